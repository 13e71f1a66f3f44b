"""How far tests of integrations found results apart, as rows of the table in docs/integrations/README.md.

    NVRTC_ATTN_TEST_DIFFERENCES=1 python -m pytest tests/unit tests/gpu -k "transformers or integrations"

prints at its end the rows of whatever ran, with the versions that it ran with: the largest difference of every row, by
device and dtype. Tests call `note`; what they assert does not depend on it. Workers of pytest-xdist report theirs, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np

WANTED = bool(os.environ.get("NVRTC_ATTN_TEST_DIFFERENCES"))
PROPERTY = "difference"


class Row(NamedTuple):
    libraries: tuple[str, ...]
    line: str
    compared: str


OUTPUTS = "outputs and input gradients"
ROWS = {
    "torch.nn": Row(("torch",), "`enable_sdpa(all=True)`", "losses of torch's modules, relative"),
    "timm": Row(("timm", "torch"), "`enable_sdpa(all=True)`", "losses of a ViT, relative"),
    "DistributedDataParallel, FSDP2": Row(("torch",), "none", "losses of two processes beside one, relative"),
    "transformers": Row(("transformers",), '`attn_implementation="nvrtc_attn"`', "outputs of models"),
    "transformers, Trainer": Row(("transformers",), '`attn_implementation="nvrtc_attn"`', "losses, relative"),
    "diffusers": Row(("diffusers",), '`set_attention_backend("nvrtc_attn")`', "outputs of models"),
    "xFormers": Row(("xformers",), "the import, or `op=(FwOp, BwOp)`", OUTPUTS),
    "flash_attn": Row((), "the import", f"{OUTPUTS}, lse"),
    "evoformer": Row((), "the import", OUTPUTS),
    "ComfyUI": Row((), "`register()`", OUTPUTS),
    "JAX": Row(("jax",), "the import of `dot_product_attention`", OUTPUTS),
    "Flax": Row(("flax", "jax"), "`attention_fn=attention_fn`", "losses of a training loop, relative"),
    "JAX, sharded": Row(("jax",), "none", f"{OUTPUTS}, four devices beside one"),
}

_properties: list[tuple[str, object]] = []


def of_test(properties: list[tuple[str, object]]) -> None:
    """From here on `note` is about the test whose report has these properties."""
    global _properties
    _properties = properties


def note(row: str, ours: Any, theirs: Any, *, relative: bool = False) -> None:
    """The largest difference of finite elements of tensors, arrays or lists; ``ours`` says the dtype."""
    if not WANTED:
        return
    dtype = str(getattr(ours, "dtype", "")).removeprefix("torch.")
    a, b = (_array(x) for x in (ours, theirs))
    finite = np.isfinite(a) & np.isfinite(b)
    apart = np.abs(a[finite] - b[finite])
    if relative:
        apart = apart / np.abs(b)[finite]
    number(row, float(apart.max(initial=0.0)), dtype)


def number(row: str, largest: float, dtype: str = "") -> None:
    """A difference that is known already."""
    assert row in ROWS, row
    if WANTED:
        _properties.append((PROPERTY, [row, largest, dtype]))


def _array(x: Any) -> Any:
    x = x.detach().double().cpu().numpy() if hasattr(x, "detach") else x
    return np.asarray(x, np.float64)


def table(reports: Iterable[Any]) -> list[str]:
    """The rows that reports of tests have something about."""
    largest: dict[tuple[str, str], float] = {}
    for report in reports:
        device = "GPU" if "tests/gpu/" in report.nodeid else "CPU"
        for name, value in report.user_properties:
            if name == PROPERTY:
                row, found, dtype = value
                where = row, ", ".join(filter(None, (device, dtype)))
                largest[where] = max(found, largest.get(where, 0.0))
    lines = ["| integration | version | line to change | compared | largest difference |", "|---|---|---|---|---|"]
    for name, (libraries, line, compared) in ROWS.items():
        found = [f"{value:.1e} ({where})" for (row, where), value in sorted(largest.items()) if row == name]
        if found:
            versions = ", ".join(f"{library} {_version(library)}" for library in libraries) or "its signatures"
            lines.append(f"| {name} | {versions} | {line} | {compared} | {', '.join(found)} |")
    return lines


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "of unknown version"
