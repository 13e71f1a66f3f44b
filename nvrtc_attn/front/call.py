"""The arguments of one public call, viewed and validated: what `api` hands to a plan or to the CPU path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from ..base.dtypes import DTYPES
from ..base.errors import shown
from ..modifiers.graph import dtype_of
from ..modifiers.modifier import Modifier
from .modified import Modified, gradient_views, simplify
from .operands import INPUTS, OPERANDS, OPTIONAL_GRADIENTS, OPTIONAL_INPUTS
from .part import ARRAY_AXES, Part, check_part
from .philox import NO_RNG, RngState
from .problem import AttentionProblem, Causal, OperandLayout, WindowSize, dense_layout, layout
from .remembered import NO_PROGRAM, TracedProgram, new_problem, problem_of
from .rng import rng_state
from .tensors import Device, TensorView, current_stream, framework_of, may_overlap, stream_handle, view
from .validation import Violations, check_flag, check_integer, check_real, check_scale_and_softcap, check_window


class CallOptions(NamedTuple):
    """The arguments that are not tensors; meanings and defaults of `nvrtc_attn.attention`.

    Equal ones may differ in their types, and ``1`` is no ``causal``: what is looked up by them is `plain_options`.
    """

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
    """Whether the backward pass makes the gradient of the bias."""
    dsink: bool = False
    """And that of the sink."""
    part: Part | None = None
    """Where the call lies in a larger attention; None = it is the whole."""
    return_max_logit: bool = False

    def arguments(self) -> dict[str, Any]:
        """Those that the core functions of both passes take by name."""
        values = self._asdict()
        for name in _FLAGS:
            del values[name]
        return values


_FLAGS: Final = ("return_lse", "deterministic", *OPTIONAL_GRADIENTS, "return_max_logit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Views of the input tensors, the problem they make, and the streams.

    ``producer_stream`` is what other tensors of this call are ordered against (`tensors.view`), ``launch_stream`` the
    handle to launch on. ``hold_owners``: the inputs must be kept alive until the kernels are done.
    """

    tensors: Mapping[str, TensorView]
    """The inputs that were given, by name, in the order of the table of operands."""
    options: CallOptions
    problem: AttentionProblem
    producer_stream: int | None
    launch_stream: int
    hold_owners: bool
    modified: Modified | None = None
    """What the modifier of the call became."""
    starts: tuple[TensorView | None, ...] = ()
    """Of `part.ARRAY_AXES` where the part begins, of those that the kernels read on the device."""
    owners: tuple[object, ...] = field(repr=False, default=())

    @property
    def q(self) -> TensorView:
        return self.tensors["q"]

    @property
    def device(self) -> Device:
        return self.tensors["q"].device

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.problem.shape_of("out")

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.problem.shape_of("lse")

    @property
    def max_logit_shape(self) -> tuple[int, ...]:
        return self.problem.shape_of("max_logit")

    @property
    def start_addresses(self) -> tuple[int, ...]:
        """The addresses of `starts`, which a launch takes behind those of its operands; none without any."""
        return start_addresses(self.starts)

    def inputs(self) -> list[tuple[str, TensorView]]:
        """Every input that was given with its argument name."""
        return list(self.tensors.items())

    def input_view(self, x: object, name: str, called: str | None = None) -> TensorView:
        """A view of a further input of the backward pass, ``called`` so by the caller."""
        called = called or name
        result = view(x, called, stream=self.producer_stream)
        faults = self._faults(result, name, called, self.problem.dtypes_of(name)[:1])
        if faults:
            raise ValueError("; ".join(faults) + ". Pass what the forward pass returned, or its gradient.")
        return result

    def output_view(self, x: object, name: str, others: Mapping[str, TensorView]) -> TensorView:
        """A writable view of ``x`` of the right shape, dtype and device, apart from the inputs and ``others``."""
        result = view(x, name, stream=self.producer_stream, writable=True)
        faults = self._faults(result, name, name, self.problem.dtypes_of(name))
        if faults:
            raise ValueError("; ".join(faults) + ". Pass an array made for it.")
        self._check_apart(result, name, others)
        return result

    def _check_apart(self, result: TensorView, name: str, others: Mapping[str, TensorView]) -> None:
        """Whether an output shares memory with an input, an array that the modifier captured, or one of ``others``."""
        captured = {} if self.modified is None else self.modified.captured()
        placed = {f"part, {axis}": x for axis, x in zip(ARRAY_AXES, self.starts, strict=False) if x is not None}
        for known in (self.tensors, captured, placed, others):
            for other_name, other in known.items():
                if may_overlap(result, other):
                    raise ValueError(
                        f"{name}: shares memory with {other_name}. A kernel would read what it has already "
                        f"overwritten. Pass memory of its own."
                    )

    @property
    def modifier(self) -> Modifier | None:
        """What options and bias leave of the modifier."""
        return None if self.modified is None else self.modified.modifier

    @property
    def captures(self) -> tuple[TensorView, ...]:
        """The arrays that `modifier` captured, in its order."""
        return () if self.modified is None else self.modified.captures

    def capture_gradients(
        self, given: Sequence[object] | None, others: Mapping[str, TensorView]
    ) -> tuple[tuple[TensorView | None, ...], TensorView | None]:
        """Writable views of the gradients of `captures`, None where none is wanted, and of that of the bias.

        ``given`` has one for each array of the modifier as the caller knows it. They are apart from ``others``, too.
        """
        if given is None or self.modified is None:
            return (None,) * len(self.captures), None
        p = self.problem
        views = gradient_views(self.modified, given, self.tensors["q"].device, self.producer_stream)
        known = dict(others)
        for i, x in enumerate(views):
            if x is not None:
                self._check_apart(x, f"daux[{i}]", known)
                known[f"daux[{i}]"] = x
        return self.modified.gradients(views, (p.batch, p.num_heads, p.seqlen_q, p.seqlen_k))

    def _faults(self, x: TensorView, name: str, called: str, dtypes: Sequence[str]) -> list[str]:
        """Where an operand is not as the table has it."""
        shape = self.problem.shape_of(name)
        faults = []
        if x.shape != shape:
            faults.append(f"{called}: shape {x.shape}, needed is {shape}")
        if x.dtype not in dtypes:
            faults.append(f"{called}: dtype {x.dtype}, needed is {' or '.join(dtypes)}")
        if x.device != self.device:
            faults.append(f"{called}: on {x.device}, needed is {self.device}, where q is")
        dense = 0 in shape or x.strides == dense_layout(shape, x.dtype).strides
        if OPERANDS[name].dense and x.shape == shape and not dense:
            faults.append(f"{called}: strides {x.strides} of shape {shape} leave gaps, it must be row-major")
        return faults

    def workspace_address(self, x: object, needed_bytes: int) -> int:
        """Address of a caller's workspace, contiguous, of any dtype; 0 when none is needed."""
        if needed_bytes == 0:
            return 0
        if x is None:
            raise ValueError(
                f"workspace: None, but this call needs {needed_bytes} bytes on {self.device}. Pass a uint8 array of "
                f"the size that forward_workspace_bytes or backward_workspace_bytes reports."
            )
        result = view(x, "workspace", stream=self.producer_stream, writable=True)
        size = DTYPES[result.dtype].itemsize
        for n in result.shape:
            size *= n
        faults = []
        if result.strides != dense_layout(result.shape, result.dtype).strides:
            faults.append(f"workspace: strides {result.strides} of shape {result.shape} leave gaps, it must be dense")
        if size < needed_bytes:
            faults.append(f"workspace: {size} bytes, needed are {needed_bytes}")
        if result.device != self.device:
            faults.append(f"workspace: on {result.device}, needed is {self.device}")
        if result.ptr % 16:
            faults.append(f"workspace: address {result.ptr:#x} is not a multiple of 16 bytes")
        if faults:
            raise ValueError("; ".join(faults) + ".")
        return result.ptr

    def rng_state(self, rng: Any) -> RngState:
        """``rng`` as the kernels take it; not looked at without dropout."""
        return NO_RNG if self.options.dropout_p == 0 else rng_state(rng, self.device, self.producer_stream)

    def kernel_rng(self, rng: Any) -> RngState:
        """`rng_state` as a launch takes it: of a part of a larger attention, with the place of its first score."""
        return self.rng_state(rng).moved(self.dropout_base)

    @property
    def dropout_base(self) -> int:
        """Dropout index of the call's first score in the whole, beside the offset."""
        part, problem = self.options.part, self.problem
        if part is None or problem.dropout_p == 0:
            return 0
        return part.dropout_base((problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k))

    def with_outputs(self, **given: TensorView | OperandLayout) -> AttentionProblem:
        """The problem with layouts of operands that are no inputs, see `AttentionProblem.with_layouts`."""
        return self.problem.with_layouts(
            **{name: x if isinstance(x, OperandLayout) else layout(x) for name, x in given.items()}
        )

    def layouts_of(self, given: Mapping[str, object], *, backward: bool) -> dict[str, OperandLayout]:
        """Layouts of those operands of a pass, beside its inputs, that are not None."""
        views: dict[str, TensorView] = {}
        for name, x in given.items():
            if x is not None:
                written = OPERANDS[name].role(backward) == "out"
                views[name] = self.output_view(x, name, views) if written else self.input_view(x, name)
        return {name: layout(x) for name, x in views.items()}

    def with_dense(self, *more: str, **known: OperandLayout) -> AttentionProblem:
        """The problem with dense layouts of what the options ask for and of ``more``, but for those ``known``."""
        asked = ("lse",) * self.options.return_lse + ("max_logit",) * self.options.return_max_logit
        asked += tuple(name for name in OPTIONAL_GRADIENTS if getattr(self.options, name))
        names = dict.fromkeys((*asked, *more))
        return self.problem.with_layouts(**{name: self.problem.dense_layout_of(name) for name in names}, **known)


