"""Trainers and model libraries on the GPU: timm under the switch, DistributedDataParallel and FSDP2 over NCCL."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn.torch as na  # noqa: E402 - after the skip
from nvrtc_attn.torch import sdpa  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def vit_losses(timm: Any, compiled: bool) -> list[float]:
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=64, patch_size=4, embed_dim=128, depth=2, num_heads=2, num_classes=5
    ).cuda()
    forward = torch.compile(model) if compiled else model
    images, labels = torch.randn(8, 3, 64, 64, device="cuda"), torch.arange(8, device="cuda") % 5
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    found = []
    for _ in range(10):
        with torch.autocast("cuda", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch.library.get_kernel is missing")
@pytest.mark.parametrize("compiled", [False, True])
def test_timm_vision_transformer_trains_the_same(compiled: bool) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed", exc_type=(ImportError, RuntimeError))
    torch._dynamo.reset()
    expected = vit_losses(timm, compiled)
    torch._dynamo.reset()
    with na.enable_sdpa(all=True):
        found = vit_losses(timm, compiled)
        taken = sum(sdpa.report()["taken"].values())
    assert found == pytest.approx(expected, rel=2e-2, abs=2e-3)
    assert found[-1] < found[0]
    assert compiled or taken > 0, "a compiled program calls the operators themselves"


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
        self.qkv, self.project = nn.Linear(128, 384), nn.Linear(128, 128)
        self.bias = nn.Parameter(torch.zeros(1, 2, 256, 256))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 64).unbind(2)
        return x + self.project(na.attention(q, k, v, bias=self.bias, causal=True).flatten(2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).cuda()


def steps(model, x):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(5):
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


torch.cuda.set_device(rank)
dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
x = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(1)).cuda()
alone = steps(model(), x)
if kind == "ddp":
    wrapped = nn.parallel.DistributedDataParallel(model(), device_ids=[rank])
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    wrapped, mesh = model(), init_device_mesh("cuda", (2,))
    for block in wrapped:
        fully_shard(block, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
losses = steps(wrapped, x[2 * rank : 2 * rank + 2])
dist.all_reduce(losses)
torch.testing.assert_close(losses / 2, alone, rtol=1e-3, atol=1e-4)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_gpus_train_as_one(kind: str, repository: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if kind == "fsdp2" and not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("this torch has no fully_shard (torch >= 2.6 has it)")
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
