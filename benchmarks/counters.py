"""Hardware counters of our kernels and of the fastest rival's side by side, read by Nsight Compute (`ncu`).

    python benchmarks/counters.py [--only REGEX] [--csv FILE] [--out FILE]

Cases are problems where a rival was faster, in this program or in `model_cases.py`. A pass is run three times, then
once under ``ncu`` at the clock as it is; where a pass has several kernels, the figures are of the longest, and the
times of all are added. Percentages are of what the multiprocessors can do at most. ``--csv`` reads what an earlier
run left, without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import measure
from measure import RESULTS, provenance
from model_cases import CASES, Case, make_inputs


class Pair(NamedTuple):
    case: Case
    rival: str
    which: str
    """``fwd`` or ``bwd``."""


def grid(b: int, s: int, h: int, d: int, causal: bool) -> Case:
    name = f"{b} x {s} x {h}, D {d}{', causal' if causal else ''}"
    return Case(name=name, kind="language", b=b, q=s, h=h, d=d, causal=causal)


BEHIND = (
    (grid(4, 4096, 16, 128, False), "fa3", "bwd"),
    (grid(1, 16384, 16, 128, True), "fa3", "bwd"),
    (grid(1, 16384, 32, 64, True), "fa3", "bwd"),
    (grid(2, 8192, 8, 256, True), "fa3", "fwd"),
    ("GLM-4 9B, training", "fa3", "bwd"),
    ("Pythia 1.4B, skewed documents", "fa3", "bwd"),
    ("SigLIP 2 NaFlex, images", "fa3", "bwd"),
    ("PixArt-alpha 512, text", "cudnn", "fwd"),
    ("GPT-2 small with dropout, training", "flash2", "fwd"),
)
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "SchedulerStats",
            "LaunchStats", "Occupancy")  # fmt: skip
COUNTERS = {
    "tensor %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "issue %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "shared %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM %": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
}
"""A column's title, and the counter it is."""
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")


def pairs(only: str) -> list[Pair]:
    named = {case.name: case for case in CASES}
    found = [Pair(named[case] if isinstance(case, str) else case, rival, which) for case, rival, which in BEHIND]
    return [pair for pair in found if re.search(only, pair.case.name, re.IGNORECASE)]


def run_passes(chosen: Iterable[Pair]) -> None:
    """What runs under `ncu`: a range named after its pair around each pass, profiled alone."""
    import peers
    import torch
    from models import Running

    for n, pair in enumerate(chosen):
        torch.manual_seed(0)
        inputs = make_inputs(pair.case, "cuda")
        for who, make in (("ours", peers.ours), (pair.rival, peers.PEERS[pair.rival])):
            running = Running(make(pair.case, inputs), pair.which == "bwd")
            run = running.functions[pair.which]
            with running.context():
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaProfilerStart()
                named = torch.cuda.nvtx.range_start(f"pair|{n}|{who}")  # for autograd's thread, too
                run()
                torch.cuda.synchronize()
                torch.cuda.nvtx.range_end(named)
                torch.cuda.cudart().cudaProfilerStop()
            del running, run
        del inputs
        torch.cuda.empty_cache()


def profile(path: Path, only: str) -> None:
    """Write `ncu`'s counters of every kernel to the CSV file ``path``; kernels are compiled before, without it."""
    passes = [sys.executable, str(Path(__file__).resolve()), "--run", "--only", only]
    subprocess.run(passes, check=True)
    sections = [word for name in SECTIONS for word in ("--section", name)]
    command = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--nvtx", "--clock-control", "none",
               "--print-units", "base", *sections, "--metrics", ",".join(COUNTERS.values()), "--log-file", str(path),
               *passes]  # fmt: skip
    subprocess.run(command, check=True)


def number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def read(path: Path) -> dict[tuple[int, str], list[dict[str, str]]]:
    """Kernels of each pair and who, in the order they ran."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    found: dict[tuple[int, str], list[dict[str, str]]] = {}
    for row in csv.DictReader(lines):
        named = re.search(r"pair\|(\d+)\|(\w+)", " ".join(str(text) for text in row.values()))
        if named:  # the line of units has none
            found.setdefault((int(named[1]), named[2]), []).append(row)
    return found


def summary(kernels: Sequence[dict[str, str]]) -> dict[str, Any]:
    longest = max(kernels, key=lambda row: number(row["gpu__time_duration.sum"]))
    row: dict[str, Any] = {
        "us": 1e-3 * sum(number(kernel["gpu__time_duration.sum"]) for kernel in kernels),
        "longest": 1e-3 * number(longest["gpu__time_duration.sum"]),
        "kernels": len(kernels),
        "M instr.": 1e-6 * number(longest.get("inst_executed", "")),
    }
    row |= {title: number(longest.get(counter, "")) for title, counter in COUNTERS.items()}
    stalls = {m[1]: number(text) for key, text in longest.items() if key and (m := STALL.fullmatch(key))}
    most = sorted((s for s in stalls if s not in ("selected", "not_selected")), key=lambda s: -stalls[s])[:4]
    row["waits"] = ", ".join(f"{name} {stalls[name]:.1f}" for name in most)
    return row


def report(found: dict[tuple[int, str], list[dict[str, str]]], chosen: Sequence[Pair]) -> list[str]:
    lines = []
    titles = ["us", "longest", "kernels", "M instr.", *COUNTERS, "waits"]
    for n, pair in enumerate(chosen):
        lines.append(f"{pair.case.name} ({pair.case.shape}), {'forward' if pair.which == 'fwd' else 'backward'}")
        lines.append(" " * 8 + "".join(title.rjust(10) for title in titles[:-1]) + "  waits (warps for each issue)")
        for who in ("ours", pair.rival):
            if (n, who) in found:
                row = summary(found[n, who])
                cells = [f"{row[title]:.4g}".rjust(10) for title in titles[:-1]]
                lines.append(who.ljust(8) + "".join(cells) + "  " + row["waits"])
        lines.append("")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression in the case's name")
    parser.add_argument("--csv", type=Path, help="what an earlier run left")
    parser.add_argument("--out", type=Path, default=RESULTS / "counters.txt")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--commit", default="", help="of the measured tree, where that is a copy without git history")
    arguments = parser.parse_args()
    measure.COMMIT = arguments.commit
    chosen = pairs(arguments.only)
    if arguments.run:
        run_passes(chosen)
        return
    path = arguments.csv or arguments.out.with_suffix(".csv")
    lines = []
    if arguments.csv is None:
        profile(path, arguments.only)
        measured = provenance()
        where = [f"{key} {measured[key]}" for key in ("driver", "torch", "nvrtc", "commit")]
        lines.append(f"One {measured['gpu']}, {', '.join(where)}, under ncu: `{measured['command']}`")
    lines += report(read(path), chosen)
    if arguments.csv is None:
        arguments.out.write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
