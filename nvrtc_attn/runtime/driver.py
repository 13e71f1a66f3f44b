"""The driver API as this package uses it: errors as exceptions, primary contexts, capture and fork detection.

Rules that every caller relies on:

* Nothing here runs at import. ``api()`` loads ``libcuda`` at first use and remembers the process.
* A child of ``fork`` inherits a driver that does not work there; every entry raises before it touches that driver.
* The primary context of a device is retained once and neither reset nor released: the framework beside us shares it.
* ``device_context`` leaves the calling thread's current context as it was found.
* After an error that destroys a context, every later call for that device raises ``DeviceFaultError`` with the first
  error.

Concurrency: the tables are written under ``_lock``; readers see whole entries.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

from ..base.errors import CudaError, DeviceFaultError, NotReadyError

SUCCESS: Final = 0
# The context cannot be used after these; cuda.h says the process must be relaunched. 214 and 220 are hardware faults.
STICKY_CODES: Final = frozenset({214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
# The image, not the device, is at fault: a damaged cache entry, or one for another GPU.
IMAGE_CODES: Final = frozenset({200, 209, 218, 222, 300, 301, 302, 303})
_HINTS: Final = {
    2: "free device memory, or reduce the batch",
    3: "CUDA was initialised before a fork: start workers with the 'spawn' or 'forkserver' method",
    35: "the installed NVIDIA driver is too old",
    100: "no CUDA device is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES; NumPy inputs run on the CPU",
    101: "no such device: check the ordinal and CUDA_VISIBLE_DEVICES",
    701: "the kernel needs more registers or shared memory than the device has left",
    803: "the NVIDIA kernel module and libcuda differ in version: reboot, or reinstall the driver",
    900: "a CUDA graph is being captured: call warmup() for this problem before the capture",
    901: "an earlier call broke the capture that is under way",
    906: "the legacy default stream was used during a capture: pass the capturing stream",
}

_api: Any = None
_lock = threading.RLock()
_contexts: dict[int, int] = {}
_faults: dict[int, CudaError] = {}
_forked_after_use = False


def _after_fork_in_child() -> None:
    global _api, _forked_after_use, _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here
    _forked_after_use = _forked_after_use or _api is not None
    _api = None  # whoever asks for it passes by the refusal


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def api() -> Any:
    """``cuda.bindings.driver`` after ``cuInit``.

    Raises
    ------
    CudaError
        There is no driver or no device, or this process was forked from one that had used CUDA.
    """
    return _api if _api is not None else _load()


def _refuse_fork() -> None:
    if _forked_after_use:
        raise CudaError(
            "this process was forked after nvrtc_attn had used CUDA in the parent; the driver does not work in such a "
            "child: start workers with multiprocessing's 'spawn' or 'forkserver' method",
            3,
            "CUDA_ERROR_NOT_INITIALIZED",
        )


def _load() -> Any:
    global _api
    _refuse_fork()
    with _lock:
        if _api is None:
            module, answer = _first_call("cuInit", 0)
            if int(answer[0]) != SUCCESS:
                raise _error(module, "cuInit", int(answer[0]))
            _api = module
    return _api


def _first_call(name: str, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
    """The bindings, and the answer of a function that a driver gives before ``cuInit``."""
    try:
        from cuda.bindings import driver as module

        return module, getattr(module, name)(*arguments)
    except Exception as error:  # loader errors differ between versions of cuda-bindings; all mean "no driver"
        raise CudaError(
            f"the NVIDIA driver is not usable: {error} Install a driver, or pass NumPy arrays to compute on "
            "the CPU; see `python -m nvrtc_attn doctor`.",
            100,
            "CUDA_ERROR_NO_DEVICE",
        ) from error


def _text(answer: tuple[Any, ...], default: str) -> str:
    if int(answer[0]) != SUCCESS or not answer[1]:
        return default
    return answer[1].decode() if isinstance(answer[1], bytes) else str(answer[1])


def _error(module: Any, call: str, code: int) -> CudaError:
    """The exception for ``code``, of the class that fits it."""
    try:
        result = module.CUresult(code)
        name = _text(module.cuGetErrorName(result), f"CUDA_ERROR_{code}")
        description = _text(module.cuGetErrorString(result), "")
    except ValueError:  # a newer driver's code
        name, description = f"CUDA_ERROR_{code}", ""
    message = f"{call}: {name} ({code})" + (f", {description}" if description else "")
    if code in STICKY_CODES:
        message += ". Raised by work that ran earlier on this device; the context is lost: restart the process"
        return DeviceFaultError(message, code, name)
    hint = _HINTS.get(code)
    return CudaError(f"{message}: {hint}" if hint else message, code, name)


def call(name: str, *arguments: Any, device: int | None = None) -> Any:
    """Call a driver function and return what follows the status: nothing, one value, or a tuple.

    ``device`` is the ordinal that a sticky error is charged to.
    """
    module = api()
    answer = getattr(module, name)(*arguments)
    code = int(answer[0])
    if code != SUCCESS:
        raise failure(name, code, device)
    return None if len(answer) == 1 else answer[1] if len(answer) == 2 else answer[1:]


def failure(name: str, code: int, device: int | None) -> CudaError:
    """The exception for a failed call; a sticky one is remembered for ``device``."""
    error = _error(api(), name, code)
    if code in STICKY_CODES and device is not None:
        with _lock:
            _faults.setdefault(device, error)
    return error


def check_device(device: int) -> None:
    """Raise ``DeviceFaultError`` if the context of ``device`` was lost earlier in this process."""
    fault = _faults.get(device)
    if fault is not None:
        raise DeviceFaultError(
            f"cuda:{device} is unusable since an earlier fault: {fault}. Restart the process.", fault.code, fault.name
        )


def driver_version() -> tuple[int, int]:
    """CUDA version that the installed driver supports, for example ``(13, 0)``. Known without any device."""
    _refuse_fork()
    if _api is not None:
        version = call("cuDriverGetVersion")
    else:
        module, (code, *values) = _first_call("cuDriverGetVersion")
        if int(code) != SUCCESS:
            raise _error(module, "cuDriverGetVersion", int(code))
        (version,) = values
    return int(version) // 1000, int(version) % 1000 // 10


def device_count() -> int:
    return int(call("cuDeviceGetCount"))


def primary_context(device: int) -> int:
    """Handle of the primary context of ``device``, retained for the life of the process."""
    api()  # raises in a forked child, whose table is the parent's
    context = _contexts.get(device)
    if context is None:
        with _lock:
            context = _contexts.get(device)
            if context is None:
                handle = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device), device=device)
                context = _contexts[device] = int(handle)
    return context


def current_context() -> int:
    """Handle of the calling thread's current context, 0 for none."""
    return int(call("cuCtxGetCurrent"))


