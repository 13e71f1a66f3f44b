"""JAX: `attention` inside ``jax.jit``, ``jax.grad`` and ``jax.vmap``, on XLA's stream and in XLA's memory.

Everything is validated, compiled and loaded while JAX traces. The traced program holds one custom call per pass; at run
time its handler, reached through ``jax-tvm-ffi``, looks up the plan and launches. On the CPU platform the same
program calls the NumPy path. Arrays are row-major there, XLA transposes others.

A custom call has to name its pass. String attributes do not survive the bridge and integer ones leak 16 bytes per call
(jax-tvm-ffi 0.1.3), and handlers are limited to 1024, so the name is the shape of a result without elements: 60 bits
of a digest of the pass, the same in every process, as XLA's persistent compilation cache needs.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import api
from ..base.errors import UnsupportedError, shown
from ..base.forks import renew_in_child
from ..base.tables import remember
from ..front import philox
from ..front.call import Call, CallOptions, describe_shapes, plain_options
from ..front.operands import (
    GRADIENTS,
    INPUTS,
    OPERANDS,
    OPTIONAL_GRADIENTS,
    OPTIONAL_INPUTS,
    FurtherInputs,
    check_further,
    dtypes_of,
    shape_of,
    takes_further_inputs,
)
from ..front.philox import RngState
from ..front.problem import Causal, WindowSize, dense_layout
from ..front.signature import are_plain
from ..front.tensors import Device, TensorView
from ..heuristics.common import orders_gradients
from ..jit.params import START_FIELDS
from ..modifiers.cuda_values import NO_MODIFIER, ModifierValues, modifier_values, ordered_bytes
from ..modifiers.modifier import Modifier, Program
from ..plans.plan import BackwardPlan, ForwardPlan, backward_plan, forward_plan
from ..plans.prefetch import BackwardPrefetch
from ..plans.run import captured_of
from ..runtime import device
from .host import Memory
from .host import array as host_array
from .host import register as register_host_target
from .modifier import traced
from .partition import in_shard_map, of_types, partitioned, words_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ROW_START", "Kind", "as_varying", "attention", "captured", "check_call", "compute", "gradients_of_part", "on_gpu",
    "rng_words", "varies", "with_modifier",
]  # fmt: skip

_TARGET: Final = "nvrtc_attn.launch"
_AUX: Final = "aux"
ROW_START: Final = "row_start"
"""The operand that holds where the rows of a part begin, int32 ``[1]``, where its `Part` has an array of them."""
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)
_registered = False
_host_registered = False
_passes: dict[tuple[int, ...], _Pass] = {}
_forms: dict[tuple[int, ...], tuple[Kind, tuple[str, ...]]] = {}
"""No entry ever goes: a compiled program names one for as long as it lives, and nothing says how long that is."""
_plans: dict[tuple[_Pass, int], ForwardPlan | BackwardPlan] = {}
_targets: dict[tuple[tuple[int, ...], int], _Target] = {}
"""By a program's name of its pass, and the device."""
_checked: dict[tuple[_Pass, bool], CallOptions] = {}
"""Calls that were described, and whether for a GPU: what is wrong with one follows from this alone. Plain options."""
_ahead: dict[tuple[_Pass, int], None] = {}
"""Backward passes whose kernels were asked for, and the device."""
_calls: dict[_Pass, Call] = {}
"""Of passes with a modifier, whose captured arrays are told apart by it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is computed, without shapes."""

    options: CallOptions
    backward: bool = False
    program: Program | None = None
    """Of score_mod and mask_mod; the arrays that they captured are operands ``aux0``, ``aux1`` and so on."""
    numbers: tuple[float, ...] = ()
    trained: tuple[int, ...] = ()
    """Captured arrays whose gradients, ``daux0`` and so on, the backward pass makes."""
    float32: bool = False
    """Whether dk and dv are float32: shares of a sum."""
    float32_q: bool = False
    """Whether out and dq are float32: of some of the keys."""

    def changed(self, **options: Any) -> Kind:
        """The same with other options."""
        return replace(self, options=self.options._replace(**options))

    def backwards(self) -> Kind:
        """The backward pass of it, as a part of a larger one."""
        return replace(self, backward=True, float32=True)

    @property
    def float32_results(self) -> tuple[str, ...]:
        """Results that are float32 whatever the inputs are."""
        return (*(("dk", "dv") if self.float32 else ()), *(("out", "dq") if self.float32_q else ()))

    @property
    def results(self) -> tuple[str, ...]:
        """Operands that the pass writes."""
        if self.backward:
            gradients = (d for d in GRADIENTS if OPERANDS[d].backward == "out" or getattr(self.options, d))
            return (*gradients, *(f"d{_AUX}{i}" for i in self.trained))
        more = [name for name in ("lse", "max_logit") if getattr(self.options, f"return_{name}")]
        return ("out", *more)


