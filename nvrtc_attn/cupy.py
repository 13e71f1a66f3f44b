"""CuPy: `attention` and its gradients on CuPy's current stream, from CuPy's allocator.

CuPy has no autograd: the gradients are a call of their own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, Final

from . import api
from .base.errors import missing, shown
from .front.call import CallOptions
from .front.operands import OPTIONAL_INPUTS, unexpected

try:
    import cupy
except ModuleNotFoundError as error:
    raise missing("cupy", error) from None

_NOTHING: Final = nullcontext()
_MADE_HERE: Final = frozenset(("dq", "dk", "dv", "dbias", "dsink", "workspace"))
_OPTIONS: Final = frozenset(signature(api.attention_backward).parameters) - _MADE_HERE


def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """`nvrtc_attn.attention` of CuPy arrays; same arguments, ``out`` and ``lse`` are CuPy arrays.

    `attention_backward` needs the lse, so ask for ``return_lse=True``, and with dropout the same ``rng``.
    """
    _check(q=q, k=k, v=v)
    with _on_device_of(q):
        return api.attention(q, k, v, **options)


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None, with_dbias: bool = True, **options: Any
) -> tuple[Any, ...]:
    """Gradients of `attention`, allocated here: ``(dq, dk, dv, dbias)``, and with a sink dsink as the fifth.

    Parameters
    ----------
    dout, out, lse
        The gradient with respect to out, and what `attention` returned.
    dlse
        The gradient with respect to lse, None = 0.
    with_dbias
        False: do not compute the gradient of the bias, which costs time and memory.
    **options
        Those of the forward call (``bias``, ``mask``, ``causal``, ``dropout_p``, ``rng``, ...), and ``deterministic``.

    Returns
    -------
    dq, dk, dv, dbias, and with a sink dsink
        Row-major, in the shapes and dtypes of q, k, v, bias, sink; dbias is None without a bias, or where not wanted.
    """
    bias, sink = options.get("bias"), options.get("sink")
    optional = {name: x for name, x in (("dlse", dlse), ("bias", bias), ("sink", sink)) if x is not None}
    _check(dout=dout, q=q, k=k, v=v, out=out, lse=lse, **optional)
    if not isinstance(with_dbias, bool):
        raise TypeError(
            f"with_dbias: got {shown(with_dbias)} of type {type(with_dbias).__name__}. It is True or False."
        )
    for name in ("return_lse", "return_max_logit"):
        options.pop(name, None)
    for name in options:
        if name not in _OPTIONS:
            raise unexpected("attention_backward", name, (*_OPTIONS, "with_dbias"))
    more = {name: options.pop(name, None) for name in ("rng", "stream", "score_mod", "mask_mod", "aux", "daux")}
    optional_inputs = [options.pop(name, None) for name in OPTIONAL_INPUTS]
    with _on_device_of(q):
        dq, dk, dv = (cupy.empty(x.shape, x.dtype) for x in (q, k, v))
        dbias = cupy.empty(bias.shape, bias.dtype) if bias is not None and with_dbias else None
        dsink = None if sink is None else cupy.empty(sink.shape, sink.dtype)
        api.run_backward(
            # In the order of `BACKWARD`.
            (q, k, v, _dense(out), _dense(dout), lse, dlse, *optional_inputs, dq, dk, dv, dbias, dsink),
            CallOptions(**options, return_lse=True, dbias=dbias is not None, dsink=dsink is not None),
            workspace=None, **more, new_workspace=lambda size: cupy.empty(size, cupy.uint8),
        )  # fmt: skip
    return (dq, dk, dv, dbias) if sink is None else (dq, dk, dv, dbias, dsink)


def _dense(x: Any) -> Any:
    """Row-major and aligned to 16 bytes, what kernels read fastest. A copy only of other layouts."""
    if x.flags.c_contiguous and x.data.ptr % 16 == 0:
        return x
    x = cupy.ascontiguousarray(x)
    return x.copy() if x.data.ptr % 16 else x


def _on_device_of(x: Any) -> AbstractContextManager[Any]:
    """A context in which the GPU of ``x`` is current; where it is already, one that costs nothing."""
    index = x.data.device_id
    return _NOTHING if cupy.cuda.runtime.getDevice() == index else cupy.cuda.Device(index)


def _check(**arrays: Any) -> None:
    for name, x in arrays.items():
        if not isinstance(x, cupy.ndarray):
            raise TypeError(
                f"{name}: got {type(x).__module__}.{type(x).__qualname__}. nvrtc_attn.cupy takes CuPy arrays; "
                f"nvrtc_attn.attention takes those of any framework."
            )
