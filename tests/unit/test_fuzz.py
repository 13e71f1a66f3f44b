"""The fuzz campaign: its reference is right, it finds what is wrong, and a slice of it on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import fuzz
import fuzz_numpy
import fuzz_problems
import numpy as np
import pytest

from nvrtc_attn.cpu.attention import reference
from nvrtc_attn.front import philox

SEED = 12


@functools.cache
def drawn() -> list[fuzz_problems.Problem]:
    return [fuzz_problems.problem(SEED, index) for index in range(2500)]


def small() -> list[fuzz_problems.Problem]:
    return [p for p in drawn() if p.scores <= 20_000]


@pytest.fixture(autouse=True)
def _backend_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each problem that is run sets its own, and the command turns measuring off."""
    monkeypatch.setenv("NVRTC_ATTN_BACKEND", "auto")
    monkeypatch.setenv("NVRTC_ATTN_AUTOTUNE", "0")


@pytest.mark.parametrize("feature", fuzz_problems.FEATURES)
def test_the_campaign_covers_the_feature(feature: str) -> None:
    assert sum(map(fuzz_problems.FEATURES[feature], drawn())) >= 5


def test_problems_replay_and_reach_every_size() -> None:
    assert fuzz_problems.problem(SEED, 77) == drawn()[77]
    assert fuzz_problems.problem(SEED + 1, 77) != drawn()[77]
    assert "--replay 12:77" in fuzz.failure(SEED, 77, ["out: wrong"])
    assert "\n" not in fuzz.failure(SEED, 77, ["several\nlines"])
    dims = {d for p in drawn() for d in (p.case.head_dim, p.case.head_dim_v)}
    assert min(dims) <= 8
    assert max(dims) >= 480
    lengths = {n for p in drawn() for n in (p.case.seqlen_q, p.case.seqlen_k)}
    assert 0 in lengths
    assert max(lengths) > 2500
    assert len(lengths) > 300
    assert {(n - 1, n, n + 1) for n in (64, 128, 256)} <= {
        (n - 1, n, n + 1) for n in lengths if {n - 1, n + 1} <= lengths
    }
    assert max(p.scores for p in drawn()) <= 20_000_000
    assert {p.case.bias for p in drawn()} >= set(cases.BIAS_SHAPES)


def test_kernels_are_known_without_a_gpu() -> None:
    plan = fuzz.make_plan(SEED, 60, 150, fuzz.H200, workers=1)
    assert len(plan.indices) == 60
    assert len(plan.kernels) <= 150
    planned = [fuzz_problems.problem(SEED, index) for index in plan.indices]
    needed = {config for p in planned for config in fuzz_problems.kernel_configs(p, **fuzz.H200)}
    assert needed == set(plan.kernels)
    few = fuzz.make_plan(SEED, 20, 40, fuzz.H200, workers=1, first=500, structures=frozenset((2, 5)))
    assert min(few.indices) >= 500
    assert {fuzz_problems.problem(SEED, index).structure for index in few.indices} == {2, 5}
    assert {"forward_portable", "forward_hopper", "backward_portable"} <= {config.kernel for config in needed}


@pytest.mark.slow(sample=["60"])
@pytest.mark.parametrize("count", [60, 200])
@pytest.mark.turns(3)
def test_a_slice_on_the_cpu(count: int) -> None:
    outcome, indices = fuzz.cpu_campaign(SEED, 0, count, 4_000)
    assert outcome.done == len(indices) == count
    assert not outcome.wrong


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dbias"])
def test_a_wrong_result_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    p = next(
        p for p in small() if p.want_dbias and p.case.seqlen_q > 20 and p.case.seqlen_k > 20 and p.case.bias[3] == "k"
    )
    assert fuzz_numpy.check(p) == []
    position = {"out": 0, "lse": 1, "dq": 0, "dk": 1, "dv": 2, "dbias": 3}[name]
    function = "attention_forward" if name in ("out", "lse") else "attention_backward"
    right = getattr(reference, function)

    def wrong(*args: Any, **options: Any) -> Any:
        results = list(right(*args, **options))
        bad = results[position].copy()
        at = np.unravel_index(np.argmax(np.where(np.isfinite(bad), np.abs(bad), 0)), bad.shape)
        bad[at] *= 1.25
        results[position] = bad
        return tuple(results)

    monkeypatch.setattr(reference, function, wrong)
    monkeypatch.setattr(fuzz_problems, "problem", lambda seed, index: p)
    outcome, _ = fuzz.cpu_campaign(p.seed, p.index, 1, 10**9)
    (lines,) = outcome.wrong.values()
    assert any(line.startswith(f"{name}:") for line in lines)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"WRONG python tests/fuzz.py --cpu --replay {p.seed}:{p.index} | ")
    assert fuzz.exit_code(outcome, 1) == 1


