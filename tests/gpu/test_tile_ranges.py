"""Masks of functions with whole tiles of nothing: the words that the GPU makes of them, and results of what walks them.

Every problem here is small: the threshold from which on words are made is taken away.
"""

from __future__ import annotations

from typing import Any

import modifiers
import numpy as np
import pytest
from harness import DEVICE, backend, forget_plans, torch, walkers
from modifiers import ModifierCase
from tile_words_twin import words_in

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.cpu import reference
from nvrtc_attn.heuristics import tile_words as heuristic
from nvrtc_attn.heuristics.tile_words import words_of
from nvrtc_attn.modifiers import intervals
from nvrtc_attn.modifiers.evaluate import HostModifier
from nvrtc_attn.plans import plan

SIZES = (2, 4, 300, 420)
TOLERANCE = 2e-3
RANDOM = 12


@pytest.fixture(autouse=True)
def _always_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heuristic, "MIN_FLOPS", 0)
    monkeypatch.setattr(heuristic, "MIN_KEY_TILES", 1)
    forget_plans(monkeypatch, kernels=True)


def with_bits(prefix: str) -> bool:
    """Whether the Hopper kernel of a pass reads what another launch has asked the mask."""
    found = {c.tile_bits for c in walkers(prefix) if "hopper" in c.kernel}
    assert len(found) == 1
    return found.pop()


class Unchecked(HostModifier):
    """Random masks read beyond their arrays on purpose: elements there are 0 or NaN, as in a kernel."""

    def check(self, values: Any, allowed: Any, kept: Any) -> None:
        pass


def close(name: str, ours: Any, exact: Any, tolerance: float) -> None:
    ours = ours.detach().double().cpu().numpy()
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(ours), finite, err_msg=name)
    error = np.abs(ours[finite] - exact[finite]).max(initial=0.0)
    assert error <= tolerance * max(np.abs(exact[finite]).max(initial=0.0), 1.0), (name, error)


def traced(case: ModifierCase, arrays: dict[str, Any]) -> tuple[Any, Any]:
    on_gpu = {name: torch.from_numpy(x).to(DEVICE) for name, x in arrays.items()}
    return nvrtc_attn.trace(*case.make(on_gpu)), nvrtc_attn.trace(*case.make(arrays))


