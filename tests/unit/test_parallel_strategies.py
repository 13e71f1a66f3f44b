"""How ranks share an attention: the strategies of ContextParallel in threads of one process, against the whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import cases  # noqa: E402
import numpy as np  # noqa: E402
import parallel_problems  # noqa: E402
from parallel_problems import Modified, Shared, take  # noqa: E402

import nvrtc_attn  # noqa: E402
from nvrtc_attn import heuristics  # noqa: E402
from nvrtc_attn.front.call import CallOptions, describe_shapes  # noqa: E402
from nvrtc_attn.front.chunks import band_of, chunks_of, joined, length, needed, places, together  # noqa: E402
from nvrtc_attn.front.documents import Packing, Piece, shared_documents  # noqa: E402
from nvrtc_attn.front.modified import banded_options  # noqa: E402
from nvrtc_attn.front.philox import RngState  # noqa: E402
from nvrtc_attn.front.problem import dense_layout  # noqa: E402
from nvrtc_attn.front.tensors import Device  # noqa: E402
from nvrtc_attn.front.validation import Violations, check_window  # noqa: E402
from nvrtc_attn.torch.parallel import local, merge_partials, strategies  # noqa: E402
from nvrtc_attn.torch.parallel.choice import groups_of, swaps  # noqa: E402
from nvrtc_attn.torch.parallel.exchange import Pending, contiguous, copy, copy_slices  # noqa: E402
from nvrtc_attn.torch.parallel.strategies.strategy import memory_of_columns, side_by_side  # noqa: E402

QUICK, FULL = 8, 2000


class Board:
    """A process group of threads: each puts up what it sends and takes what is for it."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, {}
        self.barrier = threading.Barrier(size, timeout=300)


class Member:
    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank


def exchange(group: Member, sends: Sequence[Any], receives: Sequence[Any]) -> Pending:
    """`exchange` between threads; refuses what torch.distributed would: tensors that do not agree."""
    board, rank = group.board, group.rank
    assert len(sends) == len(receives) == board.size
    board.sent[rank] = [[x.clone() for x in tensors] for tensors in sends]
    board.barrier.wait()
    for r, tensors in enumerate(receives):
        for mine, theirs in zip(tensors, board.sent[r][rank], strict=True):
            assert mine.shape == theirs.shape
            assert mine.dtype == theirs.dtype
            assert mine.is_contiguous() or r == rank
            mine.copy_(theirs)
    board.barrier.wait()
    return Pending()


