"""A pass of an attention as a program of JAX has it: what is computed, of which arrays, and the call that it is.

`Kind` is a computation without shapes and `Pass` one with them; `check_pass` and `check_call` refuse what no pass
computes, `describe` makes the validated call. `with_modifier` and `rng_words` make operands of what a user gave.

A custom call has to name its pass. String attributes do not survive the bridge and integer ones leak 16 bytes per call
(jax-tvm-ffi 0.1.3), and handlers are limited to 1024, so the name is the shape of a result without elements: 60 bits
of a digest of the pass, the same in every process, as XLA's persistent compilation cache needs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..base.errors import UnsupportedError, shown
from ..base.tables import remember
from ..front import philox
from ..front.call import Call, CallOptions, describe_shapes, plain_options
from ..front.operands import GRADIENTS, INPUTS, OPERANDS, dtypes_of, shape_of
from ..front.problem import dense_layout
from ..front.signature import are_plain
from ..front.tensors import Device, TensorView
from ..modifiers.modifier import Modifier, Program
from .partition import words_of

AUX: Final = "aux"
ROW_START: Final = "row_start"
"""The operand that holds where the rows of a part begin, int32 ``[1]``, where its `Part` has an array of them."""
_passes: dict[tuple[int, ...], Pass] = {}
_forms: dict[tuple[int, ...], tuple[Kind, tuple[str, ...]]] = {}
"""No entry ever goes: a compiled program names one for as long as it lives, and nothing says how long that is."""
_checked: dict[tuple[Pass, bool], CallOptions] = {}
"""Calls that were described, and whether for a GPU: what is wrong with one follows from this alone. Plain options."""


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
            return (*gradients, *(f"d{AUX}{i}" for i in self.trained))
        more = [name for name in ("lse", "max_logit") if getattr(self.options, f"return_{name}")]
        return ("out", *more)


@dataclass(frozen=True, slots=True)
class Pass:
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
        found = {name: (shape, dtype) for name, shape, dtype in self.operands if name.startswith(AUX)}
        return [found[f"{AUX}{i}"] for i in range(len(found))]

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


def name_form(form: tuple[Kind, tuple[str, ...]]) -> None:
    """Let programs name passes of this form, whatever their shapes."""
    _forms[tuple(_digest(form))] = form


def name_pass(bound: Pass) -> tuple[int, ...]:
    """The name by which a program may call a pass from here on."""
    key = bound.key
    _forms[key[:3]] = bound.form
    remember(_passes, key, bound)
    return key


def pass_of(key: tuple[int, ...], operands: Callable[[], list[tuple[tuple[int, ...], str]]]) -> Pass:
    """The pass that a program names; ``operands`` gives shapes and dtypes of what it passes."""
    bound = _passes.get(key)
    if bound is None:
        if key[:3] not in _forms:
            raise RuntimeError("this program was compiled in another process: trace nvrtc_attn.jax.attention here once")
        kind, names = _forms[key[:3]]
        found = operands()[: len(names)]
        bound = Pass(kind, tuple((name, *x) for name, x in zip(names, found, strict=True)))
        remember(_passes, key, bound)
    return bound


def bind(kind: Kind, operands: dict[str, Any]) -> Pass:
    """The pass of these arrays, or of tracers of them."""
    return Pass(kind, tuple((name, tuple(x.shape), x.dtype.name) for name, x in operands.items()))


def array_of(name: str, x: Any) -> Any:
    """The array of JAX that an argument of this name is."""
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


def with_modifier(kind: Kind, modifier: Modifier) -> tuple[Kind, dict[str, Any]]:
    """The kind of a call with a modifier, and the operands that its arrays are."""
    arrays = {f"{AUX}{i}": array_of(f"captured array {i}", x) for i, x in enumerate(modifier.captures)}
    program, types = modifier.program, tuple((x.dtype.name, x.ndim) for x in arrays.values())
    if program.captures != types:  # without its 64-bit types, JAX makes 32-bit arrays of NumPy's
        program = replace(program, captures=types)
    return replace(kind, program=program, numbers=modifier.numbers), arrays


def captured(kind: Kind) -> dict[int, str]:
    """The operands that are captured arrays with a gradient, by their place in the modifier."""
    return {i: f"{AUX}{i}" for i in differentiable(kind.program)}


@functools.lru_cache(maxsize=1024)
def differentiable(program: Program | None) -> tuple[int, ...]:
    """Places of the captured arrays that have a gradient."""
    return () if program is None else Modifier(program, (), ()).differentiable


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
        x = array_of(f"rng {name}", x)
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


# ---------------------------------------------------------------------------------------------- the call of a pass


def describe(bound: Pass, where: Device, stream: int = 0) -> Call:
    """The validated call, over memory that is known at run time only."""
    inputs = {name: (shape, dtype) for name, shape, dtype in bound.operands if name in INPUTS}
    if bound.kind.program is None:
        return describe_shapes(inputs, bound.kind.options, where, stream)
    captures = tuple(view_of(0, shape, dtype, where) for shape, dtype in bound.captures)
    modifier = Modifier(bound.kind.program, captures, bound.kind.numbers)
    trained = frozenset(bound.kind.trained)
    return describe_shapes(
        inputs, bound.kind.options, where, stream, modifier=modifier, trained=trained, keeps_arrays=True
    )


def view_of(address: int, shape: tuple[int, ...], dtype: str, where: Device) -> TensorView:
    """A dense tensor at this address, 0 where it is known at run time only."""
    return TensorView(address, shape, dense_layout(shape, dtype).strides, dtype, where)


def check_pass(bound: Pass) -> CallOptions:
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
    describe(bound, Device("cuda" if for_gpu else "abstract", 0))
    plain = plain_options(options)
    if are_plain(options):
        remember(_checked, (bound, for_gpu), plain)
    return plain


def check_call(operands: dict[str, Any], options: CallOptions, modifier: Modifier | None = None) -> None:
    """Refuse what no pass computes; ``operands`` are (shape, dtype) by name."""
    where = Device("cuda" if on_gpu() else "abstract", 0)
    describe_shapes(operands, options, where, modifier=modifier, keeps_arrays=True)


def on_gpu() -> bool:
    """Whether JAX computes on a GPU where nobody says otherwise."""
    default = jax.config.jax_default_device
    return (getattr(default, "platform", default) or jax.default_backend()) in ("gpu", "cuda")
