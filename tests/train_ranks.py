"""Two processes train a model on half of the batch each, and one alone on all of it: `check`, for tests.

One rank of them: ``python train_ranks.py ddp|fsdp2 RANK STORE cpu|cuda``. Gloo on the CPU, NCCL on GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from child_environment import leave_ranks, python_path
from differences import number
from torch import nn

import nvrtc_attn.torch as na

KINDS = ("ddp", "fsdp2")
BATCH, HEADS = 4, 2


class Sizes(NamedTuple):
    backend: str
    length: int
    width: int
    steps: int
    rtol: float
    atol: float
    timeout: int
    """Seconds until the ranks are given up."""


SIZES = {
    "cpu": Sizes("gloo", 8, 16, 3, 1e-5, 1e-6, 400),
    "cuda": Sizes("nccl", 256, 128, 5, 1e-3, 1e-4, 120),
}


class Block(nn.Module):
    """Attention with a bias that is trained, too, and that all ranks share."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(sizes.width, 3 * sizes.width), nn.Linear(sizes.width, sizes.width)
        self.bias = nn.Parameter(torch.zeros(1, HEADS, sizes.length, sizes.length))

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
        return x + self.project(na.attention(q, k, v, bias=self.bias, causal=True).flatten(2))


def model_of(sizes: Sizes, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(sizes), Block(sizes)).to(device)


def losses_of(model: nn.Module, x: torch.Tensor, steps: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def sharded(model: nn.Sequential, sizes: Sizes, device: torch.device) -> nn.Sequential:
    """``model`` by FSDP2, each parameter's rows divided among the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    weight: Any = model[0].qkv.weight  # type: ignore[union-attr]
    assert weight.to_local().shape == (3 * sizes.width // 2, sizes.width)
    return model


def compare(kind: str, rank: int, sizes: Sizes, device: torch.device) -> None:
    """Train by both ranks and alone. Models are gone when this returns, as `main` wants it."""
    x = torch.randn(BATCH, sizes.length, sizes.width, generator=torch.Generator().manual_seed(1)).to(device)
    alone = losses_of(model_of(sizes, device), x, sizes.steps)
    model = model_of(sizes, device)
    if kind == "ddp":
        devices = [rank] if device.type == "cuda" else None
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model, device_ids=devices)
    else:
        wrapped = sharded(model, sizes, device)
    losses = losses_of(wrapped, x.chunk(2)[rank], sizes.steps)
    dist.all_reduce(losses)
    if rank == 0:
        print("apart", float(((losses / 2 - alone) / alone).abs().max()), file=sys.stderr)
    torch.testing.assert_close(losses / 2, alone, rtol=sizes.rtol, atol=sizes.atol)


def main() -> None:
    kind, number, store, device_type = sys.argv[1:]
    rank, sizes = int(number), SIZES[device_type]
    device, options = torch.device(device_type), {}
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(sizes.backend, f"file://{store}", rank=rank, world_size=2, **options)
    compare(kind, rank, sizes, device)
    # After the wrapped model: a group that dies with its reducer waits for gloo's threads, and they for the
    # interpreter's lock, which the reducer's destructor holds (PyTorch 2.13; one run of 12 on two busy cores).
    dist.destroy_process_group()
    leave_ranks()


def check(kind: str, device: str, root: Path, store: Path) -> None:
    """Start two ranks of ``kind`` on ``device`` with the package at ``root``; fail where they are not one process."""
    if kind == "fsdp2" and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no fully_shard (torch >= 2.6 has it)")
    environment = {**os.environ, "PYTHONPATH": python_path(root)}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, kind, str(rank), str(store), device],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=SIZES[device].timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    (apart,) = (line.split()[1] for line in errors[0].splitlines() if line.startswith("apart "))
    number("DistributedDataParallel, FSDP2", float(apart), "float32")


if __name__ == "__main__":
    main()
