"""FlexAttention's documented examples on the GPU, forward and gradients, against whole matrices in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness import DEVICE, backend, torch

pytest.importorskip("torch", reason="torch is not installed")

import flex_examples

from nvrtc_attn.torch import create_block_mask, flex_attention

LENGTH, HEAD_DIM = 200, 64
CAPTURED = ("TABLE", "SLOPES", "DOCUMENTS", "OFFSETS", "PREFIX", "BUCKETS")
HOPPER_ONLY = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels run on compute capability 9.0 alone",
)
CASES = [*((name, None) for name in flex_examples.EXAMPLES), *((None, name) for name in flex_examples.MASKS),
         ("alibi", "document_causal"), ("relative_table", "natten")]  # fmt: skip


@pytest.fixture(autouse=True)
def longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the examples capture, for more than one tile and on the GPU: they read it when they are called."""
    at = torch.arange(LENGTH, device=DEVICE)
    heads, slopes = flex_examples.H, flex_examples.SLOPES
    values = {
        "M": LENGTH, "N": LENGTH, "SLOPES": slopes.to(DEVICE).requires_grad_(),
        "TABLE": torch.linspace(-1, 1, 2 * LENGTH * heads, device=DEVICE).reshape(2 * LENGTH, heads).requires_grad_(),
        "DOCUMENTS": at // 70, "OFFSETS": 70 * torch.arange(4, device=DEVICE),
        "PREFIX": torch.tensor([5, 111], device=DEVICE), "BUCKETS": (at[:, None] - at).abs().clamp(max=6),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setattr(flex_examples, name, value)


def exact(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any) -> Any:
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    at = [torch.arange(n, device=DEVICE).reshape([-1 if i == d else 1 for i in range(4)])
          for d, n in enumerate(scores.shape)]  # fmt: skip
    if score_mod is not None:
        scores = score_mod(scores, *at)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*at), -math.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("family", ["portable", pytest.param("hopper", marks=HOPPER_ONLY)])
@pytest.mark.parametrize(("score", "mask"), CASES, ids=[x or y if not (x and y) else f"{x}-{y}" for x, y in CASES])
def test_values_and_gradients(score: str | None, mask: str | None, family: str) -> None:
    score_mod = None if score is None else flex_examples.EXAMPLES[score]
    mask_mod = None if mask is None else flex_examples.MASKS[mask]
    generator = torch.Generator().manual_seed(0)
    shape = (flex_examples.B, flex_examples.H, LENGTH, HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator).half().to(DEVICE) for _ in range(4))
    trained = [flex_examples.TABLE, flex_examples.SLOPES]

    def derivatives(out: Any, inputs: list[Any], dout: Any) -> list[Any]:
        return [out.detach(), *torch.autograd.grad(out, [*inputs, *trained], dout, allow_unused=True)]

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, None, None, LENGTH, LENGTH)
    with backend(family):
        ours = derivatives(flex_attention(*leaves, score_mod, block_mask), leaves, dout)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    theirs = derivatives(exact(*doubles, score_mod, mask_mod), doubles, dout.double())
    for name, found, expected in zip(("out", "dq", "dk", "dv", "dtable", "dslopes"), ours, theirs, strict=True):
        assert (found is None) == (expected is None), name
        if found is not None:
            error = (found.double() - expected.double()).abs().max()
            assert error <= 1e-2 * max(float(expected.abs().max()), 0.1), (name, float(error))
