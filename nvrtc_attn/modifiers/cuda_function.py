"""`nvrtc_attn.cuda_function`: functions in C++ as operations of a modifier."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from ..base.errors import TraceError, shown
from .calls import Text, derivative_of, know_on_host
from .proxy import called
from .recording import recording_of

_WORD: Final = r"[A-Za-z_]\w*"
_SIGNATURE: Final = re.compile(rf"\s*(float|int|bool)\s+({_WORD})\s*\(([^()]*)\)\s*")
_PARAMETER: Final = re.compile(rf"\s*(float|int|bool)\s+({_WORD})\s*")


class CudaFunction:
    """What `cuda_function` returns: callable in a ``score_mod`` or ``mask_mod``, or one itself."""

    __slots__ = ("__weakref__", "hex", "numpy_of", "text", "value")

    def __init__(
        self, text: Text, numpy: Callable[..., Any] | None, numpy_derivatives: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.text = text
        self.value = json.dumps(text)
        self.hex = self.value.encode().hex()
        self.numpy_of = {derivative_of(text, key): compute for key, compute in numpy_derivatives.items()}
        """What nodes compute on the CPU, of the function and its derivatives, by their values."""
        if numpy is not None:
            self.numpy_of[self.value] = numpy
        know_on_host(self, self.numpy_of)

    def __repr__(self) -> str:
        parameters = ", ".join(f"{kind} {name}" for kind, name in self.text.parameters)
        return f"<CUDA function {self.text.kind} {self.text.name}({parameters})>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaFunction) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __call__(self, *args: Any) -> Any:
        """Of numbers of a modifier another one; of plain numbers what ``numpy`` makes of them."""
        for x in args:
            write = getattr(type(x), "written_call", None)  # of a program that torch.compile traces
            if write is not None:
                return write(x, self.hex, args)
        recording = recording_of(args)
        if recording is not None:
            know_on_host(self, self.numpy_of)
            return called(recording, self.value, args)
        numpy = self.numpy_of.get(self.value)
        if numpy is None or not all(isinstance(x, bool | int | float | np.generic | np.ndarray) for x in args):
            kinds = ", ".join(type(x).__name__ for x in args)
            raise TraceError(
                f"{self.text.name!r} is called with {kinds}. It is an operation of a score_mod or mask_mod, beside "
                f"operators, indices and functions of NumPy and torch, not of jax.numpy; on numbers and NumPy arrays "
                f"it is what numpy= computes."
            )
        return numpy(*args)


def cuda_function(
    signature: str,
    body: str,
    *,
    derivatives: Mapping[str, str] | None = None,
    numpy: Callable[..., Any] | None = None,
    numpy_derivatives: Mapping[str, Callable[..., Any]] | None = None,
) -> CudaFunction:
    """A function in CUDA C++ as an operation of modifiers: what `score_mod` and `mask_mod` call, or one of them itself.

    Parameters
    ----------
    signature
        ``"float squash(float x, int i)"``: result and parameters are float, int (32 bits) or bool. A function of
        ``(float score, int b, int h, int q, int k)`` can be passed as ``score_mod``, a bool one of the last four as
        ``mask_mod``. Elements of captured arrays are arguments: ``squash(score, table[h, q - k])``.
    body
        What stands between the braces: statements that return the result of the parameters alone, each time the same.
        CUDA's functions are there (``fabsf``, ``__expf``); preprocessor lines are refused.
    derivatives
        Of float parameters the body that returns the derivative of the result with respect to it. A backward pass that
        needs one which is missing is refused; gradients of captured arrays follow by the chain rule.
    numpy, numpy_derivatives
        The same for the CPU: functions of arrays that broadcast. Without them calls on host memory are refused.

    Returns
    -------
    CudaFunction
        Equal to another one of the same text.

    Raises
    ------
    ValueError
        The signature or a body cannot be read, or a derivative is of no float parameter.

    A compile error names the function and the line of its body.
    """
    match = _SIGNATURE.fullmatch(signature)
    if match is None:
        raise ValueError(
            f"signature: got {shown(signature)}. It is like 'float name(float x, int i, bool c)', of these types."
        )
    result: Any = match.group(1)
    name, inside = match.group(2), match.group(3)
    parameters: list[tuple[Any, str]] = []
    for part in inside.split(",") if inside.strip() else ():
        found = _PARAMETER.fullmatch(part)
        if found is None:
            raise ValueError(f"signature: {part.strip()!r} is no parameter. One is like 'float x', an int or a bool.")
        parameters.append((found.group(1), found.group(2)))
    names = [x for _, x in parameters]
    if len({*names, name}) <= len(names):
        raise ValueError(f"signature: {signature.strip()!r} has a name twice.")
    floats = [x for kind, x in parameters if kind == "float" and result == "float"]
    for given, called_so in ((derivatives, "derivatives"), (numpy_derivatives, "numpy_derivatives")):
        for key in given or ():
            if key not in floats:
                raise ValueError(
                    f"{called_so}: got {key!r}, accepted are the float parameters of a float function: "
                    f"{', '.join(floats) or 'none'}."
                )
    own = derivatives or {}
    for key, text in (("body", body), *((f"derivatives[{x!r}]", y) for x, y in own.items())):
        _check(key, text)
    written = Text(name, result, tuple(parameters), body, tuple((x, own.get(x)) for x in floats))
    return CudaFunction(written, numpy, numpy_derivatives or {})


def _check(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise TypeError(f"{name}: got {shown(text)} of type {type(text).__name__}. It is C++ as a string.")
    if "#" in text or "??" in text or "%:" in text:  # and what else C++ reads as one
        raise ValueError(f"{name}: preprocessor lines are not possible: a kernel's key has to know all that it reads.")
    depth = 0
    for x in text:
        depth += (x == "{") - (x == "}")
        if depth < 0:
            break
    if depth:
        raise ValueError(f"{name}: braces do not match. It is what stands between the function's own.")
