"""The gradient of a bias that the copy engine moves: strides it can follow, values that masks are written with."""

from __future__ import annotations

from typing import Any

import pytest
from harness import DEVICE, backend, torch

import nvrtc_attn
from nvrtc_attn import api

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels need compute capability 9.0",
)
BATCH, ROWS, KEYS, HEADS = 2, 300, 400, 2


def tensors(head_dim: int) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(head_dim)

    def draw(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

    q, dout = draw(BATCH, ROWS, HEADS, head_dim), draw(BATCH, ROWS, HEADS, head_dim)
    k, v = draw(BATCH, KEYS, HEADS, head_dim), draw(BATCH, KEYS, HEADS, head_dim)
    return {"q": q, "k": k, "v": v, "dout": dout, "bias": draw(BATCH, HEADS, ROWS, KEYS)}


def gradients(x: dict[str, Any], family: str = "hopper", dbias: Any = None, **options: Any) -> dict[str, Any]:
    """dq, dk, dv and dbias by one family, outputs poisoned."""
    q, k, v, bias, dout = (x[name] for name in ("q", "k", "v", "bias", "dout"))
    with backend(family):
        out = torch.full_like(dout, float("nan"))
        lse = torch.full((BATCH, HEADS, ROWS), float("nan"), device=DEVICE)
        size = api.forward_workspace_bytes(q, k, v, bias=bias, **options)
        workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, bias=bias, workspace=workspace, **options)
        found = {name: torch.full_like(x[name[1:]], float("nan")) for name in ("dq", "dk", "dv")}
        found["dbias"] = (
            torch.full(bias.shape, float("nan"), dtype=bias.dtype, device=DEVICE) if dbias is None else dbias
        )
        size = api.backward_workspace_bytes(q, k, v, bias=bias, dbias=True, **options) + (1 << 20)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, found["dq"], found["dk"], found["dv"], dbias=found["dbias"], bias=bias,
            workspace=workspace, **options,
        )  # fmt: skip
    return found


@pytest.mark.reliability(5, 16)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_strided_bias_and_dbias_give_the_same_bits(head_dim: int, causal: bool) -> None:
    """Rows of 16-byte multiples with padding, heads outside batches; what lies between rows is not written."""
    x = tensors(head_dim)
    dense = gradients(x, causal=causal)
    pitch = KEYS + 24

    def padded(poison: float) -> Any:
        storage = torch.full((HEADS, BATCH, ROWS, pitch), poison, dtype=torch.bfloat16, device=DEVICE)
        return storage, storage.transpose(0, 1)[..., :KEYS]

    _, bias = padded(float("nan"))
    bias.copy_(x["bias"])
    storage, dbias = padded(7.0)
    strided = gradients({**x, "bias": bias}, dbias=dbias, causal=causal)
    for name in ("dk", "dv", "dbias"):  # dq is summed in the order in which blocks arrive
        assert torch.equal(strided[name], dense[name]), name
    assert (storage[..., KEYS:] == 7.0).all()


@pytest.mark.reliability(5, 16)
def test_dbias_that_the_copy_engine_cannot_write() -> None:
    """Rows of dbias at odd multiples of two bytes: every thread writes its own."""
    x = tensors(64)
    dense = gradients(x)
    storage = torch.full((BATCH, HEADS, ROWS, KEYS + 1), 7.0, dtype=torch.bfloat16, device=DEVICE)
    found = gradients(x, dbias=storage[..., :KEYS])["dbias"]
    torch.testing.assert_close(found, dense["dbias"], rtol=2e-2, atol=2e-3)
    assert (storage[..., KEYS] == 7.0).all()


@pytest.mark.reliability(21)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shared", [False, True])
def test_infinite_and_huge_biases(head_dim: int, shared: bool) -> None:
    """-inf for some keys or a whole row, and rows of finfo.min: an ordinary softmax, whose LSE leaves no gradient."""
    x = tensors(head_dim)
    bias = x["bias"][:1].clone() if shared else x["bias"]
    bias[..., 5, :] = float("-inf")
    bias[..., 6, ::3] = float("-inf")
    bias[..., 7, :] = torch.finfo(torch.bfloat16).min
    bias[..., 130:, 300:] = torch.finfo(torch.bfloat16).min
    x["bias"] = bias
    ours, others = gradients(x), gradients(x, "portable")
    for name, found in ours.items():
        other = others[name].float()
        assert (found.float() - other).abs().max() <= 1e-2 * other.abs().max(), name
    assert (ours["dbias"][..., 5, :] == 0).all()
    assert (ours["dbias"][..., 6, ::3] == 0).all()
    assert (ours["dbias"][..., 7, :] == 0).all()
    assert (ours["dbias"][..., 130:, 300:] == 0).all()
    assert ours["dbias"][..., 8, :].abs().max() > 0
