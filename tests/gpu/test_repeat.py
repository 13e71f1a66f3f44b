"""Races and determinism: the same inputs must give the same bits, many times, with many blocks in flight."""

from __future__ import annotations

import cases
import pytest
from harness import Run, forget_plans

from nvrtc_attn.plans import plan

torch = pytest.importorskip("torch", reason="torch is not installed")


def equal(a: dict[str, object], b: dict[str, object], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in a and not torch.equal(_bits(a[name]), _bits(b[name]))]


def _bits(x: object) -> object:
    return x.contiguous().view(torch.uint8)  # type: ignore[attr-defined]


@pytest.mark.reliability(35)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "family", "repeats"),
    [("bfloat16", "portable", 250), ("bfloat16", "hopper", 1000), ("float32", "portable", 250)],
)
def test_repeats_at_batch_60(
    head_dim: int, causal: bool, dtype: str, family: str, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", family)
    case = cases.make_case(
        f"race-{head_dim}-{causal}-{dtype}", batch=60, seqlen_q=239, seqlen_k=257, num_heads=4, head_dim=head_dim,
        causal=causal, dtype=dtype,
    )  # fmt: skip
    run = Run(case)
    forward = run.forward()
    first = run.backward(forward)
    spread = 0.0
    for repeat in range(repeats):
        again = run.forward()
        assert not equal(forward, again, ("out", "lse")), f"forward, repeat {repeat}"
        grads = run.backward(forward)
        assert not equal(first, grads, ("dk", "dv")), f"backward, repeat {repeat}"
        spread = max(spread, float((grads["dq"].float() - first["dq"].float()).abs().max()))
    # dq adds float32 numbers in any order: the spread is rounding, of the output type at the most.
    size = float(first["dq"].float().abs().max())
    assert spread <= size * (2**-7 if dtype == "bfloat16" else 2**-18)


@pytest.mark.reliability(35, 36)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_1000_repeats_of_the_deterministic_hopper_backward(
    head_dim: int, causal: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight key tiles a head, more tiles than multiprocessors: blocks wait for each other, not always the same."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    case = cases.make_case(
        f"ordered-{head_dim}-{causal}", batch=6, seqlen_q=1001, seqlen_k=1000, num_heads=8, num_heads_kv=4,
        head_dim=head_dim, causal=causal, dropout_p=dropout_p, dtype="bfloat16", deterministic=True,
    )  # fmt: skip
    run = Run(case)
    forward = run.forward()
    first = run.backward(forward)
    for repeat in range(1000):
        assert not equal(first, run.backward(forward), ("dq", "dk", "dv")), f"repeat {repeat}"


@pytest.mark.reliability(35)
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "heads"), [(300, 12), (2001, 3)])
def test_1000_repeats_of_launches_that_overlap(
    head_dim: int, causal: bool, seqlen: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each behind NaN in the workspace, which a launch that did not wait would read: calls, and replays of a graph."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper kernels need compute capability 9.0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    forget_plans(monkeypatch)
    case = cases.make_case(
        f"overlap-{head_dim}-{causal}-{seqlen}", batch=1, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=heads,
        head_dim=head_dim, causal=causal, dtype="bfloat16",
    )  # fmt: skip
    run = Run(case)
    forward = run.forward()
    first = run.backward(forward)
    (made,) = (x for x in plan._plans.values() if isinstance(x, plan.BackwardPlan))
    assert [step.overlaps for step in made._steps] == [False] + [True] * (len(made._steps) - 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run.backward(forward)
    size = float(first["dq"].float().abs().max())
    for repeat in range(1000):
        called = run.backward(forward)
        graph.replay()
        for what, grads in (("call", called), ("replay", replayed)):
            assert not equal(first, grads, ("dk", "dv")), f"{what} {repeat}"
            apart = float((grads["dq"].float() - first["dq"].float()).abs().max())
            assert apart <= size * 2**-7, f"{what} {repeat}"


@pytest.mark.reliability(36)
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("bias", [None, "1h1k", "bhqk"])
def test_50_repeats_of_the_deterministic_backward(varlen: bool, bias: str | None) -> None:
    if varlen and bias:
        pytest.skip("a bias with packed sequences is refused")
    lengths = {"seqlens": tuple((100 + n, 90 + 2 * n) for n in range(30))} if varlen else {"batch": 30}
    case = cases.make_case("det", num_heads=4, num_heads_kv=2, deterministic=True, causal=True, bias=bias, **lengths)
    run = Run(case)
    forward = run.forward()
    first = run.backward(forward)
    for repeat in range(50):
        assert not equal(first, run.backward(forward), ("dq", "dk", "dv", "dbias")), f"repeat {repeat}"


@pytest.mark.reliability(25)
def test_q_k_v_may_be_one_tensor() -> None:
    import nvrtc_attn

    x = torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.float16)
    assert torch.equal(nvrtc_attn.attention(x, x, x), nvrtc_attn.attention(x, x.clone(), x.clone()))
