"""A call of ContextParallel as the operators of programs have it: the schema of its arguments, and what they say."""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from ...front.call import CallOptions, plain_options
from ...front.part import AXES, Part
from ...front.philox import NO_RNG
from ...modifiers.modifier import Modifier
from ...modifiers.text import read_text
from .call import whole_of
from .strategies import Inputs, has_all_tokens

OPTIONAL: Final = ("bias", "mask", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "seed", "offset")
"""Tensors behind q, k, v, any of which may be None."""
TENSORS: Final = 3 + len(OPTIONAL)
CAPTURES: Final = len(OPTIONAL)
"""Place of the captured tensors among the arguments of `OPTIONS`."""
OPTIONS: Final = (
    ", ".join(f"Tensor? {name}" for name in OPTIONAL) + ", Tensor[] captures, SymInt seed_word, SymInt offset_word, "
    "str context, str causal, SymInt? window_left, SymInt? window_right, float? softmax_scale, float softcap, "
    "float dropout_p, SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool deterministic, SymInt[]? starts_q, "
    "SymInt[]? starts_k, SymInt[] part, str program, SymInt[] ints, float[] floats, bool dbias, bool dsink"
)
"""The schema of what all operators of attention take."""
_CAUSAL: Final[dict[str, Any]] = {"": False, "bottom_right": True}
_members: Final[weakref.WeakValueDictionary[str, Any]] = weakref.WeakValueDictionary()
_numbers: Final = itertools.count()


def register(member: Any) -> str:
    """The name of a `ContextParallel` in programs of this process.

    The same in each run of a script, so that what compilers keep on disk is found again, and another one where layout
    or strategy, by which the shapes of what is kept go, are others.
    """
    facts = (
        member.rank, member.chunks_q, member.chunks_k, member.strategy, member._pipeline, member._keep, member._lanes,
    )  # fmt: skip
    digest = hashlib.sha256(repr(facts).encode(), usedforsecurity=False).hexdigest()[:16]
    name = f"context{next(_numbers)}_{digest}"
    _members[name] = member
    return name


def member_of(name: str) -> Any:
    """The `ContextParallel` that `register` gave this name."""
    found = _members.get(name)
    if found is None:
        raise RuntimeError(
            f"{name}: no ContextParallel of this process has this name. A program belongs to the ContextParallel that "
            "it was traced with: keep that, and trace anew in another process."
        )
    return found


class OperatorCall:
    """The arguments behind ``q, k, v`` of `OPTIONS`, as `ContextParallel` takes them."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        bias, mask, sink, of_q, of_k, used, seed, offset, captures, *rest = arguments
        seed_word, offset_word, name, causal, left, right, scale, softcap, dropout_p, longest_q, longest_k, *rest = rest
        deterministic, starts_q, starts_k, part, self.program, ints, floats, dbias, dsink = rest
        self.bias, self.mask, self.sink, self.captures = bias, mask, sink, captures
        self.member = member_of(name)
        self.scalars = causal, left, right, scale, softcap, dropout_p, longest_q, longest_k, deterministic, dbias, dsink
        self.given_lengths = of_q, of_k, used, starts_q, starts_k
        self.random = seed, offset, seed_word, offset_word
        self.extents, self.ints, self.floats = part, tuple(ints), tuple(floats)

    @property
    def options(self) -> CallOptions:
        causal, left, right, scale, softcap, dropout_p, longest_q, longest_k, deterministic, *wanted = self.scalars
        return plain_options(
            CallOptions(
                _CAUSAL.get(causal, causal), (left, right), scale, softcap, dropout_p, longest_q, longest_k, True,
                deterministic, *wanted,
            )
        )  # fmt: skip

    @property
    def lengths(self) -> tuple[Any, Any, Any]:
        """cu_seqlens_q, cu_seqlens_k, one tensor where they are the same, and seqused_k."""
        of_q, of_k, used, starts_q, starts_k = self.given_lengths
        same = of_k is of_q and starts_k == starts_q
        first = of_q if starts_q is None else torch.tensor(starts_q, dtype=torch.int32, device="cpu")
        if same:
            return first, first, used
        return first, of_k if starts_k is None else torch.tensor(starts_k, dtype=torch.int32, device="cpu"), used

    @property
    def rng(self) -> tuple[Any, Any]:
        seed, offset, seed_word, offset_word = self.random
        return (
            seed_word & (2**64 - 1) if seed is None else seed,
            offset_word & (2**64 - 1) if offset is None else offset,
        )

    @property
    def part(self) -> Part | None:
        if not self.extents:
            return None
        *pairs, (margin, plan_as) = (tuple(self.extents[i : i + 2]) for i in range(0, len(self.extents), 2))
        extents: Any = {axis: None if x[0] < 0 else x for axis, x in zip(AXES, pairs, strict=True)}
        return Part(**extents, sm_margin=None if margin < 0 else margin, plan_as=bool(plan_as))

    @property
    def packed(self) -> bool:
        of_q, of_k, _, *starts = self.given_lengths
        return any(x is not None for x in (of_q, of_k, *starts))

    def may_keep(self, strategy: Any) -> bool:
        """`Whole.may_keep`."""
        return not self.program and (not self.packed or has_all_tokens(strategy))

    def strategy(self, num_heads: int, num_heads_kv: int, on_gpu: bool) -> Any:
        return self.member._strategy(num_heads, num_heads_kv, on_gpu, self.packed)

    def check_shapes(self, q: Any, k: Any, v: Any) -> None:
        """Whether tensors are of shapes that results can be told of: what is wrong is refused by name in a call."""
        member = self.member
        scores = [x for x in (self.bias, self.mask) if x is not None]
        if not (
            all(x.dim() == 4 for x in (q, k, v, *scores))
            and q.shape[1] == member.local_seqlen
            and k.shape[1] == v.shape[1] == member.local_seqlen_k
            and k.shape[2] == v.shape[2]
            and k.shape[2] > 0
            and q.shape[2] % k.shape[2] == 0
            and all(x.shape[1] in (1, q.shape[2]) and x.shape[2] in (1, q.shape[1]) for x in scores)
        ):
            raise ValueError("shapes")

    def like_kept(self, strategy: Any, q: Any, k: Any, v: Any) -> list[torch.Tensor]:
        """`Strategy.like_kept` of a forward pass, and what it keeps beside."""
        causal, left, right, *_ = self.scalars
        window = tuple(None if x is None else int(x) for x in (left, right))
        options = plain_options(CallOptions(causal=_CAUSAL.get(causal, causal), window_size=window))
        lengths = (None, None, None if self.packed else self.given_lengths[2])
        whole = whole_of(self.member, strategy, lengths, None, options, NO_RNG, None, None, q.device)
        whole = whole._replace(may_keep=self.may_keep(strategy))
        found = strategy.like_kept(Inputs(q, k, v, self.bias, self.mask, 0, q.shape[2], self.sink), whole)
        starts = self.given_lengths[0]
        if self.packed and not has_all_tokens(strategy) and starts is not None and starts.is_cuda:
            found.append(torch.empty(starts.shape, dtype=torch.int32, device="cpu"))
        return list(found)

    def modifier(self) -> tuple[Modifier | None, tuple[int, ...]]:
        """Of its arrays, and where those are among the captured tensors."""
        if not self.program:
            return None, ()
        facts = tuple((x.shape, x.dtype) for x in self.captures)
        modifier, places = read_text(self.program, self.ints, self.floats, facts)
        return modifier.with_captures(tuple(self.captures[i] for i in places)), places
