"""A traced modifier: its `Program`, which decides the kernel, and the arrays and numbers of this call."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .derivative import derivatives
from .graph import POSITIONS, Node, dtype_of, listing, load, rebuilt, substituted, walk


@dataclass(frozen=True, slots=True, repr=False)
class Program:
    """The expressions with numbered operands: equal for calls that differ in numbers and in the content of arrays."""

    score: Node | None
    mask: Node | None
    captures: tuple[tuple[str, int], ...]
    """Dtype and rank of each captured array."""
    numbers: tuple[str, ...]
    """``float`` or ``int`` of each number that is given at run time."""
    sizes: tuple[tuple[int, int, int], ...] = ()
    """Heads, queries and keys that lists of blocks in it are for, 1 head for any number; what is left of a modifier in
    a call, which has been compared with them, has none."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.score, self.mask, self.captures, self.numbers, self.sizes)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[[str], Program], tuple[str]]:
        """As text: nodes are compared by identity, and a deep expression is no deep recursion there."""
        return read_program, (written(self),)

    def __repr__(self) -> str:
        roots = {name: x for name, x in (("score", self.score), ("mask", self.mask)) if x is not None}
        return f"Program({', '.join(roots)}: {listing(list(roots.values()))}; {self.captures}, {self.numbers})"


