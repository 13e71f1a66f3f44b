"""A Vision Transformer of timm trains under `nvrtc_attn.torch.enable_sdpa` as it does without."""

from __future__ import annotations

from typing import Any

import pytest
from differences import note
from vit_training import torch, vit_losses

# No reason of ours: an installed timm cannot be imported without torchvision, or beside one that is made for CUDA.
timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))

import nvrtc_attn.torch as na  # noqa: E402 - after the skips
from nvrtc_attn.torch import replaced  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def losses() -> list[float]:
    return vit_losses(timm, image=16, width=32, batch=4, steps=3, rate=1e-2)


@pytest.mark.skipif(not hasattr(torch.library, "get_kernel"), reason="torch.library.get_kernel is missing")
def test_vision_transformer_trains_the_same() -> None:
    expected = losses()
    replaced._taken.clear()
    options: dict[str, Any] = {"_keys": ("CPU",)}  # made for CUDA; here the CPU's are taken over
    with na.enable_sdpa(all=True, **options):
        found = losses()
        taken = dict(replaced._taken)
    note("timm", found, expected, relative=True)
    assert found == pytest.approx(expected, rel=1e-4)
    assert found[-1] < found[0]
    assert sum(taken.values()) >= 6, taken  # two layers, three steps
