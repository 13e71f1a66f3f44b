"""What the user asked: a validated, frozen description of one attention problem.

:func:`build_problem` raises every user error about the arguments of a call. It looks at descriptions, never at device
memory, and reports all violated conditions in one exception, in the order of the checks in ``validation``.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ..base.errors import shown
from ..modifiers.modifier import Program
from . import philox
from .dlpack import compact_strides
from .operands import BACKWARD, INPUTS, OPERANDS, OPTIONAL_INPUTS, dtypes_of, shape_of
from .part import Part
from .tensorview import TensorView, normalised
from .validation import (
    Violations,
    check_devices,
    check_dtypes,
    check_flag,
    check_lengths,
    check_optional,
    check_ranks,
    check_real,
    check_scale_and_softcap,
    check_shapes,
    check_varlen,
    check_window,
)

__all__ = [
    "AttentionProblem",
    "Causal",
    "OperandLayout",
    "WindowSize",
    "build_problem",
    "check_lengths",
    "layout",
]

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
        if name in _LAYOUTS:
            found = getattr(self, _LAYOUTS[name])
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
            changes: dict[str, Any] = {_LAYOUTS[name]: x for name, x in given.items() if name in _LAYOUTS}
            further = {**dict(self.further), **{name: x for name, x in given.items() if name not in _LAYOUTS}}
            found = replace(self, **changes, further=tuple(further.items()))
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = found
        return found

    def as_whole(self) -> AttentionProblem | None:
        """The larger attention that `plan_as` names, with tensors laid out as this part's; None without one."""
        if self.plan_as is None:
            return None
        (batch, heads, rows, keys), (left, right), bottom_right = self.plan_as
        heads_kv = heads * self.num_heads_kv // max(self.num_heads, 1)
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
            field_name: of_whole(name, x) for name, field_name in _LAYOUTS.items() if (x := self.layout_of(name))
        }
        return replace(
            self, plan_as=None, **sizes, window_left=left, window_right=right, bottom_right=bottom_right,
            dropout_pitches=None, device_starts=False, sm_margin=None, **layouts,
            further=tuple((name, of_whole(name, x)) for name, x in self.further),
        )  # fmt: skip

    def only(self, layouts: Mapping[str, OperandLayout]) -> AttentionProblem:
        """The problem with these layouts and no others."""
        changes: dict[str, Any] = {field_name: layouts.get(name) for name, field_name in _LAYOUTS.items()}
        further = tuple((name, x) for name, x in layouts.items() if name not in _LAYOUTS)
        return replace(self, **changes, further=further)


LIKE_Q: Final = tuple(
    name for name in BACKWARD if name not in INPUTS and OPERANDS[name].axes[-1].startswith("head_dim")
)
"""Operands like q that are no inputs: out, dout, dq, dk, dv."""
_MAX_KNOWN: Final = 256
# Operand -> the field of `AttentionProblem` with its layout.
_LAYOUTS: Final = {
    name: {"dbias": "dbias_layout"}.get(name, name)
    for name in (
        "q", "k", "v", "bias", "mask", "out", "dout", "lse", "dlse", "dq", "dk", "dv", "dbias",
    )
}  # fmt: skip


