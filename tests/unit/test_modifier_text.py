"""The C++ text of modifiers: what it depends on, and the bytes of a launch."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import struct
from typing import Any

import modifiers
import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn.base.errors import UnsupportedError
from nvrtc_attn.front.tensors import view
from nvrtc_attn.heuristics import choose_backward, choose_forward
from nvrtc_attn.jit.codegen import entry_source, params_class
from nvrtc_attn.jit.config import Features, ForwardConfig, HopperForwardConfig
from nvrtc_attn.jit.config_text import config_from_json, config_to_json
from nvrtc_attn.modifiers import cuda, cuda_expressions, cuda_gradients, cuda_values, graph
from nvrtc_attn.modifiers.trace import trace

CONFIG = ForwardConfig(
    kernel="forward_portable", arch="sm_80", dtype="float16", head_dim=64, head_dim_v=64, block_m=64, block_n=64,
    num_warps=4,
)  # fmt: skip


LONG = 1100
"""Operations in a chain: more than Python's stack has frames."""


def make(slope: float, table: Any) -> Any:
    return trace(lambda s, b, h, q, k: s * slope + table[h, q], lambda b, h, q, k: k <= q + 5)


def test_the_text_is_the_same_for_other_numbers_and_arrays() -> None:
    texts = {
        cuda.cuda_source(make(slope, np.zeros(shape, np.float32)).program)
        for slope, shape in ((0.5, (2, 3)), (0.75, (4, 9)))
    }
    (text,) = texts
    assert "0.5" not in text
    assert cuda.cuda_source(make(0.5, np.zeros((2, 3), np.float16)).program) != text
    assert cuda.cuda_source(make(0.5, np.zeros((2, 3), np.float32)).program, (0,)) != text


def test_no_line_without_a_modifier() -> None:
    """Keys of kernels that have none stay what they were."""
    assert "odifi" not in entry_source(CONFIG)
    text = cuda.cuda_source(make(0.5, np.zeros((2, 3), np.float32)).program)
    changed = dataclasses.replace(CONFIG, features=Features(modifier=text))
    source = entry_source(changed)
    assert "using Modifier = nvrtc_attn::Modifier<Element>;" in source
    assert "nvrtc_attn::Modified<nvrtc_attn::ForwardParams> const params" in source
    assert config_from_json(config_to_json(changed)) == changed


def test_the_bytes_of_a_launch() -> None:
    """Pointers, sizes and strides, numbers; whole 8 bytes, as the struct."""
    table = np.zeros((6, 8), np.float32)[::2, ::4]
    modifier = make(0.5, table)
    given = view(table, "table")
    values = cuda_values.modifier_values(modifier.program, (), [given], [None], modifier.numbers)
    size = cuda.block_bytes(cuda.cuda_source(modifier.program))
    assert len(values.block) == size == 32
    assert struct.unpack("<Qiiiif", values.block[:28]) == (given.ptr, 3, 2, 16, 4, 0.5)
    assert values.zeroed == ()
    gradient = view(np.zeros((3, 2), np.float32), "gradient")
    values = cuda_values.modifier_values(modifier.program, (0,), [given], [gradient], modifier.numbers)
    assert values.zeroed == ((gradient.ptr, 24),)
    assert struct.unpack("<QQiiiiiif", values.block[:44]) == (given.ptr, gradient.ptr, 3, 2, 16, 4, 2, 1, 0.5)
    with pytest.raises(ValueError, match="leave gaps"):
        cuda_values.modifier_values(modifier.program, (0,), [given], [given], modifier.numbers)
    far = dataclasses.replace(given, strides=(2**31, 1))
    with pytest.raises(ValueError, match="int32"):
        cuda_values.modifier_values(modifier.program, (), [far], [None], modifier.numbers)


