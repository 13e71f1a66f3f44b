"""The mistakes that a new user makes first: the message says what was given, what is accepted and what to do."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvrtc_attn
from nvrtc_attn import api

Q, K, V = (np.ones((2, 64, 8, 16), np.float32) for _ in range(3))
ENDS = np.array([0, 30, 64])
PACKED = {"max_seqlen_q": 34, "max_seqlen_k": 34}


def attention(*, q: Any = Q, k: Any = K, v: Any = V, **options: Any) -> Any:
    return nvrtc_attn.attention(q, k, v, **options)


def backward(**options: Any) -> Any:
    out, lse = nvrtc_attn.attention(Q, K, V, return_lse=True)
    outputs = {"dq": np.empty_like(Q), "dk": np.empty_like(K), "dv": np.empty_like(V), **options}
    return api.attention_backward(out, Q, K, V, out, lse, **outputs)


def size_of_the_workspace(**options: Any) -> int:
    return api.forward_workspace_bytes(Q, K, V, **options)


MISTAKES: list[tuple[Callable[..., Any], dict[str, Any], list[str]]] = [
    (attention, {"q": Q[0]}, ["q: shape", "rank 3", "[batch, seqlen_q, num_heads, head_dim]", "Reshape it"]),
    (attention, {"q": Q.astype(np.float64)}, ["float64", "float16, bfloat16, float32", "Convert all to float32."]),
    (attention, {"k": K.astype(np.float64)}, ["dtypes float32, float64, float32", "Convert k and v to float32."]),
    (attention, {"k": K[:, :, :3], "v": V[:, :, :3]}, ["3 heads do not divide the 8", "nearest smaller count", "2"]),
    # The layout of torch's function.
    (
        attention,
        {"q": np.ones((2, 8, 64, 16), np.float32), **dict.fromkeys("kv", np.ones((2, 2, 100, 16), np.float32))},
        ["100 heads do not divide the 64", "exchange dims 1 and 2", "scaled_dot_product_attention"],
    ),
    (
        attention,
        {**dict.fromkeys("qkv", np.ones((2, 8, 64, 16), np.float32)), "mask": np.ones((2, 1, 64, 64), bool)},
        ["mask: shape (2, 1, 64, 64)", "so their heads are 64", "exchange their dims 1 and 2"],
    ),
    (attention, {"softmax_scale": np.ones(1, np.float32)}, ["softmax_scale: got", "multiply q by it"]),
    (attention, {"mask": np.ones((64, 64), bool)}, ["mask: shape (64, 64)", "[batch or 1,", "x[None, None]"]),
    (attention, {"mask": np.ones((2, 64), bool)}, ["mask: shape (2, 64)", "[batch, seqlen_k] x[:, None, None]"]),
    # To convert them would keep the keys that -inf drops, and add 1 to the scores that True keeps.
    (attention, {"mask": np.zeros((1, 1, 64, 64), np.float32)}, ["mask: dtype float32", "bool or uint8", "bias="]),
    (attention, {"bias": np.ones((1, 1, 64, 64), bool)}, ["bias: dtype bool", "Accepted: float32", "mask="]),
    (
        attention,
        {"casual": True},
        ["attention() got", "'casual'", "Did you mean 'causal'", "help(nvrtc_attn.attention)"],
    ),
    (attention, {"is_causal": True}, ["Did you mean 'causal'"]),
    (attention, {"scale": 1.0}, ["Did you mean 'softmax_scale'"]),
    (attention, {"attn_mask": None}, ["Did you mean 'mask'"]),
    (size_of_the_workspace, {"dropout": 0.1}, ["forward_workspace_bytes() got", "Did you mean 'dropout_p'"]),
    (
        attention,
        {"q": Q[:1], "k": K[:1], "v": V[:1], "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, **PACKED},
        ["cu_seqlens_q: dtype int64", "Accepted: int32", "Convert it to int32"],
    ),
    (
        attention,
        {"q": Q[:1], "k": K[:1], "v": V[:1], "cu_seqlens_q": [0, 30, 64], "cu_seqlens_k": [0, 30, 64], **PACKED},
        ["cu_seqlens_q: got [0, 30, 64] of type list", "numpy.asarray(x, dtype=numpy.int32)"],
    ),
    (attention, {"seqused_k": np.array(3, np.int32)}, ["seqused_k: shape () has rank 0"]),
    (attention, {"q": [[1.0]]}, ["q: got [[1.0]] of type list", "numpy.asarray(x)."]),
    (
        attention,
        {"score_mod": lambda s, b, h, i, j: math.tanh(s)},
        ["needed as a Python number", "functions of math", "numpy.tanh for math.tanh"],
    ),
    (
        attention,
        {"dropout_p": 0.5, "rng": np.random.default_rng(0)},
        ["rng seed: got Generator", "a pair (seed, offset)", "pass a number that it draws"],
    ),
    (
        backward,
        {"dq": np.empty((2, 64, 8, 8), np.float32)},
        ["dq: shape (2, 64, 8, 8)", "(2, 64, 8, 16)", "made for it."],
    ),
    (
        attention,
        {"score_mod": lambda s, b, h, i, j: s if i > j else 0.0},
        ["score_mod: a branch on a value", "where(condition, a, b)"],
    ),
    (attention, {"score_mod": lambda s, b, h, i, j: None}, ["score_mod: returned None", "return statement"]),
    (attention, {"mask_mod": lambda i, j: i >= j}, ["4 were given", "It is called with (b, h, q, k)."]),
    (attention, {"score_mod": lambda s: s}, ["5 were given", "It is called with (score, b, h, q, k)."]),
    (attention, {"mask_mod": lambda b, h, i, j: i >= j, "aux": {}}, ["5 were given", "called with (b, h, q, k, aux)."]),
    (
        attention,
        {"score_mod": lambda s, b, h, i, j: s + np.zeros(8, np.float32)[h]},
        ["score_mod: an array that was made inside", "Make it outside"],
    ),
]


@pytest.mark.parametrize(("function", "given", "said"), MISTAKES, ids=map(str, range(len(MISTAKES))))
def test_a_mistake_is_explained(function: Callable[..., Any], given: dict[str, Any], said: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        function(**given)
    assert not [words for words in said if words not in str(refused.value)], refused.value


def test_a_wrong_number_of_heads_is_not_taken_for_the_layout() -> None:
    """Keys as many as queries divide as heads always, so that alone says nothing of torch's layout."""
    with pytest.raises(ValueError, match="3 heads do not divide the 8") as refused:
        attention(k=K[:, :, :3], v=V[:, :, :3])
    assert "exchange dims" not in str(refused.value)


def test_arguments_like_none_get_no_suggestion() -> None:
    with pytest.raises(TypeError, match=r"'xyz'\. See help\(nvrtc_attn\.attention\)\.$"):
        attention(xyz=1)


@pytest.mark.parametrize("library", ["torch", "jax", "cupy"])
def test_an_adapter_without_its_library_says_what_to_install(library: str, repository: Path) -> None:
    program = f"""import sys
sys.modules[{library!r}] = None
try:
    import nvrtc_attn.{library}
except ModuleNotFoundError as error:
    assert error.name == {library!r}
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=repository, check=False)
    assert done.returncode == 0, done.stderr
    assert f"nvrtc_attn.{library} needs {library}" in done.stdout
    assert f'pip install "nvrtc-attn[cu13,{library}]"' in done.stdout


def test_a_library_that_is_broken_keeps_its_own_error(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("import no_such_dependency", encoding="utf-8")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import nvrtc_attn.cupy"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=repository, check=False)
    assert "No module named 'no_such_dependency'" in done.stderr
    assert "needs cupy" not in done.stderr
