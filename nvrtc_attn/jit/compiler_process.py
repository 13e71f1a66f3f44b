"""One compiler process: how it is started, asked and ended. `worker_pool` says why there are any, and has them.

A worker is a fresh interpreter (``python -I -S nvrtc_worker.py``), not a fork: it has none of the caller's descriptors,
variables or modules, runs nothing of ``__main__``, and is a session of its own, which Ctrl-C at the terminal does not
reach. It ends by itself when its parent does.

Concurrency: a worker belongs to the thread that asks it. A fork waits while descriptors of any worker come and go.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..base import env
from . import nvrtc_worker

_SELF_IDLE_SECONDS: Final = 60.0
"""When a worker gives up waiting on its own: much later than its parent ends it, so that the two do not meet."""
_START_SECONDS: Final = 60.0
_MESSAGE_BYTES: Final = 2000
# What a worker needs of the environment; nothing else may change what NVRTC does.
_VARIABLES: Final = ("LD_LIBRARY_PATH", "PATH", "TMPDIR")
descriptors: Any = threading.RLock()
"""Held while descriptors of workers come and go, and by a fork."""


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


class Worker:
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
            status, *rest = nvrtc_worker.receive(self._answers)
        except (EOFError, OSError):
            raise self._death() from None
        return _answer(int(status), *rest)

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
        with descriptors:
            for name in ("_requests", "_answers", "_errors"):
                descriptor = getattr(self, name, -1)
                if descriptor >= 0:
                    os.close(descriptor)
                setattr(self, name, -1)


def compile_here(message: list[bytes]) -> Answer:
    """What a worker does, in the calling process.

    Raises
    ------
    OSError
        NVRTC cannot be loaded.
    """
    library, arch, name, source, *options = message
    return _answer(*nvrtc_worker.compile_program(os.fsdecode(library), arch.decode(), name, source, options))


def _answer(status: int, name: bytes, log: bytes, code: bytes, archs: bytes) -> Answer:
    text = log.rstrip(b"\0 \n").decode(errors="replace")
    return Answer(status, name.decode(), text, code, tuple(map(int, archs.split())))


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


def _before_fork() -> None:
    descriptors.acquire()


def _after_fork_in_parent() -> None:
    descriptors.release()


def _after_fork_in_child() -> None:
    global descriptors
    descriptors = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork_in_parent)
