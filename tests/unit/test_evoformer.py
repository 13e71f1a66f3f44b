"""Triangle and Evoformer attention against their formulas, with the gradients of the shared biases."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
from differences import note

from nvrtc_attn import UnsupportedError
from nvrtc_attn.base import log

torch = pytest.importorskip("torch", reason="torch is not installed")
integration = pytest.importorskip("nvrtc_attn.integrations.evoformer")


def leaf(*shape: int) -> Any:
    return torch.randn(*shape, requires_grad=True)


def compare(out: Any, expected: Any, leaves: Any) -> None:
    assert out.shape == expected.shape
    note("evoformer", out, expected)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    weight = torch.randn_like(expected)
    got = torch.autograd.grad((out * weight).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        assert a.shape == b.shape
        note("evoformer", a, b)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def triangle(q: Any, k: Any, v: Any, bias: Any, mask: Any, scale: float | None) -> Any:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    scores = scores if mask is None else torch.where(mask.bool(), scores, -1e9)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_triangle_attention(batch: int | None, masked: Any, scale: float | None) -> None:
    torch.manual_seed(0)
    lead = () if batch is None else (batch,)
    q, k, v = leaf(*lead, 3, 2, 5, 8), leaf(*lead, 3, 2, 7, 8), leaf(*lead, 3, 2, 7, 8)
    bias = leaf(*lead, 1, 2, 5, 7)
    mask = None
    if masked is not None:
        mask = torch.rand(*lead, 3, 1, 1, 7) < 0.6
        mask[..., 0] = True
        mask = mask.to(masked)
    out = integration.triangle_attention(q, k, v, bias, mask, scale)
    compare(out, triangle(q, k, v, bias, mask, scale), (q, k, v, bias))


def evoformer(q: Any, k: Any, v: Any, *biases: Any) -> Any:
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    for bias in biases:
        scores = scores if bias is None else scores + bias
    return (torch.softmax(scores, -1) @ v).transpose(-2, -3)


def evoformer_inputs(batch: int) -> list[Any]:
    torch.manual_seed(0)
    return [leaf(batch, 3, 6, 2, 8) for _ in range(3)]


def row_mask(batch: int, hidden: float = -1e9) -> Any:
    mask = torch.zeros(batch, 3, 1, 1, 6)
    mask[:, 1, ..., 4:] = hidden
    mask[:, 2, ..., 1] = hidden
    return mask


@pytest.mark.parametrize("batch", [1, 2])
def test_evoformer_attention(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask and pair bias, each alone and none; with both, no tensor of all rows' scores."""
    q, k, v = evoformer_inputs(batch)
    pair = leaf(batch, 1, 2, 6, 6)
    seen = []
    original = integration.attention
    monkeypatch.setattr(
        integration, "attention",
        lambda *args, **options: (seen.append(options["bias"]), original(*args, **options))[1],
    )  # fmt: skip
    for biases in ([row_mask(batch), pair], [row_mask(batch, -torch.inf), pair], [row_mask(batch, -5e4), pair]):
        compare(integration.DS4Sci_EvoformerAttention(q, k, v, biases), evoformer(q, k, v, *biases), (q, k, v, pair))
        compare(integration.DS4Sci_EvoformerAttention(q, k, v, biases), evoformer(q, k, v, *biases), (q, k, v, pair))
    assert all(bias.shape == (1, 2, 6, 6) for bias in seen)
    compare(integration.DS4Sci_EvoformerAttention(q, k, v, [None, pair]), evoformer(q, k, v, pair), (q, k, v, pair))
    for biases in ([], [None], [row_mask(batch)], [row_mask(batch), None]):
        compare(integration.DS4Sci_EvoformerAttention(q, k, v, biases), evoformer(q, k, v, *biases), (q, k, v))
    row = leaf(batch, 3, 1, 1, 6)
    compare(integration.DS4Sci_EvoformerAttention(q, k, v, [row]), evoformer(q, k, v, row), (q, k, v, row))


