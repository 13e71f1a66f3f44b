"""Speed on the shapes of published models beside every other kernel that can do them, on one GPU, in one process.

    python benchmarks/models.py [--part language,decode,...] [--only REGEX] [--rivals cudnn,fa3,...]
                                [--quick [--cases 45]] [--name NAME] [--out DIRECTORY]
                                [--resume] [--budget SECONDS] [--plot] [--drawn SEED]

Cases are in `model_cases.py`, those of ``--drawn`` in `drawn_cases.py`, rivals in `peers.py` ($FA3_DIR for
FlashAttention-3). For every case and direction the functions run in turn, with a rest before each; one that took 1.5
times the fastest's time in the first round is not run again. Passes below 0.6 ms are then timed from CUDA graphs,
everybody's: autograd's thread takes 0.06 to 0.45 ms of the host, whatever its kernels take, and that is the subject
of `host.py`; times without a graph are kept as ``NAME.DIRECTION.eager``. Where somebody's pass cannot be captured,
all of them are timed behind a pause of the GPU, which hides the host as well. Outputs and gradients of every rival
are compared with ours: one that computes something else is left out, and said so. NAME.json is written after every
case, so that a run that is cut short is worth what it did, and ``--resume`` goes on from it. Kernels are compiled
first, by several processes. ``--dry-run`` runs tiny cases on the CPU beside the definition. Ratios are times of the
other over ours: above 1, ours is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure as measure_module
import peers
import torch
from drawn_cases import drawn
from measure import RESULTS, behind_a_pause, graph_of, in_turn, provenance
from model_cases import CASES, KINDS, Case, in_turns, make_inputs
from plot import plot_models

DIRECTIONS = {"fwd": 1.0, "bwd": 2.5}
"""And the products of each, relative to the forward pass."""
TOLERANCES = (0.02, 0.1)
"""Largest relative distance (Frobenius norm) of a rival's output and gradients from ours; both are in 16 bits."""
HOPELESS = 1.5
"""Times the fastest, from which on one round is enough."""
GRAPH_MS = 0.6
"""A pass that somebody's kernels take less time for is timed from CUDA graphs."""
QUICK_CASES = 45
FA4_CACHE = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(Path(tempfile.gettempdir()) / "fa4_cache"),
}


class Running:
    """The calls of one provider on one case: forward without a graph, and backward of one graph."""

    def __init__(self, call: peers.Call, backward: bool, *, seed_on_host: bool = False) -> None:
        """With ``seed_on_host`` a backward pass reads dropout's seed there, if its forward pass was not captured."""
        self.call = call
        self.seed_on_host = seed_on_host
        self.context = call.context
        self.functions: dict[str, Callable[[], Any]] = {}

        def forward() -> Any:
            with torch.no_grad():
                return call.run()

        with call.context():
            self.functions["fwd"] = forward
            self.results = [call.view(forward())]
            if backward:
                self.functions["bwd"] = self.pass_of("bwd")
                q, k, v, *dbias = self.functions["bwd"]()
                self.results += [*map(call.view, (q, k, v)), *dbias]

    def pass_of(self, which: str) -> Callable[[], Any]:
        """The function of the direction ``which``, made anew where `graph` has let go of it."""
        if which == "fwd":
            return self.functions["fwd"]
        with self.call.context():
            out = self.call.run()
        return lambda: self.gradients(out)

    def gradients(self, out: Any) -> Any:
        return torch.autograd.grad(out, self.call.leaves, self.call.dout, retain_graph=True)

    def graph(self, which: str) -> Callable[[], Any]:
        """Replays one pass of the direction ``which`` from a CUDA graph; its function without one is gone.

        That one's graph of nodes is of the default stream, and would have the captured pass wait for it.
        """
        if which == "bwd":
            if self.seed_on_host:
                raise RuntimeError("dropout's seed is on the host, where the replayed kernel would look for it")
            self.functions[which] = lambda: None
            gc.collect()
        call = self.call
        with call.context():
            graph = graph_of(self.functions["fwd"]) if which == "fwd" else graph_of(self.gradients, begin=call.run)
        return graph.replay


