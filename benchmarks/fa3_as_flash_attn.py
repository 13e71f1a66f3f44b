"""FlashAttention-3 under the private names of the package flash_attn that ring-flash-attn calls.

flash_attn has no wheel on the package index, and its kernels are FlashAttention-2's, half as fast on Hopper. `install`
gives ring-flash-attn the operators of `peers.fa3_operators` instead, so that the rival is as strong as it can be.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch
from peers import fa3_operators


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """out ``[B, S, H, D]`` and lse ``[B, H, S]``, float32."""
    _plain(dropout_p, alibi_slopes, return_softmax)
    # Not given: new keys, out, boundaries, lengths in use, pages, rotary embeddings, scales of float8.
    out, lse, *_ = fa3_operators().fwd(
        q.contiguous(), k.contiguous(), v.contiguous(), *[None] * 4, None, None, None, None, None, None, None,
        *[None] * 6, *[None] * 3, softmax_scale, causal, window_size_left, window_size_right, 0, softcap, True, None,
        1, None, 0,
    )  # fmt: skip
    return out, lse, None, None


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
) -> None:
    """Writes dq, dk and dv."""
    _plain(dropout_p, alibi_slopes, rng_state is not None)
    fa3_operators().bwd(
        dout.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out.contiguous(), softmax_lse.contiguous(),
        dq, dk, dv, None, None, None, None, None, None, softmax_scale, causal, window_size_left, window_size_right,
        softcap, deterministic, 0,
    )  # fmt: skip


def _plain(dropout_p: float, alibi_slopes: torch.Tensor | None, more: bool) -> None:
    if dropout_p or alibi_slopes is not None or more:
        raise NotImplementedError("FlashAttention-3 has no dropout and no ALiBi")


def install() -> ModuleType:
    """Puts ``flash_attn.flash_attn_interface`` into `sys.modules`, and returns it; to be called before ring_flash_attn
    is imported.
    """

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError("packed sequences are not measured")

    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, interface):
        # Libraries ask for it to see whether the package is there.
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__version__ = "2.8.0"  # type: ignore[attr-defined]
    interface._flash_attn_forward = _flash_attn_forward  # type: ignore[attr-defined]
    interface._flash_attn_backward = _flash_attn_backward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_forward = absent  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = absent  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    # Its adapter for transformers wants a function that newer ones no longer have, and is not measured.
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = absent  # type: ignore[attr-defined]
    sys.modules |= {x.__name__: x for x in (package, interface, adapters)}
    return interface
