"""From the arguments of a call to its problem: :func:`build_problem` raises every user error about them.

It looks at descriptions, never at device memory, and reports all violated conditions in one exception, in the order of
the checks in ``validation`` and ``operand_checks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base.errors import shown
from ..modifiers.modifier import Program
from . import philox
from .operand_checks import check_devices, check_dtypes, check_optional, check_ranks, check_shapes, check_varlen
from .operands import INPUTS, OPERANDS, OPTIONAL_INPUTS
from .part import Part, check_part
from .problem import LAYOUT_FIELDS, AttentionProblem, Causal, OperandLayout, PlanAs, WindowSize, layout
from .tensorview import TensorView
from .validation import Violations, check_flag, check_real, check_scale_and_softcap, check_window


def build_problem(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    *,
    bias: TensorView | None = None,
    mask: TensorView | None = None,
    causal: Causal = False,
    window_size: WindowSize = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    cu_seqlens_q: TensorView | None = None,
    cu_seqlens_k: TensorView | None = None,
    seqused_k: TensorView | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    dbias: bool = False,
    dsink: bool = False,
    part: Part | None = None,
    return_max_logit: bool = False,
    modifier: Program | None = None,
    trained: tuple[int, ...] = (),
    **further: TensorView | None,
) -> AttentionProblem:
    """Check one call and describe it.

    Parameters
    ----------
    q, k, v
        ``[batch, seqlen_q, num_heads, head_dim]``, ``[batch, seqlen_k, num_heads_kv, head_dim]`` and
        ``[batch, seqlen_k, num_heads_kv, head_dim_v]``, any strides. Zero sizes are accepted except for the head dims.
        Packed (varlen) tensors have batch 1 and all tokens on dim 1.
    bias, mask
        Rank 4, each dim that of ``[batch, num_heads, seqlen_q, seqlen_k]`` or 1. ``bias`` has the dtype of ``q`` or
        float32, ``mask`` is bool or uint8 (non-zero = keep).
    causal
        ``True`` and ``"bottom_right"`` align the diagonal to the last query and key, ``"top_left"`` to the first.
    window_size
        ``(left, right)``, each at least 0, or ``None`` or -1 for unbounded.
    softmax_scale
        ``None`` means ``1 / sqrt(head_dim)``. At most 2.36e38 in magnitude, and 0 where it rounds to 0 in float32.
    softcap
        0 or ``None`` is none; otherwise at least 1.18e-38, the smallest normal float32, and ``softmax_scale / softcap``
        is finite in float32.
    cu_seqlens_q, cu_seqlens_k, seqused_k
        int32 on the device of ``q``. Their values are checked when they are in host memory.
    max_seqlen_q, max_seqlen_k
        Required with ``cu_seqlens``, refused without.
    part
        Where the call lies in a larger attention, whose masks and dropout it has.
    modifier
        What was traced of ``score_mod`` and ``mask_mod``.
    trained
        The arrays that it captured whose gradients are wanted.
    **further
        Other optional inputs of the table of operands.

    Returns
    -------
    AttentionProblem
        Windows are normalised: causal is ``window_right = 0``, and a bound that excludes no key is ``None`` (so causal
        decoding, one query aligned to the bottom right, has no band at all). Those of a part are relative to it.

    Raises
    ------
    TypeError
        A violation is of the wrong kind (whatever else is violated).
    ValueError
        A violation is a wrong value.
    UnsupportedError
        Everything is valid, but no kernel serves it; ``.reasons`` lists why.
    """
    found = Violations()
    given: dict[str, object] = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k, **further,
    }  # fmt: skip
    tensors = _checked_tensors(found, given)
    found.stop()

    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    ranks_fit = _check_operands(found, tensors, varlen)
    if dbias and bias is None:
        found.value("dbias: a gradient of the bias was asked for, but bias is None. Pass the bias.")
    if dsink and given.get("sink") is None:
        found.value("dsink: a gradient of the sink was asked for, but sink is None. Pass the sink.")
    lengths = check_varlen(found, tensors, max_seqlen_q, max_seqlen_k, varlen, ranks_fit)

    window = check_window(found, causal, window_size)
    scale, cap = check_scale_and_softcap(found, softmax_scale, softcap, q.shape[3] if ranks_fit else 1)
    dropout = check_real(found, "dropout_p", dropout_p, 0.0, 1.0, "in [0, 1]")
    flags = {
        "return_lse": return_lse, "deterministic": deterministic, "dbias": dbias, "dsink": dsink,
        "return_max_logit": return_max_logit,
    }  # fmt: skip
    flags = {name: check_flag(found, name, flag) for name, flag in flags.items()}
    sizes = (0, 0, 0, 0)
    if ranks_fit:
        sizes = (lengths[0], q.shape[2], *lengths[1:]) if varlen else (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    bottom_right = not (isinstance(causal, str) and causal == "top_left")
    # Where the used keys end is known on the device alone, and a diagonal from the bottom right ends there.
    follows_used = bottom_right and seqused_k is not None and not varlen and window != (None, None)
    _check_part(found, part, sizes if ranks_fit else None, varlen, seqused_k is not None, follows_used)
    found.stop()

    if dropout and philox.threshold(dropout) < 0:
        # Below 2**-33 no 32-bit uniform is small enough to drop anything, and the multiplier rounds to 1.
        dropout = 0.0
    batch, seqlen_q, seqlen_k = lengths if varlen else (q.shape[0], q.shape[1], v.shape[1])
    plan_as = None
    if part is not None and part.plan_as:
        whole = part.whole(sizes)
        plan_as = PlanAs(whole, _effective_window(window, *whole[2:], bottom_right), bottom_right)
    placed = part is not None and part.has_arrays
    if part is None:
        left, right = _effective_window(window, seqlen_q, seqlen_k, bottom_right)
    else:
        (left, right), bottom_right = _window_of_part(part, window, sizes, bottom_right, varlen, follows_used)
    layouts: dict[str, Any] = {name: layout(x) for name, x in tensors.items() if not OPERANDS[name].is_lengths}
    if "mask" in layouts:
        layouts["mask"] = _not_expanded(layouts["mask"])
    return AttentionProblem(
        dtype=q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=q.shape[2],
        num_heads_kv=v.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        window_left=left,
        window_right=right,
        bottom_right=bottom_right,
        softmax_scale=scale,
        softcap=cap,
        dropout_p=dropout or 0.0,
        dropout_pitches=_pitches(part, sizes) if dropout else None,
        device_starts=placed and (bool(dropout) or (left, right) != (None, None)),
        sm_margin=None if part is None else part.sm_margin,
        plan_as=plan_as,
        modifier=modifier,
        trained=trained,
        varlen=varlen,
        seqused_k=seqused_k is not None,
        further=tuple((name, x) for name, x in layouts.items() if name not in LAYOUT_FIELDS),
        **{name: x for name, x in layouts.items() if name in LAYOUT_FIELDS},
        return_lse=flags["return_lse"],
        return_max_logit=flags["return_max_logit"],
        deterministic=flags["deterministic"],
        dbias=flags["dbias"],
        dsink=flags["dsink"],
    )


def _not_expanded(x: OperandLayout) -> OperandLayout:
    """The layout of a mask before ``expand`` and its like: kernels broadcast dims of size 1 themselves.

    Which tiles keep nothing is then looked for once, not once a head, and a mask of one row is known to be one.
    """
    sizes = zip(x.shape, x.strides, strict=True)
    return replace(x, shape=tuple(1 if stride == 0 and n > 1 else n for n, stride in sizes))


def _check_part(
    found: Violations, part: object, sizes: Sequence[int] | None, varlen: bool, seqused: bool, follows_used: bool
) -> None:
    """Whether a call of these sizes, None where its operands have wrong ranks, can be this part of a larger one."""
    part = check_part(found, part)
    if part is None:
        return
    if sizes is not None:
        part.check(found, sizes, varlen)
    if follows_used and not part.follows_used_keys(0 if sizes is None else sizes[3]):
        found.unsupported(
            f"part, keys: got {shown(part.keys)} with seqused_k and a causal mask or window that ends with the "
            f'used keys, of which the part does not know how many the whole has. Pass causal="top_left", or all keys.'
        )
    if part.has_arrays and seqused:
        found.unsupported(
            "part, seqused_k: got both an array of where the part begins and lengths. Pass integers (start, size)."
        )
    if part.has_arrays and part.plan_as:
        found.unsupported(
            "part, plan_as: got True with an array of where the part begins, of which the whole's tiles depend. Pass "
            "integers (start, size)."
        )


def _window_of_part(
    part: Part, window: tuple[int | None, int | None], sizes: Sequence[int], bottom_right: bool, varlen: bool,
    follows_used: bool,
) -> tuple[tuple[int | None, int | None], bool]:  # fmt: skip
    """The bounds for a part, of those of the whole, and whether they count from the bottom right.

    They are relative to the part's first row and key, but for packed sequences and a diagonal that follows used keys.
    """
    seqlen_q, seqlen_k = sizes[2:]
    if part.has_arrays:
        # What hides nothing of the whole hides nothing of the part. What hides all or nothing of it nobody knows here.
        left, right = _effective_window(window, *part.whole(sizes)[2:], bottom_right)
        shift = part.shift(seqlen_q, seqlen_k, bottom_right)
        return (None if left is None else left - shift, None if right is None else right + shift), False
    if follows_used:
        window = _relative_window(window, part.shift_of_used_keys(seqlen_q), seqlen_k, seqlen_k)
    elif not varlen:
        window = _relative_window(window, part.shift(seqlen_q, seqlen_k, bottom_right), seqlen_q, seqlen_k)
        bottom_right = False
    return _effective_window(window, seqlen_q, seqlen_k, bottom_right), bottom_right


def _pitches(part: Part | None, sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Heads, rows and keys of the whole, which dropout's index counts by; None where they are the call's."""
    if part is None:
        return None
    if part.whole(sizes)[1:] == tuple(sizes[1:]) and not any(part.origin()) and not part.has_arrays:
        return None
    return part.whole(sizes)[1:]


