"""Random problems, with and without modifiers, on a simulated GPU: forward and gradients against float64.

    python tests/fuzz.py --simulated 9.0 [--modifiers] [--problems 500] [--seed 1]
    python tests/fuzz.py --simulated 9.0 [--modifiers] --replay SEED:INDEX

`problem` draws problems of a few tiles, `SHAPES` in a row for one modifier and the same features: to compile takes a
second or two a kernel, to run one 20 ms, and mostly the kernels of the first shape serve them all. Where there are two
families of kernels they take turns, and so do walks of tiles by words. A result may be off by twice what the same math
in the input precision is (`cases.breaches`): by one sample of that, and for what breaks the rule by the largest of
`fuzz_problems.APPEALS` more.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import fuzz_numpy
import fuzz_problems
import modifiers
import numpy as np
from cases import Array, Case
from fuzz_problems import Problem
from modifiers import ModifierCase
from simulator import gpu as simulator
from simulator.gpu import DeviceArray, SimulatedGpu
from simulator.harness import CODES, GPUS, decoded, encoded, workspace_of

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.base.log import quiet
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.modifiers.evaluate import HostModifier
from nvrtc_attn.plans import plan

SHAPES = 8
"""Problems in a row that share a modifier and their features."""
MAX_WORK = 3_000_000
"""Scores times head dims: a second or two of simulation, forward and backward."""
CAPTURED = {"float32": 2, "float64": 2, "int8": 0, "int32": 0, "int64": 0, "uint8": 1, "bool": 6}
"""DLPack's codes of captured arrays."""
THRESHOLDS = ("MIN_FLOPS", "MIN_KEY_TILES", "MIN_SHARERS")


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def modifier_of(number: int) -> ModifierCase:
    """A modifier of one of the grammars, of those with names, or scores of one and a mask of another."""
    kind, rng = number % 10, np.random.default_rng([number, 6])
    if kind in (0, 1, 2):
        return modifiers.random_case(number)
    if kind in (3, 4, 5):
        return modifiers.random_wide_case(number)
    if kind == 6:
        return modifiers.random_mask(number)
    if kind == 7:
        return _pick(rng, modifiers.sparse_cases())
    if kind == 8:
        return _pick(rng, modifiers.named_cases())
    score = modifiers.random_wide_case(number) if rng.random() < 0.5 else modifiers.random_case(number)
    mask = modifiers.random_mask(number) if rng.random() < 0.5 else _pick(rng, modifiers.sparse_cases())
    return _both(score, mask)


