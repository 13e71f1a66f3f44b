"""Loss curves of torch's own modules and of a timm ViT under `nvrtc_attn.torch.enable_sdpa`, beside torch's SDPA.

    python benchmarks/training_curves.py [--steps 60] [--dtype bfloat16] [--modes eager,compiled] [--every 10] [--save]

Every model is trained on one batch, from the same weights, on torch's attention and on this library's, eager and by
torch.compile. Rounding differs and training amplifies it, so torch's own attention is run once more without its fused
kernels (SDPBackend.MATH): that difference is what two right implementations have. Without a GPU tiny models run, eager.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import print_table, provenance, save
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import nvrtc_attn.torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, LENGTH, WIDTH, IMAGE = (16, 512, 256, 128) if DEVICE == "cuda" else (2, 16, 32, 16)
Loss = Callable[[], torch.Tensor]


class SelfAttention(nn.Module):
    """Between two layer norms, with the last eighth of the first sequence hidden."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[0, -(LENGTH // 8) :] = True
        y = self.norm(x)
        out: torch.Tensor = self.last(x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0])
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(
        img_size=IMAGE, patch_size=IMAGE // 16, embed_dim=WIDTH, depth=3, num_heads=4, num_classes=8
    )
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nn.MultiheadAttention": SelfAttention,
    "nn.TransformerEncoder": encoder,
    "timm VisionTransformer": vit,
}


def curve(name: str, steps: int, dtype: torch.dtype, compiled: bool) -> list[float]:
    """The losses of one training from fixed weights on one fixed batch."""
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE)
    torch.manual_seed(1)
    if name.startswith("timm"):
        x, wanted = torch.randn(BATCH, 3, IMAGE, IMAGE, device=DEVICE), torch.arange(BATCH, device=DEVICE) % 8
        distance: Any = functional.cross_entropy
    else:
        x = torch.randn(BATCH, LENGTH, WIDTH, device=DEVICE)
        wanted, distance = x.mean(1, keepdim=True).expand_as(x) * 4 + x.roll(1, 0), functional.mse_loss
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            out = forward(x)
        loss = distance(out.float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())  # read at the end: reading waits for the GPU
    return [float(loss) for loss in losses]


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference of two curves, relative to the larger loss of that step."""
    return max(abs(x - y) / max(abs(x), abs(y)) for x, y in zip(a, b, strict=True))


def compare(name: str, mode: str, steps: int, dtype: torch.dtype, every: int) -> dict[str, Any]:
    """Train on torch's attention, on ours, and eager on torch's unfused one."""
    compiled = mode == "compiled"
    torch._dynamo.reset()
    begun = time.perf_counter()
    theirs = curve(name, steps, dtype, compiled)
    with sdpa_kernel([SDPBackend.MATH]):
        unfused = theirs if compiled else curve(name, steps, dtype, False)
    torch._dynamo.reset()  # a program that was made without the switch would keep torch's kernels
    options: dict[str, Any] = {} if DEVICE == "cuda" else {"_keys": ("CPU",)}
    before = sum(nvrtc_attn.torch.sdpa.report()["taken"].values())
    with nvrtc_attn.torch.enable_sdpa(all=True, **options):
        ours = curve(name, steps, dtype, compiled)
    report = nvrtc_attn.torch.sdpa.report()
    if report["left_to_torch"] or (not compiled and sum(report["taken"].values()) - before < steps):
        raise SystemExit(f"{name}, {mode}: not all calls were taken: {report}")
    for label, losses in (("torch", theirs), ("ours", ours)):
        print(f"{name}, {mode}, {label}:", *(f"{loss:.5f}" for loss in losses[::every]), flush=True)
    return {
        "model": name, "mode": mode, "steps": steps, "first loss": f"{theirs[0]:.5f}",
        "last loss, torch": f"{theirs[-1]:.5f}", "last loss, ours": f"{ours[-1]:.5f}",
        "largest difference": f"{apart(theirs, ours):.1e}",
        "torch's unfused": "" if compiled else f"{apart(theirs, unfused):.1e}",
        "seconds": f"{time.perf_counter() - begun:.1f}", "curves": {"torch": theirs, "ours": ours},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--modes", default="eager,compiled" if DEVICE == "cuda" else "eager")
    parser.add_argument("--every", type=int, default=10, help="which losses are printed; all are saved")
    parser.add_argument("--save", type=Path, metavar="DIRECTORY", help="write training_curves.json there")
    arguments = parser.parse_args()
    if DEVICE == "cuda":
        print(", ".join(f"{key} {value}" for key, value in provenance().items()))
    elif arguments.save is not None:
        parser.error("--save: there is no GPU whose results these would be")
    print(f"{arguments.dtype} autocast, AdamW 1e-3, batch {BATCH}, width {WIDTH}, {LENGTH} tokens, images of {IMAGE}")
    rows = []
    for name in MODELS:
        if name.startswith("timm"):
            with contextlib.redirect_stderr(sys.stdout):
                try:
                    import timm  # noqa: F401
                except (ImportError, RuntimeError) as error:  # a torchvision of another torch raises either
                    print(f"{name}: skipped, timm cannot be imported: {error}")
                    continue
        for mode in arguments.modes.split(","):
            dtype = getattr(torch, arguments.dtype)
            rows.append(compare(name, mode, arguments.steps, dtype, max(arguments.every, 1)))
    columns = [key for key in rows[0] if key != "curves"]
    print_table(rows, columns)
    if arguments.save is not None:
        print(save("training_curves", rows, arguments.save))
    return 0


if __name__ == "__main__":
    sys.exit(main())
