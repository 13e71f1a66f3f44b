"""Parts of a larger attention on the GPU: masks and dropout of the whole, out and gradients that add up to it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import cases
import modifiers
import numpy as np
import pytest
from cases import Case
from harness import DEVICE, Run, backend, failures, families, oracle, torch

import nvrtc_attn
import nvrtc_attn.torch as na
from nvrtc_attn.front.call import CallOptions
from nvrtc_attn.front.operands import OPTIONAL_INPUTS
from nvrtc_attn.front.philox import RngState
from nvrtc_attn.torch import passes
from nvrtc_attn.torch.parallel import merge_partials
from nvrtc_attn.torch.parallel.local import slice_scores

B, H, ROWS, KEYS = 3, 6, 300, 333  # rows of the mask begin anywhere in a block of random numbers
PLACES = [
    (slice(0, 3), slice(0, 6), (0, 96), (0, 96)),
    (slice(1, 3), slice(2, 6), (171, 120), (50, 128)),
    (slice(2, 3), slice(4, 6), (299, 1), (7, 128)),  # rows of packed heads
    (slice(0, 1), slice(0, 2), (64, 128), (332, 1)),
]
FAMILIES = families(cases.make_case("any", dtype="float16")) if torch.cuda.is_available() else ("portable",)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_of_parts_is_the_wholes_bit_for_bit(family: str, on_device: bool, width: int) -> None:
    """Forward by values that are one hot, backward by dv of gradients that are."""
    p, words = 0.3, (123456789012345, 98765432109)
    rng: Any = tuple(torch.tensor(x, device=DEVICE) for x in words) if on_device else words
    keep = nvrtc_attn.dropout_keep_mask((B, H, ROWS, KEYS), p, words)
    for b, h, (first_row, rows), (first_key, keys) in PLACES:
        rows, keys = min(rows, width), min(keys, width)
        sizes = (b.stop - b.start, h.stop - h.start)
        q = torch.zeros(sizes[0], rows, sizes[1], 64, device=DEVICE, dtype=torch.float16)
        k = torch.zeros(sizes[0], keys, sizes[1] // 2, 64, device=DEVICE, dtype=torch.float16)
        eye = torch.eye(256, width, device=DEVICE, dtype=torch.float16)
        v = eye[:keys, None].expand(*k.shape[:3], width).contiguous()
        dout = eye[:rows, None].expand(*q.shape[:3], width).contiguous()
        part = nvrtc_attn.Part(batch=(b.start, B), heads=(h.start, H), rows=(first_row, ROWS), keys=(first_key, KEYS))
        with backend(family):
            q.requires_grad_()
            v.requires_grad_()
            out = na.attention(q, k, v, dropout_p=p, rng=rng, part=part)
            (dv,) = torch.autograd.grad(out, v, dout)
        expected = keep[b, h, first_row : first_row + rows, first_key : first_key + keys]
        found = (out.detach() != 0)[..., :keys].transpose(1, 2).cpu().numpy()
        assert np.array_equal(found, expected), part
        # A key head's dv is summed over its two query heads: kept by either.
        either = expected.reshape(sizes[0], -1, 2, rows, keys).any(2)
        assert np.array_equal((dv != 0)[..., :rows].permute(0, 2, 3, 1).cpu().numpy(), either), part


def sliced(run: Run, where: tuple[slice, ...]) -> tuple[Any, ...]:
    """q, k, v, bias and mask of a part."""
    b, h, m, n = where
    group = run.case.num_heads // run.case.num_heads_kv
    h_kv, i = slice(h.start // group, h.stop // group), run.inputs
    scores = [slice_scores(i.get(name), h, m, (n.start, n.stop)) for name in ("bias", "mask")]
    scores = [x if x is None or x.shape[0] == 1 else x[b] for x in scores]
    return (i["q"][b, m, h], i["k"][b, n, h_kv], i["v"][b, n, h_kv], *scores, *(None for _ in OPTIONAL_INPUTS[2:]))


CASES = [
    {"causal": True}, {"causal": "top_left", "seqlen_k": 1500}, {"window_size": (100, 30)},
    {"causal": True, "window_size": (257, None), "dropout_p": 0.2},
    {"dropout_p": 0.5, "head_dim": 256, "head_dim_v": 256},
    {"bias": "bhqk", "causal": True, "dropout_p": 0.1}, {"bias": "1hqk", "window_size": (64, 64)},
    {"mask": "b11k", "causal": True}, {"softcap": 20.0, "causal": True, "dlse": True},
    {"dtype": "float32", "causal": True},
    {"causal": True, "seqlen_q": 2100, "seqlen_k": 700}, {"causal": True, "deterministic": True, "dropout_p": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fields", CASES, ids=lambda fields: "-".join(map(str, fields.values())))
def test_parts_together_are_the_whole(fields: dict[str, Any], family: str) -> None:
    """Rows cut in three, keys in two, heads in two: by the error rule of the whole."""
    known: dict[str, Any] = {
        "dtype": "float16", "batch": 2, "seqlen_q": 1000, "seqlen_k": 1000, "num_heads": 8, "num_heads_kv": 4,
        "head_dim": 128, "head_dim_v": 128, **fields,
    }  # fmt: skip
    case: Case = dataclasses.replace(cases.make_case("part"), **known)
    if case.dtype == "float32" and family == "hopper":
        pytest.skip("the Hopper kernels are of 16-bit types")
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    options = CallOptions(**cases.call_options(case), return_lse=True, dbias="bias" in run.inputs)
    options = options._replace(deterministic=case.deterministic)
    rng = RngState(case.seed, case.offset)
    rows = [slice(0, 130), slice(130, 700), slice(700, case.seqlen_q)]
    keys = [slice(0, 333), slice(333, case.seqlen_k)]
    heads = [slice(0, 2), slice(2, 8)]
    found = {name: torch.zeros(cases.shapes(case)[name], device=DEVICE) for name in ("out", "lse", "dq", "dk", "dv")}
    if "bias" in run.inputs:
        found["dbias"] = torch.zeros(run.inputs["bias"].shape, device=DEVICE)
    everything = slice(0, case.batch)

    def part(h: slice, m: slice, n: slice) -> CallOptions:
        return options._replace(
            part=nvrtc_attn.Part(heads=(h.start, 8), rows=(m.start, case.seqlen_q), keys=(n.start, case.seqlen_k))
        )

    with backend(family):
        for h, m in itertools.product(heads, rows):
            parts = [passes.forward(sliced(run, (everything, h, m, n)), part(h, m, n), rng) for n in keys]
            outs, lses = zip(*parts, strict=True)
            found["out"][:, m, h], found["lse"][:, h, m] = merge_partials(outs, lses, torch.float32)
        out = found["out"].to(run.inputs["q"].dtype)
        for h, m, n in itertools.product(heads, rows, keys):
            dlse = run.inputs["dlse"][:, h, m] if "dlse" in run.inputs else None
            dq, dk, dv, dbias, *_ = passes.backward(
                sliced(run, (everything, h, m, n)), out[:, m, h], found["lse"][:, h, m], run.inputs["dout"][:, m, h],
                dlse, part(h, m, n), rng,
            )  # fmt: skip
            h_kv = slice(h.start // 2, h.stop // 2)
            found["dq"][:, m, h] += dq
            found["dk"][:, n, h_kv] += dk
            found["dv"][:, n, h_kv] += dv
            if dbias is not None:
                share = slice_scores(found["dbias"], h, m, (n.start, n.stop))
                assert share is not None
                share += dbias
    lines = failures(case, found, exact, low, run.arrays)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["alibi", "relative bias", "bias by head", "documents", "window", "both", "natten"])
def test_modifiers_of_parts_are_those_of_the_whole(name: str, family: str) -> None:
    """Heads, rows and keys cut: out and gradients, those of captured arrays too, of one call. One kernel for all."""
    case = next(x for x in modifiers.named_cases() if x.name == name)
    b, h, m, n = sizes = (2, 4, 500, 700)
    rng = np.random.default_rng(3)
    arrays = {key: torch.from_numpy(x).to(DEVICE) for key, x in case.arrays(sizes, rng).items()}
    shapes = ((b, m, h, 64), (b, n, 2, 64), (b, n, 2, 64), (b, m, h, 64))
    q, k, v, dout = (torch.from_numpy(rng.standard_normal(x)).to(DEVICE, torch.float16) for x in shapes)
    modifier = nvrtc_attn.trace(*case.make(arrays))
    trained = modifier.differentiable

    def run(cuts: list[list[slice]], known: Any) -> list[torch.Tensor]:
        found = [torch.zeros(x.shape, device=DEVICE) for x in (q, torch.empty(b, h, m), q, k, v)]
        found += [torch.zeros(modifier.captures[i].shape, device=DEVICE) for i in trained]

        def part(x: slice, y: slice, z: slice) -> nvrtc_attn.Part | None:
            whole = len(cuts[0]) == len(cuts[1]) == len(cuts[2]) == 1
            return None if whole else nvrtc_attn.Part(heads=(x.start, h), rows=(y.start, m), keys=(z.start, n))

        for heads, rows in itertools.product(cuts[0], cuts[1]):
            of_k = slice(heads.start // 2, heads.stop // 2)
            parts = [
                nvrtc_attn.attention(
                    q[:, rows, heads], k[:, keys, of_k], v[:, keys, of_k], score_mod=modifier, return_lse=True,
                    part=part(heads, rows, keys),
                ) for keys in cuts[2]
            ]  # fmt: skip
            outs, lses = zip(*parts, strict=True)
            found[0][:, rows, heads], found[1][:, heads, rows] = merge_partials(outs, lses, torch.float32)
        out, lse = known or (found[0].half(), found[1])
        for heads, rows, keys in itertools.product(*cuts):
            of_k = slice(heads.start // 2, heads.stop // 2)
            x = q[:, rows, heads], k[:, keys, of_k], v[:, keys, of_k]
            grads = [torch.full(y.shape, torch.nan, device=DEVICE) for y in x]
            daux = [
                torch.full(tuple(y.shape), torch.nan, device=DEVICE) if i in trained else None
                for i, y in enumerate(modifier.captures)
            ]
            options = {"score_mod": modifier, "daux": daux if trained else None, "part": part(heads, rows, keys)}
            size = nvrtc_attn.backward_workspace_bytes(*x, **options)
            workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
            nvrtc_attn.attention_backward(
                dout[:, rows, heads],
                *x,
                out[:, rows, heads],
                lse[:, heads, rows],
                *grads,
                workspace=workspace,
                **options,
            )
            for total, share in zip(
                (found[2][:, rows, heads], found[3][:, keys, of_k], found[4][:, keys, of_k]), grads, strict=True
            ):
                total += share
            for total, i in zip(found[5:], trained, strict=True):
                total += daux[i]
        return found

    with backend(family):
        whole = run([[slice(0, h)], [slice(0, m)], [slice(0, n)]], None)
        cut = [[slice(0, 2), slice(2, 4)], [slice(0, 130), slice(130, 500)], [slice(0, 256), slice(256, 700)]]
        found = run(cut, (whole[0].half(), whole[1]))
    names = ("out", "lse", "dq", "dk", "dv", *(f"daux[{i}]" for i in trained))
    for what, x, y in zip(names, found, whole, strict=True):
        finite = torch.isfinite(y)
        assert torch.equal(torch.isfinite(x), finite), what
        error, bound = (x[finite] - y[finite]).abs().max(), y[finite].abs().max()
        assert error <= 4e-3 * max(float(bound), 1.0), (what, float(error), float(bound))


@pytest.mark.skipif("hopper" not in FAMILIES, reason="bits are promised on compute capability 9.0")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {}, {"causal": True, "dropout_p": 0.2, "rng": (3, 4)}, {"causal": True, "softcap": 9.0}],
)
def test_plans_as_the_whole_give_the_wholes_bits(options: dict[str, Any], head_dim: int) -> None:
    """Shares of heads with all tokens, and rows with the keys that they see: out, lse, and dq in a fixed order."""
    n, heads = 3072, 8
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(2, n, h, head_dim, device=DEVICE, dtype=torch.bfloat16)
        for h in (heads, heads // 2, heads // 2, heads)
    )

    def run(at: slice, h: slice, part: nvrtc_attn.Part | None, known: Any) -> tuple[torch.Tensor, ...]:
        keys = slice(0, at.stop) if options.get("causal") else slice(0, n)
        of_k = slice(h.start // 2, h.stop // 2)
        x = [y.contiguous() for y in (q[:, at, h], k[:, keys, of_k], v[:, keys, of_k])]
        out, lse = nvrtc_attn.attention(*x, **options, return_lse=True, part=part)
        grads = [torch.empty_like(y) for y in x]
        more = {**options, "deterministic": True, "part": part}
        size = nvrtc_attn.backward_workspace_bytes(*x, **more)
        workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        whole_out, whole_lse = known or (out, lse)
        of_rows = [y[:, at, h].contiguous() for y in (dout, whole_out)] if known else [dout, whole_out]
        of_lse = whole_lse[:, h, at].contiguous() if known else whole_lse
        nvrtc_attn.attention_backward(of_rows[0], *x, of_rows[1], of_lse, *grads, **more, workspace=workspace)
        return out, lse, grads[0]

    everything = slice(0, n), slice(0, heads)
    whole = run(*everything, None, None)
    places = [(everything[0], slice(4, 8)), (slice(0, 768), everything[1]), (slice(1536, 3072), slice(2, 4))]
    for at, h in places:
        part = nvrtc_attn.Part(heads=(h.start, heads), rows=(at.start, n), keys=(0, n), plan_as=True)
        found = run(at, h, part, whole[:2])
        expected = whole[0][:, at, h], whole[1][:, h, at], whole[2][:, at, h]
        for name, x, y in zip(("out", "lse", "dq"), found, expected, strict=True):
            assert torch.equal(x, y), (name, at, h, float((x.float() - y.float()).abs().max()))