def test_a_missing_element_and_an_unwritten_one_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    p = next(p for p in small() if p.case.varlen and p.case.tail[0] and p.outside_nan)
    assert fuzz_numpy.check(p) == []
    found = fuzz_numpy.run(fuzz_numpy.on_cpu(p), fuzz_numpy.make_arrays(p))
    assert not any(np.isnan(x).any() for x in found.values())
    monkeypatch.setattr(fuzz_numpy, "poison_outside", lambda p, arrays: arrays)
    monkeypatch.setattr(fuzz_numpy.nvrtc_attn, "attention_backward", lambda *args, **options: None)
    lines = fuzz_numpy.check(p)
    assert {line.split(":")[0] for line in lines} >= {"dq", "dk", "dv"}


# ---------------------------------------------------------------------------------------------------------------------
# The reference in torch


def _torch() -> Any:
    pytest.importorskip("torch", reason="torch is not installed: it is what the reference on the GPU is written in")
    import fuzz_torch

    fuzz_torch.torch.set_num_threads(1)  # as the workers of a campaign
    return fuzz_torch


@pytest.mark.parametrize("start", [0, 3, 2**34 - 5, 2**62 + 1, 2**64 - 9])
@pytest.mark.parametrize("seed", [0, 1234, 2**64 - 1, 2**63 + 5])
def test_philox_in_torch(seed: int, start: int) -> None:
    words = _torch().philox_words(seed, start, 103, "cpu").numpy()
    assert np.array_equal(words, philox.words(seed, start, 103).astype(np.int64))


@pytest.mark.parametrize("part", range(4))
def test_torch_reference_agrees_with_the_oracle(part: int) -> None:
    fuzz_torch = _torch()
    compared = 0
    for p in small()[part:80:4]:
        case = p.case
        run = fuzz_torch.Run(dataclasses.replace(p, outside_nan=False), "cpu")
        exact, (low,) = fuzz_torch.references(run)
        arrays = {name: x.double().numpy() for name, x in run.inputs.items() if name != "mask"}
        if case.mask is not None:
            arrays["mask"] = run.inputs["mask"].numpy()
        for precision, results in (("float64", exact), (case.dtype, low)):
            expected = cases.attention_dense(case, arrays, precision)
            assert results.keys() == expected.keys()
            for name, x in expected.items():
                value = results[name].double().numpy()
                assert value.shape == x.shape
                if precision == "float64":
                    np.testing.assert_allclose(value, x, rtol=1e-9, atol=1e-11, err_msg=f"{name} of {p}")
        # Samples of the same rounding errors: none is much larger than the other.
        inputs = cases.cast_inputs(case, arrays, np.float32)
        for name, x in cases.attention_low_precision(case, inputs).items():
            if name == "lse" or x.size < 500 or case.dtype == "float32":
                continue
            truth = exact[name].numpy()
            ours, theirs = (np.sqrt(np.mean((y - truth) ** 2)) for y in (low[name].double().numpy(), x))
            assert theirs / 1.5 - 1e-7 <= ours <= 1.5 * theirs + 1e-7, (name, p)
            compared += 1
    assert compared > 5


def test_mask_kinds_agree() -> None:
    torch = pytest.importorskip("torch")
    u = np.random.default_rng(0).random((2, 3, 70, 150), np.float32)
    for kind in cases.MASK_KINDS:
        for shape in ((2, 3, 70, 150), (1, 3, 1, 150), (2, 1, 70, 1), (1, 1, 0, 5)):
            part = np.ascontiguousarray(u[tuple(slice(0, n) for n in shape)])
            mask = cases.make_mask(kind, part)
            assert mask.shape == shape
            assert mask.dtype == np.bool_
            assert np.array_equal(mask, cases.make_mask(kind, torch.from_numpy(part)).numpy()), kind
    assert cases.make_mask("full", u).all()
    assert not cases.make_mask("empty", u).any()
    rows = cases.make_mask("padding", u)[0, 0]
    assert (np.diff(rows.astype(int), axis=1) <= 0).all()
    assert (rows == rows[:1]).all()
    with pytest.raises(ValueError, match="mask_kind: got 'diagonal'"):
        cases.make_mask("diagonal", u)


def test_the_gpu_runner_on_the_cpu() -> None:
    """All of `fuzz_torch.judge` but the kernels and their workspace."""
    fuzz_torch = _torch()
    seen = set()
    for p in small()[600:640]:
        assert fuzz_torch.judge(p, "cpu").lines("cpu", appeal=True) == [], p
        seen |= {name for name, holds in fuzz_problems.FEATURES.items() if holds(p)}
    assert seen >= {"bias gradient", "mask", "dropout", "varlen NaN outside", "seqused_k", "dlse", "layout packed"}


