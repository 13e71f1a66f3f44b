"""docs/benchmarks.md and the table of README.md, from the saved results of `attention.py` and `models.py`.

python benchmarks/table.py            # writes both
python benchmarks/table.py --check    # exits with 1 where a file differs from what the results say
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]
PEERS = ("seed", "flash2", "cudnn", "fa3", "fa4")


def number(x: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, a dash for what was not measured."""
    if x is None:
        return "–"
    return f"{x:.0f}" if abs(x) >= 10 ** (digits - 1) else f"{x:.{digits}g}"


def ratio(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}"


def markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def grid(rows: list[Row], first: tuple[str, ...] = ("BxSxH", "D", "causal")) -> str:
    """TFLOP/s of ours and the time of each peer over ours, forward then backward; means below."""
    titles = {"BxSxH": "B x S x H", "Hkv": "key heads", "group": ""}
    head, shown = [titles.get(name, name) for name in first], {}
    for which, title in (("fwd", "forward"), ("bwd", "backward")):
        shown[which] = [name for name in PEERS if any(f"{which}/{name}" in row for row in rows)]
        head += [f"{title} TFLOP/s", *(f"/ {name}" for name in shown[which])]
    lines = []
    for row in rows:
        line = [plain(row[name]) for name in first]
        for which, names in shown.items():
            line += [number(row[f"tflops.{which}"]), *(ratio(row.get(f"{which}/{name}")) for name in names)]
        lines.append(line)
    return markdown(head, lines) + "".join(f"\n\n{mean_over_best(rows, *which)}" for which in DIRECTIONS)


DIRECTIONS = (("fwd", "Forward"), ("bwd", "Backward"))


def mean_over_best(rows: list[Row], which: str, title: str) -> str:
    """One sentence: the time of the fastest peer over ours, over all rows that have one."""
    ratios = [row[f"{which}/best"] for row in rows if row.get(f"{which}/best") is not None]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{title}, fastest peer in each row over ours: geometric mean {mean:.2f}, from {min(ratios):.2f} up."


def plain(x: object) -> str:
    return {True: "yes", False: "no"}[x] if isinstance(x, bool) else str(x).replace("x", " x ")


def sizes(rows: list[Row]) -> str:
    return grid(rows, ("group", "BxSxH", "Hkv", "D", "causal"))


def features(rows: list[Row]) -> str:
    """Milliseconds, the time of the seed and of the fastest peer over ours, and the memory that a step takes."""
    head = ["case", "forward ms", "/ seed", "/ best", "backward ms", "/ seed", "/ best", "peak MB", "seed's"]
    lines = []
    for row in rows:
        line = [row["case"]]
        for which in ("fwd", "bwd"):
            line += [number(row[f"ours.{which}"]), ratio(row.get(f"{which}/seed")), ratio(row.get(f"{which}/best"))]
        lines.append([*line, number(row["peak_mb.ours"]), number(row.get("peak_mb.seed"))])
    return markdown(head, lines)


def models(rows: list[Row]) -> str:
    """Milliseconds and TFLOP/s of ours, the time of each peer over ours; means below."""
    head, shown = ["case", "shape"], {}
    for which, title in (("fwd", "forward"), ("bwd", "backward")):
        shown[which] = [name for name in PEERS if any(f"{which}/{name}" in row for row in rows)]
        head += [f"{title} ms", "TFLOP/s", *(f"/ {name}" for name in shown[which])]
    lines = []
    for row in rows:
        line = [row["case"], plain(row["shape"])]
        for which, names in shown.items():
            line += [number(row.get(f"ours.{which}")), number(row.get(f"tflops.{which}"))]
            line += [ratio(row.get(f"{which}/{name}")) for name in names]
        lines.append(line)
    return markdown(head, lines) + "".join(f"\n\n{mean_over_best(rows, *which)}" for which in DIRECTIONS)


def start(rows: list[Row]) -> str:
    # Saved results may have a cost of repeated calls, too, of a process that had done much else.
    kept = [row for row in rows if not row["what"].startswith("host cost")]
    return markdown(["what", "value"], [[row["what"], number(row["value"])] for row in kept])


def host(text: str) -> str:
    """The first table of ``host.txt``, as `host.py` prints it, and on what it was measured."""
    on, _, head, *lines = text.splitlines()
    rows = [re.split(r" {2,}", line.strip()) for line in itertools.takewhile(str.strip, lines)]
    return on + "\n\n" + markdown(re.split(r" {2,}", head.strip()), rows)


