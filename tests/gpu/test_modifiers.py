"""Modifiers on the GPU, forward and gradients, against the same functions on whole matrices in float64."""

from __future__ import annotations

from typing import Any

import modifiers
import numpy as np
import pytest
from harness import DEVICE, backend, forget_plans, torch
from modifiers import ModifierCase

import nvrtc_attn
from nvrtc_attn import api
from nvrtc_attn.cpu import reference
from nvrtc_attn.heuristics import tile_words
from nvrtc_attn.modifiers.evaluate import HostModifier
from nvrtc_attn.plans import plan

SIZES = ((2, 4, 200, 176), (1, 2, 65, 300))
RANDOM = 40
HOPPER_ONLY = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the Hopper kernels run on compute capability 9.0 alone",
)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 1e-4}


def all_cases() -> list[ModifierCase]:
    return [*modifiers.named_cases(), *(modifiers.random_case(1000 + seed) for seed in range(RANDOM))]


class Sizes(HostModifier):
    """Sums of the sizes of what goes to the gradients: their rounding errors are relative to those."""

    def add_gradients(self, values: Any, ds: Any, gradients: Any) -> None:
        for node, derivative in self._slopes.items():
            if node.op == "load" and gradients[node.value] is not None:
                index, _ = values.indices(node)
                parts = np.abs(ds * values(derivative))
                np.add.at(gradients[node.value], tuple(np.broadcast_to(x, parts.shape) for x in index), parts)


def close(name: str, ours: Any, exact: Any, tolerance: float, size: float = 1.0) -> None:
    """Relative to the largest value: sums of many terms of both signs have errors of its size, or of one given."""
    ours = ours.detach().double().cpu().numpy()
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(ours), finite, err_msg=name)
    error = np.abs(ours[finite] - exact[finite]).max(initial=0.0)
    assert error <= tolerance * max(np.abs(exact[finite]).max(initial=0.0), size), (name, error)


def walked(kernel: str) -> bool:
    """Whether a kernel of this name that has a modifier has been loaded since `forget_plans`."""
    return any(c.kernel == kernel and c.features.modifier for c, _ in plan._kernels)


def named(name: str) -> ModifierCase:
    return next(x for x in modifiers.named_cases() if x.name == name)


def check(
    case: ModifierCase,
    sizes: tuple[int, int, int, int],
    dtype: str,
    head_dim: int,
    operands: dict[str, Any] | None = None,
    train: bool = True,
    **options: Any,
) -> None:
    """``operands``: further inputs, as NumPy arrays. ``train``: ask for the gradients of captured arrays."""
    b, h, m, n = sizes
    operands = operands or {}
    given = {name: torch.from_numpy(x).to(DEVICE) for name, x in operands.items()}
    rng = np.random.default_rng(0)
    arrays = case.arrays(sizes, rng)
    shapes = ((b, m, h, head_dim), (b, n, h // 2, head_dim), (b, n, h // 2, head_dim), (b, m, h, head_dim))
    kind = getattr(torch, dtype)
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(x).astype(np.float32)).to(DEVICE, kind) for x in shapes)
    on_gpu = {name: torch.from_numpy(x).to(DEVICE) for name, x in arrays.items()}
    modifier = nvrtc_attn.trace(*case.make(on_gpu))
    on_host = nvrtc_attn.trace(*case.make(arrays))
    assert on_host.program == modifier.program
    out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True, **given, **options)

    doubles = [x.double().cpu().numpy() for x in (q, k, v, dout)]
    wide = HostModifier(on_host, [x.astype(np.float64) if x.dtype == np.float32 else x for x in on_host.captures])
    plain = {name: x for name, x in options.items() if name not in ("deterministic", "rng")} | operands
    if "rng" in options:
        plain["seed"], plain["offset"] = options["rng"]
    exact = reference.attention_forward(*doubles[:3], modifier=wide, **plain)
    tolerance = TOLERANCE[dtype]
    close("lse", lse, exact[1], tolerance)
    close("out", out, exact[0], tolerance)

    trained = modifier.differentiable if train else ()
    sums = [np.zeros(x.shape) if i in trained else None for i, x in enumerate(modifier.captures)]
    expected = reference.attention_backward(
        doubles[3], *doubles[:3], *exact, modifier=wide, capture_grads=sums, **plain
    )
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    daux = [
        torch.full(tuple(x.shape), float("nan"), device=DEVICE) if i in trained else None
        for i, x in enumerate(modifier.captures)
    ]
    further = {} if "sink" not in given else {"dsink": torch.full_like(given["sink"], float("nan"))}
    size = api.backward_workspace_bytes(q, k, v, score_mod=modifier, daux=daux, dsink=bool(further), **given, **options)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    nvrtc_attn.attention_backward(
        dout, q, k, v, out, lse, *gradients, score_mod=modifier, daux=daux, workspace=workspace, **given, **further,
        **options,
    )  # fmt: skip
    for name, ours, theirs in zip(("dq", "dk", "dv"), gradients, expected[:3], strict=True):
        close(name, ours, theirs, 4 * tolerance)
    if trained:
        sizes_of = [None if x is None else np.zeros_like(x) for x in sums]
        absolute = Sizes(on_host, wide.captures)
        reference.attention_backward(
            doubles[3], *doubles[:3], *exact, modifier=absolute, capture_grads=sizes_of, **plain
        )
        for i, (ours, theirs, size) in enumerate(zip(daux, sums, sizes_of, strict=True)):
            if ours is not None:
                close(f"daux[{i}]", ours, theirs, 4 * tolerance, max(1.0, size.max(initial=0.0)))


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name.split(":")[0])
def test_modifiers(case: ModifierCase) -> None:
    check(case, SIZES[0], "float16", 64)


