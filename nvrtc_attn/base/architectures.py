"""The table of compile targets: what each architecture can hold, and which one serves a compute capability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of one compile target, from the table "Technical Specifications per Compute Capability" of the CUDA guide.

    All sizes in bytes. ``smem_per_block_optin`` is the most that one block can use (static plus dynamic).
    """

    name: str
    compute_capability: tuple[int, int]
    smem_per_block_optin: int
    smem_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255


_KIB: Final = 1024
ARCHITECTURES: Final[dict[str, Architecture]] = {
    a.name: a
    for a in (
        Architecture("sm_75", (7, 5), 64 * _KIB, 64 * _KIB, 1024, 16),
        Architecture("sm_80", (8, 0), 163 * _KIB, 164 * _KIB, 2048, 32),
        Architecture("sm_86", (8, 6), 99 * _KIB, 100 * _KIB, 1536, 16),
        Architecture("sm_87", (8, 7), 163 * _KIB, 164 * _KIB, 1536, 16),
        Architecture("sm_89", (8, 9), 99 * _KIB, 100 * _KIB, 1536, 24),
        Architecture("sm_90", (9, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_90a", (9, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_100", (10, 0), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_103", (10, 3), 227 * _KIB, 228 * _KIB, 2048, 32),
        Architecture("sm_110", (11, 0), 227 * _KIB, 228 * _KIB, 1536, 24),
        Architecture("sm_120", (12, 0), 99 * _KIB, 100 * _KIB, 1536, 24),
        Architecture("sm_121", (12, 1), 99 * _KIB, 100 * _KIB, 1536, 24),
    )
}
PORTABLE_ARCHITECTURES: Final = tuple(name for name in ARCHITECTURES if name[-1].isdigit())
"""Targets of the portable kernel family: plain ones, whose cubins also run on later minor versions."""
MINIMUM_COMPUTE_CAPABILITY: Final = (7, 5)
_EMBEDDED: Final = ((8, 7), (11, 0))


def arch_of(compute_capability: tuple[int, int], who: str = "the device") -> str:
    """Compile target of the portable family for a compute capability, for example ``"sm_90"``.

    A minor version that the table does not have (8.8) takes the nearest lower one of the same major version, whose
    cubins it runs; embedded chips (8.7, 11.0) are left out there, because their cubins run on nothing else. An unknown
    major version runs no cubin of ours.

    Raises
    ------
    UnsupportedError
        The compute capability is below 7.5 or of an unknown major version; the message begins with ``who``.
    """
    major, minor = compute_capability
    if compute_capability < MINIMUM_COMPUTE_CAPABILITY:
        raise UnsupportedError(
            f"{who} has compute capability {major}.{minor}: nvrtc_attn needs 7.5 (Turing) or later; pass NumPy arrays "
            "to compute on the CPU"
        )
    known = [ARCHITECTURES[name].compute_capability for name in PORTABLE_ARCHITECTURES]
    usable = [c for c in known if c == compute_capability or (c[0] == major and c[1] < minor and c not in _EMBEDDED)]
    if not usable:
        raise UnsupportedError(
            f"{who} has compute capability {major}.{minor}: this version of nvrtc_attn knows "
            f"{', '.join(f'{a}.{b}' for a, b in known)} and their later minor versions; upgrade nvrtc_attn"
        )
    best = max(usable)
    return f"sm_{best[0]}{best[1]}"
