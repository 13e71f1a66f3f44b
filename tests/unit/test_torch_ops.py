"""The operators of torch without a GPU: tracing, transformations, modes and subclasses give what eager calls give."""

from __future__ import annotations

import io
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn.torch as na  # noqa: E402 - after the skip
from nvrtc_attn.base.errors import UnsupportedError  # noqa: E402
from nvrtc_attn.torch import eager, ops  # noqa: E402

FORWARD, BACKWARD = ops.attention_forward, ops.attention_backward
# Of torch's own compiler, not of ours: modules that it imports are deprecated, and its workers fork.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def tensors(
    b: int = 2, m: int = 6, n: int = 9, h: int = 4, hkv: int = 2, d: int = 8, dtype: Any = None, grad: bool = True
) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((b, m, h, d), (b, n, hkv, d), (b, n, hkv, d))
    return [torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes]


def packed() -> dict[str, Any]:
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    return {
        "cu_seqlens_q": starts, "cu_seqlens_k": torch.tensor([0, 4, 9], dtype=torch.int32), "max_seqlen_q": 4,
        "max_seqlen_k": 5, "seqused_k": torch.tensor([4, 3], dtype=torch.int32),
    }  # fmt: skip


def arguments(
    q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, causal: str = "", dropout_p: float = 0.0,
    seed: Any = None, deterministic: bool = False, **more: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Of the operators, what comes before their last one."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "sink")
    return (
        q, k, v, bias, mask, *map(more.get, names), seed, None, 7, 3, causal, None, None, None, 0.0, dropout_p,
        more.get("max_seqlen_q"), more.get("max_seqlen_k"), deterministic, more.get("part"),
    )  # fmt: skip


def problems() -> dict[str, tuple[Any, ...]]:
    q, k, v = tensors()
    bias = torch.randn(1, 4, 6, 9, requires_grad=True)
    mask = torch.rand(2, 1, 6, 9) > 0.3
    one = [x.detach()[:1].requires_grad_() for x in tensors()]
    return {
        "plain": arguments(q, k, v),
        "bias": arguments(q, k, v, bias, mask, "top_left"),
        "strided": arguments(*(x.mT.contiguous().mT for x in (q, k, v)), bias.mT.contiguous().mT),
        "dropout": arguments(q, k, v, dropout_p=0.3),
        "device seed": arguments(q, k, v, dropout_p=0.3, seed=torch.tensor(5)),
        "packed": arguments(*one, **packed()),
        "half": arguments(*tensors(dtype=torch.bfloat16), torch.randn(1, 1, 1, 9)),
        "no rows": arguments(*tensors(m=0)),
        "sink": arguments(q, k, v, bias, sink=torch.randn(4, requires_grad=True)),
        "part": arguments(q, k, v, bias, dropout_p=0.3, part=[1, 5, 4, 12]),
    }  # fmt: skip


def detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("name", problems())
@pytest.mark.turns(3)
def test_opcheck(name: str) -> None:
    given = problems()[name]
    torch.library.opcheck(FORWARD, (*given, True, name in ("sink", "packed")))
    torch.library.opcheck(FORWARD, (*map(detached, given), False, name in ("bias", "no rows")))
    given = tuple(map(detached, given))
    out, lse, _ = FORWARD(*given, True, False)
    for dlse, wanted in itertools.product(
        (None, torch.randn_like(lse)), {False, given[3] is not None or name == "sink"}
    ):
        gradients = wanted and given[3] is not None, wanted and name == "sink"
        torch.library.opcheck(BACKWARD, (torch.randn_like(out), dlse, out, lse, *given, *gradients))


# ------------------------------------------------------------------------------------------------------- compilers

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "softcap": 4.0},
    "window": {"causal": "top_left", "window_size": (3, None), "softmax_scale": 0.3},
    "dropout": {"dropout_p": 0.4, "rng": (2**64 - 3, 11)},
    "deterministic": {"deterministic": True},
}