@dataclass(frozen=True, slots=True)
class _Pass:
    """One kernel call: every static thing of it. ``operands`` are (name, shape, dtype) in the order of the arrays."""

    kind: Kind
    operands: tuple[tuple[str, tuple[int, ...], str], ...]

    @property
    def results(self) -> list[tuple[str, tuple[int, ...], str]]:
        shapes = {name: shape for name, shape, _ in self.operands}
        dtypes = {name: dtype for name, _, dtype in self.operands}
        in_float32 = self.kind.float32_results

        def written(name: str) -> tuple[str, tuple[int, ...], str]:
            if name not in OPERANDS:
                return name, shapes[name[1:]], "float32"
            return name, shape_of(name, shapes), "float32" if name in in_float32 else dtypes_of(name, dtypes)[0]

        return [written(name) for name in self.kind.results]

    @property
    def captures(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and element type of what the modifier captured, in its order; JAX puts operands in that of names."""
        found = {name: (shape, dtype) for name, shape, dtype in self.operands if name.startswith(_AUX)}
        return [found[f"{_AUX}{i}"] for i in range(len(found))]

    @property
    def key(self) -> tuple[int, ...]:
        """Sizes of at most 20 bits: three of the pass without its shapes, then three of all of it."""
        return (*_digest(self.form), *_digest(self))

    @property
    def form(self) -> tuple[Kind, tuple[str, ...]]:
        """What of it shapes do not tell."""
        return self.kind, tuple(name for name, _, _ in self.operands)


def _digest(x: object) -> list[int]:
    digest = int.from_bytes(hashlib.sha256(repr(x).encode()).digest()[:8], "little")
    return [(digest >> shift) % 2**20 for shift in (0, 20, 40)]


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
    split without a gather; with dropout the batch alone, as its mask counts the heads of the whole. Under
    ``jax.shard_map`` each device's part is a problem of its own.

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
    operands = {name: _array(name, x) for name, x in given.items() if x is not None or name not in OPTIONAL_INPUTS}
    modifier = traced(score_mod, mask_mod, aux)
    kind = Kind(options)
    if modifier is not None:
        kind, captures = with_modifier(kind, modifier)
        operands |= captures
    options = _check(_bind(kind, operands))
    kind = replace(kind, options=options)
    if options.dropout_p > 0:
        operands |= rng_words(rng)
    # Of arrays alone nobody differentiates: past custom_vjp, which takes half a millisecond of an eager call.
    traced_call = any(isinstance(x, jax.core.Tracer) for x in operands.values())
    run: Any = _run
    if traced_call:
        operands = _equally_varying(operands)
        run = _attention_in_program if in_shard_map(operands) else _attention
    results = of_types(partial(run, kind), operands, kind.results)
    return tuple(results) if len(results) > 1 else results[0]


def _check(bound: _Pass) -> CallOptions:
    """Refuse what no pass computes: the options in Python's types, which JAX can hash. A tenth of the time again."""
    options, for_gpu = bound.kind.options, on_gpu()
    try:
        plain = _checked.get((bound, for_gpu))
    except TypeError:  # options of kinds that no table takes
        plain = None
    if plain is not None and are_plain(options):  # a table looks options up by equality, and 1 equals True
        return plain
    for name, shape, _ in bound.operands:
        if not all(isinstance(n, int) for n in shape):
            raise UnsupportedError(
                "nvrtc_attn compiles kernels for sizes that are numbers.",
                [f"{name}: shape {tuple(map(str, shape))} has symbolic sizes. Export a program for each shape."],
            )
    for name, x in options._asdict().items():
        if any(isinstance(y, jax.core.Tracer) for y in (x if isinstance(x, tuple) else (x,))):
            raise TypeError(
                f"{name}: a tracer of JAX, known only when the program runs. It is compiled in: pass a Python value, "
                f"and where jax.jit has it as an argument, name it in static_argnames."
            )
    _describe(bound, Device("cuda" if for_gpu else "abstract", 0))
    plain = plain_options(options)
    if are_plain(options):
        remember(_checked, (bound, for_gpu), plain)
    return plain


def check_call(operands: dict[str, Any], options: CallOptions, modifier: Modifier | None = None) -> None:
    """Refuse what no pass computes; ``operands`` are (shape, dtype) by name."""
    where = Device("cuda" if on_gpu() else "abstract", 0)
    describe_shapes(operands, options, where, modifier=modifier, keeps_arrays=True)


def with_modifier(kind: Kind, modifier: Modifier) -> tuple[Kind, dict[str, Any]]:
    """The kind of a call with a modifier, and the operands that its arrays are."""
    arrays = {f"{_AUX}{i}": _array(f"captured array {i}", x) for i, x in enumerate(modifier.captures)}
    program, types = modifier.program, tuple((x.dtype.name, x.ndim) for x in arrays.values())
    if program.captures != types:  # without its 64-bit types, JAX makes 32-bit arrays of NumPy's
        program = replace(program, captures=types)
    return replace(kind, program=program, numbers=modifier.numbers), arrays


def captured(kind: Kind) -> dict[int, str]:
    """The operands that are captured arrays with a gradient, by their place in the modifier."""
    return {i: f"{_AUX}{i}" for i in _differentiable(kind.program)}


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
    for i in _differentiable(kind.program):
        inputs[f"d{_AUX}{i}"] = operands[f"{_AUX}{i}"]
    wanted = {name: () if x is not None and x.perturbed else None for name, x in inputs.items()}
    _compile_ahead(_of_gradients(kind, wanted), values)
    out, lse, *max_logit = _run(replace(kind, options=kind.options._replace(return_lse=True)), values)
    return [out, *([lse] if kind.options.return_lse else ()), *max_logit], (values, out, lse, wanted)


@functools.lru_cache(maxsize=1024)
def _differentiable(program: Program | None) -> tuple[int, ...]:
    return () if program is None else Modifier(program, (), ()).differentiable


def _of_gradients(kind: Kind, wanted: dict[str, Any]) -> Kind:
    """``kind`` with these optional gradients, as a backward pass asks for them."""
    flags: dict[str, Any] = {name: x is not None for name, x in wanted.items()}
    trained = tuple(i for i in _differentiable(kind.program) if flags.pop(f"d{_AUX}{i}"))
    options = kind.options._replace(return_lse=True, return_max_logit=False, **flags)
    return replace(kind, options=options, trained=trained)


def _compile_ahead(kind: Kind, values: dict[str, Any]) -> None:
    """Let the backward pass's kernels compile beside the forward one's, for the shapes before any ``jax.vmap``."""
    if not on_gpu():
        return
    try:
        bound = _bind(replace(kind, backward=True), values)
        for index in device.one_of_each_kind(_local_devices()):
            if (bound, index) not in _ahead:  # which an eager gradient asks at every call
                remember(_ahead, (bound, index), None)
                BackwardPrefetch(_describe(bound, Device("cuda", index)).with_dense(), index).start()
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
        of_part, values = _in_whole(kind, values, place)
        return _dispatch(_bind(of_part, values), tuple(values.values()))

    def dispatch(*arrays: Any) -> Any:
        bound = _bind(kind, dict(zip(names, arrays, strict=True)))
        dropout = kind.options.dropout_p > 0
        _forms[tuple(_digest(bound.form))] = bound.form  # a program from XLA's cache is not partitioned here again
        for form in _forms_of_parts(kind, names):
            _forms[tuple(_digest(form))] = form
        return partitioned(part, bound.operands, bound.results, dropout, kind.program is not None)(*arrays)

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


def _forms_of_parts(kind: Kind, names: tuple[str, ...]) -> list[tuple[Kind, tuple[str, ...]]]:
    """The forms, beside its own, of what devices compute of a pass that XLA splits."""
    of_offsets = [names]
    if kind.options.dropout_p > 0 and "offset" not in names:
        of_offsets.append((*names, "offset"))
    forms = [(kind, x) for x in of_offsets[1:]]
    if kind.program is not None:
        program = (
            Modifier(kind.program, (None,) * len(kind.program.captures), ()).moved_on_device({"b": 0, "h": 0}).program
        )
        more = tuple(f"{_AUX}{i}" for i in range(len(kind.program.captures), len(program.captures)))
        forms += [(replace(kind, program=program), (*x, *more)) for x in of_offsets if more]
    return forms


def _in_whole(kind: Kind, values: dict[str, Any], place: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """A part whose functions get the batch entries and heads of the whole; ``place`` has the first ones."""
    if kind.program is None or "b" not in place:
        return kind, values
    captures = tuple(values[f"{_AUX}{i}"] for i in range(len(kind.program.captures)))
    moved, arrays = with_modifier(kind, Modifier(kind.program, captures, kind.numbers).moved_on_device(place))
    return moved, values | arrays


_jitted: Any = jax.jit(_compute, static_argnums=0)  # eager calls find their compiled program again


def _run(kind: Kind, operands: dict[str, Any]) -> Any:
    results, axes = _jitted(kind, operands), varies(*operands.values())
    return [as_varying(x, axes) for x in results] if axes else results


def _bind(kind: Kind, operands: dict[str, Any]) -> _Pass:
    return _Pass(kind, tuple((name, tuple(x.shape), x.dtype.name) for name, x in operands.items()))


def _dispatch(bound: _Pass, arrays: tuple[Any, ...]) -> Any:
    """The pass on whatever platform the program is compiled for."""
    name, shape, _ = bound.results[0]
    if name == "out" and 0 in shape:
        values = {"out": 0.0, "lse": -np.inf, "max_logit": -np.inf}
        return [jnp.full(shape, values[name], dtype) for name, shape, dtype in bound.results]
    _register_host()
    branches: dict[str, Any] = {"cpu": partial(_custom_call, bound, 0)}
    if on_gpu():
        _register_target()
        # Loaded on every GPU before the program begins: a load may wait for what runs there, and beside a collective
        # that waits for another GPU of this process neither might go on.
        size = max(_plan(bound, index).workspace_bytes for index in _local_devices()) + _ordered_bytes(bound)
        branches["cuda"] = partial(_custom_call, bound, size)
    return jax.lax.platform_dependent(*arrays, **branches)


def _custom_call(bound: _Pass, workspace_bytes: int, *arrays: Any) -> Any:
    key = bound.key
    _forms[key[:3]] = bound.form
    remember(_passes, key, bound)
    shapes = [(shape, dtype) for _, shape, dtype in bound.results]
    extra = [((workspace_bytes,), "uint8"), ((0, *key), "uint8")]
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes + extra]
    return jax.ffi.ffi_call(_TARGET, structs)(*arrays)[: len(shapes)]


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


def varies(*arrays: Any) -> frozenset[str]:
    """The manual axes of ``jax.shard_map`` over which one of the arrays differs from device to device."""
    types = [jax.typeof(x) for x in arrays if isinstance(x, jax.core.Tracer)]
    # Since jax 0.10 in a type of its own.
    return frozenset[str]().union(
        *(x.manual_axis_type.varying if hasattr(x, "manual_axis_type") else getattr(x, "vma", ()) for x in types)
    )


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    missing = tuple(axes - varies(x))
    if not missing:
        return x
    return jax.lax.pcast(x, missing, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, missing)


def _equally_varying(operands: dict[str, Any]) -> dict[str, Any]:
    """All operands as different as the most different one: the gradient of one that was the same is summed then."""
    axes = varies(*operands.values())
    return {name: as_varying(x, axes) for name, x in operands.items()} if axes else operands


def _array(name: str, x: Any) -> Any:
    if isinstance(x, jax.Array):  # tracers too
        return x
    try:
        if x is None:
            raise TypeError("None")
        return jnp.asarray(x)
    except Exception as error:  # of whatever kind the object raises
        raise TypeError(
            f"{name}: got {shown(x)} of type {type(x).__name__}, of which JAX makes no array. Pass an array."
        ) from error


def rng_words(rng: Any) -> dict[str, Any]:
    """Seed and offset by name, as ``uint32[2]``; an offset of 0 is left out.

    An int is an operand as arrays are: a program does not depend on it, and another one needs no new program.
    """
    if rng is None:
        raise ValueError(
            "rng: None, but dropout_p > 0. Pass a JAX key, a seed, or (seed, offset), new ones at every step."
        )
    arrays: dict[str, Any] = {}
    pair = rng if isinstance(rng, (tuple, list)) else (rng, 0)
    if len(pair) != 2:
        raise TypeError(f"rng: got {len(pair)} values. Pass a JAX key, a seed, or (seed, offset).")
    for name, x in zip(("seed", "offset"), pair, strict=True):
        if isinstance(x, (int, np.integer)):
            word = philox.check_word(f"rng {name}", x)
            if word or name == "seed":
                arrays[name] = jnp.asarray(words_of(word))
            continue
        if isinstance(x, np.ndarray) and x.size == 1 and x.dtype in (np.int64, np.uint64):
            x = x.reshape(1).view(np.uint32)  # JAX without its 64-bit types would cut it off
        x = _array(f"rng {name}", x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.shape:
            raise ValueError(f"rng {name}: {x.size} JAX keys of shape {x.shape}. Pass one; jax.vmap gives one to each.")
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            arrays[name] = jax.random.bits(x, (2,), np.uint32)
        elif x.shape == (4,) and x.dtype == np.uint32:  # a raw key of the generators "rbg" and "unsafe_rbg"
            arrays[name] = jax.random.bits(jax.random.wrap_key_data(x, impl="rbg"), (2,), np.uint32)
        elif x.shape == (2,) and x.dtype == np.uint32:
            arrays[name] = x
        elif x.size == 1 and jnp.issubdtype(x.dtype, np.integer) and x.dtype.itemsize in (4, 8):
            bits = jax.lax.bitcast_convert_type(x.reshape(()), np.uint32)
            arrays[name] = bits if bits.shape else jnp.stack([bits, jnp.zeros((), np.uint32)])
        else:
            raise ValueError(f"rng {name}: got {x.dtype} of shape {x.shape}. Pass a JAX key, an integer, or uint32[2].")
    return arrays


# ------------------------------------------------------------------------------------------------ plans and launch


def _describe(bound: _Pass, where: Device, stream: int = 0) -> Call:
    """The validated call, over memory that is known at run time only."""
    inputs = {name: (shape, dtype) for name, shape, dtype in bound.operands if name in INPUTS}
    if bound.kind.program is None:
        return describe_shapes(inputs, bound.kind.options, where, stream)
    captures = tuple(_view(0, shape, dtype, where) for shape, dtype in bound.captures)
    modifier = Modifier(bound.kind.program, captures, bound.kind.numbers)
    trained = frozenset(bound.kind.trained)
    return describe_shapes(
        inputs, bound.kind.options, where, stream, modifier=modifier, trained=trained, keeps_arrays=True
    )


def _view(address: int, shape: tuple[int, ...], dtype: str, where: Device) -> TensorView:
    return TensorView(address, shape, dense_layout(shape, dtype).strides, dtype, where)


def _values(bound: _Pass, plan_bytes: int, pointers: dict[str, int], where: Device) -> ModifierValues:
    """What a launch passes to the modifier, of arrays at these addresses, with a plan that needs so much workspace."""
    call = _calls.get(bound)
    if call is None:
        call = remember(_calls, bound, _describe(bound, where))
    if call.modifier is None or call.modified is None:
        return NO_MODIFIER
    captures, gradients = (
        [_view(pointers.get(f"{prefix}{_AUX}{i}", 0), *bound.captures[i], where) for i in call.modified.kept]
        for prefix in ("", "d")
    )
    words = None
    if orders_gradients(call.problem):  # behind the workspace of the plan
        words = pointers["workspace"] + plan_bytes
    # Behind those of the functions: where their q begins, if they read it and the device knows it.
    starts = [_view(pointers[ROW_START], (), "int32", where) for _ in call.captures[len(captures) :]]
    captures, gradients = captures + starts, gradients + starts  # of which none is trained
    numbers = call.modifier.numbers
    return modifier_values(call.modifier.program, call.problem.trained, captures, gradients, numbers, words)


def _ordered_bytes(bound: _Pass) -> int:
    """What sums without an order need: the most of what any call of these arrays does."""
    if not (bound.kind.trained and bound.kind.options.deterministic):
        return 0
    views = [_view(0, shape, dtype, Device("cuda", 0)) for shape, dtype in bound.captures]
    return ordered_bytes(bound.kind.trained, views)


def _plan(bound: _Pass, index: int, stream: int = 0) -> ForwardPlan | BackwardPlan:
    """The plan for a pass on a device; compiles and loads on the first call."""
    plan = _plans.get((bound, index))
    if plan is None:
        call = _describe(bound, Device("cuda", index), stream)
        names = [name for name, _, _ in (*bound.operands, *bound.results) if name in OPERANDS and name not in INPUTS]
        make: Any = backward_plan if bound.kind.backward else forward_plan
        problem = call.with_dense(*names)
        if in_float32 := bound.kind.float32_results:
            shares = {name: dense_layout(shape, dtype) for name, shape, dtype in bound.results if name in in_float32}
            dense = {name: call.problem.dense_layout_of(name) for name in names if name not in shares}
            problem = call.with_outputs(**dense, **shares)
        plan = remember(_plans, (bound, index), make(problem, index, stream, captured=captured_of(call)))
    return plan


@functools.lru_cache(maxsize=4096)
def _dropout_base(bound: _Pass) -> int:
    """Where the dropout of a part begins in that of the whole."""
    return _describe(bound, Device("cuda", 0)).dropout_base


def _pass_of(key: tuple[int, ...], operands: Callable[[], list[tuple[tuple[int, ...], str]]]) -> _Pass:
    """The pass that a program names; ``operands`` gives shapes and dtypes of what it passes."""
    bound = _passes.get(key)
    if bound is None:
        if key[:3] not in _forms:
            raise RuntimeError("this program was compiled in another process: trace nvrtc_attn.jax.attention here once")
        kind, names = _forms[key[:3]]
        found = operands()[: len(names)]
        bound = _Pass(kind, tuple((name, *x) for name, x in zip(names, found, strict=True)))
        remember(_passes, key, bound)
    return bound


class _Target(NamedTuple):
    """What a custom call launches on a device."""

    bound: _Pass
    plan: ForwardPlan | BackwardPlan
    names: tuple[str, ...]
    """Of the buffers."""
    pick: Callable[[Sequence[int]], tuple[int, ...]]
    """Addresses as the plan's ``run`` takes them, out of those of the buffers and a 0 behind."""
    constant: bool
    """Whether there is nothing but them to tell: neither random numbers nor a modifier."""


def _new_target(key: tuple[int, ...], buffers: Sequence[Any], index: int, stream: int) -> _Target:
    bound = _pass_of(key, lambda: [(tuple(x.shape), str(x.dtype)) for x in buffers])
    names = (*(name for name, _, _ in (*bound.operands, *bound.results)), "workspace")
    plan = _plan(bound, index, stream)
    given, needed = buffers[-1].shape[0], plan.workspace_bytes + _ordered_bytes(bound)
    if given < needed:  # a plan that was made again under other settings
        raise RuntimeError(
            f"this program was compiled with {given} bytes of workspace, and its kernels now need {needed}: call "
            "jax.clear_caches() and trace nvrtc_attn.jax.attention again"
        )
    wanted: tuple[str, ...] = plan.OPERANDS
    if ROW_START in names:
        wanted += START_FIELDS
    pick = itemgetter(*(names.index(name) if name in names else len(names) for name in wanted))
    constant = bound.kind.options.dropout_p == 0 and bound.kind.program is None
    return remember(_targets, (key, index), _Target(bound, plan, names, pick, constant))


def _launch(*arguments: Any) -> None:
    """The handler of the custom call: operands, results, workspace, the name of the pass; then XLA's stream."""
    *buffers, name, stream = arguments
    key, index = tuple(name.shape)[1:], buffers[0].device.index
    target = _targets.get((key, index)) or _new_target(key, buffers, index, stream)
    addresses = [x.data_ptr() or 0 for x in buffers]
    workspace = addresses[-1]
    addresses.append(0)
    if target.constant:
        target.plan.run(stream, target.pick(addresses), workspace)
        return
    bound = target.bound
    pointers = dict(zip(target.names, addresses, strict=False))
    rng = RngState(0, 0, pointers.get("seed", 0), pointers.get("offset", 0))
    if bound.kind.options.part is not None and bound.kind.options.dropout_p > 0:
        rng = rng.moved(_dropout_base(bound))
    more: tuple[ModifierValues, ...] = ()
    if bound.kind.program is not None:
        more = (_values(bound, target.plan.workspace_bytes, pointers, Device("cuda", index)),)
    target.plan.run(stream, target.pick(addresses), workspace, rng, *more)


def _run_host(operands: Sequence[Memory], results: Sequence[Memory]) -> None:
    """The custom call on the CPU platform: the same operands and results."""
    *results, _, (_, (_, *key), _) = results
    bound = _pass_of(tuple(key), lambda: [(shape, dtype) for _, shape, dtype in operands])
    _on_cpu(bound, *map(host_array, operands), into=list(map(host_array, results)))


def _on_cpu(bound: _Pass, *arrays: Any, into: Sequence[Any]) -> None:
    """The pass in NumPy."""
    values: dict[str, Any] = {name: x for (name, _, _), x in zip(bound.operands, arrays, strict=True)}
    results: dict[str, Any] = {name: x for (name, _, _), x in zip(bound.results, into, strict=True)}
    words = [values.pop(name, None) for name in ("seed", "offset")]
    rng = tuple(0 if x is None else int(x.view(np.uint64)[0]) for x in words)
    run: Any = api.attention_backward if bound.kind.backward else api.attention_forward
    options = bound.kind.options
    if ROW_START in values and options.part is not None and options.part.rows is not None:
        options = options._replace(part=replace(options.part, rows=(values.pop(ROW_START), options.part.rows[1])))
    modified: dict[str, Any] = {}
    if bound.kind.program is not None:
        captures = tuple(values.pop(f"{_AUX}{i}") for i in range(len(bound.captures)))
        modified["score_mod"] = Modifier(bound.kind.program, captures, bound.kind.numbers)
        if bound.kind.backward:
            modified["daux"] = [results.pop(f"d{_AUX}{i}", None) for i in range(len(captures))]
    run(**values, **options.arguments(), **results, **modified, rng=rng)


def on_gpu() -> bool:
    """Whether JAX computes on a GPU where nobody says otherwise."""
    default = jax.config.jax_default_device
    return (getattr(default, "platform", default) or jax.default_backend()) in ("gpu", "cuda")


def _local_devices() -> list[int]:
    """CUDA ordinals of the GPUs that JAX may run on."""
    return [found.local_hardware_id for found in jax.local_devices(backend="gpu")]


def _register_host() -> None:
    global _host_registered
    with _lock:
        if not _host_registered:
            register_host_target(_TARGET, _run_host)
            _host_registered = True


def _register_target() -> None:
    global _registered
    with _lock:
        if not _registered:
            try:
                import jax_tvm_ffi  # imports torch where that is installed: only when a GPU is used
            except ImportError as error:
                raise ImportError(
                    "nvrtc_attn.jax.attention launches on GPUs through jax-tvm-ffi (Python 3.11 or later), which is "
                    f'not installed: pip install "nvrtc-attn[jax]" ({error})'
                ) from error
            # Not for CUDA graphs: a plan of another device may have to be loaded at its first launch.
            jax_tvm_ffi.register_ffi_target(_TARGET, _launch, ["args", "rets", "ctx.stream"], platform="gpu")
            _registered = True