def _pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _both(score: ModifierCase, mask: ModifierCase) -> ModifierCase:
    """The scores of one and the mask of the other, whose arrays have names of their own."""

    def make(arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        of_score, of_mask = ({name[2:]: x for name, x in arrays.items() if name[0] == side} for side in "sm")
        return score.make(of_score)[0], mask.make(of_mask)[1]

    def arrays(sizes: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        of_score = {f"s.{name}": x for name, x in score.arrays(sizes, rng).items()}
        return of_score | {f"m.{name}": x for name, x in mask.arrays(sizes, rng).items()}

    return ModifierCase(f"{score.name} & {mask.name}", make, arrays)


def problem(seed: int, index: int, capability: str, with_modifiers: bool) -> tuple[Problem, ModifierCase | None]:
    """Problem ``index`` of campaign ``seed``; replays exactly."""
    number = index // SHAPES
    draw = fuzz_problems._Draw(seed, 7, number)
    modifier = modifier_of(seed * 1_000_000 + number) if with_modifiers else None
    scores = modifier is not None and modifier.make(modifier.arrays((1, 1, 9, 9), draw.rng))[0] is not None
    old = capability == "7.5"
    dtype = "float16" if old else draw.choose("float16", "bfloat16", "float32", weights=(4, 4, 2))
    head_dim = draw.choose(64, 128, 8 * draw.between(1, 16), draw.between(1, 140), 192, 256, weights=(8, 6, 4, 2, 1, 1))
    fields: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim}
    if draw.chance(0.12):
        fields["head_dim_v"] = {192: 128}.get(head_dim, draw.choose(64, 128, draw.between(1, 140)))
    fields["causal"] = draw.choose(False, True, "top_left", weights=(4, 2, 1))
    windows = (draw.chance(0.5), draw.chance(0.5)) if draw.chance(0.15) else (False, False)
    varlen, used = draw.chance(0.25), draw.chance(0.4)
    if not varlen and draw.chance(0.25):
        fields |= {"bias": draw.choose(*cases.BIAS_SHAPES), "bias_dtype": draw.choose("same", "float32")}
    if not varlen and draw.chance(0.15):
        fields |= {"mask": draw.choose(*cases.BIAS_SHAPES), "mask_kind": draw.choose(*cases.MASK_KINDS[:5])}
        fields |= {"mask_dtype": draw.choose("bool", "uint8"), "mask_empty": draw.chance(0.3)}
    if not scores and draw.chance(0.2):
        fields["softcap"] = float(draw.choose(1.0, 5.0, 30.0))
    if draw.chance(0.2):
        fields["dropout_p"] = float(draw.choose(0.1, 0.5, 0.9))
    if draw.chance(0.2):
        fields["sink"] = draw.choose("float32", "same")
    if draw.chance(0.15):
        fields["softmax_scale"] = float(draw.choose(0.5, 2.0, -1.0)) * head_dim**-0.5
    fields |= {"deterministic": draw.chance(0.3), "dlse": draw.chance(0.25)}
    group = draw.choose(1, 2, 3, 4, weights=(5, 3, 1, 1))
    layouts = ("contiguous", "bhmk", "packed") if draw.chance(0.75) else cases.LAYOUTS
    want_dbias = "bias" in fields and draw.chance(0.8)
    few, batch, heads_kv = draw.chance(0.15), draw.choose(1, 2, weights=(3, 1)), draw.choose(1, 2, weights=(2, 1))
    fields["layout"] = draw.choose(*layouts)

    draw = fuzz_problems._Draw(seed, 8, index)  # what a kernel of these features serves
    if "dropout_p" in fields:
        fields |= {"seed": draw.between(0, 2**62), "offset": draw.between(0, 2**40)}
    if any(windows):
        fields["window_size"] = tuple(draw.choose(0, draw.between(0, 200)) if x else None for x in windows)
    pairs = [(draw.between(1, 16) if few else _length(draw), _length(draw))]
    if varlen:
        for _ in range(draw.between(0, 2)):
            pairs.append((_length(draw), _length(draw)) if draw.chance(0.8) else (draw.between(0, 9), 0))
        fields |= {"lead": (draw.between(0, 5), draw.between(0, 40)), "tail": (draw.between(0, 90), draw.between(0, 9))}
    heads = heads_kv * group
    largest = MAX_WORK // (heads * max(head_dim, 16))
    while sum(m * n for m, n in pairs) * batch > largest and (batch > 1 or len(pairs) > 1):
        batch, pairs = 1, pairs[: max(1, len(pairs) - 1)]
    pairs = [(m, fuzz_problems._shrink(n, m, max(largest, 4096))) for m, n in pairs]
    if varlen:
        fields["seqlens"] = tuple(pairs)
    else:
        fields |= {"batch": batch, "seqlen_q": pairs[0][0], "seqlen_k": pairs[0][1]}
    if used:
        slots = [n for _, n in pairs] if varlen else [pairs[0][1]] * batch
        fields["seqused_k"] = tuple(draw.choose(n, draw.between(0, n)) for n in slots)
    fields |= {"num_heads": heads, "num_heads_kv": heads_kv}
    families = ("auto", "portable") if capability == "9.0" else ("auto",)
    drawn = Problem(
        seed=seed,
        index=index,
        structure=number,
        case=cases.make_case(f"simulated-{seed}-{index}", **fields),
        backend=families[number % len(families)],
        want_dbias=want_dbias,
        bias_hidden="bias" in fields and draw.chance(0.1),
        outside_nan=draw.chance(0.5),
        repeat=draw.chance(0.1),
    )
    return drawn, modifier


def _length(draw: Any) -> int:
    kind = draw.choose("edge", "uniform", "few", weights=(4, 6, 1))
    if kind == "edge":
        return int(draw.choose(32, 64, 128, 192, 256) + draw.between(-1, 1))
    return int(draw.between(1, 330) if kind == "uniform" else draw.between(1, 20))


# ---------------------------------------------------------------------------------------------------------------------
# One problem


class CapturedArray:
    """An array on the GPU whose dtype and shape are those of NumPy's."""

    def __init__(self, machine: Any, x: Array) -> None:
        self.shape, self.ndim, self.dtype = x.shape, x.ndim, x.dtype
        self._given = DeviceArray(machine, x, CAPTURED[str(x.dtype)])
        self.__dlpack__, self.__dlpack_device__ = self._given.__dlpack__, self._given.__dlpack_device__


class OnHost:
    """What a modifier makes of the scores of one sequence: `cases.Modified`.

    Masks are of the numbers that a GPU has, float32, whatever scores are computed in. With ``noise``, a seed,
    `gradients` are one sample of what rounding errors of lse and of delta, of unit roundoff ``unit``, add to them.
    """

    def __init__(self, traced: Any, precision: str, noise: list[int] | None = None, unit: float = 0.0) -> None:
        work = np.float64 if precision == "float64" else np.float32
        self._host = HostModifier(traced, [x.astype(work) if x.dtype == np.float32 else x for x in traced.captures])
        self._mask = HostModifier(traced, traced.captures)
        trained = traced.differentiable
        self.gradients = [np.zeros(x.shape) if i in trained else None for i, x in enumerate(traced.captures)]
        self._noise = None if noise is None else np.random.default_rng(noise)
        self._unit = unit
        self._values: Any = None

    def __call__(self, sequence: int, s: Array) -> tuple[Array, Array, Array | None]:
        h, m, n = s.shape
        places = {
            "score": s, "b": np.full((1, 1, 1), sequence), "h": np.arange(h)[:, None, None],
            "q": np.arange(m)[:, None], "k": np.arange(n),
        }  # fmt: skip
        kept, self._values = None, None
        with np.errstate(all="ignore"):
            if self._host.mask is not None:
                kept = np.broadcast_to(self._mask.values(places, np.dtype(np.float32))(self._host.mask), s.shape)
            if self._host.score is None:
                return s, np.ones_like(s), kept
            self._values = self._host.values(places, s.dtype)
            score, slope = (
                np.broadcast_to(self._values(x), s.shape).astype(s.dtype) for x in (self._host.score, self._host.slope)
            )
        return score, slope, kept

    def add_gradients(self, ds: Array, p: Array, lse: Array, squares: Array) -> None:
        if self._noise is not None:  # P is exp(S - lse), and lse is float32
            of_lse = self._noise.normal(0, 2.0**-24 * np.where(np.isfinite(lse), np.abs(lse), 0))
            ds = p * self._noise.normal(0, self._unit * np.sqrt(squares / 3)) + ds * of_lse
        if self._values is not None:
            with np.errstate(all="ignore"):
                self._host.add_gradients(self._values, ds, self.gradients)


class Run:
    """The arrays of one problem on one simulated GPU."""

    def __init__(self, gpu: SimulatedGpu, p: Problem, modifier: ModifierCase | None) -> None:
        self.gpu, self.problem, self.case = gpu, p, p.case
        case = p.case
        self.arrays = fuzz_numpy.make_arrays(p)
        self.shapes = cases.shapes(case)
        rng = np.random.default_rng([p.seed, 9, p.index])
        self.on_host = self.modifier = None
        self.trained: list[int] = []
        if modifier is not None:
            captures = modifier.arrays((case.batch, case.num_heads, case.seqlen_q, case.seqlen_k), rng)
            self.functions = modifier.make(captures)
            self.on_host = nvrtc_attn.trace(*self.functions)
            on_gpu = tuple(CapturedArray(gpu.machine, x) for x in self.on_host.captures)
            self.modifier = dataclasses.replace(self.on_host, captures=on_gpu)
            wanted = np.random.default_rng([p.seed, 10, p.structure])
            self.trained = [i for i in self.on_host.differentiable if wanted.random() < 0.9]
        given = fuzz_numpy.poison_outside(p, self.arrays)
        self.given = {name: self._place(name, x) for name, x in given.items() if name not in fuzz_numpy._LENGTHS}
        self.lengths = {
            name: DeviceArray(gpu.machine, x.copy(), 0) for name, x in given.items() if name in fuzz_numpy._LENGTHS
        }
        self.storages: list[tuple[str, Array, int]] = []

    def _place(self, name: str, x: Array) -> DeviceArray:
        dtype = fuzz_problems.operand_dtype(self.problem, name)
        if name == "mask":
            bits, code = x.view(np.uint8), CAPTURED[dtype]
        else:
            bits, code = encoded(x, dtype), CODES[dtype][0]
        return self._in(name, bits, code)[0]

    def _in(self, name: str, bits: Array, code: int) -> tuple[DeviceArray, Array]:
        """``bits`` in the layout of an operand; what lies around is NaN, whatever the type."""
        where = fuzz_problems.where(self.problem, name, bits.shape)
        storage = np.frombuffer(b"\xff" * (max(where.size, 1) * bits.itemsize), bits.dtype).copy()
        strides = tuple(stride * bits.itemsize for stride in where.strides)
        view = np.lib.stride_tricks.as_strided(storage[where.offset :], bits.shape, strides)
        if bits.shape[0] > 1 and strides[0] == 0:
            view[:1] = bits[:1]
        else:
            view[...] = bits
        return DeviceArray(self.gpu.machine, view, code), storage

    def blank(self, name: str) -> DeviceArray:
        dtype = fuzz_problems.operand_dtype(self.problem, name)
        code, kind = CODES[dtype]
        size = int(np.prod(self.shapes[name]))
        bits = np.frombuffer(b"\xff" * (size * np.dtype(kind).itemsize), kind).reshape(self.shapes[name])
        array, storage = self._in(name, bits, code)
        self.storages.append((name, storage, storage.size - size))
        return array

    @property
    def options(self) -> dict[str, Any]:
        operands = {name: self.given[name] for name in ("bias", "mask", "sink") if name in self.given}
        further = {} if self.modifier is None else {"score_mod": self.modifier}
        rng = (self.case.seed, self.case.offset)
        return {**cases.call_options(self.case), **operands, **self.lengths, **further, "rng": rng}

    def forward(self) -> dict[str, DeviceArray]:
        q, k, v = (self.given[name] for name in "qkv")
        out, lse = self.blank("out"), self.blank("lse")
        size = api.forward_workspace_bytes(q, k, v, lse=lse, **self.options)
        workspace = workspace_of(self.gpu.machine, size + (1 << 20))  # strided results may have other kernels
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, workspace=workspace, **self.options)
        return {"out": out, "lse": lse}

    def backward(self, forward: dict[str, DeviceArray]) -> dict[str, DeviceArray]:
        q, k, v = (self.given[name] for name in "qkv")
        further = {"dbias": self.problem.want_dbias, "dsink": self.case.sink is not None}
        found = {name: self.blank(name) for name in ("dq", "dk", "dv", *(x for x, wanted in further.items() if wanted))}
        options = {**self.options, "deterministic": self.case.deterministic}
        daux = None
        if self.on_host is not None:
            daux = [
                DeviceArray(self.gpu.machine, np.full(x.shape, np.nan, np.float32), 2) if i in self.trained else None
                for i, x in enumerate(self.on_host.captures)
            ]
            options["daux"] = daux
        size = api.backward_workspace_bytes(q, k, v, **further, **options)
        nvrtc_attn.attention_backward(
            self.given["dout"], q, k, v, forward["out"], forward["lse"], found["dq"], found["dk"], found["dv"],
            dbias=found.get("dbias"), dsink=found.get("dsink"), dlse=self.given.get("dlse"),
            workspace=workspace_of(self.gpu.machine, size + (1 << 20)), **options,
        )  # fmt: skip
        return found | {f"daux[{i}]": x for i, x in enumerate(daux or ()) if x is not None}

    def values(self, found: dict[str, DeviceArray]) -> dict[str, Array]:
        def of(name: str, x: DeviceArray) -> Array:
            dtype = "float32" if name.startswith("daux") else fuzz_problems.operand_dtype(self.problem, name)
            return decoded(x.array, dtype).astype(np.float64)

        return {name: of(name, x) for name, x in found.items()}

    def reference(self, precision: str, dither: np.random.Generator | None = None) -> dict[str, Array]:
        """The textbook's results in a precision, with the gradients of captured arrays."""
        modified = None if self.on_host is None else OnHost(self.on_host, precision)
        inputs = cases.cast_inputs(self.case, self.arrays, np.float64 if precision == "float64" else np.float32)
        with np.errstate(all="ignore"):
            results = cases.attention_dense(self.case, inputs, precision, dither, modified)
        if modified is not None:
            results |= {f"daux[{i}]": x for i, x in enumerate(modified.gradients) if x is not None}
        return results

    def summed_errors(self) -> dict[str, float]:
        """`cases.summed_delta_error` of captured arrays: four standard deviations, of sixteen samples."""
        if self.on_host is None or not self.trained:
            return {}
        inputs, unit = cases.cast_inputs(self.case, self.arrays), cases.UNITS[self.case.dtype]
        squares = {i: np.zeros(self.on_host.captures[i].shape) for i in self.trained}
        for sample in range(16):
            modified = OnHost(self.on_host, "float64", [self.problem.index, sample], unit)
            with np.errstate(all="ignore"):
                cases.attention_dense(self.case, inputs, modified=modified)
            for i, x in squares.items():
                x += np.square(modified.gradients[i]) / 16
        return {f"daux[{i}]": float(4 * np.sqrt(x.max(initial=0.0))) for i, x in squares.items()}

    def touched(self) -> list[str]:
        """Results around which something was written."""
        lines = []
        for name, storage, around in self.storages:
            still = int((storage.view(np.uint8).reshape(storage.size, -1) == 255).all(1).sum())
            if still < around:
                lines.append(f"{name}: {around - still} elements around it were written")
        return lines


