"""Triangle attention and Evoformer attention, with the signatures of cuEquivariance and DeepSpeed4Science.

Both add a pair bias that all rows of the alignment (or of the pair matrix) share. The kernels read it in that shape and
sum its gradient over the rows while they compute, so nothing has the size of all rows' scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from ..base.errors import shown
from ..base.log import log_once
from ..torch import attention
from . import refuse

__all__ = ["DS4Sci_EvoformerAttention", "triangle_attention"]

HIDDEN: Final = -1e4
"""A bias of at most this hides a key: ``exp`` of it is 0 beside any key that scores within 9,900 of it."""


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """``cuequivariance_torch.triangle_attention``.

    Parameters
    ----------
    q, k, v : ``[B, N, H, Q, D]``, ``[B, N, H, K, D]``, ``[B, N, H, K, D]``, or without B
    bias : ``[B, 1, H, Q, K]``, or without B
        Added to the scores of all N rows, gets its gradient. dtype of q or float32; another becomes float32. Under
        ``torch.autocast`` it is cast as q is.
    mask : ``[B, N, 1, 1, K]``, or without B
        Non-zero keeps the key. A row without keys is 0 and gives no gradient (cuEquivariance: the mean of v).
    scale
        Default ``1 / sqrt(D)``.

    Returns
    -------
    Shape of q, dtype of q.

    Raises
    ------
    UnsupportedError
        ``return_aux``, whose row maxima no kernel writes; ``kv_lengths``.
    TypeError, ValueError
        An argument that is no tensor; other ranks, or another B than that of q.
    """
    reasons = []
    if return_aux:
        reasons.append("return_aux: the maximum of each row is not written.")
    if kv_lengths is not None:
        reasons.append("kv_lengths: not read. Pass the mask.")
    refuse("call of triangle_attention of cuequivariance_torch", reasons)
    given = {"q": q, "k": k, "v": v, "bias": bias, **({} if mask is None else {"mask": mask})}
    _check_tensors(given)
    ranks = [x.dim() for x in given.values()]
    if len(set(ranks)) > 1 or ranks[0] not in (4, 5):
        raise ValueError(f"{', '.join(given)}: ranks {ranks}. All are 5, or all 4 without the batch.")
    if q.dim() == 4:
        return _triangle((q, k, v, bias, mask), scale)
    _check_leading(given, 1, "batch size")
    if all(x.shape[1] == 1 for x in given.values()):  # each bias has one row: the batch is that of the kernels
        of_row = tuple(None if x is None else x[:, 0] for x in (q, k, v, bias, mask))
        return _triangle(of_row, scale).unsqueeze(1)
    return _by_entry(partial(_triangle, scale=scale), (q, k, v, bias, mask))


def _by_entry(function: Callable[[tuple[Any, ...]], torch.Tensor], tensors: tuple[Any, ...]) -> torch.Tensor:
    """What ``function`` makes of the tensors of each batch entry, put together. None stands for a missing tensor.

    Not by indices: the gradient of each ``x[b]`` is as large as x, and all of them are added up. That of ``unbind`` is
    one copy.
    """
    q = tensors[0]
    parts = [(None,) * len(q) if x is None else x.unbind() for x in tensors]
    outs = [function(entry) for entry in zip(*parts, strict=True)]
    return outs[0].unsqueeze(0) if len(outs) == 1 else torch.stack(outs) if outs else torch.empty_like(q)


def _triangle(entry: tuple[Any, ...], scale: float | None) -> torch.Tensor:
    """q, k, v, bias and mask of one batch entry: N is the batch of the kernels, and the bias broadcasts over it."""
    *qkv, bias, mask = entry
    q, k, v = (x.transpose(1, 2) for x in qkv)
    bias = bias if bias.dtype in (q.dtype, torch.float32) else bias.float()
    keep = None if mask is None else mask.bool()
    out: torch.Tensor = attention(q, k, v, bias=bias, mask=keep, softmax_scale=scale)
    return out.transpose(1, 2)


def DS4Sci_EvoformerAttention(  # noqa: N802  DeepSpeed's name
    Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """``deepspeed.ops.deepspeed4science.DS4Sci_EvoformerAttention``.

    Parameters
    ----------
    Q, K, V : ``[B, N, L, H, D]``
    biases : up to two
        ``[B, N, 1, 1, L]``, by which the mask is given, and ``[B, 1, H, L, L]``, the pair bias. Both are added to the
        scores and get gradients. None stands for no bias.

    Returns
    -------
    ``[B, N, L, H, D]``

    Notes
    -----
    Where both are given, the first is read as a mask if it needs no gradient and holds nothing but 0 and values of at
    most -10,000; finding out waits for the GPU once. A row of it without keys is 0 and gives no gradient (DeepSpeed:
    the mean of V, as all keys are hidden alike). Otherwise the two are added up, in ``[N, H, L, L]`` memory, with one
    line logged. So they are under torch.compile, where nothing is logged, and while a CUDA graph is captured: neither
    can look at the values, and a row without keys is as in DeepSpeed.
    """
    given_qkv = {"Q": Q, "K": K, "V": V}
    _check_tensors(given_qkv)
    for name, x in given_qkv.items():
        if x.dim() != 5:
            raise ValueError(f"{name}: shape {tuple(x.shape)}. It is [batch, rows, length, heads, head_dim].")
    _check_leading(given_qkv, 2, "batch size and rows")
    if not isinstance(biases, (list, tuple)):
        raise TypeError(
            f"biases: got {shown(biases)} of type {type(biases).__name__}. It is a list of up to two tensors, [] for "
            f"none."
        )
    _check_tensors({f"biases[{i}]": x for i, x in enumerate(biases) if x is not None})
    batch, rows, length, heads, _ = Q.shape
    shapes = ((batch, rows, 1, 1, length), (batch, 1, heads, length, length))
    given: list[torch.Tensor | None] = [*biases, None, None][:2]
    if len(biases) > 2 or any(x is not None and x.shape != shape for x, shape in zip(given, shapes, strict=True)):
        raise ValueError(
            f"biases: shapes {[None if x is None else tuple(x.shape) for x in biases]}. They are {list(shapes)}, in "
            f"this order; None stands for one that is missing."
        )
    row_bias, pair_bias = given
    keep = None if row_bias is None or pair_bias is None or batch == 0 else _as_mask(row_bias)
    everything = (Q, K, V, row_bias if keep is None else None, pair_bias, keep)
    if pair_bias is None:  # nothing is shared by rows: they and the batch are that of the kernels
        joined = tuple(None if x is None else x.flatten(0, 1) for x in everything)
        return _evoformer(joined).unflatten(0, (batch, rows))
    if rows == 1:
        return _evoformer(tuple(None if x is None else x[:, 0] for x in everything)).unsqueeze(1)
    return _by_entry(_evoformer, everything)


def _evoformer(entry: tuple[Any, ...]) -> torch.Tensor:
    """Q, K, V, the two biases and the mask of one batch entry, or of what has no shared bias."""
    q, k, v, row_bias, pair_bias, keep = entry
    bias = row_bias if pair_bias is None else pair_bias
    if row_bias is not None and pair_bias is not None:
        bias = row_bias + pair_bias
    if bias is not None and bias.dtype not in (q.dtype, torch.float32):
        bias = bias.float()
    out: torch.Tensor = attention(q, k, v, bias=bias, mask=keep)
    return out


def _as_mask(bias: torch.Tensor) -> torch.Tensor | None:
    """True where the bias is 0, if it is at most `HIDDEN` everywhere else and no gradient of it is wanted.

    None if it is not, with a line logged, and where its values cannot be looked at.
    """
    if torch.compiler.is_compiling():
        why = "is not looked at in a program of torch.compile"
    elif bias.is_cuda and torch.cuda.is_current_stream_capturing():
        why = "is not looked at while a CUDA graph is captured"
    else:
        keep = bias == 0
        if not bias.requires_grad and bool((keep | (bias <= HIDDEN)).all()):
            return keep
        why = "is no mask (0, or at most -10,000, without a gradient)"
    log_once(
        f"DS4Sci_EvoformerAttention: the first bias {why}, so the two biases are added up, which takes memory for the "
        f"scores of every row."
    )
    return None


def _check_tensors(given: dict[str, Any]) -> None:
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. It is a torch tensor.")


def _check_leading(given: dict[str, torch.Tensor], dims: int, what: str) -> None:
    """The first ``dims`` dims of all are those of the first: later ones are checked where each batch entry runs."""
    (first, model), *others = given.items()
    for name, x in others:
        if x.shape[:dims] != model.shape[:dims]:
            raise ValueError(
                f"{name}: shape {tuple(x.shape)}. Its {what} must be {list(model.shape[:dims])}, as of {first}."
            )
