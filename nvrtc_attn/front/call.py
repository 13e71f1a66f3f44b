"""The arguments of one public call, viewed and validated: what `api` hands to a plan or to the CPU path."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ..base.errors import shown
from . import philox
from .problem import AttentionProblem, Causal, OperandLayout, WindowSize, build_problem, dense_layout, layout
from .tensors import Device, TensorView, as_numpy, current_stream, framework_of, stream_handle, view
from .validation import Violations, check_integer, check_real, check_scale_and_softcap, check_window


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The arguments that are not tensors; meanings and defaults of `nvrtc_attn.attention`."""

    causal: Causal = False
    window_size: WindowSize = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_lse: bool = False
    deterministic: bool = False
    dbias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Views of the input tensors, the problem they make, and the streams.

    ``producer_stream`` is what other tensors of this call are ordered against (`tensors.view`), ``launch_stream`` the
    handle to launch on. ``hold_owners``: the inputs must be kept alive until the kernels are done.
    """

    q: TensorView
    k: TensorView
    v: TensorView
    bias: TensorView | None
    mask: TensorView | None
    cu_seqlens_q: TensorView | None
    cu_seqlens_k: TensorView | None
    seqused_k: TensorView | None
    options: CallOptions
    problem: AttentionProblem
    producer_stream: int | None
    launch_stream: int
    hold_owners: bool
    owners: tuple[object, ...] = field(repr=False, default=())

    @property
    def device(self) -> Device:
        return self.q.device

    @property
    def on_cpu(self) -> bool:
        return self.q.device.type == "cpu"

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        b, m, h, _ = self.q.shape
        return b, m, h, self.v.shape[3]

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        b, m, h, _ = self.q.shape
        return b, h, m

    def inputs(self) -> list[tuple[str, TensorView | None]]:
        """Every input with its argument name."""
        names = ("q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        return [(name, getattr(self, name)) for name in names]

    def input_view(self, x: object, name: str, shape: Sequence[int], dtype: str) -> TensorView:
        """A view of a further input of the backward pass."""
        result = view(x, name, stream=self.producer_stream)
        faults = []
        if result.shape != tuple(shape):
            faults.append(f"{name}: shape {result.shape}, needed is {tuple(shape)}")
        if result.dtype != dtype:
            faults.append(f"{name}: dtype {result.dtype}, needed is {dtype}")
        if result.device != self.device:
            faults.append(f"{name}: on {result.device}, needed is {self.device}, where q is")
        if faults:
            raise ValueError("; ".join(faults) + ". Pass what the forward pass returned, or its gradient.")
        return result

    def with_outputs(self, **views: TensorView | None) -> AttentionProblem:
        """The problem with the layouts of out, dout, dq, dk, dv; dense where none is given."""
        shapes = (self.out_shape, self.out_shape, self.q.shape, self.k.shape, self.v.shape)
        given = (views.get(name) for name in ("out", "dout", "dq", "dk", "dv"))
        layouts = (None if x is None else layout(x) for x in given)
        return _with_outputs(self.problem, shapes, *layouts)


@functools.lru_cache(maxsize=4096)
def _with_outputs(
    problem: AttentionProblem, shapes: tuple[tuple[int, ...], ...], *given: OperandLayout | None
) -> AttentionProblem:
    names = ("out", "dout", "dq", "dk", "dv")
    layouts: dict[str, Any] = {
        name: dense_layout(shape, problem.dtype) if x is None else x
        for name, shape, x in zip(names, shapes, given, strict=True)
    }
    return replace(problem, **layouts)


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any,
    mask: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    options: CallOptions,
    stream: Any,
) -> Call:
    """View the tensors, order them before the launch stream, and validate everything. No CUDA call but the ordering."""
    framework = framework_of(q)
    handle = None if stream is None else stream_handle(stream)
    if handle is not None and handle < 0:
        raise ValueError(f"stream: got {handle}. A kernel needs a stream to run on: pass its handle, at least 0.")
    # torch and CuPy have a current stream of the tensor's device; others are ordered by their DLPack export, made once.
    streams_of_its_own = framework in ("torch", "cupy")
    first = view(q, "q", stream=None if streams_of_its_own else handle)
    on_gpu = first.device.type == "cuda"
    own = current_stream(framework, first.device.index) if on_gpu else 0
    producer_stream = None
    launch_stream = 0
    hold_owners = False
    if on_gpu:
        launch_stream = own if handle is None else handle
        producer_stream = launch_stream
        # torch's and CuPy's allocators reuse memory in the order of their current stream: nothing to hold there.
        hold_owners = not streams_of_its_own or (launch_stream or 1) != (own or 1)
        if streams_of_its_own and launch_stream != own:
            first = view(q, "q", stream=launch_stream)
    elif stream is not None:
        raise ValueError(f"stream: got {shown(stream)}, but q is on the CPU. Streams belong to GPUs: pass stream=None.")

    def optional(x: Any, name: str) -> TensorView | None:
        return None if x is None else view(x, name, stream=producer_stream)

    tensors: dict[str, Any] = {
        "bias": optional(bias, "bias"),
        "mask": optional(mask, "mask"),
        "cu_seqlens_q": optional(cu_seqlens_q, "cu_seqlens_q"),
        "cu_seqlens_k": optional(cu_seqlens_k, "cu_seqlens_k"),
        "seqused_k": optional(seqused_k, "seqused_k"),
    }
    views = [first, *(view(x, name, stream=producer_stream) for x, name in ((k, "k"), (v, "v")))]
    problem = _problem(views, tensors, options)
    return Call(
        q=views[0], k=views[1], v=views[2], **tensors, options=options, problem=problem,
        producer_stream=producer_stream, launch_stream=launch_stream, hold_owners=hold_owners,
        owners=(q, k, v, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k),
    )  # fmt: skip


def describe_shapes(
    operands: Mapping[str, tuple[tuple[int, ...], str]], options: CallOptions, where: Device, stream: int = 0
) -> Call:
    """The validated call of row-major, aligned tensors whose memory is known later, or never: of shapes and dtypes.

    ``operands`` has q, k, v and any of the other inputs, by name.
    """
    views: dict[str, Any] = {
        name: TensorView(0, shape, dense_layout(shape, dtype).strides, dtype, where)
        for name, (shape, dtype) in operands.items()
    }
    q, k, v = (views.pop(name) for name in "qkv")
    arguments: dict[str, Any] = dict(zip(CallOptions.__dataclass_fields__, _option_values(options), strict=True))
    problem = build_problem(q, k, v, **views, **arguments)
    others: dict[str, Any] = dict.fromkeys(("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")) | views
    return Call(
        q=q, k=k, v=v, **others, options=options, problem=problem,
        producer_stream=None, launch_stream=stream, hold_owners=False,
    )  # fmt: skip


_MAX_PROBLEMS: Final = 4096
_problems: dict[Hashable, AttentionProblem] = {}
_problems_lock = threading.Lock()
_option_values = operator.attrgetter(*CallOptions.__dataclass_fields__)


def _problem(views: list[TensorView], tensors: dict[str, Any], options: CallOptions) -> AttentionProblem:
    """`build_problem` of a call, remembered by what it looks at: validation takes as long as all else of a call."""
    key = _problem_key([*views, *tensors.values()], options)
    problem = None if key is None else _problems.get(key)
    if problem is None:
        # The options have the names of its arguments.
        arguments: dict[str, Any] = dict(zip(CallOptions.__dataclass_fields__, _option_values(options), strict=True))
        problem = build_problem(views[0], views[1], views[2], **tensors, **arguments)
        if key is not None:
            with _problems_lock:
                while len(_problems) >= _MAX_PROBLEMS:
                    del _problems[next(iter(_problems))]
                _problems[key] = problem
    return problem


def _problem_key(tensors: list[TensorView | None], options: CallOptions) -> Hashable:
    """None where the outcome depends on more: on lengths in host memory, or on options that are not told by a hash.

    Types of options are part of it, because 1 equals True and 1.0 and is accepted for neither.
    """
    values = _option_values(options)
    window = options.window_size
    kinds = tuple(map(type, values)), tuple(map(type, window)) if isinstance(window, tuple) else ()
    if not hash_tells(*kinds):
        return None
    facts: list[Hashable] = []
    for index, x in enumerate(tensors):
        if x is None:
            facts.append(None)
            continue
        if index > 4 and x.device.type == "cpu":  # cu_seqlens_q, cu_seqlens_k, seqused_k
            return None
        facts.append((x.shape, x.strides, x.dtype, x.device, x.ptr & 15))
    return (*facts, values, kinds)


def plain_options(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of `CallOptions` up to ``max_seqlen_k`` in Python's types, which compare and hash by value.

    What other libraries call a number, an integer or a flag is read.

    Raises
    ------
    TypeError, ValueError
        As `nvrtc_attn.attention`, for every option that is none.
    """
    causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k = options
    found = Violations()
    check_window(found, causal, None)
    left, right = check_window(found, False, window_size)
    scale, cap = check_scale_and_softcap(found, softmax_scale, softcap, 1)
    dropout = check_real(found, "dropout_p", dropout_p, 0.0, 1.0, "in [0, 1]")
    longest_q = check_integer(found, "max_seqlen_q", max_seqlen_q)
    longest_k = check_integer(found, "max_seqlen_k", max_seqlen_k)
    found.stop()
    causal = str(causal) if isinstance(causal, str) else bool(causal)
    return causal, (left, right), None if softmax_scale is None else scale, cap, dropout, longest_q, longest_k


