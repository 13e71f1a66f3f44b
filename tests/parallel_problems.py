"""Random attention problems that ranks share, and what each rank must get: used by threads, gloo processes and GPUs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import torch
from cases import Array, Case

from nvrtc_attn.front.chunks import chunks_of, length

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    """A dense problem and how its sequence is sharded."""

    case: Case
    layout: Any


def problems(
    seed: int, count: int, ranks: int, *, heads_divide: bool = False, max_flops: float = 2e5
) -> Iterator[Shared]:
    """Problems over all features that ContextParallel takes."""
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
        if (case.bias or case.mask) and min(map(length, chunks_of(layout, case.seqlen_q, ranks))) <= 1:
            continue
        case = dataclasses.replace(case, layout="contiguous", deterministic=False)
        yield Shared(case=case, layout=layout)
        found += 1
        if found == count:
            return


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
        if name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"):
            continue
        of_sink = torch.float32 if case.sink == "float32" else dtype
        of_bias = torch.float32 if case.bias_dtype == "float32" else dtype
        kind = {"bias": of_bias, "mask": None, "dlse": torch.float32, "sink": of_sink}.get(name, dtype)
        tensor = torch.from_numpy(np.ascontiguousarray(x))
        found[name] = (tensor if kind is None else tensor.to(kind)).to(device)
    return found


def options(case: Case) -> dict[str, Any]:
    """Keyword arguments of the whole call."""
    given = cases.call_options(case)
    given.pop("deterministic", None)
    return {**given, "rng": (case.seed, case.offset)}


def faults(case: Case, found: dict[str, torch.Tensor]) -> list[str]:
    """Where results of the whole break the error rule (A10) against float64."""
    exact_in = cases.cast_inputs(case, cases.make_arrays(case))
    exact = cases.attention_dense(case, exact_in)
    low = cases.attention_low_precision(case, exact_in)
    said = []
    for name, tensor in found.items():
        if name not in exact:
            continue
        x: Array = tensor.detach().cpu().double().numpy()
        finite = np.isfinite(exact[name])
        if x.shape != exact[name].shape or not np.array_equal(np.isfinite(x), finite):
            said.append(f"{name}: shape or infinities differ")
            continue
        error = np.abs(x[finite] - exact[name][finite]).max(initial=0)
        dtype = (
            "float32"
            if name == "lse" or (name == "dbias" and case.bias_dtype == "float32") or name == "dsink"
            else case.dtype
        )
        bound = cases.error_bound(exact[name], low[name], dtype)
        if name == "dbias":
            bound += cases.summed_delta_error(case, exact_in, exact)
        if name == "dsink":
            bound += cases.summed_rows_error(case, exact_in, exact)
        if not error <= bound:
            said.append(f"{name}: error {error:.3g}, allowed {bound:.3g}")
    return said
