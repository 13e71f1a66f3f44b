"""The PyTorch adapter: autograd, streams, devices, CUDA graphs, memory, threads."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn  # noqa: E402
import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn.base import log  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402
from nvrtc_attn.runtime import lifetime  # noqa: E402


def qkv(b: int = 2, m: int = 128, n: int = 128, h: int = 4, hkv: int = 4, d: int = 64, dtype: Any = None) -> list[Any]:
    dtype = dtype or torch.float16
    shapes = ((b, m, h, d), (b, n, hkv, d), (b, n, hkv, d))
    return [torch.randn(s, device="cuda", dtype=dtype, requires_grad=True) for s in shapes]


def dense(q: Any, k: Any, v: Any, bias: Any = None, keep: Any = None, multiplier: float = 1.0) -> tuple[Any, Any]:
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    s = s if bias is None else s + bias.double()
    p = s.softmax(-1)
    p = p if keep is None else p * keep * multiplier
    return (p @ v).transpose(1, 2), s.logsumexp(-1)


@pytest.mark.parametrize("bias_shape", [(2, 4, 128, 96), (1, 4, 128, 96), (1, 1, 1, 96), (2, 1, 128, 1), (1, 1, 1, 1)])
def test_gradients_through_out_lse_and_bias(bias_shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = qkv(n=96, hkv=2, dtype=torch.float32)
    bias = torch.randn(bias_shape, device="cuda", requires_grad=True)
    out, lse = na.attention(q, k, v, bias=bias, return_lse=True)
    w, u = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out * w).sum() + (lse * u).sum(), (q, k, v, bias))
    expected_out, expected_lse = dense(q, k, v, bias)
    expected = torch.autograd.grad((expected_out * w).sum() + (expected_lse * u).sum(), (q, k, v, bias))
    assert grads[3].shape == bias.shape
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=2e-5)
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=2e-4, rtol=2e-4)


def test_second_derivatives_are_refused() -> None:
    q, k, v = qkv()
    out = na.attention(q, k, v)
    dout = torch.randn_like(out, requires_grad=True)
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.reliability(40)
@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_dout_of_any_stride(kind: str) -> None:
    q, k, v = qkv()
    out = na.attention(q, k, v)
    shape = out.shape
    if kind == "transposed":
        dout = torch.randn(shape[0], shape[2], shape[1], shape[3], device="cuda", dtype=out.dtype).transpose(1, 2)
    elif kind == "sliced":
        dout = torch.randn(shape[0], 2 * shape[1], *shape[2:], device="cuda", dtype=out.dtype)[:, ::2]
    else:
        dout = torch.ones((), device="cuda", dtype=out.dtype).expand(shape)
    a = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    b = torch.autograd.grad(out, (q, k, v), dout.contiguous())
    for x, y in zip(a[1:], b[1:], strict=True):
        torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(a[0], b[0], atol=2e-3, rtol=2e-3)


@pytest.mark.reliability(33)
def test_dropout_is_the_exported_mask_in_both_directions() -> None:
    q, k, v = qkv(dtype=torch.float32)
    rng = (77, 5)
    out = na.attention(q, k, v, dropout_p=0.3, rng=rng)
    keep = torch.from_numpy(nvrtc_attn.dropout_keep_mask((2, 4, 128, 128), 0.3, rng)).cuda()
    expected, _ = dense(q, k, v, keep=keep, multiplier=1 / 0.7)
    w = torch.randn_like(out)
    mine = torch.autograd.grad((out * w).sum(), (q, k, v))
    other = torch.autograd.grad((expected * w).sum(), (q, k, v))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    for x, y in zip(mine, other, strict=True):
        torch.testing.assert_close(x, y, atol=2e-4, rtol=2e-4)
    device_rng = (torch.tensor(77, device="cuda"), torch.tensor([5], device="cuda"))
    with torch.no_grad():
        assert torch.equal(na.attention(q, k, v, dropout_p=0.3, rng=device_rng), out)
    again = na.attention(q, k, v, dropout_p=0.3, rng=device_rng)
    device_rng[1].add_(1000)  # for the next layer: the gradient is of the mask that was drawn
    for x, y in zip(torch.autograd.grad((again * w).sum(), (q, k, v)), mine, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


@pytest.mark.reliability(61)
def test_graph_capture_with_dropout_draws_a_new_mask_at_each_replay() -> None:
    q, k, v = qkv()
    ones = torch.ones_like(v)

    def step() -> tuple[Any, ...]:
        out = na.attention(q, k, ones + 0 * v, dropout_p=0.5)
        return (out, *torch.autograd.grad(out.sum(), (q, k, v)))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # compiles and loads: a capture must find everything ready
        nvrtc_attn.torch.attention(q, k, v, dropout_p=0.5, rng=(torch.zeros((), dtype=torch.int64, device="cuda"),) * 2)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seen = []
    for _ in range(100):
        graph.replay()
        seen.append(captured[0].detach().clone())
    assert not torch.equal(seen[0], seen[1])
    means = torch.stack([x.float().mean() for x in seen])
    assert abs(float(means.mean()) - 1.0) < 0.01
    # An eager backward pass reads the device-resident state that a captured forward pass used.
    seed = torch.tensor(9, device="cuda")
    offset = torch.tensor(0, device="cuda")
    with torch.no_grad():
        na.attention(q, k, v, dropout_p=0.5, rng=(seed, offset))
        with torch.cuda.graph(graph2 := torch.cuda.CUDAGraph()):
            out = na.attention(q, k, v, dropout_p=0.5, rng=(seed, offset))
        for value in (9, 10, 11):
            seed.fill_(value)
            graph2.replay()
            assert torch.equal(out, na.attention(q, k, v, dropout_p=0.5, rng=(value, 0)))


@pytest.mark.reliability(61)
def test_capture_without_warm_up_is_refused_and_leaves_the_capture_valid() -> None:
    q, k, v = (x.detach() for x in qkv(d=88))
    x = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="captur"):
            na.attention(q, k, v, softcap=3.25)
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert float(x[0]) == 1.0


@pytest.mark.reliability(46, 47)
def test_runs_on_the_current_stream_after_its_work() -> None:
    q, k, v = (x.detach() for x in qkv(m=512, n=512))
    expected = na.attention(q * 2, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            late = q * 2
            out = na.attention(late, k, v)
            del late
            torch.full_like(q, float("nan"))
        side.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.reliability(48)
def test_explicit_stream_keeps_the_memory_until_done() -> None:
    q, k, v = (x.detach() for x in qkv(m=512, n=512))
    expected = nvrtc_attn.attention(q, k, v)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for _ in range(10):
        a, b, c = q.clone(), k.clone(), v.clone()
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
        out = nvrtc_attn.attention(a, b, c, stream=side)
        del a, b, c
        garbage = [torch.full_like(q, float("nan")) for _ in range(3)]
        side.synchronize()
        assert torch.equal(out, expected)
        del garbage


@pytest.mark.reliability(57)
def test_ten_thousand_calls_leave_nothing_behind() -> None:
    """Objects, host memory, device memory of torch and of the driver, descriptors: forward, backward, raw functions."""
    q, k, v = qkv(m=32, n=32)
    w = torch.ones_like(q)
    raw = [x.detach() for x in (q, k, v)]
    out, side = torch.empty_like(raw[0]), torch.cuda.Stream()

    def calls(number: int) -> None:
        for index in range(number):
            with torch.no_grad():
                na.attention(q, k, v)
            torch.autograd.grad(na.attention(q, k, v), (q, k, v), w)  # two
            nvrtc_attn.attention_forward(*raw, out)
            nvrtc_attn.attention(*raw, stream=side)  # held until the stream is done
            if index % 100 == 0:
                side.synchronize()

    def state() -> tuple[int, ...]:
        torch.cuda.synchronize()
        lifetime._sweep()  # as the next call on another stream would
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        free = torch.cuda.mem_get_info()[0]
        return len(gc.get_objects()), pages * 4, len(os.listdir("/proc/self/fd")), torch.cuda.memory_allocated(), free

    def ready() -> int:
        """Launches that plans keep for addresses that came again: objects, but not more and more of them."""
        kept = [len(getattr(x, "_ready", ())) for x in plan._plans.values()]
        assert max(kept) <= plan._MAX_READY
        return sum(kept)

    calls(300)
    launches = ready()
    objects, resident_kib, descriptors, allocated, free = state()
    calls(2_000)
    later = state()
    assert later[0] < objects + 200 + 10 * max(ready() - launches, 0)
    assert later[1] < resident_kib + 16384, "1.6 KB a call"
    assert later[2] <= descriptors, "fewer, when processes that compiled have ended"
    assert later[3] < allocated + 10 * out.nbytes, "autograd's thread may still have gradients of the last call"
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers take memory of the same GPU
        assert later[4] >= free - (64 << 20), "torch may have taken one more block from the driver"


@pytest.mark.reliability(70)
def test_threads_launch_kernels_of_different_shared_memory() -> None:
    """10,000 rounds over kernels whose limits differ: no launch fails, no result is another's."""
    inputs = [[x.detach() for x in qkv(m=m, n=m, d=d)] for m, d in ((64, 64), (128, 128), (96, 32), (40, 256))]
    expected = [na.attention(*x) for x in inputs]
    torch.cuda.synchronize()
    sizes = {step.smem_bytes for made in plan._plans.values() for step in made._steps}
    assert len(sizes) > 2
    faults: list[Any] = []

    def work(n: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(1250):
                    which = (n + i) % len(inputs)
                    out = na.attention(*inputs[which])
                    if i % 10 == 0 and not torch.equal(out, expected[which]):
                        faults.append(f"thread {n} call {i}")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.reliability(44, 60)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_process() -> None:
    torch.cuda.set_device(0)
    inputs = {n: [torch.randn(2, 64, 4, 64, device=f"cuda:{n}", dtype=torch.float16) for _ in range(3)] for n in (0, 1)}
    expected = {n: dense(*inputs[n])[0] for n in (0, 1)}

    def work(n: int) -> None:
        for i in range(1000):
            index = (n + i) % 2
            out = na.attention(*inputs[index])
            if i % 100 == 0:
                assert out.device.index == index
                torch.testing.assert_close(out.double(), expected[index], atol=2e-3, rtol=2e-3)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))  # raises what a thread raised
    assert torch.cuda.current_device() == 0


