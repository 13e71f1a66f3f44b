"""What the user asked: a validated, frozen description of one attention problem, which ``build`` makes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ..modifiers.modifier import Program
from .dlpack import compact_strides
from .operands import BACKWARD, INPUTS, OPERANDS, OPTIONAL_INPUTS, dtypes_of, shape_of
from .tensorview import TensorView, normalised

Causal: TypeAlias = bool | Literal["bottom_right", "top_left"]
WindowSize: TypeAlias = Sequence[int | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandLayout:
    """Layout of one operand.

    ``strides`` are elements; ``offset_alignment`` is the largest power of two (at most 16) that divides the base
    address in bytes.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset_alignment: int = 16


class PlanAs(NamedTuple):
    """What of a larger attention decides its kernels."""

    sizes: tuple[int, int, int, int]
    """Batch, query heads, rows, keys."""
    window: tuple[int | None, int | None]
    bottom_right: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem:
    """One attention problem. Sizes are elements; a varlen problem has ``batch`` sequences packed on the token dim."""

    dtype: str
    batch: int
    seqlen_q: int
    """Mq, or max_seqlen_q when varlen."""
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    q: OperandLayout
    k: OperandLayout
    v: OperandLayout
    window_left: int | None = None
    """None = unbounded. Causal problems have ``window_right`` 0 (or less). Those of a part of a larger attention are
    counted from its own top left corner, where the whole's diagonal may lie to either side: any sign."""
    window_right: int | None = None
    bottom_right: bool = True
    softmax_scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_pitches: tuple[int, int, int] | None = None
    """Heads, rows and keys of the larger attention whose dropout this part has; None of a whole one."""
    device_starts: bool = False
    """Whether kernels read where the rows or keys of the part begin, which windows and dropout count from here as 0."""
    sm_margin: int | None = None
    """Multiprocessors that are left to others; None = nobody else is expected on any."""
    plan_as: PlanAs | None = None
    """The larger attention whose kernels this part has; None = those for its own sizes."""
    bias: OperandLayout | None = None
    """As passed in: rank 4, each dim full or 1."""
    mask: OperandLayout | None = None
    out: OperandLayout | None = None
    """Layouts of what is written (and of dout). None = dense, 16-byte aligned. A kernel may use 16-byte vectors on a
    tensor only if its base, its strides and its rows allow it."""
    dout: OperandLayout | None = None
    dq: OperandLayout | None = None
    dk: OperandLayout | None = None
    dv: OperandLayout | None = None
    varlen: bool = False
    seqused_k: bool = False
    return_lse: bool = False
    return_max_logit: bool = False
    deterministic: bool = False
    dbias: bool = False
    dsink: bool = False
    dbias_layout: OperandLayout | None = None
    """Of the gradient of the bias; None = dense, 16-byte aligned."""
    lse: OperandLayout | None = None
    dlse: OperandLayout | None = None
    modifier: Program | None = None
    """What takes the place of the softcap, and a mask that is computed."""
    trained: tuple[int, ...] = ()
    """Which arrays of the modifier the backward pass makes gradients of."""
    lse_padded: bool = False
    """The seed's lse: packed sequences have a batch entry each, rows that belong to no query are +inf, and a row
    without a valid key is 0 instead of -inf."""
    further: tuple[tuple[str, OperandLayout], ...] = ()
    """Layouts of operands of the table that have no field here."""
    _known: dict[Hashable, Any] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What was worked out from the fields before: a call asks for the same again."""

    def __hash__(self) -> int:
        found = self._known.get("hash")
        if found is None:
            found = self._known["hash"] = hash(tuple(getattr(self, x.name) for x in fields(self) if x.compare))
        return int(found)

    @property
    def band(self) -> bool:
        """Whether any position mask (causal or window) is in force."""
        return self.window_left is not None or self.window_right is not None

    @property
    def further_inputs(self) -> tuple[str, ...]:
        """Optional inputs that were given and have no field here."""
        return tuple(name for name, _ in self.further if name in OPTIONAL_INPUTS)

    def layout_of(self, name: str) -> OperandLayout | None:
        """The layout of an operand of the table; None of lengths, which are dense, and of what is not there."""
        if name in LAYOUT_FIELDS:
            found = getattr(self, LAYOUT_FIELDS[name])
        else:
            found = dict(self.further).get(name) if self.further else None
        return found if isinstance(found, OperandLayout) else None

    @property
    def _inputs(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Shapes and element types of the inputs that are there, asked for ten times on the way to a plan."""
        found: Any = self._known.get("inputs")
        if found is None:
            given = {name: x for name in INPUTS if (x := self.layout_of(name)) is not None}
            shapes, dtypes = ({n: getattr(x, what) for n, x in given.items()} for what in ("shape", "dtype"))
            found = self._known["inputs"] = shapes, dtypes
        return found  # type: ignore[no-any-return]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape that an operand has in the public functions."""
        return self.dense_layout_of(name).shape

    def dtype_of(self, name: str) -> str:
        return self.dense_layout_of(name).dtype

    def dtypes_of(self, name: str) -> tuple[str, ...]:
        """The accepted element types of an operand, that of an allocation first."""
        return dtypes_of(name, self._inputs[1])

    def dense_layout_of(self, name: str) -> OperandLayout:
        """A row-major layout of an operand that is no input."""
        found: OperandLayout | None = self._known.get(name)
        if found is None:
            shape = shape_of(name, self._inputs[0], self.batch)
            found = self._known[name] = dense_layout(shape, self.dtypes_of(name)[0])
        return found

    def with_layouts(self, **layouts: OperandLayout) -> AttentionProblem:
        """The problem with layouts of operands that are no inputs. Those like q are dense where none is given."""
        key = tuple(layouts.items())
        found: AttentionProblem | None = self._known.get(key)
        if found is None:
            given = {name: layouts.get(name, self.dense_layout_of(name)) for name in LIKE_Q} | layouts
            changes: dict[str, Any] = {LAYOUT_FIELDS[name]: x for name, x in given.items() if name in LAYOUT_FIELDS}
            further = {**dict(self.further), **{name: x for name, x in given.items() if name not in LAYOUT_FIELDS}}
            found = replace(self, **changes, further=tuple(further.items()))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def as_whole(self) -> AttentionProblem | None:
        """The larger attention that `plan_as` names, with tensors laid out as this part's.

        None without one, and where the part has no heads, of which those of its keys and values would follow.
        """
        if self.plan_as is None or self.num_heads == 0:
            return None
        (batch, heads, rows, keys), (left, right), bottom_right = self.plan_as
        heads_kv = heads * self.num_heads_kv // self.num_heads
        sizes: dict[str, Any] = {
            "batch": batch,
            "num_heads": heads,
            "num_heads_kv": heads_kv,
            "seqlen_q": rows,
            "seqlen_k": keys,
        }
        tokens = ("seqlen_q", "seqlen_k") if self.varlen else ()  # of packed sequences as many as are there

        def of_whole(name: str, x: OperandLayout) -> OperandLayout:
            row = OPERANDS[name]
            shape = tuple(
                n if (row.broadcast and n == 1) or axis in tokens or axis not in sizes or (axis == "batch" and tokens)
                else sizes[axis] for axis, n in zip(row.axes, x.shape, strict=True)
            )  # fmt: skip
            return replace(x, shape=shape)

        layouts: dict[str, Any] = {
            field_name: of_whole(name, x) for name, field_name in LAYOUT_FIELDS.items() if (x := self.layout_of(name))
        }
        return replace(
            self, plan_as=None, **sizes, window_left=left, window_right=right, bottom_right=bottom_right,
            dropout_pitches=None, device_starts=False, sm_margin=None, **layouts,
            further=tuple((name, of_whole(name, x)) for name, x in self.further),
        )  # fmt: skip

    def only(self, layouts: Mapping[str, OperandLayout]) -> AttentionProblem:
        """The problem with these layouts and no others."""
        changes: dict[str, Any] = {field_name: layouts.get(name) for name, field_name in LAYOUT_FIELDS.items()}
        further = tuple((name, x) for name, x in layouts.items() if name not in LAYOUT_FIELDS)
        return replace(self, **changes, further=further)


