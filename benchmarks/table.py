"""The tables of README.md from the saved results of `attention.py`, as Markdown on standard output.

python benchmarks/table.py grid_auto features_auto sizes_auto few_auto start_auto
"""

from __future__ import annotations

import math
from typing import Any

from measure import saved_results

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


def start(rows: list[Row]) -> str:
    return markdown(["what", "value"], [[row["what"], number(row["value"])] for row in rows])


TABLES = {"grid": grid, "features": features, "sizes": sizes, "few": sizes, "start": start}


def main() -> None:
    for path, saved in saved_results(__doc__):
        measured = saved["measured_on"]
        print(f"<!-- {path.stem}: {measured['gpu']}, driver {measured['driver']}, commit {measured['commit']} -->")
        print(TABLES[path.stem.split("_")[0]](saved["rows"]), end="\n\n")


if __name__ == "__main__":
    main()