@pytest.mark.parametrize("fault", ["value", "unwritten", "outside", "unrepeatable"])
def test_the_gpu_runner_finds_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fuzz_torch = _torch()
    p = next(p for p in small() if p.want_dbias and p.case.layout == "packed" and p.case.seqlen_q > 20)
    p = dataclasses.replace(p, repeat=fault == "unrepeatable")
    right, calls = fuzz_torch.nvrtc_attn.attention_backward, []

    def wrong(*args: Any, **options: Any) -> None:
        right(*args, **options)
        calls.append(args)
        dv = args[8]
        if fault == "value":
            dv[0, 3, 0, 0] += 0.25
        elif fault == "unwritten":
            dv[0, 3, 0, 0] = float("nan")
        elif fault == "outside":
            around = dv.as_strided((1,), (1,), dv.storage_offset() + dv.stride(1) - 1)
            assert bool(around.isnan())
            around.fill_(0)
        elif len(calls) > 1:
            dv[0, 3, 0, 0] += 1

    assert fuzz_torch.judge(p, "cpu").lines("cpu") == []
    p = dataclasses.replace(p, case=dataclasses.replace(p.case, deterministic=True))
    monkeypatch.setattr(fuzz_torch.nvrtc_attn, "attention_backward", wrong)
    verdict = fuzz_torch.judge(p, "cpu")
    lines = verdict.lines("cpu", appeal=False)
    assert len(lines) == 1
    assert lines[0].startswith({"outside": "1 elements around", "unrepeatable": "two runs"}.get(fault, "dv: max error"))
    calls.clear()
    assert verdict.lines("cpu")[0][:12] == lines[0][:12]


def one_key() -> fuzz_problems.Problem:
    """dv is the sum of dout over 8 heads of 2048 queries."""
    case = cases.make_case(
        "one-key", dtype="float32", batch=1, num_heads=8, num_heads_kv=1, seqlen_q=2048, seqlen_k=1, head_dim=32
    )
    plain = next(p for p in small() if p.backend == "auto" and not p.case.varlen)
    return dataclasses.replace(plain, case=case, want_dbias=False, bias_hidden=False, outside_nan=False, repeat=False)


