"""JAX: `attention` inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``, on XLA's stream and in XLA's memory.

Everything is validated, compiled and loaded while JAX traces. The traced program holds one custom call per pass
(`passes`), and at run time its handler looks up the plan and launches (`handlers`). On the CPU platform the same
program calls the NumPy path. Arrays are row-major there, XLA transposes others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import UnsupportedError
from ..base.tables import remember
from ..front.call import CallOptions
from ..front.operands import (
    OPERANDS,
    OPTIONAL_GRADIENTS,
    OPTIONAL_INPUTS,
    FurtherInputs,
    check_further,
    takes_further_inputs,
)
from ..front.part import Part
from ..front.problem import Causal, WindowSize
from ..front.tensors import Device
from ..modifiers.modifier import Modifier
from ..plans.prefetch import BackwardPrefetch
from ..runtime import device
from .handlers import TARGET, local_devices, register_host, register_target, workspace_bytes_on
from .modifier import traced
from .partition import as_varying, equally_varying, in_shard_map, of_types, partitioned, varies
from .passes import (
    AUX,
    ROW_START,
    Kind,
    Pass,
    array_of,
    bind,
    check_pass,
    describe,
    differentiable,
    name_form,
    name_pass,
    on_gpu,
    rng_words,
    with_modifier,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ahead: dict[tuple[Pass, int], None] = {}
"""Backward passes whose kernels were asked for, and the device."""


@takes_further_inputs
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Mapping[str, Any] | None = None,
    **further: Unpack[FurtherInputs],
) -> Any:
    """`nvrtc_attn.attention`, differentiable once in q, k, v, bias, sink and, through a returned lse, in the lse.

    A returned max_logit has no gradient, as behind ``jax.lax.stop_gradient``. Parameters as there, without ``out``,
    ``stream`` and ``part``, but:

    score_mod, mask_mod, aux
        Functions as there, or of ``jax.numpy``. Arrays that they captured, tracers of ``jax.jit`` and ``jax.grad`` too,
        are operands, and floating-point ones have gradients.

    rng
        Needed with dropout: a JAX key, a seed, or (seed, offset), each an int, a 64-bit or 32-bit integer scalar, or
        ``uint32[2]`` (low word first). The same values give the same mask, so pass a new one at every step.
    softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k
        Python numbers: they are compiled in, or decide what is launched.
    deterministic
        Whether the backward pass is bitwise reproducible.

    ``jax.vmap`` folds its axis into the batch; packed sequences, dropout, and the gradient of a bias shared by a
    batch run one by one. Under automatic sharding (``jax.jit`` of arrays with a ``NamedSharding``) batch and heads stay
    split without a gather, and the dropout mask is the whole's; with dropout and a sink the batch alone stays split.
    Under ``jax.shard_map`` each device's part is a problem of its own.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError
        While tracing.
    ImportError
        On a GPU without ``jax-tvm-ffi``.
    """
    options = CallOptions(
        causal,
        window_size,
        softmax_scale,
        softcap,
        dropout_p,
        max_seqlen_q,
        max_seqlen_k,
        return_lse,
        deterministic,
        return_max_logit=return_max_logit,
    )
    check_further("attention", further)
    given = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k, **further,
    }  # fmt: skip
    operands = {name: array_of(name, x) for name, x in given.items() if x is not None or name not in OPTIONAL_INPUTS}
    modifier = traced(score_mod, mask_mod, aux)
    kind = Kind(options)
    if modifier is not None:
        kind, captures = with_modifier(kind, modifier)
        operands |= captures
    options = check_pass(bind(kind, operands))
    kind = replace(kind, options=options)
    if options.dropout_p > 0:
        operands |= rng_words(rng)
    # Of arrays alone nobody differentiates: past custom_vjp, which takes half a millisecond of an eager call.
    traced_call = any(isinstance(x, jax.core.Tracer) for x in operands.values())
    run: Any = _run
    if traced_call:
        operands = equally_varying(operands)
        run = _attention_in_program if in_shard_map(operands) else _attention
    results = of_types(partial(run, kind), operands, kind.results)
    return tuple(results) if len(results) > 1 else results[0]


def compute(kind: Kind, operands: dict[str, Any]) -> Any:
    """(out, lse) of a call or a part, differentiable as `attention` is."""
    return tuple(_attention_in_program(kind, operands))


def gradients_of_part(kind: Kind, operands: dict[str, Any]) -> dict[str, Any]:
    """Shares of gradients by the input, dk and dv in float32. ``kind`` is `Kind.backwards` of the forward pass's."""
    found = zip(kind.results, _run(kind, operands), strict=True)
    return {OPERANDS[name].gradient_of if name in OPERANDS else name[1:]: x for name, x in found}


# ------------------------------------------------------------------------------------------------ differentiation


def _primal(kind: Kind, operands: dict[str, Any]) -> Any:
    return _run(kind, operands)


