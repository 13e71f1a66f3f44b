"""Ways of the Hopper backward kernel that a table may choose, each against float64: key tiles in parts, code for each
consumer, V in registers, other orders of the key tiles."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import pytest
from harness import DEVICE, Run, failures, forget_plans, oracle, torch

from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.heuristics import hopper_backward, hopper_backward_config, hopper_backward_tile

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="kernels of the Hopper family: needs compute capability 9.0",
)


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans of the Hopper family with these changes of the table's tile, for plans made from here on."""
    choose = hopper_backward_tile.choose_tile
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "hopper")

    def forced(**changes: Any) -> list[hopper_backward_config.Tile]:
        made = []

        def chosen(problem: AttentionProblem, num_sms: int) -> hopper_backward_config.Tile:
            made.append(dataclasses.replace(choose(problem, num_sms), **changes))
            return made[-1]

        forget_plans(monkeypatch)
        monkeypatch.setattr(hopper_backward, "choose_tile", chosen)
        return made

    return forced


SHAPES: dict[str, dict[str, Any]] = {
    "text": {"seqlen_q": 1000, "seqlen_k": 300, "num_heads": 3, "head_dim": 128},
    "causal": {"seqlen_q": 700, "seqlen_k": 700, "num_heads": 3, "head_dim": 128, "causal": True},
    "grouped": {"seqlen_q": 515, "seqlen_k": 640, "num_heads": 6, "num_heads_kv": 2, "head_dim": 128, "causal": True},
    "grouped_dense": {"seqlen_q": 410, "seqlen_k": 400, "num_heads": 6, "num_heads_kv": 2, "head_dim": 128},
    "window": {"seqlen_q": 900, "seqlen_k": 900, "num_heads": 4, "head_dim": 128, "window_size": (200, 30)},
    # Key tiles that no query sees, and parts without a query tile.
    "keys_unseen": {"seqlen_q": 100, "seqlen_k": 900, "num_heads": 3, "head_dim": 128, "causal": "top_left"},
    "negative_scale": {"seqlen_q": 500, "seqlen_k": 300, "num_heads": 2, "head_dim": 128, "softmax_scale": -0.1},
    "head_of_64": {"seqlen_q": 1111, "seqlen_k": 300, "num_heads": 4, "head_dim": 64},
    "head_of_64_causal": {"seqlen_q": 600, "seqlen_k": 600, "num_heads": 4, "head_dim": 64, "causal": True},
    "head_of_72": {"seqlen_q": 500, "seqlen_k": 300, "num_heads": 4, "head_dim": 72},
    "head_of_96": {"seqlen_q": 600, "seqlen_k": 600, "num_heads": 4, "head_dim": 96, "causal": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "parts": {"parts": 3},
    "many_parts": {"parts": 11},
    "parts_of_some": {"parts": 4, "whole": 5},
    "parts_of_all_but_one": {"parts": 2, "whole": 1},
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_key_tiles_in_parts(name: str, way: str, fused: bool, force: Any) -> None:
    """dk and dv of a shared tile are added up, by the blocks or by a launch; every element is written."""
    case = cases.make_case(f"ways-{name}", **{"dtype": "bfloat16", "batch": 2, **SHAPES[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    block_m = 128 if case.head_dim == 64 else 64 if fused or case.head_dim < 120 else 80
    made = force(splits=1, fused=fused, block_m=block_m, **WAYS[way])
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    assert made


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128])
def test_the_last_wave_in_parts(head_dim: int, force: Any) -> None:
    """As the table has it, of key tiles that are more than the multiprocessors by less than a third."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    heads = -(-5 * num_sms // 4 // 14)
    case = cases.make_case(
        "ways-last-wave", dtype="bfloat16", batch=1, seqlen_q=1700, seqlen_k=1700, num_heads=heads, head_dim=head_dim
    )
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = force()
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    assert made[-1].parts > 1
    assert made[-1].whole == num_sms


@pytest.mark.parametrize("parts", [2, 5])
@pytest.mark.parametrize("mask", [None, "b11k"])
@pytest.mark.parametrize(("head_dim", "seqlen_q", "causal"), [(64, 1000, False), (40, 777, False), (128, 300, True)])
def test_one_key_tile_in_parts(
    head_dim: int, seqlen_q: int, causal: bool, mask: str | None, parts: int, force: Any
) -> None:
    """dq is stored by the block that has the queries, dk and dv are added up; every row of dq is some part's."""
    case = cases.make_case(
        "ways-one-tile", dtype="bfloat16", batch=2, seqlen_q=seqlen_q, seqlen_k=77, num_heads=3, head_dim=head_dim,
        causal="top_left" if causal else False, mask=mask,
    )  # fmt: skip
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = force(parts=parts, splits=1)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    assert made


@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(192, 192), (256, 256), (192, 128), (136, 72), (72, 40), (160, 256)]
)
def test_clusters_share_the_query_heads_of_a_wide_tile(head_dim: int, head_dim_v: int, causal: Any, force: Any) -> None:
    """dk and dv are added up by several; keys beyond the last tile's half, and keys that no query sees, are zeros."""
    case = cases.make_case(
        "ways-wide", dtype="bfloat16", batch=2, seqlen_q=333, seqlen_k=467, num_heads=12, num_heads_kv=2,
        head_dim=head_dim, head_dim_v=head_dim_v, causal=causal,
    )  # fmt: skip
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    for splits in (2, 6):
        made = force(splits=splits)
        assert not failures(case, run.backward(run.forward()), exact, low, run.arrays), splits
        assert made
        assert made[-1].wide


@pytest.mark.parametrize("name", ["text", "grouped", "head_of_64", "head_of_96"])
def test_order_of_key_tiles(name: str, force: Any) -> None:
    """How many heads' tiles are handed out together, and how far apart key tiles begin, change no gradient."""
    case = cases.make_case(f"ways-{name}", **{"dtype": "bfloat16", "batch": 2, **SHAPES[name]})
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    for changes in ({"heads_together": 3}, {"heads_together": 100}, {"step": 0}, {"step": 1 << 14}):
        force(**changes)
        assert not failures(case, run.backward(run.forward()), exact, low, run.arrays), changes


@pytest.mark.parametrize("way", [{}, {"parts": 3}, {"parts": 4, "whole": 5}, {"splits": 3}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", ["causal", "grouped", "keys_unseen", "head_of_64_causal", "head_of_96"])
def test_query_tiles_from_the_last_one_down(name: str, dropout: float, way: dict[str, Any], force: Any) -> None:
    case = cases.make_case(f"ways-{name}", **{"dtype": "bfloat16", "batch": 2, "dropout_p": dropout, **SHAPES[name]})
    if case.num_heads % (3 * case.num_heads_kv) and "splits" in way:
        pytest.skip("three blocks share the heads of a group")
    if dropout and way:
        pytest.skip("of plain scores")
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = force(**{"splits": 1, "fused": False, "descending": True, **way})
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    assert made


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96, 112])
def test_columns_of_dq_and_values_in_registers(
    head_dim: int, causal: bool, dtype: str, fused: bool, force: Any
) -> None:
    case = cases.make_case(
        "ways-registers", dtype=dtype, batch=2, seqlen_q=333, seqlen_k=500, num_heads=4, num_heads_kv=2,
        head_dim=head_dim, causal=causal,
    )  # fmt: skip
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    own, kept = head_dim > 64, head_dim <= 96
    for changes in (
        {"own_code": own},
        {"values_in_registers": kept},
        # Of 128 queries a tile there are no registers for keys too.
        {"own_code": own, "keys_in_registers": own and kept, "values_in_registers": kept},
    ):
        made = force(fused=fused, **changes)
        assert not failures(case, run.backward(run.forward()), exact, low, run.arrays), changes
        assert made


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 96])
def test_packed_sequences_with_values_in_registers(head_dim: int, causal: bool, force: Any) -> None:
    """What lies behind a sequence is another's, and may be anything."""
    case = cases.make_case(
        "ways-packed", dtype="bfloat16", batch=4, num_heads=4, num_heads_kv=2, head_dim=head_dim, causal=causal,
        seqlens=((300, 300), (77, 200), (515, 64), (130, 130)),
    )  # fmt: skip
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    made = force(own_code=head_dim in (72, 80), values_in_registers=True)
    assert not failures(case, run.backward(run.forward()), exact, low, run.arrays)
    assert made


