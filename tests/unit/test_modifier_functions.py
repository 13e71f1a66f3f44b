"""What a function of a library means in a modifier is what it means in that library, argument by argument."""

from __future__ import annotations

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
}


def torch_functions() -> dict[str, Function]:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return {
        "x.where": lambda x, b, h, q, k: x.where(q >= k, -3.0),
        "x.where(other=)": lambda x, b, h, q, k: x.where(q >= k, other=-3.0),
        "where(input=, other=)": lambda x, b, h, q, k: torch.where(q >= k, input=x, other=torch.tensor(-5.0)),
        "clamp(x, None, 3)": lambda x, b, h, q, k: x + torch.clamp(q - k, None, 3),
        "x.clamp(None, 3)": lambda x, b, h, q, k: x + (q - k).clamp(None, 3),
        "x.clamp(max=3)": lambda x, b, h, q, k: x + (q - k).clamp(max=3),
        "add(other=, alpha=)": lambda x, b, h, q, k: torch.add(x, other=q, alpha=2),
        "x.sub(alpha=)": lambda x, b, h, q, k: x.sub(q, alpha=3),
        "rsub(alpha=)": lambda x, b, h, q, k: torch.rsub(x, q, alpha=2),
        "div(input=, other=, floor)": lambda x, b, h, q, k: x + torch.div(input=q - k, other=3, rounding_mode="floor"),
        "div(trunc)": lambda x, b, h, q, k: x + torch.div(q - k, 3, rounding_mode="trunc"),
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
        assert traced(NUMPY[name], *place) == pytest.approx(float(NUMPY[name](*given(*place))), rel=1e-6), place


@pytest.mark.parametrize("index", range(18))
def test_functions_of_torch(index: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    functions = torch_functions()
    assert len(functions) == 18
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
