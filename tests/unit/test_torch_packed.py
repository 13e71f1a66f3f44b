"""q, k and v in one tensor: results of their views, and a gradient in one piece that nothing puts together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn.torch as na  # noqa: E402 - after the skip
from nvrtc_attn.torch import arguments, ops, packed_ops  # noqa: E402

STARTS = torch.tensor([0, 3, 7], dtype=torch.int32)
PACKED = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 4, "max_seqlen_k": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True, "causal": True},
    "window": {"window_size": (2, 0), "softcap": 3.0, "softmax_scale": 0.5},
    "dropout": {"dropout_p": 0.4, "rng": (2**64 - 3, 11)},
    "deterministic": {"deterministic": True},
    "mask": {"mask": torch.arange(7).view(1, 1, 1, 7) < 5},
    "bias": {"bias": (1, 4, 1, 7)},
    "sink": {"sink": (4,), "causal": True, "return_lse": True},
    "sequences": PACKED,
    "max_logit": {"return_max_logit": True},
    "modifier": {"score_mod": lambda score, b, h, q, k: score * 2.0},
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Call:
    """A call by one of the doors, and the same by `attention` of views, with its gradients."""

    def __init__(self, which: str, options: dict[str, Any], dtype: Any = torch.float32, batch: int = 2) -> None:
        torch.manual_seed(0)
        shapes = ((batch, 7, 4, 8), (batch, 7, 2, 2, 8)) if which == "kv" else ((batch, 7, 3, 4, 8),)
        self.inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        self.count = len(self.inputs)
        self.options = {**options}
        for name in ("bias", "sink"):
            if name in options:
                self.options[name] = torch.randn(options[name], dtype=dtype, requires_grad=True)
                self.inputs.append(self.options[name])
        self.door: Callable[..., Any] = na.attention_kvpacked if which == "kv" else na.attention_qkvpacked

    def by_door(self, *tensors: Any) -> Any:
        return self.door(*tensors, **self.options)

    def by_views(self, *tensors: Any) -> Any:
        return na.attention(*tensors[:-1], *tensors[-1].unbind(2), **self.options)

    def run(self, call: Callable[..., Any]) -> list[Any]:
        """Results, and gradients of a weighted sum of those that have some."""
        found = call(*self.inputs[: self.count])
        results = list(found) if isinstance(found, tuple) else [found]
        with_gradient = [x for x in results if x.requires_grad]
        weights = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in with_gradient]
        return [*results, *torch.autograd.grad(with_gradient, self.inputs, weights)]

    def compare(self, call: Callable[..., Any]) -> None:
        ours, theirs = self.run(call), self.run(self.by_views)
        for a, b in zip(ours, theirs, strict=True):
            assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, True)
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("which", ["qkv", "kv"])
@pytest.mark.turns(3)
def test_results_and_gradients_are_those_of_views(which: str, name: str) -> None:
    call = Call(which, OPTIONS[name], batch=1 if OPTIONS[name] is PACKED else 2)
    call.compare(call.by_door)
    if name != "max_logit":  # torch.compile of a copy: the gradient of views as ever
        call.compare(torch.compile(call.by_door, backend="aot_eager", fullgraph=True))


def operators(inputs: list[Any], call: Callable[..., Any], gradients: Any = None) -> list[str]:
    """Of the programs of torch.compile, forward and backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    names: list[str] = []

    def seen(module: Any, _: Any) -> Any:
        names.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module)

    backend = aot_autograd(fw_compiler=seen, bw_compiler=seen)
    out = torch.compile(call, backend=backend, fullgraph=True, dynamic=False)(*inputs)
    torch.autograd.grad(out.sum(), inputs, gradients)
    return names


@pytest.mark.parametrize("which", ["qkv", "kv"])
@pytest.mark.turns(3)
def test_no_program_puts_the_gradient_together(which: str) -> None:
    call = Call(which, {"causal": True})
    names = operators(call.inputs, call.by_door)
    assert names.count("nvrtc_attn.attention_packed_forward.default") == 1
    assert names.count("nvrtc_attn.attention_packed_backward.default") == 1
    assert not any("stack" in name or "aten.cat" in name for name in names)
    torch._dynamo.reset()
    assert any("stack" in name or "aten.cat" in name for name in operators(call.inputs, call.by_views))


