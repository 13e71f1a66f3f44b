"""What a call of ContextParallel is refused for: on its rank before anything is sent, or on all ranks together."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...base.errors import UnsupportedError, shown
from ...base.tables import remember
from ...front.call import CallOptions, describe_shapes
from ...front.chunks import length
from ...front.part import Part
from ...front.tensors import Device, view
from ...front.validation import Violations, check_lengths, check_window
from ...modifiers.modifier import Modifier
from ..random import checked_rng, rng_values
from ..tensors import is_dtensor, signature
from .exchange import same_everywhere
from .strategies import Strategy, has_all_tokens, passes_keys

NO_TRANSFORMATION: Final = (
    "ContextParallel: transformations of torch.func (grad, vjp, vmap, jacrev and the like) and batches of gradients "
    "are not computed. Use backward() or torch.autograd.grad of one gradient. Nothing was sent."
)


def refuse_others(x: Any, name: str) -> None:
    """Refuse what is no tensor, and a DTensor: before anything is sent.

    The shape of a DTensor is that of all ranks, and its operators would communicate.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. ContextParallel takes torch tensors.")
    if is_dtensor(x):
        raise TypeError(
            f"{name}: got a DTensor. ContextParallel takes and returns each rank's tensors, with the tokens that its "
            f"layout gives the rank. Pass {name}.to_local(), and DTensor.from_local makes one of the result; tokens "
            f"that Shard cuts into equal pieces are those of layout='contiguous'. Nothing was sent."
        )


def check_tensors(
    cp: Any,
    given: dict[str, Any],
    lengths: dict[str, Any],
    options: CallOptions,
    part: Part | None,
    modifier: Modifier | None,
) -> None:
    """Refuse this rank's tensors by what it knows: as `nvrtc_attn.attention` would those of the whole."""
    for name, x in given.items():
        if x is not None or name in "qkv":
            refuse_others(x, name)
    tokens, keys, q = cp.local_seqlen, cp.local_seqlen_k, given["q"]
    program = None if modifier is None else (modifier.program, *map(signature, modifier.captures))
    key: Any = (*map(signature, given.values()), *map(signature, lengths.values()), options, program)
    if key in cp._checked and part is None:
        return
    faults, operands = [], {}
    for name, x in given.items():
        if x is None:
            continue
        if name != "sink" and x.dim() != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)} has rank {x.dim()}. Expected rank 4.")
        if x.device != q.device:
            faults.append(f"{name}: on {x.device}, needed is {q.device}, where q is")
        else:
            view(x.detach(), name)  # whether it has memory that can be read
        if name == "sink":
            operands[name] = (tuple(x.shape), str(x.dtype).removeprefix("torch."))
            continue
        shape, dim = list(x.shape), 1 if name in "qkv" else 2
        needed = keys if name in ("k", "v") else tokens
        if not (x.shape[dim] == needed or (dim == 2 and x.shape[dim] == 1)):
            faults.append(
                f"{name}: shape {tuple(x.shape)}, whose dim {dim} must be {needed}, the tokens of rank {cp.rank} "
                f"of {cp.seqlen_k if name in ('k', 'v') else cp.seqlen}"
            )
        if name in "qkv" or x.shape[2] != 1:
            shape[dim] = cp.seqlen_k if name in ("k", "v") else cp.seqlen
        operands[name] = (tuple(shape), str(x.dtype).removeprefix("torch."))
    if part is not None and (not isinstance(part, Part) or part != Part(batch=part.batch, heads=part.heads)):
        faults.append(
            f"part: got {shown(part)}. It is an nvrtc_attn.Part of batch and heads, rows and keys are the ranks', "
            "sm_margin and plan_as those of the ContextParallel"
        )
    for name, x in lengths.items():
        if x is not None:
            operands[name] = (tuple(x.shape), str(x.dtype).removeprefix("torch."))
    if faults:
        raise ValueError(f"{'. '.join(faults)}. Nothing was sent.")
    where = Device("cuda" if q.is_cuda else "meta", 0)
    describe_shapes(operands, options._replace(part=part), where, modifier=modifier)
    if part is None:
        remember(cp._checked, key, True)


