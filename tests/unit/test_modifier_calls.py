"""Repeated calls with a modifier: what they launch is what a first call launches, and nothing else is taken for one.

Tensors on the CPU count as tensors of GPU 0, as in `test_host_cost`.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import numpy as np  # noqa: E402
from fake_driver import FakeDriver  # noqa: E402
from tensors_of_gpu import calls_of, fake_gpu, forget, qkv  # noqa: E402

import nvrtc_attn  # noqa: E402
import nvrtc_attn.torch as na  # noqa: E402
from nvrtc_attn.front import call as front_call  # noqa: E402
from nvrtc_attn.modifiers import remembered  # noqa: E402
from nvrtc_attn.modifiers.modifier import Modifier  # noqa: E402
from nvrtc_attn.modifiers.trace import traced  # noqa: E402
from nvrtc_attn.plans import plan  # noqa: E402
from nvrtc_attn.runtime import arrays  # noqa: E402
from nvrtc_attn.torch import known as torch_known  # noqa: E402
from nvrtc_attn.torch import modified_known, passes  # noqa: E402

fake = fake_gpu
ROWS, HEADS = 64, 4
SLOPES, TABLE = torch.rand(HEADS), torch.rand(HEADS, 2 * ROWS)
WHOLE = torch.rand(HEADS, ROWS, ROWS)
DOCUMENTS = torch.zeros(ROWS, dtype=torch.int32)


def alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + SLOPES[h] * (k - q)


def relative(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + TABLE[h, k - q + ROWS]


def biased(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + WHOLE[h, q, k]


def doubled(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * 2


def same_document(b: Any, h: Any, q: Any, k: Any) -> Any:
    return DOCUMENTS[q] == DOCUMENTS[k]


def backwards(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def of_aux(score: Any, b: Any, h: Any, q: Any, k: Any, aux: Any) -> Any:
    return score * aux["by"] + aux["slopes"][h] * (k - q)


# Functions, and how many arrays the modifier has whose gradients are wanted.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "array": ({"score_mod": alibi}, 0),
    "array with gradient": ({"score_mod": alibi}, 1),
    "table with gradient and mask": ({"score_mod": relative, "mask_mod": same_document}, 1),
    "mask of an array": ({"mask_mod": same_document}, 0),
    "causal": ({"mask_mod": backwards}, 0),
    "bias": ({"score_mod": biased}, 0),
    "bias with gradient": ({"score_mod": biased, "mask_mod": same_document}, 1),
    "aux": ({"score_mod": of_aux, "aux": {"by": 2.0, "slopes": SLOPES}}, 1),
    "no array": ({"score_mod": doubled}, 0),
    "traced": ({"score_mod": nvrtc_attn.trace(relative, same_document)}, 1),
}


class Runs:
    """What plans were run with: pass, addresses, workspace, the block of the modifier and the memory set to zero."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        self.described = 0
        run, describe = plan._PlanBase.run, front_call.describe

        def seen(this: Any, stream: int, addresses: Any, workspace: Any = 0, rng: Any = None, *modifier: Any) -> None:
            block, zeroed = modifier[0] if modifier else (b"", ())
            self.seen.append((type(this).__name__, stream, addresses, workspace, bytes(block), zeroed))
            run(this, stream, addresses, workspace, rng, *modifier)

        def described(*arguments: Any, **more: Any) -> Any:
            self.described += 1
            return describe(*arguments, **more)

        monkeypatch.setattr(plan._PlanBase, "run", seen)
        monkeypatch.setattr("nvrtc_attn.api.describe", described)

    def of(self, call: Callable[[], Any]) -> list[Any]:
        self.seen.clear()
        call()
        return list(self.seen)


@pytest.fixture
def nothing_traced() -> Iterator[None]:
    forget_traces()
    yield
    forget_traces()


def forget_traces() -> None:
    remembered._traces.clear()
    remembered._recent.clear()


