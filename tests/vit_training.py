"""A Vision Transformer of timm, trained for some steps on random images."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


def vit_losses(
    timm: Any, *, image: int, width: int, batch: int, steps: int, rate: float, device: str = "cpu",
    compiled: bool = False, autocast: bool = False,
) -> list[float]:  # fmt: skip
    """The loss of every step of AdamW; under ``autocast`` the forward pass is in bfloat16."""
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=image, patch_size=4, embed_dim=width, depth=2, num_heads=2, num_classes=5
    ).to(device)
    forward = torch.compile(model) if compiled else model
    images = torch.randn(batch, 3, image, image, device=device)
    labels = torch.arange(batch, device=device) % 5
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = torch.nn.functional.cross_entropy(forward(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
