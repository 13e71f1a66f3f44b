"""Causal attention over a sequence on all GPUs of a launch: ContextParallel beside one GPU, and what others do.

    torchrun --nproc-per-node 2 benchmarks/parallel.py                   # 16k to 128k tokens, at most 150 s
    torchrun --nproc-per-node 8 benchmarks/parallel.py --seqlens 131072  # any number of GPUs and lengths
    torchrun --nproc-per-node 2 benchmarks/parallel.py --strategies all_gather:1 all_gather:4 --ctas 16
    torchrun --nproc-per-node 2 benchmarks/parallel.py --strategies all_gather all_gather:lanes=2 all_gather:keep=False
    torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --seqlens 256 --repeats 1   # does it run at all

Prints a line for each length, head count and implementation, as soon as it is known: milliseconds forward + backward
(the slowest rank, median of the repeats) and of forward alone, the efficiency t(1) / (N t(N)) against one GPU of this
package in the same run, the most memory of a rank, and how much of the time is communication that no kernel hides (of
the forward pass, of both): what the same kernels and copies take with nothing sent, subtracted. A strategy is a name,
its groups of heads (``ulysses:4``) and further arguments of ContextParallel
(``all_gather:2:lanes=2:keep=False:sm_margin=8``). torch's ``context_parallel`` shards in its own order and computes its
causal mask on FLASH and CUDNN. The package ring-flash-attn, where it is installed, computes on flash_attn's kernels, or
on FlashAttention-3's where ``$FA3_DIR`` has them (`fa3_as_flash_attn.py`): ``--ring-flash-attn zigzag ring stripe``,
each in its own layout; without it a line says what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

import nvrtc_attn.torch  # noqa: E402 - of this checkout
from nvrtc_attn.torch.parallel import ContextParallel  # noqa: E402
from nvrtc_attn.torch.parallel.exchange import Pending  # noqa: E402
from nvrtc_attn.torch.parallel.strategies import strategy as strategies  # noqa: E402

Step = Callable[[], None]


def tensors(seqlen: int, heads: tuple[int, int], options: Any, device: torch.device) -> list[torch.Tensor]:
    """q, k, v that want gradients, and dout: random, of this rank's share of tokens."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = (heads[0], heads[1], heads[1], heads[0])
    found = [torch.randn(1, seqlen, n, options.head_dim, device=device, dtype=dtype) for n in counts]
    return [*(x.requires_grad_() for x in found[:3]), found[3]]


def steps_of(function: Callable[..., torch.Tensor], x: list[torch.Tensor]) -> tuple[Step, Step]:
    """The forward pass alone, and with the backward pass."""

    def forward() -> None:
        with torch.no_grad():
            function(*x[:3])

    def both() -> None:
        torch.autograd.grad(function(*x[:3]), x[:3], x[3])

    return forward, both


class Quiet:
    """While ``on``, nothing is sent: what is received is what the exchange before left in the memory."""

    def __init__(self) -> None:
        self.on, self.exchange = False, strategies.exchange

    def __call__(self, group: Any, sends: Any, receives: Any) -> Pending:
        if not self.on:
            return self.exchange(group, sends, receives)
        rank, packed = dist.get_rank(group), {}
        for r, of_rank in enumerate(sends):
            for x in of_rank if r != rank else ():
                if id(x) not in packed:
                    packed[id(x)] = x.contiguous()
        for x, y in zip(receives[rank], sends[rank], strict=True):
            x.copy_(y)
        return Pending()


