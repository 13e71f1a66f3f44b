"""Kernels of torch's own operators of aten, and ours in front of them: what is taken, what stays with torch, counts."""

from __future__ import annotations

import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import torch

from ..base.errors import NotReadyError, UnsupportedError
from ..base.forks import renew_in_child
from ..base.log import log_once
from ..front.operand_checks import MAX_HEAD_DIM

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)
_taken: Counter[str] = Counter()
_left: Counter[str] = Counter()
_MAX_REASONS: Final = 256
"""Reasons that are counted apart: a message may name a shape, and lengths may be others at every step."""


class NotTakenError(Exception):
    """A call that torch's own kernel must serve."""


class PassedOnError(Exception):
    """A call that is for torch's own kernel to pass on: none of ours, or one that was counted before."""


def why_not(query: Any, key: Any, value: Any, bias: Any) -> str | None:
    """What keeps a call from these kernels, before anything is looked at closely."""
    for x in (query, key, value, bias):
        if x is not None and (x.is_nested or x.layout != torch.strided):
            return "a nested or sparse tensor"
    if query.dtype not in _DTYPES:
        return f"dtype {query.dtype}"
    if not query.dtype == key.dtype == value.dtype:
        return "query, key and value of different dtypes"
    if query.is_cuda and max(query.shape[-1], value.shape[-1]) > MAX_HEAD_DIM:
        return f"a head dim above {MAX_HEAD_DIM}"
    if bias is not None and bias.dtype not in (query.dtype, torch.float32, torch.bool):
        return f"a mask of {bias.dtype} for {query.dtype}"
    return None


def counts() -> dict[str, dict[str, int]]:
    """How many calls were taken, by operator, and left to torch, by operator and reason."""
    with _lock:
        return {"taken": dict(_taken), "left_to_torch": dict(_left)}


def replace_kernels(functions: dict[tuple[str, str], Callable[..., Any]]) -> torch.library.Library:
    """Put functions in front of the kernels that torch has for operators of aten, by (name, dispatch key).

    A function raises `PassedOnError`, `NotTakenError`, an error about its arguments, or `NotReadyError` for what the
    kernel behind it is to serve: a first call while a CUDA graph is captured must not break a capture that torch's
    kernel would not.
    Destroying the library that is returned gives torch its kernels back.
    """
    # All of torch's before the first of ours: that of a composite operator depends on which keys have one.
    calls = {where: _taking(*where, function) for where, function in functions.items()}
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel of torch is replaced: it is what was asked for
        for (name, key), call in calls.items():
            library.impl(name, call, key, with_keyset=True)
    return library


def _taking(name: str, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in front of the kernel that torch has for ``name`` and ``key``."""
    try:
        original: Any = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        original = None  # torch was built without it

    def call(keyset: Any, *arguments: Any, **options: Any) -> Any:
        try:
            result = function(*arguments, **options)
        except PassedOnError:
            return original.call_boxed(keyset, *arguments, **options)
        except (NotTakenError, NotReadyError, UnsupportedError, TypeError, ValueError) as error:
            if original is None:
                raise
            reason = _counted(name, error)
            log_once(f"left to torch's own kernel: {reason}", logging.WARNING)
            return original.call_boxed(keyset, *arguments, **options)
        with _lock:
            _taken[name] += 1
        return result

    return call


def _counted(name: str, error: Exception) -> str:
    """Count a call of ``name`` that is left to torch; under which reason."""
    reason = f"{name}: {str(error).splitlines()[0]}"
    with _lock:
        if reason not in _left and len(_left) >= _MAX_REASONS:
            reason = f"{name}: other reasons"
        _left[reason] += 1
    return reason


def checked(function: Callable[..., Any], first: int, bias: int) -> Callable[..., Any]:
    """``function`` where `why_not` has nothing against query, key, value (from ``first`` on) and the bias."""

    def call(*arguments: Any, **options: Any) -> Any:
        query, key, value = arguments[first : first + 3]
        reason = why_not(query, key, value, arguments[bias])
        if reason is not None:
            raise NotTakenError(reason)
        return function(*arguments, **options)

    return call