def functions_differ(run: Run) -> list[str]:
    """Where the oracle's expression is not what the functions make of matrices of NumPy."""
    case = run.case
    if run.on_host is None or case.varlen or case.seqused_k or 0 in cases.shapes(case)["out"]:
        return []
    rng = np.random.default_rng(case.head_dim)
    sizes = (case.num_heads, case.seqlen_q, case.seqlen_k)
    s = rng.standard_normal(sizes)
    h, i, j = np.arange(sizes[0])[:, None, None], np.arange(sizes[1])[:, None], np.arange(sizes[2])
    on_host = OnHost(run.on_host, "float64")
    with np.errstate(all="ignore"):
        ours, _, _ = on_host(case.batch - 1, s)
        if run.functions[0] is None:
            return []
        theirs = np.broadcast_to(run.functions[0](s, np.int64(case.batch - 1), h, i, j), sizes)
    same = np.isclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    # One in a thousand may lie beside a step: the functions see arrays of float32, the oracle those of float64.
    return [] if (~same).mean() < 1e-3 else [f"the oracle differs from the functions in {(~same).mean():.1%}"]


def check(gpu: SimulatedGpu, p: Problem, modifier: ModifierCase | None) -> list[str]:
    """What is wrong; empty where nothing is."""
    run = Run(gpu, p, modifier)
    forward = run.forward()
    found = {**forward, **run.backward(forward)}
    values = run.values(found)
    exact = run.reference("float64")
    inputs = cases.cast_inputs(p.case, run.arrays)
    lines = functions_differ(run) + run.touched()
    wrong = cases.breaches(p.case, values, exact, run.reference(p.case.dtype), inputs)
    allowed = run.summed_errors() if wrong else {}
    dither = np.random.default_rng([p.seed, 5, p.index])
    for _ in range(fuzz_problems.APPEALS if wrong else 0):
        left = {line.split(":")[0] for line in wrong}
        values = {name: x for name, x in values.items() if name in left}
        wrong = cases.breaches(p.case, values, exact, run.reference(p.case.dtype, dither), inputs, allowed)
        if not wrong:
            break
    lines += wrong
    if p.repeat:
        again = run.forward()
        if p.case.deterministic:
            again |= run.backward(forward)
        lines += [f"{name}: two runs differ" for name, x in again.items() if (x.array != found[name].array).any()]
    return [*lines, *gpu.notes] if lines else []


