"""Scores that are huge, infinite or NaN, and NaN in keys that nobody sees, in both families."""

from __future__ import annotations

from typing import Any

import pytest
from harness import DEVICE, torch

import nvrtc_attn
from nvrtc_attn import api

BACKENDS = ("portable", "hopper")
HEAD_DIMS = (64, 128, 256)
# q = k constant; (65504^2 and 1e18^2) * 256 are finite in float32.
CONSTANTS = {"float16": (16.0, 200.0, 16000.0, 30000.0, 65504.0), "bfloat16": (3e4, 1e18)}
LARGEST_LSE = 2.0**22  # from which on a row has no gradient: docs/kernels.md
LSE_ERROR = 2.0**-18  # relative: up to 256 products, whose sum the tensor cores cut off to float32 16 at a time
NAN = float("nan")


@pytest.fixture(params=BACKENDS)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Hopper family needs compute capability 9.0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", request.param)
    return str(request.param)


def randn(*shape: int, dtype: Any, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def signs(*shape: int, seed: int) -> Any:
    return 2.0 * torch.randint(2, shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE) - 1.0


def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """out and lse, written over NaN; the workspace is NaN too."""
    out = torch.full((*q.shape[:3], v.shape[3]), NAN, device=DEVICE, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), NAN, device=DEVICE)
    size = api.forward_workspace_bytes(q, k, v, **options)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    nvrtc_attn.attention_forward(q, k, v, out, lse=lse, workspace=workspace, **options)
    return out, lse


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> dict[str, Any]:
    """dq, dk, dv and, with a bias, dbias, written over NaN."""
    grads = {name: torch.full_like(x, NAN) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    bias = options.get("bias")
    if bias is not None:
        grads["dbias"] = torch.full_like(bias, NAN)
    size = api.backward_workspace_bytes(q, k, v, dbias=bias is not None, **options)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    nvrtc_attn.attention_backward(
        dout, q, k, v, out, lse, grads["dq"], grads["dk"], grads["dv"], dbias=grads.get("dbias"),
        workspace=workspace, **options,
    )  # fmt: skip
    return grads


def exact(
    q: Any, k: Any, v: Any, *, causal: bool = False, softmax_scale: float | None = None, softcap: float = 0.0,
    bias: Any = None, mask: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """float64: out, lse and the probabilities, and what rounding P and out to the inputs' type makes of out."""
    group = q.shape[2] // k.shape[2]
    wide_q = q.double().transpose(1, 2)
    wide_k, wide_v = (x.double().repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
    s = wide_q @ wide_k.mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if causal:
        s = s.masked_fill(
            torch.ones(s.shape[-2:], dtype=torch.bool, device=DEVICE).triu(s.shape[3] - s.shape[2] + 1), -torch.inf
        )
    p = torch.softmax(s, -1)
    out = (p @ wide_v).transpose(1, 2)
    low = (p.to(q.dtype).double() @ wide_v).to(q.dtype).transpose(1, 2).double()
    return {"s": s, "p": p, "out": out, "lse": s.logsumexp(-1), "low": low}


def check_forward(q: Any, k: Any, v: Any, label: str = "", **options: Any) -> None:
    """Finite, and within A10 of float64 (P rounded to the inputs' type is the yardstick)."""
    want = exact(q, k, v, **options)
    out, lse = forward(q, k, v, **options)
    bound = 2 * float((want["low"] - want["out"]).abs().max())
    rounding = float((want["out"].to(q.dtype).double() - want["out"]).abs().max())
    error = float((out.double() - want["out"]).abs().nan_to_num(torch.inf).max())
    assert error <= bound + max(rounding, 1e-5), f"{label}: out is off by {error}, allowed {bound}"
    torch.testing.assert_close(lse.double(), want["lse"], rtol=LSE_ERROR, atol=1e-5, msg=lambda m: f"{label}: {m}")


# ---------------------------------------------------------------------------------------------------------------------
# Huge scores, forward


@pytest.mark.reliability(27)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(CONSTANTS))
def test_constant_queries_and_keys(family: str, dtype: str, head_dim: int, causal: bool) -> None:
    """All scores of a row are one number, up to 2e37: out is the mean of v, of 700 keys in several tiles."""
    v = randn(2, 700, 2, head_dim, dtype=getattr(torch, dtype))
    for constant in CONSTANTS[dtype]:
        q = torch.full_like(v, constant)
        check_forward(q, q, v, f"{constant}", causal=causal)


@pytest.mark.parametrize(
    ("queries", "heads_kv", "keys"), [(1, 2, 5003), (6, 2, 5003), (40, 8, 3001)], ids=["one", "packed", "few"]
)
@pytest.mark.parametrize("dtype", list(CONSTANTS))
@pytest.mark.usefixtures("split_keys")
def test_constant_scores_of_split_keys(dtype: str, queries: int, heads_kv: int, keys: int) -> None:
    q = torch.empty(1, queries, 8, 128, device=DEVICE, dtype=getattr(torch, dtype))
    k = torch.empty(1, keys, heads_kv, 128, device=DEVICE, dtype=q.dtype)
    v = randn(*k.shape, dtype=q.dtype)
    for constant in CONSTANTS[dtype]:
        check_forward(q.fill_(constant), k.fill_(constant), v, f"{constant}")


def powers(dtype: Any, exponent: int, batch: int, rows: int, heads: int, head_dim: int, seed: int) -> Any:
    """Random signs times a power of two: every product of two such tensors is exact in float32."""
    return (signs(batch, rows, heads, head_dim, seed=seed) * 2.0**exponent).to(dtype)


SIGNED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "negative_scale": {"softmax_scale": -0.25},
    "large_scale": {"softmax_scale": 64.0},
    "softcap": {"softcap": 30.0},
    "bias": {"bias": True},
}


@pytest.mark.reliability(27)
@pytest.mark.parametrize("name", list(SIGNED))
def test_random_signs(family: str, name: str) -> None:
    """Scores of both signs, from 2^7 to 2^31 in steps: as in float64, where all of them are exact too."""
    for dtype, exponents in ((torch.float16, (2, 5, 10, 15)), (torch.bfloat16, (8, 40))):
        for exponent in exponents:
            q, k = (powers(dtype, exponent, 1, 500, 2, 128, seed) for seed in (1, 2))
            options = dict(SIGNED[name])
            if "bias" in options:  # float32 holds every sum
                size = 2.0 ** (min(2 * exponent, 15) if dtype == torch.float16 else 2 * exponent)
                options |= {"bias": (signs(1, 2, 500, 500, seed=3) * size).to(dtype), "softmax_scale": 2.0**-4}
            check_forward(q, k, randn(1, 500, 2, 128, dtype=dtype), f"{dtype} 2^{exponent}", **options)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_some_tiles_are_huge(family: str, head_dim: int) -> None:
    """The maximum of a row moves between scores of 2^-4 and of 2^27, in every order of key tiles."""
    keys = 1024
    base = powers(torch.float16, 0, 1, keys, 1, head_dim, 4)
    v = randn(1, keys, 1, head_dim, dtype=torch.float16)
    for order in ((0, 12, 3, 14), (14, 0, 12, 3), (3, 3, 3, 14), (14, 3, 3, 3), (12, 12, 0, 0)):
        k = base * torch.repeat_interleave(2.0 ** torch.tensor(order, device=DEVICE), keys // 4)[None, :, None, None]
        q = powers(torch.float16, 10, 1, 300, 1, head_dim, 5)
        q[:, ::3] /= 2.0**14  # rows whose scores are small but for the largest keys
        q[:, 128:160] = 0
        check_forward(q, k.half(), v, str(order))
        check_forward(q, k.half(), v, f"{order} causal", causal=True)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_maxima_of_minus_zero(family: str, head_dim: int) -> None:
    """Rows whose scores are all -0.0 leave the others of their warp as they are."""
    q, k, v = (randn(1, 300, 2, head_dim, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    q[:, torch.arange(300, device=DEVICE) % 16 < 8] = 0.0
    check_forward(q, -k.abs(), v)
    check_forward(q, -k.abs(), v, causal=True)


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.usefixtures("split_keys")
def test_huge_scores_in_some_splits(queries: int) -> None:
    q = powers(torch.bfloat16, 20, 1, queries, 8, 128, 6)
    k = powers(torch.bfloat16, 0, 1, 4096, 2, 128, 7)
    v = randn(*k.shape, dtype=k.dtype)
    for first, last in ((0, 4096), (0, 700), (1500, 1501), (3000, 4096)):
        grown = k.clone()
        grown[:, first:last] *= 2.0**20
        check_forward(q, grown, v, f"{first}:{last}")


@pytest.mark.parametrize("magnitude", [1e3, 3e4, 1e6])
def test_splits_are_weighed_by_exact_maxima(magnitude: float) -> None:
    """Scores near 1e6 whose differences are below the unit of an LSE: every split counts as much as it should."""
    q = torch.zeros(1, 1, 1, 64, device=DEVICE)
    q[..., 0], q[..., 1] = magnitude, 1.0
    k = torch.zeros(1, 8192, 1, 64, device=DEVICE)
    k[..., 0] = 1.0
    k[..., 1] = torch.arange(8192, device=DEVICE)[None, :, None] // 512 / 16.0
    v = randn(1, 8192, 1, 64, dtype=torch.float32)
    assert api.forward_workspace_bytes(q, k, v) > 0, "the keys are to be split"
    want = exact(q, k, v, softmax_scale=0.7)
    out, lse = forward(q, k, v, softmax_scale=0.7)
    torch.testing.assert_close(out.double(), want["out"], atol=1e-4, rtol=0)
    torch.testing.assert_close(lse.double(), want["lse"], rtol=LSE_ERROR, atol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Huge scores, backward


def exact_backward(dout: Any, q: Any, k: Any, v: Any, **options: Any) -> dict[str, Any]:
    """Gradients in float64, and the same with every P replaced by the largest error that its LSE allows."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    want = exact(*leaves, **options)
    grads = torch.autograd.grad(want["out"], leaves, dout.double())
    return {**dict(zip(("dq", "dk", "dv"), grads, strict=True)), "p": want["p"].detach(), "lse": want["lse"].detach()}


@pytest.mark.reliability(27)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", list(CONSTANTS))
def test_gradients_at_constant_scores(family: str, dtype: str, head_dim: int, causal: bool) -> None:
    """dv as exact as the LSE is, and zero gradients from rows whose LSE float32 cannot hold; never NaN."""
    v, dout = (randn(1, 300, 2, head_dim, dtype=getattr(torch, dtype), seed=seed) for seed in (0, 1))
    for constant in CONSTANTS[dtype]:
        q = torch.full_like(v, constant)
        out, lse = forward(q, q, v, causal=causal)
        grads = backward(dout, q, q, v, out, lse, causal=causal)
        if float(lse.abs().min()) >= LARGEST_LSE:
            for name, grad in grads.items():
                assert not grad.any(), f"{constant}: {name} of rows without a usable LSE is to be zero"
            continue
        want = exact_backward(dout, q, q, v, causal=causal)
        relative = float(lse.abs().max()) * 2.0**-22
        share = want["p"].mT @ dout.double().abs().transpose(1, 2)  # what the error of P is a part of
        limit = (relative + 2.0 ** (-8 if dtype == "float16" else -6)) * share.transpose(1, 2) + 1e-5
        assert bool(((grads["dv"].double() - want["dv"]).abs() <= limit).all()), f"{constant}: dv"
        for name in ("dq", "dk"):
            assert bool(torch.isfinite(grads[name]).all()), f"{constant}: {name}"


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_with_and_without_a_usable_lse(family: str, head_dim: int, deterministic: bool) -> None:
    """Rows beyond the limit take no part; the others are what they are without those."""
    q, k = (powers(torch.bfloat16, 0, 1, 384, 2, head_dim, seed) for seed in (8, 9))
    v, dout = (randn(1, 384, 2, head_dim, dtype=torch.bfloat16, seed=seed) for seed in (10, 11))
    q = q / 4
    huge = torch.zeros(384, dtype=torch.bool, device=DEVICE)
    huge[5::7] = huge[128:192] = True
    grown = torch.where(huge[None, :, None, None], q * 2.0**60, q)
    out, lse = forward(grown, k, v)
    assert bool((lse.abs() >= LARGEST_LSE).all(1)[:, huge].all())
    grads = backward(dout, grown, k, v, out, lse, deterministic=deterministic)
    assert not grads["dq"][:, huge].any()
    small_out, small_lse = forward(q, k, v)
    small_dout = dout.masked_fill(huge[None, :, None, None], 0.0)
    small = backward(small_dout, q, k, v, small_out, small_lse, deterministic=deterministic)
    # A warp with a large row subtracts maxima in another order: out, and delta with it, differ by a bfloat16 rounding.
    torch.testing.assert_close(grads["dq"][:, ~huge], small["dq"][:, ~huge], rtol=2e-2, atol=1e-3)
    for name in ("dk", "dv"):
        torch.testing.assert_close(grads[name], small[name], rtol=2e-2, atol=2e-3)


def test_gradients_with_a_huge_bias(family: str) -> None:
    """A row whose bias is finfo.min everywhere is an ordinary softmax forward, and has no gradient."""
    q, k, v, dout = (randn(1, 256, 2, 64, dtype=torch.bfloat16, seed=seed) for seed in range(4))
    bias = randn(1, 2, 256, 256, dtype=torch.bfloat16, seed=4)
    bias[:, :, 7] = torch.finfo(torch.bfloat16).min
    bias[:, :, 100:, 50] = torch.finfo(torch.bfloat16).min
    out, lse = forward(q, k, v, bias=bias)
    torch.testing.assert_close(out[:, 7].double(), v.double().mean(1), atol=5e-3, rtol=1e-2)
    grads = backward(dout, q, k, v, out, lse, bias=bias)
    assert not grads["dq"][:, 7].any()
    assert not grads["dbias"][:, :, 7].any()
    assert not grads["dbias"][:, :, 100:, 50].any()
    assert bool(grads["dbias"][:, :, 8].any())
    for name, grad in grads.items():
        assert bool(torch.isfinite(grad).all()), name


# ---------------------------------------------------------------------------------------------------------------------
# NaN


def assert_nan_rows(out: Any, lse: Any, rows: Any, clean_out: Any, clean_lse: Any) -> None:
    """NaN in `rows` ([B, H, Mq]) of out and lse, the others as they were up to rounding: when a warp moves its maxima
    depends on all of its rows."""
    assert bool(lse[rows].isnan().all()), "lse of a row with NaN scores"
    assert bool(out.transpose(1, 2)[rows].isnan().all()), "out of a row with NaN scores"
    torch.testing.assert_close(lse[~rows], clean_lse[~rows], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.transpose(1, 2)[~rows], clean_out.transpose(1, 2)[~rows], atol=2e-3, rtol=1e-2)


@pytest.mark.reliability(26)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_nan(family: str, head_dim: int, causal: bool) -> None:
    q, k, v = (randn(2, 400, 2, head_dim, dtype=torch.float16, seed=seed) for seed in range(3))
    clean = forward(q, k, v, causal=causal)
    bad = q.clone()
    bad[1, 37, 0] = NAN  # all scores of a row
    rows = torch.zeros(2, 2, 400, dtype=torch.bool, device=DEVICE)
    rows[1, 0, 37] = True
    out, lse = forward(bad, k, v, causal=causal)
    assert_nan_rows(out, lse, rows, *clean)
    bad = k.clone()
    bad[0, 200, 1, 5] = NAN  # one score of every row that sees the key
    rows[:] = False
    rows[0, 1, 200 if causal else 0 :] = True
    assert_nan_rows(*forward(q, bad, v, causal=causal), rows, *clean)
    grads = backward(torch.ones_like(q), q, bad, v, *forward(q, bad, v, causal=causal), causal=causal)
    assert bool(grads["dq"].transpose(1, 2)[rows].isnan().all())


@pytest.mark.reliability(26)
@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.usefixtures("split_keys")
def test_nan_in_one_split(queries: int) -> None:
    q = randn(1, queries, 8, 128, dtype=torch.bfloat16)
    k, v = (randn(1, 5003, 2, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    clean = forward(q, k, v)
    k[0, 4000, 1] = NAN
    rows = torch.zeros(1, 8, queries, dtype=torch.bool, device=DEVICE)
    rows[:, 4:] = True
    assert_nan_rows(*forward(q, k, v), rows, *clean)
    k[:, :, 1] = NAN  # no split has a maximum
    assert_nan_rows(*forward(q, k, v), rows, *clean)


@pytest.mark.reliability(26)
@pytest.mark.parametrize("how", ["padding", "mask", "causal", "window"])
def test_nan_in_k_of_hidden_keys(family: str, how: str) -> None:
    """A key that no query of a row block sees leaves out and lse as they are."""
    q, k, v = (randn(2, 300, 2, 64, dtype=torch.float16, seed=seed) for seed in range(3))
    options: dict[str, Any] = {"causal": {"causal": True}, "window": {"window_size": (40, 3)}}.get(how, {})
    hidden = torch.zeros(300, dtype=torch.bool, device=DEVICE)
    hidden[150:200] = True
    if how in ("padding", "mask"):
        options["mask"] = ~hidden[None, None, None, :]
        if how == "mask":
            options["mask"] = options["mask"].expand(2, 2, 300, 300).contiguous()
    clean = forward(q, k, v, **options)
    bad = k.clone()
    bad[:, hidden] = NAN
    out, lse = forward(q, bad, v, **options)
    sees = {"causal": slice(0, 150), "window": slice(0, 147)}.get(how, slice(None))
    torch.testing.assert_close(out[:, sees], clean[0][:, sees], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse[..., sees], clean[1][..., sees], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Padding


PADDED: dict[str, dict[str, Any]] = {
    "d64": {"head_dim": 64},
    "d64_tiles": {"head_dim": 64, "keys": 400},  # rows of the mask that the copy engine can bring
    "d128_tiles_causal": {"head_dim": 128, "keys": 400, "causal": True},
    "d128_causal": {"head_dim": 128, "causal": True},
    "d256": {"head_dim": 256},
    "d40_bias": {"head_dim": 40, "bias": True},
    "d192_causal": {"head_dim": 192, "causal": True},
    "d64_dropout": {"head_dim": 64, "dropout_p": 0.2},
    "d320": {"head_dim": 320},
    "d64_float32": {"head_dim": 64, "dtype": "float32"},
    "d36_unaligned": {"head_dim": 36, "dtype": "float32", "causal": True},
    "d64_deterministic": {"head_dim": 64, "deterministic": True},
    "d192_deterministic": {"head_dim": 192, "deterministic": True},
    "grouped": {"head_dim": 64, "heads": 6},
}


@pytest.mark.reliability(26)
@pytest.mark.parametrize("poison", [NAN, float("inf")])
@pytest.mark.parametrize("name", list(PADDED))
def test_padding_contributes_nothing(family: str, name: str, poison: float) -> None:
    """A mask [B, 1, 1, Mk]: NaN in k and v of the keys that it hides changes no output and no gradient."""
    fields = dict(PADDED[name])
    head_dim, heads, keys = fields.pop("head_dim"), fields.pop("heads", 2), fields.pop("keys", 390)
    dtype = getattr(torch, fields.pop("dtype", "float16"))
    if family == "hopper" and (dtype == torch.float32 or head_dim > 256):
        pytest.skip("the Hopper family has 16-bit types and head dims to 256")
    q, dout = (randn(2, 250, heads, head_dim, dtype=dtype, seed=seed) for seed in (0, 3))
    k, v = (randn(2, keys, 2, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    hidden = torch.zeros(2, keys, dtype=torch.bool, device=DEVICE)
    hidden[0, 300:] = hidden[1, 1:40] = hidden[1, 128:256] = hidden[1, -1] = True
    options: dict[str, Any] = {**fields, "mask": ~hidden[:, None, None, :], "rng": (1, 2)}
    if options.pop("bias", False):
        options["bias"] = randn(2, heads, 250, keys, dtype=dtype, seed=4)
    results = []
    for fill in (0.0, poison):
        shown = [x.masked_fill(hidden[:, :, None, None], fill) for x in (k, v)]
        forward_options = {key: value for key, value in options.items() if key != "deterministic"}
        out, lse = forward(q, *shown, **forward_options)
        results.append({"out": out, "lse": lse, **backward(dout, q, *shown, out, lse, **options)})
    clean, found = results
    for key in ("out", "lse"):
        assert torch.equal(found[key], clean[key]), key
    for key in ("dq", "dk", "dv", *(["dbias"] if "bias" in options else [])):
        # Additions to dq come in any order.
        torch.testing.assert_close(found[key], clean[key], rtol=1e-2, atol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
    for key in ("dk", "dv"):
        assert not found[key][hidden].any(), key


@pytest.mark.reliability(26)
@pytest.mark.parametrize("queries", [1, 6])
def test_padding_of_split_keys(queries: int) -> None:
    q = randn(2, queries, 8, 128, dtype=torch.bfloat16)
    k, v = (randn(2, 5003, 2, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    hidden = torch.zeros(2, 5003, dtype=torch.bool, device=DEVICE)
    hidden[0, 3000:] = hidden[1, :777] = True
    mask = ~hidden[:, None, None, :]
    clean = forward(q, k, v, mask=mask)
    k[hidden] = v[hidden] = NAN
    out, lse = forward(q, k, v, mask=mask)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])


@pytest.mark.reliability(26)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_tokens_that_are_not_in_use_contribute_nothing(family: str, head_dim: int) -> None:
    """k and v beyond seqused_k, and everything outside every sequence, hold NaN."""
    q, k, v, dout = (randn(1, 400, 2, head_dim, dtype=torch.bfloat16, seed=seed) for seed in range(4))
    starts = torch.tensor((0, 200, 350), dtype=torch.int32, device=DEVICE)
    seqused = torch.tensor((133, 150), dtype=torch.int32, device=DEVICE)
    options: dict[str, Any] = {
        "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 200, "max_seqlen_k": 200, "seqused_k": seqused,
    }  # fmt: skip
    unused, outside = (torch.ones(400, dtype=torch.bool, device=DEVICE) for _ in range(2))
    unused[:133] = unused[200:350] = outside[:350] = False
    results = []
    for fill in (0.0, NAN):
        q_shown, dout_shown = (x.masked_fill(outside[None, :, None, None], fill) for x in (q, dout))
        k_shown, v_shown = (x.masked_fill(unused[None, :, None, None], fill) for x in (k, v))
        out, lse = forward(q_shown, k_shown, v_shown, **options)
        grads = backward(dout_shown, q_shown, k_shown, v_shown, out, lse, **options)
        results.append({"out": out, "lse": lse[..., :350], **grads})
    for key, clean in results[0].items():
        torch.testing.assert_close(results[1][key], clean, rtol=1e-2, atol=1e-3, msg=lambda m, key=key: f"{key}: {m}")
    for key in ("dk", "dv"):
        assert not results[1][key][:, unused].any(), key
