"""What this package asks of a GPU, by ordinal: queried once a process, for plans, memory and the doctor."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from ..base.architectures import arch_of
from ..base.forks import renew_in_child
from . import driver


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of one GPU as the driver reports them (a MIG slice reports its own). Sizes in bytes."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_block_optin: int
    """The most shared memory that one block can use, static and dynamic."""
    total_memory_bytes: int
    has_memory_pools: bool
    """Memory can be allocated in the order of a stream."""

    @property
    def arch(self) -> str:
        """Compile target of the portable family, see ``architectures.arch_of``."""
        return arch_of(self.compute_capability, f"cuda:{self.index} ({self.name})")


_properties: dict[int, DeviceProperties] = {}
_without_clusters: set[int] = set()
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)


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


def has_clusters(index: int) -> bool:
    """Whether clusters of thread blocks may be chosen for the device: until one was refused (`no_clusters`)."""
    return index not in _without_clusters


def no_clusters(index: int) -> None:
    """Remember that the device has no room for a cluster that the tables took it to have room for."""
    _without_clusters.add(index)


def one_of_each_kind(indices: Iterable[int]) -> list[int]:
    """The first of the CUDA ordinals ``indices`` of every kind of GPU: kinds differ in their plans and workspaces."""
    kinds: dict[tuple[object, ...], int] = {}
    for index in indices:
        found = properties(index)
        kinds.setdefault((found.name, found.compute_capability, found.num_sms), index)
    return list(kinds.values())


def _query(index: int) -> DeviceProperties:
    attributes = driver.api().CUdevice_attribute
    handle = driver.call("cuDeviceGet", index)

    def attribute(name: str) -> int:
        which = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", which, handle))

    name = driver.call("cuDeviceGetName", 256, handle)
    return DeviceProperties(
        index=index,
        name=name.split(b"\0", 1)[0].decode(errors="replace") if isinstance(name, bytes) else str(name),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        smem_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        total_memory_bytes=int(driver.call("cuDeviceTotalMem", handle)),
        has_memory_pools=bool(attribute("MEMORY_POOLS_SUPPORTED")),
    )
