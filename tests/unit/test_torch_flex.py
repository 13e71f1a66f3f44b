"""`nvrtc_attn.torch.flex_attention` on the CPU: FlexAttention's examples against torch, gradients against autograd."""

from __future__ import annotations

import copy
import inspect
import math
from types import SimpleNamespace
from typing import Any

import modifiers
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from flex_examples import EXAMPLES, MASKS, SLOPES, TABLE, B, H, M, N, alibi, causal, tensors, theirs  # noqa: E402

import nvrtc_attn  # noqa: E402
from nvrtc_attn.torch import BlockMask, create_block_mask, flex_attention  # noqa: E402


def dense(q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, scale: float | None = None) -> tuple[Any, Any]:
    """The same on whole matrices, with autograd."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    positions = [torch.arange(n).reshape([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(scores.shape)]
    if score_mod is not None:
        scores = score_mod(scores, *positions)
    if mask_mod is not None:
        scores = torch.where(mask_mod(*positions), scores, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_score_mods_are_those_of_torch(name: str) -> None:
    q, k, v = tensors()
    out, lse = flex_attention(q, k, v, EXAMPLES[name], return_lse=True)
    expected, expected_lse = theirs.flex_attention(q, k, v, EXAMPLES[name], return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_torch(name: str) -> None:
    """Ours and a BlockMask of torch's, of small blocks so that some are whole."""
    q, k, v = tensors()
    block_mask = theirs.create_block_mask(MASKS[name], B, H, M, N, device="cpu", BLOCK_SIZE=4)
    ours = create_block_mask(MASKS[name], B, H, M, N, device="cpu")
    expected, _ = dense(q, k, v, None, MASKS[name])
    for given in (ours, block_mask):
        torch.testing.assert_close(flex_attention(q, k, v, block_mask=given), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["flex_attention", "create_block_mask"])
def test_every_argument_of_torch_is_taken(name: str) -> None:
    ours, of_torch = (inspect.signature(getattr(x, name)).parameters for x in (nvrtc_attn.torch, theirs))
    assert of_torch.keys() <= ours.keys()
    assert [(x, ours[x].kind, ours[x].default) for x in of_torch if x != "device"] == [
        (x, y.kind, y.default) for x, y in of_torch.items() if x != "device"
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.skipif(not hasattr(theirs, "AuxRequest"), reason="this torch has no AuxRequest")
def test_return_aux_is_that_of_torch() -> None:
    q, k, v = tensors()
    for lse in (True, False):
        request = theirs.AuxRequest(lse=lse)
        out, aux = flex_attention(q, k, v, alibi, return_aux=request)
        expected, expected_aux = theirs.flex_attention(q, k, v, alibi, return_aux=request)
        assert type(aux) is theirs.AuxOutput
        assert aux.max_scores is None
        assert (aux.lse is None) == (not lse)
        torch.testing.assert_close((out, aux.lse), (expected, expected_aux.lse), rtol=1e-4, atol=1e-5)
    with pytest.raises(nvrtc_attn.UnsupportedError, match="return_aux: max_scores"):
        flex_attention(q, k, v, return_aux=theirs.AuxRequest(max_scores=True))
    with pytest.raises(ValueError, match="return_lse, return_aux: both"):
        flex_attention(q, k, v, return_lse=True, return_aux=theirs.AuxRequest(lse=True))


@pytest.mark.parametrize("separate", [True, False])
def test_a_block_mask_has_what_that_of_torch_has(separate: bool) -> None:
    more = {} if separate else {"separate_full_blocks": False}
    if not separate and "separate_full_blocks" not in inspect.signature(theirs.create_block_mask).parameters:
        pytest.skip("this torch has no separate_full_blocks")
    given = (MASKS["prefix_lm"], B, None, M, N, "cpu", (4, 8))
    ours, of_torch = create_block_mask(*given, **more), theirs.create_block_mask(*given, **more)
    assert ours.device == torch.device("cpu")
    assert (ours.shape, ours.numel()) == (of_torch.shape, of_torch.numel())
    assert ours.sparsity() == of_torch.sparsity()
    assert ours.to_string() == of_torch.to_string()
    assert torch.equal(ours.to_dense(), of_torch.to_dense())
    assert (ours.full_kv_indices is None) == (of_torch.full_kv_indices is None) == (not separate)
    for found, expected in zip(ours.as_tuple(), of_torch.as_tuple(), strict=True):
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(ours, name), getattr(of_torch, name))
        assert torch.equal(getattr(ours[1], name), getattr(of_torch[1], name))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_slice_of_a_block_mask() -> None:
    """The last rows of blocks, as decoding uses them; and torch's own function takes our mask."""
    q, k, v = tensors()
    mask = create_block_mask(causal, None, None, M, N, "cpu", 8)
    last = mask[:, :, 2]
    last.seq_lengths, last.mask_mod = (8, N), lambda b, h, i, j: i + 16 >= j
    expected, _ = dense(q, k, v, None, causal)
    found = flex_attention(q[:, :, 16:], k, v, block_mask=last)
    torch.testing.assert_close(found, expected[:, :, 16:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(theirs.flex_attention(q, k, v, block_mask=mask), expected, rtol=1e-4, atol=1e-5)


def test_a_block_mask_has_nothing_else() -> None:
    mask = create_block_mask(causal, None, None, M, N)
    assert mask.device is None
    assert mask.to("meta").device == torch.device("meta")
    assert copy.deepcopy(mask) == mask
    assert mask._adjust(M - 1, N - 2) == create_block_mask(causal, None, None, M - 1, N - 2)
    with pytest.raises(
        AttributeError, match=r"'dq_write_order'.*torch\.nn\.attention\.flex_attention\.create_block_mask"
    ):
        _ = mask.dq_write_order
    counts, indices = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, 3, dtype=torch.int32)
    made = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=8)
    assert type(made) is theirs.BlockMask
    assert made.seq_lengths == (M, N)


