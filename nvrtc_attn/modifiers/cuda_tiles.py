"""A mask as C++ that decides about whole tiles: the text of the kernel that finds those which it leaves nothing of.

The rules are those of ``interval_rules``, spelled in ``cuda_src/nvrtc_attn/collective/tile_ranges.cuh``. The bytes that
a launch passes are those of the attention kernel's own text (``cuda``), so that one block of them serves both.
"""

from __future__ import annotations

import functools
from typing import Final

from .cuda import cuda_source
from .cuda_expressions import TYPES, Text, members_of
from .graph import Node
from .intervals import leaves_of, ranges_below
from .modifier import Program

_OF_BOOLEANS: Final = {"and": "both_of", "or": "either_of", "xor": "one_of", "not": "not_so"}
_UNKNOWN: Final = {"float": "any_float()", "int": "any_int()", "bool": "any_bool()"}


@functools.lru_cache(maxsize=1024)
def tile_source(program: Program, trained: tuple[int, ...] = (), ordered: bool = False) -> str:
    """The definitions of ``ModifierBlock`` and of a ``Modifier`` that knows ranges of the program's mask.

    Parameters
    ----------
    trained, ordered
        Those of the attention kernel's own text: its block has the addresses of gradients.

    Raises
    ------
    TraceError
        A literal that int32 does not hold.
    """
    mask = program.mask
    assert mask is not None
    leaves = leaves_of(mask)
    block = cuda_source(program, trained, ordered).partition("template <class Element>")[0]
    members = members_of([mask])
    text = Text(program, members, [mask])
    order = ranges_below(mask, leaves)
    names = {node: f"r{i}" for i, node in enumerate(order)}
    names |= {node: f"rows.x{i}" for i, node in enumerate(leaves.rows)}
    names |= {node: f"columns.x{i}" for i, node in enumerate(leaves.columns)}
    names |= {node: node.op for node in order if node.op in ("q", "k")}
    lines = [
        block + "template <class Element>",
        "struct Modifier {",
        "  static constexpr bool kScores = false;",
        "  static constexpr bool kMasks = true;",
        "  static constexpr bool kTrains = false;",
        "  ModifierBlock const& block;",
        "  int b, h;",
        *(f"  {TYPES[x.kind]} {name};" for x, name in members.items()),
        *text.slice_members(),
        "  NVRTC_ATTN_DEVICE Modifier(ModifierBlock const& block_, int b_, int h_) : block(block_), b(b_), h(h_) {",
        *text.body([*members, *text.slice_indices()], inside=True),
        *(f"    {name} = {text.name(x, inside=True)};" for x, name in members.items()),
        *text.slice_values(),
        "  }",
        *_values("Rows", "q", leaves.rows, text),
        *_values("Columns", "k", leaves.columns, text),
        "  NVRTC_ATTN_DEVICE IntRange keeps(IntRange q, IntRange k, Rows const& rows, Columns const& columns) const {",
    ]
    given = {*leaves.rows, *leaves.columns}
    for node in order:
        if node in given or node.op in ("q", "k"):
            continue
        if node.op == "load" and node.depends & {"q", "k"}:
            rank = len(node.args)
            lines.append(f"    IntRange const i{names[node]}[{rank}] = {{{', '.join(names[x] for x in node.args)}}};")
        lines.append(f"    {_range(node)} const {names[node]} = {_expression(node, names, text)};")
    return "\n".join([*lines, f"    return {names[mask]};", "  }", "};", "}  // namespace nvrtc_attn", ""])


def _range(node: Node) -> str:
    return "FloatRange" if node.kind == "float" else "IntRange"


def _of_value(node: Node, name: str) -> str:
    """The range of a number. What was computed may have been rounded otherwise in the attention kernel."""
    if node.kind == "float" and node.op not in ("load", "number", "param"):
        return f"widened({name}, {name})"
    return f"range_of({name})"


def _values(struct: str, position: str, leaves: tuple[Node, ...], text: Text) -> list[str]:
    """The struct of the values that are computed at each query, or key, and how a tile's ranges of them are found."""
    fields = [(f"x{i}", x) for i, x in enumerate(leaves)]
    return [
        f"  struct {struct} {{",
        *(f"    {_range(x)} {name};" for name, x in fields),
        "    NVRTC_ATTN_DEVICE void clear() {",
        *(f"      make_nothing({name});" for name, _ in fields),
        "    }",
        f"    NVRTC_ATTN_DEVICE void join({struct} const& other) {{",
        *(f"      {name} = joined({name}, other.{name});" for name, _ in fields),
        "    }",
        f"    NVRTC_ATTN_DEVICE {struct} of_lane(int lane) const {{",
        f"      return {{{', '.join(f'nvrtc_attn::of_lane({name}, lane)' for name, _ in fields)}}};",
        "    }",
        "  };",
        f"  NVRTC_ATTN_DEVICE void join({struct}& found, int {position}, int {position}0 = 0) const {{",
        *text.body(leaves),
        *(f"    found.{name} = joined(found.{name}, {_of_value(x, text.name(x))});" for name, x in fields),
        "  }",
    ]


def _expression(node: Node, names: dict[Node, str], text: Text) -> str:
    if not node.depends & {"q", "k"}:
        return _of_value(node, text.name(node))
    if node.op == "load":
        element = text._load(node, [f"at[{axis}]" for axis in range(len(node.args))])
        return (
            f"range_in_box({_UNKNOWN[node.kind]}, i{names[node]}, "
            f"[&](int const (&at)[{len(node.args)}]) {{ return {element}; }})"
        )
    if node.op == "call":
        return _UNKNOWN[node.kind]
    args = [names[x] for x in node.args]
    if node.kind == "bool" and node.op in _OF_BOOLEANS:
        return f"{_OF_BOOLEANS[node.op]}({', '.join(args)})"
    if len(args) == 2 and args[0] == args[1] and node.op in ("mul", "minimum", "maximum", "and"):
        return f"range_square({args[0]})" if node.op == "mul" else args[0]
    return f"range_{node.op}({', '.join(args)})"
