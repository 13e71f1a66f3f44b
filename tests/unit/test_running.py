"""Many calls, many threads, little memory, other GPUs: the whole path of a call, on a driver written in Python."""

from __future__ import annotations

import ast
import dataclasses
import gc
import resource
import struct
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import cases
import modifiers
import numpy as np
import pytest
from dlpack_producer import BOGUS_POINTER, Producer
from fake_driver import FakeDriver, FakeGpu, installed, instant_compiler
from open_files import open_files

import nvrtc_attn
from nvrtc_attn import heuristics
from nvrtc_attn.base.errors import CudaError, UnsupportedError
from nvrtc_attn.front.problem import AttentionProblem, dense_layout
from nvrtc_attn.heuristics import hopper_forward_dropout, tile_words
from nvrtc_attn.jit import compile as compiler
from nvrtc_attn.jit.cache import kernel_cache
from nvrtc_attn.jit.compile import compile_kernel
from nvrtc_attn.jit.config import ForwardConfig
from nvrtc_attn.jit.params import BackwardParams, ForwardParams
from nvrtc_attn.plans import autotune, plan
from nvrtc_attn.runtime import buffers as device_buffer
from nvrtc_attn.runtime.buffers import DeviceBuffer
from nvrtc_attn.runtime.driver import device_context
from nvrtc_attn.runtime.kernel import ParamsBuffer, launch, load_kernel

FLOAT32, BFLOAT16 = (2, 32), (4, 16)


class BusyDriver(FakeDriver):
    """A driver for a million calls: it counts launches, checks them, and every event has passed at once.

    A launch with more shared memory than its function was allowed is refused, as the real driver does.
    """

    def __init__(self, gpus: list[FakeGpu]) -> None:
        super().__init__(gpus)
        self.allocations: dict[int, int] = {}
        self.addresses = count(1 << 44, 1 << 24)
        self.events: set[int] = set()
        self.event_numbers = count(1)
        self.launched = count()
        self.allowed: dict[int, int] = {}
        self.grids: list[tuple[int, int]] = []

    def _function(self, name: str) -> Any:
        call = super()._function(name)

        def without_a_log(*arguments: Any) -> Any:
            answer = call(*arguments)
            if len(self.calls) > 1000:
                self.calls.clear()
                self.modes.clear()
            return answer

        return without_a_log

    def do_FuncSetAttribute(self, function: int, which: Any, value: int) -> None:
        self.allowed[function] = value

    def do_LaunchKernel(self, function: int, grid: int, *arguments: Any) -> None:
        smem_bytes = arguments[5]
        if smem_bytes > self.allowed[function]:
            raise AssertionError(f"{smem_bytes} bytes of shared memory, allowed are {self.allowed[function]}")
        if len(self.grids) < 1000:
            self.grids.append((grid, smem_bytes))
        next(self.launched)

    def do_MemsetD8Async(self, *arguments: int) -> None:
        return None

    def do_MemAllocAsync(self, size: int, _stream: int) -> int:
        address = next(self.addresses)
        self.allocations[address] = size
        return address

    def do_MemFree(self, address: int) -> None:
        del self.allocations[address]

    def do_EventCreate(self, _flags: int) -> int:
        number = next(self.event_numbers)
        self.events.add(number)
        return number

    def do_EventRecord(self, _event: int, _stream: int) -> None:
        return None

    def do_EventQuery(self, _event: int) -> None:
        return None

    def do_EventDestroy(self, event: int) -> None:
        self.events.remove(event)


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_kernels", {})
    monkeypatch.setattr(autotune, "_choices", {})
    monkeypatch.delenv("NVRTC_ATTN_BACKEND", raising=False)
    # Counters and caches are the process's: what another test left to compile would be counted here.
    for thread in threading.enumerate():
        if thread.name in ("nvrtc_attn prefetch", "nvrtc_attn compile"):
            thread.join(60)
    with instant_compiler(tmp_path / "kernels"):
        yield