def test_lengths_that_are_symbols_and_exported_programs() -> None:
    program = torch.compile(
        lambda x: na.attention_qkvpacked(x, causal=True), backend="aot_eager", fullgraph=True, dynamic=True
    )
    for length in (5, 9):
        x = torch.randn(2, length, 3, 4, 8, requires_grad=True)
        found, expected = program(x), na.attention(*x.unbind(2), causal=True)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (found, expected)))

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return na.attention_qkvpacked(x, causal=True)

    x = x.detach()
    exported = torch.export.export(Module(), (x,), dynamic_shapes=({1: torch.export.Dim("m", min=2, max=99)},))
    torch.testing.assert_close(exported.module()(x[:, :7]), na.attention(*x[:, :7].unbind(2), causal=True))


def test_no_copy_is_made_of_it_outside_of_programs_either() -> None:
    call = Call("qkv", {})
    out = call.by_door(*call.inputs)
    assert [type(function).__name__ for function, _ in out.grad_fn.next_functions if function] == ["AccumulateGrad"]
    (gradient,) = torch.autograd.grad(out.sum(), call.inputs)
    assert gradient.is_contiguous()
    assert gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()


@pytest.mark.parametrize("name", ["plain", "dropout", "bias", "sink", "sequences"])
@pytest.mark.parametrize("which", ["qkv", "kv"])
@pytest.mark.turns(3)
def test_opcheck(which: str, name: str) -> None:
    call = Call(which, OPTIONS[name], batch=1 if OPTIONS[name] is PACKED else 2)
    parts = packed_ops.views(*((None, *call.inputs[:1]) if which == "qkv" else call.inputs[:2]))
    options = {"rng": None, **call.options}
    given, _, _ = arguments.operator_arguments(
        (), *parts, options.get("bias"), None, False, (None, None), None, 0.0, options.get("dropout_p", 0.0),
        options["rng"], options.get("cu_seqlens_q"), options.get("cu_seqlens_k"), options.get("max_seqlen_q"),
        options.get("max_seqlen_k"), None, True, False, None,
        {"sink": options["sink"]} if "sink" in options else {},
    )  # fmt: skip
    inputs = (None, call.inputs[0]) if which == "qkv" else call.inputs[:2]
    torch.library.opcheck(packed_ops.attention_packed_forward, (*inputs, *given[3:-1]))
    given = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in (*inputs, *given[3:-2]))
    out, lse = packed_ops.attention_packed_forward(*given, True)
    wanted = name == "bias", name == "sink"
    for dlse in (None, torch.randn_like(lse)):
        torch.library.opcheck(
            packed_ops.attention_packed_backward, (torch.randn_like(out), dlse, out, lse, *given, *wanted)
        )


@pytest.mark.parametrize("which", ["qkv", "kv"])
def test_one_gradient_alone(which: str) -> None:
    call = Call(which, {"bias": (1, 4, 7, 7)})
    for chosen in call.inputs:
        found = torch.autograd.grad(call.by_door(*call.inputs[: call.count]).sum(), chosen)
        expected = torch.autograd.grad(call.by_views(*call.inputs[: call.count]).sum(), chosen)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
        for x in call.inputs:
            x.requires_grad_(x is chosen)
        (found,) = torch.autograd.grad(call.by_door(*call.inputs[: call.count]).sum(), chosen)
        torch.testing.assert_close(found, expected[0], atol=1e-6, rtol=1e-6)
        for x in call.inputs:
            x.requires_grad_()


def test_strides_and_lazy_signs_are_read_as_they_are() -> None:
    call = Call("qkv", {"causal": True})
    plain = call.inputs[0]
    for change in (
        lambda x: x.mT.contiguous().mT,
        lambda x: x.flip(0).flip(0).transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch._neg_view(-x),
    ):
        call.inputs = [change(plain.detach()).requires_grad_()]
        call.compare(call.by_door)


def test_autocast_casts_once_and_gives_back_the_type_of_the_input() -> None:
    for which in ("qkv", "kv"):
        call = Call(which, {"sink": (4,)})
        with torch.autocast("cpu", torch.bfloat16):
            out = call.by_door(*call.inputs[: call.count])
            theirs = call.by_views(*call.inputs[: call.count])
            program = torch.compile(call.by_door, backend="aot_eager", fullgraph=True)(*call.inputs[: call.count])
        assert out.dtype == torch.bfloat16
        expected = torch.autograd.grad(theirs.float().sum(), call.inputs)
        for x in (out, program):
            torch.testing.assert_close(x, theirs)
            torch.testing.assert_close(torch.autograd.grad(x.float().sum(), call.inputs), expected)