def test_the_bytes_of_a_launch_with_ordered_gradients() -> None:
    """Words of 264 bytes an element behind the plan's workspace, in the order of the gradient's own memory."""
    table = np.zeros((3, 2), np.float32)
    modifier = make(0.5, table)
    gradient = view(np.zeros((2, 3), np.float32).T, "gradient")
    assert cuda_values.ordered_bytes((0,), [table]) == 6 * 264
    values = cuda_values.modifier_values(modifier.program, (0,), [view(table, "x")], [gradient], modifier.numbers, 4096)
    assert values.zeroed == ((4096, 6 * 264),)
    assert len(values.block) == cuda.block_bytes(cuda.cuda_source(modifier.program, (0,), True))
    assert struct.unpack("<QQQiiiiiiif", values.block[:56])[1:] == (4096, gradient.ptr, 3, 2, 2, 1, 33, 99, 6, 0.5)
    with pytest.raises(UnsupportedError, match="arrays of 5000000 elements"):
        cuda_values.ordered_bytes((1,), [table, np.zeros((5, 1000000), np.float16)])


def test_the_struct_has_what_the_text_says() -> None:
    text = cuda.cuda_source(trace(None, lambda b, h, q, k: (q // 4) % 2 == 0).program)
    assert cuda.block_bytes(text) == 8
    config = dataclasses.replace(CONFIG, features=Features(modifier=text))
    plain, whole = params_class(CONFIG), params_class(config)
    assert whole.modifier.offset == -(-__import__("ctypes").sizeof(plain) // 8) * 8  # type: ignore[attr-defined]


def test_every_operation_has_an_expression() -> None:
    others = {"abs", "not", "bool"}
    assert set(cuda_expressions.EXPRESSIONS) | others == set(graph.OPERATIONS)


def test_chains_longer_than_pythons_stack() -> None:
    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(LONG):
            s = s + 0.5
        return s

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(LONG):
            q = q + k
        return q < 5

    for functions in ((score, None), (None, mask)):
        program = trace(*functions).program
        assert cuda.cuda_source(program).count(" const v") >= LONG
    q = np.ones((1, 4, 1, 8), np.float32)
    v = np.arange(32, dtype=np.float32).reshape(1, 4, 1, 8)
    out = nvrtc_attn.attention(q, q, v, mask_mod=mask)
    assert np.array_equal(out, np.broadcast_to(v[:, :1], v.shape)), "the first key alone"


def test_integers_beyond_int32_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit int32"):
        cuda.cuda_source(trace(lambda s, b, h, q, k: s + q * 3000000000).program)


def problem(**changes: Any) -> Any:
    from nvrtc_attn.front.problem import AttentionProblem, dense_layout

    layout = dense_layout((1, 512, 4, 64), "float16")
    small = dense_layout((1, 512, 2, 64), "float16")
    return AttentionProblem(
        dtype="float16", batch=1, seqlen_q=512, seqlen_k=512, num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64,
        q=layout, k=small, v=small, softmax_scale=0.125, **changes,
    )  # fmt: skip


def text_of(name: str) -> str:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    return cuda.cuda_source(trace(*case.make(case.arrays((2, 4, 8, 8), np.random.default_rng(0)))).program)


def test_a_distance_is_known_but_for_where_the_tile_begins() -> None:
    """A constant for each score of a tile, and no conversion."""
    assert "fmaf(head0, float(1 * (k - k0) + -1 * (q - q0)), head0 * float(1 * k0 + -1 * q0 + 0))" in text_of("alibi")
    assert "fabsf(float(1 * q0 + -1 * k0 + 0) + float(1 * (q - q0) + -1 * (k - k0)))" in text_of("distance")
    twice = trace(lambda s, b, h, q, k: s + np.exp((3 * (q + 1) - b) * 0.5) + np.tanh(q * k)).program
    text = cuda.cuda_source(twice)
    assert "float(3 * q0 + -1 * b + 3)" in text
    assert "float(3 * (q - q0))" in text
    assert "float(v" in text, "a product of positions is no sum"


def test_quotients_of_a_score_are_quick_where_no_step_is_made_of_one() -> None:
    scale = np.ones(4, np.float32)

    def text_of_score(score: Any) -> str:
        return cuda.cuda_source(trace(score).program)

    assert "quotient<Element>(score, " in text_of_score(lambda s, b, h, q, k: s / (1.0 + abs(s)) + q)
    by_head = text_of_score(lambda s, b, h, q, k: np.tanh(s / scale[h]) + q)
    assert "score * head0" in by_head, "the reciprocal once a tile"
    assert "score / " not in by_head
    stepped = text_of_score(lambda s, b, h, q, k: np.floor(s / scale[h]) + q)
    assert "quotient" not in stepped
    assert "score / " in stepped, "rounded to the nearest, as everywhere else"
    assert "quotient" not in text_of_score(lambda s, b, h, q, k: s + (q - k) / (k + 1.0)), "of positions alone"


def test_what_a_head_reads_of_an_array_is_found_once() -> None:
    text = text_of("relative bias")
    assert "slice0_at = block.x0_at + (long long)h * block.x0_stride0;" in text
    assert "slice0_size = within(h, block.x0_size0) ? block.x0_size1 : 0;" in text
    assert "slice" not in text_of("documents")
    # What is read without a branch exists in any case.
    assert "captured(block.x0_at + (long long)nearest(q, block.x0_size0) * block.x0_stride0)" in text_of("documents")


def test_params_end_where_the_compiler_ends_them() -> None:
    """Of Hopper kernels a whole number of 64 bytes, behind whatever else lies behind; so does the static_assert."""
    text = text_of("alibi")
    for features in (Features(), Features(optional="sink"), Features(mask=True, tile_words=True)):
        config = HopperForwardConfig(
            kernel="forward_hopper", arch="sm_90a", dtype="float16", head_dim=64, head_dim_v=64, block_m=128,
            block_n=128, num_warps=12, features=dataclasses.replace(features, modifier=text),
        )  # fmt: skip
        whole: Any = params_class(config)
        assert ctypes.sizeof(whole) % 64 == whole.modifier.offset % 64 == 0
        assert ctypes.sizeof(whole) > whole.modifier.offset
        assert f"using ModifiedParams = nvrtc_attn::Modified<nvrtc_attn::{whole.__name__}>;" in entry_source(config)


def test_only_kernels_of_scores_have_the_text() -> None:
    """Of either family, with one head a tile."""
    case = next(x for x in modifiers.named_cases() if x.name == "alibi")
    modifier = trace(*case.make(case.arrays((1, 4, 512, 512), np.random.default_rng(0))))
    asked = problem(modifier=modifier.program, trained=(0,))
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    forward = choose_forward(dataclasses.replace(asked, trained=()), **target)
    backward = choose_backward(asked, **target)
    named = {x.config.kernel: x.config.features.modifier for x in (*forward.launches, *backward.launches)}
    with_text = {name for name, text in named.items() if text}
    assert with_text == {"forward_hopper", "backward_hopper"}
    assert "kTrains = true" in named["backward_hopper"]
    assert "kTrains = false" in named["forward_hopper"]
    older = target | {"arch": "sm_80"}
    portable = (choose_forward(dataclasses.replace(asked, trained=()), **older), choose_backward(asked, **older))
    found = [x.config.kernel for spec in portable for x in spec.launches if x.config.features.modifier]
    assert found == ["forward_portable", "backward_portable"]
    for where in (target, older):
        summed = choose_backward(dataclasses.replace(asked, deterministic=True), **where).launches
        texts = {x.config.kernel: x.config.features.modifier for x in summed if x.config.features.modifier}
        assert [x.config.kernel for x in summed][-1] == "captured_sum"
        assert all("using Sum = ExactSum;" in text for text in texts.values())
    assert "using Sum = AtomicSum;" in named["backward_hopper"]
    plain = dataclasses.replace(asked, trained=(), deterministic=True)
    assert any(
        x.config.kernel == "backward_hopper" and x.config.ordered for x in choose_backward(plain, **target).launches
    )
    ordered = choose_backward(plain, **older)
    assert any(x.config.kernel == "backward_dq" and x.config.features.modifier for x in ordered.launches)


@pytest.mark.parametrize(
    ("name", "plain", "rows"),
    [("alibi", True, 128), ("head scale", True, 128), ("relative bias", True, 128), ("documents", True, 64),
     ("softcap and alibi", False, 64), ("array twice", False, 64)],
)  # fmt: skip
def test_which_modifiers_leave_the_order_of_the_backward_pass(name: str, plain: bool, rows: int) -> None:
    """P before dP, and lse times log2(e), where the derivative is the head's own; 128 queries of light ones.

    And of the relative bias, which products begin with.
    """
    case = next(x for x in modifiers.named_cases() if x.name == name)
    program = trace(*case.make(case.arrays((1, 4, 8, 8), np.random.default_rng(0)))).program
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    asked = problem(modifier=program)

    def config(asked: Any) -> Any:
        spec = choose_backward(asked, **target, backend="hopper")
        return next(x.config for x in spec.launches if x.config.kernel == "backward_hopper")

    assert (config(asked).log2_lse, config(asked).block_m) == (plain, rows)
    assert not config(dataclasses.replace(asked, dropout_p=0.1)).log2_lse
    # A slope for each head is trained so, and an array of distances; a factor of the score is not.
    trained_so = ("alibi", "relative bias", "documents")
    assert config(dataclasses.replace(asked, trained=(0,))).log2_lse == (name in trained_so)
    text = cuda.cuda_source(program)
    assert ("kHeadSlope = true" in text) == plain


@pytest.mark.parametrize(
    ("name", "by_distance"),
    [("alibi", False), ("t5", True), ("relative bias", True), ("head scale", False), ("softcap and alibi", False),
     ("swin", False), ("rows and columns", False), ("both", False), ("array twice", False)],
)  # fmt: skip
def test_what_is_trained_by_sums_of_equal_distances(name: str, by_distance: bool) -> None:
    """Elements of a distance, where the score's derivative is 1: ds of the product says what they get."""
    case = next(x for x in modifiers.named_cases() if x.name == name)
    traced = trace(*case.make(case.arrays((1, 4, 8, 8), np.random.default_rng(0))))
    text = cuda.cuda_source(traced.program, traced.differentiable)
    assert ("kTrainsByDistance = true" in text) == by_distance
    assert not by_distance or "void add_plainly" in text
    assert not by_distance or cuda_gradients.trains_plainly(traced.program, traced.differentiable)
    assert "kTrainsByDistance = false" in cuda.cuda_source(traced.program)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("alibi", (0, 0, 0, 0, 1)), ("head scale", (0, 0, 0, 0, 1)), ("both", (0, 0, 1, 0, 0)), ("t5", (1, 1, 0, 0, 0)),
     ("relative bias", (1, 1, 0, 0, 0)), ("rows and columns", (0, 0, 1, 1, 0)), ("swin", (1, 0, 0, 0, 0))],
)  # fmt: skip
def test_what_selects_an_element_decides_how_its_gradient_is_summed(name: str, counts: tuple[int, ...]) -> None:
    """Elements by themselves, those of a distance among them; sums of a key, of a query, of a head."""
    case = next(x for x in modifiers.named_cases() if x.name == name)
    traced = trace(*case.make(case.arrays((1, 4, 8, 8), np.random.default_rng(0))))
    text = cuda.cuda_source(traced.program, traced.differentiable)
    kinds = ("Element", "Distance", "Key", "Query", "Head")
    found = [int(re.findall(rf"int k{kind}Gradients = (\d+);", text)[0]) for kind in kinds]
    assert tuple(found) == counts
    # A warp holds a sum for each gradient of a distance or of the head.
    assert cuda.sums_held(text) == counts[1] + counts[4]
    assert cuda.sums_held(cuda.cuda_source(traced.program)) == 0
