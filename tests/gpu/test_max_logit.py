"""The largest score of each head on the GPU, beside torch in float64: both families, every way to run."""

from __future__ import annotations

from typing import Any

import cases
import pytest
from harness import DEVICE, backend, families, forget_plans, torch

import nvrtc_attn.torch as na
from nvrtc_attn import api
from nvrtc_attn.heuristics import portable_forward
from nvrtc_attn.plans import plan

BASE = {"batch": 2, "rows": 300, "keys": 300, "heads": 4, "heads_kv": 2, "head_dim": 64, "dtype": "bfloat16"}
DECODE = {"batch": 2, "rows": 1, "keys": 8192, "heads": 8}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal_short": {"causal": True, "rows": 512, "keys": 512, "heads": 64, "heads_kv": 16},
    "three_consumers": {"rows": 2000, "keys": 2000, "heads": 32, "heads_kv": 32},
    "three_consumers_causal": {"rows": 3000, "keys": 3000, "heads": 32, "heads_kv": 8, "causal": True},
    "window": {"causal": True, "window_size": (40, 0)},
    "rows_without_keys": {"causal": True, "rows": 400, "keys": 90},
    "heads_without_keys": {"mask": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "bias": {"bias": True},
    "bias_dropout": {"bias": True, "dropout_p": 0.3},
    "dropout": {"dropout_p": 0.3, "causal": True},
    "sink": {"sink": True, "causal": True},
    "negative_scale": {"softmax_scale": -0.7},
    "negative_scores": {"shift": -40.0},
    "large_scores": {"softmax_scale": 400.0},
    "decode": DECODE,
    "decode_gqa": DECODE | {"rows": 4, "heads": 16, "sink": True},
    "few_queries": {"batch": 1, "rows": 16, "keys": 4096, "heads": 32, "heads_kv": 4},
    "few_queries_softcap": {"batch": 1, "rows": 48, "keys": 4096, "heads": 32, "heads_kv": 4, "softcap": 3.0},
    "one_key": {"keys": 1},
    "float16": {"dtype": "float16", "causal": True},
    "score_mod": {"score_mod": True},
}
DIMS = (64, 128, 256)


