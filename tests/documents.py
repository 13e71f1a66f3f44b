"""The Python programs of README.md and docs/: found, and run as a reader would, on the CPU or on the GPU.

A block that imports `nvrtc_attn` begins a program; the blocks behind it that do not belong to it. A line
``<!-- not run: REASON -->`` above a block keeps it out where there is no GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
FRAMEWORKS = ("torch", "jax", "cupy")
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>.*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass
class Block:
    """One block of code, and the line of its page where it begins."""

    line: int
    code: str
    reason: str = ""
    """Why it does not run without a GPU."""


@dataclass
class Program:
    """Blocks of one page that follow each other in one namespace."""

    page: str
    blocks: list[Block]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.blocks[0].line}"

    @property
    def frameworks(self) -> list[str]:
        """What it imports, `nvrtc_attn.torch` counted as torch."""
        words = " ".join(name for block in self.blocks for name in imports(block.code))
        return [name for name in FRAMEWORKS if re.search(rf"\b{name}\b", words)]

    def source(self, *, on_gpu: bool) -> str:
        """The whole text, with line numbers of the page; ``"cuda"`` becomes ``"cpu"`` where there is no GPU."""
        text = ""
        for block in self.blocks:
            if block.reason and not on_gpu:
                continue
            text += "\n" * (block.line - 1 - text.count("\n")) + block.code
        return text if on_gpu else text.replace('"cuda"', '"cpu"')


def imports(code: str) -> list[str]:
    """Modules that a block imports."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
    return found


def programs(page: str) -> list[Program]:
    """Those of one page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[Program] = []
    for match in _BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n") + 1
        block = Block(line, match["code"], match["reason"] or "")
        begins = any(name.split(".")[0] == "nvrtc_attn" for name in imports(block.code))
        if begins or not found:
            found.append(Program(page, []))
        found[-1].blocks.append(block)
    return found


def missing(program: Program, *, on_gpu: bool) -> str:
    """Why the program cannot run here; empty when it can."""
    absent = [name for name in program.frameworks if importlib.util.find_spec(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if "cupy" in program.frameworks and not on_gpu:
        return "CuPy needs a GPU"
    return ""


def run(program: Program, *, on_gpu: bool, cwd: Path) -> None:
    """In a process of its own. AssertionError with its output where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not on_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    script = cwd / "program.py"
    script.write_text(program.source(on_gpu=on_gpu), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{program.name}\n{done.stdout}{done.stderr}"
