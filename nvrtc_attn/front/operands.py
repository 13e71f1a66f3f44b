"""The one table of operands: every tensor that a call reads or writes, in the order of the kernels' params.

Validation (`operand_checks`), the params structs (`jit.params`), the addresses of a launch (`plans.plan`), the scratch
memory of the autotuner and the adapters of the frameworks are derived from it. To add an optional input, write

* a row here, after the last input, and its name in `FurtherInputs`,
* its pointer in ``cuda_src/nvrtc_attn/params.cuh``, after that of the input before it (and, unless it is a dense
  vector, its strides after those of the operands with the same dims): the generated ``static_assert`` lines check both.
  With ``behind`` it lies behind all else instead, so that kernels that do not read it stay as they are,
* what a kernel does with it, behind ``Traits::kHas<Name>``, and the same in `nvrtc_attn.cpu.reference`.

The public functions take it by its name then. Until all do something with it, name the kernel families that do
(``families``): the others refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, Final, Literal, TypedDict, TypeVar

Role = Literal["", "in", "in?", "out", "out?"]
"""What a pass does with an operand: nothing, read it or write it; with a question mark where it may be missing."""
Shape = tuple[int, ...]

FAMILIES: Final = ("forward_portable", "backward_portable", "forward_hopper", "backward_hopper")
_LETTERS: Final = {
    "batch": "b", "seqlen_q": "m", "seqlen_k": "n", "num_heads": "h", "num_heads_kv": "h", "head_dim": "d",
    "head_dim_v": "d",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One row of the table."""

    name: str
    axes: tuple[str, ...]
    """Names of the dims, outermost first. Packed sequences have batch 1 and all tokens on seqlen_q and seqlen_k."""
    dtypes: tuple[str, ...]
    """Accepted element types, that of an allocation first; the name of an operand means the type of that one. What a
    pass reads beside the inputs is of the first."""
    forward: Role
    backward: Role
    gradient_of: str = ""
    broadcast: bool = False
    """Each dim is full or 1, and a kernel walks a dim of size 1 with stride 0. Not for packed sequences."""
    dense: bool = False
    """A row-major array without gaps, which has no strides in the params."""
    behind: bool = False
    """Its pointer, strides and element type lie behind the params of its pass, in those of the kernels that read it."""
    alone: bool = False
    """With ``behind``: its pointer has a struct of its own, for kernels that are asked for it alone."""
    families: tuple[str, ...] = FAMILIES
    """The kernel families that read it; asked of `FURTHER_INPUTS` alone."""

    @property
    def strides(self) -> str:
        """One letter for each stride in the params, as in ``q_stride_m``; empty for a dense vector."""
        return "" if self.dense else "".join(_LETTERS[axis] for axis in self.axes)

    @property
    def is_lengths(self) -> bool:
        """Whether its values are lengths of packed sequences."""
        return self.axes[0].startswith("number of sequences")

    def role(self, backward: bool) -> Role:
        return self.backward if backward else self.forward


def _rows() -> tuple[Operand, ...]:
    q = ("batch", "seqlen_q", "num_heads", "head_dim")
    k = ("batch", "seqlen_k", "num_heads_kv", "head_dim")
    v = (*k[:3], "head_dim_v")
    out = (*q[:3], "head_dim_v")
    lse = ("batch", "num_heads", "seqlen_q")
    scores = ("batch", "num_heads", "seqlen_q", "seqlen_k")
    starts, counts, heads = ("number of sequences + 1",), ("number of sequences",), ("num_heads",)
    of_heads = ("sequences", "num_heads")  # the batch, or how many sequences are packed

    def row(
        name: str, axes: Shape | tuple[str, ...], dtypes: str, forward: Role, backward: Role, **more: Any
    ) -> Operand:
        return Operand(
            name=name,
            axes=tuple(map(str, axes)),
            dtypes=tuple(dtypes.split()),
            forward=forward,
            backward=backward,
            **more,
        )

    return (
        row("q", q, "q", "in", "in"),
        row("k", k, "q", "in", "in"),
        row("v", v, "q", "in", "in"),
        row("out", out, "q float32", "out", "in"),
        row("dout", out, "q", "", "in", gradient_of="out"),
        row("lse", lse, "float32", "out?", "in"),
        row("max_logit", of_heads, "float32", "out?", "", dense=True, behind=True, alone=True),
        row("dlse", lse, "float32", "", "in?", gradient_of="lse"),
        row("bias", scores, "q float32", "in?", "in?", broadcast=True),
        row("mask", scores, "bool uint8", "in?", "in?", broadcast=True),
        row("cu_seqlens_q", starts, "int32", "in?", "in?", dense=True),
        row("cu_seqlens_k", starts, "int32", "in?", "in?", dense=True),
        row("seqused_k", counts, "int32", "in?", "in?", dense=True),
        row("sink", heads, "float32 q", "in?", "in?", behind=True),
        row("dq", q, "q float32", "", "out", gradient_of="q"),
        row("dk", k, "k float32", "", "out", gradient_of="k"),
        row("dv", v, "v float32", "", "out", gradient_of="v"),
        row("dbias", scores, "bias", "", "out?", gradient_of="bias", broadcast=True),
        row("dsink", heads, "sink", "", "out?", gradient_of="sink", behind=True),
    )


