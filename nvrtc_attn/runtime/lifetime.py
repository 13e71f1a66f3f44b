"""Memory that queued kernels still use, kept alive until they are done.

A framework's allocator reuses memory in the order of its own stream. When a kernel runs on another stream, or the
producer is only known through DLPack, the owner is held here until an event recorded after the kernel has passed.

Concurrency: appending and popping a ``deque`` is atomic; the sweep holds a lock so that an entry is released once.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from . import driver

_pending: deque[tuple[int, Any, tuple[object, ...]]] = deque()
_captured: list[tuple[object, ...]] = []
_lock = threading.Lock()


def hold(device_index: int, stream: int, owners: tuple[object, ...]) -> None:
    """Keep ``owners`` until the work queued on ``stream`` so far is done, and release what is done already.

    A captured graph may be replayed at any time: what it uses is kept for good.
    """
    with driver.device_context(device_index):
        if driver.is_capturing(stream):
            _captured.append(owners)
            return
        event = driver.record(stream, device_index)
    _pending.append((device_index, event, owners))
    _sweep()


def _sweep() -> None:
    """Release from the oldest on. An unfinished event ends the sweep; later ones wait for a later call."""
    module = driver.api()
    with _lock:
        while _pending:
            device_index, event, _ = _pending[0]
            with driver.device_context(device_index):
                # A query is harmless to a capture that another thread has under way, but only a relaxed one is allowed.
                _, mode = module.cuThreadExchangeStreamCaptureMode(
                    module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
                )
                try:
                    if module.cuEventQuery(event)[0] != module.CUresult.CUDA_SUCCESS:
                        return
                    module.cuEventDestroy(event)
                finally:
                    module.cuThreadExchangeStreamCaptureMode(mode)
            _pending.popleft()