def tensors(fields: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    dtype = getattr(torch, fields["dtype"])
    shapes = (("rows", "heads"), ("keys", "heads_kv"), ("keys", "heads_kv"))
    q, k, v = (
        torch.randn(fields["batch"], fields[n], fields[h], fields["head_dim"], device=DEVICE).to(dtype)
        for n, h in shapes
    )
    if "shift" in fields:  # all scores negative: zeros of rows that do not exist must not win
        q[..., 0], k[..., 0] = 8.0, fields["shift"]
    return q, k, v


def scores(q: Any, k: Any, fields: dict[str, Any], options: dict[str, Any]) -> Any:
    """``[B, H, Mq, Mk]`` in float64, -inf where hidden."""
    scale = fields.get("softmax_scale", q.shape[3] ** -0.5)
    rows, keys = q.shape[1], k.shape[1]
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale
    if "score_mod" in options:
        s = s - 0.5 * torch.arange(keys, device=DEVICE)
    if softcap := fields.get("softcap"):
        s = softcap * (s / softcap).tanh()
    if "bias" in options:
        s = s + options["bias"].double()
    if "mask" in options:
        s = s.masked_fill(~options["mask"], -torch.inf)
    i, j = torch.arange(rows, device=DEVICE)[:, None] + keys - rows, torch.arange(keys, device=DEVICE)
    if fields.get("causal"):
        s = s.masked_fill(j > i, -torch.inf)
    if window := fields.get("window_size"):
        s = s.masked_fill(j < i - window[0], -torch.inf)
    return s


def options_of(fields: dict[str, Any]) -> dict[str, Any]:
    names = ("causal", "window_size", "softcap", "softmax_scale", "dropout_p")
    options = {name: fields[name] for name in names if name in fields}
    if fields.get("dropout_p"):
        options["rng"] = (3, 4)
    if fields.get("bias"):
        shape = (1, fields["heads"], fields["rows"], fields["keys"])
        options["bias"] = torch.randn(shape, device=DEVICE).to(getattr(torch, fields["dtype"]))
    if fields.get("sink"):
        options["sink"] = torch.full((fields["heads"],), 60.0, device=DEVICE)
    if fields.get("mask"):
        mask = torch.rand(2, fields["heads"], 1, fields["keys"], device=DEVICE) < 0.5
        mask[1, 2] = False
        options["mask"] = mask
    if fields.get("score_mod"):
        options["score_mod"] = lambda s, b, h, q, k: s - 0.5 * k
    return options


def largest(q: Any, k: Any, v: Any, options: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """Written over NaN, twice: what was there before must not matter. The kernels that ran have the feature."""
    forget_plans(kernels=True)
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, device=DEVICE, dtype=q.dtype)
    found = torch.full(shape, torch.nan, device=DEVICE)
    size = api.forward_workspace_bytes(q, k, v, max_logit=found, **options)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    for filled in (torch.nan, 1e30):
        found.fill_(filled)
        api.attention_forward(q, k, v, out, max_logit=found, workspace=workspace, **options)
    wanted = {config.kernel for config, _ in plan._kernels if config.features.max_logit}
    assert len(wanted) == 1, wanted
    plain = torch.empty_like(out)
    size = api.forward_workspace_bytes(q, k, v, **options)  # its tile may be another, and with it the number of splits
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    api.attention_forward(q, k, v, plain, workspace=workspace, **options)
    torch.testing.assert_close(out, plain, atol=2e-2, rtol=2e-2)
    return found


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, head_dim: int) -> None:
    fields = {**BASE, **CASES[name], "head_dim": head_dim}
    q, k, v = tensors(fields)
    options = options_of(fields)
    expected = scores(q, k, fields, options).amax((2, 3))
    tolerance = 3e-5 * (1 + float(expected[expected.isfinite()].abs().max()))
    for family in families(cases.make_case("max", dtype=fields["dtype"])):
        with backend(family):
            found = largest(q, k, v, options, tuple(expected.shape))
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float32(head_dim: int) -> None:
    for more in ({}, {"causal": True}, {"rows": 1, "keys": 5000}, {"softcap": 2.0, "bias": True}):
        fields = {**BASE, **more, "head_dim": head_dim, "dtype": "float32"}
        q, k, v = tensors(fields)
        options = options_of(fields)
        expected = scores(q, k, fields, options).amax((2, 3))
        found = largest(q, k, v, options, tuple(expected.shape))
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("most", [90, 1300])
def test_packed(head_dim: int, causal: bool, most: int) -> None:
    """Rows of other sequences share the tiles of short ones, and have larger scores."""
    torch.manual_seed(2)
    lengths = [most, 1, 0, most // 3, most // 2, 17]
    starts = torch.tensor([5, *lengths], device=DEVICE).cumsum(0).int()
    total = int(starts[-1]) + 9
    q, k, v = (torch.randn(1, total, h, head_dim, device=DEVICE).bfloat16() for h in (4, 2, 2))
    for b in range(len(lengths)):  # every sequence larger than the one before it
        q[:, starts[b] : starts[b + 1]] *= 0.5 + b
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": most, "max_seqlen_k": most}
    for family in families(cases.make_case("packed", dtype="bfloat16")):
        with backend(family):
            found = largest(q, k, v, {**packed, "causal": causal}, (len(lengths), 4))
        for b, n in enumerate(lengths):
            rows = slice(int(starts[b]), int(starts[b]) + n)
            expected = torch.full((4,), -torch.inf, device=DEVICE, dtype=torch.float64)
            if n:
                expected = scores(q[:, rows], k[:, rows], {"causal": causal}, {})[0].amax((1, 2))
            torch.testing.assert_close(found[b].double(), expected, atol=1e-4, rtol=1e-5)


def test_nan_shows_in_its_head_alone() -> None:
    for head_dim in DIMS:
        q, k, v = tensors({**BASE, "head_dim": head_dim})
        q[1, 100, 3] = torch.nan
        for family in families(cases.make_case("nan", dtype="bfloat16")):
            with backend(family):
                found = largest_of(q, k, v)
            wanted = torch.zeros(2, 4, dtype=torch.bool, device=DEVICE)
            wanted[1, 3] = True
            assert torch.equal(found.isnan(), wanted)


# What the scores are like (`shape_scores`) -> the call. Bounds of P tell whether a tile of keys may hold a larger
# one, so what counts is in which order they come.
SHAPED: dict[str, dict[str, Any]] = {
    "growing": {},
    "falling": {},
    "last_tile": {},
    "first_tile": {},
    "constant": {},
    "tiny": {},
    "spread": {},
    "negative": {},
    "growing_causal": {"causal": True},
    "growing_window": {"causal": True, "window_size": (300, 0)},
    "growing_softcap": {"softcap": 8.0},
    "growing_bias": {"bias": True},
    "growing_float16": {"dtype": "float16"},
    "growing_fast": {"causal": True},
    "growing_fast_float16": {"dtype": "float16"},
    "spread_masked": {"mask": True},
    "tiny_few_heads": {"heads": 8, "heads_kv": 1},
    "falling_heads": {},
}


def shape_scores(name: str, q: Any, k: Any) -> None:
    """Columns 0 and 1 of q are one; those of k are what is added to a score, so that the rest is noise around it."""
    keys = k.shape[1]
    places = torch.arange(keys, device=DEVICE)[None, :, None] / keys
    q[..., 0], k[..., 0] = 8.0, 0.0
    if name.startswith("growing"):
        k[..., 0] = places * (60.0 if "fast" in name else 6.0)
    elif name == "falling":
        k[..., 0] = 6.0 - 6.0 * places
    elif name == "last_tile":
        k[:, 3, :, 0] = 100.0  # the first keys are the last ones that a kernel comes to
    elif name == "first_tile":
        k[:, -2, :, 0] = 100.0
    elif name == "constant":
        q.zero_()
        k.zero_()
        q[..., 0], k[..., 0] = 2.0, 3.0
    elif name.startswith("tiny"):
        q[..., 1:] *= 1e-3
        k[..., 0] = 1.0
    elif name.startswith("spread"):
        q[..., 1:] *= 4.0
    elif name == "negative":
        k[..., 0] = -60.0
    elif name == "falling_heads":  # what one head has found must not be a bound of the next
        q *= 8.0 * 0.3 ** torch.arange(q.shape[0] * q.shape[2], device=DEVICE).reshape(q.shape[0], 1, q.shape[2], 1)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SHAPED)
