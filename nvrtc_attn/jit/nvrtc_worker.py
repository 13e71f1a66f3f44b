"""What runs in a compiler process: NVRTC through ctypes, one request after another from a pipe.

`compiler_process` starts this file with ``python -I -S``. It imports five small modules of the standard library and
nothing of this package, so that a worker is ready after 30 ms of processor time (``cuda.bindings.nvrtc`` alone takes
60).

A message is a number of byte strings, each after its length. The worker answers a request of (library, arch, name,
source, option, ...) with (status, name of the status, log, cubin, known architectures); its first message is `HELLO`.
It ends when its standard input ends, when its parent is another process than at the start, and when it had nothing to
do for as long as its first argument says. The second, if any, is a directory for precompiled headers.

Concurrency: the main thread compiles, a second one watches the parent, because NVRTC cannot be interrupted.
"""

from __future__ import annotations

import ctypes
import os
import struct

HELLO = b"nvrtc_attn worker 1"
UNKNOWN_ARCH = -1
"""Status of a request for an architecture that NVRTC does not list."""


def compile_program(
    library: str, arch: str, name: bytes, source: bytes, options: list[bytes]
) -> tuple[int, bytes, bytes, bytes, bytes]:
    """(status, its name, log, cubin, known architectures); the cubin is empty unless the status is 0.

    Raises
    ------
    OSError
        ``library`` cannot be loaded.
    """
    nvrtc = ctypes.CDLL(library)
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    # The wheels of 13.0 have no search path for the library of builtins: NVRTC finds what is loaded.
    builtins = os.path.join(os.path.dirname(library), f"libnvrtc-builtins.so.{major.value}.{minor.value}")
    if os.path.exists(builtins):
        ctypes.CDLL(builtins, ctypes.RTLD_GLOBAL)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    number = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(number))
    archs = (ctypes.c_int * number.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    known = b" ".join(b"%d" % arch for arch in archs)
    digits = arch[3:-1] if arch[-1:] in ("a", "f") else arch[3:]
    if arch[:3] != "sm_" or not digits.isdigit() or int(digits) not in archs:
        return UNKNOWN_ARCH, b"", b"", b"", known
    program = ctypes.c_void_p()

    def read(get_size: str, get: str) -> tuple[int, bytes]:
        size = ctypes.c_size_t()
        status = getattr(nvrtc, get_size)(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        return status or getattr(nvrtc, get)(program, buffer), buffer.raw

    if b"--pch" in options:
        PrecompiledHeaders.make_room(nvrtc)
    log = cubin = b""
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    if status == 0:
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = read("nvrtcGetProgramLogSize", "nvrtcGetProgramLog")[1]
        if status == 0:
            status, cubin = read("nvrtcGetCUBINSize", "nvrtcGetCUBIN")
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, nvrtc.nvrtcGetErrorString(status) or b"", log, b"" if status else cubin, known


class PrecompiledHeaders:
    """Options by which a compile reads what an earlier one of this process wrote about the same headers.

    A file belongs to the process that wrote it: NVRTC compares the address of its heap. It is worth its 250 to 300 MB
    from the third kernel with the same first lines and options on, whose compile then takes 40 % less
    (docs/experiments.md).
    """

    MAX_FILES = 3
    """The kernels of one problem that take long: the forward pass, and up to two of the backward pass."""
    MIN_SECONDS = 0.3
    """Of a kind's first compile. Small kernels take 0.1 to 0.2, with a file and without: they have none."""
    HEAP_BYTES = 512 << 20
    """What a file is made from, 256 MB by default. NVRTC 13.5 needs 293 for CuTe's headers, and writes none in less."""
    _has_room = False

    def __init__(self, directory: str) -> None:
        self._directory = os.path.join(directory, str(os.getpid())) if directory else ""
        self._seen: list[tuple[bytes, ...]] = []
        """What names a file of each of the last kernels, the latest last."""

    def options(self, source: bytes, options: list[bytes]) -> list[bytes]:
        """Further options of a compile; none for the first one of its kind."""
        if not self._directory:
            return []
        key = self._kind(source, options)
        if key not in self._seen:
            return []
        place = self._place(key)
        os.makedirs(place, exist_ok=True)
        return [b"--pch", b"--pch-dir=" + os.fsencode(place)]

    def compiled(self, source: bytes, options: list[bytes], seconds: float) -> None:
        """Remember the kind of a compile that took ``seconds`` of processor time, if it is worth a file."""
        if not self._directory:
            return
        key = self._kind(source, options)
        known = key in self._seen
        if seconds < self.MIN_SECONDS and not known:
            return
        if known:
            self._seen.remove(key)
        self._seen.append(key)
        for forgotten in self._seen[: -self.MAX_FILES]:
            self._remove(self._place(forgotten))
        del self._seen[: -self.MAX_FILES]

    @classmethod
    def make_room(cls, nvrtc: ctypes.CDLL) -> None:
        """Before the first file: a file is of no use once the heap is another."""
        if not cls._has_room:
            cls._has_room = True
            nvrtc.nvrtcSetPCHHeapSize(ctypes.c_size_t(cls.HEAP_BYTES))

    def close(self) -> None:
        """Remove the files of this process."""
        for key in self._seen:
            self._remove(self._place(key))
        if self._directory:
            self._remove(self._directory)

    @staticmethod
    def without_remarks(log: bytes) -> bytes:
        """The log of a compile as it is without these options."""
        return b"\n".join(line for line in log.split(b"\n") if b"precompiled header" not in line)

    @staticmethod
    def _kind(source: bytes, options: list[bytes]) -> tuple[bytes, ...]:
        first_lines = source[: source.find(b"\n", source.find(b"#include"))]
        return (first_lines, *options, *map(PrecompiledHeaders._stamp, options))

    @staticmethod
    def _stamp(option: bytes) -> bytes:
        """When files of the device code were written last, if ``option`` names their directory.

        NVRTC reads an old file where a header was changed within a second and has its size still.
        """
        _, found, root = option.partition(b"--include-path=")
        own = os.path.join(root, b"nvrtc_attn") if found else b""
        if not own or not os.path.isdir(own):
            return b""
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(own) for name in sorted(names)]
        return b"%d" % max((os.stat(path).st_mtime_ns for path in paths), default=0)

    def _place(self, key: tuple[bytes, ...]) -> str:
        return os.path.join(self._directory, f"{hash(key):x}")

    @staticmethod
    def _remove(place: str) -> None:
        try:
            for name in os.listdir(place):
                os.unlink(os.path.join(place, name))
            os.rmdir(place)
        except OSError:  # it was never made, or somebody else has removed it
            pass


def send(descriptor: int, fields: list[bytes]) -> None:
    """Write one message."""
    parts = [struct.pack("<Q", len(fields))]
    for field in fields:
        parts += [struct.pack("<Q", len(field)), field]
    view = memoryview(b"".join(parts))
    while view:
        view = view[os.write(descriptor, view) :]


def receive(descriptor: int) -> list[bytes]:
    """Read one message.

    Raises
    ------
    EOFError
        The other end is closed.
    """

    def exactly(size: int) -> bytes:
        parts = []
        while size:
            part = os.read(descriptor, min(size, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def number() -> int:
        value: int = struct.unpack("<Q", exactly(8))[0]
        return value

    return [exactly(number()) for _ in range(number())]


def _watch(poll: object, parent: int, precompiled: PrecompiledHeaders) -> None:
    """End the process, also in the middle of a compile, when the parent is gone.

    A fork of the parent may hold the pipe open, so its end is not waited for alone.
    """
    while not poll.poll(1000) and os.getppid() == parent:  # type: ignore[attr-defined]
        pass
    precompiled.close()
    os._exit(0)


def main(idle_seconds: float, directory: str = "") -> None:
    """Serve requests from descriptor 0 until there are no more; ``directory``: for precompiled headers."""
    import _signal  # type: ignore[import-not-found]  # without the enumerations of signal, which take 5 ms
    import _thread
    import resource
    import select

    parent = os.getppid()
    precompiled = PrecompiledHeaders(directory)
    # A scheduler signals every process of a job. The parent decides what a signal means; SIGKILL is what ends a worker.
    names = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "TSTP", "TTIN", "TTOU")
    _signal.pthread_sigmask(_signal.SIG_SETMASK, [getattr(_signal, "SIG" + name) for name in names])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")  # the kernel ends a compile rather than the user's program
    except OSError:
        pass
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    hang_up = select.poll()
    hang_up.register(0, 0)
    _thread.start_new_thread(_watch, (hang_up, parent, precompiled))
    send(answers, [HELLO])
    while select.select([0], [], [], idle_seconds)[0]:
        try:
            library, arch, name, source, *options = receive(0)
        except EOFError:
            break
        further = precompiled.options(source, options)
        began = os.times()
        try:
            status, *fields = compile_program(os.fsdecode(library), arch.decode(), name, source, [*options, *further])
        except OSError as error:
            status, fields = 1, [b"the library cannot be loaded", str(error).encode(errors="replace"), b"", b""]
        took = os.times()
        precompiled.compiled(source, options, took.user + took.system - began.user - began.system)
        if further:
            fields[1] = precompiled.without_remarks(fields[1])
        send(answers, [b"%d" % status, *fields])
    precompiled.close()


if __name__ == "__main__":
    import sys

    main(float(sys.argv[1]), *sys.argv[2:])
