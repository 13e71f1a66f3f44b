"""The gradient of q, k and v that lie in one tensor is written into one: the same numbers as those of views."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import nvrtc_attn.torch as na  # noqa: E402 - after the skip

STARTS = [0, 40, 41, 100]
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (17, 3), "softcap": 5.0},
    "dropout": {"dropout_p": 0.2, "rng": (3, 4)},
    "bias": {},
    "sink": {"causal": True},
    "sequences": {"causal": True},
}

# Head dim, heads, element type, and whether rows begin at no multiple of 16 bytes.
VARIANTS: dict[str, tuple[int, int, Any, bool]] = {
    "64": (64, 2, torch.bfloat16, False),
    "128": (128, 1, torch.bfloat16, False),
    "72 unaligned": (72, 1, torch.bfloat16, True),
    "5": (5, 1, torch.float16, False),
    "64 fp32": (64, 2, torch.float32, False),
}


def inputs_of(which: str, name: str, dim: int, heads: int, dtype: Any, unaligned: bool) -> tuple[list[Any], Any]:
    """Leaves for the door, and the options of ``name`` with tensors."""
    torch.manual_seed(dim)
    batch, rows = (1, 100) if name == "sequences" else (2, 100)
    shapes = [(batch, rows, 3, heads, dim)]
    if which == "kv":
        shapes = [(batch, rows, 2 * heads, dim), (batch, rows, 2, heads, dim)]
    leaves = []
    for shape in shapes:
        x = torch.randn(*shape[:-1], shape[-1] + unaligned, dtype=dtype, device="cuda")
        leaves.append(x[..., unaligned:].requires_grad_())
    options = dict(OPTIONS[name])
    if name == "sequences":
        starts = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 60, "max_seqlen_k": 60}
    all_heads = heads * (2 if which == "kv" else 1)
    if name == "bias":
        options["bias"] = torch.randn(1, all_heads, rows, rows, dtype=dtype, device="cuda", requires_grad=True)
    if name == "sink":
        options["sink"] = torch.randn(all_heads, device="cuda", requires_grad=True)
    return leaves, options


@pytest.mark.parametrize("backend", ["auto", "portable"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("which", ["qkv", "kv"])
def test_numbers_are_those_of_views(
    which: str, name: str, variant: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", backend)
    dim, heads, dtype, unaligned = VARIANTS[variant]
    leaves, options = inputs_of(which, name, dim, heads, dtype, unaligned)
    door = na.attention_qkvpacked if which == "qkv" else na.attention_kvpacked
    wanted = [*leaves, *(options[x] for x in ("bias", "sink") if x in options)]
    found = []
    for call in (door, lambda *x, **more: na.attention(*x[:-1], *x[-1].unbind(2), **more)):
        out = call(*leaves, **options, deterministic=True)
        dout = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(dtype)
        for _ in range(3):  # remembered, and known, where it can be
            out = call(*leaves, **options, deterministic=True)
            gradients = torch.autograd.grad(out, wanted, dout)
        found.append([out, *gradients])
    for ours, theirs in zip(*found, strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # of torch
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_in_a_program_of_inductor(mode: str) -> None:
    leaves, options = inputs_of("qkv", "causal", 64, 2, torch.bfloat16, False)
    program = torch.compile(na.attention_qkvpacked, fullgraph=True, mode=mode)
    expected = torch.autograd.grad(na.attention_qkvpacked(*leaves, **options, deterministic=True).sum(), leaves)
    for _ in range(3):
        out = program(*leaves, **options, deterministic=True)
        (gradient,) = torch.autograd.grad(out.sum(), leaves)
        torch.testing.assert_close(gradient, expected[0], atol=0, rtol=0)
