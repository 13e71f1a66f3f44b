"""The DLPack consumer against producers that are made by hand: right ones, old ones and broken ones. No GPU needed."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
from dlpack_producer import BOGUS_POINTER, Producer

from nvrtc_attn import UnsupportedError
from nvrtc_attn.front import dlpack, tensors
from nvrtc_attn.front.build import build_problem
from nvrtc_attn.front.tensors import as_numpy, view


def _host(array: np.ndarray[Any, Any], **options: Any) -> Producer:
    """A producer over real CPU memory; keeps the array alive."""
    codes = {"f": 2, "i": 0, "u": 1, "b": 6}
    producer = Producer(
        array.shape,
        dtype=(codes[array.dtype.kind], 8 * array.itemsize),
        device=(1, 0),
        data=array.ctypes.data,
        **options,
    )
    producer.array = array
    return producer


@pytest.mark.reliability(51, 53)
@pytest.mark.parametrize("version", [None, (1, 0), (1, 9)])
def test_every_field_is_read(version: tuple[int, int] | None) -> None:
    producer = Producer((2, 3, 1), strides=(3, 1, 77), device=(2, 1), byte_offset=6, version=version)
    v = view(producer, "q")
    assert v.ptr == BOGUS_POINTER + 6
    assert (v.shape, v.strides, v.dtype, v.device) == ((2, 3, 1), (3, 1, 0), "float16", ("cuda", 1))
    assert not v.readonly
    del v
    assert producer.deleted == 1


@pytest.mark.reliability(51)
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_producer_that_does_not_know_max_version(version: tuple[int, int] | None) -> None:
    producer = Producer(knows_max_version=False, version=version)
    assert view(producer, "q", stream=5).shape == (2, 3)
    assert producer.requests == [{"max_version": (1, 0), "stream": 5}, {"stream": 5}]
    assert producer.deleted == 1


@pytest.mark.reliability(51)
@pytest.mark.parametrize("major", [0, 2])
def test_other_major_version_is_refused_and_deleted(major: int) -> None:
    producer = Producer(version=(major, 3), shape=(2, 3))
    with pytest.raises(ValueError, match=rf"^k: .*version {major}\.3.*1\.0"):
        view(producer, "k")
    assert producer.deleted == 1
    # A capsule of the user's too: the deleter is the only field whose place is certain.
    capsule = producer.capsule()
    with pytest.raises(ValueError, match=r"^k: "):
        view(capsule, "k")
    assert producer.deleted == 2
    del capsule
    assert producer.deleted == 2


@pytest.mark.reliability(46)
@pytest.mark.parametrize(("stream", "received"), [(None, 1), (0, 1), (1, 1), (2, 2), (0xABC0, 0xABC0), (-1, -1)])
@pytest.mark.parametrize("device_type", [2, 13])
def test_stream_that_the_producer_receives(
    stream: int | None, received: int, device_type: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_device_of", lambda ptr: 0)
    producer = Producer(device=(device_type, 0))
    view(producer, "q", stream=stream)
    assert producer.requests == [{"max_version": (1, 0), "stream": received}]


@pytest.mark.reliability(46)
def test_cpu_producer_receives_no_stream() -> None:
    producer = _host(np.ones((2, 3), np.float16))
    view(producer, "q", stream=7)
    assert producer.requests == [{"max_version": (1, 0)}]


@pytest.mark.reliability(46)
@pytest.mark.parametrize(("stream", "options"), [(-1, {}), (None, {"stream": 1}), (0x20, {"stream": 0x20})])
def test_jax_takes_minus_one_for_a_handle(
    stream: int | None, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("jax")
    module.Array = Producer
    monkeypatch.setitem(sys.modules, "jax", module)
    producer = Producer()
    assert view(producer, "q", stream=stream).readonly
    assert producer.requests == [{"max_version": (1, 0), **options}]


@pytest.mark.reliability(46)
def test_refusal_of_a_stream_names_the_argument() -> None:
    with pytest.raises(ValueError, match=r"^v: .*BufferError: per-thread default stream is not supported") as info:
        view(Producer(error=BufferError("per-thread default stream is not supported")), "v", stream=2)
    assert isinstance(info.value.__cause__, BufferError)


@pytest.mark.reliability(49)
class TestDeleterRunsOnce:
    def test_success(self) -> None:
        producer = Producer()
        v = view(producer, "q")
        assert (producer.deleted, producer.exported) == (0, 1)
        w = tensors.TensorView(v.ptr, v.shape, v.strides, v.dtype, v.device, owner=v.owner)
        del v
        gc.collect()
        assert producer.deleted == 0
        del w
        assert (producer.deleted, producer.exported) == (1, 0)

    def test_null_deleter(self) -> None:
        producer = Producer(deleter=False)
        assert view(producer, "q").shape == (2, 3)

    @pytest.mark.parametrize("version", [None, (1, 0)])
    def test_dtype_refusal(self, version: tuple[int, int] | None) -> None:
        producer = Producer(dtype=(5, 64), version=version)
        with pytest.raises(UnsupportedError) as info:
            view(producer, "q")
        # Not when the exception and its traceback die: now.
        assert producer.deleted == 1, info
        del info
        gc.collect()
        assert producer.deleted == 1

    def test_shape_refusal_later(self) -> None:
        producers = [Producer((2, 8, 3)), Producer((2, 8, 3, 16)), Producer((2, 8, 3, 16))]
        with pytest.raises(ValueError, match="q: shape"):
            build_problem(*(view(p, name) for p, name in zip(producers, "qkv", strict=True)))
        gc.collect()
        assert [p.deleted for p in producers] == [1, 1, 1]

    @pytest.mark.parametrize("error", [RuntimeError("launch failed"), KeyboardInterrupt()])
    def test_exception_while_the_view_is_used(self, error: BaseException) -> None:
        producer = Producer()

        def use() -> None:
            v = view(producer, "q")
            assert v.ptr
            raise error

        with pytest.raises(type(error)):
            use()
        error.__traceback__ = None
        gc.collect()
        assert producer.deleted == 1

    @pytest.mark.parametrize("step", ["describe", "take", "_set_name", "request_capsule"])
    @pytest.mark.parametrize("after", [False, True])
    def test_interrupt_between_steps(self, step: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        producer = Producer()
        original = getattr(dlpack, step)

        def interrupted(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(dlpack, step, original)
            if after:
                original(*arguments, **options)
            raise KeyboardInterrupt

        monkeypatch.setattr(dlpack, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            view(producer, "q")
        gc.collect()
        assert producer.exported == 0
        assert producer.deleted == len(producer.requests)
        assert len(producer.requests) == (0 if step == "request_capsule" and not after else 1)

    def test_writable_refusal(self) -> None:
        producer = Producer(flags=dlpack.FLAG_READ_ONLY)
        with pytest.raises(ValueError, match=r"^out: .*read-only"):
            view(producer, "out", writable=True)
        assert producer.deleted == 1


@pytest.mark.reliability(50)
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsule_passed_twice(version: tuple[int, int] | None) -> None:
    producer = Producer(version=version)
    capsule = producer.capsule()
    v = view(capsule, "q")
    assert v.shape == (2, 3)
    with pytest.raises(ValueError, match=r"^k: .*already consumed.*multiple times"):
        view(capsule, "k")
    with pytest.raises(ValueError, match="already consumed"):
        dlpack.take(capsule)
    del v, capsule
    assert producer.deleted == 1


@pytest.mark.reliability(49, 50)
def test_refused_capsule_of_the_user_stays_usable() -> None:
    producer = Producer(dtype=(3, 16))
    capsule = producer.capsule()
    with pytest.raises(UnsupportedError):
        view(capsule, "q")
    assert producer.deleted == 0
    del capsule
    assert producer.deleted == 1


@pytest.mark.reliability(52)
def test_read_only_flag() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    v = view(_host(array, flags=dlpack.FLAG_READ_ONLY), "q")
    assert v.readonly
    assert not as_numpy(v).flags.writeable
    with pytest.raises(ValueError, match=r"^dq: .*READ_ONLY"):
        view(_host(array, flags=dlpack.FLAG_READ_ONLY), "dq", writable=True)
    w = view(_host(array), "dq", writable=True)
    as_numpy(w)[1, 2] = 50.0
    assert array[1, 2] == 50.0


@pytest.mark.reliability(24)
def test_copy_made_for_the_export_is_no_output() -> None:
    assert view(Producer(flags=dlpack.FLAG_IS_COPIED), "q").shape == (2, 3)
    with pytest.raises(ValueError, match=r"^out: .*IS_COPIED"):
        view(Producer(flags=dlpack.FLAG_IS_COPIED), "out", writable=True)


@pytest.mark.reliability(53)
class TestHeader:
    def test_byte_offset(self) -> None:
        array = np.arange(12, dtype=np.float32)
        producer = _host(array)
        producer.shape, producer.byte_offset = (2, 3), 8
        np.testing.assert_array_equal(as_numpy(view(producer, "q")), array[2:8].reshape(2, 3))

    def test_null_strides_are_row_major(self) -> None:
        assert view(Producer((4, 5, 6)), "q").strides == (30, 6, 1)
        array = np.arange(6, dtype=np.float16).reshape(2, 3)
        np.testing.assert_array_equal(as_numpy(view(_host(array), "q")), array)

    def test_rank_zero(self) -> None:
        v = view(_host(np.array(7, np.int64)), "rng seed")
        assert (v.shape, v.strides, int(as_numpy(v)[()])) == ((), (), 7)

    @pytest.mark.parametrize("device", [(1, 0), (2, 0)])
    def test_null_data_without_elements(self, device: tuple[int, int]) -> None:
        v = view(Producer((2, 0, 3), data=None, byte_offset=16, device=device), "q", writable=True)
        assert (v.ptr, v.shape) == (0, (2, 0, 3))
        if device[0] == 1:
            assert as_numpy(v).shape == (2, 0, 3)

    def test_null_data_with_elements(self) -> None:
        with pytest.raises(ValueError, match=r"^q: .*\(2, 3\) without memory"):
            view(Producer(data=None), "q")

    @pytest.mark.parametrize(
        ("dtype", "lanes", "shown"),
        [
            ((2, 16), 2, "float .*2 lanes"),
            ((2, 16), 0, "float .*0 lanes"),
            ((10, 8), 1, "float8_e4m3fn .*code 10"),
            ((12, 8), 1, "float8_e5m2"),
            ((17, 4), 1, "float4_e2m1fn"),
            ((5, 64), 1, "complex"),
            ((0, 4), 1, "int .*code 0, 4 bits"),
            ((2, 8), 1, "float .*8 bits"),
            ((99, 16), 1, "unknown family .*code 99"),
        ],
    )
    def test_refused_element_types(self, dtype: tuple[int, int], lanes: int, shown: str) -> None:
        producer = Producer(dtype=dtype, lanes=lanes)
        with pytest.raises(UnsupportedError, match=f"^k: dtype {shown}.*float16, bfloat16, float32"):
            view(producer, "k")
        assert producer.deleted == 1

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [((4, 16), "bfloat16"), ((6, 8), "bool"), ((1, 8), "uint8"), ((0, 8), "int8"), ((0, 32), "int32")],
    )
    def test_accepted_element_types(self, dtype: tuple[int, int], name: str) -> None:
        assert view(Producer(dtype=dtype), "mask").dtype == name

    @pytest.mark.parametrize("ndim", [-1, 65, 1 << 30])
    def test_impossible_rank(self, ndim: int) -> None:
        with pytest.raises(ValueError, match=f"^q: malformed.*ndim is {ndim}"):
            view(Producer(ndim=ndim), "q")

    def test_shape_missing_or_negative(self) -> None:
        with pytest.raises(ValueError, match="malformed"):
            view(Producer((), ndim=2), "q")
        with pytest.raises(ValueError, match=r"^q: malformed.*\(2, -3\)"):
            view(Producer((2, -3)), "q")

    def test_misaligned_device_address(self) -> None:
        with pytest.raises(ValueError, match=r"^q: address 0x7f0000000001 .*2 bytes"):
            view(Producer(byte_offset=1), "q")


@pytest.mark.reliability(12)
def test_negative_strides() -> None:
    v = view(Producer(strides=(3, -1), byte_offset=64), "k", writable=True)
    assert (v.ptr, v.strides) == (BOGUS_POINTER + 64, (3, -1))
    # A dim of one element has no stride, whatever is written there.
    assert view(Producer((2, 1), strides=(1, -9)), "k").strides == (1, 0)


@pytest.mark.reliability(11)
def test_overlapping_output() -> None:
    for strides in ((0, 1), (1, 1), (2, 1)):
        assert view(Producer((4, 3), strides=strides), "q").strides == strides
        with pytest.raises(ValueError, match=r"^out: strides .*of shape \(4, 3\)"):
            view(Producer((4, 3), strides=strides), "out", writable=True)
    assert view(Producer((4, 3), strides=(1, 4)), "out", writable=True).strides == (1, 4)


@pytest.mark.reliability(54)
class TestDeviceType:
    @pytest.mark.parametrize(
        ("device", "shown"),
        [
            ((3, 0), r"kDLCUDAHost \(3\) device 0"),
            ((10, 2), r"kDLROCM \(10\) device 2"),
            ((14, 0), r"kDLOneAPI \(14\)"),
            ((77, 0), r"unknown \(77\)"),
        ],
    )
    def test_refused_before_the_export(self, device: tuple[int, int], shown: str) -> None:
        producer = Producer(device=device)
        with pytest.raises(ValueError, match=f"^q: .*{shown}.*Accepted: CPU"):
            view(producer, "q")
        assert producer.requests == []
        capsule = producer.capsule()
        with pytest.raises(ValueError, match=f"^q: .*{shown}"):
            view(capsule, "q")

    def test_managed_memory_asks_the_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[int] = []
        monkeypatch.setattr(tensors, "_device_of", lambda ptr: asked.append(ptr) or 1)
        assert view(Producer(device=(13, 0)), "q").device == ("cuda", 1)
        assert asked == [BOGUS_POINTER]
        assert view(Producer((0, 3), data=None, device=(13, 0)), "q").device == ("cuda", 0)

    def test_the_capsule_decides(self) -> None:
        producer = Producer(device=(2, 0))
        capsule = producer.capsule()
        producer.device = (2, 3)
        assert view(capsule, "q").device == ("cuda", 0)


class TestRefusedObjects:
    def test_proxy_without_a_capsule(self) -> None:
        class Proxy(Producer):
            def __dlpack__(self, **options: Any) -> Any:
                return np.zeros(3)

        with pytest.raises(TypeError, match=r"^q: .*Proxy.__dlpack__\(\) returned numpy.ndarray, not a DLPack capsule"):
            view(Proxy(), "q")

    def test_foreign_capsule(self) -> None:
        import datetime

        with pytest.raises(TypeError, match=r"^q: got .*PyCapsule"):
            view(datetime.datetime_CAPI, "q")

    @pytest.mark.parametrize("result", [None, 3, ("cuda", 0)])
    def test_bad_device_answer(self, result: object) -> None:
        producer = types.SimpleNamespace(__dlpack__=lambda **_: None, __dlpack_device__=lambda: result)
        with pytest.raises(ValueError, match=r"^q: .*__dlpack_device__\(\) failed"):
            view(producer, "q")

    def test_type_error_of_the_producer_is_not_hidden(self) -> None:
        with pytest.raises(ValueError, match=r"^q: .*TypeError: bad thing"):
            view(Producer(error=TypeError("bad thing")), "q")


@pytest.mark.reliability(57)
@pytest.mark.parametrize("device_type", [1, 2])
def test_ten_thousand_views_leave_nothing(device_type: int) -> None:
    array = np.zeros((2, 3), np.float16)
    producer = Producer(device=(device_type, 0), data=array.ctypes.data)

    def calls(count: int) -> None:
        for _ in range(count):
            v = view(producer, "q")
            if device_type == 1:
                as_numpy(v)
            producer.requests.clear()

    calls(100)
    gc.collect()
    before = len(gc.get_objects())
    calls(10_000)
    gc.collect()
    assert producer.deleted == 10_100
    assert producer.exported == 0
    assert len(gc.get_objects()) <= before + 10


@pytest.mark.reliability(58)
def test_exit_with_live_views(request: pytest.FixtureRequest) -> None:
    """No deleter runs while the interpreter goes down, and nothing is printed."""
    code = (
        "import atexit\n"
        "from dlpack_producer import Producer\n"
        "from nvrtc_attn.front import tensors\n"
        "producers = [Producer(version=v) for v in (None, (1, 0))]\n"
        "atexit.register(lambda: print('deleted', sum(p.deleted for p in producers)))\n"
        "alive = [tensors.view(p, 'q') for p in producers for _ in range(5)]\n"
        "cycle = [alive]; cycle.append(cycle)\n"
        "tensors.kept = alive\n"
    )
    paths = [str(request.config.rootpath), str(request.config.rootpath / "tests")]
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "deleted 0\n", "")


def test_shared_ctypes_prototypes_are_untouched() -> None:
    """Other libraries set argtypes on the same function objects of ctypes.pythonapi."""
    assert ctypes.pythonapi.PyCapsule_IsValid.argtypes is None
    assert ctypes.pythonapi.PyCapsule_SetName.argtypes is None
