"""What `nvrtc_attn.front.call` remembers of a call gives the answer that looking again would."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvrtc_attn.front.call import Call, CallOptions, describe
from nvrtc_attn.front.problem import AttentionProblem


def call(q: Any = None, **more: Any) -> Call:
    q = np.zeros((1, 8, 2, 16), np.float16) if q is None else q
    tensors = {name: more.pop(name, None) for name in ("bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")}
    return describe(q, q, q, **tensors, options=CallOptions(**more), stream=None)


def problem(q: Any = None, **more: Any) -> AttentionProblem:
    return call(q, **more).problem


def test_equal_calls_share_a_problem() -> None:
    first = problem(causal=True)
    assert problem(causal=True) is first
    assert problem(causal=False) != first
    assert problem(causal=True, dropout_p=0.5) != first


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"return_lse": True}, {"return_lse": 1}),
        ({"window_size": (1, 2)}, {"window_size": (1.0, 2)}),
        ({"window_size": (1, 2)}, {"window_size": (True, 2)}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
    ],
)
def test_a_remembered_call_does_not_admit_an_equal_one_of_another_type(
    accepted: dict[str, Any], refused: dict[str, Any]
) -> None:
    problem(**accepted)
    with pytest.raises((TypeError, ValueError)):
        problem(**refused)


def test_what_a_kernel_depends_on_is_told_apart() -> None:
    base = np.zeros(4096, np.float16)
    aligned = base[: 8 * 2 * 16].reshape(1, 8, 2, 16)
    shifted = base[1 : 1 + 8 * 2 * 16].reshape(1, 8, 2, 16)
    assert problem(aligned).q.offset_alignment != problem(shifted).q.offset_alignment
    strided = np.zeros((1, 8, 4, 16), np.float16)[:, :, ::2]
    assert problem(strided).q.strides != problem(aligned).q.strides
    assert problem(aligned.astype(np.float32)).dtype == "float32"
    assert problem(aligned, bias=np.zeros((1, 2, 8, 8), np.float16)).bias is not None


def test_options_that_cannot_be_hashed_are_looked_at_each_time() -> None:
    assert problem(window_size=[1, 2]) == problem(window_size=(1, 2))


def test_lengths_in_host_memory_are_looked_at_each_time() -> None:
    packed = {"max_seqlen_q": 8, "max_seqlen_k": 8}
    good, bad = (np.array(ends, np.int32) for ends in ((0, 3, 8), (0, 9, 8)))
    problem(cu_seqlens_q=good, cu_seqlens_k=good, **packed)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        problem(cu_seqlens_q=bad, cu_seqlens_k=good, **packed)


def test_a_refused_call_is_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="dropout_p"):
            problem(dropout_p=2.0)


def test_layouts_of_outputs_belong_to_the_problem() -> None:
    one = call()
    dense = one.with_outputs()
    assert one.with_outputs() is dense
    assert dense.out is not None
    assert dense.dk is not None
    assert dense.dk.shape == one.tensors["k"].shape
    other = call(np.zeros((1, 8, 4, 16), np.float16)[:, :, ::2])
    assert one.with_outputs(dq=other.q).dq != dense.dq