def distances(found: Running, expected: Running, seen: torch.Tensor | None) -> tuple[float, float]:
    """Relative distance of outputs, and the largest of gradients; rows without a key do not count."""
    most = [0.0, 0.0]
    for n, (x, y) in enumerate(zip(found.results, expected.results, strict=True)):
        a, b = x.float(), y.float()
        if n < 2 and seen is not None:  # out and dq
            a, b = (torch.where(seen[:, :, None, None], z, 0.0) for z in (a, b))
        far = float((a - b).norm() / b.norm().clamp(min=1e-20))
        most[n > 0] = max(most[n > 0], far if math.isfinite(far) else math.inf)
    return most[0], most[1]


def slow(times: dict[str, float]) -> set[str]:
    """Functions ``name.direction`` that took `HOPELESS` times the fastest of their direction; never one of ours."""
    best = {which: min((t for key, t in times.items() if key.endswith(which)), default=0.0) for which in DIRECTIONS}
    return {key for key, t in times.items() if not key.startswith("ours.") and t > HOPELESS * best[key[-3:]]}


def measure_case(case: Case, rivals: list[str], device: str, rounds: int, rep_ms: int) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "kind": case.kind, "shape": case.shape, "skipped": {}}
    inputs = make_inputs(case, device)
    running = {"ours": Running(peers.ours(case, inputs), case.backward)}
    for name in rivals:
        make = peers.plain_math if name == "math" else peers.PEERS[name]
        try:
            found = Running(make(case, inputs), case.backward, seed_on_host=case.dropout > 0)
        except Exception as error:  # what it cannot do; the reason is kept
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            row["skipped"][name] = text.removeprefix("CannotError: ").splitlines()[0][:150]
            continue
        far = (0.0, 0.0) if case.dropout else distances(found, running["ours"], inputs.seen)
        if any(x > most for x, most in zip(far, TOLERANCES, strict=True)):
            row["skipped"][name] = f"computes something else: relative distances {far[0]:.2g} and {far[1]:.2g}"
        else:
            running[name] = found
            row[f"{name}.distance"] = max(far)
    for each in running.values():
        each.results.clear()
    functions = {f"{name}.{which}": f for name, x in running.items() for which, f in x.functions.items()}
    contexts = {f"{name}.{which}": x.context for name, x in running.items() for which in x.functions}
    if device == "cpu":
        times = {key: {"ms": wall_ms(function), "spread": 0.0} for key, function in functions.items()}
    else:
        times = in_turn(functions, rounds=rounds, rep_ms=rep_ms, contexts=contexts, hopeless=slow)
        functions.clear()
        for which in running["ours"].functions:
            row |= from_graphs(times, running, which, rounds, rep_ms)
    for key, value in times.items():
        row[key], row[f"{key}.spread"] = value["ms"], value["spread"]
    flops = case.flops()
    for which in running["ours"].functions:
        mine = row[f"ours.{which}"]
        row[f"tflops.{which}"] = DIRECTIONS[which] * flops / mine * 1e-9
        ratios = {n: row[f"{n}.{which}"] / mine for n in running if n != "ours" and f"{n}.{which}" in row}
        row |= {f"{which}/{name}": ratio for name, ratio in ratios.items()}
        row[f"{which}/best"] = min(ratios.values(), default=None)
        row[f"{which}.rival"] = min(ratios, key=lambda name: ratios[name], default=None)
    if case.kind == "decode":
        read = 2 * case.b * case.seqlen_k * case.heads_kv * (case.d + case.head_dim_v)
        row["GB/s"] = 1e-6 * read / row["ours.fwd"]
    return row