def start_addresses(starts: Sequence[TensorView | None]) -> tuple[int, ...]:
    """Of views of `part.ARRAY_AXES`, 0 for None; nothing where there is none at all."""
    return tuple(0 if x is None else x.ptr for x in starts) if any(starts) else ()


def describe(
    q: Any,
    k: Any,
    v: Any,
    *,
    options: CallOptions,
    stream: Any,
    modifier: Modifier | None = None,
    trained: frozenset[int] = frozenset(),
    **optional: Any,
) -> Call:
    """View the tensors, order them before the launch stream, and validate everything. No CUDA call but the ordering.

    ``optional`` are the other inputs of the table of operands by name, those that are not given None or left out.
    ``trained`` are the captured arrays of the modifier whose gradient is wanted.
    """
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

    tensors = {"q": first}
    for name, x in (("k", k), ("v", v)):
        tensors[name] = view(x, name, stream=producer_stream)
    for name in OPTIONAL_INPUTS:
        x = optional.get(name)
        if x is not None:
            tensors[name] = view(x, name, stream=producer_stream)
    starts: tuple[TensorView | None, ...] = ()
    if isinstance(options.part, Part) and options.part.has_arrays:
        part, starts = options.part.located(first.device, producer_stream)
        options = options._replace(part=part)
    modified = None
    if modifier is not None:
        modified = simplify(modifier, options, tensors, optional, producer_stream, trained, starts)
        options = modified.options
        if modified.bias is not None:
            tensors["bias"] = modified.bias
            options = options._replace(dbias=modified.bias_capture in trained)
    program: TracedProgram = NO_PROGRAM
    if modified is not None and modified.modifier is not None:
        program = modified.modifier.program, modified.trained(trained)
    return Call(
        tensors=tensors, options=options, problem=problem_of(tensors, options, program),
        producer_stream=producer_stream, launch_stream=launch_stream, hold_owners=hold_owners,
        modified=modified, starts=starts, owners=(q, k, v, *optional.values(), modifier),
    )  # fmt: skip


