"""The integrations on the GPU, in 16-bit types: no further from float64 than twice the same formula in that type.

What they compute is compared on the CPU (tests/unit); here are the device's own ways: kernels, strides, graphs.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from differences import number

torch = pytest.importorskip("torch", reason="torch is not installed")
comfyui = pytest.importorskip("nvrtc_attn.integrations.comfyui")
evoformer = pytest.importorskip("nvrtc_attn.integrations.evoformer")
flash_attn = pytest.importorskip("nvrtc_attn.integrations.flash_attn")
xformers = pytest.importorskip("nvrtc_attn.integrations.xformers")

TYPES = [torch.float16, torch.bfloat16, torch.float32]


def formula(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Of [B, M, H, D]; a bias with -inf hides keys."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhmn,bnhd->bmhd", torch.softmax(scores + bias, -1), v)


def check(row: str, call: Any, reference: Any, leaves: list[Any]) -> None:
    """Outputs and gradients of `call(*leaves)` against those of `reference`, in float64 and in the type itself."""

    def run(function: Any, dtype: Any) -> list[Any]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out = function(*inputs)
        weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view(out.shape)
        gradients = torch.autograd.grad((out * weight.to(out.dtype)).sum(), inputs)
        return [x.double() for x in (out.detach(), *gradients)]

    dtype = leaves[0].dtype
    exact, same, ours = run(reference, torch.float64), run(reference, dtype), run(call, dtype)
    for index, (a, b, c) in enumerate(zip(exact, same, ours, strict=True)):
        number(row, float((c - a).abs().max()), str(dtype).removeprefix("torch."))
        allowed = 2 * float((b - a).abs().max()) + 1e-5 * max(float(a.abs().max()), 1)
        assert float((c - a).abs().max()) <= allowed, index


def random(*shape: int, dtype: Any) -> Any:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("causal", "longer"), [(False, "keys"), (True, "keys"), (False, "queries")])
def test_alibi(dtype: Any, causal: bool, longer: str) -> None:
    """Lengths beyond one call of float16 and float32, keys before the queries or queries before the keys."""
    torch.manual_seed(0)
    rows, columns = (2500, 2700) if dtype == torch.float16 else (300, 500)
    if longer == "queries":
        rows, columns = columns, rows
    leaves = [random(1, rows, 4, 64, dtype=dtype), *(random(1, columns, 2, 64, dtype=dtype) for _ in range(2))]
    slopes = 2.0 ** -torch.arange(2, 10, 2, device="cuda")
    distance = torch.arange(rows, device="cuda")[:, None] + columns - rows - torch.arange(columns, device="cuda")
    bias = -slopes[:, None, None].double() * distance.abs()
    if causal:
        bias = bias.masked_fill(distance < 0, -torch.inf)
    check(
        "flash_attn",
        lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes),
        lambda q, k, v: formula(q, k, v, bias.to(q.dtype)),
        leaves,
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_alibi_of_packed_sequences_that_see_both_ways(dtype: Any) -> None:
    """No copy into a batch: a function of the scores, with each sequence's own alignment."""
    torch.manual_seed(0)
    lengths = ((100, 60), (70, 200))
    leaves = [random(170, 4, 64, dtype=dtype), *(random(260, 2, 64, dtype=dtype) for _ in range(2))]
    starts = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 100, 170], [0, 60, 260])]
    slopes = 2.0 ** -torch.arange(2, 10, 2, device="cuda")
    bias = torch.full((4, 170, 260), -torch.inf, device="cuda", dtype=torch.float64)
    for (m, n), row, column in zip(lengths, (0, 100), (0, 60), strict=True):
        distance = torch.arange(m, device="cuda")[:, None] + n - m - torch.arange(n, device="cuda")
        bias[:, row : row + m, column : column + n] = -slopes[:, None, None].double() * distance.abs()
    check(
        "flash_attn",
        lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, *starts, 100, 200, alibi_slopes=slopes),
        lambda q, k, v: formula(q[None], k[None], v[None], bias.to(q.dtype))[0],
        leaves,
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_packed_in_one_tensor(dtype: Any) -> None:
    torch.manual_seed(0)
    qkv = random(300, 3, 4, 64, dtype=dtype)
    cu = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    hidden = torch.full((300, 300), -torch.inf, device="cuda")
    for start, end in ((0, 100), (100, 300)):
        hidden[start:end, start:end] = torch.full((end - start, end - start), -torch.inf, device="cuda").triu(1)
    check(
        "flash_attn",
        lambda x: flash_attn.flash_attn_varlen_qkvpacked_func(x, cu, 200, causal=True),
        lambda x: formula(*(y[None] for y in x.unbind(1)), hidden.to(x.dtype))[0],
        [qkv],
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_triangle_and_evoformer(dtype: Any, batch: int) -> None:
    """The gradient of the shared bias is summed over the rows; a row mask in both forms."""
    torch.manual_seed(0)
    rows, length, heads = 6, 130, 4
    leaves = [*(random(batch, rows, heads, length, 32, dtype=dtype) for _ in range(3)),
              random(batch, 1, heads, length, length, dtype=dtype)]  # fmt: skip
    keep = torch.rand(batch, rows, 1, 1, length, device="cuda") < 0.8
    hidden = torch.zeros(keep.shape, device="cuda").masked_fill(~keep, -1e9)

    def reference(q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = (q @ k.transpose(-1, -2) * 32**-0.5 + bias).masked_fill(~keep, -torch.inf)
        return torch.softmax(scores, -1) @ v

    check("evoformer", lambda q, k, v, bias: evoformer.triangle_attention(q, k, v, bias, keep), reference, leaves)
    check(
        "evoformer",
        lambda q, k, v, bias: evoformer.DS4Sci_EvoformerAttention(
            *(x.transpose(2, 3) for x in (q, k, v)), [hidden, bias]
        ).transpose(2, 3),
        reference,
        leaves,
    )


def imported_xformers() -> Any:
    """Its Python only, not its build."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from xformers.ops import fmha
        except ImportError as error:
            pytest.skip(f"xformers is not installed: {error}")
    return fmha


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", sorted(xformers._BIASES))
def test_masks_of_xformers(name: str, dtype: Any) -> None:
    """Every class that needs no paging, by the function and by the operators, beside xFormers' dense form of it."""
    fmha = imported_xformers()
    from xformers_masks import dense_mask, packed_mask

    torch.manual_seed(0)
    rows, columns = 200, 200
    if name == "LowerTriangularMaskWithTensorBias":
        mask = fmha.attn_bias.LowerTriangularMask().add_bias(random(1, 4, rows, columns, dtype=dtype))
    elif name.startswith("BlockDiagonal"):
        mask = packed_mask(name, 40, "cuda")
        rows, columns = (int(info.seqstart_py[-1]) for info in (mask.q_seqinfo, mask.k_seqinfo))
    else:
        mask = dense_mask(name, 40)
    dense = mask.materialize((1, 4, rows, columns), dtype=torch.float32, device="cuda")
    leaves = [random(1, n, 4, 64, dtype=dtype) for n in (rows, columns, columns)]
    op = (xformers.FwOp, xformers.BwOp)
    for call in (
        lambda q, k, v: xformers.memory_efficient_attention(q, k, v, mask),
        lambda q, k, v: fmha.memory_efficient_attention(q, k, v, mask, op=op),
    ):
        check("xFormers", call, lambda q, k, v: formula(q, k, v, dense.to(q.dtype)), leaves)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_dropout_of_xformers_operators(dtype: Any) -> None:
    fmha = imported_xformers()
    torch.manual_seed(0)
    op = (xformers.FwOp, xformers.BwOp)
    leaves = [random(1, 300, 4, 64, dtype=dtype) for _ in range(2)]
    q, k = (x.detach() for x in leaves[:2])
    v = torch.eye(300, device="cuda", dtype=dtype).view(1, 300, 1, 300).expand(1, 300, 4, 300).clone().requires_grad_()
    out = fmha.memory_efficient_attention(q, k, v, p=0.5, op=op)
    out.sum().backward()
    # One mask in both directions: the column sums of what came out are the gradient of v.
    torch.testing.assert_close(v.grad[0, :, :, 0].float(), out.detach().float()[0].sum(0).T, atol=5e-2, rtol=2e-2)


def test_backward_functions_of_xformers() -> None:
    """The functions outside of autograd, with a workspace where the kernels need one."""
    torch.manual_seed(0)
    q, k, v = (random(2, 260, 4, 64, dtype=torch.float16).requires_grad_() for _ in range(3))
    bias = random(1, 4, 260, 260, dtype=torch.float16)
    expected = xformers.memory_efficient_attention(q, k, v, bias)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    assert torch.equal(out, expected)
    gradients = xformers.memory_efficient_attention_backward(weight, out, lse, q, k, v, bias)
    for a, b in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_evoformer_in_a_captured_graph() -> None:
    """Capturing, nothing may wait for the GPU: the two biases are added up, with the same result."""
    torch.manual_seed(0)
    q, k, v = (random(1, 4, 128, 4, 32, dtype=torch.float16) for _ in range(3))
    row = torch.zeros(1, 4, 1, 1, 128, device="cuda", dtype=torch.float16)
    row[:, 1:, ..., 100:] = -6e4
    pair = random(1, 1, 4, 128, 128, dtype=torch.float16)
    expected = evoformer.DS4Sci_EvoformerAttention(q, k, v, [row, pair])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        added = evoformer.attention(q[0], k[0], v[0], bias=row[0] + pair[0])  # compiles the kernel of this form
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = evoformer.DS4Sci_EvoformerAttention(q, k, v, [row, pair])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out[0], added)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [None, (200, 260), (2, 200, 260), (1, 1, 260), (2, 4, 200, 260)], ids=str)
@pytest.mark.parametrize("layout", ["packed heads", "heads first"])
def test_function_of_comfyui(layout: str, shape: Any, dtype: Any) -> None:
    """Both of ComfyUI's layouts, grouped heads, masks added or boolean, the gradient of the added one too."""
    torch.manual_seed(0)
    leaves = [random(2, 200, 4, 64, dtype=dtype), *(random(2, 260, 2, 64, dtype=dtype) for _ in range(2))]

    def call(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        if layout == "packed heads":
            return comfyui.attention_nvrtc(*(x.flatten(2) for x in (q, k, v)), 4, mask).unflatten(2, (4, 64))
        first = (x.transpose(1, 2) for x in (q, k, v))
        return comfyui.attention_nvrtc(*first, 4, mask, None, True, True).transpose(1, 2)

    def reference(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        if mask is None:
            return formula(q, k, v, 0.0)
        return formula(q, k, v, mask[:, None] if mask.dim() == 3 else mask)

    if shape is None:
        check("ComfyUI", call, reference, leaves)
        return
    check("ComfyUI", call, reference, [*leaves, random(*shape, dtype=dtype)])
    keep = torch.rand(shape, device="cuda") < 0.7
    keep[..., 0] = True
    hidden = torch.zeros(shape, device="cuda").masked_fill(~keep, -torch.inf)
    check(
        "ComfyUI", lambda q, k, v: call(q, k, v, keep), lambda q, k, v: reference(q, k, v, hidden.to(q.dtype)), leaves
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_of_packed_sequences_and_a_cache(dtype: Any) -> None:
    """Each sequence alone; then the same keys from a cache that is one tensor."""
    torch.manual_seed(0)
    starts = torch.tensor([0, 300, 300, 700, 1000], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(1000, h, 64, device="cuda", dtype=dtype, requires_grad=True) for h in (4, 2, 2))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda")
    found = flash_attn.flash_attn_varlen_func(q, k, v, starts, starts, 400, 400, causal=True, alibi_slopes=slopes)
    parts = [
        flash_attn.flash_attn_func(*(x[None, a:b] for x in (q, k, v)), causal=True, alibi_slopes=slopes)[0]
        for a, b in ((0, 300), (300, 700), (700, 1000))
    ]
    expected = torch.cat(parts)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=10 * tolerance, rtol=tolerance)

    caches = [torch.full((3, 512, 2, 64), torch.nan, device="cuda", dtype=dtype) for _ in "kv"]
    lengths = torch.tensor([511, 0, 100], dtype=torch.int32, device="cuda")
    old = [torch.randn(3, 512, 2, 64, device="cuda", dtype=dtype) for _ in "kv"]
    hidden = (torch.arange(512, device="cuda") >= lengths[:, None])[:, :, None, None]
    for cache, x in zip(caches, old, strict=True):
        cache.copy_(x.masked_fill(hidden, torch.nan))
    query, key, value = (torch.randn(3, 1, h, 64, device="cuda", dtype=dtype) for h in (4, 2, 2))
    out = flash_attn.flash_attn_with_kvcache(query, *caches, key, value, cache_seqlens=lengths, causal=True)
    for b, length in enumerate(lengths.tolist()):
        keys, values = (torch.cat([x[b, :length], new[b]])[None] for x, new in zip(old, (key, value), strict=True))
        alone = flash_attn.flash_attn_func(query[b : b + 1], keys, values, causal=True)
        torch.testing.assert_close(out[b : b + 1], alone, atol=tolerance, rtol=tolerance)
