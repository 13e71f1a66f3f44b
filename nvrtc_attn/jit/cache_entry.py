"""What is in a file of the disk cache: a kernel, or a choice that was measured, under a key.

::

    b"NVAT"  u16 schema  u16 flags  u32 header_len  u64 payload_len      little endian
    header   JSON: the key and what is known of the kernel
    payload  the cubin
    sha256   over everything before it
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MAGIC: Final = b"NVAT"
SCHEMA: Final = 1
TUNED: Final = "autotune"
"""What stands for the kernel's name in the metadata of a choice that was measured; such an entry has no payload."""
_HEAD: Final = struct.Struct("<4sHHIQ")
_DIGEST_BYTES: Final = 32


class Entry(NamedTuple):
    """A cubin and what is recorded about it."""

    code: bytes
    metadata: dict[str, Any]


def encode_entry(key: str, metadata: Mapping[str, Any], code: bytes) -> bytes:
    """The bytes of an entry file."""
    header = json.dumps({**metadata, "key": key}, sort_keys=True, separators=(",", ":")).encode()
    body = _HEAD.pack(MAGIC, SCHEMA, 0, len(header), len(code)) + header + code
    return body + hashlib.sha256(body, usedforsecurity=False).digest()


def decode_entry(data: bytes, key: str) -> Entry:
    """Check and take apart an entry file.

    Raises
    ------
    ValueError
        It is not a whole entry for ``key``; the message says why.
    """
    if len(data) < _HEAD.size + _DIGEST_BYTES:
        raise ValueError(f"truncated: {len(data)} bytes")
    magic, schema, flags, header_len, payload_len = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("not a kernel cache entry")
    if schema != SCHEMA or flags != 0:
        raise ValueError(f"schema {schema} flags {flags}, this version reads schema {SCHEMA} flags 0")
    end = _HEAD.size + header_len + payload_len
    if end + _DIGEST_BYTES != len(data):
        raise ValueError(f"length {len(data)}, the head says {end + _DIGEST_BYTES}")
    view = memoryview(data)
    if hashlib.sha256(view[:end], usedforsecurity=False).digest() != data[end:]:
        raise ValueError("checksum mismatch")
    try:
        metadata = json.loads(bytes(view[_HEAD.size : _HEAD.size + header_len]))
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not isinstance(metadata, dict):
        raise ValueError(f"the header is no JSON object but {type(metadata).__name__}")
    if metadata.get("key") != key:
        raise ValueError(f"it is the entry of key {metadata.get('key')}")
    for name in ("kernel", "arch", "log"):
        if not isinstance(metadata.get(name, ""), str):
            raise ValueError(f"the header's {name} is no text")
    # A float, or an integer that is one exactly: float(10**400) raises.
    milliseconds = metadata.get("compile_ms", 0.0)
    if not isinstance(milliseconds, float) and not (isinstance(milliseconds, int) and abs(milliseconds) < 1 << 53):
        raise ValueError("the header's compile_ms is no number")
    return Entry(bytes(view[_HEAD.size + header_len : end]), metadata)