def _forward_rule(kind: Kind, operands: dict[str, Any]) -> Any:
    values = {name: x.value for name, x in operands.items()}
    # A structure may tell what a value cannot: whether an optional gradient, which costs time, is wanted.
    inputs = {name: operands.get(OPERANDS[name].gradient_of) for name in OPTIONAL_GRADIENTS}
    for i in differentiable(kind.program):
        inputs[f"d{AUX}{i}"] = operands[f"{AUX}{i}"]
    wanted = {name: () if x is not None and x.perturbed else None for name, x in inputs.items()}
    _compile_ahead(_of_gradients(kind, wanted), values)
    out, lse, *max_logit = _run(replace(kind, options=kind.options._replace(return_lse=True)), values)
    return [out, *([lse] if kind.options.return_lse else ()), *max_logit], (values, out, lse, wanted)


def _of_gradients(kind: Kind, wanted: dict[str, Any]) -> Kind:
    """``kind`` with these optional gradients, as a backward pass asks for them."""
    flags: dict[str, Any] = {name: x is not None for name, x in wanted.items()}
    trained = tuple(i for i in differentiable(kind.program) if flags.pop(f"d{AUX}{i}"))
    options = kind.options._replace(return_lse=True, return_max_logit=False, **flags)
    return replace(kind, options=options, trained=trained)


def _compile_ahead(kind: Kind, values: dict[str, Any]) -> None:
    """Let the backward pass's kernels compile beside the forward one's, for the shapes before any ``jax.vmap``."""
    if not on_gpu():
        return
    try:
        bound = bind(replace(kind, backward=True), values)
        for index in device.one_of_each_kind(local_devices()):
            if (bound, index) not in _ahead:  # which an eager gradient asks at every call
                remember(_ahead, (bound, index), None)
                BackwardPrefetch(describe(bound, Device("cuda", index)).with_dense(), index).start()
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        pass  # for the passes themselves to say


def _backward_rule(kind: Kind, residuals: Any, cotangents: Any) -> Any:
    values, out, lse, wanted = residuals
    zero = jax.custom_derivatives.SymbolicZero
    dout = jnp.zeros_like(out) if isinstance(cotangents[0], zero) else cotangents[0]
    operands = {**values, "dout": dout, "out": out, "lse": lse}
    if kind.options.return_lse and not isinstance(cotangents[1], zero):
        operands["dlse"] = cotangents[1]
    backward = replace(_of_gradients(kind, wanted), backward=True)
    gradients = zip(backward.results, _run(backward, operands), strict=True)
    named = {
        name[1:]: gradient.astype(values[name[1:]].dtype) if name not in OPERANDS else gradient
        for name, gradient in gradients
    }
    return ({name: named.get(name) for name in values},)


_attention: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))
_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
_attention_in_program: Any = jax.jit(_attention, static_argnums=0)
"""The same for `jax.shard_map`, which refuses ``symbolic_zeros`` of what it does not find in a program."""


# -------------------------------------------------------------------------------------------- tracing of one pass


def _compute(kind: Kind, operands: dict[str, Any]) -> Any:
    names = tuple(operands)

    def part(place: dict[str, Any], *arrays: Any) -> Any:
        values = dict(zip(names, arrays, strict=True))
        if "offset" in place:
            values["offset"] = place["offset"]
        of_part, values = _in_whole(kind if "heads" not in place else _of_heads(kind, place["heads"]), values, place)
        return _dispatch(bind(of_part, values), tuple(values.values()))

    def dispatch(*arrays: Any) -> Any:
        bound = bind(kind, dict(zip(names, arrays, strict=True)))
        name_form(bound.form)  # a program from XLA's cache is not partitioned here again
        for form in _forms_of_parts(kind, names, arrays[names.index("q")].shape[2]):
            name_form(form)
        split = partitioned(part, bound.operands, bound.results, kind.options, functions=kind.program is not None)
        return split(*arrays)

    run = jax.custom_batching.custom_vmap(dispatch)
    run.def_vmap(partial(_vmap_rule, kind, names))
    once = jax.custom_jvp(lambda *arrays: run(*arrays))
    once.defjvp(_refuse_second_derivatives)
    return once(*operands.values())


def _refuse_second_derivatives(*_: Any) -> Any:
    raise UnsupportedError(
        "nvrtc_attn has no second derivatives.",
        ["a pass of an attention is differentiated: by a gradient of a gradient or jax.hessian."],
    )