def from_graphs(
    times: dict[str, dict[str, float]], running: dict[str, Running], which: str, rounds: int, rep_ms: int
) -> dict[str, Any]:
    """Put the times of graphs into ``times`` where a pass is short; times without one are returned, for the row.

    Of everybody: by times without a graph a kernel whose host is slow would be left out, however fast it is itself.
    Where one cannot be captured, all wait behind a pause instead; the row says why.
    """
    mine = {f"{name}.{which}": each for name, each in running.items() if which in each.functions}
    if min(times[key]["ms"] for key in mine) >= GRAPH_MS:
        return {}
    eager: dict[str, Any] = {f"{key}.eager": times[key]["ms"] for key in mine}
    graphs: dict[str, Callable[[], Any]] = {}
    for key in sorted(mine):
        try:
            graphs[key] = mine[key].graph(which)
        except Exception as error:
            after_a_failed_capture()
            eager[f"{which}.paused"] = f"{key}: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
            times |= behind_a_pause({k: (mine[k].pass_of(which), mine[k].context) for k in sorted(mine)}, rounds)
            return eager
    times |= in_turn(graphs, rounds=rounds, rep_ms=rep_ms, hopeless=slow)
    return eager


def after_a_failed_capture() -> None:
    """The random number generator is told by the end of a capture, of one that succeeded, that there is none."""
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def wall_ms(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - begin)


def compile_all(only: list[Case], rivals: list[str], workers: int, seed: int | None) -> None:
    """Run every case once with the kernels that are compiled at run time, in several processes."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rivals", ",".join(n for n in rivals if n == "fa4")]
    if seed is not None:
        command += ["--drawn", str(seed)]
    running = []
    for n in range(workers):
        names = [case.name for case in only[n::workers]]
        if names:
            worker = [*command, "--compile", json.dumps(names)]
            running.append(subprocess.Popen(worker, env={**os.environ, **FA4_CACHE}))
    for process in running:
        if process.wait():
            print(f"a compiling process ended with status {process.returncode}", flush=True)


def compile_cases(known: tuple[Case, ...], names: list[str], rivals: list[str]) -> None:
    for case in known:
        if case.name in names:
            inputs = make_inputs(case, "cuda")
            for make in (peers.ours, *(peers.PEERS[name] for name in rivals)):
                try:
                    Running(make(case, inputs), case.backward)
                except Exception as error:  # the measuring process says which
                    print(f"{case.name}: {type(error).__name__}", flush=True)
            del inputs
            torch.cuda.empty_cache()


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """For each direction the means over all cases and over each kind's, and the cases that are behind."""
    lines = []
    for which, title in (("fwd", "Forward"), ("bwd", "Backward")):
        ratios = {row["case"]: row[f"{which}/best"] for row in rows if row.get(f"{which}/best") is not None}
        if not ratios:
            continue
        behind = {name: ratio for name, ratio in ratios.items() if ratio < 1}
        lines.append(
            f"{title}, fastest rival's time over ours: geometric mean {geometric_mean(list(ratios.values())):.3f} of "
            f"{len(ratios)} cases, {len(ratios) - len(behind)} at 1.00 or more."
        )
        kinds = {kind: [ratios[r["case"]] for r in rows if r["kind"] == kind and r["case"] in ratios] for kind in KINDS}
        lines.append("  " + ", ".join(f"{kind} {geometric_mean(found):.2f}" for kind, found in kinds.items() if found))
        by_name = {row["case"]: row for row in rows}
        for name, ratio in sorted(behind.items(), key=lambda item: item[1]):
            row = by_name[name]
            rival, mine = row[f"{which}.rival"], row[f"ours.{which}"]
            lines.append(f"  {ratio:.3f} {name} ({row['shape']}): {mine:.3f} ms, {rival} {ratio * mine:.3f} ms")
    return lines


def brief(row: dict[str, Any]) -> str:
    """One line of progress."""
    parts = [f"{row['case'][:40]:40} {row['shape']:28}"]
    for which in DIRECTIONS:
        if f"ours.{which}" in row:
            ratios = [f"{n} {row[f'{which}/{n}']:.2f}" for n in (*peers.PEERS, "math") if f"{which}/{n}" in row]
            parts.append(f"{which} {row[f'ours.{which}']:.3f} ms {row[f'tflops.{which}']:.0f}: {' '.join(ratios)}")
    return " | ".join(parts)


