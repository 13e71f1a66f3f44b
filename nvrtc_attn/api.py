"""The public functions: arguments -> problem -> plan -> launch. No policy.

All of them take tensors of any framework (PyTorch, JAX, CuPy, NumPy; where outputs are passed, anything with DLPack) in
the layout ``[batch, seqlen, heads, head_dim]`` with any strides. CPU memory is computed on the CPU (`nvrtc_attn.cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .base import env
from .front import philox, tensors
from .front.call import Call, CallOptions, describe
from .front.operands import (
    BACKWARD,
    INPUTS,
    OPTIONAL_GRADIENTS,
    OPTIONAL_INPUTS,
    FurtherInputs,
    check_further,
    takes_further_inputs,
    unexpected,
)
from .front.part import Part
from .front.problem import Causal, WindowSize
from .front.signature import Signature, sign
from .front.tensors import framework_of
from .front.validation import Violations, check_real, check_shape
from .modifiers.modifier import Modifier
from .modifiers.remembered import look
from .plans import repeats, run
from .plans.plan import backward_plan, forward_plan
from .plans.run import plan_backward as plan_backward
from .plans.run import plan_forward as plan_forward
from .runtime import arrays, driver

if TYPE_CHECKING:
    from typing_extensions import Unpack

tensors.connect_driver(driver.device_of)
_import_jax: Callable[[], Any] | None = None
# JAX's type of arrays -> what may have a program for a call of them, once there was a call on a GPU.
_programs_of: dict[type, Callable[[tuple[Any, ...], CallOptions], Any]] = {}


def connect_jax(load: Callable[[], Any]) -> None:
    """Let repeated calls on JAX arrays be programs of the JAX adapter, which lies above: `jax.repeated.attend`."""
    global _import_jax
    _import_jax = load


@takes_further_inputs
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Mapping[str, Any] | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: bool = False,
    part: Part | None = None,
    out: Any = None,
    stream: Any = None,
    **further: Unpack[FurtherInputs],
) -> Any:
    """Scaled dot-product attention, ``out = dropout(softmax(S)) v``, in memory linear in the sequence length.

    ``S[i, j] = softcap(softmax_scale * q_i . k_j) + bias[i, j]`` with ``softcap(s) = c tanh(s / c)``, and -inf where a
    mask drops the key. ``score_mod`` takes the place of the softcap. With a sink,
    ``softmax(S)[i, j] = exp(S[i, j]) / (sum_j exp(S[i, j]) + exp(sink[h]))``. Not differentiable by itself:
    `nvrtc_attn.torch.attention` and `nvrtc_attn.jax.attention` are.

    Parameters
    ----------
    q : ``[B, Mq, H, K]``
    k : ``[B, Mk, Hkv, K]``
    v : ``[B, Mk, Hkv, Kv]``
        float16, bfloat16 or float32, any strides (0 and negative ones included). Hkv divides H: query head h reads key
        head ``h // (H / Hkv)``.
    bias : ``[1|B, 1|H, 1|Mq, 1|Mk]``, optional
        dtype of q, or float32. Added to the scaled scores in float32.
    mask : ``[1|B, 1|H, 1|Mq, 1|Mk]``, optional
        bool or uint8, non-zero keeps the key. Read as bytes, never expanded.
    causal
        ``True`` or ``"bottom_right"`` keeps ``j <= i + Mk - Mq``; ``"top_left"`` keeps ``j <= i``.
    window_size
        (left, right): keeps ``i + off - left <= j <= i + off + right`` with the same alignment; None or -1 = no bound.
    softmax_scale
        Default ``1 / sqrt(K)``. Any finite number (at most 2.36e38 in magnitude); what rounds to 0 in float32 is 0.
    softcap
        c, 0 = none. At least 1.18e-38, and so large that ``softmax_scale / c`` is finite in float32.
    dropout_p
        Probability of dropping an element of P, in [0, 1]. Kept ones are multiplied by ``1 / (1 - p)``.
    rng
        None (a fresh seed), a seed, or (seed, offset); ints in [0, 2**64), or int64 tensors with one element on q's
        device, which a CUDA graph reads anew at every replay. The keep mask is `dropout_keep_mask`. Not looked at
        without dropout.
    cu_seqlens_q, cu_seqlens_k : int32 ``[nb + 1]``, optional
        Sequences packed on the token dim of q and of k, v (then B = 1): sequence b is rows ``cu[b]`` to ``cu[b + 1]``.
    max_seqlen_q, max_seqlen_k
        Longest sequence; needed with cu_seqlens. A tensor with one integer is read, which waits for a GPU it is on.
    seqused_k : int32 ``[nb]`` or ``[B]``, optional
        Keys of each sequence, or of each batch entry, that take part: the first so many. Alignment to the bottom right
        is to the last of them.
    score_mod
        ``score_mod(score, b, h, q, k)`` gives what takes the place of ``score = softmax_scale * q . k``, before the
        bias: operators and functions of Python, NumPy or torch, and elements of captured arrays. b is the sequence of
        packed tensors, q and k are positions in it. Or what `nvrtc_attn.trace` made of it.
    mask_mod
        ``mask_mod(b, h, q, k)`` says whether the key is kept.
    aux
        Arrays by name that both functions take as one more argument: ``aux["slopes"][h]``. Of any shape and strides,
        on q's device: bool, uint8, int8, int16, int32, int64, or floats of 16 to 64 bits.
    return_lse
        Return (out, lse); lse is float32 ``[B, H, Mq]`` (packed: ``[1, H, total_q]``), the natural log of the sum of
        ``exp(S)`` and of ``exp(sink)``; -inf for a row with no valid key, or the sink.
    return_max_logit
        Return max_logit behind these: float32 ``[B, H]`` (packed: ``[nb, H]``), the largest ``S[i, j]`` of each head of
        a batch entry or sequence, exactly, as QK-clip (Kimi K2) needs it. Scale, softcap or score_mod and bias are in
        it, sink and dropout are not; of a part it is that of the part. -inf where masks leave nothing, NaN where a
        score that a row sees is NaN. It has no gradient, and no meaning for `attention_backward`.
    deterministic
        Only matters to the backward pass. The forward pass is always bitwise reproducible.
    part : nvrtc_attn.Part, optional
        Where this call lies in a larger attention, whose causal alignment, windows and dropout mask it then has.
    out : ``[B, Mq, H, Kv]``, optional
        Written and returned. Must not overlap an input. Not possible for JAX arrays, which are immutable.
    sink : ``[H]``, optional
        float32, or dtype of q. One more logit in every row of a query head (gpt-oss; StreamingLLM, Xiao et al., 2023),
        which takes probability and has no value. Scale, softcap, bias, masks and dropout do not touch it. -inf is none.
    stream
        CUDA stream to run on: an object of torch or CuPy, anything with ``__cuda_stream__``, or a handle. Default: the
        current stream of q's framework; the legacy default stream for JAX and other DLPack producers. JAX arrays of a
        kind of call that was made 64 times run on XLA's own, where jax-tvm-ffi is installed: as a program of JAX's,
        which takes the host a tenth of the time.

    Returns
    -------
    out, or (out, lse), (out, max_logit), (out, lse, max_logit)
        In q's framework, which is PyTorch, JAX, CuPy or NumPy: arrays of others come with ``out``, or go to
        `attention_forward`. Rows with no valid key are 0. The call is asynchronous on ``stream``.

    Raises
    ------
    TypeError, ValueError
        Before any launch; the message names the argument, what was given and what is accepted.
    UnsupportedError
        A valid request that no kernel serves, with every reason. It is a ValueError, too.
    TraceError
        ``score_mod`` or ``mask_mod`` does what cannot be traced. An UnsupportedError that names the operation.
    CompileError, CudaError
        On a GPU: NVRTC, its headers or the driver are missing, refused a kernel, or may not compile one now
        (``NVRTC_ATTN_NO_COMPILE``, CUDA-graph capture). `python -m nvrtc_attn doctor` names what is missing.

    Notes
    -----
    The algorithm is FlashAttention-2's (T. Dao, 2023) on the interface of PyTorch's memory-efficient attention.

    Where the exact result is finite, out is, for every score and ``q . k`` that float32 can hold. A NaN in a score that
    a row sees makes its out and lse NaN. k and v of keys beyond ``seqused_k``, outside every sequence, or hidden by a
    mask of one row for all queries contribute nothing, whatever they hold, and k of any hidden key nothing to out and
    lse. A NaN or infinity in v of a key that causal, window_size or another mask hides may reach rows that do not see
    it.

    With a sink a row whose keys are all hidden has an lse, that of the sink alone, and no output either.

    Gradients are computed from lse, whose rounding is a relative error of P of up to ``|lse| * 2**-22``. A row with
    ``|lse| >= 2**22`` (4.2 million) has no gradient: see `attention_backward`.
    """
    options = CallOptions(
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse, deterministic,
        part=part, return_max_logit=return_max_logit,
    )  # fmt: skip
    # In the order of `FORWARD`, as below.
    operands = (
        q, k, v, out, None, None, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k,
        *check_further("attention", further),
    )  # fmt: skip
    modifier = signature = None
    captures: tuple[Any, ...] = ()
    if score_mod is not None or mask_mod is not None or aux is not None:
        modifier, captures = _modifier(score_mod, mask_mod, aux)
    if stream is None and part is None:
        signature = sign(operands, options) if modifier is None else _sign(operands, options, modifier, captures)
    if signature is not None and (known := repeats.find(signature, operands)) is not None:
        return repeats.attention_again(known, signature, q, out, options, rng)
    if signature is None and modifier is None and stream is None and part is None and out is None:
        program_of = _programs_of.get(q.__class__)
        if program_of is not None and (found := program_of((q, k, v, *operands[6:]), options)) is not None:
            return found
    call = checked_call(
        q, k, v, bias=bias, mask=mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k,
        **further, options=options, stream=stream, modifier=modifier and modifier.with_captures(captures),
    )  # fmt: skip
    framework = framework_of(q)

    def new(shape: tuple[int, ...], dtype: str) -> Any:
        return arrays.allocate(q, framework, shape, dtype, call.device, call.launch_stream)

    given = out
    made = {}
    if out is None:
        out, made["out"] = new(call.out_shape, call.problem.dtype), (call.out_shape, call.problem.dtype)
    lse = None
    if return_lse:
        lse, made["lse"] = new(call.lse_shape, "float32"), (call.lse_shape, "float32")
    max_logit = None
    if return_max_logit:
        shape = call.max_logit_shape
        max_logit, made["max_logit"] = new(shape, "float32"), (shape, "float32")
    run.forward(
        call, {"out": out, "lse": lse, "max_logit": max_logit}, rng, None,
        new_workspace=lambda size: new((size,), "uint8"), signature=signature, made=made,
    )  # fmt: skip
    if framework == "jax":
        from .runtime.buffers import to_jax

        out, lse, max_logit = (to_jax(x, q) if x is not None and x is not given else x for x in (out, lse, max_logit))
        if not call.on_cpu and _import_jax is not None and q.__class__ not in _programs_of:
            _programs_of[q.__class__] = _import_jax()
    results = (out, *(x for x in (lse, max_logit) if x is not None))
    return results if len(results) > 1 else out


@takes_further_inputs
def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    lse: Any = None,
    max_logit: Any = None,
    bias: Any = None,
    mask: Any = None,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Any = None,
    part: Part | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Mapping[str, Any] | None = None,
    workspace: Any = None,
    stream: Any = None,
    **further: Unpack[FurtherInputs],
) -> None:
    """`attention` into given outputs; allocates nothing.

    Parameters
    ----------
    out : ``[B, Mq, H, Kv]``
        dtype of q, or float32, any strides that give every element an address of its own. Every element is written.
    lse : float32 ``[B, H, Mq]`` (packed: ``[1, H, total_q]``), optional
        Written when given.
    max_logit : float32 ``[B, H]`` (packed: ``[nb, H]``), row-major, optional
        Written when given: what ``return_max_logit`` of `attention` returns.
    workspace
        Memory of at least `forward_workspace_bytes` bytes on q's device, 16-byte aligned; not needed when that is 0.

    The others are those of `attention`, and so are the errors. Backward needs the same ``rng``: pass one with dropout.
    """
    options = CallOptions(
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse=lse is not None,
        part=part, return_max_logit=max_logit is not None,
    )  # fmt: skip
    operands = (
        q, k, v, out, lse, max_logit, bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k,
        *check_further("attention_forward", further),
    )  # fmt: skip
    modifier, captures = _modifier(score_mod, mask_mod, aux)
    signature = None
    if stream is None and part is None:
        signature = _sign(operands, options, modifier, captures, workspace)
    if signature is not None and repeats.ran_again(signature, operands, options, rng):
        return
    call = checked_call(
        q, k, v, bias=bias, mask=mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k,
        **further, options=options, stream=stream, modifier=modifier and modifier.with_captures(captures),
    )  # fmt: skip
    run.forward(call, {"out": out, "lse": lse, "max_logit": max_logit}, rng, workspace, signature=signature)


@takes_further_inputs
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    *,
    dlse: Any = None,
    dbias: Any = None,
    dsink: Any = None,
    bias: Any = None,
    mask: Any = None,
    causal: Causal = False,
    window_size: WindowSize = (None, None),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: Mapping[str, Any] | None = None,
    daux: Sequence[Any] | None = None,
    deterministic: bool = False,
    part: Part | None = None,
    workspace: Any = None,
    stream: Any = None,
    **further: Unpack[FurtherInputs],
) -> None:
    """Gradients of `attention` into given outputs; allocates nothing.

    With Z the keep mask times ``1 / (1 - p)``, ``P = exp(S - lse)`` and ``D = rowsum(dout * out)``:
    ``dv = (P * Z)^T dout``, ``dP = Z * (dout v^T)``, ``dS = P * (dP - D + dlse)``, ``dbias = dS`` summed over the dims
    that the bias broadcasts, ``dT = dS * softcap'``, ``dq = softmax_scale * dT k``, ``dk = softmax_scale * dT^T q``.
    A sink has no value, so its dP is 0: ``dsink[h] = sum over rows of exp(sink[h] - lse) * (dlse - D)``.

    Parameters
    ----------
    dout, out : ``[B, Mq, H, Kv]``
        dtype of q: round an out that was written in float32.
    lse : float32 ``[B, H, Mq]`` (packed: ``[1, H, total_q]``)
        What the forward pass wrote.
    dq, dk, dv
        Shapes and dtype of q, k, v, or float32 (dk and dv alike); any strides, slices of one packed buffer included.
        Every element is written.
    dlse : float32, shape of lse, optional
        Gradient with respect to lse, None = 0.
    dbias : shape and dtype of bias, optional
        Written when given; broadcast dims are summed in float32 without a temporary of ``[B, H, Mq, Mk]``.
    dsink : shape and dtype of sink, optional
        Written when given: one more small kernel, which adds in a fixed order, ``deterministic`` or not.
    rng
        The values the forward pass used; needed with dropout.
    daux
        Gradients of the arrays that the modifier captured, in the order of `nvrtc_attn.Modifier.captures`: float32
        arrays of their shapes, None where none is wanted. Every element is written.
    deterministic
        Bitwise reproducible. On compute capability 9.0 up to head dim 128 dq is added up in a fixed order (1 to 16 %
        more time); elsewhere dq gets a kernel of its own instead of atomics, about 1.4 times the matrix products.
    workspace
        At least `backward_workspace_bytes` bytes on q's device, 16-byte aligned.

    The others are those of `attention`, and so are the errors.

    Notes
    -----
    P is made again from lse, whose rounding to float32 is a relative error of P of up to ``|lse| * 2**-22``: 2^-11 at
    2,000, 1/16 at 260,000. From ``|lse| >= 2**22`` on float32 does not tell P, and the row takes no part in the
    gradients: its dq and what it would add to dk, dv and dbias are zero. So gradients are finite where the exact ones
    are.

    A NaN or infinity in k of a key that causal, window_size or a mask hides from some queries only may reach their dq,
    as in v their out, and one in dout or q of a query dk and dv of keys that it does not see.
    """
    options = CallOptions(
        causal, window_size, softmax_scale, softcap, dropout_p, max_seqlen_q, max_seqlen_k, return_lse=True,
        deterministic=deterministic, dbias=dbias is not None, dsink=dsink is not None,
        part=part,
    )  # fmt: skip
    inputs = (bias, mask, cu_seqlens_q, cu_seqlens_k, seqused_k, *check_further("attention_backward", further))
    operands = (q, k, v, out, dout, lse, dlse, *inputs, dq, dk, dv, dbias, dsink)
    run_backward(operands, options, rng, workspace, stream, score_mod, mask_mod, aux, daux)


def run_backward(
    operands: tuple[Any, ...], options: CallOptions, rng: Any, workspace: Any, stream: Any, score_mod: Any = None,
    mask_mod: Any = None, aux: Mapping[str, Any] | None = None, daux: Sequence[Any] | None = None,
    new_workspace: Callable[[int], Any] | None = None,
) -> None:  # fmt: skip
    """`attention_backward` of ``operands`` in the order of `BACKWARD`; ``new_workspace(nbytes)`` makes a workspace."""
    modifier, captures = _modifier(score_mod, mask_mod, aux)
    _check_gradients(daux, modifier)
    signature = None
    if stream is None and options.part is None:
        signature = _sign(operands, options, modifier, captures, workspace, daux)
    known_rng = rng is not None or options.dropout_p == 0
    if signature is not None and known_rng and repeats.ran_again(signature, operands, options, rng, new_workspace):
        return
    trained = frozenset(i for i, x in enumerate(daux or ()) if x is not None)
    given = dict(zip(BACKWARD, operands, strict=True))
    q, k, v, *optional = (given.pop(name) for name in INPUTS)
    call = checked_call(
        q, k, v, **dict(zip(OPTIONAL_INPUTS, optional, strict=True)), options=options, stream=stream,
        modifier=modifier and modifier.with_captures(captures), trained=trained,
    )  # fmt: skip
    if options.dropout_p > 0 and rng is None:
        raise ValueError("rng: None, but dropout_p > 0. Pass the (seed, offset) that the forward pass used.")
    run.backward(call, given, rng, workspace, daux, new_workspace, signature)


def backward_allocating(
    operands: Mapping[str, Any], options: CallOptions, rng: Any, modifier: Modifier | None, daux: Sequence[Any] | None
) -> None:
    """`attention_backward` of torch tensors by their names in `BACKWARD`, with a workspace of its own."""
    q = operands["q"]

    def new(size: int) -> Any:
        return arrays.allocate_again("torch", q, q.get_device(), (size,), (1,), "uint8")[0]

    run_backward(tuple(map(operands.get, BACKWARD)), options, rng, None, None, modifier, None, None, daux, new)


def forward_workspace_bytes(q: Any, k: Any, v: Any, *, out: Any = None, **options: Any) -> int:
    """Bytes that `attention_forward` needs in ``workspace`` for these arguments; often 0, and always on the CPU.

    Compiles and loads the kernels, so that the next call finds them.

    Parameters
    ----------
    q, k, v, **options
        As of `attention_forward`. Of ``lse`` and ``max_logit`` it matters whether they are None; ``rng`` and
        ``workspace`` are not looked at.
    out
        The one of the call. None = of q's dtype, row-major, 16-byte aligned; others may need other kernels, and more.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, CudaError
        As `attention`.
    """
    given = {f"return_{name}": options.pop(name, None) is not None for name in ("lse", "max_logit")}
    call = _describe_for_query("forward_workspace_bytes", q, k, v, {**given, **options})
    problem = call.with_dense(**call.layouts_of({"out": out}, backward=False))
    if call.on_cpu:
        return 0
    captured = run.captured_of(call)
    return forward_plan(problem, call.device.index, call.launch_stream, captured=captured).workspace_bytes


def backward_workspace_bytes(
    q: Any, k: Any, v: Any, *, dbias: bool = False, dsink: bool = False, dout: Any = None, out: Any = None,
    dq: Any = None, dk: Any = None, dv: Any = None, **options: Any,
) -> int:  # fmt: skip
    """Bytes that `attention_backward` needs in ``workspace`` for these arguments (as there). 0 on the CPU.

    Compiles and loads the kernels, so that the next call finds them.

    Parameters
    ----------
    q, k, v, **options
        As of `attention_backward`. ``daux`` has something else than None for each captured array whose gradient is
        wanted.
    dbias, dsink
        Whether the gradients of bias and sink are wanted, row-major ones.
    dout, out, dq, dk, dv
        Those of the call. None = of q's dtype, row-major, 16-byte aligned; others may need other kernels, and more.

    Raises
    ------
    TypeError, ValueError, UnsupportedError, CompileError, CudaError
        As `attention`.
    """
    options.pop("dlse", None)
    options["return_lse"] = True
    call = _describe_for_query("backward_workspace_bytes", q, k, v, options, dbias=dbias, dsink=dsink)
    given = {"out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
    problem = call.with_dense(**call.layouts_of(given, backward=True))
    if call.on_cpu:
        return 0
    captured = run.captured_of(call)
    plan = backward_plan(problem, call.device.index, call.launch_stream, captured=captured)
    return plan.workspace_bytes + run.captured_bytes(call)


def dropout_keep_mask(shape: tuple[int, int, int, int], dropout_p: float, rng: tuple[int, int] | int) -> Any:
    """The elements of P that dropout keeps, as a NumPy bool array ``[B, H, Mq, Mk]``.

    Element (b, h, i, j) is kept iff Philox4x32-10 output number ``offset + ((b * H + h) * Mq + i) * Mk + j`` of the
    stream ``seed``, as a uniform in (0, 1], exceeds p. Independent of GPU, kernel, framework; dense problems draw the
    same mask as PyTorch's memory-efficient attention. For packed sequences Mq, Mk are max_seqlen_q and max_seqlen_k.

    Raises
    ------
    TypeError, ValueError
        ``shape`` is not four integers from 0 to 2**31 - 1, ``dropout_p`` no number in [0, 1], ``rng`` no seed and no
        pair (seed, offset) of integers from 0 to 2**64 - 1 (None is not accepted: it would be another mask each time).
    """
    found = Violations()
    sizes: tuple[int, int, int, int] = check_shape(found, shape)
    p = check_real(found, "dropout_p", dropout_p, 0.0, 1.0, "in [0, 1]")
    found.stop()
    if rng is None:
        raise TypeError("rng: got None. Pass the seed, or the pair (seed, offset), whose mask is wanted.")
    state = philox.normalise_rng(rng)
    return philox.keep_mask(sizes, p or 0.0, state.seed, state.offset)


# ------------------------------------------------------------------------------------------------------------


def checked_call(q: Any, k: Any, v: Any, **arguments: Any) -> Call:
    """`describe`, and under ``NVRTC_ATTN_DEBUG`` lengths and indices of captured arrays whose values the device has."""
    call = describe(q, k, v, **arguments)
    lengths = call.problem.varlen or call.problem.seqused_k
    if (lengths or call.captures) and not call.on_cpu and env.debug():
        from .plans import debug

        if lengths:
            debug.check_device_lengths(call)
        debug.check_device_indices(call)
    return call


def _describe_for_query(function: str, q: Any, k: Any, v: Any, options: dict[str, Any], **gradients: Any) -> Call:
    arguments: dict[str, Any] = {name: options.pop(name, None) for name in OPTIONAL_INPUTS}
    modifier, captures = _modifier(*(options.pop(name, None) for name in ("score_mod", "mask_mod", "aux")))
    arguments["modifier"] = modifier and modifier.with_captures(captures)
    daux = options.pop("daux", None)
    _check_gradients(daux, modifier)
    arguments["trained"] = frozenset(i for i, x in enumerate(daux or ()) if x is not None)
    stream = options.pop("stream", None)
    for ignored in ("rng", "workspace"):
        options.pop(ignored, None)
    for name in options:
        if name not in CallOptions._fields or name in OPTIONAL_GRADIENTS:
            raise unexpected(function, name, [*OPTIONAL_INPUTS, *set(CallOptions._fields) - set(OPTIONAL_GRADIENTS)])
    return checked_call(q, k, v, **arguments, options=CallOptions(**options, **gradients), stream=stream)


def _sign(
    operands: tuple[Any, ...], options: CallOptions, modifier: Modifier | None, captures: tuple[Any, ...],
    workspace: Any = None, daux: Sequence[Any] | None = None,
) -> Signature | None:  # fmt: skip
    """The signature of a call with a workspace, or a modifier, as `repeats.RepeatedModifier` takes it apart."""
    if modifier is None:
        return sign((*operands, workspace), options)
    return sign((*operands, workspace, *captures, *(daux or ())), options, modifier)


def _check_gradients(daux: Sequence[Any] | None, modifier: Modifier | None) -> None:
    if daux is not None and modifier is None:
        raise ValueError("daux: given without score_mod and mask_mod, which capture the arrays.")


def _modifier(
    score_mod: Any, mask_mod: Any, aux: Mapping[str, Any] | None
) -> tuple[Modifier | None, tuple[Any, ...]]:  # fmt: skip
    """What the functions of a call mean, None without them, and the arrays that it is over: its own may be others."""
    if score_mod is None and mask_mod is None:
        if aux is not None:
            from .modifiers.trace import no_functions

            raise no_functions()
        return None, ()
    found = look(score_mod, mask_mod, aux)
    if found is not None:
        return found
    from .modifiers.trace import traced

    modifier = traced(score_mod, mask_mod, aux=aux)
    return modifier, modifier.captures