def check(
    case: ModifierCase,
    sizes: tuple[int, int, int, int] = SIZES,
    head_dim: int = 64,
    bits: bool | None = None,
    **options: Any,
) -> None:
    """``bits``: whether the Hopper kernels read them; None: as it may be."""
    b, h, m, n = sizes
    rng = np.random.default_rng(0)
    arrays = case.arrays(sizes, rng)
    shapes = ((b, m, h, head_dim), (b, n, h // 2, head_dim), (b, n, h // 2, head_dim), (b, m, h, head_dim))
    q, k, v, dout = (
        torch.from_numpy(rng.standard_normal(x).astype(np.float32)).to(DEVICE, torch.float16) for x in shapes
    )
    modifier, on_host = traced(case, arrays)
    forget_plans(kernels=True)
    poison = [torch.full_like(x, float("nan")) for x in (dout, q, k, v)]
    lse = torch.full((b, h, m), float("nan"), device=DEVICE)
    forward_options = {name: x for name, x in options.items() if name != "deterministic"}
    size = api.forward_workspace_bytes(q, k, v, lse=lse, score_mod=modifier, **forward_options)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    nvrtc_attn.attention_forward(
        q, k, v, poison[0], lse=lse, score_mod=modifier, workspace=workspace, **forward_options
    )
    assert walkers("forward")
    if bits is not None:
        assert with_bits("forward") == bits
    doubles = [x.double().cpu().numpy() for x in (q, k, v, dout)]
    wide = Unchecked(on_host, on_host.captures)
    plain = dict(forward_options)
    if "sink" in plain:
        plain["sink"] = plain["sink"].double().cpu().numpy()
    exact = reference.attention_forward(*doubles[:3], modifier=wide, **plain)
    close("lse", lse, exact[1], TOLERANCE)
    close("out", poison[0], exact[0], TOLERANCE)
    expected = reference.attention_backward(doubles[3], *doubles[:3], *exact, modifier=wide, **plain)
    size = api.backward_workspace_bytes(q, k, v, score_mod=modifier, **options)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    nvrtc_attn.attention_backward(
        dout, q, k, v, poison[0], lse, *poison[1:], score_mod=modifier, workspace=workspace, **options
    )
    assert walkers("backward")
    if bits is not None:
        assert with_bits("backward") == bits
    for name, ours, theirs in zip(("dq", "dk", "dv"), poison[1:], expected[:3], strict=True):
        close(name, ours, theirs, 4 * TOLERANCE)


def planned(case: ModifierCase) -> bool:
    """Whether something is left of the mask that a window does not say."""
    traced_mask = nvrtc_attn.trace(*case.make(case.arrays(SIZES, np.random.default_rng(0))))
    return traced_mask.program.mask is not None and case.name not in ("causal", "window", "causal below")


def all_cases() -> list[ModifierCase]:
    return [*modifiers.sparse_cases(), *(modifiers.random_mask(5000 + seed) for seed in range(RANDOM))]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name.split(":")[0])
def test_results(case: ModifierCase) -> None:
    if not planned(case):
        pytest.skip("a window")
    for family in ("auto", "portable"):
        with backend(family):
            check(case)


@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("name", ["causal documents", "prefix", "natten"])
def test_head_dims_and_ends(name: str, head_dim: int) -> None:
    case = next(x for x in modifiers.sparse_cases() if x.name == name)
    check(case, (1, 2, 1000, 1030), head_dim)


@pytest.mark.parametrize("name", ["causal documents", "prefix", "window of a head"])
def test_deterministic_causal_and_sinks(name: str) -> None:
    case = next(x for x in modifiers.sparse_cases() if x.name == name)
    check(case, deterministic=True)
    check(case, causal=True)
    check(case, window_size=(100, 100))


def test_words_are_those_of_numpy() -> None:
    sizes = (3, 32, 700, 1100)  # so many heads that keys are not split: words would lie behind partial results
    for case in modifiers.sparse_cases():
        if not planned(case):
            continue
        arrays = case.arrays(sizes, np.random.default_rng(3))
        modifier, on_host = traced(case, arrays)
        b, h, m, n = sizes
        q = torch.randn(b, m, h, 64, device=DEVICE, dtype=torch.float16)
        k = torch.randn(b, n, h, 64, device=DEVICE, dtype=torch.float16)
        forget_plans(kernels=True)
        with backend("portable"):
            out, lse = torch.empty_like(q), torch.empty(b, h, m, device=DEVICE)
            size = api.forward_workspace_bytes(q, k, k, lse=lse, score_mod=modifier)
            workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_forward(q, k, k, out, lse=lse, score_mod=modifier, workspace=workspace)
        if len(walkers("forward")) > 1:
            continue  # spills made the plan compare tiles
        (config,) = walkers("forward")
        assert not config.split
        problem = next(key[1] for key in plan._plans)
        words = words_of(problem, config.block_m, config.block_n)
        found = words_in(workspace, words)
        mask = on_host.with_captures(on_host.captures)
        residual = problem.modifier.mask
        assert mask.program.mask is not None
        if residual is not mask.program.mask:
            continue  # a part of it became a window
        some, every = intervals.decide(
            on_host.valued[1], on_host.captures, batch=range(words.batch), heads=range(words.heads),
            query_starts=np.arange(0, m, words.rows)[: words.lines], seqlen_q=m, key_starts=np.arange(0, n, words.cols),
            seqlen_k=n,
        )  # fmt: skip
        bits = [np.unpackbits(found[..., i].copy().view(np.uint8), axis=-1, bitorder="little") for i in range(2)]
        shape = some.shape
        np.testing.assert_array_equal(bits[0][..., : shape[3]].reshape(shape) != 0, some, err_msg=case.name)
        np.testing.assert_array_equal(bits[1][..., : shape[3]].reshape(shape) != 0, every, err_msg=case.name)


def test_other_contents_and_lengths_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents that change, under a CUDA graph too: a replay follows what the array holds then."""
    n = 640
    ids = torch.zeros(n, dtype=torch.int32, device=DEVICE)

    def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[q] == ids[k]

    q = torch.randn(1, n, 4, 64, device=DEVICE, dtype=torch.float16)

    def exact() -> Any:
        s = torch.einsum("bqhd,bkhd->bhqk", q.float(), q.float()) * 0.125
        s = s.masked_fill(ids[:, None] != ids, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), q.float())

    def call() -> Any:
        return nvrtc_attn.attention(q, q, q, mask_mod=documents)

    torch.testing.assert_close(call().float(), exact(), rtol=2e-3, atol=2e-3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = call()
    monkeypatch.setenv("NVRTC_ATTN_ASSERT_CACHED", "1")
    for parts in (3, 10, 1, 640):
        ids.copy_(torch.arange(n, device=DEVICE) * parts // n)
        torch.testing.assert_close(call().float(), exact(), rtol=2e-3, atol=2e-3)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out.float(), exact(), rtol=2e-3, atol=2e-3)
    n = 700
    ids = torch.arange(n, dtype=torch.int32, device=DEVICE) // 77
    q = torch.randn(1, n, 4, 64, device=DEVICE, dtype=torch.float16)
    torch.testing.assert_close(call().float(), exact(), rtol=2e-3, atol=2e-3)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors_in_documents(deterministic: bool) -> None:
    """Through the torch door, of a table beside a mask with tiles of nothing, against autograd on whole matrices."""
    from nvrtc_attn.torch import create_block_mask, flex_attention

    length, heads = 400, 4
    ids = torch.arange(length, device=DEVICE) // 110
    found = []
    before = torch.are_deterministic_algorithms_enabled()
    for run in ("ours", "dense"):
        generator = torch.Generator(DEVICE).manual_seed(0)
        q, k, v = (torch.randn(2, heads, length, 64, generator=generator, device=DEVICE) for _ in range(3))
        table = torch.randn(2 * length, heads, generator=generator, device=DEVICE)
        leaves = [x.requires_grad_() for x in (q, k, v, table)]

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, table: Any = table) -> Any:
            return s + table[i - j + length, h]

        def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (ids[i] == ids[j]) & (j % 5 != 3)

        if run == "ours":
            torch.use_deterministic_algorithms(deterministic)
            try:
                mask = create_block_mask(mask_mod, None, None, length, length)
                flex_attention(q, k, v, score_mod, mask).square().sum().backward()
            finally:
                torch.use_deterministic_algorithms(before)
            assert walkers("backward")
        else:
            at = torch.meshgrid(*(torch.arange(n, device=DEVICE) for n in (2, heads, length, length)), indexing="ij")
            scores = torch.where(mask_mod(*at), score_mod(q @ k.mT * 0.125, *at), -torch.inf)
            (scores.softmax(-1) @ v).square().sum().backward()
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


# ---------------------------------------------------------------------------------------------- bits of undecided tiles

HOPPER = pytest.mark.skipif(
    torch.cuda.get_device_capability(DEVICE) != (9, 0) if torch.cuda.is_available() else True,
    reason="the kernels that read bits of undecided tiles are those of compute capability 9.0",
)
MANY = (2, 8, 1000, 1030)


def named(name: str) -> ModifierCase:
    return next(x for x in modifiers.sparse_cases() if x.name == name)


@HOPPER
@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize("name", ["causal documents", "prefix of documents", "padding", "natten", "block diffusion"])
def test_results_with_and_without_bits(name: str, bits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch entries with masks of their own, grouped heads, lengths off the edges of all tiles, all tiles of a pass."""
    monkeypatch.setattr(heuristic, "KEEPS_BITS", bits)
    with backend("hopper"):
        for head_dim in (64, 128):
            check(named(name), MANY, head_dim, bits)
        check(named(name), (3, 4, 129, 1500), bits=bits)
        check(named(name), MANY, bits=bits, deterministic=True)
        check(named(name), MANY, bits=bits, causal=True)


@HOPPER
@pytest.mark.parametrize("slots", [0, 1, 7, 40])
def test_tiles_without_room_are_asked_in_every_head(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ones they are differs from run to run; results do not."""
    monkeypatch.setattr(heuristic, "MAX_BIT_BYTES", slots * heuristic.bits_bytes(192, 96))
    with backend("hopper"):
        for name in ("causal documents", "prefix", "natten"):
            check(named(name), MANY, bits=True)
            check(named(name), MANY, 128, bits=True, deterministic=True)


def outputs(case: ModifierCase, sizes: tuple[int, int, int, int], fill: Any) -> list[Any]:
    """Of both passes, the backward one deterministic, with workspaces that `fill` has written to."""
    b, h, m, n = sizes
    generator = torch.Generator(DEVICE).manual_seed(1)
    q, dout = (torch.randn(b, m, h, 64, generator=generator, device=DEVICE).half() for _ in range(2))
    k, v = (torch.randn(b, n, h // 2, 64, generator=generator, device=DEVICE).half() for _ in range(2))
    modifier, _ = traced(case, case.arrays(sizes, np.random.default_rng(0)))
    out, lse = torch.full_like(q, float("nan")), torch.full((b, h, m), float("nan"), device=DEVICE)
    workspace = fill(api.forward_workspace_bytes(q, k, v, lse=lse, score_mod=modifier))
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, score_mod=modifier, workspace=workspace)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    workspace = fill(api.backward_workspace_bytes(q, k, v, score_mod=modifier, deterministic=True))
    nvrtc_attn.attention_backward(
        dout, q, k, v, out, lse, *gradients, score_mod=modifier, deterministic=True, workspace=workspace
    )
    return [out, lse, *gradients]


@HOPPER
@pytest.mark.parametrize("name", ["documents", "prefix", "natten"])
def test_neither_room_nor_what_memory_held_changes_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(nbytes: int) -> Any:
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=DEVICE)

    def noise(nbytes: int) -> Any:
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)

    with backend("hopper"):
        first = outputs(named(name), MANY, ones)
        assert with_bits("forward")
        assert with_bits("backward")
        for slots in (100_000, 5, 30):
            monkeypatch.setattr(heuristic, "MAX_BIT_BYTES", slots * heuristic.bits_bytes(192, 96))
            forget_plans(kernels=True)
            for _ in range(10):
                for ours, theirs in zip(outputs(named(name), MANY, noise), first, strict=True):
                    assert torch.equal(ours, theirs)


@HOPPER
def test_slots_are_those_of_undecided_tiles() -> None:
    """The counter beside that of tickets, against ranges in NumPy."""
    b, h, m, n = sizes = (2, 8, 1500, 1700)
    for name in ("documents", "prefix", "padding", "natten"):
        modifier, on_host = traced(named(name), named(name).arrays(sizes, np.random.default_rng(5)))
        q = torch.randn(b, m, h, 64, device=DEVICE, dtype=torch.float16)
        k = torch.randn(b, n, h, 64, device=DEVICE, dtype=torch.float16)
        forget_plans(kernels=True)
        with backend("hopper"):
            out, lse = torch.empty_like(q), torch.empty(b, h, m, device=DEVICE)
            size = api.forward_workspace_bytes(q, k, k, lse=lse, score_mod=modifier)
            workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_forward(q, k, k, out, lse=lse, score_mod=modifier, workspace=workspace)
        (config,) = [c for c in walkers("forward") if "hopper" in c.kernel]
        problem = next(key[1] for key in plan._plans)
        words = words_of(problem, config.block_m, config.block_n)
        some, every = intervals.decide(
            on_host.valued[1], on_host.captures, batch=range(words.batch), heads=range(words.heads),
            query_starts=np.arange(0, m, words.rows)[: words.lines], seqlen_q=m, key_starts=np.arange(0, n, words.cols),
            seqlen_k=n,
        )  # fmt: skip
        assert int(workspace[4:8].view(torch.int32)) == int((some & ~every).sum()), name


@HOPPER
def test_a_replay_counts_slots_anew() -> None:
    """Under a CUDA graph, both passes: the array changes between replays, and with it how many tiles are undecided."""
    n, heads = 1024, 8
    ids = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    modifier = nvrtc_attn.trace(None, lambda b, h, i, j: ids[i] == ids[j])
    forget_plans(kernels=True)
    q, k, v, dout = torch.randn(4, 1, n, heads, 64, device=DEVICE, dtype=torch.float16)

    def both() -> list[Any]:
        out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
        gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        size = api.backward_workspace_bytes(q, k, v, score_mod=modifier)
        workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, score_mod=modifier, workspace=workspace)
        return [out, *gradients]

    def exact() -> list[Any]:
        leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
        s = torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) * 0.125
        s = s.masked_fill(ids[:, None] != ids, float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), leaves[2])
        return [out, *torch.autograd.grad(out, leaves, dout.float())]

    with backend("hopper"):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            both()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found = both()
        assert with_bits("forward")
        assert with_bits("backward")
        for parts in (1, 5, 100, 2, 1024):
            ids.copy_(torch.arange(n, device=DEVICE) * parts // n)
            graph.replay()
            torch.cuda.synchronize()
            for ours, theirs in zip(found, exact(), strict=True):
                torch.testing.assert_close(ours.float(), theirs, rtol=1e-2, atol=1e-2)


@HOPPER
def test_packed_sequences_ask_as_before() -> None:
    """Lengths on the device: no words, so no bits, and the result of each sequence is its own."""
    lengths, heads = (300, 500), 8
    q, k, v = (torch.randn(1, sum(lengths), heads, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
    cu = torch.tensor([0, 300, 800], dtype=torch.int32, device=DEVICE)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (abs(i - j) < 40) | (j < 3)

    packed = nvrtc_attn.attention(
        q, k, v, mask_mod=near, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=500, max_seqlen_k=500
    )
    assert not any(c.tile_bits for c, _ in plan._kernels)
    for start, length in ((0, 300), (300, 500)):
        alone = nvrtc_attn.attention(*(x[:, start : start + length] for x in (q, k, v)), mask_mod=near)
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=2e-3, atol=2e-3)


@HOPPER
def test_beside_a_sink_lengths_and_max_logit() -> None:
    """Forward, whose params lie in front of those of bits."""
    b, h, m, n = 2, 8, 700, 900
    ids = torch.arange(n, device=DEVICE) // 210
    q = torch.randn(b, m, h, 64, device=DEVICE, dtype=torch.float16)
    k, v = (torch.randn(b, n, h, 64, device=DEVICE, dtype=torch.float16) for _ in range(2))
    sink = torch.randn(h, device=DEVICE, dtype=torch.float16)
    used = torch.tensor([650, 900], dtype=torch.int32, device=DEVICE)

    def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ids[i] == ids[j]

    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float()) * 0.125
    kept = (ids[:m, None] == ids) & (torch.arange(n, device=DEVICE) < used[:, None, None, None])
    s = s.masked_fill(~kept, float("-inf"))
    p = torch.cat([s, sink.float()[None, :, None, None].expand(b, h, m, 1)], -1).softmax(-1)[..., :n]
    exact = torch.einsum("bhqk,bkhd->bqhd", p, v.float())
    with backend("hopper"):
        out = nvrtc_attn.attention(q, k, v, mask_mod=documents, sink=sink, seqused_k=used)
        assert with_bits("forward")
        torch.testing.assert_close(out.float(), exact, rtol=2e-3, atol=2e-3)
        forget_plans(kernels=True)
        _, largest = nvrtc_attn.attention(q, k, v, mask_mod=documents, seqused_k=used, return_max_logit=True)
        assert with_bits("forward")
        torch.testing.assert_close(largest, s.amax((2, 3)), rtol=1e-3, atol=1e-3)
