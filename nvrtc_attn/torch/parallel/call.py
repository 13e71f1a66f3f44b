"""What a call of ContextParallel is made of: its modifier, who computes what of it, and the whole that all compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...base.errors import UnsupportedError
from ...front.call import CallOptions
from ...front.chunks import band_of
from ...front.documents import Packing
from ...front.modified import banded_options
from ...front.part import Part
from ...front.philox import NO_RNG, RngState
from ...front.validation import Violations, check_window
from ...modifiers.modifier import Modifier
from ...modifiers.trace import no_functions, traced
from ..random import checked_rng
from ..tensors import captured_on
from .checks import check_call_lengths, check_tensors, compare, ends_with_used_keys
from .choice import margin_of
from .documents import packing_of
from .exchange import complete
from .local import Whole
from .strategies import Strategy, has_all_tokens


def modifier_of(
    score_mod: Any, mask_mod: Any, aux: Mapping[str, Any] | None, q: torch.Tensor
) -> tuple[Modifier | None, tuple[torch.Tensor, ...]]:
    """What the functions of a call mean, and the arrays that they captured, where q is."""
    if score_mod is None and mask_mod is None:
        if aux is not None:
            raise no_functions()
        return None, ()
    modifier = traced(score_mod, mask_mod, aux=aux)
    captures = captured_on(modifier.captures, q.device)
    return modifier.with_captures(captures), captures


def begin_call(
    cp: Any,
    given: dict[str, Any],
    lengths: tuple[Any, Any, Any],
    options: CallOptions,
    rng: Any,
    part: Part | None,
    modifier: Modifier | None,
    grad: bool,
    return_lse: bool,
) -> tuple[Strategy, Whole]:
    """Who computes what of a call, whose tensors and options are checked and compared between the ranks.

    Parameters
    ----------
    given
        q, k, v, bias, mask and sink.
    lengths
        cu_seqlens_q, cu_seqlens_k and seqused_k.
    """
    q, k = given["q"], given["k"]
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), lengths, strict=True))
    check_tensors(cp, given, named, options, part, modifier)
    packed = lengths[0] is not None or lengths[1] is not None
    strategy = cp._strategy(q.shape[2], k.shape[2], q.is_cuda, packed)
    packing = shared_packing(cp, strategy, lengths, options, k.shape[2])
    check_call_lengths(cp, strategy, lengths, options)
    if is_compared(cp):
        compare(cp, given, named, options, part, grad, rng, modifier, return_lse)
    cp._calls += 1
    state = _draw(cp, q, rng, grad) if options.dropout_p > 0 else NO_RNG
    whole = whole_of(cp, strategy, lengths, packing, options, state, part, modifier, q.device)
    return strategy, whole._replace(return_lse=return_lse, backward_follows=grad)


def is_compared(cp: Any) -> bool:
    """Whether the next call of `attention` is compared between the ranks."""
    return cp._check == "always" or (cp._check == "first" and not cp._calls)


def shared_packing(
    cp: Any, strategy: Strategy, lengths: tuple[Any, Any, Any], options: CallOptions, heads_kv: int
) -> Packing | None:
    """The documents of a call whose tokens ranks share; None where there are none, or a rank has all tokens."""
    starts_q, starts_k, used = lengths
    if (starts_q is None and starts_k is None) or has_all_tokens(strategy):
        return None
    if cp.chunks_q != cp.chunks_k or cp._plan_as or used is not None:
        raise UnsupportedError(
            "cu_seqlens_q, cu_seqlens_k: seqlen_k, seqused_k and plan_as are for packed sequences only with "
            f"strategy 'ulysses', here is {cp.strategy!r} with {heads_kv} key heads over {cp.size} ranks."
        )
    return packing_of(starts_q, starts_k, options, cp.seqlen)


def whole_of(
    cp: Any, strategy: Strategy, lengths: tuple[Any, Any, Any], packing: Packing | None, options: CallOptions,
    state: RngState, part: Part | None, modifier: Modifier | None, device: torch.device,
) -> Whole:  # fmt: skip
    """What all ranks compute together."""
    # The band of the whole: what a rank needs of the others follows from it.
    packed = lengths[0] is not None or lengths[1] is not None
    used = None if packed else lengths[2]
    banded = options
    if modifier is not None and not packed:
        banded = banded_options(modifier, options, None if used is not None else (cp.seqlen, cp.seqlen_k))
    left, right = check_window(Violations(), banded.causal, banded.window_size)
    if used is not None and ends_with_used_keys(banded):
        left = right = None  # where the diagonal is, the device alone knows: a part of these rows has all keys
    bottom_right = banded.causal != "top_left"
    return Whole(
        options._replace(part=None),
        state,
        cp.seqlen,
        cp.seqlen_k,
        band_of(None if packed else left, None if packed else right, cp.seqlen, cp.seqlen_k, bottom_right),
        None
        if packing is not None or lengths[0] is None or lengths[1] is None
        else (_moved(lengths[0], device), _moved(lengths[1], device), _moved(lengths[2], device)),
        None if part is None else part.batch,
        None if part is None else part.heads,
        sm_margin=margin_of(cp, strategy) if device.type == "cuda" and cp.size > 1 else None,
        plan_as=cp._plan_as,
        modifier=modifier,
        packing=packing,
        used=_moved(used, device),
        tables=None if packing is None and used is None else {},
    )


def _draw(cp: Any, q: torch.Tensor, rng: Any, grad: bool) -> RngState:
    """The random numbers of the whole: a seed of the first rank's generator, which stays on the GPU."""
    if rng is not None:
        return checked_rng(rng, q, backward_follows=grad)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device)
    share_seed(cp, seed)
    return checked_rng(seed, q)


def share_seed(cp: Any, seed: torch.Tensor) -> None:
    """Write the seed of the first rank into that of every rank."""
    for group in reversed(cp._groups):
        first = dist.get_global_rank(group, 0) if group is not None else 0
        complete(dist.broadcast, seed, first, group=group)


def _moved(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Lengths where the kernels read them, in row-major order."""
    return None if x is None else x.to(device).contiguous()
