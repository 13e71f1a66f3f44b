"""What the torch adapters ask of a tensor and of its device: a signature, a plain face, the current stream."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import torch

from ..front.dlpack import compact_strides


def _raw_stream(index: int) -> int:
    return int(torch.cuda.current_stream(index).cuda_stream)


def _no_device() -> int:
    """Of a torch without CUDA, or without one of the two: `allocator` knows another way."""
    return -2


raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", _raw_stream)
"""``raw_stream(index)``: handle of torch's current stream on a GPU."""
empty_on_current: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""An uninitialised tensor of (shape, strides, dtype) on the current GPU: what inductor's programs allocate with, in
half the time of `torch.empty_strided`."""
current_device: Any = getattr(torch._C, "_cuda_getDevice", _no_device) if empty_on_current is not None else _no_device
"""Index of the GPU on which `empty_on_current` allocates."""
Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of what a pass allocates."""
PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
"""Classes of tensors that are no more than that."""
_unwrapped: Final[Any] = torch._C._functorch.unwrap_if_dead
_functorch_level: Final = torch._C._functorch.maybe_current_level
_includes_key: Final = torch._C._dispatch_tls_is_dispatch_key_included
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")


def allocator(index: int) -> Any:
    """What `empty_on_current` is, of any device; -1 is the CPU."""
    return functools.partial(_empty_on, index)


def _empty_on(index: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=index if index >= 0 else "cpu")


def dense(shape: tuple[int, ...], dtype: torch.dtype, *, heads_first: bool = False) -> Made:
    """A tensor in row-major order; ``heads_first`` swaps the second and third dim of it, not of the memory."""
    shape = tuple(shape)
    strides = compact_strides(shape)
    if heads_first:
        shape, strides = tuple([(x[0], x[2], x[1], *x[3:]) for x in (shape, strides)])
    return shape, strides, dtype


def address_of(x: torch.Tensor | None) -> int:
    """Of the first element; 0 where there is no tensor."""
    return 0 if x is None else x.data_ptr()


def detached(x: Any) -> Any:
    """A tensor without its autograd history; anything else as it is, for validation to name."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def resolved(x: Any) -> Any:
    """The tensor with a lazy sign applied, and out of a transformation that has ended; anything else as it is."""
    return _unwrapped(x).resolve_neg() if isinstance(x, torch.Tensor) else x


def is_elsewhere(x: Any, where: Any) -> bool:
    """Whether a captured tensor is not where q is, and no number on the CPU, which goes anywhere as in torch."""
    return isinstance(x, torch.Tensor) and x.device != where and not (x.dim() == 0 and x.device.type == "cpu")


def captured_on(arrays: Any, where: Any) -> tuple[Any, ...]:
    """The arrays that functions captured as tensors: NumPy's, and numbers on the CPU, are copied to where q is.

    Arrays are copied on the CPU, too: torch sees no write to one between the passes, as it does to a tensor.

    Raises
    ------
    ValueError
        A tensor is on another device.
    """
    for i, x in enumerate(arrays):
        if is_elsewhere(x, where):
            raise ValueError(
                f"score_mod, mask_mod: captured array {i}, of shape {tuple(x.shape)}, is on {x.device}, but q is on "
                f"{where}. Move it there."
            )
    return tuple([
        torch.as_tensor(x, device=where) if isinstance(x, torch.Tensor) else torch.tensor(x, device=where)
        for x in arrays
    ])  # fmt: skip


def signature(x: Any) -> Any:
    """What of a tensor decides the kernel: everything but the address beyond its alignment."""
    if x is None:
        return None
    try:
        return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.is_neg()
    except (AttributeError, RuntimeError, TypeError):
        return type(x), id(x)  # not a plain tensor: refused on the way to a plan, so nothing is remembered of it


def refuses_nondeterminism() -> bool:
    """Whether torch's own attention kernels are deterministic now: not where torch would only warn."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def is_dtensor(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, getattr(module, "DTensor", ()))


def is_transformed() -> bool:
    """Whether tensors may stand for batches or levels of others: in torch.func, and where autograd has its own vmap.

    The latter is for a batch of gradients: `is_grads_batched`, and `torch.autograd.functional` with `vectorize`.
    """
    return _functorch_level() is not None or _includes_key(_VMAP_MODE)


def as_plain(x: torch.Tensor | None) -> Any:
    return x if x is None or x.__class__ in PLAIN else x.as_subclass(torch.Tensor)
