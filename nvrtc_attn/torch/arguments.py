"""The arguments of the operators: their signature, and the way from a call to them and back.

torch.compile traces the way there, so nothing on it looks at memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ..base.errors import UnsupportedError, shown
from ..front.call import CallOptions, plain_options
from ..front.operands import INPUTS, OPERANDS, OPTIONAL_GRADIENTS, check_further
from ..front.part import Part
from ..front.philox import NO_RNG
from ..front.problem import Causal, WindowSize
from .autocast import cast_for_autocast, cast_further_for_autocast
from .derivatives import refuse_tangents
from .random import checked_rng, rng_values
from .tensors import as_plain, is_dtensor

SEED: Final = len(INPUTS)  # positions in the signature: the inputs of the table of operands, then the random numbers
SEED_WORD, DROPOUT, PART = SEED + 2, SEED + 9, SEED + 13
BIAS: Final = INPUTS.index("bias")
CU_SEQLENS_Q: Final = INPUTS.index("cu_seqlens_q")
FLAGS: Final = 2  # behind the signature: return_lse and return_max_logit
BATCHLESS: Final = tuple(place for place, name in enumerate(INPUTS) if OPERANDS[name].axes[0] != "batch")
OPTIONS: Final = len(OPTIONAL_GRADIENTS)
CAUSAL: Final[dict[str, Causal]] = {"": False, "bottom_right": True, "top_left": "top_left"}
SIGNATURE: Final = (
    ", ".join(f"Tensor{'' if name in ('q', 'k', 'v') else '?'} {name}" for name in INPUTS)
    + ", Tensor? seed, Tensor? offset, SymInt seed_word, SymInt offset_word, str causal, "
    "SymInt? window_left, SymInt? window_right, float? softmax_scale, float softcap, float dropout_p, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, SymInt[]? part"
)
"""``part`` is (first batch entry, batch, first head, heads) of a whole that the tensors lie in: see `sharding`."""


# ------------------------------------------------------------------------------------------------------ of a call


def operator_arguments(
    captures: Sequence[Any], q: Any, k: Any, v: Any, bias: Any, mask: Any, causal: Causal, window_size: WindowSize,
    softmax_scale: Any, softcap: Any, dropout_p: Any, rng: Any, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: Any, max_seqlen_k: Any, seqused_k: Any, return_lse: bool, deterministic: bool | None,
    part: Part | None, further: Mapping[str, Any], return_max_logit: bool = False,
) -> tuple[tuple[Any, ...], bool, bool]:  # fmt: skip
    """The arguments of the operator that `nvrtc_attn.torch.attention` is, return_lse and return_max_logit.

    torch.compile traces this, so nothing here looks at memory. ``captures`` are those of a modifier.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if part is not None:
        raise no_part()
    tensors = (q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, *check_further("attention", further))
    for name, x in zip(INPUTS, tensors, strict=True):
        if not (isinstance(x, torch.Tensor) or (x is None and name not in ("q", "k", "v"))):
            raise TypeError(
                f"{name}: got {shown(x)} of type {type(x).__name__}. nvrtc_attn.torch takes torch tensors; "
                f"nvrtc_attn.attention takes those of any framework."
            )
    if not _in_dynamo() and any(x.is_nested for x in (q, k, v)):
        raise UnsupportedError(
            "q, k, v: nested tensors. Pass their values with batch 1, x.values()[None], and their offsets() as int32 "
            "in cu_seqlens_q and cu_seqlens_k, with max_seqlen_q and max_seqlen_k. On a GPU torch's own "
            "scaled_dot_product_attention takes them under nvrtc_attn.torch.enable_sdpa()."
        )
    options = (causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k)
    flags = (return_lse, deterministic, return_max_logit)
    if not (_are_plain(*options) and all(isinstance(x, bool) for x in flags)):
        # Numbers of other libraries; whatever is none is refused by name.
        read = plain_options(CallOptions(*options, return_lse, deterministic, return_max_logit=return_max_logit))
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k = read[:7]
        return_lse, deterministic, return_max_logit = read.return_lse, read.deterministic, read.return_max_logit
    word = causal_word(causal)
    left, right = (None, None) if window_size is None else window_size
    q, k, v, bias = cast_for_autocast(q, k, v, bias)
    more = check_further("attention", cast_further_for_autocast(q, further))
    seed = offset = None
    words = (0, 0)
    if dropout_p > 0:
        seed, offset, words = rng_operands(rng, q)
    if not _in_dynamo():
        refuse_tangents(q, k, v, bias, *more, *captures)
    with_lse = return_lse or (torch.is_grad_enabled() and _any_requires_grad(q, k, v, bias, *more, *captures))
    arguments = (
        q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, *more, seed, offset, *words, word, left, right,
        softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, deterministic, None, with_lse, return_max_logit,
    )  # fmt: skip
    return arguments, return_lse, return_max_logit


