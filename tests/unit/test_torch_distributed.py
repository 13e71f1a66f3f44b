"""DistributedDataParallel, FSDP2 and activation offload around attention: two processes on the CPU, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

import train_ranks  # noqa: E402 - after the skip

import nvrtc_attn.torch as na  # noqa: E402


@pytest.mark.parametrize("kind", train_ranks.KINDS)
@pytest.mark.turns(3)
def test_two_processes_train_as_one(kind: str, repository: Path, tmp_path: Path) -> None:
    """Half of the batch each, the gradient of a shared bias included."""
    train_ranks.check(kind, "cpu", repository, tmp_path / "store")


def test_saved_tensors_may_be_packed_away() -> None:
    """As ``torch.autograd.graph.save_on_cpu`` and offloading trainers do: all that is kept passes through the hooks."""

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = [torch.randn(2, 8, 2, 8, requires_grad=True) for _ in range(3)]
        bias = torch.randn(1, 2, 8, 8, requires_grad=True)
        out = na.attention(*x, bias=bias, dropout_p=0.2, rng=(1, 2))
        return list(torch.autograd.grad((out**2).sum(), [*x, bias]))

    expected = gradients()
    away: list[Any] = []

    def pack(x: torch.Tensor) -> int:
        away.append(x.detach().numpy().tobytes())
        shapes.append(x.shape)
        return len(away) - 1

    shapes: list[Any] = []

    def unpack(index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(away[index]), dtype=torch.float32).view(shapes[index])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = gradients()
    assert len(away) >= 6  # q, k, v, bias, out, lse
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
