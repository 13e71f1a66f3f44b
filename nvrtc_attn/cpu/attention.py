"""The CPU path: calls on host memory, computed by `nvrtc_attn.cpu.reference` and written into the given outputs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from ..front.call import Call
from ..front.operands import GRADIENTS, OPTIONAL_INPUTS
from ..front.philox import NO_RNG
from ..front.tensors import TensorView, as_numpy, bfloat16_to_float32, float32_to_bfloat16
from ..modifiers.evaluate import HostModifier
from ..modifiers.graph import make, walk
from ..modifiers.intervals import is_inside
from ..modifiers.modifier import Modifier
from . import reference


def forward(call: Call, views: Mapping[str, TensorView], rng: Any) -> None:
    """Write what ``views`` names: out and maybe lse."""
    q, k, v = (_read(call.tensors[name]) for name in "qkv")
    largest = np.empty(views["max_logit"].shape, np.float32) if "max_logit" in views else None
    arrays = reference.attention_forward(
        q, k, v, **_options(call, rng), result_dtype=_wider(views["out"]), max_logit=largest
    )
    results = {**dict(zip(("out", "lse"), arrays, strict=True)), "max_logit": largest}
    for name, view in views.items():
        values = results[name]
        assert values is not None
        _write(view, values)


def backward(call: Call, views: Mapping[str, TensorView], rng: Any, daux: Sequence[TensorView | None] = ()) -> None:
    """Read the inputs of the backward pass in ``views`` and write the gradients that it names, and ``daux``."""
    sums = [None if x is None else np.zeros(x.shape, np.float32) for x in daux]
    read: dict[str, Any] = {name: _read(view) for name, view in views.items() if name not in GRADIENTS}
    q, k, v = (_read(call.tensors[name]) for name in "qkv")
    gradients = reference.attention_backward(
        read.pop("dout"), q, k, v, read.pop("out"), read.pop("lse"), **read, bias_grad="dbias" in views,
        sink_grad="dsink" in views, capture_grads=sums,
        result_dtype=_wider(views["dq"], views["dk"], views["dv"]), **_options(call, rng),
    )  # fmt: skip
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        if name in views and gradient is not None:
            _write(views[name], gradient)
    for view, values in zip(daux, sums, strict=True):
        if view is not None and values is not None:
            _write(view, values)


def check_indices(call: Call, read: Callable[[TensorView], np.ndarray[Any, Any]]) -> None:
    """Refuse an index beyond a captured array at a pair of query and key that is kept, or hidden because of it.

    ``read`` gives a host array. Of indices that a range of them cannot prove; not of those that depend on the score.
    """
    modifier = call.modifier
    if modifier is None:
        return
    problem, captures = call.problem, [checked_integers(read(x)) for x in call.captures]
    score, mask = modifier.valued
    sizes = problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k
    loads = [x for x in walk([x for x in (score, mask) if x is not None]) if x.op == "load" and x.args]
    unproven = [x for x in loads if "score" not in x.depends and not is_inside(x, captures, sizes)]
    if not unproven:
        return
    # What is read has no meaning here, and its comparison with itself is a finite number.
    compared = [make("float", make("ne", x, x)) for x in unproven]
    probe = Modifier.of(functools.reduce(lambda a, b: make("add", a, b), compared), mask, call.captures)
    used = [captures[[y is x for y in call.captures].index(True)] for x in probe.captures]
    q, k = (np.broadcast_to(np.float32(0), (*call.tensors[name].shape[:3], 0)) for name in "qk")
    options: dict[str, Any] = {
        name: read(x) for name, x in call.tensors.items() if name in OPTIONAL_INPUTS and name not in ("bias", "sink")
    }
    reference.attention_forward(q, k, k, **_settings(call), **options, modifier=HostModifier(probe, used))


def checked_integers(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``x``, a captured array. A kernel's integers are int32, and a wider one would be another number there.

    Raises
    ------
    ValueError
        An integer beyond int32.
    """
    if x.dtype.kind not in "iu" or np.can_cast(x.dtype, np.int32) or not x.size:
        return x
    limits = np.iinfo(np.int32)
    for value in (x.max(), x.min()):
        if not limits.min <= value <= limits.max:
            raise ValueError(
                f"a captured array of {x.dtype} holds {value}: integers of score_mod and mask_mod are int32. Number "
                "the values before, as numpy.unique(x, return_inverse=True) and torch.unique do."
            )
    return x


def _options(call: Call, rng: Any) -> dict[str, Any]:
    problem = call.problem
    state = call.rng_state(rng) if problem.dropout_p > 0 else NO_RNG
    captures = [checked_integers(_read(x)) for x in call.captures]
    modifier = None if call.modifier is None else HostModifier(call.modifier, captures)
    return {
        **{name: _read(x) for name, x in call.tensors.items() if name in OPTIONAL_INPUTS},
        **_settings(call),
        "modifier": modifier,
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "dropout_p": problem.dropout_p,
        "seed": state.seed,
        "offset": state.offset,
    }


def _settings(call: Call) -> dict[str, Any]:
    """Of which keys a row sees."""
    options, problem = call.options, call.problem
    return {
        "causal": options.causal,
        "window_size": tuple(map(_bound, options.window_size or (None, None))),
        "max_seqlen_q": problem.seqlen_q if problem.varlen else None,
        "max_seqlen_k": problem.seqlen_k if problem.varlen else None,
        "part": options.part,
    }


def _wider(*views: TensorView) -> type[np.float32] | None:
    """The type of results: that of the inputs, or float32 where one of them is to be written so."""
    return np.float32 if any(view.dtype == "float32" for view in views) else None


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