@pytest.mark.parametrize("function", ["triangle", "evoformer"])
def test_gradients_of_several_examples_are_put_together_once(function: str) -> None:
    """Each example's gradient was a tensor of the whole batch's size, zero elsewhere, and those were added up."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    batch, pair = 4, leaf(4, 1, 2, 6, 6)
    with Counts() as forward:
        if function == "triangle":
            leaves = [*(leaf(batch, 3, 2, 6, 8) for _ in range(3)), pair]
            out = integration.triangle_attention(*leaves, torch.ones(batch, 3, 1, 1, 6, dtype=torch.bool))
        else:
            leaves = [*(leaf(batch, 3, 6, 2, 8) for _ in range(3)), pair]
            out = integration.DS4Sci_EvoformerAttention(*leaves[:3], [row_mask(batch), pair])
    with Counts() as backward:
        torch.autograd.grad(out.sum(), leaves)
    assert backward.seen["attention_backward"] == batch
    assert (backward.seen["stack"], backward.seen["select_backward"], backward.seen["add"]) == (4, 0, 0)
    # Whether the first bias is a mask is asked once, which waits for the GPU.
    assert forward.seen["all"] == (function == "evoformer")


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_is_one_call_where_rows_share_no_bias(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *x, **options: (calls.append(1), original(*x, **options))[1])
    q, k, v = (leaf(3, rows, 6, 2, 8) for _ in range(3))
    row, pair = leaf(3, rows, 1, 1, 6), leaf(3, 1, 2, 6, 6)
    mask = torch.zeros(3, rows, 1, 1, 6)
    mask[:, 0, ..., 4:] = -1e9
    for biases, leaves in (([], ()), ([row], (row,)), ([mask], ())):
        compare(integration.DS4Sci_EvoformerAttention(q, k, v, biases), evoformer(q, k, v, *biases), (q, k, v, *leaves))
    assert len(calls) == 3
    for biases, leaves in (([None, pair], (pair,)), ([mask, pair], (pair,)), ([row, pair], (row, pair))):
        compare(integration.DS4Sci_EvoformerAttention(q, k, v, biases), evoformer(q, k, v, *biases), (q, k, v, *leaves))
    q, k, v = (x.detach().transpose(2, 3).requires_grad_() for x in (q, k, v))
    keep = mask == 0
    compare(integration.triangle_attention(q, k, v, pair, keep), triangle(q, k, v, pair, keep, None), (q, k, v, pair))
    assert len(calls) == 3 + 4 * (1 if rows == 1 else 3)


def test_a_first_bias_that_is_no_mask_is_added(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values between, or a gradient of it: the same result, more memory, one line."""
    monkeypatch.setattr(log, "_said", set())
    q, k, v = evoformer_inputs(2)
    pair, row = leaf(2, 1, 2, 6, 6), leaf(2, 3, 1, 1, 6)
    between = row_mask(2, -5.0)
    with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
        compare(
            integration.DS4Sci_EvoformerAttention(q, k, v, [between, pair]), evoformer(q, k, v, between, pair),
            (q, k, v, pair),
        )  # fmt: skip
        compare(
            integration.DS4Sci_EvoformerAttention(q, k, v, [row, pair]), evoformer(q, k, v, row, pair),
            (q, k, v, row, pair),
        )  # fmt: skip
    assert len([record for record in caplog.records if "added up" in record.message]) == 1


