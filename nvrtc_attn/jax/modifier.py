"""`score_mod` and `mask_mod` of JAX: functions of ``jax.numpy``, or with nothing but operators and indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..base.errors import TraceError
from ..modifiers.draws import without_draws
from ..modifiers.graph import POSITION_NODES, SCORE, Node
from ..modifiers.jaxpr import expression
from ..modifiers.modifier import Modifier
from ..modifiers.recording import Recording, followed
from ..modifiers.trace import literals, modifier_of, no_functions, trace


def traced(score_mod: Any, mask_mod: Any, aux: Mapping[str, Any] | None) -> Modifier | None:
    """The modifier of a call; captured arrays may be tracers of a transformation that is going on.

    Functions with operators and indices alone are traced as everywhere, others by JAX.
    """
    if score_mod is None and mask_mod is None:
        if aux is not None:
            raise no_functions()
        return None
    try:
        return trace(score_mod, mask_mod, aux=aux)
    except (ValueError, TypeError) as error:  # what jax.numpy looks for in a number, there is nothing of
        if not all(x is None or callable(x) for x in (score_mod, mask_mod)):
            raise
        first = error
    try:
        return without_draws(lambda: _traced_by_jax(score_mod, mask_mod, aux))
    except jax.errors.TracerArrayConversionError:  # functions of NumPy, which the first way knows
        raise first from None


def _traced_by_jax(score_mod: Any, mask_mod: Any, aux: Mapping[str, Any] | None) -> Modifier:
    recording = Recording(frozenset(literals(score_mod)) | frozenset(literals(mask_mod)))
    score = mask = None
    if score_mod is not None:
        score = _expression(recording, "score_mod", score_mod, (SCORE, *POSITION_NODES), aux)
    if mask_mod is not None:
        mask = _expression(recording, "mask_mod", mask_mod, POSITION_NODES, aux)
    return modifier_of(score, mask, recording)


def _expression(
    recording: Recording,
    name: str,
    function: Callable[..., Any],
    nodes: tuple[Node, ...],
    aux: Mapping[str, Any] | None,
) -> Node:
    kinds = [jnp.float32 if x == SCORE else jnp.int32 for x in nodes]
    more = () if aux is None else (aux,)
    try:
        with followed(recording):
            closed = jax.make_jaxpr(lambda *scalars: function(*scalars, *more))(
                *(jax.ShapeDtypeStruct((), kind) for kind in kinds)
            )
    except jax.errors.ConcretizationTypeError as error:
        raise TraceError(
            f"{name}: a branch on a value that is known only when the kernel runs, or such a value where a Python "
            f"number is needed. Use jnp.where(condition, a, b), and &, |, ~ between conditions."
        ) from error
    if len(closed.jaxpr.outvars) != 1:
        raise TraceError(f"{name}: returned {len(closed.jaxpr.outvars)} values. It returns one.")
    try:
        return expression(closed, recording, nodes)
    except TraceError as error:
        raise TraceError(f"{name}: {error.args[0]}") from None
