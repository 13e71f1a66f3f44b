"""A compile and the process that asks for it: signals, forks, ends, and every kind of main program.

Each program runs in a process of its own, on the real NVRTC, with a kernel that takes half a second of processor time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipapp
from pathlib import Path

import pytest

from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import worker_pool

pytest.importorskip("cuda.bindings.nvrtc")
ROOT = Path(__file__).resolve().parents[2]
PRELUDE = f"""
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
sys.path[:0] = [{str(ROOT)!r}]
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit import worker_pool
from nvrtc_attn.base.errors import CompileError
def compile_one(number=0):
    source = f"// {{os.getpid()}} {{number}}\\n#include <cute/layout.hpp>\\n"
    source += 'extern "C" __global__ void attention_entry(int* x) {{ x[0] = 1; }}'
    return compiler.compile_source(source, "sm_80")
def in_thread(call, *arguments):
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread
def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
"""


def run_program(
    program: str, directory: Path, *options: str, given: str = "", timeout: float = 300
) -> tuple[str, str, int]:
    """(stdout, stderr, exit code) of ``program`` behind `PRELUDE`, with a cache in ``directory``."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVRTC_ATTN_")}
    environment["NVRTC_ATTN_CACHE_DIR"] = str(directory / "kernels")
    done = subprocess.run(
        [sys.executable, *options, "-c", PRELUDE + textwrap.dedent(program)],
        input=given, capture_output=True, text=True, timeout=timeout, env=environment, check=False,
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


@pytest.mark.reliability(75)
def test_ctrl_c_at_ten_moments_of_a_compile(tmp_path: Path) -> None:
    program = """
        start = time.perf_counter()
        compile_one(-1)
        whole = time.perf_counter() - start
        handler = signal.getsignal(signal.SIGINT)
        inside = 0
        for moment in range(10):
            timer = threading.Timer(whole * moment / 10, os.kill, (os.getpid(), signal.SIGINT))
            compiled = None
            try:
                timer.start()
                compiled = compile_one(moment)
                timer.join()
                time.sleep(5)
            except KeyboardInterrupt:
                inside += compiled is None
            else:
                sys.exit("no KeyboardInterrupt")
            assert compile_one(moment).code[:4] == b"\\x7fELF"
        assert signal.getsignal(signal.SIGINT) is handler
        assert not compiler._flights
        print(inside, [name for name in os.listdir(os.environ["NVRTC_ATTN_CACHE_DIR"]) if name.endswith(".tmp")])
    """
    out, err, code = run_program(program, tmp_path)
    assert (err, code) == ("", 0)
    inside, temporaries = out.split(maxsplit=1)
    assert int(inside) >= 5, "most of them in a compile"
    assert temporaries.strip() == "[]"


def test_handlers_of_the_user_run_while_a_kernel_compiles(tmp_path: Path) -> None:
    program = """
        seen = []
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append((number, bool(compiler._flights))))
        def send():
            wait_until(lambda: worker_pool.pool()._running)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
        sender = in_thread(send)
        compile_one()
        sender.join()
        print(seen == [(signal.SIGTERM, True)], "nvrtc" in open("/proc/self/maps").read())
    """
    assert run_program(program, tmp_path) == ("True False\n", "", 0)


def test_a_fork_during_a_compile_leaves_a_child_that_compiles(tmp_path: Path) -> None:
    program = """
        import faulthandler
        thread = in_thread(compile_one)
        wait_until(lambda: worker_pool.pool()._running)
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(100, exit=True)
            same, other = compile_one(), compile_one(1)
            os._exit(0 if same.code[:4] == other.code[:4] == b"\\x7fELF" else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        thread.join()
        print(code, compile_one().code[:4], compile_one(2).code[:4])
    """
    out, err, code = run_program(program, tmp_path)
    assert (out, code) == ("0 b'\\x7fELF' b'\\x7fELF'\n", 0), err


def test_a_killed_compiler_is_a_compile_error_and_the_next_call_works(tmp_path: Path) -> None:
    program = """
        def kill():
            wait_until(lambda: worker_pool.pool()._running and worker_pool.pool().workers)
            time.sleep(0.1)
            os.kill(worker_pool.pool().workers[0].pid, signal.SIGKILL)
        killer = in_thread(kill)
        try:
            compile_one()
        except CompileError as error:
            print("SIGKILL" in str(error), "memory" in str(error), bool(error.source), bool(error.options))
        killer.join()
        print(compile_one().code[:4])
    """
    assert run_program(program, tmp_path) == ("True True True True\nb'\\x7fELF'\n", "", 0)


@pytest.mark.reliability(100)
def test_compiles_leave_the_process_as_it_was(tmp_path: Path) -> None:
    program = """
        import ctypes, resource
        def state():
            handlers = []
            for number in range(1, 32):
                action = ctypes.create_string_buffer(152)
                ctypes.CDLL(None).sigaction(number, None, action)
                handlers.append(action.raw[:8])
            return (handlers, resource.getrlimit(resource.RLIMIT_STACK), dict(os.environ), os.getcwd(), os.umask(0o022),
                    len([line for line in open("/proc/self/maps") if "nvrtc" in line]))
        os.umask(0o022)
        before, seen, most = state(), [], [0]
        threads = [in_thread(compile_one, number) for number in range(4)]
        while any(thread.is_alive() for thread in threads):
            seen.append(state() == before)
            most[0] = max(most[0], len(worker_pool.pool().workers))
            time.sleep(0.01)
        print(all(seen) and len(seen) > 3, most[0] <= worker_pool.usable_cores(), compiler.statistics.compiles)
        print(sys.stdin.read())
    """
    assert run_program(program, tmp_path, given="untouched") == ("True True 4\nuntouched\n", "", 0)


MAIN = """
import os, sys
sys.path[:0] = [{root!r}]
_ = open({count!r}, "a").write("x")
os.environ["NVRTC_ATTN_CACHE_DIR"] = {cache!r}
from nvrtc_attn.jit.compile import compile_source
print(compile_source('extern "C" __global__ void attention_entry(int* x) {{ x[0] = 1; }}', "sm_80").cached)
"""


@pytest.mark.parametrize("kind", ["script", "-I", "-I -S", "-c", "stdin", "interactive", "zip", "module"])
def test_every_kind_of_main_program_runs_once(kind: str, tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = MAIN.format(root=str(ROOT), count=str(count), cache=str(tmp_path / "kernels"))
    if "-S" in kind:  # without the site's directories NVRTC is found nowhere else
        import site

        text = f"import site; site.main()  # {site.getsitepackages()}\n" + text
    (tmp_path / "app").mkdir()
    script = tmp_path / "app" / "__main__.py"
    script.write_text(text)
    arguments = {
        "script": [str(script)], "-I": ["-I", str(script)], "-I -S": ["-I", "-S", str(script)], "-c": ["-c", text],
        "stdin": ["-"], "interactive": ["-i", "-q"], "zip": [str(tmp_path / "app.pyz")], "module": ["-m", "app"],
    }[kind]  # fmt: skip
    zipapp.create_archive(tmp_path / "app", tmp_path / "app.pyz")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NVRTC_ATTN_")}
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False,
    )  # fmt: skip
    if kind == "interactive":
        assert "False\n" in done.stdout, done.stderr
    else:
        assert (done.stdout, done.stderr, done.returncode) == ("False\n", "", 0)
    assert count.read_text() == "x", "a worker runs nothing of the main program"


def test_precompiled_headers_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third compile of a kind reads them: its machine code and its log are those of a compile without them."""
    # 1 s of processor time: what takes less than 0.3 is not worth a file.
    source = '#include <cute/layout.hpp>\nextern "C" __global__ void attention_entry(int* x) {{ x[0] = {number}; }}'
    options = ("--gpu-architecture=sm_80", *compiler.COMMON_OPTIONS)

    def compile_three() -> list[tuple[bytes, str]]:
        pool = worker_pool.WorkerPool()
        monkeypatch.setattr(worker_pool, "_pool", pool)
        try:
            texts = [source.format(number=number) for number in range(3)]
            answers = [compiler.run_nvrtc(text, "sm_80", options, worker_pool.Ticket()) for text in texts]
            return [(code, re.sub(r"[\d.]+ ms", "", log)) for code, log in answers]
        finally:
            seen.append(sorted(path.suffix for path in tmp_path.rglob("*") if path.is_file()))
            for worker in list(pool.workers):
                pool._forget(worker)

    seen: list[list[str]] = []
    monkeypatch.delenv("NVRTC_ATTN_PCH_DIR", raising=False)
    expected = compile_three()
    monkeypatch.setenv("NVRTC_ATTN_PCH_DIR", str(tmp_path))
    assert compile_three() == expected
    assert seen == [[], [".pch"]]
    assert list(tmp_path.iterdir()) == []