def run(call: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    """out, lse and the gradients of a weighted sum."""
    out, lse = call(*inputs)
    w, u = torch.linspace(-1, 1, out.numel()).view(out.shape), torch.linspace(0, 1, lse.numel()).view(lse.shape)
    grads = torch.autograd.grad((out * w).sum() + (lse * u).sum(), inputs)
    return [out, lse, *grads]


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def with_bias(inputs: list[Any]) -> list[Any]:
    q, k = inputs[:2]
    return [*inputs, torch.randn(1, q.shape[2], 1, k.shape[1], requires_grad=True)]


@pytest.fixture
def fresh() -> Iterator[None]:
    """No program compiled by another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow(sample=["False-causal", "True-dropout", "True-window"])
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.turns(3)
def test_compiled_whole(name: str, dynamic: bool) -> None:
    """F21: fullgraph died at ``is_neg``, and without it Dynamo walked into the NumPy reference."""

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return na.attention(q * 2, k, v, bias=bias, return_lse=True, **CALLS[name])

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m, n in ((6, 9), (7, 12), (8, 15)):
        inputs = with_bias(tensors(m=m, n=n))
        same(run(compiled, inputs), run(call, inputs))


@pytest.mark.usefixtures("fresh")
@pytest.mark.turns(3)
def test_one_dynamic_program_serves_all_lengths() -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return na.attention(q, k, v, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*tensors(m=11, n=17))  # no two sizes are equal at first: torch would take them for one
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in range(12, 15):
            assert compiled(*tensors(m=m, n=m + 6)).shape[1] == m


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++, with which inductor compiles what it makes for the CPU"
)


@needs_compiler
@pytest.mark.slow(sample=["dynamic"])
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("dynamic", "mode"),
    [
        pytest.param(False, None, id="static"),
        pytest.param(True, None, id="dynamic"),
        pytest.param(False, "max-autotune", id="max-autotune"),
    ],
)
@pytest.mark.turns(3)
def test_inductor(dynamic: bool, mode: str | None) -> None:
    """Its code asserts the strides that the fake tensors had."""

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out, lse = na.attention(q.sin(), k, v, bias=bias, causal=True, return_lse=True)
        return out.cos(), lse

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, mode=mode)
    for m in (6, 10) if dynamic else (6,):
        inputs = with_bias(tensors(m=m))
        same(run(compiled, inputs), run(call, inputs))


@pytest.mark.usefixtures("fresh")
def test_packed_sequences_compile() -> None:
    given = packed()

    def call(q: Any, k: Any, v: Any, **lengths: Any) -> Any:
        return na.attention(q, k, v, causal=True, return_lse=True, **lengths)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = [x.detach()[:1].requires_grad_() for x in tensors()]
    same(run(partial(compiled, **given), inputs), run(partial(call, **given), inputs))


@pytest.mark.usefixtures("fresh")
def test_dropout_without_a_seed_draws_anew_in_a_compiled_program() -> None:
    q, k, v = tensors()
    compiled = torch.compile(
        lambda: na.attention(q, k, torch.ones_like(v), dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    again = compiled()
    torch.manual_seed(4)
    assert torch.equal(compiled(), again)


class Layer(torch.nn.Module):
    """Projections around attention, as models have them."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.qkv, self.out = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(na.attention(q, k, v, causal=True).flatten(2))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    layer, x = Layer(), torch.randn(2, 6, 16)
    shapes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}}
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict)
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert FORWARD in called
    longer = torch.randn(3, 11, 16)
    torch.testing.assert_close(program.module()(longer), layer(longer))
    program.run_decompositions()


@needs_compiler
@pytest.mark.slow
@pytest.mark.turns(3)
def test_aot_inductor_package_runs_in_python(tmp_path: Path) -> None:
    layer, x = Layer().eval(), torch.randn(2, 6, 16)
    with torch.no_grad():
        program = torch.export.export(layer, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), layer(x))


@pytest.mark.usefixtures("fresh")
def test_a_program_exported_for_inference_still_has_gradients() -> None:
    """Its graph writes no log-sum-exp, so the backward pass computes it."""
    q, k, v = tensors(grad=False)

    class Attention(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return na.attention(q, k, v)

    program = torch.export.export(Attention(), (q, k, v))
    inputs = tensors()
    ours = torch.autograd.grad(program.module()(*inputs).sum(), inputs)
    same(list(ours), list(torch.autograd.grad(na.attention(*inputs).sum(), inputs)))


@pytest.mark.usefixtures("fresh")
def test_wrong_arguments_are_named_while_tracing() -> None:
    q, k, v = tensors()
    compiled = torch.compile(na.attention, fullgraph=True, backend="aot_eager")
    for given, match in (
        ({"q": q, "k": k[..., :4], "v": v}, "head dims 8 and 4 differ"),
        ({"q": q[0], "k": k, "v": v}, "q: shape"),
        ({"q": q, "k": k, "v": v, "causal": 1}, "causal: got 1"),
        ({"q": q, "k": k, "v": v, "bias": torch.ones(3, 4, 6, 9)}, "bias: shape"),
    ):
        with pytest.raises(Exception, match=match):
            compiled(**given)


# ---------------------------------------------------------------------------------------------------- transformations


def weighted(q: Any, k: Any, v: Any, bias: Any = None, **options: Any) -> Any:
    out, lse = na.attention(q, k, v, bias=bias, return_lse=True, **options)
    return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() + lse.square().sum()


def test_functional_gradients() -> None:
    inputs = [x.detach() for x in with_bias(tensors())]
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(weighted(*leaves), leaves)
    same(list(torch.func.grad(weighted, argnums=(0, 1, 2, 3))(*inputs)), list(expected))
    out, pull = torch.func.vjp(weighted, *inputs)
    same(list(pull(torch.ones_like(out))), list(expected))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.4, "rng": 5}])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (1, 0, None), (None, 2, 0)])
