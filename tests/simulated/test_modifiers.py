"""Functions of scores on simulated GPUs: results, gradients of captured arrays, and work that is not done twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import modifiers
import numpy as np
import pytest
from simulator import gpu as simulator
from simulator.gpu import DeviceArray
from simulator.harness import CODES, GPUS, decoded, encoded, workspace_of

import nvrtc_attn
from nvrtc_attn import api, heuristics
from nvrtc_attn.cpu import reference
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.jit.cache import KernelCache
from nvrtc_attn.modifiers.evaluate import HostModifier
from nvrtc_attn.plans import autotune, measure, plan, run

KINDS = {"float32": 2, "float16": 2, "int32": 0, "int64": 0, "bool": 6}
"""DLPack's codes of captured arrays."""


class CapturedArray:
    """An array on the GPU whose dtype and shape are those of NumPy's."""

    def __init__(self, machine: Any, x: np.ndarray[Any, Any]) -> None:
        self.shape, self.ndim, self.dtype = x.shape, x.ndim, x.dtype
        self._given = DeviceArray(machine, x, KINDS[str(x.dtype)])
        self.__dlpack__, self.__dlpack_device__ = self._given.__dlpack__, self._given.__dlpack_device__


class Problem:
    """[batch, rows, heads, head dim] and a modifier of the table in tests/modifiers.py, or two functions."""

    def __init__(self, machine: Any, sizes: tuple[int, int, int, int], head_dim: int, dtype: str) -> None:
        b, h, m, n = sizes
        self.machine, self.sizes, self.dtype = machine, sizes, dtype
        self.rng = np.random.default_rng(0)
        shapes = ((b, m, h, head_dim), *(((b, n, h // 2, head_dim),) * 2), (b, m, h, head_dim))
        bits = [encoded(self.rng.standard_normal(x).astype(np.float32), dtype) for x in shapes]
        self.exact = [decoded(x, dtype).astype(np.float64) for x in bits]
        self.given = [self.placed(x) for x in bits]

    def placed(self, x: Any) -> DeviceArray:
        return DeviceArray(self.machine, x, CODES[self.dtype][0])

    def blank(self, x: Any, dtype: str) -> DeviceArray:
        code, kind = CODES[dtype]
        nan = np.frombuffer(b"\xff" * (x.size * np.dtype(kind).itemsize), kind).reshape(x.shape).copy()
        return DeviceArray(self.machine, nan, code)

    def forward(self, modifier: Any) -> tuple[DeviceArray, DeviceArray]:
        q, k, v, _ = self.given
        b, h, m, _ = self.sizes
        out, lse = self.blank(self.exact[0], self.dtype), self.blank(np.empty((b, h, m)), "float32")
        size = api.forward_workspace_bytes(q, k, v, lse=lse, score_mod=modifier)
        nvrtc_attn.attention_forward(
            q, k, v, out, lse=lse, score_mod=modifier, workspace=workspace_of(self.machine, size)
        )
        return out, lse


def close(name: str, ours: DeviceArray, dtype: str, exact: Any, tolerance: float) -> None:
    found, finite = decoded(ours.array, dtype).astype(np.float64), np.isfinite(exact)
    np.testing.assert_array_equal(found[~finite], exact[~finite], err_msg=name)
    error = np.abs(found[finite] - exact[finite]).max(initial=0.0)
    assert error <= tolerance * max(np.abs(exact[finite]).max(initial=0.0), 1.0), (name, error)


CASES = [
    # Head dims beyond 128 have blocks that each have a slice of a row's gradients, and all of its scores.
    ("sm_80", "relative bias", "float32", 256), ("sm_90", "relative bias", "float32", 256),
    ("sm_90", "t5", "float16", 64), ("sm_89", "relative bias", "float16", 64), ("sm_75", "both", "float16", 40),
    ("sm_120", "documents", "float16", 64), ("sm_100", "alibi", "float16", 192),
    ("sm_90", "cuda function", "float16", 64), ("sm_90", "cuda mask", "float16", 128),
    ("sm_80", "cuda function", "float32", 40), ("sm_75", "cuda mask", "float16", 64),
]  # fmt: skip
ALWAYS = (CASES[1], CASES[7])


@pytest.mark.parametrize(
    ("gpu", "name", "dtype", "head_dim"),
    [pytest.param(*x, marks=[] if x in ALWAYS else [pytest.mark.slow], id="-".join(map(str, x))) for x in CASES],
)
def test_forward_and_gradients(gpu: str, name: str, dtype: str, head_dim: int, machine: Any) -> None:
    check_forward_and_gradients(gpu, name, dtype, head_dim, machine)


def check_forward_and_gradients(gpu: str, name: str, dtype: str, head_dim: int, machine: Any, **options: Any) -> None:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    tolerance = {"float16": 4e-3, "float32": 2e-4}[dtype]
    with simulator.simulated(machine, GPUS[gpu]):
        problem = Problem(machine, (1, 4, 70, 90), head_dim, dtype)
        arrays = case.arrays(problem.sizes, problem.rng)
        on_host = nvrtc_attn.trace(*case.make(arrays))
        on_gpu = (CapturedArray(machine, x) for x in on_host.captures)
        modifier = dataclasses.replace(on_host, captures=tuple(on_gpu))
        out, lse = problem.forward(modifier)

        wide = HostModifier(on_host, [x.astype(np.float64) if x.dtype == np.float32 else x for x in on_host.captures])
        exact = reference.attention_forward(*problem.exact[:3], modifier=wide)
        close("out", out, dtype, exact[0], tolerance)
        close("lse", lse, "float32", exact[1], tolerance)

        trained = modifier.differentiable
        sums = [np.zeros(x.shape) if i in trained else None for i, x in enumerate(modifier.captures)]
        expected = reference.attention_backward(
            problem.exact[3], *problem.exact[:3], *exact, modifier=wide, capture_grads=sums
        )
        q, k, v, dout = problem.given
        gradients = [problem.blank(x, dtype) for x in problem.exact[:3]]
        daux = [None if x is None else problem.blank(x, "float32") for x in sums]
        size = api.backward_workspace_bytes(q, k, v, score_mod=modifier, daux=daux, **options)
        workspace = workspace_of(machine, size)
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=daux, workspace=workspace, **options
        )
        for what, ours, theirs in zip(("dq", "dk", "dv"), gradients, expected[:3], strict=True):
            close(what, ours, dtype, theirs, 4 * tolerance)
        for ours, theirs in zip(daux, sums, strict=True):
            if ours is not None and theirs is not None:
                close("gradient of what was captured", ours, "float32", theirs, 8 * tolerance)


MEASURED = [
    ("sm_90", "relative bias", True, {"deterministic": True}), ("sm_90", "t5", False, {}),
    ("sm_80", "documents", True, {}), ("sm_80", "t5", False, {"deterministic": True}), ("sm_90", "documents", True, {}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "name", "known", "options"),
    [pytest.param(*x, id=f"{x[0]}-{x[1]}-{i}") for i, x in enumerate(MEASURED)],
)
def test_measured_plans(
    gpu: str, name: str, known: bool, options: dict[str, Any], machine: Any, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Candidates run in scratch memory, with the arrays or what stands for them; the last is taken, and is right."""
    with monkeypatch.context() as patch:
        measured: list[list[str]] = []
        times_us, captured_of = measure.times_us, run.captured_of

        def times(*arguments: Any) -> dict[str, float]:
            patch.setattr(measure, "MAX_ROUNDS", 1)
            found = times_us(*arguments)
            measured.append(list(found))
            return {label: 10.0 - place for place, label in enumerate(found)}

        def nowhere(call: Any) -> Any:
            found = captured_of(call)
            return found._replace(arrays=tuple(dataclasses.replace(x, ptr=0) for x in found.arrays))

        if not known:
            patch.setattr(run, "captured_of", nowhere)
        patch.setattr(measure, "times_us", times)
        patch.setattr(measure, "FLUSH_BYTES", 1 << 12)
        patch.setattr(heuristics, "MAX_CANDIDATES", 2)
        patch.setattr(autotune, "_choices", {})
        patch.setattr(autotune.env, "autotune", lambda: True)
        patch.setattr(autotune, "kernel_cache", lambda: KernelCache(tmp_path, 1 << 20))
        check_forward_and_gradients(gpu, name, "float16", 64, machine, **options)
    assert len(measured) == 2, "of each pass once"
    assert all(len(labels) >= 2 for labels in measured), measured


@pytest.mark.parametrize("gpu", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_bias_gradients_summed_over_rows_beside_arrays_that_end(gpu: str, machine: Any) -> None:
    """Rows of the last tile that no sequence has would read beyond the table: what is NaN there is no part of a sum."""
    heads, rows, keys = 4, 70, 90
    with simulator.simulated(machine, GPUS[gpu]):
        problem = Problem(machine, (1, heads, rows, keys), 64, "float16")
        case = next(x for x in modifiers.named_cases() if x.name == "relative bias")
        on_host = nvrtc_attn.trace(*case.make(case.arrays(problem.sizes, problem.rng)))
        captures = tuple(CapturedArray(machine, x) for x in on_host.captures)
        modifier = dataclasses.replace(on_host, captures=captures)
        values = problem.rng.standard_normal((1, heads, 1, keys)).astype(np.float32)
        q, k, v, dout = problem.given
        out, lse = problem.blank(problem.exact[0], "float16"), problem.blank(np.empty((1, heads, rows)), "float32")
        options = {"bias": DeviceArray(machine, values, 2), "score_mod": modifier}
        size = api.forward_workspace_bytes(q, k, v, lse=lse, **options)
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, workspace=workspace_of(machine, size), **options)
        gradients = [problem.blank(x, "float16") for x in problem.exact[:3]]
        dbias = problem.blank(values, "float32")
        size = api.backward_workspace_bytes(q, k, v, dbias=True, **options)
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *gradients, dbias=dbias, workspace=workspace_of(machine, size), **options
        )
    wide = HostModifier(on_host, [x.astype(np.float64) for x in on_host.captures])
    given = {"modifier": wide, "bias": values.astype(np.float64)}
    exact = reference.attention_forward(*problem.exact[:3], **given)
    expected = reference.attention_backward(problem.exact[3], *problem.exact[:3], *exact, bias_grad=True, **given)
    close("dbias", dbias, "float32", expected[3], 1.6e-2)


def test_a_tile_without_a_key_for_new_rows_is_computed_once(machine: Any) -> None:
    """Half of the rows see the first keys alone, which come last; beside rows that have seen the last ones, too."""
    rows, keys = 128, 640

    def work(late: int) -> int:
        with simulator.simulated(machine, GPUS["sm_90"]) as driver:
            problem = Problem(machine, (1, 2, rows, keys), 64, "float16")
            modifier = nvrtc_attn.trace(
                None, lambda b, h, q, k: ((k < 64) & (q < 64)) | ((k >= 64) & (q >= 64)) | (k >= late)
            )
            problem.forward(modifier)
        return driver.launched[-1][1]

    alone, beside = work(keys), work(keys - 1)
    assert alone < 1.25 * beside, "once where those rows begin; of every tile it is 1.45"


@pytest.mark.parametrize("pattern", ["100111 011001 001010", "000000 110100 000001", "111000 001110 010000"])
def test_warp_groups_pass_over_tiles_that_hide_their_rows(
    pattern: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 rows a word, 96 keys a digit: what a group passes over is at the start, between others, at the end or all."""
    for name in ("MIN_FLOPS", "MIN_KEY_TILES", "MIN_SHARERS"):
        monkeypatch.setattr(tile_words, name, 0)
    strips = np.array([[x == "1" for x in word] for word in pattern.split()])
    rows, keys = 64 * strips.shape[0], 96 * strips.shape[1]

    def forward(kept: Any) -> int:
        with simulator.simulated(machine, GPUS["sm_90"]) as driver:
            problem = Problem(machine, (1, 2, rows, keys), 64, "float16")
            on_host = nvrtc_attn.trace(None, lambda b, h, q, k: kept[q // 64, k // 96] & ((q + k) % 5 != 0))
            captures = tuple(CapturedArray(machine, x) for x in on_host.captures)
            out, lse = problem.forward(dataclasses.replace(on_host, captures=captures))
            work = driver.launched[-1][1]
            assert len(driver.launched) == 3, "tiles, their bits, attention"
        exact = reference.attention_forward(*problem.exact[:3], modifier=HostModifier(on_host, on_host.captures))
        close("out", out, "float16", exact[0], 4e-3)
        close("lse", lse, "float32", exact[1], 4e-3)
        return work

    of_any = np.broadcast_to(strips.any(0), strips.shape).copy()
    assert forward(strips) < 0.9 * forward(of_any), (
        "the instructions of a kernel whose groups compute all tiles of any group"
    )


@pytest.mark.slow
@pytest.mark.parametrize("bits", [True, False])
def test_key_tiles_of_more_words_than_a_warp_reads_at_once(
    bits: bool, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 words are 98,304 keys: kept tiles in the last words, in the first ones, and none in all between."""
    for name, value in (("MIN_FLOPS", 0), ("MIN_SHARERS", 0), ("KEEPS_BITS", bits)):
        monkeypatch.setattr(tile_words, name, value)
    keys = 230_000
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")
    with simulator.simulated(machine, GPUS["sm_90"]):
        problem = Problem(machine, (1, 2, 70, keys), 64, "float16")
        modifier = nvrtc_attn.trace(
            None, lambda b, h, q, k: (k < q + 30) | ((k > 50_000) & (k < 50_003 + q)) | (k > 229_990 - q)
        )
        out, lse = problem.forward(modifier)
        kernels = {c.kernel: c for c, _ in plan._kernels}
        assert kernels["forward_hopper"].tile_bits == bits
        assert kernels["forward_hopper"].features.tile_words
    exact = reference.attention_forward(*problem.exact[:3], modifier=HostModifier(modifier, []))
    close("out", out, "float16", exact[0], 4e-3)
    close("lse", lse, "float32", exact[1], 4e-3)
