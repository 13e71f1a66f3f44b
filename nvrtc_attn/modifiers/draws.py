"""Random numbers that a function draws while it is traced: one for all scores and all calls, so they are refused."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

from ..base.errors import TraceError

_Result = TypeVar("_Result")

NO_RANDOM: Final = "a modifier has no random numbers; dropout is an argument of the attention"
_ATTEMPTS: Final = 3
_OF_TORCH: Final = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "normal", "normal_", "multinomial", "poisson", "uniform_", "random_", "exponential_", "cauchy_", "geometric_",
    "log_normal_", "gumbel_softmax",
)  # fmt: skip
"""Functions and methods of torch that draw numbers, whatever their arguments are."""
_OF_TRAINING: Final = (
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip
"""Those that draw unless they are called with ``training=False``."""


def draws(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch draws random numbers."""
    return name in _OF_TORCH or (name in _OF_TRAINING and kwargs.get("training", True) is True)


def without_draws(make: Callable[[], _Result]) -> _Result:
    """The result of ``make``, which traces functions and draws no number of a global generator.

    Another thread may draw meanwhile: only what moves a generator at each of some attempts is refused.

    Raises
    ------
    TraceError
        ``random``, ``numpy.random`` or torch's generator of the CPU moved.
    """
    moved: list[str] = []
    for _ in range(_ATTEMPTS):
        before = dict(_states())
        result = make()
        moved = [name for name, state in _states() if before.get(name) != state]
        if not moved:
            return result
    raise TraceError(
        f"score_mod, mask_mod: random numbers of {' and '.join(moved)} are drawn inside of the function, which is "
        f"traced once for all scores: {NO_RANDOM}. Draw them before, and capture the array."
    )


def _states() -> Iterator[tuple[str, Any]]:
    """What is drawn next, by the generators that a program has without making one; of modules that are there."""
    random, of_numpy, torch = map(sys.modules.get, ("random", "numpy.random", "torch"))
    if random is not None:
        yield "'random'", random.getstate()
    if of_numpy is not None:
        yield "'numpy.random'", pickle.dumps(of_numpy.get_state(legacy=False))
    if torch is not None and not torch._C._len_torch_dispatch_stack():  # below a mode, states are no memory
        yield "'torch'", torch.default_generator.get_state().numpy().tobytes()