def test_checkpoints_and_transformations() -> None:
    call = Call("qkv", {})
    call.compare(lambda *x: torch.utils.checkpoint.checkpoint(call.by_door, *x, use_reentrant=False))
    (x,) = call.inputs
    several = torch.stack((x, 2 * x)).detach()
    torch.testing.assert_close(torch.func.vmap(call.by_door)(several), torch.stack([*map(call.by_door, several)]))
    found = torch.func.grad(lambda x: call.by_door(x).square().sum())(x.detach())
    torch.testing.assert_close(found, torch.autograd.grad(call.by_views(x).square().sum(), x)[0])
    program = torch.compile(torch.func.vmap(call.by_door), backend="aot_eager")
    torch.testing.assert_close(program(several), torch.func.vmap(call.by_views)(several))
    for call in (Call("qkv", {}), Call("kv", {})):
        out = call.by_door(*call.inputs)
        weights = torch.randn(3, *out.shape)
        theirs = call.by_views(*call.inputs)
        torch.testing.assert_close(
            torch.autograd.grad(out, call.inputs, weights, is_grads_batched=True),
            torch.autograd.grad(theirs, call.inputs, weights, is_grads_batched=True),
        )


def test_a_second_derivative_is_refused() -> None:
    for call in (Call("qkv", {}), Call("kv", {"sink": (4,)})):
        gradients = torch.autograd.grad(call.by_door(*call.inputs[: call.count]).sum(), call.inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="no second"):
            sum(x.sum() for x in gradients).backward()


@pytest.mark.parametrize("which", ["qkv", "kv"])
def test_the_flop_counter_counts_them_as_attention(which: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    call = Call(which, {})
    inputs = [x.detach() for x in call.inputs]
    given = (None, *inputs) if which == "qkv" else tuple(inputs)
    rest = (*(None,) * 8, 0, 0, "", None, None, None, 0.0, 0.0, None, None, False, None)
    counted = []
    for forward, backward, tensors, results in (
        (packed_ops.attention_packed_forward, packed_ops.attention_packed_backward, given, (True,)),
        (ops.attention_forward, ops.attention_backward, packed_ops.views(*given), (True, False)),
    ):
        with FlopCounterMode(display=False) as counter:
            out, lse, *_ = forward(*tensors, *rest, *results)
            backward(torch.ones_like(out), None, out, lse, *tensors, *rest, False, False)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_without_a_gradient_nothing_is_kept() -> None:
    call = Call("qkv", {})
    with torch.no_grad():
        assert not call.by_door(*call.inputs).requires_grad
    assert not call.by_door(call.inputs[0].detach()).requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_wrong_shapes_are_refused_by_name(compiled: bool) -> None:
    def run(call: Callable[..., Any], *given: Any) -> Any:
        return (torch.compile(call, backend="aot_eager") if compiled else call)(*given)

    wrong = pytest.raises((ValueError, torch._dynamo.exc.TorchRuntimeError), match="heads, head_dim")
    with wrong:
        run(na.attention_qkvpacked, torch.randn(2, 7, 2, 4, 8, requires_grad=True))
    with wrong:
        run(na.attention_kvpacked, torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 2, 8))
    with wrong:
        run(na.attention_qkvpacked, torch.randn(2, 7, 3, 32))
    with pytest.raises(TypeError, match="qkv"):
        na.attention_qkvpacked([1.0])  # type: ignore[arg-type]
    q, kv = torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 4, 8, requires_grad=True)
    with pytest.raises(TypeError, match=r"^q: got NoneType"):
        na.attention_kvpacked(None, kv)  # type: ignore[arg-type]
    for name, x in (("bias", [1]), ("bias", q.numpy()), ("sink", [0.0] * 4)):
        with pytest.raises(TypeError, match=rf"^{name}: got .*takes torch tensors"):
            na.attention_kvpacked(q, kv, **{name: x})
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        na.attention_qkvpacked(torch.randn(2, 7, 3, 4, 8, requires_grad=True), window=3)
