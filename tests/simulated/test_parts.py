"""Parts of a larger attention, and the largest scores, on simulated GPUs: what the CPU path says of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulator import gpu as simulator
from simulator.gpu import DeviceArray
from simulator.harness import CODES, GPUS, decoded, encoded, workspace_of

import nvrtc_attn
from nvrtc_attn import api

BATCH, HEADS, ROWS, KEYS, HEAD_DIM = 2, 2, 150, 210, 64
USED = np.array([165, 210], np.int32)
DTYPE = "float16"


def placed(machine: Any, x: np.ndarray[Any, Any]) -> DeviceArray:
    return DeviceArray(machine, encoded(x, DTYPE), CODES[DTYPE][0])


def blank(machine: Any, shape: tuple[int, ...], dtype: str = DTYPE) -> DeviceArray:
    code, kind = CODES[dtype]
    return DeviceArray(machine, np.full(shape, np.nan, kind), code)


def tensors(rows: int) -> list[np.ndarray[Any, Any]]:
    """q, k, v and dout of these rows."""
    rng = np.random.default_rng(0)
    sizes = (ROWS, KEYS, KEYS, ROWS)
    found = [rng.standard_normal((BATCH, n, HEADS, HEAD_DIM)).astype(DTYPE).astype(np.float32) for n in sizes]
    return [x[:, -rows:] if x.shape[1] == ROWS else x for x in found]


PARTS = {"rows": (nvrtc_attn.Part(rows=(ROWS - 40, ROWS)), 40), "margin": (nvrtc_attn.Part(sm_margin=1), ROWS)}


@pytest.mark.parametrize("gpu", ["sm_90", pytest.param("sm_89", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["rows", pytest.param("margin", marks=pytest.mark.slow)])
def test_the_diagonal_of_parts_ends_with_the_used_keys(name: str, gpu: str, machine: Any) -> None:
    """Bounds of a part's window are negative, relative to its own corner."""
    part, rows = PARTS[name]
    options: dict[str, Any] = {"causal": True, "window_size": (100, 0), "part": part}
    q, k, v, dout = tensors(rows)
    expected = [np.empty_like(x) for x in (q, k, v)]
    exact, lse = nvrtc_attn.attention(q, k, v, seqused_k=USED, return_lse=True, **options)
    nvrtc_attn.attention_backward(dout, q, k, v, exact, lse, *expected, seqused_k=USED, **options)
    with simulator.simulated(machine, GPUS[gpu]):
        given = [placed(machine, x) for x in (q, k, v)]
        used = DeviceArray(machine, USED.copy(), 0)
        out, found_lse = blank(machine, q.shape), blank(machine, lse.shape, "float32")
        size = api.forward_workspace_bytes(*given, lse=found_lse, seqused_k=used, **options)
        nvrtc_attn.attention_forward(
            *given, out, lse=found_lse, seqused_k=used, workspace=workspace_of(machine, size), **options
        )
        np.testing.assert_allclose(decoded(out.array, DTYPE), exact, atol=2e-3)
        np.testing.assert_allclose(found_lse.array, lse, atol=2e-3)
        gradients = [blank(machine, x.shape) for x in (q, k, v)]
        size = api.backward_workspace_bytes(*given, seqused_k=used, **options)
        nvrtc_attn.attention_backward(
            placed(machine, dout), *given, out, found_lse, *gradients, seqused_k=used,
            workspace=workspace_of(machine, size), **options,
        )  # fmt: skip
        for ours, theirs in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(decoded(ours.array, DTYPE), theirs, atol=8e-3 * max(np.abs(theirs).max(), 1))


@pytest.mark.parametrize("options", [{"causal": True}, {}], ids=str)
def test_the_largest_scores_of_the_hopper_kernel(options: dict[str, Any], machine: Any) -> None:
    """Of the first tile alone (few keys), of several, and of rows whose largest score comes first or last."""
    for keys, scale in ((60, 1.0), (KEYS, 1.0), (KEYS, np.linspace(3, 1, KEYS)), (KEYS, np.linspace(1, 3, KEYS))):
        q, k, v, _ = tensors(ROWS)
        k, v = (k * np.reshape(scale, (-1, 1, 1))).astype(np.float16).astype(np.float32)[:, :keys], v[:, :keys]
        _, exact = nvrtc_attn.attention(q, k, v, return_max_logit=True, **options)
        with simulator.simulated(machine, GPUS["sm_90"]):
            given = [placed(machine, x) for x in (q, k, v)]
            out, largest = blank(machine, q.shape), blank(machine, exact.shape, "float32")
            size = api.forward_workspace_bytes(*given, max_logit=largest, **options)
            nvrtc_attn.attention_forward(
                *given, out, max_logit=largest, workspace=workspace_of(machine, size), **options
            )
            np.testing.assert_allclose(largest.array, exact, rtol=1e-4)
