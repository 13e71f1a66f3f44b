"""Attention over a sequence that is sharded over ranks, on `torch.distributed`: `ContextParallel`.

The answer is that of one GPU: every mask, window, bias and dropout decision is the whole's, however many ranks.
`context` has the class, `call` what a call of it is made of, `choice` which strategy it takes, `checks` what it is
refused for, `autograd` its derivatives, `operators` and `operator_call` what programs see of it; `strategies` who
computes what and sends what to whom, `local` what a rank computes by itself, `exchange` how tensors travel, `documents`
the lengths of packed sequences.
"""

from __future__ import annotations

from .context import ContextParallel
from .local import merge_partials

__all__ = ["ContextParallel", "merge_partials"]
