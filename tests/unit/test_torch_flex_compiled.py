"""`nvrtc_attn.torch.flex_attention` inside of torch.compile(fullgraph=True): what eager calls give, on the CPU."""

from __future__ import annotations

import functools
import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import modifiers
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
from flex_examples import (  # noqa: E402
    EXAMPLES,
    MASKS,
    OFFSETS,
    SLOPES,
    TABLE,
    B,
    E,
    H,
    M,
    N,
    alibi,
    causal,
    document,
    tensors,
    theirs,
)
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import nvrtc_attn  # noqa: E402
from nvrtc_attn.modifiers.modifier import written  # noqa: E402
from nvrtc_attn.modifiers.text import read_text  # noqa: E402
from nvrtc_attn.torch import create_block_mask, flex_attention, modified, modified_passes  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11),
        reason="what Dynamo follows of the tracer was tried with torch 2.11 and later; before, the graph may break",
    ),
    # Of torch's own compiler, not of ours: modules that it imports are deprecated, and its workers fork.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("fresh"),
]


@pytest.fixture
def fresh() -> Iterator[None]:
    """No program compiled by another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def same(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def out_and_gradient(call: Callable[..., Any], make: Callable[..., Any], table: Any) -> list[Any]:
    """The output with a score_mod that ``make`` makes of ``table``, and the gradient of the table."""
    out = call(*tensors(), make(table))
    return [out.detach(), *torch.autograd.grad(out.square().sum(), table)]


# ---------------------------------------------------------------------------------------------------- what is traced


@pytest.mark.parametrize("name", EXAMPLES)
def test_score_mods(name: str) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, EXAMPLES[name], return_lse=True)

    same(compiled(call)(*tensors()), call(*tensors()))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, inside: bool) -> None:
    """A mask that is made in the program, and one that is made outside of it."""
    outside = create_block_mask(MASKS[name], None, None, M, N)

    def call(q: Any, k: Any, v: Any) -> Any:
        made = create_block_mask(MASKS[name], None, None, q.shape[2], k.shape[2]) if inside else outside
        return flex_attention(q, k, v, alibi, made)

    same(compiled(call)(*tensors()), call(*tensors()))


def test_a_block_mask_of_torch() -> None:
    block_mask = theirs.create_block_mask(MASKS["prefix_lm"], B, H, M, N, device="cpu", BLOCK_SIZE=4)

    def call(q: Any, k: Any, v: Any, block_mask: Any) -> Any:
        return flex_attention(q, k, v, block_mask=block_mask)

    same(compiled(call)(*tensors(), block_mask), call(*tensors(), block_mask))


class Layer(torch.nn.Module):
    """A learned table, read by a method and by a function that is made at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.linspace(-1, 1, 2 * M))

    def score(self, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + self.table[q - k + M]

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        half = q.shape[2] // 2

        def nested(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return torch.where(j <= i + half, self.score(score, b, h, i, j), -math.inf)

        return flex_attention(q, k, v, nested)


LAYER = Layer()
ARRAY = np.linspace(0.5, 1.0, H, dtype=np.float32)
KINDS: dict[str, Any] = {
    "method": LAYER.score,
    "partial": functools.partial(lambda x, s, b, h, i, j: s + x[h] * (i - j), SLOPES),
    "nvrtc_attn.where": lambda s, b, h, i, j: nvrtc_attn.where(i > j, s, s * 2),
    "parts of tensors": lambda s, b, h, i, j: s + TABLE[i][h] + SLOPES[1] + SLOPES.exp()[h] + TABLE[3, 1],
    "keywords": lambda s, b, h, i, j: (
        torch.div(i, j + 1, rounding_mode="floor") + torch.clamp(s, max=2.0, min=-1) + torch.zeros_like(s)
        + i.new_ones((), device=i.device) + torch.add(s, i, alpha=2)
    ),
    "loop": lambda s, b, h, i, j: sum([s * x for x in (1.0, 2.5)]),
    "reflected": lambda s, b, h, i, j: 1 - s + 2 / (1 + abs(3 - i)) + (5 - j) // 2 - (7 % (j + 1)) + 0.5**i,
    "powers": lambda s, b, h, i, j: s - (i - j) ** 2 * 0.01 + torch.pow(s, 3),
    "compared with a tensor": lambda s, b, h, i, j: torch.where(OFFSETS[1] < i, s, 0.0) + (i < OFFSETS[2]) * s,
    "numpy": lambda s, b, h, i, j: s * ARRAY[h],
    "of sizes": lambda s, b, h, i, j: s * math.sqrt(SLOPES.shape[0]) + [SLOPES, SLOPES * 2][1][h],
    "none": None,
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_functions(name: str) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, KINDS[name], scale=0.3)

    same(compiled(call)(*tensors()), call(*tensors()))


def test_what_eager_calls_take_beside_functions() -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        mask = create_block_mask(causal, None, None, M, N)
        return flex_attention(q, k[:1], v[:1], alibi, mask, scale=0.3, enable_gqa=True, return_lse=True)

    same(compiled(call)(*tensors(heads=2)), call(*tensors(heads=2)))


def test_return_aux_and_another_device() -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        mask = create_block_mask(causal, None, None, M, N, device=q.device, separate_full_blocks=False).to("cpu")
        return flex_attention(q, k, v, alibi, mask, return_aux=theirs.AuxRequest(lse=True))

    out, aux = compiled(call)(*tensors())
    expected, expected_aux = call(*tensors())
    same((out, aux.lse), (expected, expected_aux.lse))


@pytest.mark.parametrize("name", ["grad", "vmap"])
def test_transformations_are_refused(name: str) -> None:
    q, k, v = tensors()

    def call(x: Any) -> Any:
        if name == "vmap":
            return torch.vmap(lambda y: flex_attention(y, k, v, alibi))(x[None])
        return torch.func.grad(lambda y: flex_attention(y, k, v, alibi).sum())(x)

    with pytest.raises(Exception, match=r"flex_attention, .*transformations of torch\.func"):
        compiled(call)(q)


# ---------------------------------------------------------------------------------- operands: tensors, numbers, sizes


def leaves() -> list[Any]:
    """q, k, v, then a table, a bias and a number, all with gradients."""
    torch.manual_seed(0)
    more = (torch.randn(2 * M, H), torch.randn(H, M, N), torch.tensor(1.3))
    return [x.requires_grad_() for x in (*tensors(), *more)]


def all_captured(q: Any, k: Any, v: Any, table: Any, bias: Any, factor: Any, block_mask: Any = None) -> Any:
    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(score * factor / 3) * 3 + table[i - j + M, h] + bias[h, i, j] + table[i, 0]

    return flex_attention(q.sin(), k, v, score_mod, block_mask, return_lse=True)


def results(call: Any, inputs: list[Any]) -> list[Any]:
    out, lse = call(*inputs)
    gradients = torch.autograd.grad(out.square().sum() + lse.sin().sum(), [x for x in inputs if x.requires_grad])
    return [out.detach(), lse.detach(), *gradients]


@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients(dynamic: bool | None) -> None:
    """Of q, k, v and everything captured, a table that is read twice among them."""
    mask = create_block_mask(causal, None, None, M, N)
    call = functools.partial(all_captured, block_mask=mask)
    same(results(compiled(call, dynamic=dynamic), leaves()), results(call, leaves()))


def test_gradients_of_some() -> None:
    """A table without a gradient, and integers, beside one that has one; then a program without any."""
    inputs = leaves()
    inputs[3].requires_grad_(False)

    def call(*x: Any) -> Any:
        mask = create_block_mask(document, None, None, M, N)
        return all_captured(*x, block_mask=mask)

    program = compiled(call)
    same(results(program, inputs), results(call, inputs))
    with torch.no_grad():
        same(program(*inputs), call(*inputs))


def test_parameters_of_a_module_train() -> None:
    inputs = [x.requires_grad_() for x in tensors()]
    found = []
    for layer in (LAYER, compiled(LAYER)):
        out = layer(*inputs)
        found.append(torch.autograd.grad(out.square().sum(), [*inputs, LAYER.table]))
    same(found[1], found[0])


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, with which inductor compiles for the CPU")
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic: bool) -> None:
    program = compiled(all_captured, backend="inductor", dynamic=dynamic)
    same(results(program, leaves()), results(all_captured, leaves()))


def test_a_closure_over_other_tensors_is_another_call_of_one_program() -> None:
    """Results and gradients are those of what the cells hold now, and nothing is compiled again."""

    def make(table: Any) -> Any:
        return lambda s, b, h, i, j: s + table[i - j + M, h]

    counter = CompileCounterWithBackend("aot_eager")
    program = compiled(lambda q, k, v, f: flex_attention(q, k, v, f), backend=counter)
    for seed in range(4):
        torch.manual_seed(seed)
        table = torch.randn(2 * M, H, requires_grad=True)
        same(*(out_and_gradient(call, make, table) for call in (program, flex_attention)))
    assert counter.frame_count == 1


def test_other_functions_are_other_programs() -> None:
    program = compiled(lambda q, k, v, f: flex_attention(q, k, v, f))
    for function in (alibi, EXAMPLES["softcap"], None, EXAMPLES["relative"], lambda s, b, h, q, k: s - 10**300 * 0 + q):
        same(program(*tensors(), function), flex_attention(*tensors(), function))


def test_export() -> None:
    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(TABLE.clone())

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2])
            return flex_attention(q, k, v, lambda s, b, h, i, j: s + self.table[i - j + M, h], mask)

    program = torch.export.export(Attend(), tensors(), strict=True)
    same(program.module()(*tensors()), Attend()(*tensors()))


