"""A covering set of kernels for compute-sanitizer: every feature and every kernel once or more, small.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitizer.py
    ... python tests/gpu/sanitizer.py decode wide-0-d256-256    # these cases of tests/cases.py alone
    ... python tests/gpu/sanitizer.py modifier-both             # a case of tests/modifiers.py
    ... python tests/gpu/sanitizer.py part-dropout              # one of PARTS below

Without torch's caching allocator every tensor is an allocation of its own, so that an access past its end is seen.
With ``--tool initcheck`` an element that a kernel was meant to write and did not shows as the poison of the harness.
Exit code 0 and a last line ``N cases ok`` when results are right too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import cases  # noqa: E402
import harness  # noqa: E402
import test_modifiers  # noqa: E402
import test_parts  # noqa: E402

from nvrtc_attn.heuristics import hopper_forward_dropout, tile_words  # noqa: E402

NAMES = (
    "basic-float16", "basic-bfloat16", "basic-float32", "head_dim-40", "head_dim-59", "head_dim-128",
    "head_dim-192-128", "head_dim-256", "head_dim-512", "decode", "gqa-8-2-True", "window-113-203-True-17-5",
    "mask-empty-rows", "bias-bhqk", "bias-1h1k", "bias-11q1", "bias-float32-bhqk", "dropout-0.5",
    "softcap-causal-float32", "deterministic", "varlen-seqused-True", "varlen-everything", "varlen-float32",
    "layout-random-float16", "layout-unaligned-float16", "everything", "empty-keys", "tiles-0-d64", "tiles-4-d128",
    "bias-tiles-0-bhqk", "bias-tiles-13-1hqk", "bias-tiles-19-bh1k", "wide-0-d256-256", "wide-2-d192-128",
    "wide-10-d256-256", "between-10-d120", "few-queries-0", "few-queries-packed", "few-queries-unaligned",
    "dropout-gqa", "varlen-many",
    "split-queries", "bias-11q1", "mask-tiles", "modifier-both", "modifier-t5",
    "modifier-documents", "part-dropout", "part-bias-dlse", "part-masked", "part-deterministic",
)  # fmt: skip


PARTS: dict[str, dict[str, Any]] = {
    "dropout": {"causal": True, "window_size": (257, None), "dropout_p": 0.2},
    "bias-dlse": {"bias": "bhqk", "causal": True, "dropout_p": 0.1, "dlse": True, "head_dim": 64, "head_dim_v": 64},
    "masked": {"mask": "b11k", "causal": True, "softcap": 20.0},
    "deterministic": {"causal": True, "deterministic": True, "dropout_p": 0.1},
}
"""What differs from `test_parts`' problem of 1000 rows in three parts, 1000 keys in two, 8 heads in two."""


def check_modifier(name: str) -> None:
    """In both families, deterministic, where the tiles of its mask are planned whatever the size of the problem."""
    for family in ("portable", "hopper") if harness.torch.cuda.get_device_capability() == (9, 0) else ("portable",):
        with harness.backend(family):
            test_modifiers.check(test_modifiers.named(name), test_modifiers.SIZES[0], "float16", 64, deterministic=True)


def check_part(name: str) -> None:
    """Forward and backward of slices of the whole's tensors, in every family, added up and compared with the whole."""
    for family in test_parts.FAMILIES:
        test_parts.test_parts_together_are_the_whole(PARTS[name], family)


def main() -> int:
    named = {case.name: case for case in cases.named_cases()}
    names = sys.argv[1:] or NAMES
    bad = 0
    tile_words.MIN_FLOPS = tile_words.MIN_KEY_TILES = 0  # type: ignore[misc]
    hopper_forward_dropout.MIN_SCORES.update(dict.fromkeys(hopper_forward_dropout.MIN_SCORES, 0.0))
    for name in names:
        try:
            if name.startswith("modifier-"):
                check_modifier(name.removeprefix("modifier-"))
            elif name.startswith("part-"):
                check_part(name.removeprefix("part-"))
            else:
                harness.check(named[name])
        except AssertionError as error:
            print(f"{name}: {error}", flush=True)
            bad += 1
        harness.torch.cuda.synchronize()
    print(f"{len(names) - bad} cases ok, {bad} wrong", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
