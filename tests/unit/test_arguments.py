"""Every argument of every public function with values of the wrong kind: an error that names it, and no other one."""

from __future__ import annotations

import importlib
import sys
import types
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from wrong_values import (
    HUGE,
    NOT_CAUSAL,
    NOT_FLAGS,
    NOT_INTEGERS,
    NOT_LENGTHS,
    NOT_NUMBERS,
    NOT_OUTPUTS,
    NOT_Q,
    NOT_RNG,
    NOT_SCORES,
    NOT_STREAMS,
    NOT_TENSORS,
    NOT_WINDOWS,
    UNPRINTABLE,
    Rude,
    arrays,
    check,
    label,
)

import nvrtc_attn
from nvrtc_attn import api


def dense() -> dict[str, Any]:
    return {"q": arrays(1, 4, 2, 8), "k": arrays(1, 6, 2, 8), "v": arrays(1, 6, 2, 8)}


def packed() -> dict[str, Any]:
    ends = np.array([0, 4], np.int32)
    return {**dense(), "cu_seqlens_q": ends, "cu_seqlens_k": np.array([0, 6], np.int32), "max_seqlen_q": 4,
            "max_seqlen_k": 6}  # fmt: skip


OPTIONS: dict[str, list[Any]] = {
    "causal": NOT_CAUSAL, "window_size": NOT_WINDOWS, "softmax_scale": NOT_NUMBERS, "softcap": [*NOT_NUMBERS, -1.0],
    "dropout_p": [*NOT_NUMBERS, None, -0.1, 1.1], "max_seqlen_q": [*NOT_INTEGERS, None, 3],
    "max_seqlen_k": [*NOT_INTEGERS, None, 3], "bias": NOT_SCORES, "mask": [*NOT_SCORES, np.ones((1, 2, 4, 6))],
    "q": NOT_Q, "k": NOT_Q, "v": NOT_Q, "cu_seqlens_q": [None, *NOT_LENGTHS], "cu_seqlens_k": [None, *NOT_LENGTHS],
    "seqused_k": NOT_LENGTHS, "sink": [*NOT_TENSORS, arrays(1, 2), arrays(3), np.ones(2), np.ones(2, np.int32)],
}  # fmt: skip
FORWARD = {**OPTIONS, "rng": NOT_RNG, "return_lse": NOT_FLAGS, "deterministic": NOT_FLAGS, "stream": NOT_STREAMS,
           "out": NOT_OUTPUTS}  # fmt: skip
INTO = {**FORWARD, "lse": [*NOT_OUTPUTS, arrays(1, 2, 5)], "out": [None, *NOT_OUTPUTS]}
del INTO["return_lse"], INTO["deterministic"]
GRADIENTS = {name: [None, *NOT_OUTPUTS] for name in ("dq", "dk", "dv")}
BACKWARD = {
    **OPTIONS, "rng": [None, *NOT_RNG], "deterministic": NOT_FLAGS, "stream": NOT_STREAMS, **GRADIENTS,
    "dbias": [*NOT_TENSORS, arrays(1, 2, 4, 7)], "dout": [None, *NOT_OUTPUTS[:-1]], "out": [None, *NOT_OUTPUTS[:-1]],
    "lse": [None, *NOT_OUTPUTS], "dlse": NOT_OUTPUTS, "dsink": [*NOT_TENSORS, arrays(3)],
}  # fmt: skip
SIZES = {name: values for name, values in FORWARD.items() if name not in ("rng", "out")}
MASK: dict[str, list[Any]] = {
    "shape": [None, 4, "abcd", b"abcd", (), (1, 2, 3), (1, 2, 3, 4, 5), (1, 1, 1, -1), (1, 1, 1, 1.0), (1, 1, 1, None),
              (1, 1, 1, True), (1, 1, 1, HUGE), (1, 1, 1, -UNPRINTABLE), (1, 1, 1, "1"), {}, Rude(), arrays(4)],
    "dropout_p": [*NOT_NUMBERS, None, -0.1, 1.1],
    "rng": [None, *NOT_RNG],
}  # fmt: skip


def arguments(function: str, name: str) -> dict[str, Any]:
    """A valid call, in which ``name`` matters."""
    if function == "dropout_keep_mask":
        return {"shape": (1, 1, 2, 3), "dropout_p": 0.5, "rng": 1}
    needs_packing = name.startswith(("cu_", "max_", "seqused"))
    given = packed() if needs_packing else dense()
    if name == "rng":
        given |= {"dropout_p": 0.5, "rng": 1}
    if function == "attention_forward":
        given["out"] = arrays(1, 4, 2, 8)
    if function == "attention_backward":
        given |= {"dq": arrays(1, 4, 2, 8), "dk": arrays(1, 6, 2, 8), "dv": arrays(1, 6, 2, 8)}
        given |= {"dout": arrays(1, 4, 2, 8), "out": arrays(1, 4, 2, 8), "lse": arrays(1, 2, 4)}
        given |= {"bias": arrays(1, 2, 4, 6)} if name in ("bias", "dbias") else {}
        given |= {"sink": arrays(2)} if name in ("sink", "dsink") else {}
    return given


FUNCTIONS: list[tuple[str, dict[str, list[Any]]]] = [
    ("attention", FORWARD), ("attention_forward", INTO), ("attention_backward", BACKWARD),
    ("forward_workspace_bytes", SIZES),
    ("backward_workspace_bytes", {**SIZES, "dbias": NOT_FLAGS[:3], "dsink": NOT_FLAGS[:3]}),
    ("dropout_keep_mask", MASK),
]  # fmt: skip
del FUNCTIONS[4][1]["return_lse"]


