"""What every benchmark shares: timing in turn within one process, and where a number was measured."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

COMMIT = ""
"""Set where the measured tree is a copy without its git history."""
REST_SECONDS = 0.02
UNSTEADY = 0.1
"""Spread of a function's rounds from which on it has more of them."""
RESULTS = Path(__file__).resolve().parent / "results"


def in_turn(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int = 3,
    rep_ms: int = 60,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    hopeless: Callable[[dict[str, float]], Container[str]] = lambda _: (),
) -> dict[str, dict[str, float]]:
    """Milliseconds of each function: the median of ``rounds`` medians, run in turn, and their relative spread.

    A context of ``contexts`` is around all runs of its function and no part of their time: the one that chooses a
    backend of SDPA takes 12 microseconds. Of the first round's times ``hopeless`` names the functions that keep them.

    The order rotates and the GPU rests before each, because its clock remembers what ran before: one kernel of 0.72
    ms took 0.84 after a long one that draws much power (H200, 2026-11-21). A function whose rounds differ by more than
    ``UNSTEADY``, because the host was busy, say, has up to as many rounds again; the spread is that of the ``rounds``
    times nearest to the median.
    """
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    done: Container[str] = ()
    for number in range(2 * rounds):
        shift = number % rounds * len(order) // rounds
        for name, function in order[shift:] + order[:shift]:
            if name not in done and (number < rounds or steady(times[name], rounds)["spread"] > UNSTEADY):
                time.sleep(REST_SECONDS)
                with contexts[name]() if contexts and name in contexts else nullcontext():
                    times[name].append(do_bench(function, warmup=15, rep=rep_ms, return_mode="median"))
        if number == 0:
            done = hopeless({name: t[0] for name, t in times.items()})
    return {name: steady(t, rounds) for name, t in times.items()}


def steady(times: list[float], rounds: int) -> dict[str, float]:
    """The median as ``ms``; as ``spread`` how far the ``rounds`` times nearest to it are apart, relative to it."""
    middle = median(times)
    nearest = sorted(times, key=lambda t: abs(t - middle))[:rounds]
    return {"ms": middle, "spread": (max(nearest) - min(nearest)) / middle}


def graph_of(call: Callable[..., Any], number: int = 1, begin: Callable[[], Any] | None = None) -> Any:
    """A `torch.cuda.CUDAGraph` of ``number`` calls, captured after three on a stream of their own.

    ``begin`` runs once on that stream, and each call takes what it returned: a forward pass, whose nodes autograd runs
    on the stream that they were made on. The graph keeps both, and so the tensors and workspaces that a replay reads.
    """
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        given = () if begin is None else (begin(),)
        for _ in range(3):
            call(*given)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(number):
                call(*given)
    torch.cuda.synchronize()
    graph.kept = call, given
    return graph


PAUSED_CALLS = 10
CYCLES_PER_SECOND = 2e9
"""At least those of the GPU's clock."""


def behind_a_pause(
    functions: Mapping[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]], rounds: int = 3
) -> dict[str, dict[str, float]]:
    """As `in_turn`, of functions with their contexts, without what the host takes to launch them, and without graphs.

    The GPU waits while the host enqueues `PAUSED_CALLS` calls, each behind a clear of the L2 and between two events. A
    function that waits for the GPU itself has no use of that: its time is that of the host as well.
    """
    import torch

    cleared = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def enqueue(function: Callable[[], Any], pause: float) -> tuple[list[float], float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(PAUSED_CALLS)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(pause * CYCLES_PER_SECOND))
        begin = time.perf_counter()
        for first, last in pairs:
            cleared.zero_()
            first.record()
            function()
            last.record()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return [first.elapsed_time(last) for first, last in pairs], took

    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (function, context) in functions.items():
            with context():
                _, took = enqueue(function, 0.0)
                times[name].append(median(enqueue(function, 2 * took)[0]))
    return {name: steady(t, rounds) for name, t in times.items()}


def provenance() -> dict[str, str]:
    """GPU, driver, package versions, commit and command of this process."""
    import torch

    def package(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().splitlines()
    root = Path(__file__).resolve().parent.parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=root)
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver[0] if driver else "unknown",
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "nvrtc": package("nvidia-cuda-nvrtc"),
        "cuda-bindings": package("cuda-bindings"),
        "commit": COMMIT or (head.stdout.strip() if head.returncode == 0 else "unknown"),
        "command": " ".join(["python", *sys.argv]),
    }


def save(name: str, rows: list[dict[str, Any]], directory: Path | None = None) -> Path:
    """Write ``rows`` with their provenance as ``name``.json."""
    directory = directory or RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({"measured_on": provenance(), "rows": rows}, indent=1) + "\n")
    return path


def saved_results(description: str | None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Path and content of every result that the command line names; ``description`` is the program's help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="files of the results folder, without .json")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for name in arguments.names:
        path = arguments.results / f"{name}.json"
        yield path, json.loads(path.read_text())


def print_table(rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Aligned plain text; floats with three significant digits."""

    def cell(x: Any) -> str:
        return (
            "–"
            if x is None
            else f"{x:.3g}"
            if isinstance(x, float) and x < 100
            else f"{x:.0f}"
            if isinstance(x, float)
            else str(x)
        )

    table = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in table) for n in range(len(columns))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), flush=True)