PACKED: dict[str, dict[str, Any]] = {
    # Without keys, without queries, and tokens in no sequence.
    "packed": {"seqlens": ((300, 300), (0, 200), (515, 64), (130, 0), (77, 400)), "lead": (3, 5), "tail": (9, 300)},
    "packed_grouped": {"num_heads_kv": 2, "seqlens": ((200, 333), (640, 640), (1, 129)), "causal": True},
}
SMALL: dict[str, dict[str, Any]] = {
    "dense": {"seqlen_q": 333, "seqlen_k": 500},
    "causal": {"seqlen_q": 700, "seqlen_k": 700, "causal": True},
    "grouped": {"seqlen_q": 515, "seqlen_k": 640, "num_heads_kv": 2, "causal": True},
    "window": {"seqlen_q": 900, "seqlen_k": 900, "window_size": (100, 30)},
    "keys_unseen": {"seqlen_q": 100, "seqlen_k": 900, "causal": "top_left"},
    "negative_scale": {"seqlen_q": 500, "seqlen_k": 300, "softmax_scale": -0.1},
    **PACKED,
}


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize("head_dim", [24, 64, 72, 96, 112, 128])
@pytest.mark.parametrize("name", SMALL)
def test_two_slots_of_keys(name: str, head_dim: int, block_m: int, force: Any) -> None:
    """dk and dv that idle warps store are those that the consumers store; every element is written."""
    if block_m == 128 and head_dim > 64:
        pytest.skip("128 queries a tile fit in registers up to head dim 64")
    case = cases.make_case(
        f"ways-slots-{name}", **{"dtype": "bfloat16", "batch": 2, "num_heads": 4, "head_dim": head_dim, **SMALL[name]}
    )
    run = Run(case)
    exact, low = oracle(case, run.arrays)
    found = {}
    for slots in (1, 2):
        made = force(key_slots=slots, fused=False, splits=1, parts=1, block_m=block_m, descending=False)
        found[slots] = run.backward(run.forward())
        assert not failures(case, found[slots], exact, low, run.arrays), slots
        assert made
    for gradient in ("dk", "dv"):
        assert torch.equal(found[1][gradient], found[2][gradient]), gradient