def lists(counts: list[int], indices: list[list[int]], **more: Any) -> Any:
    """A BlockMask of torch's with blocks of 8 of three rows."""
    made = (torch.tensor(counts, dtype=torch.int32)[None, None], torch.tensor(indices, dtype=torch.int32)[None, None])
    return theirs.BlockMask.from_kv_blocks(*made, BLOCK_SIZE=8, seq_lengths=(M, N), **more)


def test_lists_of_blocks_that_make_no_sense_are_refused_before_any_launch() -> None:
    q, k, v = tensors()
    good = [[0, 1, 2], [1, 0, 2], [2, 0, 1]]
    flex_attention(q, k, v, block_mask=lists([1, 2, 1], good))  # any order, as in torch
    for counts, indices in (([2, 1, 1], [[1, 1, 0], *good[1:]]), ([1, 3, 1], [good[0], [0, 2, 2], good[2]])):
        with pytest.raises(ValueError, match="twice"):
            flex_attention(q, k, v, block_mask=lists(counts, indices))
    for counts, indices in (([1, 1, 1], [[3, 0, 0], *good[1:]]), ([4, 1, 1], good)):
        with pytest.raises(ValueError, match="beyond the 3 of a row"):
            flex_attention(q, k, v, block_mask=lists(counts, indices))
    partial, full = torch.ones(1, 1, 3, dtype=torch.int32), torch.tensor(good, dtype=torch.int32)[None, None]
    overlap = theirs.BlockMask.from_kv_blocks(partial, full, partial, full, BLOCK_SIZE=8, seq_lengths=(M, N))
    with pytest.raises(ValueError, match="as partial and as full"):
        flex_attention(q, k, v, block_mask=overlap)
    short = theirs.BlockMask.from_kv_blocks(partial[..., :2], full[..., :2, :], BLOCK_SIZE=8, seq_lengths=(M, N))
    with pytest.raises(ValueError, match="kv_num_blocks has shape"):
        flex_attention(q, k, v, block_mask=short)
    nothing = torch.zeros(B, 1, 3, dtype=torch.int32), full.expand(B, -1, -1, -1)
    other = theirs.BlockMask.from_kv_blocks(partial, full, *nothing, BLOCK_SIZE=8, seq_lengths=(M, N))
    with pytest.raises(ValueError, match="full_kv_num_blocks has shape"):
        flex_attention(q, k, v, block_mask=other)
    with pytest.raises(ValueError, match="on meta"):
        flex_attention(q, k, v, block_mask=lists([1, 1, 1], good).to("meta"))


