"""Every rule of `build_problem`: what is accepted, how it is normalised, and each refusal with its message."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nvrtc_attn import UnsupportedError
from nvrtc_attn.front.build import build_problem
from nvrtc_attn.front.dlpack import compact_strides
from nvrtc_attn.front.problem import AttentionProblem
from nvrtc_attn.front.tensors import Device, TensorView, view
from nvrtc_attn.heuristics.common import features_of

GPU = Device("cuda", 0)


def tensor(
    *shape: int,
    dtype: str = "float16",
    device: Device = GPU,
    ptr: int = 1 << 40,
    strides: tuple[int, ...] | None = None,
) -> TensorView:
    return TensorView(ptr, shape, compact_strides(shape) if strides is None else strides, dtype, device)


def qkv(b: int = 2, m: int = 8, n: int = 12, h: int = 4, hkv: int = 2, d: int = 64, dv: int = 32) -> list[TensorView]:
    return [tensor(b, m, h, d), tensor(b, n, hkv, d), tensor(b, n, hkv, dv)]


def host(values: Any, dtype: str = "int32") -> TensorView:
    return view(np.asarray(values, dtype), "lengths")


def packed(**changes: Any) -> AttentionProblem:
    """Three sequences on the CPU, 10 query and 12 key tokens; lengths 4, 0, 5 and 3, 2, 6."""
    cpu = Device("cpu", 0)
    views = [tensor(1, 10, 4, 64, device=cpu), tensor(1, 12, 2, 64, device=cpu), tensor(1, 12, 2, 32, device=cpu)]
    arguments: dict[str, Any] = {
        "cu_seqlens_q": host([1, 5, 5, 10]),
        "cu_seqlens_k": host([0, 3, 5, 11]),
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
    }
    return build_problem(*changes.pop("views", views), **{**arguments, **changes})


def refused(kind: type[Exception], *patterns: str, views: list[TensorView] | None = None, **options: Any) -> str:
    """The message of the refusal, which has a line for every pattern, in this order."""
    with pytest.raises(kind) as info:
        build_problem(*(qkv() if views is None else views), **options)
    assert type(info.value) is kind
    text = str(info.value)
    position = 0
    for pattern in patterns:
        assert pattern in text, f"{pattern!r} is not in {text!r}"
        assert text.index(pattern) >= position, f"{pattern!r} is out of order in {text!r}"
        position = text.index(pattern)
    assert "help(nvrtc_attn.attention)" in text
    assert str(pickle.loads(pickle.dumps(info.value))) == text  # multiprocessing carries it
    return text


class TestDescription:
    def test_sizes_and_defaults(self) -> None:
        p = build_problem(*qkv())
        assert (p.batch, p.seqlen_q, p.seqlen_k, p.num_heads, p.num_heads_kv) == (2, 8, 12, 4, 2)
        assert (p.head_dim, p.head_dim_v, p.dtype) == (64, 32, "float16")
        assert (p.softmax_scale, p.softcap, p.dropout_p) == (0.125, 0.0, 0.0)
        assert not any((p.band, p.varlen, p.seqused_k, p.return_lse, p.deterministic, p.dbias))
        assert (p.bias, p.mask) == (None, None)
        assert p.q.strides == (2048, 256, 64, 1)

    def test_hashable_and_determined_by_layout(self) -> None:
        a, b = build_problem(*qkv()), build_problem(*(replace(x, ptr=x.ptr + 4096) for x in qkv()))
        assert a == b
        assert hash(a) == hash(b)

    @pytest.mark.reliability(9)
    @pytest.mark.parametrize(("offset", "alignment"), [(0, 16), (256, 16), (8, 8), (24, 8), (4, 4), (2, 2), (1, 1)])
    def test_alignment_of_the_address(self, offset: int, alignment: int) -> None:
        views = [replace(x, ptr=x.ptr + offset) for x in qkv()]
        assert build_problem(*views).k.offset_alignment == alignment
        assert build_problem(*(replace(x, ptr=0) for x in qkv(m=0, n=0))).v.offset_alignment == 16

    @pytest.mark.reliability(8, 10, 11)
    def test_any_strides(self) -> None:
        q, k, v = qkv()
        q = replace(q, strides=(0, 130, 8192, 2))
        k = replace(k, strides=(0, 0, 0, 1))
        p = build_problem(q, k, v, bias=tensor(2, 4, 8, 12, strides=(0, 0, 1, 8)))
        assert (p.q.strides, p.k.strides) == ((0, 130, 8192, 2), (0, 0, 0, 1))
        assert p.bias is not None
        assert p.bias.strides == (0, 0, 1, 8)

    @pytest.mark.reliability(25)
    def test_one_object_three_times(self) -> None:
        x = tensor(2, 8, 4, 64)
        p = build_problem(x, x, x)
        assert p.q == p.k == p.v

    @pytest.mark.reliability(14)
    @pytest.mark.parametrize("sizes", [{"b": 0}, {"m": 0}, {"n": 0}, {"h": 0}, {"h": 0, "hkv": 0}, {"m": 0, "n": 0}])
    @pytest.mark.parametrize("causal", [False, True, "top_left"])
    def test_no_elements(self, sizes: dict[str, int], causal: Any) -> None:
        p = build_problem(*qkv(**sizes), causal=causal, window_size=(3, 4))
        assert p.seqlen_q == sizes.get("m", 8)

    @pytest.mark.reliability(5)
    @pytest.mark.parametrize("d", [1, 40, 59, 111, 257, 512])
    def test_head_dims(self, d: int) -> None:
        p = build_problem(*qkv(d=d, dv=513 - d))
        assert (p.head_dim, p.head_dim_v, p.softmax_scale) == (d, 513 - d, pytest.approx(d**-0.5))

    def test_flags_are_carried(self) -> None:
        bias = tensor(1, 4, 1, 12, dtype="float32")
        p = build_problem(*qkv(), bias=bias, return_lse=True, deterministic=np.True_, dbias=True)  # type: ignore[arg-type]
        assert (p.return_lse, p.deterministic, p.dbias) == (True, True, True)
        assert type(p.deterministic) is bool


class TestWindows:
    @pytest.mark.parametrize(
        ("causal", "window", "left", "right", "bottom_right"),
        [
            (False, None, None, None, True),
            (False, (None, None), None, None, True),
            (False, (-1, -1), None, None, True),
            (False, (3, 2), 3, 2, True),
            (False, [np.int64(3), None], 3, None, True),
            (True, None, None, 0, True),
            (np.True_, None, None, 0, True),
            ("bottom_right", None, None, 0, True),
            ("top_left", None, None, 0, False),
            (True, (3, 5), 3, 0, True),
            ("top_left", (3, -1), 3, 0, False),
            # A bound beyond every key of every row is none (8 queries, 12 keys).
            (False, (10, 6), 10, 6, True),
            (False, (11, 7), None, None, True),
            ("top_left", (6, None), 6, 0, False),
            ("top_left", (7, None), None, 0, False),
            (False, (2**40, 2**31), None, None, True),
        ],
    )
    def test_normalised(
        self, causal: Any, window: Any, left: int | None, right: int | None, bottom_right: bool
    ) -> None:
        p = build_problem(*qkv(), causal=causal, window_size=window)
        assert (p.window_left, p.window_right, p.bottom_right) == (left, right, bottom_right)
        assert p.band == (left is not None or right is not None)

    def test_causal_decoding_has_no_band(self) -> None:
        assert not build_problem(*qkv(m=1), causal=True).band
        assert build_problem(*qkv(m=1), causal="top_left").window_right == 0
        assert not build_problem(*qkv(n=1), causal="top_left").band

    @pytest.mark.parametrize("causal", [False, True, "top_left"])
    def test_dropped_bounds_exclude_nothing(self, causal: Any) -> None:
        """By the definition of the band, for every length and bound up to 6."""
        bounds = [None, *range(7)]
        for m, n, left, right in itertools.product(range(7), range(7), bounds, bounds):
            p = build_problem(*qkv(m=m, n=n), causal=causal, window_size=(left, right))
            expected = _keep(m, n, left, 0 if causal else right, causal != "top_left")
            assert np.array_equal(_keep(m, n, p.window_left, p.window_right, p.bottom_right), expected)

    @pytest.mark.parametrize("causal", [1, None, 0.0, []])
    def test_causal_of_the_wrong_kind(self, causal: Any) -> None:
        refused(TypeError, f"causal: got {causal!r} of type", "'top_left'", causal=causal)

    def test_causal_of_the_wrong_value(self) -> None:
        refused(
            ValueError,
            "causal: got 'upper_left'. Accepted: False, True, 'bottom_right', 'top_left'",
            causal="upper_left",
        )

    @pytest.mark.parametrize("window", [4, "ab", 1.5, np.array([1, 2])])
    def test_window_of_the_wrong_kind(self, window: Any) -> None:
        refused(TypeError, f"window_size: got {window!r} of type", "(W - 1, 0)", window_size=window)

    def test_window_bounds(self) -> None:
        refused(ValueError, "window_size: got (1, 2, 3)", window_size=(1, 2, 3))
        refused(ValueError, "window_size: got (3, -2), right bound -2", window_size=(3, -2))
        refused(TypeError, "window_size left: got 1.5", "window_size right: got True", window_size=(1.5, True))


def _keep(m: int, n: int, left: int | None, right: int | None, bottom_right: bool) -> np.ndarray:
    i, j = np.ogrid[:m, :n]
    diagonal = i + (n - m if bottom_right else 0)
    keep = np.ones((m, n), bool)
    if left is not None:
        keep &= diagonal - left <= j
    if right is not None:
        keep &= j <= diagonal + right
    return keep


class TestScalars:
    @pytest.mark.reliability(17)
    @pytest.mark.parametrize("scale", [0, 0.0, -2.5, 3, np.float32(0.5), np.float64(1e-30)])
    def test_scales(self, scale: Any) -> None:
        p = build_problem(*qkv(), softmax_scale=scale)
        assert p.softmax_scale == float(scale)
        assert type(p.softmax_scale) is float

    @pytest.mark.reliability(17)
    @pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan"), 1e39])
    def test_scale_not_finite(self, scale: float) -> None:
        refused(ValueError, f"softmax_scale: got {scale!r}. It is finite in float32", softmax_scale=scale)

    @pytest.mark.reliability(18)
    @pytest.mark.parametrize("p", [0, 1e-6, 0.999, 1, 1.0, np.float32(0.5)])
    def test_dropout(self, p: Any) -> None:
        assert build_problem(*qkv(), dropout_p=p).dropout_p == float(p)

    @pytest.mark.reliability(18)
    @pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), float("inf")])
    def test_dropout_outside(self, p: float) -> None:
        refused(ValueError, f"dropout_p: got {p!r}. It is in [0, 1]", dropout_p=p)

    @pytest.mark.reliability(17)
    def test_a_scale_below_float32_is_zero(self) -> None:
        """F4: the kernels get a float32, and multiply before they compare only where the scale is not positive."""
        for scale in (1e-46, -1e-46, 2.0**-150, 5e-324, -0.0, Fraction(1, 10**400)):
            p = build_problem(*qkv(), softmax_scale=scale)  # type: ignore[arg-type]
            assert str(p.softmax_scale) == "0.0"
            assert features_of(p).prescale
        smallest = build_problem(*qkv(), softmax_scale=1e-45)
        assert np.float32(smallest.softmax_scale) > 0
        assert not features_of(smallest).prescale

    @pytest.mark.reliability(17)
    @pytest.mark.parametrize("scale", [2.36e38, -2.36e38, 10**400, -(10**400), 10**5000, Fraction(10**400)], ids=hash)
    def test_a_scale_that_overflows_with_log2_e(self, scale: Any) -> None:
        refused(ValueError, "softmax_scale: got ", "at most 2.36e+38 in magnitude", softmax_scale=scale)

    @pytest.mark.parametrize("cap", [1e-46, 5e-324, 1e-39, 1.17e-38])
    def test_softcap_below_the_normal_numbers(self, cap: float) -> None:
        """F4: ``scale / softcap`` was infinite or NaN on the device."""
        refused(ValueError, f"softcap: got {cap!r}. It is 0 (none), or positive", "1.18e-38", softcap=cap)

    def test_softcap_and_scale(self) -> None:
        assert build_problem(*qkv(), softcap=1.2e-38).softcap == 1.2e-38
        assert build_problem(*qkv(), softcap=1.2e-38, softmax_scale=0).softmax_scale == 0
        refused(ValueError, "softcap: got 1.2e-38 with softmax_scale -5", "4.17e+38", softcap=1.2e-38, softmax_scale=-5)

    @pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
    def test_integers_beyond_float64(self, name: str) -> None:
        """F17: an OverflowError, or that of printing so many digits."""
        for value in (10**400, -(10**400), 10**5000):
            refused(ValueError, f"{name}: got ", **{name: value})

    def test_softcap(self) -> None:
        assert build_problem(*qkv(), softcap=30).softcap == 30.0
        assert build_problem(*qkv(), softcap=None).softcap == 0.0
        for cap in (-1.0, float("inf"), float("nan"), 1e39):
            refused(ValueError, f"softcap: got {cap!r}", softcap=cap)

    @pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
    @pytest.mark.parametrize("value", ["1", True, 1j, [1.0]])
    def test_not_a_number(self, name: str, value: Any) -> None:
        refused(TypeError, f"{name}: got {value!r} of type {type(value).__name__}", **{name: value})

    def test_dropout_none(self) -> None:
        refused(TypeError, "dropout_p: got None", dropout_p=None)

    @pytest.mark.parametrize("name", ["return_lse", "deterministic", "dbias"])
    def test_flags(self, name: str) -> None:
        refused(TypeError, f"{name}: got 1 of type int", bias=tensor(1, 1, 1, 1), **{name: 1})


class TestShapes:
    @pytest.mark.reliability(7)
    @pytest.mark.parametrize("shape", [(8, 4, 64), (1, 2, 8, 4, 64), ()])
    def test_rank(self, shape: tuple[int, ...]) -> None:
        q, k, v = qkv()
        expected = "[batch, seqlen_q, num_heads, head_dim]"
        refused(
            ValueError,
            f"q: shape {shape} has rank {len(shape)}. Expected rank 4, {expected}",
            views=[tensor(*shape), k, v],
        )
        refused(
            ValueError, f"v: shape {shape}", "[batch, seqlen_k, num_heads_kv, head_dim_v]", views=[q, k, tensor(*shape)]
        )

    @pytest.mark.reliability(6)
    def test_heads_that_do_not_divide(self) -> None:
        refused(ValueError, "k, v: 4 heads do not divide the 9 heads of q", "is 3.", views=qkv(h=9, hkv=4))
        refused(ValueError, "k, v: 0 heads do not divide the 9 heads of q", "is 1.", views=qkv(h=9, hkv=0))
        refused(ValueError, "k, v: 8 heads do not divide the 4 heads of q", "is 4.", views=qkv(h=4, hkv=8))
        assert build_problem(*qkv(h=0, hkv=3)).num_heads_kv == 3

    def test_axes_that_differ(self) -> None:
        q, k, v = qkv()
        refused(ValueError, "q, k, v: batch sizes 2, 3, 2", views=[q, tensor(3, 12, 2, 64), v])
        refused(ValueError, "k, v: lengths 12 and 11", views=[q, k, tensor(2, 11, 2, 32)])
        refused(ValueError, "k, v: head counts 2 and 1", views=[q, k, tensor(2, 12, 1, 32)])
        refused(ValueError, "q, k: head dims 64 and 63", views=[q, tensor(2, 12, 2, 63), v])

    @pytest.mark.reliability(5)
    def test_head_dim_zero(self) -> None:
        refused(ValueError, "q: head dim 0", "k: head dim 0", views=qkv(d=0))
        refused(ValueError, "v: head dim 0", views=qkv(dv=0))

    @pytest.mark.reliability(5)
    def test_head_dim_above_the_widest_tile(self) -> None:
        refused(UnsupportedError, "q: head dim 513", "up to 512", "k: head dim 513", views=qkv(d=513))
        refused(UnsupportedError, "v: head dim 1024", "up to 512", views=qkv(dv=1024))
        cpu = [replace(x, device=Device("cpu", 0)) for x in qkv(d=513, dv=1024)]
        assert build_problem(*cpu).head_dim == 513

    def test_sizes_are_32_bit(self) -> None:
        shape = (1, 2**31, 1, 64)
        views = [tensor(*shape, strides=(0, 0, 0, 1))] * 3
        refused(UnsupportedError, f"q: shape {shape} has a dim above 2147483647", "k: shape", views=views)


class TestDtypesAndDevices:
    @pytest.mark.reliability(3)
    @pytest.mark.parametrize("dtype", ["float64", "uint8", "int32", "bool"])
    def test_not_computed(self, dtype: str) -> None:
        views = [replace(x, dtype=dtype) for x in qkv()]
        refused(UnsupportedError, f"q: dtype {dtype}. Accepted: float16, bfloat16, float32", views=views)

    @pytest.mark.reliability(4)
    def test_different(self) -> None:
        q, k, v = qkv()
        refused(
            ValueError, "q, k, v: dtypes float16, bfloat16, float16 differ", views=[q, replace(k, dtype="bfloat16"), v]
        )

    @pytest.mark.reliability(2)
    def test_two_devices(self) -> None:
        q, k, v = qkv()
        views = [q, replace(k, device=Device("cuda", 1)), v]
        refused(ValueError, "on 2 devices (q, v on cuda:0; k on cuda:1)", "Move them to cuda:0", views=views)
        mask = tensor(1, 1, 1, 12, dtype="bool", device=Device("cpu", 0))
        refused(ValueError, "mask on cpu", mask=mask)

    @pytest.mark.reliability(28)
    @pytest.mark.parametrize("name", ["q", "k", "v", "bias", "mask", "cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
    def test_not_a_view(self, name: str) -> None:
        given: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
        given[name] = "text"
        refused(TypeError, f"{name}: got 'text' of type str", views=[given.pop(n) for n in "qkv"], **given)

    @pytest.mark.reliability(28)
    def test_missing(self) -> None:
        q, _, v = qkv()
        refused(TypeError, "k: got None", views=[q, None, v])  # type: ignore[list-item]


class TestBiasAndMask:
    @pytest.mark.reliability(20)
    def test_every_broadcast_shape(self) -> None:
        for bits in range(16):
            shape = tuple(size if bits >> i & 1 else 1 for i, size in enumerate((2, 4, 8, 12)))
            p = build_problem(*qkv(), bias=tensor(*shape), mask=tensor(*shape, dtype="uint8"))
            assert p.bias is not None
            assert p.mask is not None
            assert p.bias.shape == p.mask.shape == shape

    @pytest.mark.parametrize(
        ("q_dtype", "dtype"), [("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float32")]
    )
    def test_bias_dtypes(self, q_dtype: str, dtype: str) -> None:
        views = [replace(x, dtype=q_dtype) for x in qkv()]
        p = build_problem(*views, bias=tensor(1, 1, 1, 1, dtype=dtype))
        assert p.bias is not None
        assert p.bias.dtype == dtype

    @pytest.mark.reliability(20)
    def test_dtypes_refused(self) -> None:
        shape = (2, 4, 8, 12)
        refused(
            ValueError,
            f"bias: dtype bfloat16 of shape {shape}",
            "float16 or float32",
            bias=tensor(*shape, dtype="bfloat16"),
        )
        refused(ValueError, f"mask: dtype int64 of shape {shape}", "bool or uint8", mask=tensor(*shape, dtype="int64"))
        refused(ValueError, f"mask: dtype float16 of shape {shape}", "bool or uint8", mask=tensor(*shape))

    @pytest.mark.reliability(20)
    @pytest.mark.parametrize("name", ["bias", "mask"])
    @pytest.mark.parametrize("shape", [(2, 4, 8, 11), (2, 2, 8, 12), (3, 4, 8, 12), (2, 4, 12, 8), (0, 1, 1, 1)])
    def test_shapes_refused(self, name: str, shape: tuple[int, ...]) -> None:
        dtype = "bool" if name == "mask" else "float16"
        message = f"{name}: shape {shape} does not broadcast", "[2, 4, 8, 12]"
        refused(ValueError, *message, **{name: tensor(*shape, dtype=dtype)})

    @pytest.mark.reliability(7, 20)
    def test_rank(self) -> None:
        refused(ValueError, "bias: shape (8, 12) has rank 2. Expected rank 4", bias=tensor(8, 12))
        refused(ValueError, "mask: shape (4, 8, 12) has rank 3", mask=tensor(4, 8, 12, dtype="bool"))

    def test_gradient_of_nothing(self) -> None:
        refused(ValueError, "dbias: a gradient of the bias was asked for, but bias is None", dbias=True)


class TestVarlen:
    def test_description(self) -> None:
        p = packed(causal=True, seqused_k=host([3, 0, 6]))
        assert (p.batch, p.seqlen_q, p.seqlen_k, p.varlen, p.seqused_k) == (3, 5, 6, True, True)
        assert (p.q.shape, p.k.shape) == ((1, 10, 4, 64), (1, 12, 2, 64))
        assert packed(max_seqlen_q=1000).seqlen_q == 1000  # a loose bound
        assert (p.window_left, p.window_right) == (None, 0)

    @pytest.mark.reliability(23)
    def test_unused_tokens_are_right(self) -> None:
        p = packed(cu_seqlens_q=host([3, 4, 4, 6]), cu_seqlens_k=host([2, 2, 2, 2]), max_seqlen_k=0)
        assert (p.seqlen_q, p.seqlen_k) == (5, 0)

    @pytest.mark.reliability(14)
    def test_no_sequences(self) -> None:
        assert packed(cu_seqlens_q=host([0]), cu_seqlens_k=host([4])).batch == 0

    def test_device_values_are_not_read(self) -> None:
        cu = tensor(4, dtype="int32")
        p = build_problem(
            tensor(1, 10, 4, 64), tensor(1, 12, 2, 64), tensor(1, 12, 2, 32),
            cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=6, seqused_k=tensor(3, dtype="int32"),
        )  # fmt: skip
        assert (p.batch, p.varlen) == (3, True)

    @staticmethod
    def refused(kind: type[Exception], *patterns: str, **changes: Any) -> None:
        with pytest.raises(kind) as info:
            packed(**changes)
        for pattern in patterns:
            assert pattern in str(info.value)

    @pytest.mark.reliability(23)
    def test_dtype(self) -> None:
        self.refused(ValueError, "cu_seqlens_q: dtype int64", "int32", cu_seqlens_q=host([0, 4, 4, 9], "int64"))
        self.refused(ValueError, "seqused_k: dtype int64", seqused_k=host([1, 1, 1], "int64"))

    @pytest.mark.reliability(23)
    def test_on_the_cpu_with_device_tensors(self) -> None:
        views = [tensor(1, 10, 4, 64), tensor(1, 12, 2, 64), tensor(1, 12, 2, 32)]
        self.refused(ValueError, "cu_seqlens_q, cu_seqlens_k on cpu", "Move them to cuda:0", views=views)

    @pytest.mark.reliability(23)
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"cu_seqlens_q": [0, 5, 4, 9]}, "cu_seqlens_q: decreases from 5 to 4 at element 2"),
            (
                {"cu_seqlens_k": [0, 3, 5, 13], "max_seqlen_k": 8},
                "cu_seqlens_k: its last element is 13, but there are 12",
            ),
            ({"cu_seqlens_q": [-1, 3, 5, 10]}, "cu_seqlens_q: element 0 is -1"),
            ({"max_seqlen_q": 4}, "max_seqlen_q: got 4, but sequence 2 of cu_seqlens_q has 5 tokens"),
            ({"max_seqlen_k": 5}, "max_seqlen_k: got 5, but sequence 2 of cu_seqlens_k has 6 tokens"),
            ({"max_seqlen_q": -1}, "max_seqlen_q: got -1"),
            ({"max_seqlen_q": None}, "max_seqlen_q: got None with cu_seqlens_q"),
            ({"cu_seqlens_k": None}, "cu_seqlens_k: got None with cu_seqlens_q"),
            ({"cu_seqlens_q": None}, "cu_seqlens_q: got None with cu_seqlens_k"),
            ({"cu_seqlens_q": [0, 5, 10]}, "lengths 3 and 4 differ"),
            ({"cu_seqlens_q": [], "cu_seqlens_k": []}, "cu_seqlens_q: shape (0,)"),
            ({"cu_seqlens_q": [[0, 5, 5, 10]]}, "cu_seqlens_q: shape (1, 4) has rank 2"),
            ({"seqused_k": [3, 2, 7]}, "seqused_k: element 2 is 7. It is at least 0 and at most 6"),
            ({"seqused_k": [3, -2, 6]}, "seqused_k: element 1 is -2"),
            ({"seqused_k": [3, 2]}, "seqused_k: shape (2,). There are 3 sequences"),
        ],
    )
    def test_values(self, changes: dict[str, Any], message: str) -> None:
        changes = {key: host(x) if isinstance(x, list) else x for key, x in changes.items()}
        self.refused(ValueError, message, **changes)

    @pytest.mark.reliability(23)
    def test_strided_vector(self) -> None:
        strided = view(np.array([1, 0, 5, 0, 5, 0, 10], np.int32)[::2], "cu_seqlens_q")
        self.refused(ValueError, "cu_seqlens_q: stride 2 of shape (4,)", cu_seqlens_q=strided)

    def test_batch(self) -> None:
        views = [replace(x, device=Device("cpu", 0)) for x in qkv(m=10)]
        self.refused(ValueError, "q, k, v: batch size 2 with cu_seqlens", views=views)

    @pytest.mark.parametrize(("name", "dtype"), [("bias", "float16"), ("mask", "bool")])
    def test_bias_and_mask(self, name: str, dtype: str) -> None:
        operand = tensor(1, 4, 5, 6, dtype=dtype, device=Device("cpu", 0))
        self.refused(UnsupportedError, f"{name}: shape (1, 4, 5, 6) with cu_seqlens", **{name: operand})

    def test_dense_problem_with_packed_arguments(self) -> None:
        refused(ValueError, "max_seqlen_q: got 8 without cu_seqlens", max_seqlen_q=8)

    def test_used_keys_of_a_dense_batch(self) -> None:
        p = build_problem(*qkv(), seqused_k=tensor(2, dtype="int32"))
        assert (p.batch, p.varlen, p.seqused_k) == (2, False, True)
        refused(ValueError, "seqused_k: shape (3,). The batch is 2", seqused_k=tensor(3, dtype="int32"))
        refused(ValueError, "seqused_k: dtype int64", seqused_k=tensor(2, dtype="int64"))

    def test_kind(self) -> None:
        self.refused(TypeError, "max_seqlen_q: got 5.0 of type float", max_seqlen_q=5.0)
        assert packed(max_seqlen_q=np.int64(5)).seqlen_q == 5


class TestReport:
    def test_everything_at_once_in_order(self) -> None:
        q, k, v = qkv(h=9, hkv=4)
        views = [q, replace(k, device=Device("cuda", 3)), replace(v, dtype="float32")]
        text = refused(
            ValueError,
            "q, k, v: dtypes",
            "mask: dtype int64",
            "cuda:3",
            "k, v: 4 heads",
            "mask: shape (1, 1, 1, 5)",
            "window_size: got (-7, 0)",
            "softmax_scale: got nan",
            "dropout_p: got 2",
            views=views,
            mask=tensor(1, 1, 1, 5, dtype="int64"),
            window_size=(-7, 0),
            softmax_scale=float("nan"),
            dropout_p=2,
        )
        assert text.count("\n  - ") == 8

    def test_the_strongest_kind_wins(self) -> None:
        views = [replace(x, dtype="float64") for x in qkv(d=600)]
        with pytest.raises(UnsupportedError) as info:
            build_problem(*views)
        assert len(info.value.reasons) == 3
        assert "q: dtype float64" in info.value.reasons[0]
        text = refused(ValueError, "q: dtype float64", "q: head dim 600", "dropout_p: got 2", views=views, dropout_p=2)
        assert text.count("\n  - ") == 4
        refused(
            TypeError,
            "q: dtype float64",
            "dropout_p: got 2",
            "return_lse: got 3",
            views=views,
            dropout_p=2,
            return_lse=3,
        )

    @pytest.mark.reliability(104)
    def test_refusals_are_not_asserts(self, request: pytest.FixtureRequest) -> None:
        """The same refusals under ``python -O -W error``."""
        code = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import numpy as np\n"
            "from nvrtc_attn.front.build import build_problem\n"
            "from nvrtc_attn.front.tensors import view\n"
            "q = view(np.zeros((1, 2, 3, 4), np.float32), 'q')\n"
            "i = view(np.zeros((1, 2, 3, 4), np.int32), 'i')\n"
            "build_problem(q, q, q)\n"
            "calls = ((q, q, None), {}), ((q, i, q), {}), ((i, i, i), {}), ((q, q, q), {'dropout_p': 2})\n"
            "for views, options in calls:\n"
            "    try:\n"
            "        build_problem(*views, **options)\n"
            "    except Exception as error:\n"
            "        print(type(error).__name__)\n"
        )
        command = [sys.executable, "-O", "-W", "error", "-c", code, str(request.config.rootpath)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (result.stdout.split(), result.stderr) == (
            ["TypeError", "ValueError", "UnsupportedError", "ValueError"],
            "",
        )


@pytest.mark.parametrize("expanded", [(1, 2), (0, 1, 2), (0,), (3,), ()], ids=str)
def test_an_expanded_mask_is_the_mask_that_was_expanded(expanded: tuple[int, ...]) -> None:
    """Kernels broadcast by themselves: an expanded mask of one row was looked at for each row of each head."""
    sizes = (2, 4, 8, 12)
    given = tuple(1 if axis in expanded else n for axis, n in enumerate(sizes))
    strides = tuple(0 if n == 1 else stride for n, stride in zip(given, compact_strides(given), strict=True))
    as_given = build_problem(*qkv(), mask=tensor(*given, dtype="bool", strides=strides))
    assert build_problem(*qkv(), mask=tensor(*sizes, dtype="bool", strides=strides)) == as_given
    assert as_given.mask is not None
    assert as_given.mask.shape == given
