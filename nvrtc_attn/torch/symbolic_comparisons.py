"""Operators of a `ScriptValue` that Dynamo does not ask the object for.

Dynamo takes an object that is no tensor for unequal to every integer that it made symbolic (a captured one that
changed, a size), without asking the object: ``j == w`` was False in a program, silently, and ``j < w`` an internal
error (torch 2.13). ``~x`` it traces of no object at all. No method of the class is ever called, so both are replaced
here, for objects of this one class alone.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Final

import torch

_REFLECTED: Final = {
    operator.lt: "gt", operator.le: "ge", operator.gt: "lt", operator.ge: "le", operator.eq: "eq", operator.ne: "ne",
}  # fmt: skip
"""Of each comparison, the one that has its operands in reverse."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def compared_by_their_class(kind: type) -> bool:
    """Have Dynamo call the methods of ``kind``; a program calls this while it is traced. True: from now on it does."""
    return _replaced(kind)


@functools.cache
def _replaced(kind: type) -> bool:
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    theirs = getattr(BuiltinVariable, "_comparison_with_symnode", None)
    if theirs is None:
        return False

    def comparison(self: Any, tx: Any, left: Any, right: Any) -> Any:
        for x, other, name in ((left, right, self.fn.__name__), (right, left, _REFLECTED.get(self.fn))):
            if name and isinstance(x, UserDefinedObjectVariable) and issubclass(x.python_type(), kind):
                return x.call_method(tx, f"__{name}__", [other], {})
        return theirs(self, tx, left, right)

    def call_invert(self: Any, tx: Any, x: Any) -> Any:
        if isinstance(x, UserDefinedObjectVariable) and issubclass(x.python_type(), kind):
            return x.call_method(tx, "__invert__", [], {})
        return None  # for Dynamo's other ways

    BuiltinVariable._comparison_with_symnode = comparison
    if not hasattr(BuiltinVariable, "call_invert"):
        BuiltinVariable.call_invert = call_invert
    # What was looked up before is looked up again.
    BuiltinVariable._binop_handlers.cache_clear()
    BuiltinVariable.call_function_handler_cache.clear()
    return True
