"""The text of a PTX module -> numbers that `machine.cpp` executes.

An instruction becomes one of the machine's operations: what its modifiers say of memory order, caches and rounding
modes other than of conversions to integers is dropped, since a machine that does one thing after another has no use for
it. What is not known raises `UnknownInstructionError` with the text, before anything runs.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SPECIAL = (
    "%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x", "%cluster_ctarank", "%cluster_nctarank", "%laneid", "%warpid",
    "%smid", "zero",
)  # fmt: skip
"""As in ``Special`` of machine.hpp."""
ZEROS = {"%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z", "%clusterid.y", "%clusterid.z"}
SPACES = {"global": 0, "shared": 1, "param": 2, "local": 3, "const": 0, "": 4}
BRANCH, EXIT = -1, -2
SMEM_BASE = 1024
"""Address of the first byte of a block's shared memory."""
BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4}
BYTES |= {"b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "tf32": 4, "pred": 0}
DROPPED = {
    "rn", "approx", "full", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys", "cluster", "weak",
    "volatile", "nc", "cs", "ca", "cg", "lu", "cv", "wb", "wt", "uni", "noftz", "L1::no_allocate", "L2::128B",
    "L2::256B", "L2::64B", "L1::evict_last", "L1::evict_first", "L1::evict_normal", "aligned", "xorsign",
}  # fmt: skip
ATOMICS = {"add", "min", "max", "inc", "dec", "exch", "cas", "or", "and", "xor"}
TYPES = {"bf16": 0, "f16": 1, "tf32": 2}


class UnknownInstructionError(Exception):
    """The machine does not have this."""


@dataclass
class Scope:
    names: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Register -> (kind, slot): kind "p" for predicates, else "32" or "64"."""
    labels: dict[str, int] = field(default_factory=dict)
    """Label -> number."""


@dataclass
class Program:
    """What a kernel is to the machine. ``lines``: the text of every instruction."""

    code: array[int]
    pool: array[int]
    constants: array[int]
    special: list[int]
    sizes: list[int]
    """Slots, predicates, bytes of static shared memory and of local memory of a thread, blocks of a cluster."""
    data: dict[str, bytes]
    """Variables in global memory that the kernel names, and what they begin with."""


def statements(text: str) -> Iterator[tuple[int, str]]:
    """(line, statement) of the body of the kernel: labels with their colon, braces of scopes by themselves."""
    line = 1 + text[: text.index("{\n", text.index(".entry"))].count("\n")
    body = text[text.index("{\n", text.index(".entry")) :]
    at, size, depth = 0, len(body), 0
    token = re.compile(r"[{};:\n]|//[^\n]*")
    current: list[str] = []
    position = 0
    while at < size:
        found = token.search(body, at)
        if found is None:
            break
        mark = found.group()
        current.append(body[position : found.start()])
        at = position = found.end()
        if mark == "\n":
            line += 1
            current.append(" ")
            continue
        if mark.startswith("//"):
            continue
        said = "".join(current).strip()
        if mark == "{" and not said and not depth:
            current = []
            yield line, "{"
        elif mark == "}" and not said and not depth:
            current = []
            yield line, "}"
        elif mark == "{":
            depth += 1
            current.append("{")
        elif mark == "}":
            depth -= 1
            current.append("}")
        elif mark == ":" and not depth and re.fullmatch(r"[\w$]+", said) and body[at : at + 1] != ":":
            current = []
            yield line, said + ":"
        elif mark == ";":
            current = []
            if said:
                yield line, said
        else:
            current.append(mark)


def split(text: str) -> list[str]:
    """Operands: parts between commas that are in no bracket."""
    parts, depth, begun = [], 0, 0
    for at, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[begun:at].strip())
            begun = at + 1
    last = text[begun:].strip()
    return [*parts, last] if last else parts


class Reader:
    """Reads one kernel."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.scopes = [Scope()]
        self.slots = 0
        self.predicates = 0
        self.code = array("i")
        self.pool = array("i")
        self.known: dict[tuple[int, int], int] = {}
        """(value, width in slots) -> slot of a constant."""
        self.constants = array("Q")
        self.special = [-1] * 16
        self.labels: list[int] = []
        """Number of a label -> instruction, -1 while it is not known."""
        self.jumps: list[tuple[int, int]] = []
        self.variables: dict[str, tuple[str, int]] = {}
        """Name -> (space, address), of variables but those in global memory."""
        self.static_smem = 0
        self.local_bytes = 0
        self.data: dict[str, bytes] = {}
        self.ops: Callable[[str], int]

    # ------------------------------------------------------------------------------------------------- declarations

    def declare_module(self) -> None:
        """Variables before the kernel: shared memory, static before dynamic."""
        head = self.text[: self.text.index(".entry")]
        dynamic = []
        for space, align, size, name, count in re.findall(
            r"^\s*(?:\.visible |\.extern |\.weak )*\.(shared|local) (?:\.align (\d+) )?\.(\w+)\s+([\w$]+)"
            r"(?:\[(\d*)\])?;",
            self.text, re.MULTILINE,
        ):  # fmt: skip
            if count == "" and f"{name}[]" in head:
                dynamic.append(name)
                continue
            total, step = BYTES[size] * int(count or 1), int(align or BYTES[size])
            if space == "shared":
                self.static_smem = -(-self.static_smem // step) * step
                self.variables[name] = ("shared", SMEM_BASE + self.static_smem)
                self.static_smem += total
            else:
                self.local_bytes = -(-self.local_bytes // step) * step
                self.variables[name] = ("local", self.local_bytes)
                self.local_bytes += total
        self.static_smem = -(-self.static_smem // 1024) * 1024 if dynamic else self.static_smem
        for name in dynamic:
            self.variables[name] = ("shared", SMEM_BASE + self.static_smem)
        for name in re.findall(r"\.param [^\n]*?([\w$]+)\[", self.text):
            self.variables[name] = ("param", 0)

    def global_variable(self, name: str) -> int:
        """The slot of the address of a variable in global memory, whose bytes are kept."""
        found = re.search(
            rf"^\s*(?:\.visible |\.weak )*\.(?:global|const) (?:\.align \d+ )?\.(\w+) {re.escape(name)}(?:\[(\d+)\])?"
            r"(?: = ([^;]*))?;", self.text, re.MULTILINE,
        )  # fmt: skip
        if found is None:
            raise UnknownInstructionError(f"a variable {name}")
        kind, count, given = found.groups()
        values = split((given or "").strip("{}"))
        code = {1: "B", 2: "H", 4: "I", 8: "Q"}[BYTES[kind]]
        numbers = [number_of(value) & (256 ** BYTES[kind] - 1) for value in values]
        numbers += [0] * (int(count or 1) - len(numbers))
        self.data[name] = struct.pack(f"<{len(numbers)}{code}", *numbers)
        slot = self.new_slot(2)
        self.constants.extend([slot, 3, list(self.data).index(name)])
        return slot

    def new_slot(self, width: int) -> int:
        self.slots += width
        return self.slots - width

    def declare(self, text: str) -> None:
        """``.reg .b32 %r<10>`` or ``.reg .pred p, q``."""
        _, kind, names = text.split(None, 2)
        width = {"pred": 0}.get(kind[1:], 2 if BYTES[kind[1:]] == 8 else 1)
        for name in split(names):
            several = re.fullmatch(r"(.*)<(\d+)>", name)
            for each in [f"{several[1]}{n}" for n in range(int(several[2]))] if several else [name]:
                if width == 0:
                    self.scopes[-1].names[each] = ("p", self.predicates)
                    self.predicates += 1
                else:
                    self.scopes[-1].names[each] = ("64" if width == 2 else "32", self.new_slot(width))

    # ----------------------------------------------------------------------------------------------------- operands

    def find(self, name: str) -> tuple[str, int] | None:
        for scope in reversed(self.scopes):
            if name in scope.names:
                return scope.names[name]
        return None

    def label(self, name: str) -> int:
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return scope.labels[name]
        # A label of a block of inline assembly is its scope's own; one of the kernel begins with a dollar sign.
        scope = self.scopes[0] if name.startswith("$") else self.scopes[-1]
        scope.labels[name] = len(self.labels)
        self.labels.append(-1)
        return scope.labels[name]

    def constant(self, value: int, width: int) -> int:
        value &= 0xFFFFFFFFFFFFFFFF if width == 2 else 0xFFFFFFFF
        slot = self.known.get((value, width))
        if slot is None:
            slot = self.known[value, width] = self.new_slot(width)
            self.constants.extend([slot, width, value])
        return slot

    def predicate(self, text: str) -> int:
        found = self.find(text)
        if found is None or found[0] != "p":
            raise UnknownInstructionError(f"a predicate {text}")
        return found[1]

    def value(self, text: str, width: int) -> int:
        """The slot of a register, number, special register or address of a variable that is read, of that width."""
        found = self.find(text)
        if found is not None:
            if found[0] != ("64" if width == 2 else "32"):
                raise UnknownInstructionError(f"{text} where a register of {32 * width} bits is read")
            return found[1]
        if text in ZEROS:
            text = "zero"
        if text in SPECIAL and width == 1:
            which = SPECIAL.index(text)
            if self.special[which] < 0:
                self.special[which] = self.new_slot(1)
            return self.special[which]
        if text in self.variables:
            return self.variable(text, width)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?|0[fFdD][0-9a-fA-F]+", text):
            return self.constant(number_of(text), width)
        if re.fullmatch(r"[A-Za-z_$][\w$]*", text) and width == 2:
            return self.global_variable(text)
        raise UnknownInstructionError(f"an operand {text}")

    def variable(self, name: str, width: int) -> int:
        space, address = self.variables[name]
        if space != "param":
            return self.constant(address, width)
        slot = self.known.get((-1, 2))
        if slot is None:
            slot = self.known[-1, 2] = self.new_slot(2)
            self.constants.extend([slot, 4, 0])  # the address of the parameters, set at launch
        return slot

    def target(self, text: str, width: int) -> int:
        """The slot of a register that is written; -1 for ``_``."""
        if text == "_":
            return -1
        found = self.find(text)
        if found is None or found[0] != ("64" if width == 2 else "32"):
            raise UnknownInstructionError(f"{text} where a register of {32 * width} bits is written")
        return found[1]

    def address(self, text: str) -> list[int]:
        """Slot, whether it is 64 bits wide, what is added."""
        inner = text.strip()[1:-1].strip() if text.startswith("[") else text
        base, _, added = inner.partition("+")
        base, offset = base.strip(), int(added or "0", 0)
        found = self.find(base)
        if found is not None:
            return [found[1], int(found[0] == "64"), offset]
        if base in self.variables:
            if self.variables[base][0] == "param":
                return [self.variable(base, 2), 1, offset]
            return [-1, 1, self.variables[base][1] + offset]
        if re.fullmatch(r"-?\d+", base):
            return [-1, 1, int(base) + offset]
        return [self.global_variable(base), 1, offset]

    def vector(self, text: str) -> list[str]:
        return split(text[1:-1]) if text.startswith("{") else [text]

    # ------------------------------------------------------------------------------------------------- instructions

    def emit(self, op: str | int, operands: list[int], guard: tuple[int, bool], line: int, label: int = -1) -> None:
        number = op if isinstance(op, int) else self.ops(op)
        if not isinstance(op, int) and number < 0:
            raise UnknownInstructionError(op)
        if label >= 0:
            self.jumps.append((len(self.code) + 3, label))
        self.code.extend([number, guard[0], int(guard[1]), 0, line, len(self.pool), len(operands)])
        self.pool.extend(operands)

    def read(self, ops: Callable[[str], int]) -> Program:
        self.ops = ops
        self.declare_module()
        depth = 0
        for line, text in statements(self.text):
            if text == "{":
                depth += 1
                self.scopes.append(Scope())
            elif text == "}":
                depth -= 1
                self.scopes.pop()
                if depth == 0:
                    break
            elif text.endswith(":"):
                self.labels[self.label(text[:-1])] = len(self.code) // 7
            elif text.startswith(".reg"):
                self.declare(text)
            elif text.startswith("."):
                if not text.startswith((".pragma", ".loc", ".shared", ".local")):
                    raise UnknownInstructionError(text)
            else:
                try:
                    self.instruction(text, line)
                except (UnknownInstructionError, KeyError, ValueError, IndexError) as error:
                    raise UnknownInstructionError(f"line {line}: {text[:200]} ({error!r})") from error
        self.emit(EXIT, [], (-1, False), 0)
        for at, label in self.jumps:
            assert self.labels[label] >= 0
            self.code[at] = self.labels[label]
        cluster = re.search(r"\.reqnctapercluster (\d+)", self.text)
        sizes = [self.slots, self.predicates, self.static_smem, self.local_bytes, int(cluster[1]) if cluster else 1]
        return Program(self.code, self.pool, self.constants, self.special, sizes, self.data)

    def instruction(self, text: str, line: int) -> None:
        guard = (-1, False)
        if text.startswith("@"):
            said, text = text[1:].split(None, 1)
            guard = (self.predicate(said.lstrip("!")), said.startswith("!"))
        found = re.match(r"[\w.:]+", text)
        assert found is not None
        opcode, rest = found.group(), split(text[found.end() :])
        words = opcode.split(".")
        name = words[0]
        if name == "bra":
            self.emit(BRANCH, [], guard, line, self.label(rest[0]))
            return
        if name in ("ret", "exit"):
            self.emit(EXIT, [], guard, line)
            return
        handler = getattr(self, f"on_{name}", None)
        made = handler(words, rest) if handler is not None else self.arithmetic(words, rest)
        for op, operands in made if isinstance(made, list) else [made]:
            self.emit(op, operands, guard, line)

    def on_predicates(self, op: str, x: list[str]) -> list[tuple[str, list[int]]]:
        """Of ``xor.pred %p1, %p2, -1`` the number is put into a predicate of its own before."""
        made, slots = [], []
        for text in x:
            if re.fullmatch(r"-?\d+", text):
                made.append(("set.pred", [self.predicates, int(text)]))
                slots.append(self.predicates)
                self.predicates += 1
            else:
                slots.append(self.predicate(text))
        return [*made, (op, slots)]

    def arithmetic(self, words: list[str], x: list[str]) -> Any:
        kept = [word for word in words if word not in DROPPED]
        name, kind = kept[0], kept[-1]
        floats = kind in ("f32", "f64")
        if name not in ("ex2",):
            kept = [word for word in kept if word != "ftz"]
        if name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt") and floats:
            kept = [word for word in kept if word not in ("rz", "rm", "rp")]
        width = 2 if BYTES[kind] == 8 else 1
        if kind == "pred":
            return self.on_predicates(".".join(kept), x)
        if name == "setp":
            if "|" in x[0] or len(x) != 3:
                raise UnknownInstructionError("setp with two results")
            return ".".join(kept), [self.predicate(x[0]), *(self.value(text, width) for text in x[1:])]
        if name == "selp":
            a, b = (self.value(text, width) for text in x[1:3])
            return f"selp.{32 * width}", [self.target(x[0], width), a, b, self.predicate(x[3])]
        wide = "wide" in kept
        to = 2 if wide and BYTES[kind] >= 4 else width
        widths = [width] * (len(x) - 1)
        if name in ("shl", "shr"):
            widths[1] = 1
        if name == "mad" and wide:
            widths[2] = to
        if name in ("bfe", "bfi"):  # where it begins, and how long it is
            widths[-2:] = [1, 1]
        if name in ("popc", "clz"):
            to = 1
        if name == "lop3":
            widths = [1, 1, 1, 1]
        return ".".join(kept), [self.target(x[0], to), *map(self.value, x[1:], widths)]

    def on_mov(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        kind = words[-1]
        if kind == "pred":
            if x[1].lstrip("-").isdigit():
                return "set.pred", [self.predicate(x[0]), int(x[1])]
            return "mov.pred", [self.predicate(x[0]), self.predicate(x[1])]
        width = 2 if BYTES[kind] == 8 else 1
        if x[1].startswith("{"):
            parts = self.vector(x[1])
            name = "pack4" if len(parts) == 4 else "pack"
            return f"{name}.{32 * width}", [self.target(x[0], width), *(self.value(p, 1) for p in parts)]
        if x[0].startswith("{"):
            parts = self.vector(x[0])
            name = "unpack4" if len(parts) == 4 else "unpack"
            return f"{name}.{32 * width}", [*(self.target(p, 1) for p in parts), self.value(x[1], width)]
        if width == 2 and x[1] in ("%clock64", "%globaltimer"):
            return "clock.64", [self.target(x[0], 2)]
        base, plus, added = x[1].partition("+")
        if plus:
            return "add_number.64", [self.target(x[0], 2), self.value(base, 2), int(added)]
        return f"mov.b{32 * width}", [self.target(x[0], width), self.value(x[1], width)]

    def on_cvt(self, words: list[str], x: list[str]) -> list[tuple[str, list[int]]]:
        """A register wider than the source's type counts with its low bits, as in ``cvt.s64.s32 %rd2, %rd1``."""
        rounds = next((word for word in words if word in ("rzi", "rni", "rmi", "rpi")), None)
        to, source = words[-2:]
        parts = ["cvt", rounds, "sat" if "sat" in words and to == "f32" else None, to, source]
        width = 2 if BYTES[to] == 8 else 1
        made, values = [], []
        for text in x[1:]:
            found = self.find(text)
            if BYTES[source] < 8 and found is not None and found[0] == "64":
                values.append(self.new_slot(1))
                made.append(("cvt.u32.u64", [values[-1], found[1]]))
            else:
                values.append(self.value(text, 2 if BYTES[source] == 8 else 1))
        return [*made, (".".join(part for part in parts if part), [self.target(x[0], width), *values])]

    def on_cvta(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        space = words[-2]
        operands = [self.target(x[0], 2), self.value(x[1], 2)]
        if space in ("global", "param", "const"):
            return "mov.b64", operands
        return f"{'untag' if 'to' in words else 'tag'}.{space}", operands

    def memory(self, words: list[str], registers: list[str], address: str, *, stores: bool) -> list[int]:
        kind = words[-1]
        # `ld.global` and `ld.shared::cluster` name their space, a generic access none.
        space = next((word.split("::")[0] for word in words[1:-1] if word.split("::")[0] in SPACES), "")
        size = BYTES[kind]
        width = 2 if size == 8 else 1
        # A load may widen, a store may narrow: the register is larger than what is read or written.
        if (self.find(registers[0]) or ("", 0))[0] == "64":
            width = 2
        slots = [self.value(text, width) if stores else self.target(text, width) for text in registers]
        more = int(kind[0] == "s") + 2 * int(width == 2)
        return [SPACES[space], size, more, len(slots), *self.address(address), *slots]

    def on_ld(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return "ld", self.memory(words, self.vector(x[0]), x[1], stores=False)

    def on_ldu(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return self.on_ld(words, x)

    def on_st(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        if words[1] == "async":
            kind = words[-1]
            width = 2 if BYTES[kind] == 8 else 1
            values = [self.value(text, width) for text in self.vector(x[1])]
            return "st.async", [*self.address(x[0]), *self.address(x[2]), BYTES[kind], *values]
        return "st", self.memory(words, self.vector(x[1]), x[0], stores=True)

    def on_atom(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return self.atomic(words, x[0], x[1:])

    def on_red(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return self.atomic(words, "_", x)

    def atomic(self, words: list[str], result: str, x: list[str]) -> tuple[str, list[int]]:
        space = next((word.split("::")[0] for word in words[1:] if word.split("::")[0] in SPACES), "")
        kind = words[-1]
        what = next(
            word for word in words if word in ("add", "min", "max", "inc", "dec", "exch", "cas", "or", "and", "xor")
        )
        width = 2 if BYTES[kind] == 8 else 1
        values = [self.value(text, width) for text in self.vector(x[1])]
        more = [self.value(text, width) for text in x[2:]]
        target = self.target(result, width)
        return f"atom.{what}.{kind}", [target, SPACES[space], *self.address(x[0]), len(values), *values, *more]

    def on_prefetch(self, _words: list[str], _x: list[str]) -> tuple[str, list[int]]:
        return "nothing", []

    on_fence = on_membar = on_nanosleep = on_createpolicy = on_prefetch
    on_discard = on_applypriority = on_prefetchu = on_prefetch

    def on_griddepcontrol(self, words: list[str], _x: list[str]) -> tuple[str, list[int]]:
        return "griddepcontrol.wait" if words[1] == "wait" else "nothing", []

    def on_setmaxnreg(self, _words: list[str], _x: list[str]) -> tuple[str, list[int]]:
        return "aligned", []

    def on_trap(self, _words: list[str], _x: list[str]) -> tuple[str, list[int]]:
        return "trap", []

    def on_elect(self, _words: list[str], x: list[str]) -> tuple[str, list[int]]:
        target, predicate = x[0].split("|")
        return "elect", [self.target(target, 1), self.predicate(predicate), self.value(x[1], 1)]

    def on_activemask(self, _words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return "activemask.b32", [self.target(x[0], 1)]

    def on_shfl(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        target, _, predicate = x[0].partition("|")
        kept = self.predicate(predicate) if predicate else -1
        return f"shfl.{words[2]}", [self.target(target, 1), kept, *(self.value(text, 1) for text in x[1:])]

    def on_vote(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        target = self.target(x[0], 1) if words[2] == "ballot" else self.predicate(x[0])
        return f"vote.{words[2]}", [target, self.predicate(x[1]), self.value(x[2], 1)]

    def on_redux(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return f"redux.{words[2]}.{words[3]}", [self.target(x[0], 1), self.value(x[1], 1), self.value(x[2], 1)]

    def on_match(self, _words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return "match.any.b32", [self.target(x[0], 1), self.value(x[1], 1), self.value(x[2], 1)]

    def on_bar(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        if words[1] == "warp":
            return "bar.warp", [self.value(x[0], 1)]
        kind = words[1] if words[1] in ("sync", "arrive") else None
        if kind is None:
            raise UnknownInstructionError(".".join(words))
        return f"bar.{kind}", [self.value(x[0], 1), self.value(x[1], 1) if len(x) > 1 else -1]

    def on_barrier(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        if words[1] == "cluster":
            return f"barrier.cluster.{words[2]}", []
        return self.on_bar([words[0], words[1]], x)

    def on_mapa(self, _words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return "mapa", [self.target(x[0], 1), self.value(x[1], 1), self.value(x[2], 1)]

    def on_mbarrier(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        what = words[1]
        if what == "init":
            return "mbarrier.init", [*self.address(x[0]), self.value(x[1], 1)]
        if what == "inval":
            return "mbarrier.inval", self.address(x[0])
        if what in ("try_wait", "test_wait") and "parity" in words:
            return f"mbarrier.{what}", [self.predicate(x[0]), *self.address(x[1]), self.value(x[2], 1)]
        if what == "expect_tx":
            return "mbarrier.arrive", [*self.address(x[0]), self.value(x[1], 1), -2]
        if what == "arrive" and "noComplete" not in words:
            # The state that an arrival may return is not kept.
            x = x if x[0].startswith("[") else x[1:]
            count = self.value(x[1], 1) if len(x) > 1 else -1
            return "mbarrier.arrive", [*self.address(x[0]), *([count, -1] if "expect_tx" in words else [-1, count])]
        raise UnknownInstructionError(".".join(words))

    def on_cp(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        if words[1] == "reduce":
            return self.bulk(words[2:], x, adds=True)
        if words[2] == "bulk":
            return self.bulk(words[1:], x, adds=False)
        if words[2] == "commit_group":
            return "cp.async.commit", []
        if words[2] == "wait_group":
            return "cp.async.wait", [int(x[0])]
        if words[2] == "wait_all":
            return "cp.async.wait_all", []
        if words[2] not in ("cg", "ca"):
            raise UnknownInstructionError(".".join(words))
        valid = self.value(x[3], 1) if len(x) > 3 else -1
        return "cp.async", [*self.address(x[0]), *self.address(x[1]), int(x[2]), valid]

    def bulk(self, words: list[str], x: list[str], *, adds: bool) -> tuple[str, list[int]]:
        """``words`` from "async" and "bulk" on."""
        rest = words[2:]
        if rest[0] == "prefetch":
            return "nothing", []
        if rest[0] == "commit_group":
            return "bulk.commit", []
        if rest[0] == "wait_group":
            return "bulk.wait", [int(x[0])]
        if rest[0] == "tensor":
            if "im2col" in rest:
                raise UnknownInstructionError("im2col")
            rank = int(rest[1][0])
            if rest[2].startswith("shared"):
                tensor, where = split(x[1][1:-1])
                blocks = self.value(x[3], 1) if "multicast::cluster" in rest else -1
                coordinates = [self.value(text, 1) for text in self.vector(where)]
                return "bulk.tensor.load", [
                    rank, *self.address(f"[{tensor}]"), *self.address(x[0]), *self.address(x[2]), blocks, *coordinates
                ]  # fmt: skip
            tensor, where = split(x[0][1:-1])
            coordinates = [self.value(text, 1) for text in self.vector(where)]
            if adds and "add" not in rest:
                raise UnknownInstructionError("a bulk reduction other than an addition")
            return "bulk.tensor.store", [
                rank, *self.address(f"[{tensor}]"), *self.address(x[1]), int(adds), *coordinates
            ]  # fmt: skip
        if rest[0].startswith("shared"):
            from_shared = int(rest[1].startswith("shared"))
            size = self.value(x[2], 1)
            return "bulk.load", [*self.address(x[0]), from_shared, *self.address(x[1]), size, *self.address(x[3])]
        if rest[0] == "global":
            if adds and (rest[-1] != "f32" or "add" not in rest):
                raise UnknownInstructionError("a bulk reduction other than an addition of float32")
            return "bulk.store", [*self.address(x[0]), *self.address(x[1]), self.value(x[2], 1), int(adds)]
        raise UnknownInstructionError(".".join(words))

    def on_ldmatrix(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        slots = [self.target(text, 1) for text in self.vector(x[0])]
        return "ldmatrix", [*self.address(x[1]), int("trans" in words), len(slots), *slots]

    def on_stmatrix(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        slots = [self.value(text, 1) for text in self.vector(x[1])]
        return "stmatrix", [*self.address(x[0]), int("trans" in words), len(slots), *slots]

    def on_movmatrix(self, _words: list[str], x: list[str]) -> tuple[str, list[int]]:
        return "movmatrix", [self.target(x[0], 1), self.value(x[1], 1)]

    def on_mma(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        shape = next(word for word in words if re.fullmatch(r"m16n8k\d+", word))
        kind = words[-3]
        if words[-1] != "f32" or words[-4] != "f32":
            raise UnknownInstructionError("mma with other than float32 sums")
        d = [self.target(text, 1) for text in self.vector(x[0])]
        more = [self.value(text, 1) for operand in x[1:] for text in self.vector(operand)]
        return "mma", [TYPES[kind], int(shape.split("k")[1]), *d, *more]

    def on_wgmma(self, words: list[str], x: list[str]) -> tuple[str, list[int]]:
        if words[1] == "fence":
            return "aligned", []
        if words[1] == "commit_group":
            return "wgmma.commit", []
        if words[1] == "wait_group":
            return "wgmma.wait", [int(x[0])]
        shape = next(word for word in words if re.fullmatch(r"m64n\d+k\d+", word))
        n, k = map(int, shape[4:].split("k"))
        kind = words[-1]
        if k != 16 or words[-3] != "f32":
            raise UnknownInstructionError(".".join(words))
        registers = x[1].startswith("{")
        d = [self.target(text, 1) for text in self.vector(x[0])]
        a = [self.value(text, 1) for text in self.vector(x[1])] if registers else [self.value(x[1], 2)]
        b = self.value(x[2], 2)
        keeps = (-1, int(x[3])) if x[3].isdigit() else (self.predicate(x[3]), 0)
        scales, transposed = [int(x[4]), int(x[5])], [int(text) for text in x[6:]]
        over = [0, *transposed] if registers else transposed
        return "wgmma", [TYPES[kind], n, int(registers), *over, *keeps, *scales, *d, *a, b]


def number_of(text: str) -> int:
    """The bits of a number of PTX."""
    if text[:2] in ("0f", "0F", "0d", "0D") and re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def read(text: str, ops: Callable[[str], int]) -> Program:
    """The kernel of a module of PTX.

    Raises
    ------
    UnknownInstructionError
        It has an instruction that the machine has not.
    """
    return Reader(text).read(ops)
