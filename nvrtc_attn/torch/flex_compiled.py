"""Functions of scores inside of torch.compile: how one becomes the text of an operator's call.

While Dynamo traces a program, the user's functions are called with objects of a class that Dynamo follows line by line:
they write down what is done to them, as text. Tensors that a function reads are operands of the operator, so that a
closure over other ones is another call of the same program; so are numbers. The text becomes a graph where the operator
runs, once for each text: `modifiers.text`.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from ..modifiers.draws import NO_RANDOM, draws
from ..modifiers.modifier import Modifier
from ..modifiers.proxy import METHODS, REPLAYED, SIZED, of_method
from ..modifiers.trace import numbers_of
from .symbolic_comparisons import compared_by_their_class
from .tensors import is_elsewhere


def _refused(message: str) -> tuple[str, list[torch.Tensor], list[int], list[float]]:
    """What `traced` returns of a traced modifier that no program can have."""
    return f'[[],[["score_mod",[["refused",["\'{message}"],{{}}]],null]]]', [], [], []


def _elsewhere(x: torch.Tensor, where: Any) -> str:
    return f"a captured tensor is on {x.device}, but q is on {where}. Move it there."


# An operator of our own: inductor may repeat a copy of torch's in the backward pass, when the array holds other values.
_LIBRARY: Final = torch.library.Library("nvrtc_attn", "FRAGMENT")
_LIBRARY.define("copied(Tensor x, Device where) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("copied", lambda x, where: x.to(where, copy=True), "CompositeExplicitAutograd")
torch.library.register_fake("nvrtc_attn::copied", lambda x, where: torch.empty_like(x, device=where), lib=_LIBRARY)
_copied: Any = torch.ops.nvrtc_attn.copied.default
"""An array of NumPy's, of whose writes torch sees none, copied once to where q is."""


class _Script:
    """What is written down of the functions of one call."""

    def __init__(self, where: Any) -> None:
        self.where = where
        """The device of q."""
        self.lines: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.copies: list[tuple[Any, torch.Tensor]] = []
        """Arrays of NumPy's, each with its copy."""
        self.ints: list[int] = []
        self.floats: list[float] = []

    def operand(self, x: Any) -> str:
        """An operand, in JSON: `modifiers.text` says what the letters mean."""
        if isinstance(x, ScriptValue):
            return f'"{x.word}"'
        if isinstance(x, torch.Tensor):
            if is_elsewhere(x, self.where):
                return self.refuse(_elsewhere(x, self.where)).word
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
        if x is Ellipsis:
            return '"..."'
        if isinstance(x, slice) and x.start is None and x.stop is None and x.step is None:
            return '":"'
        if isinstance(x, np.ndarray):
            for known, copy in self.copies:
                if known is x:
                    return self.operand(copy)
            self.copies.append((x, _copied(torch.from_numpy(x), self.where)))
            return self.operand(self.copies[-1][1])
        return self.refuse("a value takes part that is no number and no tensor.").word

    def refuse(self, message: str) -> ScriptValue:
        """A line that says what is not possible: raised where the text is read, as Dynamo raises nothing of its own."""
        return self.call("refused", (message,), {})

    def call(self, name: str, args: Any, kwargs: Any) -> ScriptValue:
        """One more line."""
        options = ",".join([f'"{key}":{self.operand(x)}' for key, x in kwargs.items()])
        self.lines.append(f'["{name}",[{",".join([self.operand(x) for x in args])}],{{{options}}}]')
        return ScriptValue(self, f"%{len(self.lines) - 1}")

    def element(self, array: Any, sizes: tuple[int, ...], index: Any) -> ScriptValue:
        """A line that indexes ``array``, whose dims without an index have ``sizes``."""
        given = index if isinstance(index, tuple) else (index,)
        left: list[int] = []
        axis = 0
        for x in given:
            if x is Ellipsis:
                skipped = len(sizes) - len(given) + 1
                left.extend(sizes[axis : axis + skipped])
                axis += skipped
            else:
                if isinstance(x, slice):
                    left.append(sizes[axis])
                axis += 1
        found = self.call("getitem", (array, index), {})
        found.sizes = (*left, *sizes[axis:])
        return found

    def of_function(self, function: Any, args: Any, kwargs: Any) -> ScriptValue:
        """A line for a function of torch's that has a `ScriptValue` among its arguments."""
        name = function.__name__
        if function is torch.Tensor.where:
            args, kwargs = of_method(name, args[0], args[1:], kwargs)
        if name not in ("__getitem__", "getitem"):
            return self.call(name, args, kwargs)
        # Dynamo of torch 2.15 passes the operands of `array[number]` in reverse where the array is NumPy's.
        # `number[array]` never comes here: `ScriptValue.__getitem__` takes it.
        array, index = args[::-1] if isinstance(args[0], ScriptValue) else args
        return self.element(array, array.shape, index)

    def function(self, name: str, function: Any, inputs: tuple[int, ...], more: tuple[Any, ...] = ()) -> str:
        """What a function does, and what it returns."""
        self.lines = []
        before = _modes_may_be_entered(True)
        with _Mode(self):
            result = function(*[ScriptValue(self, f"${i}") for i in inputs], *more)
        _modes_may_be_entered(before)
        if result is None:
            self.refuse("returned None. It returns what it computes: is there a return statement?")
        end = self.operand(result)
        return f'["{name}",[{",".join(self.lines)}],{end}]'


