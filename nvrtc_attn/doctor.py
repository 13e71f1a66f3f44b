"""The command ``doctor``, on the standard library alone: it speaks where a requirement of the others is broken."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .collect_env import collect


def without_the_others(arguments: Sequence[str], error: BaseException) -> int:
    """Run ``doctor``, refuse any other command because of ``error``; the exit code."""
    accept_any_text()
    if list(arguments[:1]) != ["doctor"]:
        what = f"{type(error).__name__}: {error}"
        sys.stderr.write(
            f"The command line cannot be imported ({what}). It needs numpy, click and rich: reinstall them with pip. "
            "`python -m nvrtc_attn doctor` works without them and tells more.\n"
        )
        return 1
    parser = argparse.ArgumentParser("python -m nvrtc_attn doctor", description="Show what attention finds here.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    return show(parser.parse_args(arguments[1:]).json)


def accept_any_text() -> None:
    """A path or a variable may hold bytes that the terminal's encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def show(as_json: bool = False) -> int:
    """Print the report; the exit code: 0 where no problem was found.

    In a program that calls attention the report has the calls that ``enable_sdpa`` took and left to torch there.
    """
    report = collect()
    problems = report["problems"]
    if as_json:
        lines = [json.dumps(report, indent=2)]
    else:
        lines = [*_report_lines(report), "", *(f"problem: {problem}" for problem in problems)]
        lines += [] if problems else ["no problem found"]
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if problems else 0


def _report_lines(value: Any, name: str = "", depth: int = -1) -> Iterator[str]:
    indent = "  " * max(depth, 0)
    if isinstance(value, dict):
        if name:
            yield f"{indent}{name}:" + ("" if value else " none")
        for key, item in value.items():
            if not (depth == -1 and key == "problems"):
                yield from _report_lines(item, key, depth + 1)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield f"{indent}{name}[{index}]: " + ", ".join(f"{k} {v}" for k, v in item.items())
    else:
        text = " ".join(map(str, value)) if isinstance(value, list) else value
        yield f"{indent}{name}: {'none' if text in (None, '') else text}"