def is_current(device: int, context: int) -> bool:
    """Whether ``context``, the primary one of ``device``, is current and sound: `device_context` had nothing to do.

    One call of the driver's and three look-ups, a quarter of what that context manager takes to find the same.
    """
    module = api()
    return device not in _faults and int(module.cuCtxGetCurrent()[1] or 0) == context


def adopt_context(device: int) -> None:
    """Make the primary context of ``device`` current in a thread that has none, and leave it so.

    For threads that a framework owns and has not used yet: libraries that it calls there later expect a context.
    """
    if current_context() == 0:
        call("cuCtxSetCurrent", primary_context(device), device=device)


class device_context:  # noqa: N801 - used as a statement: with device_context(0):
    """Make the primary context of ``device`` current, and restore what was current before.

    Where it is current already, entering costs one ``cuCtxGetCurrent`` (0.1 microseconds) and leaving nothing.
    """

    __slots__ = ("_pushed", "device")

    def __init__(self, device: int) -> None:
        self.device = device
        self._pushed = False

    def __enter__(self) -> device_context:
        check_device(self.device)
        context = primary_context(self.device)
        if current_context() != context:
            call("cuCtxPushCurrent", api().CUcontext(context), device=self.device)
            self._pushed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pushed:
            self._pushed = False
            answer = api().cuCtxPopCurrent()
            # After a fault the pop fails too, and would hide the exception that says why.
            if int(answer[0]) != SUCCESS and kind is None:
                raise failure("cuCtxPopCurrent", int(answer[0]), self.device)


def is_capturing(stream: int) -> bool:
    """Whether work on ``stream`` is being recorded into a CUDA graph.

    The legacy default stream (0) reports ``True`` while any blocking stream of the current context is captured, because
    using it then would break that capture. Legal during a capture; changes nothing.
    """
    module = api()
    answer = module.cuStreamIsCapturing(module.CUstream(stream))
    code = int(answer[0])
    if code == 906:  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        return True
    if code != SUCCESS:
        raise failure("cuStreamIsCapturing", code, None)
    return int(answer[1]) != 0


def refuse_capture(stream: int, what: str) -> None:
    """Raise `NotReadyError` if ``stream`` is captured.

    Call this before compiling, loading or allocating; ``what`` needs that.
    """
    if is_capturing(stream):
        raise NotReadyError(
            f"{what} is not ready and stream {stream:#x} is being captured into a CUDA graph, where nothing can be "
            "compiled, loaded or allocated: call warmup first (run the same call once before the capture)",
            900,
            "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        )


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Let this thread load, allocate and wait while another stream is captured, by any thread: that is not touched.

    A capture in the global mode, the default, otherwise refuses such calls in every thread, and breaks on the first.
    """
    module = api()
    relaxed = module.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        module.cuThreadExchangeStreamCaptureMode(before)


def record(stream: int, device: int) -> Any:
    """An event behind the work that is queued on ``stream``, whose context is current. Without a time, which costs."""
    event = call("cuEventCreate", int(api().CUevent_flags.CU_EVENT_DISABLE_TIMING), device=device)
    call("cuEventRecord", event, stream, device=device)
    return event


def device_of(address: int) -> int:
    """Ordinal of the GPU that the memory at ``address`` belongs to: managed memory does not tell. Needs no context."""
    attribute = api().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(call("cuPointerGetAttribute", attribute, address))


def read_memory(address: int, nbytes: int, device: int, stream: int) -> bytes:
    """``nbytes`` of device memory, after the work that is queued on ``stream``. Waits for it."""
    data = ctypes.create_string_buffer(nbytes)
    if nbytes:
        with device_context(device):
            call("cuStreamSynchronize", stream, device=device)
            call("cuMemcpyDtoH", ctypes.addressof(data), address, nbytes, device=device)
    return data.raw