def describe_shapes(
    operands: Mapping[str, tuple[tuple[int, ...], str]],
    options: CallOptions,
    where: Device,
    stream: int = 0,
    *,
    modifier: Modifier | None = None,
    trained: frozenset[int] = frozenset(),
    keeps_arrays: bool = False,
) -> Call:
    """The validated call of row-major, aligned tensors whose memory is known later, or never: of shapes and dtypes.

    ``operands`` has q, k, v and any of the other inputs, by name. The arrays of a modifier are taken to be row-major,
    too, and with ``keeps_arrays`` stay its own: none becomes a bias.
    """
    tensors = {
        name: TensorView(0, shape, dense_layout(shape, dtype).strides, dtype, where)
        for name in INPUTS
        if name in operands
        for shape, dtype in (operands[name],)
    }
    modified, program = None, NO_PROGRAM
    starts: tuple[TensorView | None, ...] = ()
    if isinstance(options.part, Part) and options.part.has_arrays:
        starts = tuple(TensorView(0, (), (), "int32", where) if x else None for x in options.part.are_arrays()[2:])
        options = options._replace(part=options.part.bare())
    if modifier is not None:
        views = tuple(
            TensorView(0, tuple(x.shape), dense_layout(tuple(x.shape), dtype_of(x)).strides, dtype_of(x), where)
            for x in modifier.captures
        )
        given = {**tensors, "bias": ()} if keeps_arrays else tensors
        modified = simplify(modifier.with_captures(views), options, tensors, given, None, trained, starts)
        options = modified.options
        if modified.bias is not None:
            tensors["bias"] = modified.bias
            options = options._replace(dbias=modified.bias_capture in trained)
        if modified.modifier is not None:
            program = modified.modifier.program, modified.trained(trained)
    return Call(
        tensors=tensors, options=options, problem=new_problem(tensors, options, program), producer_stream=None,
        launch_stream=stream, hold_owners=False, modified=modified, starts=starts,
    )  # fmt: skip


def plain_options(options: CallOptions) -> CallOptions:
    """The options in Python's types, which compare and hash by value.

    What other libraries call a number, an integer or a flag is read.

    Raises
    ------
    TypeError, ValueError
        As `nvrtc_attn.attention`, for every option that is none.
    """
    found = Violations()
    check_window(found, options.causal, None)
    left, right = check_window(found, False, options.window_size)
    scale, cap = check_scale_and_softcap(found, options.softmax_scale, options.softcap, 1)
    dropout = check_real(found, "dropout_p", options.dropout_p, 0.0, 1.0, "in [0, 1]")
    longest_q = check_integer(found, "max_seqlen_q", options.max_seqlen_q)
    longest_k = check_integer(found, "max_seqlen_k", options.max_seqlen_k)
    flags = {name: check_flag(found, name, getattr(options, name)) for name in _FLAGS}
    part = check_part(found, options.part)
    found.stop()
    causal = options.causal
    return CallOptions(
        causal=str(causal) if isinstance(causal, str) else bool(causal),  # type: ignore[arg-type]
        window_size=(left, right),
        softmax_scale=None if options.softmax_scale is None else scale,
        softcap=cap,
        dropout_p=dropout or 0.0,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        **flags,
        part=part,
    )