@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_runs_what_a_first_one_does(
    name: str, deterministic: bool, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions, wanted = CASES[name]
    q, k, v = qkv(torch.float32)
    runs = Runs(monkeypatch)
    out, lse = torch.empty_like(q), torch.empty(2, HEADS, ROWS)
    dout, gradients = torch.zeros_like(q), [torch.empty_like(x) for x in (q, k, v)]
    arrays = traced(**functions).captures
    daux = [torch.empty_like(x) if x.dtype == torch.float32 else None for x in arrays] if wanted else None
    # By its address the allocator of a GPU has one workspace for all of these calls.
    workspace = torch.empty(1 << 24, dtype=torch.uint8)

    def passes() -> None:
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, **functions, workspace=workspace)
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *gradients, **functions, daux=daux, deterministic=deterministic,
            workspace=workspace,
        )  # fmt: skip

    first = runs.of(passes)
    assert [x[0] for x in first] == ["ForwardPlan", "BackwardPlan"]
    assert runs.described == 2
    memsets, launches = len(fake.memsets), len(fake.launches)
    for number in range(1, 4):
        assert runs.of(passes) == first
        assert runs.described == 2, "found, and not described again"
        assert len(fake.launches) == (number + 1) * launches
        assert len(fake.memsets) == (number + 1) * memsets
    forget()
    forget_traces()
    assert runs.of(passes) == first
    assert runs.described == 4
    if wanted and "bias" not in name:
        sums = first[1][5]
        assert len(sums) == 1, "the gradient that atomics add to, or the sums without an order"
        assert (sums[0][0] == daux[0].data_ptr()) == (not deterministic)  # type: ignore[index, union-attr]


@pytest.mark.usefixtures("fake", "nothing_traced")
def test_a_repeated_call_refuses_what_a_first_one_does() -> None:
    """Of the gradient of a captured array: memory of another operand, and another device than that of q."""
    q, k, v = qkv(torch.float32)
    out, lse, dout = torch.empty_like(q), torch.empty(2, HEADS, ROWS), torch.zeros_like(q)
    gradients, workspace = [torch.empty_like(x) for x in (q, k, v)], torch.empty(1 << 24, dtype=torch.uint8)
    memory = torch.zeros(2 * TABLE.numel())
    table, rest = memory[: TABLE.numel()].view_as(TABLE), memory[TABLE.numel() :].view_as(TABLE)

    def by_table(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * table[h, i % table.shape[1]]

    def run(daux: Any) -> None:
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *gradients, score_mod=by_table, daux=[daux], workspace=workspace
        )

    for _ in range(3):
        run(rest)
    for of_other, name in ((table, "captured array 0"), (gradients[0].view(-1)[: table.numel()].view_as(table), "dq")):
        with pytest.raises(ValueError, match=rf"daux\[0\]: shares memory with {name}"):
            run(of_other)
    with pytest.raises(ValueError, match=r"daux\[0\]: on cpu, but q is on cuda:0"):
        run(np.zeros(tuple(table.shape), np.float32))
    run(rest)


