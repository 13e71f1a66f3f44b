"""Modifiers for tests: named ones and random ones of a grammar, with the textbook in float64 that they are compared to.

The oracle calls the same Python function with NumPy arrays of all scores and positions at once: nothing of the package
is in it. What a function does must therefore mean the same to arrays: NumPy's functions, and `&`, `|`, `~`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import nvrtc_attn

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ModifierCase:
    """``make(arrays)`` returns (score_mod, mask_mod) over named arrays, which `sizes` gives shapes of."""

    name: str
    make: Callable[[Mapping[str, Any]], tuple[Any, Any]]
    arrays: Callable[[tuple[int, int, int, int], np.random.Generator], dict[str, Array]] = field(
        default=lambda sizes, rng: {}
    )
    trained: tuple[str, ...] = ()
    """Arrays with a gradient."""

    def __str__(self) -> str:
        return self.name


def _floats(*shape: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def _documents(count: int, rng: np.random.Generator) -> Array:
    return np.sort(rng.integers(0, 4, count)).astype(np.int32)


def _t5_bucket(distance: Any) -> Any:
    """T5's buckets of relative positions, 16 on each side."""
    near = 8
    size = abs(distance)
    far = near + (np.log(np.maximum(size, 1) / near) / np.log(128 / near) * near).astype(np.int32)
    bucket = np.where(size < near, size, np.minimum(far, 15))
    return bucket + np.where(distance > 0, 16, 0)


BENT: Final = nvrtc_attn.cuda_function(
    "float bent(float x, float slope, int distance)",
    "float far = slope * abs(distance);\nreturn x / (1.0f + fabsf(x)) + far;",
    derivatives={"x": "float y = 1.0f + fabsf(x); return 1.0f / (y * y);", "slope": "return float(abs(distance));"},
    numpy=lambda x, slope, distance: x / (1 + np.abs(x)) + slope * np.abs(distance),
    numpy_derivatives={
        "x": lambda x, slope, distance: 1 / (1 + np.abs(x)) ** 2 + 0 * slope,
        "slope": lambda x, slope, distance: np.abs(distance) + 0 * x,
    },
)
"""A function in C++, and one that is a mask by itself."""
STRIPES: Final = nvrtc_attn.cuda_function(
    "bool stripes(int b, int h, int q, int k)",
    "if (q == k) { return true; }\nreturn (q + k + h) % 4 != 1 && k <= q + 9;",
    numpy=lambda b, h, q, k: (q == k) | (((q + k + h) % 4 != 1) & (k <= q + 9)),
)


