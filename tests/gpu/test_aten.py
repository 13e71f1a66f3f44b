"""The seed's entry points against the operators themselves, where those have no known defect."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from nvrtc_attn import aten, dropout_keep_mask  # noqa: E402

OPS = torch.ops.aten


def tensors(dtype: Any, b: int = 2, m: int = 113, n: int = 200, h: int = 3, k: int = 64, kv: int = 64) -> list[Any]:
    torch.manual_seed(1)
    shapes = ((b, m, h, k), (b, n, h, k), (b, n, h, kv), (b, m, h, kv))
    return [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]


def close(ours: Any, theirs: Any, dtype: Any, factor: float = 1.0) -> None:
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}[dtype] * factor
    scale = max(1.0, float(theirs.float().abs().max()))
    assert float((ours.float() - theirs.float()).abs().max()) <= tolerance * scale


@pytest.mark.reliability(42)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mask_type", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kv", [64, 96])
def test_forward_and_backward_match_the_operators(dtype: Any, mask_type: int, with_bias: bool, kv: int) -> None:
    q, k, v, dout = tensors(dtype, kv=kv)
    bias = None
    if with_bias and mask_type:
        pytest.skip("the operator leaves gradients of skipped bias tiles unwritten")
    if with_bias:
        bias = torch.randn((2, 3, 113, 200), device="cuda", dtype=dtype)
    arguments = (bias, None, None, None, None, 0.0, mask_type, True)
    theirs = OPS._efficient_attention_forward(q, k, v, *arguments)
    ours = aten.efficient_attention_forward(q, k, v, *arguments)
    assert ours[1].shape == theirs[1].shape
    assert ours[4:] == tuple(theirs[4:])
    assert [x.dtype for x in ours[2:4]] == [torch.int64, torch.int64]
    close(ours[0], theirs[0], dtype)
    close(ours[1][..., :113], theirs[1][..., :113], torch.float32, 10)
    assert bool((ours[1][..., 113:] == float("inf")).all())
    back = (None, None, 113, 200)
    grads_theirs = OPS._efficient_attention_backward(
        dout, q, k, v, bias, theirs[0], *back, theirs[1], 0.0, theirs[2], theirs[3], mask_type, with_bias
    )
    # Each side's state works with the other's backward: the padded LSE has one format.
    for out, lse in ((ours[0], ours[1]), (theirs[0], theirs[1])):
        grads = aten.efficient_attention_backward(
            dout, q, k, v, bias, out, *back, lse, 0.0, ours[2], ours[3], mask_type, with_bias
        )
        for mine, other in zip(grads, grads_theirs, strict=True):
            if mine is not None:
                close(mine, other, dtype, 4)


@pytest.mark.reliability(33)
def test_dropout_follows_the_generator_and_the_mask_of_the_operator() -> None:
    q, k, v, dout = tensors(torch.float16)
    torch.cuda.manual_seed(42)
    theirs = OPS._efficient_attention_forward(q, k, v, None, None, None, None, None, 0.3, 0, True)
    after_theirs = torch.cuda.default_generators[0].get_offset()
    torch.cuda.manual_seed(42)
    ours = aten.efficient_attention_forward(q, k, v, None, None, None, None, None, 0.3, 0, True)
    assert torch.cuda.default_generators[0].get_offset() == after_theirs
    assert [int(x) for x in ours[2:4]] == [int(x) for x in theirs[2:4]]
    close(ours[0], theirs[0], torch.float16)
    u = torch.empty((2, 3, 113, 200), device="cuda")
    OPS._fill_mem_eff_dropout_mask_(u, 0.3, int(ours[2]), int(ours[3]))
    mask = dropout_keep_mask((2, 3, 113, 200), 0.3, (int(ours[2]), int(ours[3])))
    assert torch.equal(u > 0.3, torch.from_numpy(mask).cuda())
    back = (None, None, 113, 200)
    grads_theirs = OPS._efficient_attention_backward(
        dout, q, k, v, None, theirs[0], *back, theirs[1], 0.3, theirs[2], theirs[3], 0, False
    )
    grads = aten.efficient_attention_backward(
        dout, q, k, v, None, ours[0], *back, ours[1], 0.3, ours[2], ours[3], 0, False
    )
    for mine, other in zip(grads[:3], grads_theirs[:3], strict=True):
        close(mine, other, torch.float16, 4)


@pytest.mark.parametrize("offset", [0, 1, 6, 2**33 + 3])
@pytest.mark.parametrize("shape", [(2, 3, 50, 64), (1, 2, 33, 77)])
def test_keep_mask_is_the_operators_bit_for_bit(shape: tuple[int, int, int, int], offset: int) -> None:
    for p in (0.1, 0.5, 0.9):
        u = torch.empty(shape, device="cuda")
        OPS._fill_mem_eff_dropout_mask_(u, p, 1234567, offset)
        assert torch.equal(u > p, torch.from_numpy(dropout_keep_mask(shape, p, (1234567, offset))).cuda())


def test_rows_without_a_key_have_the_seeds_lse() -> None:
    q, k, v, dout = tensors(torch.float16, m=100, n=60)
    out, lse, *rest = aten.efficient_attention_forward(q, k, v, None, None, None, None, None, 0.0, 2, True)
    assert bool((out[:, :40] == 0).all())
    assert bool((lse[..., :40] == 0).all())
    assert bool((lse[..., 100:] == float("inf")).all())
    grads = aten.efficient_attention_backward(
        dout, q, k, v, None, out, None, None, 100, 60, lse, 0.0, rest[0], rest[1], 2, False
    )
    assert all(bool(torch.isfinite(x).all()) for x in grads[:3] if x is not None)
    assert bool((grads[0][:, :40] == 0).all())


def test_window_shared_storage_and_varlen() -> None:
    q, k, v, dout = tensors(torch.bfloat16, b=1, m=300, n=300)
    cu = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    out, lse, seed, offset, max_q, max_k = aten.efficient_attention_forward(
        q, k, v, None, cu, cu, 200, 200, 0.0, 2, True, window_size=50
    )
    assert lse.shape == (2, 3, 224)
    assert (max_q, max_k) == (200, 200)
    grads = aten.efficient_attention_backward(
        dout, q, k, v, None, out, cu, cu, 200, 200, lse, 0.0, seed, offset, 2, False,
        window_size=50, shared_storage_dqdkdv=True,
    )  # fmt: skip
    assert grads[0].untyped_storage().data_ptr() == grads[2].untyped_storage().data_ptr()
    for start, end in ((0, 100), (100, 300)):
        s = slice(start, end)
        parts = [x[:, s].float().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        i = torch.arange(end - start, device="cuda")
        keep = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 50)
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=keep)
        close(out[:, s], expected.detach().transpose(1, 2), torch.bfloat16)
        expected.backward(dout[:, s].float().transpose(1, 2))
        for mine, part in zip(grads[:3], parts, strict=True):
            close(mine[:, s], part.grad.transpose(1, 2), torch.bfloat16, 3)


@pytest.mark.reliability(61)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_captured_state_is_on_the_device(dropout_p: float) -> None:
    """F3: seed and offset of a captured forward pass, as the operator returns them; eager ones are on the CPU."""
    q, k, v, dout = tensors(torch.float16)
    arguments = (None, None, None, None, None, dropout_p, 0, True)
    back = (None, None, 113, 200)

    def step() -> tuple[Any, ...]:
        out, lse, seed, offset, *_ = aten.efficient_attention_forward(q, k, v, *arguments)
        grads = aten.efficient_attention_backward(
            dout, q, k, v, None, out, *back, lse, dropout_p, seed, offset, 0, False
        )
        return out, seed, offset, *grads[:3]

    eager = step()
    assert {x.device.type for x in eager[1:3]} == {"cpu"}
    OPS._efficient_attention_forward(q, k, v, *arguments)  # what is captured must be loaded
    torch.zeros(2, dtype=torch.int64, device="cuda").random_()
    torch.cuda.synchronize()
    theirs_graph, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(theirs_graph):
        theirs = OPS._efficient_attention_forward(q, k, v, *arguments)
    with torch.cuda.graph(graph):
        captured = step()
    for mine, other in zip(captured[1:3], theirs[2:4], strict=True):
        assert (mine.device, mine.dtype, mine.shape) == (other.device, other.dtype, other.shape)
        assert mine.is_cuda
    graph.replay()
    torch.cuda.synchronize()
    if dropout_p == 0:
        assert [int(x) for x in captured[1:3]] == [0, 0]
        assert torch.equal(captured[0], eager[0])
    else:
        keep = dropout_keep_mask((2, 3, 113, 200), dropout_p, (int(captured[1]) & (2**64 - 1), int(captured[2])))
        assert abs(float(keep.mean()) - (1 - dropout_p)) < 0.01
    assert all(bool(torch.isfinite(x).all()) for x in captured if x.is_floating_point())


def test_undefined_gradient_gives_undefined_gradients() -> None:
    q, k, v, _ = tensors(torch.float16)
    word = torch.zeros((), dtype=torch.int64)
    assert aten.efficient_attention_backward(
        None, q, k, v, None, q, None, None, 113, 200, q, 0.0, word, word, 0, False
    ) == (None, None, None, None)  # fmt: skip


def test_refusals_name_the_argument() -> None:
    q, k, v, _ = tensors(torch.float16)
    with pytest.raises(ValueError, match="window_size"):
        aten.efficient_attention_forward(q, k, v, None, None, None, None, None, 0.0, 0, window_size=4)
    with pytest.raises(ValueError, match="custom_mask_type"):
        aten.efficient_attention_forward(q, k, v, None, None, None, None, None, 0.0, 3)
