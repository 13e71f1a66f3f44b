"""The documents are what they say: up to date with the results, short at the front, without a link to nothing."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import documents
import pytest

import nvrtc_attn
from nvrtc_attn.commands import main

HEURISTICS = Path(__file__).resolve().parents[2] / "nvrtc_attn" / "heuristics"
PAGES = documents.PAGES
PROGRAMS = [program for page in PAGES for program in documents.programs(page)]


def test_tables_are_those_of_the_saved_results(repository: Path) -> None:
    command = [sys.executable, str(repository / "benchmarks" / "table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_newcomer_reads_the_readme_in_one_go(repository: Path) -> None:
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    table = text[text.index("<!-- grid") : text.index("<!-- end of grid")]
    assert len([line for line in table.splitlines() if line.startswith("|")]) <= 2 + 12  # head, rule, rows


def test_tables_of_the_kernels_are_those_of_the_saved_grid(repository: Path) -> None:
    """TFLOP/s of the rows that docs/kernels.md says are of grid_auto.json."""
    page = (repository / "docs" / "kernels.md").read_text(encoding="utf-8")
    rows = json.loads((repository / "benchmarks" / "results" / "grid_auto.json").read_text(encoding="utf-8"))["rows"]
    figures = {}
    for row in rows:
        batch, seqlen, heads = map(int, row["BxSxH"].split("x"))
        products = batch * heads * seqlen**2 * row["D"] * (0.5 if row["causal"] else 1)
        for name, count in (("fwd", 4), ("bwd", 10)):
            for provider in ("cudnn", "fa3", "fa4", "ours"):
                if ms := row.get(f"{provider}.{name}"):
                    key = (row["D"], row["BxSxH"], row["causal"], name, provider)
                    figures[key] = f"{count * products / ms / 1e9:.0f}"
    for head_dim, shape in {(row["D"], row["BxSxH"]) for row in rows}:

        def cells(name: str, providers: str, order: tuple[bool, bool], at: tuple[int, str] = (head_dim, shape)) -> str:
            return " | ".join(figures[(*at, causal, name, x)] for causal in order for x in providers.split())

        forward = cells("fwd", "cudnn fa3 ours", (True, False))
        assert f"| {head_dim} | {shape.split('x')[1]} | {forward} |" in page
        wide = head_dim == 256
        backward = cells("bwd", "cudnn ours" if wide else "cudnn fa3 fa4 ours", (False, True))
        if not wide or shape in ("16x1024x8", "4x4096x8", "1x16384x8"):
            assert f"| {head_dim} | {shape.replace('x', ' x ')} | {backward} |" in page


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str, repository: Path) -> None:
    path = repository / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def text_blocks(source: str) -> list[tuple[int, str]]:
    """(line, text) of every docstring, string behind a constant, and block of comments on lines of their own."""
    lines = source.splitlines()
    found = []
    begin = None
    for number, line in enumerate([*lines, ""], 1):
        comment = line.strip().startswith("#")
        if comment and begin is None:
            begin = number
        elif not comment and begin is not None:
            found.append((begin, "\n".join(lines[begin - 1 : number - 1])))
            begin = None
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.append((node.lineno, node.value.value))
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in HEURISTICS.glob("*.py")))
def test_a_heuristic_gives_its_reasons_in_five_lines(name: str) -> None:
    long = []
    for line, text in text_blocks((HEURISTICS / name).read_text(encoding="utf-8")):
        prose = re.split(r"\n\s*(?:Parameters|Returns|Raises)\n\s*-{3,}", text)[0]
        count = sum(bool(words.strip()) for words in prose.splitlines())
        if count > 5:
            long.append(f"{name}:{line}: {count} lines")
    assert not long, f"figures of what lost belong into docs/experiments.md: {long}"


def test_sections_that_the_heuristics_refer_to_exist(repository: Path) -> None:
    headings = re.findall(
        r"^## (.*)$", (repository / "docs" / "experiments.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = set()
    for path in HEURISTICS.glob("*.py"):
        text = " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
        named |= set(re.findall(r'docs/experiments\.md[,:]? \(?(?:under )?"([^"]+)"', text))
        named |= set(re.findall(r'under "([^"]+)"', text))
    assert len(named) >= 5
    assert named <= set(headings), named - set(headings)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
@pytest.mark.turns(3)
def test_what_the_documents_show_runs(program: documents.Program, tmp_path: Path) -> None:
    """On the CPU, as far as it can; tests/gpu runs all of it."""
    reason = documents.run(program, on_gpu=False, cwd=tmp_path)
    if reason:
        pytest.skip(f"not all of it ran: {reason}")


def test_every_framework_has_programs_and_few_blocks_stay_out() -> None:
    assert {name for program in PROGRAMS for name in program.libraries} == set(documents.LIBRARIES)
    out = {
        f"{program.page}:{block.line}": block.reason for program in PROGRAMS for block in program.blocks if block.reason
    }
    assert all("GPU" in reason for reason in out.values()), out
    assert len(out) <= 4


def test_options_that_the_documents_show_exist() -> None:
    """Also where the framework is missing that the program needs."""
    accepted = set(inspect.signature(nvrtc_attn.attention).parameters)
    accepted |= set(inspect.signature(nvrtc_attn.attention_backward).parameters)
    shown = 0
    for program in PROGRAMS:
        for node in ast.walk(ast.parse(program.source(on_gpu=True))):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("attention", "attention_forward", "attention_backward"):
                unknown = {keyword.arg for keyword in node.keywords if keyword.arg} - accepted
                assert not unknown, f"{program.name}: line {node.lineno}: {unknown}"
                shown += 1
    assert shown > 20


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_the_documents_show_exist(page: str, repository: Path) -> None:
    """Names, options and values; nothing is executed."""
    text = (repository / page).read_text(encoding="utf-8").replace("\\\n", " ")
    for line in re.findall(r"^(?:RUN )?python -m nvrtc_attn (.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        command: click.Command = main
        context = click.Context(command)
        while isinstance(command, click.Group):
            found = command.get_command(context, words.pop(0))
            assert found is not None, f"{page}: {line}"
            command = found
        command.make_context(command.name, words, resilient_parsing=False)


def messages() -> str:
    """Every text of the package with ``…`` for what is filled in, one a line."""
    found = []

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else ""
        if isinstance(node, ast.JoinedStr):
            return "".join("…" if isinstance(part, ast.FormattedValue) else text_of(part) for part in node.values)
        return ""

    for path in sorted((documents.ROOT / "nvrtc_attn").rglob("*.py")):
        if "_include" not in path.parts:
            found += [text_of(node) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    return "\n".join(" ".join(text.split()) for text in found if text)


def test_messages_that_troubleshooting_quotes_are_those_of_the_package(repository: Path) -> None:
    page = (repository / "docs" / "guide" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) > 20
    known = messages()
    # A placeholder of the page may stand for several of the source and for the words between them.
    unknown = [x for x in quoted if not re.search(".{0,120}?".join(map(re.escape, x.split("…"))), known)]
    assert not unknown


def test_the_reference_has_every_public_function(repository: Path) -> None:
    text = (repository / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\.\. (?:autofunction|autoclass|autoexception|from-source):: (\S+)$", text, re.MULTILINE))
    assert {f"nvrtc_attn.{name}" for name in nvrtc_attn.__all__ if name != "__version__"} <= listed
    for name in sorted(listed):
        door, _, attribute = name.rpartition(".")
        if all(importlib.util.find_spec(library) is not None for library in documents.behind(door)):
            assert inspect.getdoc(getattr(importlib.import_module(door), attribute)), name


@pytest.mark.parametrize("door", ["torch", "torch/parallel", "jax"])
def test_the_reference_has_what_an_adapter_hands_out(door: str, repository: Path) -> None:
    """Read from the source, so that the frameworks need not be here."""
    page = (repository / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    path = repository / "nvrtc_attn" / door / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
            break
    else:
        raise AssertionError(f"{path} has no __all__")
    module = f"nvrtc_attn.{door.replace('/', '.')}"
    assert not [name for name in names if f".. from-source:: {module}.{name}\n" not in page]


def texts_with_names(repository: Path) -> dict[str, str]:
    """The pages, and the docstrings of the package."""
    found = {page: (repository / page).read_text(encoding="utf-8") for page in PAGES}
    for path in (repository / "nvrtc_attn").rglob("*.py"):
        if "_include" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                name = getattr(node, "name", "module")
                found[f"{path.relative_to(repository)}, {name}"] = text
    return found


def exists(name: str) -> bool:
    """Whether the package has a dotted name; what is behind a library that is missing here is taken as there."""
    found: object = nvrtc_attn
    parts = name.split(".")
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(".".join(parts[:count]))
            except ModuleNotFoundError as error:
                return not str(error.name).startswith("nvrtc_attn")
    return True


def test_names_of_the_package_that_texts_mention_exist(repository: Path) -> None:
    assert exists("nvrtc_attn.front.part.Part")
    assert not exists("nvrtc_attn.merge_partials")
    names = {
        (name, place)
        for place, text in texts_with_names(repository).items()
        for name in re.findall(r"`(nvrtc_attn(?:\.\w+)+)(?:`|\()", text)
        if not name.endswith(".launch")  # the target of a custom call of XLA
    }
    assert len(names) > 50
    assert not sorted(x for x in names if not exists(x[0]))


def test_every_integration_has_a_page(repository: Path) -> None:
    modules = {path.stem for path in (repository / "nvrtc_attn" / "integrations").glob("*.py")}
    pages = {path.stem for path in (repository / "docs" / "integrations").glob("*.md")}
    assert pages - {"README"} == modules - {"__init__", "alibi"}


def test_every_page_is_on_the_site(repository: Path) -> None:
    index = (repository / "docs" / "index.md").read_text(encoding="utf-8")
    entries = {line for tree in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for line in tree.splitlines()}
    pages = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES if page.startswith("docs/")}
    assert pages - {"index"} == {entry for entry in entries if entry and entry[0] != ":"}


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "README.md", "docs/configuration.md", "docs/kernels.md"])
def test_files_that_the_documents_name_exist(page: str, repository: Path) -> None:
    """By their path from the repository, the package or the device code; in kernels.md from their own folder, too."""
    roots = [repository, repository / "nvrtc_attn", repository / "cuda_src" / "nvrtc_attn"]
    roots += [folder for folder in (roots[1] / "heuristics", roots[2] / "collective") if page.endswith("kernels.md")]
    named = set(re.findall(r"`([\w./]+\.(?:cuh|py|sh))`", (repository / page).read_text(encoding="utf-8")))
    assert not [name for name in sorted(named) if not any((root / name).exists() for root in roots)]


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_ci_has_the_newest_version_that_the_module_checks(library: str, repository: Path) -> None:
    module = (repository / "nvrtc_attn" / library / "__init__.py").read_text(encoding="utf-8")
    (last,) = re.findall(rf'check_version\("{library}", "[\d.]+", "([\d.]+)"\)', module)
    script = (repository / ".ci" / "check_frameworks").read_text(encoding="utf-8")
    installed = {"torch": r'"torch==([\d.]+)"', "jax": r'jax=.*print\("([\d.]+)" if'}
    assert re.findall(installed[library], script) == [last]


def test_the_table_of_integrations_has_the_versions_that_the_modules_check(repository: Path) -> None:
    table = (repository / "docs" / "integrations" / "README.md").read_text(encoding="utf-8")
    checked = set()
    cells = [line.lower().split(" | ") for line in table.splitlines() if line.startswith("| ")]
    for path in (repository / "nvrtc_attn").rglob("*.py"):
        text = path.read_text("utf-8")
        for library, _, last in re.findall(r'check_version\("(\w+)", "([\d.]+)", "([\d.]+)"\)', text):
            version = last.removesuffix(".0") if library == "torch" else last
            assert any(library in row[0] and row[1].endswith(version) for row in cells), f"{library} {last}"
            checked.add(library)
    assert checked == {"torch", "jax", "flax", "transformers", "diffusers", "xformers"}
