"""Faults, forks, exits and first calls, each in a process of its own. The processes run side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_environment import python_path

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[2]

# A process that no other may disturb: it compares the free memory of the GPU.
OURS_FIRST = """
    import sys
    from nvrtc_attn import attention_forward
    from nvrtc_attn.runtime import driver
    from nvrtc_attn.runtime.buffers import DeviceBuffer

    tensors = [DeviceBuffer((1, 64, 2, 64), "float16", 0) for _ in range(4)]
    with driver.device_context(0):
        for x in tensors:
            driver.call("cuMemsetD8", x.ptr, 0x3C, x.nbytes)
    attention_forward(*tensors)
    assert "torch" not in sys.modules
    with driver.device_context(0):
        driver.call("cuCtxSynchronize")
        ours, _ = driver.call("cuMemGetInfo")
    assert driver.current_context() == 0, "the thread's context is what it was"
    import torch
    assert not torch.cuda.is_initialized()
    assert float(torch.ones(8, device="cuda").sum()) == 8.0
    torch.cuda.synchronize()
    assert driver.current_context() == driver.primary_context(0), "torch runs in the context that we use"
    both = torch.cuda.mem_get_info()[0]
    print(f"torch took {(ours - both) >> 20} MiB")
    assert ours - both < 300 << 20, "a second context takes more"
    out = torch.from_dlpack(tensors[3])
    assert float((out.float() - 1.0586).abs().max()) < 1e-2
    import nvrtc_attn.torch as na
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
    assert bool(torch.isfinite(na.attention(q, q, q)).all())
    print("done")
"""

TORCH_FIRST = """
    import threading
    import torch
    x = torch.ones(8, device="cuda")
    import nvrtc_attn.torch as na
    from nvrtc_attn.runtime import driver
    seen = []

    def use():
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
        assert bool(torch.isfinite(na.attention(q, q, q)).all())
        assert float(x.sum()) == 8.0
        seen.append(driver.current_context())

    use()
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [driver.primary_context(0)] * 2
    print("done")
"""

THREAD_FIRST = """
    import threading
    import torch
    import nvrtc_attn.torch as na
    from nvrtc_attn.runtime import driver
    seen = []

    def use():
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        na.attention(q, q, q).sum().backward()
        assert bool(torch.isfinite(q.grad).all())
        seen.append(driver.current_context())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    use()
    assert seen == [driver.primary_context(0)] * 2
    assert float(torch.ones(8, device="cuda").sum()) == 8.0
    print("done")
"""

EXIT = """
    import torch, nvrtc_attn, nvrtc_attn.torch as na
    from nvrtc_attn.runtime.buffers import DeviceBuffer
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    x = q.detach()
    out = na.attention(q, q, q)  # with its graph
    side = torch.cuda.Stream()
    na.attention(x, x, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = na.attention(x, x, x)
    ours = DeviceBuffer((1, 64, 2, 64), "float16", 0)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
    held = nvrtc_attn.attention(x, x, x, stream=side)  # still waits when the interpreter goes
    shared = torch.from_dlpack(ours)
    cycle = [out, held, captured, shared, graph]
    cycle.append(cycle)
"""

FOREIGN_FAULT = """
    import os, sys, time
    import torch, nvrtc_attn.torch as na
    from cuda.bindings import driver as cuda, nvrtc
    from nvrtc_attn.base.errors import DeviceFaultError

    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
    na.attention(q, q, q)
    torch.cuda.synchronize()
    # Somebody else's kernel: it writes to the address that it is given.
    source = b'extern "C" __global__ void foreign(int* p) { *p = 1; }'
    major, minor = torch.cuda.get_device_capability()
    program = nvrtc.nvrtcCreateProgram(source, b"foreign.cu", 0, None, None)[1]
    (result,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
    assert int(result) == 0
    code = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, code)
    library = cuda.cuModuleLoadData(code)[1]
    function = cuda.cuModuleGetFunction(library, b"foreign")[1]
    import ctypes
    address = ctypes.c_uint64(0x10)
    slot = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    (result,) = cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ctypes.addressof(slot), 0)
    assert int(result) == 0
    time.sleep(1)
    messages = []
    for _ in range(3):
        try:
            na.attention(q, q, q)
        except DeviceFaultError as error:
            assert error.code == 700, error.code
            messages.append(str(error))
    assert len(messages) == 3, messages
    assert "Raised by work that ran earlier on this device" in messages[0]
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in text and "estart the process" in text for text in messages), messages
    assert all("unusable since an earlier fault" in text for text in messages[1:])
    print("done", flush=True)
    os._exit(0)  # torch cannot end its work in this context either
"""

OUR_FAULT = """
    import os, time
    os.environ["NVRTC_ATTN_BACKEND"] = "portable"
    import torch, nvrtc_attn.torch as na
    from nvrtc_attn.runtime import driver
    from nvrtc_attn.plans import plan
    from nvrtc_attn.base.errors import DeviceFaultError

    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
    na.attention(q, q, q)
    torch.cuda.synchronize()
    (made,) = plan._plans.values()
    addresses = (0x10,) * 4 + (0,) * (len(made.OPERANDS) - 4)
    made.run(torch.cuda.current_stream().cuda_stream, addresses)  # our kernel, at nobody's addresses
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        pass
    else:
        raise SystemExit("the kernel did not fault")
    found = []
    for _ in range(3):
        try:
            na.attention(q, q, q)
        except DeviceFaultError as error:
            found.append(error)
    assert [error.code for error in found] == [700] * 3, found
    assert driver._faults[0].code == 700
    first = str(driver._faults[0])
    assert all(first in str(error) for error in found[1:]), "the first error is kept"
    calls = []
    start = time.perf_counter()
    for _ in range(100):
        try:
            made.run(0, addresses)
        except DeviceFaultError:
            calls.append(1)
    assert len(calls) == 100
    assert time.perf_counter() - start < 0.1, "later calls fail before the driver is asked"
    print("done", flush=True)
    os._exit(0)
