"""Compiler processes, with a compiler that runs its source as Python: turns, ends, crashes, forks, interpreters."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrtc_attn.base import log
from nvrtc_attn.base.errors import CompileError
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import compiler_process, nvrtc_worker, worker_pool
from nvrtc_attn.jit.compile import compile_source
from nvrtc_attn.jit.compiler_process import Answer, WorkerDiedError, WorkerUnavailableError
from nvrtc_attn.jit.worker_pool import Ticket, WorkerPool

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
FAKE = f"""
import os, sys, time
sys.path.insert(0, {str(Path(nvrtc_worker.__file__).parent)!r})
import nvrtc_worker
def run(library, arch, name, source, options):
    found = {{"code": b"code"}}
    found["options"] = options
    exec(source.decode(), found)
    return 0, b"", b"the log", found["code"], b"80 90"
nvrtc_worker.compile_program = run
nvrtc_worker.main(float(sys.argv[1]), *sys.argv[2:])
"""


@pytest.fixture
def fake_script(tmp_path: Path) -> Path:
    path = tmp_path / "fake_worker.py"
    path.write_text(FAKE)
    return path


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, fake_script: Path) -> Iterator[WorkerPool]:
    """A pool of its own whose workers execute their source."""
    monkeypatch.setattr(compiler_process, "_script", lambda: str(fake_script))
    made = WorkerPool()
    monkeypatch.setattr(worker_pool, "_pool", made)
    yield made
    for worker in list(made.workers):
        made._forget(worker)


def run(pool: WorkerPool, source: str, *, urgent: bool = True) -> Answer:
    return pool.compile([b"library", b"sm_80", b"name", textwrap.dedent(source).encode()], Ticket(urgent=urgent))


def pid_of(answer: Answer) -> int:
    return int(answer.code)


REPORT_PID = "import os; code = b'%d' % os.getpid()"


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_an_answer_comes_whole_and_a_worker_is_used_again(pool: WorkerPool) -> None:
    answer = run(pool, "code = bytes(3 << 20) + b'end'")
    assert answer == Answer(0, "", "the log", bytes(3 << 20) + b"end", (80, 90))
    assert pid_of(run(pool, REPORT_PID)) == pid_of(run(pool, REPORT_PID)) == pool.workers[0].pid
    assert len(pool.workers) == 1


def test_another_library_is_another_process(pool: WorkerPool) -> None:
    pids = {pid_of(pool.compile([name, b"", b"", REPORT_PID.encode()], Ticket())) for name in (b"one", b"two")}
    assert len(pids) == 2


def test_an_idle_worker_is_ended_and_leaves_no_zombie(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "IDLE_SECONDS", 0.2)
    pid = pid_of(run(pool, REPORT_PID))
    assert is_alive(pid)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    wait_until(lambda: pool.workers == [] and pool._keeper is None)
    assert run(pool, REPORT_PID).code != b"%d" % pid


def test_a_worker_that_gave_up_waiting_is_replaced(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_process, "_SELF_IDLE_SECONDS", 0.1)
    pid = pid_of(run(pool, REPORT_PID))
    wait_until(lambda: not is_alive(pid))  # while this process was stopped, say
    monkeypatch.setattr(compiler_process, "_SELF_IDLE_SECONDS", 60.0)
    assert run(pool, "code = b'again'").code == b"again"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT"])
def test_a_crash_is_named_and_the_next_compile_works(pool: WorkerPool, name: str) -> None:
    number = getattr(signal, name)
    with pytest.raises(WorkerDiedError, match=name) as caught:
        run(pool, f"import os; os.write(2, b'ran out of luck'); os.kill(os.getpid(), {int(number)})")
    assert (caught.value.signal, caught.value.last_words) == (number, "ran out of luck")
    assert ("memory" in str(caught.value)) == (name == "SIGKILL")
    assert run(pool, "").code == b"code"
    assert len(pool.workers) == 1


def test_an_exit_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerDiedError, match="exit code 4"):
        run(pool, "import os; os._exit(4)")


def test_a_crash_is_a_compile_error(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.delenv("NVRTC_ATTN_ASSERT_CACHED", raising=False)
    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(compiler, "_memory", type(compiler._memory)())
    source = "import os; os.kill(os.getpid(), 11)"
    with pytest.raises(CompileError, match="SIGSEGV") as caught:
        compile_source(source, "sm_80")
    assert caught.value.source == source
    assert "sm_80" in str(caught.value)
    assert "doctor" in str(caught.value)
    assert compile_source("code = b'works'", "sm_80").code == b"works"
    assert capfd.readouterr() == ("", "")


def test_signals_that_a_scheduler_sends_to_all_processes_do_not_end_a_compile(pool: WorkerPool) -> None:
    sent = [int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT")]
    assert run(pool, f"import os; [os.kill(os.getpid(), s) for s in {sent}]").code == b"code"


def test_a_worker_has_its_own_session_no_descriptor_and_a_small_environment(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    try:
        facts = run(
            pool,
            """
            import os, sys
            paths = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if int(n) > 2]
            links = [os.readlink(path) for path in paths if os.path.lexists(path)]
            code = repr((os.getsid(0) == os.getpid(), os.getcwd(), sorted(os.environ), sys.flags.isolated, len(links),
                         links[1:])).encode()
            """,
        ).code.decode()
        own_session, directory, environment, isolated, count, _ = eval(facts)
        pipe = os.readlink(f"/proc/self/fd/{reader}")
    finally:
        os.close(reader)
        os.close(writer)
    assert (own_session, directory, isolated) == (True, "/", 1)
    assert set(environment) <= {"LC_ALL", "LC_CTYPE", *compiler_process._VARIABLES}
    assert pipe not in facts
    assert count == 1, "the pipe of its answers"


def test_what_a_library_prints_is_no_answer(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(pool, "import os; os.write(1, b'hello'); print('hello', flush=True)").code == b"code"
    assert capfd.readouterr() == ("", "")


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.reliability(100)
def test_no_more_compile_at_once_than_there_are_cores(pool: WorkerPool) -> None:
    pool.limit = 2
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(len(pool.workers))
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    threads = [threading.Thread(target=run, args=(pool, "import time; time.sleep(0.05)")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    done.set()
    watcher.join()
    assert max(seen) == 2


@pytest.mark.reliability(100)
def test_no_more_compile_at_once_than_memory_allows(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 16)
    monkeypatch.setattr(worker_pool, "available_memory_bytes", lambda: 3 * worker_pool.COMPILE_MEMORY_BYTES + 1)
    gate = threading.Barrier(4)
    most = [0]

    class Slow(WorkerPool):
        def _ask(self, message: list[bytes]) -> Any:
            most[0] = max(most[0], len(self._running))
            time.sleep(0.05)

    slow = Slow()

    def work() -> None:
        gate.wait(30)
        for _ in range(4):
            slow.compile([b""], Ticket())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most[0] == 3


@pytest.mark.parametrize(
    ("cores", "running", "urgent", "expected"),
    [
        (2, [], False, True),
        (2, [True], False, False),  # a core is left to what somebody waits for
        (2, [False], False, True),
        (2, [False, False], False, False),
        (2, [False, False], True, True),  # nobody waits for the background
        (2, [True, True], True, False),
        (4, [True], False, True),
        (4, [True, False], False, True),
        (4, [True, False, False], False, False),
        (1, [False], True, True),
    ],
)
def test_the_background_leaves_room(
    cores: int, running: list[bool], urgent: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: cores)
    pool = WorkerPool()
    pool._capacity = 100
    pool._running = [Ticket(urgent=u) for u in running]
    ticket = Ticket(urgent=urgent)
    pool._waiting = [ticket]
    assert pool._may_start(ticket) is expected


def test_limits_of_two_callers_end_with_them_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to come may be the first to go: what holds is the largest limit of those who are there."""
    monkeypatch.setattr(worker_pool, "usable_cores", lambda: 9)
    monkeypatch.setattr(worker_pool, "available_memory_bytes", lambda: 9 * worker_pool.COMPILE_MEMORY_BYTES)
    pool = WorkerPool()

    def most() -> int:
        """So many compile at once."""
        pool._running, ticket = [], Ticket()
        pool._waiting = [ticket]
        while pool._may_start(ticket):
            pool._running.append(Ticket())
        return len(pool._running)

    first, second = pool.limited(2), pool.limited(3)
    assert most() == 9
    with first:
        assert most() == 2
        second.__enter__()
        assert most() == 3
    assert most() == 3
    second.__exit__(None, None, None)
    assert most() == 9


