"""The benchmarks run as they are documented, here without a GPU and at tiny sizes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest


def run_benchmark(repository: Path, *arguments: str) -> str:
    command = [sys.executable, str(repository / "benchmarks" / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_two_checkouts_are_compared_line_by_line(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "times.json"
    printed = run_benchmark(
        repository, "trees.py", f"old={repository}", f"new={repository}", "--dry-run", "--rounds", "1",
        "--only", "host|D 64|dbias", "--json", str(path),
    )  # fmt: skip
    times = json.loads(path.read_text())["microseconds"]
    assert set(times) == {"old", "new"}
    assert set(times["old"]) == set(times["new"])
    lines = set(times["old"])
    assert {name.split(" ")[0] for name in lines} == {"host", "fwd", "bwd"}
    assert len([name for name in lines if name.startswith("host")]) == 4
    assert all(min(values) > 0 for found in times.values() for values in found.values())
    assert all(line in printed for line in lines)
    assert "ratio" in printed


def test_training_curves_of_torchs_attention_and_ours(repository: Path) -> None:
    """In float32 they differ by rounding only; a script that took no call would say so."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("torch.library.get_kernel is missing (torch >= 2.9.1 has it)")
    printed = run_benchmark(repository, "training_curves.py", "--steps", "4", "--dtype", "float32").splitlines()
    header = next(index for index, line in enumerate(printed) if line.split()[:2] == ["model", "mode"])
    column = printed[header].index("largest difference") + len("largest difference")
    rows = printed[header + 1 :]
    assert {row.split()[0] for row in rows} >= {"nn.MultiheadAttention", "nn.TransformerEncoder"}
    assert all(float(row[:column].split()[-1]) < 1e-3 for row in rows)


