"""Compiler processes: started when a compile needs one, used again for a while, never more than cores and memory allow.

Why processes: NVRTC 12.9 and 13.0 replace the process's SIGINT and SIGTERM handlers while they compile, so that Ctrl-C
ends the program; a fork during a compile leaves a child in which NVRTC hangs; a crash of NVRTC is the end of its
process; and compiles in threads of one process wait for each other.

A worker is a fresh interpreter (``python -I -S nvrtc_worker.py``), not a fork: it has none of the caller's descriptors,
variables or modules, runs nothing of ``__main__``, and is a session of its own, which Ctrl-C at the terminal does not
reach. Where no worker can be started (a sandbox without ``exec``, a frozen program without an interpreter beside it)
NVRTC compiles in the calling process, after one warning in the log.

Concurrency: any thread may compile. Compiles that a caller waits for come first; background ones leave a core free for
them. An idle worker is ended after `IDLE_SECONDS`; workers end by themselves when their parent does. A child of a fork
forgets its parent's workers.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..base import env
from ..base.log import log_once
from . import nvrtc_worker

COMPILE_MEMORY_BYTES: Final = 700 << 20
"""Room for one compile process: the backward kernels peak at 260 MB with NVRTC 13.0 and at 420 MB with 13.5."""
IDLE_SECONDS: Final = 5.0
"""How long a worker without work stays: its next compile is 0.25 s of processor time cheaper than a new worker's."""
_SELF_IDLE_SECONDS: Final = 60.0
"""When a worker gives up waiting on its own: much later than its parent ends it, so that the two do not meet."""
_START_SECONDS: Final = 60.0
_MESSAGE_BYTES: Final = 2000
# What a worker needs of the environment; nothing else may change what NVRTC does.
_VARIABLES: Final = ("LD_LIBRARY_PATH", "PATH", "TMPDIR")


class Answer(NamedTuple):
    """What NVRTC said. ``code`` is empty unless ``status`` is 0."""

    status: int
    name: str
    log: str
    code: bytes
    archs: tuple[int, ...]


class WorkerDiedError(RuntimeError):
    """A worker ended in the middle of a compile. ``signal`` is 0 if it ended by itself or nobody knows."""

    def __init__(self, signal_number: int, exit_code: int | None, last_words: str) -> None:
        super().__init__(signal_number, exit_code, last_words)
        self.signal, self.exit_code, self.last_words = signal_number, exit_code, last_words

    def __str__(self) -> str:
        if self.signal:
            try:
                what = f"was ended by {signal.Signals(self.signal).name}"
            except ValueError:
                what = f"was ended by signal {self.signal}"
        else:
            what = "ended" if self.exit_code is None else f"ended with exit code {self.exit_code}"
        if self.signal == getattr(signal, "SIGKILL", None):
            what += ", most likely for want of memory: see dmesg and the memory limit of the container"
        return what + (f"; its last words: {self.last_words}" if self.last_words else "")


class WorkerUnavailableError(RuntimeError):
    """No worker can be started here, and why."""


class Ticket:
    """One compile's place in the queue.

    ``urgent``: somebody waits for it. ``started``: when its turn came, by ``time.perf_counter``.
    """

    __slots__ = ("started", "urgent")

    def __init__(self, *, urgent: bool = True) -> None:
        self.urgent = urgent
        self.started = time.perf_counter()


