"""nvrtc_attn's xFormers functions and operators against xFormers' own dense form of every mask."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from differences import note

from nvrtc_attn import UnsupportedError

torch = pytest.importorskip("torch", reason="torch is not installed")
integration = pytest.importorskip("nvrtc_attn.integrations.xformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from xformers.ops import fmha
        from xformers.ops.fmha import attn_bias as biases
        from xformers_masks import dense_mask, packed_mask
    except ImportError:
        fmha = biases = None

needs_xformers = pytest.mark.skipif(fmha is None, reason="xformers is not installed")
CPU = torch.device("cpu")
DENSE = sorted(name for name, (_, packed) in integration._BIASES.items() if not packed and "Tensor" not in name)


def reference(q: Any, k: Any, v: Any, bias: Any, scale: float | None = None) -> Any:
    """The dense formula of xFormers' documentation, in the inputs' precision; `bias` is [.., M, N]."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return (torch.softmax(scores, -1) @ v).transpose(-3, -2)


def inputs(rows: int, columns: int, batch: int = 2, heads: int = 2, head_dim_v: int = 8) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((batch, rows, heads, 8), (batch, columns, heads, 8), (batch, columns, heads, head_dim_v))
    return [torch.randn(shape, dtype=torch.float32, requires_grad=True) for shape in shapes]


def check(q: Any, k: Any, v: Any, bias: Any, dense: Any, *more: Any, call: Any = None, **options: Any) -> None:
    """Output and gradients of q, k, v and `more` are those of the reference under `dense`."""
    call = call or integration.memory_efficient_attention
    expected = reference(q, k, v, dense, options.get("scale"))
    out = call(q, k, v, bias, **options)
    assert out.shape == expected.shape
    note("xFormers", out, expected)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    weight = torch.randn_like(out)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v, *more))
    got = torch.autograd.grad((out * weight).sum(), (q, k, v, *more))
    for name, a, b in zip("qkvb", got, wanted, strict=False):
        assert a.shape == b.shape, name
        note("xFormers", a, b)
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5, msg=lambda text, name=name: f"d{name}: {text}")


PACKED = sorted(name for name in integration._BIASES if name.startswith("BlockDiagonal"))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_tensor_bias(scale: float | None) -> None:
    q, k, v = inputs(5, 7, head_dim_v=16)
    check(q, k, v, None, 0.0, scale=scale)
    bias = torch.randn(2, 2, 5, 7, requires_grad=True)
    check(q, k, v, bias, bias, bias, scale=scale)
    shared = torch.randn(1, 2, 5, 7, requires_grad=True)
    check(q, k, v, shared, shared, shared)
    # What xFormers wants instead: all dims there, by strides of 0. The gradient arrives in the bias's own shape.
    expanded = shared.expand(2, 2, 5, 7)
    check(q, k, v, expanded, expanded, shared)


@needs_xformers
@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 6)])
def test_dense_masks(name: str, lengths: tuple[int, int]) -> None:
    q, k, v = inputs(*lengths)
    mask = dense_mask(name)
    check(q, k, v, mask, mask.materialize((2, 2, *lengths)))


@needs_xformers
def test_causal_mask_with_a_bias_and_its_gradient() -> None:
    q, k, v = inputs(5, 5)
    bias = torch.randn(2, 2, 5, 5, requires_grad=True)
    mask = biases.LowerTriangularMask().add_bias(bias)
    check(q, k, v, mask, mask.materialize((2, 2, 5, 5)), bias)


@needs_xformers
@pytest.mark.parametrize("name", PACKED)
def test_packed_masks(name: str) -> None:
    mask = packed_mask(name)
    rows, columns = mask.q_seqinfo.seqstart_py[-1], mask.k_seqinfo.seqstart_py[-1]
    q, k, v = inputs(rows, columns, batch=1)
    dense = mask.materialize((1, 2, rows, columns))
    assert torch.isfinite(dense).any(-1).all()  # every row sees a key: the dense formula has no NaN
    check(q, k, v, mask, dense)


