"""The operators and the switch of torch on the GPU: inductor, CUDA graphs, export, autocast, torch's own modules."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from differences import note

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.nn.functional as F  # noqa: E402 - after the skip
from harness import forget_plans  # noqa: E402

import nvrtc_attn  # noqa: E402
import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402
from nvrtc_attn.torch import eager, modified, ops, passes, replaced, sdpa  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
ATEN = torch.ops.aten
needs_get_kernel = pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="torch.library.get_kernel is missing (torch >= 2.9.1 has it)"
)


def qkv(b: int = 2, m: int = 128, n: int = 160, h: int = 4, hkv: int = 2, d: int = 64, dtype: Any = None) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((b, m, h, d), (b, n, hkv, d), (b, n, hkv, d))
    return [torch.randn(s, device="cuda", dtype=dtype or torch.bfloat16, requires_grad=True) for s in shapes]


def run(call: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    out = call(*inputs)
    weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view(out.shape)
    return [x.clone() for x in (out, *torch.autograd.grad((out * weight).sum(), inputs))]


def same(ours: list[Any], theirs: list[Any], tolerance: float = 0.0) -> None:
    """Without a tolerance: the same kernels ran on the same values."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


MODES: dict[str, dict[str, Any]] = {
    "static": {"dynamic": False},
    "dynamic": {"dynamic": True},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("mode", MODES)
def test_inductor_gives_the_eager_numbers(mode: str, with_bias: bool) -> None:
    """deterministic=True, so that the gradients of two runs are the same bits."""

    def call(q: Any, k: Any, v: Any, bias: Any = None) -> Any:
        return na.attention(q, k, v, bias=bias, causal=True, deterministic=True)

    compiled = torch.compile(call, fullgraph=True, **MODES[mode])
    for m, n in ((128, 160), (96, 200)):
        inputs = qkv(m=m, n=n)
        if with_bias:
            inputs.append(torch.randn(1, 4, m, n, device="cuda", dtype=torch.bfloat16, requires_grad=True))
        expected = run(call, inputs)
        for _ in range(3):  # CUDA graphs are recorded at the second call, and replayed at the third
            torch.compiler.cudagraph_mark_step_begin()
            same(run(compiled, inputs), expected)


def test_reduce_overhead_replays_graphs_and_draws_new_dropout_masks() -> None:
    q, k, v = (x.detach() for x in qkv(hkv=4))
    compiled = torch.compile(
        lambda q, k, v: na.attention(q, k, v, dropout_p=0.5), fullgraph=True, mode="reduce-overhead"
    )
    seen = []
    ones = torch.ones_like(v)
    for _ in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        seen.append(compiled(q, k, ones).clone())
    assert all(not torch.equal(seen[-1], x) for x in seen[:-1])
    means = torch.stack([x.float().mean() for x in seen])
    assert abs(float(means.mean()) - 1.0) < 0.02


class Block(torch.nn.Module):
    """Projections around attention, as models have them."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.qkv, self.out = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return x + self.out(na.attention(q, k, v, causal=True).flatten(2))


def losses(module: Any, steps: int = 5, dtype: Any = torch.bfloat16, **inputs: Any) -> list[float]:
    torch.manual_seed(1)
    x = torch.randn(4, 128, 256, device="cuda")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = module(x, **inputs).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_training_under_autocast_compiled_and_eager(mode: str) -> None:
    """F21: under autocast float32 came in and went out."""
    expected = losses(Block().cuda())
    found = losses(torch.compile(Block().cuda(), fullgraph=True, **MODES[mode]))
    assert found == pytest.approx(expected, rel=2e-3)
    assert found[-1] < found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_that_of_sdpa(dtype: Any) -> None:
    q, k, v = qkv(hkv=4, dtype=torch.float32)
    with torch.autocast("cuda", dtype):
        ours = na.attention(q, k, v)
        theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert ours.dtype is theirs.dtype is dtype
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    for mine, other in zip(*(torch.autograd.grad(x.float().sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
        assert mine.dtype is other.dtype is torch.float32
        torch.testing.assert_close(mine, other, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("name", ["plain", "bias", "dropout", "packed", "sink"])
def test_opcheck(name: str) -> None:
    q, k, v = qkv(b=1, m=32, n=48)
    bias = torch.randn(1, 1, 32, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts: list[Any] = [None, None]
    longest: tuple[Any, Any] = (None, None)
    if name == "packed":
        starts = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 12, 32], [0, 20, 48])]
        longest = (20, 28)
    seed = torch.tensor(5, device="cuda") if name == "dropout" else None
    sink = torch.zeros(q.shape[2], device="cuda", requires_grad=True) if name == "sink" else None
    arguments = (
        q, k, v, bias if name == "bias" else None, None, *starts, None, sink, seed, None, 0, 3, "", None, None, None,
        0.0, 0.3 if name == "dropout" else 0.0, *longest, True, None,
    )  # fmt: skip
    torch.library.opcheck(ops.attention_forward, (*arguments, True, name in ("plain", "packed")))
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    out, lse, _ = ops.attention_forward(*detached, True, False)
    for dlse in (None, torch.randn_like(lse)):
        gradients = torch.randn_like(out), dlse, out, lse, *detached, name == "bias", name == "sink"
        torch.library.opcheck(ops.attention_backward, gradients)


@pytest.mark.parametrize("beside", ["alone", "bias, sink and dropout"])
def test_opcheck_of_modifiers(beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators that calls with functions are in programs, as a mode sees them: arguments of such a call."""
    q, k, v = qkv(b=1, m=32, n=48)
    slopes, table = (torch.randn(n, device="cuda", requires_grad=True) for n in (4, 80))
    modifier = nvrtc_attn.trace(
        lambda score, b, h, q, k: score * slopes[h] + table[q - k + 47], lambda b, h, q, k: (q - k).abs() < 40
    )
    options: dict[str, Any] = {}
    if beside != "alone":
        options["bias"] = torch.randn(1, 1, 32, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options["sink"] = torch.zeros(4, device="cuda", requires_grad=True)
        options["dropout_p"], options["rng"] = 0.3, (5, 3)
    own, seen = modified.modified_forward, []
    with monkeypatch.context() as patch:
        patch.setattr(modified, "modified_forward", lambda *given: (seen.append(given), own(*given))[1])
        patch.setattr(modified, "_dispatch_modes", lambda: 1)
        na.attention(q, k, v, score_mod=modifier, return_lse=True, **options)
    (given,) = seen
    torch.library.opcheck(own, given)
    *of_call, _, _, captures, program, ints, floats = given
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in of_call]
    functions = [x.detach() for x in captures], program, ints, floats
    out, lse, _ = own(*detached, True, False, *functions)
    flags = ("bias" in options, "sink" in options)
    for dlse in (None, torch.randn_like(lse)):
        for wanted in ([True, True], [False, True]):
            arguments = torch.randn_like(out), dlse, out, lse, *detached, *flags, *functions, wanted
            torch.library.opcheck(modified.modified_backward, arguments)


def test_export_runs_in_another_shape() -> None:
    block, x = Block().cuda(), torch.randn(2, 128, 256, device="cuda")
    shapes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=4096)}}
    program = torch.export.export(block, (x,), dynamic_shapes=shapes)
    longer = torch.randn(3, 200, 256, device="cuda")
    torch.testing.assert_close(program.module()(longer), block(longer))