@dataclass(frozen=True, slots=True, eq=False)
class Modifier:
    """What `trace` returns. Pass it as ``score_mod``: nothing is traced again.

    ``captures`` are the arrays that the functions read, of ``aux`` too, in the order in which they are used, which is
    that of ``daux``. Arrays on which no score depends are left out.
    """

    program: Program
    captures: tuple[Any, ...]
    numbers: tuple[float, ...]
    text: str = ""
    """The program as text, where `trace` was called by the user: what a program of torch.compile reads of it."""
    known: dict[Hashable, Any] = field(init=False, repr=False, default_factory=dict)
    """What was worked out from it before: a call asks for the same again."""

    def __reduce__(self) -> tuple[type[Modifier], tuple[Any, ...]]:
        """A copy, of `copy.deepcopy` or of a pickle, has arrays of its own and works out anew what is known."""
        return Modifier, (self.program, self.captures, self.numbers, self.text)

    @classmethod
    def of(
        cls,
        score: Node | None,
        mask: Node | None,
        captures: tuple[Any, ...],
        sizes: tuple[tuple[int, int, int], ...] = (),
    ) -> Modifier:
        """The modifier of expressions over ``captures``."""
        return cls.parts(score, mask, captures, sizes)[0]

    @classmethod
    def parts(
        cls,
        score: Node | None,
        mask: Node | None,
        captures: tuple[Any, ...],
        sizes: tuple[tuple[int, int, int], ...] = (),
    ) -> tuple[Modifier, tuple[int, ...]]:
        """Number the operands in the order in which the expressions use them, and leave out the others.

        Also returns which of ``captures`` the modifier has.
        """
        roots = [x for x in (score, mask) if x is not None]
        slots: dict[int, int] = {}
        params: dict[int, int] = {}
        numbers: list[float] = []
        kinds: list[str] = []
        for node in walk(roots):
            if node.op == "load":
                slots.setdefault(node.value, len(slots))
            elif node.op == "param" and node.value[0] not in params:
                params[node.value[0]] = len(params)
                numbers.append(node.value[1])
                kinds.append(node.kind)

        def value_of(node: Node) -> Any:
            if node.op == "param":
                return params[node.value[0]]
            return slots[node.value] if node.op == "load" else node.value

        def numbered(root: Node | None) -> Node | None:
            return None if root is None else rebuilt(root, value_of)

        kept = tuple(sorted(slots, key=lambda x: slots[x]))
        arrays = tuple(captures[i] for i in kept)
        program = Program(
            numbered(score), numbered(mask), tuple((dtype_of(x), len(x.shape)) for x in arrays), tuple(kinds), sizes
        )
        return cls(program, arrays, tuple(numbers)), kept

    def with_captures(self, captures: tuple[Any, ...]) -> Modifier:
        """The same over other arrays of the same dtypes and shapes; what was worked out of it is shared."""
        result = object.__new__(Modifier)
        write = object.__setattr__
        write(result, "program", self.program)
        write(result, "captures", captures)
        write(result, "numbers", self.numbers)
        write(result, "text", self.text)
        write(result, "known", self.known)
        return result

    def check_sizes(
        self, heads: int | None = None, rows: int | None = None, keys: int | None = None, *, packed: bool = False
    ) -> None:
        """Refuse a call of other sizes than those that lists of blocks are for; those of the whole, of a part.

        ``packed``: rows and keys are those of the longest sequence. Shorter ones have the first of the listed blocks.

        Raises
        ------
        ValueError
            The message has both.
        """
        for for_heads, for_rows, for_keys in self.program.sizes:
            if heads is not None and for_heads not in (1, heads):
                raise ValueError(
                    f"mask_mod: its lists of blocks are for {for_heads} heads, but q has {heads}. Make them by "
                    f"nvrtc_attn.block_mask for as many, or for all alike, with an indptr of one dim."
                )
            for name, there, wanted in (("queries", rows, for_rows), ("keys", keys, for_keys)):
                if there is not None and (there > wanted if packed else there != wanted):
                    longest = " in the longest sequence (max_seqlen)" if packed else ""
                    raise ValueError(
                        f"mask_mod: its lists of blocks are for {wanted} {name}, but the call has {there}{longest}. "
                        f"Make them by nvrtc_attn.block_mask for this length."
                    )

    def moved(self, starts: Sequence[int | None]) -> Modifier:
        """The same of a part of the scores, whose own indices begin at 0: b, h, q and k are those of the whole.

        ``starts`` are where they begin in the whole, None where nobody asks. They become captured numbers, so that one
        kernel serves every part.
        """
        used = frozenset().union(*(x.depends for x in (self.program.score, self.program.mask) if x is not None))
        axes = {name: x for name, x in zip(POSITIONS, starts, strict=True) if x is not None and name in used}
        if not axes:
            return self
        return Modifier(_moved(self.program, tuple(axes)), self.captures, (*self.numbers, *axes.values()))

    def moved_on_device(self, starts: Mapping[str, Any]) -> Modifier:
        """As `moved`, by captured int32 scalars, each for the index of that name."""
        used = frozenset().union(*(x.depends for x in (self.program.score, self.program.mask) if x is not None))
        axes = tuple(name for name in starts if name in used)
        if not axes:
            return self
        program = _moved_on_device(self.program, axes)
        return Modifier(program, (*self.captures, *(starts[x] for x in axes)), self.numbers)

    @property
    def valued(self) -> tuple[Node | None, Node | None]:
        """The expressions of score and mask with the numbers of this call."""

        def value_of(node: Node) -> Any:
            return (node.value, self.numbers[node.value]) if node.op == "param" else node.value

        score, mask = (None if x is None else rebuilt(x, value_of) for x in (self.program.score, self.program.mask))
        return score, mask

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Which captured arrays the score has a derivative to."""
        return _differentiable(self.program)


@functools.lru_cache(maxsize=1024)
def _differentiable(program: Program) -> tuple[int, ...]:
    if program.score is None:
        return ()
    return tuple(sorted({x.value for x in derivatives(program.score) if x.op == "load"}))


@functools.lru_cache(maxsize=1024)
def written(program: Program) -> str:
    """The program as JSON, node by node; `read_program` makes an equal one of it."""
    roots = {name: x for name, x in (("score", program.score), ("mask", program.mask)) if x is not None}
    places: dict[Node, int] = {}
    nodes = []
    for node in walk(list(roots.values())):
        places[node] = len(places)
        nodes.append([node.op, node.kind, node.value, [places[x] for x in node.args]])
    ends = {name: places[x] for name, x in roots.items()}
    sizes = {"sizes": program.sizes} if program.sizes else {}
    whole = {"nodes": nodes, "captures": program.captures, "numbers": program.numbers, **sizes, **ends}
    return json.dumps(whole, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def read_program(text: str) -> Program:
    """What `written` made a text of."""
    fields = json.loads(text)
    nodes: list[Node] = []
    for op, kind, value, args in fields["nodes"]:
        nodes.append(Node(op, tuple(nodes[i] for i in args), kind, value))
    score, mask = (nodes[fields[name]] if name in fields else None for name in ("score", "mask"))
    sizes = tuple((heads, rows, keys) for heads, rows, keys in fields.get("sizes", ()))
    captures = tuple((dtype, rank) for dtype, rank in fields["captures"])
    return Program(score, mask, captures, tuple(fields["numbers"]), sizes)


@functools.lru_cache(maxsize=1024)
def _moved(program: Program, axes: tuple[str, ...]) -> Program:
    """``program`` with one more number for each of ``axes``, which is added to the index."""
    first = len(program.numbers)
    starts = {name: Node("param", kind="int", value=first + i) for i, name in enumerate(axes)}
    score, mask = (None if x is None else _shifted(x, starts) for x in (program.score, program.mask))
    return Program(score, mask, program.captures, (*program.numbers, *(("int",) * len(axes))))


@functools.lru_cache(maxsize=1024)
def _moved_on_device(program: Program, axes: tuple[str, ...]) -> Program:
    """``program`` with one more captured array without dimensions for each of ``axes``."""
    first = len(program.captures)
    starts = {name: load(first + i, "int", ()) for i, name in enumerate(axes)}
    score, mask = (None if x is None else _shifted(x, starts) for x in (program.score, program.mask))
    sizes = tuple((1 if "h" in axes else heads, rows, keys) for heads, rows, keys in program.sizes)
    return Program(score, mask, (*program.captures, *((("int32", 0),) * len(axes))), program.numbers, sizes)


def _shifted(root: Node, starts: Mapping[str, Node]) -> Node:
    places = {}
    for name, start in starts.items():
        index = Node(name, kind="int")
        places[index] = Node("add", (index, start), "int")
    return substituted(root, places)