@needs_xformers
def test_every_bias_class_is_served_or_refused() -> None:
    """A class that a later xFormers adds fails here until somebody decides."""
    names = {
        name for name, kind in vars(biases).items()
        if isinstance(kind, type) and issubclass(kind, biases.AttentionBias) and kind is not biases.AttentionBias
    }  # fmt: skip
    paged = {name for name in names if name.startswith("Paged")}
    assert names - paged == set(integration._BIASES)
    assert paged

    class Own(biases.LowerTriangularMask):
        pass

    q, k, v = inputs(4, 4)
    with pytest.raises(UnsupportedError) as caught:
        integration.memory_efficient_attention(q, k, v, Own(), output_dtype=torch.float64)
    assert len(caught.value.reasons) == 2
    overlapping = biases.BlockDiagonalGappyKeysMask.from_seqlens([2, 2], [0, 1, 6], [3, 3], device=CPU)
    q, k, v = inputs(4, 6, batch=1)
    with pytest.raises(UnsupportedError, match="not overlap"):
        integration.memory_efficient_attention(q, k, v, overlapping)


def test_one_head_and_grouped_heads() -> None:
    """Rank 3 is one head; rank 5 shares key heads where they are expanded, and only there."""
    q, k, v = (x[:, :, 0].detach().requires_grad_() for x in inputs(5, 7))
    four = [x.unsqueeze(2) for x in (q, k, v)]
    torch.testing.assert_close(
        integration.memory_efficient_attention(q, k, v), reference(*four, 0.0).squeeze(2), atol=2e-6, rtol=1e-5
    )
    torch.manual_seed(1)
    q = torch.randn(2, 5, 2, 3, 8, requires_grad=True)
    for expanded in (True, False):
        k, v = (torch.randn(2, 7, 2, 1 if expanded else 3, 8, requires_grad=True) for _ in range(2))
        full = [x.expand(2, 7, 2, 3, 8) for x in (k, v)]
        flat = [x.reshape(x.shape[0], x.shape[1], 6, 8) for x in (q, *full)]
        expected = reference(*flat, 0.0).view(2, 5, 2, 3, 8)
        out = integration.memory_efficient_attention(q, *full)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
        for a, b in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), wanted, strict=True):
            torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("groups", [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_a_bias_of_grouped_heads_broadcasts_over_groups_or_heads(groups: tuple[int, int]) -> None:
    """With one of the two dims 1 it was refused, by the shape of the two joined."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 2, 3, 8, requires_grad=True) for n in (5, 7, 7))
    bias = torch.randn(1, *groups, 5, 7, requires_grad=True)
    flat = [x.flatten(2, 3) for x in (q, k, v)]
    expected = reference(*flat, bias.expand(2, 2, 3, 5, 7).flatten(1, 2)).unflatten(2, (2, 3))
    out = integration.memory_efficient_attention(q, k, v, bias)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    weight = torch.randn_like(out)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v, bias))
    for a, b in zip(torch.autograd.grad((out * weight).sum(), (q, k, v, bias)), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)


def test_the_functions_outside_of_autograd() -> None:
    q, k, v = inputs(5, 7)
    bias = torch.randn(2, 2, 5, 7)
    expected = reference(q, k, v, bias)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    out, lse = integration.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    assert not out.requires_grad
    assert torch.equal(out, integration.memory_efficient_attention_forward(q, k, v, bias))
    scores = torch.einsum("bmhk,bnhk->bhmn", q, k) * 8**-0.5 + bias
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1).detach(), atol=2e-6, rtol=1e-5)
    gradients = integration.memory_efficient_attention_backward(weight, out, lse, q, k, v, bias)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=5e-6, rtol=1e-5)
    with pytest.raises(UnsupportedError, match=r"p: got 0\.5"):
        integration.memory_efficient_attention_backward(weight, out, lse, q, k, v, bias, 0.5)


@needs_xformers
@pytest.mark.parametrize("name", [None, *DENSE, "LowerTriangularMaskWithTensorBias", *PACKED])
def test_operators_of_xformers(name: str | None) -> None:
    """xFormers' own function with ``op=(FwOp, BwOp)``."""

    def call(q: Any, k: Any, v: Any, bias: Any, **options: Any) -> Any:
        return fmha.memory_efficient_attention(q, k, v, bias, op=(integration.FwOp, integration.BwOp), **options)

    if name is None:
        q, k, v = inputs(5, 7, head_dim_v=16)
        check(q, k, v, None, 0.0, call=call, scale=0.3)
        bias = torch.randn(2, 2, 5, 7, requires_grad=True)
        check(q, k, v, bias, bias, bias, call=call)
        assert call(*(x.detach().bfloat16() for x in (q, k, v)), None).dtype == torch.bfloat16
    elif name == "LowerTriangularMaskWithTensorBias":
        q, k, v = inputs(5, 5)
        bias = torch.randn(2, 2, 5, 5)
        mask = biases.LowerTriangularMask().add_bias(bias)
        check(q, k, v, mask, mask.materialize((2, 2, 5, 5)), call=call)
        bias.requires_grad_()  # xFormers would drop this gradient in silence
        assert call(*(x.detach() for x in (q, k, v)), mask).shape == q.shape
        with pytest.raises(UnsupportedError, match=r"attn_bias: .*requires grad.*xformers\.memory_efficient_attention"):
            call(q, k, v, mask)
        context = fmha.common.Context(lse=torch.zeros(2, 2, 5), out=q.detach())
        with pytest.raises(UnsupportedError, match="requires grad"):
            integration.BwOp.apply(context, fmha.Inputs(query=q, key=k, value=v, attn_bias=mask), q.detach())
    elif name in PACKED:
        mask = packed_mask(name)
        rows, columns = mask.q_seqinfo.seqstart_py[-1], mask.k_seqinfo.seqstart_py[-1]
        q, k, v = inputs(rows, columns, batch=1)
        check(q, k, v, mask, mask.materialize((1, 2, rows, columns)), call=call)
    else:
        q, k, v = inputs(5, 5)
        check(q, k, v, dense_mask(name), dense_mask(name).materialize((2, 2, 5, 5)), call=call)


@needs_xformers
def test_operators_drop_alike_in_both_directions() -> None:
    """With v the identity the output is the dropped P; its gradient is of the same mask."""
    q, k, _ = inputs(6, 6, batch=1, heads=1)
    v = torch.eye(6).view(1, 6, 1, 6).requires_grad_()
    op = (integration.FwOp, integration.BwOp)
    out = fmha.memory_efficient_attention(q, k, v, p=0.5, op=op)
    out.sum().backward()
    dropped = out.detach()[0, :, 0] == 0
    assert 0 < int(dropped.sum()) < 36
    torch.testing.assert_close(v.grad[0, :, 0, 0], out.detach()[0, :, 0].sum(0), atol=1e-6, rtol=1e-5)
    again = fmha.memory_efficient_attention(q, k, v, p=0.5, op=op)
    assert not torch.equal(again, out)


@needs_xformers
def test_xformers_refuses_what_the_operators_do_not_take() -> None:
    q, k, v = (x.detach() for x in inputs(5, 5))
    reasons = integration.FwOp.not_supported_reasons(
        fmha.Inputs(query=q.double(), key=k.double(), value=v.double(), output_dtype=torch.float16)
    )
    assert len(reasons) == 2
    with pytest.raises(ValueError, match="nvrtc_attn"):
        fmha.memory_efficient_attention(q.double(), k.double(), v.double(), op=(integration.FwOp, integration.BwOp))


def test_without_xformers_only_the_operators_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xformers.ops.fmha", None)
    for name in ("FwOp", "BwOp"):
        monkeypatch.delitem(vars(integration), name, raising=False)
    with pytest.raises(ImportError):
        integration.FwOp  # noqa: B018
    with pytest.raises(AttributeError, match="Nothing"):
        integration.Nothing  # noqa: B018
    q, k, v = inputs(3, 3)
    assert integration.memory_efficient_attention(q, k, v).shape == (2, 3, 2, 8)