class _Worker:
    """One process and the pipes to it. It serves one NVRTC: two in a process would share a library of builtins."""

    def __init__(self, library: bytes) -> None:
        import subprocess  # 4 ms that only a compile needs

        command = [_interpreter(), "-I", "-S", _script(), str(_SELF_IDLE_SECONDS)]
        precompiled = env.pch_dir()
        if precompiled is not None:
            command.append(str(precompiled))
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        self._errors = os.memfd_create("nvrtc_attn worker") if hasattr(os, "memfd_create") else -1
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if self._errors < 0 else self._errors,
                bufsize=0,
                cwd="/",
                env={**environment, "LC_ALL": "C"},
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:  # RuntimeError: the interpreter is shutting down
            self.close()
            raise WorkerUnavailableError(f"{command[0]}: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        self.library = library
        self.pid = process.pid
        self._precompiled = None if precompiled is None else precompiled / str(process.pid)
        self._requests, self._answers = os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        process.returncode = 0  # it is waited for here; otherwise the object would warn when it is collected
        self._ended = False
        self._exit_code: int | None = None
        self.idle_since = 0.0

    def ask(self, message: list[bytes]) -> Answer:
        """Send one request and wait for its answer.

        Raises
        ------
        WorkerDiedError
            It ended before it answered.
        """
        try:
            nvrtc_worker.send(self._requests, message)
            status, name, log, code, archs = nvrtc_worker.receive(self._answers)
        except (EOFError, OSError):
            raise self._death() from None
        text = log.rstrip(b"\0 \n").decode(errors="replace")
        return Answer(int(status), name.decode(), text, code, tuple(map(int, archs.split())))

    def greet(self) -> None:
        """Wait until it says that it is a worker.

        Raises
        ------
        WorkerUnavailableError
            It does not.
        """
        said: list[bytes] = []
        with suppress(EOFError, OSError):
            if select.select([self._answers], [], [], _START_SECONDS)[0] and os.read(self._answers, 8)[:1] == b"\1":
                size = int.from_bytes(os.read(self._answers, 8), "little")
                said = [os.read(self._answers, min(size, 100))]
        if said != [nvrtc_worker.HELLO]:
            raise WorkerUnavailableError(f"{_interpreter()} does not start a worker: {self._death()}")

    def _death(self) -> WorkerDiedError:
        code, words = self.end(), ""
        if self._errors >= 0:
            size = os.fstat(self._errors).st_size
            tail = os.pread(self._errors, _MESSAGE_BYTES, max(0, size - _MESSAGE_BYTES))
            words = tail.decode(errors="replace").strip()
        self.close()
        if code is None:
            return WorkerDiedError(0, None, words)
        return WorkerDiedError(-code, None, words) if code < 0 else WorkerDiedError(0, code, words)

    def end(self) -> int | None:
        """End the process if it has not; its exit code, minus the signal that it died of, ``None`` if unknown."""
        if not self._ended:
            self._ended = True  # once: its number may belong to another process afterwards
            # Suppressed: somebody else waits for all children of the process, or ignores SIGCHLD.
            with suppress(ChildProcessError, ProcessLookupError):
                self._exit_code = self._wait()
            if self._precompiled is not None:
                import shutil  # only here

                shutil.rmtree(self._precompiled, ignore_errors=True)
        return self._exit_code

    def _wait(self) -> int:
        poll = select.poll()
        poll.register(self._answers, 0)
        for _ in range(20):  # what has just closed its pipe has an exit code of its own in a moment
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid or not poll.poll(0):
                break
            time.sleep(0.005)
        if not pid:
            os.kill(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Give back the descriptors. The lock: a fork must not see one that is closed and not yet forgotten."""
        with _descriptors:
            for name in ("_requests", "_answers", "_errors"):
                descriptor = getattr(self, name, -1)
                if descriptor >= 0:
                    os.close(descriptor)
                setattr(self, name, -1)


class WorkerPool:
    """The workers of this process. ``limit`` is the most that compile at once, by cores and memory if it is None."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self._limits: list[int] = []
        """Those of `limited`, in the place of ``limit`` while there are any: the largest holds."""
        self.workers: list[_Worker] = []
        """All that were started and not ended, the newest idle one last."""
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
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
                return _compile_here(message)

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

    def _take(self, library: bytes) -> _Worker:
        with self._changed:
            for worker in reversed(self._idle):
                if worker.library == library:
                    self._idle.remove(worker)
                    return worker
            if self._unavailable:
                raise WorkerUnavailableError(self._unavailable)
        with _descriptors:  # a fork meanwhile waits, so that the child knows what to close
            worker = _Worker(library)
            self.workers.append(worker)
        try:
            worker.greet()
        except WorkerUnavailableError as error:
            self._unavailable = str(error)  # another try would take as long
            self._forget(worker)
            raise
        return worker

    def _give_back(self, worker: _Worker) -> None:
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

    def _forget(self, worker: _Worker) -> None:
        worker.end()
        worker.close()
        with _descriptors:
            if worker in self.workers:
                self.workers.remove(worker)


def _compile_here(message: list[bytes]) -> Answer:
    library, arch, name, source, *options = message
    status, what, log, code, archs = nvrtc_worker.compile_program(
        os.fsdecode(library), arch.decode(), name, source, options
    )
    text = log.rstrip(b"\0 \n").decode(errors="replace")
    return Answer(status, what.decode(), text, code, tuple(map(int, archs.split())))


def _interpreter() -> str:
    """A Python to run the worker with. It need not be of this version.

    ``sys.executable`` of an embedding program or of a frozen one is that program, which must not be started again.

    Raises
    ------
    WorkerUnavailableError
        There is none.
    """
    if os.name != "posix":
        raise WorkerUnavailableError(f"not implemented on {sys.platform}")
    chosen = getattr(sys.modules.get("multiprocessing.spawn"), "_python_exe", None)  # multiprocessing.set_executable
    beside = os.path.join(sys.base_exec_prefix, "bin", "python{}.{}".format(*sys.version_info))
    frozen = getattr(sys, "frozen", False)
    candidates = (beside,) if frozen else (sys.executable, chosen, getattr(sys, "_base_executable", None), beside)
    for candidate in candidates:
        path = os.fsdecode(candidate) if candidate else ""
        if re.match(r"(python|pypy)[\d.]*[a-z]*(-dbg)?$", os.path.basename(path)) and os.access(path, os.X_OK):
            return path
    raise WorkerUnavailableError(f"sys.executable is {sys.executable!r}, not a Python interpreter")


def _script() -> str:
    path = Path(nvrtc_worker.__file__)
    if not path.is_file():
        raise WorkerUnavailableError(f"{path} is not a file")
    return str(path)


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


_descriptors: Any = threading.RLock()
"""Held while descriptors of workers come and go, and by a fork."""
_pool = WorkerPool()


def pool() -> WorkerPool:
    """The pool of this process."""
    return _pool


def _before_fork() -> None:
    _descriptors.acquire()


def _after_fork_in_parent() -> None:
    _descriptors.release()


def _after_fork_in_child() -> None:
    global _descriptors, _pool
    forgotten, _pool = _pool, WorkerPool()
    _pool.limit = forgotten.limit
    _descriptors = threading.RLock()
    for worker in forgotten.workers:
        worker.close()  # an open pipe would keep the parent's worker from seeing that its parent ended


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)
