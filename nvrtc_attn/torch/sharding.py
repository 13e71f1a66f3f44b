"""How DTensors are attended to: each rank computes its shard, where it matters as a part of the whole.

The operators have a rule for DTensors, below autograd and the modes, so that eager calls and programs of torch.compile
go the same way. A mesh axis is over the batch or over heads; what lies otherwise is moved first, which communicates.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Final

import torch

from ..base.tables import remember
from ..front.dlpack import compact_strides
from ..front.operands import GRADIENTS, INPUTS, OPERANDS
from .arguments import CU_SEQLENS_Q, DROPOUT, FLAGS, OPTIONS, PART, SEED_WORD
from .ops import validate

_LIBRARY: Final = torch.library.Library("nvrtc_attn", "FRAGMENT")
_OPERATORS: Final = ("attention_forward", "attention_backward", "modified_forward", "modified_backward")
BATCH, HEADS = "batch", "heads"
_NAMES: Final = (*INPUTS, "seed", "offset")
_BEFORE: Final = ("dout", "dlse", "out", "lse")
"""What the backward operators take before the arguments of the forward ones."""
_checked: dict[Any, bool] = {}
_sharding_registered = False


def register_sharding() -> None:
    """Teach DTensor the operators: batch and heads can be sharded.

    Done by itself at the first eager call with a DTensor, and by ``import nvrtc_attn.torch`` where
    ``torch.distributed.tensor`` was imported before. Call it where neither comes before a compiled program.
    """
    global _sharding_registered
    if _sharding_registered:
        return
    from torch.distributed.tensor import DTensor

    for name in _OPERATORS:
        torch.library.register_torch_dispatch(f"nvrtc_attn::{name}", DTensor, _attend, lib=_LIBRARY)
    _sharding_registered = True


def _attend(cls: Any, operator: Any, types: Any, arguments: tuple[Any, ...], options: Any) -> Any:
    """An operator of DTensors."""
    is_forward = operator._opname.endswith("forward")
    first = 0 if is_forward else len(_BEFORE)
    given, rest = arguments[first : first + PART], arguments[first + PART + 1 :]
    flags, functions = rest[:FLAGS], rest[FLAGS:]  # there are as many of `OPTIONAL_GRADIENTS`
    with torch.no_grad():
        shards = _Shards(given, functions)
        if shards.is_elsewhere:
            found = _nothing(is_forward, given, functions)
        else:
            local = [shards.local(name, x) for name, x in zip(_BEFORE, arguments[:first], strict=False)]
            found = operator(*local, *shards.of_call(given), *flags, *shards.of_functions(functions))
        return (_results if is_forward else _gradients)(shards, found, given, flags, functions)


def _nothing(is_forward: bool, given: Any, functions: Any) -> list[torch.Tensor]:
    """What an operator returns on a rank that is none of the mesh's, which has nothing of any DTensor."""
    q = given[0].to_local()
    like: list[Any] = [INPUTS.index(OPERANDS[name].gradient_of) for name in GRADIENTS]
    like = [given[place] for place in like] + list(functions[0] if functions else ())
    kinds = [q.dtype, torch.float32, torch.float32] if is_forward else [(q if x is None else x).dtype for x in like]
    return [q.new_empty(0, dtype=kind) for kind in kinds]


def _results(shards: _Shards, found: Any, given: Any, flags: Any, functions: Any) -> tuple[Any, ...]:
    """out, lse and max_logit, of those of a rank; what nobody asks for is an empty plain tensor."""
    (batch, rows, heads, _), starts = given[0].shape, given[CU_SEQLENS_Q]
    shapes = {
        "out": (batch, rows, heads, given[2].shape[3]), "lse": (batch, heads, rows),
        "max_logit": (batch if starts is None else starts.shape[0] - 1, heads),
    }  # fmt: skip
    return tuple([
        shards.whole(x, shape, shards.places(name, shape)) if wants else x
        for (name, shape), x, wants in zip(shapes.items(), found, (True, *flags), strict=True)
    ])  # fmt: skip


def _gradients(shards: _Shards, found: Any, given: Any, flags: Any, functions: Any) -> Any:
    """What the backward operators return, of what they returned on a rank; the same of what nobody asks for."""
    results = []
    for name, x, wants in zip(GRADIENTS, found, (True,) * (len(GRADIENTS) - OPTIONS) + flags, strict=False):
        of = OPERANDS[name].gradient_of
        results.append(shards.gradient(of, given[INPUTS.index(of)], x) if wants else x)
    if not functions:
        return tuple(results)
    for capture, x, wants in zip(functions[0], found[len(GRADIENTS) :], functions[-1], strict=True):
        results.append(shards.gradient("", capture, x) if wants else x)
    return results