LIKE_Q: Final = tuple(
    name for name in BACKWARD if name not in INPUTS and OPERANDS[name].axes[-1].startswith("head_dim")
)
"""Operands like q that are no inputs: out, dout, dq, dk, dv."""
_MAX_KNOWN: Final = 256
# Operand -> the field of `AttentionProblem` with its layout.
LAYOUT_FIELDS: Final = {
    name: {"dbias": "dbias_layout"}.get(name, name)
    for name in (
        "q", "k", "v", "bias", "mask", "out", "dout", "lse", "dlse", "dq", "dk", "dv", "dbias",
    )
}  # fmt: skip


def layout(view: TensorView) -> OperandLayout:
    """What of a tensor decides which kernel can read it."""
    # The lowest set bit of the address, at most 16; a null pointer (no elements) is aligned to everything.
    alignment = min(view.ptr & -view.ptr or 16, 16)
    return OperandLayout(shape=view.shape, strides=view.strides, dtype=view.dtype, offset_alignment=alignment)


def dense_layout(shape: Sequence[int], dtype: str) -> OperandLayout:
    """Row-major and 16-byte aligned; strides of dims of size 1 are 0 as in a view."""
    sizes = tuple(shape)
    return OperandLayout(shape=sizes, strides=normalised(sizes, compact_strides(sizes)), dtype=dtype)