def test_scores_of_every_kind(name: str, head_dim: int) -> None:
    """Rows enough for three consumers, and many tiles of keys."""
    fields = {**BASE, "rows": 2500, "keys": 2500, "heads": 16, "heads_kv": 4, **SHAPED[name], "head_dim": head_dim}
    q, k, v = tensors(fields)
    shape_scores(name, q, k)
    options = options_of(fields)
    expected = scores(q, k, fields, options).amax((2, 3))
    for family in families(cases.make_case("max", dtype=fields["dtype"])):
        with backend(family):
            found = largest_of(q, k, v, **options)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=3e-6)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_scores_of_every_kind(head_dim: int) -> None:
    torch.manual_seed(3)
    lengths = [1500, 0, 3, 700, 129, 64]
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1500, "max_seqlen_k": 1500}
    for name in ("growing", "last_tile", "spread", "tiny"):
        q, k, v = (torch.randn(1, sum(lengths), h, head_dim, device=DEVICE).bfloat16() for h in (8, 2, 2))
        for b, n in enumerate(lengths):
            rows = slice(int(starts[b]), int(starts[b]) + n)
            if n > 3:
                shape_scores(name, q[:, rows], k[:, rows])
            k[:, rows] *= 1 + b  # rows of the next sequence, in the same tile, have larger scores
        for causal in (False, True):
            for family in families(cases.make_case("packed", dtype="bfloat16")):
                with backend(family):
                    found = largest_of(q, k, v, causal=causal, **options)
                for b, n in enumerate(lengths):
                    rows = slice(int(starts[b]), int(starts[b]) + n)
                    expected = torch.full((8,), -torch.inf, device=DEVICE, dtype=torch.float64)
                    if n:
                        expected = scores(q[:, rows], k[:, rows], {"causal": causal}, {})[0].amax((1, 2))
                    torch.testing.assert_close(found[b].double(), expected, atol=1e-5, rtol=3e-6)


