"""What is compiled: every compile-time value of a kernel and nothing else.

A config is frozen and hashable. Changing any field changes the generated entry source, hence the cache key
(a test checks every field). Nothing here imports CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from ..base.dtypes import DTYPES

GIVEN: Final[dict[str, Any]] = {"given": True}
"""Metadata of a field that follows from the problem and the target, or is part of every label: it does not tell two
plans of one problem apart (`heuristics.spec.label`). All other fields are choices."""
PORTABLE_CLUSTER: Final = 8
"""Thread blocks of a cluster that every GPU with clusters has room for. More must be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The switches that every attention kernel shares; each one is a policy in ``cuda_src/nvrtc_attn/collective``."""

    band: bool = False
    """Keep only keys inside ``[i + off - window_left, i + off + window_right]`` (causal is ``window_right = 0``)."""
    bias: str | None = None
    """Element type of the additive bias, ``None`` for no bias."""
    mask: bool = False
    """Read a byte mask, non-zero = keep."""
    tile_words: bool = False
    """Walk the tiles that words in the workspace keep (``collective/tile_words.cuh``), beside a byte mask."""
    softcap: bool = False
    prescale: bool = False
    """Multiply scores by the softmax scale before the row maximum: needed when the scale is not positive."""
    dropout: bool = False
    varlen: bool = False
    """Sequences are packed and delimited by ``cu_seqlens_q`` / ``cu_seqlens_k``."""
    seqused_k: bool = False
    part: bool = False
    """Dropout counts by the sizes of a larger attention, which the call is a part of."""
    device_starts: bool = False
    """Where the rows and keys of a part begin is read on the device, for position masks and, with ``part``, dropout."""
    float32_q: bool = False
    """Results like q (out, dq) are float32, whatever q is: those of a part are added to others."""
    float32_k: bool = False
    """And those like k and v (dk, dv)."""
    modifier: str = ""
    """C++ text of the user's function of a score and its position, of `modifiers.cuda`; empty for none."""
    max_logit: bool = False
    """Write the largest score of each head (``collective/max_logit.cuh``): the forward kernels."""
    optional: str = ""
    """Names of further optional operands that are there, of the table in ``front/operands.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Fields common to all kernels. ``kernel`` names the header in ``cuda_src/nvrtc_attn/kernel`` and its function."""

    kernel: str = field(metadata=GIVEN)
    arch: str = field(metadata=GIVEN)
    """Compile target, for example ``sm_80`` or ``sm_90a``."""
    dtype: str = field(metadata=GIVEN)
    """Element type of q, k, v, out."""
    head_dim: int = field(metadata=GIVEN)
    """Tile width of q and k: a multiple of 8, at least the problem's head dim; columns beyond it read as zero."""
    head_dim_v: int = field(metadata=GIVEN)
    block_m: int = field(metadata=GIVEN)
    block_n: int = field(metadata=GIVEN)
    num_warps: int
    num_stages: int = 1
    min_blocks_per_sm: int = 1
    aligned: bool = field(default=True, metadata=GIVEN)
    """Rows of q, k, v, (out, dout, and the gradients) can be moved in 16-byte vectors."""
    legacy_mma: bool = field(default=False, metadata=GIVEN)
    """Compute capability 7.5 instruction set: no ``cp.async``, m16n8k8 matrix multiplies, float16 and float32 only."""
    features: Features = field(default=Features(), metadata=GIVEN)
    tile_bits: bool = False
    """A launch of its own asks a mask_mod about undecided tiles, once for all heads (``collective/tile_bits.cuh``)."""

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig(KernelConfig):
    """The forward kernel and, with ``split``, the kernel that writes partial results for ``combine``."""

    split: bool = field(default=False, metadata=GIVEN)
    cluster: int = 1
    """More than one: the blocks of this many splits are a cluster and add their results up without ``combine``."""
    packed_heads: bool = field(default=False, metadata=GIVEN)
    """The query heads of a key head are rows of one tile, so that they share a pass over K and V."""
    preload_q: bool = False
    """Keep the query tile in registers for the whole key loop."""
    warps_n: int = 1
    """Warps along the keys of a tile: more than one when there are few query rows (decode)."""
    warps_d: int = 1
    """Warps along ``head_dim_v``: more than one when the output of a row block does not fit in registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperForwardConfig(KernelConfig):
    """The forward kernel on TMA and WGMMA: a loading warp-group and one consumer warp-group per 64 query rows."""

    packed_heads: bool = False
    """The query heads of a key head are rows of one tile."""
    num_stages_q: int = 1
    """Two: the queries of the next tile load while this one is worked on."""
    ping_pong: bool = True
    """Consumers take turns at issuing matrix products, so that one computes its softmax under the other's products."""
    half_tile: bool = False
    """A second shape of the first product of a query tile, for warp-groups that see at most half of the key tile."""
    lazy_max: bool = False
    """After the first key tile, keep the reference of the exponentials until a sum gets out of range."""
    tickets: bool = field(default=False, metadata=GIVEN)
    """Blocks take the next tile that nobody has, of a counter: something else may use multiprocessors beside them."""
    score_tiles: bool = False
    """The copy engine brings bias and mask as tiles; otherwise every thread reads its own elements."""
    num_stages_scores: int = 2
    split: bool = field(default=False, metadata=GIVEN)
    """Partial results of shares of the keys go to a workspace, for ``combine``."""
    begins_products: bool = False
    """Products begin with what a score_mod adds, which warps of the loading group compute for each diagonal."""
    keep_words: bool = False
    """A launch of its own makes dropout's decisions ahead of the kernel (``kernel/dropout_words.cuh``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig(KernelConfig):
    """Any kernel of the backward pass; ``kernel`` says which.

    ``warps_*`` is the number of warps along the first dimension of each product, ``dq`` is ``"atomic"`` (accumulate
    into a float32 workspace) or ``"none"`` (also with ``stores_dq``), ``dbias`` is ``"store"`` (one write per score) or
    ``"none"``.
    """

    warps_m_sdp: int = 4
    warps_n_dkv: int = 4
    warps_m_dq: int = 4
    dq: str = field(default="atomic", metadata=GIVEN)
    dbias: str = field(default="none", metadata=GIVEN)
    dbias_dtype: str | None = field(default=None, metadata=GIVEN)
    num_stages_dout: int = 1
    split: bool = field(default=False, metadata=GIVEN)
    """Several thread blocks share the query loop of one key tile and add into a float32 workspace."""
    dim_slices: int = 1
    """Thread blocks that share one key tile, each with a slice of the gradients' head dim; scores are recomputed."""
    v_in_smem: bool = True
    """Otherwise the value tile is read from global memory: where head dim 512 would not fit."""
    v_in_registers: bool = False
    """Each warp keeps the values of its keys for the whole query loop, where shared memory would hold fewer warps."""
    skip_hidden: bool = False
    """Warps leave out their part of a tile above the diagonal, at some cost for every other tile."""
    stores_dq: bool = False
    """One tile holds all keys: dq is stored when it is complete, instead of added to a workspace and converted."""
    fused: bool = False
    """The kernel computes delta itself, instead of a kernel before it."""
    transposed_blocks: bool = False
    """The float32 workspace of dq has blocks of 16 columns and 8 rows, instead of 16 rows and 8 columns."""
    smem_bytes: int = field(default=0, metadata=GIVEN)
    """Dynamic shared memory of the dk/dv kernel, which checks that its own layout has the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperBackwardConfig(KernelConfig):
    """The backward kernel on TMA and WGMMA, a loading warp-group and two consumers, and the kernel that prepares it."""

    log2_lse: bool = field(default=True, metadata=GIVEN)
    """The workspace holds LSE in base 2, for scores whose scale is folded in the exponent."""
    one_key_tile: bool = field(default=False, metadata=GIVEN)
    """One tile holds all keys: dq is stored when it is complete, instead of added to a workspace and converted."""
    dbias: str = field(default="none", metadata=GIVEN)
    dbias_dtype: str | None = field(default=None, metadata=GIVEN)
    bias_tiles: bool = field(default=False, metadata=GIVEN)
    """The copy engine brings the bias and takes a full-shape dbias away; otherwise every thread moves its own."""
    keep_words: bool = field(default=False, metadata=GIVEN)
    """Warps of the loading group make dropout's decisions ahead of the consumers."""
    key_mask: bool = field(default=False, metadata=GIVEN)
    """The mask is the same for all queries of a key head: threads know of their two keys whether they are hidden."""
    ordered: bool = field(default=False, metadata=GIVEN)
    """Key tiles add to dq in a fixed order: the deterministic pass."""
    fused: bool = False
    """Idle warps of the kernel do what ``backward_hopper_prepare`` else does before it."""
    split: bool = False
    """Thread blocks share the query heads of a group, and add their dk and dv up in a float32 workspace."""
    parts: bool = False
    """Some key tiles are worked on in parts, each with some of the query tiles of its heads, which are added up."""
    own_code: bool = False
    """Each consumer has code of its own, and no more columns of dq than there are."""
    keys_in_registers: bool = False
    """K of a key tile stays in registers for S, instead of being read from shared memory at every query tile."""
    values_in_registers: bool = False
    """V of a key tile stays in registers, instead of being read from shared memory at every query tile."""
    descending: bool = False
    """The query tiles of a key tile come from the last one down."""
    begins_products: bool = False
    """Products begin with what a score_mod adds, which warps of the loading group compute for each diagonal."""
    num_stages_dout: int = 2
    """Slots of dout; ``num_stages`` are those of q."""
    key_slots: int = 1
    """Slots of k. With two, dk and dv leave through shared memory, by the idle warps of the loading group."""
    cluster: int = field(default=1, metadata=GIVEN)
    """Thread blocks that share a key tile and run at the same time."""
    smem_bytes: int = field(default=0, metadata=GIVEN)
    """Dynamic shared memory, which the kernel checks against its own layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HopperDbiasConfig(KernelConfig):
    """The Hopper kernel that sums the gradient of a bias over the batch entries or heads that share it."""

    split: bool = field(default=False, metadata=GIVEN)
    """Write float32 partial sums, one per share of the pairs of batch entry and head, for ``dbias_reduce``."""
    dbias_dtype: str = field(default="bfloat16", metadata=GIVEN)
    smem_bytes: int = field(default=0, metadata=GIVEN)
    """Dynamic shared memory, which the kernel checks against its own layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DqConfig(KernelConfig):
    """The dq kernel without atomics: ``warps_m`` row groups of ``num_warps / warps_m`` warps which share dq's row."""

    warps_m: int
    chunk_n: int
    """Key columns whose scores a warp holds at once; divides ``block_n``. Read when one warp holds a whole dq row."""
    preload: bool = False
    """Keep the q and dout tiles in registers for the whole key loop."""
    streamed: bool = False
    """Bring every operand in slices of ``slice_d`` columns: for head dims whose tiles do not fit shared memory."""
    slice_d: int = 64
    vector_scores: bool = False
    """Bias and mask can be read eight columns at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DbiasConfig(KernelConfig):
    """The dbias kernel (``warps_m`` by ``num_warps / warps_m`` warps), and the sum of its partial results."""

    warps_m: int = 1
    slice_d: int = 64
    """Columns of the head dim that one shared-memory slot holds."""
    chunk_n: int = 32
    """Key columns whose scores a warp holds at once, when one slot holds the whole head dim."""
    vector_scores: bool = False
    """Bias and mask can be read eight columns at a time."""
    reduce_m: bool = False
    """The bias has one row: sum over the queries."""
    reduce_n: bool = False
    split: bool = field(default=False, metadata=GIVEN)
    """Write float32 partial sums, one per share of the reduced tiles, for ``dbias_reduce``."""
    dbias_dtype: str = field(default="float32", metadata=GIVEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkConfig(KernelConfig):
    """The kernel that sums the gradient of a sink over the rows of its head, after those that prepare the rows."""

    padded: bool = field(default=False, metadata=GIVEN)
    """Rows of the workspaces are in whole tiles of ``block_m``, in each of which one sequence begins at most."""
    log2_lse: bool = field(default=False, metadata=GIVEN)
    """The workspace holds LSE in base 2."""
