"""Compiler processes: started when a compile needs one, used again for a while, never more than cores and memory allow.

Why processes: NVRTC 12.9 and 13.0 replace the process's SIGINT and SIGTERM handlers while they compile, so that Ctrl-C
ends the program; a fork during a compile leaves a child in which NVRTC hangs; a crash of NVRTC is the end of its
process; and compiles in threads of one process wait for each other.

Where no worker can be started (a sandbox without ``exec``, a frozen program without an interpreter beside it) NVRTC
compiles in the calling process, after one warning in the log.

Concurrency: any thread may compile. Compiles that a caller waits for come first; background ones leave a core free for
them. An idle worker is ended after `IDLE_SECONDS`; workers end by themselves when their parent does. A child of a fork
forgets its parent's workers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..base.log import log_once
from . import compiler_process
from .compiler_process import Answer, Worker, WorkerDiedError, WorkerUnavailableError, compile_here

COMPILE_MEMORY_BYTES: Final = 700 << 20
"""Room for one compile process: the backward kernels peak at 260 MB with NVRTC 13.0 and at 420 MB with 13.5."""
IDLE_SECONDS: Final = 5.0
"""How long a worker without work stays: its next compile is 0.25 s of processor time cheaper than a new worker's."""


class Ticket:
    """One compile's place in the queue.

    ``urgent``: somebody waits for it. ``started``: when its turn came, by ``time.perf_counter``.
    """

    __slots__ = ("started", "urgent")

    def __init__(self, *, urgent: bool = True) -> None:
        self.urgent = urgent
        self.started = time.perf_counter()


class WorkerPool:
    """The workers of this process. ``limit`` is the most that compile at once, by cores and memory if it is None."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._limits: list[int] = []
        """Those of `limited`, in the place of ``limit`` while there are any: the largest holds."""
        self.workers: list[Worker] = []
        """All that were started and not ended, the newest idle one last."""
        self._changed = threading.Condition()
        self._idle: list[Worker] = []
        self._waiting: list[Ticket] = []
        self._running: list[Ticket] = []
        self._capacity = 1
        self._keeper: threading.Thread | None = None
        self._unavailable = ""

    def compile(self, message: list[bytes], ticket: Ticket) -> Answer:
        """Compile in a worker as soon as ``ticket`` may. ``message`` is that of `nvrtc_worker`.

        Raises
        ------
        WorkerDiedError
            The process ended in the middle of it.
        OSError
            NVRTC cannot be loaded.
        """
        with self._turn(ticket):
            try:
                return self._ask(message)
            except WorkerUnavailableError as error:
                if sys.is_finalizing():
                    raise  # nobody is left to read a warning or to use the kernel
                log_once(
                    f"no compiler process can be started ({error}): kernels are compiled in this process, where NVRTC "
                    "12.9 and 13.0 take the signal handlers meanwhile and a fork during a compile hangs"
                )
                return compile_here(message)

    def _ask(self, message: list[bytes]) -> Answer:
        while True:
            worker = self._take(message[0])
            try:
                answer = worker.ask(message)
            except WorkerDiedError as death:
                self._forget(worker)
                if death.exit_code != 0:
                    raise
                continue  # it gave up waiting: this process was stopped for a minute
            except BaseException:
                self._forget(worker)
                raise
            self._give_back(worker)
            return answer

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """At most ``limit`` at once meanwhile. Of several callers at a time the one that allows most is heard."""
        with self._changed:
            self._limits.append(limit)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._limits.remove(limit)
                self._changed.notify_all()

    def hurry(self, ticket: Ticket) -> None:
        """Somebody waits for ``ticket`` now."""
        with self._changed:
            ticket.urgent = True
            self._changed.notify_all()

    @contextmanager
    def _turn(self, ticket: Ticket) -> Iterator[None]:
        with self._changed:
            self._waiting.append(ticket)
            while not self._may_start(ticket):
                self._changed.wait()
            self._waiting.remove(ticket)
            self._running.append(ticket)
            ticket.started = time.perf_counter()
            self._changed.notify_all()  # for the next, which may fit beside this one
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(ticket)
                self._changed.notify_all()

    def _may_start(self, ticket: Ticket) -> bool:
        if ticket is not next((t for t in self._waiting if t.urgent), self._waiting[0]):
            return False
        limit = max(self._limits, default=self.limit)
        if not self._running:  # measured while nothing runs: a compile that has just begun will take more than it has
            self._capacity = available_memory_bytes() // COMPILE_MEMORY_BYTES
            return True
        cores = limit or usable_cores()
        urgent = sum(t.urgent for t in self._running)
        if len(self._running) >= max(1, limit or self._capacity):
            return False
        if ticket.urgent:
            return urgent < cores
        return len(self._running) + bool(urgent) < cores

    def _take(self, library: bytes) -> Worker:
        with self._changed:
            for worker in reversed(self._idle):
                if worker.library == library:
                    self._idle.remove(worker)
                    return worker
            if self._unavailable:
                raise WorkerUnavailableError(self._unavailable)
        with compiler_process.descriptors:  # a fork meanwhile waits, so that the child knows what to close
            worker = Worker(library)
            self.workers.append(worker)
        try:
            worker.greet()
        except WorkerUnavailableError as error:
            self._unavailable = str(error)  # another try would take as long
            self._forget(worker)
            raise
        return worker

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            worker.idle_since = time.monotonic()
            self._idle.append(worker)
            if self._keeper is None:
                keeper = threading.Thread(target=self._keep, name="nvrtc_attn worker pool", daemon=True)
                try:
                    keeper.start()
                    self._keeper = keeper
                except RuntimeError:  # the interpreter is shutting down, and its workers with it
                    pass

    def _keep(self) -> None:
        """End workers that have been idle for long enough, until there are none."""
        while True:
            with self._changed:
                if not self._idle:
                    self._keeper = None
                    return
                remaining = self._idle[0].idle_since + IDLE_SECONDS - time.monotonic()
                if remaining > 0:
                    self._changed.wait(remaining)
                    continue
                worker = self._idle.pop(0)
            worker.end()
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        worker.end()
        worker.close()
        with compiler_process.descriptors:
            if worker in self.workers:
                self.workers.remove(worker)


def usable_cores() -> int:
    """Cores that this process may use: its affinity, within the quota of the container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = min(cores, -(-int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        pass
    return max(cores, 1)


def available_memory_bytes() -> int:
    """Memory that this process may still use: what the kernel calls available, within the limit of the container."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        available = int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError):
        return 4 * COMPILE_MEMORY_BYTES  # not Linux
    group = Path("/sys/fs/cgroup")
    try:
        limit, current = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        pages = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        # Files that were read once count as used, and are dropped when memory is asked for.
        available = min(available, limit - current + int(pages["inactive_file"]))
    except (OSError, KeyError, ValueError):  # no cgroup v2, or "max"
        pass
    return available


_pool = WorkerPool()


def pool() -> WorkerPool:
    """The pool of this process."""
    return _pool


def _after_fork_in_child() -> None:
    global _pool
    forgotten, _pool = _pool, WorkerPool()
    _pool.limit = forgotten.limit
    for worker in forgotten.workers:
        worker.close()  # an open pipe would keep the parent's worker from seeing that its parent ended


# `compiler_process` is imported before, and registered its own function first: closing a worker takes the new lock.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