@pytest.mark.slow
def test_aot_inductor_package_runs_in_python(tmp_path: Path) -> None:
    """Skipped where torch's loader ends the process with a package of torch's own layers, too.

    On an H200 (torch 2.11.0+cu130, driver 580.159) it does so with both; on the CPU both packages run.
    """

    def run_package(of: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(Path(__file__).with_name("aot_package.py")), str(tmp_path), of, "cuda"]
        return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    done = run_package("attention")
    if done.returncode == -signal.SIGSEGV and run_package("torch").returncode == -signal.SIGSEGV:
        pytest.skip("torch's loader of packages crashes here with a layer that has no attention")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout


def test_selective_checkpointing_runs_the_forward_pass_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op is ops.attention_forward else CheckpointPolicy.PREFER_RECOMPUTE

    block, x = Block().cuda(), torch.randn(2, 128, 256, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    original, calls = passes.forward, []
    for module in (eager, ops):  # the eager function's, and that of the operators
        monkeypatch.setattr(module, "forward", lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    contexts = partial(create_selective_checkpoint_contexts, policy)
    (dx,) = torch.autograd.grad(checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum(), x)
    assert len(calls) == 1
    torch.testing.assert_close(dx, expected, atol=1e-4, rtol=1e-4)


def test_offloaded_activations() -> None:
    inputs = qkv()
    expected = run(partial(na.attention, deterministic=True), inputs)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        out = na.attention(*inputs, deterministic=True)
    weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=out.dtype).view(out.shape)
    same([out, *torch.autograd.grad((out * weight).sum(), inputs)], expected)


def test_gradients_of_every_sample() -> None:
    q, k, v = (x.detach() for x in qkv(b=3, dtype=torch.float32))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return na.attention(q[None], k[None], v[None], causal=True).square().sum()

    ours = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        theirs = torch.func.grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[i])
        same([x[i] for x in ours], list(theirs), 1e-4)


# ----------------------------------------------------------------------------------------------------------------- SDPA


@pytest.fixture
def counted() -> Iterator[None]:
    replaced._taken.clear()
    replaced._left.clear()
    yield
    assert sdpa.report()["enabled"] == []