@pytest.mark.usefixtures("fake", "nothing_traced")
def test_arrays_of_another_call_are_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of one shape at other addresses: in the block, as a bias, and in a closure that is made at every step."""
    q, k, v = qkv(torch.float32)
    runs = Runs(monkeypatch)
    bias_place = plan.ForwardPlan.OPERANDS.index("bias")

    def step(slopes: Any, whole: Any) -> tuple[Any, Any]:
        def sloped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + slopes[h] * (j - i)

        def added(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score + whole[h, i, j]

        (in_block,) = runs.of(lambda: nvrtc_attn.attention(q, k, v, score_mod=sloped))
        (as_bias,) = runs.of(lambda: nvrtc_attn.attention(q, k, v, score_mod=added))
        return int.from_bytes(in_block[4][:8], "little"), as_bias[2][bias_place]

    given = [(torch.rand(HEADS), torch.rand(HEADS, ROWS, ROWS)) for _ in range(5)]
    for _ in range(2):
        for slopes, whole in given:
            assert step(slopes, whole) == (slopes.data_ptr(), whole.data_ptr())
    assert runs.described == 2
    # Of other strides, or on the CPU's side of an address that is no multiple of 16 bytes, it is another call.
    turned = torch.rand(ROWS, HEADS, ROWS).transpose(0, 1)
    assert step(torch.rand(HEADS + 1)[1:], turned)[1] == turned.data_ptr()
    assert runs.described == 4


def changes() -> dict[str, tuple[Any, Any]]:
    """Two (score_mod, mask_mod) each of one text that are not the same modifier."""

    def scaled(by: Any) -> Any:
        return lambda score, b, h, q, k: score * by

    def of_two(a: Any, b: Any) -> Any:
        return lambda score, batch, h, q, k: score + a[h] * b[h]

    def sized(x: Any) -> Any:
        return lambda score, b, h, q, k: score + x[h] / x.shape[0]

    def called(inner: Any) -> Any:
        return lambda score, b, h, q, k: inner(score, h)

    def defaulted(by: Any) -> Any:
        return lambda score, b, h, q, k, by=by: score * by

    def in_globals(**names: Any) -> Any:
        def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return abs(score) * FACTOR  # type: ignore[name-defined]  # noqa: F821

        return types.FunctionType(function.__code__, {"FACTOR": 2.0, **names})

    def halved(x: Any) -> Any:
        return x / 2

    def first(x: Any, h: Any) -> Any:
        return x + SLOPES[h]

    def second(x: Any, h: Any) -> Any:
        return x - SLOPES[h]

    x, y = torch.rand(HEADS), torch.rand(HEADS)
    return {
        "number": (scaled(2.0), scaled(3.0)),
        "integer": (scaled(2), scaled(2.0)),
        "zero": (scaled(0.0), scaled(-0.0)),
        "one array twice": (of_two(x, y), of_two(x, x)),
        "two arrays": (of_two(x, x), of_two(x, y)),
        "other order": (of_two(x, y), of_two(y, x)),
        "shape": (sized(x), sized(torch.rand(HEADS + 1))),
        "type": (sized(x), sized(x.double())),
        "numpy": (sized(x), sized(np.zeros(HEADS, np.float32))),
        "scalar": (scaled(torch.tensor(2.0)), scaled(torch.tensor(3.0))),
        "inner": (called(first), called(second)),
        "default": (defaulted(2.0), defaulted(3.0)),
        "global": (in_globals(), in_globals(FACTOR=3.0)),
        "global that hides a builtin": (in_globals(), in_globals(abs=halved)),
        "in a tuple": (called(lambda s, h, by=(2.0,): s * by[0]), called(lambda s, h, by=(3.0,): s * by[0])),
        "longer tuple": (scaled((1.0, 2.0)[0]), scaled((1.0, 2.0, 3.0)[1])),
    }


PAIRS = changes()


@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("name", PAIRS)
def test_functions_that_read_something_else_are_traced_again(name: str) -> None:
    def facts(modifier: Modifier) -> Any:
        return modifier.program, repr(modifier.numbers), [id(x) for x in modifier.captures]

    first, second = PAIRS[name]
    alone = []
    for function in (first, second):
        forget_traces()
        alone.append(facts(traced(function)))
    assert alone[0] != alone[1]
    forget_traces()
    for function, wanted in ((first, alone[0]), (second, alone[1])) * 4:
        assert facts(traced(function)) == wanted
    if name not in ("scalar", "numpy"):  # scalars are read when it is traced
        assert remembered._recent


@pytest.mark.usefixtures("nothing_traced")
def test_what_is_in_aux_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, longer = torch.rand(HEADS), torch.rand(HEADS), torch.rand(HEADS + 1)
    kinds = [
        ({"by": 2.0, "slopes": x}, (2.0,)), ({"by": 3.0, "slopes": x}, (3.0,)), ({"by": 2.0, "slopes": y}, (2.0,)),
        ({"by": 2.0, "slopes": longer}, (2.0,)), ({"slopes": x, "by": 2.0}, (2.0,)),
        ({"by": 2.0, "slopes": x, "more": y}, (2.0,)),
    ]  # fmt: skip
    for _ in range(4):
        for aux, numbers in kinds:
            found = traced(of_aux, aux=aux)
            assert found.numbers == numbers
            assert [id(array) for array in found.captures] == [id(aux["slopes"])]
    monkeypatch.setattr("nvrtc_attn.modifiers.trace._called", None)
    for aux, _ in kinds:
        assert traced(of_aux, aux=aux).captures[0] is aux["slopes"]
    with pytest.raises(TypeError):  # another name: traced, which this test does not let it be
        traced(of_aux, aux={"by": 2.0, "slopes ": x})


@pytest.mark.usefixtures("nothing_traced")
def test_functions_of_libraries_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whichever name; what a library made of the user's own function is not one of them."""
    where = nvrtc_attn.where
    functions: list[Any] = [
        lambda score, b, h, q, k: where(k <= q, score, -1.0),
        lambda score, b, h, q, k: nvrtc_attn.where(k <= q, score, -1.0),
        lambda score, b, h, q, k: torch.where(k <= q, score, -1.0),
    ]
    for function in functions:
        forget_traces()
        for _ in range(3):
            modifier = traced(function)
        with monkeypatch.context() as patch:
            patch.setattr("nvrtc_attn.modifiers.trace._called", None)
            assert traced(function).program == modifier.program
    factor = [2.0]

    @torch.enable_grad()
    def scaled(score: Any) -> Any:
        return score * factor[0]

    for factor[0] in (2.0, 3.0, 3.0, 2.0):
        assert traced(lambda score, b, h, q, k: scaled(score)).numbers == (factor[0],)


