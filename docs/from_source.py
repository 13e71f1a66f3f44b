"""Sphinx directive ``from-source``: a function or class as its source has it, without importing it.

autodoc imports what it documents, and the adapters import frameworks that need not be installed where the site is
built. Mocks of them do not survive expressions such as ``torch.Tensor | None``.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import NumpyDocstring
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
Definition = ast.FunctionDef | ast.ClassDef


def module_path(module: str) -> Path:
    """The file of a module of the package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find(module: str, name: str) -> tuple[Path, Definition]:
    """The definition of ``module.name``, in the module itself or where it imports the name from."""
    path = module_path(module)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node in tree.body:
            return path, node
        if isinstance(node, ast.ImportFrom) and node.level and any(alias.name == name for alias in node.names):
            origin = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            return find(".".join(filter(None, origin)), name)
    raise ValueError(f"{path} neither defines nor imports {name}")


def signature(node: Definition) -> str:
    """Arguments and return type as written; of a class those of its ``__init__``, the private ones left out."""
    if isinstance(node, ast.FunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"({ast.unparse(node.args)}){returns}"
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            arguments = member.args
            arguments.args = arguments.args[1:]
            both = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
            kept = [(argument, default) for argument, default in both if argument.arg[0] != "_"]
            arguments.kwonlyargs, arguments.kw_defaults = [x for x, _ in kept], [x for _, x in kept]
            return f"({ast.unparse(arguments)})"
    return "()"


class FromSource(SphinxDirective):
    """``.. from-source:: nvrtc_attn.torch.attention``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes of the signature and of the docstring."""
        module, _, name = self.arguments[0].rpartition(".")
        path, node = find(module, name)
        self.env.note_dependency(path)
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        text = ast.get_docstring(node)
        if not text:
            raise self.error(f"{self.arguments[0]} has no docstring")
        lines = str(NumpyDocstring(text, self.config, what=kind)).splitlines()
        head = [f".. py:{kind}:: {name}{signature(node)}", f"   :module: {module}", ""]
        return self.parse_text_to_nodes("\n".join([*head, *(f"   {line}" for line in lines)]))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("from-source", FromSource)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
