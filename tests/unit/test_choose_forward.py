"""Which family serves a forward problem, and what is said about it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from nvrtc_attn.base import log
from nvrtc_attn.front.problem import AttentionProblem, OperandLayout, dense_layout
from nvrtc_attn.heuristics import choose_forward, forward_candidates, hopper_forward_config, hopper_forward_tile
from nvrtc_attn.modifiers.trace import trace


def problem(
    batch: int = 4, seqlen_q: int = 2048, seqlen_k: int = 2048, heads: int = 16, head_dim: int = 128, **changes: Any
) -> AttentionProblem:
    dtype = changes.get("dtype", "bfloat16")
    values: dict[str, Any] = {
        "dtype": dtype, "batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": heads,
        "num_heads_kv": heads, "head_dim": head_dim, "head_dim_v": head_dim,
        "q": dense_layout((batch, seqlen_q, heads, head_dim), dtype),
        "k": dense_layout((batch, seqlen_k, heads, head_dim), dtype),
        "v": dense_layout((batch, seqlen_k, heads, head_dim), dtype), "softmax_scale": head_dim**-0.5,
    }  # fmt: skip
    return AttentionProblem(**{**values, **changes})


def kernel(asked: AttentionProblem, arch: str = "sm_90", backend: str = "auto") -> str:
    """Name of the first kernel."""
    smem_limit = 232448 if arch == "sm_90" else 166912
    spec = choose_forward(asked, arch=arch, num_sms=132, smem_limit=smem_limit, backend=backend)
    return spec.launches[0].config.kernel


@pytest.mark.parametrize(
    ("arch", "backend", "expected"),
    [
        ("sm_90", "auto", "forward_hopper"),
        ("sm_90", "hopper", "forward_hopper"),
        ("sm_90", "portable", "forward_portable"),
        ("sm_80", "auto", "forward_portable"),
        ("sm_100", "auto", "forward_portable"),
        ("sm_120", "hopper", "forward_portable"),
    ],
)
def test_family_by_target_and_backend(arch: str, backend: str, expected: str) -> None:
    assert kernel(problem(), arch, backend) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"head_dim": 512},
        {"head_dim": 60},
        {"seqlen_q": 1},
        {"q": OperandLayout(shape=(4, 2048, 16, 128), strides=(2048 * 2080, 2080, 130, 1), dtype="bfloat16")},
        {"k": OperandLayout(
            shape=(4, 2048, 16, 128), strides=(2048 * 2048, 2048, 128, 1), dtype="bfloat16", offset_alignment=2
        )},
        {"bias": OperandLayout(shape=(4, 16, 2048, 1), strides=(16 * 2048, 2048, 1, 1), dtype="bfloat16")},
    ],
)  # fmt: skip
def test_what_the_copy_engine_cannot_read_is_served(changes: dict[str, Any]) -> None:
    assert kernel(problem(**changes)) == "forward_portable"
    assert kernel(problem(**changes), backend="hopper") == "forward_portable"


# (batch, queries, keys, heads, head dim): microseconds of the portable and of the Hopper kernel on an H200.
MEASURED = {
    (1, 64, 64, 8, 64): (7.6, 8.4),
    (64, 64, 64, 16, 64): (18.0, 15.4),
    (8, 100, 100, 16, 128): (13.5, 10.6),
    (1, 1024, 1024, 8, 128): (31.6, 18.3),
    (1, 2048, 2048, 4, 128): (42.6, 27.9),
    (1, 2048, 2048, 2, 128): (30.1, 27.3),
    (1, 4096, 4096, 1, 128): (41.0, 27.9),
    (1, 128, 8192, 8, 128): (35.0, 30.6),
    (1, 128, 8192, 32, 128): (66.8, 54.9),
    (4, 64, 4096, 32, 128): (90.8, 77.8),
    (1, 512, 4096, 8, 64): (27.6, 24.1),
    (1, 512, 4096, 16, 64): (41.9, 31.2),
    (1, 256, 4096, 16, 128): (41.7, 30.3),
    (8, 64, 1024, 32, 128): (49.4, 46.6),
}


@pytest.mark.parametrize("shape", MEASURED)
def test_small_grids_take_the_family_that_was_measured_faster(shape: tuple[int, int, int, int, int]) -> None:
    portable, hopper = MEASURED[shape]
    assert kernel(problem(*shape)) == ("forward_portable" if portable < hopper else "forward_hopper")
    assert kernel(problem(*shape), backend="hopper") == "forward_hopper"


def test_reasons_are_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_said", set())
    for backend, level in (("auto", logging.DEBUG), ("hopper", logging.WARNING)):
        monkeypatch.setattr(log, "_said", set())
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="nvrtc_attn"):
            for _ in range(2):
                kernel(problem(dtype="float32"), backend=backend)
        assert [(r.levelno, "float32" in r.getMessage()) for r in caplog.records] == [(level, True)]


def test_bias_comes_as_tiles_where_its_rows_allow_it() -> None:
    scores = dense_layout((4, 16, 2048, 2048), "bfloat16")
    spec = choose_forward(problem(bias=scores), arch="sm_90", num_sms=132, smem_limit=232448)
    assert [item.pointer for item in spec.launches[0].tensor_maps] == ["q", "k", "v", "bias"]
    odd = dense_layout((4, 16, 2048, 2047), "bfloat16")  # rows of 4094 bytes
    asked = problem(seqlen_k=2047, bias=odd)
    spec = choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=232448)
    assert spec.launches[0].config.kernel == "forward_hopper"
    assert [item.pointer for item in spec.launches[0].tensor_maps] == ["q", "k", "v"]


@pytest.mark.parametrize(
    ("shape", "causal", "expected"),
    [
        ((16, 1024, 1024, 32, 64), False, (192, 128, 3)),
        ((16, 1024, 1024, 32, 64), True, (64, 64, 3)),  # three of them on a multiprocessor
        ((8, 2048, 2048, 32, 64), True, (192, 128, 3)),
        ((2, 4096, 226, 48, 64), False, (192, 80, 3)),
        ((4, 4096, 77, 10, 64), False, (192, 80, 2)),  # one key tile
        ((8, 4096, 300, 16, 64), False, (192, 80, 4)),
        ((8, 4096, 333, 16, 64), False, (192, 112, 3)),
        ((8, 4000, 4000, 16, 64), False, (192, 128, 3)),
        ((2, 4096, 226, 30, 96), False, (192, 80, 3)),
        ((8, 2048, 300, 16, 72), False, (192, 80, 3)),
        ((2, 4096, 512, 16, 72), False, (192, 64, 4)),
        ((1, 8192, 8192, 16, 72), True, (192, 64, 4)),
        ((16, 512, 512, 12, 96), True, (128, 64, 4)),
        ((16, 512, 512, 32, 128), True, (192, 64, 4)),
        ((64, 256, 256, 16, 128), True, (128, 64, 4)),
        ((16, 512, 49, 32, 128), True, (192, 64, 2)),  # fewer keys than a tile has
        ((1, 2048, 2048, 8, 64), False, (128, 128, 2)),  # 88 tiles of 192 rows would leave a third of the GPU idle
    ],
)
def test_tile_follows_the_lengths(
    shape: tuple[int, int, int, int, int], causal: bool, expected: tuple[int, int, int]
) -> None:
    asked = problem(*shape, window_right=0 if causal else None)
    config = choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=232448).launches[0].config
    assert (config.block_m, config.block_n, config.num_stages) == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 4096, 4096, 4, 64), "forward_hopper"),  # causal, with split keys: 76 us; dense here: 41
        ((1, 4096, 4096, 2, 128), "forward_hopper"),
        ((1, 4096, 4096, 1, 128), "forward_hopper"),
    ],
)
def test_a_band_halves_no_splits_time(shape: tuple[int, int, int, int, int], expected: str, causal: bool) -> None:
    """Whether split keys win is a matter of the blocks that see all keys, with a causal mask too."""
    asked = problem(*shape, window_right=0 if causal else None)
    spec = choose_forward(asked, arch="sm_90", num_sms=132, smem_limit=232448)
    assert spec.launches[0].config.kernel == expected


def packed(lengths: tuple[int, ...], head_dim: int, **changes: Any) -> AttentionProblem:
    layout = dense_layout((1, sum(lengths), 16, head_dim), "bfloat16")
    longest = max(lengths)
    return problem(
        len(lengths), longest, longest, head_dim=head_dim, varlen=True, q=layout, k=layout, v=layout, **changes
    )


CAUSAL = {"window_right": 0}


@pytest.mark.parametrize(
    ("asked", "rows", "columns", "half_tile"),
    [
        # What was measured on an H200: docs/experiments.md, "Hopper forward: tiles".
        (packed((1024,) * 64, 64), 192, 128, False),
        (packed((1024,) * 64, 64, **CAUSAL), 64, 64, False),
        (packed((4096,) * 16, 64, **CAUSAL), 192, 128, True),
        (packed((64, 128, 4096, 256, 777, 2048, 512, 1024, 96, 3000, 1500), 64, **CAUSAL), 192, 128, True),
        (packed(tuple(range(32, 513, 8)), 64), 64, 64, False),
        (packed(tuple(range(64, 1025, 20)), 72), 192, 80, False),
        (packed(tuple(range(64, 1025, 20)), 80, **CAUSAL), 128, 64, False),
        (problem(32, 729, 729, 16, 72), 192, 64, False),
        (problem(16, 1024, 1024, 16, 72), 192, 64, False),
        (problem(16, 1024, 120, 16, 72), 192, 64, False),
        (problem(8, 1024, 1024, 8, 80), 192, 64, False),
        (problem(8, 1024, 1024, 32, 80, **CAUSAL), 128, 128, True),
        (problem(4, 2048, 2048, 32, 80, **CAUSAL), 192, 64, False),
        (problem(2, 4096, 4096, 32, 96, window_left=255, **CAUSAL), 192, 64, False),
        (problem(4, 2048, 2048, 16, 64, softcap=20.0, **CAUSAL), 192, 64, False),
        (problem(2, 4096, 4096, 16, 128, softcap=20.0, **CAUSAL), 192, 64, False),
        (problem(4, 4096, 4096, 16, 96), 192, 96, False),
        (problem(16, 64, 2048, 16, 96), 64, 64, False),
        # What was not measured keeps the tile that it had.
        (packed((1024,) * 64, 64, window_left=100, **CAUSAL), 64, 64, False),
        (packed((1024,) * 64, 64, seqused_k=True), 192, 112, False),
        (packed((1024,) * 64, 64, softcap=20.0), 192, 112, False),
        (problem(32, 729, 729, 16, 72, softcap=20.0), 192, 64, False),
        (problem(32, 729, 729, 16, 72, dropout_p=0.1), 192, 64, False),
    ],
)
def test_tiles_that_were_measured(asked: AttentionProblem, rows: int, columns: int, half_tile: bool) -> None:
    tile = hopper_forward_tile.choose_tile(asked, 132)
    assert (tile.block_m, tile.block_n, tile.half_tile) == (rows, columns, half_tile)


def biased(batch: int, rows: int, heads: int, head_dim: int, dtype: str = "bfloat16", **changes: Any) -> Any:
    return problem(batch, rows, rows, heads, head_dim, bias=dense_layout((1, heads, rows, rows), dtype), **changes)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # Rows of no multiple of 16 bytes, which threads read: measured on an H200, benchmarks/results/slots.txt.
        (biased(64, 129, 12, 64), (192, 80, 2)),
        (biased(64, 145, 8, 48), (192, 64, 3)),
        (biased(301, 301, 4, 32), (192, 80, 2)),
        (biased(4, 1001, 16, 64), (192, 80, 2)),
        (biased(2048, 49, 6, 32), (128, 64, 2)),
        (biased(128, 197, 12, 64), (128, 112, 2)),
        (biased(512, 196, 3, 32, "float32"), (128, 128, 2)),  # by the copy engine
        # Not measured.
        (biased(64, 129, 12, 64, **CAUSAL), (128, 128, 2)),
        (biased(64, 129, 12, 64, softcap=9.0), (128, 80, 2)),
        (biased(64, 129, 12, 64, "float32"), (128, 80, 2)),
        (biased(64, 129, 12, 64, dropout_p=0.1), (128, 80, 2)),
    ],
)
def test_tiles_of_a_bias(asked: AttentionProblem, expected: tuple[int, int, int]) -> None:
    tile = hopper_forward_tile.choose_tile(asked, 132)
    assert (tile.block_m, tile.block_n, tile.num_stages) == expected


@pytest.mark.parametrize("rows", [129, 197])
def test_the_autotuner_tries_a_bias_with_both_numbers_of_rows(rows: int) -> None:
    found = forward_candidates(biased(64, rows, 12, 64), arch="sm_90", num_sms=132, smem_limit=232448).values()
    hopper = [spec.main.config for spec in found if spec.main.config.kernel == "forward_hopper"]
    assert {(128, 80 if rows == 129 else 112), (192, 80)} <= {(config.block_m, config.block_n) for config in hopper}


ADDED = np.zeros((2, 64), np.float32)


@pytest.mark.parametrize(
    ("head_dims", "changes", "expected"),
    [
        ((72, 72), {}, (128, 112, 2, True)),
        ((192, 128), {}, (128, 96, 2, False)),
        ((160, 160), {}, (128, 96, 2, True)),
        ((256, 256), {}, (128, 48, 2, False)),
        ((256, 256), {"softcap": 9.0}, (128, 32, 2, False)),
    ],
    ids=str,
)
def test_tiles_of_kernels_that_make_their_own_decisions(
    head_dims: tuple[int, int], changes: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """Of the same problems with few decisions, or too many for the memory."""
    head_dim, head_dim_v = head_dims
    values = dense_layout((4, 2048, 16, head_dim_v), "bfloat16")
    asked = problem(4, head_dim=head_dim, head_dim_v=head_dim_v, v=values, dropout_p=0.1, **changes)
    tile = hopper_forward_tile.large_tile(asked, 132)
    assert (tile.block_m, tile.block_n, tile.num_stages, tile.lazy_max) == expected
    assert hopper_forward_tile.choose_tile(asked, 132).keep_words


@pytest.mark.parametrize(
    ("batch", "rows", "heads", "causal", "expected"),
    [
        # Tiles of 128 rows where those of 192 need as many waves: measured on an H200.
        (8, 512, 12, False, (128, 128, 4)),
        (8, 1024, 12, False, (128, 128, 4)),
        (16, 512, 16, False, (192, 112, 4)),
        (8, 2048, 12, False, (192, 112, 4)),
        (8, 1024, 12, True, (192, 112, 2)),
    ],
)
def test_waves_of_products_that_begin_with_a_value(
    batch: int, rows: int, heads: int, causal: bool, expected: tuple[int, int, int]
) -> None:
    changes = {"modifier": trace(lambda s, b, h, q, k: s + ADDED[h, q - k + 32]).program} | (CAUSAL if causal else {})
    tile = hopper_forward_tile.choose_tile(problem(batch, rows, rows, heads, 64, **changes), 132)
    assert (tile.block_m, tile.block_n, tile.num_stages) == expected


@pytest.mark.parametrize(
    ("score", "changes", "begins"),
    [
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {}, True),
        (lambda s, b, h, q, k: ADDED[h, abs(q - k) // 4] + s, {"head_dim": 64, **CAUSAL}, True),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {"varlen": True, "batch": 1}, True),
        # Cheap to compute for every score, no number that is added, or something beside it.
        (lambda s, b, h, q, k: s + 0.5 * (q - k), {}, False),
        (lambda s, b, h, q, k: s * ADDED[h, q - k + 32], {}, False),
        (lambda s, b, h, q, k: np.tanh(s) + ADDED[h, q - k + 32], {}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32] + ADDED[h, k], {}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q + k], {}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {"head_dim": 192}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {"dropout_p": 0.1}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {"mask": dense_layout((4, 1, 1, 2048), "bool")}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {"softmax_scale": -0.1}, False),
        (lambda s, b, h, q, k: s + ADDED[h, q - k + 32], {"softmax_scale": 1e-30}, False),
    ],
)
def test_products_begin_with_what_distances_add(score: Any, changes: dict[str, Any], begins: bool) -> None:
    asked = problem(**changes, modifier=trace(score).program)
    tile = hopper_forward_tile.choose_tile(asked, 132)
    assert tile.begins_products is begins
    config = hopper_forward_config.config_of(asked, tile)
    assert ("kAddsDiagonal = true" in config.features.modifier) >= begins
    assert hopper_forward_config.smem_bytes(config) <= 232448


SOFTCAP: dict[str, Any] = {"softcap": 9.0}
WINDOW: dict[str, Any] = {"window_left": 500, "window_right": 0}


def tile_of(rows: int, head_dim: int, head_dim_v: int, batch: int = 4, keys: int = 0, **changes: Any) -> Any:
    """What of the chosen tile differs: rows, columns, slots, whether corrections wait."""
    values = dense_layout((batch, keys or rows, 16, head_dim_v), "bfloat16")
    asked = problem(batch, rows, keys or rows, head_dim=head_dim, head_dim_v=head_dim_v, v=values, **changes)
    tile = hopper_forward_tile.choose_tile(asked, 132)
    assert hopper_forward_config.smem_bytes(hopper_forward_config.config_of(asked, tile)) <= 232448
    assert tile.ping_pong is (head_dim <= 192 and tile.block_m == 128)
    return tile.block_m, tile.block_n, tile.num_stages, tile.lazy_max


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (2048, {}, (128, 128, 2, True)),
        (2048, SOFTCAP, (128, 128, 2, True)),
        (4096, CAUSAL, (128, 128, 2, True)),
        (2048, CAUSAL, (128, 64, 4, True)),
        (4096, WINDOW, (128, 64, 4, True)),
        (4096, CAUSAL | {"seqused_k": True}, (128, 64, 4, True)),
        (2048, {"seqused_k": True}, (128, 112, 2, False)),
        (2048, {"dropout_p": 0.1}, (128, 128, 2, True)),
        (512, {"batch": 1}, (64, 128, 2, True)),
    ],
    ids=str,
)
def test_tiles_of_narrow_values(rows: int, changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Multi-head latent attention: keys of 192, values of 128."""
    assert tile_of(rows, 192, 128, **changes) == expected


