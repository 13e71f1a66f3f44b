"""The fuzz campaign without a GPU and without torch: the CPU path on NumPy arrays against `cases.attention_dense`."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import fuzz_problems
import numpy as np
from cases import Array
from fuzz_problems import Problem

import nvrtc_attn

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def on_cpu(p: Problem) -> Problem:
    """``p`` as NumPy can hold it: bfloat16 becomes float32, or float16 where the scores are large."""
    if p.case.dtype != "bfloat16":
        return p
    large = (p.case.softmax_scale or 0) > 2.1 * p.case.head_dim**-0.5
    return dataclasses.replace(p, case=dataclasses.replace(p.case, dtype="float16" if large else "float32"))


def make_arrays(p: Problem) -> dict[str, Array]:
    """`cases.make_arrays`, and what the problem says besides."""
    case = p.case
    rng = np.random.default_rng([p.seed, 4, p.index])
    arrays = cases.make_arrays(case, rng)
    for name in ("k", "v"):
        if fuzz_problems.layout_of(p, name) == "expanded":  # one batch entry backs them all
            arrays[name] = np.ascontiguousarray(np.broadcast_to(arrays[name][:1], arrays[name].shape))
    if p.bias_hidden:
        arrays["bias"][rng.random(arrays["bias"].shape) < 0.2] = -np.inf
    return arrays


def poison_outside(p: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays with NaN in tokens that take no part, where the problem asks for it."""
    if not (p.outside_nan and p.case.varlen):
        return arrays
    arrays = {name: x.copy() for name, x in arrays.items()}
    rows, keys = fuzz_problems.outside_tokens(p.case)
    for name in ("q", "dout", "k", "v"):
        arrays[name][:, rows if name in ("q", "dout") else keys] = np.nan
    if "dlse" in arrays:
        arrays["dlse"][:, :, rows] = np.nan
    return arrays


def run(p: Problem, arrays: dict[str, Array]) -> dict[str, Array]:
    """All results, written into NaN in the problem's layouts."""
    case, shape = p.case, cases.shapes(p.case)

    def put(name: str, x: Array) -> Array:
        return cases.place(x.astype(fuzz_problems.operand_dtype(p, name)), fuzz_problems.where(p, name, x.shape))

    def blank(name: str) -> Array:
        return put(name, np.full(shape[name], np.nan))

    given = poison_outside(p, arrays)
    i = {name: put(name, given[name]) for name in given if name not in _LENGTHS}
    options: dict[str, Any] = {**cases.call_options(case), "rng": (case.seed, case.offset)}
    options |= {name: i[name] for name in ("bias", "mask", "sink") if name in i}
    options |= {name: given[name] for name in _LENGTHS if name in given}
    names = ["out", "lse", "dq", "dk", "dv"] + ["dbias"] * p.want_dbias + ["dsink"] * (case.sink is not None)
    results = {name: blank(name) for name in names}
    nvrtc_attn.attention_forward(i["q"], i["k"], i["v"], results["out"], lse=results["lse"], **options)
    nvrtc_attn.attention_backward(
        i["dout"], i["q"], i["k"], i["v"], results["out"], results["lse"], results["dq"], results["dk"], results["dv"],
        dbias=results.get("dbias"), dsink=results.get("dsink"), dlse=i.get("dlse"),
        deterministic=case.deterministic, **options,
    )  # fmt: skip
    return results


def check(p: Problem) -> list[str]:
    """What is wrong with ``p`` on the CPU; empty where nothing is."""
    p = on_cpu(p)
    case = p.case
    arrays = make_arrays(p)
    found = run(p, arrays)
    exact = cases.attention_dense(case, cases.cast_inputs(case, arrays))
    low: list[dict[str, Array]] = []
    lines = []
    for name, x in found.items():
        value, truth = x.astype(np.float64), exact[name]
        with np.errstate(invalid="ignore"):
            error = float(np.where(value == truth, 0.0, np.abs(value - truth)).max(initial=0.0))
        # The CPU path computes in float32: most results are within one rounding, which needs no yardstick.
        dtype = "float32" if name == "lse" else case.dtype
        if error <= cases.error_bound(truth, truth, dtype):
            continue
        low = low or _yardsticks(p, arrays)
        bound = max(cases.error_bound(truth, sample[name], dtype) for sample in low)
        if name == "dsink":
            bound += cases.summed_rows_error(case, arrays, exact)
        if not error <= bound:
            lines.append(f"{name}: max error {error:.3e}, allowed {bound:.3e}")
    return lines


def _yardsticks(p: Problem, arrays: dict[str, Array]) -> list[dict[str, Array]]:
    """The same math in the input precision, and further samples of its rounding errors."""
    inputs = cases.cast_inputs(p.case, arrays, np.float32)
    rng = np.random.default_rng([p.seed, 5, p.index])
    samples = [cases.attention_dense(p.case, inputs, p.case.dtype, rng) for _ in range(fuzz_problems.APPEALS)]
    return [cases.attention_low_precision(p.case, inputs), *samples]
