"""Modifiers on the GPU, forward and gradients, against the same functions on whole matrices in float64."""

from __future__ import annotations

from typing import Any

import modifiers
import numpy as np
import pytest
from harness import DEVICE, torch
from modifiers import ModifierCase

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.cpu import reference
from nvrtc_attn.modifiers.evaluate import HostModifier

SIZES = ((2, 4, 200, 176), (1, 2, 65, 300))
RANDOM = 40
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-4}


def all_cases() -> list[ModifierCase]:
    return [*modifiers.named_cases(), *(modifiers.random_case(1000 + seed) for seed in range(RANDOM))]


class Sizes(HostModifier):
    """Sums of the sizes of what goes to the gradients: their rounding errors are relative to those."""

    def add_gradients(self, values: Any, ds: Any, gradients: Any) -> None:
        for node, derivative in self._slopes.items():
            if node.op == "load" and gradients[node.value] is not None:
                index, _ = values.indices(node)
                parts = np.abs(ds * values(derivative))
                np.add.at(gradients[node.value], tuple(np.broadcast_to(x, parts.shape) for x in index), parts)


def close(name: str, ours: Any, exact: Any, tolerance: float, size: float = 1.0) -> None:
    """Relative to the largest value: sums of many terms of both signs have errors of its size, or of one given."""
    ours = ours.detach().double().cpu().numpy()
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(ours), finite, err_msg=name)
    error = np.abs(ours[finite] - exact[finite]).max(initial=0.0)
    assert error <= tolerance * max(np.abs(exact[finite]).max(initial=0.0), size), (name, error)


def check(case: ModifierCase, sizes: tuple[int, int, int, int], dtype: str, head_dim: int, **options: Any) -> None:
    b, h, m, n = sizes
    rng = np.random.default_rng(0)
    arrays = case.arrays(sizes, rng)
    shapes = ((b, m, h, head_dim), (b, n, h // 2, head_dim), (b, n, h // 2, head_dim), (b, m, h, head_dim))
    kind = getattr(torch, dtype)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(x).astype(np.float32)).to(DEVICE, kind) for x in shapes)
    on_gpu = {name: torch.from_numpy(x).to(DEVICE) for name, x in arrays.items()}
    modifier = nvrtc_attn.trace(*case.make(on_gpu))
    on_host = nvrtc_attn.trace(*case.make(arrays))
    assert on_host.program == modifier.program
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True, **options)

    doubles = [x.double().cpu().numpy() for x in (q, k, v, dout)]
    wide = HostModifier(on_host, [x.astype(np.float64) if x.dtype == np.float32 else x for x in on_host.captures])
    plain = {name: x for name, x in options.items() if name != "deterministic"}
    exact = reference.attention_forward(*doubles[:3], modifier=wide, **plain)
    tolerance = TOLERANCE[dtype]
    close("lse", lse, exact[1], tolerance)
    close("out", out, exact[0], tolerance)

    trained = () if options.get("deterministic") else modifier.differentiable
    sums = [np.zeros(x.shape) if i in trained else None for i, x in enumerate(modifier.captures)]
    expected = reference.attention_backward(
        doubles[3], *doubles[:3], *exact, modifier=wide, capture_grads=sums, **plain
    )
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    daux = [
        torch.full(tuple(x.shape), float("nan"), device=DEVICE) if i in trained else None
        for i, x in enumerate(modifier.captures)
    ]
    size = api.backward_workspace_bytes(q, k, v, score_mod=modifier, daux=daux, **options)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    nvrtc_attn.attention_backward(
        dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=daux, workspace=workspace, **options
    )
    for name, ours, theirs in zip(("dq", "dk", "dv"), gradients, expected[:3], strict=True):
        close(name, ours, theirs, 4 * tolerance)
    if trained:
        sizes_of = [None if x is None else np.zeros_like(x) for x in sums]
        absolute = Sizes(on_host, wide.captures)
        reference.attention_backward(
            doubles[3], *doubles[:3], *exact, modifier=absolute, capture_grads=sizes_of, **plain
        )
        for i, (ours, theirs, size) in enumerate(zip(daux, sums, sizes_of, strict=True)):
            if ours is not None:
                close(f"daux[{i}]", ours, theirs, 4 * tolerance, max(1.0, size.max(initial=0.0)))


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name.split(":")[0])
def test_modifiers(case: ModifierCase) -> None:
    check(case, SIZES[0], "float16", 64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [40, 128, 256])
@pytest.mark.parametrize("name", ["alibi", "relative bias", "documents", "both", "softcap and alibi"])
def test_types_and_head_dims(name: str, head_dim: int, dtype: str) -> None:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    check(case, SIZES[1], dtype, head_dim)


@pytest.mark.parametrize("name", ["alibi", "documents", "both"])
def test_deterministic_and_causal(name: str) -> None:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    check(case, SIZES[0], "float16", 64, deterministic=True)
    check(case, SIZES[0], "float16", 128, causal=True, window_size=(60, None))


def test_decoding_splits_keys() -> None:
    case = next(x for x in modifiers.named_cases() if x.name == "alibi")
    check(case, (1, 2, 1, 4096), "float16", 128)


def test_another_number_array_or_length_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(slope: float, n: int) -> None:
        table = torch.randn(4, n, device=DEVICE)
        q, k, v = (torch.randn(1, n, 4, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
        out = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.sin(s) * slope + table[h, j])
        exact, _ = modifiers.textbook(
            *(x.double().cpu().numpy() for x in (q, k, v)),
            lambda s, b, h, i, j: np.sin(s) * slope + table.double().cpu().numpy()[h, j], None,
        )  # fmt: skip
        close("out", out, exact, 2e-3)

    call(0.3, 300)
    monkeypatch.setenv("NVRTC_ATTN_ASSERT_CACHED", "1")
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    call(-1.7, 517)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_flex_attention_trains_a_table() -> None:
    """Through the torch door, gradients of everything against autograd on whole matrices."""
    from nvrtc_attn.torch import create_block_mask, flex_attention

    length, heads = 160, 4

    def make(table: Any, slopes: Any) -> Any:
        return lambda s, b, h, q, k: torch.tanh(s / 3) * 3 + table[q - k + length, h] + slopes[h] * (k - q)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (k % 7 != 3)

    found = []
    for run in ("ours", "dense"):
        generator = torch.Generator(DEVICE).manual_seed(0)
        q, k, v = (torch.randn(2, heads, length, 64, generator=generator, device=DEVICE) for _ in range(3))
        table = torch.randn(2 * length, heads, generator=generator, device=DEVICE)
        slopes = torch.rand(heads, generator=generator, device=DEVICE)
        leaves = [x.requires_grad_() for x in (q, k, v, table, slopes)]
        score_mod = make(table, slopes)
        if run == "ours":
            mask = create_block_mask(causal, None, None, length, length)
            out, lse = flex_attention(q, k, v, score_mod, mask, return_lse=True)
        else:
            at = [torch.arange(n, device=DEVICE).reshape([-1 if i == d else 1 for i in range(4)])
                  for d, n in enumerate((2, heads, length, length))]  # fmt: skip
            scores = torch.where(causal(*at), score_mod(q @ k.mT * 0.125, *at), -torch.inf)
            out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
        (out.square().sum() + lse.sin().sum()).backward()
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
