"""Train the GPT of train_gpt.py on sequences that are sharded over several processes, attention by ContextParallel.

    python examples/train_gpt_parallel.py --processes 2                   # 2 processes on gloo, on the CPU; no launcher
    torchrun --nproc-per-node 2 examples/train_gpt_parallel.py            # one process a GPU, on NCCL
    torchrun --nproc-per-node 2 examples/train_gpt_parallel.py --fsdp     # and parameters sharded by FSDP2
    ... --compare                                                         # the same run in one process beside it

Every rank has its tokens of every sequence and all parameters (or FSDP's share). The loss of a rank is the sum over
its tokens divided by the tokens of all, so gradients are added up over the ranks. Dropout of attention is on: its mask
is that of one process. With --compare rank 0 trains alone on whole sequences afterwards, and the two losses must agree
to 1e-3 of their size per step on the CPU (float32), and to 2 % on GPUs, where attention is bfloat16.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from train_gpt import GPT, Attention, corpus, options_of_a_run, parse

    import nvrtc_attn.torch
    from nvrtc_attn.torch.parallel import ContextParallel
except ImportError as error:
    print(f'skipped: torch is not installed ({error}). pip install "nvrtc-attn[torch]"')
    sys.exit(0)

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class ShardedGPT(GPT):
    """The same model on some of the tokens: ``positions`` says on which."""

    positions: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[self.positions]
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def train(options: argparse.Namespace, cp: ContextParallel | None, device: torch.device) -> list[float]:
    """The losses of one run: sharded with ``cp``, of whole sequences in this process alone without."""
    on_gpu = device.type == "cuda"
    torch.manual_seed(options.seed)
    text = corpus(400_000)
    index = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([index[c] for c in text])
    order = torch.Generator().manual_seed(options.seed)
    calls = 0

    def attention(qkv: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1  # a mask of its own for every layer and step, the same on all ranks and without them
        keywords = {"causal": True, "dropout_p": options.dropout, "rng": (options.seed, calls << 40)}
        if cp is None:
            alone: torch.Tensor = nvrtc_attn.torch.attention_qkvpacked(qkv, **keywords)
            return alone
        sharded: torch.Tensor = cp.attention(*qkv.unbind(2), **keywords)
        return sharded

    compute: Attention = attention
    model = ShardedGPT(len(index), options, compute, torch.bfloat16 if on_gpu else torch.float32).to(device)
    model.positions = torch.arange(options.context, device=device) if cp is None else cp.positions(device)
    sharded_parameters = options.fsdp and cp is not None
    if sharded_parameters:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    tokens_of_all = options.batch * options.context
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(data) - options.context - 1, (options.batch, 1), generator=order)
        window = data[starts + torch.arange(options.context + 1)].to(device)
        tokens, targets = window[:, :-1], window[:, 1:]
        if cp is not None:
            tokens, targets = cp.shard(tokens, 1), cp.shard(targets, 1)
        logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / tokens_of_all
        optimizer.zero_grad(set_to_none=True)
        # FSDP takes the mean over the ranks, which have shares of one loss and not losses of their own.
        (loss * cp.size if sharded_parameters and cp is not None else loss).backward()
        total = loss.detach().clone()
        if cp is not None:
            dist.all_reduce(total)
            if not sharded_parameters:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(float(total))
    return losses


def work(options: argparse.Namespace) -> int:
    """What one rank does."""
    rank, size, local = (int(os.environ[name]) for name in LAUNCHED)
    device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    more: dict[str, Any] = {}
    if device.type == "cuda":  # what is sent gets multiprocessors as soon as there are any
        more = {"device_id": device, "pg_options": dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=size, init_method=options.store or "env://",
        timeout=datetime.timedelta(minutes=10), **more,
    )  # fmt: skip
    cp = ContextParallel(seqlen=options.context, strategy=options.strategy)
    losses = train(options, cp, device)
    status = 0
    if rank == 0:
        print(f"{size} ranks, {cp.strategy}: loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        if options.compare:
            alone = train(options, None, device)
            difference = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
            allowed = 1e-3 if device.type == "cpu" else 0.02
            print(f"1 process: loss {alone[0]:.4f} -> {alone[-1]:.4f}; largest difference {difference:.2g} of it, "
                  f"allowed {allowed}: {'passed' if difference <= allowed else 'FAILED'}")  # fmt: skip
            status = int(not difference <= allowed)
    dist.barrier()
    dist.destroy_process_group()
    return status


def launch(options: argparse.Namespace) -> int:
    """Start the ranks as processes of this machine and wait for them."""
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{Path(directory) / 'store'}"
        command = [sys.executable, *sys.argv, "--store", store]
        ranks = [
            subprocess.Popen(command, env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r),
                                           "WORLD_SIZE": str(options.processes)})
            for r in range(options.processes)
        ]  # fmt: skip
        return max(abs(process.wait()) for process in ranks)


SIZES = {
    "steps": (100, 6), "layers": (4, 2), "width": (1024, 64), "heads": (8, 4), "context": (65536, 96), "batch": (1, 2),
}  # fmt: skip


def main() -> int:
    parser = options_of_a_run(__doc__, SIZES)
    parser.add_argument("--processes", type=int, help="start so many ranks here, instead of a launcher's")
    parser.add_argument("--strategy", choices=("auto", "all_gather", "ulysses", "ring"), default="auto")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters, too")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parse(parser)
    if all(name in os.environ for name in LAUNCHED):
        return work(options)
    if options.processes is None:
        parser.error("start it with torchrun, or with --processes N")
    return launch(options)


if __name__ == "__main__":
    sys.exit(main())
