"""Config -> the text of the generated entry file: a ``Traits`` struct and one ``extern "C"`` kernel.

The text is derived from the dataclass fields of the config, so a field that is added to a config reaches the text (and
with it the cache key) without a line here; a field whose meaning cannot be derived is refused instead of dropped.
"""

from __future__ import annotations

import ctypes
import functools
import re
from dataclasses import fields
from typing import Any, Final

from ..base.dtypes import DTYPES
from ..front.operands import FURTHER_INPUTS, OPERANDS
from ..modifiers.cuda import block_bytes
from .config import Features, ForwardConfig, HopperBackwardConfig, HopperDbiasConfig, HopperForwardConfig, KernelConfig
from .params import (
    BackwardParams,
    ForwardParams,
    HopperBackwardParams,
    HopperForwardParams,
    padded,
    params_behind,
    with_max_logit,
    with_tile_bits,
)

ENTRY_NAME: Final = "attention_entry"
"""The ``extern "C"`` name of the kernel in every generated file."""

# Fields that hold one of a few words: the words that mean "on" become booleans, e.g. dq="atomic" -> kDqAtomic.
CHOICES: Final[dict[str, tuple[str, ...]]] = {"dq": ("atomic",), "dbias": ("store",)}
# Fields that hold an element type or None: the C++ alias, which has a kHas... flag beside it when None is allowed.
ELEMENT_ALIASES: Final[dict[str, str]] = {"dtype": "Element", "bias": "Bias", "dbias_dtype": "DBias"}
# The field's spelling of products in a name: warps_n_dkv -> kWarpsNdKV.
WORDS: Final[dict[str, str]] = {"sdp": "SdP", "dkv": "dKV", "dq": "dQ"}
# Spelled outside the struct: the header and the function, the target of the whole file.
_OUTSIDE_TRAITS: Final = ("kernel", "arch", "features")


def constant_name(field: str) -> str:
    """C++ name of a config field: ``block_m`` -> ``kBlockM``."""
    return "k" + "".join(WORDS.get(word, word.capitalize()) for word in field.split("_"))


def params_class(config: KernelConfig) -> type[ctypes.Structure]:
    """The struct that the kernel of ``config`` takes by value."""
    params = base_params_class(config)
    if config.features.max_logit:
        params = with_max_logit(params)
    if config.tile_bits:
        params = with_tile_bits(params)
    return modified_params(params, block_bytes(config.features.modifier)) if config.features.modifier else params


