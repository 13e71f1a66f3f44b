"""Values of the wrong kind for every kind of argument, and the check that a refusal names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

HUGE = 10**400
UNPRINTABLE = 10**5000  # Python refuses to print so many digits


class Rude:
    """Answers no question."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


def arrays(*shape: int) -> Any:
    return np.ones(shape, np.float32)


NOT_TENSORS: list[Any] = ["x", 3, 1.5, True, [[1.0]], {}, object(), Rude(), UNPRINTABLE, np.float32(1), b"x", print]
NOT_NUMBERS: list[Any] = [
    "1", True, np.bool_(True), 1j, [1.0], (1.0,), {}, Rude(), arrays(1), arrays(2), np.array(1.0), float("nan"), HUGE,
    -HUGE, UNPRINTABLE, Fraction(HUGE), object(), np.datetime64(1, "s"),
]  # fmt: skip
NOT_INTEGERS: list[Any] = [
    "4", 4.0, True, np.bool_(True), [4], (), {}, Rude(), arrays(2), np.array(4.0), float("nan"), HUGE, -HUGE,
    UNPRINTABLE, -1, object(), 1j, np.array([4, 4]),
]  # fmt: skip
NOT_FLAGS: list[Any] = [1, 0, 1.0, "yes", "", None, [], [True], Rude(), arrays(2), np.array(True), object()]
NOT_CAUSAL: list[Any] = [
    1,
    0,
    1.0,
    "yes",
    "",
    None,
    [],
    ("top_left",),
    Rude(),
    arrays(2),
    np.array([1, 2]),
    object(),
    b"",
]
NOT_WINDOWS: list[Any] = [
    0, 5, "ab", b"ab", bytearray(b"ab"), (), [], (1,), (1, 2, 3), (1.0, 2), ("1", "2"), (True, 2), (-2, 0), [-2, 0],
    (-HUGE, 0), (-UNPRINTABLE, 0), (arrays(2), 0), (Rude(), 0), {}, {1, 2}, arrays(2), Rude(), 1.5, (float("nan"), 0),
]  # fmt: skip
NOT_RNG: list[Any] = [
    "x", 1.5, True, -1, 2**64, HUGE, UNPRINTABLE, (1,), (1, 2, 3), (1, -1), (None, 0), ("a", 0), (0, 1.5), (0, True),
    {}, Rude(), arrays(1), np.zeros(2, np.int64), [[1, 2], 3], np.zeros((), np.int8),
]  # fmt: skip
NOT_STREAMS: list[Any] = ["x", True, 1.5, [], Rude(), -2, HUGE, UNPRINTABLE, 0, arrays(2)]  # 0: there is no GPU
NOT_LENGTHS: list[Any] = [*NOT_TENSORS, np.array([0, 4]), arrays(2), np.array(3, np.int32), np.zeros(2, np.int8),
                          np.array([3, 1], np.int32), np.array([0, 99], np.int32)]  # fmt: skip
NOT_Q: list[Any] = [None, *NOT_TENSORS, arrays(4), arrays(1, 4, 2, 9), *(
    np.ones((1, 4, 2, 8), dtype) for dtype in ("f8", "i1", "i4", "i8", "u2", "c8", "?", ">f4", "S3", "O")
)]  # fmt: skip
NOT_OUTPUTS: list[Any] = [*NOT_TENSORS, arrays(1, 4, 2, 9), np.ones((1, 4, 2, 8)), np.ones((1, 4, 2, 8), "i1"),
                          np.broadcast_to(np.float32(0), (1, 4, 2, 8))]  # fmt: skip
NOT_SCORES: list[Any] = [*NOT_TENSORS, arrays(3, 2, 4, 6), arrays(4, 6), np.ones((1, 2, 4, 6), "i1"),
                         np.ones((1, 2, 4, 6), "c8")]  # fmt: skip


def check(call: Callable[..., Any], given: dict[str, Any], name: str, value: Any) -> str | None:
    """What is wrong with the refusal; None where nothing is."""
    try:
        call(**{**given, name: value})
    except (TypeError, ValueError) as error:
        named = re.search(rf"(^|, |invalid arguments:.*\n  - ){name}\b", str(error), re.DOTALL)
        return None if named else f"does not name it: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "is accepted"


def label(value: Any) -> str:
    try:
        return f"{type(value).__name__} {value!r}"[:60]
    except Exception:
        return f"a {type(value).__name__}"