@pytest.fixture
def fake() -> Iterator[BusyDriver]:
    with installed(BusyDriver([FakeGpu()])) as driver_in_python:
        assert isinstance(driver_in_python, BusyDriver)
        yield driver_in_python


class Tensors:
    """What the raw functions take, as a DLPack producer of another framework would hold it: each at its own address."""

    def __init__(self, seqlen: int = 64, head_dim: int = 64) -> None:
        address = count(BOGUS_POINTER, 1 << 24)
        rows = (2, seqlen, 4, head_dim)
        self.q, self.k, self.v, self.out, self.dout, self.dq, self.dk, self.dv = (
            Producer(rows, dtype=BFLOAT16, data=next(address)) for _ in range(8)
        )
        self.lse = Producer((2, 4, seqlen), dtype=FLOAT32, data=next(address))
        self.workspace = Producer((1 << 28,), dtype=(1, 8), data=next(address))

    def forward(self) -> None:
        nvrtc_attn.attention_forward(self.q, self.k, self.v, self.out, lse=self.lse, workspace=self.workspace)

    def backward(self) -> None:
        nvrtc_attn.attention_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, self.dq, self.dk, self.dv, workspace=self.workspace
        )

    def forget_requests(self) -> None:
        for producer in vars(self).values():
            producer.requests.clear()


def resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def state_of(directory: Path) -> list[tuple[str, int, int, int]]:
    """Every file of a cache with what a write, a rename or a renewed access time would change."""
    found = ((path, path.lstat()) for path in sorted([directory, *directory.rglob("*")]))
    return [(str(path), s.st_mtime_ns, s.st_atime_ns if path.is_file() else 0, s.st_ino) for path, s in found]


@pytest.mark.reliability(57)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow(sample=["1000"])
@pytest.mark.parametrize("pairs", [1_000, 5_000])
@pytest.mark.turns(3)
def test_ten_thousand_calls_leave_nothing_behind(pairs: int, fake: BusyDriver) -> None:
    """And the first 2,000 of them, which takes a second."""
    tensors = Tensors()

    def calls(number: int) -> None:
        for _ in range(number):
            tensors.forward()
            tensors.backward()
            tensors.forget_requests()

    calls(200)
    gc.collect()
    objects, memory, files = len(gc.get_objects()), resident_kib(), open_files()
    launched = next(fake.launched)
    calls(pairs)
    gc.collect()
    assert next(fake.launched) - launched >= 2 * pairs, "each call has launched"
    assert len(gc.get_objects()) <= objects + 50
    assert resident_kib() < memory + 4096, "at 10,000 calls 0.4 KB a call, less than any object that is forgotten"
    assert not open_files() - files
    assert len(fake.events) <= 1, "the owners of the last call at the most are waiting for their event"
    assert len(plan._plans) == 2
    assert tensors.q.exported <= 2


@pytest.mark.reliability(105)
def test_warm_calls_of_eight_threads_touch_neither_the_compiler_nor_the_cache(fake: BusyDriver) -> None:
    threads, rounds, shapes = 8, 500, ((64, 64), (200, 128), (1, 64))
    for seqlen, head_dim in shapes:
        Tensors(seqlen, head_dim).forward()
    directory = kernel_cache().path
    assert directory is not None
    before, compiles = state_of(directory), compiler.statistics.compiles
    assert len(before) > 1
    already = next(fake.launched)
    faults: list[BaseException] = []
    barrier = threading.Barrier(threads)

    def work(number: int) -> None:
        tensors = [Tensors(*shape) for shape in shapes]
        barrier.wait(30)
        try:
            for index in range(rounds):
                tensors[(number + index) % len(tensors)].forward()
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert faults == []
    assert next(fake.launched) - already - 1 >= threads * rounds
    assert compiler.statistics.compiles == compiles
    assert state_of(directory) == before