def test_vmap(options: dict[str, Any], in_dims: tuple[Any, ...]) -> None:
    size = 3
    inputs = []
    for dim, x in zip(in_dims, tensors(grad=False), strict=True):
        inputs.append(x if dim is None else torch.stack([x + 0.1 * i for i in range(size)], dim))
    call = partial(na.attention, return_lse=True, **options)
    ours = torch.func.vmap(call, in_dims=in_dims)(*inputs)
    rows = [[x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True)] for i in range(size)]
    theirs = zip(*(call(*row) for row in rows), strict=True)
    same(list(ours), [torch.stack(x) for x in theirs])


@pytest.mark.parametrize("shape", [(1, 4, 6, 9), (2, 1, 6, 9), (1, 1, 1, 9)])
@pytest.mark.parametrize("order", ["vmap of grad", "grad of vmap", "vmap of vmap of grad"])
def test_transformations_within_one_another(shape: tuple[int, ...], order: str) -> None:
    """Gradients of every sample, as torch.func users compute them; the bias is shared, then each has its own."""
    size = 3
    q, k, v = (torch.stack([x * (1 + 0.1 * i) for i in range(size)]) for x in tensors(grad=False))
    bias = torch.randn(shape)
    single = torch.func.grad(weighted, argnums=(0, 1, 2, 3))
    each = [single(q[i], k[i], v[i], bias) for i in range(size)]
    expected = [torch.stack(x) for x in zip(*each, strict=True)]
    dims = (0, 0, 0, None)
    if order == "vmap of grad":
        ours = torch.func.vmap(single, in_dims=dims)(q, k, v, bias)
    elif order == "grad of vmap":
        mapped = torch.func.vmap(weighted, in_dims=dims)
        ours = torch.func.grad(lambda *x: mapped(*x).sum(), argnums=(0, 1, 2, 3))(q, k, v, bias)
        expected[3] = expected[3].sum(0)
    else:
        twice = torch.func.vmap(torch.func.vmap(single, in_dims=dims), in_dims=dims)
        ours = [x[0] for x in twice(q[None], k[None], v[None], bias)]
    same(list(ours), expected)