@pytest.mark.parametrize("head_dim", [136, 160, 192])
@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (4096, CAUSAL, (128, 64, 3, True)),
        (512, WINDOW, (128, 64, 3, True)),
        (2048, {}, (128, 64, 3, True)),
        (4096, {}, (128, 96, 2, True)),
        (2048, {"keys": 226}, (128, 80, 2, True)),
        (2048, {"keys": 300}, (128, 64, 3, True)),
        (2048, {"keys": 77}, (128, 80, 2, False)),
        (2048, {"keys": 10}, (128, 64, 2, False)),
        (2048, {"seqused_k": True}, (128, 64, 3, True)),
        (2048, {"varlen": True}, (128, 64, 3, True)),
        (2048, {"dropout_p": 0.1}, (128, 64, 3, True)),
        (2048, {"dropout_p": 0.1} | CAUSAL, (128, 64, 3, True)),
        (2048, SOFTCAP, (128, 96, 2, True)),
        (2048, SOFTCAP | CAUSAL, (128, 96, 2, False)),
        (2048, SOFTCAP | CAUSAL | {"varlen": True}, (128, 64, 3, True)),
        (512, {"batch": 1}, (64, 128, 2, True)),
        (512, {"batch": 1} | CAUSAL, (64, 128, 2, True)),
        (512, {"batch": 1} | SOFTCAP, (64, 96, 2, True)),
    ],
    ids=str,
)
def test_tiles_of_wide_heads(rows: int, changes: dict[str, Any], head_dim: int, expected: tuple[Any, ...]) -> None:
    assert tile_of(rows, head_dim, head_dim, **changes) == expected