def plain_flags(**flags: Any) -> list[bool]:
    """The flags as ``bool``; a TypeError names one that is none."""
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name}: got {shown(flag)} of type {type(flag).__name__}. It is True or False.")
    return [bool(flag) for flag in flags.values()]


@functools.lru_cache(maxsize=1024)
def hash_tells(options: tuple[type, ...], bounds: tuple[type, ...]) -> bool:
    """Whether values of these types, and of a window's bounds, can be hashed and are equal only if they mean the same.

    A list cannot, and a tensor is hashed by its identity: a table would grow by an entry a call.
    """
    scalars = (bool, int, float, str, type(None), np.bool_, np.number)
    return all(kind is tuple or issubclass(kind, scalars) for kind in options) and all(
        issubclass(kind, scalars) for kind in bounds
    )


def rng_state(rng: Any, where: Device, producer_stream: int | None) -> tuple[tuple[int, int, int, int], list[Any]]:
    """``rng`` as (seed address, offset address, seed, offset), and what must stay alive for the addresses.

    Values on the CPU are read now, values on the GPU ``where`` by the kernel. Signed 64-bit holders are read as
    unsigned. One value instead of a pair is the seed, of offset 0.

    Raises
    ------
    TypeError, ValueError
        Anything but None, an int, a tensor that holds one int64 on the CPU or on ``where``, or a pair of these.
    """
    if rng is None:
        rng = philox.normalise_rng(None)
    elif not isinstance(rng, (tuple, list)) or len(rng) != 2:
        numbers: Any = rng if isinstance(rng, (int, np.integer, tuple, list)) else None
        rng = (rng, 0) if numbers is None else philox.normalise_rng(numbers)
    words, addresses, owners = [0, 0], [0, 0], []
    for index, (x, name) in enumerate(zip(rng, ("rng seed", "rng offset"), strict=True)):
        if isinstance(x, (int, np.integer)):
            pair: Any = (x, 0) if index == 0 else (0, x)
            words[index] = philox.normalise_rng(pair)[index]
            continue
        word = view(x, name, stream=producer_stream)
        if word.dtype not in ("int64", "uint64") or any(n != 1 for n in word.shape):
            raise ValueError(
                f"{name}: got {word.dtype} of shape {word.shape}. A tensor must hold one int64: pass that, or an int."
            )
        if word.device.type == "cpu":
            words[index] = int(as_numpy(word).reshape(())) & (2**64 - 1)
        elif word.device == where:
            addresses[index] = word.ptr
            owners.append(word)
        else:
            raise ValueError(f"{name}: on {word.device}, but q is on {where}. Pass it on {where}, or as an int.")
    return (addresses[0], addresses[1], words[0], words[1]), owners
