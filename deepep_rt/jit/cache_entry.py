"""An entry of the kernel cache as bytes: the metadata that is stored with the code, and the checks before it is used."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._documents import (
    MAX_COUNT,
    Check,
    UnusableFile,
    is_count,
    is_count_or_none,
    is_dict_of,
    is_flag,
    is_in,
    is_seconds,
    is_text,
    parse,
    wrong_fields,
)

FAMILY = b"deepep_rt kernel "
"""The start of the files of every version."""

MAGIC = FAMILY + b"2\n"
DIGEST_BYTES = 32
ARCH = re.compile(r"(sm|compute)_\d{2,3}[a-z]?", re.ASCII)
KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A compiled kernel and its metadata.

    Attributes:
        key: 64 hexadecimal digits: a hash of everything that determines the code.
        arch: Target, such as "sm_90".
        code: A cubin, or PTX.
        info: See `CompiledKernel.info`. `FIELDS` lists its members.
    """

    key: str
    arch: str
    code: bytes
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CorruptEntry:
    """A file that differs from the one that was written. The next request compiles the kernel again. `reason` is printable."""

    key: str
    arch: str
    reason: str


FIELDS: Mapping[str, Check] = {
    "kernel": lambda value: is_text(value) and value.isidentifier(),
    "arch": is_text,
    "constants": is_dict_of(is_in(-MAX_COUNT, MAX_COUNT)),
    "bytes": is_count,
    "registers": is_count_or_none,
    "static_shared_bytes": is_count_or_none,
    "stack_bytes": is_count_or_none,
    "spill_stores": is_count_or_none,
    "spill_loads": is_count_or_none,
    "dynamic_shared_bytes": is_count,
    "nvshmem": is_flag,
    "compile_seconds": is_seconds,
    "created": is_text,
    "versions": is_dict_of(is_text),
}
"""The members of `Entry.info`, and a check of each value."""


def pack(entry: Entry) -> bytes:
    """Return the file content of an entry: magic, checksum, length of the JSON object, the object (`info` and the key), the code."""
    text = json.dumps({**entry.info, "key": entry.key}, sort_keys=True).encode()
    body = len(text).to_bytes(8, "little") + text + entry.code
    return MAGIC + hashlib.sha256(body).digest() + body


def unpack(data: bytes, arch: str, key: str) -> Entry | CorruptEntry:
    """Read the file content of an entry, and compare it with the name of its file."""
    start = len(MAGIC) + DIGEST_BYTES
    if not data.startswith(MAGIC):
        return CorruptEntry(key, arch, "no entry of this version")
    if hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
        return CorruptEntry(key, arch, "wrong checksum")
    split = start + 8 + int.from_bytes(data[start : start + 8], "little")
    try:
        info = parse(data[start + 8 : split], dict)
    except UnusableFile:
        return CorruptEntry(key, arch, "its description is no JSON object")
    if info.keys() != {*FIELDS, "key"}:
        return CorruptEntry(key, arch, "its description has other fields")
    if wrong := wrong_fields(info, FIELDS):
        return CorruptEntry(key, arch, f"its description is wrong in {', '.join(wrong)}")
    code = data[split:]
    found, expected = (info.pop("key"), info["arch"], info["bytes"]), (key, arch, len(code))
    if found != expected:
        return CorruptEntry(key, arch, "it is the entry of another kernel")
    return Entry(key, arch, code, info)
