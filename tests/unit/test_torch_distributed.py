"""DistributedDataParallel, FSDP2 and activation offload around attention: two processes on the CPU, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import nvrtc_attn.torch as na  # noqa: E402 - after the skip

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn

import nvrtc_attn.torch as na

kind, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(1, 2, 8, 8))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        return x + self.project(na.attention(q, k, v, bias=self.bias, causal=True).flatten(2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def steps(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(3):
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1))
alone = steps(model(), x)
if kind == "ddp":
    wrapped = nn.parallel.DistributedDataParallel(model())
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrapped, mesh = model(), init_device_mesh("cpu", (2,))
    for block in wrapped:
        fully_shard(block, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    assert wrapped[0].qkv.weight.to_local().shape == (24, 16)  # half of the rows
losses = steps(wrapped, x[2 * rank : 2 * rank + 2])
dist.all_reduce(losses)
torch.testing.assert_close(losses / 2, alone, rtol=1e-5, atol=1e-6)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_train_as_one(kind: str, repository: Path, tmp_path: Path) -> None:
    """Half of the batch each, the gradient of a shared bias included."""
    if kind == "fsdp2":
        pytest.importorskip("torch.distributed.fsdp", reason="no FSDP")
        if not hasattr(torch.distributed.fsdp, "fully_shard"):
            pytest.skip("this torch has no fully_shard (torch >= 2.6 has it)")
    environment = {**os.environ, "PYTHONPATH": str(repository), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


def test_saved_tensors_may_be_packed_away() -> None:
    """As ``torch.autograd.graph.save_on_cpu`` and offloading trainers do: all that is kept passes through the hooks."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = [torch.randn(2, 8, 2, 8, requires_grad=True) for _ in range(3)]
        bias = torch.randn(1, 2, 8, 8, requires_grad=True)
        out = na.attention(*x, bias=bias, dropout_p=0.2, rng=(1, 2))
        return list(torch.autograd.grad((out**2).sum(), [*x, bias]))

    expected = gradients()
    away: list[Any] = []

    def pack(x: torch.Tensor) -> int:
        away.append(x.detach().numpy().tobytes())
        shapes.append(x.shape)
        return len(away) - 1

    shapes: list[Any] = []

    def unpack(index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(away[index]), dtype=torch.float32).view(shapes[index])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = gradients()
    assert len(away) >= 6  # q, k, v, bias, out, lse
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
