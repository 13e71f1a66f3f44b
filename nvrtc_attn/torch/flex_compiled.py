"""`flex_attention` inside of torch.compile: an operator each way, and how a function becomes one's text.

While Dynamo traces a program, the user's functions are called with objects of a class that Dynamo follows line by line:
they write down what is done to them, as text. Tensors that a function reads are operands of the operator, so that a
closure over other ones is another call of the same program; so are numbers. The text becomes a graph where the operator
runs, once for each text: `modifiers.text`.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from .. import api
from ..base.errors import UnsupportedError
from ..modifiers.modifier import Modifier
from ..modifiers.proxy import METHODS
from ..modifiers.text import read_text
from ..modifiers.trace import numbers_of
from .ops import no_second_derivative, setup_nothing

_ANY_SIZE: Final = 2**31 - 1
_NO_TEXT: Final = (
    '[[],[["score_mod",[["refused",["\'this modifier has no text for a compiled program. Make it by nvrtc_attn.trace."]'
    ",{}]],null]]]"
)

# ------------------------------------------------------------------------------------- what Dynamo traces: the script


class _Script:
    """What is written down of the functions of one call."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []

    def operand(self, x: Any) -> str:
        """An operand, in JSON: `modifiers.text` says what the letters mean."""
        if isinstance(x, ScriptValue):
            return f'"{x.word}"'
        if isinstance(x, torch.Tensor):
            for i, y in enumerate(self.tensors):
                if y is x:
                    return f'"@{i}"'
            self.tensors.append(x)
            return f'"@{len(self.tensors) - 1}"'
        if x is None:
            return "null"
        if isinstance(x, bool):
            return "true" if x else "false"
        if isinstance(x, int):
            self.ints.append(x)
            return f'"i{len(self.ints) - 1}"'
        if isinstance(x, float):
            self.floats.append(x)
            return f'"f{len(self.floats) - 1}"'
        if isinstance(x, (tuple, list)):
            return "[" + ",".join([self.operand(y) for y in x]) + "]"
        if isinstance(x, (str, torch.dtype)):
            return f'"\'{x}"'
        if isinstance(x, np.ndarray):
            return self.operand(torch.from_numpy(x))
        return self.refuse("a value takes part that is no number and no tensor.").word

    def refuse(self, message: str) -> ScriptValue:
        """A line that says what is not possible: raised where the text is read, as Dynamo raises nothing of its own."""
        return self.call("refused", (message,), {})

    def call(self, name: str, args: Any, kwargs: Any) -> ScriptValue:
        """One more line."""
        options = ",".join([f'"{key}":{self.operand(x)}' for key, x in kwargs.items()])
        self.lines.append(f'["{name}",[{",".join([self.operand(x) for x in args])}],{{{options}}}]')
        return ScriptValue(self, f"%{len(self.lines) - 1}")

    def function(self, name: str, function: Any, inputs: tuple[int, ...]) -> str:
        """What a function does, and what it returns."""
        self.lines = []
        with _Mode(self):
            result = function(*[ScriptValue(self, f"${i}") for i in inputs])
        if result is None:
            self.refuse("returned None. It returns what it computes: is there a return statement?")
        end = self.operand(result)
        return f'["{name}",[{",".join(self.lines)}],{end}]'


