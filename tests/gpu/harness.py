"""One case on the GPU: strided, NaN-poisoned tensors in, every result checked against the float64 oracle."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import pytest
from cases import Array, Case

torch = pytest.importorskip("torch", reason="torch is not installed: GPU tests make their tensors with it")

import fuzz_torch  # noqa: E402 - after the skip

import nvrtc_attn  # noqa: E402
from nvrtc_attn import api  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402

DEVICE = "cuda"
BANDS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True},
    {"causal": "top_left", "seqlen_q": 1300, "dtype": "float16"},
    {"window_size": (200, 30)},
    {"causal": True, "window_size": (64, 0), "softcap": 20.0},
)
"""Options of a case: which keys a row sees by where both are."""
OUTPUT_LAYOUTS = ("contiguous", "bhmk", "packed", "padded_rows", "last_strided", "unaligned", "random")


_PLANS = (
    ("plans.plan", "_plans"), ("plans.repeats", "_repeats"),
    ("torch.passes", "_forward_plans"), ("torch.passes", "_backward_plans"), ("torch.known", "_known_plans"),
    ("torch.ops", "_backward_calls"), ("torch.packed_ops", "_backward_calls"), ("torch.parallel.local", "_plans"),
    ("torch.efficient", "_forward_calls"), ("torch.efficient", "_backward_calls"),
    ("torch.scaled_efficient", "_forward_plans"), ("torch.scaled_efficient", "_backward_plans"),
    ("jax.handlers", "_plans"), ("jax.handlers", "_calls"), ("jax.handlers", "_targets"),
)  # fmt: skip
_KERNELS_OF_PLANS = (("plans.plan", "_kernels"),)


def forget_plans(monkeypatch: pytest.MonkeyPatch | None = None, *, kernels: bool = False) -> None:
    """No call is known from here on: each asks the heuristics again, whatever the adapter.

    With ``monkeypatch`` until the test ends, where what was known comes back: for tests that change what the heuristics
    answer. ``kernels``: neither is which kernels the plans before have used; they stay loaded.
    """
    for name, table in (*_PLANS, *(_KERNELS_OF_PLANS if kernels else ())):
        module = sys.modules.get(f"nvrtc_attn.{name}")  # one that is not imported has nothing to forget
        if module is None:
            continue
        if monkeypatch is None:
            getattr(module, table).clear()
        else:
            monkeypatch.setattr(module, table, {})


def walkers(prefix: str) -> list[Any]:
    """The configs that have been loaded in this test, walk words and begin with ``prefix``."""
    walk = [c for c, _ in plan._kernels if c.features.tile_words and c.kernel.startswith(prefix)]
    return [c for c in walk if not c.kernel.endswith("prepare")]  # which finds an order of key tiles


def torch_dtype(name: str) -> Any:
    return getattr(torch, name)


def upload(name: str, x: Array, dtype: str | None, layout: str, rng: np.random.Generator) -> Any:
    """``x`` on the GPU in ``layout``; the memory around it is NaN (floats) or one (others)."""
    value = torch.from_numpy(np.array(x)).to(DEVICE)
    if dtype is not None:
        value = value.to(torch_dtype(dtype))
    tensor = blank(
        name, tuple(x.shape), value.dtype, layout, rng, poison=float("nan") if value.is_floating_point() else 1
    )
    if layout == "expanded" and name in ("k", "v"):  # one batch entry backs them all
        tensor[:1].copy_(value[:1])
    else:
        tensor.copy_(value)
    return tensor


def blank(
    name: str, shape: tuple[int, ...], dtype: Any, layout: str, rng: np.random.Generator, poison: float = float("nan")
) -> Any:
    """A poisoned tensor in ``layout``."""
    where = cases.placement(name, shape, layout, rng)
    storage = torch.full((max(where.size, 1),), poison, dtype=dtype, device=DEVICE)
    return torch.as_strided(storage, shape, where.strides, where.offset)


class Run:
    """The tensors of one case; ``forward`` and ``backward`` overwrite poisoned outputs."""

    def __init__(self, case: Case, arrays: dict[str, Array] | None = None, seed: int = 0) -> None:
        self.case = case
        self.rng = np.random.default_rng([seed, case.seed & 0xFFFF])
        self.arrays = cases.make_arrays(case) if arrays is None else arrays
        shape = cases.shapes(case)
        layout = case.layout
        self.inputs = {
            name: upload(name, self.arrays[name], case.dtype, layout, self.rng) for name in ("q", "k", "v", "dout")
        }
        if "bias" in self.arrays:
            dtype = case.dtype if case.bias_dtype == "same" else "float32"
            bias_layout = "contiguous" if layout == "expanded" else layout
            self.inputs["bias"] = upload("bias", self.arrays["bias"], dtype, bias_layout, self.rng)
        if "sink" in self.arrays:
            sink_layout = layout if layout in OUTPUT_LAYOUTS else "contiguous"
            dtype = case.dtype if case.sink == "same" else "float32"
            self.inputs["sink"] = upload("sink", self.arrays["sink"], dtype, sink_layout, self.rng)
        if "mask" in self.arrays:
            mask_layout = "contiguous" if layout == "expanded" else layout
            self.inputs["mask"] = upload("mask", self.arrays["mask"], None, mask_layout, self.rng)
        if "dlse" in self.arrays:
            self.inputs["dlse"] = upload("dlse", self.arrays["dlse"], None, "contiguous", self.rng)
        self.lengths = {
            name: torch.from_numpy(self.arrays[name]).to(DEVICE)
            for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
            if name in self.arrays
        }
        self.shape = shape
        self.output_layout = layout if layout in OUTPUT_LAYOUTS else "contiguous"
        self.rng_words = (case.seed, case.offset)

    @property
    def options(self) -> dict[str, Any]:
        score = {name: self.inputs[name] for name in ("bias", "mask", "sink") if name in self.inputs}
        return {**cases.call_options(self.case), **score, **self.lengths, "rng": self.rng_words}

    def _blank(self, name: str, dtype: str) -> Any:
        return blank(name, self.shape[name], torch_dtype(dtype), self.output_layout, self.rng)

    def forward(self) -> dict[str, Any]:
        """out and lse."""
        i = self.inputs
        out, lse = self._blank("out", self.case.dtype), self._blank("lse", "float32")
        options = self.options
        size = api.forward_workspace_bytes(i["q"], i["k"], i["v"], **options)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)  # NaN as float32
        nvrtc_attn.attention_forward(i["q"], i["k"], i["v"], out, lse=lse, workspace=workspace, **options)
        return {"out": out, "lse": lse}

    def backward(self, forward: dict[str, Any], *, deterministic: bool | None = None) -> dict[str, Any]:
        """dq, dk, dv, dbias and dsink."""
        i = self.inputs
        grads = {name: self._blank(name, self.case.dtype) for name in ("dq", "dk", "dv")}
        if "bias" in i:
            dtype = self.case.dtype if self.case.bias_dtype == "same" else "float32"
            grads["dbias"] = self._blank("dbias", dtype)
        if "sink" in i:
            grads["dsink"] = self._blank("dsink", self.case.dtype if self.case.sink == "same" else "float32")
        options = {
            **self.options,
            "deterministic": self.case.deterministic if deterministic is None else deterministic,
        }
        size = api.backward_workspace_bytes(i["q"], i["k"], i["v"], dbias="bias" in i, dsink="sink" in i, **options)
        # Strided gradients may ask for other kernels than dense ones, hence for some more.
        workspace = torch.full((size + (1 << 20),), 255, dtype=torch.uint8, device=DEVICE)
        nvrtc_attn.attention_backward(
            i["dout"], i["q"], i["k"], i["v"], forward["out"], forward["lse"],
            grads["dq"], grads["dk"], grads["dv"], dbias=grads.get("dbias"), dsink=grads.get("dsink"),
            dlse=i.get("dlse"), workspace=workspace, **options,
        )  # fmt: skip
        return grads


def to_numpy(x: Any) -> Array:
    array: Array = x.detach().to(torch.float64).cpu().numpy()
    return array


def oracle(case: Case, arrays: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """(float64 results, results of the same math in the input precision) of the inputs as the kernel sees them.

    In torch on the GPU, which is some 50 times as fast as the NumPy reference that it is tested against
    (tests/unit/test_fuzz.py). The yardstick of float32 is NumPy's: a GPU's float32 product adds in an order of its own.
    """
    # Copied: an array may be a broadcast view, which torch warns of.
    inputs = {name: torch.from_numpy(np.array(x)).to(DEVICE) for name, x in cases.cast_inputs(case, arrays).items()}
    geometry = fuzz_torch.Geometry(case, DEVICE)
    keep = fuzz_torch.keep_mask(case, DEVICE) if case.dropout_p > 0 else None
    exact = fuzz_torch.attention_dense(case, inputs, geometry, "float64", keep)
    if case.dtype == "float32":
        low = cases.attention_low_precision(case, cases.cast_inputs(case, arrays, np.float32))
    else:
        rounded = fuzz_torch.attention_dense(case, inputs, geometry, case.dtype, keep)
        low = {name: to_numpy(x) for name, x in rounded.items()}
    return {name: to_numpy(x) for name, x in exact.items()}, low


def failures(
    case: Case, found: dict[str, Any], exact: dict[str, Array], low: dict[str, Array], arrays: dict[str, Array]
) -> list[str]:
    """`cases.breaches` of tensors."""
    return cases.breaches(case, {name: to_numpy(x) for name, x in found.items()}, exact, low, arrays)


def families(case: Case) -> tuple[str, ...]:
    """The kernel families that can serve ``case`` here; one that ``NVRTC_ATTN_BACKEND`` names is the only one."""
    named = os.environ.get("NVRTC_ATTN_BACKEND")
    if named:
        return (named,)
    hopper = torch.cuda.get_device_capability() == (9, 0) and case.dtype != "float32"
    return ("portable", "hopper") if hopper else ("portable",)


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """``NVRTC_ATTN_BACKEND`` for a block of a test."""
    before = os.environ.get("NVRTC_ATTN_BACKEND")
    os.environ["NVRTC_ATTN_BACKEND"] = name
    try:
        yield
    finally:
        del os.environ["NVRTC_ATTN_BACKEND"]
        if before is not None:
            os.environ["NVRTC_ATTN_BACKEND"] = before


def check(case: Case, seed: int = 0) -> None:
    """Run ``case`` forward and backward in every family, and fail with every line of `failures`."""
    run = Run(case, seed=seed)
    exact, low = oracle(case, run.arrays)
    lines = []
    for family in families(case):
        with backend(family):
            forward = run.forward()
            found = failures(case, forward, exact, low, run.arrays)
            found += failures(case, run.backward(forward), exact, low, run.arrays)
        lines += [f"{family}: {line}" for line in found]
    assert not lines, "\n".join([f"{case}", f"stride seed {seed}", *lines])
