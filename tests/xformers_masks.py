"""A mask of every class of xFormers that needs no paging, small for the CPU, ``times`` as long for the GPU."""

from __future__ import annotations

from typing import Any

import torch
from xformers.ops.fmha import attn_bias as biases

Q_LENGTHS, K_LENGTHS = (3, 1, 5), (4, 2, 6)


def dense_mask(name: str, times: int = 1) -> Any:
    fields = {
        "LowerTriangularFromBottomRightLocalAttentionMask": {"_window_size": 2 * times},
        "LocalAttentionFromBottomRightMask": {"window_left": times, "window_right": 2 * times},
    }
    return getattr(biases, name)(**fields.get(name, {}))


def packed_mask(name: str, times: int = 1, device: str = "cpu") -> Any:
    """A mask of three sequences; keys in slots of 7, or with gaps, where the class has them."""
    kind, where = getattr(biases, name), torch.device(device)
    rows, columns = [times * n for n in Q_LENGTHS], [times * n for n in K_LENGTHS]
    if "Padded" in name:
        queries = biases._SeqLenInfo.from_seqlens(rows, device=where)
        keys = biases._PaddedSeqLenInfo.from_seqlens_padded(columns, 7 * times, device=where)
        extra = {"_window_size": 2 * times} if "CausalLocal" in name else {}
        if name == "BlockDiagonalLocalAttentionPaddedKeysMask":
            extra = {"window_left": times, "window_right": 2 * times}
        return kind(q_seqinfo=queries, k_seqinfo=keys, **extra)
    if "Gappy" in name:
        return kind.from_seqlens(rows, [times * n for n in (0, 5, 9, 16)], columns, device=where)
    queries = biases._SeqLenInfo.from_seqlens(rows, device=where)
    keys = biases._SeqLenInfo.from_seqlens(columns, device=where)
    return kind(q_seqinfo=queries, k_seqinfo=keys, **({"_window_size": 3 * times} if "Local" in name else {}))
