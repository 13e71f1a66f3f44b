"""TFLOP/s against length, from the saved results of `attention.py`, as a PNG beside them; of `models.py` ratios.

python benchmarks/plot.py grid_auto models_auto
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from measure import saved_results

COLOURS = {
    "ours": "black", "fa4": "tab:red", "fa3": "tab:orange",
    "cudnn": "tab:green", "flash2": "tab:blue", "seed": "tab:grey",
}  # fmt: skip
"""One a provider, whether or not it takes part in a panel."""


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel per head dim, mask and direction, one line a provider."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    panels = sorted({(row["D"], row["causal"]) for row in rows})
    figure, axes = plt.subplots(2, len(panels), figsize=(3.2 * len(panels), 6.4), squeeze=False, sharex=True)
    for column, (d, causal) in enumerate(panels):
        chosen = [row for row in rows if (row["D"], row["causal"]) == (d, causal)]
        for line, (which, title) in enumerate((("fwd", "forward"), ("bwd", "backward"))):
            axis = axes[line][column]
            for name, colour in COLOURS.items():
                points = [
                    (length(row), row[f"tflops.{which}"] * row[f"ours.{which}"] / row[f"{name}.{which}"])
                    for row in chosen
                    if f"{name}.{which}" in row
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, color=colour)
            axis.set_xscale("log", base=2)
            axis.set_title(f"{title}, D {d}{', causal' if causal else ''}", fontsize=9)
            axis.set_ylim(bottom=0)
    for line in (0, 1):
        axes[line][0].set_ylabel("TFLOP/s")
    for axis in axes[1]:
        axis.set_xlabel("length")
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=len(names), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)


def plot_models(rows: list[dict[str, Any]], path: Path) -> None:
    """A line for each case, forward and backward: each rival's time over ours."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    rows = sorted(rows, key=lambda row: kinds.index(row["kind"]))
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.2 + 0.2 * len(rows)), squeeze=False, sharey=True)
    for axis, (which, title) in zip(axes[0], (("fwd", "forward"), ("bwd", "backward")), strict=True):
        for name, colour in COLOURS.items():
            points = [(row[f"{which}/{name}"], y) for y, row in enumerate(rows) if f"{which}/{name}" in row]
            if points:
                axis.plot(*zip(*points, strict=True), "o", markersize=4, label=name, color=colour)
        axis.axvline(1, color="black", linewidth=1)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("time of the other over ours")
        axis.set_title(title, fontsize=9)
        axis.grid(axis="y", linewidth=0.3)
    axes[0][0].set_yticks(range(len(rows)), [f"{row['case']}, {row['shape']}" for row in rows], fontsize=7)
    axes[0][0].set_ylim(len(rows) - 0.5, -0.5)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="lower center", ncols=max(len(names), 1), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.4 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def length(row: dict[str, Any]) -> int:
    return int(row["BxSxH"].split("x")[1])


def main() -> None:
    for path, saved in saved_results(__doc__):
        draw = plot_models if "kind" in saved["rows"][0] else plot
        draw(saved["rows"], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
