"""Which tiles a mask leaves anything of: the launch that finds out, and when it is worth its time.

A small kernel writes two bits a tile into the workspace: ``kernel/tile_plan.cuh`` reads a byte mask as it was passed
in, once, ``kernel/tile_ranges.cuh`` computes ranges of a mask_mod and no score of it. The attention kernel then walks
the tiles that keep something (``collective/tile_words.cuh`` has the layout).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ..front.problem import AttentionProblem
from ..jit.config import BackwardConfig, Features, ForwardConfig, KernelConfig
from ..modifiers.cuda_tiles import tile_source
from .common import ceil_div, orders_gradients
from .spec import Launch, Workspace

MIN_KEY_TILES: Final = 4
"""With fewer, a padded sequence has hardly a whole tile of padding."""
MIN_FLOPS: Final = 4e9
"""Products of a forward pass: some 10 us of an H200 at 400 TFLOP/s, where the launch that reads the mask costs about 3.

A backward pass takes 2.5 times as long, and few rows that wait for keys longer than their products say.
"""
MIN_KEY_BYTES: Final = 32 << 20
"""K and V of few query rows: as many microseconds of memory."""
WORD_TILES: Final = 32
WORD_BYTES: Final = 8
_WARPS: Final = 32

_Config = TypeVar("_Config", bound=KernelConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileWords:
    """The words of one mask at one size of tiles: ``[batch][heads][lines][words]``, the mask's own batch and heads.

    Those of a mask_mod are told apart by the batch entries, heads and queries that it depends on.
    """

    batch: int
    heads: int
    lines: int
    """Query tiles, or 1 where the mask has one row; with ``transposed``, key tiles."""
    tiles: int
    """Bits of a line: key tiles, or query tiles."""
    rows: int
    cols: int
    transposed: bool
    one_row: bool
    """Of the mask, for all queries."""

    @property
    def words(self) -> int:
        """Of a line."""
        return ceil_div(self.tiles, WORD_TILES)

    @property
    def nbytes(self) -> int:
        return WORD_BYTES * self.batch * self.heads * self.lines * self.words

    @property
    def strides(self) -> tuple[int, int, int]:
        """In words: of the batch, heads and lines of the scores; 0 where they share words."""
        line = self.words
        head = self.lines * line
        batch = self.heads * head
        shared = (self.batch == 1, self.heads == 1, self.one_row and not self.transposed)
        return tuple(0 if same else step for same, step in zip(shared, (batch, head, line), strict=True))  # type: ignore[return-value]

    def params(self, offset: int = 0, name: str = "words") -> tuple[tuple[str, int], ...]:
        """What a kernel that reads them must know; ``offset`` is in bytes from the pointer of their workspace."""
        b, h, line = self.strides
        return (
            (f"tile_{name}_offset", offset // WORD_BYTES),
            (f"tile_{name}_stride_b", b),
            (f"tile_{name}_stride_h", h),
            (f"tile_{name}_stride_line", line),
        )


def words_of(problem: AttentionProblem, rows: int, cols: int, *, transposed: bool = False) -> TileWords:
    """The words of the mask of ``problem`` for tiles of ``rows`` queries and ``cols`` keys."""
    batch, heads, mask_rows = _forms(problem)
    query_tiles, key_tiles = ceil_div(problem.seqlen_q, rows), ceil_div(problem.seqlen_k, cols)
    one_row = mask_rows == 1
    return TileWords(
        batch=batch,
        heads=heads,
        lines=key_tiles if transposed else 1 if one_row else query_tiles,
        tiles=query_tiles if transposed else key_tiles,
        rows=rows,
        cols=cols,
        transposed=transposed,
        one_row=one_row,
    )


def of_ranges(problem: AttentionProblem) -> bool:
    """Whether words are of a mask_mod, by its ranges. Beside it a byte mask is left to the attention kernel."""
    return problem.modifier is not None and problem.modifier.mask is not None


def _forms(problem: AttentionProblem) -> tuple[int, int, int]:
    """Batch entries, heads and queries that the mask tells apart."""
    if problem.modifier is not None and problem.modifier.mask is not None:
        on = problem.modifier.mask.depends
        sizes = (("b", problem.batch), ("h", problem.num_heads), ("q", problem.seqlen_q))
        batch, heads, rows = (size if name in on else 1 for name, size in sizes)
        return batch, heads, rows
    assert problem.mask is not None
    return problem.mask.shape[0], problem.mask.shape[1], problem.mask.shape[2]


def pays(problem: AttentionProblem, block_n: int) -> bool:
    """Whether a launch that looks for tiles without anything kept is worth its time.

    The kernel that it runs before must be long enough, and have tiles to leave out. Nothing is known of what the mask
    holds: that is on the device.
    """
    if (problem.mask is None and not of_ranges(problem)) or problem.varlen:
        return False
    if ceil_div(problem.seqlen_k, block_n) < MIN_KEY_TILES:
        return False
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    itemsize = 4 if problem.dtype == "float32" else 2
    key_bytes = itemsize * problem.batch * problem.num_heads_kv * problem.seqlen_k
    dims = problem.head_dim + problem.head_dim_v
    return 2 * scores * dims >= MIN_FLOPS or key_bytes * dims >= MIN_KEY_BYTES


def with_words(config: _Config) -> _Config:
    """``config``, walking words."""
    return replace(config, features=replace(config.features, tile_words=True))


def plan_launch(problem: AttentionProblem, words: TileWords, config: KernelConfig, offset: int = 0) -> Launch:
    """The launch that writes ``words``, before a kernel of ``config``: one kernel for a pass, whatever the tiles."""
    ranges, features = of_ranges(problem), Features(mask=True, tile_words=True)
    if ranges and problem.modifier is not None:
        text = tile_source(problem.modifier, problem.trained, orders_gradients(problem))
        features = Features(mask=problem.mask is not None, tile_words=True, modifier=text)
    fields: dict[str, Any] = {
        "kernel": "tile_ranges" if ranges else "tile_plan", "arch": config.arch, "dtype": "float16", "head_dim": 8,
        "head_dim_v": 8, "block_m": 16, "block_n": 16, "num_warps": _WARPS, "features": features,
    }  # fmt: skip
    # Of the backward pass, whose params are others: told apart by its name in tables of kernels, too.
    forward = config.kernel.startswith("forward")
    plan: KernelConfig = ForwardConfig(**fields) if forward else BackwardConfig(**fields, dq="none")
    lines = words.batch * words.heads * words.lines
    one_warp = words.transposed and words.one_row and not ranges
    grid = lines if one_warp else lines * words.words
    if ranges:  # a block has a word of 32 lines
        grid = words.batch * words.heads * ceil_div(words.lines, WORD_TILES) * words.words
    return Launch(
        config=plan,
        grid=grid,
        block=32 if one_warp else plan.num_threads,
        smem_bytes=0 if ranges else 4 * _WARPS,
        params=(
            *words.params(offset),
            ("tile_plan_rows", words.rows),
            ("tile_plan_cols", words.cols),
            ("tile_plan_lines", words.lines),
            ("tile_plan_tiles", words.tiles),
            ("tile_plan_heads", words.heads),
            ("tile_plan_transposed", int(words.transposed)),
        ),
    )


def backward_launches(
    problem: AttentionProblem, config: BackwardConfig | Any, *, ordered: bool = False
) -> tuple[list[Launch], tuple[tuple[str, int], ...], Workspace]:
    """What writes the words of a dk/dv kernel of ``config``, the params that it reads them by, and their workspace.

    ``ordered``: also by query tile, which the deterministic pass of the Hopper family counts with.
    """
    words = words_of(problem, config.block_m, config.block_n, transposed=True)
    launches, params, nbytes = [plan_launch(problem, words, config)], words.params(), words.nbytes
    if ordered:
        order = words_of(problem, config.block_m, config.block_n)
        launches.append(plan_launch(problem, order, config, nbytes))
        params += order.params(nbytes, "order")
        nbytes += order.nbytes
    return launches, params, Workspace(field="counters", nbytes=nbytes)
