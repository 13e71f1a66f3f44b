"""What a function of a library means in a modifier is what it means in that library, argument by argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn.base.errors import TraceError
from nvrtc_attn.modifiers.derivative import slope
from nvrtc_attn.modifiers.evaluate import Values

PLACES = [(1.7, 0, 1, 5, 2), (-2.4, 1, 2, 3, 7), (0.5, 0, 0, 4, 4), (3.0, 2, 3, 2, 6)]
"""A score, b, h, q and k."""
Function = Callable[..., Any]
NUMPY: dict[str, Function] = {
    "clip(x, None, 3)": lambda x, b, h, q, k: x + np.clip(q - k, None, 3),
    "clip(x, -1, None)": lambda x, b, h, q, k: x + np.clip(q - k, -1, None),
    "clip(a_min=None)": lambda x, b, h, q, k: x + np.clip(q - k, a_min=None, a_max=3),
    "around": lambda x, b, h, q, k: np.around(x),
    "round(x, 0)": lambda x, b, h, q, k: np.round(x, 0),
    "astype('i4')": lambda x, b, h, q, k: x + (x * np.float32(2.5)).astype("i4"),
    "astype(int)": lambda x, b, h, q, k: x + (x * np.float32(2.5)).astype(int),
    "bool + bool": lambda x, b, h, q, k: x + ((q > k) + (q > 2)),
    "bool * bool": lambda x, b, h, q, k: x + ((q > k) * (q > 2)),
    "divmod": lambda x, b, h, q, k: x + divmod(q, 3)[0] - divmod(20, k)[1],
    "where": lambda x, b, h, q, k: np.where(q > k, x, -2.0),
    "logical_xor": lambda x, b, h, q, k: x + np.logical_xor(q > k, h > 1),
    "fmod": lambda x, b, h, q, k: np.fmod(x, 0.75) + np.fmod(q - k, 3),
    "tan, arctan": lambda x, b, h, q, k: np.tan(x) + np.arctan(x * q),
    "sinh, cosh": lambda x, b, h, q, k: np.sinh(x) + np.cosh(x - q),
    "log10": lambda x, b, h, q, k: np.log10(abs(x) + q),
    "hypot": lambda x, b, h, q, k: np.hypot(x, q),
    "logaddexp": lambda x, b, h, q, k: np.logaddexp(x, -x) + np.logaddexp2(x, k),
    "copysign": lambda x, b, h, q, k: np.copysign(x, q - k) + np.copysign(x, x * -0.0),
    "isnan": lambda x, b, h, q, k: x + np.isnan(x / 0 * 0) + np.isinf(x / 0) + np.isfinite(x) + np.isnan(q),
    "conditions": lambda x, b, h, q, k: (
        x
        + ~np.maximum(q > k, h > 1)
        + 2 * ~np.minimum(q > k, h < 1)
        + 4 * ~np.abs(q > k)
        + 8 * ~np.clip(h > 1, q > k, b > 0)
    ),
    "fmax, fmin of conditions": lambda x, b, h, q, k: x + ~np.fmax(q > k, h > 1) + 2 * ~np.fmin(q > k, h < 1),
    "square of conditions": lambda x, b, h, q, k: x + np.square(q > k) + (np.square(q > k) + np.square(q > 2)),
    "hypot of conditions": lambda x, b, h, q, k: x + (np.hypot(q > k, q > 2) > 1.2),
    "fmax, fmin": lambda x, b, h, q, k: (
        np.fmax(x, k - 2.0) + np.fmin(x, q - k) + np.fmax(x / 0 * 0, k) + np.fmin(x, x / 0 * 0) + np.fmax(q, k)
    ),
    "nan_to_num": lambda x, b, h, q, k: (
        x + np.nan_to_num(x / 0 * 0, nan=3.0) + np.nan_to_num(x / 0, posinf=2, neginf=1)
    ),
}


def torch_functions() -> dict[str, Function]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cube = 3
    return {
        "x.where": lambda x, b, h, q, k: x.where(q >= k, -3.0),
        "x.where(other=)": lambda x, b, h, q, k: x.where(q >= k, other=-3.0),
        "where(input=, other=)": lambda x, b, h, q, k: torch.where(q >= k, input=x, other=torch.tensor(-5.0)),
        "tensor.where": lambda x, b, h, q, k: torch.tensor(5.0).where(q >= k, x),
        "tensor.where(other=)": lambda x, b, h, q, k: torch.tensor(5.0).where(q >= k, other=x),
        "maximum of conditions": lambda x, b, h, q, k: x + ~torch.maximum(q > k, h > 1),
        "minimum of conditions": lambda x, b, h, q, k: x + ~torch.minimum(q > k, h < 1) + ~torch.min(q > 2, h < 1),
        "fmax, fmin of conditions": lambda x, b, h, q, k: x + ~torch.fmax(q > k, h > 1) + 2 * ~torch.fmin(q > 3, h < 1),
        "sign of a condition": lambda x, b, h, q, k: x + ~torch.sign(q > k) + ~torch.sgn(k > q),
        "clamp of a condition": lambda x, b, h, q, k: x + ~torch.clamp(q > k, min=h > 1),
        "square of a condition": lambda x, b, h, q, k: x + (torch.square(q > k) + torch.square(q > 2)),
        "clamp(x, None, 3)": lambda x, b, h, q, k: x + torch.clamp(q - k, None, 3),
        "x.clamp(None, 3)": lambda x, b, h, q, k: x + (q - k).clamp(None, 3),
        "x.clamp(max=3)": lambda x, b, h, q, k: x + (q - k).clamp(max=3),
        "add(other=, alpha=)": lambda x, b, h, q, k: torch.add(x, other=q, alpha=2),
        "x.sub(alpha=)": lambda x, b, h, q, k: x.sub(q, alpha=3),
        "rsub(alpha=)": lambda x, b, h, q, k: torch.rsub(x, q, alpha=2),
        "div(input=, other=, floor)": lambda x, b, h, q, k: x + torch.div(input=q - k, other=3, rounding_mode="floor"),
        "div(trunc)": lambda x, b, h, q, k: x + torch.div(q - k, 3, rounding_mode="trunc"),
        "div(trunc) is an integer": lambda x, b, h, q, k: x + (torch.div(q - k, -3, rounding_mode="trunc") & 7),
        "div(trunc) of two": lambda x, b, h, q, k: x + torch.div(q - k, k - 40, rounding_mode="trunc"),
        "captured exponent": lambda x, b, h, q, k: x + (q - k) ** cube + x**cube,
        "pow(captured exponent)": lambda x, b, h, q, k: x + torch.pow(q - k, exponent=cube),
        "large exponent": lambda x, b, h, q, k: x + (q - k) ** 7,
        "powers of 2": lambda x, b, h, q, k: x + 2 ** (h + 1) + torch.pow(2, k),
        "pow(exponent=)": lambda x, b, h, q, k: torch.pow(x, exponent=2),
        "masked_fill(mask=, value=)": lambda x, b, h, q, k: x.masked_fill(mask=q < k, value=-2.0),
        "relu(inplace=)": lambda x, b, h, q, k: torch.nn.functional.relu(x, inplace=False),
        "max of two": lambda x, b, h, q, k: torch.max(x, q - k) + torch.min(x, 0.5 * k),
        "to(torch.int32)": lambda x, b, h, q, k: x + (x * 2.5).to(torch.int32),
        "detach": lambda x, b, h, q, k: x + (x * 2).detach(),
        "bool + bool": lambda x, b, h, q, k: x + ((q > k) + (q > 2)),
    }


def given(x: float, *places: int, of: Any = None) -> tuple[Any, ...]:
    if of is None:
        return (np.float32(x), *(np.int64(i) for i in places))
    return (of.tensor(x), *(of.tensor(i) for i in places))


def traced(function: Function, x: float, *places: int) -> float:
    score, _ = nvrtc_attn.trace(function).valued
    numbers = {"score": np.array([x], np.float32), **{n: np.array([i]) for n, i in zip("bhqk", places, strict=True)}}
    return float(np.asarray(Values(numbers, [], np.dtype(np.float32))(score)).reshape(-1)[0])


@pytest.mark.parametrize("name", NUMPY)
def test_functions_of_numpy(name: str) -> None:
    for place in PLACES:
        with np.errstate(divide="ignore", invalid="ignore"):
            found, wanted = traced(NUMPY[name], *place), float(NUMPY[name](*given(*place)))
        assert found == pytest.approx(wanted, rel=1e-6), place


NUMBERS = [-100.0, -6.0, -3.0, -2.4, -1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 1.7, 2.5, 3.5, 6.0, 90.0]


def torch_activations() -> dict[str, Function]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    f = torch.nn.functional
    return {
        "relu": f.relu, "relu6": f.relu6, "hardtanh": f.hardtanh, "hardtanh(-2, 3)": lambda x: f.hardtanh(x, -2.0, 3.0),
        "hardsigmoid": f.hardsigmoid, "leaky_relu": f.leaky_relu, "leaky_relu(0.3)": lambda x: f.leaky_relu(x, 0.3),
        "elu": f.elu, "elu(alpha)": lambda x: f.elu(x, alpha=0.5), "gelu": f.gelu, "mish": f.mish, "silu": f.silu,
        "gelu(tanh)": lambda x: f.gelu(x, approximate="tanh"), "softsign": f.softsign, "tanhshrink": f.tanhshrink,
        "softplus": f.softplus, "softplus(beta)": lambda x: f.softplus(x, beta=2.0), "logsigmoid": f.logsigmoid,
        "softplus(2, 20)": lambda x: f.softplus(x, 2.0, 20.0), "threshold": lambda x: f.threshold(x, 0.5, -1.0),
        "fmod": lambda x: torch.fmod(x, 2.0), "frac": lambda x: torch.frac(x) * x, "atan": torch.atan,
        "tan": lambda x: torch.tan(x * 0.1), "sinh": lambda x: torch.sinh(x * 0.1), "cosh": torch.cosh,
        "erfc": torch.erfc, "special.erfc": torch.special.erfc, "log10": lambda x: torch.log10(x * x + 1.0),
        "hypot": lambda x: torch.hypot(x, x * 0.5 + 1), "lerp": lambda x: torch.lerp(x, x * x, 0.3),
        "addcmul": lambda x: torch.addcmul(x, x, x, value=0.5), "addcdiv": lambda x: torch.addcdiv(x, x, x + 0.3),
        "logaddexp": lambda x: torch.logaddexp(x, x * 0), "logaddexp(x, x)": lambda x: torch.logaddexp(x, x),
        "pow(0, x)": lambda x: torch.pow(torch.relu(x).detach(), x.abs() + 0.5),
        "logaddexp2": lambda x: torch.logaddexp2(x, x * 0.5), "copysign": lambda x: torch.copysign(x * x, x),
        "nan_to_num": lambda x: torch.nan_to_num(x), "sgn": lambda x: x * torch.sgn(x),
        "isfinite": lambda x: torch.where(torch.isfinite(x) & ~torch.isnan(x), x, torch.finfo(x.dtype).min),
        "fmax": lambda x: torch.fmax(x, x * 0.5), "fmin": lambda x: torch.fmin(x * 0.5, x),
        "fmax beside NaN": lambda x: torch.fmax(x, torch.where(x > 0, x * x, math.nan)),
        "fmin beside NaN": lambda x: torch.fmin(torch.where(x > 0, x, math.nan), x * 2),
        "fmax of NaN": lambda x: torch.fmax(x * math.nan, x * math.nan),
        "sign of NaN": lambda x: torch.sign(torch.where(x > 0, x, math.nan)),
        "threshold of NaN": lambda x: torch.nn.functional.threshold(torch.where(x > 0, x, math.nan), 0.5, -1.0),
        "type_as": lambda x: (x > 0).type_as(x) + (x < 1).to(x.dtype) * x,
    }  # fmt: skip


@pytest.mark.parametrize("index", range(49))
def test_activations_of_torch_and_their_derivatives(index: int) -> None:
    """In float64, also where they bend: there the derivative is torch's."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    activations = torch_activations()
    assert len(activations) == 49
    name, function = list(activations.items())[index]
    wide = torch.tensor(NUMBERS, dtype=torch.float64, requires_grad=True)
    wanted = function(wide)
    (derivative,) = torch.autograd.grad(wanted.sum(), wide)
    score, _ = nvrtc_attn.trace(lambda x, b, h, q, k: function(x)).valued
    values = Values({"score": np.array(NUMBERS)}, [], np.dtype(np.float64))
    with np.errstate(all="ignore"):
        found = [np.broadcast_to(values(x), wide.shape) for x in (score, slope(score))]
    if name == "isfinite":  # the type of a score is float32
        wanted = wanted.float().double()
    for a, b in zip(found, (wanted, derivative), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-7, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("index", range(32))
def test_functions_of_torch(index: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    functions = torch_functions()
    assert len(functions) == 32
    name, function = list(functions.items())[index]
    for place in PLACES:
        assert traced(function, *place) == pytest.approx(float(function(*given(*place, of=torch))), rel=1e-6), name


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, b, h, q, k: np.round(x, 1), "'round' to decimals"),
        (lambda x, b, h, q, k: x.astype(np.int16), "converted to int16"),
        (lambda x, b, h, q, k: x.astype("uint8"), "converted to uint8"),
        (lambda x, b, h, q, k: np.add(x, q, where=q > k), "'add' with 2 arguments"),
        (lambda x, b, h, q, k: x.clamp(0, 1, 2), "'clamp' with 4 arguments"),
        (lambda x, b, h, q, k: np.exp(x, q), "'exp' with "),
        (lambda x, b, h, q, k: x.where(q > k), "'where' with 1 arguments"),
        (lambda x, b, h, q, k: x.new_zeros(1), "'new_zeros'"),
    ],
)
def test_what_would_be_left_out_is_refused(function: Function, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        nvrtc_attn.trace(function)


def test_types_of_torch_that_wrap_around_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (torch.int16, torch.int8, torch.uint8):
        with pytest.raises(TraceError, match="what a modifier computes with is float32, int32 or bool"):
            nvrtc_attn.trace(lambda x, b, h, q, k, dtype=dtype: x.to(dtype))


NARROW = np.array([3, 200, 255, 0, 7, 1, 9, 250], np.uint8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, b, h, q, k: x + (NARROW[q] - NARROW[k]),
        lambda x, b, h, q, k: x + (NARROW[q] - 1),
        lambda x, b, h, q, k: x + ~NARROW[q],
        lambda x, b, h, q, k: x + np.maximum(NARROW[q], NARROW[k]) * 2,
        lambda x, b, h, q, k: x + np.square(NARROW[q]),
        lambda x, b, h, q, k: x + (-NARROW[q]),
        lambda x, b, h, q, k: x + np.subtract(np.where(q > k, NARROW[q], 3), 7),
    ],
)
def test_what_wraps_around_in_small_integers_is_refused(function: Function) -> None:
    with pytest.raises(TraceError, match="wraps around at their ends"):
        nvrtc_attn.trace(function)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
