"""`nvrtc_attn.cuda_function`: C++ as an operation of a modifier. What it computes is in tests/modifiers.py's cases."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_environment import python_path

import nvrtc_attn
from nvrtc_attn.base import tables
from nvrtc_attn.jit.codegen import entry_source
from nvrtc_attn.modifiers import calls, derivative
from nvrtc_attn.modifiers.calls import text_of
from nvrtc_attn.modifiers.cuda import cuda_source
from nvrtc_attn.modifiers.modifier import written
from nvrtc_attn.modifiers.text import read_text
from nvrtc_attn.modifiers.trace import traced

SIGNATURE = "float f(float x, int i, bool c)"


def tensors() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 7, 2, 8), dtype=np.float32) for _ in range(4)]


def square(**more: Any) -> Any:
    return nvrtc_attn.cuda_function("float square(float x)", "return x * x;", **more)


def test_it_is_told_by_its_text() -> None:
    """Equal texts are one program, whatever computes them on the CPU; others of the same name are another one."""
    first, second = square(numpy=np.square), square(numpy=lambda x: x * x)
    other = nvrtc_attn.cuda_function("float square(float x)", "return x * x * 1.0f;")
    derived = square(derivatives={"x": "return 2.0f * x;"})
    programs = [nvrtc_attn.trace(lambda s, b, h, i, j, f=f: f(s)).program for f in (first, second, other, derived)]
    assert first == second
    assert hash(first) == hash(second)
    assert programs[0] == programs[1]
    assert len({first, other, derived}) == len(set(programs)) == len({cuda_source(x) for x in programs}) == 3
    assert repr(first) == "<CUDA function float square(float x)>"


def test_two_functions_of_one_name_are_both_there() -> None:
    other = nvrtc_attn.cuda_function("float square(float x)", "return x * x * 1.0f;")
    source = cuda_source(nvrtc_attn.trace(lambda s, b, h, i, j: square()(s) + other(s) + square()(s * 2)).program)
    assert source.count("float square(float x) {") == 2


def test_it_passes_through_text() -> None:
    """As compiled programs keep it: the graph, and the calls of a script, of any process."""
    function = square(numpy=np.square)
    modifier = nvrtc_attn.trace(lambda s, b, h, i, j: function(s) + 1)
    read, _ = read_text(written(modifier.program), (), (), ())
    assert read.program == modifier.program
    script = json.dumps([[], [["score_mod", [["cuda_function", ["'" + function.hex, "$0"], {}],
                                             ["__add__", ["%0", 1], {}]], "%1"]]])  # fmt: skip
    assert read_text(script, (), (), ())[0].program == modifier.program


def test_calls_are_remembered() -> None:
    function, other = square(numpy=np.square), square(numpy=np.square, derivatives={"x": "return 2.0f * x;"})

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return function(s)

    first = traced(score_mod)
    assert traced(score_mod).program is first.program
    function = other
    assert traced(score_mod).program is not first.program


def test_on_the_cpu_it_is_refused_where_nobody_said_how() -> None:
    q, k, v, dout = tensors()
    cube = nvrtc_attn.cuda_function("float cube(float x)", "return x * x * x;")
    with pytest.raises(nvrtc_attn.UnsupportedError, match=r"'cube' is written in CUDA C\+\+.*pass numpy= to"):
        nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: cube(s))
    function = nvrtc_attn.cuda_function(
        "float cubed(float x)", "return x * x * x;", derivatives={"x": "return 3.0f * x * x;"}, numpy=lambda x: x**3
    )
    given = {"score_mod": lambda s, b, h, i, j: function(s)}
    out, lse = nvrtc_attn.attention(q, k, v, **given, return_lse=True)
    same = nvrtc_attn.attention(q, k, v, score_mod=lambda s, b, h, i, j: s**3)
    np.testing.assert_allclose(out, same, rtol=1e-5, atol=1e-6)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    with pytest.raises(nvrtc_attn.UnsupportedError, match="pass numpy_derivatives= to"):
        nvrtc_attn.attention_backward(dout, q, k, v, out, lse, *gradients, **given)


def test_functions_that_are_gone_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known for the CPU is bounded, and nothing of it is lost to who still has the function."""
    monkeypatch.setattr(tables, "MAX_ENTRIES", 4)
    q, k, v, _ = tensors()
    function = square(numpy=np.square)
    modifier = nvrtc_attn.trace(lambda s, b, h, i, j: function(s))
    expected = nvrtc_attn.attention(q, k, v, score_mod=modifier)
    for number in range(20):
        nvrtc_attn.cuda_function("float f(float x)", f"return x + {number};", numpy=lambda x, n=number: x + n)
    gc.collect()
    assert len(calls._on_host) <= 4
    assert len([x for x in calls._alive.values() if x.text.name == "f"]) == 0
    assert function.value not in calls._on_host
    np.testing.assert_array_equal(nvrtc_attn.attention(q, k, v, score_mod=modifier), expected)


