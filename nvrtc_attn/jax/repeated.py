"""`nvrtc_attn.attention` of JAX arrays on a GPU that is called again and again, as a compiled program of JAX's.

A call by itself describes its arrays through DLPack, allocates, records an event, and has JAX compute something that
says when the memory is free: 0.75 ms. A program has XLA's memory and stream, and takes 0.04 ms; XLA compiles it in the
time of some fifty calls. So that many are made first: after them a program costs at most twice what is best.

Concurrency: the table changes by single operations that the interpreter lock makes atomic, or by `tables.remember`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Hashable
from typing import Any, Final

import jax

from ..base import env
from ..base.errors import CompileError
from ..base.log import log_once
from ..base.tables import remember
from ..front.call import CallOptions
from ..front.operands import INPUTS
from ..front.signature import are_plain
from .custom_call import attention
from .passes import on_gpu

FIRST: Final = 64
"""Calls of one kind before there is a program of it."""
_Program = Callable[..., Any]
_STARTS, _USED = INPUTS.index("cu_seqlens_q"), INPUTS.index("seqused_k")
# A kind of call -> how often it came, or its program; None where there is none to be had.
_programs: dict[Hashable, int | _Program | None] = {}


def attend(inputs: tuple[Any, ...], options: CallOptions) -> Any:
    """The result of a call of many; None of others. ``inputs`` are those of `INPUTS`, q of JAX's array type."""
    if options.dropout_p != 0 or not are_plain(options):
        return None
    if (inputs[_STARTS] is not None or inputs[_USED] is not None) and env.debug():
        return None  # lengths are checked then, which no program does
    q = inputs[0]
    given = []
    try:
        cls, devices = q.__class__, q.devices()
        facts: list[Any] = [options, env.raw_backend(), jax.config.jax_default_device, *devices]
        for x in inputs:
            if x is None:
                facts.append(None)
            elif x.__class__ is cls and x.devices() == devices:
                given.append(x)
                aval = x.aval
                facts += aval.shape, aval.dtype
            else:
                return None
    except RuntimeError:
        return None  # deleted: for the description to say
    key = tuple(facts)
    program = _programs.get(key, 0)
    if isinstance(program, int):
        _count(key, program, inputs, options)
        return None
    if program is None:
        return None
    # Also where a function is traced: the arrays are there, and so is the result.
    with jax.ensure_compile_time_eval():
        return program(*given)


def _count(key: Hashable, calls: int, inputs: tuple[Any, ...], options: CallOptions) -> None:
    """One call more, and a program instead of the last one that is counted."""
    if calls + 1 < FIRST:
        remember(_programs, key, calls + 1)
        return
    if not _has_bridge():
        remember(_programs, key, 0)  # it may come later
        return
    try:
        program = _compiled(inputs, options)
    except (CompileError, ImportError) as error:
        log_once(f"JAX arrays: calls are not compiled into programs ({error})", logging.INFO)
        program = None
    remember(_programs, key, program)


def _has_bridge() -> bool:
    """Whether jax-tvm-ffi can be had without importing torch, which it does where that is installed."""
    if "jax_tvm_ffi" in sys.modules:
        return True
    found = importlib.util.find_spec
    return found("jax_tvm_ffi") is not None and ("torch" in sys.modules or found("torch") is None)


def _compiled(inputs: tuple[Any, ...], options: CallOptions) -> _Program | None:
    given = {name: x for name, x in zip(INPUTS, inputs, strict=True) if x is not None}
    devices = inputs[0].devices()
    if len(devices) > 1 or not on_gpu():
        return None
    flags = {name: getattr(options, name) for name in ("return_lse", "return_max_logit", "deterministic")}
    keywords = {name: x for name, x in options.arguments().items() if name != "part"} | flags
    names = tuple(given)

    def nvrtc_attn_attention(*arrays: Any) -> Any:
        return attention(**dict(zip(names, arrays, strict=True)), **keywords)

    # On the arrays' device, whichever is JAX's default: results are committed to it, as those of DLPack are.
    where = jax.sharding.SingleDeviceSharding(*devices)
    program: _Program = jax.jit(nvrtc_attn_attention, in_shardings=where, out_shardings=where)
    with jax.ensure_compile_time_eval():
        program(*given.values())
    return program
