"""Attention over a sequence on all GPUs of a launch: ContextParallel beside one GPU, and what others do.

    torchrun --nproc-per-node 2 benchmarks/parallel.py                   # 16k to 128k tokens, at most 5 minutes
    torchrun --nproc-per-node 8 benchmarks/parallel.py --seqlens 131072  # any number of GPUs and lengths
    torchrun --nproc-per-node 2 benchmarks/parallel.py --strategies all_gather:1 all_gather:4 --ctas 16
    torchrun --nproc-per-node 2 benchmarks/parallel.py --strategies all_gather all_gather:lanes=2 all_gather:keep=False
    torchrun --nproc-per-node 4 benchmarks/parallel.py --strategies all_gather ulysses ulysses+all_gather:inside=2
    torchrun --nproc-per-node 4 benchmarks/parallel.py --masks causal dense --seqlens 1048576 --one-gpu-until 131072
    torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --seqlens 256 --repeats 1   # does it run at all

For each length, head count and mask all implementations are made one after the other, warmed up, and calibrated by one
step forward + backward. Those whose step takes at most ``--cell-seconds`` stay in memory and are timed in turns: hot
GPUs lower their clocks, so that whatever always came first would look faster. A round goes through all of them, each
round begins one further than the one before it, and before each timing the GPUs rest for ``--rest`` seconds. A timing
is of as many steps as take some 60 ms, at most 8. There are ``--repeats`` rounds, or fewer, at least two, where the
slowest implementation would take longer than ``--cell-seconds`` in all of them. One whose step alone takes longer is
warmed up once, timed once behind a rest and not kept; its forward pass and what is exposed are left out.

Prints a line for each implementation, of the short ones when their rounds are over: milliseconds forward + backward
(the slowest rank, median of the rounds), the efficiency t(1) / (N t(N)) against one GPU of this package in the same
run, milliseconds of forward alone, the most memory of a rank in the step that calibrates (without that of the other
implementations), and how much of the time is communication that no kernel hides (of the forward pass, of both): what
the same kernels and copies take with nothing sent, in the same rounds, subtracted. Beyond ``--one-gpu-until`` tokens
the time of one GPU is the longest that was measured, times the square of the lengths' ratio: the line says "modelled".

A strategy is a name, its groups of heads (``ulysses:4``) and further arguments of ContextParallel
(``all_gather:2:lanes=2:keep=False:sm_margin=8``); ``ulysses+all_gather:inside=2`` is a pair, the first of the two over
groups of so many GPUs. Dense attention has one piece a rank (``layout="contiguous"``), causal attention zigzag's two.
torch's ``context_parallel`` shards in its own order and computes its causal mask on FLASH and CUDNN. The package
ring-flash-attn, where it is installed, computes on flash_attn's kernels, or on FlashAttention-3's where ``$FA3_DIR``
has them (`fa3_as_flash_attn.py`): ``--ring-flash-attn zigzag ring stripe``, each in its own layout; without it a line
says what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import nvrtc_attn.torch  # noqa: E402 - of this checkout
from nvrtc_attn.torch.parallel import ContextParallel  # noqa: E402
from nvrtc_attn.torch.parallel.exchange import Pending  # noqa: E402
from nvrtc_attn.torch.parallel.strategies import strategy as strategies  # noqa: E402

Step = Callable[[], None]
Around = Callable[[], contextlib.AbstractContextManager[Any]]

ONE_GPU = "one GPU"
FAULTS = (RuntimeError, ValueError, ImportError, AttributeError, TypeError)
"""Unsupported, out of memory, or a rival that does not fit this flash_attn or torch: every rank fails alike.

