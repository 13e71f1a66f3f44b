"""Views of NumPy, torch, CuPy and JAX arrays. CUDA paths run against stand-ins that record what is asked of them."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
from dlpack_producer import BOGUS_POINTER, Producer

from nvrtc_attn import UnsupportedError
from nvrtc_attn.front import tensors, tensorview
from nvrtc_attn.front.tensors import (
    TensorView,
    as_numpy,
    bfloat16_to_float32,
    current_stream,
    float32_to_bfloat16,
    framework_of,
    may_overlap,
    stream_handle,
    view,
)


def _torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def _jax_numpy() -> Any:
    pytest.importorskip("jax", reason="jax is not installed")
    return pytest.importorskip("jax.numpy", reason="jax is not installed")


class TestWrongKind:
    @pytest.mark.reliability(28)
    @pytest.mark.parametrize("x", [None, 3, 1.5, "q", [1.0], (1.0,), object(), b"abc", {"a": 1}])
    def test_type_error_names_the_argument(self, x: object) -> None:
        with pytest.raises(TypeError, match=f"^k: got .* of type {type(x).__name__}.*numpy.asarray"):
            view(x, "k")

    @pytest.mark.reliability(28)
    def test_long_values_are_cut(self) -> None:
        with pytest.raises(TypeError) as info:
            view(list(range(10_000)), "q")
        assert len(str(info.value)) < 400


class TestNumpy:
    @pytest.mark.reliability(1, 55)
    @pytest.mark.parametrize("dtype", ["float16", "float32", "bool", "uint8", "int32", "int64"])
    def test_view(self, dtype: str) -> None:
        x = np.arange(24).reshape(2, 3, 4).astype(dtype)
        v = view(x.transpose(2, 0, 1)[::2], "q")
        assert (v.ptr, v.shape, v.strides, v.dtype) == (x.ctypes.data, (2, 2, 3), (2, 12, 4), dtype)
        assert v.device == ("cpu", 0)
        assert str(v.device) == "cpu"
        np.testing.assert_array_equal(as_numpy(v), x.transpose(2, 0, 1)[::2])

    def test_owner_keeps_the_memory(self) -> None:
        v = view(np.full((1000,), 7.0, np.float32), "q")
        gc.collect()
        assert as_numpy(v)[999] == 7.0

    @pytest.mark.reliability(13)
    def test_strides_of_single_elements_are_ignored(self) -> None:
        x = np.lib.stride_tricks.as_strided(np.zeros(8, np.float16), (1, 4, 1), (-2222, 4, 1 << 40))
        assert view(x, "q").strides == (0, 2, 0)

    @pytest.mark.reliability(12)
    def test_negative_strides(self) -> None:
        """F7: they are strides like others; the address is that of element 0, in outputs too."""
        x = np.arange(12, dtype=np.float16).reshape(3, 4)
        for writable in (False, True):
            v = view(x[::-1, ::-2], "q", writable=writable)
            assert (v.ptr, v.shape, v.strides) == (x.ctypes.data + 2 * 11, (3, 2), (-4, -2))
        np.testing.assert_array_equal(as_numpy(v), x[::-1, ::-2])
        foreign = TensorView(v.ptr, v.shape, v.strides, v.dtype, v.device, owner=[x])
        np.testing.assert_array_equal(as_numpy(foreign), x[::-1, ::-2])
        assert view(x[:0][::-1], "q").shape == (0, 4)
        assert may_overlap(v, view(x[:1], "k"))
        assert may_overlap(view(x[:1], "k"), v)
        assert not may_overlap(v, view(x[:, ::2], "k"))
        assert not may_overlap(view(x[:1][::-1, ::-1], "q"), view(x[1:][::-1], "k"))
        folded = np.lib.stride_tricks.as_strided(x[1:], (3, 4), (-2, 2))
        with pytest.raises(ValueError, match=r"^out: strides \(-1, 1\)"):
            view(folded, "out", writable=True)

    def test_subclasses_are_read_as_plain_arrays(self) -> None:
        """F6: what a class computes differently must not reach the arithmetic."""

        class Reversed(np.ndarray[Any, Any]):
            def __getitem__(self, index: Any) -> Any:
                raise AssertionError("asked")

            def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
                raise AssertionError("asked")

            def view(self, *_: Any, **__: Any) -> Any:
                raise AssertionError("asked")

            @property
            def shape(self) -> Any:
                return (1,)

        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        v = view(x.view(Reversed), "q", writable=True)
        assert v.shape == (3, 4)
        assert type(as_numpy(v)) is np.ndarray
        assert type(v.owner) is np.ndarray
        assert as_numpy(v)[2, 3] == 11

    @pytest.mark.reliability(11)
    def test_expanded(self) -> None:
        x = np.broadcast_to(np.zeros((1, 4), np.float16), (3, 4))
        assert view(x, "q").strides == (0, 1)
        assert view(x, "q").readonly

    @pytest.mark.reliability(24, 52)
    def test_read_only(self) -> None:
        x = np.zeros((3, 4), np.float16)
        x.flags.writeable = False
        assert not as_numpy(view(x, "q")).flags.writeable
        with pytest.raises(ValueError, match=r"^out: .*flags.writeable is False"):
            view(x, "out", writable=True)

    @pytest.mark.reliability(3)
    @pytest.mark.parametrize("dtype", ["complex64", "uint16", "uint32", "float128", "datetime64[s]", "U3", ">f4"])
    def test_refused_dtypes(self, dtype: str) -> None:
        with pytest.raises(UnsupportedError, match=r"^q: dtype .* Accepted: float16, bfloat16, float32"):
            view(np.zeros(3, dtype), "q")

    def test_record_field(self) -> None:
        x = np.zeros(4, [("a", "<f4"), ("b", "u1")])["a"]
        with pytest.raises(ValueError, match=r"^q: strides \(5,\) \(bytes\).*4-byte"):
            view(x, "q")

    def test_masked_array(self) -> None:
        with pytest.raises(TypeError, match=r"^k: got a numpy.ma.MaskedArray.*filled"):
            view(np.ma.zeros((2, 2), np.float32), "k")

    @pytest.mark.reliability(55)
    def test_bfloat16(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
        x = np.array([[1.5, -2.0], [np.inf, 3e38]], ml_dtypes.bfloat16)
        v = view(x, "q")
        assert v.dtype == "bfloat16"
        assert as_numpy(v) is x
        foreign = TensorView(v.ptr, v.shape, v.strides, v.dtype, v.device, owner=[x])
        assert as_numpy(foreign).dtype == ml_dtypes.bfloat16
        monkeypatch.setattr(tensorview, "_ml_dtypes_bfloat16", lambda: None)
        bits = as_numpy(foreign)
        assert bits.dtype == np.uint16
        np.testing.assert_array_equal(bfloat16_to_float32(bits), x.astype(np.float32))

    def test_wrong_device(self) -> None:
        with pytest.raises(TypeError, match=r"as_numpy: .*cuda:1"):
            as_numpy(view(Producer(device=(2, 1)), "q"))


@pytest.mark.reliability(55)
def test_bfloat16_rounding() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:6] = (
        0x3F808000,
        0x3F818000,
        0x7F7FFFFF,
        0x7F800001,
        0xFFFFFFFF,
        0x00000001,
    )  # ties, overflow, NaN, subnormal
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(bfloat16_to_float32(float32_to_bfloat16(values)), expected)


class TestTorch:
    @pytest.mark.reliability(55)
    def test_view(self) -> None:
        torch = _torch()
        for dtype in ("float16", "bfloat16", "float32", "bool", "uint8", "int32", "int64"):
            t = torch.arange(24).reshape(2, 1, 3, 4).to(getattr(torch, dtype))
            v = view(t.transpose(0, 3), "q")
            assert (v.ptr, v.shape, v.strides) == (t.data_ptr(), (4, 1, 3, 2), (1, 0, 4, 12))
            assert (v.dtype, v.device, v.readonly, v.owner.shape) == (dtype, ("cpu", 0), False, (4, 1, 3, 2))
            expected = t.transpose(0, 3).float().numpy()
            actual = as_numpy(v)
            if actual.dtype == np.uint16:
                actual = bfloat16_to_float32(actual)
            np.testing.assert_array_equal(actual.astype(np.float32), expected)

    def test_written_memory_arrives(self) -> None:
        t = _torch().zeros(2, 3)
        as_numpy(view(t, "out", writable=True))[1, 2] = 5
        assert t[1, 2] == 5

    @pytest.mark.reliability(9)
    def test_offset_views(self) -> None:
        torch = _torch()
        t = torch.zeros(65, dtype=torch.float16)
        assert view(t[1:], "q").ptr == t.data_ptr() + 2

    @pytest.mark.reliability(43)
    def test_requires_grad(self) -> None:
        torch = _torch()
        for t in (torch.zeros(2, 3, requires_grad=True), torch.nn.Parameter(torch.zeros(2, 3))):
            with pytest.raises(ValueError, match=r"^v: requires_grad.*v\.detach\(\).*torch\.attention"):
                view(t, "v")
            assert view(t.detach(), "v").ptr == t.data_ptr()
            with torch.no_grad():  # no gradient can be lost here
                assert view(t, "v").shape == (2, 3)

    @pytest.mark.reliability(45)
    def test_conjugate_and_negative_views(self) -> None:
        torch = _torch()
        c = torch.complex(torch.ones(3), torch.tensor([1.0, 2.0, 3.0]))
        t = c.conj().imag
        assert t.is_neg()
        np.testing.assert_array_equal(as_numpy(view(t, "q")), [-1.0, -2.0, -3.0])
        with pytest.raises(ValueError, match=r"^out: .*negated view"):
            view(t, "out", writable=True)
        with pytest.raises(UnsupportedError, match=r"^q: dtype torch.complex64"):
            view(c.conj(), "q")

    @pytest.mark.reliability(3)
    def test_refused_dtypes(self) -> None:
        torch = _torch()
        for dtype in (torch.uint16, torch.complex64, torch.float8_e4m3fn):
            with pytest.raises(UnsupportedError, match=f"^q: dtype {dtype} .*float16, bfloat16, float32"):
                view(torch.zeros(3, dtype=dtype), "q")

    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
    def test_no_readable_memory(self) -> None:
        torch = _torch()
        with pytest.raises(TypeError, match=r"^q: .*layout torch.sparse_coo.*to_dense"):
            view(torch.eye(3).to_sparse(), "q")
        with pytest.raises(TypeError, match=r"^q: .*layout torch.sparse_csr"):
            view(torch.eye(3).to_sparse_csr(), "q")
        with pytest.raises(TypeError, match=r"^q: .*torch.func"):
            torch.func.vmap(lambda t: view(t, "q") and t)(torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"^q: the memory is on meta"):
            view(torch.zeros(3, device="meta"), "q")

    def test_subclasses(self) -> None:
        torch = _torch()

        class Mine(torch.Tensor):
            pass

        with pytest.raises(TypeError, match=r"^k: got .*Mine, a subclass of torch.Tensor.*as_subclass"):
            view(torch.zeros(3).as_subclass(Mine), "k")
        with torch._subclasses.FakeTensorMode(), pytest.raises(TypeError, match=r"^k: got .*FakeTensor"):
            view(torch.zeros(3), "k")

    @pytest.mark.reliability(11)
    def test_expanded(self) -> None:
        t = _torch().zeros(1, 4).expand(3, 4)
        assert view(t, "q").strides == (0, 1)
        with pytest.raises(ValueError, match=r"^dq: strides \(0, 1\).*expanded"):
            view(t, "dq", writable=True)

    @pytest.mark.reliability(14)
    def test_no_elements(self) -> None:
        v = view(_torch().zeros(2, 0, 4), "out", writable=True)
        assert (v.ptr, v.shape, as_numpy(v).shape) == (0, (2, 0, 4), (2, 0, 4))

    @pytest.mark.reliability(57)
    def test_ten_thousand_views_leave_nothing(self) -> None:
        t = _torch().zeros(2, 3, 4)
        view(t, "q")
        gc.collect()
        objects, references = len(gc.get_objects()), sys.getrefcount(t)
        for _ in range(10_000):
            view(t, "q")
            view(t[:1], "q", writable=True)
        gc.collect()
        assert len(gc.get_objects()) <= objects + 10
        assert sys.getrefcount(t) == references

    def test_dlpack_path_reads_the_same(self) -> None:
        torch = _torch()

        class Wrapped:
            def __init__(self, t: Any) -> None:
                self.__dlpack__, self.__dlpack_device__ = t.__dlpack__, t.__dlpack_device__

        for dtype in ("float16", "bfloat16", "float32", "bool", "int32"):
            t = torch.zeros(3, 1, 5, dtype=getattr(torch, dtype))[1:].transpose(0, 2)
            assert view(Wrapped(t), "q") == view(t, "q")


class TestJax:
    @pytest.mark.reliability(55)
    def test_view(self) -> None:
        jnp = _jax_numpy()
        for dtype in ("float16", "bfloat16", "float32", "int32", "bool"):
            x = jnp.arange(6).reshape(2, 3).astype(dtype)
            v = view(x, "q")
            assert (v.shape, v.strides, v.dtype, v.device) == ((2, 3), (3, 1), dtype, ("cpu", 0))
            np.testing.assert_array_equal(as_numpy(v).astype(np.float32), np.asarray(x).astype(np.float32))

    @pytest.mark.reliability(52)
    def test_never_written(self) -> None:
        x = _jax_numpy().zeros((2, 3))
        v = view(x, "q")
        assert v.readonly
        assert not as_numpy(v).flags.writeable
        with pytest.raises(ValueError, match=r"^out: JAX arrays are immutable"):
            view(x, "out", writable=True)

    @pytest.mark.reliability(56)
    def test_tracer(self) -> None:
        jnp = _jax_numpy()
        import jax

        def f(x: Any) -> Any:
            view(x, "k")
            return x

        for transformed in (jax.jit(f), jax.vmap(f), jax.grad(lambda x: f(x).sum())):
            with pytest.raises(TypeError, match=r"^k: got a JAX tracer.*nvrtc_attn\.jax\.attention"):
                transformed(jnp.zeros((2, 3)))


class _Recorder:
    """A CuPy or torch stand-in writes down every ordering between streams here."""

    def __init__(self) -> None:
        self.current: dict[int, int] = {0: 0, 1: 0x10}
        self.device = 0
        self.waits: list[tuple[int, int, int]] = []
        """(device, the stream that waits, the stream it waits for)"""


@pytest.fixture
def _fresh_frameworks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_handlers", {})
    monkeypatch.setattr(tensors, "_torch_state", None)


class _DeviceGuard:
    def __init__(self, recorder: _Recorder, index: int) -> None:
        self.recorder, self.index = recorder, index

    def __enter__(self) -> None:
        self.before, self.recorder.device = self.recorder.device, self.index

    def __exit__(self, *_: object) -> None:
        self.recorder.device = self.before


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, _fresh_frameworks: None) -> Any:
    """What the package uses of CuPy."""
    recorder = _Recorder()

    class ndarray:
        def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: int = 0) -> None:
            self.shape, self.strides, self.dtype = shape, strides, np.dtype(dtype)
            self.data = types.SimpleNamespace(ptr=BOGUS_POINTER)
            self.device = types.SimpleNamespace(id=device)

    class ExternalStream:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

        def record(self) -> int:
            return self.ptr

        def wait_event(self, event: int) -> None:
            recorder.waits.append((recorder.device, self.ptr, event))

    module = types.ModuleType("cupy")
    module.ndarray = ndarray
    module.recorder = recorder
    module.cuda = types.SimpleNamespace(
        Device=lambda index: _DeviceGuard(recorder, index),
        ExternalStream=ExternalStream,
        get_current_stream=lambda: ExternalStream(recorder.current[recorder.device]),
        runtime=types.SimpleNamespace(is_hip=False, getDevice=lambda: recorder.device),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


class TestCupy:
    def test_view(self, cupy: Any) -> None:
        x = cupy.ndarray((2, 1, 4), (16, 999, 2), np.float16, device=1)
        v = view(x, "q", writable=True)
        assert (v.ptr, v.shape, v.strides, v.dtype) == (BOGUS_POINTER, (2, 1, 4), (8, 0, 1), "float16")
        assert v.device == ("cuda", 1)
        assert str(v.device) == "cuda:1"
        assert v.owner is x
        assert framework_of(x) == "cupy"

    @pytest.mark.reliability(55)
    def test_bfloat16(self, cupy: Any) -> None:
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
        assert view(cupy.ndarray((2,), (2,), ml_dtypes.bfloat16), "q").dtype == "bfloat16"

    @pytest.mark.reliability(47)
    @pytest.mark.parametrize(
        ("device", "stream", "waits"),
        [
            (0, None, []),
            (0, 0, []),
            (0, 1, []),
            (0, -1, []),
            (0, 0x20, [(0, 0x20, 0)]),
            (1, 0x10, []),
            (1, 0x20, [(1, 0x20, 0x10)]),
            (1, 1, [(1, 0, 0x10)]),
            (1, 2, [(1, 2, 0x10)]),
            (1, -1, []),
        ],
    )
    def test_order(self, cupy: Any, device: int, stream: int | None, waits: list[tuple[int, int, int]]) -> None:
        view(cupy.ndarray((2,), (2,), np.float16, device=device), "q", stream=stream)
        assert cupy.recorder.waits == waits
        assert cupy.recorder.device == 0

    @pytest.mark.reliability(3, 12, 54)
    def test_refusals(self, cupy: Any) -> None:
        with pytest.raises(UnsupportedError, match=r"^q: dtype uint16"):
            view(cupy.ndarray((2,), (2,), np.uint16), "q")
        assert view(cupy.ndarray((2,), (-2,), np.float16), "q", writable=True).strides == (-1,)
        cupy.cuda.runtime.is_hip = True
        with pytest.raises(ValueError, match=r"^q: .*ROCm"):
            view(cupy.ndarray((2,), (2,), np.float16), "q")

    def test_current_stream(self, cupy: Any) -> None:
        assert (current_stream("cupy", 0), current_stream("cupy", 1)) == (0, 0x10)
        assert cupy.recorder.device == 0


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch, _fresh_frameworks: None) -> Any:
    """What the package uses of torch, with CUDA tensors and no GPU."""
    recorder = _Recorder()

    class Tensor:
        is_cuda, is_cpu, requires_grad, layout = True, False, False, "strided"

        def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], index: int = 0) -> None:
            self.shape, self.dtype, self._strides, self._index = shape, "torch.float16", strides, index
            self.device = f"cuda:{index}"

        def is_neg(self) -> bool:
            return False

        def data_ptr(self) -> int:
            return BOGUS_POINTER

        def stride(self) -> tuple[int, ...]:
            return self._strides

        def get_device(self) -> int:
            return self._index

    class Parameter(Tensor):
        pass

    class Stream:
        def __init__(self, handle: int, device: int) -> None:
            self.cuda_stream, self.device = handle, device

        def wait_stream(self, other: Stream) -> None:
            assert self.device == other.device == recorder.device
            recorder.waits.append((self.device, self.cuda_stream, other.cuda_stream))

    module = types.ModuleType("torch")
    module.Tensor, module.nn, module.float16 = Tensor, types.SimpleNamespace(Parameter=Parameter), "torch.float16"
    module.version = types.SimpleNamespace(hip=None)
    module._C = types.SimpleNamespace()
    module.recorder = recorder
    module.cuda = types.SimpleNamespace(
        device=lambda index: _DeviceGuard(recorder, index),
        current_stream=lambda index: Stream(recorder.current[index], index),
        ExternalStream=lambda handle, device: Stream(handle, device),
    )
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


class TestTorchCuda:
    @pytest.mark.reliability(44)
    def test_second_device_without_touching_the_current_one(self, fake_torch: Any) -> None:
        v = view(fake_torch.Tensor((2, 3), (3, 1), index=1), "q")
        assert v.device == ("cuda", 1)
        assert fake_torch.recorder.device == 0

    @pytest.mark.reliability(46, 47)
    @pytest.mark.parametrize(
        ("device", "stream", "waits"),
        [
            (0, None, []),
            (0, 0, []),
            (0, 1, []),
            (0, -1, []),
            (0, 0x20, [(0, 0x20, 0)]),
            (1, 0x10, []),
            (1, 0x20, [(1, 0x20, 0x10)]),
            (1, 0, [(1, 0, 0x10)]),
            (1, 1, [(1, 0, 0x10)]),
        ],
    )
    @pytest.mark.parametrize("raw", [False, True])
    def test_order(
        self, fake_torch: Any, device: int, stream: int | None, waits: list[tuple[int, int, int]], raw: bool
    ) -> None:
        if raw:
            fake_torch._C._cuda_getCurrentRawStream = fake_torch.recorder.current.__getitem__
        view(fake_torch.Tensor((2, 3), (3, 1), index=device), "q", stream=stream)
        assert fake_torch.recorder.waits == waits
        assert current_stream("torch", device) == fake_torch.recorder.current[device]

    @pytest.mark.reliability(54)
    def test_rocm_build(self, fake_torch: Any) -> None:
        fake_torch.version.hip = "7.0"
        with pytest.raises(ValueError, match=r"^k: the memory is on cuda:0 of a ROCm build of torch"):
            view(fake_torch.Tensor((2, 3), (3, 1)), "k")


class TestStreams:
    def test_handles(self) -> None:
        assert stream_handle(0) == 0
        assert stream_handle(np.int64(77)) == 77
        assert stream_handle(-1) == -1
        assert stream_handle(types.SimpleNamespace(cuda_stream=9)) == 9
        assert stream_handle(types.SimpleNamespace(ptr=10)) == 10
        assert stream_handle(types.SimpleNamespace(__cuda_stream__=lambda: (0, 11), ptr=10)) == 11

    @pytest.mark.parametrize("stream", [True, "s", 1.0, object()])
    def test_wrong_kind(self, stream: object) -> None:
        with pytest.raises(TypeError, match=r"^stream: got "):
            stream_handle(stream)

    def test_wrong_value(self) -> None:
        with pytest.raises(ValueError, match=r"^stream: got -2"):
            stream_handle(-2)

    def test_frameworks_without_streams(self) -> None:
        assert framework_of(np.zeros(1)) == "numpy"
        assert framework_of(Producer()) == "dlpack"
        assert [current_stream(name, 0) for name in ("numpy", "jax", "dlpack")] == [0, 0, 0]

    def test_framework_names(self) -> None:
        assert framework_of(_torch().zeros(1)) == "torch"
        assert framework_of(_jax_numpy().zeros(1)) == "jax"


class TestOverlap:
    @pytest.mark.reliability(24)
    def test_slices_of_one_buffer(self) -> None:
        buffer = np.zeros((2, 5, 3, 4), np.float32)
        q, k, v = (view(buffer[:, :, i], name) for i, name in enumerate("qkv"))
        assert may_overlap(q, q)
        assert not may_overlap(q, k)
        assert not may_overlap(k, v)
        assert may_overlap(view(buffer, "out"), v)
        assert may_overlap(view(buffer[0, 1:], "a"), view(buffer[0, :2], "b"))
        assert not may_overlap(view(buffer[0], "a"), view(buffer[1], "b"))
        assert not may_overlap(view(buffer[:, :0], "a"), view(buffer, "b"))

    @pytest.mark.reliability(24)
    def test_device_memory_is_not_touched(self) -> None:
        a = view(Producer((4, 3), strides=(6, 1)), "a")
        assert not may_overlap(a, view(Producer((4, 3), strides=(6, 1), byte_offset=6), "b"))
        assert may_overlap(a, view(Producer((4, 3), strides=(6, 1), byte_offset=4), "b"))
        # One byte of a wider element is enough.
        assert may_overlap(a, view(Producer((4, 3), strides=(3, 1), dtype=(2, 32)), "b"))
        assert not may_overlap(a, view(Producer((4, 3), strides=(6, 1), device=(2, 1)), "b"))

    @pytest.mark.reliability(24)
    def test_search_is_bounded(self) -> None:
        strides, other = (100_003, 10_007, 1_009, 101, 13), (99_991, 10_009, 1_013, 103, 11)
        a = view(Producer((40, 41, 42, 43, 44), strides=strides), "a")
        assert may_overlap(a, view(Producer((40, 41, 42, 43, 44), strides=other, byte_offset=2), "b"))


@pytest.mark.reliability(103)
def test_frameworks_are_not_imported(request: pytest.FixtureRequest) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np\n"
        "from nvrtc_attn.front.tensors import view\n"
        "view(np.zeros((2, 3), np.float32), 'q')\n"
        "print([m for m in ('torch', 'jax', 'cupy', 'cuda', 'ml_dtypes') if m in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(request.config.rootpath)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout == "[]\n"
