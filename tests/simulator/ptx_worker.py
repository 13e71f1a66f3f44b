"""What runs in the process that makes PTX: NVRTC, one request after another, reading headers once where it may.

`gpu.compile_to_ptx` starts this file with the directory of the package's `nvrtc_worker`, whose messages and precompiled
headers it has, and a directory for those, or "". A request is (library, name, source, option, ...), the answer
(status, PTX or log).
"""

from __future__ import annotations

import ctypes
import os
import sys

sys.path.insert(0, sys.argv[1])

import nvrtc_worker


class PrecompiledHeaders(nvrtc_worker.PrecompiledHeaders):
    """Of kernels of random problems, which are of many kinds in turn."""

    MAX_FILES = 8


def compile_program(nvrtc: ctypes.CDLL, name: bytes, source: bytes, options: list[bytes]) -> tuple[int, bytes]:
    """(status, PTX or log)."""
    program = ctypes.c_void_p()
    if b"--pch" in options:
        PrecompiledHeaders.make_room(nvrtc)

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw.rstrip(b"\0")

    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name, 0, None, None)
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    text = read("ProgramLog" if status else "PTX")
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, text


def load(library: str) -> ctypes.CDLL:
    nvrtc = ctypes.CDLL(library)
    folder = os.path.dirname(library)
    for found in os.listdir(folder):
        if found.startswith("libnvrtc-builtins.so."):
            ctypes.CDLL(os.path.join(folder, found), ctypes.RTLD_GLOBAL)
    return nvrtc


def main(directory: str) -> None:
    precompiled = PrecompiledHeaders(directory)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is no answer
    libraries: dict[bytes, ctypes.CDLL] = {}
    while True:
        try:
            library, name, source, *options = nvrtc_worker.receive(0)
        except EOFError:
            break
        if library not in libraries:
            libraries[library] = load(os.fsdecode(library))
        further, began = precompiled.options(source, options), os.times()
        status, text = compile_program(libraries[library], name, source, [*options, *further])
        took = os.times()
        precompiled.compiled(source, options, took.user + took.system - began.user - began.system)
        nvrtc_worker.send(answers, [b"%d" % status, text])
    precompiled.close()


if __name__ == "__main__":
    main(sys.argv[2])
