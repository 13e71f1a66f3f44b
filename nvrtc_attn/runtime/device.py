"""What the heuristics may know about a GPU: the table of architectures, and the properties of each device ordinal."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ..base.errors import UnsupportedError
from . import driver


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of one compile target, from the table "Technical Specifications per Compute Capability" of the CUDA guide.

    All sizes in bytes. ``smem_per_block_optin`` is the most that one block can use (static plus dynamic).
    """

    name: str
    compute_capability: tuple[int, int]
    smem_per_block_optin: int
    smem_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255


_KIB: Final = 1024
ARCHITECTURES: Final[dict[str, Architecture]] = {
    a.name: a
    for a in (
        Architecture("sm_75", (7, 5), 64 * _KIB, 64 * _KIB, 1024, 16),
        Architecture("sm_80", (8, 0), 163 * _KIB, 164 * _KIB, 2048, 32),
        Architecture("sm_86", (8, 6), 99 * _KIB, 100 * _KIB, 1536, 16),
        Architecture("sm_87", (8, 7), 163 * _KIB, 164 * _KIB, 1536, 16),
        Architecture("sm_89", (8, 9), 99 * _KIB, 100 * _KIB, 1536, 24),
        Architecture("sm_90", (9, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_90a", (9, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_100", (10, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_103", (10, 3), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_110", (11, 0), 227 * _KIB, 228 * _KIB, 1536, 24),
        Architecture("sm_120", (12, 0), 99 * _KIB, 100 * _KIB, 1536, 24),
        Architecture("sm_121", (12, 1), 99 * _KIB, 100 * _KIB, 1536, 24),
    )
}
PORTABLE_ARCHITECTURES: Final = tuple(name for name in ARCHITECTURES if name[-1].isdigit())
"""Targets of the portable kernel family: plain ones, whose cubins also run on later minor versions."""
MINIMUM_COMPUTE_CAPABILITY: Final = (7, 5)
_EMBEDDED: Final = ((8, 7), (11, 0))


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of one GPU as the driver reports them (a MIG slice reports its own)."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_block_optin: int
    smem_per_sm: int
    max_threads_per_sm: int
    registers_per_sm: int
    l2_bytes: int
    total_memory_bytes: int

    @property
    def arch(self) -> str:
        """Compile target of the portable family, see ``arch_of``."""
        return arch_of(self)


_properties: dict[int, DeviceProperties] = {}
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def properties(index: int) -> DeviceProperties:
    """Properties of the device with ordinal ``index`` (the ordinal after ``CUDA_VISIBLE_DEVICES``), cached.

    Raises
    ------
    CudaError
        There is no driver or no such device.
    """
    found = _properties.get(index)
    if found is None:
        with _lock:
            found = _properties.get(index)
            if found is None:
                found = _properties[index] = _query(index)
    return found


def one_of_each_kind(indices: Iterable[int]) -> list[int]:
    """The first of the CUDA ordinals ``indices`` of every kind of GPU: kinds differ in their plans and workspaces."""
    kinds: dict[tuple[object, ...], int] = {}
    for index in indices:
        found = properties(index)
        kinds.setdefault((found.name, found.compute_capability, found.num_sms), index)
    return list(kinds.values())


def _query(index: int) -> DeviceProperties:
    module = driver.api()
    handle = driver.call("cuDeviceGet", index)

    def attribute(name: str) -> int:
        return int(driver.call("cuDeviceGetAttribute", getattr(module.CUdevice_attribute, name), handle))

    prefix = "CU_DEVICE_ATTRIBUTE_"
    name = driver.call("cuDeviceGetName", 256, handle)
    return DeviceProperties(
        index=index,
        name=name.split(b"\0", 1)[0].decode(errors="replace") if isinstance(name, bytes) else str(name),
        compute_capability=(
            attribute(prefix + "COMPUTE_CAPABILITY_MAJOR"),
            attribute(prefix + "COMPUTE_CAPABILITY_MINOR"),
        ),
        num_sms=attribute(prefix + "MULTIPROCESSOR_COUNT"),
        smem_per_block_optin=attribute(prefix + "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_per_sm=attribute(prefix + "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        max_threads_per_sm=attribute(prefix + "MAX_THREADS_PER_MULTIPROCESSOR"),
        registers_per_sm=attribute(prefix + "MAX_REGISTERS_PER_MULTIPROCESSOR"),
        l2_bytes=attribute(prefix + "L2_CACHE_SIZE"),
        total_memory_bytes=int(driver.call("cuDeviceTotalMem", handle)),
    )


def arch_of(device: DeviceProperties | tuple[int, int]) -> str:
    """Compile target of the portable family for a device, for example ``"sm_90"``.

    A minor version that the table does not have (8.8) takes the nearest lower one of the same major version, whose
    cubins it runs; embedded chips (8.7, 11.0) are left out there, because their cubins run on nothing else. An unknown
    major version runs no cubin of ours.

    Raises
    ------
    UnsupportedError
        The compute capability is below 7.5 or of an unknown major version.
    """
    if isinstance(device, DeviceProperties):
        capability, who = device.compute_capability, f"cuda:{device.index} ({device.name})"
    else:
        capability, who = device, "the device"
    major, minor = capability
    if capability < MINIMUM_COMPUTE_CAPABILITY:
        raise UnsupportedError(
            f"{who} has compute capability {major}.{minor}: nvrtc_attn needs 7.5 (Turing) or later; pass NumPy arrays "
            "to compute on the CPU"
        )
    known = [ARCHITECTURES[name].compute_capability for name in PORTABLE_ARCHITECTURES]
    usable = [c for c in known if c == capability or (c[0] == major and c[1] < minor and c not in _EMBEDDED)]
    if not usable:
        raise UnsupportedError(
            f"{who} has compute capability {major}.{minor}: this version of nvrtc_attn knows "
            f"{', '.join(f'{a}.{b}' for a, b in known)} and their later minor versions; upgrade nvrtc_attn"
        )
    best = max(usable)
    return f"sm_{best[0]}{best[1]}"