def test_tensors_that_are_written_to_are_read_anew() -> None:
    slopes = SLOPES.clone()
    counter = CompileCounterWithBackend("aot_eager")

    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + slopes[h] * (j - i))

    program = compiled(call, backend=counter)
    for _ in range(3):
        same(program(*tensors()), call(*tensors()))
        slopes.mul_(-2)
    assert counter.frame_count == 1


def test_captured_numbers_may_change() -> None:
    """Another integer is an operand from the second on, another float a program of its own."""

    def make(factor: float, offset: int) -> Any:
        return lambda s, b, h, i, j: s * factor + (i + offset) % 5

    counter = CompileCounterWithBackend("aot_eager")
    program = compiled(lambda q, k, v, f: flex_attention(q, k, v, f), backend=counter)
    for factor, offset in ((0.5, 7), (0.5, 8), (0.5, 9), (0.5, 11)):
        same(program(*tensors(), make(factor, offset)), flex_attention(*tensors(), make(factor, offset)))
    assert counter.frame_count == 2
    for factor in (0.7, 0.9):
        same(program(*tensors(), make(factor, 3)), flex_attention(*tensors(), make(factor, 3)))


COMPARED: dict[str, Any] = {
    "==": lambda x, n: x == n, "!=": lambda x, n: x != n, "<": lambda x, n: x < n, "<=": lambda x, n: x <= n,
    ">": lambda x, n: x > n, ">=": lambda x, n: x >= n, "== reflected": lambda x, n: n == x,
    "!= reflected": lambda x, n: n != x, "< reflected": lambda x, n: n < x, ">= reflected": lambda x, n: n >= x,
}  # fmt: skip


