"""Parts that begin where arrays on the GPU say, on simulated GPUs: as those of integers, at every place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulator import gpu as simulator
from simulator.gpu import DeviceArray
from simulator.harness import CODES, GPUS, decoded, encoded, workspace_of

import nvrtc_attn
from nvrtc_attn import api

ROWS, KEYS, WHOLE_ROWS, WHOLE_KEYS = 150, 210, 600, 700
DTYPE = "float16"
# Rows and keys: before the diagonal, on it, behind it, and so far away that no key is seen, or all are.
PLACES = [(0, 0), (101, 203), (450, 490), (0, 490), (449, 3)]


def placed(machine: Any, x: np.ndarray[Any, Any]) -> DeviceArray:
    return DeviceArray(machine, encoded(x, DTYPE), CODES[DTYPE][0])


def blank(machine: Any, shape: tuple[int, ...], dtype: str = DTYPE) -> DeviceArray:
    code, kind = CODES[dtype]
    return DeviceArray(machine, np.full(shape, np.nan, kind), code)


def far_and_late(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - 0.01 * (q - k) * (h + 1)


def blocks(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q // 128 == k // 128) | (k % 7 == 0)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window and dropout": {"window_size": (100, 30), "dropout_p": 0.25, "rng": (7, 9)},
    "dropout": {"dropout_p": 0.25, "rng": (7, 9)},
    "modifier": {"causal": "top_left", "score_mod": far_and_late},
    "mask": {"mask_mod": blocks},
}
CALLS = [
    ("sm_90", "causal", 128, {}), ("sm_90", "window and dropout", 64, {}), ("sm_90", "modifier", 64, {}),
    ("sm_90", "mask", 64, {}), ("sm_90", "causal", 64, {"deterministic": True}), ("sm_90", "dropout", 256, {}),
    ("sm_80", "causal", 64, {}), ("sm_80", "window and dropout", 128, {}), ("sm_80", "modifier", 64, {}),
    ("sm_80", "mask", 64, {}),
]  # fmt: skip


ALWAYS = (CALLS[2], CALLS[4], CALLS[7])


@pytest.mark.parametrize(
    ("gpu", "name", "head_dim", "more"),
    [pytest.param(*x, marks=[] if x in ALWAYS else [pytest.mark.slow], id="-".join(map(str, x))) for x in CALLS],
)
def test_arrays_say_where_a_part_begins(gpu: str, name: str, head_dim: int, more: dict[str, Any], machine: Any) -> None:
    """Forward and backward; one plan serves all places, and reads what the arrays hold when it runs."""
    numbers = np.random.default_rng(0)
    sizes = (ROWS, KEYS, KEYS, ROWS)
    shapes = [(1, n, heads, head_dim) for n, heads in zip(sizes, (2, 1, 1, 2), strict=True)]
    q, k, v, dout = (numbers.standard_normal(x).astype(DTYPE).astype(np.float32) for x in shapes)
    options = OPTIONS[name]
    with simulator.simulated(machine, GPUS[gpu]):
        given = [placed(machine, x) for x in (q, k, v)]
        starts = [np.zeros(1, np.int32), np.zeros((), np.int32)]
        arrays = [DeviceArray(machine, x, 0) for x in starts]
        part = nvrtc_attn.Part(rows=(arrays[0], WHOLE_ROWS), keys=(arrays[1], WHOLE_KEYS))
        for row, key in PLACES:
            starts[0][...], starts[1][...] = row, key
            host = nvrtc_attn.Part(rows=(row, WHOLE_ROWS), keys=(key, WHOLE_KEYS))
            exact, lse = nvrtc_attn.attention(q, k, v, return_lse=True, part=host, **options)
            expected = [np.empty_like(x) for x in (q, k, v)]
            nvrtc_attn.attention_backward(dout, q, k, v, exact, lse, *expected, part=host, **options)
            out, found_lse = blank(machine, q.shape), blank(machine, lse.shape, "float32")
            size = api.forward_workspace_bytes(*given, lse=found_lse, part=part, **options)
            nvrtc_attn.attention_forward(
                *given, out, lse=found_lse, workspace=workspace_of(machine, size), part=part, **options
            )
            np.testing.assert_allclose(decoded(out.array, DTYPE), exact, atol=2e-3, err_msg=f"{row}, {key}")
            np.testing.assert_allclose(found_lse.array, lse, atol=2e-3)
            gradients = [blank(machine, x.shape) for x in (q, k, v)]
            size = api.backward_workspace_bytes(*given, part=part, **options, **more)
            nvrtc_attn.attention_backward(
                placed(machine, dout), *given, out, found_lse, *gradients, workspace=workspace_of(machine, size),
                part=part, **options, **more,
            )  # fmt: skip
            for ours, theirs in zip(gradients, expected, strict=True):
                bound = 8e-3 * max(np.abs(theirs).max(), 1)
                np.testing.assert_allclose(decoded(ours.array, DTYPE), theirs, atol=bound, err_msg=f"{row}, {key}")