def test_what_somebody_waits_for_comes_first(pool: WorkerPool) -> None:
    pool.limit = 1
    order: list[str] = []
    tickets = {name: Ticket(urgent=name.startswith("urgent")) for name in ("first", "later", "hurried", "urgent")}

    def compile_one(name: str) -> None:
        pool.compile([b"", b"", b"", b"import time; time.sleep(0.1)"], tickets[name])
        order.append(name)

    threads = []
    for number, name in enumerate(tickets):
        threads.append(threading.Thread(target=compile_one, args=(name,)))
        threads[-1].start()
        wait_until(lambda number=number: len(pool._waiting) + len(pool._running) + len(order) == number + 1)
    pool.hurry(tickets["hurried"])
    for thread in threads:
        thread.join(60)
    assert set(order[1:3]) == {"hurried", "urgent"} or order[:2] == ["urgent", "first"], order
    assert order[-1] == "later"


# -- forks and ends of the parent --------------------------------------------------------------------------------------


def test_a_child_of_a_fork_starts_its_own_workers(pool: WorkerPool) -> None:
    pid = pid_of(run(pool, REPORT_PID))
    busy = threading.Thread(target=run, args=(pool, "import time; time.sleep(1)"))
    busy.start()
    wait_until(lambda: pool._running)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        sender.send((run(worker_pool.pool(), REPORT_PID).code, [w._requests for w in pool.workers]))

    process = context.Process(target=child)
    process.start()
    assert receiver.poll(30), "the child hangs"
    code, descriptors = receiver.recv()
    process.join(30)
    assert process.exitcode == 0
    assert int(code) != pid
    assert set(descriptors) == {-1}, "the pipes of the parent's workers are closed"
    busy.join()
    assert pid_of(run(pool, REPORT_PID)) == pid, "the parent's worker goes on"


