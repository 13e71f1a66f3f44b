"""How XLA splits a pass inside of a `jax.shard_map` that leaves axes of the mesh to it (``axis_names``).

Inside of it these axes have no names: a device cannot ask where it is, nor add up what devices share. XLA says which
device has which tile of q, and from these tiles follow those of every operand and result. Where dropout or functions
of the scores need the place in the whole, a device reads it from its part of an array of numbers (`partition`). The
gradient of what devices share (a bias with batch 1, a sink, the key head of all query heads) is a sum over them: such a
dim is not split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Tiles(NamedTuple):
    """Which devices have which batch entries and heads."""

    given: Any
    """XLA's sharding of q, whose axes have no names."""
    devices: np.ndarray[Any, Any]
    """``[batch, heads, others]``: tiles of batch and heads, and the devices that have the same."""
    partly_manual: bool = False
    """Whether ``given`` is of manual axes, too: it then says nothing of tiles, and all devices have the same."""

    @classmethod
    def of(cls, given: Any) -> Tiles:
        """Those of q: ``[batch, seqlen, heads, head_dim]``. What has parts of its other dims has the same tile."""
        tiles = given._to_xla_hlo_sharding(4)
        if given.is_fully_replicated or tiles.subgroup_types():
            return cls(given, np.zeros((1, 1, 1), np.int64), bool(tiles.subgroup_types()))
        shape = (*tiles.tile_assignment_dimensions(), 1)[:5]  # its fifth dim, if any, is that of devices with the same
        devices = np.asarray(tiles.tile_assignment_devices(), np.int64).reshape(shape).transpose(0, 2, 1, 3, 4)
        return cls(given, devices.reshape(*devices.shape[:2], -1))

    def kept(self, batch: bool, heads: bool) -> Tiles:
        """With only those dims split."""
        devices = self.devices
        if not heads:
            devices = devices.reshape(devices.shape[0], 1, -1)
        if not batch:
            devices = devices.transpose(1, 0, 2).reshape(1, devices.shape[1], -1)
        return self._replace(devices=devices)

    def sharding(self, rank: int, batch: int | None, heads: int | None) -> Any:
        """Of an array of ``rank`` dims, of which one may be that of batch entries, one that of heads."""
        order: Sequence[int] = (0, 1) if batch is None or heads is None or batch < heads else (1, 0)
        places = (batch, heads)
        split = [x for x in order if places[x] is not None and self.devices.shape[x] > 1]
        of_xla = self.given._to_xla_hlo_sharding(rank)
        proto = of_xla.to_proto()
        proto.iota_reshape_dims, proto.iota_transpose_perm, proto.last_tile_dims = [], [], []
        proto.tile_assignment_dimensions, proto.tile_assignment_devices = [], []
        proto.replicate_on_last_tile_dim = False
        if not split:
            proto.type = proto.Type.REPLICATED
        else:
            shape = [1] * rank
            for x in split:
                place = places[x]
                assert place is not None
                shape[place] = self.devices.shape[x]
            devices = self.devices.transpose(*split, *(x for x in range(3) if x not in split)).reshape(-1)
            others = devices.size // int(np.prod(shape))
            proto.tile_assignment_dimensions = [*shape, others] if others > 1 else shape
            proto.tile_assignment_devices = devices.tolist()
            proto.replicate_on_last_tile_dim = others > 1
        return type(self.given)(self.given._device_assignment, type(of_xla).from_proto(proto))