@pytest.mark.parametrize("head_dim", [200, 256])
@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        (4096, {}, (128, 64, 2, True)),
        (4096, CAUSAL, (128, 64, 2, True)),
        (4096, SOFTCAP | WINDOW, (128, 64, 2, True)),
        (2048, {"varlen": True}, (128, 64, 2, True)),
        (1500, {}, (128, 80, 2, True)),
        (2048, {"keys": 77}, (128, 80, 2, False)),
        (2048, {"seqused_k": True}, (128, 80, 2, False)),
        (2048, {"dropout_p": 0.1}, (128, 64, 2, True)),
        (2048, {"dropout_p": 0.1} | SOFTCAP, (128, 64, 2, True)),
        (2048, {"return_max_logit": True}, (128, 64, 2, True)),
        (2048, {"return_max_logit": True} | SOFTCAP, (128, 80, 2, False)),
        (512, {"batch": 1} | CAUSAL, (64, 64, 3, True)),
    ],
    ids=str,
)
def test_tiles_of_the_widest_heads(
    rows: int, changes: dict[str, Any], head_dim: int, expected: tuple[Any, ...]
) -> None:
    assert tile_of(rows, head_dim, head_dim, **changes) == expected


@pytest.mark.parametrize(
    ("head_dim", "changes", "expected"),
    [
        # By the copy engine, measured on an H200: benchmarks/results/slots.txt.
        (160, {}, (128, 64, 3, True)),
        (192, CAUSAL, (128, 64, 3, True)),
        (136, SOFTCAP | CAUSAL | {"dropout_p": 0.1}, (128, 64, 3, True)),
        (256, {}, (128, 64, 2, True)),
        (200, CAUSAL | {"seqused_k": True}, (128, 64, 2, True)),
        # A third slot does not fit beside a float32 bias, nor beside what max_logit notes.
        (192, {"return_max_logit": True}, (128, 64, 2, True)),
        (192, {"bias": dense_layout((1, 16, 2048, 2048), "float32")}, (128, 64, 2, True)),
        # A mask would spill beside corrections that wait.
        (192, {"mask": dense_layout((1, 16, 2048, 2048), "bool")}, (128, 64, 2, True)),
        (256, {"bias": None, "mask": dense_layout((1, 16, 2048, 2048), "bool")}, (128, 64, 2, False)),
        (256, {"return_max_logit": True}, (128, 64, 2, False)),
        # Rows of no multiple of 16 bytes, which threads read: in one tile where it holds all keys.
        (160, {"keys": 77}, (128, 80, 2, False)),
        (192, {"keys": 77, **CAUSAL}, (128, 64, 2, False)),
        (192, {"keys": 90}, (128, 64, 2, False)),
        (192, {"keys": 77, "dropout_p": 0.1}, (128, 80, 2, False)),
        (256, {"keys": 77}, (128, 48, 2, False)),
    ],
    ids=str,
)
def test_tiles_of_a_bias_of_wide_heads(head_dim: int, changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    keys = changes.get("keys", 2048)
    values = dense_layout((4, keys, 16, head_dim), "bfloat16")
    given = {"bias": dense_layout((1, 16, 2048, keys), "bfloat16"), "v": values, "head_dim_v": head_dim}
    given |= {name: x for name, x in changes.items() if name != "keys"}
    asked = problem(4, 2048, keys, head_dim=head_dim, **given)
    tile = hopper_forward_tile.choose_tile(asked, 132)
    assert hopper_forward_config.smem_bytes(hopper_forward_config.config_of(asked, tile)) <= 232448
    assert (tile.block_m, tile.block_n, tile.num_stages, tile.lazy_max) == expected


def test_candidates_of_wide_heads() -> None:
    """The autotuner tries what other lengths have."""
    for head_dim, columns in ((192, {"64", "80", "96"}), (256, {"64", "80"})):
        asked = problem(4, 4096, 4096, head_dim=head_dim, **CAUSAL)
        found = forward_candidates(asked, arch="sm_90", num_sms=132, smem_limit=232448)
        assert {x.split()[1].partition("x")[2] for x in found if x.startswith("hopper 128")} >= columns
