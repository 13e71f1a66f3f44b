"""Random attention problems that ranks share, and what each rank must get: used by threads, gloo processes and GPUs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import cases
import modifiers
import numpy as np
import torch
from cases import Array, Case
from fuzz_problems import APPEALS
from modifiers import ModifierCase

import nvrtc_attn
from nvrtc_attn.front.chunks import Chunks, chunks_of
from nvrtc_attn.front.documents import shared_documents

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """A dense problem and how its sequence is sharded."""

    case: Case
    layout: Any


def problems(
    seed: int, count: int, ranks: int, *, heads_divide: bool = False, passes_keys: bool = False, max_flops: float = 2e5
) -> Iterator[Shared]:
    """Problems over all features that ContextParallel takes; with ``passes_keys`` those that a ring takes."""
    found = 0
    for index in itertools.count():
        case = cases.random_case(seed, index, max_flops=max_flops)
        if case.varlen or case.seqused_k or not (case.num_heads and case.num_heads_kv and case.batch):
            continue
        rng = np.random.default_rng([seed, index, ranks])
        if heads_divide:
            group = case.num_heads // case.num_heads_kv
            count_kv, group = int(rng.choice([1, ranks, 2 * ranks])), min(group, 2)
            case = dataclasses.replace(
                case, num_heads_kv=count_kv, num_heads=count_kv * (ranks if count_kv == 1 else group)
            )
        kind = int(rng.integers(0, 4))
        layout: Any = "zigzag" if kind < 2 else "contiguous"
        if kind == 3 and case.seqlen_q == case.seqlen_k:
            layout = random_layout(rng, case.seqlen_q, ranks)
        case = dataclasses.replace(case, layout="contiguous", deterministic=False)
        if rng.random() < 0.4:
            used = tuple(int(n) for n in rng.integers(0, case.seqlen_k + 1, case.batch))
            diagonal = case.causal or case.window_size != (None, None)
            case = dataclasses.replace(
                case, seqused_k=used, causal="top_left" if passes_keys and diagonal else case.causal
            )
        yield Shared(case=case, layout=layout)
        found += 1
        if found == count:
            return


def packed_problems(seed: int, count: int, ranks: int, *, heads_divide: bool = False) -> Iterator[Shared]:
    """Packed self-attention, among it empty documents, those of one token, and tokens in none; every layout."""
    for index, shared in enumerate(problems(seed, count, ranks, heads_divide=heads_divide)):
        rng = np.random.default_rng([seed, index, ranks, 7])
        kinds = [[0], [1], range(2, 12), range(30, 90)]
        sizes = [
            int(rng.choice(kinds[int(x)])) for x in rng.choice(4, int(rng.integers(1, 7)), p=[0.15, 0.2, 0.4, 0.25])
        ]
        outside = [(0, 0), (3, 0), (0, 5), (2, 70)][int(rng.integers(4))]
        bound = max(sizes) + int(rng.integers(0, 2)) * 5  # a loose one is what callers have
        case = dataclasses.replace(
            shared.case, bias=None, mask=None, seqused_k=(), seqlens=tuple((n, n) for n in sizes),
            lead=(outside[0],) * 2, tail=(outside[1],) * 2, batch=len(sizes), seqlen_q=bound, seqlen_k=bound,
        )  # fmt: skip
        tokens = sum(sizes) + sum(outside)
        layout: Any = ("zigzag", "contiguous", "documents")[int(rng.integers(3))]
        if rng.random() < 0.25:
            layout = random_layout(rng, tokens, ranks)
        yield Shared(case=case, layout=layout)


def starts_of(case: Case) -> tuple[int, ...]:
    """cu_seqlens of packed self-attention."""
    return tuple(int(x) for x in np.cumsum([case.lead[0], *(n for n, _ in case.seqlens)]))


def tokens_of(case: Case) -> tuple[int, int]:
    """Tokens of queries and keys."""
    if not case.varlen:
        return case.seqlen_q, case.seqlen_k
    shapes = cases.shapes(case)
    return shapes["q"][1], shapes["k"][1]


def chunks_for(shared: Shared, tokens: int, ranks: int) -> tuple[Chunks, ...]:
    """The tokens of each rank."""
    if isinstance(shared.layout, str) and shared.layout == "documents":
        return shared_documents(starts_of(shared.case), tokens, ranks)
    return chunks_of(shared.layout, tokens, ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modified:
    """A modifier, the sizes (batch, heads, queries, keys) of what it is for, and the options beside it."""

    case: ModifierCase
    seed: int
    sizes: tuple[int, int, int, int]
    heads_kv: int
    layout: str
    options: dict[str, Any]

    def tensors(self, device: Any = "cpu") -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """q, k, v and dout of the whole, and the arrays that the modifier captures."""
        b, h, m, n = self.sizes
        rng = np.random.default_rng([self.seed, 1])
        shapes = ((b, m, h, 8), (b, n, self.heads_kv, 8), (b, n, self.heads_kv, 8), (b, m, h, 8))
        found = [torch.from_numpy(rng.standard_normal(x).astype(np.float32)).to(device) for x in shapes]
        arrays = self.case.arrays(self.sizes, rng)
        return found, {name: torch.from_numpy(np.asarray(x)).to(device) for name, x in arrays.items()}


def modified_problems(seed: int, count: int, ranks: int) -> Iterator[Modified]:
    """Named and random modifiers, with windows, causal masks and dropout beside them. Heads suit every strategy."""
    named = [*modifiers.named_cases(), *modifiers.sparse_cases()]
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        random = modifiers.random_case(1000 * seed + index)
        case = random if index % 3 == 2 else named[int(rng.integers(len(named)))]
        heads_kv = int(rng.choice([1, ranks, 2 * ranks]))
        heads = heads_kv * (ranks if heads_kv == 1 else int(rng.integers(1, 3)))
        sizes = (int(rng.integers(1, 3)), heads, *(int(x) for x in rng.integers(2, 50, 2)))
        if rng.random() < 0.5:
            sizes = (*sizes[:3], sizes[2])
        options: dict[str, Any] = {"causal": [False, True, "top_left"][int(rng.integers(3))]}
        options["window_size"] = (int(rng.integers(1, 20)), None) if rng.random() < 0.3 else (None, None)
        options["dropout_p"] = 0.2 if rng.random() < 0.3 else 0.0
        layout = ("zigzag", "contiguous")[int(rng.integers(2))]
        yield Modified(case=case, seed=seed + index, sizes=sizes, heads_kv=heads_kv, layout=layout, options=options)


def of_one_call(given: Modified) -> dict[str, Any]:
    """out, lse, gradients and those of captured arrays in their order, of the whole on the CPU path."""
    (q, k, v, dout), arrays = given.tensors()
    modifier = nvrtc_attn.trace(*given.case.make({name: x.numpy() for name, x in arrays.items()}))
    options = {**given.options, "rng": (3, 4), "score_mod": modifier}
    out, lse = nvrtc_attn.attention(*(x.numpy() for x in (q, k, v)), return_lse=True, **options)
    found = {
        "out": out,
        "lse": lse,
        **{f"d{name}": np.zeros(x.shape, np.float32) for name, x in zip("qkv", (q, k, v), strict=True)},
    }
    daux = [
        np.zeros(x.shape, np.float32) if i in modifier.differentiable else None for i, x in enumerate(modifier.captures)
    ]
    nvrtc_attn.attention_backward(
        dout.numpy(), *(x.numpy() for x in (q, k, v)), out, lse, found["dq"], found["dk"], found["dv"],
        daux=daux or None, **options,
    )  # fmt: skip
    return found | {"daux": daux}


def differ(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Which results are not `of_one_call`'s."""
    pairs = [(name, found[name], x) for name, x in expected.items() if name != "daux"]
    pairs += [(f"daux {i}", found["daux"][i], x) for i, x in enumerate(expected["daux"]) if x is not None]
    said = []
    for name, x, y in pairs:
        x = np.asarray(x, np.float64)
        finite = np.isfinite(y)
        error = np.abs(x[finite] - y[finite]).max(initial=0)
        if not (np.array_equal(np.isfinite(x), finite) and error <= 3e-4 * max(np.abs(y[finite]).max(initial=1), 1)):
            said.append(f"{name}: {error}")
    return said