@pytest.mark.parametrize("name", COMPARED)
def test_comparisons_with_integers_that_change(name: str) -> None:
    """Dynamo takes an object for unequal to every integer that it made symbolic, unless it is told otherwise."""
    compare = COMPARED[name]
    program = torch.compile(lambda x, y: x * 2 if x.shape[0] > y else x, backend="eager")  # it has looked these up
    for n in (3, 5, 8):
        program(torch.zeros(n), n - 4)

    def call(q: Any, k: Any, v: Any, n: int) -> Any:
        def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return compare(j, n) | compare(i, k.shape[2] - 3) | (j == 0)

        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.where(compare(h, n - 3), s, -s), mask_of(mask))

    def mask_of(mask: Any) -> Any:
        return create_block_mask(mask, None, None, M, N)

    program = compiled(call)
    for n in (3, 4, 5, 7):
        same(program(*tensors(), n), call(*tensors(), n))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_inside_of_activation_checkpoints(backend: str) -> None:
    """What Dynamo traces there may change nothing outside: the modes that see an indexed tensor are left again."""
    if backend == "inductor" and shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    table = torch.linspace(-1, 1, H * N).reshape(H, N).requires_grad_()

    def call(q: Any, k: Any, v: Any, n: int) -> Any:
        def layer(q: Any, k: Any, v: Any) -> Any:
            mask = create_block_mask(lambda b, h, i, j: (i >= j - PAIRS[h, 1]) | (j == n), None, None, M, N)
            return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, j] + 0.1 * h, mask)

        return torch.utils.checkpoint.checkpoint(layer, q, k, v, use_reentrant=False)

    program = compiled(call, backend=backend)
    for n in (3, 5):
        found, expected = (
            torch.autograd.grad(function(*tensors(), n).square().sum(), table)[0] for function in (program, call)
        )
        same(found, expected)