@pytest.mark.parametrize("hidden", [-1e9, -5.0])
def test_evoformer_compiles_whole(
    hidden: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph with its gradients, whatever the first bias is; one line says that nobody looked at its values."""
    monkeypatch.setattr(log, "_said", set())
    q, k, v = evoformer_inputs(1)
    row, pair = row_mask(1, hidden), leaf(1, 1, 2, 6, 6)

    def call(*x: Any) -> Any:
        return integration.DS4Sci_EvoformerAttention(*x[:3], list(x[3:]))

    for fullgraph in (True, False):
        torch._dynamo.reset()
        with caplog.at_level(logging.WARNING, logger="nvrtc_attn"):
            out = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)(q, k, v, row, pair)
        compare(out, evoformer(q, k, v, row, pair), (q, k, v, pair))
    (line,) = (record.message for record in caplog.records if record.name == "nvrtc_attn")
    assert "is not looked at in a program of torch.compile" in line


def test_rows_without_keys_are_zero() -> None:
    q, k, v = evoformer_inputs(1)
    pair, mask = leaf(1, 1, 2, 6, 6), row_mask(1)
    mask[:, 0] = -1e9
    out = integration.DS4Sci_EvoformerAttention(q, k, v, [mask, pair])
    assert torch.equal(out[:, 0], torch.zeros(1, 6, 2, 8))
    torch.testing.assert_close(out[:, 1:], evoformer(q, k, v, mask, pair)[:, 1:], atol=2e-6, rtol=1e-5)
    out.square().sum().backward()
    assert float(q.grad[:, 0].abs().max()) == 0
    assert float(pair.grad.abs().max()) > 0


def test_refusals() -> None:
    q, k, v = evoformer_inputs(1)
    for biases in ([torch.zeros(1, 3, 1, 6, 6)], [None, None, None], [torch.zeros(1, 1, 2, 6, 6), row_mask(1)]):
        with pytest.raises(ValueError, match="biases: shapes"):
            integration.DS4Sci_EvoformerAttention(q, k, v, biases)
    with pytest.raises(ValueError, match="Q: shape"):
        integration.DS4Sci_EvoformerAttention(q[0], k, v, [])
    with pytest.raises(UnsupportedError) as caught:
        integration.triangle_attention(q, k, v, q, return_aux=True, kv_lengths=q)
    assert len(caught.value.reasons) == 2
    with pytest.raises(ValueError, match="ranks"):
        integration.triangle_attention(q, k, v, q[0])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", ["k", "v", "bias", "mask"])
def test_triangle_refuses_another_batch_size(name: str, batch: int) -> None:
    """More entries than q has would be ignored."""
    shapes = {"q": (3, 2, 5, 8), "k": (3, 2, 7, 8), "v": (3, 2, 7, 8), "bias": (1, 2, 5, 7), "mask": (3, 1, 1, 7)}
    given = {x: torch.ones(batch if x == name else 2, *shape) for x, shape in shapes.items()}
    with pytest.raises(ValueError, match=rf"^{name}: shape \({batch}, .*batch size must be \[2\], as of q"):
        integration.triangle_attention(**given)


@pytest.mark.parametrize("shape", [(1, 3, 6, 2, 8), (3, 3, 6, 2, 8), (2, 4, 6, 2, 8)], ids=str)
@pytest.mark.parametrize("name", ["K", "V"])
def test_evoformer_refuses_other_rows(name: str, shape: tuple[int, ...]) -> None:
    given = {x: torch.ones(2, 3, 6, 2, 8) for x in "QKV"}
    given[name] = torch.ones(shape)
    with pytest.raises(ValueError, match=rf"^{name}: shape .*must be \[2, 3\], as of Q"):
        integration.DS4Sci_EvoformerAttention(**given, biases=[])
    given[name] = torch.ones(shape)[0]
    with pytest.raises(ValueError, match=rf"^{name}: shape .*It is \[batch, rows"):
        integration.DS4Sci_EvoformerAttention(**given, biases=[])


def test_what_is_no_tensor_is_named() -> None:
    q, k, v = evoformer_inputs(1)
    for name, call in {
        "bias": lambda: integration.triangle_attention(q, k, v, None),
        "K": lambda: integration.DS4Sci_EvoformerAttention(q, None, v, []),
        "biases": lambda: integration.DS4Sci_EvoformerAttention(q, k, v, None),
        r"biases\[1\]": lambda: integration.DS4Sci_EvoformerAttention(q, k, v, [None, 3.0]),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: got "):
            call()
    with pytest.raises(TypeError, match=r"^biases: got tensor.*of type Tensor"):
        integration.DS4Sci_EvoformerAttention(q, k, v, row_mask(1))