def check_call_lengths(cp: Any, strategy: Strategy, lengths: tuple[Any, Any, Any], options: CallOptions) -> None:
    """Refuse lengths whose values the host sees, which no part could tell, and seqused_k that a ring cannot take.

    Packed sequences whose tokens ranks share were looked at by `call.shared_packing`.
    """
    starts_q, starts_k, used = lengths
    packed = starts_q is not None or starts_k is not None
    if packed and not has_all_tokens(strategy):
        return
    of_q, of_k, of_used = (x.numpy() if x is not None and x.device.type == "cpu" else None for x in lengths)
    faults = check_lengths(
        of_q, of_k, of_used, total_q=cp.seqlen, total_k=None if packed and of_k is None else cp.seqlen_k,
        max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k,
    )  # fmt: skip
    if faults:
        raise ValueError(f"{' '.join(faults)} Nothing was sent.")
    if used is not None and not packed and passes_keys(strategy) and ends_with_used_keys(options):
        raise UnsupportedError(
            f"seqused_k: given with strategy {cp.strategy!r} and a causal mask or window that ends with the used "
            'keys, which a rank of a ring does not have together. Pass causal="top_left", another strategy, or a '
            "mask= that says what is seen. Nothing was sent."
        )


def ends_with_used_keys(options: CallOptions) -> bool:
    """Whether there is a diagonal from the bottom right, which moves with seqused_k: see `Part`."""
    window = check_window(Violations(), options.causal, options.window_size)
    return options.causal != "top_left" and window != (None, None)


def compare(
    cp: Any, given: dict[str, Any], lengths: dict[str, Any], options: CallOptions, part: Part | None, grad: bool,
    rng: Any, modifier: Modifier | None, return_lse: bool,
) -> None:  # fmt: skip
    """Ask all ranks whether they mean the same call."""
    q, k, v, bias, mask, sink = given.values()
    seed: Any = None
    if options.dropout_p > 0:
        seed = "drawn" if rng is None else tuple(int(x) % 2**64 for x in rng_values(checked_rng(rng, q)))

    # A single row of a rank that has no other may be its own, or one for all.
    single = any(length(chunks) == 1 for chunks in cp.chunks_q)

    def scores(x: Any) -> Any:
        if x is None:
            return None
        return str(x.dtype), *x.shape[:2], "one row" if x.shape[2] == 1 and not single else "", x.shape[3]

    same_everywhere(
        cp._groups,
        "attention",
        {
            "dtype": str(q.dtype), "device type": q.device.type, "batch": q.shape[0],
            "heads": (q.shape[2], k.shape[2]), "head dims": (q.shape[3], v.shape[3]),
            "bias": scores(bias), "mask": scores(mask), "sink": None if sink is None else str(sink.dtype),
            "options": str(options), "gradient": grad, "return_lse": return_lse,
            **{name: None if x is None else tuple(x.tolist()) for name, x in lengths.items()},
            "part": None if part is None else (part.batch, part.heads), "rng": seed,
            "score_mod, mask_mod": None if modifier is None else (
                repr(modifier.program), modifier.numbers, tuple(tuple(x.shape) for x in modifier.captures)
            ),
            "contents of captured arrays": None if modifier is None else tuple(map(checksum, modifier.captures)),
        },
    )  # fmt: skip


def checksum(x: torch.Tensor) -> int:
    """A sum over the bits of ``x`` that tells one array from another: elements count by their places, modulo 2^64."""
    bits = x.detach().contiguous().flatten().view(_INTEGERS[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for begin in range(0, bits.numel(), _CHUNK):
        chunk = bits[begin : begin + _CHUNK].to(torch.int64)
        places = torch.arange(begin, begin + chunk.numel(), device=x.device)
        total += ((chunk + 1) * (places * _ODD + 1)).sum()
    return int(total)


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""An integer type of each size of an element."""
_CHUNK: Final = 1 << 22
"""Elements whose 64-bit terms are in memory at a time."""
_ODD: Final = 0x9E3779B97F4A7C15 - 2**64
"""An odd number whose multiples are spread over 64 bits."""
