"""Calls of functions that the user wrote in C++, as nodes of a graph: what `nvrtc_attn.cuda_function` makes.

A node has op ``call``, and its value is all of the function as JSON: equal texts are one node, one program and one
kernel, in any process. What it computes on the CPU is no part of it, and found by that value.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..base.errors import UnsupportedError
from ..base.tables import remember
from .graph import Kind, Node, make, walk


class Text(NamedTuple):
    """A function as it is written."""

    name: str
    kind: Kind
    parameters: tuple[tuple[Kind, str], ...]
    body: str | None
    """None: the derivative that nobody wrote."""
    derivatives: tuple[tuple[str, str | None], ...] = ()
    """Of each float parameter the body of the derivative."""
    derivative_of: str = ""
    """The function that this is a derivative of."""

    @property
    def symbol(self) -> str:
        """What the function is called in a kernel: functions of one name are told apart."""
        return f"called_{hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]}::{self.name}"


_on_host: dict[str, Callable[..., Any]] = {}
"""What calls on the CPU compute, by the value of the node: of the functions that were written or traced last."""
_alive: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""The same of functions that somebody still has, however many came after them: objects with ``numpy_of``."""


def know_on_host(function: Any, values: Iterable[str]) -> None:
    """Remember what a function computes on the CPU, under the ``values`` of its nodes: itself and its derivatives."""
    for value in values:
        _alive[value] = function
        _on_host.pop(value, None)  # to be the newest
        remember(_on_host, value, function.numpy_of[value])


@functools.lru_cache(maxsize=1024)
def text_of(value: str) -> Text:
    """The function that a node calls."""
    name, kind, parameters, body, derived, of = json.loads(value)
    return Text(name, kind, tuple((x, y) for x, y in parameters), body, tuple((x, y) for x, y in derived), of)


def derivative_of(text: Text, parameter: str) -> str:
    """The value of the node of a derivative."""
    body = dict(text.derivatives).get(parameter)
    return json.dumps(Text(f"d_{text.name}_d_{parameter}", "float", text.parameters, body, (), text.name))


def derivative_rule(node: Node, d: Node) -> tuple[Node | None, ...]:
    """`derivative.RULES` of a call."""
    text = text_of(node.value)
    return tuple(
        make("mul", d, Node("call", node.args, "float", derivative_of(text, name))) if kind == "float" else None
        for kind, name in text.parameters
    )


def definitions(roots: Sequence[Node]) -> list[str]:
    """The C++ of every function that the nodes below ``roots`` call, each once."""
    lines = []
    for value in dict.fromkeys(x.value for x in walk(roots) if x.op == "call"):
        text = text_of(value)
        space, _, name = text.symbol.partition("::")
        parameters = ", ".join(f"{kind} {x}" for kind, x in text.parameters)
        # A backward pass that needs a derivative which nobody wrote is refused before this is asked.
        body = "return not_a_number();" if text.body is None else text.body
        lines += [
            f"namespace {space} {{",
            f"NVRTC_ATTN_DEVICE {text.kind} {name}({parameters}) {{",
            f'#line 1 "{name}"',
            *body.splitlines(),
            "}",
            f"}}  // namespace {space}",
        ]
    return lines


def on_host(value: str) -> Callable[..., Any]:
    """What a node computes on the CPU.

    Raises
    ------
    UnsupportedError
        Nobody said how.
    """
    found = _on_host.get(value)
    if found is None and (function := _alive.get(value)) is not None:
        found = remember(_on_host, value, function.numpy_of[value])
    if found is None:
        text = text_of(value)
        missing = "numpy_derivatives" if text.derivative_of else "numpy"
        raise UnsupportedError(
            f"{text.name!r} is written in CUDA C++, and a call on host memory computes in NumPy: pass {missing}= to "
            f"nvrtc_attn.cuda_function as well, or tensors on a GPU."
        )
    return found