def in_order(dout: np.ndarray[Any, Any], tile: int = 32) -> np.ndarray[Any, Any]:
    """The sum over heads and rows of ``[1, rows, heads, dim]`` as a kernel adds it up: tiles of rows, one by one."""
    rows = dout[0].swapaxes(0, 1).reshape(-1, tile, dout.shape[-1])
    chains = np.zeros_like(rows[:, 0])
    for step in range(tile):
        chains = chains + rows[:, step]
    return np.add.accumulate(chains, axis=0, dtype=np.float32)[-1]


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (3.0, False)])
def test_float32_sums_in_order_pass_and_three_times_their_error_does_not(
    factor: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz_torch = _torch()
    p = one_key()
    right, dense = fuzz_torch.nvrtc_attn.attention_backward, fuzz_torch.attention_dense

    def ours(*args: Any, **options: Any) -> None:
        right(*args, **options)
        dout, dv = args[0].numpy(), args[8]
        exact = dout.sum((1, 2), dtype=np.float64)
        dv[0, 0, 0] = fuzz_torch.torch.from_numpy(exact[0] + factor * (in_order(dout) - exact[0]))

    def pairwise(*args: Any, **options: Any) -> Any:
        """The plain yardstick of a library whose products add few parts of a long sum: exact but for its last bit."""
        results = dense(*args, **options)
        if len(args) > 3 and args[3] == "float32" and options.get("tile") is None:
            results["dv"] = args[1]["dout"].double().sum((1, 2)).float().reshape(results["dv"].shape)
        return results

    monkeypatch.setattr(fuzz_torch.nvrtc_attn, "attention_backward", ours)
    monkeypatch.setattr(fuzz_torch, "attention_dense", pairwise)
    verdict = fuzz_torch.judge(p, "cpu")
    assert [line.split(":")[0] for line in verdict.lines("cpu", appeal=False)] == ["dv"]
    assert [line.split(":")[0] for line in verdict.lines("cpu")] == ([] if passes else ["dv"])


@pytest.mark.parametrize("tile", [1, 32, 10**6])
def test_gradients_in_order_are_the_same_gradients(tile: int) -> None:
    fuzz_torch = _torch()
    compared = 0
    for p in [p for p in small() if p.case.num_heads > p.case.num_heads_kv and p.case.dtype == "float32"][:6]:
        run = fuzz_torch.Run(dataclasses.replace(p, outside_nan=False), "cpu")
        geometry = fuzz_torch.Geometry(p.case, "cpu")
        keep = fuzz_torch.keep_mask(p.case, "cpu") if p.case.dropout_p > 0 else None
        plain = fuzz_torch.attention_dense(p.case, run.inputs, geometry, "float64", keep)
        tiled = fuzz_torch.attention_dense(p.case, run.inputs, geometry, "float64", keep, tile=tile)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_allclose(tiled[name].numpy(), plain[name].numpy(), rtol=1e-9, atol=1e-10, err_msg=str(p))
            compared += plain[name].numel()
    assert compared > 1000


def test_packed_operands_are_bounded() -> None:
    """A problem of few scores may be large all the same: many long sequences over one key each."""
    packed = [p for seed in (3, SEED) for p in (fuzz_problems.problem(seed, n) for n in range(1200)) if p.case.varlen]
    for p in packed:
        c = p.case
        padded = c.batch * c.num_heads * (c.seqlen_q + c.seqlen_k) * max(c.head_dim, c.head_dim_v)
        assert padded <= fuzz_problems.MAX_PADDED or c.batch == 1, p
    assert max(p.case.batch for p in packed) > 35


class _Queue(list[Any]):
    def put(self, message: Any) -> None:
        self.append(message)


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.parametrize("appealed", [False, True])
def test_a_harness_out_of_memory_is_no_wrong_result(
    failures: int, appealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker tries once more, then hands the problem over."""
    fuzz_torch = _torch()
    indices = [p.index for p in small()[600:603]]
    tries = dict.fromkeys(indices, 0)

    def memory(index: int) -> None:
        tries[index] += 1
        if index == indices[1] and tries[index] <= failures:
            raise fuzz_torch.torch.OutOfMemoryError("CUDA out of memory.")

    class Verdict:
        def __init__(self, p: fuzz_problems.Problem) -> None:
            self.problem = p

        def lines(self, device: str, *, appeal: bool = True) -> list[str]:
            if appealed and appeal:
                memory(self.problem.index)
            return ["dv: max error"] if appealed and not appeal else []

    def judge(p: fuzz_problems.Problem, device: str) -> Verdict:
        if not appealed:
            memory(p.index)
        return Verdict(p)

    monkeypatch.setattr(fuzz_torch, "judge", judge)
    results = _Queue()
    counter, stop = fuzz.multiprocessing.Value("q", 0), fuzz.multiprocessing.Event()
    fuzz._work(0, "cpu", SEED, indices, 1.0, counter, stop, [0], results)
    kinds = [message[0] for message in results]
    assert "wrong" not in kinds
    assert "fault" not in kinds
    handed = [message[1] for message in results if message[0] == "alone"]
    assert handed == ([indices[1]] if failures == 2 else [])
    assert sum(message[1] for message in results if message[0] == "done") + len(handed) == 3
    assert tries[indices[1]] == 2


def test_what_ran_out_of_memory_is_run_alone_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = fuzz.Outcome(done=5, alone={7: "OutOfMemoryError: x", 9: "OutOfMemoryError: y"})
    asked = []

    def alone(seed: int, indices: list[int], device: str, workers: int) -> fuzz.Outcome:
        asked.append((seed, indices, device, workers))
        return fuzz.Outcome(done=2, wrong={9: ["OutOfMemoryError: y"]})

    monkeypatch.setattr(fuzz, "run_campaign", alone)
    fuzz._run_alone(SEED, "cuda", outcome)
    assert asked == [(SEED, [7, 9], "cuda", 1)]
    assert (outcome.done, list(outcome.wrong)) == (7, [9])
    assert "run alone, as memory ran out beside other workers: 2" in fuzz.summary(SEED, outcome)
    assert fuzz._out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert not fuzz._out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_the_command_in_two_processes(capsys: pytest.CaptureFixture[str]) -> None:
    _torch()
    command = ["--device", "cpu", "--problems", "12", "--kernels", "400", "--compilers", "1", "--workers", "2"]
    assert fuzz.main([*command, "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert "12 problems of" in out
    assert ", 0 wrong, " in out


@pytest.mark.parametrize("name", ["used-short-64", "used-mask", "used-bias-mask-dropout", "used-window", "used-decode"])
def test_torch_reference_knows_used_keys_of_a_dense_batch(name: str) -> None:
    torch = pytest.importorskip("torch")
    import fuzz_torch

    (case,) = (case for case in cases.named_cases() if case.name == name)
    arrays = cases.make_arrays(case)
    expected = cases.attention_dense(case, arrays)
    inputs = {name: torch.from_numpy(np.array(x)) for name, x in arrays.items()}
    keep = fuzz_torch.keep_mask(case, "cpu") if case.dropout_p > 0 else None
    found = fuzz_torch.attention_dense(case, inputs, fuzz_torch.Geometry(case, "cpu"), "float64", keep)
    for name, x in expected.items():
        np.testing.assert_allclose(found[name].numpy(), x, atol=1e-6, err_msg=name)
