"""Masks of functions with whole tiles of nothing: the words that the GPU makes of them, and results of what walks them.

Every problem here is small: the threshold from which on words are made is taken away.
"""

from __future__ import annotations

from typing import Any

import modifiers
import numpy as np
import pytest
from harness import DEVICE, backend, forget_plans, torch
from modifiers import ModifierCase
from tile_words_twin import of_tiles

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.cpu import reference
from nvrtc_attn.heuristics import tile_words as heuristic
from nvrtc_attn.heuristics.tile_words import TileWords, words_of
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


def walkers(prefix: str) -> list[Any]:
    return [c for c, _ in plan._kernels if c.features.tile_words and c.kernel.startswith(prefix)]


class Unchecked(HostModifier):
    """Random masks read beyond their arrays on purpose: elements there are 0 or NaN, as in a kernel."""

    def check(self, values: Any, kept: Any) -> None:
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
    **options: Any,
) -> None:
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


def words_in(workspace: Any, words: TileWords) -> Any:
    found = workspace[: words.nbytes].cpu().numpy().view(np.uint32)
    return of_tiles(found.reshape(words.batch, words.heads, words.lines, words.words, 2), words)


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