def test_lists_of_blocks_are_read_again_after_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvrtc_attn.torch import flex

    made = []
    monkeypatch.setattr(flex, "_table", lambda *x, own=flex._table: (made.append(x), own(*x))[1])
    q, k, v = tensors()
    mask = lists([1, 1, 1], [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
    first = flex_attention(q, k, v, block_mask=mask)
    flex_attention(q, k, v, block_mask=mask)
    assert len(made) == 1
    mask.kv_num_blocks.fill_(2)
    second = flex_attention(q, k, v, block_mask=mask)
    assert len(made) == 2
    assert not torch.equal(first, second)
    kept = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    expected, _ = dense(q, k, v, None, lambda b, h, i, j: kept[i // 8, j // 8])
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)


def test_lists_in_the_place_of_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other lists may get the numbers that Python gave to those before, and sizes may change below the same lists."""
    from nvrtc_attn.torch import flex

    q, k, v = tensors()
    mask = lists([1, 1, 1], [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
    first = flex_attention(q, k, v, block_mask=mask)
    mask.kv_num_blocks = torch.full_like(mask.kv_num_blocks, 2)
    monkeypatch.setattr(flex, "id", lambda _: 0, raising=False)
    second = flex_attention(q, k, v, block_mask=mask)
    assert not torch.equal(first, second)
    mask.kv_num_blocks = torch.ones_like(mask.kv_num_blocks)
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), first)
    mask.seq_lengths = (M, 8)
    with pytest.raises(ValueError, match="at most 1"):
        flex_attention(q, k[:, :, :8], v[:, :, :8], block_mask=mask)


def test_lists_that_inference_mode_made() -> None:
    q, k, v = tensors()
    made = ([1, 1, 1], [[0, 1, 2], [1, 0, 2], [2, 0, 1]])
    expected = flex_attention(q, k, v, block_mask=lists(*made))
    with torch.inference_mode():
        mask = lists(*made)
        for _ in range(2):
            assert torch.equal(flex_attention(q, k, v, block_mask=mask), expected)
        mask.kv_num_blocks.fill_(2)
        assert not torch.equal(flex_attention(q, k, v, block_mask=mask), expected), "no version tells of the write"


def test_blocks_without_a_function() -> None:
    """`from_kv_blocks`: the lists alone say what is kept."""
    q, k, v = tensors()
    counts = torch.tensor([[[1, 2, 3]]])
    indices = torch.tensor([[[[0, 1, 2], [2, 0, 1], [0, 1, 2]]]])
    block_mask = theirs.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=8, mask_mod=causal, seq_lengths=(M, N))
    kept = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 1]], dtype=torch.bool)

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return kept[i // 8, j // 8] & (i >= j)

    expected, _ = dense(q, k, v, None, mask_mod)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=block_mask), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_is_that_of_torch(compiled: bool) -> None:
    """out of autocast's type, gradients of the inputs' own; types that differ become one."""
    slopes = SLOPES.clone().requires_grad_()

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + slopes[h] * (j - i)

    def ours(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, score_mod, return_lse=True)

    def of_torch(q: Any, k: Any, v: Any) -> Any:
        return theirs.flex_attention(q, k, v, score_mod, return_lse=True)

    if compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, fullgraph=True, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in tensors())
    wanted = (q, k, v, slopes)
    exact = torch.autograd.grad(flex_attention(q, k, v, score_mod).sum(), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = ours(q, k, v)
        expected, expected_lse = of_torch(q.detach(), k.detach(), v.detach())
        mixed, _ = ours(q, k.bfloat16(), v.bfloat16())
    assert (out.dtype, lse.dtype) == (expected.dtype, expected_lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(lse, expected_lse, rtol=0.05, atol=0.05)
    assert torch.equal(mixed, out)
    for ours_of, x, theirs_of in zip(torch.autograd.grad(out.float().sum(), wanted), wanted, exact, strict=True):
        assert ours_of.dtype is x.dtype
        torch.testing.assert_close(ours_of, theirs_of, rtol=0.1, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert ours(q, k, v)[0].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_captured_tensors(dtype: Any) -> None:
    """q, k, v, a table, slopes, a scalar and a bias, through out and lse; in the types of what they belong to."""
    parameters = {
        "table": (torch.randn(2 * M, H)).to(dtype),
        "slopes": SLOPES.clone(),
        "temperature": torch.tensor(1.3),
        "bias": torch.randn(H, M, N),
    }

    def make(p: dict[str, Any]) -> Any:
        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            x = score * p["temperature"] + p["slopes"][h] * (k - q)
            return torch.tanh(x / 3) * 3 + p["table"][q - k + M, h] + p["bias"][h, q, k]

        return score_mod

    found = []
    for run in ("ours", "dense"):
        # The textbook adds up in float32 what ours does.
        leaves = {name: (x.clone() if run == "ours" else x.float()).requires_grad_() for name, x in parameters.items()}
        q, k, v = (x.to(torch.float32).requires_grad_() for x in tensors(dtype))
        if run == "ours":
            out, lse = flex_attention(
                q, k, v, make(leaves), create_block_mask(causal, None, None, M, N), return_lse=True
            )
        else:
            out, lse = dense(q, k, v, make(leaves), causal)
        (out.square().sum() + lse.sin().sum()).backward()
        found.append({"q": q.grad, "k": k.grad, "v": v.grad, **{name: x.grad for name, x in leaves.items()}})
    for name, gradient in found[0].items():
        assert gradient is not None, name
        assert gradient.dtype == (dtype if name == "table" else torch.float32)
        tolerance = 1e-2 if gradient.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(gradient.float(), found[1][name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_module_of_embeddings_is_its_table(compiled: bool) -> None:
    """T5's buckets, as models look them up; one whose rows have no gradient, or other ones, is refused."""
    embedding = torch.nn.Embedding(2 * M, H)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + embedding(q - k + M)[h]

    def call(*x: Any) -> Any:
        return flex_attention(*x, score_mod)

    if compiled:
        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = []
    for run in (
        lambda *x: call(*x),
        lambda *x: dense(*x, lambda s, b, h, i, j: s + embedding.weight[i - j + M, h], None)[0],
    ):
        embedding.weight.grad = None
        run(*tensors()).square().sum().backward()
        found.append(embedding.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    for option in ({"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        other = torch.nn.Embedding(2 * M, H, **option)
        with pytest.raises(nvrtc_attn.TraceError, match=f"'embedding' with {next(iter(option))} is not possible"):
            flex_attention(*tensors(), lambda s, b, h, q, k, other=other: s + other(q - k + M)[h])


@pytest.mark.parametrize("case", modifiers.named_cases(), ids=str)
def test_tensors_and_numpy_arrays_make_the_same_program(case: modifiers.ModifierCase) -> None:
    arrays = case.arrays((B, H, M, N), np.random.default_rng(0))
    ours = nvrtc_attn.trace(*case.make({name: torch.from_numpy(x) for name, x in arrays.items()}))
    assert ours.program == nvrtc_attn.trace(*case.make(arrays)).program


def test_grouped_heads_scale_and_shared_batch() -> None:
    q, k, v = tensors(heads=2)
    expected, _ = dense(q, k, v, alibi, causal, 0.3)
    mask = create_block_mask(causal, None, None, M, N)
    out = flex_attention(q, k, v, alibi, mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    expected, _ = dense(q, k[:1], v[:1], alibi, None)
    out = flex_attention(q, k[:1], v[:1], alibi, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_a_traced_modifier_reads_its_tensors_anew() -> None:
    slopes = SLOPES.clone()
    modifier = nvrtc_attn.trace(lambda s, b, h, q, k: s + slopes[h] * (k - q))
    q, k, v = tensors()
    for _ in range(2):
        expected, _ = dense(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i), None)
        torch.testing.assert_close(flex_attention(q, k, v, modifier), expected, rtol=1e-4, atol=1e-5)
        slopes.mul_(-2)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, q, k: s if q > k else 0 * s, "branch"),
        (lambda s, b, h, q, k: s + torch.rand_like(s), "'rand_like'.*random"),
        (lambda s, b, h, q, k: s + torch.rand(()), "'rand'.*no random numbers"),
        (lambda s, b, h, q, k: s + torch.randn((1,))[0] * 0.1, "'randn'.*no random numbers"),
        (lambda s, b, h, q, k: s + torch.empty(()).uniform_(), "'uniform_'.*no random numbers"),
        (lambda s, b, h, q, k: s + torch.nn.Dropout()(TABLE)[q, k], "'dropout'.*no random numbers"),
        (lambda s, b, h, q, k: s + torch.nn.functional.rrelu(TABLE, training=True)[q, k], "numbers of 'torch' are"),
        (lambda s, b, h, q, k: s + TABLE[q], "1 of the 2 indices"),
        (lambda s, b, h, q, k: torch.softmax(s, 0), "'softmax'.*shape"),
        (lambda s, b, h, q, k: torch.linalg.norm(s), "'linalg_norm'"),
        (lambda s, b, h, q, k: s.item(), "'item'"),
        (lambda s, b, h, q, k: s.shape[0] * s, "'shape'"),
        (lambda s, b, h, q, k: s + torch.stack([s, s]), "stack"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(function: Any, words: str) -> None:
    with pytest.raises(nvrtc_attn.TraceError, match=words):
        flex_attention(*tensors(), function)


def test_other_refusals() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="is for lengths"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, None, M, N + 1))
    with pytest.raises(ValueError, match="its H is 3"):
        flex_attention(q, k, v, block_mask=create_block_mask(causal, None, 3, M, N))
    with pytest.raises(ValueError, match="enable_gqa"):
        flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match=r"^scale: got inf\."):
        flex_attention(q, k, v, scale=math.inf)
    with pytest.raises(ValueError, match="query: shape"):
        flex_attention(q[0], k, v)
    with pytest.raises(nvrtc_attn.TraceError, match="mask_mod"):
        create_block_mask(lambda b, h, i, j: bool(i > j), None, None, M, N)
    for name, given in (("key", (k[:0], v)), ("key", (torch.cat([k, k]), v)), ("value", (k, torch.cat([v, v])))):
        with pytest.raises(ValueError, match=rf"^{name}: batch [04], needed is that of query, 2, or 1"):
            flex_attention(q, *given)


def dual_tensors(call: Any, x: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return call(torch.autograd.forward_ad.make_dual(x, x))


TRANSFORMATIONS: dict[str, Any] = {
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "dual tensors": dual_tensors,
}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's forward mode calls it
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_are_refused(name: str) -> None:
    q, k, v = tensors()
    with pytest.raises(nvrtc_attn.UnsupportedError, match=r"^flex_attention, .*transformations of torch\.func.*batch"):
        TRANSFORMATIONS[name](lambda x: flex_attention(x, k, v, alibi), q)


def test_known_calls_are_none_of_dual_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches would lose the tangents without a word."""
    from nvrtc_attn.torch import modified_known

    results = torch.ones(1), torch.ones(1)
    known = SimpleNamespace(fits=lambda *_: True, run=lambda _: results, grad=False)
    monkeypatch.setattr(modified_known, "_looked_up", lambda *_: ("name", None, ()))
    monkeypatch.setitem(modified_known._known, "name", (known,))
    given = (*tensors(), None, None, None, (None, None, False), True)
    assert modified_known.again(*given) is results
    with torch.autograd.forward_ad.dual_level():
        assert modified_known.again(*given) is None


def relative(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + (h + 1) * (j - i)


@pytest.mark.parametrize("score_mod", [None, relative])
def test_shapes_without_memory(score_mod: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (x.requires_grad_() for x in tensors())
        out, lse = flex_attention(q, k, v, score_mod, return_lse=True)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        (dq,) = torch.autograd.grad(out.sum(), q)
        assert dq.shape == q.shape


def test_tensors_of_a_mesh() -> None:
    """Heads on devices of their own, where functions of scores see which of all heads they are."""
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        q, k, v = tensors()
        local = [x.chunk(2, 1)[0] for x in (q, k, v)]
        placed = [DTensor.from_local(x, mesh, [Shard(1)]) for x in local]
        out = flex_attention(*placed)
        assert out.placements == (Shard(1),)
        torch.testing.assert_close(out.to_local(), flex_attention(*local))
        out = flex_attention(*placed, relative)
        assert out.placements == (Shard(1),)
        torch.testing.assert_close(out.to_local(), flex_attention(q, k, v, relative).chunk(2, 1)[0])
    finally:
        torch.distributed.destroy_process_group()
