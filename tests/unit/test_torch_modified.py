"""`nvrtc_attn.torch.attention` with functions of scores: beside every other argument, eager and compiled."""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn  # noqa: E402
from nvrtc_attn.torch import attention, flex_attention, modified, modified_passes  # noqa: E402

B, H, HKV, M, N, K = 2, 4, 2, 10, 14, 8
CU_Q, CU_K = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([0, 5, 14], dtype=torch.int32)
USED = torch.tensor([9, 14], dtype=torch.int32)
RNG = (5, 7)


def inputs(packed: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def new(*shape: int) -> Any:
        return torch.randn(shape, generator=generator).requires_grad_()

    batch = 1 if packed else B
    return {
        "q": new(batch, M, H, K), "k": new(batch, N, HKV, K), "v": new(batch, N, HKV, K), "bias": new(B, 1, M, N),
        "sink": new(H), "slopes": new(H), "table": new(H, M + N),
    }  # fmt: skip


def functions(slopes: Any, table: Any) -> dict[str, Any]:
    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 2 * torch.tanh(score / 2) * slopes[h] + table[h, i - j + N - 1]

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + j) % 3 != 1

    return {"score_mod": score_mod, "mask_mod": mask_mod}


def whole(
    x: dict[str, Any], score_mod: Any = None, mask_mod: Any = None, bias: Any = None, mask: Any = None,
    sink: Any = None, band: tuple[int, int] | None = None, dropout_p: float = 0.0, seqused_k: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """(out, lse, max_logit) on whole matrices with autograd, in float64; ``band`` are the bounds of ``j - i``."""
    q, k, v = (x[name].double().transpose(1, 2) for name in "qkv")
    k, v = (y.repeat_interleave(H // HKV, 1) for y in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(K)
    b, h, i, j = [
        torch.arange(n).reshape([-1 if axis == d else 1 for axis in range(4)]) for d, n in enumerate(scores.shape)
    ]
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if bias is not None:
        scores = scores + bias.double()
    keep = torch.ones(scores.shape, dtype=torch.bool)
    if mask_mod is not None:
        keep = keep & mask_mod(b, h, i, j)
    if mask is not None:
        keep = keep & mask
    if band is not None:
        keep = keep & (j - i >= band[0]) & (j - i <= band[1])
    if seqused_k is not None:
        keep = keep & (j < seqused_k.reshape(-1, 1, 1, 1))
    scores = torch.where(keep, scores, -math.inf)
    logits = (
        scores
        if sink is None
        else torch.cat([scores, sink.double().reshape(1, H, 1, 1).expand(*scores.shape[:3], 1)], -1)
    )
    p = logits.softmax(-1)[..., : scores.shape[-1]]
    if dropout_p:
        kept = torch.from_numpy(nvrtc_attn.dropout_keep_mask(tuple(scores.shape), dropout_p, RNG))
        p = p * kept / (1 - dropout_p)
    return (p @ v).transpose(1, 2), logits.logsumexp(-1), scores.amax((-1, -2))


def derivatives(results: tuple[Any, ...], x: dict[str, Any]) -> list[Any]:
    """Of weighted sums of results to all of the inputs."""
    generator = torch.Generator().manual_seed(11)
    total = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in results)
    return list(torch.autograd.grad(total, list(x.values()), allow_unused=True))


def compare(found: Any, expected: Any) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if b is None:
            assert a is None or not a.any()
        else:
            torch.testing.assert_close(a.double(), b.double(), rtol=2e-4, atol=2e-5, msg=lambda m, i=i: f"{i}: {m}")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")  # type: ignore[no-any-return]


MASK = torch.rand(B, 1, M, N, generator=torch.Generator().manual_seed(9)) > 0.3
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Arguments of the call, and those of `whole`; a string is the input of that name.
    "alone": ({}, {}),
    "bias": ({"bias": "bias"}, {"bias": "bias"}),
    "mask": ({"mask": MASK}, {"mask": MASK}),
    "sink": ({"sink": "sink"}, {"sink": "sink"}),
    "causal": ({"causal": True}, {"band": (-M, N - M)}),
    "window": ({"window_size": (4, 2), "causal": "top_left"}, {"band": (-4, 0)}),
    "dropout": ({"dropout_p": 0.3, "rng": RNG}, {"dropout_p": 0.3}),
    "used keys": ({"seqused_k": USED}, {"seqused_k": USED}),
    "everything": (
        {"bias": "bias", "mask": MASK, "sink": "sink", "causal": True, "dropout_p": 0.3, "rng": RNG},
        {"bias": "bias", "mask": MASK, "sink": "sink", "band": (-M, N - M), "dropout_p": 0.3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.turns(3)
def test_functions_beside_other_arguments(name: str, way: str) -> None:
    """out, lse and all gradients, also of the captured tensors and through the lse."""
    x = inputs()
    given, of_whole = (
        {key: x[y] if isinstance(y, str) and y in x else y for key, y in arguments.items()}
        for arguments in OPTIONS[name]
    )

    def call(x: dict[str, Any], given: dict[str, Any]) -> Any:
        mods = functions(x["slopes"], x["table"])
        return attention(x["q"], x["k"], x["v"], **mods, **given, return_lse=True)

    found = (compiled(call) if way == "compiled" else call)(x, given)
    expected = whole(x, **functions(x["slopes"], x["table"]), **of_whole)[:2]
    compare(found, expected)
    compare(derivatives(found, x), derivatives(expected, x))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_packed_sequences(way: str) -> None:
    x = inputs(packed=True)

    def call(x: dict[str, Any]) -> Any:
        return attention(
            x["q"], x["k"], x["v"], **functions(x["slopes"], x["table"]), sink=x["sink"], cu_seqlens_q=CU_Q,
            cu_seqlens_k=CU_K, max_seqlen_q=6, max_seqlen_k=9, return_lse=True,
        )  # fmt: skip

    found = (compiled(call) if way == "compiled" else call)(x)
    outs, lses = [], []
    for s in range(2):
        rows, keys = slice(CU_Q[s], CU_Q[s + 1]), slice(CU_K[s], CU_K[s + 1])
        one = {**x, "q": x["q"][:, rows], "k": x["k"][:, keys], "v": x["v"][:, keys]}
        out, lse, _ = whole(one, **functions(x["slopes"], x["table"]), sink=x["sink"])
        outs.append(out)
        lses.append(lse)
    expected = torch.cat(outs, 1), torch.cat(lses, 2)
    compare(found, expected)
    compare(derivatives(found, x), derivatives(expected, x))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_max_logit_has_no_gradient(way: str) -> None:
    x = inputs()

    def call(x: dict[str, Any]) -> Any:
        mods = functions(x["slopes"], x["table"])
        return attention(x["q"], x["k"], x["v"], **mods, return_max_logit=True)

    out, max_logit = (compiled(call) if way == "compiled" else call)(x)
    expected, _, most = whole(x, **functions(x["slopes"], x["table"]))
    compare((out, max_logit), (expected, most))
    assert not max_logit.requires_grad
    compare(derivatives((out,), x), derivatives((expected,), x))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_arrays_by_name_have_gradients(way: str) -> None:
    x = inputs()

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any, aux: Any) -> Any:
        return score * aux["slopes"][h] + aux.table[h, j]

    def call(x: dict[str, Any]) -> Any:
        aux = {"slopes": x["slopes"], "table": x["table"]}
        return attention(x["q"], x["k"], x["v"], score_mod=score_mod, aux=aux)

    found = (compiled(call) if way == "compiled" else call)(x)
    expected, *_ = whole(x, lambda s, b, h, i, j: s * x["slopes"][h] + x["table"][h, j])
    compare((found,), (expected,))
    compare(derivatives((found,), x), derivatives((expected,), x))


def test_a_traced_modifier_and_a_mask_alone() -> None:
    x = inputs()
    mods = functions(x["slopes"], x["table"])
    modifier = nvrtc_attn.trace(**mods)
    for given, of_whole in (({"score_mod": modifier}, mods), ({"mask_mod": mods["mask_mod"]},) * 2):
        found, (expected, *_) = attention(x["q"], x["k"], x["v"], **given), whole(x, **of_whole)
        compare((found,), (expected,))
        compare(derivatives((found,), x), derivatives((expected,), x))


def test_torch_decides_about_dropout_and_types() -> None:
    """Its generator draws the mask, and autocast casts what it casts for scaled_dot_product_attention."""
    x = inputs()
    mods = functions(x["slopes"], x["table"])

    def call(**options: Any) -> Any:
        return attention(x["q"], x["k"], x["v"], **mods, **options)

    def seeded() -> Any:
        torch.manual_seed(1)
        return call(dropout_p=0.5)

    first, second = seeded(), call(dropout_p=0.5)
    assert torch.equal(first, seeded())
    assert not torch.equal(first, second)
    with torch.autocast("cpu", torch.bfloat16):
        assert call().dtype == torch.bfloat16
        call().sum().backward()
    assert x["q"].grad.dtype == x["slopes"].grad.dtype == torch.float32


def test_outside_of_autograd() -> None:
    x = inputs()
    mods = functions(x["slopes"].detach(), x["table"].detach())
    with torch.no_grad():
        found = attention(x["q"], x["k"], x["v"], **mods)
    assert not found.requires_grad
    compare((found,), (whole(x, **mods)[0],))
    with torch.inference_mode():
        compare((attention(x["q"].detach(), x["k"].detach(), x["v"].detach(), **mods),), (found,))


def test_shapes_without_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = inputs()
        out, lse = attention(x["q"], x["k"], x["v"], **functions(x["slopes"], x["table"]), return_lse=True)
        assert (out.shape, lse.shape) == ((B, M, H, K), (B, H, M))
        gradients = derivatives((out,), x)
        assert [None if y is None else y.shape for y in gradients] == [
            None if name in ("bias", "sink") else y.shape for name, y in x.items()
        ]


def test_selective_checkpointing_runs_the_forward_pass_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Below its mode the call is an operator, which a policy saves."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = op is modified.modified_forward
        return CheckpointPolicy.MUST_SAVE if is_ours else CheckpointPolicy.PREFER_RECOMPUTE

    x = inputs()
    seen: list[str] = []
    own = modified_passes.api.attention
    monkeypatch.setattr(modified_passes.api, "attention", lambda *a, **k: (seen.append("forward"), own(*a, **k))[1])

    def call(q: Any) -> Any:
        return attention(q, x["k"], x["v"], **functions(x["slopes"], x["table"]))

    expected = derivatives((call(x["q"]),), x)
    seen.clear()
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(call, x["q"], use_reentrant=False, context_fn=contexts)
    compare(derivatives((out,), x), expected)
    assert seen == ["forward"]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck of torch 2.15 reads it
def test_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs()
    modifier = nvrtc_attn.trace(**functions(x["slopes"], x["table"]))
    options: dict[str, Any] = {"dropout_p": 0.3, "rng": RNG, "bias": x["bias"], "sink": x["sink"], "return_lse": True}
    arguments: list[Any] = []
    own = modified.modified_forward

    def spy(*given: Any) -> Any:
        arguments.append(given)
        return own(*given)

    monkeypatch.setattr(modified, "modified_forward", spy)
    monkeypatch.setattr(modified, "_dispatch_modes", lambda: 1)
    attention(x["q"], x["k"], x["v"], score_mod=modifier, **options)
    (given,) = arguments
    torch.library.opcheck(own, given)
    *of_call, _, _, captures, program, ints, floats = given
    detached = [y.detach() if isinstance(y, torch.Tensor) else y for y in of_call]
    of_modifier = [y.detach() for y in captures], program, ints, floats
    out, lse, _ = own(*detached, True, False, *of_modifier)
    backward = (torch.randn_like(out), None, out, lse, *detached, True, True, *of_modifier, [True, False])
    torch.library.opcheck(modified.modified_backward, backward)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"softcap": 5.0}, ValueError, "softcap: got 5.0 with score_mod"),
        ({"aux": {}}, nvrtc_attn.TraceError, "positional argument"),
        ({"sinks": None}, TypeError, "unexpected keyword argument 'sinks'"),
        ({"dropout_p": 2.0}, ValueError, "dropout_p"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    x = inputs()
    with pytest.raises(error, match=words):
        attention(x["q"], x["k"], x["v"], **functions(x["slopes"], x["table"]), **options)


def test_functions_are_needed_for_arrays_by_name() -> None:
    x = inputs()
    with pytest.raises(ValueError, match="aux: given without score_mod and mask_mod"):
        attention(x["q"], x["k"], x["v"], aux={"slopes": x["slopes"]})


def test_a_graph_of_the_gradient_is_refused_where_it_is_used() -> None:
    x = inputs()
    out = attention(x["q"], x["k"], x["v"], **functions(x["slopes"], x["table"]))
    (dq,) = torch.autograd.grad(out.sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        dq.sum().backward()
    with pytest.raises(nvrtc_attn.UnsupportedError, match=r"transformations of torch\.func"):
        torch.func.grad(lambda q: attention(q, x["k"], x["v"], **functions(x["slopes"], x["table"])).sum())(x["q"])


@pytest.mark.parametrize("door", ["attention", "flex_attention", "flex_attention, alone", "compiled"])
def test_batches_of_gradients_are_refused_by_name(door: str) -> None:
    """They named dout, which nobody had passed, or a batching rule."""
    x = inputs()

    def call(q: Any) -> Any:
        if "flex" in door:
            given = () if "alone" in door else (lambda s, b, h, i, j: s + i - j,)
            heads_first = [y.transpose(1, 2) for y in (q, x["k"], x["v"])]
            return nvrtc_attn.torch.flex_attention(*heads_first, *given, enable_gqa=True)
        return attention(q, x["k"], x["v"], **functions(x["slopes"], x["table"]))

    torch._dynamo.reset()
    out = (torch.compile(call, backend="aot_eager") if door == "compiled" else call)(x["q"])
    with pytest.raises(nvrtc_attn.UnsupportedError, match="batches of gradients"):
        torch.autograd.grad(out, x["q"], torch.ones(2, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize("door", ["attention", "flex_attention", "traced", "compiled", "compiled traced", "fake"])
def test_captured_tensors_of_another_device_are_refused(door: str) -> None:
    """Where nothing of it is read: on a device without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, slopes = inputs(), torch.zeros(H, device="meta")

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + slopes[h]

    given: Any = nvrtc_attn.trace(score_mod) if "traced" in door else score_mod
    call: Any = attention
    if door == "flex_attention":

        def call(q: Any, k: Any, v: Any, score_mod: Any) -> Any:
            return flex_attention(*(y.transpose(1, 2) for y in (q, k, v)), score_mod, enable_gqa=True)

    if "compiled" in door:
        torch._dynamo.reset()
        call = torch.compile(attention, backend="aot_eager", fullgraph=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if door == "fake" else contextlib.nullcontext()
    with mode, pytest.raises(Exception, match=r"captured .*is on meta, but q is on cpu") as raised:
        call(x["q"].detach(), x["k"].detach(), x["v"].detach(), score_mod=given)
    assert isinstance(raised.value, ValueError) or "compiled" in door


@pytest.mark.parametrize("captured", ["number", "array"])
@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_and_arrays_of_the_host_go_anywhere(captured: str, compiled: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    held: Any = torch.tensor(2.0) if captured == "number" else np.ones(H, np.float32)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * held if captured == "number" else s * held[h]

    torch._dynamo.reset()
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    q = torch.empty(B, M, H, K, device="meta")
    assert call(q, q, q, score_mod=score_mod).device.type == "meta"
    if not compiled and captured == "array":
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert attention(q, q, q, score_mod=score_mod).device.type == "meta"


@pytest.mark.parametrize("way", ["eager", "traced", "aot_eager", "inductor", "inductor, traced"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_arrays_of_the_host_that_are_written_to_between_the_passes(way: str) -> None:
    """torch notices a write to a tensor, and none to an array of NumPy's."""
    if "inductor" in way and shutil.which("g++") is None:
        pytest.skip("inductor compiles C++")
    x, slopes = inputs(), np.linspace(0.5, 2.0, H, dtype=np.float32)
    table = np.linspace(-1, 1, N, dtype=np.float32)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(s * slopes[h]) + table[j] * slopes[h]

    given = nvrtc_attn.trace(score_mod) if "traced" in way else score_mod

    def call(q: Any) -> Any:
        return attention(q, x["k"], x["v"], score_mod=given).square().sum()

    (expected,) = torch.autograd.grad(call(x["q"]), x["q"])
    torch._dynamo.reset()
    if way not in ("eager", "traced"):
        call = torch.compile(call, fullgraph=True, backend=way.split(",")[0])
    total = call(x["q"])
    slopes *= 2.0
    table[:] = 0.0
    (found,) = torch.autograd.grad(total, x["q"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