def _forms_of_parts(kind: Kind, names: tuple[str, ...], heads: int) -> list[tuple[Kind, tuple[str, ...]]]:
    """The forms, beside its own, of what devices compute of a pass of so many heads that XLA splits."""
    found = [(kind, names)]
    if kind.options.dropout_p > 0:
        of_offset = names if "offset" in names else (*names, "offset")
        found += [(kind, of_offset), (_of_heads(kind, heads), of_offset)]
    if kind.program is not None:
        captures = len(kind.program.captures)
        program = Modifier(kind.program, (None,) * captures, ()).moved_on_device({"b": 0, "h": 0}).program
        more = tuple(f"{AUX}{i}" for i in range(captures, len(program.captures)))
        found += [(replace(of_part, program=program), (*x, *more)) for of_part, x in found if more]
    return found[1:]


def _of_heads(kind: Kind, heads: int) -> Kind:
    """A part with some of so many heads. It is the first ones': the dropout's offset says which they are."""
    part = kind.options.part or Part()
    return kind if part.heads is not None else kind.changed(part=replace(part, heads=(0, heads)))


def _in_whole(kind: Kind, values: dict[str, Any], place: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """A part whose functions get the batch entries and heads of the whole; ``place`` has the first ones."""
    if kind.program is None or "b" not in place:
        return kind, values
    captures = tuple(values[f"{AUX}{i}"] for i in range(len(kind.program.captures)))
    moved, arrays = with_modifier(kind, Modifier(kind.program, captures, kind.numbers).moved_on_device(place))
    return moved, values | arrays


_jitted: Any = jax.jit(_compute, static_argnums=0)  # eager calls find their compiled program again


def _run(kind: Kind, operands: dict[str, Any]) -> Any:
    results, axes = _jitted(kind, operands), varies(*operands.values())
    return [as_varying(x, axes) for x in results] if axes else results


def _dispatch(bound: Pass, arrays: tuple[Any, ...]) -> Any:
    """The pass on whatever platform the program is compiled for."""
    name, shape, _ = bound.results[0]
    if name == "out" and 0 in shape:
        values = {"out": 0.0, "lse": -np.inf, "max_logit": -np.inf}
        return [jnp.full(shape, values[name], dtype) for name, shape, dtype in bound.results]
    register_host()
    branches: dict[str, Any] = {"cpu": partial(_custom_call, bound, 0)}
    if on_gpu():
        register_target()
        # Loaded on every GPU before the program begins: a load may wait for what runs there, and beside a collective
        # that waits for another GPU of this process neither might go on.
        size = max(workspace_bytes_on(bound, index) for index in local_devices())
        branches["cuda"] = partial(_custom_call, bound, size)
    return jax.lax.platform_dependent(*arrays, **branches)


def _custom_call(bound: Pass, workspace_bytes: int, *arrays: Any) -> Any:
    key = name_pass(bound)
    shapes = [(shape, dtype) for _, shape, dtype in bound.results]
    extra = [((workspace_bytes,), "uint8"), ((0, *key), "uint8")]
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes + extra]
    return jax.ffi.ffi_call(TARGET, structs)(*arrays)[: len(shapes)]


def _vmap_rule(kind: Kind, names: tuple[str, ...], size: int, batched: list[bool], *arrays: Any) -> Any:
    """Fold the mapped axis into the batch where that computes the same, otherwise loop."""
    options = kind.options
    batch = {
        name: x.shape[is_batched]
        for name, x, is_batched in zip(names, arrays, batched, strict=True)
        if x.ndim and name in OPERANDS
    }
    mapped = dict(zip(names, batched, strict=True))
    shared_bias = "bias" in batch and batch["bias"] != batch["q"]
    batchless = [name for name in names if name in OPERANDS and OPERANDS[name].axes[0] != "batch"]
    if ROW_START in names:
        batchless.append(ROW_START)
    # A sink or a start of all batches goes with the longer one as it is. A sink's gradient would be summed over the
    # mapped axis, too.
    alone = any(name not in ("sink", ROW_START) or options.dsink or mapped[name] for name in batchless)
    if alone or kind.program is not None or options.dropout_p > 0 or (options.dbias and shared_bias):

        def one(mapped: list[Any]) -> Any:
            items = iter(mapped)
            values = [next(items) if is_batched else x for x, is_batched in zip(arrays, batched, strict=True)]
            return _compute(kind, dict(zip(names, values, strict=True)))

        results = jax.lax.map(one, [x for x, is_batched in zip(arrays, batched, strict=True) if is_batched])
        return results, [True] * len(results)
    folded = {}
    for name, x, is_batched in zip(names, arrays, batched, strict=True):
        shape = x.shape[is_batched:]
        if name in batchless:
            folded[name] = x
        elif not is_batched and shape[0] == 1 and OPERANDS[name].broadcast and not options.dbias:
            folded[name] = x  # broadcast over the longer batch as well
        else:
            x = x if is_batched else x[None]
            wide = jnp.broadcast_to(x, (size, batch["q"], *shape[1:]))
            folded[name] = wide.reshape(size * batch["q"], *shape[1:])
    results = [x.reshape(size, batch["q"], *x.shape[1:]) for x in _compute(kind, folded)]
    return results, [True] * len(results)
