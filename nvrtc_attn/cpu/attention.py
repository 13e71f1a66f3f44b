"""The CPU path: calls on host memory, computed by `nvrtc_attn.cpu.reference` and written into the given outputs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, SupportsIndex

import numpy as np

from ..front.call import Call, rng_state
from ..front.tensors import TensorView, as_numpy, bfloat16_to_float32, float32_to_bfloat16
from . import reference


def forward(call: Call, out: TensorView, lse: TensorView | None, rng: Any) -> None:
    """Write ``out`` and, when wanted, ``lse``."""
    result, log_sums = reference.attention_forward(_read(call.q), _read(call.k), _read(call.v), **_options(call, rng))
    _write(out, result)
    if lse is not None:
        _write(lse, log_sums)


def backward(call: Call, reads: Mapping[str, TensorView], writes: Mapping[str, TensorView], rng: Any) -> None:
    """Write the gradients named in ``writes``: dq, dk, dv and maybe dbias."""
    dlse = reads.get("dlse")
    gradients = reference.attention_backward(
        _read(reads["dout"]),
        _read(call.q),
        _read(call.k),
        _read(call.v),
        _read(reads["out"]),
        _read(reads["lse"]),
        dlse=None if dlse is None else _read(dlse),
        bias_grad="dbias" in writes,
        **_options(call, rng),
    )
    for name, gradient in zip(("dq", "dk", "dv", "dbias"), gradients, strict=True):
        if name in writes and gradient is not None:
            _write(writes[name], gradient)


def _options(call: Call, rng: Any) -> dict[str, Any]:
    options = call.options
    problem = call.problem
    seed, offset = rng_state(rng, call.device, None)[0][2:] if problem.dropout_p > 0 else (0, 0)
    tensors = {
        name: None if x is None else _read(x)
        for name, x in call.inputs()
        if name in ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    }
    return {
        **tensors,
        "causal": options.causal,
        "window_size": tuple(map(_bound, options.window_size or (None, None))),
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        "seed": seed,
        "offset": offset,
        "max_seqlen_q": problem.seqlen_q if problem.varlen else None,
        "max_seqlen_k": problem.seqlen_k if problem.varlen else None,
    }


def _bound(bound: SupportsIndex | None) -> int | None:
    return None if bound is None or (number := operator.index(bound)) == -1 else number


def _read(x: TensorView) -> np.ndarray[Any, Any]:
    array = as_numpy(x)
    # Without ml_dtypes bfloat16 memory comes as its bits.
    return bfloat16_to_float32(array) if x.dtype == "bfloat16" and array.dtype == np.uint16 else array


def _write(target: TensorView, values: np.ndarray[Any, Any]) -> None:
    array = as_numpy(target)
    if target.dtype == "bfloat16" and array.dtype == np.uint16:
        array[...] = float32_to_bfloat16(values)
    else:
        array[...] = values.astype(array.dtype, copy=False)
