"""The seed's two entry points: stand-ins for ``aten::_efficient_attention_forward`` and ``_backward`` on CUDA tensors.

Parameters, defaults and returned values are the operators' own, padded log-sum-exp and Philox state included. Where the
operators have known defects (windows and offsets in the backward pass, rows without a key, variable lengths with
dropout, uninitialised padding) these functions follow `nvrtc_attn.attention` instead.
"""

from __future__ import annotations

from .torch.efficient import efficient_attention_backward, efficient_attention_forward

__all__ = ["efficient_attention_backward", "efficient_attention_forward"]
