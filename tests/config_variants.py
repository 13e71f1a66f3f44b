"""Every one-field change of a kernel config, for the tests of generated source and of cache keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvrtc_attn.jit.config import Features, KernelConfig

OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "kernel": ("another_kernel",),
    "arch": ("sm_86", "sm_90", "sm_90a"),
    "dtype": ("bfloat16", "float32"),
    "bias": ("float16", "bfloat16", "float32"),
    "dbias_dtype": ("float16", "bfloat16", "float32"),
    "dq": ("none",),
    "dbias": ("store",),
    "modifier": ("// ModifierBlock: 8 bytes\n", "// ModifierBlock: 16 bytes\n"),
    "optional": (),  # tests/unit/test_operands.py
}


def config_variants(config: KernelConfig) -> list[tuple[str, KernelConfig]]:
    """``config`` with one field changed, for every field and every kind of other value."""
    found: list[tuple[str, KernelConfig]] = []
    for part in (config, config.features):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, Features):
                continue
            if field.name in OTHER_VALUES:
                others = OTHER_VALUES[field.name]
            elif isinstance(value, bool):
                others = (not value,)
            elif isinstance(value, int):
                others = (value + 8, value + 1)
            else:
                raise AssertionError(f"say what other values {field.name} has")
            for other in (other for other in others if other != value):
                changed: Any = dataclasses.replace(part, **{field.name: other})
                whole = dataclasses.replace(config, features=changed) if isinstance(part, Features) else changed
                found.append((f"{field.name}={other}", whole))
    return found
