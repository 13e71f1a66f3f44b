"""Random problems of the fuzz campaign: what is compiled is drawn first, then many problems for it; and its kernels.

`structure` draws everything that a kernel is specialised for, `problem` draws the rest (lengths, heads, strides, kinds
of mask) for one of the structures. Both are functions of (seed, number) alone, so ``seed:index`` replays a problem.
Nothing here imports a framework or needs a GPU.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import cases
import numpy as np
from cases import Case, Placement

from nvrtc_attn import heuristics
from nvrtc_attn.base.architectures import ARCHITECTURES
from nvrtc_attn.front.build import build_problem
from nvrtc_attn.front.problem import AttentionProblem, layout
from nvrtc_attn.front.tensors import Device, TensorView
from nvrtc_attn.jit.config import KernelConfig

STRUCTURES: Final = 90
"""Of one campaign. With 90, a few thousand problems need about 1,500 kernels, half of them rarely."""
MAX_LENGTH: Final = 3000
APPEALS: Final = 8
"""Further samples of the yardstick that decide about a problem that breaks the error rule with one of them."""
TILE: Final = 16
"""Rows, or keys, that the ordered sample of float32 gradients adds up at a time: a chain of the float32 kernels."""
MAX_PADDED: Final = 1 << 25
"""Elements of a packed problem's queries and keys, padded to the longest: 256 MiB for each float64 tensor of them."""
_DTYPES: Final = ("float16", "bfloat16", "float32")
_ITEMSIZES: Final = {"float16": 2, "bfloat16": 2, "float32": 4, "bool": 1, "uint8": 1}
_LAYOUTS: Final = ("contiguous", "random", "mixed", *(x for x in cases.LAYOUTS[1:] if x != "random"))
_DENSE_LAYOUTS: Final = ("contiguous", "bhmk", "packed", "expanded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a campaign: a case, and how it is run."""

    seed: int
    index: int
    structure: int
    case: Case
    backend: str
    """``NVRTC_ATTN_BACKEND``."""
    want_dbias: bool
    bias_hidden: bool
    """Some elements of the bias are -inf."""
    outside_nan: bool
    """Tokens that belong to no sequence, and keys beyond ``seqused_k``, are NaN; random numbers otherwise."""
    repeat: bool
    """Run the forward pass, and a deterministic backward pass, twice: the bits are the same."""

    @property
    def scores(self) -> int:
        """Elements of the padded score matrices."""
        return self.case.batch * self.case.num_heads * self.case.seqlen_q * self.case.seqlen_k

    @property
    def replay(self) -> str:
        """The line that runs this problem again."""
        return f"python tests/fuzz.py --replay {self.seed}:{self.index}"


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


class _Draw:
    def __init__(self, *entropy: int) -> None:
        self.rng = np.random.default_rng(entropy)

    def choose(self, *options: Any, weights: tuple[float, ...] | None = None) -> Any:
        p = None if weights is None else np.array(weights) / sum(weights)
        return options[int(self.rng.choice(len(options), p=p))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return int(self.rng.integers(low, high + 1))

    def log_between(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What kernels are specialised for, as fields of a `Case`, and the run-time choices that go with them."""

    fields: dict[str, Any]
    backend: str
    group: int
    windows: tuple[bool, bool]
    varlen: bool
    seqused_k: bool
    want_dbias: bool
    layouts: tuple[str, ...]
    """Layouts that its problems have."""
    regime: str
    """Which lengths: "any", "few" queries over many keys, or "short" sequences in large batches."""


def structure(seed: int, number: int) -> Structure:
    """Structure ``number`` of campaign ``seed``."""
    draw = _Draw(seed, 1, number)
    # Half are such as the Hopper kernels serve: 16 bit, rows of 16 bytes. The rest covers its own ground in turn.
    hopper, legacy, every_bias = number % 2 == 0, number % 10 == 1, number < 48 and number % 3 == 0
    dtype = "float16" if legacy else draw.choose(*_DTYPES, weights=(1, 1, 0 if hopper else 1))
    fields: dict[str, Any] = {"dtype": dtype}
    for name, p in (("head_dim", 1.0), ("head_dim_v", 0.25)):
        if not draw.chance(p):
            continue
        if hopper:
            fields[name] = draw.choose(64, 128, 64, 128, 72, 96, 192, 256, 8 * draw.between(1, 32))
        else:
            fields[name] = draw.choose(*cases.HEAD_DIMS) if draw.chance(0.5) else draw.between(1, 512)
    fields.setdefault("head_dim_v", fields["head_dim"])
    fields["causal"] = draw.choose(False, True, "bottom_right", "top_left", weights=(4, 2, 1, 2))
    windows = (draw.chance(0.5), draw.chance(0.5)) if draw.chance(0.3) else (False, False)
    varlen = not every_bias and draw.chance(0.32)
    want_dbias = False
    if not varlen:
        if every_bias or draw.chance(0.35):
            fields["bias"] = cases.BIAS_SHAPES[5 * number % 16]  # each of them where every_bias
            fields["bias_dtype"] = draw.choose("same", "float32")
            want_dbias = draw.chance(0.85)
        if draw.chance(0.35):
            fields["mask"] = draw.choose(*cases.BIAS_SHAPES)
    if draw.chance(0.25):
        fields["softcap"] = float(draw.choose(1.0, 5.0, 30.0))
    if draw.chance(0.3):
        fields["dropout_p"] = 0.5  # problems have their own
    if draw.chance(0.1):
        fields["softmax_scale"] = float(draw.choose(0.0, -1.0, -3.0)) * fields["head_dim"] ** -0.5
    fields["deterministic"] = draw.chance(0.3)
    if legacy:  # the instruction set of compute capability 7.5, which has matrix products of float16 only
        backend = "legacy"
    else:
        backend = draw.choose("auto", "hopper", "portable", weights=(5, 2, 0) if hopper else (4, 0.5, 4))
    frame = Structure(
        fields=fields,
        backend=backend,
        group=draw.choose(1, 2, 3, 4, 8, weights=(5, 2, 1, 2, 1)),
        windows=windows,
        varlen=varlen,
        seqused_k=varlen and draw.chance(0.5),
        want_dbias=want_dbias,
        layouts=_DENSE_LAYOUTS if hopper or draw.chance(0.6) else _LAYOUTS,
        regime=draw.choose("any", "few", "short", weights=(8, 1, 1) if hopper else (7, 2, 1)),
    )
    if draw.chance(0.2):
        fields["sink"] = draw.choose("float32", "same")
    return frame


def problem(seed: int, index: int) -> Problem:
    """Problem ``index`` of campaign ``seed``; replays exactly."""
    draw = _Draw(seed, 2, index)
    number = draw.between(0, STRUCTURES - 1)
    frame = structure(seed, number)
    fields = dict(frame.fields)
    # One problem in 50 is large; the others take the GPU a millisecond or two.
    scores = draw.log_between(3e6, 1.6e7) if draw.chance(1 / 50) else draw.log_between(2e3, 3e6)
    heads_kv = draw.choose(1, 2, 3, 5, weights=(5, 3, 2, 1))
    if frame.group >= 4:
        heads_kv = min(heads_kv, 2)
    if frame.varlen:
        fields |= _packed_lengths(draw, frame, scores, heads_kv * frame.group)
    else:
        fields |= _dense_lengths(draw, frame, scores, heads_kv * frame.group)
    fields |= {"num_heads": heads_kv * frame.group, "num_heads_kv": heads_kv}
    if draw.chance(0.004):
        fields |= {"num_heads": 0, "num_heads_kv": 0}
    spans = tuple(_window(draw) if bounded else None for bounded in frame.windows)
    fields["window_size"] = spans if any(frame.windows) else draw.choose((None, None), (-1, -1))
    if "mask" in fields:
        fields["mask_kind"] = draw.choose(*cases.MASK_KINDS, weights=(4, 3, 2, 3, 2, 0.5, 0.5))
        fields["mask_empty"] = draw.chance(0.25)
        fields["mask_dtype"] = draw.choose("bool", "uint8")
    if "dropout_p" in fields:
        fields["dropout_p"] = float(draw.choose(0.1, 0.5, 0.9, 1e-3, 1.0, weights=(5, 3, 2, 1, 0.3)))
        # Words wrap at 2**64, and the upper half of the counter changes at 2**34.
        fields["seed"] = draw.choose(draw.between(0, 2**62), 2**64 - 1 - draw.between(0, 2**32))
        fields["offset"] = draw.choose(
            draw.between(0, 2**40), 2**34 - draw.between(0, 2000), 2**64 - 1 - draw.between(0, 2000), weights=(6, 1, 1)
        )
    if "softmax_scale" not in fields and draw.chance(0.25):
        # Scores with a standard deviation of 16 are as sharp as any that are trained. In float32 it is 2: with larger
        # ones the error rule compares two orders of one sum.
        sharp = (4.0, 16.0) if fields["dtype"] != "float32" else ()
        fields["softmax_scale"] = float(draw.choose(0.1, 0.5, 2.0, *sharp)) * fields["head_dim"] ** -0.5
    fields["layout"] = draw.choose(*frame.layouts)
    fields["dlse"] = draw.chance(0.3)
    return Problem(
        seed=seed,
        index=index,
        structure=number,
        case=cases.make_case(f"fuzz-{seed}-{index}", **fields),
        backend=frame.backend,
        want_dbias=frame.want_dbias,
        bias_hidden="bias" in fields and draw.chance(0.1),
        outside_nan=draw.chance(0.5),
        repeat=draw.chance(0.04),
    )


def _window(draw: _Draw) -> int:
    return draw.choose(0, draw.between(0, 200), draw.between(0, MAX_LENGTH), weights=(1, 3, 1))


def _length(draw: _Draw) -> int:
    kind = draw.choose("log", "edge", "uniform", "empty", weights=(25, 45, 30, 1))
    if kind == "log":
        return min(MAX_LENGTH, int(draw.log_between(1, MAX_LENGTH + 1)))
    if kind == "edge":
        return draw.choose(16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048) + draw.between(-1, 1)
    return draw.between(1, 700) if kind == "uniform" else 0


def _shrink(length: int, other: int, scores: float) -> int:
    """``length`` cut so that ``length * other`` is at most ``scores``; at least 1 where it was."""
    return length if length * other <= scores else max(1, int(scores / max(1, other)))


def _dense_lengths(draw: _Draw, frame: Structure, scores: float, heads: int) -> dict[str, Any]:
    seqlen_q = draw.between(1, 16) if frame.regime == "few" else _length(draw)
    seqlen_k = _length(draw)
    if frame.regime == "short":
        seqlen_q, seqlen_k = min(seqlen_q, 70), min(seqlen_k, 70)
    if draw.chance(0.5):
        seqlen_q = _shrink(seqlen_q, seqlen_k, scores / heads)
    seqlen_k = _shrink(seqlen_k, seqlen_q, scores / heads)
    seqlen_q = _shrink(seqlen_q, seqlen_k, scores / heads)
    largest = int(scores / max(1, heads * seqlen_q * seqlen_k))
    # Operands too: few queries over many keys are few scores.
    largest = min(largest, int(4e6 / max(1, heads * (seqlen_q + seqlen_k) * max(16, frame.fields["head_dim"]))))
    batch = draw.between(1, max(1, min(largest, 64 if frame.regime == "short" else 4)))
    return {"batch": 0 if draw.chance(0.003) else batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}


def _packed_lengths(draw: _Draw, frame: Structure, scores: float, heads: int) -> dict[str, Any]:
    """``scores`` bounds the product of heads, sequences and both longest lengths, which the oracle pads to.

    `MAX_PADDED` bounds the operands: forty sequences of 3000 queries over one key are few scores.
    """
    count = draw.choose(1, draw.between(2, 5), draw.between(6, 40), weights=(1, 4, 1))
    shape = draw.choose("even", "any", "skewed", weights=(1, 3, 2))
    longest_k = _length(draw)
    longest_q = draw.between(1, 16) if frame.regime == "few" else draw.choose(longest_k, _length(draw))
    if frame.regime == "short":
        longest_q, longest_k = min(longest_q, 70), min(longest_k, 70)
    longest_k = _shrink(longest_k, longest_q * count, scores / heads)
    longest_q = _shrink(longest_q, longest_k * count, scores / heads)
    width = max(frame.fields["head_dim"], frame.fields["head_dim_v"])
    count = min(count, max(1, MAX_PADDED // max(1, heads * (longest_q + longest_k) * width)))
    pairs = []
    for n in range(count):
        if shape == "even" or (shape == "skewed" and n == count // 2):
            pairs.append((longest_q, longest_k))
            continue
        cut = 16 if shape == "skewed" else 1
        pairs.append(tuple(draw.between(0, -(-x // cut)) if draw.chance(0.9) else 0 for x in (longest_q, longest_k)))
    fields: dict[str, Any] = {"seqlens": tuple(pairs)}
    for name in ("lead", "tail"):
        fields[name] = draw.choose((0, 0), (draw.between(0, 9), draw.between(0, 150)), weights=(2, 1))
    if frame.seqused_k:
        fields["seqused_k"] = tuple(draw.choose(n, draw.between(0, n)) for _, n in pairs)
    return fields


def outside_tokens(case: Case) -> tuple[list[int], list[int]]:
    """Query tokens of no sequence, and key tokens of none or beyond ``seqused_k``."""
    found: list[list[int]] = []
    for side in (0, 1):
        start = case.lead[side]
        tokens = list(range(start))
        for n, pair in enumerate(case.seqlens):
            used = case.seqused_k[n] if side and case.seqused_k else pair[side]
            tokens += range(start + used, start + pair[side])
            start += pair[side]
        found.append([*tokens, *range(start, start + case.tail[side])])
    return found[0], found[1]


# ---------------------------------------------------------------------------------------------------------------------
# Strides


def layout_of(p: Problem, name: str) -> str:
    """The layout of operand ``name``: that of the case, as far as it has a meaning for this operand."""
    choice = p.case.layout
    if choice == "mixed":
        rng = _operand_rng(p, name)
        choice = cases.LAYOUTS[int(rng.integers(len(cases.LAYOUTS)))]
    if choice == "expanded" and name not in ("k", "v"):
        return "contiguous"
    return "contiguous" if name == "dlse" and choice == "packed" else choice


def where(p: Problem, name: str, shape: tuple[int, ...]) -> Placement:
    """The placement of operand ``name`` in its buffer."""
    return cases.placement(name, shape, layout_of(p, name), _operand_rng(p, name))


def _operand_rng(p: Problem, name: str) -> np.random.Generator:
    return np.random.default_rng([p.seed, 3, p.index, zlib.crc32(name.encode())])


def operand_dtype(p: Problem, name: str) -> str:
    """The element type of operand or result ``name``."""
    if name in ("lse", "dlse"):
        return "float32"
    if name == "mask":
        return p.case.mask_dtype
    if name in ("sink", "dsink"):
        return "float32" if p.case.sink == "float32" else p.case.dtype
    return "float32" if name in ("bias", "dbias") and p.case.bias_dtype == "float32" else p.case.dtype


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


def kernel_configs(
    p: Problem, arch: str = "sm_90", num_sms: int = 132, smem_limit: int | None = None
) -> list[KernelConfig]:
    """The kernels that ``p`` launches, forward and backward, without a GPU."""
    limit = ARCHITECTURES[arch].smem_per_block_optin if smem_limit is None else smem_limit
    target: dict[str, Any] = {"arch": arch, "num_sms": num_sms, "smem_limit": limit, "backend": p.backend}
    asked = described(p)
    plain = dataclasses.replace(asked, dbias=False, dsink=False, deterministic=False)
    forward = heuristics.choose_forward(plain, **target)
    backward = heuristics.choose_backward(asked, **target)
    launches = [*(forward.launches if 0 not in cases.shapes(p.case)["out"] else ()), *backward.launches]
    return list(dict.fromkeys(launch.config for launch in launches if launch.grid))


def described(p: Problem) -> AttentionProblem:
    """What `nvrtc_attn.attention_backward` plans for ``p``, whose buffers all begin at a multiple of 16 bytes."""
    case, shape = p.case, cases.shapes(p.case)
    gpu = Device("cuda", 0)

    def view(name: str) -> TensorView:
        spot = where(p, name, shape[name])
        dtype = operand_dtype(p, name)
        strides = tuple(0 if n == 1 else s for n, s in zip(shape[name], spot.strides, strict=True))
        address = 1 << 20 if 0 not in shape[name] else 0
        return TensorView(address + spot.offset * _ITEMSIZES[dtype], shape[name], strides, dtype, gpu)

    def lengths(count: int) -> TensorView:
        return TensorView(1 << 20, (count,), (1,), "int32", gpu)

    operands: dict[str, TensorView] = {name: view(name) for name in ("bias", "mask", "sink") if name in shape}
    if case.varlen:
        operands |= {f"cu_seqlens_{side}": lengths(case.batch + 1) for side in "qk"}
    if case.seqused_k:
        operands["seqused_k"] = lengths(case.batch)
    built = build_problem(
        view("q"), view("k"), view("v"), **operands, **cases.call_options(case), return_lse=True,
        deterministic=case.deterministic, dbias=p.want_dbias, dsink=case.sink is not None,
    )  # fmt: skip
    outputs: dict[str, Any] = {name: layout(view(name)) for name in ("out", "dout", "dq", "dk", "dv")}
    if p.want_dbias:
        outputs["dbias_layout"] = layout(view("dbias"))
    return dataclasses.replace(built, **outputs)


# ---------------------------------------------------------------------------------------------------------------------
# Coverage

FEATURES: Final[dict[str, Callable[[Problem], bool]]] = {
    **{dtype: lambda p, dtype=dtype: p.case.dtype == dtype for dtype in _DTYPES},
    **{f"backend {name}": lambda p, name=name: p.backend == name for name in ("auto", "hopper", "portable", "legacy")},
    "head_dim <= 64": lambda p: p.case.head_dim <= 64,
    "head_dim 65 to 128": lambda p: 64 < p.case.head_dim <= 128,
    "head_dim 129 to 256": lambda p: 128 < p.case.head_dim <= 256,
    "head_dim > 256": lambda p: p.case.head_dim > 256,
    "head_dim % 8": lambda p: p.case.head_dim % 8 != 0,
    "head_dim_v != head_dim": lambda p: p.case.head_dim != p.case.head_dim_v,
    "GQA": lambda p: 1 < p.case.num_heads_kv < p.case.num_heads,
    "MQA": lambda p: p.case.num_heads_kv == 1 < p.case.num_heads,
    "causal bottom right": lambda p: p.case.causal in (True, "bottom_right"),
    "causal top left": lambda p: p.case.causal == "top_left",
    "window left": lambda p: p.case.window_size[0] not in (None, -1),
    "window right": lambda p: p.case.window_size[1] not in (None, -1),
    "bias": lambda p: p.case.bias is not None,
    "bias broadcast": lambda p: p.case.bias is not None and "1" in p.case.bias,
    "bias gradient": lambda p: p.want_dbias,
    "bias float32 beside 16 bit": lambda p: (
        p.case.bias is not None and p.case.bias_dtype == "float32" and p.case.dtype != "float32"
    ),
    "bias with -inf": lambda p: p.bias_hidden,
    "mask": lambda p: p.case.mask is not None,
    "mask uint8": lambda p: p.case.mask is not None and p.case.mask_dtype == "uint8",
    "mask hides whole rows": lambda p: p.case.mask is not None and (p.case.mask_empty or p.case.mask_kind == "empty"),
    **{
        f"mask {kind}": lambda p, kind=kind: p.case.mask is not None and p.case.mask_kind == kind
        for kind in cases.MASK_KINDS
    },
    "sink": lambda p: p.case.sink is not None,
    "sink of 16 bit": lambda p: p.case.sink == "same" and p.case.dtype != "float32",
    "softcap": lambda p: p.case.softcap > 0,
    "dropout": lambda p: p.case.dropout_p > 0,
    "varlen": lambda p: p.case.varlen,
    "varlen empty sequence": lambda p: any(0 in pair for pair in p.case.seqlens),
    "varlen tokens outside": lambda p: p.case.lead != (0, 0) or p.case.tail != (0, 0),
    "varlen NaN outside": lambda p: (
        p.case.varlen and p.outside_nan and (p.case.lead != (0, 0) or p.case.tail != (0, 0) or bool(p.case.seqused_k))
    ),
    "seqused_k": lambda p: bool(p.case.seqused_k),
    "dlse": lambda p: p.case.dlse,
    "deterministic": lambda p: p.case.deterministic,
    "scale 0": lambda p: p.case.softmax_scale == 0,
    "scale < 0": lambda p: (p.case.softmax_scale or 0) < 0,
    "scale >= 4 / sqrt(head_dim)": lambda p: (p.case.softmax_scale or 0) >= 3.9 * p.case.head_dim**-0.5,
    "16 queries or less": lambda p: 0 < p.case.seqlen_q <= 16,
    "1 query": lambda p: p.case.seqlen_q == 1,
    "length > 1024": lambda p: max(p.case.seqlen_q, p.case.seqlen_k) > 1024,
    "size 0": lambda p: 0 in (p.case.batch, p.case.num_heads, p.case.seqlen_q, p.case.seqlen_k),
    "run twice": lambda p: p.repeat,
    **{f"layout {name}": lambda p, name=name: p.case.layout == name for name in _LAYOUTS},
}
"""What a summary counts."""


def features_of(p: Problem) -> list[str]:
    """The names of what ``p`` has."""
    return [name for name, holds in FEATURES.items() if holds(p)]