@pytest.mark.parametrize("name", [case.name for case in modifiers.named_cases()])
def test_the_portable_kernels_alone(name: str) -> None:
    with backend("portable"):
        check(named(name), SIZES[0], "float16", 64)


@pytest.mark.parametrize("name", ["alibi", "documents"])
def test_the_portable_kernels_with_a_sink(name: str) -> None:
    """What the modifier captured lies behind the sink in the params."""
    with backend("portable"):
        check(named(name), SIZES[0], "float16", 64, {"sink": np.linspace(-1, 2, 4).astype(np.float32)})


HOPPER = {
    "causal": {"causal": True},
    "window": {"window_size": (60, 30)},
    "top_left": {"causal": "top_left"},
    "dropout": {"dropout_p": 0.2, "rng": (3, 5)},
    "scale": {"softmax_scale": -0.2},
}


@HOPPER_ONLY
@pytest.mark.parametrize("option", HOPPER)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["alibi", "prefix", "both"])
def test_hopper(name: str, head_dim: int, option: str) -> None:
    """Several key tiles, the last one partly filled, and rows of which nothing is left."""
    forget_plans(kernels=True)
    with backend("hopper"):
        check(named(name), (1, 4, 333, 450), "bfloat16", head_dim, **HOPPER[option])
    alone = option != "dropout" and name != "both"  # what "both" adds of a key is taken as a bias
    assert walked("forward_hopper") == (head_dim <= 128 or alone)
    assert walked("backward_hopper") == (head_dim <= 64 or (head_dim <= 128 and alone))