A rank that fails alone ends at the timeout.
"""


class Steps(NamedTuple):
    forward: Step
    """The forward pass alone."""
    both: Step
    """With the backward pass."""
    around: Around
    """What is entered while either of them runs, outside the time."""


def tensors(seqlen: int, heads: tuple[int, int], options: Any, device: torch.device) -> list[torch.Tensor]:
    """q, k, v that want gradients, and dout: random, of this rank's share of tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = (heads[0], heads[1], heads[1], heads[0])
    found = [torch.randn(1, seqlen, n, options.head_dim, device=device, dtype=dtype) for n in counts]
    return [*(x.requires_grad_() for x in found[:3]), found[3]]


def steps_of(
    function: Callable[..., torch.Tensor], x: list[torch.Tensor], around: Around = contextlib.nullcontext
) -> Steps:
    """Of a function of q, k and v."""

    def forward() -> None:
        with torch.no_grad():
            function(*x[:3])

    def both() -> None:
        torch.autograd.grad(function(*x[:3]), x[:3], x[3])

    return Steps(forward, both, around)


@functools.cache
def mesh_of(device_type: str, *shape: int) -> Any:
    """One for all implementations of a run: each mesh of several dims has communicators of its own."""
    return init_device_mesh(device_type, shape)


class Quiet:
    """While it is entered, nothing is sent: what is received is what the exchange before left in the memory."""

    module: Any = strategies

    def __enter__(self) -> None:
        self.exchange = self.module.exchange
        self.module.exchange = self

    def __exit__(self, *_: object) -> None:
        self.module.exchange = self.exchange

    def __call__(self, group: Any, sends: Any, receives: Any) -> Pending:
        rank, packed = dist.get_rank(group), {}
        for r, of_rank in enumerate(sends):
            for x in of_rank if r != rank else ():
                if id(x) not in packed:
                    packed[id(x)] = x.contiguous()
        for x, y in zip(receives[rank], sends[rank], strict=True):
            x.copy_(y)
        return Pending()


@dataclasses.dataclass(eq=False)
class Timed:
    """A step, how it is timed, and its times."""

    step: Step
    around: Around
    estimate: float = math.inf
    """Milliseconds of a step, once it is calibrated."""
    times: list[float] = dataclasses.field(default_factory=list)
    """Milliseconds of a step in each round."""

    @property
    def calls(self) -> int:
        """How many steps a timing has: short ones follow one another, as in a model."""
        return max(1, min(8, int(60 / self.estimate)))

    def median(self) -> float | None:
        return median(self.times) if self.times else None


@dataclasses.dataclass(eq=False)
class Contender:
    """An implementation in a cell."""

    name: str
    both: Timed
    forward: Timed
    memory: float = 0.0
    """GiB at most on any rank, in the step that calibrates."""
    quiet: tuple[Timed, Timed] | None = None
    """Both and forward with nothing sent, where this is to be timed too."""

    def timed(self) -> list[Timed]:
        """What a round times, in this order."""
        return [self.both, self.forward, *(self.quiet or ())]