@pytest.mark.reliability(70)
def test_launches_with_more_and_less_shared_memory_race(fake: BusyDriver) -> None:
    """10,000 rounds of one kernel. A limit that is set at every launch is lowered between another's set and launch."""
    config = ForwardConfig(
        kernel="forward_portable", arch="sm_90", dtype="float16", head_dim=64, head_dim_v=64, block_m=128, block_n=64,
        num_warps=4,
    )  # fmt: skip
    compiled = compile_kernel(config)
    sizes = [1024 * (1 + n) for n in range(8)]
    barrier = threading.Barrier(8)
    faults: list[BaseException] = []
    interval = sys.getswitchinterval()

    def work(number: int) -> None:
        params = ParamsBuffer(bytes(ForwardParams()))
        barrier.wait(30)
        try:
            for index in range(1250):
                smem_bytes = sizes[(number + index) % 8]
                kernel = load_kernel(compiled, 0, smem_bytes=smem_bytes)
                with device_context(0):
                    launch(kernel, 1, 128, smem_bytes, params, 0)
        except BaseException as error:
            faults.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    sys.setswitchinterval(1e-5)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert faults == []
    assert next(fake.launched) == 10_000
    assert max(fake.allowed.values()) == max(sizes)
    assert len(fake.allowed) <= len(sizes), "loaded anew for a larger size only"