def named_cases() -> list[ModifierCase]:
    def score(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
        return lambda a: (lambda s, b, h, q, k: function(a, s, b, h, q, k), None)

    def mask(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
        return lambda a: (None, lambda b, h, q, k: function(a, b, h, q, k))

    slope, width = 0.3, 7
    return [
        ModifierCase("distance", score(lambda a, s, b, h, q, k: s - slope * abs(q - k))),
        ModifierCase(
            "alibi", score(lambda a, s, b, h, q, k: s + a["slopes"][h] * (k - q)),
            lambda n, rng: {"slopes": _floats(n[1], rng=rng)}, ("slopes",),
        ),
        ModifierCase("alibi by formula", score(lambda a, s, b, h, q, k: s + np.exp2(-(h + 1) * 8.0 / 4) * (k - q))),
        ModifierCase("softcap", score(lambda a, s, b, h, q, k: 2.0 * np.tanh(s / 2.0))),
        ModifierCase(
            "softcap and alibi",
            score(lambda a, s, b, h, q, k: slope * np.tanh(s / slope) + a["slopes"][h] * (k - q)),
            lambda n, rng: {"slopes": _floats(n[1], rng=rng)}, ("slopes",),
        ),
        ModifierCase(
            "head scale", score(lambda a, s, b, h, q, k: s * a["scales"][h]),
            lambda n, rng: {"scales": _floats(n[1], rng=rng)}, ("scales",),
        ),
        ModifierCase(
            "temperature", score(lambda a, s, b, h, q, k: s * np.exp(a["t"][0])),
            lambda n, rng: {"t": _floats(1, rng=rng)}, ("t",),
        ),
        ModifierCase(
            "bias", score(lambda a, s, b, h, q, k: s + a["bias"][b, h, q, k]),
            lambda n, rng: {"bias": _floats(*n, rng=rng)}, ("bias",),
        ),
        ModifierCase(
            "bias by head", score(lambda a, s, b, h, q, k: s + a["bias"][h, q, k]),
            lambda n, rng: {"bias": _floats(*n[1:], rng=rng)}, ("bias",),
        ),
        ModifierCase(
            "relative bias", score(lambda a, s, b, h, q, k: s + a["table"][h, q - k + a["table"].shape[1] // 2]),
            lambda n, rng: {"table": _floats(n[1], 2 * max(n[2:]) + 2, rng=rng)}, ("table",),
        ),
        ModifierCase(
            "t5", score(lambda a, s, b, h, q, k: s + a["table"][_t5_bucket(k - q), h]),
            lambda n, rng: {"table": _floats(32, n[1], rng=rng)}, ("table",),
        ),
        ModifierCase(
            "swin", score(lambda a, s, b, h, q, k: s + a["table"][a["index"][q, k], h]),
            lambda n, rng: {
                "table": _floats(9, n[1], rng=rng), "index": rng.integers(0, 9, n[2:]).astype(np.int64),
            }, ("table",),
        ),
        ModifierCase(
            "rows and columns", score(lambda a, s, b, h, q, k: s + a["rows"][b, q] * a["columns"][h, k]),
            lambda n, rng: {"rows": _floats(n[0], n[2], rng=rng), "columns": _floats(n[1], n[3], rng=rng)},
            ("rows", "columns"),
        ),
        ModifierCase(
            "array twice", score(lambda a, s, b, h, q, k: s + a["x"][q % 3] * s + a["x"][k % 3]),
            lambda n, rng: {"x": _floats(3, rng=rng)}, ("x",),
        ),
        ModifierCase(
            "cuda function", score(lambda a, s, b, h, q, k: BENT(s, a["slopes"][h], q - k) * 0.5),
            lambda n, rng: {"slopes": _floats(n[1], rng=rng)}, ("slopes",),
        ),
        ModifierCase("cuda mask", lambda a: (None, STRIPES)),
        ModifierCase("masked by score", score(lambda a, s, b, h, q, k: np.where((q >= k) & (k % 3 != 1), s, -np.inf))),
        ModifierCase("causal", mask(lambda a, b, h, q, k: q >= k)),
        ModifierCase("window", mask(lambda a, b, h, q, k: (q - k <= width) & (k <= q + 2))),
        ModifierCase(
            "prefix", mask(lambda a, b, h, q, k: (k < a["lengths"][b]) | (k <= q)),
            lambda n, rng: {"lengths": rng.integers(0, n[3] + 1, n[0]).astype(np.int32)},
        ),
        ModifierCase(
            "documents", mask(lambda a, b, h, q, k: (a["rows"][q] == a["columns"][k]) & (k <= q + width)),
            lambda n, rng: {"rows": _documents(n[2], rng), "columns": _documents(n[3], rng)},
        ),
        ModifierCase("dilated", mask(lambda a, b, h, q, k: ((q - k) % 3 == 0) & (h % 2 == 0) | (q // 4 == k // 4))),
        ModifierCase(
            "natten", mask(lambda a, b, h, q, k: (abs(q // 5 - k // 5) <= 1) & (abs(q % 5 - k % 5) <= 1)),
        ),
        ModifierCase(
            "both",
            lambda a: (
                lambda s, b, h, q, k: s * 0.5 + a["x"][k], lambda b, h, q, k: (k < width) | (abs(q - k) < width),
            ),
            lambda n, rng: {"x": _floats(n[3], rng=rng)}, ("x",),
        ),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the grammar


def random_case(seed: int) -> ModifierCase:
    """A random modifier of the grammar."""
    rng = np.random.default_rng(seed)
    expression = _score(rng, 3)
    masks = rng.random() < 0.5
    condition = _condition(rng, 2) if masks else "True"
    text_mask = f"lambda b, h, q, k: {condition} | (q == k)" if masks else "None"
    text = f"lambda s, b, h, q, k: {expression}"
    constants = {f"c{i}": round(float(rng.uniform(0.2, 2.0)), 3) for i in range(3)}
    whole = {f"n{i}": int(rng.integers(2, 9)) for i in range(3)}

    def make(arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        names = {"np": np, **constants, **whole, **arrays}
        return eval(text, names), eval(text_mask, names)

    def arrays(n: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        everything = {
            "zero": _floats(1, rng=rng), "head": _floats(n[1], rng=rng), "row": _floats(n[2], rng=rng),
            "column": _floats(n[3], rng=rng), "batch": _floats(n[0], n[1], rng=rng),
            "table": _floats(n[1], 2 * max(n[2:]) + 2, rng=rng), "full": _floats(n[1], n[2], n[3], rng=rng),
            "bucket": _floats(7, rng=rng), "ids_q": rng.integers(0, 7, n[2]).astype(np.int32),
            "ids_k": rng.integers(0, 7, n[3]).astype(np.int64), "flags": rng.random(n[3]) < 0.7,
        }  # fmt: skip
        return {name: x for name, x in everything.items() if name in text or name in text_mask}

    trained = tuple(
        name for name in ("zero", "head", "row", "column", "batch", "table", "full", "bucket") if f"{name}[" in text
    )
    return ModifierCase(f"random {seed}: {text}; {text_mask}", make, arrays, trained)


def _pick(rng: np.random.Generator, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def _integer(rng: np.random.Generator, depth: int) -> str:
    leaves = ("b", "h", "q", "k", "n0", "n1", "3", "ids_q[q]", "ids_k[k]")
    if depth == 0 or rng.random() < 0.3:
        return _pick(rng, leaves)
    a, b = (_integer(rng, depth - 1) for _ in range(2))
    return _pick(
        rng,
        (
            f"({a} + {b})", f"({a} - {b})", f"abs({a} - {b})", f"({a} // n2)", f"({a} % n1)", f"({a} // 4)",
            f"np.minimum({a}, {b})", f"np.maximum({a}, {b})",
        ),
    )  # fmt: skip


def _condition(rng: np.random.Generator, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        a, b = (_integer(rng, 1) for _ in range(2))
        return _pick(
            rng, (f"({a} <= {b})", f"({a} < {b} + n0)", f"({a} == {b})", f"({a} != {b})", "flags[k]", "(q >= k)")
        )
    a, b = (_condition(rng, depth - 1) for _ in range(2))
    return _pick(rng, (f"({a} & {b})", f"({a} | {b})", _not(a), f"({a} ^ {b})"))


def _not(condition: str) -> str:
    """Of constants alone it is a bool of Python, whose ``~`` is an integer that is never zero."""
    return f"(~{condition})" if re.search(r"\b[bhqk]\b", condition) else f"(not {condition})"


def _term(rng: np.random.Generator) -> str:
    """Something that does not depend on the score."""
    return _pick(
        rng,
        (
            "c0", "0.5", "zero[0]", "head[h]", "row[q]", "column[k]", "batch[b, h]", "table[h, q - k + column_count]",
            "full[h, q, k]", "bucket[(q + k) % 7]", "bucket[ids_q[q]]", f"np.tanh(0.1 * {_integer(rng, 1)})",
            f"np.where({_condition(rng, 0)}, c1, -0.25)",
        ),
    ).replace("column_count", "table.shape[1] // 2")  # fmt: skip


def _score(rng: np.random.Generator, depth: int) -> str:
    """Bounded where a chain of exponentials would leave float32."""
    if depth == 0:
        return "s"
    x = _score(rng, depth - 1)
    y = _score(rng, depth - 1) if rng.random() < 0.2 else "s"
    found = _pick(
        rng,
        (
            f"{x} + {_term(rng)}", f"{x} * {_term(rng)}", f"{x} - c2 * {_term(rng)}", f"c0 * np.tanh({x} / c0)",
            f"np.sin({x})", f"np.where({_condition(rng, 1)}, {x}, {y})", f"np.exp(-{x} * {x})",
            f"{x} / (1.0 + abs({y}))", f"np.log1p(np.exp(np.tanh({x}) * c1))",
            f"np.sqrt({x} ** 2 + 1.0) + {_term(rng)}",
            f"np.maximum({x}, {_term(rng)})", f"np.expm1(0.3 * np.tanh({x}))",
        ),
    )  # fmt: skip
    return f"({found})"


def random_wide_case(seed: int) -> ModifierCase:
    """What `random_case` leaves out: operations of integers, powers, remainders, learned exponents, narrow arrays."""
    rng = np.random.default_rng([seed, 78])
    score = "s"
    for _ in range(int(rng.integers(1, 3))):
        x, y = _wide_value(rng, 2), _wide_value(rng, 1)
        score = _pick(
            rng,
            (
                f"({score} + {x})", f"({score} - {x})", f"({score} * np.tanh({x}) + {y})",
                f"np.clip({score}, -2.1, 2.2)",
                f"({score} + np.tanh({score}) ** 3 * {x})", f"np.logaddexp({score}, {x})", f"np.hypot({score}, {x})",
                f"np.where({_plain_condition(rng)}, {score}, {x})", f"((np.tanh({score}) + 1.13) % (abs({x}) + 0.7))",
                f"({score} / (abs({x}) + 0.5))", f"np.fmod(np.tanh({score}), 0.77)", f"({x} - {score})",
            ),
        )  # fmt: skip
    if rng.random() < 0.25:
        score = f"np.where({_plain_condition(rng)} | (q == k), {score}, -np.inf)"
    text = f"lambda s, b, h, q, k: {score}"
    constants = {
        "c0": round(float(rng.uniform(0.3, 2.0)), 3),
        "n1": int(rng.integers(2, 9)),
        "p": int(rng.integers(2, 5)),
    }

    def arrays(n: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        everything = {
            "head": _floats(n[1], rng=rng), "zero": np.zeros(n[1], np.float32), "row": _floats(n[2], rng=rng),
            "table": _floats(5, n[1], rng=rng), "bucket": _floats(7, rng=rng),
            "power": rng.uniform(0.6, 1.9, n[1]).astype(np.float32), "narrow": rng.integers(-9, 9,
            n[3]).astype(np.int8),
            "ids": rng.integers(0, 9, n[2:]),
        }  # fmt: skip
        return {name: x for name, x in everything.items() if f"{name}[" in text}

    def make(arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        return eval(text, {"np": np, **constants, **arrays}), None

    trained = tuple(x for x in ("head", "zero", "row", "table", "bucket", "power") if f"{x}[" in text)
    return ModifierCase(f"wide {seed}: {text}", make, arrays, trained)


def _plain_integer(rng: np.random.Generator, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return _pick(rng, ("b", "h", "q", "k", "(q - k)", "(k - q)", "narrow[k].astype(np.int32)", "ids[q, k]"))
    a, b = (_plain_integer(rng, depth - 1) for _ in range(2))
    return _pick(
        rng,
        (
            f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} // -3)", f"({a} % -4)", f"({a} // n1)",
            f"({a} % n1)",
            f"({a} // (abs({b}) + 1))", f"({a} % (abs({b}) + 1))", f"({a} & 7)", f"({a} | {b})", f"({a} ^ {b})",
            f"({a} >> 1)", f"({a} << 1)", f"(~{a})", f"(-{a})", f"np.sign({a})", f"np.clip({a}, -3, n1)",
            f"(({a} % 5) ** p)", f"2 ** ({a} % 4)", f"np.fmod({a}, 5)",
            f"np.where({_plain_condition(rng)}, {a}, {b})",
            f"({a} > {b}).astype(np.int32)",
        ),
    )  # fmt: skip


def _plain_condition(rng: np.random.Generator) -> str:
    a = _plain_integer(rng, 1)
    return _pick(rng, (f"({a} > 2)", f"({a} <= 1.5)", f"({a} != {_plain_integer(rng, 0)})", "((q - k) % 3 == 0)"))


def _wide_value(rng: np.random.Generator, depth: int) -> str:
    """Bounded, so that no score leaves float32, and without steps where differences are taken."""
    i = _plain_integer(rng, 2)
    if depth == 0 or rng.random() < 0.3:
        return _pick(
            rng,
            (
                "head[h]", "row[q]", f"table[{i} % 5, h]", f"bucket[{i} % 7]", "head[-1]",
                "0.1 * abs(q - k) ** power[h]", f"np.tanh({i} / 7)", f"zero[h] * np.tanh({i} * 0.1)", f"({i} % 2.5)",
                "np.log1p(abs(q - k)) * head[h]", f"np.sin({i} * c0)",
            ),
        )  # fmt: skip
    x, y = (_wide_value(rng, depth - 1) for _ in range(2))
    return _pick(
        rng,
        (
            f"({x} + {y})", f"({x} * {y})", f"np.tanh({x}) ** p", f"(abs({x}) + 0.2) ** c0", f"np.arctan({x})",
            f"(abs({x}) + 0.3) ** np.tanh({y})", f"2.0 ** np.tanh({x})", f"np.exp2(np.tanh({x}))", f"np.square({x})",
            f"np.logaddexp({x}, {y})", f"np.hypot({x}, {y})", f"np.where({_plain_condition(rng)}, {x}, {y})",
            f"np.maximum({x}, {y} + 0.013)", f"np.clip({x}, -1.1, 0.9)", f"np.tan(np.tanh({x}))",
            f"np.cosh(np.tanh({x}))",
            f"np.sinh(np.tanh({x}))", f"np.reciprocal(abs({x}) + 0.5)", f"np.log10(abs({x}) + 0.5)",
            f"np.copysign({x}, {y})",
            f"({_plain_condition(rng)} * {x})", f"np.log2(abs({x}) + 0.5)", f"np.nan_to_num({x})",
        ),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- masks that tiles can be of


def sparse_cases() -> list[ModifierCase]:
    """Masks with whole tiles of nothing, of the kinds that models use."""

    def mask(function: Callable[..., Any]) -> Callable[[Mapping[str, Any]], tuple[Any, Any]]:
        return lambda a: (None, lambda b, h, q, k: function(a, b, h, q, k))

    def documents(n: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        longest = max(n[2:])
        cuts = np.sort(rng.integers(1, longest, 5))
        return {"ids": np.searchsorted(cuts, np.arange(longest), "right").astype(np.int32)}

    def blocks(n: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        return {"blocks": rng.random((n[2] // 16 + 1, n[3] // 16 + 1)) < 0.3}

    def strips(n: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        kept = rng.random((n[2] // 64 + 1, n[3] // 48 + 1)) < 0.4
        kept[1:2] = False
        return {"strips": kept}

    width, reach = 40, 64
    return [
        ModifierCase("causal below", mask(lambda a, b, h, q, k: (q >= k) & (q - k < width))),
        ModifierCase("sinks and window", mask(lambda a, b, h, q, k: (q >= k) & ((q - k < width) | (k < 4)))),
        ModifierCase("documents", mask(lambda a, b, h, q, k: (a["ids"][q] == a["ids"][k])), documents),
        ModifierCase(
            "causal documents", mask(lambda a, b, h, q, k: (a["ids"][q] == a["ids"][k]) & (q >= k)), documents
        ),
        ModifierCase(
            "prefix", mask(lambda a, b, h, q, k: (k < a["lengths"][b]) | (k <= q)),
            lambda n, rng: {"lengths": rng.integers(0, n[3] + 1, n[0]).astype(np.int32)},
        ),
        ModifierCase(
            "prefix of documents",
            mask(lambda a, b, h, q, k: (a["ids"][q] == a["ids"][k]) & ((k < a["prefix"][a["ids"][q]]) | (k <= q))),
            lambda n, rng: {**documents(n, rng), "prefix": rng.integers(0, n[3], 6).astype(np.int64)},
        ),
        ModifierCase(
            "padding", mask(lambda a, b, h, q, k: k < a["lengths"][b]),
            lambda n, rng: {"lengths": rng.integers(0, n[3] + 1, n[0]).astype(np.int32)},
        ),
        ModifierCase(
            "window of a head", mask(lambda a, b, h, q, k: abs(q - k) < a["reach"][h]),
            lambda n, rng: {"reach": rng.integers(1, n[3], n[1]).astype(np.int32)},
        ),
        ModifierCase(
            "natten", mask(lambda a, b, h, q, k: (abs(q // 16 - k // 16) <= 1) & (abs(q % 16 - k % 16) <= 2)),
        ),
        ModifierCase("chunks", mask(lambda a, b, h, q, k: (q // reach == k // reach) & (q >= k))),
        ModifierCase(
            "block diffusion",
            mask(lambda a, b, h, q, k: np.where(
                q < reach, np.where(k < reach, q // 8 == k // 8, q // 8 > (k - reach) // 8),
                (k >= reach) & ((q - reach) // 8 >= (k - reach) // 8),
            )),
        ),
        ModifierCase("blocks", mask(lambda a, b, h, q, k: a["blocks"][q // 16, k // 16]), blocks),
        ModifierCase(  # tiles in which some warp-groups of 64 rows have nothing to do, the second one in all
            "rows of 64", mask(lambda a, b, h, q, k: a["strips"][q // 64, k // 48] & ((q + k) % 5 != 0)), strips,
        ),
        ModifierCase("circle", mask(lambda a, b, h, q, k: np.sqrt((q - k) * (q - k) * 1.0 + 1.0) <= 20.5)),
    ]  # fmt: skip


def random_mask(seed: int) -> ModifierCase:
    """A random condition of integers and floating-point numbers, arrays and their elements beyond the end."""
    rng = np.random.default_rng([seed, 77])
    text = f"lambda b, h, q, k: {_wide_condition(rng, 3)}"
    constants = {f"c{i}": round(float(rng.uniform(0.2, 20.0)), 3) for i in range(3)}
    whole = {f"n{i}": int(rng.integers(2, 40)) for i in range(3)}

    def make(arrays: Mapping[str, Any]) -> tuple[Any, Any]:
        return None, eval(text, {"np": np, **constants, **whole, **arrays})

    def arrays(n: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Array]:
        longest = max(n[2:])
        everything = {
            "ids_q": _documents(n[2], rng), "ids_k": _documents(n[3], rng).astype(np.int64),
            "lengths": rng.integers(0, n[3] + 1, n[0]).astype(np.int32), "reach": rng.integers(0, 30, n[1]),
            "flags": np.arange(n[3]) % 29 < 20, "row": np.cumsum(_floats(n[2], rng=rng)).astype(np.float32),
            "column": _floats(n[3], rng=rng), "short": rng.integers(-3, 9, longest // 2).astype(np.int32),
            "table": rng.random((longest // 8 + 1, longest // 8 + 1)) < 0.4,
            "bytes": rng.integers(0, 5, (3, 5), np.uint8), "wide": np.round(rng.random(7), 3),
        }  # fmt: skip
        return {name: x for name, x in everything.items() if name in text}

    return ModifierCase(f"mask {seed}: {text}", make, arrays)


def _wide_integer(rng: np.random.Generator, depth: int) -> str:
    leaves = (
        "b", "h", "q", "q", "k", "k", "n0", "n1", "3", "17", "ids_q[q]", "ids_k[k]", "lengths[b]", "reach[h]",
        "short[q]", "short[abs(q - k)]", "bytes[b, (q // 8 + k // 8) % 6].astype(np.int32)", "short[ids_q[q]]",
    )  # fmt: skip
    if depth == 0 or rng.random() < 0.25:
        return _pick(rng, leaves)
    a, b = (_wide_integer(rng, depth - 1) for _ in range(2))
    return _pick(
        rng,
        (
            f"({a} + {b})", f"({a} - {b})", f"abs({a} - {b})", f"({a} * {b})", f"({a} // n2)", f"({a} % n1)",
            f"({a} // 8)", f"np.minimum({a}, {b})", f"np.maximum({a}, {b})", f"({a} & 7)", f"({a} & {b})",
            f"({a} | {b})", f"({a} ^ 5)", f"({a} >> 2)", f"({a} << 1)", f"(-{a})", f"np.sign({a} - {b})", f"(~{a})",
            f"np.where({a} < {b}, {a}, {b})",
            f"({a} % (abs({b}) + 1))", f"({a} // (abs({b}) + 1))", f"({a} - {b}) * ({a} - {b})", f"({a} % -7)",
        ),
    )  # fmt: skip


def _wide_float(rng: np.random.Generator, depth: int) -> str:
    if depth == 0 or rng.random() < 0.3:
        return _pick(
            rng, ("c0", "c1", "0.5", "row[q]", "column[k]", "wide[ids_q[q]]", "q * 0.25", "k / c2", "(q - k) * 0.1")
        )
    a, b = (_wide_float(rng, depth - 1) for _ in range(2))
    return _pick(
        rng,
        (
            f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} / (abs({b}) + 0.5))", f"({a} / {b})",
            f"np.tanh({a})", f"np.sqrt(abs({a}))", f"np.sqrt({a})", f"np.log1p(abs({a}))", f"np.log({a})",
            f"np.exp(-abs({a}))", f"np.sin({a})", f"np.floor({a})", f"np.maximum({a}, {b})", f"np.minimum({a}, {b})",
            f"abs({a})", f"({a}) * ({a})", f"({a} % 3.0)", f"({a} // 2.5)", f"np.where({a} < {b}, {a}, {b})",
            f"np.sign({a})", f"(abs({a}) + 0.1) ** 1.5", f"np.expm1(np.minimum({a}, 3.0))",
        ),
    )  # fmt: skip


def _wide_condition(rng: np.random.Generator, depth: int) -> str:
    if depth == 0 or rng.random() < 0.15:
        if rng.random() < 0.3:
            return f"({_wide_float(rng, 2)} {_pick(rng, ('<', '<=', '>', '>=', '==', '!='))} {_wide_float(rng, 1)})"
        a, b = (_wide_integer(rng, 2) for _ in range(2))
        plain = (
            "flags[k]",
            "(q >= k)",
            "(ids_q[q] == ids_k[k])",
            "table[q // 8, k // 8]",
            "(k < lengths[b])",
            "(q - k < n0)",
        )
        return _pick(rng, (*plain, *(f"({a} {op} {b})" for op in ("<=", "<", "==", "!=", ">="))))
    a, b = (_wide_condition(rng, depth - 1) for _ in range(2))
    return _pick(
        rng,
        (f"({a} & {b})", f"({a} & {b})", f"({a} | {b})", _not(a), f"({a} ^ {b})", f"np.where({a}, {b}, {_not(b)})"),
    )


# --------------------------------------------------------------------------------------------------------- the oracle


def textbook(
    q: Array,
    k: Array,
    v: Array,
    score_mod: Any,
    mask_mod: Any,
    *,
    softmax_scale: float | None = None,
    bias: Array | None = None,
    keep: Array | None = None,
) -> tuple[Array, Array]:
    """(out, lse) in float64, with the functions called on arrays. ``keep``: dropout's mask and multiplier."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, 2) for x in (k, v))
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    sizes = s.shape
    b, h, i, j = (np.arange(n).reshape([-1 if a == d else 1 for a in range(4)]) for d, n in enumerate(sizes))
    with np.errstate(all="ignore"):
        if score_mod is not None:
            s = np.broadcast_to(score_mod(s, b, h, i, j), sizes)
        if bias is not None:
            s = s + bias
        if mask_mod is not None:
            s = np.where(np.broadcast_to(mask_mod(b, h, i, j), sizes), s, -np.inf)
        top = s.max(-1, keepdims=True)
        p = np.exp(s - np.where(np.isfinite(top), top, 0))
        total = p.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.log(total) + np.where(np.isfinite(top), top, 0), -np.inf)[..., 0]
        p = p / np.where(total > 0, total, 1)
    if keep is not None:
        p = p * keep
    return np.einsum("bhqk,bkhd->bqhd", p, v), lse
