"""``warmup --modifier``: what it names, and that what it compiles is what a call looks up; the line of a compile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import commands
from nvrtc_attn.front.call import CallOptions, describe_shapes
from nvrtc_attn.front.tensors import Device
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jit.config_text import described
from nvrtc_attn.plans import precompile

TEXT = """
import numpy as np
import nvrtc_attn

slopes = np.ones(16, np.float32)
ids = np.zeros(77, np.int32)

def alibi(score, b, h, q, k):
    return score + slopes[h] * (k - q)

def documents(b, h, q, k):
    return ids[q] == ids[k]

def both():
    return alibi, documents

traced = nvrtc_attn.trace(alibi, documents)

def three(a, b, c):
    return a

def one():
    return alibi

def nothing():
    pass

def fails():
    raise ZeroDivisionError("nothing to divide by")
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_masks.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)


def test_names() -> None:
    of = commands._modifier_named
    assert of("my_masks:alibi").program.mask is None
    assert of("my_masks:documents").program.score is None
    assert of("my_masks:both").program == of("my_masks:traced").program
    Path("breaks.py").write_text("1 / 0")
    wrong = ("three", "none", "one", "nothing", "fails")
    for name in (*(f"my_masks:{x}" for x in wrong), "no_such_module:x", "breaks:x", "my_masks", ":", "builtins:max"):
        with pytest.raises(ValueError, match="--modifier"):
            of(name)


def test_the_kernels_are_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other lengths, contents and captured numbers."""
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "portable")
    modifier = commands._modifier_named("my_masks:both")
    request = precompile.Request(
        arch="sm_90", head_dim=64, dtype="bfloat16", seqlens=((4096, 4096),), modifier=modifier
    )
    ids, slopes = np.arange(2048, dtype=np.int32) // 100, np.zeros(16, np.float32)
    call = nvrtc_attn.trace(lambda s, b, h, q, k: s + slopes[h] * (k - q), lambda b, h, q, k: ids[q] == ids[k])
    shape = ((2, 2048, 16, 64), "bfloat16")
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448, "backend": "portable"}
    of_pass = {}
    for backward, choose in ((False, choose_forward), (True, choose_backward)):
        (warm,) = precompile.problems(request, backward=backward)
        trained = frozenset(call.differentiable if backward else ())  # gradients are no matter of a forward call
        other = describe_shapes(
            dict.fromkeys("qkv", shape), CallOptions(return_lse=True), Device("cuda", 0), modifier=call,
            trained=trained,
        ).with_dense()  # fmt: skip
        assert warm.modifier == other.modifier
        ours, theirs = (choose(x, **target).launches for x in (warm, other))  # type: ignore[operator]
        assert [x.config for x in ours] == [x.config for x in theirs]
        of_pass[backward] = {x.config for x in ours}
    assert of_pass[False] | of_pass[True] <= set(precompile.configs([request]))
    main = choose_forward(precompile.problems(request)[0], **target).main.config
    assert main.features.tile_words
    words = described(main)
    assert words.startswith("forward_portable for sm_90 bfloat16 head dim 64 tile 128x")
    assert "modifier (" in words
    assert "tile_words" in words
    assert len(words) < 200


def test_a_compile_is_one_line_that_says_why(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from nvrtc_attn.jit.compile import compile_kernel
    from nvrtc_attn.jit.config import BackwardConfig, Features

    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path / "kernels"))
    config = BackwardConfig(
        kernel="tile_plan", arch="sm_90", dtype="float16", head_dim=8, head_dim_v=8, block_m=16, block_n=16,
        num_warps=32, features=Features(mask=True, tile_words=True), dq="none", min_blocks_per_sm=1, num_stages=7,
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "nvrtc_attn"):
        compile_kernel(config)
        compile_kernel(config)
    lines = [x.getMessage() for x in caplog.records if x.getMessage().startswith("compiled in")]
    assert len(lines) == 1
    assert "no cache had: tile_plan for sm_90 float16 head dim 8 tile 16x16 mask tile_words" in lines[0]
