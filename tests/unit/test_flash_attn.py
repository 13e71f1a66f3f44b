"""The functions of nvrtc_attn.integrations.flash_attn against the formula of flash_attn's documentation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from differences import note

from nvrtc_attn import UnsupportedError

torch = pytest.importorskip("torch", reason="torch is not installed")
integration = pytest.importorskip("nvrtc_attn.integrations.flash_attn")
alibi = pytest.importorskip("nvrtc_attn.integrations.alibi")

POSITIONAL = [
    "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
    "return_attn_probs",
]  # fmt: skip
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *POSITIONAL],
    "flash_attn_kvpacked_func": ["q", "kv", *POSITIONAL],
    "flash_attn_qkvpacked_func": ["qkv", *POSITIONAL],
    "flash_attn_varlen_func": [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *POSITIONAL, "block_table",
    ],
    "flash_attn_varlen_kvpacked_func": [
        "q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *POSITIONAL,
    ],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *POSITIONAL],
    "flash_attn_with_kvcache": [
        "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
        "alibi_slopes", "num_splits", "return_softmax_lse",
    ],
}  # fmt: skip


def reference(
    q: Any, k: Any, v: Any, scale: float | None, causal: bool, window: tuple[int, int], softcap: float, slopes: Any
) -> tuple[Any, Any]:
    """(out, lse), with the M x N distances in memory."""
    rows, columns = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
    if slopes is not None:
        scores = scores - slopes.reshape(-1, q.shape[2], 1, 1) * distance.abs()
    left, right = window
    keep = torch.ones(rows, columns, dtype=torch.bool)
    keep &= (distance <= left) if left >= 0 else keep
    keep &= (distance >= -(0 if causal else right)) if causal or right >= 0 else keep
    scores = scores.masked_fill(~keep, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(
        keep.any(-1)[:, None], torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]), 0
    )
    return torch.einsum("bhmn,bnhd->bmhd", weights, v), lse


def inputs(rows: int, columns: int, heads_kv: int = 2, batch: int = 2) -> list[Any]:
    torch.manual_seed(0)
    shapes = ((batch, rows, 4, 8), (batch, columns, heads_kv, 8), (batch, columns, heads_kv, 8))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def compare(results: Any, expected: Any, leaves: Any) -> None:
    """out, lse and the gradients of `leaves` through both."""
    out, lse = results
    wanted_out, wanted_lse = expected
    note("flash_attn", out, wanted_out)
    note("flash_attn", lse, wanted_lse)
    torch.testing.assert_close(out, wanted_out, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=4e-6, rtol=1e-5)
    weights = torch.randn_like(out), torch.randn_like(lse)
    finite = torch.isfinite(wanted_lse)

    def loss(x: Any, sums: Any) -> Any:
        return (x * weights[0]).sum() + (sums[finite] * weights[1][finite]).sum()

    got = torch.autograd.grad(loss(out, lse), leaves)
    for a, b in zip(got, torch.autograd.grad(loss(wanted_out, wanted_lse), leaves), strict=True):
        note("flash_attn", a, b)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    """Names, order and defaults: callers pass many of them by position."""
    parameters = inspect.signature(getattr(integration, name)).parameters
    assert list(parameters) == SIGNATURES[name]
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    if name == "flash_attn_with_kvcache":
        others = {
            "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "num_splits": 0,
            "return_softmax_lse": False,
        }  # fmt: skip
        assert defaults == {**dict.fromkeys(SIGNATURES[name][3:]), **others}
        return
    assert defaults == {
        "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
        "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
        **({"block_table": None} if name == "flash_attn_varlen_func" else {}),
    }  # fmt: skip
    assert set(integration.__all__) == set(SIGNATURES)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 7), (7, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1), (2, -1)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_dense(lengths: tuple[int, int], causal: bool, window: tuple[int, int], softcap: float) -> None:
    q, k, v = inputs(*lengths)
    options = (0.3, causal, window, softcap, None)
    out, lse, nothing = integration.flash_attn_func(q, k, v, 0.0, *options, False, True)
    assert nothing.numel() == 0
    compare((out, lse), reference(q, k, v, *options), (q, k, v))
    assert torch.equal(integration.flash_attn_func(q, k, v, 0.0, *options), out)


@pytest.mark.parametrize("lengths", [(6, 6), (3, 7), (1, 4), (7, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (2, 3), (1, 1), (2, 0)])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("rows_a_call", [2, 8192])
def test_alibi(
    lengths: tuple[int, int], causal: bool, window: tuple[int, int], batched: bool, rows_a_call: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Both directions, all alignments, in one call and in many; the slopes get gradients, too."""
    monkeypatch.setitem(alibi._ROWS, torch.float32, rows_a_call)
    q, k, v = inputs(*lengths)
    slopes = (torch.rand(2, 4) if batched else torch.rand(4)).requires_grad_()
    options = (None, causal, window, 2.0, slopes)
    out, lse, _ = integration.flash_attn_func(q, k, v, 0.0, *options, False, True)
    compare((out, lse), reference(q, k, v, *options), (q, k, v, slopes))


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_has_no_bias_of_all_scores(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bias has one row, and sequences longer than a call keep float32's accuracy."""
    shapes = []
    original = alibi.attention

    def recorded(*args: Any, **options: Any) -> Any:
        shapes.append(options["bias"].shape)
        return original(*args, **options)

    monkeypatch.setattr(alibi, "attention", recorded)
    q, k, v = (x[:, :, :1].detach() for x in inputs(700, 700, batch=1))
    slopes = torch.tensor([0.9])
    out, lse, _ = integration.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True)
    assert len(shapes) == (6 if causal else 12)
    assert all(shape[2] == 1 for shape in shapes)
    expected, expected_lse = reference(*(x.double() for x in (q, k, v)), None, causal, (-1, -1), 0.0, slopes.double())
    assert float((out - expected).abs().max()) < 3e-5
    assert float((lse - expected_lse).abs().max()) < 3e-5


