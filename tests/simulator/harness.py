"""One case on the simulated GPU: strided, NaN-poisoned arrays in, every result checked against the float64 oracle."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
from cases import Array, Case
from fake_driver import FakeGpu

import nvrtc_attn
from nvrtc_attn import api

from .gpu import DeviceArray, SimulatedGpu

CODES = {"float16": (2, np.float16), "bfloat16": (4, np.uint16), "float32": (2, np.float32)}
# Shared memory that a block may have, and multiprocessors.
GPUS = {
    "sm_75": FakeGpu((7, 5), 65536, 40, "Turing"),
    "sm_80": FakeGpu((8, 0), 166912, 108, "A100"),
    "sm_89": FakeGpu((8, 9), 101376, 128, "RTX 4090"),
    "sm_90": FakeGpu((9, 0), 232448, 132, "H200"),
    "sm_100": FakeGpu((10, 0), 232448, 148, "B200"),
    "sm_120": FakeGpu((12, 0), 101376, 170, "RTX 5090"),
}
OUTPUT_LAYOUTS = ("contiguous", "bhmk", "packed", "padded_rows", "last_strided", "unaligned", "random")


def encoded(x: Array, dtype: str) -> Array:
    """The bits of ``x`` rounded to ``dtype``; those of bfloat16 in a uint16 array."""
    rounded = cases.round_to(x, dtype)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else rounded


def decoded(x: Array, dtype: str) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else x.astype(np.float32)


def workspace_of(machine: Any, size: int) -> DeviceArray:
    """Of the alignment that frameworks give; every byte is 255."""
    storage = np.full(size + 512, 255, np.uint8)
    start = -storage.ctypes.data % 512
    return DeviceArray(machine, storage[start : start + size], 1)


class Run:
    """The arrays of one case on one simulated GPU."""

    def __init__(self, gpu: SimulatedGpu, case: Case) -> None:
        self.gpu, self.case = gpu, case
        self.rng = np.random.default_rng(case.seed & 0xFFFF)
        self.arrays = cases.make_arrays(case)
        self.shapes = cases.shapes(case)
        kinds = dict.fromkeys(("q", "k", "v", "dout"), case.dtype) | {"dlse": "float32"}
        kinds["bias"] = case.dtype if case.bias_dtype == "same" else "float32"
        kinds["sink"] = case.dtype if case.sink == "same" else "float32"
        self.kinds = kinds
        self.given = {
            name: self.placed(name, encoded(x, kinds[name]), CODES[kinds[name]][0])
            for name, x in self.arrays.items()
            if name in kinds
        }
        if "mask" in self.arrays:
            mask = self.arrays["mask"]
            self.given["mask"] = self.placed("mask", mask.view(np.uint8), 6 if mask.dtype == np.bool_ else 1)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
            if name in self.arrays:
                self.given[name] = DeviceArray(gpu.machine, self.arrays[name].copy(), 0)

    def placed(self, name: str, x: Array, code: int) -> DeviceArray:
        layout = "contiguous" if self.case.layout == "expanded" and name not in "kv" else self.case.layout
        if name in ("sink", "dlse") and layout not in OUTPUT_LAYOUTS:
            layout = "contiguous"
        where = cases.placement(name, x.shape, "contiguous" if name == "dlse" else layout, self.rng)
        # What lies around is NaN, whatever the type of the bits.
        storage = np.frombuffer(b"\xff" * (max(where.size, 1) * x.itemsize), x.dtype).copy()
        strides = tuple(stride * x.itemsize for stride in where.strides)
        view = np.lib.stride_tricks.as_strided(storage[where.offset :], x.shape, strides)
        if layout == "expanded" and name in "kv":
            view[:1] = x[:1]
        else:
            view[...] = x
        return DeviceArray(self.gpu.machine, view, code)

    def blank(self, name: str, dtype: str) -> DeviceArray:
        code, kind = CODES[dtype]
        layout = self.case.layout if self.case.layout in OUTPUT_LAYOUTS else "contiguous"
        poison = np.frombuffer(b"\xff" * (int(np.prod(self.shapes[name])) * np.dtype(kind).itemsize), kind)
        where = cases.placement(name, self.shapes[name], layout, self.rng)
        storage = np.frombuffer(b"\xff" * (max(where.size, 1) * poison.itemsize), kind).copy()
        view = np.lib.stride_tricks.as_strided(
            storage[where.offset :], self.shapes[name], tuple(s * poison.itemsize for s in where.strides)
        )
        return DeviceArray(self.gpu.machine, view, code)

    @property
    def options(self) -> dict[str, Any]:
        names = ("bias", "mask", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        operands = {name: self.given[name] for name in names if name in self.given}
        return {**cases.call_options(self.case), **operands, "rng": (self.case.seed, self.case.offset)}

    def forward(self) -> dict[str, Any]:
        q, k, v = (self.given[name] for name in "qkv")
        out, lse = self.blank("out", self.case.dtype), self.blank("lse", "float32")
        workspace = workspace_of(self.gpu.machine, api.forward_workspace_bytes(q, k, v, **self.options))
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, workspace=workspace, **self.options)
        return {"out": out, "lse": lse}

    def backward(self, forward: dict[str, Any]) -> dict[str, Any]:
        q, k, v = (self.given[name] for name in "qkv")
        found = {name: self.blank(name, self.case.dtype) for name in ("dq", "dk", "dv")}
        for name, of in (("dbias", "bias"), ("dsink", "sink")):
            if of in self.given:
                found[name] = self.blank(name, self.kinds[of])
        options = {**self.options, "deterministic": self.case.deterministic}
        size = api.backward_workspace_bytes(q, k, v, dbias="bias" in self.given, dsink="sink" in self.given, **options)
        # Strided gradients may ask for other kernels than dense ones, hence for some more.
        workspace = workspace_of(self.gpu.machine, size + (1 << 20))
        nvrtc_attn.attention_backward(
            self.given["dout"], q, k, v, forward["out"], forward["lse"], found["dq"], found["dk"], found["dv"],
            dbias=found.get("dbias"), dsink=found.get("dsink"), dlse=self.given.get("dlse"), workspace=workspace,
            **options,
        )  # fmt: skip
        return found

    def wrong(self, found: dict[str, Any], exact: dict[str, Array], low: dict[str, Array]) -> list[str]:
        """`cases.breaches` of arrays of the simulated device."""
        values = {}
        for name, x in found.items():
            dtype = "float32" if name == "lse" else self.kinds.get(name[1:], self.case.dtype)
            values[name] = decoded(x.array, dtype).astype(np.float64)
        return cases.breaches(self.case, values, exact, low, self.arrays)


def check(gpu: SimulatedGpu, case: Case, *, backward: bool = True) -> None:
    """Run ``case`` and fail with every line of `Run.wrong`."""
    run = Run(gpu, case)
    exact = cases.attention_dense(case, cases.cast_inputs(case, run.arrays))
    low = cases.attention_low_precision(case, cases.cast_inputs(case, run.arrays, np.float32))
    forward = run.forward()
    lines = run.wrong(forward, exact, low)
    if backward:
        lines += run.wrong(run.backward(forward), exact, low)
    assert not lines, "\n".join([str(case), *lines, *gpu.notes])
