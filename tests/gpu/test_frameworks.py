"""Trainers and model libraries on the GPU: timm under the switch, DistributedDataParallel and FSDP2 over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from differences import note

torch = pytest.importorskip("torch", reason="torch is not installed")

import train_ranks  # noqa: E402 - after the skip
from harness import forget_plans  # noqa: E402
from vit_training import vit_losses  # noqa: E402

import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def losses(timm: Any, compiled: bool) -> list[float]:
    return vit_losses(
        timm, image=64, width=128, batch=8, steps=10, rate=1e-3, device="cuda", compiled=compiled, autocast=True
    )


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch.library.get_kernel is missing")
@pytest.mark.parametrize("compiled", [False, True])
def test_timm_vision_transformer_trains_the_same(compiled: bool) -> None:
    try:
        import timm
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch raises either
        pytest.skip(f"timm cannot be imported: {error}")
    torch._dynamo.reset()
    expected = losses(timm, compiled)
    torch._dynamo.reset()
    forget_plans()
    with na.enable_sdpa(all=True):
        found = losses(timm, compiled)
    assert {type(x).__name__ for x in plan._plans.values()} >= {"ForwardPlan", "BackwardPlan"}, "not on our kernels"
    note("timm", found, expected, relative=True)
    assert found == pytest.approx(expected, rel=2e-2, abs=2e-3)
    assert found[-1] < found[0]


@pytest.mark.parametrize("kind", train_ranks.KINDS)
def test_two_gpus_train_as_one(kind: str, repository: Path, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    train_ranks.check(kind, "cuda", repository, tmp_path / "store")