def run_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` in as many threads; the first error of any."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            for board in boards:
                board.barrier.abort()

    boards.clear()
    threads = [threading.Thread(target=run, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors
    return results


boards: list[Board] = []


def check_kept(mine: Any, inputs: Any, own: Any, saved: Any) -> None:
    """What is kept is as `like_kept` says it, which programs are traced with; nothing of it shares memory."""
    kept = saved.kept
    like = mine.like_kept(inputs, own)
    assert [(x.shape, x.stride(), x.dtype) for x in kept] == [(x.shape, x.stride(), x.dtype) for x in like]
    others = [x for x in (*inputs, saved.out, saved.lse) if isinstance(x, torch.Tensor)]
    addresses = [x.untyped_storage().data_ptr() for x in kept if x.numel()]
    assert len({*addresses, *(x.untyped_storage().data_ptr() for x in others if x.numel())}) == len(
        {x.untyped_storage().data_ptr() for x in others if x.numel()}
    ) + len(addresses)
    assert not mine.like_kept(inputs, own._replace(backward_follows=False))


def make(name: str, size: int, chunks_q: Any, chunks_k: Any) -> Callable[[int], Any]:
    """The strategy of a rank."""
    board = Board(size)
    everything = strategies.AllGather(None, 0, [together(chunks_q)], [together(chunks_k)])

    def of(rank: int) -> Any:
        boards.append(board)
        if name.startswith("all_gather"):
            more: dict[str, Any] = {"all_gather kept": {"keep": True}, "all_gather again": {"keep": False}}.get(
                name, {}
            )
            pipeline = 1 if more else 2
            return strategies.AllGather(Member(board, rank), rank, chunks_q, chunks_k, pipeline, **more)
        if name == "ring":
            return strategies.Ring(Member(board, rank), rank, chunks_q, chunks_k)
        if name == "ulysses":
            return strategies.Ulysses(Member(board, rank), rank, chunks_q, chunks_k, everything, pipeline=2)
        width = 2
        inner, outer = Member(rows[rank // width], rank % width), Member(columns[rank % width], rank // width)
        boards.extend((inner.board, outer.board))
        mine = [slice(i, i + width) for i in range(0, size, width)]
        over = [[together(chunks[s]) for s in mine] for chunks in (chunks_q, chunks_k)]
        own = mine[rank // width]
        if name == "ulysses x ring":
            beyond, pipeline = strategies.Ring(outer, rank // width, *over), 2
        else:
            beyond, pipeline = strategies.AllGather(outer, rank // width, *over, 2), 1
        return strategies.Ulysses(inner, rank % width, chunks_q[own], chunks_k[own], beyond, pipeline)

    rows, columns = [Board(2) for _ in range(size // 2)], [Board(size // 2) for _ in range(2)]
    return of


def check(shared: Shared, name: str, size: int, monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> list[str]:
    """Run one problem on ``size`` threads; what is wrong with it."""
    monkeypatch.setattr(strategies.strategy, "exchange", exchange)
    case = shared.case
    given = parallel_problems.whole_tensors(case, device)
    keywords = parallel_problems.options(case)
    seed, offset = keywords.pop("rng")
    left, right = check_window(Violations(), case.causal, case.window_size)
    options = CallOptions(
        **keywords, return_lse=True, dbias="bias" in given, dsink="sink" in given, deterministic=case.deterministic
    )
    tokens = parallel_problems.tokens_of(case)
    packing = lengths = None
    if case.varlen and name == "ulysses":  # a rank has all tokens
        cu = torch.tensor(parallel_problems.starts_of(case), dtype=torch.int32, device=device)
        left, right, lengths = None, None, (cu, cu, None)
    elif case.varlen:
        packing = Packing(parallel_problems.starts_of(case), left, right)
    used = given.get("seqused_k")
    if used is not None and case.causal != "top_left" and (left, right) != (None, None):
        left = right = None  # the diagonal moves with the used keys
    whole = local.Whole(
        options, RngState(seed, offset), *tokens, band_of(left, right, *tokens, case.causal != "top_left"),
        sm_margin=None if device == "cpu" else 0, packing=packing, lengths=lengths, used=used,
    )  # fmt: skip
    chunks_q, chunks_k = (parallel_problems.chunks_for(shared, n, size) for n in tokens)
    strategy = make(name, size, chunks_q, chunks_k)

    def work(rank: int) -> Any:
        of_q, of_k = chunks_q[rank], chunks_k[rank]
        scores = [
            None if x is None else x if x.shape[2] == 1 else take(x, of_q, 2)
            for x in (given.get("bias"), given.get("mask"))
        ]
        mine = strategy(rank)
        inputs = strategies.Inputs(
            take(given["q"], of_q, 1),
            take(given["k"], of_k, 1),
            take(given["v"], of_k, 1),
            *scores,
            0,
            case.num_heads,
            given.get("sink"),
        )
        own = whole._replace(tables={})
        out, lse, saved = mine.forward(inputs, own)
        check_kept(mine, inputs, own, saved)
        dlse = take(given["dlse"], of_q, 2) if "dlse" in given else None
        return out, lse, *mine.backward(saved, own, take(given["dout"], of_q, 1), dlse)

    found: dict[str, Any] = {}
    for rank, results in enumerate(run_ranks(size, work)):
        for key, x in zip(("out", "lse", "dq", "dk", "dv", "dbias", "dsink"), results, strict=True):
            if x is None:
                continue
            x = x.cpu()
            if key == "dsink":  # the share of the rank's rows
                found[key] = found.get(key, 0) + x
                continue
            chunks = chunks_k[rank] if key in ("dk", "dv") else chunks_q[rank]
            dim = 2 if key in ("lse", "dbias") else 1
            if key == "dbias" and given["bias"].shape[2] == 1:
                found[key] = found.get(key, 0) + x.float()
                continue
            length_of = tokens[key in ("dk", "dv")]
            total = found.setdefault(key, torch.full((*x.shape[:dim], length_of, *x.shape[dim + 1 :]), torch.nan))
            for (a, b), at in zip(chunks, places(chunks, chunks), strict=True):
                total.narrow(dim, a, b - a).copy_(x.narrow(dim, at.start, b - a))
    return [f"{name} over {size}, {shared}: {fault}" for fault in parallel_problems.faults(case, found)]


CASES = [
    ("all_gather", 2), ("all_gather", 3), ("all_gather kept", 2), ("all_gather again", 3), ("ring", 2), ("ring", 3),
    ("ulysses", 2), ("ulysses", 4),
    ("ulysses x ring", 4), ("ulysses x all_gather", 4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "size"), CASES)
def test_random_problems_are_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    more = {"heads_divide": "ulysses" in name, "passes_keys": "ring" in name}
    for shared in parallel_problems.problems(11, QUICK, size, **more):
        faults += check(shared, name, size, monkeypatch)
    assert not faults, "\n".join(faults[:5])


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.parametrize(("bias", "mask"), [("bhqk", "111k"), ("11qk", None), ("1h1k", "b1qk")])
def test_a_single_row_of_a_rank_is_its_own_or_one_for_all(
    name: str, size: int, bias: str, mask: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query on every rank, on one of them alone, and on one beside ranks with many and with none."""
    faults = []
    uneven = [[(0, 1)], [(1, 9)], [], []][:size]
    for seqlen, layout in ((size, "contiguous"), (1, "contiguous"), (9, uneven)):
        case = cases.make_case(
            "single rows", dtype="float32", batch=2, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=4, num_heads_kv=2,
            head_dim=8, bias=bias, mask=mask,
        )  # fmt: skip
        faults += check(Shared(case=case, layout=layout), name, size, monkeypatch)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("name", "size"), [("ulysses", 4), ("ulysses x ring", 4), ("ulysses x all_gather", 4)])
def test_gradients_of_shared_key_heads_are_rounded_once(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dv depends on nothing that was rounded before: it is the bfloat16 next to the sum over all ranks."""
    monkeypatch.setattr(strategies.strategy, "exchange", exchange)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 64, heads, 8) for heads in (4, 1, 1, 4))
    q, k, v, dout = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    scores = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double()) / 8**0.5
    exact = torch.einsum("bhqk,bqhd->bkd", scores.softmax(-1), dout.double())[:, :, None]
    whole = local.Whole(CallOptions(return_lse=True), RngState(0, 0), 64, 64, (None, None))
    chunks = chunks_of("zigzag", 64, size)
    strategy = make(name, size, chunks, chunks)

    def work(rank: int) -> torch.Tensor:
        mine = strategy(rank)
        tensors = (take(x, chunks[rank], 1) for x in (q, k, v))
        *_, saved = mine.forward(strategies.Inputs(*tensors, None, None, 0, 4), whole)
        found, _ = strategies.gradients_of(mine, saved, whole, (), (), take(dout, chunks[rank], 1), None)
        return found.dv

    for rank, dv in enumerate(run_ranks(size, work)):
        expected = take(exact, chunks[rank], 1)
        assert dv.dtype == torch.bfloat16
        error = (dv.double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 1e-5).all(), float(error.max())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*CASES, ("all_gather", 7), ("ring", 5)])
def test_many_random_problems_are_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    more = {"heads_divide": "ulysses" in name, "passes_keys": "ring" in name}
    for shared in parallel_problems.problems(12, FULL // len(CASES), size, **more):
        faults += check(shared, name, size, monkeypatch)
    assert not faults, "\n".join(faults[:5])


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.turns(3)
def test_packed_sequences_are_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents cut anywhere, with windows, dropout and sinks: empty ones, one token, more ranks than tokens."""
    faults = []
    for shared in parallel_problems.packed_problems(15, 2 * QUICK, size, heads_divide="ulysses" in name):
        faults += check(shared, name, size, monkeypatch)
    assert not faults, "\n".join(faults[:5])


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_what_is_judged_again_and_wrong_stays_wrong(name: str) -> None:
    problems = parallel_problems.packed_problems(16, 50, 5, heads_divide=False)
    shared = next(x for x in problems if x.case.dtype != "float32")
    exact = cases.attention_dense(shared.case, cases.cast_inputs(shared.case, cases.make_arrays(shared.case)))
    found = {key: torch.from_numpy(np.array(exact[key])) for key in ("out", "lse", "dq", "dk", "dv")}
    assert not parallel_problems.faults(shared.case, found)
    found[name] = 1.1 * found[name]
    (said,) = parallel_problems.faults(shared.case, found)
    assert said.startswith(f"{name}: max error")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [*CASES, ("all_gather", 7), ("ring", 5)])
def test_many_packed_sequences_are_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    for shared in parallel_problems.packed_problems(16, FULL // len(CASES), size, heads_divide="ulysses" in name):
        faults += check(shared, name, size, monkeypatch)
    assert not faults, "\n".join(faults[:5])


def check_modified(given: Modified, name: str, size: int, monkeypatch: pytest.MonkeyPatch, device: str) -> list[str]:
    """Run one modifier on ``size`` threads: out, lse, gradients and the sums of those of captured arrays."""
    monkeypatch.setattr(strategies.strategy, "exchange", exchange)
    (q, k, v, dout), arrays = given.tensors(device)
    functions = given.case.make(arrays if device != "cpu" else {key: x.numpy() for key, x in arrays.items()})
    modifier = nvrtc_attn.trace(*functions)
    captures = [torch.as_tensor(x, device=device) for x in modifier.captures]
    options = CallOptions(**given.options, return_lse=True)
    lengths = given.sizes[2:]
    banded = banded_options(modifier, options, lengths)
    left, right = check_window(Violations(), banded.causal, banded.window_size)
    whole = local.Whole(
        options, RngState(3, 4), *lengths, band_of(left, right, *lengths, banded.causal != "top_left"),
        sm_margin=None if device == "cpu" else 0, modifier=modifier,
    )  # fmt: skip
    chunks_q, chunks_k = (chunks_of(given.layout, n, size) for n in lengths)
    strategy = make(name, size, chunks_q, chunks_k)

    def work(rank: int) -> Any:
        of_q, of_k = chunks_q[rank], chunks_k[rank]
        mine = strategy(rank)
        own = local.whole_with(whole, captures, [True] * len(captures))
        tensors = take(q, of_q, 1), take(k, of_k, 1), take(v, of_k, 1)
        out, lse, saved = mine.forward(strategies.Inputs(*tensors, None, None, 0, given.sizes[1]), own)
        dq, dk, dv, *_ = mine.backward(saved, own, take(dout, of_q, 1), None)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, own.daux

    expected = parallel_problems.of_one_call(given)
    found: dict[str, Any] = {key: np.full(x.shape, np.nan) for key, x in expected.items() if key != "daux"}
    found["daux"] = [None if x is None else np.zeros(x.shape) for x in expected["daux"]]
    for rank, (results, daux) in enumerate(run_ranks(size, work)):
        for key, x in results.items():
            chunks = chunks_k[rank] if key in ("dk", "dv") else chunks_q[rank]
            at = np.concatenate([np.arange(a, b) for a, b in chunks] or [np.arange(0)])
            place = (slice(None), slice(None), at) if key == "lse" else (slice(None), at)
            found[key][place] = x.cpu()
        for total, share in zip(found["daux"], daux, strict=True):
            if total is not None:
                total += share.cpu().numpy()
    return [f"{name} over {size}, {given}: {fault}" for fault in parallel_problems.differ(found, expected)]


@pytest.mark.parametrize(("name", "size"), CASES)
@pytest.mark.turns(3)
def test_modifiers_get_the_positions_of_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zigzag chunks, fetched keys and shares of heads: indices, captured arrays and their gradients are the whole's."""
    faults = []
    for given in parallel_problems.modified_problems(13, 2 * QUICK, size):
        faults += check_modified(given, name, size, monkeypatch, "cpu")
    assert not faults, "\n".join(faults[:5])


@pytest.mark.parametrize(("name", "size"), [case for case in CASES if case[0] != "ulysses"])
@pytest.mark.parametrize("causal", [False, True])
def test_modifiers_of_packed_sequences_get_their_places(
    name: str, size: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the document, positions in it, a captured array with its gradient, dropout: those of one call."""
    monkeypatch.setattr(strategies.strategy, "exchange", exchange)
    starts = (0, 9, 9, 10, 37, 61)
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(1, 64, heads, 8, generator=generator) for heads in (4, 2, 2, 4))
    table = torch.randn(5, 4, 30, generator=generator)
    modifier = nvrtc_attn.trace(
        lambda s, b, h, q, k: s + table[b, h, k] * 0.5 + 0.01 * q, lambda b, h, q, k: (3 * q + k + b) % 4 != 1
    )
    captures = [torch.as_tensor(x) for x in modifier.captures]
    keywords: dict[str, Any] = {"causal": causal, "dropout_p": 0.3, "max_seqlen_q": 27, "max_seqlen_k": 27}
    cu = torch.tensor(starts, dtype=torch.int32)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "rng": (3, 4), "score_mod": modifier, **keywords}
    expected: dict[str, Any] = {}
    expected["out"], expected["lse"] = nvrtc_attn.attention(q, k, v, return_lse=True, **packed)
    for key, x in (("dq", q), ("dk", k), ("dv", v)):
        expected[key] = torch.empty_like(x)
    expected["daux"] = [np.zeros(x.shape, np.float32) for x in captures]
    nvrtc_attn.attention_backward(
        dout, q, k, v, *list(expected.values())[:5],
        daux=expected["daux"], **packed,
    )  # fmt: skip
    whole = local.Whole(
        CallOptions(**keywords, return_lse=True), RngState(3, 4), 64, 64, (None, None), modifier=modifier,
        packing=Packing(starts, None, 0 if causal else None),
    )  # fmt: skip
    chunks = chunks_of("zigzag", 64, size)
    strategy = make(name, size, chunks, chunks)

    def work(rank: int) -> Any:
        own = local.whole_with(whole._replace(tables={}), captures, [True] * len(captures))
        mine = strategy(rank)
        tensors = (take(x, chunks[rank], 1) for x in (q, k, v))
        out, lse, saved = mine.forward(strategies.Inputs(*tensors, None, None, 0, 4), own)
        dq, dk, dv, *_ = mine.backward(saved, own, take(dout, chunks[rank], 1), None)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}, own.daux

    found: dict[str, Any] = {key: np.full(x.shape, np.nan) for key, x in expected.items() if key != "daux"}
    found["daux"] = [np.zeros(x.shape) for x in captures]
    for rank, (results, daux) in enumerate(run_ranks(size, work)):
        at = np.concatenate([np.arange(a, b) for a, b in chunks[rank]])
        for key, x in results.items():
            found[key][(slice(None), slice(None), at) if key == "lse" else (slice(None), at)] = x
        for total, share in zip(found["daux"], daux, strict=True):
            total += share.numpy()
    expected = {key: x if key == "daux" else x.numpy() for key, x in expected.items()}
    assert not parallel_problems.differ(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), CASES)
def test_many_modifiers_get_the_positions_of_the_whole(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = []
    for given in parallel_problems.modified_problems(14, 400, size):
        faults += check_modified(given, name, size, monkeypatch, "cpu")
    assert not faults, "\n".join(faults[:5])


@pytest.mark.parametrize("name", ["ulysses", "all_gather", "all_gather kept"])
@pytest.mark.parametrize("options", [{"causal": True}, {}, {"causal": True, "dropout_p": 0.2}])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_calls_of_ranks_are_planned_as_the_whole(
    name: str, options: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``plan_as``: every call of both passes has the kernels and tiles that the whole has on one H200."""
    size, seqlen, heads = 2, 4096, 8
    target: dict[str, Any] = {"arch": "sm_90", "num_sms": 132, "smem_limit": 232448}
    tile = ("kernel", "block_m", "block_n", "num_stages", "lazy_max", "ping_pong", "packed_heads")
    monkeypatch.setattr(strategies.strategy, "exchange", exchange)
    chosen = CallOptions(**options, return_lse=True, deterministic=True)

    def plan(shapes: Any, of_call: CallOptions, results: dict[str, Any], backward: bool) -> tuple[Any, ...]:
        call = describe_shapes(shapes, of_call, Device("cuda", 0)).with_outputs(**results)
        choose = heuristics.choose_backward if backward else heuristics.choose_forward
        plan_of_call = choose(call, **target)
        if not backward:
            return tuple(getattr(plan_of_call.main.config, field, None) for field in tile)
        main = next(x.config for x in plan_of_call.launches if x.config.kernel.startswith("backward"))
        return main.kernel, main.block_m

    def planned(*arguments: Any, **_: Any) -> Any:
        """In place of a pass: its plan, and a result of its shape."""
        q, k, v = arguments[:3]
        of_call = next(x for x in arguments if isinstance(x, CallOptions))
        backward = len(arguments) > 8
        results = arguments[9] if backward else (arguments[5],)
        names = ("dq", "dk", "dv") if backward else ("out",)
        layouts = {
            of: dense_layout(tuple(x.shape), str(x.dtype).removeprefix("torch."))
            for of, x in zip(names, results, strict=True)
        }
        shapes = {of: (tuple(x.shape), "bfloat16") for of, x in zip("qkv", (q, k, v), strict=True)}
        plans.append(plan(shapes, of_call, layouts, backward))
        return None if backward else q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    for module in (strategies.all_gather, strategies.ring):
        monkeypatch.setattr(module, "forward_here", planned)
        monkeypatch.setattr(module, "backward_here", planned)
    shapes = {of: ((1, seqlen, n, head_dim), "bfloat16") for of, n in zip("qkv", (heads, 4, 4), strict=True)}
    expected = {
        plan(shapes, chosen, {of: dense_layout(*shapes[like]) for of, like in pairs}, bool(len(pairs) > 1))
        for pairs in ((("out", "q"),), (("dq", "q"), ("dk", "k"), ("dv", "v")))
    }
    chunks = chunks_of("zigzag", seqlen, size)
    band = band_of(None, 0 if options.get("causal") else None, seqlen, seqlen, True)
    found = {}
    for plan_as in (True, False):
        plans: list[tuple[Any, ...]] = []
        whole = local.Whole(chosen, RngState(0, 0), seqlen, seqlen, band, sm_margin=0, plan_as=plan_as)
        strategy = make(name, size, chunks, chunks)

        def work(rank: int, strategy: Any = strategy, whole: Any = whole) -> None:
            q, k = (
                torch.empty(1, length(chunks[rank]), n, head_dim, dtype=torch.bfloat16, device="meta")
                for n in (heads, 4)
            )
            mine, own = strategy(rank), whole._replace(tables={})
            *_, saved = mine.forward(strategies.Inputs(q, k, k, None, None, 0, heads), own)
            mine.backward(saved, own, torch.empty_like(q), None)

        run_ranks(size, work)
        found[plan_as] = set(plans)
    assert found[True] == expected
    assert "dropout_p" in options or found[False] != expected  # what plan_as is for


def test_a_mask_that_is_a_window_fetches_only_what_it_reaches() -> None:
    """A band that mask_mod says is that of the options."""
    modifier = nvrtc_attn.trace(None, lambda b, h, q, k: (q >= k) & (q - k <= 5) & (k % 3 != 1))
    banded = banded_options(modifier, CallOptions(), (64, 64))
    left, right = check_window(Violations(), banded.causal, banded.window_size)
    chunks = chunks_of("contiguous", 64, 4)
    assert needed(chunks[1], band_of(left, right, 64, 64, banded.causal != "top_left"), 64) == ((11, 32),)


def test_keys_of_the_short_row_come_first_and_gradients_leave_early() -> None:
    """Two ranks, zigzag, causal: rank 0 begins with keys that it has, and what it returns is done after one row."""
    chunks = chunks_of("zigzag", 64, 2)
    whole = local.Whole(CallOptions(), RngState(0, 0), 64, 64, band_of(None, 0, 64, 64, True))
    routes = [strategies.AllGather(None, r, chunks, chunks)._routes(whole) for r in range(2)]
    assert (routes[0].first[1], routes[0].rest[1]) == ([[], []], [[], [slice(16, 48)]])
    assert (routes[1].first[1], routes[1].rest[1]) == ([[slice(0, 16)], []], [[], []])
    assert (routes[0].early[0][1], routes[0].late[0][1]) == ([slice(16, 48)], [])
    assert (routes[1].early[0][0], routes[1].late[0][0]) == ([slice(0, 16)], [])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("window", [(None, 0), (None, None), (7, 0), (9, 9)])
def test_every_needed_key_and_gradient_travels_once(ranks: int, window: tuple[int | None, int | None]) -> None:
    """What ranks send of each stage is what the others expect, the stages together what their rows see."""
    chunks = chunks_of("zigzag", 61, ranks)
    whole = local.Whole(CallOptions(), RngState(0, 0), 61, 61, band_of(*window, 61, 61, True))
    routes = [strategies.AllGather(None, r, chunks, chunks)._routes(whole) for r in range(ranks)]

    def tokens(of: strategies.all_gather._Routes, slices: list[slice]) -> list[int]:
        have = [i for a, b in of.have for i in range(a, b)]
        return [i for s in slices for i in have[s]]

    for r, of in enumerate(routes):
        seen = {i for a, b in needed(chunks[r], whole.band, 61) for i in range(a, b)}
        for other, theirs in enumerate(routes):
            if other == r:
                continue
            own = {i for a, b in chunks[other] for i in range(a, b)}
            stages = [tokens(of, stage[1][other]) for stage in (of.first, of.rest)]
            assert sorted([*stages[0], *stages[1]]) == sorted(tokens(of, of.everything[1][other])) == sorted(seen & own)
            for stage, name in zip(stages, ("first", "rest"), strict=True):
                assert stage == tokens(theirs, getattr(theirs, name)[0][r])
            back = [tokens(of, stage[0][other]) for stage in (of.early, of.late)]
            assert sorted([*back[0], *back[1]]) == sorted(seen & own)
            mine = [i for a, b in chunks[other] for i in range(a, b)]
            for stage, name in zip(back, ("early", "late"), strict=True):
                assert stage == [i for s in getattr(theirs, name)[1][r] for i in mine[s]]


def test_all_ranks_keep_what_they_fetched_or_none() -> None:
    """By the sizes of all of them: four times as many query heads keep the keys of two ranks, not those of four."""

    def keeps(ranks: int, heads_kv: int) -> set[bool]:
        chunks = chunks_of("zigzag", 64, ranks)
        whole = local.Whole(CallOptions(), RngState(0, 0), 64, 64, band_of(None, 0, 64, 64, True))
        q, k = torch.zeros(1, 8, 8, 4), torch.zeros(1, 8, heads_kv, 4)
        x = strategies.Inputs(q, k, k, None, None, 0, 8)
        return {strategies.AllGather(None, r, chunks, chunks)._keeps(x, whole) for r in range(ranks)}

    assert (keeps(2, 2), keeps(4, 2), keeps(2, 8)) == ({True}, {False}, {False})


@pytest.mark.parametrize("seqlen", [0, 1, 7, 64, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_layouts_hold_every_token_once(layout: str, ranks: int, seqlen: int) -> None:
    chunks = chunks_of(layout, seqlen, ranks)
    assert sorted(i for mine in chunks for a, b in mine for i in range(a, b)) == list(range(seqlen))
    sizes = [length(mine) for mine in chunks]
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)


def test_zigzag_shares_the_work_of_a_causal_mask() -> None:
    work = [sum(sum(range(a + 1, b + 1)) for a, b in mine) for mine in chunks_of("zigzag", 4096, 4)]
    assert max(work) == min(work)


def _scores(chunks: Any, starts: Sequence[int]) -> int:
    """Of causal attention, one token at a time."""
    return sum(1 + i - max(x for x in starts if x <= i) for a, b in chunks for i in range(a, b) if i < starts[-1])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("lengths", "tail"),
    [
        ((4096,), 0), ((100,) * 40, 0), ((2500, 30, 1, 0, 800, 7, 700), 11), ((1, 1, 1000, 1, 1), 0),
        ((700, 20, 20, 20, 650, 20, 20, 900), 100), ((1,) * 50, 0), ((0, 0), 3), ((), 5), ((2,), 0),
        ((13, 10, 13, 15, 14), 0), ((5, 4, 5, 11, 10), 0),
    ],
)  # fmt: skip
def test_documents_share_tokens_and_work(lengths: tuple[int, ...], tail: int, ranks: int) -> None:
    """Every token once, as many on all ranks to within one, causal work within 5 % where it is long."""
    starts = [0, *np.cumsum(lengths, dtype=int).tolist()]
    seqlen = starts[-1] + tail
    chunks = shared_documents(starts, seqlen, ranks)
    assert sorted(i for mine in chunks for a, b in mine for i in range(a, b)) == list(range(seqlen))
    sizes = [length(mine) for mine in chunks]
    assert max(sizes) - min(sizes) <= 1
    if seqlen > 500:
        work = [_scores(mine, starts) for mine in chunks]
        assert max(work) * ranks <= 1.05 * sum(work)


def test_short_documents_are_not_cut_in_pieces() -> None:
    """Equal short ones have equal work as they lie: one interval a rank. One long one among them is zigzag."""
    assert [len(mine) for mine in shared_documents(range(0, 64001, 100), 64000, 4)] == [1, 1, 1, 1]
    long = [0, 32000, *range(32100, 64001, 100)]
    assert max(len(mine) for mine in shared_documents(long, 64000, 4)) == 3


def test_a_chunk_of_packed_sequences_is_three_calls_at_most() -> None:
    """The rest of a document, the documents that are in the chunk whole, and a last one that goes on."""
    starts = (0, 10, 10, 14, 15, 40)
    causal, full, window = (Packing(starts, *sides) for sides in ((None, 0), (None, None), (3, 2)))
    assert causal.pieces(((4, 20),)) == [
        Piece((4, 10), (0, 10), 0, 4), Piece((10, 15), (10, 15), 2, lengths=(0, 4, 5)), Piece((15, 20), (15, 20), 4),
    ]  # fmt: skip
    assert full.pieces(((4, 20),)) == [
        Piece((4, 10), (0, 10), 0, 4), Piece((10, 15), (10, 15), 2, lengths=(0, 4, 5)), Piece((15, 20), (15, 40), 4),
    ]  # fmt: skip
    assert window.pieces(((20, 30),)) == [Piece((20, 30), (17, 32), 4, 5, 2)]
    assert causal.pieces(((38, 45),)) == [Piece((38, 40), (15, 40), 4, 23), Piece((40, 45), (0, 0), -1)]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("sideways", TypeError),
        ([[(0, 8)]], ValueError),
        ([[(0, 4)], [(3, 8)]], ValueError),
        ([[(4, 8), (0, 4)], []], ValueError),
        ([[(0, 4)], [(5, 8)]], ValueError),
        ([(0, 4), (4, 8)], TypeError),
        ([[(0, 4.5)], [(4.5, 8)]], TypeError),
        ([[(0, 4, 8)], []], TypeError),
        (np.asarray([[(0, 4)], [(4, 8)]]), TypeError),
    ],
)
def test_wrong_layouts_are_refused(layout: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="layout"):
        chunks_of(layout, 8, 2)


@pytest.mark.parametrize(
    ("heads_kv", "keys", "expected"),
    [(4, 16384, 1), (8, 16384, 1), (8, 65536, 3), (16, 16384, 1), (32, 65536, 4), (0, 0, 1)],
)
def test_heads_are_exchanged_in_groups_that_keep_a_gpu_busy(heads_kv: int, keys: int, expected: int) -> None:
    assert groups_of(heads_kv, keys) == expected


@pytest.mark.parametrize(
    ("heads", "heads_kv", "ranks", "expected"),
    [(32, 8, 2, False), (32, 8, 4, True), (32, 32, 2, True), (32, 8, 8, True)],
)
def test_auto_takes_what_sends_less(heads: int, heads_kv: int, ranks: int, expected: bool) -> None:
    elements = {
        True: 2 * 2 * (2 * heads + 2 * heads_kv) / ranks,  # both passes, 2 bytes
        False: (2 + 4) * 2 * heads_kv,  # k and v, and their gradients in float32
    }
    assert swaps(heads, heads_kv, ranks) is expected is (elements[True] < elements[False])


def test_a_window_fetches_only_what_it_reaches() -> None:
    chunks = chunks_of("contiguous", 64, 4)
    band = band_of(5, 0, 64, 64, True)
    assert [needed(mine, band, 64) for mine in chunks] == [((0, 16),), ((11, 32),), ((27, 48),), ((43, 64),)]
    assert needed(chunks_of("zigzag", 64, 2)[0], band_of(None, 0, 64, 64, True), 64) == ((0, 64),)
    assert joined([(0, 3), (3, 5), (7, 7), (8, 9)]) == ((0, 5), (8, 9))


def test_partial_results_are_merged() -> None:
    """Keys in three parts, one of which no row sees: out and lse are the whole's, rows without keys 0 and -inf."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 16, generator=generator) for n in (20, 12, 12))
    whole, whole_lse = nvrtc_attn.attention(q, k, v, causal=True, return_lse=True)
    outs, lses = zip(
        *[
            nvrtc_attn.attention(
                q, k[:, a:b], v[:, a:b], causal=True, return_lse=True,
                part=nvrtc_attn.Part(rows=(0, 20), keys=(a, 12)),
            )
            for a, b in ((0, 5), (5, 5), (5, 12))
        ],
        strict=True,
    )  # fmt: skip
    out, lse = merge_partials(outs, lses)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-6, rtol=0)
    assert (out[:, :8] == 0).all()
    assert torch.isneginf(lse[:, :, :8]).all()


@pytest.mark.parametrize("head_dim", [64, 24, 5])  # elements of 16 bytes, of 16 bytes in half of the dtypes, and not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_copies_are_exact_whatever_the_elements_are(dtype: torch.dtype, head_dim: int) -> None:
    x = (torch.randn(2, 12, 6, head_dim) * 3).to(dtype)
    for source in (x, x[:, :, 1:4], x[:, 3:], x.transpose(1, 3), x[..., 1:], x[:1].expand(2, -1, -1, -1)):
        to = torch.zeros(2, 64, 8, 96).to(dtype)[:, : source.shape[1], : source.shape[2], : source.shape[3]]
        copy(to, source)
        assert torch.equal(to, source)
        found = contiguous(source)
        assert found.is_contiguous()
        assert torch.equal(found, source)
        assert (found is source) == source.is_contiguous()


@pytest.mark.parametrize(
    ("at", "of"),
    [
        ([slice(0, 3), slice(9, 12)], [slice(0, 3), slice(3, 6)]),  # zigzag's two chunks
        ([slice(2, 4), slice(5, 7), slice(8, 10)], [slice(0, 2), slice(2, 4), slice(10, 12)]),  # evenly on one side
        ([slice(0, 1), slice(4, 9)], [slice(0, 1), slice(1, 6)]),  # of different lengths
        ([slice(6, 9), slice(0, 3)], [slice(3, 6), slice(0, 3)]),  # backwards
        ([slice(1, 5)], [slice(0, 4)]),
        ([], []),
    ],
)
def test_slices_are_copied_to_their_places(at: list[slice], of: list[slice]) -> None:
    x = torch.randn(12, 2, 3, 8)
    to = torch.zeros(12, 2, 5, 8)
    expected = to.clone()
    for s, t in zip(at, of, strict=True):
        expected[s, :, 1:4] = x[t]
    copy_slices(to[:, :, 1:4], at, x, of)
    assert torch.equal(to, expected)


def test_columns_of_one_tensor_are_told_from_others() -> None:
    like = [torch.zeros(2, 7, heads, 16) for heads in (6, 2, 2)]
    (memory,), columns = side_by_side(like, 7)
    memory.normal_()
    found = memory_of_columns(columns)
    assert found is not None
    assert found.data_ptr() == memory.data_ptr()
    assert torch.equal(found, memory)
    assert memory_of_columns(columns[:2]) is None  # not all of it
    assert memory_of_columns([columns[0], columns[2], columns[1]]) is None
    assert memory_of_columns([columns[0], columns[1], columns[2].clone()]) is None
    assert memory_of_columns([x.transpose(0, 1) for x in like]) is None