def test_a_folder_that_is_no_checkout_is_refused(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "trees.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "no checkout" in done.stderr


@pytest.fixture
def benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, importable."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return repository / "benchmarks"


def test_cases_of_models_are_well_formed(benchmarks: Path) -> None:
    from model_cases import CASES, KINDS, in_turns

    assert len(CASES) >= 45
    assert {case.kind for case in CASES} == set(KINDS)
    assert len({case.name for case in CASES}) == len(CASES)
    assert sum(case.backward for case in CASES) >= 40
    for case in (*CASES, *(case.tiny() for case in CASES)):
        assert case.h % case.heads_kv == 0, case.name
        assert case.d % 8 == 0, case.name
        assert (case.q > 0) != bool(case.packed), case.name
        assert len(case.lengths) == (case.b if case.padding else 0), case.name
        assert all(0 < n <= case.seqlen_k for n in case.lengths), case.name
        assert not (case.block and case.q % case.block), case.name
        assert case.window is None or not case.causal or case.window[1] == 0, case.name
        assert case.flops() > 0
    assert sorted(case.name for case in in_turns(CASES)) == sorted(case.name for case in CASES)
    assert {case.kind for case in in_turns(CASES)[: len(KINDS)]} == set(KINDS)


def test_cases_that_a_seed_draws(benchmarks: Path) -> None:
    """The same for everybody, of every kind, and no more work than a run has time for."""
    from drawn_cases import drawn
    from model_cases import KINDS

    found = drawn(1)
    assert found == drawn(1)
    assert [case.shape for case in found] != [case.shape for case in drawn(2)]
    for case in (*found, *drawn(2), *(case.tiny() for case in found)):
        assert case.h % case.heads_kv == 0, case.name
        assert (case.q > 0) != bool(case.packed), case.name
        assert len(case.lengths) == (case.b if case.padding else 0), case.name
        assert all(0 < n <= case.seqlen_k for n in case.lengths), case.name
        assert 0 < case.flops() < 3e13, case.name
    assert {case.kind for case in found[: len(KINDS)]} == set(KINDS)
    assert len({case.name for case in found}) == len(found) == 8 * len(KINDS)


def test_cases_of_models_have_what_the_kinds_are_about(benchmarks: Path) -> None:
    from model_cases import CASES

    def some(**fields: object) -> bool:
        return any(all(getattr(case, name) == value for name, value in fields.items()) for case in CASES)

    assert some(padding="left", causal=True)
    assert some(padding="left", causal=False)
    assert some(padding="right")
    assert {1, 4, 8} <= {case.heads_kv for case in CASES if case.causal and case.backward}
    assert {40, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512} <= {case.d for case in CASES}
    assert {197, 577, 729, 1500} <= {case.q for case in CASES}
    assert {1, 16, 64} <= {case.b for case in CASES if case.kind == "decode" and case.q == 1}
    assert {1, 4, 64} <= {case.b for case in CASES if case.kind == "decode" and case.q > 1}
    assert all(case.backward for case in CASES if case.bias)
    assert any(case.b >= 4000 for case in CASES if case.bias)
    evenness = [max(case.packed) / min(case.packed) for case in CASES if case.packed]
    assert min(evenness) == 1
    assert max(evenness) >= 64
    assert max(case.seqlen_k for case in CASES if case.causal) >= 32768


def test_masks_and_counts_of_the_cases_agree(benchmarks: Path) -> None:
    pytest.importorskip("torch")
    from model_cases import CASES, keep_of, make_inputs

    for case in (case.tiny() for case in CASES):
        inputs = make_inputs(case, "cpu")
        keep = keep_of(case, inputs)
        kept = case.kept()
        if keep is None:
            assert all((rows == case.seqlen_k).all() for rows in kept), case.name
            continue
        b, rows, keys = inputs.q.shape[0], inputs.q.shape[1], inputs.k.shape[1]
        assert keep.shape[1:] == (1, rows, keys), case.name
        if inputs.mask is not None:
            expected = (b, 1, 1, keys) if case.padding else (1, 1, rows, keys)
            assert inputs.mask.shape == expected, case.name
        found = keep.expand(b, 1, rows, keys).sum(-1).flatten().tolist()
        own = [max(int(n), 1) if inputs.seen is not None else int(n) for x in kept for n in x]
        assert found == own, case.name


def test_models_are_compared_with_the_definition(
    benchmarks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A case of every kind, tiny and on the CPU: the arguments that ours gets mean what the rivals' mean."""
    pytest.importorskip("torch")
    import models

    chosen = (
        "Qwen2.5 7B|window 128|V2 Lite|XLM-R|CLIP ViT|SDXL, 64|resampler|Swin-B, stage 1|left padding|NLLB|four images|"
        "NaFlex|speculative 4|MiniLM|softcap,"
    )
    arguments = ["models.py", "--dry-run", "--only", chosen, "--out", str(tmp_path), "--name", "found"]
    monkeypatch.setattr("sys.argv", arguments)
    models.main()
    assert "geometric mean" in capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert len({row["kind"] for row in rows}) == 12
    for row in rows:
        assert row["skipped"] == {}, row["case"]
        assert row["math.distance"] < 0.02, row["case"]
        assert row["fwd/best"] > 0
    monkeypatch.setattr("sys.argv", [*arguments, "--resume"])
    models.main()
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows, "what is there is not measured again"
    drawn = ["models.py", "--dry-run", "--drawn", "3", "--only", "tiny 0|window 1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*drawn, "--name", "drawn"])
    models.main()
    rows = json.loads((tmp_path / "drawn.json").read_text())["rows"]
    assert {row["kind"] for row in rows} == {"tiny", "window"}
    assert all(row["math.distance"] < 0.02 for row in rows)


def test_ring_flash_attn_is_a_rival_where_it_is_installed(
    benchmarks: Path, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions by name; nothing where it or flash_attn is missing, or flash_attn is this package's own."""
    pytest.importorskip("torch")
    import parallel

    assert parallel.parse([]).ring_flash_attn == ["zigzag"]
    assert parallel.parse(["--ring-flash-attn"]).ring_flash_attn == []
    names = ["ring", "stripe", "zigzag"]
    assert parallel.parse(["--ring-flash-attn", *names, "--repeats", "2"]).ring_flash_attn == names
    with pytest.raises(SystemExit):
        parallel.parse(["--ring-flash-attn", "ulysses"])
    rival, kernels = ModuleType("ring_flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for name in ("zigzag_ring_flash_attn_func", "ring_flash_attn_func", "stripe_flash_attn_func"):
        setattr(rival, name, name)
    missing: dict[str, None] = {"flash_attn": None, "flash_attn.flash_attn_interface": None}
    for modules in (
        {**missing, rival.__name__: rival}, {"flash_attn": kernels, kernels.__name__: kernels, rival.__name__: None},
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            for module, value in modules.items():
                patch.setitem(sys.modules, module, value)
            with pytest.raises(ImportError):
                parallel.ring_flash_attn("zigzag")
    for module, found in (("flash_attn", kernels), (kernels.__name__, kernels), (rival.__name__, rival)):
        monkeypatch.setitem(sys.modules, module, found)
    kernels.__file__ = str(tmp_path / "flash_attn_interface.py")
    assert [parallel.ring_flash_attn(name) for name in names] == [
        "ring_flash_attn_func", "stripe_flash_attn_func", "zigzag_ring_flash_attn_func",
    ]  # fmt: skip
    kernels.__file__ = str(repository / "nvrtc_attn" / "integrations" / "flash_attn.py")
    with pytest.raises(ImportError, match="no rival"):
        parallel.ring_flash_attn("zigzag")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_kernels_get_the_same_problem(benchmarks: Path) -> None:
    """The backend of SDPA that a CPU has, on tensors of every layout; nested ones for packed documents."""
    pytest.importorskip("torch")
    import models
    import peers
    from model_cases import CASES, make_inputs
    from torch.nn.attention import SDPBackend

    compared = set()
    for case in (case.tiny() for case in CASES if not case.dropout):
        inputs = make_inputs(case, "cpu")
        try:
            call = peers.sdpa(SDPBackend.MATH, case, inputs)
            found = models.Running(call, case.backward)
        except (peers.CannotError, RuntimeError):
            assert case.window or case.softcap or (case.packed and (case.causal or case.hkv)), case.name
            continue
        expected = models.Running(peers.plain_math(case, inputs), case.backward)
        assert max(models.distances(found, expected, inputs.seen)) < 0.02, case.name
        compared.add(case.kind)
    assert len(compared) >= 11


def test_own_operators_of_torch_take_the_arguments(benchmarks: Path) -> None:
    """Of packed documents, windows and few queries, whose operators only CUDA has: shapes, on no device at all."""
    pytest.importorskip("torch")
    import models
    import peers
    from model_cases import CASES, make_inputs

    taken = {"seed": 0, "flash2": 0}
    for case in CASES:
        if case.kind in ("packed", "window") or (case.kind == "decode" and case.q > 1):
            inputs = make_inputs(case, "meta")
            expected = [(*inputs.q.shape[:3], case.head_dim_v), inputs.q.shape, inputs.k.shape, inputs.v.shape]
            for name in taken:
                try:
                    call = peers.PEERS[name](case, inputs)
                except peers.CannotError:
                    continue
                found = models.Running(call, case.backward)
                assert [x.shape for x in found.results] == expected[: len(found.results)], case.name
                taken[name] += 1
    assert taken["seed"] >= 4
    assert taken["flash2"] >= 12


def test_a_hopeless_rival_is_run_once(benchmarks: Path) -> None:
    pytest.importorskip("torch")
    import models

    times = {"ours.fwd": 5.0, "ours.bwd": 1.0, "a.fwd": 1.0, "a.bwd": 1.4, "b.fwd": 1.6, "b.bwd": 1.6}
    assert models.slow(times) == {"b.fwd", "b.bwd"}


@pytest.mark.parametrize("refuses", [False, True])
def test_graphs_of_short_passes_are_everybodys(
    refuses: bool, benchmarks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel with a slow host is not left out; where one cannot be captured all wait behind a pause."""
    pytest.importorskip("torch")
    import models

    class Pass:
        functions: ClassVar = {"bwd": None}
        context = None

        def graph(self, which: str) -> str:
            if refuses:
                raise RuntimeError("no graph")
            return f"graph of {which}"

        def pass_of(self, which: str) -> str:
            return f"pass of {which}"

    running = {"ours": Pass(), "fa3": Pass()}
    times = {"ours.bwd": {"ms": 0.1}, "fa3.bwd": {"ms": 0.5}}
    measured = []
    for name in ("in_turn", "behind_a_pause"):
        monkeypatch.setattr(
            models, name, lambda functions, *_, name=name, **__: measured.append((name, functions)) or {}
        )
    monkeypatch.setattr(models, "after_a_failed_capture", lambda: None)
    kept = models.from_graphs(times, running, "bwd", 3, 12)
    assert (kept["ours.bwd.eager"], kept["fa3.bwd.eager"]) == (0.1, 0.5)
    assert ("bwd.paused" in kept) == refuses
    ((how, functions),) = measured
    assert how == ("behind_a_pause" if refuses else "in_turn")
    assert set(functions) == {"ours.bwd", "fa3.bwd"}
    assert models.from_graphs({"ours.bwd": {"ms": 0.7}, "fa3.bwd": {"ms": 0.9}}, running, "bwd", 3, 12) == {}


def test_a_seed_on_the_host_is_not_replayed(benchmarks: Path) -> None:
    """A backward pass that would read it from a graph faults; `from_graphs` lets all of that case wait instead."""
    pytest.importorskip("torch")
    import models

    class Pass:
        context = contextlib.nullcontext

        def run(self) -> int:
            return 1

        def view(self, x: int) -> int:
            return x

    running = models.Running(Pass(), False, seed_on_host=True)
    with pytest.raises(RuntimeError, match="dropout's seed is on the host"):
        running.graph("bwd")


def test_cases_of_the_grid_and_of_its_neighbours(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row each, of as many scores as its name says; tiny ones are computed as the definition says."""
    pytest.importorskip("torch")
    import attention

    assert len(attention.grid_cases(quick=False)) == 36
    assert len(attention.grid_cases(quick=True)) == 18
    known = [*attention.grid_cases(quick=False), *attention.few_cases(), *attention.size_cases()]
    monkeypatch.setattr(attention, "timed", lambda case, rep_ms: {"timed": case})
    rows = list(attention.shapes(known, 60))
    for row, case in zip(rows, known, strict=True):
        b, s, h = map(int, row["BxSxH"].split("x"))
        assert (b, s, h, row["D"], row["causal"]) == (case.b, case.q, case.h, case.d, case.causal)
        kept = s * (s + 1) / 2 if case.causal else s * s
        assert case.flops() == 4 * b * h * case.d * kept
        assert row["Hkv"] == case.heads_kv
        assert row["timed"] is case
    names = [(row["group"], row["BxSxH"], row["D"], row["causal"], row["Hkv"]) for row in rows]
    assert len(set(names)) == len(names)
    for case in attention.feature_cases():
        if not case.dropout:
            row = attention.measure_case(case.tiny(), ["math"], "cpu", 1, 1)
            assert not row["skipped"], case.name
            assert row["bwd/math"] > 0, case.name


def test_summary_names_the_cases_behind(benchmarks: Path) -> None:
    pytest.importorskip("torch")
    import models

    rows = [
        {"case": "x", "kind": "tiny", "shape": "s", "ours.fwd": 2.0, "fwd/best": 0.5, "fwd.rival": "fa3"},
        {"case": "y", "kind": "tiny", "shape": "s", "ours.fwd": 2.0, "fwd/best": 2.0, "fwd.rival": "seed"},
    ]
    lines = models.summary(rows)
    assert "geometric mean 1.000 of 2 cases, 1 at 1.00" in lines[0]
    assert [line for line in lines if "0.500 x (s): 2.000 ms, fa3 1.000 ms" in line]
    assert not [line for line in lines if " y " in line]


def test_candidates_for_small_work_are_plans(benchmarks: Path) -> None:
    """Every problem has some beside today's choice; one without a launch before or behind it for short sequences."""
    import short

    from nvrtc_attn.heuristics import hopper_backward

    assert {kind.part for kind in short.KINDS} == {"short", "tiny", "decode", "pack", "few", "fit", "step"}
    for kind in short.KINDS:
        for backward in kind.directions:
            specs = short.plans_of(kind, backward)
            assert len(specs) >= 2, kind.name
            assert next(iter(specs)) == "today", kind.name
            if backward and kind.part == "short" and kind.q <= 128:
                (name,) = [n for n in specs if n.endswith("store+rows")][:1]
                kernels = [launch.config.kernel for launch in specs[name].launches]
                assert kernels == ["backward_portable", "backward_dbias", "dbias_reduce"], kind.name
    (step,) = [kind for kind in short.KINDS if kind.part == "step"][:1]
    specs = short.plans_of(step, backward=True).values()
    today, zero = (dict(hopper_backward.kernel_of(x).params)["query_step"] for x in specs)
    assert today > zero == 0


@pytest.mark.usefixtures("benchmarks")
def test_ways_to_the_gradient_of_a_packed_tensor_agree() -> None:
    torch = pytest.importorskip("torch")
    import packed_gradients

    qkv = torch.randn(2, 5, 3, 2, 8, requires_grad=True)
    expected, *others = (run()[0] for run in packed_gradients.ways(qkv, True).values())
    for found in others:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("length", [4096, 1 << 20])
def test_sparse_masks_are_planned_without_a_gpu(
    length: int, benchmarks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a million tokens, too, where nothing of the size of the scores could be made."""
    pytest.importorskip("torch")
    import sparse

    sparse.main(["--dry-run", "--length", str(length), "--head-dim", "64", "--pass", "forward"])
    lines = capsys.readouterr().out.splitlines()
    if length < sparse.LONG:
        assert all(any(name in x for x in lines) for name in ("prefix", "natten 7 of 64", "chunks of 1024"))
        return
    rows = [x.split() for x in lines if sparse.LONG_CASE in x]
    tiles = length // sparse.TILE
    # A row of tiles has those of 4096 keys, the one that its first query begins in, its own, and that of the sinks.
    kept = sum(min(i + 1, 33) + (i > 33) for i in range(tiles)) / tiles**2
    assert float(rows[0][rows[0].index("forward") + 1]) == pytest.approx(kept, rel=0.01)


def test_kept_tiles_by_ranges_are_those_of_the_mask(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import sparse

    length = 2048
    monkeypatch.setattr(sparse.torch.cuda, "is_available", lambda: False)
    q = torch.arange(length)
    zero = torch.zeros((), dtype=torch.int64)
    for name, mask_mod in sparse.masks(length, "cpu").items():
        whole = mask_mod(zero, zero, q[:, None], q[None]).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        assert sparse.kept_tiles(mask_mod, length) == pytest.approx(float(whole.any(3).any(1).float().mean())), name


@pytest.mark.parametrize("regex", ["", "sink|block"])
def test_functions_are_measured_on_the_cpu(
    regex: str, benchmarks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case runs, forward and backward; those that need a name are left out without."""
    pytest.importorskip("torch")
    monkeypatch.delitem(sys.modules, "modifiers", raising=False)  # that of the tests has the same name
    import modifiers

    monkeypatch.setattr(modifiers, "HEADS", 2)
    modifiers.main(["--device", "cpu", "--length", "128", "--only-ours", "--dims", "16", "--case", regex])
    lines = capsys.readouterr().out.splitlines()
    names = {case.name for case in modifiers.cases(False, "cpu", 128)}
    assert names > {"window 128", "head scale", "sink", "swin 8x8", "block list", "gradient by k", "gradient by q"}
    for name in names:
        rows = [line for line in lines if line.lstrip().startswith(name + " ") and "ward" in line]
        assert (len(rows) >= 2) == (not regex or name in ("sink", "block list")), name
    assert not [x for x in modifiers.cases(True, "cpu", 128) if x.by_name]


def test_a_mask_as_intervals_of_keys_is_the_mask(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cudnn.flex_attention gets: below the first number, and between every two later ones."""
    torch = pytest.importorskip("torch")
    monkeypatch.delitem(sys.modules, "modifiers", raising=False)
    import modifiers

    batch = 2
    numbers = {"documents causal": 3, "prefix": 1, "natten 64x64": 9, "window 128": 3, "block list": 3}
    for case in modifiers.cases(False, "cpu", 256):
        if case.name not in numbers:
            continue
        length = case.length
        b, q, k = torch.arange(batch)[:, None, None], torch.arange(length)[:, None], torch.arange(length)
        mask_mod = case.mask_of_peers
        found = modifiers.key_intervals(mask_mod, batch, length, "cpu")
        assert found.is_contiguous()
        assert found.dtype == torch.int32
        assert (found.diff(dim=1) >= 0).all(), case.name
        bounds = found[0].reshape(-1, batch, length, 1)
        seen = k < bounds[0]
        for begin, end in zip(bounds[1::2], bounds[2::2], strict=True):
            seen = seen | ((k >= begin) & (k < end))
        assert torch.equal(seen, mask_mod(b, torch.tensor(0), q, k).expand_as(seen)), case.name
        assert found.shape[1] == numbers.pop(case.name), case.name
    assert not numbers