PARENT = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
from nvrtc_attn.jit import compiler_process, worker_pool
compiler_process._script = lambda: {script!r}
def run(source):
    return worker_pool.pool().compile([b"", b"", b"", source], worker_pool.Ticket())
print(int(run(b"import os; code = b'%d' % os.getpid()").code), flush=True)
threading.Thread(target=run, args=(b"import time; time.sleep(600)",), daemon=True).start()
time.sleep(0.2)
{then}
"""


def start_parent(fake_script: Path, then: str, *options: str) -> tuple[subprocess.Popen[str], int]:
    program = PARENT.format(root=str(ROOT), script=str(fake_script), then=then)
    parent = subprocess.Popen(
        [sys.executable, *options, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_a_killed_parent_leaves_no_worker(fake_script: Path) -> None:
    parent, worker = start_parent(fake_script, "time.sleep(600)")
    assert is_alive(worker)
    time.sleep(0.5)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_alive(worker), 10)


def test_a_killed_parent_leaves_no_worker_where_a_fork_holds_the_pipe(fake_script: Path) -> None:
    # Behind Python's back, so that no hook closes anything.
    then = "import ctypes; ctypes.CDLL(None).fork() or time.sleep(15); time.sleep(600)"
    parent, worker = start_parent(fake_script, then)
    time.sleep(0.5)
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(worker), 10)
    parent.wait(30)
    parent.stdout.close()
    parent.stderr.close()


@pytest.mark.parametrize("options", [(), ("-X", "dev", "-W", "error")])
def test_the_interpreter_ends_in_a_compile_without_a_word_and_without_waiting(
    fake_script: Path, options: tuple[str, ...]
) -> None:
    parent, worker = start_parent(fake_script, "", *options)
    out, err = parent.communicate(timeout=30)
    assert (parent.returncode, out, err) == (0, "", "")
    wait_until(lambda: not is_alive(worker), 10)


# -- where no worker can be started --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no interpreter", "no exec", "no worker"])
def test_without_a_worker_the_process_compiles_after_one_warning(
    how: str, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(nvrtc_worker, "compile_program", lambda *_: (0, b"", b"", b"here", b"80"))
    if how == "no interpreter":
        monkeypatch.setattr(sys, "executable", "/usr/sbin/uwsgi")
        monkeypatch.setattr(sys, "_base_executable", "", raising=False)
        monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
        monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)  # another test may have imported it
    elif how == "no exec":
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(PermissionError(1, "denied")))
    else:
        script = tmp_path / "other.py"
        script.write_text("print('welcome to another program')")
        monkeypatch.setattr(compiler_process, "_script", lambda: str(script))
    assert run(pool, "").code == b"here"
    assert run(pool, "").code == b"here"
    assert len(caplog.records) == 1
    assert "no compiler process can be started" in caplog.text
    assert pool.workers == []


@pytest.mark.parametrize(
    ("executable", "frozen", "works"),
    [
        (sys.executable, False, True),
        ("/opt/app/my_program", True, False),
        ("/opt/python3", True, False),
        ("", False, False),
        (None, False, False),
        ("/usr/lib/cgi-bin/app", False, False),
    ],
)
def test_only_a_python_interpreter_is_started(
    executable: str | None, frozen: bool, works: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "_base_executable", executable, raising=False)
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "frozen", frozen, raising=False)
    monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)  # a runner may have set its interpreter
    if works:
        assert compiler_process._interpreter() == executable
    else:
        with pytest.raises(WorkerUnavailableError, match=re.escape(repr(executable))):
            compiler_process._interpreter()
        beside = tmp_path / "bin" / "python{}.{}".format(*sys.version_info)
        beside.parent.mkdir()
        beside.symlink_to(PYTHON)
        assert compiler_process._interpreter() == str(beside)


def test_cores_and_memory_are_counted() -> None:
    assert 1 <= worker_pool.usable_cores() <= (os.cpu_count() or 1)
    assert worker_pool.available_memory_bytes() > 0


def test_precompiled_headers_serve_the_later_compiles_of_a_kind(tmp_path: Path) -> None:
    """Same first lines and same options; of the kinds before the last three nothing stays on disk."""
    precompiled = nvrtc_worker.PrecompiledHeaders(str(tmp_path))

    def options(kernel: str, *given: bytes, traits: str = "", seconds: float = 1.0) -> list[bytes]:
        source = f"#if 1\n#endif\n#include <{kernel}.cuh>\n{traits}".encode()
        further = precompiled.options(source, list(given))
        precompiled.compiled(source, list(given), seconds)
        return further

    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    assert options("forward", b"-a") == []
    pch, directory = options("forward", b"-a", traits="struct Traits;")
    assert (pch, directory[:10]) == (b"--pch", b"--pch-dir=")
    place = Path(os.fsdecode(directory[10:]))
    assert place.parent == tmp_path / str(os.getpid())
    (place / "file.pch").write_bytes(b"headers")
    assert options("forward", b"-b") == []
    assert options("backward", b"-a") == []
    for _ in range(2):
        for small in ("delta", "convert", "sum"):  # they would take the places of those that take long
            assert options(small, b"-a", seconds=0.1) == []
    assert options("forward", b"-a", seconds=0.1) == [pch, directory]  # it took long without the file
    assert files() == [place / "file.pch"]
    for kernel in ("one", "two", "three"):
        assert options(kernel) == []
    assert files() == []
    assert options("forward", b"-a") == []
    _, directory = options("three")
    Path(os.fsdecode(directory[10:]), "file.pch").write_bytes(b"headers")
    precompiled.close()
    assert list(tmp_path.iterdir()) == []
    without = nvrtc_worker.PrecompiledHeaders("")
    without.compiled(b"#include <a>", [], 1.0)
    assert without.options(b"#include <a>", []) == []


def test_a_worker_that_ends_leaves_no_precompiled_headers(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that dies in the middle of a compile."""
    monkeypatch.setenv("NVRTC_ATTN_PCH_DIR", str(tmp_path / "headers"))
    write = """
        import os, nvrtc_worker
        nvrtc_worker.PrecompiledHeaders.MIN_SECONDS = 0.0
        place = [x for x in options if x.startswith(b"--pch-dir=")]
        if place:
            with open(os.path.join(place[0][10:], b"file.pch"), "wb") as file:
                file.write(b"headers")
        code = b"%d" % len(place)
    """
    assert [run(pool, write).code for _ in range(2)] == [b"0", b"1"]
    assert [path.name for path in (tmp_path / "headers").rglob("*.pch")] == ["file.pch"]
    with pytest.raises(WorkerDiedError):
        run(pool, write + "    os.kill(os.getpid(), 11)\n")
    assert list((tmp_path / "headers").iterdir()) == []


def test_remarks_on_precompiled_headers_are_not_in_the_log() -> None:
    log = b'"x.pch": creating precompiled header file\nptxas info : Used 168 registers\n\0'
    assert nvrtc_worker.PrecompiledHeaders.without_remarks(log) == b"ptxas info : Used 168 registers\n\0"