class ScriptValue:
    """A number that is known when the kernel runs, or a part of a captured tensor: `Proxy` and `Captured` as text."""

    def __init__(self, script: _Script, word: str) -> None:
        self.script, self.word = script, word
        self.sizes: tuple[int, ...] = ()
        """Of the dims of a captured tensor that are not indexed yet."""

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return _Method(self, name)
        if name == "device":
            return None
        if name == "shape" and self.sizes:
            return self.sizes
        if name == "dtype" and self.word[0] == "$":  # of other numbers the kind is known where the text is read
            return torch.float32 if self.word == "$0" else torch.int32
        return self.script.refuse(f"'{name}' is not possible in a modifier, which works on one score.")

    def __getitem__(self, index: Any) -> Any:
        return self.script.element(self, self.sizes, index)

    def __len__(self) -> int:
        if not self.sizes:
            self.script.refuse("len() of a number: a modifier works on one score.")
            return 0
        return self.sizes[0]

    def __iter__(self) -> Any:
        if not self.sizes:
            self.script.refuse("iteration over a number: a modifier works on one score.")
        return iter([self[i] for i in range(self.sizes[0])] if self.sizes else [])

    def __divmod__(self, other: Any) -> tuple[ScriptValue, ScriptValue]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[ScriptValue, ScriptValue]:
        return other // self, other % self

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

    def written_call(self, function: str, args: tuple[Any, ...]) -> ScriptValue:
        """Of a `cuda_function`, which is in hexadecimal digits."""
        return self.script.call(REPLAYED, (function, *args), {})

    def written_sizes(self, sizes: str) -> ScriptValue:
        """`recording.for_sizes`."""
        return self.script.call(SIZED, (self, sizes), {})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        script = _script_of((args, tuple((kwargs or {}).values())))
        assert script is not None
        return script.of_function(func, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Called behind a graph break: Dynamo follows no function of NumPy's."""
        return self.script.call(ufunc.__name__ if method == "__call__" else method, inputs, kwargs)


class _Method:
    def __init__(self, owner: ScriptValue, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.owner.script.call(self.name, *of_method(self.name, self.owner, args, kwargs))


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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _modes_may_be_entered(allowed: bool) -> bool:
    """In the body of an operator such as activation checkpointing's, where Dynamo lets none be. Returns what was so.

    `_Mode` is left again before the body ends, so that nothing outside of it changes.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # behind a graph break nothing is traced
        return True
    tracer = output.current_tracer
    before = getattr(tracer, "unsafe_allow_externally_visible_side_effects", True)
    if not output.is_root_tracer():
        tracer.unsafe_allow_externally_visible_side_effects = allowed
    return bool(before)


class _Mode(torch.overrides.TorchFunctionMode):
    """Sees the indexing of a tensor with what is no tensor."""

    def __init__(self, script: _Script) -> None:
        super().__init__()
        self.script = script

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _script_of((args, tuple(kwargs.values()))) is not None:
            return self.script.of_function(func, args, kwargs)
        if draws(func.__name__, kwargs):
            return self.script.refuse(f"'{func.__name__}' is not possible in a modifier: {NO_RANDOM}.")
        if func.__name__ in ("__getitem__", "getitem") and _names_element(args[0], args[1]):
            return self.script.call("getitem", args, {})
        return func(*args, **kwargs)


def _names_element(x: Any, index: Any) -> bool:
    """As `recording.names_element`: an element of plain indices is an operand, too."""
    whole = index if isinstance(index, tuple) else (index,)
    return len(whole) == x.dim() and all(isinstance(i, int) and not isinstance(i, bool) for i in whole)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _numbers_in(code: types.CodeType) -> str:
    """Numbers in the text of a function, comma separated: of what a function is, nothing of what it captured."""
    return ",".join([json.dumps(x) for x in numbers_of(code) if abs(x) < math.inf])


def _literals(function: Any) -> str:
    """Of a function alone: what it calls may be of many kinds here. They belong to the kernel's text, for its speed."""
    return _numbers_in(function.__code__) if isinstance(function, types.FunctionType) else ""


class NamedArrays:
    """The arrays of ``aux``, by name as items and as attributes."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def __getattr__(self, name: str) -> Any:
        return self.arrays[name]


def traced(
    score_mod: Any, mask_mod: Any, where: Any, mask_literals: str = "", aux: Mapping[str, Any] | None = None
) -> tuple[str, list[torch.Tensor], list[int], list[float]]:
    """The operands of the operators for functions, or for what `nvrtc_attn.trace` made of some.

    ``where`` is the device of q, to which arrays of NumPy's and numbers on the CPU are copied.
    """
    if score_mod is None and mask_mod is None:
        return "", [], [], []
    if isinstance(score_mod, Modifier):
        if not score_mod.text:
            return _refused("this modifier has no text for a compiled program. Make it by nvrtc_attn.trace.")
        numbers = score_mod.numbers
        ints, floats = [x for x in numbers if isinstance(x, int)], [x for x in numbers if isinstance(x, float)]
        arrays = [_copied(torch.from_numpy(x), where) if isinstance(x, np.ndarray) else x for x in score_mod.captures]
        for x, given in zip(arrays, score_mod.captures, strict=True):
            if x is given and is_elsewhere(x, where):
                return _refused(_elsewhere(x, where))
        return score_mod.text, [x if x.device == where else x.to(where) for x in arrays], ints, floats
    compared_by_their_class(ScriptValue)
    script = _Script(where)
    more = () if aux is None else (NamedArrays(aux),)
    functions = []
    literals = []
    if score_mod is not None:
        functions.append(script.function("score_mod", score_mod, (0, 1, 2, 3, 4), more))
        literals.append(_literals(score_mod))
    if mask_mod is not None:
        functions.append(script.function("mask_mod", mask_mod, (1, 2, 3, 4), more))
        literals.append(mask_literals or _literals(mask_mod))
    return (
        f"[[{','.join([x for x in literals if x])}],[{','.join(functions)}]]",
        [x if x.device == where else x.to(where) for x in script.tensors],
        script.ints,
        script.floats,
    )