def test_rows_without_keys_beside_others() -> None:
    """A warp some rows of which see no key takes the maximum of every tile until they do."""
    fields = {**BASE, "rows": 900, "keys": 900, "heads": 8, "heads_kv": 8}
    for head_dim in (64, 128):
        q, k, v = tensors({**fields, "head_dim": head_dim})
        shape_scores("growing", q, k)
        mask = torch.ones(2, 1, 900, 900, dtype=torch.bool, device=DEVICE)
        mask[:, :, 5::7, :] = False
        mask[:, :, 3::11, 64:] = False
        expected = scores(q, k, fields, {"mask": mask}).amax((2, 3))
        for family in families(cases.make_case("rows", dtype="bfloat16")):
            with backend(family):
                found = largest_of(q, k, v, mask=mask)
            torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=3e-6)


def largest_of(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return na.attention(q, k, v, return_max_logit=True, **options)[-1]


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs clusters")
def test_splits_that_are_a_cluster(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {**BASE, "rows": rows, "keys": 4096, "heads": 8}
    q, k, v = tensors(fields)
    choose = portable_forward.choose_forward
    made = []

    def forced(problem: Any, **target: Any) -> Any:
        made.append(choose(problem, **target, num_splits=4, clustered=True))
        return made[-1]

    forget_plans(monkeypatch)
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "portable")
    monkeypatch.setattr(portable_forward, "choose_forward", forced)
    found = largest_of(q, k, v)
    assert made, "the forced plan was not asked for"
    assert all(spec.main.config.cluster == 4 and spec.main.config.features.max_logit for spec in made)
    torch.testing.assert_close(found.double(), scores(q, k, fields, {}).amax((2, 3)), atol=1e-4, rtol=1e-5)


def test_tiles_that_a_mask_leaves_out() -> None:
    """Words of tiles: a byte mask of documents."""
    fields = {**BASE, "batch": 1, "rows": 2048, "keys": 2048}
    q, k, v = tensors(fields)
    document = torch.arange(2048, device=DEVICE) // 300
    mask = (document[:, None] == document)[None, None]
    expected = scores(q, k, fields, {"mask": mask}).amax((2, 3))
    for family in families(cases.make_case("documents", dtype="bfloat16")):
        with backend(family):
            for options in ({"mask": mask}, {"mask_mod": lambda b, h, q, k: q // 300 == k // 300}):
                found = api.attention(q, k, v, return_max_logit=True, **options)[1]
                torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # of torch
def test_training_compiled_and_in_a_graph() -> None:
    fields = {**BASE, "rows": 512, "keys": 512}
    q, k, v = (x.requires_grad_() for x in tensors(fields))
    expected = scores(q.detach(), k.detach(), {"causal": True}, {}).amax((2, 3))

    def step(q: Any, k: Any, v: Any) -> Any:
        out, max_logit = na.attention(q, k, v, causal=True, return_max_logit=True)
        return out.float().square().sum(), max_logit

    plain = torch.autograd.grad(na.attention(q, k, v, causal=True).float().square().sum(), (q, k, v))
    for how in (step, torch.compile(step, fullgraph=True)):
        loss, max_logit = how(q, k, v)
        torch.testing.assert_close(max_logit.double(), expected, atol=1e-4, rtol=1e-5)
        for found, want in zip(torch.autograd.grad(loss, (q, k, v)), plain, strict=True):
            torch.testing.assert_close(found, want, atol=2e-2, rtol=2e-2)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(largest_of(q, k, v, causal=True).double(), expected, atol=1e-4, rtol=1e-5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = largest_of(q, k, v, causal=True)
        for factor in (1.0, 0.25, 3.0):  # smaller, too: every replay begins anew
            q.mul_(factor)
            graph.replay()
            again = scores(q, k, {"causal": True}, {}).amax((2, 3))
            torch.testing.assert_close(captured.double(), again, atol=1e-3, rtol=1e-5)
    empty = largest_of(q.detach()[:, :0], k.detach(), v.detach())
    assert torch.equal(empty, torch.full((2, 4), -torch.inf, device=DEVICE))


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    from nvrtc_attn import cupy as adapter

    q, k, v = (x.half() for x in tensors(BASE))
    expected = scores(q, k, {}, {}).amax((2, 3))
    arrays = [cupy.from_dlpack(x) for x in (q, k, v)]
    for _ in range(2):
        _, lse, max_logit = adapter.attention(*arrays, return_lse=True, return_max_logit=True)
        assert lse.shape == (2, 4, 300)
        torch.testing.assert_close(torch.from_dlpack(max_logit).double(), expected, atol=1e-4, rtol=1e-5)
