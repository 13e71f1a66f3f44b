"""A model on paper of ContextParallel on many GPUs: what of a step no kernel hides, from a few constants.

    python benchmarks/parallel_model.py                            # with the constants below
    python benchmarks/parallel_model.py --link 300 --rate 600      # with measured ones
    python benchmarks/parallel_model.py --gpus 8 64 --heads 32/32 --tokens 1048576

Causal attention, forward + backward, bfloat16, no dropout. A step of one GPU is ``7 S^2 H D / rate``; N GPUs share it.
Of each group of heads that is exchanged, all but the first (before the kernels) and the last (behind them) lie beside
kernels, as long as those take. Every byte that travels is also copied once in memory on either side.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    rate: float = 620e12
    """Operations a second, forward and backward together: one H200, 16k to 64k tokens, 2026-11."""
    link: float = 190e9
    """Bytes a second that a GPU receives inside a node: two H200, ulysses at 16k tokens, NVLS off, 2026-11."""
    node_link: float = 45e9
    """Between nodes, a GPU: not measured, 400 Gb/s."""
    memory: float = 3.5e12
    """Bytes a second of a copy, read and written."""
    per_node: int = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    compute: float
    inside: float
    """Seconds on the links of a node."""
    between: float
    copies: float
    groups: int

    @property
    def efficiency(self) -> float:
        sent = self.inside + self.between
        hidden = min(sent * (1 - 1 / self.groups), self.compute)
        return self.compute / (self.compute + sent - hidden + self.copies)


def step(c: Constants, gpus: int, tokens: int, heads: tuple[int, int], dim: int, strategy: str, groups: int) -> Step:
    """A rank's step with ``ulysses``, ``all_gather``, or ``ulysses+all_gather`` (the first inside a node)."""
    query, key = heads
    nodes = max(gpus // c.per_node, 1)
    within = min(gpus, c.per_node)
    mine = tokens / gpus
    compute = 7 * tokens**2 * query * dim / (gpus * c.rate)
    # In 16 bits: q, k, v; out; dout; dq, dk, dv. Each rank keeps its own part.
    swapped = 2 * mine * dim * (4 * query + 4 * key)
    inside = between = 0.0
    if strategy == "ulysses":
        moved = swapped * (gpus - 1) / gpus
        inside = moved * (within - 1) / max(gpus - 1, 1)
        between = moved - inside
        total = moved
    else:
        u = within if strategy == "ulysses+all_gather" else 1
        # k and v in both passes, dk and dv in float32 once: of all keys, of the heads that are left.
        gathered = 8 * tokens * dim * key / u + 8 * tokens * dim * key / u
        if u > 1:
            inside = swapped * (u - 1) / u
            between = gathered * (nodes - 1) / nodes
        else:
            inside = gathered * (within - 1) / gpus
            between = gathered * (gpus - within) / gpus
        total = inside + between
    return Step(
        compute=compute, inside=inside / c.link, between=between / c.node_link, copies=2 * total / c.memory,
        groups=groups,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rate", "link", "node_link", "memory"):
        scale = 1e12 if name in ("rate", "memory") else 1e9
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=getattr(Constants, name) / scale,
            help="T/s" if scale == 1e12 else "GB/s",
        )  # fmt: skip
    parser.add_argument("--per-node", type=int, default=Constants.per_node)
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 8, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 262144, 1048576])
    parser.add_argument("--heads", default="32/8", help="query heads / key heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--groups", type=int, default=4)
    options = parser.parse_args()
    constants = Constants(
        rate=1e12 * options.rate, link=1e9 * options.link, node_link=1e9 * options.node_link,
        memory=1e12 * options.memory, per_node=options.per_node,
    )  # fmt: skip
    query, key = map(int, options.heads.split("/"))
    print(f"{'GPUs':>6s} {'tokens':>9s} {'ulysses':>9s} {'all_gather':>11s} {'ulysses+all_gather':>19s}")
    for gpus in options.gpus:
        for tokens in options.tokens:
            row = []
            for strategy in ("ulysses", "all_gather", "ulysses+all_gather"):
                shared = gpus if strategy == "ulysses" else min(gpus, options.per_node)
                possible = strategy == "all_gather" or (key % shared == 0)
                possible = possible and not (strategy == "ulysses+all_gather" and gpus <= options.per_node)
                found = step(constants, gpus, tokens, (query, key), options.head_dim, strategy, options.groups)
                row.append(f"{found.efficiency:.2f}" if possible else "-")
            print(f"{gpus:6d} {tokens:9d} {row[0]:>9s} {row[1]:>11s} {row[2]:>19s}")


if __name__ == "__main__":
    main()
