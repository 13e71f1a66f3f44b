"""Dropout's words on the GPU, which callers write to between the passes. CPU tensors count as those of a GPU here."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tensors_of_gpu import Recorder, fake_gpu, qkv, tensor  # noqa: E402

import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402

fake = fake_gpu


def attend(q: Any, k: Any, v: Any, rng: Any) -> Any:
    return na.attention(q, k, v, dropout_p=0.5, rng=rng)


def attend_packed(q: Any, k: Any, v: Any, rng: Any) -> Any:
    kv = torch.stack([k, v], 2)
    return na.attention_kvpacked(q, kv, dropout_p=0.5, rng=rng)


def attend_modified(q: Any, k: Any, v: Any, rng: Any) -> Any:
    return na.attention(q, k, v, dropout_p=0.5, rng=rng, score_mod=lambda score, b, h, i, j: score + i - j)


def word_at(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


@pytest.mark.parametrize("call", [attend, attend_packed, attend_modified])
@pytest.mark.parametrize("grad", ["qkv", ""])
def test_a_backward_pass_reads_the_words_of_its_forward_pass(
    call: Any, grad: str, fake: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An offset that was added to in place after each layer gave every gradient the mask of the last one."""
    read: list[Any] = []
    run = plan._PlanBase.run

    def recorded(self: Any, stream: int, addresses: Any, workspace: int = 0, rng: Any = None, *more: Any) -> None:
        read.append((type(self).__name__, *[word_at(x) for x in (rng.seed_address, rng.offset_address)], rng))
        run(self, stream, addresses, workspace, rng, *more)

    monkeypatch.setattr(plan._PlanBase, "run", recorded)
    seed, offset = tensor((), dtype=torch.int64) + 7, tensor((), dtype=torch.int64) + 4
    inputs = qkv(grad=grad)
    out = call(*inputs, (seed, offset))
    offset.add_(100)
    if grad:
        torch.autograd.grad(out, inputs, torch.zeros_like(out))
        assert [x[:3] for x in read] == [("ForwardPlan", 7, 4), ("BackwardPlan", 7, 4)]
    else:
        assert [x[:3] for x in read] == [("ForwardPlan", 7, 4)]
        assert read[0][3].seed_address == seed.data_ptr(), "nothing is copied where no gradient follows"
