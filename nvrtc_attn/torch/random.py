"""Random numbers of dropout: those of torch's generators, and what a caller passes, as the kernels take them."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ..base.forks import renew_in_child
from ..front.philox import NO_RNG, RngState
from ..front.rng import rng_state
from ..front.tensors import CPU, Device, TensorView
from .tensors import address_of

_generator_lock = threading.Lock()
renew_in_child(globals(), "_generator_lock", threading.Lock)


def draw_rng(q: torch.Tensor, k: torch.Tensor, packed: tuple[int, int | None, int | None] | None) -> RngState:
    """Numbers from torch's generator of q's device, which is advanced past those of this problem."""
    if not q.is_cuda:
        return RngState(int(torch.randint(2**63 - 1, (), device="cpu")), 0)  # whatever the default device is
    index = q.get_device()
    if torch.cuda.is_current_stream_capturing():
        seed = torch.empty((), dtype=torch.int64, device=q.device).random_()
        offset = torch.zeros((), dtype=torch.int64, device=q.device)
        return RngState(0, 0, seed.data_ptr(), offset.data_ptr(), (seed, offset))
    torch.cuda.init()
    generator = torch.cuda.default_generators[index]
    batch, rows, columns = packed or (q.shape[0], q.shape[1], k.shape[1])
    numbers = batch * q.shape[2] * (rows or 0) * (columns or 0)
    with _generator_lock:  # two threads must not draw the same numbers
        state = RngState(generator.initial_seed() & (2**64 - 1), generator.get_offset())
        generator.set_offset(state.offset + -(-numbers // 4) * 4)
    return state


def checked_rng(rng: Any, q: torch.Tensor, *, backward_follows: bool = False) -> RngState:
    """``rng`` as the kernels take it; int64 tensors on q's device are read by them.

    Where a backward pass follows, these are copied, 8 bytes each: it has to read what the forward pass read, and
    meanwhile a caller may write the next offset to its tensor.

    Errors are those of `nvrtc_attn.front.rng.rng_state`.
    """
    state = rng_state(rng, Device("cuda", q.get_device()) if q.is_cuda else CPU, None)
    owners = tuple([x.owner if isinstance(x, TensorView) else x for x in state.owners])
    if not (backward_follows and any(x is not None for x in owners)):
        return state._replace(owners=owners)
    copies = tuple([x if x is None else as_torch(x).detach().clone() for x in owners])
    seed, offset = map(address_of, copies)
    return RngState(state.seed, state.offset, seed, offset, copies)


def as_torch(x: Any) -> torch.Tensor:
    """An array of any library as a tensor of torch, in the same memory."""
    return x if isinstance(x, torch.Tensor) else torch.from_dlpack(x)


def random_state(
    rng: Any, part: Any, q: Any, k: Any, cu_seqlens_q: Any, max_seqlen_q: int | None, max_seqlen_k: int | None, *,
    backward_follows: bool,
) -> RngState:  # fmt: skip
    """The random numbers of a call with dropout: what it passes, or drawn from torch's generator."""
    # What is no tensor, or of another rank, is refused later.
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and q.dim() == k.dim() == 4):
        return NO_RNG
    if rng is not None:
        return checked_rng(rng, q, backward_follows=backward_follows)
    if part is not None:
        raise ValueError("rng: None, but this is a part of a larger attention. Pass its (seed, offset).")
    if cu_seqlens_q is None:
        return draw_rng(q, k, None)
    if isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
        return draw_rng(q, k, (cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k))
    return NO_RNG


def rng_values(state: RngState) -> tuple[Any, Any]:
    """(seed, offset) of what `draw_rng` or `checked_rng` returned: ints, and tensors of words on the GPU."""
    seed, offset = state.owners or (None, None)
    return state.seed if seed is None else seed, state.offset if offset is None else offset


def no_state(device: torch.device) -> tuple[Any, Any]:
    """Zeros where the seed has its words: on the GPU while a graph is captured, which then holds one fill of both."""
    if not torch.cuda.is_current_stream_capturing():
        return 0, 0
    seed, offset = torch.zeros(2, dtype=torch.int64, device=device).unbind()
    return seed, offset


def as_tensor(word: Any) -> torch.Tensor:
    """The seed's form of a Philox word: int64, unsigned values above 2**63 wrapped."""
    if isinstance(word, torch.Tensor):
        return word
    # In half the time of `torch.tensor`, and on the CPU whatever the default device is.
    return torch.scalar_tensor(word - 2**64 if word >= 2**63 else word, dtype=torch.int64, device="cpu")
