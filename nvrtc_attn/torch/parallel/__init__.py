"""Attention over a sequence that is sharded over ranks, on `torch.distributed`: `ContextParallel`.

The answer is that of one GPU: every mask, window, bias and dropout decision is the whole's, however many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from ...base import env
from ...base.errors import UnsupportedError, shown
from ...base.tables import remember
from ...base.version import __version__
from ...front.call import CallOptions, describe_shapes, plain_options
from ...front.chunks import Chunks, band_of, chunks_of, length, places, together
from ...front.documents import Packing, shared_documents
from ...front.modified import banded_options
from ...front.part import Part
from ...front.philox import NO_RNG, RngState
from ...front.problem import Causal, WindowSize
from ...front.tensors import Device, view
from ...front.validation import Violations, check_flag, check_integer, check_lengths, check_window
from ...modifiers.modifier import Modifier
from ...modifiers.trace import no_functions, traced
from ..ops import cast_for_autocast, is_dtensor, is_transformed, once_only
from ..random import checked_rng, rng_values
from ..tensors import captured_on, resolved, signature
from . import operators
from .documents import as_tensor, lengths_of, packing_of
from .exchange import exchange, same_everywhere
from .local import Whole, merge_partials, whole_with
from .strategies import AllGather, Inputs, Ring, Saved, Strategy, Ulysses, gradients_of, has_all_tokens, passes_keys

__all__ = ["ContextParallel", "merge_partials"]

_traced_by_dynamo: Final = torch.compiler.is_dynamo_compiling
_STRATEGIES: Final = ("auto", "all_gather", "ulysses", "ring")
_PAIRS: Final = (("ulysses", "ring"), ("ulysses", "all_gather"))
_MOST_GROUPS: Final = 4
_KEY_TILE: Final = 128
_MULTIPROCESSORS: Final = 132
_MARGIN: Final = 8
"""With one group of all_gather: 7.03 ms instead of 7.16 at 16k tokens on two H200, 32/8 heads. With two groups of
ulysses it takes 2 % longer."""
_TOKENS_OF_LANES: Final = 1 << 15
"""Tokens a rank: two lanes take 104.4 ms instead of 107.0 at 64k tokens on two H200, 7.41 instead of 7.03 at 16k."""
_KEYS_OF_GROUP: Final = 8 << 16
"""Of all heads, which all_gather fetches at once: 107.3 ms at 64k, 108.2 in three groups. Beyond, memory counts."""
_WAVES: Final = 8
"""Key tiles a multiprocessor that a group of heads keeps: with fewer, causal ones of unequal work leave multiprocessors
idle in the backward pass, and its kernel splits the queries of a key tile instead."""

_NO_TRANSFORMATION: Final = (
    "ContextParallel: transformations of torch.func (grad, vjp, vmap, jacrev and the like) and batches of gradients "
    "are not computed. Use backward() or torch.autograd.grad of one gradient. Nothing was sent."
)


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
        self._name = operators.register(self)

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
        _refuse_others(x, "x")
        chunks, whole = (self.chunks_k, self.seqlen_k) if keys else (self.chunks_q, self.seqlen)
        if x.shape[dim] != whole:
            raise ValueError(f"x: shape {tuple(x.shape)}, whose dim {dim} must be {whole}, the whole sequence.")
        mine = [x.narrow(dim, a, b - a) for a, b in chunks[self.rank]]
        return torch.cat(mine or [x.narrow(dim, 0, 0)], dim)

    def unshard(self, x: torch.Tensor, dim: int = 1, *, keys: bool = False) -> torch.Tensor:
        """The whole tensor of the ranks' tokens, on every rank. Its gradient is added up over the ranks."""
        _refuse_others(x, "x")
        mine = length((self.chunks_k if keys else self.chunks_q)[self.rank])
        if x.shape[dim] != mine:
            raise ValueError(
                f"x: shape {tuple(x.shape)}, whose dim {dim} must be {mine}, the tokens of rank {self.rank}."
            )
        whole = self.seqlen_k if keys else self.seqlen
        found: torch.Tensor
        found, _ = operators.context_unshard(x, self._name, whole, dim % x.dim(), keys, None)
        return found

    def _unsharded(self, x: torch.Tensor, dim: int, keys: bool) -> torch.Tensor:
        if self._check == "always":
            beside = tuple(_resized(x, dim, -1))
            same_everywhere(
                self._groups, "unshard", {"shape beside the tokens": beside, "dtype": str(x.dtype), "keys": keys}
            )
        chunks = self.chunks_k if keys else self.chunks_q
        parts, ranks = [x], [(self.rank,)]
        # Over the last dim of a mesh first: ranks are numbered along it.
        for group, level in reversed(list(zip(self._groups, range(len(self._groups)), strict=True))):
            count = dist.get_world_size(group)
            step = 1 if level == len(self._groups) - 1 else dist.get_world_size(self._groups[-1])
            first = ranks[0][0] - dist.get_rank(group) * step
            theirs = [tuple(first + i * step + j for j in range(len(ranks[0]))) for i in range(count)]
            received = [[x.new_empty(_resized(x, dim, length(chunks[r]))) for r in of_rank] for of_rank in theirs]
            exchange(group, [parts] * count, received).wait()
            parts, ranks = [y for of_rank in received for y in of_rank], [tuple(r for of in theirs for r in of)]
        whole = x.new_empty(_resized(x, dim, self.seqlen_k if keys else self.seqlen))
        for r, part in zip(ranks[0], parts, strict=True):
            for (a, b), at in zip(chunks[r], places(chunks[r], chunks[r]), strict=True):
                whole.narrow(dim, a, b - a).copy_(part.narrow(dim, at.start, b - a))
        return whole

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
            return operators.attention(
                self._name, q, k, v, bias, mask, sink, causal, window_size, softmax_scale, softcap, dropout_p, rng,
                cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, return_lse, deterministic, part,
                score_mod, mask_mod, aux,
            )  # fmt: skip
        if is_transformed():
            raise UnsupportedError(_NO_TRANSFORMATION)
        for name, x in (("q", q), ("k", k), ("v", v)):
            _refuse_others(x, name)
        for name, x in (("bias", bias), ("mask", mask), ("sink", sink), ("seqused_k", seqused_k)):
            if x is not None:
                _refuse_others(x, name)
        q, k, v, bias, mask, sink, cu_seqlens_q, cu_seqlens_k, seqused_k = map(
            resolved, (*cast_for_autocast(q, k, v, bias), mask, sink, cu_seqlens_q, cu_seqlens_k, seqused_k)
        )
        modifier, captures = _modifier_of(score_mod, mask_mod, aux, q)
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
        strategy, whole = self._begin(given, lengths, options, rng, part, modifier, grad, return_lse)
        out, lse = _Attention.apply(strategy, whole, q, k, v, bias, mask, sink, *captures)
        return (out, lse) if return_lse else out

    def _begin(
        self,
        given: dict[str, Any],
        lengths: tuple[Any, Any, Any],
        options: CallOptions,
        rng: Any,
        part: Part | None,
        modifier: Modifier | None,
        grad: bool,
        return_lse: bool,
    ) -> tuple[Strategy, Whole]:
        """Who computes what of a call, whose tensors and options are checked and compared between the ranks.

        Parameters
        ----------
        given
            q, k, v, bias, mask and sink.
        lengths
            cu_seqlens_q, cu_seqlens_k and seqused_k.
        """
        q, k = given["q"], given["k"]
        named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), lengths, strict=True))
        self._check_tensors(given, named, options, part, modifier)
        packed = lengths[0] is not None or lengths[1] is not None
        strategy = self._strategy(q.shape[2], k.shape[2], q.is_cuda, packed)
        packing = self._packing(strategy, lengths, options, k.shape[2])
        self._check_lengths(strategy, lengths, options)
        if self._asks():
            self._compare(given, named, options, part, grad, rng, modifier)
        self._calls += 1
        state = self._draw(q, rng) if options.dropout_p > 0 else NO_RNG
        whole = self._whole(strategy, lengths, packing, options, state, part, modifier, q.device)
        return strategy, whole._replace(return_lse=return_lse, backward_follows=grad)

    def _asks(self) -> bool:
        """Whether the next call of `attention` is compared between the ranks."""
        return self._check == "always" or (self._check == "first" and not self._calls)

    def _packing(
        self, strategy: Strategy, lengths: tuple[Any, Any, Any], options: CallOptions, heads_kv: int
    ) -> Packing | None:
        """The documents of a call whose tokens ranks share; None where there are none, or a rank has all tokens."""
        starts_q, starts_k, used = lengths
        if (starts_q is None and starts_k is None) or has_all_tokens(strategy):
            return None
        if self.chunks_q != self.chunks_k or self._plan_as or used is not None:
            raise UnsupportedError(
                "cu_seqlens_q, cu_seqlens_k: seqlen_k, seqused_k and plan_as are for packed sequences only with "
                f"strategy 'ulysses', here is {self.strategy!r} with {heads_kv} key heads over {self.size} ranks."
            )
        return packing_of(starts_q, starts_k, options, self.seqlen)

    def _check_lengths(self, strategy: Strategy, lengths: tuple[Any, Any, Any], options: CallOptions) -> None:
        """Refuse lengths whose values the host sees, which no part could tell, and seqused_k that a ring cannot take.

        Packed sequences whose tokens ranks share were looked at by `_packing`.
        """
        starts_q, starts_k, used = lengths
        packed = starts_q is not None or starts_k is not None
        if packed and not has_all_tokens(strategy):
            return
        of_q, of_k, of_used = (x.numpy() if x is not None and x.device.type == "cpu" else None for x in lengths)
        faults = check_lengths(
            of_q, of_k, of_used, total_q=self.seqlen, total_k=None if packed and of_k is None else self.seqlen_k,
            max_seqlen_q=options.max_seqlen_q, max_seqlen_k=options.max_seqlen_k,
        )  # fmt: skip
        if faults:
            raise ValueError(f"{' '.join(faults)} Nothing was sent.")
        if used is not None and not packed and passes_keys(strategy) and _ends_with_used_keys(options):
            raise UnsupportedError(
                f"seqused_k: given with strategy {self.strategy!r} and a causal mask or window that ends with the used "
                'keys, which a rank of a ring does not have together. Pass causal="top_left", another strategy, or a '
                "mask= that says what is seen. Nothing was sent."
            )

    def _whole(
        self, strategy: Strategy, lengths: tuple[Any, Any, Any], packing: Packing | None, options: CallOptions,
        state: RngState, part: Part | None, modifier: Modifier | None, device: torch.device,
    ) -> Whole:  # fmt: skip
        """What all ranks compute together."""
        # The band of the whole: what a rank needs of the others follows from it.
        packed = lengths[0] is not None or lengths[1] is not None
        used = None if packed else lengths[2]
        banded = options
        if modifier is not None and not packed:
            banded = banded_options(modifier, options, None if used is not None else (self.seqlen, self.seqlen_k))
        left, right = check_window(Violations(), banded.causal, banded.window_size)
        if used is not None and _ends_with_used_keys(banded):
            left = right = None  # where the diagonal is, the device alone knows: a part of these rows has all keys
        bottom_right = banded.causal != "top_left"
        return Whole(
            options._replace(part=None),
            state,
            self.seqlen,
            self.seqlen_k,
            band_of(None if packed else left, None if packed else right, self.seqlen, self.seqlen_k, bottom_right),
            None
            if packing is not None or lengths[0] is None or lengths[1] is None
            else (_moved(lengths[0], device), _moved(lengths[1], device), _moved(lengths[2], device)),
            None if part is None else part.batch,
            None if part is None else part.heads,
            sm_margin=self._margin(strategy) if device.type == "cuda" and self.size > 1 else None,
            plan_as=self._plan_as,
            modifier=modifier,
            packing=packing,
            used=_moved(used, device),
            tables=None if packing is None and used is None else {},
        )

    def _check_tensors(
        self,
        given: dict[str, Any],
        lengths: dict[str, Any],
        options: CallOptions,
        part: Part | None,
        modifier: Modifier | None,
    ) -> None:
        """Refuse this rank's tensors by what it knows: as `nvrtc_attn.attention` would those of the whole."""
        for name, x in given.items():
            if x is not None or name in "qkv":
                _refuse_others(x, name)
        tokens, keys, q = self.local_seqlen, self.local_seqlen_k, given["q"]
        program = None if modifier is None else (modifier.program, *map(signature, modifier.captures))
        key: Any = (*map(signature, given.values()), *map(signature, lengths.values()), options, program)
        if key in self._checked and part is None:
            return
        faults, operands = [], {}
        for name, x in given.items():
            if x is None:
                continue
            if name != "sink" and x.dim() != 4:
                raise ValueError(f"{name}: shape {tuple(x.shape)} has rank {x.dim()}. Expected rank 4.")
            if x.device != q.device:
                faults.append(f"{name}: on {x.device}, needed is {q.device}, where q is")
            else:
                view(x.detach(), name)  # whether it has memory that can be read
            if name == "sink":
                operands[name] = (tuple(x.shape), str(x.dtype).removeprefix("torch."))
                continue
            shape, dim = list(x.shape), 1 if name in "qkv" else 2
            needed = keys if name in ("k", "v") else tokens
            if not (x.shape[dim] == needed or (dim == 2 and x.shape[dim] == 1)):
                faults.append(
                    f"{name}: shape {tuple(x.shape)}, whose dim {dim} must be {needed}, the tokens of rank {self.rank} "
                    f"of {self.seqlen_k if name in ('k', 'v') else self.seqlen}"
                )
            if name in "qkv" or x.shape[2] != 1:
                shape[dim] = self.seqlen_k if name in ("k", "v") else self.seqlen
            operands[name] = (tuple(shape), str(x.dtype).removeprefix("torch."))
        if part is not None and (not isinstance(part, Part) or part != Part(batch=part.batch, heads=part.heads)):
            faults.append(
                f"part: got {shown(part)}. It is an nvrtc_attn.Part of batch and heads, rows and keys are the ranks', "
                "sm_margin and plan_as those of the ContextParallel"
            )
        for name, x in lengths.items():
            if x is not None:
                operands[name] = (tuple(x.shape), str(x.dtype).removeprefix("torch."))
        if faults:
            raise ValueError(f"{'. '.join(faults)}. Nothing was sent.")
        where = Device("cuda" if q.is_cuda else "meta", 0)
        describe_shapes(operands, options._replace(part=part), where, modifier=modifier)
        if part is None:
            remember(self._checked, key, True)

    def _strategy(self, heads: int, heads_kv: int, on_gpu: bool, packed: bool) -> Strategy:
        """Who computes what, of tensors with so many heads."""
        kind = heads, heads_kv, on_gpu, packed
        strategy = self._strategies.get(kind)
        if strategy is None:
            strategy = self._strategies[kind] = self._make_strategy(*kind)
        return strategy

    def _make_strategy(self, heads: int, heads_kv: int, on_gpu: bool, packed: bool) -> Strategy:
        name, groups, size, rank = self.strategy, self._groups, self.size, self.rank
        whole_q, whole_k = [together(self.chunks_q)], [together(self.chunks_k)]
        everything = AllGather(None, 0, whole_q, whole_k)
        if isinstance(name, tuple):
            outer, inner = groups
            width = dist.get_world_size(inner)
            why_not = Ulysses.why_not(heads, heads_kv, width)
            if why_not:
                raise ValueError(f"strategy: ulysses over {width} ranks, but {why_not}.")
            rows = [slice(i * width, (i + 1) * width) for i in range(size // width)]
            over_q, over_k = ([together(x[s]) for s in rows] for x in (self.chunks_q, self.chunks_k))
            beyond: Strategy = (
                Ring(outer, rank // width, over_q, over_k)
                if name[1] == "ring"
                else AllGather(
                    outer,
                    rank // width,
                    over_q,
                    over_k,
                    self._groups_for(on_gpu, -(-heads_kv // width)),
                    keep=self._keep,
                    lanes=self._lanes or 1,
                )
            )
            mine = rows[rank // width]
            # Groups of all_gather are on their way between nodes: cut once more, they would wait for one another.
            pipeline = self._pipeline or 1 if name[1] == "ring" else 1
            return Ulysses(inner, rank % width, self.chunks_q[mine], self.chunks_k[mine], beyond, pipeline)
        if size == 1:
            return everything
        why_not = Ulysses.why_not(heads, heads_kv, size)
        if name == "ulysses" and why_not:
            raise ValueError(f"strategy: 'ulysses' over {size} ranks, but {why_not}. Use 'all_gather' or 'auto'.")
        divides = heads_kv % size == 0 and not why_not
        if name == "ulysses" or (name == "auto" and divides and (packed or swaps(heads, heads_kv, size))):
            return Ulysses(
                groups[0], rank, self.chunks_q, self.chunks_k, everything, self._groups_for(on_gpu, heads_kv // size)
            )
        if name == "ring":
            return Ring(groups[0], rank, self.chunks_q, self.chunks_k)
        pipeline = self._groups_for(on_gpu, heads_kv)
        if not self._pipeline and heads_kv * self.seqlen_k <= _KEYS_OF_GROUP:
            pipeline = 1
        lanes = self._lanes or (2 if self.seqlen >= _TOKENS_OF_LANES * size else 1)
        return AllGather(groups[0], rank, self.chunks_q, self.chunks_k, pipeline, keep=self._keep, lanes=lanes)

    def _margin(self, strategy: Strategy) -> int:
        """Multiprocessors that kernels beside an exchange leave free."""
        if self._sm_margin is not None:
            return self._sm_margin
        return _MARGIN if isinstance(strategy, AllGather) and strategy.pipeline == 1 else 0

    def _groups_for(self, on_gpu: bool, heads_kv: int) -> int:
        """In how many groups of so many key heads a rank works."""
        if self._pipeline or not on_gpu:
            return self._pipeline or 1
        return groups_of(heads_kv, self.seqlen_k)

    def _compare(
        self, given: dict[str, Any], lengths: dict[str, Any], options: CallOptions, part: Part | None, grad: bool,
        rng: Any, modifier: Modifier | None,
    ) -> None:  # fmt: skip
        """Ask all ranks whether they mean the same call."""
        q, k, v, bias, mask, sink = given.values()
        seed: Any = None
        if options.dropout_p > 0:
            seed = "drawn" if rng is None else tuple(int(x) % 2**64 for x in rng_values(checked_rng(rng, q)))

        # A single row of a rank that has no other may be its own, or one for all.
        single = any(length(chunks) == 1 for chunks in self.chunks_q)

        def scores(x: Any) -> Any:
            if x is None:
                return None
            return str(x.dtype), *x.shape[:2], "one row" if x.shape[2] == 1 and not single else "", x.shape[3]

        same_everywhere(
            self._groups,
            "attention",
            {
                "dtype": str(q.dtype), "device type": q.device.type, "batch": q.shape[0],
                "heads": (q.shape[2], k.shape[2]), "head dims": (q.shape[3], v.shape[3]),
                "bias": scores(bias), "mask": scores(mask), "sink": None if sink is None else str(sink.dtype),
                "options": str(options), "gradient": grad,
                **{name: None if x is None else tuple(x.tolist()) for name, x in lengths.items()},
                "part": None if part is None else (part.batch, part.heads), "rng": seed,
                "score_mod, mask_mod": None if modifier is None else (
                    repr(modifier.program), modifier.numbers, tuple(tuple(x.shape) for x in modifier.captures)
                ),
            },
        )  # fmt: skip

    def _draw(self, q: torch.Tensor, rng: Any) -> RngState:
        """The random numbers of the whole: a seed of the first rank's generator, which stays on the GPU."""
        if rng is not None:
            return checked_rng(rng, q)
        seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device)
        self._share_seed(seed)
        return checked_rng(seed, q)

    def _share_seed(self, seed: torch.Tensor) -> None:
        for group in reversed(self._groups):
            dist.broadcast(seed, dist.get_global_rank(group, 0) if group is not None else 0, group=group)


def _refuse_others(x: Any, name: str) -> None:
    """Refuse what is no tensor, and a DTensor: before anything is sent.

    The shape of a DTensor is that of all ranks, and its operators would communicate.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {shown(x)} of type {type(x).__name__}. ContextParallel takes torch tensors.")
    if is_dtensor(x):
        raise TypeError(
            f"{name}: got a DTensor. ContextParallel takes and returns each rank's tensors, with the tokens that its "
            f"layout gives the rank. Pass {name}.to_local(), and DTensor.from_local makes one of the result; tokens "
            f"that Shard cuts into equal pieces are those of layout='contiguous'. Nothing was sent."
        )


def _moved(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Lengths where the kernels read them, in row-major order."""
    return None if x is None else x.to(device).contiguous()


def _ends_with_used_keys(options: CallOptions) -> bool:
    """Whether there is a diagonal from the bottom right, which moves with seqused_k: see `Part`."""
    window = check_window(Violations(), options.causal, options.window_size)
    return options.causal != "top_left" and window != (None, None)


def _modifier_of(
    score_mod: Any, mask_mod: Any, aux: Mapping[str, Any] | None, q: torch.Tensor
) -> tuple[Modifier | None, tuple[torch.Tensor, ...]]:
    """What the functions of a call mean, and the arrays that they captured, where q is."""
    if score_mod is None and mask_mod is None:
        if aux is not None:
            raise no_functions()
        return None, ()
    modifier = traced(score_mod, mask_mod, aux=aux)
    captures = captured_on(modifier.captures, q.device)
    return modifier.with_captures(captures), captures


def swaps(num_heads: int, num_heads_kv: int, ranks: int) -> bool:
    """Whether ``"auto"`` swaps tokens for heads where the heads divide: what a rank receives then is less.

    That is q, k, v, out and their gradients of 1 / N of the heads, instead of all heads of k, v and their float32
    gradients. 32 query and 8 key heads on 2 GPUs at 16k tokens: 0.85 of the ideal with ulysses, 0.88 with all_gather.
    """
    return 3 * ranks * num_heads_kv > 2 * (num_heads + num_heads_kv)


def groups_of(heads_kv: int, keys: int) -> int:
    """Groups of key heads that are worth it: see ``pipeline`` of `ContextParallel`. The same number on all ranks."""
    tiles = heads_kv * -(-keys // _KEY_TILE)
    return max(1, min(_MOST_GROUPS, tiles // (_WAVES * _MULTIPROCESSORS)))


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


def _resized(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


class _Attention(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(ctx: Any, strategy: Strategy, whole: Whole, *tensors: Any) -> Any:
        q, k, v, bias, mask, sink, *captures = tensors
        inputs = Inputs(q, k, v, bias, mask, 0, q.shape[2], sink)
        out, lse, saved = strategy.forward(inputs, whole_with(whole, captures))
        own = (q, k, v, out, lse) if strategy.needs_own else (None,) * 5
        lengths = whole.lengths or (None, None, whole.used)
        ctx.save_for_backward(*own, bias, mask, sink, *lengths, *saved.kept, *captures)
        plain = whole_with(whole, None)._replace(lengths=None, used=None)
        ctx.call = strategy, plain, len(saved.kept), (q.shape[2], k.shape[2])
        ctx.like_out = out.shape, out.dtype, out.device
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        every = ctx.saved_tensors
        return once_only(lambda: _Attention._gradients(ctx, every, dout, dlse), (*every, dout, dlse))

    @staticmethod
    def _gradients(
        ctx: Any, every: tuple[Any, ...], dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        if is_transformed():
            raise UnsupportedError(_NO_TRANSFORMATION)
        q, k, v, out, lse, bias, mask, sink, *rest = every
        strategy, whole, kept, (heads, heads_kv) = ctx.call
        lengths, rest = tuple(rest[:3]), rest[3:]
        whole = whole._replace(used=lengths[2]) if lengths[0] is None else whole._replace(lengths=lengths)
        captures = tuple(rest[kept:])
        if dout is None:
            shape, dtype, device = ctx.like_out
            dout = torch.zeros(shape, dtype=dtype, device=device)
        saved = Saved(Inputs(q, k, v, bias, mask, 0, heads, sink), out, lse, heads_kv, rest[:kept])
        wanted = ctx.needs_input_grad[_CAPTURES:]
        gradients, daux = gradients_of(strategy, saved, whole, captures, wanted, dout, dlse)
        *of_inputs, dsink = gradients
        return None, None, *of_inputs, None, dsink, *daux


_CAPTURES: Final = 8
"""Where the captured tensors begin among the arguments of `_Attention`."""