@pytest.mark.reliability(3, 7, 17, 18, 19, 20, 28)
@pytest.mark.parametrize(("function", "table"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_wrong_kinds_are_refused_by_name(function: str, table: dict[str, list[Any]]) -> None:
    """F17 and its siblings."""
    call = getattr(nvrtc_attn, function, None) or getattr(api, function)
    faults = []
    for name, values in table.items():
        call(**arguments(function, name))  # else a refusal would prove nothing
        for value in values:
            fault = check(call, arguments(function, name), name, value)
            if fault is not None:
                faults.append(f"{name}={label(value)}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", np.bool_(True)), ("causal", np.str_("top_left")), ("window_size", [1, None]),
        ("window_size", (np.int64(1), np.array(2))), ("window_size", None), ("softmax_scale", np.float64(0.5)),
        ("softmax_scale", 1), ("softmax_scale", Fraction(1, 2)), ("softcap", None), ("softcap", np.float16(3)),
        ("dropout_p", np.float32(0)), ("dropout_p", 0), ("max_seqlen_q", np.int32(4)), ("max_seqlen_k", np.array(6)),
        ("return_lse", np.bool_(False)), ("deterministic", np.bool_(True)),
    ],
    ids=lambda x: label(x)[:30],
)  # fmt: skip
def test_other_libraries_numbers_are_numbers(name: str, value: Any) -> None:
    given = arguments("attention", name)
    assert nvrtc_attn.attention(**{**given, name: value}).shape == (1, 4, 2, 8)


@pytest.mark.reliability(29)
@pytest.mark.parametrize("function", [api.forward_workspace_bytes, api.backward_workspace_bytes])
def test_unknown_options_of_the_sizes(function: Any) -> None:
    """F17: the message named a class that no user knows."""
    with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) got an unexpected keyword argument 'is_causal'"):
        function(**dense(), is_causal=True)
    # What the functions themselves take is accepted, tensors that do not matter to the size included.
    given: dict[str, Any] = {"causal": True, "rng": (1, 2), "workspace": None, "dropout_p": 0.5, "stream": None}
    assert function(**dense(), **given) == 0
    assert api.forward_workspace_bytes(**dense(), lse=arrays(1, 2, 4)) == 0
    assert api.backward_workspace_bytes(**dense(), dlse=arrays(1, 2, 4)) == 0
    with pytest.raises(ValueError, match="daux: given without score_mod and mask_mod"):
        api.backward_workspace_bytes(**dense(), daux=[None])
    for name in ("dbias", "dsink"):
        with pytest.raises(TypeError, match=f"'{name}'"):
            api.forward_workspace_bytes(**dense(), **{name: True})


@pytest.mark.reliability(3)
def test_a_wrong_dtype_is_a_value_error_of_one_kind() -> None:
    """F17: whether or not the package has a name for the type."""
    for dtype in ("f8", "i1", "i4", "c8", "u4"):
        with pytest.raises(nvrtc_attn.UnsupportedError, match=r"q: dtype .*float16, bfloat16, float32") as refused:
            nvrtc_attn.attention(**{**dense(), **dict.fromkeys("qkv", np.ones((1, 4, 2, 8), dtype))})
        assert isinstance(refused.value, ValueError)
        with pytest.raises(ValueError, match=r"mask: dtype .*bool (and|or) uint8") as refused_mask:
            nvrtc_attn.attention(**dense(), mask=np.ones((1, 1, 1, 6), dtype))
        assert not isinstance(refused_mask.value, nvrtc_attn.UnsupportedError)


def test_refused_calls_leave_nothing_behind() -> None:
    from nvrtc_attn.front import remembered

    before = len(remembered._problems)
    for value in (np.array(6), np.array(6), object()):
        check(nvrtc_attn.attention, packed(), "max_seqlen_k", value)
    assert len(remembered._problems) == before


def test_the_cupy_adapter_names_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it looks at itself, before `nvrtc_attn.attention` and its kin look at the rest; without CuPy."""
    fake = types.ModuleType("cupy")
    fake.ndarray = type("ndarray", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "nvrtc_attn.cupy", raising=False)
    adapter = importlib.import_module("nvrtc_attn.cupy")
    monkeypatch.delitem(sys.modules, "nvrtc_attn.cupy")
    array = fake.ndarray()
    names = ("dout", "q", "k", "v", "out", "lse")
    given: dict[str, Any] = {**dict.fromkeys((*names, "dlse", "bias", "sink"), array), "with_dbias": True}
    wrong: dict[str, list[Any]] = {name: [*NOT_TENSORS, arrays(1, 4, 2, 8)] for name in given} | {
        "with_dbias": [1, None]
    }
    faults = []
    for name, values in wrong.items():
        for value in values:
            fault = check(adapter.attention_backward, given, name, value)
            if fault is None and name in "qkv":
                fault = check(adapter.attention, dict.fromkeys("qkv", array), name, value)
            if fault is not None:
                faults.append(f"{name}={label(value)}: {fault}")
    assert not faults, "\n".join(faults)
    for name in ("is_causal", "workspace", "out_of_place", "dsink"):
        with pytest.raises(TypeError, match=rf"^attention_backward\(\) got an unexpected keyword argument '{name}'"):
            adapter.attention_backward(*[array] * 6, **{name: True})
