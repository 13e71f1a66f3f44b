"""A config as one line of JSON and back, and the command that compiles exactly this kernel."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from typing import Any

from . import config as config_types
from .codegen import entry_source
from .config import Features, KernelConfig


def config_to_json(config: KernelConfig) -> str:
    """One line of JSON that names a kernel exactly: only the fields that differ from their defaults."""
    values: dict[str, Any] = {"type": type(config).__name__}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            values[field.name] = dataclasses.asdict(value) if isinstance(value, Features) else value
    return json.dumps(values, separators=(",", ":"))


def config_from_json(text: str) -> KernelConfig:
    """Inverse of `config_to_json`.

    Raises
    ------
    ValueError
        The text is not the JSON of a config.
    """
    types = {cls.__name__: cls for cls in vars(config_types).values() if isinstance(cls, type)}
    try:
        values = json.loads(text)
        cls = types[values.pop("type")]
        if not issubclass(cls, KernelConfig):
            raise TypeError(f"{cls.__name__} is not a kernel config")
        config: KernelConfig = cls(**{**values, "features": Features(**values.get("features", {}))})
        entry_source(config)  # refuses values that no kernel has a spelling for
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is not a kernel config: {type(error).__name__}: {error}") from error
    return config


def described(config: KernelConfig) -> str:
    """What tells a kernel from others, for people: why it had to be compiled. No length or content is part of it."""
    words = [config.kernel, f"for {config.arch}", config.dtype, f"head dim {config.head_dim}"]
    if config.head_dim_v != config.head_dim:
        words.append(f"and {config.head_dim_v}")
    words.append(f"tile {config.block_m}x{config.block_n}")
    for field in dataclasses.fields(config.features):
        value = getattr(config.features, field.name)
        if value == field.default:
            continue
        if field.name == "modifier":
            value = f"{len(value.splitlines())} lines, {hashlib.sha256(value.encode()).hexdigest()[:8]}"
        words.append(field.name if value is True else f"{field.name} ({value})")
    return " ".join(words)


def warmup_command(config: KernelConfig) -> str:
    """Return the command that puts exactly this kernel into the cache; quoted in the error of a missing one."""
    return f"python -m nvrtc_attn warmup --config {shlex.quote(config_to_json(config))}"
