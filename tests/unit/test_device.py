"""Architectures and devices: the table agrees with NVRTC, and a GPU that cannot be used says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import FakeDriver, FakeGpu, installed

from nvrtc_attn.base.architectures import ARCHITECTURES, PORTABLE_ARCHITECTURES, arch_of
from nvrtc_attn.base.errors import CudaError, UnsupportedError
from nvrtc_attn.jit import nvrtc_library
from nvrtc_attn.jit.compile import compile_source
from nvrtc_attn.runtime import device


def test_the_table_holds_the_promised_architectures() -> None:
    promised = "sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_100 sm_103 sm_110 sm_120 sm_121"
    assert set(promised.split()) == set(PORTABLE_ARCHITECTURES)
    for name, arch in ARCHITECTURES.items():
        assert arch.name == name
        assert int("{}{}".format(*arch.compute_capability)) == int(name.removeprefix("sm_").rstrip("a"))
        # One KiB of each block is the system's, from compute capability 8.0 on.
        reserved = 1024 if arch.compute_capability >= (8, 0) else 0
        assert arch.smem_per_sm - arch.smem_per_block_optin == reserved
        assert arch.max_threads_per_sm in (1024, 1536, 2048)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_nvrtc_knows_every_architecture(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVRTC_ATTN_ASSERT_CACHED", raising=False)
    if arch == "sm_110" and nvrtc_library.nvrtc().version < (13, 0):
        pytest.skip("NVRTC 12 calls it sm_101")
    source = 'extern "C" __global__ void attention_entry(int* x) { x[0] = 1; }'
    assert compile_source(source, arch).code


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_87"), ((8, 8), "sm_86"),
        ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 1), "sm_100"), ((10, 3), "sm_103"),
        ((11, 0), "sm_110"), ((12, 0), "sm_120"), ((12, 1), "sm_121"), ((12, 9), "sm_121"),
    ],
)  # fmt: skip
def test_target_of_a_compute_capability(capability: tuple[int, int], arch: str) -> None:
    assert arch_of(capability) == arch
    target = ARCHITECTURES[arch].compute_capability
    assert target[0] == capability[0]
    assert target <= capability


@pytest.mark.reliability(68)
@pytest.mark.parametrize("capability", [(7, 0), (7, 2), (6, 1), (3, 5)])
def test_an_old_gpu_is_refused(capability: tuple[int, int]) -> None:
    with installed(FakeDriver([FakeGpu(), FakeGpu(capability, name="Old GPU")])) as fake:
        with pytest.raises(UnsupportedError) as caught:
            _ = device.properties(1).arch
        assert not {"cuLibraryLoadData", "cuDevicePrimaryCtxRetain"} & set(fake.calls)
    for part in ("cuda:1", "Old GPU", "{}.{}".format(*capability), "7.5", "CPU"):
        assert part in str(caught.value)


def test_an_unknown_generation_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"13\.0.*upgrade nvrtc_attn"):
        arch_of((13, 0))


def test_properties_are_the_driver_s_and_are_asked_for_once() -> None:
    gpus = [FakeGpu((9, 0), 232448, 132, "First"), FakeGpu((8, 6), 101376, 14, "Second")]
    with installed(FakeDriver(gpus)) as fake:
        first, second = device.properties(0), device.properties(1)
        assert (first.index, first.name, first.compute_capability, first.num_sms) == (0, "First", (9, 0), 132)
        assert (second.name, second.smem_per_block_optin, second.num_sms) == ("Second", 101376, 14)
        assert second.arch == "sm_86"
        assert first.total_memory_bytes == 1 << 36
        count = len(fake.calls)
        assert device.properties(0) is first
        assert len(fake.calls) == count


@pytest.mark.parametrize("code", [100, 101])
def test_no_such_device(code: int) -> None:
    with installed(FakeDriver(failures={"cuDeviceGet": [code]})), pytest.raises(CudaError) as caught:
        device.properties(7)
    assert caught.value.code == code
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


@pytest.mark.reliability(73)
def test_without_a_driver_everything_imports_and_a_call_says_what_is_missing(repository: Path) -> None:
    program = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
import cuda.pathfinder
def missing(name, *rest):
    if name == "cuda":
        raise RuntimeError("libcuda.so.1: cannot open shared object file")
    return load(name, *rest)
load, cuda.pathfinder.load_nvidia_dynamic_lib = cuda.pathfinder.load_nvidia_dynamic_lib, missing
import nvrtc_attn
from nvrtc_attn.jit import compile, nvrtc_library
from nvrtc_attn.runtime import device, driver, kernel
from nvrtc_attn.base import errors
import cuda.bindings.driver
def no_driver(*_):
    raise RuntimeError("libcuda.so.1: cannot open shared object file")
class WithoutDriver:
    cuInit = staticmethod(no_driver)
cuda.bindings.driver = WithoutDriver
for call in (lambda: device.properties(0), lambda: driver.primary_context(0), lambda: driver.is_capturing(0)):
    for attempt in range(2):
        try:
            call()
        except errors.CudaError as error:
            print(error.code, error)
assert driver._api is None
"""
    output = subprocess.run(
        [sys.executable, "-c", program, str(repository)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    assert len(output) == 6
    assert len(set(output)) == 1
    for part in ("100 ", "libcuda.so.1", "doctor", "NumPy"):
        assert part in output[0]