def test_element_wise_layouts_are_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log, "_said", set())
    for m in (77, 78):
        with torch.no_grad():
            na.attention(*qkv(m=m, d=60))
            na.attention(*qkv(m=m))
    messages = [record.message for record in caplog.records if "one element at a time" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith("forward")


@pytest.mark.reliability(45)
def test_negated_views_keep_their_sign() -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    z = torch.complex(torch.zeros_like(q), q).conj().imag
    assert z.is_neg()
    torch.testing.assert_close(na.attention(z, k, v), na.attention(-q, k, v))


@pytest.mark.reliability(26)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_in_masked_keys_changes_nothing(poison: float) -> None:
    q, k, v = (x.detach() for x in qkv())
    mask = torch.ones(1, 1, 1, 128, dtype=torch.bool, device="cuda")
    mask[..., 40] = False
    clean = na.attention(q, k, v, mask=mask)
    k[:, 40] = poison
    assert torch.equal(na.attention(q, k, v, mask=mask), clean)


@pytest.mark.reliability(27)
def test_largest_float16_values_stay_finite() -> None:
    """Of q, k and v at once, with gradients; other values and kernels: test_scores.py."""
    q, k, v = (
        torch.full((1, 64, 1, 64), 65504.0, device="cuda", dtype=torch.float16, requires_grad=True) for _ in "qkv"
    )
    out = na.attention(q, k, v)
    assert bool(torch.isfinite(out).all())
    torch.testing.assert_close(out, v, atol=0, rtol=1e-3)  # P is rounded to float16
    for grad in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert not grad.any()  # the LSE, 3e10, leaves none


@pytest.mark.reliability(34)
def test_mask_does_not_depend_on_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 130, 2, 64, device="cuda", dtype=torch.float16)
    v = torch.eye(64, device="cuda", dtype=torch.float16).repeat(3, 1)[None, :130, None].expand(1, 130, 2, 64)
    first = na.attention(q, q, v, dropout_p=0.5, rng=3)
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "legacy")
    torch.testing.assert_close(na.attention(q, q, v, dropout_p=0.5, rng=3), first, atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize(("head_dim", "keys"), [(64, 333), (128, 333), (192, 333), (256, 333), (64, 100), (128, 100)])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_beyond_the_used_ones_of_a_dense_batch_may_hold_anything(
    poison: float, head_dim: int, keys: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
    torch.manual_seed(0)
    used = torch.tensor([keys, 0, 1, 64, keys - 30], dtype=torch.int32, device="cuda")
    q = torch.randn(5, 150, 4, head_dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(5, keys, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    beyond = (torch.arange(keys, device="cuda") >= used[:, None])[:, :, None, None]
    results = []
    for value in (0.0, poison):
        given = [q, *(x.masked_fill(beyond, value).requires_grad_() for x in (k, v))]
        out = na.attention(*given, causal=True, seqused_k=used, deterministic=True)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), given)])
    for plain, poisoned in zip(*results, strict=True):
        assert plain.isfinite().all()
        torch.testing.assert_close(poisoned, plain, rtol=0, atol=0)
    assert not results[0][2].masked_select(beyond).any()
    assert not results[0][0][1].any()