@pytest.mark.parametrize(("head_dim", "block_m"), [(64, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize("packed", [False, True])
def test_two_slots_of_keys_many_times(packed: bool, head_dim: int, block_m: int, force: Any) -> None:
    """Rows that are stored before or behind their time would be those of another key tile. dk and dv have one order."""
    import nvrtc_attn.torch as na

    batch, length, heads = 24, 300, 16
    shape = (1, batch * length, heads, head_dim) if packed else (batch, length, heads, head_dim)
    q, k, v, dout = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    options: dict[str, Any] = {}
    if packed:
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=DEVICE)
        options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    out = na.attention(q, k, v, **options)
    force(key_slots=1, fused=False, splits=1, parts=1, block_m=block_m)
    expected = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    force(key_slots=2, fused=False, splits=1, parts=1, block_m=block_m)
    for _ in range(1000):
        found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[2], expected[2])
        assert float((found[0].float() - expected[0].float()).norm()) < 4e-3 * float(expected[0].float().norm())


@pytest.mark.parametrize(
    ("head_dim", "causal", "descending"),
    [(64, False, False), (64, True, False), (64, True, True), (80, True, True), (128, False, False), (128, True, True)],
)
def test_neighbours_of_a_sequence_may_hold_nan(head_dim: int, causal: bool, descending: bool, force: Any) -> None:
    """The last query and key tiles of a sequence hold rows of the next one, which both groups of consumers zero."""
    import nvrtc_attn.torch as na

    lengths = [300, 77, 515, 130, 64, 1, 190] * 6
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
    total, heads = sum(lengths), 8
    odd = torch.repeat_interleave(torch.arange(len(lengths), device=DEVICE) % 2 == 1, starts.diff())
    options: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": causal}
    options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    clean = [torch.randn(1, total, heads, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]

    def gradients(of_others: float) -> Any:
        q, k, v, dout = (torch.where(odd[:, None, None], of_others, x) for x in clean)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = na.attention(*leaves, **options)
        return lambda: [x[:, ~odd] for x in torch.autograd.grad(out, leaves, dout, retain_graph=True)]

    def close(found: Any, expected: Any) -> bool:
        return float((found.float() - expected.float()).norm()) < 4e-3 * float(expected.float().norm())

    made = force(descending=descending, splits=1, parts=1)
    # Rounded otherwise where other rows decide whether a warp of the forward pass scales its sums anew.
    expected = gradients(0.0)()
    again = gradients(float("nan"))
    first = again()
    assert all(map(close, first, expected))
    for _ in range(1000):
        found = again()
        assert close(found[0], first[0])
        assert torch.equal(found[1], first[1])
        assert torch.equal(found[2], first[2])
    assert made


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_parts_many_times(head_dim: int, force: Any) -> None:
    """A race between the parts of a tile, or with the launch that adds them up, would move a bit of dk or dv."""
    import nvrtc_attn.torch as na

    q, dout = (torch.randn(1, 4000, 8, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, 400, 8, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = na.attention(*leaves)
    block_m = 128 if head_dim == 64 else 80 if head_dim == 128 else 64
    force(parts=1, splits=1, fused=False, block_m=block_m)
    whole = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    made = force(parts=7, whole=6, splits=1, fused=False, block_m=block_m)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert made
    for _ in range(1000):
        dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        for x, y in zip((dq, dk, dv), whole, strict=True):
            assert float((x.float() - y.float()).norm()) < 4e-3 * float(y.float().norm())