def test_a_backward_pass_without_its_derivative_is_refused_by_name() -> None:
    """Where kernels are chosen, of whatever framework; one that is of nobody's use may be missing."""
    function = nvrtc_attn.cuda_function(
        "float f(float x, float y, int i)", "return x + y * i;", derivatives={"y": "return float(i);"}
    )
    table = np.zeros(3, np.float32)
    program = nvrtc_attn.trace(lambda s, b, h, i, j: function(s, table[h], i)).program
    with pytest.raises(nvrtc_attn.UnsupportedError, match="d_f_d_x is needed"):
        derivative.check_derivatives(program.score, ())
    beside = nvrtc_attn.trace(lambda s, b, h, i, j: s + function(i * 1.0, table[h], i)).program
    derivative.check_derivatives(beside.score, (0,))
    turned = nvrtc_attn.trace(lambda s, b, h, i, j: s + function(table[h], i * 1.0, i)).program
    derivative.check_derivatives(turned.score, ())
    with pytest.raises(nvrtc_attn.UnsupportedError, match="d_f_d_x is needed"):
        derivative.check_derivatives(turned.score, (0,))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("square(float x)", "return x;"), r"signature: got 'square\(float x\)'"),
        (("float f(double x)", "return x;"), "'double x' is no parameter"),
        (("float f(float x, float x)", "return x;"), "has a name twice"),
        (("float f(float f)", "return f;"), "has a name twice"),
        (("float f(float x)", "#include <stdio.h>\nreturn x;"), "body: preprocessor"),
        (("float f(float x)", "return x; }"), "body: braces do not match"),
        (("float f(float x)", "if (x > 0) { return x;"), "body: braces do not match"),
        (("float f(float x)", "} void g() {"), "body: braces do not match"),
    ],
)
def test_texts_that_cannot_be_read(arguments: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nvrtc_attn.cuda_function(*arguments)


def test_derivatives_of_something_else() -> None:
    for key in ("i", "y"):
        with pytest.raises(ValueError, match=f"derivatives: got '{key}', accepted are .*: x"):
            nvrtc_attn.cuda_function(SIGNATURE, "return x;", derivatives={key: "return 1;"})
    with pytest.raises(ValueError, match=r"derivatives\['x'\]: preprocessor"):
        nvrtc_attn.cuda_function(SIGNATURE, "return x;", derivatives={"x": "#define A 1\nreturn A;"})
    with pytest.raises(TypeError, match="body: got 3 of type int"):
        nvrtc_attn.cuda_function(SIGNATURE, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"derivatives: got 'x', accepted are .*: none"):
        nvrtc_attn.cuda_function("bool f(float x)", "return x > 0;", derivatives={"x": "return 0;"})


def test_calls_that_do_not_fit() -> None:
    function = nvrtc_attn.cuda_function(SIGNATURE, "return c ? x : i;")

    def refused(score_mod: Any, words: str) -> None:
        with pytest.raises(nvrtc_attn.TraceError, match=words):
            nvrtc_attn.trace(score_mod)

    refused(lambda s, b, h, i, j: function(s, i), "score_mod: 'f' takes 3 arguments, and got 2")
    refused(lambda s, b, h, i, j: function(s, s, i > j), "score_mod: 'i' of 'f' is int, and got a floating-point")
    refused(lambda s, b, h, i, j: s * function(1.0, 2, True), "score_mod: 'f' is called with float, int, bool")
    program = nvrtc_attn.trace(lambda s, b, h, i, j: function(h, i > j, h)).program
    assert program.score is not None
    assert [x.kind for x in program.score.args] == ["float", "int", "bool"]
    assert text_of(program.score.value).name == "f"


def test_plain_numbers_are_numpys() -> None:
    assert square(numpy=np.square)(3.0) == 9.0


def test_a_compile_error_names_the_function_and_its_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from nvrtc_attn.front.problem import AttentionProblem, dense_layout
    from nvrtc_attn.heuristics import choose_forward
    from nvrtc_attn.jit.compile import compile_source

    monkeypatch.setenv("NVRTC_ATTN_CACHE_DIR", str(tmp_path))
    function = nvrtc_attn.cuda_function("float faulty(float x)", "float y = x;\nreturn y + nothing;")
    layout = dense_layout((1, 64, 1, 32), "float16")
    problem = AttentionProblem(
        dtype="float16", batch=1, seqlen_q=64, seqlen_k=64, num_heads=1, num_heads_kv=1, head_dim=32, head_dim_v=32,
        q=layout, k=layout, v=layout, modifier=nvrtc_attn.trace(lambda s, b, h, i, j: function(s)).program,
    )  # fmt: skip
    config = choose_forward(problem, arch="sm_80", num_sms=108, smem_limit=166912).main.config
    with pytest.raises(nvrtc_attn.CompileError, match=r'faulty\(2\): error: identifier "nothing" is undefined'):
        compile_source(entry_source(config), config.arch, config=config)


def test_another_process_has_the_same_text(repository: Path) -> None:
    """Kernels in the cache are found again."""
    script = (
        "import nvrtc_attn; from nvrtc_attn.modifiers.cuda import cuda_source\n"
        "f = nvrtc_attn.cuda_function('float f(float x)', 'return x;', derivatives={'x': 'return 1;'})\n"
        "print(cuda_source(nvrtc_attn.trace(lambda s, b, h, i, j: f(s)).program))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True,
            env={"PYTHONPATH": python_path(repository), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in "01"
    }  # fmt: skip
    assert len(found) == 1