def choose(known: tuple[Case, ...], parts: str, only: str) -> list[Case]:
    """Cases of the kinds ``parts`` whose name or shape contains ``only``."""
    kinds = parts.split(",") if parts else KINDS
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    pattern = re.compile(only, re.IGNORECASE)
    return in_turns(c for c in known if c.kind in kinds and pattern.search(f"{c.name}, {c.shape}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help=f"comma-separated kinds of {', '.join(KINDS)}; default all")
    parser.add_argument("--only", default="", help="regular expression in the case's name or shape")
    parser.add_argument("--rivals", help="comma-separated, default those installed; an empty text: none")
    parser.add_argument(
        "--quick", action="store_true", help="45 cases, two short rounds, without fa4: under two minutes"
    )
    parser.add_argument("--cases", type=int, default=QUICK_CASES, help="so many, of --quick")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for JSON and plot")
    parser.add_argument("--name", default=f"models_{os.environ.get('NVRTC_ATTN_BACKEND', 'auto')}")
    parser.add_argument("--resume", action="store_true", help="keep the cases that NAME.json has")
    parser.add_argument("--budget", type=float, help="seconds after which no case begins; default 400, quick 110")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="compiling processes")
    parser.add_argument("--commit", default="", help="of the measured tree, where that is a copy without git history")
    parser.add_argument("--plot", action="store_true", help="only draw NAME.json again")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, beside the definition")
    parser.add_argument(
        "--drawn", type=int, metavar="SEED", help="cases that this seed draws, instead of the chosen ones"
    )
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    begin = time.perf_counter()
    path = arguments.out / f"{arguments.name}.json"
    rivals = peers.installed() if arguments.rivals is None else [n for n in arguments.rivals.split(",") if n]
    if arguments.plot:
        plot_models(json.loads(path.read_text())["rows"], path.with_suffix(".png"))
        return
    torch.manual_seed(0)
    known = CASES if arguments.drawn is None else drawn(arguments.drawn)
    if arguments.compile is not None:
        compile_cases(known, json.loads(arguments.compile), rivals)
        return
    measure_module.COMMIT = arguments.commit
    chosen = choose(known, arguments.part, arguments.only)
    rows: list[dict[str, Any]] = []
    if arguments.resume and path.is_file():
        rows = json.loads(path.read_text())["rows"]
        chosen = [case for case in chosen if case.name not in {row["case"] for row in rows}]
    device, rounds, rep_ms, budget = "cuda", 3, 30, 400.0
    if arguments.quick:
        rounds, rep_ms, budget = 2, 12, 110.0
        rivals = [name for name in rivals if name != "fa4"]
        chosen = chosen[: arguments.cases]
    if arguments.dry_run:
        device, rivals, chosen = "cpu", ["math"], [case.tiny() for case in chosen]
    else:
        os.environ.update(FA4_CACHE)
        compile_all(chosen, rivals, arguments.workers, arguments.drawn)
        print(f"{time.perf_counter() - begin:.0f} s: compiled; rivals {', '.join(rivals) or 'none'}", flush=True)
    where = {"command": " ".join(["python", *sys.argv])} if arguments.dry_run else provenance()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(chosen):
        if time.perf_counter() - begin > (arguments.budget or budget):
            print(f"out of time: {len(chosen) - number} cases left, go on with --resume", flush=True)
            break
        try:
            row = measure_case(case, rivals, device, rounds, rep_ms)
        except torch.OutOfMemoryError as error:  # all providers' gradients are there at a time
            print(f"left out, {case.name} {case.shape}: {str(error).splitlines()[0][:120]}", flush=True)
        else:
            rows.append(row)
            path.write_text(json.dumps({"measured_on": where, "rows": rows}, indent=1) + "\n")
            print(f"{time.perf_counter() - begin:3.0f} s {brief(row)}", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(summary(rows)), flush=True)
    if rows and not arguments.dry_run:
        plot_models(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