def test_small_integers(dtype: str) -> None:
    """As indices, conditions, and beside what is wider."""
    numbers = (np.arange(8) * 29 % 101).astype(dtype)

    def function(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        wide = numbers[q].astype(np.int32) - numbers[k]
        return x * numbers[q] + np.where(numbers[q] > numbers[k], wide, numbers[k] - q) + numbers[numbers[h] // 101]

    modifier = nvrtc_attn.trace(function)
    assert modifier.program.captures == ((dtype, 1),)
    for place in PLACES:
        names = {"score": np.array([place[0]]), **{n: np.array([i]) for n, i in zip("bhqk", place[1:], strict=True)}}
        found = Values(names, modifier.captures, np.dtype(np.float64))(modifier.valued[0])
        assert found == pytest.approx(float(function(*(np.float64(place[0]), *map(np.int64, place[1:])))))


def test_indices_that_leave_dims_open() -> None:
    table = np.arange(4 * 5 * 8, dtype=np.float32).reshape(4, 5, 8)
    whole = nvrtc_attn.trace(lambda x, b, h, q, k: x + table[h, b, q]).program
    for function in (
        lambda x, b, h, q, k: x + table[h, :][b, q], lambda x, b, h, q, k: x + table[..., q][h, b],
        lambda x, b, h, q, k: x + table[:, b][h][q], lambda x, b, h, q, k: x + table[h, ..., q][b],
        lambda x, b, h, q, k: x + table[:][h, b][..., q],
    ):  # fmt: skip
        assert nvrtc_attn.trace(function).program == whole
    for wrong in (slice(1, 3), slice(None, None, 2), None):
        with pytest.raises(TraceError, match="an index must name one element"):
            nvrtc_attn.trace(lambda x, b, h, q, k, wrong=wrong: x + table[h, wrong, q][b])
    with pytest.raises(TraceError, match=r"2 of the 3 indices of a captured array of shape \(4, 5, 8\) are given"):
        nvrtc_attn.trace(lambda x, b, h, q, k: x + table[h, :, q])


def test_rules_of_gradients_that_would_be_left_out_are_refused() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Halved(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1.5

        @staticmethod
        def backward(ctx: Any, dx: Any) -> Any:
            return dx / 2

    def stopped(x: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        with torch.no_grad():
            y = x * 2.0
        return x + y

    for function in (lambda x, b, h, q, k: Halved.apply(x), stopped):
        with pytest.raises(TraceError, match=r"gradients are switched off inside of the function.*x\.detach"):
            nvrtc_attn.trace(function)


def test_a_detached_number_has_no_derivative() -> None:
    """Straight through: the value is rounded, the derivative is that of the score."""
    score, _ = nvrtc_attn.trace(lambda x, b, h, q, k: x + (np.round(x) - x).detach()).valued
    numbers = {"score": np.array([1.7], np.float32)}
    assert Values(numbers, [], np.dtype(np.float32))(score) == 2.0
    assert Values(numbers, [], np.dtype(np.float32))(slope(score)) == 1.0
    score, _ = nvrtc_attn.trace(lambda x, b, h, q, k: x * x.detach()).valued
    assert Values(numbers, [], np.dtype(np.float32))(slope(score)) == np.float32(1.7)


class OfCupy:
    """A ufunc of CuPy's, as far as it looks at arguments that are no arrays."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x in args:
            if hasattr(x, "__cupy_override_elementwise_kernel__"):
                return x.__cupy_override_elementwise_kernel__(self, *args, **kwargs)
        raise TypeError(f"Unsupported type {type(args[0])}")


def test_functions_of_cupy_are_those_of_numpy() -> None:
    table = np.ones(4, np.float32)
    tanh, where, divide, erf = map(OfCupy, ("cupy_tanh", "cupy_where", "cupy_true_divide", "cupyx_scipy_special_erf"))
    found = nvrtc_attn.trace(lambda s, b, h, q, k: where((q < k).astype("?"), tanh(s), divide(1, erf(s))) * table[h])
    expected = nvrtc_attn.trace(
        lambda s, b, h, q, k: np.where(q < k, np.tanh(s), np.true_divide(1, s.erf())) * table[h]
    )
    assert found.program == expected.program
    for name, words in (("cupy_cumsum", "'cumsum' .*shape"), ("my_kernel", "'my_kernel', a kernel of CuPy's")):
        function = OfCupy(name)
        with pytest.raises(nvrtc_attn.TraceError, match=words):
            nvrtc_attn.trace(lambda s, b, h, q, k, f=function: f(s))
    rows = np.ones((4, 3), np.float32)
    with pytest.raises(nvrtc_attn.TraceError, match="indices of a captured array"):
        nvrtc_attn.trace(lambda s, b, h, q, k: tanh(rows[h]) * s)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_dtype_of_an_array_is_what_a_number_is_converted_to(framework: str) -> None:
    whole: Any = np.arange(4)
    fractions: Any = np.ones(4, np.float32)
    if framework == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        whole, fractions = torch.from_numpy(whole), torch.from_numpy(fractions)
    for function in (
        lambda x, b, h, q, k: (x * 2.5).to(whole) * 1.0,
        lambda x, b, h, q, k: (x * 2.5).type_as(whole) * 1.0,
        lambda x, b, h, q, k: (x * 2.5).type_as(whole[0]) * 1.0,
        lambda x, b, h, q, k: (x * 2.5).type_as(whole[h]) * 1.0,
        lambda x, b, h, q, k: (x * 2.5).to(k).to(fractions),
    ):
        traced = nvrtc_attn.trace(function).valued[0]
        for x, b, h, q, k in PLACES:
            values = Values({"score": np.array(x), "b": b, "h": h, "q": q, "k": k}, [whole], np.dtype(np.float64))
            assert float(values(traced)) == int(x * 2.5)
    with pytest.raises(TraceError, match="int16"):
        nvrtc_attn.trace(lambda x, b, h, q, k: x.to(np.zeros(3, np.int16)))
