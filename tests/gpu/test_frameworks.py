"""Trainers and model libraries on the GPU: timm under the switch, DistributedDataParallel and FSDP2 over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from differences import note

torch = pytest.importorskip("torch", reason="torch is not installed")

import train_ranks  # noqa: E402 - after the skip
from harness import forget_plans  # noqa: E402

import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402

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
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch raises either
        pytest.skip(f"timm cannot be imported: {error}")
    torch._dynamo.reset()
    expected = vit_losses(timm, compiled)
    torch._dynamo.reset()
    forget_plans()
    with na.enable_sdpa(all=True):
        found = vit_losses(timm, compiled)
    assert {type(x).__name__ for x in plan._plans.values()} >= {"ForwardPlan", "BackwardPlan"}, "not on our kernels"
    note("timm", found, expected, relative=True)
    assert found == pytest.approx(expected, rel=2e-2, abs=2e-3)
    assert found[-1] < found[0]


@pytest.mark.parametrize("kind", train_ranks.KINDS)
def test_two_gpus_train_as_one(kind: str, repository: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    train_ranks.check(kind, "cuda", repository, tmp_path / "store")