class _Shards:
    """The mesh of one call, what each of its axes is over, and this rank's share of the tensors."""

    def __init__(self, given: tuple[Any, ...], functions: tuple[Any, ...]) -> None:
        """``given`` are the arguments of `SIGNATURE` before ``part``, ``functions`` what tells of a modifier.

        Raises
        ------
        ValueError
            Tensors are plain ones beside DTensors, or on different meshes, or what the whole would be refused for.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        self._dtensor, self._shard, self._replicate, self._partial = DTensor, Shard, Replicate(), Partial()
        captures = functions[0] if functions else ()
        self._mesh = self._mesh_of(given, captures)
        _check(given)
        q, k, v = given[:3]
        self._packed = given[CU_SEQLENS_Q] is not None
        self._over = [self._role(of_ranks) for of_ranks in zip(q.placements, k.placements, v.placements, strict=True)]
        self._heads = q.shape[2], k.shape[2]
        self._splits_keys = self._key_heads_go_along()
        self._knows_whole = given[DROPOUT] > 0 or bool(functions and functions[1])
        self.is_elsewhere = self._mesh.get_coordinate() is None
        """Whether the rank is none of the mesh's."""

    def _mesh_of(self, given: tuple[Any, ...], captures: Any) -> Any:
        mesh = None
        named = [*zip(_NAMES, given, strict=False), *[("score_mod, mask_mod: captured tensor", x) for x in captures]]
        for name, x in named:
            if isinstance(x, self._dtensor):
                if mesh is not None and x.device_mesh != mesh:
                    raise ValueError(f"{name}: on {x.device_mesh}, but q is on {mesh}. All DTensors are on one mesh.")
                mesh = x.device_mesh
            elif isinstance(x, torch.Tensor) and name in INPUTS and not _takes_plain(self._dtensor):
                raise ValueError(
                    f"{name}: a plain tensor beside DTensors. Make it one, of the whole with "
                    f"DTensor.from_local({name}, mesh, [Replicate()] * mesh.ndim), or pass to_local() of the others."
                )
        return mesh

    def _role(self, placements: tuple[Any, ...]) -> str:
        """What a mesh axis is over, by how q, k and v lie along it: the first of them that says so."""
        for x in placements:
            if type(x) is self._shard and (x.dim == 2 or (x.dim == 0 and not self._packed)):
                return HEADS if x.dim else BATCH
        return ""

    # ------------------------------------------------------------------------------------------------------ placements

    def places(self, name: str, shape: Any, rest: Any = None) -> list[Any]:
        """How a tensor of the call lies along each mesh axis; ``rest`` is how where all ranks of it have the same."""
        found = []
        for role in self._over:
            dim = _dim(name, role)
            is_whole = dim is None or (OPERANDS[name].broadcast and shape[dim] == 1)
            if is_whole or (name in ("k", "v") and role == HEADS and not self._splits_keys):
                found.append(rest if rest is not None and role else self._replicate)
            else:
                found.append(self._shard(dim))
        return found

    def _extent(self, size: int, role: str, at: Any = None) -> tuple[int, int]:
        """Where a rank's piece of a dim begins and ends: DTensor cuts it for one mesh axis after another."""
        start, end = 0, size
        for axis, index in enumerate(self._mesh.get_coordinate() if at is None else at):
            if self._over[axis] == role:
                step = -(-(end - start) // self._mesh.size(axis))
                start, end = min(start + index * step, end), min(start + (index + 1) * step, end)
        return start, end

    def _key_heads_go_along(self) -> bool:
        """Whether the key heads of each rank are those of its query heads, if k and v are cut as q is."""
        heads, key_heads = self._heads
        if HEADS not in self._over or heads == key_heads or key_heads == 0:
            return True
        group = heads // key_heads
        ranks = itertools.product(*[
            range(self._mesh.size(axis) if role == HEADS else 1) for axis, role in enumerate(self._over)
        ])  # fmt: skip
        return all(
            self._extent(heads, HEADS, at) == tuple([group * x for x in self._extent(key_heads, HEADS, at)])
            for at in ranks
        )

    # -------------------------------------------------------------------------------------------------------- the rank

    def of_call(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `SIGNATURE`: the rank's tensors, and what part of the whole they are if it matters."""
        tensors = [self.local(name, x) for name, x in zip(_NAMES, given, strict=False)]
        part = None
        if self._knows_whole:
            batch = given[CU_SEQLENS_Q].shape[0] - 1 if self._packed else given[0].shape[0]
            part = [self._extent(batch, BATCH)[0], batch, self._extent(self._heads[0], HEADS)[0], self._heads[0]]
        return (*tensors, *given[len(_NAMES) :], part)

    def of_functions(self, functions: tuple[Any, ...]) -> tuple[Any, ...]:
        """What tells of a modifier; each rank has all of what it captured."""
        return functions and ([self.local("", x) for x in functions[0]], *functions[1:])

    def local(self, name: str, x: Any) -> Any:
        """What the rank's call has of a tensor."""
        if not isinstance(x, self._dtensor):
            return x
        placements = self.places(name, x.shape)
        if list(x.placements) != placements:
            # A result that wants a gradient would be detached in place, which torch 2.11 cannot do to a DTensor.
            x = x.detach().redistribute(self._mesh, placements)
        x = x.to_local()
        if name in ("k", "v") and not self._splits_keys:
            first, count, group, skipped, heads = self._keys_of_rank()
            x = x.narrow(2, first, count)
            if group > 1:
                x = x.repeat_interleave(group, 2).narrow(2, skipped, heads)
        return x

    def _keys_of_rank(self) -> tuple[int, int, int, int, int]:
        """Which of all key heads the rank's query heads read.

        The first, how many, how often each is repeated, how many are left out in front then, and how many remain.
        """
        heads, key_heads = self._heads
        group = heads // key_heads
        start, end = self._extent(heads, HEADS)
        first, last = start // group, -(-end // group)
        count = last - first if end > start else 0
        if count < 2 or (start % group == 0 and end % group == 0):
            return first, count, 1, 0, count
        return first, count, group, start - first * group, end - start

    def gradient(self, name: str, x: Any, found: Any) -> Any:
        """The gradient of a tensor of the call, of the rank's share of it. Shares of a plain one are added up."""
        if name in ("k", "v") and not self._splits_keys and not self.is_elsewhere:
            found = self._of_all_key_heads(found)
        placements = self.places(name, x.shape, self._partial)
        whole = self.whole(found, x.shape, placements)
        if not isinstance(x, self._dtensor):
            return whole.full_tensor()
        wanted = [
            before if after is self._partial and before.is_shard() else after
            for before, after in zip(x.placements, placements, strict=True)
        ]
        return whole if wanted == placements or self.is_elsewhere else whole.redistribute(self._mesh, wanted)

    def _of_all_key_heads(self, found: torch.Tensor) -> torch.Tensor:
        """The gradient of k or v, zeros where the rank needed none."""
        first, count, group, skipped, heads = self._keys_of_rank()
        batch, rows, _, dim = found.shape
        if group > 1:
            wide = found.new_zeros((batch, rows, count * group, dim), dtype=torch.float32)
            wide.narrow(2, skipped, heads).copy_(found)
            found = wide.unflatten(2, (count, group)).sum(3).to(found.dtype)
        if count == self._heads[1]:
            return found
        whole = found.new_zeros((batch, rows, self._heads[1], dim))
        whole.narrow(2, first, count).copy_(found)
        return whole

    def whole(self, x: Any, shape: Any, placements: list[Any]) -> Any:
        """The DTensor that a rank has the share ``x`` of."""
        shape = tuple(shape)
        return self._dtensor.from_local(
            x, self._mesh, placements, run_check=False, shape=torch.Size(shape), stride=compact_strides(shape)
        )


def _dim(name: str, role: str) -> int | None:
    """The dim of a tensor that a mesh axis cuts."""
    axes = OPERANDS[name].axes if name in OPERANDS else ()
    if role == HEADS:
        return next((i for i, axis in enumerate(axes) if axis.startswith("num_heads")), None)
    return 0 if role == BATCH and axes and not axes[0].startswith("num_heads") else None


def _check(given: tuple[Any, ...]) -> None:
    """Refuse what the call of the whole would be refused for, on all ranks alike: asked once of calls of a kind."""
    of_tensors = [x if x is None else (x.shape, x.dtype, x.device) for x in given[:SEED_WORD]]
    key: Any = (*of_tensors, *given[SEED_WORD + 2 :])  # not the seed's words, which differ from step to step
    try:
        if key in _checked:
            return
    except TypeError:  # symbols, which no table has
        key = None
    validate((*given, None), None)
    if key is not None:
        remember(_checked, key, True)


def _takes_plain(dtensor: Any) -> bool:
    """Whether torch is told to take plain tensors for replicated ones."""
    return bool(getattr(getattr(dtensor, "_op_dispatcher", None), "_allow_implicit_replication", False))


# torch 2.4 has a module of this name, without DTensor.
if hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor"):
    register_sharding()