@pytest.mark.parametrize("causal", [False, True])
def test_packed_in_one_tensor(causal: bool) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    q, k, v = qkv.unbind(2)
    expected = integration.flash_attn_func(q, k, v, causal=causal)
    wanted = torch.autograd.grad(expected.square().sum(), qkv)[0]
    for out in (
        integration.flash_attn_qkvpacked_func(qkv, causal=causal),
        integration.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=causal),
    ):
        assert torch.equal(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), qkv)[0], wanted)


def test_the_gradient_of_a_packed_tensor_is_not_put_together() -> None:
    """Neither a stack of three gradients nor the sum of padded ones is in the graph."""
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, qkv, kv = (torch.randn(2, 5, *x, 4, 8, requires_grad=True) for x in ((), (3,), (2,)))
    for out in (
        integration.flash_attn_qkvpacked_func(qkv),
        integration.flash_attn_kvpacked_func(q, kv),
        integration.flash_attn_varlen_qkvpacked_func(qkv[0], starts, 3),
        integration.flash_attn_varlen_kvpacked_func(q[0], kv[0], starts, starts, 3, 3, return_attn_probs=True)[0],
    ):
        names = set()
        nodes = [out.grad_fn]
        while nodes:
            node = nodes.pop()
            names.add(type(node).__name__)
            nodes += [x for x, _ in node.next_functions if x is not None]
        assert "UnbindBackward0" not in names
        assert "_PackedAttentionBackward" in names


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1)])
def test_varlen(causal: bool, window: tuple[int, int]) -> None:
    """Each sequence is a dense call of its own; the packed forms are the same."""
    torch.manual_seed(0)
    lengths_q, lengths_k = [3, 5, 1], [4, 5, 2]
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(x).cumsum(0)], dtype=torch.int32) for x in (lengths_q, lengths_k))
    q = torch.randn(9, 4, 8, requires_grad=True)
    kv = torch.randn(11, 2, 2, 8, requires_grad=True)
    more = (0.0, None, causal, window, 1.5, None, False, True)
    parts = [
        integration.flash_attn_func(a[None], b[None, :, 0], b[None, :, 1], *more)
        for a, b in zip(q.split(lengths_q), kv.split(lengths_k), strict=True)
    ]
    expected = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], 1)
    out, lse, _ = integration.flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], cu_q, cu_k, 5, 5, *more)
    assert lse.shape == (4, 9)
    compare((out, lse), expected, (q, kv))
    again = integration.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 5, 5, *more)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
    qkv = torch.randn(9, 3, 4, 8, requires_grad=True)
    one = integration.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 5, *more)
    two = integration.flash_attn_varlen_func(*qkv.unbind(1), cu_q, cu_q, 5, 5, *more)
    assert torch.equal(one[0], two[0])
    compare(one[:2], two[:2], (qkv,))


