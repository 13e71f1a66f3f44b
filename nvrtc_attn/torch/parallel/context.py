"""Attention over a sequence that is sharded over ranks: the class, what it is made from, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from ...base import env
from ...base.errors import UnsupportedError, shown
from ...base.version import __version__
from ...front.call import CallOptions, plain_options
from ...front.chunks import Chunks, chunks_of, length
from ...front.documents import shared_documents
from ...front.part import Part
from ...front.problem import Causal, WindowSize
from ...front.validation import Violations, check_flag, check_integer
from ..autocast import cast_for_autocast
from ..derivatives import refuse_tangents
from ..tensors import is_transformed, resolved
from .autograd import Attention
from .call import begin_call, modifier_of
from .checks import NO_TRANSFORMATION, refuse_others
from .choice import make_strategy
from .documents import as_tensor, lengths_of
from .exchange import same_everywhere
from .operator_call import register
from .operators import attention as attention_in_graph
from .operators import context_unshard
from .strategies import Strategy

_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_STRATEGIES: Final = ("auto", "all_gather", "ulysses", "ring")
_PAIRS: Final = (("ulysses", "ring"), ("ulysses", "all_gather"))


class ContextParallel:
    """Attention whose sequence is sharded over the ranks of a group.

    Parameters
    ----------
    group
        A process group, a `DeviceMesh` with one dim, or None for all ranks; for a pair of strategies a mesh with two
        dims, of which the last is that of ``"ulysses"``.
    seqlen
        Tokens of the whole sequence, of queries and keys.
    seqlen_k
        Keys of the whole, where they are not as many as the queries.
    strategy
        ``"all_gather"``: each rank fetches the keys that its queries see. ``"ulysses"``: ranks swap tokens for heads,
        whose number they must divide (key heads: one number must divide the other). ``"ring"``: keys go around, a
        rank holds those of two ranks at a time. ``("ulysses", "ring")`` and ``("ulysses", "all_gather")``: the first
        inside, over the last dim of the mesh. ``"auto"``: ulysses where the ranks divide the key heads and less is
        sent so (or sequences are packed), otherwise all_gather.
    layout
        Which tokens a rank has: ``"zigzag"`` (two pieces, equal work under a causal mask), ``"contiguous"``, or for
        each rank its intervals ``[(start, stop), ...]``, ascending. The sequence need not divide. ``"documents"``, with
        ``cu_seqlens``: as many tokens on all ranks, to within one, and near equal work of causal attention; the longest
        documents are cut as zigzag cuts a sequence, as few as suffices, the other tokens once for each rank.
    cu_seqlens
        Where documents begin that are packed on the token dim, and where the last one ends: for
        ``layout="documents"``. On the CPU, a list or an array; read once if it is on a GPU.
    pipeline
        Groups of a rank's key heads: one is computed while the next is on its way. Default on a GPU: as many, up to 4,
        as leave each group 8 key tiles of 128 for each of 132 multiprocessors; with ``"all_gather"`` one, up to 8 heads
        of 65,536 keys. Of ``("ulysses", "all_gather")`` they are all_gather's, of ``("ulysses", "ring")`` ulysses', by
        default one; ``"ring"`` has none.
    check
        Which calls of `attention` compare between all ranks what they were given: the ``"first"`` one, ``"always"``
        (those of `unshard`, too), ``"never"``. Comparing waits for the GPU. ``NVRTC_ATTN_DEBUG=1``, read here, means
        always.
    sm_margin
        Multiprocessors that kernels beside which something is sent leave to communication. Default: 8 with one group of
        ``"all_gather"``, otherwise none: kernels hand out their tiles as multiprocessors ask for them, and do not wait
        for those that NCCL has.
    keep
        Whether ``"all_gather"`` keeps the keys that the forward pass fetched for the backward pass, which fetches them
        again otherwise. Default: where they take at most half as much memory as what is kept anyway.
    lanes
        Streams for the kernels of ``"all_gather"`` that do not depend on one another, in the forward pass, and in the
        backward pass those of a rank's pieces: the next begins on multiprocessors that the one before leaves idle.
        Default: 2 from 32,768 tokens a rank on.

    plan_as
        Whether kernels and tiles are those of the whole sequence on one GPU: see `nvrtc_attn.Part`. out, lse, and dq
        where the call is deterministic, are then bit for bit those of one GPU (compute capability 9.0) with
        ``"ulysses"`` where the ranks divide the key heads, and with ``"all_gather"`` without a left window bound where
        every piece begins at a multiple of 128. Kernels may be slower.

    Raises
    ------
    ValueError
        On all ranks, when sequence lengths, layouts, strategies, ``check`` or versions differ between them; it names
        the ranks.

    Notes
    -----
    Making one is collective, and so are `attention`, its backward pass and `unshard`: all ranks of the group call them
    in the same order. A rank that is gone lets the others fail after the timeout of the process group
    (``init_process_group(timeout=...)``): gloo raises, NCCL's watchdog ends their processes, unless
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING=0``, with which they wait for ever.

    Programs of torch.compile have `attention`, `shard` and `unshard` in their graph. A program belongs to the
    ContextParallel that it was traced with: make it once, outside.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        seqlen: int,
        seqlen_k: int | None = None,
        strategy: str | tuple[str, str] = "auto",
        layout: Any = "zigzag",
        pipeline: int | None = None,
        check: str = "first",
        sm_margin: int | None = None,
        keep: bool | None = None,
        lanes: int | None = None,
        plan_as: bool = False,
        cu_seqlens: Any = None,
    ) -> None:
        found = Violations()
        tokens = check_integer(found, "seqlen", seqlen)
        if tokens is None and not found.found:
            found.kind("seqlen: got None. It is an integer, the tokens of the whole sequence.")
        self.seqlen = tokens or 0
        keys = check_integer(found, "seqlen_k", seqlen_k)
        self.seqlen_k = self.seqlen if keys is None else keys
        if self.seqlen < 0 or self.seqlen_k < 0:
            found.value(f"seqlen: got {shown(seqlen)}, seqlen_k {shown(seqlen_k)}. They are at least 0.")
        pair = strategy if isinstance(strategy, tuple) else (strategy,)
        if not ((len(pair) == 1 and pair[0] in _STRATEGIES) or pair in _PAIRS):
            found.value(
                f"strategy: got {shown(strategy)}. It is one of {_STRATEGIES}, ('ulysses', 'ring') or "
                "('ulysses', 'all_gather')."
            )
        if check not in ("first", "always", "never"):
            found.value(f"check: got {shown(check)}. It is 'first', 'always' or 'never'.")
        if (check_integer(found, "sm_margin", sm_margin) or 0) < 0:
            found.value(f"sm_margin: got {shown(sm_margin)}. It is at least 0.")
        if pipeline is not None and (check_integer(found, "pipeline", pipeline) or 0) < 1:
            found.value(f"pipeline: got {shown(pipeline)}. It is at least 1.")
        if keep is not None:
            check_flag(found, "keep", keep)
        check_flag(found, "plan_as", plan_as)
        if lanes is not None and (check_integer(found, "lanes", lanes) or 0) < 1:
            found.value(f"lanes: got {shown(lanes)}. It is at least 1.")
        self._groups = _groups_of(found, group, len(pair))
        found.stop()
        debug = env.debug()
        self._check, self._calls = "always" if debug else check, 0
        self.strategy, self._pipeline = strategy, pipeline
        self._sm_margin, self._lanes, self._keep = sm_margin, lanes, keep
        self._plan_as = plan_as
        self._strategies: dict[tuple[int, int, bool, bool], Strategy] = {}  # their routes are worked out once
        self._checked: dict[Any, bool] = {}  # calls whose tensors were looked at
        sizes = [dist.get_world_size(x) for x in self._groups]
        ranks = [dist.get_rank(x) for x in self._groups]
        self.size = sizes[0] * (sizes[1] if len(sizes) == 2 else 1)
        self.rank = ranks[0] if len(sizes) == 1 else ranks[0] * sizes[1] + ranks[1]
        fault = ""
        self.chunks_q: tuple[Chunks, ...] = ()
        self.chunks_k: tuple[Chunks, ...] = ()
        try:
            if (isinstance(layout, str) and layout == "documents") != (cu_seqlens is not None):
                raise ValueError("layout: 'documents' is cut by cu_seqlens. Pass both, or neither.")
            if cu_seqlens is not None:
                starts = lengths_of("cu_seqlens", cu_seqlens, self.seqlen)
                self.chunks_q = shared_documents(starts, self.seqlen, self.size)
            else:
                self.chunks_q = chunks_of(layout, self.seqlen, self.size)
            self.chunks_k = self.chunks_q
            if self.seqlen_k != self.seqlen:
                if layout not in ("zigzag", "contiguous"):
                    raise ValueError(
                        "layout: intervals and documents are for queries and keys of one length. Take 'zigzag' or "
                        "'contiguous'."
                    )
                self.chunks_k = chunks_of(layout, self.seqlen_k, self.size)
        except (TypeError, ValueError) as error:
            fault = str(error)
        # The one collective: what must be the same is compared before anything depends on it, faults are everyone's.
        same_everywhere(
            self._groups,
            "the making of a ContextParallel",
            {
                "version": __version__, "seqlen": self.seqlen, "seqlen_k": self.seqlen_k, "strategy": str(strategy),
                "layout": f"{layout if isinstance(layout, str) and cu_seqlens is None else self.chunks_q}",
                "pipeline": pipeline, "keep": keep, "plan_as": plan_as, "check": check, "NVRTC_ATTN_DEBUG": debug,
                "fault": fault,
            },
        )  # fmt: skip
        if fault:
            raise ValueError(fault)
        self._name = register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself: copies of a model (of weights that are averaged, say) share the group, which cannot be copied."""
        return self

    # -------------------------------------------------------------------------------------------------- tensors

    @property
    def local_seqlen(self) -> int:
        """Queries of this rank."""
        return length(self.chunks_q[self.rank])

    @property
    def local_seqlen_k(self) -> int:
        """Keys of this rank."""
        return length(self.chunks_k[self.rank])

    def positions(self, device: Any = None) -> torch.Tensor:
        """Position in the whole sequence of each of this rank's queries, int64: for rotary embeddings and the like."""
        return torch.cat(
            [torch.arange(a, b, device=device) for a, b in self.chunks_q[self.rank]] or [torch.arange(0, device=device)]
        )

    def shard(self, x: torch.Tensor, dim: int = 1, *, keys: bool = False) -> torch.Tensor:
        """Take this rank's tokens of a tensor that has the whole sequence on ``dim``. No communication.

        Its gradient is zero outside: the sum over all ranks is that of the whole tensor.
        """
        refuse_others(x, "x")
        chunks, whole = (self.chunks_k, self.seqlen_k) if keys else (self.chunks_q, self.seqlen)
        if x.shape[dim] != whole:
            raise ValueError(f"x: shape {tuple(x.shape)}, whose dim {dim} must be {whole}, the whole sequence.")
        mine = [x.narrow(dim, a, b - a) for a, b in chunks[self.rank]]
        return torch.cat(mine or [x.narrow(dim, 0, 0)], dim)

    def unshard(self, x: torch.Tensor, dim: int = 1, *, keys: bool = False) -> torch.Tensor:
        """The whole tensor of the ranks' tokens, on every rank. Its gradient is added up over the ranks."""
        refuse_others(x, "x")
        if not _traced_by_dynamo():
            if is_transformed():
                raise UnsupportedError(NO_TRANSFORMATION)
            refuse_tangents(x)
        mine = length((self.chunks_k if keys else self.chunks_q)[self.rank])
        if x.shape[dim] != mine:
            raise ValueError(
                f"x: shape {tuple(x.shape)}, whose dim {dim} must be {mine}, the tokens of rank {self.rank}."
            )
        whole = self.seqlen_k if keys else self.seqlen
        found: torch.Tensor
        found, _ = context_unshard(x, self._name, whole, dim % x.dim(), keys, None)
        return found

    # ------------------------------------------------------------------------------------------------- attention

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        causal: Causal = False,
        window_size: WindowSize = (None, None),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        rng: Any = None,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        seqused_k: torch.Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        part: Part | None = None,
        sink: torch.Tensor | None = None,
        score_mod: Any = None,
        mask_mod: Any = None,
        aux: Mapping[str, Any] | None = None,
    ) -> Any:
        """`nvrtc_attn.torch.attention` of this rank's tokens in the whole sequence, with gradients.

        Parameters
        ----------
        q : ``[B, tokens, H, K]``
        k : ``[B, tokens, Hkv, K]``
        v : ``[B, tokens, Hkv, Kv]``
            The tokens of this rank, see `shard` and `positions`.
        bias, mask : ``[1|B, 1|H, 1|tokens, 1|Mk]``, optional
            This rank's rows (or one), all keys of the whole. The gradient of a bias with one row is this rank's share:
            add it up over the ranks, as the gradients of all parameters that ranks have in common.
        sink : ``[H]``, optional
            One more logit in every row of a head, on every rank. Its gradient is this rank's share likewise.
        score_mod, mask_mod, aux
            As of `nvrtc_attn.attention`, on every rank: the indices that they get are those of the whole, and so are
            the arrays that they captured. Floating-point ones have gradients, which are this rank's share likewise.
        rng
            Default: a seed that the first rank draws from torch's generator, for all of them. Otherwise the same on all
            ranks. The mask is `nvrtc_attn.dropout_keep_mask` of the whole.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
            Of the whole, on every rank: sequences packed on the token dim, of which a rank has any tokens. cu_seqlens
            may be a list or an array. The strategies but ``"ulysses"``, which has all tokens of a head on one rank,
            take those of self-attention (cu_seqlens_q is cu_seqlens_k) without seqused_k, and work with lengths on the
            host: pass those on the CPU. A tensor on the GPU is read, which waits for it, once for as long as torch
            knows that nobody wrote to it. Without cu_seqlens, seqused_k has the keys of the whole that each batch entry
            uses, and stays on the device. A causal mask or window that ends with them sees no less than all keys:
            ``"all_gather"`` fetches those, and ``"ring"`` refuses it.
        part
            Batch and heads of a still larger attention: with data and tensor parallelism beside, the dropout mask is
            then that of all.

        The others are those of `nvrtc_attn.torch.attention`.

        Returns
        -------
        out, or (out, lse)
            Of this rank's rows.

        Raises
        ------
        ValueError, TypeError
            On this rank, before any communication, for what is wrong with its tensors; on all ranks, naming them, for
            what differs between them (see ``check``).
        UnsupportedError
            On all ranks, before any communication, for what their strategy does not compute.
        """
        if _traced_by_dynamo() or torch._C._len_torch_dispatch_stack():
            return attention_in_graph(
                self._name, q, k, v, bias, mask, sink, causal, window_size, softmax_scale, softcap, dropout_p, rng,
                cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part,
                score_mod, mask_mod, aux,
            )  # fmt: skip
        if is_transformed():
            raise UnsupportedError(NO_TRANSFORMATION)
        for name, x in (("q", q), ("k", k), ("v", v)):
            refuse_others(x, name)
        for name, x in (("bias", bias), ("mask", mask), ("sink", sink), ("seqused_k", seqused_k)):
            if x is not None:
                refuse_others(x, name)
        q, k, v, bias, mask, sink, cu_seqlens_q, cu_seqlens_k, seqused_k = map(
            resolved, (*cast_for_autocast(q, k, v, bias), mask, sink, cu_seqlens_q, cu_seqlens_k, seqused_k)
        )
        modifier, captures = modifier_of(score_mod, mask_mod, aux, q)
        grad = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q, k, v, bias, sink, *captures)
        )
        if deterministic is None:
            deterministic = grad and torch.are_deterministic_algorithms_enabled()
        options = plain_options(
            CallOptions(
                causal=causal, window_size=window_size, softmax_scale=softmax_scale, softcap=softcap,
                dropout_p=dropout_p, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_lse=True,
                deterministic=deterministic,
                dbias=grad and bias is not None and bias.requires_grad,
                dsink=grad and sink is not None and sink.requires_grad,
            )
        )  # fmt: skip
        same = cu_seqlens_k is cu_seqlens_q
        cu_seqlens_q = as_tensor("cu_seqlens_q", cu_seqlens_q)
        cu_seqlens_k = cu_seqlens_q if same else as_tensor("cu_seqlens_k", cu_seqlens_k)
        given = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "sink": sink}
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_k
        strategy, whole = begin_call(self, given, lengths, options, rng, part, modifier, grad, return_lse)
        tie = None
        if grad and not strategy.needs_own:
            tie = torch.cat([x[:0].reshape(-1) for x in (q, k, v)])
        out, lse = Attention.apply(strategy, whole, q, k, v, bias, mask, sink, tie, *captures)
        return (out, lse) if return_lse else out

    def _strategy(self, heads: int, heads_kv: int, on_gpu: bool, packed: bool) -> Strategy:
        """Who computes what, of tensors with so many heads."""
        kind = heads, heads_kv, on_gpu, packed
        strategy = self._strategies.get(kind)
        if strategy is None:
            strategy = self._strategies[kind] = make_strategy(self, *kind)
        return strategy


def _groups_of(found: Violations, group: Any, dims: int) -> list[Any]:
    """The process groups, one for each dim of a mesh, the outermost first."""
    if not (dist.is_available() and dist.is_initialized()):
        found.value("group: torch.distributed is not initialised. Call torch.distributed.init_process_group first.")
        return []
    if hasattr(group, "get_group"):
        if group.ndim != dims:
            found.value(f"group: a mesh with {group.ndim} dims, but strategy needs {dims}.")
            return []
        if group.get_coordinate() is None:
            found.value(f"group: rank {dist.get_rank()} is none of the mesh's. Make a ContextParallel on those alone.")
            return []
        return [group.get_group(i) for i in range(dims)]
    if dims != 1:
        found.value("group: a pair of strategies needs a DeviceMesh with two dims, the last one that of 'ulysses'.")
        return []
    if group is None:
        return [dist.group.WORLD]
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns there
        found.value(f"group: rank {dist.get_rank()} is none of its ranks. Make a ContextParallel on those alone.")
        return []
    if not isinstance(group, dist.ProcessGroup):
        found.kind(
            f"group: got {shown(group)} of type {type(group).__name__}. It is a process group, a DeviceMesh or None."
        )
        return []
    return [group]