def random_layout(rng: np.random.Generator, seqlen: int, ranks: int) -> list[list[tuple[int, int]]]:
    """Intervals of any lengths, given to any ranks."""
    cuts = sorted({0, seqlen, *(int(x) for x in rng.integers(0, seqlen + 1, 2 * ranks))})
    owners = rng.integers(0, ranks, len(cuts))
    pairs = list(itertools.pairwise(cuts))
    return [[pair for pair, owner in zip(pairs, owners, strict=False) if owner == r] for r in range(ranks)]


def take(x: torch.Tensor, chunks: Any, dim: int) -> torch.Tensor:
    """A rank's tokens."""
    return torch.cat([x.narrow(dim, a, b - a) for a, b in chunks] or [x.narrow(dim, 0, 0)], dim)


def whole_tensors(case: Case, device: Any = "cpu") -> dict[str, torch.Tensor]:
    """The inputs of the whole call."""
    arrays = cases.make_arrays(case)
    dtype = DTYPES[case.dtype]
    found = {}
    for name, x in arrays.items():
        if name in ("cu_seqlens_q", "cu_seqlens_k"):
            continue
        of_sink = torch.float32 if case.sink == "float32" else dtype
        of_bias = torch.float32 if case.bias_dtype == "float32" else dtype
        kind = {"bias": of_bias, "mask": None, "seqused_k": None, "dlse": torch.float32, "sink": of_sink}.get(
            name, dtype
        )
        tensor = torch.from_numpy(np.ascontiguousarray(x))
        found[name] = (tensor if kind is None else tensor.to(kind)).to(device)
    return found


