"""``NVRTC_ATTN_DEBUG=1``: lengths in device memory are read and checked, on a driver written in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dlpack_producer import Producer
from fake_driver import FakeDriver, installed

from nvrtc_attn.api import checked_call
from nvrtc_attn.front import tensors
from nvrtc_attn.front.call import Call, CallOptions
from nvrtc_attn.runtime import driver


class ReadableDriver(FakeDriver):
    """Device addresses are host addresses."""

    def do_StreamSynchronize(self, _stream: int) -> None:
        return None

    def do_MemcpyDtoH(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    with installed(ReadableDriver()) as driver_in_python:
        yield driver_in_python


def lengths(*values: int) -> Producer:
    array = np.array(values, np.int32)
    producer = Producer((len(values),), dtype=(0, 32), data=array.ctypes.data)
    producer.kept = array
    return producer


def call(**more: Any) -> Call:
    rows = Producer((1, 8, 2, 16))
    tensors = {"bias": None, "mask": None, "seqused_k": None} | more
    options = CallOptions(max_seqlen_q=4, max_seqlen_k=4)
    return checked_call(rows, rows, rows, **tensors, options=options, stream=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": (0, 5, 4)}, "cu_seqlens_q: decreases from 5 to 4"),
        ({"cu_seqlens_k": (0, 4, 9)}, "cu_seqlens_k: its last element is 9, but there are 8 tokens"),
        ({"cu_seqlens_q": (0, 5, 8)}, "max_seqlen_q: got 4, but sequence 0 of cu_seqlens_q has 5"),
        ({"seqused_k": (4, 5)}, "seqused_k: element 1 is 5"),
    ],
)
def test_wrong_lengths_on_the_gpu_are_refused_when_they_are_asked_for(
    changes: dict[str, tuple[int, ...]], message: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"cu_seqlens_q": (0, 4, 8), "cu_seqlens_k": (0, 4, 8)}
    wrong = {name: lengths(*values) for name, values in (good | changes).items()}
    assert call(**wrong).problem.varlen
    assert "cuMemcpyDtoH" not in fake.calls, "nobody asked: reading would wait for the GPU"
    monkeypatch.setenv("NVRTC_ATTN_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        call(**wrong)
    assert call(**{name: lengths(*values) for name, values in good.items()}).problem.batch == 2


def test_the_api_connects_the_driver(fake: FakeDriver) -> None:
    assert tensors._device_of is driver.device_of
    managed = Producer((2, 3), device=(13, 0), data=(1 << 40) + 64)  # the driver in Python: device 1
    assert tensors.view(managed, "q").device == ("cuda", 1)
    with pytest.raises(RuntimeError, match=r"import nvrtc_attn\.api"):
        tensors._no_driver(64)
