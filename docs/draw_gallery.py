"""The pictures of docs/guide/gallery.md: masks of functions, and what is decided about their tiles.

    python docs/draw_gallery.py [FOLDER]

Queries go down, keys to the right. Dark: kept pairs. A tile of 8 x 8 pairs is grey where it has nothing and is left
out, outlined where the mask is asked in the kernel, and neither where it keeps everything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import nvrtc_attn
from nvrtc_attn.modifiers import intervals

LENGTH, TILE, PIXELS = 64, 8, 4
DOCUMENTS = np.searchsorted([17, 26, 45], np.arange(LENGTH), "right").astype(np.int32)
PREFIX = np.array([22], np.int32)
LISTED = np.random.default_rng(4).random((LENGTH // TILE, LENGTH // TILE)) < 0.35

MASKS: dict[str, Callable[..., Any]] = {
    "prefix": lambda b, h, i, j: (j <= i) | (j < PREFIX[b]),
    "documents": lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (j <= i),
    "sinks": lambda b, h, i, j: (j <= i) & ((i - j < 12) | (j < 3)),
    "natten": lambda b, h, i, j: (abs(i // 8 - j // 8) <= 1) & (abs(i % 8 - j % 8) <= 2),
    "chunks": lambda b, h, i, j: (i // 16 == j // 16) & (j <= i),
    "block_diffusion": lambda b, h, i, j: np.where(
        i < 32, np.where(j < 32, i // 4 == j // 4, i // 4 > (j - 32) // 4), (j >= 32) & ((i - 32) // 4 >= (j - 32) // 4)
    ),
    "dilated": lambda b, h, i, j: (j <= i) & ((i - j) % 4 == 0) & (i - j < 36),
    "blocks": lambda b, h, i, j: LISTED[i // TILE, j // TILE],
}


def picture(mask_mod: Callable[..., Any]) -> str:
    """A mask as SVG."""
    modifier = nvrtc_attn.trace(None, mask_mod)
    assert modifier.valued[1] is not None
    starts = np.arange(0, LENGTH, TILE)
    some, every = intervals.decide(
        modifier.valued[1], modifier.captures, batch=[0], heads=[0], query_starts=starts, seqlen_q=LENGTH,
        key_starts=starts, seqlen_k=LENGTH,
    )  # fmt: skip
    at = np.arange(LENGTH)
    kept = np.broadcast_to(mask_mod(0, 0, at[:, None], at), (LENGTH, LENGTH))
    size = LENGTH * PIXELS
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" height="{size}">']
    lines.append(f'<path fill="#fff" d="M0 0h{size}v{size}h-{size}z"/>')
    side = TILE * PIXELS
    for fill, tiles in (("#ddd", ~some[0, 0]), ("none", some[0, 0] & ~every[0, 0])):
        boxes = "".join(f"M{n * side} {m * side}h{side}v{side}h-{side}z" for m, n in np.argwhere(tiles))
        lines.append(f'<path fill="{fill}" stroke="#e08020" stroke-width="{int(fill == "none")}" d="{boxes}"/>')
    runs = []
    for row, flags in enumerate(kept):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
        runs += [
            f"M{a * PIXELS} {row * PIXELS}h{(b - a) * PIXELS}v{PIXELS}h-{(b - a) * PIXELS}z"
            for a, b in zip(edges[::2], edges[1::2], strict=True)
        ]
    lines.append(f'<path fill="#20508c" d="{"".join(runs)}"/>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "guide" / "gallery"
    for name, mask_mod in MASKS.items():
        (folder / f"{name}.svg").write_text(picture(mask_mod), encoding="utf-8")


if __name__ == "__main__":
    main()