PAIRS = torch.arange(2 * H).reshape(H, 2)
IN_PARTS: dict[str, Any] = {
    "iterated": lambda s, b, h, i, j: s + sum([torch.where(j == x, 1.0, 0.5) for x in PAIRS[h]]),
    "unpacked": lambda s, b, h, i, j: (lambda x, y: torch.where(j > x, s, s * y))(*PAIRS[h]),
    "sizes": lambda s, b, h, i, j: s * len(PAIRS[h]) + PAIRS[h].shape[0] * j,
    "rows": lambda s, b, h, i, j: s + sum([row[h] for row in TABLE]) + sum([2 * x for x in TABLE[:, h]]),
    "ellipsis": lambda s, b, h, i, j: s + sum([2 * x for x in TABLE[..., h]]),
    "shifts": lambda s, b, h, i, j: s + (i >> 1) + (j << 2) + (1 << h) + (64 >> h),
    "divmod": lambda s, b, h, i, j: s + divmod(i, 3)[0] - divmod(j, 3)[1] + divmod(7, j + 1)[0],
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_parts_of_tensors_and_operators_of_python(name: str) -> None:
    def call(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, IN_PARTS[name])

    same(compiled(call)(*tensors()), call(*tensors()))


def test_one_dynamic_program_serves_all_lengths() -> None:
    table = torch.randn(100, H)

    def call(q: Any, k: Any, v: Any) -> Any:
        mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2])
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j + k.shape[2], h], mask)

    program = compiled(call, dynamic=True)

    def inputs(m: int) -> list[Any]:
        return [torch.randn(2, H, n, E) for n in (m, m + 6, m + 6)]

    program(*inputs(11))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (12, 15, 30):
            given = inputs(m)
            same(program(*given), call(*given))


def test_a_traced_modifier() -> None:
    """Its tensors are operands, another program is another one, and other numbers are read."""
    counter = CompileCounterWithBackend("aot_eager")
    program = compiled(lambda q, k, v, m: flex_attention(q, k, v, m), backend=counter)

    def make(table: Any, number: int = 7) -> Any:
        return nvrtc_attn.trace(lambda s, b, h, i, j: s + table[i - j + M, h] + i % number, document)

    torch.manual_seed(0)
    for _ in range(3):
        table = torch.randn(2 * M, H, requires_grad=True)
        same(*(out_and_gradient(call, make, table) for call in (program, flex_attention)))
    assert counter.frame_count == 1
    for other in (make(table, 9), make(table, 11), nvrtc_attn.trace(alibi), nvrtc_attn.trace(None, causal)):
        same(program(*tensors(), other), flex_attention(*tensors(), other))
    arrays = nvrtc_attn.trace(lambda s, b, h, i, j: s + np.tanh(j * ARRAY[h]))  # NumPy's, functions and arrays
    same(program(*tensors(), arrays), flex_attention(*tensors(), arrays))
    bare = other.of(other.program.score, other.program.mask, ())
    with pytest.raises(Exception, match=r"Make it by nvrtc_attn\.trace"):
        program(*tensors(), bare)


