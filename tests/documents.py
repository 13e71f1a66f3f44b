"""The Python programs of README.md and docs/: found, and run as a reader would, on the CPU or on the GPU.

A block that imports both `nvrtc_attn` and a framework (``import torch``) begins a program; the blocks behind it belong
to it. A line ``<!-- not run: REASON -->`` above a block keeps it out where there is no GPU.
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

from child_environment import python_path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")))
FRAMEWORKS = ("torch", "jax", "cupy")
LIBRARIES = (*FRAMEWORKS, "transformers", "diffusers", "xformers", "flax")
# What a door of the package imports, by the beginning of its name.
_BEHIND = {
    "nvrtc_attn.torch": "torch",
    "nvrtc_attn.aten": "torch",
    "nvrtc_attn.jax": "jax",
    "nvrtc_attn.cupy": "cupy",
    "nvrtc_attn.integrations": "torch",
    "nvrtc_attn.integrations.transformers": "transformers",
    "nvrtc_attn.integrations.diffusers": "diffusers",
}
# Seen once (jaxlib of JAX 0.10.2, 2026-11-29): a program was done, and its process waited for good in the destructor of
# JAX's CPU client, for a thread of its pool that slept.
_END = "\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n"
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

    @property
    def libraries(self) -> list[str]:
        """What it imports, by itself or through `nvrtc_attn`."""
        found = set()
        for name in imports(self.code):
            found |= {name.split(".")[0], *behind(name)}
        return [name for name in LIBRARIES if name in found]


@dataclass
class Program:
    """Blocks of one page that follow each other in one namespace."""

    page: str
    blocks: list[Block]

    @property
    def name(self) -> str:
        return f"{self.page}:{self.blocks[0].line}"

    @property
    def libraries(self) -> set[str]:
        """What its blocks import."""
        return {name for block in self.blocks for name in block.libraries}

    def source(self, *, on_gpu: bool, last: int | None = None) -> str:
        """The text up to block ``last``, in its page's lines; ``"cuda"`` becomes ``"cpu"`` where there is no GPU."""
        text = ""
        for block in self.blocks[:last]:
            if block.reason and not on_gpu:
                continue
            text += "\n" * (block.line - 1 - text.count("\n")) + block.code
        return text if on_gpu else text.replace('"cuda"', '"cpu"')


def behind(name: str) -> set[str]:
    """Libraries that the module ``name`` of the package imports."""
    if name == "nvrtc_attn.integrations.flax":  # the only integration that is not torch's
        return {"jax"}
    return {library for door, library in _BEHIND.items() if f"{name}.".startswith(f"{door}.")}


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
        ours = any(name.split(".")[0] == "nvrtc_attn" for name in imports(block.code))
        if not found or (ours and re.search(r"^import .*\b(numpy|torch|jax|cupy)\b", block.code, re.MULTILINE)):
            found.append(Program(page, []))
        found[-1].blocks.append(block)
    return found


def missing(program: Program, *, on_gpu: bool) -> tuple[int, str]:
    """How many blocks from the first on can run here, and why no more; empty when all can."""
    for count, block in enumerate(program.blocks):
        needed = [*block.libraries, *(["jax_tvm_ffi"] if on_gpu and "jax" in block.libraries else [])]
        absent = [name for name in needed if importlib.util.find_spec(name) is None]
        if absent:
            return count, f"not installed: {', '.join(absent)}"
        if "cupy" in block.libraries and not on_gpu:
            return count, "CuPy needs a GPU"
    return len(program.blocks), ""


def run(program: Program, *, on_gpu: bool, cwd: Path) -> str:
    """Run what can run here, in a process of its own; why the rest, or all of it, cannot.

    Raises AssertionError with its output where it fails.
    """
    count, reason = missing(program, on_gpu=on_gpu)
    if count == 0:
        return reason
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    if not on_gpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    script = cwd / "program.py"
    source = program.source(on_gpu=on_gpu, last=count)
    if "jax" in program.libraries:
        source += _END
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=cwd,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{program.name}\n{done.stdout}{done.stderr}"
    return reason