def transformed(how: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A derivative of ``call``, a function of tensors that have a batch."""

    def single(*x: Any) -> Any:
        return call(*(t[None] for t in x))

    places = tuple(range(4))
    if how == "grad":
        return torch.func.grad(call, argnums=places)
    if how == "grad of vmap":
        return torch.func.grad(lambda *x: torch.func.vmap(single)(*x).sum(), argnums=places)
    return torch.func.vmap(torch.func.grad(single, argnums=places))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("how", ["grad", "vmap of grad", "grad of vmap"])
@pytest.mark.turns(3)
def test_transformations_compile_whole(how: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs = [x.detach() for x in with_bias(tensors())]
    inputs[3] = inputs[3].expand(2, -1, -1, -1).contiguous()
    call = transformed(how, partial(weighted, causal=True))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    same(list(compiled(*inputs)), list(call(*inputs)))


BATCHED = {
    "plain": {}, "causal with lse": {"causal": "top_left", "return_lse": True},
    "dropout": {"dropout_p": 0.4, "rng": (2**64 - 3, 7)},
    "sink": {"sink": torch.linspace(-1, 1, 4).requires_grad_(), "window_size": (3, None), "deterministic": True},
}  # fmt: skip


@pytest.mark.parametrize("how", ["is_grads_batched", "jacobian", "vmap"])
@pytest.mark.parametrize("name", [*BATCHED, "heads first"])
@pytest.mark.turns(3)
def test_a_batch_of_gradients(name: str, how: str) -> None:
    """Rows of it are those of one gradient after the other, from an output that eager calls made."""
    inputs = with_bias(tensors())
    options = BATCHED.get(name, {})
    if name == "heads first":
        inputs = [x.transpose(1, 2).detach().requires_grad_() for x in inputs[:3]] + inputs[3:]
        call: Any = partial(na.scaled_dot_product_attention, enable_gqa=True)
    else:
        call = lambda q, k, v, bias: na.attention(q, k, v, bias=bias, **options)  # noqa: E731
    if how == "jacobian":
        jacobian = partial(torch.autograd.functional.jacobian, call, tuple(inputs))
        ours, theirs = torch.utils._pytree.tree_leaves(jacobian(vectorize=True)), jacobian()
        same(ours, torch.utils._pytree.tree_leaves(theirs))
        return
    found = call(*inputs)
    wanted = [*inputs, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    for out in found if isinstance(found, tuple) else (found,):
        batch = torch.randn(3, *out.shape)
        slope = partial(torch.autograd.grad, out, wanted, retain_graph=True)
        ours = slope(batch, is_grads_batched=True) if how == "is_grads_batched" else torch.func.vmap(slope)(batch)
        rows = zip(*(slope(x) for x in batch), strict=True)
        same(list(ours), [torch.stack(x) for x in rows])


def test_a_batch_of_gradients_has_no_second_derivative() -> None:
    q, k, v = tensors()
    out = na.attention(q, k, v)
    batch = torch.randn(3, *out.shape)
    slope = partial(torch.autograd.grad, out, q, create_graph=True)
    for found in (slope(batch, is_grads_batched=True)[0], torch.func.vmap(slope)(batch)[0]):
        with pytest.raises(RuntimeError, match="once_differentiable"):
            found.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(grad: bool) -> None:
    """Without a gradient tangents were dropped, as if they were zero."""
    q, k, v = tensors(grad=grad)
    inner = torch.func.vmap(lambda x: na.attention(x[None], k[:1].detach(), v[:1].detach()))
    with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        torch.func.jvp(lambda x: na.attention(x, k, v), (q,), (q,))
    with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
        torch.func.jvp(inner, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
            na.attention(dual, k, v)
        with pytest.raises(UnsupportedError, match="forward-mode derivatives"):
            inner(dual)
        same([na.attention(q, k, v)], [na.attention(*(x.detach() for x in (q, k, v)))])


def test_second_derivatives_are_refused() -> None:
    q, k, v = (x.detach() for x in tensors())

    def slope(q: Any) -> Any:
        return torch.func.grad(lambda q: na.attention(q, k, v).sum())(q).sum()

    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.func.grad(slope)(q)
    given = tuple(x.requires_grad_() for x in (q, k, v))
    out, *_ = FORWARD(*arguments(*given), True, False)
    (dq,) = torch.autograd.grad(out, q, torch.ones_like(out, requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# ------------------------------------------------------------------------------------------------ modes and subclasses


def eager_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled with the names of the kernels' functions as they run."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        for module in (eager, ops):  # the eager function's, and that of the operators
            original = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, _n=name, _f=original, **k: (seen.append(_n), _f(*a, **k))[1])
    return seen


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_runs_the_forward_pass_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F21: the eager call is no operator, so a policy could not save it."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    layer, x = Layer(), torch.randn(2, 6, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    contexts = partial(create_selective_checkpoint_contexts, policy)

    def step(x: Any) -> Any:
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    seen = eager_calls(monkeypatch)
    (dx,) = torch.autograd.grad(step(x).square().sum(), x)
    assert seen == ["forward", "backward"]
    torch.testing.assert_close(dx, expected)


def test_saved_tensor_hooks_see_what_is_kept() -> None:
    q, k, v = tensors()
    packed_sizes: list[Any] = []

    def pack(x: Any) -> Any:
        packed_sizes.append(tuple(x.shape))
        return x.numpy() if not x.requires_grad else x.detach().numpy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        eager = na.attention(q, k, v)
        op, *_ = FORWARD(*arguments(q, k, v), True, False)
    assert packed_sizes.count((2, 6, 4, 8)) == 4  # q and out, twice
    same(list(torch.autograd.grad(eager.sum(), (q, k, v))), list(torch.autograd.grad(op.sum(), (q, k, v))))


def test_fake_tensors_are_described_without_a_warning() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeTensorMode() as mode:
            q, k, v = tensors()
            out, lse = na.attention(q, k, v, return_lse=True)
            out.sum().backward()
        outside = na.attention(*(mode.from_tensor(x) for x in tensors(grad=False)))
    assert (out.shape, lse.shape, q.grad.shape) == ((2, 6, 4, 8), (2, 4, 6), q.shape)
    assert type(outside).__name__ == "FakeTensor"


def test_meta_tensors_are_described() -> None:
    q, k, v = (x.to("meta") for x in tensors(grad=False))
    out, lse = na.attention(q, k, v, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 6, 4, 8), (2, 4, 6))
    with pytest.raises(ValueError, match="head dims 8 and 4 differ"):
        na.attention(q, k[..., :4], v)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask"])
def test_what_is_only_described_is_on_one_device(name: str) -> None:
    """With q alone on meta the call returned a tensor there, whatever k and v are."""
    q, k, v = tensors(grad=False)
    given = {"q": q, "k": k, "v": v, "bias": torch.zeros(1, 1, 6, 9), "mask": torch.ones(1, 1, 1, 9, dtype=torch.bool)}
    away = {x: y.to("meta") for x, y in given.items()}
    if name == "q":
        with pytest.raises(ValueError, match=r"q on meta, k on cpu.*Move them to meta"):
            na.attention(**{**given, "q": away["q"]})
    else:
        with pytest.raises(ValueError, match=rf"{name} on cpu.*Move them to meta"):
            na.attention(**{**away, name: given[name]})


TRACED: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: na.attention(q, k, v, causal=True, window_size=(4, 0), dropout_p=0.3, rng=(1, 2)),
    "sdpa": lambda q, k, v: na.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True),
    "score_mod": lambda q, k, v: na.attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j) * 0.1),
}


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of shapes, which it takes for data
def test_torch_jit_trace_records_the_operators(name: str) -> None:
    """It recorded memory for the output and nothing that writes to it, and of functions a call of Python."""
    call = TRACED[name]
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(call, tuple(tensors(grad=False))), file)
    file.seek(0)
    program = torch.jit.load(file)
    for sizes in ({}, {"b": 3, "m": 5, "n": 7}):
        given = [x + 1 for x in tensors(**sizes)]
        out, expected = program(*given), call(*given)
        torch.testing.assert_close(out, expected, atol=0, rtol=0)
        same(list(torch.autograd.grad(out.sum(), given)), list(torch.autograd.grad(expected.sum(), given)))


@pytest.mark.parametrize("name", ["attention", "sdpa", "score_mod"])
def test_the_flop_counter_counts_what_it_counts_for_torchs_attention(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = tensors()
    # Heads that share keys count as if each had its own; before torch 2.12 its functions refuse other numbers of heads.
    shapes = [(x.shape[0], q.shape[2], x.shape[1], x.shape[3]) for x in (q, k, v)]
    with FlopCounterMode(display=False) as counter:
        out = TRACED[name](q, k, v)
        assert counter.get_total_flops() == sdpa_flop_count(*shapes) > 0
        out.sum().backward()
    both = sdpa_flop_count(*shapes) + sdpa_backward_flop_count(shapes[0], *shapes)
    assert counter.get_total_flops() == both


def test_the_flop_counter_counts_each_sequence_with_its_own_keys() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (x.detach()[:1] for x in tensors())
    lengths = {name: x for name, x in packed().items() if name != "seqused_k"}
    with FlopCounterMode(display=False) as counter:
        na.attention(q, k, v, **lengths)
    assert counter.get_total_flops() == 2 * (2 * 4 + 4 * 5) * 4 * (8 + 8)
    with FlopCounterMode(display=False) as counter:  # without values of the lengths it is the most that it can be
        na.attention(*(x.to("meta") for x in (q, k, v)), **{n: move(x) for n, x in lengths.items()})
    assert counter.get_total_flops() == 2 * (6 * 9) * 4 * (8 + 8)


def move(x: Any) -> Any:
    return x.to("meta") if isinstance(x, torch.Tensor) else x


def test_subclasses_of_the_user_compute() -> None:
    class Named(torch.Tensor):
        pass

    q, k, v = tensors(grad=False)
    out = na.attention(q.as_subclass(Named), k, v)
    assert type(out) is Named
    torch.testing.assert_close(out.as_subclass(torch.Tensor), na.attention(q, k, v))

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * slopes[h]

    slopes = torch.rand(q.shape[2])
    expected = na.attention(q, k, k, score_mod=score_mod)
    slopes = slopes.as_subclass(Named)
    torch.testing.assert_close(na.attention(q, k, k, score_mod=score_mod).as_subclass(torch.Tensor), expected)
    heads_first = [x.transpose(1, 2) for x in (q, k, k)]
    out = na.flex_attention(*heads_first, score_mod, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), expected)
    used = torch.full((q.shape[0],), 3, dtype=torch.int32)
    out = na.attention(q, k, v, seqused_k=used.as_subclass(Named))
    torch.testing.assert_close(out.as_subclass(torch.Tensor), na.attention(q, k, v, seqused_k=used))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_that_of_sdpa(dtype: Any, compiled: bool) -> None:
    """F21: float32 came in and went out."""
    q, k, v = tensors(hkv=4)
    bias = torch.randn(1, 4, 6, 9, requires_grad=True)

    def call(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return na.attention(q, k, v, bias=bias)

    def theirs(q: Any, k: Any, v: Any, bias: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), bias)
        return out.transpose(1, 2)

    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, theirs):
        with torch.autocast("cpu", dtype):
            out = function(q, k, v, bias)
        results.append([out, *torch.autograd.grad(out.float().sum(), (q, k, v, bias))])
    for a, b in zip(*results, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a.float(), b.float(), atol=0.05, rtol=0.05)
    assert results[0][0].dtype is dtype
    with torch.autocast("cpu", dtype), torch.autocast("cpu", enabled=False):
        assert na.attention(q, k, v).dtype is torch.float32
    double = torch.ones(1, 1, 1, 9, dtype=torch.float64)
    with torch.autocast("cpu", dtype), pytest.raises(ValueError, match="bias: dtype float64"):
        na.attention(q, k, v, bias=double)


def test_plain_eager_calls_take_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door costs 0.2 us; an operator with its derivative 45 us."""
    monkeypatch.setattr(eager, "attention_by_operators", None)
    q, k, v = tensors()
    torch.autograd.grad(na.attention(q, torch.nn.Parameter(k), v).sum(), q)
    with torch.no_grad():
        na.attention(q, k, v, bias=torch.zeros(1, 1, 1, 9), mask=torch.ones(1, 1, 1, 9, dtype=torch.bool))


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "cu_seqlens_q"])
def test_what_is_no_tensor_is_refused_by_name_in_a_mode(name: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    given: dict[str, Any] = dict(zip("qkv", tensors(grad=False), strict=True))
    with TorchDispatchMode(), pytest.raises(TypeError, match=rf"^{name}: "):
        na.attention(**{**given, name: np.ones((2, 6, 4, 8), np.float32)})


# -------------------------------------------------------------------------------------------------------------- DTensor


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Callable[..., Any]]:
    """Meshes of four ranks of which this process is the first; collectives give back what they get."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield lambda *shape: init_device_mesh("cpu", shape)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("bias_shape", [(1, 8, 6, 9), (4, 1, 1, 9), (4, 8, 6, 9), (1, 1, 6, 9)])
def test_dtensors_shard_over_batch_and_heads(dim: int, bias_shape: tuple[int, ...], mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    devices = mesh(4)
    whole = [*(x.detach() for x in tensors(b=4, h=8, hkv=4)), torch.randn(bias_shape), torch.randn(8)]
    axis = {0: 0, 2: 1}[dim]
    placed = [*([Shard(dim)],) * 3, [Shard(axis) if bias_shape[axis] > 1 else Replicate()]]
    placed.append([Shard(0) if dim == 2 else Replicate()])
    local, distributed = [], []
    for x, placement in zip(whole, placed, strict=True):
        part = x.chunk(4, placement[0].dim)[0] if isinstance(placement[0], Shard) else x
        local.append(part.clone().requires_grad_())
        distributed.append(DTensor.from_local(part.clone(), devices, placement).requires_grad_())
    with CommDebugMode() as communication:
        q, k, v, bias, sink = distributed
        out, lse = na.attention(q, k, v, bias=bias, sink=sink, causal=True, return_lse=True)
        out.to_local().sum().backward()
    assert (tuple(out.placements), tuple(lse.placements)) == ((Shard(dim),), (Shard(axis),))
    assert communication.get_total_counts() == 0
    expected, _ = na.attention(local[0], local[1], local[2], bias=local[3], sink=local[4], causal=True, return_lse=True)
    expected.sum().backward()
    torch.testing.assert_close(out.to_local(), expected)
    for ours, theirs in zip(distributed, local, strict=True):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad)
    if isinstance(placed[3][0], Replicate):
        assert isinstance(bias.grad.placements[0], Partial)
    assert isinstance(sink.grad.placements[0], Shard if dim == 2 else Partial)


@pytest.mark.parametrize("dim", [1, 3])
def test_dtensors_that_are_sharded_otherwise_are_gathered(dim: int, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    devices = mesh(4)
    q, k, v = (x.detach()[:, :4] for x in tensors(b=4, h=8, hkv=4, m=4))
    q = DTensor.from_local(q.chunk(4, dim)[0], devices, [Shard(dim)])
    k, v = (DTensor.from_local(x, devices, [Replicate()]) for x in (k, v))
    with CommDebugMode() as communication:
        out = na.attention(q, k, v, dropout_p=0.5, rng=(3, 0))
    assert tuple(out.placements) == (Replicate(),)
    assert tuple(out.shape) == (4, 4, 8, 8)
    assert communication.get_total_counts() == 1
    with pytest.raises(ValueError, match="same on all ranks"):
        na.attention(q, k, v, dropout_p=0.5)


@pytest.mark.parametrize("more", [{}, {"dropout_p": 0.5, "rng": (3, 7)}])
def test_dtensors_of_packed_sequences_shard_over_heads(more: dict[str, Any], mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    devices, whole = mesh(4), [x.detach()[:1].requires_grad_() for x in tensors(h=8, hkv=1)]
    sink = torch.randn(8, requires_grad=True)
    alike = [Replicate()]
    q, of_heads = (
        DTensor.from_local(x.detach().chunk(4, dim)[0], devices, [Shard(dim)]).requires_grad_()
        for x, dim in ((whole[0], 2), (sink, 0))
    )
    k, v = (DTensor.from_local(x.detach(), devices, alike).requires_grad_() for x in whole[1:])
    lengths = {
        name: DTensor.from_local(x, devices, alike) if isinstance(x, torch.Tensor) else x
        for name, x in packed().items()
    }
    with CommDebugMode() as communication:
        out, largest = na.attention(q, k, v, sink=of_heads, return_max_logit=True, **lengths, **more)
        gradients = torch.autograd.grad(out, (q, k, v, of_heads), torch.ones_like(out.detach()))
    assert communication.get_total_counts() == 0
    assert (out.placements, largest.placements) == ((Shard(2),), (Shard(1),))
    assert [x.placements[0] for x in gradients] == [Shard(2), Partial(), Partial(), Shard(0)]
    expected, of_whole = na.attention(*whole, sink=sink, return_max_logit=True, **packed(), **more)
    torch.testing.assert_close(out.to_local(), expected[:, :, :2])
    torch.testing.assert_close(largest.to_local(), of_whole[:, :2])
    of_rank = torch.autograd.grad(expected[:, :, :2].sum(), (*whole, sink))
    for x, y, dim in zip(gradients, of_rank, (2, None, None, 0), strict=True):
        torch.testing.assert_close(x.to_local(), y if dim is None else y.narrow(dim, 0, 2))


def test_dtensors_beside_what_does_not_fit_are_refused_before_anything_is_sent(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.experimental import implicit_replication

    devices, whole = mesh(4), [x.detach() for x in tensors(b=4, h=8, hkv=4, m=8)]
    q, k, v = (DTensor.from_local(x.chunk(4, 1)[0], devices, [Shard(1)]) for x in whole)
    bias = torch.randn(8, 1, 1)[None]
    elsewhere = DTensor.from_local(bias, mesh(2, 2), [Replicate()] * 2)
    few = DTensor.from_local(whole[1][:3], devices, [Replicate()])
    with CommDebugMode() as communication:
        with pytest.raises(ValueError, match="bias: a plain tensor beside DTensors"):
            na.attention(q, k, v, bias=bias)
        with pytest.raises(ValueError, match="q: a plain tensor beside DTensors"):
            na.attention(whole[0], k, v)
        with pytest.raises(ValueError, match="one mesh"):
            na.attention(q, k, v, bias=elsewhere)
        with pytest.raises(ValueError, match="batch"):
            na.attention(q, few, few)
    assert communication.get_total_counts() == 0
    with implicit_replication():
        assert na.attention(q, k, v, bias=bias).shape == whole[0].shape


def test_ranks_that_are_none_of_the_mesh_take_part_in_no_call(mesh: Any) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh(4)
    devices = DeviceMesh("cpu", [2, 3])
    q, k, v = (DTensor.from_local(x.detach(), devices, [Shard(2)]).requires_grad_() for x in tensors(b=2, h=8, hkv=1))
    out, lse = na.attention(q, k, v, dropout_p=0.5, rng=(3, 0), return_lse=True)
    assert (out.placements, lse.placements) == ((Shard(2),), (Shard(1),))
    assert (out.to_local().numel(), out.dtype, lse.dtype) == (0, q.dtype, torch.float32)
    gradients = torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert [x.to_local().numel() for x in gradients] == [0] * 3


@pytest.mark.parametrize("with_functions", [False, True])
@pytest.mark.parametrize("dim", [0, 2])
def test_programs_shard_dtensors_as_eager_calls_do(dim: int, with_functions: bool, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    devices, whole = mesh(4), [x.detach() for x in tensors(b=5, h=8, hkv=4)]
    inputs = [
        DTensor.from_local(x.chunk(4, dim)[0], devices, [Shard(dim)], shape=x.shape, stride=x.stride()) for x in whole
    ]
    inputs.append(DTensor.from_local(torch.randn(8), devices, [Replicate()]))
    inputs = [x.requires_grad_() for x in inputs[: 3 + with_functions]]
    na.register_sharding()

    def call(q: Any, k: Any, v: Any, slopes: Any = None) -> Any:
        more = {"score_mod": lambda s, b, h, i, j: s + slopes[h] * (i - j) + b} if with_functions else {}
        return na.attention(q, k, v, causal=True, dropout_p=0.5, rng=(3, 0), **more)

    found = []
    for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out.detach()))
        placements = [x.placements[0] for x in (out, *gradients)]
        assert placements == [Shard(dim)] * 4 + [Partial()] * with_functions
        found.append([out, *gradients])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.to_local(), theirs.to_local())


@pytest.mark.parametrize("compiled", [False, True])
def test_used_keys_of_a_dense_batch(compiled: bool) -> None:
    def gradients(call: Any, **options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = [torch.randn(3, n, 4, 16, requires_grad=True) for n in (20, 30, 30)]
        bias = torch.randn(1, 4, 20, 30, requires_grad=True)
        out = call(*x, bias=bias, **options)
        return [out.detach(), *torch.autograd.grad((out**2).sum(), [*x, bias])]

    used = torch.tensor([30, 0, 13], dtype=torch.int32)
    call = torch.compile(na.attention, backend="aot_eager", fullgraph=True) if compiled else na.attention
    mask = torch.arange(30) < used[:, None, None, None]
    for a, b in zip(gradients(call, seqused_k=used), gradients(na.attention, mask=mask), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_programs_announce_their_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels begin to compile beside those of the forward pass, as in eager calls."""
    announced = []
    original = ops.forward

    def spy(*arguments: Any, backward_follows: bool = False, **more: Any) -> Any:
        announced.append(backward_follows)
        return original(*arguments, backward_follows=backward_follows, **more)

    monkeypatch.setattr(ops, "forward", spy)
    q, bias = torch.randn(1, 8, 2, 8), torch.randn(1, 2, 8, 8)
    compiled = torch.compile(lambda q, **options: na.attention(q, q, q, **options), backend="aot_eager")
    compiled(q.clone().requires_grad_()).sum().backward()
    compiled(q)
    compiled(q.clone().requires_grad_(), bias=bias)  # whose gradient may be wanted or not: other kernels
    assert announced == [True, False, False]