class ScriptValue:
    """A number that is known when the kernel runs, or a part of a captured tensor: `Proxy` and `Captured` as text."""

    def __init__(self, script: _Script, word: str) -> None:
        self.script, self.word = script, word

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return _Method(self, name)
        if name == "device":
            return None
        return self.script.refuse(f"'{name}' is not possible in a modifier, which works on one score.")

    def __getitem__(self, index: Any) -> Any:
        return self.script.call("getitem", (self, index), {})

    def __bool__(self) -> bool:
        self.script.refuse(
            "a branch on a value that is known only when the kernel runs (if, while, and, or, not, chained "
            "comparisons). Use where(condition, a, b), and &, |, ~ between conditions."
        )
        return True

    def __pos__(self) -> ScriptValue:
        return self

    __hash__ = object.__hash__

    def written_where(self, condition: Any, a: Any, b: Any) -> ScriptValue:
        """`nvrtc_attn.where`."""
        return self.script.call("where", (condition, a, b), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        script = _script_of((args, tuple((kwargs or {}).values())))
        assert script is not None
        return script.call(func.__name__, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Called behind a graph break: Dynamo follows no function of NumPy's."""
        return self.script.call(ufunc.__name__ if method == "__call__" else method, inputs, kwargs)


class _Method:
    def __init__(self, owner: ScriptValue, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.owner.script.call(self.name, (self.owner, *args), kwargs)


def _operator(name: str) -> Any:
    def method(self: ScriptValue, *others: Any) -> ScriptValue:
        return self.script.call(name, (self, *others), {})

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    setattr(ScriptValue, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(ScriptValue, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "abs", "invert"):
    setattr(ScriptValue, f"__{_name}__", _operator(f"__{_name}__"))


def _script_of(args: Any) -> _Script | None:
    for x in args:
        if isinstance(x, ScriptValue):
            return x.script
        if isinstance(x, (tuple, list)):
            found = _script_of(x)
            if found is not None:
                return found
    return None


class _Mode(torch.overrides.TorchFunctionMode):
    """Sees the indexing of a tensor with what is no tensor."""

    def __init__(self, script: _Script) -> None:
        super().__init__()
        self.script = script

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _script_of((args, tuple(kwargs.values()))) is not None:
            return self.script.call(func.__name__, args, kwargs)
        if func.__name__ in ("__getitem__", "getitem") and _names_element(args[0], args[1]):
            return self.script.call("getitem", args, {})
        return func(*args, **kwargs)


def _names_element(x: Any, index: Any) -> bool:
    """As `proxy.names_element`: an element of plain indices is an operand, too."""
    whole = index if isinstance(index, tuple) else (index,)
    return len(whole) == x.dim() and all(isinstance(i, int) and not isinstance(i, bool) for i in whole)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _numbers_in(code: types.CodeType) -> str:
    """Numbers in the text of a function, comma separated: of what a function is, nothing of what it captured."""
    return ",".join([json.dumps(x) for x in numbers_of(code) if abs(x) < math.inf])


def _literals(function: Any) -> str:
    """Of a function alone: what it calls may be of many kinds here. They belong to the kernel's text, for its speed."""
    return _numbers_in(function.__code__) if isinstance(function, types.FunctionType) else ""


def traced(
    score_mod: Any, mask_mod: Any, mask_literals: str = ""
) -> tuple[str, list[torch.Tensor], list[int], list[float]]:
    """The operands of the operators for functions, or for what `nvrtc_attn.trace` made of some."""
    if score_mod is None and mask_mod is None:
        return "", [], [], []
    if isinstance(score_mod, Modifier):
        if not score_mod.text:
            return _NO_TEXT, [], [], []
        numbers = score_mod.numbers
        ints, floats = [x for x in numbers if isinstance(x, int)], [x for x in numbers if isinstance(x, float)]
        arrays = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in score_mod.captures]
        return score_mod.text, arrays, ints, floats
    script = _Script()
    functions = []
    literals = []
    if score_mod is not None:
        functions.append(script.function("score_mod", score_mod, (0, 1, 2, 3, 4)))
        literals.append(_literals(score_mod))
    if mask_mod is not None:
        functions.append(script.function("mask_mod", mask_mod, (1, 2, 3, 4)))
        literals.append(mask_literals or _literals(mask_mod))
    return (
        f"[[{','.join([x for x in literals if x])}],[{','.join(functions)}]]",
        script.tensors,
        script.ints,
        script.floats,
    )


def attention(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, mask_literals: str, scale: float | None) -> Any:
    """(out, lse) by the operator, of q, k and v in ``[B, L, H, E]``: what torch.compile traces."""
    text, tensors, ints, floats = traced(score_mod, mask_mod, mask_literals)
    captures = [x if x.device == q.device else x.to(q.device) for x in tensors]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return modified_forward(q, k, v, captures, text, ints, floats, scale, deterministic)


def backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, modifier: Modifier | None, wanted: Sequence[bool], scale: float | None,
    deterministic: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:  # fmt: skip
    """The backward pass with a modifier, of detached tensors or where no graph is made: in programs and beside them.

    Parameters
    ----------
    dout, out : ``[B, L, H, Ev]``
    dlse, lse : float32 ``[B, H, L]``, dlse None where nothing depends on the lse
    q, k, v : ``[B, L, H, E]``
    modifier
        With its arrays.
    wanted
        Of each array, whether its gradient is asked for.

    Returns
    -------
    dq, dk, dv
        Contiguous, of the types of q, k and v.
    sums
        Of each array its gradient in float32; None of one that has none, or whose gradient nobody asks for.
    """
    arrays = () if modifier is None else modifier.captures
    trained = [i for i in (() if modifier is None else modifier.differentiable) if wanted[i]]
    sums = [
        torch.empty(x.shape, dtype=torch.float32, device=q.device) if i in trained else None
        for i, x in enumerate(arrays)
    ]
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = dout.contiguous()
    api.backward_allocating(
        dout.resolve_neg(), q, k, v, out, lse, *gradients, dlse=None if dlse is None else dlse.contiguous(),
        score_mod=modifier, daux=sums if trained else None, softmax_scale=scale, deterministic=deterministic,
    )  # fmt: skip
    return gradients, sums


def refuse_transformed(*_: Any) -> Any:
    raise UnsupportedError(
        "flex_attention: transformations of torch.func (grad, vjp, vmap, jvp, jacrev, hessian) and forward-mode "
        "derivatives are not computed. Use backward() or torch.autograd.grad, put the dim that vmap maps into the "
        "batch, or call nvrtc_attn.torch.attention, which takes no functions, but whose grad, vjp and vmap work."
    )


# ------------------------------------------------------------------------------------------------------ the operators

_SIGNATURE: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor[] captures, str program, SymInt[] ints, float[] floats, "
    "float? softmax_scale, bool deterministic"
)
_LIBRARY: Final = torch.library.Library("nvrtc_attn", "FRAGMENT")
_LIBRARY.define(f"modified_forward({_SIGNATURE}) -> (Tensor out, Tensor lse)", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    f"modified_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_SIGNATURE}, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
modified_forward: Any = torch.ops.nvrtc_attn.modified_forward.default
modified_backward: Any = torch.ops.nvrtc_attn.modified_backward.default


def _modifier(captures: Any, program: str, ints: Any, floats: Any) -> tuple[Modifier | None, tuple[int, ...]]:
    if not program:
        return None, ()
    facts = tuple([(x.shape, x.dtype) for x in captures])
    modifier, places = read_text(program, tuple(ints), tuple(floats), facts)
    return modifier.with_captures(tuple([captures[i] for i in places])), places


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_forward(
    q: Any, k: Any, v: Any, captures: Any, program: str, ints: Any, floats: Any, scale: Any, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        modifier, _ = _modifier(captures, program, ints, floats)
        out, lse = api.attention(q, k, v, score_mod=modifier, softmax_scale=scale, return_lse=True)
    return out, lse


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_backward(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, captures: Any, program: str, ints: Any,
    floats: Any, scale: Any, deterministic: bool, wanted: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of q, k, v, then of each captured tensor: empty ones of those that have none."""
    with torch.no_grad():
        modifier, places = _modifier(captures, program, ints, floats)
        wanted_of_modifier = [wanted[place] for place in places]
        gradients, sums = backward(dout, dlse, out, lse, q, k, v, modifier, wanted_of_modifier, scale, deterministic)
        of_captures = {place: x for place, x in zip(places, sums, strict=True) if x is not None}
        found = []
        for i, x in enumerate(captures):
            if i in of_captures:
                found.append(of_captures[i].to(x.dtype))
            else:  # no score depends on it, or nobody asks
                found.append(x.new_zeros(x.shape) if wanted[i] else x.new_empty(0))
    return [*gradients, *found]


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("modified_forward", _run_forward, _key)
    _LIBRARY.impl("modified_backward", _run_backward, _key)
# The key that comes before any other while a transformation is on.
_LIBRARY.impl("modified_forward", refuse_transformed, "FuncTorchDynamicLayerFrontMode")


def _forward_fake(
    q: Any, k: Any, v: Any, captures: Any, program: str, ints: Any, floats: Any, scale: Any, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Also refuses what a modifier cannot do, while the program is traced."""
    if program:
        # Symbols stand for any number here.
        numbers = [
            tuple([x if type(x) is kind else kind(2) for x in given]) for kind, given in ((int, ints), (float, floats))
        ]
        shapes = tuple([(tuple([n if type(n) is int else _ANY_SIZE for n in x.shape]), x.dtype) for x in captures])
        read_text(program, *numbers, shapes)
    batch, rows, heads, _ = q.shape
    return q.new_empty((batch, rows, heads, v.shape[3])), q.new_empty((batch, heads, rows), dtype=torch.float32)


def _backward_fake(
    dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, captures: Any, program: str, ints: Any,
    floats: Any, scale: Any, deterministic: bool, wanted: Any,
) -> list[torch.Tensor]:  # fmt: skip
    dense = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return dense + [
        torch.empty_like(x, memory_format=torch.contiguous_format) if wants else x.new_empty(0)
        for x, wants in zip(captures, wanted, strict=True)
    ]


torch.library.register_fake("nvrtc_attn::modified_forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("nvrtc_attn::modified_backward", _backward_fake, lib=_LIBRARY)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, captures, *ctx.rest = inputs
    ctx.save_for_backward(*output, q, k, v, *captures)
    ctx.set_materialize_grads(False)


def _derivative(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    out, lse, q, k, v, *captures = ctx.saved_tensors
    needed = list(ctx.needs_input_grad[3])
    none = [None] * len(captures)
    no_more = [x if x == [] else None for x in ctx.rest]  # torch takes an empty list for one of tensors
    if dout is None and dlse is None:
        return None, None, None, none, *no_more
    dout = torch.zeros_like(out) if dout is None else dout
    wanted = [bool(wants) and x.is_floating_point() for x, wants in zip(captures, needed, strict=True)]
    dq, dk, dv, *found = modified_backward(dout, dlse, out, lse, q, k, v, captures, *ctx.rest, wanted)
    of_captures = [x if wants else None for x, wants in zip(found, wanted, strict=True)]
    return dq, dk, dv, of_captures, *no_more


torch.library.register_autograd("nvrtc_attn::modified_forward", _derivative, setup_context=_setup_context, lib=_LIBRARY)
torch.library.register_autograd(
    "nvrtc_attn::modified_backward", no_second_derivative, setup_context=setup_nothing, lib=_LIBRARY
)
