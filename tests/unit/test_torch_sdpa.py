"""torch's attention by its own signature, and the switch that takes over torch's operators, on the CPU.

The switch is made for CUDA; here it takes over the operators for CPU tensors, for which torch has no kernel of its own
(memory-efficient attention) or one to compare with (``scaled_dot_product_attention``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from differences import note

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402 - after the skip
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import CheckpointError, checkpoint  # noqa: E402

import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn import collect_env  # noqa: E402
from nvrtc_attn.aten import efficient_attention_forward  # noqa: E402
from nvrtc_attn.base import log  # noqa: E402
from nvrtc_attn.base.errors import CudaError, NotReadyError  # noqa: E402
from nvrtc_attn.torch import flash, ops, replaced, sdpa  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
ATEN = torch.ops.aten
needs_get_kernel = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="torch.library.get_kernel is missing (torch >= 2.9.1 has it)"
)


def tensors(*shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    """float64, of which a float32 copy is made for ours."""
    torch.manual_seed(0)
    return [torch.randn(s, dtype=dtype) for s in shapes]


def leaves(values: list[Any], dtype: Any) -> list[Any]:
    return [x if x.dtype == torch.bool else x.to(dtype).requires_grad_() for x in values]


def against_torch(query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> None:
    """Output, strides and gradients beside torch's in float64."""
    given = [query, key, value, *([] if mask is None else [mask])]
    results = []
    for function, dtype in ((na.scaled_dot_product_attention, torch.float32), (F.scaled_dot_product_attention, None)):
        inputs = leaves(given, dtype or torch.float64)
        out = function(*inputs, **options)
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        differentiable = [x for x in inputs if x.requires_grad]
        results.append([out, *torch.autograd.grad((out * weight).sum(), differentiable)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
def test_ranks(lead: tuple[int, ...], causal: bool) -> None:
    q, k, v = tensors((*lead, 5, 8), (*lead, 7, 8), (*lead, 7, 4))
    against_torch(q, k, v, is_causal=causal, scale=0.4)


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize(
    "shape", [(7,), (5, 7), (5, 1), (3, 5, 7), (1, 1, 7), (2, 3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 1)]
)
def test_masks_and_biases_as_they_are(shape: tuple[int, ...], kind: str) -> None:
    q, k, v, bias = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), shape)
    mask = bias
    if kind == "bool":
        mask = (bias > -0.8).view(-1, 7) if len(shape) == 1 else bias > -0.8  # torch takes no boolean vector
        mask[..., 0] = True  # a row without keys is NaN in some of torch's kernels
    against_torch(q, k, v, mask)


def test_masks_of_more_than_four_dims() -> None:
    q, k, v = tensors((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8))
    for shape in ((2, 2, 3, 5, 7), (2, 1, 1, 5, 7), (1, 1, 3, 5, 7)):
        against_torch(q, k, v, *tensors(shape))


def test_batches_and_single_heads_broadcast() -> None:
    against_torch(*tensors((2, 3, 5, 8), (1, 1, 7, 8), (2, 3, 7, 8)))
    against_torch(*tensors((1, 1, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)))


