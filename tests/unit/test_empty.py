"""Problems without queries, keys, heads or sequences: what is launched on them, on a driver written in Python."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dlpack_producer import BOGUS_POINTER, Producer
from fake_driver import FakeDriver, FakeGpu, launching

import nvrtc_attn
from nvrtc_attn import Part

TYPES = {"float16": (2, 16), "bfloat16": (4, 16), "float32": (2, 32), "bool": (6, 8), "int32": (0, 32)}
TARGETS = [((9, 0), "bfloat16"), ((9, 0), "float32"), ((8, 0), "bfloat16"), ((7, 5), "float16")]
# Sequences, queries, keys, heads of q and of k.
DENSE = [
    (0, 256, 256, 4, 4), (2, 0, 256, 4, 2), (2, 256, 0, 4, 2), (2, 256, 256, 0, 1), (0, 0, 0, 4, 2),
    (0, 2048, 2048, 8, 2), (2, 0, 4096, 8, 2), (2, 4096, 0, 8, 2),
]  # fmt: skip
# Sequences, tokens of q and of k, the bounds of a sequence.
PACKED = [
    (4, 0, 300, 128, 128), (4, 300, 0, 128, 128), (4, 0, 0, 64, 64), (4, 0, 0, 0, 0), (4, 0, 300, 0, 128),
    (4, 300, 0, 128, 0), (0, 0, 0, 0, 0), (0, 0, 0, 64, 64), (4, 0, 4000, 2048, 2048), (4, 4000, 0, 2048, 2048),
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"mask": "full"}, {"mask": "row"}, {"bias": True}, {"causal": True}, {"dropout_p": 0.1}, {"max_logit": True},
    {"deterministic": True}, {"mask": "row", "bias": True},
]  # fmt: skip


@pytest.fixture(params=TARGETS, ids=lambda x: f"sm_{x[0][0]}{x[0][1]}-{x[1]}")
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The element type, and the driver: it refuses empty grids and tensor maps, as CUDA does."""
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.delenv("NVRTC_ATTN_BACKEND", raising=False)
    capability, dtype = request.param
    with launching(monkeypatch, tmp_path / "kernels", FakeGpu(capability)) as fake:
        yield dtype, fake


def both_passes(
    dtype: str, queries: tuple[int, ...], keys: tuple[int, ...], lse_shape: tuple[int, ...], sequences: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Run them on memory that nobody may look at."""
    addresses = itertools.count(BOGUS_POINTER, 1 << 32)

    def new(shape: tuple[int, ...], element: str = dtype) -> Producer:
        return Producer(shape, dtype=TYPES[element], data=next(addresses))

    given = {**options, "workspace": new((1 << 29,), "int32")}
    seen = queries[0], queries[2], queries[1], keys[1]
    if "mask" in options:
        given["mask"] = new(seen if options["mask"] == "full" else (seen[0], 1, 1, seen[3]), "bool")
    if "bias" in options:
        given["bias"] = new((1, *seen[1:]))
    if "dropout_p" in options:
        given["rng"] = 1, 2
    if "cu_seqlens_q" in options:
        given |= {name: new((sequences + 1,), "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    wants_largest = given.pop("max_logit", False)
    deterministic = given.pop("deterministic", False)
    q, k, v, out, lse = new(queries), new(keys), new(keys), new(queries), new(lse_shape, "float32")
    largest = new((sequences, queries[2]), "float32") if wants_largest else None
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, max_logit=largest, **given)
    gradients = new(queries), new(keys), new(keys)
    dbias = new((1, *seen[1:])) if "bias" in options else None
    nvrtc_attn.attention_backward(
        new(queries), q, k, v, out, lse, *gradients, dbias=dbias, deterministic=deterministic, **given
    )


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("sizes", DENSE, ids=str)
def test_dense(target: tuple[str, FakeDriver], sizes: tuple[int, ...], head_dim: int) -> None:
    batch, rows, columns, heads, heads_kv = sizes
    for options in OPTIONS:
        shapes = (batch, rows, heads, head_dim), (batch, columns, heads_kv, head_dim), (batch, heads, rows)
        both_passes(target[0], *shapes, batch, options)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("sizes", PACKED, ids=str)
def test_packed(target: tuple[str, FakeDriver], sizes: tuple[int, ...], head_dim: int) -> None:
    sequences, rows, columns, most_rows, most_columns = sizes
    bounds = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": most_rows, "max_seqlen_k": most_columns}
    for options in OPTIONS:
        if "mask" in options or "bias" in options:
            continue  # refused of packed sequences
        shapes = (1, rows, 8, head_dim), (1, columns, 2, head_dim), (1, 8, rows)
        both_passes(target[0], *shapes, sequences, {**options, **bounds})


@pytest.mark.parametrize(
    ("sizes", "of_whole"),
    [
        ((2, 512, 512, 0, 0), {"heads": (0, 8)}),
        ((2, 2048, 2048, 0, 2), {"heads": (0, 8)}),
        ((2, 0, 512, 8, 8), {"rows": (0, 1024)}),
        ((2, 512, 0, 8, 2), {"keys": (0, 2048)}),
        ((0, 512, 512, 8, 8), {"batch": (0, 4)}),
    ],
    ids=str,
)
def test_parts_with_the_kernels_of_the_whole(
    target: tuple[str, FakeDriver], sizes: tuple[int, ...], of_whole: dict[str, tuple[int, int]]
) -> None:
    batch, rows, columns, heads, heads_kv = sizes
    for options in ({}, {"causal": "top_left"}, {"deterministic": True}):
        shapes = (batch, rows, heads, 64), (batch, columns, heads_kv, 64), (batch, heads, rows)
        both_passes(target[0], *shapes, batch, {**options, "part": Part(plan_as=True, **of_whole)})  # type: ignore[arg-type]


def test_gradients_of_keys_without_queries_are_written(target: tuple[str, FakeDriver]) -> None:
    dtype, fake = target
    both_passes(dtype, (2, 0, 4, 64), (2, 256, 2, 64), (2, 4, 0), 2, {})
    assert fake.launches, "dk and dv are zeros"
    before = len(fake.launches)
    both_passes(dtype, (0, 256, 4, 64), (0, 256, 2, 64), (0, 4, 256), 0, {})
    assert len(fake.launches) == before, "nothing is to be written"