def milliseconds(
    step: Step, repeats: int, device: torch.device, seconds: float, quiet: Quiet | None = None
) -> tuple[float, float]:
    """(median over repeats of the slowest rank's time, GiB at most on any rank). Fewer repeats of what takes long."""
    times: list[float] = []
    on_gpu = device.type == "cuda"
    number, calls = 0, 1
    while len(times) < repeats:
        if on_gpu and number == 1:
            torch.cuda.reset_peak_memory_stats()
        if quiet is not None:
            quiet.on = number >= 2
        dist.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        taken = torch.tensor([1e3 * (time.perf_counter() - start) / calls], device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if number == 1:  # the same numbers on every rank; short ones follow one another, as in a model
            calls = max(1, min(8, int(60 / float(taken))))
            repeats = min(repeats, max(2, int(1e3 * seconds / (calls * float(taken)))))
        if number >= 2:  # kernels compile, allocators and communicators warm up
            times.append(float(taken))
        number += 1
    most = torch.tensor([torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return median(times), float(most)


def torch_context_parallel(
    x: list[torch.Tensor], seqlen: int, backend: str, held: contextlib.ExitStack
) -> tuple[Step, Step]:
    """torch's ring over its own kernels, in its own balanced layout; buffers are [B, H, S, D]."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    dout = x[3].transpose(1, 2).contiguous()
    whole = [torch.randn(1, y.shape[2], seqlen, y.shape[3], dtype=y.dtype, device=y.device) for y in x[:3]]
    # Entering it shards the buffers in place, which is no part of the time.
    held.enter_context(context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]))
    local = [y.detach().clone().requires_grad_() for y in whole]
    gqa = local[0].shape[1] != local[1].shape[1]

    def function(*qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=gqa)

    return steps_of(function, [*local, dout])


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
    """One length and head count: every implementation in turn."""

    def __init__(self, options: argparse.Namespace, device: torch.device, seqlen: int, pair: str, end: float) -> None:
        self.options, self.device, self.seqlen, self.pair, self.end = options, device, seqlen, pair, end
        self.heads = int(pair.split("/")[0]), int(pair.split("/")[1])
        self.alone: float | None = None

    def late(self) -> bool:
        """Whether the time is over, on any rank: all of them stop together."""
        over = torch.tensor([float(time.perf_counter() > self.end)], device=self.device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return bool(over > 0)

    def measure(self, name: str, make: Callable[[], tuple[Step, Step]], quiet: bool = False) -> float | None:
        """Print a line, and return the milliseconds."""
        if self.late():
            return None
        row = f"{self.seqlen:8d} {self.pair:>6s} {name:40s}"
        seconds = self.options.cell_seconds
        try:
            forward_step, step = make()
            forward, _ = milliseconds(forward_step, self.options.repeats, self.device, seconds / 3)
            ms, most = milliseconds(step, self.options.repeats, self.device, seconds)
            hidden = ""
            if quiet:
                silence = Quiet()
                strategies.exchange = silence
                try:
                    # Also of the forward pass alone, which the line gives first.
                    forward_alone, _ = milliseconds(
                        forward_step, self.options.repeats, self.device, seconds / 3, silence
                    )
                    alone, _ = milliseconds(step, self.options.repeats, self.device, seconds, silence)
                finally:
                    strategies.exchange = silence.exchange
                hidden = f"{forward - forward_alone:6.2f} {ms - alone:6.2f} ms exposed"
        except (RuntimeError, ValueError, ImportError, AttributeError, TypeError) as error:
            # Every rank fails alike: unsupported, out of memory, or a rival that does not fit this flash_attn or torch.
            # A rank alone would end at the timeout.
            if dist.get_rank() == 0:
                print(f"{row} {type(error).__name__}: {str(error)[:90]}", flush=True)
            return None
        if dist.get_rank() == 0:
            share = f"{self.alone / (dist.get_world_size() * ms):6.3f}" if self.alone else " " * 6
            print(f"{row} {ms:9.2f} ms {share} forward {forward:8.2f} ms {most:7.2f} GiB {hidden}", flush=True)
        return ms

    def one_gpu(self) -> tuple[Step, Step]:
        x = tensors(self.seqlen, self.heads, self.options, self.device)
        return steps_of(lambda q, k, v: nvrtc_attn.torch.attention(q, k, v, causal=True), x)

    def sharded(self, strategy: str) -> tuple[Step, Step]:
        name, *settings = strategy.split(":")
        more: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.rpartition("=")
            more[key or "pipeline"] = {"True": True, "False": False}.get(value, value) if key == "keep" else int(value)
        cp = ContextParallel(seqlen=self.seqlen, strategy=name, **more)
        x = tensors(cp.local_seqlen, self.heads, self.options, self.device)
        return steps_of(lambda q, k, v: cp.attention(q, k, v, causal=True), x)

    def ring_flash_attn(self, name: str) -> tuple[Step, Step]:
        """Tokens are random, so that any rank's share of them is that of its layout: equal pieces."""
        function = ring_flash_attn(name)
        pieces = 2 * dist.get_world_size()
        if self.seqlen % pieces:
            raise ValueError(f"{self.seqlen} tokens are not {pieces} equal pieces")
        x = tensors(2 * (self.seqlen // pieces), self.heads, self.options, self.device)
        return steps_of(lambda q, k, v: function(q, k, v, causal=True), x)

    def run(self) -> None:
        self.alone = self.measure("one GPU", self.one_gpu)
        for strategy in self.options.strategies:
            self.measure(strategy, functools.partial(self.sharded, strategy), quiet=True)
        for backend in self.options.torch if self.device.type == "cuda" else ():
            with contextlib.ExitStack() as held:
                x = tensors(self.seqlen // dist.get_world_size(), self.heads, self.options, self.device)
                make = functools.partial(torch_context_parallel, x, self.seqlen, backend, held)
                self.measure(f"torch {backend.split('_')[0].lower()}", make)
        for name in self.options.ring_flash_attn if self.device.type == "cuda" else ():
            self.measure(f"ring-flash-attn {name}", functools.partial(self.ring_flash_attn, name))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/32"], help="query heads / key heads")
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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140.0, help="begin no measurement after so many")
    parser.add_argument("--cell-seconds", type=float, default=1.0, help="fewer repeats of what takes longer")
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
        print(f"{where}, torch {torch.__version__}, causal, head dim {options.head_dim}, forward + backward")
    for seqlen in options.seqlens:  # the short ones first: what is cut off is the longest
        for pair in options.heads:
            Cell(options, device, seqlen, pair, end).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