@pytest.mark.parametrize("dim", [0, 2])
def test_dtensors_with_used_keys_of_a_dense_batch(dim: int, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    devices = mesh(4)
    whole = [x.detach() for x in tensors(b=4, h=8, hkv=4)]
    used = torch.tensor([5, 9, 0, 2], dtype=torch.int32)
    local = [x.chunk(4, dim)[0].clone() for x in whole]
    q, k, v = (DTensor.from_local(x, devices, [Shard(dim)]) for x in local)
    local_used, placement = (used[:1], Shard(0)) if dim == 0 else (used, Replicate())
    with CommDebugMode() as communication:
        out = na.attention(q, k, v, seqused_k=DTensor.from_local(local_used, devices, [placement]))
    assert communication.get_total_counts() == 0
    assert tuple(out.placements) == (Shard(dim),)
    torch.testing.assert_close(out.to_local(), na.attention(*local, seqused_k=local_used))


def test_dtensors_with_a_seed_in_a_tensor(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    whole = [x.detach() for x in tensors(b=4, h=8, hkv=4)]
    devices, seed = mesh(4), torch.tensor(3)
    q, k, v, word = (DTensor.from_local(x, devices, [Replicate()]) for x in (*whole, seed))
    found = na.attention(q, k, v, dropout_p=0.5, rng=(word, 0))
    torch.testing.assert_close(found.to_local(), na.attention(*whole, dropout_p=0.5, rng=(3, 0)))
