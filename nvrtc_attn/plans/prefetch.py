"""Kernels of a backward pass that is likely to come, compiled in the background while the forward pass gets ready.

A first training step otherwise waits for NVRTC twice. What is guessed here is only which kernels: dense gradients, and
no gradient of the log-sum-exp. Where the guess is wrong the backward pass compiles what it needs, as it does where the
background compile failed; nothing is raised or logged here above the level of debugging.

Nothing is guessed where a compile is forbidden (``NVRTC_ATTN_NO_COMPILE``, ``NVRTC_ATTN_ASSERT_CACHED``) and while
plans are measured (``NVRTC_ATTN_AUTOTUNE=1``), which chooses other kernels.

Concurrency: the work is done by a thread of its own, once for the same forward kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Final

from ..base import env
from ..base.forks import renew_in_child
from ..base.log import LOGGER, quiet
from ..front.problem import AttentionProblem
from ..jit.compile import request_kernels
from . import autotune

_MAX_DONE: Final = 1024
_done: set[Hashable] = set()
_lock = threading.Lock()
renew_in_child(globals(), "_lock", threading.Lock)


class BackwardPrefetch:
    """The backward pass of ``problem``, whose outputs have their layouts, on a device."""

    __slots__ = ("_device_index", "_problem", "_started")

    def __init__(self, problem: AttentionProblem, device_index: int) -> None:
        self._problem = problem
        self._device_index = device_index
        self._started = False

    def start(self) -> None:
        """Begin, in another thread. The first call counts."""
        if self._started:
            return
        self._started = True
        try:
            if not (env.no_compile() or env.assert_cached() or env.autotune()):
                threading.Thread(target=self._work, name="nvrtc_attn prefetch", daemon=True).start()
        except (RuntimeError, ValueError) as error:  # no thread to be had; a variable that is refused where it matters
            LOGGER.debug("nothing is compiled ahead of the backward pass: %s", error)

    def start_after(self, forward_kernels: tuple[str, ...]) -> None:
        """Begin, unless that was done for other shapes that have the same forward kernels."""
        p = self._problem
        key = (forward_kernels, self._device_index, p.deterministic, p.dbias, p.dsink)
        if key not in _done:
            with _lock:
                if len(_done) < _MAX_DONE:
                    _done.add(key)
            self.start()

    def _work(self) -> None:
        try:
            with quiet():
                spec = autotune.expected_backward(self._problem, self._device_index)
                request_kernels([launch.config for launch in spec.launches if launch.grid])
        except Exception as error:
            LOGGER.debug("nothing is compiled ahead of the backward pass: %s", error)