TABLES = {
    "grid": grid,
    "models": models,
    "drawn": models,
    "features": features,
    "sizes": sizes,
    "few": sizes,
    "start": start,
}


class Section(NamedTuple):
    """One result of docs/benchmarks.md: a file of the results folder, what to say above its table and below it."""

    result: str
    title: str
    above: str
    below: str = ""


SECTIONS = (
    Section(
        "grid_auto",
        "Dense and causal attention",
        "TFLOP/s of ours, and the time of each peer over ours in the same process: above 1, ours is faster. Repeated "
        "runs differ by up to 5 %, at 16384 tokens by 10 %.",
        "![TFLOP/s against length, one line a provider](../benchmarks/results/grid_auto.png)",
    ),
    Section(
        "models_auto",
        "Shapes of published models",
        "Milliseconds and TFLOP/s of ours (of the scores that the masks keep), and the time of each peer over ours in "
        "the same process. Backward is by itself; a dash is what a peer cannot do or the case does not have. Passes "
        "below 0.6 ms are timed from CUDA graphs: autograd's thread takes the host 0.06 to 0.45 ms, "
        "which benchmarks/host.py measures, and models_auto.json keeps the times without graphs beside (`.eager`).",
        "![Time of each peer over ours, a line a case](../benchmarks/results/models_auto.png)",
    ),
    Section(
        "drawn_auto",
        "Shapes that nobody chose",
        "Columns as in the table before, of problems of the same kinds that are drawn at random "
        "(`benchmarks/drawn_cases.py`): what a choice by the kind of a problem is worth on the next shape of it. "
        "Nothing was chosen for those of this seed; two backward passes that were behind when it was first drawn were "
        "mended then. "
        "What seeds before it found is in [experiments](experiments.md#problems-that-nobody-chose).",
        "![Time of each peer over ours, a line a case](../benchmarks/results/drawn_auto.png)",
    ),
    Section(
        "features_auto",
        "Beside plain attention: what PyTorch's memory-efficient kernel does",
        "`/ seed` is that kernel, `/ best` the fastest of the three backends of "
        "`scaled_dot_product_attention` that can do the case.",
        "Decoding is bound by memory: K and V are read as fast as a copy moves bytes on this GPU. Dropout is bound by "
        "its random numbers (Philox with ten rounds, 32 bits a score, as in that kernel; FlashAttention draws 8 bits a "
        "score in seven). These figures are of a kernel that makes them itself; with a launch that makes them before "
        "it forward passes take 0.73 to 0.95 of the time (`benchmarks/dropout.py`, `benchmarks/results/dropout.txt`).",
    ),
    Section(
        "sizes_auto",
        "Lengths that are no multiple of a tile, shared key heads and float16",
        "Columns as in the first table.",
    ),
    Section(
        "few_auto",
        "Few heads",
        "Replayed from CUDA graphs.",
    ),
    Section(
        "grid_portable",
        "The portable family",
        "The kernels that serve every GPU from compute capability 7.5 on, forced with `NVRTC_ATTN_BACKEND=portable`.",
        "![The same plot for the portable family](../benchmarks/results/grid_portable.png)",
    ),
    Section("features_portable", "The portable family, features", "Columns as in the second table."),
    Section("start_auto", "Start-up", "In milliseconds and microseconds, as each row says."),
)

HOST = (
    "Microseconds that the host takes for a call of 64 tokens, 8 heads of dim 64, by the way that it is called: "
    "without a graph, with one, the backward pass through it, and both passes. Beside it the time over that of "
    "`seed`: of the operator, or of `scaled_dot_product_attention` on it where the operator has none. "
    "`benchmarks/results/host.txt` has small models, too."
)

HEAD = """# Benchmarks

This file is written by `python benchmarks/table.py` from `benchmarks/results/`; `python benchmarks/attention.py` makes
the results (`--part` chooses, `--quick` times each call for half as long), `python benchmarks/models.py` those of
shapes of published models, and `python benchmarks/plot.py` the plots.
bfloat16 unless a case says otherwise. `seed` (the memory-efficient kernel), `flash2` and `cudnn` are the backends of
`torch.nn.functional.scaled_dot_product_attention`, `fa3` and `fa4` FlashAttention-3 and -4. TFLOP/s count 4 B H S S D
operations forward, 2.5 times as many backward, half of it when causal.

"""

