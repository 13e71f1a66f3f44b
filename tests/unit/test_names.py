"""Names of this package that GPU tests, benchmarks and examples use exist: what cannot run here would break unseen."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for part in ("tests/gpu", "benchmarks", "examples") for path in (ROOT / part).rglob("*.py"))


def module_at(name: str) -> ModuleType | None:
    """The module called ``name``, None if there is none, skipped if another package that it needs is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("nvrtc_attn"):
            pytest.skip(f"{name} needs {error.name}")
    return None


def has(module: ModuleType, name: str) -> bool:
    return hasattr(module, name) or module_at(f"{module.__name__}.{name}") is not None


def used(tree: ast.AST) -> Iterator[tuple[int, ModuleType, str]]:
    """(line, module, name) of imports, of ``module.name``, and of ``(module, "name")``, which monkeypatch takes."""
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "nvrtc_attn":
                    module = module_at(alias.name if alias.asname else "nvrtc_attn")
                    assert module is not None, f"line {node.lineno}: no module {alias.name}"
                    modules[alias.asname or "nvrtc_attn"] = module
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nvrtc_attn":
            module = module_at(node.module or "")
            assert module is not None, f"line {node.lineno}: no module {node.module}"
            for alias in node.names:
                yield node.lineno, module, alias.name
                child = None if hasattr(module, alias.name) else module_at(f"{node.module}.{alias.name}")
                child = child or getattr(module, alias.name, None)
                if isinstance(child, ModuleType):
                    modules[alias.asname or alias.name] = child
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield node.lineno, modules[node.value.id], node.attr
        elif isinstance(node, ast.Tuple | ast.Call):
            first = (node.elts if isinstance(node, ast.Tuple) else node.args)[:2]
            match first:
                case [ast.Name(id=name), ast.Constant(value=str(attribute))] if name in modules:
                    yield node.lineno, modules[name], attribute


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    missing = [
        f"line {line}: {module.__name__} has no {name}"
        for line, module, name in used(ast.parse(path.read_text(encoding="utf-8")))
        if not has(module, name)
    ]
    assert not missing, "\n".join(missing)


def test_a_name_that_is_gone_is_found() -> None:
    text = (
        "import nvrtc_attn\nfrom nvrtc_attn.plans import plan\nnvrtc_attn.attention\nplan.nowhere = 1\nf(plan, 'gone')"
    )
    assert [name for _, module, name in used(ast.parse(text)) if not has(module, name)] == ["nowhere", "gone"]
