"""What the choices of the portable family's passes have in common: how many warps a multiprocessor holds."""

from __future__ import annotations

from typing import Final

from ..base.architectures import ARCHITECTURES

MIN_WARPS: Final = 8
"""Warps a multiprocessor, two for each of its schedulers: one multiplies while the other waits for its operands."""
MEASURED_SMEM: Final = ARCHITECTURES["sm_90"].smem_per_block_optin
"""Shared memory per block of the GPU that the tables were measured on. With less, tiles with `MIN_WARPS` come first."""
_REGISTERS_PER_SM: Final = 65536
SMEM_RESERVED: Final = 1024
"""Shared memory that the driver keeps per thread block, and that a multiprocessor has more than one block may use."""


def warps_per_sm(num_warps: int, smem_bytes: int, smem_limit: int, blocks: int = 1) -> int:
    """Warps of thread blocks of ``num_warps`` with ``smem_bytes`` on one multiprocessor.

    A thread has 255 registers, or as many as the compiler may use where ``blocks`` of them are asked for.
    """
    by_smem = (smem_limit + SMEM_RESERVED) // (smem_bytes + SMEM_RESERVED)
    registers = min(256, _REGISTERS_PER_SM // (32 * num_warps * blocks) // 8 * 8)
    return num_warps * min(by_smem, _REGISTERS_PER_SM // (registers * 32 * num_warps))