class Clock:
    """Times steps on all ranks at once. What it returns is the same on every rank, and so is what follows from it."""

    def __init__(self, device: torch.device, rest: float) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.rest = rest if self.on_gpu else 0.0

    def most(self, value: float) -> float:
        """The largest of all ranks."""
        found = torch.tensor([value], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, timed: Timed, rest: bool = True) -> float:
        """A step on the slowest rank."""
        with timed.around():
            if rest:
                time.sleep(self.rest)
            dist.barrier()
            self.synchronize()
            start = time.perf_counter()
            for _ in range(timed.calls):
                timed.step()
            self.synchronize()
            taken = 1e3 * (time.perf_counter() - start) / timed.calls
        return self.most(taken)

    def contender(self, name: str, make: Callable[[], Steps], quiet: bool, longest: float) -> Contender:
        """Make it, warm it up and calibrate it: its only time, where a step takes more than so many milliseconds."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated() if self.on_gpu else 0
        steps = make()
        made = Contender(name, Timed(steps.both, steps.around), Timed(steps.forward, steps.around))
        self.milliseconds(made.both, rest=False)  # Kernels compile, allocators and communicators warm up.
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        made.both.estimate = self.milliseconds(made.both)
        made.memory = self.most((torch.cuda.max_memory_allocated() - before) / 2**30 if self.on_gpu else 0.0)
        if made.both.estimate > longest:
            made.both.times.append(made.both.estimate)
            return made
        self.milliseconds(made.forward, rest=False)
        made.forward.estimate = self.milliseconds(made.forward)
        if quiet:
            both, forward = (dataclasses.replace(x, around=Quiet, times=[]) for x in (made.both, made.forward))
            made.quiet = both, forward
        return made


@contextlib.contextmanager
def torch_sdpa_of_ranks(mesh: Any, causal: bool) -> Iterator[None]:
    """While it is entered, torch's scaled_dot_product_attention is that of a sequence on all ranks.

    ``context_parallel`` replaces a function of torch and handlers of DTensor for the whole process, and leaving one
    ends those around it, so that two are never open at once. It needs a buffer to shard and gets one that nobody
    reads: which blocks of scores a rank computes depends on its rank, the option and ``is_causal`` alone.
    """
    from torch.distributed.tensor.experimental import context_parallel

    # torch exports the function under another module's name, and wraps it twice.
    options = sys.modules[inspect.unwrap(context_parallel).__module__]._cp_options
    options.enable_load_balance = causal  # Causal attention is zigzag's then; dense attention is refused with it.
    tokens = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    held = contextlib.ExitStack()
    held.enter_context(context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0]))
    try:
        yield
    finally:
        held.close()  # Without an error, behind which older versions of torch leave the function replaced.


RING_FLASH_ATTN = {
    "zigzag": "zigzag_ring_flash_attn_func",
    "ring": "ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
}


def ring_flash_attn(name: str) -> Callable[..., torch.Tensor]:
    """A function of ring-flash-attn on the kernels of FlashAttention-3 or flash_attn itself, or ImportError."""
    if os.environ.get("FA3_DIR"):
        importlib.import_module("fa3_as_flash_attn").install()
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    where = Path(getattr(interface, "__file__", None) or "").resolve()
    if Path(nvrtc_attn.__file__).resolve().parent in where.parents or interface.__name__.startswith("nvrtc_attn"):
        raise ImportError(f"flash_attn is {interface.__name__} of nvrtc_attn, no rival of it")
    found: Callable[..., torch.Tensor] = getattr(importlib.import_module("ring_flash_attn"), RING_FLASH_ATTN[name])
    return found


class Cell:
    """One length, head count and mask: every implementation."""

    def __init__(
        self, options: argparse.Namespace, device: torch.device, seqlen: int, pair: str, mask: str, end: float,
        measured: dict[tuple[str, str], tuple[int, float]],
    ) -> None:  # fmt: skip
        """``measured``: the longest sequence of each head count and mask on one GPU, and its milliseconds."""
        self.options, self.device, self.seqlen, self.pair, self.end = options, device, seqlen, pair, end
        self.heads = int(pair.split("/")[0]), int(pair.split("/")[1])
        self.mask, self.causal = mask, mask == "causal"
        self.clock, self.measured = Clock(device, options.rest), measured
        self.alone: float | None = None
        """Milliseconds of one GPU: modelled, or its estimate until its rounds are over."""
        self.short: list[Contender] = []

    def late(self) -> bool:
        """Whether the time is over, on any rank: all of them stop together."""
        return self.clock.most(float(time.perf_counter() > self.end)) > 0

    def show(self, name: str, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"{self.seqlen:8d} {self.pair:>6s} {self.mask:6s} {name:40s} {text}".rstrip(), flush=True)

    def show_fault(self, name: str, error: Exception) -> None:
        self.show(name, f"{type(error).__name__}: {str(error)[:90]}")
        if name == ONE_GPU:
            self.alone = None

    def show_times(self, found: Contender) -> None:
        """Show nothing of one that no round has timed."""
        ms, forward = found.both.median(), found.forward.median()
        if ms is None:
            return
        share, alone, hidden = " " * 6, " " * 19, ""
        if found.name == ONE_GPU:
            self.alone = ms
            self.measured[self.pair, self.mask] = self.seqlen, ms
        elif self.alone is not None:
            share = f"{self.alone / (dist.get_world_size() * ms):6.3f}"
        if forward is not None:
            alone = f"forward {forward:8.2f} ms"
            if found.quiet is not None:
                both_quiet, forward_quiet = (median(x.times) for x in found.quiet)
                hidden = f"{forward - forward_quiet:6.2f} {ms - both_quiet:6.2f} ms exposed"
        self.show(found.name, f"{ms:9.2f} ms {share} {alone} {found.memory:7.2f} GiB {hidden}")

    def enter(self, name: str, make: Callable[[], Steps], quiet: bool = False) -> None:
        """Calibrate what ``make`` makes, and keep it for the rounds, or show its time where a step takes too long."""
        if self.late():
            return
        try:
            found = self.clock.contender(name, make, quiet, 1e3 * self.options.cell_seconds)
        except FAULTS as error:
            self.show_fault(name, error)
            return
        if found.both.times:
            self.show_times(found)
            return
        self.short.append(found)
        if name == ONE_GPU:
            self.alone = found.both.estimate

    def enter_one_gpu(self) -> None:
        """Or model its time from the longest sequence of these heads and this mask that was measured."""
        kind = (self.pair, self.mask)
        if self.seqlen <= self.options.one_gpu_until or kind not in self.measured:
            self.enter(ONE_GPU, self.one_gpu)
        if self.alone is None and kind in self.measured:
            seqlen, ms = self.measured[kind]
            self.alone = ms * (self.seqlen / seqlen) ** 2
            self.show(f"one GPU, modelled from {seqlen}", f"{self.alone:9.2f} ms")

    def turn(self, first: int, measure: Callable[[Contender], None]) -> None:
        """Measure all short contenders, from this one on; one that fails leaves them."""
        for found in self.short[first:] + self.short[:first]:
            try:
                measure(found)
            except FAULTS as error:
                self.show_fault(found.name, error)
                self.short.remove(found)

    def settle(self, found: Contender) -> None:
        """Run its steps without a time: making another contender has freed the memory that the allocator kept."""
        for timed in (found.both, found.forward):
            self.clock.milliseconds(timed, rest=False)

    def time_once(self, found: Contender) -> None:
        for timed in found.timed():
            timed.times.append(self.clock.milliseconds(timed))

    def rounds(self) -> None:
        """Time the short contenders, until the time is over."""
        if not self.short or self.late():
            return
        self.turn(0, self.settle)
        slowest = max((x.both.calls * x.both.estimate for x in self.short), default=math.inf)
        fit = int(1e3 * self.options.cell_seconds / slowest)
        for number in range(min(self.options.repeats, max(2, fit))):
            if not self.short or self.late():
                return
            self.turn(number % len(self.short), self.time_once)

    def one_gpu(self) -> Steps:
        x = tensors(self.seqlen, self.heads, self.options, self.device)
        return steps_of(lambda q, k, v: nvrtc_attn.torch.attention(q, k, v, causal=self.causal), x)

    def equal_pieces(self) -> int:
        """How many tokens a rank has of a rival that wants two equal pieces a rank.

        Tokens are random, so that any rank's share of them is that of its layout.
        """
        ranks: int = dist.get_world_size()
        if self.seqlen % (2 * ranks):
            raise ValueError(f"{self.seqlen} tokens are not {2 * ranks} equal pieces")
        return self.seqlen // ranks

    def sharded(self, strategy: str) -> Steps:
        name, *settings = strategy.split(":")
        more: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.rpartition("=")
            more[key or "pipeline"] = {"True": True, "False": False}.get(value, value) if key == "keep" else int(value)
        pair, ranks = tuple(name.split("+")), dist.get_world_size()
        inside = more.pop("inside", ranks)
        mesh = mesh_of(self.device.type, ranks // inside, inside) if len(pair) == 2 else None
        cp = ContextParallel(
            mesh,
            seqlen=self.seqlen,
            strategy=(pair[0], pair[1]) if len(pair) == 2 else name,
            layout="zigzag" if self.causal else "contiguous",
            **more,
        )
        x = tensors(cp.local_seqlen, self.heads, self.options, self.device)
        return steps_of(lambda q, k, v: cp.attention(q, k, v, causal=self.causal), x)

    def torch_context_parallel(self, backend: str) -> Steps:
        """torch's ring over its own kernels, in its own balanced layout; tensors are [B, H, S, D]."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh = mesh_of(self.device.type, dist.get_world_size())
        x = [y.detach().transpose(1, 2) for y in tensors(self.equal_pieces(), self.heads, self.options, self.device)]
        *qkv, dout = (y.contiguous() for y in x)

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            gqa = q.shape[1] != k.shape[1]
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=gqa)

        around = functools.partial(torch_sdpa_of_ranks, mesh, self.causal)
        return steps_of(function, [*(y.requires_grad_() for y in qkv), dout], around)

    def ring_flash_attn(self, name: str) -> Steps:
        function = ring_flash_attn(name)
        x = tensors(self.equal_pieces(), self.heads, self.options, self.device)
        return steps_of(lambda q, k, v: function(q, k, v, causal=self.causal), x)

    def run(self) -> None:
        if self.late():
            return
        self.enter_one_gpu()
        for strategy in self.options.strategies:
            self.enter(strategy, functools.partial(self.sharded, strategy), quiet=True)
        for backend in self.options.torch if self.device.type == "cuda" else ():
            self.enter(
                f"torch {backend.split('_')[0].lower()}", functools.partial(self.torch_context_parallel, backend)
            )
        for name in self.options.ring_flash_attn if self.device.type == "cuda" else ():
            self.enter(f"ring-flash-attn {name}", functools.partial(self.ring_flash_attn, name))
        self.rounds()
        for found in self.short:
            self.show_times(found)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/32"], help="query heads / key heads")
    parser.add_argument("--masks", nargs="+", choices=("causal", "dense"), default=["causal"])
    parser.add_argument("--one-gpu-until", type=int, default=1 << 30, help="tokens; its time is modelled beyond")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--strategies", nargs="+", default=["all_gather", "ulysses", "ring", "all_gather:lanes=1:sm_margin=0"]
    )
    parser.add_argument(
        "--torch", nargs="*", default=["FLASH_ATTENTION", "CUDNN_ATTENTION"], help="its own, by backend"
    )
    parser.add_argument(
        "--ring-flash-attn", nargs="*", choices=tuple(RING_FLASH_ATTN), default=["zigzag"], help="its functions"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds before each timing, on GPUs")
    parser.add_argument("--seconds", type=float, default=280.0, help="begin no implementation or round after so many")
    parser.add_argument(
        "--cell-seconds", type=float, default=1.0, help="fewer rounds of what takes longer, one timing of a longer step"
    )
    parser.add_argument("--ctas", type=int, help="thread blocks that NCCL may use at most")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = options.device == "cuda"
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    timeout = datetime.timedelta(minutes=3)
    if on_gpu:
        nccl = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if options.ctas:
            nccl.config.max_ctas = options.ctas
        dist.init_process_group("nccl", timeout=timeout, pg_options=nccl, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    end = time.perf_counter() + options.seconds
    if dist.get_rank() == 0:
        where = f"{dist.get_world_size()} x {torch.cuda.get_device_name() if on_gpu else 'CPU'}"
        print(f"{where}, torch {torch.__version__}, head dim {options.head_dim}, forward + backward")
    measured: dict[tuple[str, str], tuple[int, float]] = {}
    for seqlen in options.seqlens:  # the short ones first: what is cut off is the longest
        for pair in options.heads:
            for mask in options.masks:
                Cell(options, device, seqlen, pair, mask, end, measured).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
