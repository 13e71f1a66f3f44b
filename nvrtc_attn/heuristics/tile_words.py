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
from ..modifiers.cuda import cuda_source
from ..modifiers.cuda_tiles import tile_source
from ..modifiers.graph import Node, walk
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

KEEPS_BITS: Final = True
"""Whether undecided tiles of a mask_mod are asked about once for all heads where `bits_pay` (``tile_bits.cuh``), by a
launch of its own. Of 336 us for packed documents the kernel that asked in every head took 106 to ask (2 x 8192, 16
heads, D 64, H200, 2026-11-23)."""
MIN_SHARERS: Final = 4
"""Heads and batch entries that share a mask. To ask costs a head some 2.8 us a tile of 128 x 128 on one multiprocessor,
the launch 3 us and the same once: of two sharers the launch takes what they save of few tiles."""
MAX_BIT_BYTES: Final = 64 << 20
"""Of the bits, at 2 KB a tile of 128 x 128: all of 23,000 x 23,000 scores, or four undecided tiles for each of 8,192
rows of tiles of a million queries, where words take another 25 MB. What has no room is asked in every head."""
BIT_BLOCKS: Final = 8
"""Thread blocks a multiprocessor of the launch that asks: four warps each, so that registers suffice."""
SLOT_BYTES: Final = 16
ORDERED_LINES: Final = range(64, 1025)
"""Key tiles of a head that are handed out by their work in the Hopper backward pass: 0.91 to 1.00 of the time for masks
from 8192 keys on, 0.96 to 1.02 at 4096, up to 1.08 with fewer (docs/experiments.md, "Hopper backward: key
tiles by their work"). The end is that of the kernel, ``kMostOrderedLines``."""
COUNTER_BYTES: Final = 16
"""In front of the words: two counters, of which the second is that of slots, and zeros to a multiple of 16."""

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
        return (
            *self.strides_of_heads(self.lines * self.words),
            0 if self.one_row and not self.transposed else self.words,
        )

    def strides_of_heads(self, words: int) -> tuple[int, int]:
        """Of the batch and heads of the scores, where each that the mask tells apart has so many ``words``."""
        return 0 if self.batch == 1 else self.heads * words, 0 if self.heads == 1 else words

    def params(self, offset: int = 0, name: str = "words") -> tuple[tuple[str, int], ...]:
        """What a kernel that reads them must know; ``offset`` is in bytes from the pointer of their workspace."""
        b, h, line = self.strides
        return (
            (f"tile_{name}_offset", offset // WORD_BYTES),
            (f"tile_{name}_stride_b", b),
            (f"tile_{name}_stride_h", h),
            (f"tile_{name}_stride_line", line),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOrder:
    """Key tiles in the order in which they are handed out (``hopper/backward/line_order.cuh``), by their ``words``."""

    words: TileWords
    behind: int
    """The byte of the buffer of words where it may begin."""

    @property
    def lists(self) -> int:
        """One for each batch entry and head that the mask tells apart: thread blocks that make them."""
        return self.words.batch * self.words.heads

    @property
    def _list_words(self) -> int:
        return ceil_div(4 * self.words.lines, WORD_BYTES)

    @property
    def end(self) -> int:
        return _rounded(self.behind, WORD_BYTES) + WORD_BYTES * self.lists * self._list_words

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        stride_b, stride_h = self.words.strides_of_heads(self._list_words)
        return (
            ("tile_order_offset", ceil_div(self.behind, WORD_BYTES)),
            ("tile_order_stride_b", stride_b),
            ("tile_order_stride_h", stride_h),
        )


def line_order_of(words: TileWords, behind: int) -> LineOrder | None:
    """The order of ``words``, in their buffer from byte ``behind`` on; None where it does not pay."""
    return LineOrder(words=words, behind=behind) if words.lines in ORDERED_LINES else None


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
    if 0 in (problem.batch, problem.num_heads, problem.seqlen_q):
        return False
    if ceil_div(problem.seqlen_k, block_n) < MIN_KEY_TILES:
        return False
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    itemsize = 4 if problem.dtype == "float32" else 2
    key_bytes = itemsize * problem.batch * problem.num_heads_kv * problem.seqlen_k
    dims = problem.head_dim + problem.head_dim_v
    return 2 * scores * dims >= MIN_FLOPS or key_bytes * dims >= MIN_KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBits:
    """The buffer of bits of the undecided tiles of ``words`` (``collective/tile_bits.cuh``)."""

    words: TileWords
    behind: int
    """The byte of the buffer of words where it may begin."""

    @property
    def _sides(self) -> tuple[int, int]:
        """Rows and columns of the accumulators of a tile."""
        return (self.words.cols, self.words.rows) if self.words.transposed else (self.words.rows, self.words.cols)

    @property
    def tile_bytes(self) -> int:
        """Of a slot."""
        return bits_bytes(*self._sides)

    @property
    def tiles(self) -> int:
        return self.words.batch * self.words.heads * self.words.lines * self.words.tiles

    @property
    def room(self) -> int:
        return min(self.tiles, MAX_BIT_BYTES // self.tile_bytes)

    @property
    def _places(self) -> tuple[int, int, int, int]:
        """Of the first slots, of the list of slots, of bits, and their end."""
        first = _rounded(self.behind, 128)
        slots = _rounded(first + self.words.nbytes // 2, 128)
        bits = _rounded(slots + SLOT_BYTES * self.room, 128)
        return first, slots, bits, bits + self.tile_bytes * self.room

    @property
    def end(self) -> int:
        """Of the whole buffer, in bytes."""
        return self._places[-1]

    @property
    def params(self) -> tuple[tuple[str, int], ...]:
        places = dict(zip(("first", "slots", "at"), self._places, strict=False))
        return tuple((f"tile_bits_{name}", value) for name, value in (places | {"room": self.room}).items())

    def launch(self, problem: AttentionProblem, config: KernelConfig, words: Launch, num_sms: int) -> Launch:
        """The launch that asks, behind ``words`` and before a kernel of ``config``."""
        rows, columns = self._sides
        assert problem.modifier is not None
        text = cuda_source(problem.modifier, problem.trained, orders_gradients(problem))
        asking = replace(
            words.config, kernel="tile_bits", num_warps=4, block_m=rows, block_n=columns,
            features=replace(words.config.features, modifier=text),
        )  # fmt: skip
        grid = min(self.room * ceil_div(rows, 64), BIT_BLOCKS * num_sms)
        return Launch(config=asking, grid=grid, block=asking.num_threads, smem_bytes=0, params=words.params)


def bits_bytes(rows: int, columns: int) -> int:
    """Of a tile of accumulators of 8 columns and 16 rows: a thread's word has eight of them, and it reads 1, 2 or 4.

    Behind them are 16 bytes, a word for each 64 rows.
    """
    words = ceil_div(columns, 64)
    return 2 * rows * 4 * (4 if words == 3 else words) + 16


def _rounded(nbytes: int, multiple: int) -> int:
    return ceil_div(nbytes, multiple) * multiple


_EXACT: Final = frozenset(
    ("number", "param", "load", "neg", "abs", "sign", "minimum", "maximum", "where", "floor", "ceil", "round", "trunc")
)
"""Operations with a float32 result that is not rounded. What is, another kernel may round otherwise: it may fuse a
product and a sum."""


def is_same_everywhere(mask: Node) -> bool:
    """Whether any kernel that computes a condition decides the same: nothing in it is rounded."""
    return all(x.op != "call" and (x.kind != "float" or x.op in _EXACT) for x in walk([mask]))


def may_have_bits(problem: AttentionProblem) -> bool:
    """Whether a launch can ask the mask_mod for all heads that share it; beside a byte mask words promise nothing.

    Which tiles have no room differs from run to run, and must not change the result.
    """
    if not of_ranges(problem) or problem.mask is not None or problem.varlen:
        return False
    assert problem.modifier is not None
    assert problem.modifier.mask is not None
    batch, heads, _ = _forms(problem)
    scores = batch * heads * _rounded(problem.seqlen_q, 256) * _rounded(problem.seqlen_k, 256)
    has_room = 2 * scores // 8 <= MAX_BIT_BYTES  # 80 columns take the two words of 128
    return scores < 2**40 and (has_room or is_same_everywhere(problem.modifier.mask))


def bits_pay(problem: AttentionProblem, block_n: int) -> bool:
    """Whether it is worth a launch: enough heads share the mask, and words pay."""
    if not KEEPS_BITS or not may_have_bits(problem) or not pays(problem, block_n):
        return False
    batch, heads, _ = _forms(problem)
    return problem.batch * problem.num_heads >= MIN_SHARERS * batch * heads


def with_words(config: _Config) -> _Config:
    """``config``, walking words."""
    return replace(config, features=replace(config.features, tile_words=True))


def plan_launch(
    problem: AttentionProblem, words: TileWords, config: KernelConfig, offset: int = 0, bits: TileBits | None = None
) -> Launch:
    """The launch that writes ``words``, before a kernel of ``config``: one kernel for a pass, whatever the tiles.

    With ``bits`` it gives undecided tiles their slots.
    """
    ranges, features = of_ranges(problem), Features(mask=True, tile_words=True)
    if ranges and problem.modifier is not None:
        text = tile_source(problem.modifier, problem.trained, orders_gradients(problem))
        features = Features(mask=problem.mask is not None, tile_words=True, modifier=text)
    fields: dict[str, Any] = {
        "kernel": "tile_ranges" if ranges else "tile_plan", "arch": config.arch, "dtype": "float16", "head_dim": 8,
        "head_dim_v": 8, "block_m": 16, "block_n": 16, "num_warps": _WARPS, "features": features,
        "tile_bits": bits is not None,
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
            *(bits.params if bits else ()),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWords:
    """The words of a dk/dv kernel: what finds them, and what is known of where they lie."""

    launches: tuple[Launch, ...]
    params: tuple[tuple[str, int], ...]
    """Of words and of the order of key tiles: for the kernel, and for what comes before it and makes that order."""
    bits_params: tuple[tuple[str, int], ...]
    """Of the bits of undecided tiles, which the kernel alone reads."""
    workspace: Workspace
    order: LineOrder | None


def backward_words(
    problem: AttentionProblem, config: BackwardConfig | Any, *, ordered: bool = False, by_work: bool = False,
    num_sms: int = 0,
) -> BackwardWords:  # fmt: skip
    """The words of a dk/dv kernel of ``config``.

    ``ordered``: also by query tile, which the deterministic pass of the Hopper family counts with. ``by_work``: with
    room for the order of key tiles, where it pays.
    """
    words = words_of(problem, config.block_m, config.block_n, transposed=True)
    offset = COUNTER_BYTES if config.tile_bits else 0
    nbytes = offset + words.nbytes
    by_query = words_of(problem, config.block_m, config.block_n) if ordered else None
    bits = TileBits(words=words, behind=nbytes + (by_query.nbytes if by_query else 0)) if config.tile_bits else None
    launches = [plan_launch(problem, words, config, offset, bits)]
    params = words.params(offset)
    if by_query:
        launches.append(plan_launch(problem, by_query, config, nbytes))
        params += by_query.params(nbytes, "order")
        nbytes += by_query.nbytes
    if bits:
        launches.append(bits.launch(problem, config, launches[0], num_sms))
        nbytes = bits.end
    order = line_order_of(words, nbytes) if by_work else None
    if order:
        params += order.params
        nbytes = order.end
    workspace = Workspace(field="counters", nbytes=nbytes)
    if bits:
        workspace = replace(workspace, zeroed=True, zeroed_bytes=COUNTER_BYTES)
    return BackwardWords(
        launches=tuple(launches), params=params, bits_params=bits.params if bits else (), workspace=workspace,
        order=order,
    )  # fmt: skip