"""

FORK = """
    import multiprocessing, os

    def use(seed):
        import torch, nvrtc_attn.torch as na
        torch.manual_seed(seed)
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16, requires_grad=True)
        out = na.attention(q, q, q, causal=True)
        out.sum().backward()
        return float(out.float().sum()), float(q.grad.float().sum())

    def refused(calls):
        texts = []
        for call in calls:
            try:
                call()
            except RuntimeError as error:
                texts.append(f"{type(error).__name__}: {error}")
            else:
                texts.append("no error")
        return texts

    if __name__ == "__main__":
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of processes with threads
        expected = use(3)
        pools = [multiprocessing.get_context(name).Pool(1) for name in ("spawn", "forkserver")]
        pending = [pool.apply_async(use, (3,)) for pool in pools]

        import torch, nvrtc_attn, nvrtc_attn.torch as na
        from nvrtc_attn.runtime import driver
        from nvrtc_attn.plans import plan
        q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
        out = torch.empty_like(q)
        nvrtc_attn.attention_forward(q, q, q, out)
        torch.cuda.synchronize()
        made = next(iter(plan._plans.values()))
        calls = (
            lambda: made.run(0, (*[q.data_ptr()] * 3, out.data_ptr(), *[0] * (len(made.OPERANDS) - 4))),
            lambda: driver.primary_context(0),
            lambda: nvrtc_attn.attention_forward(q, q, q, out),
            lambda: na.attention(q, q, q, softcap=3.0),  # cold: torch allocates before a warm one
        )
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            sender.send(refused(calls))
            os._exit(0)
        assert receiver.poll(60), "the child hangs"
        texts = receiver.recv()
        os.waitpid(child, 0)
        assert all(text.startswith("CudaError: this process was forked after") for text in texts[:2]), texts
        assert all("spawn" in text for text in texts), texts  # torch may refuse before we do
        for name, result in zip(("spawn", "forkserver"), pending):
            assert result.get(120) == expected, name
        for pool in pools:
            pool.close()
            pool.join()
        nvrtc_attn.attention_forward(q, q, q, out)  # the parent goes on
        assert bool(torch.isfinite(out).all())
        print("done")
"""

SCRIPTS = {
    "torch first": TORCH_FIRST, "a thread first": THREAD_FIRST, "exit": EXIT, "a foreign fault": FOREIGN_FAULT,
    "our fault": OUR_FAULT, "fork": FORK,
}  # fmt: skip


def start(script: str, path: Path, *options: str) -> subprocess.Popen[str]:
    path.write_text(textwrap.dedent(script))  # spawned processes import it
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    return subprocess.Popen(
        [sys.executable, *options, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, stdout, stderr


@pytest.mark.reliability(59)
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers change the free memory of the GPU")
def test_a_call_before_torch_has_a_context_shares_its_own(tmp_path: Path) -> None:
    """No second context: torch finds ours, and needs no memory for another."""
    code, stdout, stderr = end(start(OURS_FIRST, tmp_path / "script.py"))
    assert code == 0, stderr
    assert stdout.splitlines()[-1] == "done"


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All scripts, started at once: each spends most of its time importing torch."""
    directory = tmp_path_factory.mktemp("scripts")
    running = {
        name: start(script, directory / f"{name.replace(' ', '_')}.py", *(("-W", "error") if name == "exit" else ()))
        for name, script in SCRIPTS.items()
    }
    yield running
    for process in running.values():
        with process:  # closes its pipes; xdist may have given its test to another worker
            process.kill()


def succeeded(process: subprocess.Popen[str]) -> None:
    code, stdout, stderr = end(process)
    assert code == 0, stderr
    assert stdout.splitlines()[-1:] == ["done"], stderr


@pytest.mark.reliability(59)
@pytest.mark.parametrize("order", ["torch first", "a thread first"])
def test_contexts_are_shared_with_torch(order: str, processes: dict[str, subprocess.Popen[str]]) -> None:
    succeeded(processes[order])


@pytest.mark.reliability(58)
def test_exit_with_live_outputs_is_silent(processes: dict[str, subprocess.Popen[str]]) -> None:
    """Outputs, a graph of autograd, a CUDA graph, memory of our own, and work that is still held."""
    assert end(processes["exit"]) == (0, "", "")


@pytest.mark.reliability(64)
def test_a_fault_of_foreign_code_is_named(processes: dict[str, subprocess.Popen[str]]) -> None:
    succeeded(processes["a foreign fault"])


@pytest.mark.reliability(65)
def test_a_fault_of_our_kernel_is_kept_and_later_calls_fail_with_it(
    processes: dict[str, subprocess.Popen[str]],
) -> None:
    succeeded(processes["our fault"])


@pytest.mark.reliability(74)
def test_a_fork_is_refused_and_spawned_processes_compute(processes: dict[str, subprocess.Popen[str]]) -> None:
    succeeded(processes["fork"])