# ---------------------------------------------------------------------------------------------------------------------
# A campaign


@contextmanager
def thresholds(number: int) -> Iterator[None]:
    """Every other problem walks tiles by words, whatever its size."""
    before = [getattr(tile_words, name) for name in THRESHOLDS]
    if number % 4 > 1:
        for name, value in zip(THRESHOLDS, (0, 1, 0), strict=True):
            setattr(tile_words, name, value)
    try:
        yield
    finally:
        for name, value in zip(THRESHOLDS, before, strict=True):
            setattr(tile_words, name, value)


def run(
    capability: str, problems: int, seed: int, first: int, seconds: float, with_modifiers: bool, replay: bool = False
) -> int:
    """Print what is wrong, and return how many problems are."""
    name = "sm_" + capability.replace(".", "")
    if name not in GPUS:
        raise SystemExit(f"--simulated {capability}: simulated are {[x[3:-1] + '.' + x[-1] for x in GPUS]}")
    start, wrong, done = time.monotonic(), 0, 0
    kinds: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(os.environ.setdefault("NVRTC_ATTN_CACHE_DIR", folder))
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        machine = simulator.build_machine(SimpleNamespace(getbasetemp=lambda: kept))  # type: ignore[arg-type]
        index, end = first, first + problems
        while index < end and time.monotonic() - start < seconds:
            number = index // SHAPES
            with quiet(), thresholds(number), simulator.simulated(machine, GPUS[name]) as gpu:
                gpu.seed = 1000 * index
                for index in range(index, min(end, (number + 1) * SHAPES)):  # noqa: B020 - the rest of a pair
                    p, modifier = problem(seed, index, capability, with_modifiers)
                    os.environ["NVRTC_ATTN_BACKEND"] = p.backend
                    try:
                        lines = check(gpu, p, modifier)
                    except nvrtc_attn.UnsupportedError as error:
                        lines = []
                        refused[str(error).split(". ")[0][:200]] += 1
                    except Exception:
                        lines = [traceback.format_exc(limit=-3)]
                    done += 1
                    wrong += bool(lines)
                    if lines:
                        print(failure(p, modifier, capability, lines), flush=True)
                used = {config.kernel for config, _ in plan._kernels}
                kinds.update(used)
            index += 1
    if replay and not wrong:
        print("right")
    for text, count in refused.items():
        print(f"refused {count}: {text}")
    print("kernels: " + ", ".join(f"{kernel} {n}" for kernel, n in kinds.most_common()))
    print(
        f"simulated {capability}{' with modifiers' * with_modifiers}, seed {seed}: {done} problems, {wrong} wrong, "
        f"{time.monotonic() - start:.0f} s; --first {index} goes on from here",
        flush=True,
    )
    return wrong


def failure(p: Problem, modifier: ModifierCase | None, capability: str, lines: Sequence[str]) -> str:
    """With the command that runs the problem again."""
    options = f"--simulated {capability}{' --modifiers' if modifier is not None else ''}"
    default = {x.name: x.default for x in dataclasses.fields(Case)}
    fields = {x.name: getattr(p.case, x.name) for x in dataclasses.fields(Case)}
    shown = " ".join(f"{name}={x}" for name, x in fields.items() if x != default[name])
    of_what = "" if modifier is None else f"{modifier.name}\n"
    command = f"python tests/fuzz.py {options} --replay {p.seed}:{p.index}"
    return "\n".join([f"WRONG {command} | {p.backend} {shown}", of_what + "\n".join(lines)])
