"""Memory that queued kernels still use, kept alive until they are done.

A framework's allocator reuses memory in the order of its own stream. When a kernel runs on another stream, or the
producer is only known through DLPack, the owner is held here until an event recorded after the kernel has passed.

Concurrency: appending and popping a ``deque`` is atomic; the sweep holds a lock so that an entry is released once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

from ..base.errors import DeviceFaultError
from ..base.forks import renew_in_child
from . import driver

_pending: dict[int, deque[tuple[Any, tuple[object, ...]]]] = {}
"""Of each GPU: events and owners, in the order in which they came."""
_captured: list[tuple[object, ...]] = []
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)


def hold(device_index: int, stream: int, owners: tuple[object, ...]) -> None:
    """Keep ``owners`` until the work queued on ``stream`` so far is done, and release what is done already.

    A captured graph may be replayed at any time: what it uses is kept for good.
    """
    with driver.device_context(device_index):
        if driver.is_capturing(stream):
            _captured.append(owners)
            return
        event = driver.record(stream, device_index)
    _pending.setdefault(device_index, deque()).append((event, owners))
    _sweep()


def _sweep() -> None:
    """Release what is done on every GPU. One whose context is lost is left out: calls for it say so themselves."""
    with _lock:
        for device_index, pending in list(_pending.items()):
            if not pending:
                continue
            with contextlib.suppress(DeviceFaultError), driver.device_context(device_index):
                _release(pending)


def _release(pending: deque[tuple[Any, tuple[object, ...]]]) -> None:
    """Release from the oldest on. An unfinished event ends it; later ones wait for a later call."""
    module = driver.api()
    while pending:
        # A query is harmless to a capture that another thread has under way, but only a relaxed one is allowed.
        _, mode = module.cuThreadExchangeStreamCaptureMode(module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            if module.cuEventQuery(pending[0][0])[0] != module.CUresult.CUDA_SUCCESS:
                return
            module.cuEventDestroy(pending[0][0])
        finally:
            module.cuThreadExchangeStreamCaptureMode(mode)
        pending.popleft()