def heads_first(*shapes: tuple[int, ...], dtype: Any = torch.float16) -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [160, 131])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_efficient_attention_beside_torchs_own(dtype: Any, length: int, causal: bool, biased: bool) -> None:
    """Numbers, shapes and strides of all that the four operators return."""
    q, k, v, bias = heads_first((2, 4, 100, 64), *((2, 4, length, 64),) * 2, (1, 4, 100, 168), dtype=dtype)
    full = bias[..., :length].expand(2, 4, 100, length) if biased else None
    inputs = [q, k, v, *([bias] if biased else [])]
    results = []
    for switch in (True, False):
        handle = na.enable_sdpa() if switch else None
        out, lse, seed, offset = ATEN._scaled_dot_product_efficient_attention(q, k, v, full, True, 0.0, causal)
        raw = ATEN._scaled_dot_product_efficient_attention_backward(
            torch.ones_like(out), q, k, v, full, out, lse, seed, offset, 0.0, [True, True, True, biased], causal
        )
        grads = torch.autograd.grad(out.square().sum(), inputs)
        results.append([x if x is None else x.detach() for x in (out, lse, *raw, *grads)])
        layouts = [
            (x.stride(), x.device, x.dtype) for x in (out, lse, seed, offset, *(g for g in raw if g is not None))
        ]
        results[-1].append(layouts)
        if handle is not None:
            handle.disable()
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 3e-4}[dtype]
    *ours, our_layouts = results[0]
    *theirs, their_layouts = results[1]
    if biased and causal:
        # torch leaves the gradient of a bias unwritten in tiles that lie wholly beyond the diagonal.
        beyond = torch.ones(100, length, device="cuda", dtype=torch.bool).triu(1)
        for index in (5, 9):
            assert not ours[index][..., :length][..., beyond].any()
            theirs[index][..., :length].masked_fill_(beyond, 0.0)
    assert our_layouts == their_layouts
    assert sdpa.report()["taken"]["_scaled_dot_product_efficient_attention"] == 1
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            finite = torch.isfinite(b)
            scale = max(1.0, float(b[finite].float().abs().max()))
            assert torch.equal(torch.isfinite(a), finite)
            assert float((a[finite].float() - b[finite].float()).abs().max()) <= tolerance * scale


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("ours_first", [False, True])
def test_forward_and_backward_may_be_of_two_makers(ours_first: bool) -> None:
    """The switch may end between the two: log-sum-exp, dropout mask and its state mean the same to both."""
    q, k, v = heads_first(*((2, 4, 100, 64),) * 3, dtype=torch.float32)

    def forward() -> Any:
        return ATEN._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.3, False)[0]

    def backward(out: Any) -> Any:
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    torch.manual_seed(5)
    expected = backward(forward())
    torch.manual_seed(5)
    if ours_first:
        with na.enable_sdpa():
            out = forward()
        found = backward(out)
    else:
        out = forward()
        with na.enable_sdpa():
            found = backward(out)
    same(list(found), list(expected), 3e-4)


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_a_captured_call_replays_with_new_masks_and_unknown_kernels_are_torchs() -> None:
    q, k, v = (x.detach() for x in heads_first(*((1, 2, 128, 64),) * 3))
    ones = torch.ones_like(v)

    def call(p: float, scale: float | None = None) -> Any:
        return ATEN._scaled_dot_product_efficient_attention(q, k, ones, None, True, p, False, scale=scale)

    with na.enable_sdpa():
        call(0.5)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _, seed, _ = call(0.5)
        assert seed.is_cuda
        seen = []
        for _ in range(50):
            graph.replay()
            seen.append(out.clone())
        assert not torch.equal(seen[0], seen[1])
        assert abs(float(torch.stack(seen).float().mean()) - 1.0) < 0.02
        left = sum(sdpa.report()["left_to_torch"].values())
        odd = [x.detach() for x in heads_first(*((1, 2, 72, 88),) * 3, dtype=torch.float32)]
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ATEN._scaled_dot_product_efficient_attention(*odd, None, False, 0.0, True)
        assert sum(sdpa.report()["left_to_torch"].values()) > left


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(256, 4, batch_first=True)

    def forward(self, x: Any) -> Any:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[0, -20:] = True
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def module(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "MultiheadAttention":
        return SelfAttention().cuda()
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()


@needs_get_kernel
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
@pytest.mark.parametrize("every", [False, True], ids=["efficient", "all"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerEncoder"])
def test_modules_of_torch_train_the_same(kind: str, dtype: Any, every: bool, compiled: bool) -> None:
    expected = losses(module(kind), dtype=dtype)
    forget_plans()
    torch._dynamo.reset()  # a program made without the switch keeps its kernels, and serves every such module
    with na.enable_sdpa(all=every):
        model = module(kind)
        if compiled:
            model = torch.compile(model, fullgraph=True)
        found = losses(model, dtype=dtype)
    note("torch.nn", found, expected, relative=True)
    assert found == pytest.approx(expected, rel=1e-4 if dtype is None else 5e-3)
    if every:
        assert {type(x).__name__ for x in plan._plans.values()} >= {"ForwardPlan", "BackwardPlan"}, "not on our kernels"
    if every and not compiled:
        assert sdpa.report()["taken"]["scaled_dot_product_attention"] >= 5
    elif kind == "MultiheadAttention" and dtype is None and not every:
        # What torch gives to memory-efficient attention: masks in half precision go to cuDNN, where there is one.
        assert sdpa.report()["taken"]["_scaled_dot_product_efficient_attention"] >= 5
    assert not sdpa.report()["left_to_torch"]


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_all_serves_masked_groups_and_wide_heads_which_torch_computes_densely() -> None:
    q, k, v = heads_first((1, 8, 256, 320), *((1, 2, 256, 320),) * 2, dtype=torch.bfloat16)
    mask = torch.rand(1, 1, 256, 256, device="cuda") > 0.3
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, enable_gqa=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with na.enable_sdpa(all=True), torch.no_grad():
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.cuda.max_memory_allocated() - before < 4 * out.numel() * out.element_size()
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
    assert sdpa.report()["taken"] == {"scaled_dot_product_attention": 1}


class Jagged:
    """Three sequences of 100, 7 and 200 tokens, 4 heads of 64, as jagged tensors of leaves."""

    lengths = (100, 7, 200)

    def __init__(self, dtype: torch.dtype, device: str = "cuda") -> None:
        torch.manual_seed(0)
        self.leaves = [torch.randn(sum(self.lengths), 4, 64, device=device, dtype=dtype) for _ in range(3)]
        self.dout = torch.randn_like(self.leaves[0])
        offsets = torch.tensor([0, *self.lengths], device=device).cumsum(0)
        self.nested = [
            torch.nested.nested_tensor_from_jagged(x.requires_grad_(), offsets).transpose(1, 2) for x in self.leaves
        ]

    def check(self, out: Any, tolerance: float) -> None:
        """``out`` and the gradients that come through it, against each sequence by itself in float32."""
        values = out.transpose(1, 2).values()
        found = (values, *torch.autograd.grad(values, self.leaves, self.dout))
        exact = [x.detach().float().requires_grad_() for x in self.leaves]
        parts = zip(*(x.split(self.lengths) for x in exact), strict=True)
        rows = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in part), is_causal=True)[0].transpose(0, 1)
            for part in parts
        ]
        expected = torch.cat(rows)
        wanted = (expected, *torch.autograd.grad(expected, exact, self.dout.float()))
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
            torch.testing.assert_close(
                ours.float(), theirs, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: n + m
            )