@pytest.mark.usefixtures("nothing_traced")
def test_what_is_written_into_a_cell_or_an_array_is_seen() -> None:
    factor, slopes = 2.0, torch.rand(HEADS)

    def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * factor + slopes[h] * slopes.shape[0]

    for _ in range(3):
        assert traced(function).numbers == (2.0, HEADS)
    factor = 3.0
    assert traced(function).numbers == (3.0, HEADS)
    slopes.resize_(HEADS + 3)
    for _ in range(3):
        assert traced(function).numbers == (3.0, HEADS + 3)
    before, slopes = slopes, torch.rand(HEADS)
    (captured,) = traced(function).captures
    assert captured is slopes
    assert captured is not before


VALUES = [np.zeros(2, np.float32)]


def hidden() -> dict[str, tuple[Any, Callable[[float], Any]]]:
    """Functions that scale by what is no cell, default or global of theirs, and what sets the factor."""
    package, settings = types.ModuleType("of_a_user"), types.ModuleType("of_a_user.math")
    package.math = settings  # type: ignore[attr-defined]
    sys.modules.update({x.__name__: x for x in (package, settings)})
    tensor, flag, array = torch.rand(2), torch.rand(2), np.zeros(2, np.float32)
    numbers: dict[str, float] = {}
    get = numbers.get

    def helper() -> Any:
        return array[1]

    def attribute(score: Any, b: Any, h: Any, q: Any, k: Any, otherwise: Any = 2.5) -> Any:
        return score * getattr(attribute, "by", otherwise)

    def attribute_of_helper(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * helper.by  # type: ignore[attr-defined]

    def array_of_function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * array_of_function.array[1]  # type: ignore[attr-defined]

    array_of_function.array = array  # type: ignore[attr-defined]

    def imported(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        def inner() -> Any:
            from of_a_user.math import by  # type: ignore[import-not-found]

            return by

        return score * inner()

    def imported_from_beside() -> Any:
        from .math import by  # type: ignore[import-not-found]

        return by

    def calls_itself(score: Any, b: Any, h: Any, q: Any, k: Any, deeper: bool = True) -> Any:
        if deeper:
            return calls_itself(score, b, h, q, k, False)
        return score * array[1]

    def attribute_of_tensor(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * tensor.by

    def gradient_of_tensor(score: Any, b: Any, h: Any, q: Any, k: Any, by: Any = (2.5, 3.5)) -> Any:
        return score * by[flag.requires_grad]

    def global_by_name(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * globals()["VALUES"][0][1]

    def array_in_a_list(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * VALUES[0][1]

    def method(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * get("by")

    def of_another_file(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score * FUNCTION()  # type: ignore[name-defined]  # noqa: F821

    beside = types.FunctionType(imported_from_beside.__code__, {"__package__": "of_a_user"})
    elsewhere = types.FunctionType((lambda: VALUES[1]).__code__, {"VALUES": array})
    return {
        "attribute": (attribute, lambda x: setattr(attribute, "by", x)),
        "attribute of helper": (attribute_of_helper, lambda x: setattr(helper, "by", x)),
        "array of function": (array_of_function, lambda x: array.fill(x)),
        "array of a function that calls itself": (calls_itself, lambda x: array.fill(x)),
        "imported": (imported, lambda x: setattr(settings, "by", x)),
        "imported from beside": (lambda score, b, h, q, k: score * beside(), lambda x: setattr(settings, "by", x)),
        "array of another file": (
            types.FunctionType(of_another_file.__code__, {"FUNCTION": elsewhere}), lambda x: array.fill(x),
        ),
        "attribute of tensor": (attribute_of_tensor, lambda x: setattr(tensor, "by", x)),
        "gradient of tensor": (gradient_of_tensor, lambda x: flag.requires_grad_(x == 3.5)),
        "global by name": (global_by_name, lambda x: VALUES[0].fill(x)),
        "array in a list": (array_in_a_list, lambda x: VALUES[0].fill(x)),
        "method": (method, lambda x: numbers.update(by=x)),
    }  # fmt: skip


def of_state() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Functions that ask torch for its state, by many names, and a block in which it is another one."""
    asks, none, matmul = torch.is_grad_enabled, torch.no_grad, torch.backends.cuda.matmul

    @contextlib.contextmanager
    def of_doubles() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @contextlib.contextmanager
    def with_tf32() -> Iterator[None]:
        before, matmul.allow_tf32 = matmul.allow_tf32, not matmul.allow_tf32
        try:
            yield
        finally:
            matmul.allow_tf32 = before

    @contextlib.contextmanager
    def deterministic() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    def helper() -> Any:
        return torch.is_grad_enabled()

    def autocast() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    return {
        "gradients": (lambda s, b, h, q, k: s * (2.5 if torch.is_grad_enabled() else 3.5), none),
        "by another name": (lambda s, b, h, q, k: s * (2.5 if asks() else 3.5), none),
        "by its name": (lambda s, b, h, q, k: s * (2.5 if getattr(torch, "is_grad_enabled")() else 3.5), none),  # noqa: B009
        "of a helper": (lambda s, b, h, q, k: s * (2.5 if helper() else 3.5), none),
        "inference": (
            lambda s, b, h, q, k: s * (2.5 if torch.is_inference_mode_enabled() else 3.5), torch.inference_mode,
        ),
        "autocast": (lambda s, b, h, q, k: s * (2.5 if torch.is_autocast_enabled("cpu") else 3.5), autocast),
        "type of autocast": (
            lambda s, b, h, q, k: s * (2.5 if torch.get_autocast_dtype("cpu") == torch.float16 else 3.5),
            lambda: torch.autocast("cpu", dtype=torch.float16),
        ),
        "default type": (
            lambda s, b, h, q, k: s * (2.5 if torch.get_default_dtype() == torch.float32 else 3.5), of_doubles,
        ),
        "setting": (lambda s, b, h, q, k: s * (2.5 if torch.backends.cuda.matmul.allow_tf32 else 3.5), with_tf32),
        "deterministic": (
            lambda s, b, h, q, k: s * (2.5 if torch.are_deterministic_algorithms_enabled() else 3.5), deterministic,
        ),
    }  # fmt: skip


OF_STATE = of_state()


@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("name", OF_STATE)
def test_functions_that_ask_torch_for_its_state_are_traced_anew(name: str) -> None:
    function, other = OF_STATE[name]

    def factor() -> Any:
        return traced(function).program.score.args[1].value  # type: ignore[union-attr]

    forget_traces()
    with other():
        there = factor()
    assert {there, factor()} == {2.5, 3.5}
    with other():
        assert factor() == there


HIDDEN = hidden()


@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_read_in_other_ways_is_seen(name: str) -> None:
    function, put = HIDDEN[name]
    if name == "attribute":  # which the function does not have yet
        for _ in range(3):
            assert traced(function).numbers == (2.5,)
    for value in (2.5, 2.5, 2.5, 3.5, 3.5, 3.5, 2.5, 3.5):
        put(value)
        assert traced(function).numbers == (value,)
    if name in ("attribute of helper", "attribute of tensor", "gradient of tensor"):
        assert remembered._recent, "numbers that are seen need no new trace"


@pytest.mark.usefixtures("nothing_traced")
def test_functions_of_a_recent_call_keep_no_array_alive() -> None:
    def make() -> tuple[Any, Any]:
        slopes = torch.rand(HEADS)
        return (lambda score, b, h, q, k: score + slopes[h]), weakref.ref(slopes)

    function, array = make()
    for _ in range(3):
        traced(function)
    assert remembered._recent
    del function
    assert array() is None


@pytest.mark.usefixtures("nothing_traced")
def test_functions_that_call_themselves_are_looked_at_whole() -> None:
    def function(score: Any, b: Any, h: Any, q: Any, k: Any, times: int = 2) -> Any:
        return score if times == 0 else function(score * 2, b, h, q, k, times - 1)

    for _ in range(3):
        assert traced(function).program == traced(lambda score, b, h, q, k: score * 2 * 2).program
    assert (function.__code__, None) not in remembered._recent


@pytest.mark.usefixtures("nothing_traced")
def test_a_number_that_is_another_one_at_every_step_leaves_a_table_as_it_is() -> None:
    def of(by: float) -> Any:
        return lambda score, b, h, q, k: score * by

    for number in range(200):
        for _ in range(2):
            assert traced(of(number + 0.5)).numbers == (number + 0.5,)
    ((_, kept),) = remembered._recent.items()
    assert len(kept) == remembered._RECENT


# ------------------------------------------------------------------------------ flex_attention, attention of torch


def heads_first(grad: str = "", dtype: Any = torch.float32) -> list[Any]:
    return [x.detach().transpose(1, 2).requires_grad_(n in grad) for n, x in zip("qkv", qkv(dtype), strict=True)]


def mask_of(functions: dict[str, Any]) -> Any:
    mask = functions.get("mask_mod")
    return None if mask is None else na.create_block_mask(mask, None, None, ROWS, ROWS)


def known(function: Callable[[], object]) -> list[str]:
    """The passes in ``function`` that are answered by what is known."""
    found = []
    codes = {modified_known._Known.run.__code__: "forward", modified_known._KnownBackward.run.__code__: "backward"}

    def seen(frame: Any, event: str, result: Any) -> None:
        if event == "return" and frame.f_code in codes and result is not None:
            found.append(codes[frame.f_code])

    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.usefixtures("fake", "nothing_traced")
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    ("door", "name"),
    [
        *(("flex_attention", x) for x in (*CASES, "plain") if x not in ("traced", "aux")),
        *(("attention", x) for x in CASES),
    ],
)
def test_a_known_call_of_torch_runs_what_a_first_one_does(
    door: str, name: str, return_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions, wanted = CASES.get(name, ({}, 0))
    block_mask = mask_of(functions) if door == "flex_attention" else None

    def call(inputs: list[Any]) -> Any:
        if door == "attention":
            return na.attention(*inputs, **functions, causal=True, return_lse=return_lse)
        return na.flex_attention(*inputs, functions.get("score_mod"), block_mask, return_lse=return_lse)

    def laid_out(x: Any) -> Any:
        """``[batch, rows, heads, head_dim]``, and back."""
        return x if door == "attention" else x.transpose(1, 2)

    runs = Runs(monkeypatch)
    arrays = traced(**functions).captures if functions else ()
    leaves = [x.requires_grad_(x.dtype == torch.float32 and bool(wanted)) for x in arrays]
    trained = [x for x in leaves if x.requires_grad]
    places = {name: plan.BackwardPlan.OPERANDS.index(name) for name in ("dout", "dq", "dk", "dv", "dbias")}
    facts, answered = [], []
    try:
        for _ in range(6):
            inputs = [laid_out(x.transpose(1, 2)).detach().requires_grad_() for x in heads_first()]
            dout = laid_out(torch.zeros(2, ROWS, HEADS, 64))
            kept: list[Any] = []

            def step(inputs: Any = inputs, dout: Any = dout, kept: Any = kept) -> None:
                found = call(inputs)
                out = found[0] if return_lse else found
                kept += [found, *torch.autograd.grad(out, (*inputs, *trained), dout)]

            forward, backward = runs.of(lambda step=step: answered.append(known(step)))
            found, *gradients = kept
            out, lse = found if return_lse else (found, None)
            assert (forward[0], backward[0]) == ("ForwardPlan", "BackwardPlan")
            assert list(forward[2][:4]) == [x.data_ptr() for x in (*inputs, out)]
            assert lse is None or lse.data_ptr() == forward[2][4]
            assert list(backward[2][:3]) == [x.data_ptr() for x in inputs]
            assert backward[2][places["dout"]] == dout.data_ptr()
            assert [backward[2][places[x]] for x in ("dq", "dk", "dv")] == [x.data_ptr() for x in gradients[:3]]
            assert all(laid_out(x).is_contiguous() for x in (out, *gradients[:3]))
            assert [x.shape for x in gradients[3:]] == [x.shape for x in trained]
            if trained and "bias" in name:
                assert backward[2][places["dbias"]] == gradients[3].data_ptr()
            elif trained:
                assert backward[5][0][0] == gradients[3].data_ptr()
            facts.append((forward[4], len(backward[4]), len(backward[5])))
            assert facts[-1] == facts[0]
    finally:
        for x in leaves:
            x.requires_grad_(False)
    assert answered[0] == []
    assert answered[-1] == ["forward", "backward"]


def sloped(slopes: Any) -> Any:
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fake", "nothing_traced")
def test_no_other_call_is_taken_for_a_known_one_of_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes, mask = torch.rand(HEADS), mask_of({"mask_mod": same_document})
    q, k, v = heads_first()

    def call(*tensors: Any, slopes: Any = slopes, mask: Any = mask, **more: Any) -> list[str]:
        return known(lambda: na.flex_attention(*(tensors or (q, k, v)), sloped(slopes), mask, **more))

    for _ in range(5):
        call()
    assert call() == ["forward"]
    assert call(slopes=torch.rand(HEADS)) == ["forward"]
    half = [x.half() for x in (q, k, v)]
    shifted = torch.rand(HEADS + 1)[1:]
    others: dict[str, Callable[[], list[str]]] = {
        "type": lambda: call(*half),
        "wants a gradient": lambda: call(*heads_first("q")),
        "array wants a gradient": lambda: call(slopes=torch.rand(HEADS, requires_grad=True)),
        "longer array": lambda: call(slopes=torch.rand(HEADS + 1)),
        "array with gaps": lambda: call(slopes=torch.rand(2 * HEADS)[::2]),
        "unaligned": lambda: call(slopes=shifted),
        "contiguous": lambda: call(*(x.contiguous() for x in (q, k, v))),
        "negated": lambda: call(torch._neg_view(q), k, v),
        "one tensor": lambda: call(q, q, q),
        "scale": lambda: call(scale=0.5),
        "integer scale": lambda: call(scale=1),
        "no mask": lambda: call(mask=None),
        "other mask": lambda: call(mask=mask_of({"mask_mod": backwards})),
        "lse": lambda: call(return_lse=True),
    }
    for name, other in others.items():
        assert other() == [], name
        assert call() == ["forward"], name
    with Watching():
        assert call() == []
    with torch.autocast("cpu", torch.bfloat16):
        assert call() == []
    with torch.no_grad():
        assert call() == []
    assert call() == ["forward"]
    # The type of autocast alone tells these apart: tensors of either type are on the same side of its switch.
    half = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(modified_known, "_autocast_dtype", lambda _: torch.bfloat16)
        for _ in range(5):
            call(*half)
        assert call(*half) == ["forward"]
        monkeypatch.setattr(modified_known, "_autocast_dtype", lambda _: torch.float16)
        assert call(*half) == []
    with pytest.raises(ValueError, match="lengths"):
        na.flex_attention(q[:, :, 1:], k, v, sloped(slopes), mask)
    with pytest.raises(ValueError, match="enable_gqa"):
        na.flex_attention(q, k[:, :2], v[:, :2], sloped(slopes), mask)


@pytest.mark.usefixtures("fake", "nothing_traced")
def test_no_other_call_is_taken_for_a_known_one_of_attention() -> None:
    slopes = torch.rand(HEADS)
    q, k, v = (x.transpose(1, 2) for x in heads_first())

    def call(slopes: Any = slopes, **more: Any) -> list[str]:
        return known(lambda: na.attention(q, k, v, score_mod=sloped(slopes), **more))

    for _ in range(5):
        call()
    assert call() == call(slopes=torch.rand(HEADS)) == ["forward"]
    bias = torch.zeros(1, HEADS, ROWS, ROWS)
    starts = torch.tensor([0, ROWS], dtype=torch.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
    others: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window_size": (3, 0)},
        "scale": {"softmax_scale": 0.5},
        "bias": {"bias": bias},
        "mask": {"mask": bias == 0},
        "sink": {"sink": torch.zeros(HEADS)},
        "used keys": {"seqused_k": torch.full((2,), ROWS, dtype=torch.int32)},
        "dropout": {"dropout_p": 0.5, "rng": 1},
        "lse": {"return_lse": True},
        "deterministic": {"deterministic": True},
        "other mask": {"mask_mod": same_document},
    }
    for name, more in others.items():
        assert call(**more) == [], name
        assert call() == ["forward"], name
    with pytest.raises(ValueError, match="softcap"):
        call(softcap=3.0)
    with pytest.raises(ValueError, match="batch"):
        call(**packed)
    with pytest.raises(ValueError, match=r"score_mod: a traced modifier|aux"):
        call(aux={"slopes": slopes})


@pytest.mark.usefixtures("fake", "nothing_traced")
def test_a_backward_pass_of_flex_attention_is_known_for_what_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    slopes = torch.rand(HEADS, requires_grad=True)
    function = sloped(slopes)
    inputs, dout = heads_first("qkv"), torch.zeros(2, ROWS, HEADS, 64).transpose(1, 2)
    runs = Runs(monkeypatch)

    def backward(wanted: Any, dout: Any = dout, **more: Any) -> list[str]:
        out, lse = na.flex_attention(*inputs, function, return_lse=True)
        return known(lambda: torch.autograd.grad((out, lse) if "dlse" in more else out, wanted, (
            (dout, more["dlse"]) if "dlse" in more else dout)))  # fmt: skip

    every = (*inputs, slopes)
    for _ in range(5):
        backward(every)
    assert backward(every) == ["backward"]
    assert backward(inputs) == ["backward"]
    fixed = [x.detach() for x in inputs]
    # Of one array alone: the launches are known, and so is the forward pass from the second time on.
    for number in range(4):
        out = na.flex_attention(*fixed, function)
        assert known(lambda out=out: torch.autograd.grad(out, slopes, dout)) == ["backward"] * (number >= 2)
    assert backward(every, dout.contiguous()) == []
    assert backward(every, torch.zeros(1).expand(dout.shape)) == []
    assert backward(every, dlse=torch.zeros(2, HEADS, ROWS)) == []
    torch.use_deterministic_algorithms(True)
    try:
        assert backward(every) == []
        sums = runs.of(lambda: backward(every))[-1][5]
    finally:
        torch.use_deterministic_algorithms(False)
    assert sums[0][1] > slopes.numel() * 4, "sums without an order"
    assert backward(every) == ["backward"]
    dout = dout.requires_grad_()
    (dq,) = torch.autograd.grad(na.flex_attention(*inputs, function), inputs[0], dout, create_graph=True)
    with pytest.raises(RuntimeError, match="derivative"):
        dq.sum().backward()


@pytest.mark.usefixtures("fake", "nothing_traced")
def test_what_changes_at_every_step_is_not_remembered() -> None:
    q, k, v = heads_first()
    for number in range(50):
        by = number + 0.5
        na.flex_attention(q, k, v, lambda score, b, h, q, k, by=by: score * by)
        na.flex_attention(q, k, v, scale=by)
    assert not modified_known._known


# A fourteenth above what was counted with Python 3.11 and torch 2.13: 91, 86, 91, 211, 58, 88, 63, 94. Without a
# modifier `attention` has 68, and torch's signature 41 and 44.
BOUNDS = {
    "function": 97, "traced": 92, "mask": 97, "forward and backward": 226, "flex": 62, "flex, both passes": 94,
    "attention": 67, "attention, both passes": 100,
}  # fmt: skip


@pytest.mark.usefixtures("fake", "nothing_traced")
@pytest.mark.parametrize("name", BOUNDS)
def test_a_warm_call_with_a_modifier_calls_few_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[Any, Any] = {}

    def again(*made: Any) -> Any:
        shape, strides, dtype = made
        return memory.setdefault(made, torch.empty_strided(shape, strides, dtype=dtype)).detach()

    monkeypatch.setattr(arrays, "_of_torch", lambda: (again, lambda: 0))
    for module in (passes, torch_known, modified_known):
        monkeypatch.setattr(module, "empty_on_current", again)
    tensors, leaves = heads_first(dtype=torch.bfloat16), heads_first("qkv", torch.bfloat16)
    mask, gradient = mask_of({"mask_mod": same_document}), torch.zeros_like(leaves[0])
    q, k, v = qkv()
    out, lse, dout = torch.empty_like(q), torch.empty(2, HEADS, ROWS), torch.zeros_like(q)
    gradients, daux = [torch.empty_like(x) for x in (q, k, v)], [torch.empty_like(TABLE)]
    workspace = torch.empty(1 << 24, dtype=torch.uint8)
    known, rows_first = nvrtc_attn.trace(alibi), [x.detach().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        nvrtc_attn.attention_forward(q, k, v, out, lse=lse, score_mod=relative, workspace=workspace)
        nvrtc_attn.attention_backward(
            dout, q, k, v, out, lse, *gradients, score_mod=relative, daux=daux, workspace=workspace
        )

    functions: dict[str, Callable[[], Any]] = {
        "function": lambda: nvrtc_attn.attention(q, k, v, score_mod=alibi),
        "traced": lambda: nvrtc_attn.attention(q, k, v, score_mod=known),
        "mask": lambda: nvrtc_attn.attention(q, k, v, mask_mod=same_document),
        "forward and backward": both,
        "flex": lambda: na.flex_attention(*tensors, alibi, mask),
        "flex, both passes": lambda: torch.autograd.grad(na.flex_attention(*leaves, alibi, mask), leaves, gradient),
        "attention": lambda: na.attention(q, k, v, score_mod=alibi, mask_mod=same_document),
        "attention, both passes": lambda: torch.autograd.grad(
            na.attention(*rows_first, score_mod=alibi, mask_mod=same_document), rows_first, torch.zeros_like(q)
        ),
    }
    for _ in range(5):
        functions[name]()
    assert calls_of(functions[name]) <= BOUNDS[name]