OPERANDS: Final[dict[str, Operand]] = {row.name: row for row in _rows()}
INPUTS: Final = tuple(row.name for row in OPERANDS.values() if row.forward in ("in", "in?"))
"""The tensors that a call is given, in the order of the adapters: q, k, v, then what may be missing."""
OPTIONAL_INPUTS: Final = tuple(name for name in INPUTS if OPERANDS[name].forward == "in?")
FORWARD: Final = tuple(row.name for row in OPERANDS.values() if row.forward)
"""Operands of the forward pass, in the order of the addresses of a launch."""
BACKWARD: Final = tuple(row.name for row in OPERANDS.values() if row.backward)
GRADIENTS: Final = tuple(row.name for row in OPERANDS.values() if row.gradient_of and row.backward in ("out", "out?"))
"""What the backward pass writes. One that is optional is asked for by an option of its name."""
OPTIONAL_GRADIENTS: Final = tuple(name for name in GRADIENTS if OPERANDS[name].backward == "out?")
DIFFERENTIABLE: Final = tuple(OPERANDS[name].gradient_of for name in GRADIENTS)
FURTHER_INPUTS: Final = tuple(
    name for name in OPTIONAL_INPUTS if name not in ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")
)
"""Those that the public functions take beside the arguments that they spell out."""


def shape_of(name: str, shapes: Mapping[str, Shape], sequences: int | None = None) -> Shape:
    """The shape of an operand, from those of q, k, v and of what it is the gradient of.

    ``sequences`` are packed, unless ``shapes`` has that of cu_seqlens_q, which says how many.
    """
    row = OPERANDS[name]
    if row.gradient_of in shapes:
        return shapes[row.gradient_of]
    sizes: dict[str, int] = {}
    for given in "vkq":
        sizes.update(zip(OPERANDS[given].axes, shapes[given], strict=True))
    if sequences is None:
        sequences = shapes["cu_seqlens_q"][0] - 1 if "cu_seqlens_q" in shapes else sizes["batch"]
    sizes["sequences"] = sequences
    return tuple(sizes[axis] for axis in row.axes)


def dtypes_of(name: str, dtypes: Mapping[str, str]) -> tuple[str, ...]:
    """The accepted element types of an operand, from the types of those that its row names; the first is its own."""
    return tuple(dict.fromkeys(dtypes.get(dtype, dtype) for dtype in OPERANDS[name].dtypes))


def addresses(names: Sequence[str], pointers: Mapping[str, int]) -> tuple[int, ...]:
    """Addresses in the order of ``names``, `FORWARD` or `BACKWARD`; 0 for an operand that is not there."""
    return tuple([pointers.get(name, 0) for name in names])


def unread_by(family: str, names: Sequence[str]) -> list[str]:
    """Why no kernel of one of `FAMILIES` serves a call with these optional inputs; empty when one does."""
    unread = [name for name in names if family not in OPERANDS[name].families]
    return [f"{name} is given, which no {family} kernel reads" for name in unread]


class FurtherInputs(TypedDict, total=False):
    """`FURTHER_INPUTS` for type checkers: one line ``name: Any`` for each."""

    sink: Any


_Function = TypeVar("_Function", bound=Callable[..., Any])
_ACCEPTED: Final[dict[str, tuple[str, ...]]] = {}
"""Arguments that every public function of a name takes: what a message may suggest."""


def takes_further_inputs(function: _Function) -> _Function:
    """Let ``**further`` of a public function's signature show as the names of `FURTHER_INPUTS`. No wrapper."""
    given = signature(function)
    kept = [x for x in given.parameters.values() if x.kind is not Parameter.VAR_KEYWORD]
    added = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation="Any") for name in FURTHER_INPUTS]
    function.__signature__ = given.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    names = tuple(x.name for x in (*kept, *added))
    _ACCEPTED[function.__name__] = tuple(x for x in _ACCEPTED.get(function.__name__, names) if x in names)
    return function


def unexpected(function: str, name: str, accepted: Iterable[str]) -> TypeError:
    """Python's error for an argument that a function does not have, with the nearest of those that it has."""
    from difflib import get_close_matches

    nearest = get_close_matches(name, tuple(accepted), n=1, cutoff=0.55)
    advice = f"Did you mean {nearest[0]!r}? See help(nvrtc_attn.{function})." if nearest else ""
    return TypeError(
        f"{function}() got an unexpected keyword argument {name!r}. {advice or f'See help(nvrtc_attn.{function}).'}"
    )


def check_further(function: str, further: Mapping[str, Any]) -> tuple[Any, ...]:
    """`FURTHER_INPUTS` in their order; refuses a keyword argument that is none of them, as Python does."""
    for name in further:
        if name not in FURTHER_INPUTS:
            raise unexpected(function, name, _ACCEPTED.get(function, FURTHER_INPUTS))
    return tuple(map(further.get, FURTHER_INPUTS))
