"""Every exception and warning of the package. All of them survive pickling."""

from __future__ import annotations

from collections.abc import Sequence


class UnsupportedError(NotImplementedError, ValueError):
    """A request that no kernel serves. ``reasons`` lists every condition that was not met.

    Also a ``ValueError``: who catches bad arguments need not know which of them a later release could serve.
    """

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(reasons))
        self.reasons = tuple(reasons)

    def __str__(self) -> str:
        return "\n  - ".join([self.args[0], *self.reasons])


class TraceError(UnsupportedError):
    """A modifier that cannot be traced into a kernel; the message names the operation."""


def shown(value: object) -> str:
    """``repr(value)`` for a message: one line of at most 60 characters, whatever the object."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # also of an integer of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def missing(library: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """``error`` of the import of ``nvrtc_attn.<library>``, with what to install where the library itself is missing."""
    if error.name != library:
        return error
    return ModuleNotFoundError(
        f"nvrtc_attn.{library} needs {library}, which is not installed here. "
        f'Run: pip install "nvrtc-attn[cu13,{library}]" (or cu12, by the CUDA major of the driver)',
        name=library,
    )


class CompileError(RuntimeError):
    """NVRTC refused a kernel. Carries the whole ``log``, the generated ``source`` and the ``options``."""

    def __init__(self, message: str, log: str = "", source: str = "", options: Sequence[str] = ()) -> None:
        super().__init__(message, log, source, tuple(options))
        self.log, self.source, self.options = log, source, tuple(options)

    def __str__(self) -> str:
        return str(self.args[0])


class CudaError(RuntimeError):
    """The driver refused a call. ``code`` and ``name`` are the driver's."""

    def __init__(self, message: str, code: int = 0, name: str = "") -> None:
        super().__init__(message, code, name)
        self.code, self.name = code, name

    def __str__(self) -> str:
        return str(self.args[0])


class NotReadyError(CudaError):
    """A kernel would have to be compiled or loaded while the stream is captured into a CUDA graph. Nothing was done."""


class DeviceFaultError(CudaError):
    """The context was already broken by an earlier fault: only a new process helps."""


class CacheWarning(UserWarning):
    """The disk cache is not used, and why."""