# ------------------------------------------------------------------------------------------------- texts and operators


@pytest.mark.parametrize("case", modifiers.named_cases(), ids=str)
def test_a_text_says_all_of_a_program(case: modifiers.ModifierCase) -> None:
    modifier = nvrtc_attn.trace(*case.make(case.arrays((B, H, M, N), np.random.default_rng(0))))
    ints, floats = (tuple(x for x in modifier.numbers if isinstance(x, kind)) for kind in (int, float))
    shapes = tuple((tuple(x.shape), str(x.dtype)) for x in modifier.captures)
    found, places = read_text(modifier.text, ints, floats, shapes)
    assert found.program == modifier.program
    assert found.numbers == modifier.numbers
    assert places == tuple(range(len(modifier.captures)))
    assert modifier.text == written(modifier.program)


@pytest.mark.parametrize("name", [*EXAMPLES, *(x for x in KINDS if x not in ("none", "parts of tensors", "of sizes"))])
def test_a_compiled_program_runs_the_kernel_of_the_eager_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One expression, with the same numbers in its text and given beside it: nothing is compiled twice."""
    function = {**EXAMPLES, **KINDS}[name]
    found: list[Any] = []
    own = modified_passes.api.attention

    def spy(*args: Any, score_mod: Any, **options: Any) -> Any:
        found.append(score_mod.program)
        return own(*args, score_mod=score_mod, **options)

    monkeypatch.setattr(modified_passes.api, "attention", spy)
    for call in (flex_attention, compiled(flex_attention)):
        call(*tensors(), function)
    assert found[0] == found[1]


def operands() -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in tensors())
    table, offsets = TABLE.clone().requires_grad_(), OFFSETS.clone()
    script = (
        '[[1],[["score_mod",[["__sub__",["$3","$4"],{}],["__add__",["%0","i0"],{}],["getitem",["@0",["%1","$2"]],{}],'
        '["__mul__",["%2","f0"],{}],["__add__",["$0","%3"],{}],["getitem",["@1",["i1"]],{}],["__lt__",["$3","%5"],{}],'
        '["where",["%6","%4","$0"],{}]],"%7"]]]'
    )
    return (*modified.plain_arguments(q, k, v, None, False), [table, offsets], script, [M, 2], [0.7])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "slices": lambda s, b, h, q, k: s + TABLE[:, h][q - k + N] + TABLE[k, ...][h],
    "type of a score": lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo(s.dtype).min) + (q - k).to(s.dtype),
    "type_as": lambda s, b, h, q, k: s + (q - k).type_as(s) * 0.1,
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s, approximate="tanh") + torch.nn.functional.gelu(s),
    "softplus": lambda s, b, h, q, k: torch.nn.functional.softplus(s, beta=2.0) + torch.nn.functional.logsigmoid(s),
    "leaky_relu": lambda s, b, h, q, k: torch.nn.functional.leaky_relu(s, 0.1) * torch.nn.functional.silu(s),
    "elu": lambda s, b, h, q, k: torch.nn.functional.elu(s, alpha=0.5) + torch.nn.functional.hardtanh(s),
    "atan": lambda s, b, h, q, k: torch.atan(s) + torch.fmod(s, 2.0) + torch.hypot(s, s + 1),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, s * s, 0.3) + torch.addcmul(s, s, s, value=0.5),
    "logaddexp": lambda s, b, h, q, k: torch.logaddexp(s, -s) + torch.nan_to_num(s) * torch.isfinite(s),
    "where of a score": lambda s, b, h, q, k: s.where(q >= k, -1.0) + s.where(h > 0, other=0.5),
    "where of a tensor": lambda s, b, h, q, k: s + SLOPES[0].clone().where(q >= k, s) + SLOPES[h].where(q > 2, 0.5),
    "not": lambda s, b, h, q, k: torch.where(~(q >= k) & ~(h > 0), -1.0, s) + (~q & 3),
    "not of conditions": lambda s, b, h, q, k: s + ~torch.maximum(q > k, h > 0) * 0.5 + ~torch.sign(q > 2),
    "signs": lambda s, b, h, q, k: -s + abs(s) * +q,
    "fmax": lambda s, b, h, q, k: torch.fmax(s, q - k) + torch.fmin(s, 0.5 * k) + torch.fmax(s * math.nan, s),
    "int16": lambda s, b, h, q, k: s * SHORT[k] + SHORT[q].int() - SHORT[k],
}
SHORT = torch.arange(M + N).to(torch.int16)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_torch(name: str) -> None:
    same(compiled(flex_attention)(*tensors(), FUNCTIONS[name]), flex_attention(*tensors(), FUNCTIONS[name]))


@pytest.mark.parametrize("kind", ["literal", "given"])
def test_zeros_of_both_signs_are_two_texts(kind: str) -> None:
    """They are equal, and what is made of one text is kept."""
    literals = "0.0" if kind == "literal" else ""
    script = f'[[{literals}],[["score_mod",[["copysign",["$0","f0"],{{}}]],"%0"]]]'
    found = [read_text(script, (), (x,), ())[0].valued[0] for x in (0.0, -0.0, 0.0)]
    assert found[0] == found[2] != found[1]


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.nvrtc_attn.copied.default, (torch.rand(3), torch.device("cpu")))
    given = operands()
    torch.library.opcheck(modified.modified_forward, given)
    *of_call, _, _, captures, script, ints, floats = given
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in of_call]
    functions = [x.detach() for x in captures], script, ints, floats
    out, lse, _ = modified.modified_forward(*detached, True, False, *functions)
    for dlse in (None, torch.randn_like(lse)):
        for wanted in ([True, False], [False, False]):
            given = (torch.randn_like(out), dlse, out, lse, *detached, False, False, *functions, wanted)
            torch.library.opcheck(modified.modified_backward, given)


def test_second_derivatives_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    out = compiled(flex_attention, backend="eager")(q, k, v, alibi)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda s, b, h, q, k: s if q > k else 0 * s, "score_mod: a branch"),
        (lambda s, b, h, q, k: s + torch.rand(()), "'rand'.*no random numbers"),
        (lambda s, b, h, q, k: s + TABLE[q], "1 of the 2 indices"),
        (lambda s, b, h, q, k: torch.softmax(s, 0), "'softmax'.*shape"),
        (lambda s, b, h, q, k: s.shape[0] * s, "'shape'"),
        (lambda s, b, h, q, k: s + torch.stack([s, s]), "stack"),
        (lambda s, b, h, q, k: None, "return statement"),
        (lambda s, b, h, q, k: s + TABLE, "used as a whole"),
        (lambda s, b, h, q, k: s + SLOPES[9], "out of range"),
        (lambda s, b, h, q, k: s + sum([2 * x for x in q]), "iteration over a number"),
        (lambda s, b, h, q, k: s + len(PAIRS[h, 1]), "len.* of a number"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(function: Any, words: str) -> None:
    """While the program is traced; without fullgraph it is the eager call that refuses."""
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(flex_attention)(*tensors(), function)
    with pytest.raises(nvrtc_attn.TraceError):
        torch.compile(flex_attention, backend="aot_eager")(*tensors(), function)


def test_what_dynamo_does_not_follow_breaks_the_graph() -> None:
    """A function of NumPy's: the call is made behind a graph break, or refused with fullgraph."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return np.tanh(score) + h + SLOPES[h]

    call = torch.compile(lambda q, k, v: flex_attention(q * 1.0, k, v, score_mod) + 1, backend="aot_eager")
    same(call(*tensors()), flex_attention(*tensors(), score_mod) + 1)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(flex_attention)(*tensors(), score_mod)


def test_called_uncompiled_inside_of_a_program_that_dynamo_gave_up() -> None:
    """The tracer of eager calls is none of Dynamo's business."""

    @torch.compiler.disable(recursive=False)
    def outer(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, alibi)

    call = torch.compile(lambda *x: outer(*x) + 1, backend="aot_eager")
    same(call(*tensors()), flex_attention(*tensors(), alibi) + 1)