def test_grouped_heads() -> None:
    q, k, v, bias = tensors((2, 6, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (6, 5, 7))
    against_torch(q, k, v, bias, enable_gqa=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        na.scaled_dot_product_attention(q.float(), k.float(), v.float())


def test_the_gradient_of_a_broadcast_bias_is_never_expanded() -> None:
    """The kernels sum it; torch's make a full one and sum that."""
    q, k, v, bias = leaves(tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (3, 1, 7)), torch.float32)
    with Shapes() as watch:
        na.scaled_dot_product_attention(q, k, v, bias).sum().backward()
    assert bias.grad.shape == (3, 1, 7)
    assert (2, 3, 5, 8) in watch.seen
    assert (2, 3, 5, 7) not in watch.seen


class Shapes(TorchDispatchMode):
    """Shapes of everything that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [tuple(x.shape) for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        return out


def test_strides_are_those_of_torchs_memory_efficient_attention() -> None:
    q, k, v = tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), dtype=torch.float32)
    theirs = ATEN._scaled_dot_product_efficient_attention(*(x.to("meta") for x in (q, k, v)), None, True)[0]
    assert na.scaled_dot_product_attention(q, k, v).stride() == theirs.stride()


def test_the_output_may_be_written_to_until_a_backward_pass_needs_it() -> None:
    """On the CPU it was a view, which autograd lets nobody write to."""
    q, k, v = leaves(tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), torch.float32)
    out = na.scaled_dot_product_attention(q, k, v)
    twice = 2 * out.detach()
    out.mul_(2)
    assert torch.equal(out, twice)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_causal_biases_of_torch() -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = tensors((1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    ones = torch.ones(4, 6, dtype=torch.bool)
    for bias, keep in ((causal_upper_left(4, 6), ones.tril()), (causal_lower_right(4, 6), ones.tril(2))):
        ours = na.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias)
        torch.testing.assert_close(ours.double(), F.scaled_dot_product_attention(q, k, v, keep), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(2, 5), (5, 2), (4, 4)])
def test_causal_biases_beside_is_causal(rows: int, columns: int) -> None:
    """Both hold: rows saw keys that is_causal hides."""
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = tensors((1, 2, rows, 8), (1, 2, columns, 8), (1, 2, columns, 8))
    ones = torch.ones(rows, columns, dtype=torch.bool)
    lower = ones.tril(columns - rows)
    for bias, keep in ((causal_upper_left(rows, columns), ones), (causal_lower_right(rows, columns), lower)):
        ours = na.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias, is_causal=True)
        seen = na.scaled_dot_product_attention(q.float(), k.float(), v.float(), keep & ones.tril())
        torch.testing.assert_close(ours, seen, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match=r"attn_mask: a causal bias for 9 queries and 9 keys, but query and key have"):
        na.scaled_dot_product_attention(q, k, v, causal_lower_right(9, 9))


def test_dropout_and_autocast() -> None:
    q, k, v = (x.float() for x in tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)))
    torch.manual_seed(1)
    first = na.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(first, na.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    torch.manual_seed(1)
    assert torch.equal(first, na.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    with torch.autocast("cpu", torch.bfloat16):
        assert na.scaled_dot_product_attention(q, k, v, torch.zeros(5, 7)).dtype is torch.bfloat16


@pytest.mark.turns(3)
def test_compiled_whole() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(na.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (5, 6):
        q, k, v, bias = (x.float() for x in tensors((2, 3, m, 8), (2, 3, 7, 8), (2, 3, 7, 8), (3, m, 7)))
        torch.testing.assert_close(compiled(q, k, v, bias), na.scaled_dot_product_attention(q, k, v, bias))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": None}, TypeError, "query: got None"),
        ({"query": torch.ones(8)}, ValueError, "ranks 1, 4, 4"),
        ({"attn_mask": [1.0]}, TypeError, "attn_mask: got"),
        ({"attn_mask": torch.ones(4, 7)}, ValueError, "attn_mask: shape"),
        (
            {"attn_mask": torch.ones(5, 7, dtype=torch.float64)},
            ValueError,
            r"^attn_mask: dtype torch\.float64\. It is bool, float32 or that of query, torch\.float32",
        ),
        ({"query": torch.ones(2, 3, 5, 8, dtype=torch.float64)}, ValueError, "dtype"),
        ({"dropout_p": 2.0}, ValueError, "dropout_p"),
        ({"scale": "x"}, TypeError, r"^scale: got 'x'"),
        (
            {"value": torch.ones(2, 2, 7, 8)},
            ValueError,
            r"key, value: head counts 3 and 2 differ \(dim -3 of \[.*, heads",
        ),
        ({"value": torch.ones(2, 3, 6, 8)}, ValueError, r"key, value: lengths 7 and 6 differ \(dim -2 of \[.*, heads"),
        (
            {"query": torch.ones(2, 4, 5, 8), "enable_gqa": True},
            ValueError,
            r"key, value: 3 heads do not divide the 4 heads of query \(dim -3 of",
        ),
        ({"scale": torch.tensor(1.0)}, TypeError, r"^scale: got .* multiply query by it, and pass scale=1\.0\."),
        ({"scale": float("nan")}, ValueError, "^scale: got nan. It is finite"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], error: type[Exception], match: str) -> None:
    given: dict[str, Any] = dict(
        zip(("query", "key", "value"), tensors((2, 3, 5, 8), *((2, 3, 7, 8),) * 2, dtype=torch.float32), strict=True)
    )
    with pytest.raises(error, match=match):
        na.scaled_dot_product_attention(**{**given, **change})


def test_entry_points_of_aten_call_the_scale_by_their_own_name() -> None:
    query, key, value = tensors(*((1, 4, 2, 8),) * 3, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^scale: got nan\. It is finite"):
        efficient_attention_forward(query, key, value, None, None, None, None, None, 0.0, 0, scale=float("nan"))


# ----------------------------------------------------------------------------------------------------------- the switch


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counters and logged lines start empty, and no switch stays on."""
    monkeypatch.setattr(log, "_said", set())
    replaced._taken.clear()
    replaced._left.clear()
    yield
    assert sdpa.report()["enabled"] == []


def on_cpu(**options: Any) -> Any:
    return na.enable_sdpa(**options, _keys=("CPU",))


@pytest.mark.parametrize("given", [False, True, "all"])
def test_what_is_not_named_is_no_switch(given: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"{given!r} was given\. It switches on; .* disable\(\), .* all=True"
    ) as refused:
        na.enable_sdpa(given)
    assert "__init__" not in str(refused.value)
    assert sdpa.report()["enabled"] == []


def efficient(q: Any, k: Any, v: Any, bias: Any, causal: bool = False, p: float = 0.0, scale: Any = None) -> Any:
    return ATEN._scaled_dot_product_efficient_attention(q, k, v, bias, True, p, causal, scale=scale)


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_shape", [None, (2, 3, 5, 7), (1, 1, 1, 7)])
def test_efficient_attention_is_taken_with_torchs_strides(causal: bool, bias_shape: Any) -> None:
    q, k, v = leaves(tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4)), torch.float32)
    # As torch prepares it: of full size by an expansion, rows of a multiple of 8 elements.
    bias = None if bias_shape is None else torch.randn(*bias_shape[:-1], 8, requires_grad=True)
    full = None if bias is None else bias[..., :7].expand(2, 3, 5, 7)
    inputs = [q, k, v, *([] if bias is None else [bias])]
    with on_cpu():
        out, lse, seed, offset = efficient(q, k, v, full, causal, scale=0.3)
        grads = torch.autograd.grad((out * torch.arange(4)).sum(), inputs)
    keep = torch.ones(5, 7, dtype=torch.bool).tril() if causal else torch.ones(5, 7, dtype=torch.bool)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    scores = doubles[0] @ doubles[1].mT * 0.3
    scores = scores if bias is None else scores + doubles[3][..., :7]
    scores = scores.masked_fill(~keep, float("-inf"))
    expected = scores.softmax(-1) @ doubles[2]
    theirs = torch.autograd.grad((expected * torch.arange(4)).sum(), doubles)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse[..., :5].double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert bool((lse[..., 5:] == float("inf")).all())
    for mine, other in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=2e-5, rtol=2e-5)
    metas = efficient(*(None if x is None else x.to("meta") for x in (q, k, v, full)), causal)
    for mine, meta in zip((out, lse, seed, offset), metas, strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (meta.shape, meta.stride(), meta.dtype)


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("wanted", [(True, True, True, True), (True, True, True, False)])
def test_gradients_have_the_strides_of_torchs_operator(wanted: tuple[bool, ...]) -> None:
    q, k, v, bias = (x.float() for x in tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 4), (2, 3, 5, 7)))
    with on_cpu():
        out, lse, seed, offset = efficient(q, k, v, bias)
        arguments = (torch.randn_like(out), q, k, v, bias, out, lse, seed, offset)
        ours = ATEN._scaled_dot_product_efficient_attention_backward(*arguments, 0.0, list(wanted))
    metas = ATEN._scaled_dot_product_efficient_attention_backward(*(x.to("meta") for x in arguments), 0.0, list(wanted))
    for mine, meta in zip(ours, metas, strict=True):
        assert (mine is None) == (meta is None)
        if mine is not None:
            assert (mine.shape, mine.stride(), mine.dtype) == (meta.shape, meta.stride(), meta.dtype)


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_rows_without_keys_are_torchs_in_the_log_sum_exp_and_zero_in_gradients() -> None:
    q, k, v = leaves(tensors((1, 1, 4, 8), (1, 1, 6, 8), (1, 1, 6, 8)), torch.float32)
    bias = torch.zeros(1, 1, 4, 6)
    bias[:, :, 2] = float("-inf")
    with on_cpu():
        out, lse, *_ = efficient(q, k, v, bias)
        dq, _, _ = torch.autograd.grad(out.sum(), (q, k, v))
    assert float(lse[0, 0, 2]) == 0.0
    assert not out[0, 0, 2].any()
    assert not dq[0, 0, 2].any()
    assert dq[0, 0, 1].any()


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_a_dropout_mask_is_the_one_of_the_returned_state() -> None:
    q, k, v = leaves(tensors((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)), torch.float32)
    with on_cpu():
        out, _, seed, offset = efficient(q, k, v, None, p=0.4)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
    again = na.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.4, rng=(int(seed), int(offset))
    ).transpose(1, 2)
    torch.testing.assert_close(again, out)
    for a, b in zip(grads, torch.autograd.grad(again.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_the_switch_gives_everything_back() -> None:
    q, k, v = (x.float() for x in tensors((1, 2, 5, 8), *((1, 2, 7, 8),) * 2))
    tag = torch.compiler.config.cache_key_tag
    with pytest.raises(NotImplementedError, match="CPU"):
        efficient(q, k, v, None)
    outer = on_cpu(all=True)
    assert torch.compiler.config.cache_key_tag != tag
    with on_cpu():
        efficient(q, k, v, None)
    efficient(q, k, v, None)  # the outer one is still on
    assert sdpa.report()["enabled"] == ["all", "efficient"]
    outer.disable()
    outer.disable()
    with pytest.raises(NotImplementedError, match="CPU"):
        efficient(q, k, v, None)
    assert torch.compiler.config.cache_key_tag == tag
    assert sdpa.report()["taken"]["_scaled_dot_product_efficient_attention"] == 2


@pytest.mark.usefixtures("counted")
def test_a_call_that_no_capture_allows_is_torchs_at_every_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel of the outer operator calls the inner one, which the switch has replaced as well."""
    kernels: dict[str, Any] = {}
    monkeypatch.setattr(torch.library, "get_kernel", lambda name, _key: kernels[name], raising=False)

    def refuse(error: Exception) -> Any:
        def function(*_: Any) -> Any:
            raise error

        return function

    not_ready = NotReadyError("kernel forward_portable is not ready and stream 0x7 is being captured", 900)
    kernels["aten::inner"] = SimpleNamespace(call_boxed=lambda _keyset, x: x + 1)
    inner = replaced._taking("inner", "CUDA", refuse(not_ready))
    kernels["aten::outer"] = SimpleNamespace(call_boxed=inner)
    outer = replaced._taking("outer", "CUDA", refuse(not_ready))
    assert outer(None, 1) == 2
    assert sdpa.report()["left_to_torch"] == {f"{name}: {not_ready}": 1 for name in ("inner", "outer")}
    broken = replaced._taking("inner", "CUDA", refuse(CudaError("cuLaunchKernel: an illegal address", 700)))
    with pytest.raises(CudaError, match="illegal address"):
        broken(None, 1)
    assert sdpa.report()["taken"] == {}


@pytest.mark.usefixtures("counted")
def test_reasons_that_name_a_shape_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(call_boxed=lambda _keyset, x: x)
    monkeypatch.setattr(torch.library, "get_kernel", lambda _name, _key: kernel, raising=False)

    def refuse(length: int) -> None:
        raise ValueError(f"attn_mask: shape ({length},)")

    call = replaced._taking("operator", "CUDA", refuse)
    for length in range(400):
        call(None, length)
    left = sdpa.report()["left_to_torch"]
    assert sum(left.values()) == 400
    assert len(left) == replaced._MAX_REASONS + 1
    assert left["operator: other reasons"] == 400 - replaced._MAX_REASONS


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("grad", [False, True])
def test_all_takes_every_call_and_leaves_what_it_cannot_serve(grad: bool, caplog: pytest.LogCaptureFixture) -> None:
    name = "scaled_dot_product_attention"
    q, k, v = leaves(tensors((1, 4, 5, 8), *((1, 2, 7, 8),) * 2), torch.float32)
    mask = torch.rand(1, 1, 5, 7) > 0.2
    with on_cpu(all=True), torch.set_grad_enabled(grad):
        ours = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        assert sdpa.report()["taken"] == {name: 1}
        doubles = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)
        F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, enable_gqa=True)
        with torch.inference_mode():
            inside = F.scaled_dot_product_attention(q.detach().clone(), k, v, mask, enable_gqa=True)
        assert sdpa.report()["taken"] == {name: 2}
        assert sdpa.report()["left_to_torch"] == {f"{name}: dtype torch.float64": 2}
        assert collect_env.collect()["sdpa"] == {"counted_in": "this process", **sdpa.report()}
    assert doubles.dtype is torch.float64
    torch.testing.assert_close(ours.double(), doubles, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(inside, ours)
    said = [x.message for x in caplog.records if "left to torch" in x.message]
    assert said == [f"left to torch's own kernel: {name}: dtype torch.float64"]
    if grad:
        grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (ours, doubles)]
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def outputs_squared(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
    return F.scaled_dot_product_attention(query, key, value, mask).square().sum()


def each_squared(*x: Any) -> Any:
    return outputs_squared(*(t[None] for t in x))


TRANSFORMED: dict[str, Any] = {
    "grad": lambda *x: torch.func.grad(outputs_squared, argnums=(0, 1, 2, 3))(*x),
    "vjp": lambda *x: torch.func.vjp(F.scaled_dot_product_attention, *x)[1](x[0]),
    "vmap": lambda *x: torch.func.vmap(F.scaled_dot_product_attention)(*x),
    "vmap of grad": lambda *x: torch.func.vmap(torch.func.grad(each_squared, argnums=(0, 1, 2)))(*x),
    "grad of vmap": lambda *x: torch.func.grad(lambda *y: torch.func.vmap(each_squared)(*y).sum())(*x),
    "jacrev": lambda q, *x: torch.func.jacrev(lambda y: F.scaled_dot_product_attention(y, *x))(q),
    "vectorized": lambda q, *x: torch.autograd.functional.jacobian(
        lambda y: F.scaled_dot_product_attention(y, *x), q, vectorize=True
    ),
}


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", TRANSFORMED)
@pytest.mark.turns(3)
def test_transformations_of_torchs_calls_are_taken(how: str, compiled: bool) -> None:
    torch._dynamo.reset()
    inputs = [x.float() for x in tensors((2, 2, 3, 8), *((2, 2, 4, 8),) * 2, (2, 1, 3, 4))]
    theirs = TRANSFORMED[how](*inputs)
    if compiled and how == "vectorized":
        pytest.skip("torch.compile does not trace torch.autograd.functional")
    call = torch.compile(TRANSFORMED[how], backend="aot_eager", fullgraph=True) if compiled else TRANSFORMED[how]
    with on_cpu(all=True):
        ours = call(*inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert set(sdpa.report()["taken"]) == {"scaled_dot_product_attention"}
    assert sdpa.report()["left_to_torch"] == {}


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_transformations_that_are_left_to_torch() -> None:
    """Forward mode, element types that are not ours, and whatever is on another device than the switch is for."""
    name = "scaled_dot_product_attention"
    q, k, v = (x.float() for x in tensors((2, 2, 3, 8), *((2, 2, 4, 8),) * 2))

    def tangent(x: Any) -> Any:
        return torch.func.jvp(lambda y: F.scaled_dot_product_attention(y, k, v), (x,), (x,))[1]

    def dual(x: Any) -> Any:
        with torch.autograd.forward_ad.dual_level():
            out = F.scaled_dot_product_attention(torch.autograd.forward_ad.make_dual(x, x), k, v)
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    doubles = [x.double() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = [tangent(q), dual(q), torch.func.grad(outputs_squared)(*doubles)]
        with na.enable_sdpa(all=True):
            torch.func.grad(outputs_squared)(q, k, v)
        assert sdpa.report()["taken"] == sdpa.report()["left_to_torch"] == {}
        with on_cpu(all=True):
            found = [tangent(q), dual(q), torch.func.grad(outputs_squared)(*doubles)]
    torch.testing.assert_close(found, expected)
    left = sdpa.report()["left_to_torch"]
    assert sorted(left.values()) == [1, 1, 1]
    assert {f"{name}: Jvp of torch.func", f"{name}: dtype torch.float64"} < set(left)
    assert sdpa.report()["taken"] == {}


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_a_switch_is_used_again() -> None:
    """One object, by one `with` after the other and within its own; `disable` ends all that it switched on."""

    def enabled() -> list[str]:
        found: list[str] = sdpa.report()["enabled"]
        return found

    switch = on_cpu(all=True)
    for _ in range(3):
        with switch as it:
            assert it is switch
            assert enabled() == ["all", "efficient"]
            with switch:
                assert enabled() == ["all", "efficient"]
            assert enabled() == ["all", "efficient"]
        assert enabled() == []
    with switch, on_cpu():
        switch.disable()
        assert enabled() == ["efficient"]
        with switch:
            assert enabled() == ["all", "efficient"]
        assert enabled() == ["efficient"]
    assert enabled() == []
    with pytest.raises(ZeroDivisionError), switch:
        1 / 0  # noqa: B018
    assert enabled() == []
    switch.disable()
    assert enabled() == []


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("inside", ["forward", "backward", "both"])
def test_a_checkpoint_recomputes_by_what_the_switch_is_then(inside: str) -> None:
    q, k, v = (torch.randn(1, 2, 8, 8, requires_grad=True) for _ in range(3))

    def off() -> Any:
        return contextlib.nullcontext()

    for reentrant in (False, True):
        with off() if inside == "backward" else on_cpu(all=True):
            out = checkpoint(torch.nn.functional.scaled_dot_product_attention, q, k, v, use_reentrant=reentrant)
        raised = not reentrant and inside != "both"
        with (
            off() if inside == "forward" else on_cpu(all=True),
            pytest.raises(CheckpointError, match="different metadata") if raised else off(),
        ):
            out.sum().backward()


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_the_switch_decorates_functions() -> None:
    """Off outside of them, on in each call and in calls within calls."""

    @on_cpu(all=True)
    def within(depth: int) -> list[str]:
        """What it says."""
        if depth:
            within(depth - 1)
        enabled: list[str] = sdpa.report()["enabled"]
        return enabled

    assert sdpa.report()["enabled"] == []
    assert within(1) == within(0) == ["all", "efficient"]
    assert sdpa.report()["enabled"] == []
    assert (within.__name__, within.__doc__) == ("within", "What it says.")

    def steps() -> Iterator[int]:
        yield 1

    for wrong in (steps, 5):
        with on_cpu() as switch, pytest.raises(TypeError, match=r"as a decorator it got .* `with` statement"):
            switch(wrong)


def test_the_report_of_a_process_without_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(collect_env.sys.modules, "nvrtc_attn.torch.sdpa")
    found = collect_env.collect()["sdpa"]
    assert list(found) == ["counted_in"]
    assert "is not this one" in found["counted_in"]


def losses(module: Any, inputs: Any, steps: int = 3) -> list[float]:
    """Of a few steps of training."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for _ in range(steps):
        loss = module(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Any) -> Any:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -2:] = True
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def module(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "MultiheadAttention":
        return SelfAttention()
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@needs_get_kernel
@pytest.mark.slow(sample=["MultiheadAttention-False", "TransformerEncoder-True"])
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerEncoder"])
def test_modules_of_torch_train_the_same(kind: str, compiled: bool) -> None:
    x = torch.randn(2, 6, 16)
    expected = losses(module(kind), x)
    torch._dynamo.reset()
    with on_cpu(all=True):
        model = module(kind)
        if compiled:
            model = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = losses(model, x)
        model.eval()
        with torch.no_grad():
            module_out = model(x)
    torch._dynamo.reset()
    assert sdpa.report()["taken"]["scaled_dot_product_attention"] >= (1 if compiled else 3)
    note("torch.nn", found, expected, relative=True)
    assert found == pytest.approx(expected, rel=1e-4)
    assert bool(torch.isfinite(module_out).all())


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_a_compiled_program_holds_the_operator_while_the_switch_is_on() -> None:
    """Whatever was compiled before: what torch remembered of the operator is forgotten with each turn of the switch."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=lambda g, _: (graphs.append(g), g)[1])(graph, inputs)

    def holds_the_operator() -> bool:
        torch._dynamo.reset()
        graphs.clear()
        torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend=backend)(q, k, v)
        return ops.attention_forward in {node.target for graph in graphs for node in graph.graph.nodes}

    q, k, v = (x.float() for x in tensors((1, 4, 5, 8), *((1, 4, 7, 8),) * 2))
    for _ in range(2):
        assert not holds_the_operator()
        with on_cpu(all=True):
            assert holds_the_operator()


# ------------------------------------------------------------------------------------ the registry of flash attention


@pytest.fixture
def flash_on_cpu(counted: None) -> Iterator[None]:
    handle = flash.activate(_key="CPU")
    yield
    handle.remove()


def test_the_name_is_in_torchs_registry() -> None:
    attention = torch.nn.attention
    if not hasattr(attention, "list_flash_attention_impls"):
        pytest.skip("torch.nn.attention has no registry of flash attention (torch >= 2.10 has one)")
    assert "nvrtc_attn" in attention.list_flash_attention_impls()

    def kernel() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_backward", "CUDA")

    before = attention.current_flash_attention_impl(), kernel()
    attention.activate_flash_attention_impl("nvrtc_attn")
    assert (attention.current_flash_attention_impl(), kernel()) == ("nvrtc_attn", True)
    attention.restore_flash_attention_impl()
    assert (attention.current_flash_attention_impl(), kernel()) == before


@needs_get_kernel
@pytest.mark.usefixtures("flash_on_cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_last", [False, True])
def test_flash_attention_in_torchs_strides(causal: bool, heads_last: bool) -> None:
    values = tensors((2, 3, 7, 8), (2, 3, 7, 8), (2, 3, 7, 8))
    if heads_last:
        values = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in values]
    inputs = leaves(values, torch.float32)
    everything = ATEN._scaled_dot_product_flash_attention(*inputs, 0.0, causal, False, scale=0.3)
    out, lse, _, _, max_q, max_k, state, unused, _ = everything
    metas = ATEN._scaled_dot_product_flash_attention(*(x.detach().to("meta") for x in inputs), 0.0, causal)
    for mine, meta in zip(everything, metas, strict=True):
        if isinstance(meta, torch.Tensor):
            assert (mine.shape, mine.stride(), mine.dtype) == (meta.shape, meta.stride(), meta.dtype)
        else:
            assert mine == meta
    doubles = leaves(values, torch.float64)
    expected = F.scaled_dot_product_attention(*doubles, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    weight = torch.arange(8)
    theirs = torch.autograd.grad((expected * weight).sum(), doubles)
    for mine, other in zip(torch.autograd.grad((out * weight).sum(), inputs), theirs, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=5e-5, rtol=5e-5)
    raw = [torch.ones_like(out), *inputs, out, lse, None, None, max_q, max_k, 0.0, causal, state, unused]
    gradients = ATEN._scaled_dot_product_flash_attention_backward(*(detach(x) for x in raw))
    metas = ATEN._scaled_dot_product_flash_attention_backward(*(detach(x, "meta") for x in raw))
    assert [x.stride() for x in gradients] == [x.stride() for x in metas]


def detach(x: Any, device: str = "cpu") -> Any:
    return x.detach().to(device) if isinstance(x, torch.Tensor) else x


@needs_get_kernel
@pytest.mark.usefixtures("flash_on_cpu")
def test_flash_attention_of_packed_sequences_with_a_window() -> None:
    q, k, v = leaves(tensors((9, 2, 8), (9, 2, 8), (9, 2, 8)), torch.float32)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, lse, *_ = ATEN._flash_attention_forward(
        q, k, v, starts, starts, 5, 5, 0.0, True, False, window_size_left=2, window_size_right=0
    )
    assert lse.shape == (2, 9)
    expected = na.attention(
        q[None], k[None], v[None], causal=True, window_size=(2, 0), cu_seqlens_q=starts, cu_seqlens_k=starts,
        max_seqlen_q=5, max_seqlen_k=5,
    )[0]  # fmt: skip
    torch.testing.assert_close(out, expected)
    for mine, other in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected)), strict=True):
        torch.testing.assert_close(mine, other)


@needs_get_kernel
@pytest.mark.usefixtures("flash_on_cpu")
def test_dropout_of_flash_attention_is_left_to_torch() -> None:
    """Its masks are counted otherwise, and the backward pass may be torch's. On the CPU torch has no kernel."""
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(replaced.NotTakenError, match="dropout"):
        ATEN._scaled_dot_product_flash_attention(q, q, q, 0.5)
    with pytest.raises(replaced.NotTakenError, match="alibi_slopes"):
        ATEN._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, q, q)), None, None, 4, 4, 0.0, False, False, alibi_slopes=torch.ones(2)
        )
