"""Tensor maps: what the copy engine can read, and one encoding a plan however many addresses follow."""

from __future__ import annotations

import ctypes
import dataclasses
import struct

import pytest
from fake_driver import FakeDriver, installed

from nvrtc_attn.front.problem import OperandLayout
from nvrtc_attn.heuristics import tensor_map as tma
from nvrtc_attn.jit.params import HopperForwardParams
from nvrtc_attn.runtime import tensor_maps

QUERY = OperandLayout(shape=(2, 512, 4, 64), strides=(512 * 256, 256, 64, 1), dtype="bfloat16")
BIAS = OperandLayout(shape=(2, 4, 512, 384), strides=(4 * 512 * 384, 512 * 384, 384, 1), dtype="bfloat16")
POINTERS = HopperForwardParams.POINTERS


def written(encoder: tensor_maps.TensorMapEncoder, address: int) -> dict[str, tuple[int, int]]:
    """(address, number of the encoding) of every map after a ``write`` with all tensors at ``address``."""
    buffer = (ctypes.c_char * ctypes.sizeof(HopperForwardParams))()
    encoder.write(buffer, [address] * len(POINTERS))
    fields = {name: getattr(HopperForwardParams, f"tensor_map_{name}").offset for name in ("q", "bias")}
    return {name: struct.unpack_from("<2Q", buffer, offset) for name, offset in fields.items()}


def test_another_address_is_put_into_the_map_that_was_encoded() -> None:
    maps = [
        tma.tensor_map("tensor_map_q", "q", QUERY, 2, 128),
        tma.score_map("tensor_map_bias", "bias", BIAS, 2, 128),
    ]
    with installed(FakeDriver()) as gpu:
        encoder = tensor_maps.TensorMapEncoder(maps, HopperForwardParams, POINTERS)
        assert written(encoder, 0x1000) == {"q": (0x1000, 1), "bias": (0x1000, 2)}
        assert written(encoder, 0x2000) == {"q": (0x2000, 1), "bias": (0x2000, 2)}
        calls = len(gpu.calls)
        assert written(encoder, 0x1000) == {"q": (0x1000, 1), "bias": (0x1000, 2)}
        assert len(gpu.calls) == calls, "a known address asks the driver again"
        for address in range(0x4000, 0x4000 + 0x100 * (tensor_maps._REMEMBERED + 10), 0x100):
            assert written(encoder, address)["q"] == (address, 1)
        assert len(gpu.tensor_maps) == 2
        assert all(len(known) <= tensor_maps._REMEMBERED for *_, known in encoder._slots)


@pytest.mark.parametrize(
    ("changes", "dims", "strides", "rows"),
    [
        ({}, (384, 512, 4, 2), (768, 512 * 768, 4 * 512 * 768), 128),
        ({"shape": (1, 4, 512, 384)}, (384, 512, 4, 1), (768, 512 * 768, 16), 128),
        ({"shape": (2, 1, 1, 384)}, (384, 1, 1, 2), (16, 16, 4 * 512 * 768), 1),
        ({"strides": (0, 0, 384, 1)}, (384, 512, 1, 1), (768, 16, 16), 128),
        ({"strides": (512 * 384, 0, 0, 1)}, (384, 1, 1, 2), (16, 16, 512 * 768), 1),
    ],
)
def test_repeated_dims_of_a_bias_have_one_element(
    changes: dict[str, tuple[int, ...]], dims: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> None:
    found = tma.score_map("tensor_map_bias", "bias", dataclasses.replace(BIAS, **changes), 2, 128)
    assert (found.dims, found.strides_bytes, found.box) == (dims, strides, (64, rows))


@pytest.mark.parametrize(
    ("dtype", "width", "swizzle"), [("bfloat16", 64, "128B"), ("float32", 32, "128B"), ("bool", 64, "64B")]
)
def test_box_and_swizzle_fit_the_element(dtype: str, width: int, swizzle: str) -> None:
    itemsize = {"bfloat16": 2, "float32": 4, "bool": 1}[dtype]
    item = tma.score_map("tensor_map_bias", "bias", dataclasses.replace(BIAS, dtype=dtype), itemsize, 192)
    assert item.box == (width, 192)
    with installed(FakeDriver()) as gpu:
        tensor_maps.encode(item, 0x1000)
    assert gpu.tensor_maps[0][8].name == f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"


def test_reasons_name_dim_and_number() -> None:
    assert tma.score_reasons_against("bias", BIAS, 2) == []
    odd = dataclasses.replace(BIAS, strides=(4 * 512 * 385, 512 * 385, 385, 1), offset_alignment=2)
    reasons = tma.score_reasons_against("bias", odd, 2)
    assert len(reasons) == 2
    assert "multiple of 2 bytes" in reasons[0]
    assert "stride 385 (770 bytes) in dim 2" in reasons[1]
    # Dims of one element are never walked.
    one_row = dataclasses.replace(odd, shape=(1, 1, 1, 384), offset_alignment=16)
    assert tma.score_reasons_against("bias", one_row, 2) == []
