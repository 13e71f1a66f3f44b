"""Attention over a sequence that is sharded over an axis of a mesh, inside `jax.shard_map`.

One program runs on all devices, which differ in where their rows lie. It branches on the index of the device, with the
place of each known while tracing, so that every branch is an ordinary part (`nvrtc_attn.Part`) with its own bounds; or
places are numbers on the device, of calls that are the same everywhere: how many keys the rows of a causal call see,
or where they begin in the whole.

`context` has the function and what it refuses, `strategies` what devices send each other and the derivatives of all of
it, `local` what a device computes by itself.
"""

from __future__ import annotations

from .context import context_parallel_attention, zigzag

__all__ = ["context_parallel_attention", "zigzag"]