def _relative_window(
    window: tuple[int | None, int | None], shift: int, most_right: int, most_left: int
) -> tuple[int | None, int | None]:
    """The bounds counted from a part's own corner; as far away as the last ones say, one hides everything."""
    left, right = window
    left = None if left is None else max(left - shift, -most_left)
    return left, None if right is None else max(right + shift, -most_right)


def _checked_tensors(found: Violations, given: Mapping[str, object]) -> dict[str, TensorView]:
    """The inputs that are there, in the order of the table; what is no tensor is a violation."""
    tensors: dict[str, TensorView] = {}
    for name in INPUTS:
        tensor = given.get(name)
        if isinstance(tensor, TensorView):
            tensors[name] = tensor
        elif tensor is not None or name not in OPTIONAL_INPUTS:
            found.kind(f"{name}: got {shown(tensor)} of type {type(tensor).__name__}. A tensor is needed.")
    return tensors


def _check_operands(found: Violations, tensors: dict[str, TensorView], varlen: bool) -> bool:
    """Check the tensors against one another. Whether the ranks fit, without which sizes mean nothing."""
    check_dtypes(found, tensors)
    check_devices(found, tensors)
    ranks_fit = check_ranks(found, tensors)
    if ranks_fit:
        check_shapes(found, tensors["q"], tensors["k"], tensors["v"], varlen)
        check_optional(found, tensors, varlen)
    return ranks_fit


def _effective_window(
    window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int, bottom_right: bool
) -> tuple[int | None, int | None]:
    """The loosest bounds that still exclude a key of some row: one beyond them costs a masked kernel for nothing."""
    left, right = window
    if left is not None and left >= (seqlen_k if bottom_right else seqlen_q) - 1:
        left = None
    if right is not None and right >= (seqlen_q if bottom_right else seqlen_k) - 1:
        right = None
    return left, right
