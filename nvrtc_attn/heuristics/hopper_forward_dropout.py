"""Dropout's decisions of the Hopper forward kernel, made by a launch of its own: that launch, and when it pays.

The kernel that makes them beside its products takes longer than both launches one after the other: 16 x 1024, 12 heads
of 64, causal, 191 and 169 us; 4 x 2048 x 16 of 80 251 and 213; 4 x 4096 x 8 of 256 756 and 580 (H200, 2026-11-30;
docs/experiments.md, "Dropout: decisions made elsewhere").
"""

from __future__ import annotations

from typing import Final

from ..front.problem import AttentionProblem
from ..jit.config import Features, HopperForwardConfig
from .common import ceil_div
from .hopper_forward_config import config_before
from .hopper_forward_schedule import key_tiles_of_rows
from .spec import Launch
from .tile_words import pays as tile_words_pay

MIN_SCORES: Final = {64: 40e6, 256: 16e6}
"""Up to head dim 64 and beyond, of scores that no position hides, in tiles of 64. Head dim 64: 34 million, 1 x 2048 x
16, causal, take 65 us, 64 without words, 18 million 0.95 to 1.06 of the time, 50 million 0.9; 17 million at head dims
96, 128 and 256 0.93, 0.97 and 0.81 (H200)."""
FREE_BYTES: Final = 64 << 20
"""Words up to that are made whatever the tensors take: the bound of a mask's bits, too (`tile_words.MAX_BIT_BYTES`)."""
MOST_BYTES: Final = 4 << 32
"""The kernels count in 32 bits what a thread has of a key tile, which is four bytes at least."""
CHUNK_COLUMNS: Final = 2048
"""Keys of a thread block at most. 4 x 4096 x 16, causal, takes 678 us with 2048, 699 with 512, 790 with 128 (H200)."""
BLOCKS: Final = 12
"""For each multiprocessor. Where there would be fewer, thread blocks have fewer keys, so that the last ones end at
about the same time. Five run at once."""


def keep_words_bytes(problem: AttentionProblem, rows: int, columns: int) -> int:
    """Of the decisions of tiles of ``rows`` queries and ``columns`` keys.

    Four threads have two rows and for them two words of four bytes, or one up to 64 keys.
    """
    tiles = ceil_div(problem.seqlen_q, rows) * ceil_div(problem.seqlen_k, columns)
    words = 1 if columns <= 64 else 2
    return 4 * words * 2 * rows * problem.batch * problem.num_heads * tiles


def makes_words(problem: AttentionProblem) -> bool:
    """Whether there are so many decisions, of whole sequences, that a launch of its own makes them.

    Where a mask leaves out whole tiles, the kernel that knows them makes only theirs. A modifier was not measured.
    """
    if problem.dropout_p <= 0 or problem.varlen or problem.modifier is not None or tile_words_pay(problem, 64):
        return False
    tiles = problem.batch * problem.num_heads * int(key_tiles_of_rows(problem, 64, 64).sum())
    return 64 * 64 * tiles >= MIN_SCORES[64 if max(problem.head_dim, problem.head_dim_v) <= 64 else 256]


def has_room(problem: AttentionProblem, rows: int, columns: int) -> bool:
    """Whether decisions of such tiles take about as much memory as q, k, v and out at most.

    A bit for each score of tiles of 128 keys, two at most: up to 4096 keys at head dim 64, 8192 at 128.
    """
    tokens = problem.num_heads * problem.seqlen_q + problem.num_heads_kv * problem.seqlen_k
    tensors = 2 * problem.batch * tokens * (problem.head_dim + problem.head_dim_v)
    return keep_words_bytes(problem, rows, columns) <= min(max(tensors * 9 // 8, FREE_BYTES), MOST_BYTES)


def keep_words_launch(
    problem: AttentionProblem, config: HopperForwardConfig, num_m_blocks: int, num_sms: int
) -> Launch:
    """The launch before a kernel of ``config``."""
    of_main = config.features
    features = Features(
        band=of_main.band,
        dropout=True,
        seqused_k=of_main.seqused_k,
        part=of_main.part,
        device_starts=of_main.device_starts,
    )
    making = config_before(config, "dropout_words", num_warps=4, features=features, tickets=config.tickets)
    blocks = problem.batch * problem.num_heads * num_m_blocks * (config.block_m // 64)
    key_tiles = ceil_div(problem.seqlen_k, config.block_n)
    tiles = max(CHUNK_COLUMNS // config.block_n, 1)
    while tiles > 1 and blocks * ceil_div(key_tiles, tiles) < BLOCKS * num_sms:
        tiles //= 2
    chunks = ceil_div(key_tiles, tiles)
    return Launch(
        config=making,
        grid=blocks * chunks,
        block=making.num_threads,
        smem_bytes=0,
        params=(
            ("num_m_blocks", num_m_blocks),
            ("num_heads", problem.num_heads),
            ("chunk_rows", tiles),
            ("num_chunks", chunks),
        ),
    )