@pytest.mark.reliability(71)
@pytest.mark.parametrize("num_sms", [14, 132])
@pytest.mark.parametrize("seqlen", [512, 8192])
def test_persistent_grids_have_the_size_that_the_driver_tells(num_sms: int, seqlen: int) -> None:
    """A slice of a GPU has its own number of multiprocessors. No launch waits for blocks that cannot be resident."""
    with installed(BusyDriver([FakeGpu(num_sms=num_sms)])) as fake:
        assert isinstance(fake, BusyDriver)
        tensors = Tensors(seqlen)
        tensors.forward()
        (forward,) = plan._plans.values()
        (step,) = forward._steps
        assert step.kernel.name == "forward_hopper"
        # 64 rows where every tile has a multiprocessor of its own.
        tiles = 2 * 4 * seqlen // (64 if 2 * 4 * seqlen // 64 <= num_sms else 128)
        assert fake.grids == [(min(step.grid, tiles), step.smem_bytes)]
        # Two blocks of a multiprocessor's 228 KB at the most.
        assert step.grid <= num_sms * (228 * 1024 // (step.smem_bytes + 1024))
        if seqlen == 8192:
            assert step.grid % num_sms == 0
        fake.grids.clear()
        tensors.backward()
        assert all(grid > 0 for grid, _ in fake.grids)


@pytest.mark.reliability(72)
def test_out_of_memory_names_the_bytes_and_the_next_smaller_call_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that we allocate ourselves: results and workspace of calls on JAX arrays."""
    with installed(BusyDriver([FakeGpu()])) as fake:
        assert isinstance(fake, BusyDriver)
        small = DeviceBuffer((1000, 100), "float32", 0)
        fake.failures["cuMemAllocAsync"] = [2]
        with pytest.raises(
            CudaError, match=r"^400000000 bytes on cuda:0: .*OUT_OF_MEMORY.*free device memory"
        ) as error:
            DeviceBuffer((1000, 100_000), "float32", 0)
        assert (error.value.code, error.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
        assert fake.stack == [], "the context of the thread is what it was"
        assert DeviceBuffer((1000, 10), "float32", 0).ptr not in (0, small.ptr)
        Tensors().forward()
        fake.failures["cuMemAllocAsync"] = [1]
        with pytest.raises(CudaError) as error:
            DeviceBuffer((5,), "float32", 0)
        assert "bytes on" not in str(error.value), "another error is about something else"
        del small
        gc.collect()
        device_buffer.reclaim(0)
        assert fake.allocations == {}, "what failed has left nothing to free"


BIAS_SHAPES = ((2, 4, 200, 200), (1, 4, 200, 200), (2, 1, 200, 200), (1, 1, 1, 200), (2, 4, 200, 1), (1, 4, 1, 1))


@pytest.mark.reliability(22)
@pytest.mark.parametrize("backend", ["portable", "hopper", "legacy"])
@pytest.mark.parametrize("head_dim", [64, 192])
def test_a_gradient_of_a_bias_that_is_asked_for_is_written_by_a_kernel(
    backend: str, head_dim: int, fake: BusyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every form a bias can have some kernel of the plan gets its gradient's address and stores to it."""
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
    half = (2, 16)
    for shape in BIAS_SHAPES:
        for dtype, dropout_p, deterministic in ((half, 0.0, False), (FLOAT32, 0.1, False), (half, 0.1, True)):
            plan._plans.clear()
            plan._kernels.clear()
            tensors = Tensors(200, head_dim)
            for name, producer in vars(tensors).items():
                if name not in ("lse", "workspace"):
                    producer.dtype = half
            bias, dbias = (Producer(shape, dtype=dtype, data=BOGUS_POINTER + n * (1 << 30)) for n in (1, 2))
            nvrtc_attn.attention_backward(
                tensors.dout, tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse, tensors.dq, tensors.dk,
                tensors.dv, bias=bias, dbias=dbias, workspace=tensors.workspace, dropout_p=dropout_p, rng=(1, 2),
                deterministic=deterministic,
            )  # fmt: skip
            writers = {
                config.kernel
                for config, _ in plan._kernels
                if getattr(config, "dbias", "none") != "none" or "dbias" in config.kernel
            }
            what = (shape, dtype, dropout_p, deterministic)
            assert writers, what
            assert writers != {"dbias_reduce"}, what
            (made,) = plan._plans.values()
            offset = BackwardParams.dbias.offset
            addresses = {
                struct.unpack_from("<Q", step.spare[0].data, offset)[0]
                for step in made._steps
                if step.kernel.name in writers
            }
            assert addresses == {BOGUS_POINTER + 2 * (1 << 30)}, what


@pytest.mark.reliability(22)
def test_a_gradient_of_a_bias_that_no_kernel_has_is_refused(fake: BusyDriver) -> None:
    tensors = Tensors()
    lengths = {name: Producer((2,), dtype=(0, 32)) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    bias, dbias = (Producer((1, 4, 64, 64), dtype=BFLOAT16, data=BOGUS_POINTER + n * (1 << 30)) for n in (1, 2))
    for producer in vars(tensors).values():
        producer.shape = (1, *producer.shape[1:])
    with pytest.raises((ValueError, UnsupportedError), match="bias"):
        nvrtc_attn.attention_backward(
            tensors.dout, tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse, tensors.dq, tensors.dk,
            tensors.dv, bias=bias, dbias=dbias, **lengths, max_seqlen_q=64, max_seqlen_k=64,
        )  # fmt: skip
    assert fake.grids == []
    with pytest.raises(ValueError, match=r"^dbias: .*bias is None"):
        nvrtc_attn.attention_backward(
            tensors.dout, tensors.q, tensors.k, tensors.v, tensors.out, tensors.lse, tensors.dq, tensors.dk,
            tensors.dv, dbias=dbias, workspace=tensors.workspace,
        )  # fmt: skip
    assert fake.grids == []


CODES = {"float16": (2, 16), "bfloat16": BFLOAT16, "float32": FLOAT32, "bool": (6, 8), "int32": (0, 32)}


def launch_case(case: cases.Case) -> None:
    """Forward and backward of a case of `cases`, in its layouts, at addresses where nothing is."""
    address = count(BOGUS_POINTER, 1 << 24)

    def tensor(name: str, shape: tuple[int, ...], dtype: str) -> Producer:
        layout = "contiguous" if name in ("lse", "dlse", "mask") or case.layout == "expanded" else case.layout
        where = cases.placement(name, shape, layout)
        itemsize = CODES[dtype][1] // 8
        data = next(address) + (1 << 20) + where.offset * itemsize
        return Producer(shape, strides=where.strides, dtype=CODES[dtype], data=data)

    arrays = cases.make_arrays(case)
    same = {"q", "k", "v", "dout", *(["bias"] * (case.bias_dtype == "same")), *(["sink"] * (case.sink == "same"))}
    given = {name: tensor(name, x.shape, case.dtype if name in same else str(x.dtype)) for name, x in arrays.items()}
    made = {name: tensor(name, cases.shapes(case)[name], case.dtype) for name in ("out", "dq", "dk", "dv")}
    options: dict[str, Any] = {**cases.call_options(case), "rng": (1, 2)}
    names = ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "sink")
    options |= {name: given[name] for name in names if name in given}
    lse = tensor("lse", cases.shapes(case)["lse"], "float32")
    options["workspace"] = Producer((1 << 32,), dtype=(1, 8), data=next(address))
    q, k, v = (given[name] for name in "qkv")
    nvrtc_attn.attention_forward(q, k, v, made["out"], lse=lse, **options)
    if "bias" in given:
        options["dbias"] = tensor("dbias", arrays["bias"].shape, case.dtype if "bias" in same else "float32")
    if "sink" in given:
        options["dsink"] = tensor("dsink", arrays["sink"].shape, case.dtype if "sink" in same else "float32")
    nvrtc_attn.attention_backward(
        given["dout"], q, k, v, made["out"], lse, made["dq"], made["dk"], made["dv"], dlse=given.get("dlse"),
        deterministic=case.deterministic, **options,
    )  # fmt: skip


def kernels_of(case: modifiers.ModifierCase, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels of the deterministic backward pass of ``case`` in `tests/gpu/sanitizer.py`, in both families."""
    sizes = (2, 4, 200, 176)
    traced = nvrtc_attn.trace(*case.make(case.arrays(sizes, np.random.default_rng(0))))
    shapes = {name: (2, n, heads, 64) for name, n, heads in (("q", 200, 4), ("k", 176, 2), ("v", 176, 2))}
    asked = AttentionProblem(
        batch=2, seqlen_q=200, seqlen_k=176, num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float16",
        softmax_scale=0.125, modifier=traced.program, trained=tuple(traced.differentiable), deterministic=True,
        **{name: dense_layout(shape, "float16") for name, shape in shapes.items()},
    )  # fmt: skip
    monkeypatch.setattr(tile_words, "MIN_FLOPS", 0)
    monkeypatch.setattr(tile_words, "MIN_KEY_TILES", 0)
    specs = [
        heuristics.choose_backward(asked, arch="sm_90", num_sms=132, smem_limit=232448, backend=backend)
        for backend in ("portable", "hopper")
    ]
    return {launch.config.kernel for spec in specs for launch in spec.launches}


@pytest.mark.reliability(41)
def test_the_cases_of_the_sanitizer_launch_every_kernel(
    fake: BusyDriver, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs under compute-sanitizer misses no kernel of either family."""
    tree = ast.parse((repository / "tests/gpu/test_sanitizer.py").read_text(encoding="utf-8"))
    assigned = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Tuple)
    }
    tree = ast.parse((repository / "tests/gpu/sanitizer.py").read_text(encoding="utf-8"))
    parts = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    )
    assert set(assigned["PARTS"]) <= set(parts)
    assert all(dataclasses.replace(cases.make_case("part"), **fields) for fields in parts.values())
    monkeypatch.setattr(hopper_forward_dropout, "MIN_SCORES", dict.fromkeys(hopper_forward_dropout.MIN_SCORES, 0.0))
    names = assigned["CASES"]
    named = {case.name: case for case in cases.named_cases()}
    assert set(names) <= set(named)
    for name in names:
        for backend in ("portable", "hopper"):
            if backend == "portable" or named[name].dtype != "float32":
                monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
                launch_case(named[name])
    launched = {config.kernel for config, _ in plan._kernels}
    with_modifiers = {case.name: case for case in modifiers.named_cases()}
    for name in assigned["MODIFIERS"]:
        launched |= kernels_of(with_modifiers[name], monkeypatch)
    assert launched == {path.stem for path in (repository / "cuda_src/nvrtc_attn/kernel").glob("*.cuh")}