def results_of(found: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """What the caller of an operator gets of its three results."""
    out, lse, max_logit = found
    results = (out, *([lse] if return_lse else ()), *([max_logit.detach()] if return_max_logit else ()))
    return results if len(results) > 1 else out


def no_part() -> UnsupportedError:
    return UnsupportedError(
        "part: the operators of torch do not take it, and torch.compile, torch.export, torch.func, dispatch modes "
        "and tensor subclasses need them. Call outside of these."
    )


def _in_dynamo() -> bool:
    return bool(torch.compiler.is_dynamo_compiling())


def _any_requires_grad(*tensors: Any) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _are_plain(
    causal: Any, window: Any, scale: Any, softcap: Any, dropout_p: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> bool:
    """Whether options are of Python's types, or symbols for them."""
    if not (isinstance(causal, bool) or (isinstance(causal, str) and causal in ("top_left", "bottom_right"))):
        return False
    if window is not None:
        if not (isinstance(window, (tuple, list)) and len(window) == 2):
            return False
        for bound in window:
            if not (bound is None or (_is_number(bound, False) and bound >= -1)):
                return False
    if not (scale is None or _is_number(scale, True)):
        return False
    if not (_is_number(softcap, True) and _is_number(dropout_p, True) and 0 <= dropout_p <= 1 and softcap >= 0):
        return False
    return all(n is None or _is_number(n, False) for n in (max_seqlen_q, max_seqlen_k))


def _is_number(x: Any, real: bool) -> bool:
    if isinstance(x, bool):
        return False
    return isinstance(x, (int, torch.SymInt)) or (real and isinstance(x, (float, torch.SymFloat)))


def rng_operands(rng: Any, q: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Seed and offset as tensors, or as signed 64-bit words where they are integers."""
    if rng is None:
        if is_dtensor(q):
            raise UnsupportedError(
                "rng: None, with dropout of DTensors. Every rank would draw a mask of its own: pass rng=(seed, offset) "
                "as integers, the same on all ranks."
            )
        return torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device), None, (0, 0)
    pair = rng if isinstance(rng, (tuple, list)) and len(rng) == 2 else (rng, 0)
    if not all(isinstance(x, torch.Tensor) or _is_number(x, False) for x in pair):
        pair = rng_values(checked_rng(rng, q))
    tensors: list[Any] = [None, None]
    words: list[Any] = [0, 0]
    for index, x in enumerate(pair):
        if isinstance(x, torch.Tensor):
            tensors[index] = x
        elif not 0 <= x < 2**64:
            raise ValueError(f"rng: got {shown(x)}. Seed and offset are in [0, 2**64).")
        else:
            words[index] = x - 2**64 if x >= 2**63 else x
    return tensors[0], tensors[1], (words[0], words[1])


def causal_word(causal: Causal) -> str:
    return causal if isinstance(causal, str) else "bottom_right" if causal else ""


# ------------------------------------------------------------------------------------------------------ to a call


def part_of(part: Sequence[int] | None) -> Part | None:
    """What the operators' argument ``part`` says."""
    if part is None:
        return None
    entry, batch, head, heads = part
    return Part(batch=(entry, batch), heads=(head, heads))


def split(arguments: tuple[Any, ...], return_lse: bool, *gradients: bool) -> tuple[Any, CallOptions, Any]:
    """(tensors, options, state of the dropout) as the eager functions take them, of the arguments in `SIGNATURE`."""
    *tensors, seed, offset = map(as_plain, arguments[:SEED_WORD])
    seed_word, offset_word, causal, left, right, scale, softcap, dropout_p, max_q, max_k = arguments[SEED_WORD:-2]
    deterministic, part = arguments[-2:]
    wanted: Any = gradients
    options = CallOptions(
        CAUSAL[causal], (left, right), scale, softcap, dropout_p, max_q, max_k, return_lse, deterministic, *wanted
    )
    if part is not None:
        options = options._replace(part=part_of(part))
    state = NO_RNG
    if dropout_p > 0:
        words = (seed_word & (2**64 - 1), offset_word & (2**64 - 1))
        pair = tuple(word if x is None else x for x, word in zip((seed, offset), words, strict=True))
        state = checked_rng(pair, tensors[0])
    return tuple(tensors), options, state