TRAINING = (
    "A GPT of 12 layers, 12 heads of dim 64, texts of 2048 characters, under `torch.compile` and bfloat16 autocast: "
    "whole training steps, with everything that is not attention. `sdpa` is SDPA on its FLASH backend, `other backend` "
    "on cuDNN's."
)
CURVES = (
    "{batch} texts a step on {processes}. The curves differ by at most {difference:.3f} nats (mean of {window} steps), "
    "those of the two runs of SDPA by {noise:.3f}."
)
TRAININGS = ("train_gpt_2048", "train_gpt_two_gpus")

README_LENGTHS = ("16x1024", "1x16384")
"""Batch and length of the rows that README shows: two for each head dim and mask, twelve in all."""
MARKERS = ("<!-- grid: written by benchmarks/table.py -->", "<!-- end of grid -->")


def load(result: str) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads((RESULTS / f"{result}.json").read_text())
    return saved


def measured_on(saved: dict[str, Any]) -> str:
    on = saved["measured_on"]
    cudnn = "{}.{}".format(*divmod(int(on["cudnn"]) // 100, 100))
    return (
        f"One {on['gpu']}, driver {on['driver']}, torch {on['torch']}, cuDNN {cudnn}, NVRTC {on['nvrtc']}, commit "
        f"{on['commit'][:7]}: `{on['command']}`{measured_again(on)}"
    )


def measured_again(on: dict[str, Any]) -> str:
    """What was measured once more, at another commit."""
    if "again" not in on:
        return ""
    return f". At commit {on['again']['commit'][:7]}, alone: {'; '.join(on['again']['cases'])}."


def training(name: str) -> str:
    """Of one result: where it was measured, steps and curves."""
    saved = load(name)
    runs, options = saved["runs"], saved["options"]
    lines = ["| attention | ms a step | tokens per second | / sdpa |", "| --- | --- | --- | --- |"]
    for kind, run in runs.items():
        speed = run["tokens_per_second"]
        over = speed / runs["sdpa"]["tokens_per_second"]
        lines.append(f"| {kind} | {run['ms_per_step']:.1f} | {speed:,.0f} | {over:.3f} |")
    count = options["processes"]
    on = (
        f"{'One' if count == 1 else count} {saved['device']}, driver {saved['driver']}, torch {saved['torch']}, "
        f"commit {saved['commit']}: `{saved['command']}`"
    )
    gpus = "one GPU" if count == 1 else f"{count} GPUs of one host (DDP)"
    curves = CURVES.format(**saved | {"batch": options["batch"], "processes": gpus})
    picture = f"![Loss of each run, and its difference to SDPA](../benchmarks/results/{name}.png)"
    return "\n\n".join([curves, on, "\n".join(lines), picture])


def benchmarks_page() -> str:
    parts = [HEAD]
    for section in SECTIONS:
        saved = load(section.result)
        table = TABLES[section.result.split("_")[0]](saved["rows"])
        parts.append(f"\n## {section.title}\n\n{section.above}\n\n{measured_on(saved)}\n\n{table}\n")
        if section.below:
            parts.append(f"\n{section.below}\n")
    parts.append("\n## Training\n\n" + "\n\n".join([TRAINING, *map(training, TRAININGS)]) + "\n")
    text = (RESULTS / "host.txt").read_text(encoding="utf-8")
    parts.append(f"\n## What a repeated call costs the host\n\n{HOST}\n\n{host(text)}\n")
    return "".join(parts)


def readme(text: str) -> str:
    """``text`` with its table made anew."""
    saved = load("grid_auto")
    rows = [row for row in saved["rows"] if row["BxSxH"].rsplit("x", 1)[0] in README_LENGTHS]
    head = ["B x S x H", "D", "causal", "forward TFLOP/s", "x cuDNN", "x best", "backward TFLOP/s", "x cuDNN", "x best"]
    lines = []
    for row in rows:
        line = [plain(row[name]) for name in ("BxSxH", "D", "causal")]
        for which in ("fwd", "bwd"):
            line += [number(row[f"tflops.{which}"]), ratio(row[f"{which}/cudnn"]), ratio(row[f"{which}/best"])]
        lines.append(line)
    start, end = (text.index(marker) for marker in MARKERS)
    return f"{text[:start]}{MARKERS[0]}\n{markdown(head, lines)}\n\n{measured_on(saved)}\n{text[end:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, say which file is not up to date")
    check = parser.parse_args().check
    page, front = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
    stale = 0
    for path, content in ((page, benchmarks_page()), (front, readme(front.read_text(encoding="utf-8")))):
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        stale += 1
        if check:
            print(f"{path.relative_to(ROOT)} differs from the results: run python benchmarks/table.py")
        else:
            path.write_text(content, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return stale if check else 0


if __name__ == "__main__":
    sys.exit(main())