@needs_get_kernel
@pytest.mark.usefixtures("counted")
def test_jagged_tensors_reach_the_kernels() -> None:
    """torch gives nested tensors of float32 to ``_efficient_attention_forward`` and its backward."""
    jagged = Jagged(torch.float32)
    with na.enable_sdpa():
        out = F.scaled_dot_product_attention(*jagged.nested, is_causal=True)
        jagged.check(out, 1e-4)
    taken = sdpa.report()["taken"]  # beside the dense calls that it was compared with
    assert taken["_efficient_attention_forward"] == taken["_efficient_attention_backward"] == 1


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "inductor"])
def test_flash_attention_by_its_name_in_torchs_registry(compiled: bool) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("torch.nn.attention has no registry of flash attention (torch >= 2.10 has one)")
    inputs = heads_first(*((2, 4, 200, 64),) * 3, dtype=torch.bfloat16)

    def call(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        expected = run(call, inputs)
        torch.nn.attention.activate_flash_attention_impl("nvrtc_attn")
        try:
            found = run(torch.compile(call, fullgraph=True) if compiled else call, inputs)
        finally:
            torch.nn.attention.restore_flash_attention_impl()
    same(found, expected, 3e-2)
    taken = sdpa.report()["taken"]
    assert taken["_scaled_dot_product_flash_attention"] >= 1
    assert taken["_scaled_dot_product_flash_attention_backward"] >= 1


@pytest.mark.usefixtures("counted")
def test_jagged_tensors_of_16_bits_reach_the_kernels_by_the_registry() -> None:
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("torch.nn.attention has no registry of flash attention (torch >= 2.10 has one)")
    jagged = Jagged(torch.bfloat16)
    torch.nn.attention.activate_flash_attention_impl("nvrtc_attn")
    try:
        out = F.scaled_dot_product_attention(*jagged.nested, is_causal=True)
        jagged.check(out, 3e-2)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert sdpa.report()["taken"] == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