@functools.lru_cache(maxsize=256)
def modified_params(base: type[ctypes.Structure], nbytes: int) -> type[ctypes.Structure]:
    """``base`` with what a modifier captured behind it."""
    return type(base.__name__, (base,), {"_fields_": padded(base, [("modifier", ctypes.c_uint64 * (nbytes // 8))])})


def base_params_class(config: KernelConfig) -> type[ctypes.Structure]:
    """The struct without where the largest scores go and without what a modifier captured."""
    params: type[ctypes.Structure] = BackwardParams
    if isinstance(config, HopperForwardConfig):
        params = HopperForwardParams
    elif isinstance(config, HopperBackwardConfig | HopperDbiasConfig):
        params = HopperBackwardParams
    elif isinstance(config, ForwardConfig):
        params = ForwardParams
    optional = config.features.optional.split()
    return params_behind(
        params, tile_words=config.features.tile_words, part=config.features.part,
        device_starts=config.features.device_starts,
        further=any(OPERANDS[name].behind for name in optional if name in OPERANDS),
    )  # fmt: skip


def _trait_lines(name: str, value: Any) -> list[str]:
    """The members of ``Traits`` that say ``name == value``, usually one."""
    if name == "modifier":
        # No line where there is none: the text of such kernels, and their key, is what it was.
        return ["using Modifier = nvrtc_attn::Modifier<Element>;"] if value else []
    if name == "optional":
        given = value.split()
        if unknown := set(given) - set(FURTHER_INPUTS):
            raise ValueError(f"optional={value!r}: {', '.join(sorted(unknown))} is no optional operand of the table")
        return [
            f"static constexpr bool kHas{constant_name(x)[1:]} = {str(x in given).lower()};" for x in FURTHER_INPUTS
        ]
    if name in ELEMENT_ALIASES:
        alias = ELEMENT_ALIASES[name]
        cpp = DTYPES[value or "float32"].cpp
        lines = [f"using {alias} = {cpp};"]
        if name != "dtype":
            lines.append(f"static constexpr bool kHas{alias} = {str(value is not None).lower()};")
        return lines
    if name in CHOICES:
        if value != "none" and value not in CHOICES[name]:
            raise ValueError(f"{name}={value!r}: accepted are {', '.join(CHOICES[name])} and none")
        return [
            f"static constexpr bool k{name.capitalize()}{choice.capitalize()} = {str(value == choice).lower()};"
            for choice in CHOICES[name]
        ]
    if isinstance(value, bool):
        return [f"static constexpr bool {constant_name(name)} = {str(value).lower()};"]
    if isinstance(value, int):
        return [f"static constexpr int {constant_name(name)} = {value};"]
    raise TypeError(f"config field {name}={value!r}: codegen has no C++ spelling for {type(value).__name__}")


def _arch_guard(arch: str) -> list[str]:
    """Lines that refuse to compile for another target than the config's."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if match is None:
        raise ValueError(
            f"arch={arch!r}: expected sm_<number> with an optional suffix a or f, for example sm_80 or sm_90a"
        )
    number, suffix = match.groups()
    condition = f"__CUDA_ARCH__ != {int(number) * 10}"
    if suffix == "a":
        condition += f" || !defined(__CUDA_ARCH_FEAT_SM{number}_ALL)"
    return [f"#if {condition}", f'#error "this file is for {arch}"', "#endif"]


def _layout_asserts(struct: type[ctypes.Structure]) -> list[str]:
    name = struct.__name__
    qualified = f"nvrtc_attn::{name}"
    lines = [
        # NVRTC has no __builtin_offsetof; __INTADDR__ is what its front end makes of offsetof.
        "#define OFFSET(type, field, bytes) \\",
        '  static_assert(__INTADDR__(&((type*)0)->field) == bytes, #type "::" #field)',
        f'static_assert(sizeof({qualified}) == {ctypes.sizeof(struct)}, "sizeof({name})");',
    ]
    # Base classes first; names with an underscore are padding that only the ctypes mirror has to spell.
    bases = [base for base in reversed(struct.__mro__) if "_fields_" in vars(base)]
    for name in (field[0] for base in bases for field in vars(base)["_fields_"]):
        if not name.startswith("_"):
            lines.append(f"OFFSET({qualified}, {name}, {getattr(struct, name).offset});")
    return lines


def entry_source(config: KernelConfig) -> str:
    """Text of the ``.cu`` file for ``config``; equal configs give equal text, different ones different text."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", config.kernel):
        raise ValueError(f"kernel={config.kernel!r}: expected a lower-case C++ identifier")
    traits: list[str] = []
    for part in (config, config.features):
        for field in fields(part):
            if isinstance(part, Features) or field.name not in _OUTSIDE_TRAITS:
                traits += _trait_lines(field.name, getattr(part, field.name))
    traits.append(f"static constexpr int kNumThreads = {config.num_threads};")
    struct = base_params_class(config)
    params = f"nvrtc_attn::{struct.__name__}"
    if config.features.part or config.features.device_starts:
        traits.append(f"using PartParams = {params};")
    asserts = _layout_asserts(struct)
    whole = params_class(config)
    if config.features.max_logit:
        params = f"nvrtc_attn::WithMaxLogit<{params}>"
        traits.append(f"using MaxLogitParams = {params};")
    if config.tile_bits:
        params = f"nvrtc_attn::WithTileBits<{params}>"
        traits.append(f"using TileBitsParams = {params};")
    if config.features.modifier:
        params = f"nvrtc_attn::Modified<{params}>"
        traits.append(f"using ModifiedParams = {params};")
    if whole is not struct:
        asserts += [
            f"using WholeParams = {params};",
            f'static_assert(sizeof(WholeParams) == {ctypes.sizeof(whole)}, "sizeof(WholeParams)");',
        ]
        names = ("max_logit", "tile_bits_first", "tile_bits_room", "modifier")
        behind = [name for name in names if hasattr(whole, name)]
        asserts += [f"OFFSET(WholeParams, {name}, {getattr(whole, name).offset});" for name in behind]
    cluster = "__cluster_dims__(Traits::kCluster, 1, 1) " if getattr(config, "cluster", 1) > 1 else ""
    return "\n".join(
        [
            *_arch_guard(config.arch),
            # Angle brackets: NVRTC looks up quoted names of the main file in the working directory first.
            f"#include <nvrtc_attn/kernel/{config.kernel}.cuh>",
            "",
            *config.features.modifier.splitlines(),
            "struct Traits {",
            *(f"  {line}" for line in traits),
            "};",
            "",
            *asserts,
            "",
            f'extern "C" __global__ void {cluster}__launch_bounds__(Traits::kNumThreads, Traits::kMinBlocksPerSm)',
            f"{ENTRY_NAME}(__grid_constant__ {params} const params) {{",
            f"  nvrtc_attn::{config.kernel}<Traits>(params);",
            "}",
            "",
        ]
    )