def test_options_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout drops; deterministic is asked for where the caller or torch does."""
    q, k, v = inputs(6, 6)
    assert not torch.equal(integration.flash_attn_func(q, k, v, 0.5), integration.flash_attn_func(q, k, v))
    seen = []
    monkeypatch.setattr(
        integration, "attention", lambda *args, **options: (seen.append(options["deterministic"]), (q, q))[1]
    )
    integration.flash_attn_func(q, k, v)
    integration.flash_attn_func(q, k, v, deterministic=True)
    assert seen == [None, True]


def test_refusals() -> None:
    q, k, v = (x.detach() for x in inputs(6, 6))
    with pytest.raises(UnsupportedError, match="dropout_keep_mask"):
        integration.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    cu = torch.tensor([0, 6], dtype=torch.int32)
    with pytest.raises(UnsupportedError) as caught:
        integration.flash_attn_varlen_func(
            q[0], k[0], v[0], cu, cu, 6, 6, 0.5, alibi_slopes=torch.rand(4), block_table=cu, return_attn_probs=True
        )
    assert len(caught.value.reasons) == 2
    for call in (
        lambda: integration.flash_attn_func(q, k, v, alibi_slopes=torch.rand(3)),
        lambda: integration.flash_attn_qkvpacked_func(q),
        lambda: integration.flash_attn_varlen_func(q, k[0], v[0], cu, cu, 6, 6),
    ):
        with pytest.raises(ValueError, match="shape"):
            call()
    slopes: Any = [0.5, 0.25, 0.125, 0.0625]
    for call in (
        lambda: integration.flash_attn_func(q, k, v, alibi_slopes=slopes),
        lambda: integration.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 6, 6, causal=True, alibi_slopes=slopes),
    ):
        with pytest.raises(TypeError, match=r"^alibi_slopes: got \[0\.5.*of type list"):
            call()


@pytest.mark.parametrize(
    "options", [{"window_size": (2, 0)}, {"alibi_slopes": True}, {"causal": True, "alibi_slopes": True}]
)
def test_compiles_whole(options: dict[str, Any]) -> None:
    """One graph, with its gradients: ALiBi is made of traced operations."""
    q, k, v = inputs(6, 6)
    slopes = torch.rand(4, requires_grad=True)
    options = {**options, **({"alibi_slopes": slopes} if "alibi_slopes" in options else {})}

    def call(*x: Any) -> Any:
        return integration.flash_attn_func(*x, **options)

    torch._dynamo.reset()
    leaves = (q, k, v, slopes) if "alibi_slopes" in options else (q, k, v)
    out, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v)
    torch.testing.assert_close(out, expected, atol=0, rtol=0)
    got = torch.autograd.grad(out.square().sum(), leaves)
    for a, b in zip(got, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("new", [0, 3])
def test_cache_of_one_tensor(new: int, causal: bool) -> None:
    """Each batch entry alone, with the keys that it has; the rest of the cache holds NaN."""
    torch.manual_seed(0)
    lengths = [9, 0, 4] if new else [9, 1, 4]
    q = torch.randn(3, max(new, 1), 4, 16)
    caches = [torch.full((3, 16, 2, 16), torch.nan) for _ in "kv"]
    for cache in caches:
        for entry, length in zip(cache, lengths, strict=True):
            entry[:length] = torch.randn(length, 2, 16)
    fresh = [torch.randn(3, new, 2, 16) for _ in "kv"] if new else [None, None]
    before = [cache.clone() for cache in caches]
    used = torch.tensor(lengths, dtype=torch.int32)
    out, lse = integration.flash_attn_with_kvcache(
        q, *caches, *fresh, cache_seqlens=used, causal=causal, return_softmax_lse=True, num_splits=4
    )
    for b, length in enumerate(lengths):
        keys, values = (
            old[b, :length] if add is None else torch.cat([old[b, :length], add[b]])
            for old, add in zip(before, fresh, strict=True)
        )
        expected = integration.attention(q[b : b + 1], keys[None], values[None], causal=causal, return_lse=True)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), expected, rtol=1e-5, atol=1e-5)
        for cache, wanted in zip(caches, (keys, values), strict=True):
            torch.testing.assert_close(cache[b, : length + new], wanted, rtol=0, atol=0)
            assert cache[b, length + new :].isnan().all()
    whole = integration.flash_attn_with_kvcache(q, *(x.nan_to_num() for x in caches), causal=causal)
    torch.testing.assert_close(whole, integration.attention(q, *(x.nan_to_num() for x in caches), causal=causal))


def test_what_a_cache_cannot_have_is_refused() -> None:
    q, cache = torch.randn(1, 1, 2, 16), torch.randn(1, 8, 2, 16)
    with pytest.raises(UnsupportedError) as info:
        integration.flash_attn_with_kvcache(
            q, cache, cache, rotary_cos=q, rotary_sin=q, block_table=q, cache_batch_idx=q
        )
    assert len(info.value.reasons) == 4
    with pytest.raises(ValueError, match="both are given or none"):
        integration.flash_attn_with_kvcache(q, cache, cache, k=q)
    with pytest.raises(ValueError, match="cache_seqlens with them"):
        integration.flash_attn_with_kvcache(q, cache, cache, k=q, v=q)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_seqlens": torch.tensor([1])}, "cache_seqlens: torch.int64 of shape"),
        ({"cache_seqlens": torch.tensor([1, 1], dtype=torch.int32)}, "cache_seqlens: torch.int32 of shape"),
        ({"cache_seqlens": torch.tensor([-1], dtype=torch.int32)}, "cache_seqlens: from -1 to -1"),
        ({"cache_seqlens": torch.tensor([8], dtype=torch.int32)}, "cache_seqlens: from 8 to 8.*0 to 7"),
        ({"cache_seqlens": 8}, "cache_seqlens: got 8.*0 to 7"),
        ({"cache_seqlens": 1.5}, "cache_seqlens: got 1.5"),
        ({"softmax_scale": float("nan")}, "softmax_scale"),
        ({"v": torch.randn(1, 1, 3, 16)}, r"v: shape .*v_cache has"),
    ],
)
def test_nothing_is_written_to_a_cache_by_a_call_that_is_refused(options: dict[str, Any], words: str) -> None:
    q, cache = torch.randn(1, 1, 2, 16), torch.zeros(1, 8, 2, 16)
    new: dict[str, Any] = {"k": torch.randn(1, 1, 2, 16), "v": torch.randn(1, 1, 2, 16), "cache_seqlens": 1, **options}
    with pytest.raises((TypeError, ValueError), match=words):
        integration.flash_attn_with_kvcache(q, cache, cache, **new)
    assert not cache.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_seqlen_q": 2}, "max_seqlen_q: got 2, but sequence 1"),
        ({"cu_seqlens_q": torch.tensor([0, 6, 4], dtype=torch.int32)}, "cu_seqlens_q: decreases"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 40], dtype=torch.int32)}, "cu_seqlens_k: its last element is 40"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 9])}, "cu_seqlens_q: dtype int64"),
        ({"v": torch.randn(7, 4, 16)}, "k, v: lengths 11 and 7 differ"),
    ],
)
def test_packed_sequences_with_slopes_are_checked_as_those_without(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "q": torch.randn(9, 4, 16), "k": torch.randn(11, 4, 16), "v": torch.randn(11, 4, 16), "max_seqlen_q": 5,
        "cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32), "max_seqlen_k": 8,
        "cu_seqlens_k": torch.tensor([0, 3, 11], dtype=torch.int32), "causal": True, **change,
    }  # fmt: skip
    for slopes in (None, torch.rand(4)):
        with pytest.raises((TypeError, ValueError), match=words):
            integration.flash_attn_varlen_func(**given, alibi_slopes=slopes)


@pytest.mark.parametrize("packed", [False, True])
def test_autocast_does_not_round_slopes(packed: bool) -> None:
    """A bias of 2,000 rounded to bfloat16 is off by 4: lse was 30,000 times as wrong as without autocast."""
    torch.manual_seed(0)
    n = 600
    q, k, v = (torch.randn(1, n, 2, 16) for _ in range(3))
    slopes = torch.tensor([0.7, 0.35])

    def call() -> Any:
        if not packed:
            return integration.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)[:2]
        starts = torch.tensor([0, n], dtype=torch.int32)
        return integration.flash_attn_varlen_func(
            q[0], k[0], v[0], starts, starts, n, n, causal=True, alibi_slopes=slopes, return_attn_probs=True
        )[:2]

    q, k, v = (x.bfloat16() for x in (q, k, v))
    plain = call()
    q, k, v = (x.float() for x in (q, k, v))  # autocast casts them
    with torch.autocast("cpu", torch.bfloat16):
        found = call()
    assert found[0].dtype is torch.bfloat16
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (True, (4, 0)), (False, (-1, -1)), (False, (4, 2))])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_alibi_of_packed_sequences(
    per_sequence: bool, causal: bool, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence alone, gradients too; tokens of none at both ends, a sequence without queries, one without keys."""
    monkeypatch.setattr(alibi, "_ROWS", {torch.float32: 5})  # several parts
    torch.manual_seed(0)
    lengths = ((7, 9), (0, 4), (12, 12), (3, 0), (5, 2))  # of the last, without causal, dense calls take a score_mod
    starts_q, starts_k = ([2], [1])
    for m, n in lengths:
        starts_q.append(starts_q[-1] + m)
        starts_k.append(starts_k[-1] + n)
    inputs = [
        torch.randn(n, h, 16, requires_grad=True) for n, h in ((starts_q[-1] + 3, 4), *(((starts_k[-1] + 2), 2),) * 2)
    ]
    slopes = torch.rand(*([5, 4] if per_sequence else [4])).requires_grad_()
    inputs.append(slopes)
    q, k, v, _ = inputs
    found, lse, _ = integration.flash_attn_varlen_func(
        q, k, v, torch.tensor(starts_q, dtype=torch.int32), torch.tensor(starts_k, dtype=torch.int32), 12, 12,
        causal=causal, window_size=window, alibi_slopes=slopes, return_attn_probs=True,
    )  # fmt: skip
    nothing, empty = torch.zeros(1, dtype=torch.int32), torch.zeros(2, 4, 16)
    assert not integration.flash_attn_varlen_func(
        empty, empty, empty, nothing, nothing, 0, 0, causal=causal, alibi_slopes=torch.ones(4)
    ).any()
    outs, sums = [torch.zeros(2, 4, 16)], [torch.full((4, 2), -torch.inf)]
    for b, (m, n) in enumerate(lengths):
        q0, k0 = starts_q[b], starts_k[b]
        of_sequence = slopes[b] if per_sequence else slopes
        out, sum_ = integration.flash_attn_func(
            q[None, q0 : q0 + m], k[None, k0 : k0 + n], v[None, k0 : k0 + n], causal=causal, window_size=window,
            alibi_slopes=of_sequence, return_attn_probs=True,
        )[:2]  # fmt: skip
        outs.append(out[0])
        sums.append(sum_[0])
    expected = torch.cat([*outs, torch.zeros(3, 4, 16)])
    expected_lse = torch.cat([*sums, torch.full((4, 3), -torch.inf)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    weight = torch.linspace(-1, 1, found.numel()).view(found.shape)
    finite = expected_lse.isfinite()
    gradients = [
        torch.autograd.grad((o * weight).sum() + x[finite].sum(), inputs)
        for o, x in ((found, lse), (expected, expected_lse))
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi_of_packed_sequences_drops(causal: bool) -> None:
    """With v the identity out is the dropped P: of what stays twice that without dropout, in both directions."""
    torch.manual_seed(0)
    lengths, size = [6, 10], 16
    starts = torch.tensor([0, 6, 16], dtype=torch.int32)
    q, k = (torch.randn(size, 4, 16) for _ in "qk")
    v = torch.eye(size)[:, None].expand(size, 4, size).clone().requires_grad_()
    slopes = torch.rand(4)

    def call(p: float) -> Any:
        return integration.flash_attn_varlen_func(
            q, k, v, starts, starts, 10, 10, p, causal=causal, alibi_slopes=slopes
        )

    whole, out = call(0.0).detach(), call(0.5)
    out.sum().backward()
    dropped = out.detach()
    stays = dropped != 0
    seen = sum(n * (n + 1) // 2 if causal else n * n for n in lengths) * 4
    assert 0.3 * seen < int(stays.sum()) < 0.7 * seen
    torch.testing.assert_close(dropped[stays], 2 * whole[stays], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(v.grad[:, :, 0], dropped.sum(0).T, rtol=1e-5, atol=1e-5)


def test_alibi_of_more_queries_than_keys_compiles_whole() -> None:
    q, k, v = inputs(7, 3)
    slopes = torch.rand(4, requires_grad=True)

    def call(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return integration.flash_attn_func(q, k, v, alibi_slopes=slopes, softcap=2.0)

    torch._dynamo.reset()
    leaves = (q, k, v, slopes)
    out, expected = torch.compile(call, backend="aot_eager", fullgraph=True)(*leaves), call(*leaves)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    got, wanted = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, expected))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