@HOPPER_ONLY
@pytest.mark.parametrize("name", ["alibi", "both"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["bias", "float32 bias", "bias of odd rows", "mask", "padding", "sink", "seqused_k"])
def test_hopper_beside_other_operands(name: str, head_dim: int, kind: str) -> None:
    """Bias and mask come as tiles where rows are whole vectors, else every thread reads its own."""
    rng = np.random.default_rng(1)
    sizes = (2, 4, 200, 301 if kind == "bias of odd rows" else 304)
    b, h, m, n = sizes
    operands: dict[str, Any] = {}
    if "bias" in kind:
        operands["bias"] = rng.standard_normal((1, h, m, n)).astype(np.float32 if "32" in kind else np.float16)
    elif kind == "mask":
        operands["mask"] = rng.random((b, 1, m, n)) < 0.8
    elif kind == "padding":
        operands["mask"] = np.arange(n) < np.array([n, 177])[:, None, None, None]
    elif kind == "sink":
        operands["sink"] = rng.standard_normal(h).astype(np.float32)
    else:
        operands["seqused_k"] = np.array([n, 130], np.int32)
    forget_plans(kernels=True)
    with backend("hopper"):
        check(named(name), sizes, "float16", head_dim, operands)
    assert walked("forward_hopper")
    alone = kind in ("sink", "seqused_k") and name != "both"  # what "both" adds of a key is taken as a bias
    assert walked("backward_hopper") == (head_dim == 64 or alone)


@HOPPER_ONLY
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["alibi", "head scale", "relative bias", "documents", "softcap and alibi"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_backward_alone(name: str, head_dim: int, deterministic: bool) -> None:
    """Without a gradient of what is captured P is made before dP: of all queries, in groups of heads, and in order."""
    forget_plans(kernels=True)
    with backend("hopper"):
        check(named(name), (1, 4, 450, 333), "float16", head_dim, train=False, deterministic=deterministic)
    assert walked("backward_hopper")


@pytest.mark.parametrize("family", ["portable", "hopper"])
@pytest.mark.parametrize("name", ["alibi", "prefix", "rows and columns", "natten", "relative bias", "t5"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences(name: str, head_dim: int, family: str) -> None:
    """b is the sequence, and q and k are positions in it."""
    case, lengths, heads = named(name), ((0, 5), (200, 330), (129, 64), (65, 300), (1, 1)), 4
    rng = np.random.default_rng(0)
    longest = tuple(max(x) for x in zip(*lengths, strict=True))
    arrays = case.arrays((len(lengths), heads, *longest), rng)
    starts = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in zip(*lengths, strict=True)]
    shapes = [(1, int(x[-1]) + 7, heads, head_dim) for x in (starts[0], starts[1], starts[1])]
    q, k, v = (torch.from_numpy(rng.standard_normal(x).astype(np.float16)).to(DEVICE) for x in shapes)
    modifier = nvrtc_attn.trace(*case.make({x: torch.from_numpy(y).to(DEVICE) for x, y in arrays.items()}))
    host = nvrtc_attn.trace(*case.make(arrays))
    on_device = [torch.from_numpy(x).to(DEVICE) for x in starts]
    forget_plans(kernels=True)
    packed: dict[str, Any] = {
        "causal": True, "cu_seqlens_q": on_device[0], "cu_seqlens_k": on_device[1], "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1], "score_mod": modifier,
    }  # fmt: skip
    dout = torch.randn_like(q)
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    with backend(family):
        out, lse = nvrtc_attn.attention(q, k, v, return_lse=True, **packed)
        size = api.backward_workspace_bytes(q, k, v, **packed)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
        nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, workspace=workspace, **packed)
    doubles = [x.double().cpu().numpy() for x in (q, k, v)]
    wide = HostModifier(host, host.captures)
    starting: dict[str, Any] = {"causal": True, "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    exact = reference.attention_forward(*doubles, modifier=wide, **starting)
    close("lse", lse, exact[1], 2e-3)
    close("out", out, exact[0], 2e-3)
    expected = reference.attention_backward(dout.double().cpu().numpy(), *doubles, *exact, modifier=wide, **starting)
    for what, ours, theirs in zip(("dq", "dk", "dv"), gradients, expected[:3], strict=True):
        close(what, ours, theirs, 8e-3)
    if torch.cuda.get_device_capability() == (9, 0):
        assert walked("forward_hopper") == walked("backward_hopper") == (family == "hopper")


@HOPPER_ONLY
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scores_of_any_size(head_dim: int) -> None:
    """Rows of huge scores of both signs, of -inf alone and of finfo.min alone, from a modifier."""
    n, heads = 300, 2
    rows = torch.zeros(n, device=DEVICE)
    rows[10:40], rows[40:70], rows[70:100], rows[100:130] = 3e6, -3e6, -3.4e38, float("-inf")
    q, k, v = (torch.randn(1, n, heads, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    with backend("hopper"):
        out, lse = nvrtc_attn.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5 + rows[i], causal=True, return_lse=True
        )
    values = rows.double().cpu().numpy()
    exact = modifiers.textbook(
        *(x.double().cpu().numpy() for x in (q, k, v)), lambda s, b, h, i, j: (s * 0.5 + values[i]).astype(np.float32),
        lambda b, h, i, j: j <= i,
    )  # fmt: skip
    plain = np.r_[0:10, 130:n]
    close("out", out[:, plain], exact[0][:, plain], 1.6e-2)
    close("lse", lse[:, :, plain], exact[1][:, :, plain], 1.6e-2)
    # float32 keeps a quarter of a unit at 3e6, and nothing of a score at 3.4e38: those are averages.
    assert bool((out[:, 100:130] == 0).all())
    assert bool((lse[:, :, 100:130] == float("-inf")).all())
    means = torch.stack([v[0, : i + 1].double().mean(0) for i in range(70, 100)])
    torch.testing.assert_close(out[0, 70:100].double(), means, atol=2e-2, rtol=2e-2)
    assert bool(torch.isfinite(out[:, 10:70]).all())
    close("out of large ones", out[:, 10:70], exact[0][:, 10:70], 0.5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [40, 128, 256])
@pytest.mark.parametrize("name", ["alibi", "relative bias", "documents", "both", "softcap and alibi"])
def test_types_and_head_dims(name: str, head_dim: int, dtype: str) -> None:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    check(case, SIZES[1], dtype, head_dim)


@pytest.mark.parametrize("name", ["alibi", "documents", "both"])
def test_deterministic_and_causal(name: str) -> None:
    case = next(x for x in modifiers.named_cases() if x.name == name)
    check(case, SIZES[0], "float16", 64, deterministic=True)
    check(case, SIZES[0], "float16", 128, causal=True, window_size=(60, None))


@pytest.mark.parametrize("family", ["portable", "hopper"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["alibi", "temperature", "relative bias", "rows and columns", "array twice", "t5"])
def test_gradients_of_captures_are_reproducible_on_request(name: str, head_dim: int, family: str) -> None:
    """Arrays indexed by nothing, the head, the row, the key, their distance, a table, and twice; and they are right."""
    forget_plans(kernels=True)
    case, sizes = named(name), (2, 4, 700, 600)
    with backend(family):
        check(case, sizes, "float16", head_dim, deterministic=True, causal=True)
        assert any(c.kernel == "captured_sum" for c, _ in plan._kernels)
        arrays = {x: torch.from_numpy(y).to(DEVICE) for x, y in case.arrays(sizes, np.random.default_rng(0)).items()}
        modifier = nvrtc_attn.trace(*case.make(arrays))
        shapes = (sizes[2], sizes[3], sizes[3], sizes[2])
        q, k, v, dout = (torch.randn(2, n, 4, head_dim, device=DEVICE, dtype=torch.float16) for n in shapes)
        out, lse = nvrtc_attn.attention(q, k, v, return_lse=True, score_mod=modifier)
        found = []
        for _ in range(20):
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            daux = [
                torch.empty(tuple(x.shape), device=DEVICE) if i in modifier.differentiable else None
                for i, x in enumerate(modifier.captures)
            ]
            options = {"score_mod": modifier, "deterministic": True}
            size = nvrtc_attn.backward_workspace_bytes(q, k, v, daux=daux, **options)
            workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_backward(
                dout, q, k, v, out, lse, *gradients, daux=daux, workspace=workspace, **options
            )
            found.append([*gradients, *(x for x in daux if x is not None)])
    assert all(torch.equal(x, y) for more in found[1:] for x, y in zip(found[0], more, strict=True))


@pytest.mark.parametrize("family", ["portable", "hopper"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_gradient_of_a_bias_that_decides_a_mask_too(deterministic: bool, family: str) -> None:
    """It is that of the bias: no sum of what is left of the modifier is written over it."""

    def make(arrays: dict[str, Any]) -> tuple[Any, Any]:
        table = arrays["table"]

        def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
            return table[h, q, k] > -1.0

        return lambda s, b, h, q, k: s + table[h, q, k], mask_mod

    def arrays(sizes: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Any]:
        return {"table": rng.standard_normal(sizes[1:]).astype(np.float32)}

    with backend(family):
        check(ModifierCase("bias and mask", make, arrays), (1, 2, 70, 90), "float16", 64, deterministic=deterministic)


def distance_cases() -> dict[str, ModifierCase]:
    """What the distance of query and key decides: tables of it, one element for all, and more than the table."""

    def arrays(sizes: tuple[int, int, int, int], rng: np.random.Generator) -> dict[str, Any]:
        table, rows = rng.standard_normal((81, sizes[1])), rng.standard_normal(sizes[2])
        return {"table": table.astype(np.float32), "rows": rows.astype(np.float32)}

    score = {
        "clipped": lambda a: lambda s, b, h, q, k: s + a["table"][np.minimum(np.maximum(k - q, -40), 40) + 40, h],
        "by order": lambda a: lambda s, b, h, q, k: s + a["table"][np.where(k > q, 40, 0) + abs(q - k) % 40, h],
        "factor": lambda a: lambda s, b, h, q, k: s * np.tanh(a["table"][abs(q - k) % 81, h]) + 0.01 * (k - q),
        "a row beside": lambda a: lambda s, b, h, q, k: s + a["table"][(q - k) % 81, h] * a["rows"][q],
        "one element": lambda a: lambda s, b, h, q, k: s + a["table"][abs(q - k) // 4096, h],
    }

    def case(name: str, function: Any) -> ModifierCase:
        return ModifierCase(name, lambda a: (function(a), None), arrays, ("table",))

    return {name: case(name, function) for name, function in score.items()}


@HOPPER_ONLY
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["relative bias", "t5", *distance_cases()])
def test_hopper_by_distance(name: str, head_dim: int, deterministic: bool) -> None:
    """Tiles with a rest, grouped heads, both directions of the difference of lengths, with a band and without."""
    case = distance_cases().get(name) or named(name)
    forget_plans(kernels=True)
    with backend("hopper"):
        check(case, (2, 4, 333, 450), "bfloat16", head_dim, deterministic=deterministic)
        check(case, (1, 4, 450, 333), "float16", head_dim, deterministic=deterministic, causal=True)
    found = [c for c, _ in plan._kernels if c.kernel in ("forward_hopper", "backward_hopper") and c.features.modifier]
    assert {c.kernel for c in found} == {"forward_hopper", "backward_hopper"}
    assert all("struct Diagonal {" in c.features.modifier for c in found)


@HOPPER_ONLY
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(1000, 1500), (1500, 70), (70, 3000)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_products_begin_with_what_distances_add(
    head_dim: int, sizes: tuple[int, int], causal: bool, largest: bool
) -> None:
    """Query tiles with many key tiles, with one, and with a rest; values of any size, which must not overflow."""
    m, n = sizes
    heads = 3
    q, k, v = (torch.randn(1, x, heads, head_dim, device=DEVICE, dtype=torch.bfloat16) for x in (m, n, n))
    table = 3 * torch.randn(heads, m + n, device=DEVICE)
    table[0, ::3] = torch.finfo(torch.float32).min
    table[1, 1::7] = float("-inf")
    table[2, ::5] *= 1000
    forget_plans(kernels=True)
    with backend("hopper"):
        out, *of_rows = nvrtc_attn.attention(
            q, k, v, causal=causal, score_mod=lambda s, b, h, i, j: s + table[h, i - j + n], return_max_logit=largest
        )
    assert any(getattr(config, "begins_products", False) for config, _ in plan._kernels)
    i, j = torch.arange(m, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) * head_dim**-0.5 + table[:, i - j + n].double()
    if causal:
        scores = scores.masked_fill(j > i + n - m, float("-inf"))
    exact = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1).nan_to_num(0.0), v.double())
    # A row of finfo.min alone is an average in float32, where these swallow what products add.
    plain = ((scores > -1e30) | (scores == float("-inf"))).any(-1).transpose(1, 2)[..., None]
    close("out", torch.where(plain, out, 0.0), torch.where(plain, exact, 0.0).cpu().numpy(), 1.6e-2)
    assert bool(torch.isfinite(out).all())
    if largest:
        close("max_logit", of_rows[0], scores.amax((2, 3)).cpu().numpy(), 1.6e-2)


@HOPPER_ONLY
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("m", "n", "causal"), [(500, 700, True), (333, 450, False), (700, 100, False)])
def test_gradients_of_products_that_begin_with_what_distances_add(m: int, n: int, causal: bool, trained: bool) -> None:
    """Query tiles that go on from the one before, another head's first one, one key tile; values of any size."""
    heads = 4
    shapes = (m, heads), (n, 2), (n, 2)
    q, k, v = (torch.randn(2, x, h, 64, device=DEVICE, dtype=torch.float16, requires_grad=True) for x, h in shapes)
    table = 3 * torch.randn(heads, m + n, device=DEVICE)
    table[0, ::3] = torch.finfo(torch.float32).min
    table[1, 1::7] = float("-inf")
    table[2, ::5] *= 30
    asked = [q, k, v, *([table.requires_grad_()] if trained else [])]
    dout = torch.randn(2, m, heads, 64, device=DEVICE, dtype=torch.float16)
    forget_plans(kernels=True)
    with backend("hopper"):
        out = nvrtc_attn.torch.attention(
            q, k, v, causal=causal, score_mod=lambda s, b, h, i, j: s + table[h, i - j + n - 1]
        )
        found = torch.autograd.grad(out, asked, dout)
    (config,) = (c for c, _ in plan._kernels if c.kernel == "backward_hopper")
    assert config.begins_products
    i, j = torch.arange(m, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
    exact_q, exact_k, exact_v = (x.double() for x in (q, k, v))
    k_of, v_of = (x.repeat_interleave(heads // 2, 2) for x in (exact_k, exact_v))
    scores = torch.einsum("bmhd,bnhd->bhmn", exact_q, k_of) * 64**-0.5 + table[:, i - j + n - 1].double()
    if causal:
        scores = scores.masked_fill(j > i + n - m, float("-inf"))
    exact_out = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v_of)
    exact = torch.autograd.grad(exact_out, asked, dout.double())
    for name, x, y in zip(("dq", "dk", "dv", "dtable"), found, exact, strict=False):
        close(name, x, y.cpu().numpy(), 4e-3)


@HOPPER_ONLY
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["relative bias", "t5"])
def test_sums_along_diagonals_beside_empty_tiles(
    name: str, head_dim: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A diagonal goes on in the next query tile, but not behind one that has no products, nor in another head."""
    monkeypatch.setattr(tile_words, "MIN_FLOPS", 0)
    monkeypatch.setattr(tile_words, "MIN_KEY_TILES", 1)
    of_scores = named(name)

    def make(arrays: Any) -> Any:
        return of_scores.make(arrays)[0], lambda b, h, q, k: abs(abs(q - k) - 160) > 110

    case = ModifierCase("with gaps", make, of_scores.arrays, of_scores.trained)
    forget_plans(monkeypatch, kernels=True)
    with backend("hopper"):
        check(case, (1, 4, 450, 400), "float16", head_dim, deterministic=deterministic)
    (config,) = (c for c, _ in plan._kernels if c.kernel == "backward_hopper")
    assert config.features.tile_words


@HOPPER_ONLY
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hopper_by_distance_is_what_it_is_by_score(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN in the same places where an element does not exist, and the same numbers elsewhere."""
    from nvrtc_attn.heuristics import common

    def added(x: Any) -> Any:
        return lambda s, b, h, i, j: s + x[h, i - j + 150]  # which queries from 300 on have not for all keys

    table = torch.randn(2, 300, device=DEVICE)
    for dtype in (torch.float32, torch.float16):
        values = table.to(dtype)
        q, k, v, dout = (
            torch.randn(1, n, 2, head_dim, device=DEVICE, dtype=torch.bfloat16) for n in (500, 260, 260, 500)
        )
        modifier = nvrtc_attn.trace(added(values))
        found = []
        for by_distance in (True, False):
            monkeypatch.setattr(common, "COMPUTES_BY_DISTANCE", by_distance)
            forget_plans(kernels=True)
            with backend("hopper"):
                out, lse = nvrtc_attn.attention(q, k, v, score_mod=modifier, return_lse=True)
                gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
                daux = [torch.full(tuple(values.shape), float("nan"), device=DEVICE)]
                options = {"score_mod": modifier, "deterministic": True}
                size = nvrtc_attn.backward_workspace_bytes(q, k, v, daux=daux, **options)
                workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
                nvrtc_attn.attention_backward(
                    dout, q, k, v, out, lse, *gradients, daux=daux, workspace=workspace, **options
                )
            found.append([out, lse, *gradients])
        assert not bool(torch.isfinite(found[0][0]).all())
        assert bool(torch.isfinite(found[0][0]).any())
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1.6e-2, atol=1e-2, equal_nan=True)


def test_decoding_splits_keys() -> None:
    case = next(x for x in modifiers.named_cases() if x.name == "alibi")
    check(case, (1, 2, 1, 4096), "float16", 128)


def test_another_number_array_or_length_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added of a key is a bias, whose rows of 16 aligned bytes are read by another kernel than others are."""

    def call(slope: float, n: int) -> None:
        table = torch.randn(4, n, device=DEVICE)
        q, k, v = (torch.randn(1, n, 4, 64, device=DEVICE, dtype=torch.float16) for _ in range(3))
        out = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.sin(s) * slope + table[h, j])
        exact, _ = modifiers.textbook(
            *(x.double().cpu().numpy() for x in (q, k, v)),
            lambda s, b, h, i, j: np.sin(s) * slope + table.double().cpu().numpy()[h, j], None,
        )  # fmt: skip
        close("out", out, exact, 2e-3)

    call(0.3, 300)
    monkeypatch.setenv("NVRTC_ATTN_ASSERT_CACHED", "1")
    monkeypatch.setenv("NVRTC_ATTN_NO_COMPILE", "1")
    call(-1.7, 516)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_flex_attention_trains_a_table() -> None:
    """Through the torch door, gradients of everything against autograd on whole matrices."""
    from nvrtc_attn.torch import create_block_mask, flex_attention

    length, heads = 160, 4

    def make(table: Any, slopes: Any) -> Any:
        return lambda s, b, h, q, k: torch.tanh(s / 3) * 3 + table[q - k + length, h] + slopes[h] * (k - q)

    def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (k % 7 != 3)

    found = []
    for run in ("ours", "dense"):
        generator = torch.Generator(DEVICE).manual_seed(0)
        q, k, v = (torch.randn(2, heads, length, 64, generator=generator, device=DEVICE) for _ in range(3))
        table = torch.randn(2 * length, heads, generator=generator, device=DEVICE)
        slopes = torch.rand(heads, generator=generator, device=DEVICE)
        leaves = [x.requires_grad_() for x in (q, k, v, table, slopes)]
        score_mod = make(table, slopes)
        if run == "ours":
            mask = create_block_mask(causal, None, None, length, length)
            out, lse = flex_attention(q, k, v, score_mod, mask, return_lse=True)
        else:
            at = [torch.arange(n, device=DEVICE).reshape([-1 if i == d else 1 for i in range(4)])
                  for d, n in enumerate((2, heads, length, length))]  # fmt: skip
            scores = torch.where(causal(*at), score_mod(q @ k.mT * 0.125, *at), -torch.inf)
            out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
        (out.square().sum() + lse.sin().sum()).backward()
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_torch_attention_with_functions_beside_other_arguments(way: str) -> None:
    """By autograd, against the same call on the CPU in float32, which tests/unit/test_torch_modified.py looks at."""
    import nvrtc_attn.torch

    def inputs(device: str) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(2)
        shapes = {
            "q": (1, 300, 4, 64), "k": (1, 400, 2, 64), "v": (1, 400, 2, 64), "sink": (4,), "slopes": (4,),
            "table": (4, 520),
        }  # fmt: skip
        made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return {name: x.to(device).requires_grad_() for name, x in made.items()}

    def call(x: dict[str, Any]) -> Any:
        def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return 3 * torch.tanh(score / 3) * x["slopes"][h] + x["table"][h, i - j + 260]

        return nvrtc_attn.torch.attention(
            x["q"], x["k"], x["v"], score_mod=score_mod, mask_mod=lambda b, h, i, j: (i + j) % 5 != 2, sink=x["sink"],
            dropout_p=0.2, rng=(3, 4), cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=200,
            max_seqlen_k=250, return_lse=True,
        )  # fmt: skip

    results = []
    for device in ("cpu", DEVICE):
        starts = torch.tensor([[0, 100, 300], [0, 150, 400]], dtype=torch.int32, device=device)
        x = inputs(device)
        compiles = way == "compiled" and device == DEVICE
        out, lse = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiles else call)(x)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(device)
        gradients = torch.autograd.grad((out * weights).sum() + lse.sum(), list(x.values()))
        results.append([y.detach().double().cpu() for y in (out, lse, *gradients)])
    for name, expected, found in zip(("out", "lse", *x), *results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3, msg=lambda m, name=name: f"{name}: {m}")
