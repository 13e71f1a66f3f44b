"""How ranks share an attention: keys gathered (`AllGather`), passed around (`Ring`), heads for tokens (`Ulysses`).

Each is made for the tokens of the ranks of one group and has `forward` and `backward` of a rank's tensors. q, out, dq
and their like hold the tokens of ``chunks_q``, k, v, dk and dv those of ``chunks_k``; bias and mask have the rank's
rows (or one) and all keys (or one).

What travels is stored with its tokens first: the tokens of a rank are then contiguous, are received where they are
wanted and sent from where they are. Exchanges begin two groups of heads ahead of the kernels and no further: so much of
what was fetched is in memory at a time.
"""

from __future__ import annotations

from .all_gather import AllGather
from .ring import Ring
from .strategy import Gradients, Inputs, Saved, Strategy, gradients_of
from .ulysses import Ulysses

__all__ = [
    "AllGather", "Gradients", "Inputs", "Ring", "Saved", "Strategy", "Ulysses", "gradients_of", "has_all_tokens",
    "passes_keys",
]  # fmt: skip


def has_all_tokens(strategy: Strategy) -> bool:
    """Whether each rank computes its heads of all tokens."""
    inside = strategy.inside if isinstance(strategy, Ulysses) else strategy
    return isinstance(inside, AllGather) and inside.size == 1


def passes_keys(strategy: Strategy) -> bool:
    """Whether a rank computes with some of the keys that its queries see at a time."""
    inside = strategy.inside if isinstance(strategy, Ulysses) else strategy
    return isinstance(inside, Ring) and inside.size > 1