def options(case: Case) -> dict[str, Any]:
    """Keyword arguments of the whole call."""
    given = cases.call_options(case)
    given.pop("deterministic", None)
    return {**given, "rng": (case.seed, case.offset)}


def faults(case: Case, found: dict[str, torch.Tensor]) -> list[str]:
    """Where results of the whole break the error rule (A10) against float64.

    The rule's yardstick is one sample of rounding errors, small by chance now and then where a result has few rows:
    what breaks it is judged again by up to `APPEALS` more, and is wrong if it breaks all of them.
    """
    exact_in = cases.cast_inputs(case, cases.make_arrays(case))
    exact = cases.attention_dense(case, exact_in)
    values: dict[str, Array] = {name: x.detach().cpu().double().numpy() for name, x in found.items() if name in exact}
    said = [f"{name}: shape {x.shape}" for name, x in values.items() if x.shape != exact[name].shape]
    if said:
        return said
    said = _breaches(case, values, exact_in, exact, cases.attention_low_precision(case, exact_in))
    dither = np.random.default_rng(case.seed)
    for _ in range(APPEALS):
        if not said:
            break
        said = _breaches(case, values, exact_in, exact, cases.attention_dense(case, exact_in, case.dtype, dither))
    return said


def _breaches(
    case: Case, values: dict[str, Array], exact_in: dict[str, Array], exact: dict[str, Array], low: dict[str, Array]
) -> list[str]:
    """`cases.breaches` of what parts add up to, judged by the yardstick ``low``."""
    allowed = {}
    if case.dtype == "float32":
        # Gradients take P as exp(s - lse). Parts may round scores of lse in one order and these in another, where a
        # single call and the yardstick round both alike: then the error of a row's lse is in all that the row gives.
        finite = np.isfinite(exact["lse"]) & np.isfinite(low["lse"])
        lse_error = float(np.abs(low["lse"][finite] - exact["lse"][finite]).max(initial=0))
        allowed = {
            name: lse_error * float(np.abs(exact[name]).max(initial=0))
            for name in ("dq", "dk", "dbias")
            if name in values
        }
    in_float32 = ("dbias", "dsink") if case.bias_dtype == "float32" else ("dsink",)
    return cases.breaches(case, values, exact, low, exact_in, allowed, in_float32)