def build_problem(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    *,
    bias: TensorView | None = None,
    mask: TensorView | None = None,
    causal: Causal = False,
    window_size: WindowSize = None,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    dropout_p: float = 0.0,
    cu_seqlens_q: TensorView | None = None,
    cu_seqlens_k: TensorView | None = None,
    seqused_k: TensorView | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    dbias: bool = False,
    dsink: bool = False,
    part: Part | None = None,
    return_max_logit: bool = False,
    modifier: Program | None = None,
    trained: tuple[int, ...] = (),
    **further: TensorView | None,
) -> AttentionProblem:
    """Check one call and describe it.

    Parameters
    ----------
    q, k, v
        ``[batch, seqlen_q, num_heads, head_dim]``, ``[batch, seqlen_k, num_heads_kv, head_dim]`` and
        ``[batch, seqlen_k, num_heads_kv, head_dim_v]``, any strides. Zero sizes are accepted except for the head dims.
        Packed (varlen) tensors have batch 1 and all tokens on dim 1.
    bias, mask
        Rank 4, each dim that of ``[batch, num_heads, seqlen_q, seqlen_k]`` or 1. ``bias`` has the dtype of ``q`` or
        float32, ``mask`` is bool or uint8 (non-zero = keep).
    causal
        ``True`` and ``"bottom_right"`` align the diagonal to the last query and key, ``"top_left"`` to the first.
    window_size
        ``(left, right)``, each at least 0, or ``None`` or -1 for unbounded.
    softmax_scale
        ``None`` means ``1 / sqrt(head_dim)``. At most 2.36e38 in magnitude, and 0 where it rounds to 0 in float32.
    softcap
        0 or ``None`` is none; otherwise at least 1.18e-38, the smallest normal float32, and ``softmax_scale / softcap``
        is finite in float32.
    cu_seqlens_q, cu_seqlens_k, seqused_k
        int32 on the device of ``q``. Their values are checked when they are in host memory.
    max_seqlen_q, max_seqlen_k
        Required with ``cu_seqlens``, refused without.
    part
        Where the call lies in a larger attention, whose masks and dropout it has.
    modifier
        What was traced of ``score_mod`` and ``mask_mod``.
    trained
        The arrays that it captured whose gradients are wanted.
    **further
        Other optional inputs of the table of operands.

    Returns
    -------
    AttentionProblem
        Windows are normalised: causal is ``window_right = 0``, and a bound that excludes no key is ``None`` (so causal
        decoding, one query aligned to the bottom right, has no band at all). Those of a part are relative to it.

    Raises
    ------
    TypeError
        A violation is of the wrong kind (whatever else is violated).
    ValueError
        A violation is a wrong value.
    UnsupportedError
        Everything is valid, but no kernel serves it; ``.reasons`` lists why.
    """
    found = Violations()
    given: dict[str, object] = {
        "q": q, "k": k, "v": v, "bias": bias, "mask": mask, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k, **further,
    }  # fmt: skip
    tensors = _checked_tensors(found, given)
    found.stop()

    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    ranks_fit = _check_operands(found, tensors, varlen)
    if dbias and bias is None:
        found.value("dbias: a gradient of the bias was asked for, but bias is None. Pass the bias.")
    if dsink and given.get("sink") is None:
        found.value("dsink: a gradient of the sink was asked for, but sink is None. Pass the sink.")
    lengths = check_varlen(found, tensors, max_seqlen_q, max_seqlen_k, varlen, ranks_fit)

    window = check_window(found, causal, window_size)
    scale, cap = check_scale_and_softcap(found, softmax_scale, softcap, q.shape[3] if ranks_fit else 1)
    dropout = check_real(found, "dropout_p", dropout_p, 0.0, 1.0, "in [0, 1]")
    flags = {
        "return_lse": return_lse, "deterministic": deterministic, "dbias": dbias, "dsink": dsink,
        "return_max_logit": return_max_logit,
    }  # fmt: skip
    flags = {name: check_flag(found, name, flag) for name, flag in flags.items()}
    sizes = (0, 0, 0, 0)
    if ranks_fit:
        sizes = (lengths[0], q.shape[2], *lengths[1:]) if varlen else (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    bottom_right = not (isinstance(causal, str) and causal == "top_left")
    # Where the used keys end is known on the device alone, and a diagonal from the bottom right ends there.
    follows_used = bottom_right and seqused_k is not None and not varlen and window != (None, None)
    _check_part(found, part, sizes if ranks_fit else None, varlen, seqused_k is not None, follows_used)
    found.stop()

    if dropout and philox.threshold(dropout) < 0:
        # Below 2**-33 no 32-bit uniform is small enough to drop anything, and the multiplier rounds to 1.
        dropout = 0.0
    batch, seqlen_q, seqlen_k = lengths if varlen else (q.shape[0], q.shape[1], v.shape[1])
    plan_as = None
    if part is not None and part.plan_as:
        whole = part.whole(sizes)
        plan_as = PlanAs(whole, _effective_window(window, *whole[2:], bottom_right), bottom_right)
    placed = part is not None and part.has_arrays
    if part is None:
        left, right = _effective_window(window, seqlen_q, seqlen_k, bottom_right)
    else:
        (left, right), bottom_right = _window_of_part(part, window, sizes, bottom_right, varlen, follows_used)
    layouts: dict[str, Any] = {name: layout(x) for name, x in tensors.items() if not OPERANDS[name].is_lengths}
    return AttentionProblem(
        dtype=q.dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=q.shape[2],
        num_heads_kv=v.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        window_left=left,
        window_right=right,
        bottom_right=bottom_right,
        softmax_scale=scale,
        softcap=cap,
        dropout_p=dropout or 0.0,
        dropout_pitches=_pitches(part, sizes) if dropout else None,
        device_starts=placed and (bool(dropout) or (left, right) != (None, None)),
        sm_margin=None if part is None else part.sm_margin,
        plan_as=plan_as,
        modifier=modifier,
        trained=trained,
        varlen=varlen,
        seqused_k=seqused_k is not None,
        further=tuple((name, x) for name, x in layouts.items() if name not in _LAYOUTS),
        **{name: x for name, x in layouts.items() if name in _LAYOUTS},
        return_lse=flags["return_lse"],
        return_max_logit=flags["return_max_logit"],
        deterministic=flags["deterministic"],
        dbias=flags["dbias"],
        dsink=flags["dsink"],
    )


def _check_part(
    found: Violations, part: object, sizes: Sequence[int] | None, varlen: bool, seqused: bool, follows_used: bool
) -> None:
    """Whether a call of these sizes, None where its operands have wrong ranks, can be this part of a larger one."""
    if part is None:
        return
    if not isinstance(part, Part):
        found.kind(f"part: got {shown(part)} of type {type(part).__name__}. It is an nvrtc_attn.Part or None.")
        return
    if sizes is not None:
        part.check(found, sizes, varlen)
    if follows_used and not part.follows_used_keys(0 if sizes is None else sizes[3]):
        found.unsupported(
            f"part, keys: got {shown(part.keys)} with seqused_k and a causal mask or window that ends with the "
            f'used keys, of which the part does not know how many the whole has. Pass causal="top_left", or all keys.'
        )
    if part.has_arrays and seqused:
        found.unsupported(
            "part, seqused_k: got both an array of where the part begins and lengths. Pass integers (start, size)."
        )
    if part.has_arrays and part.plan_as:
        found.unsupported(
            "part, plan_as: got True with an array of where the part begins, of which the whole's tiles depend. Pass "
            "integers (start, size)."
        )


def _window_of_part(
    part: Part, window: tuple[int | None, int | None], sizes: Sequence[int], bottom_right: bool, varlen: bool,
    follows_used: bool,
) -> tuple[tuple[int | None, int | None], bool]:  # fmt: skip
    """The bounds for a part, of those of the whole, and whether they count from the bottom right.

    They are relative to the part's first row and key, but for packed sequences and a diagonal that follows used keys.
    """
    seqlen_q, seqlen_k = sizes[2:]
    if part.has_arrays:
        # What hides nothing of the whole hides nothing of the part. What hides all or nothing of it nobody knows here.
        left, right = _effective_window(window, *part.whole(sizes)[2:], bottom_right)
        shift = part.shift(seqlen_q, seqlen_k, bottom_right)
        return (None if left is None else left - shift, None if right is None else right + shift), False
    if follows_used:
        window = _relative_window(window, part.shift_of_used_keys(seqlen_q), seqlen_k, seqlen_k)
    elif not varlen:
        window = _relative_window(window, part.shift(seqlen_q, seqlen_k, bottom_right), seqlen_q, seqlen_k)
        bottom_right = False
    return _effective_window(window, seqlen_q, seqlen_k, bottom_right), bottom_right


def _pitches(part: Part | None, sizes: Sequence[int]) -> tuple[int, int, int] | None:
    """Heads, rows and keys of the whole, which dropout's index counts by; None where they are the call's."""
    if part is None:
        return None
    if part.whole(sizes)[1:] == tuple(sizes[1:]) and not any(part.origin()) and not part.has_arrays:
        return None
    return part.whole(sizes)[1:]


def _relative_window(
    window: tuple[int | None, int | None], shift: int, most_right: int, most_left: int
) -> tuple[int | None, int | None]:
    """The bounds counted from a part's own corner; as far away as the last ones say, one hides everything."""
    left, right = window
    left = None if left is None else max(left - shift, -most_left)
    return left, None if right is None else max(right + shift, -most_right)


def _checked_tensors(found: Violations, given: Mapping[str, object]) -> dict[str, TensorView]:
    """The inputs that are there, in the order of the table; what is no tensor is a violation."""
    tensors: dict[str, TensorView] = {}
    for name in INPUTS:
        tensor = given.get(name)
        if isinstance(tensor, TensorView):
            tensors[name] = tensor
        elif tensor is not None or name not in OPTIONAL_INPUTS:
            found.kind(f"{name}: got {shown(tensor)} of type {type(tensor).__name__}. A tensor is needed.")
    return tensors


def _check_operands(found: Violations, tensors: dict[str, TensorView], varlen: bool) -> bool:
    """Check the tensors against one another. Whether the ranks fit, without which sizes mean nothing."""
    check_dtypes(found, tensors)
    check_devices(found, tensors)
    ranks_fit = check_ranks(found, tensors)
    if ranks_fit:
        check_shapes(found, tensors["q"], tensors["k"], tensors["v"], varlen)
        check_optional(found, tensors, varlen)
    return ranks_fit


def _effective_window(
    window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int, bottom_right: bool
) -> tuple[int | None, int | None]:
    """The loosest bounds that still exclude a key of some row: one beyond them costs a masked kernel for nothing."""
    left, right = window
    if left is not None and left >= (seqlen_k if bottom_right else seqlen_q) - 1:
        left = None
    if right is not None and right >= (seqlen_q if bottom_right else seqlen_k) - 1:
        right = None
    return left, right


def layout(view: TensorView) -> OperandLayout:
    """What of a tensor decides which kernel can read it."""
    # The lowest set bit of the address, at most 16; a null pointer (no elements) is aligned to everything.
    alignment = min(view.ptr & -view.ptr or 16, 16)
    return OperandLayout(shape=view.shape, strides=view.strides, dtype=view.dtype, offset_alignment=alignment)


def dense_layout(shape: Sequence[int], dtype: str) -> OperandLayout:
    """Row-major and 16-byte aligned; strides of dims of size 1 are 0 as in a view."""
    sizes = tuple(shape)
    return OperandLayout(shape=sizes, strides=normalised(sizes, compact_strides(sizes)), dtype=dtype)
