"""Entries of the kernel cache: an entry with another key, other contents or wrong metadata counts as corrupt."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from entries import KEY, OTHER, entry, file_of, reason

from deepep_rt.jit import cache as cache_module
from deepep_rt.jit.cache import KernelCache


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    """A cache with one entry."""
    cache = KernelCache(tmp_path / "cache")
    cache.put(entry())
    return cache


def rewrite(cache: KernelCache, text: bytes, code: bytes = b"code", length: int | None = None) -> None:
    """Replace the entry by one with this metadata and a valid checksum."""
    data = file_of(cache).read_bytes()
    body = (len(text) if length is None else length).to_bytes(8, "little") + text + code
    magic = data[: data.index(b"\n") + 1]
    file_of(cache).write_bytes(magic + hashlib.sha256(body).digest() + body)


def test_an_entry_under_another_key_is_corrupt(cache: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise `route` for 4 ranks could be loaded as `route` for 8."""
    shutil.copy(file_of(cache), file_of(cache, OTHER))
    assert cache.get("sm_90", OTHER) is None
    assert "it is the entry of another kernel" in caplog.text
    assert cache.get("sm_90", KEY) == entry()
    assert [type(found).__name__ for found in cache.entries()] == ["Entry", "CorruptEntry"]


def test_an_entry_of_another_architecture_is_corrupt(cache: KernelCache) -> None:
    (cache.folder / "sm_80").mkdir()
    shutil.copy(file_of(cache), file_of(cache, arch="sm_80"))
    assert cache.get("sm_80", KEY) is None


@pytest.mark.parametrize(
    ("kernel", "versions", "is_found"),
    [
        (None, None, True),
        ("tiny", {"nvrtc": "12.9.86"}, True),
        ("tiny", {"nvrtc": "12.9.86", "deepep_rt": "1.0"}, True),
        ("route", {"nvrtc": "12.9.86"}, False),
        ("tiny", {"nvrtc": "12.9.41"}, False),
        ("tiny", {"nvrtc": "12.9.86", "nvshmem": "3.4.5"}, False),
    ],
)
def test_kernel_and_versions_are_compared(
    cache: KernelCache, caplog: pytest.LogCaptureFixture, kernel: str | None, versions: dict[str, str] | None, is_found: bool
) -> None:
    found = cache.get("sm_90", KEY, kernel, versions)
    assert found == (entry() if is_found else None)
    assert ("it holds tiny built with" in caplog.text) == (not is_found)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff", b"[" * 100_000, b"1" * 5000, b"[]", b"3", b"null", b"{}", b'{"kernel": "tiny"}'],
    ids=lambda text: repr(text[:20]),
)
def test_an_entry_without_metadata_is_corrupt(cache: KernelCache, text: bytes) -> None:
    rewrite(cache, text)
    assert cache.get("sm_90", KEY) is None
    assert "its description" in reason(cache)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kernel", 3),
        ("kernel", "\x1b[31mred"),
        ("kernel", ""),
        ("kernel", "[red]"),
        ("arch", ["sm_90"]),
        ("constants", [1]),
        ("constants", {"kA": "one"}),
        ("constants", {"\x1b": 1}),
        ("bytes", -1),
        ("bytes", True),
        ("bytes", 10**400),
        ("compile_seconds", 10**400),
        ("registers", "ten"),
        ("spill_loads", 1.5),
        ("dynamic_shared_bytes", None),
        ("nvshmem", 1),
        ("compile_seconds", "long"),
        ("compile_seconds", float("inf")),
        ("created", "\x1b]0;title\x07"),
        ("created", "\u202eright to left"),
        ("versions", None),
        ("versions", {"nvrtc": 12}),
        ("versions", {"nvrtc": "12\x9b31m"}),
        ("more", 1),
    ],
)
def test_an_entry_with_a_wrong_field_is_corrupt(cache: KernelCache, name: str, value: Any) -> None:
    rewrite(cache, json.dumps({**entry().info, "key": KEY, name: value}).encode())
    assert cache.get("sm_90", KEY) is None
    assert "its description" in reason(cache)
    assert reason(cache).isprintable()


@pytest.mark.parametrize("name", [*entry().info, "key"])
def test_an_entry_needs_every_field(cache: KernelCache, name: str) -> None:
    rewrite(cache, json.dumps({field: value for field, value in {**entry().info, "key": KEY}.items() if field != name}).encode())
    assert reason(cache) == "its description has other fields"


def test_an_entry_with_a_wrong_length_is_corrupt(cache: KernelCache) -> None:
    text = json.dumps({**entry().info, "key": KEY}).encode()
    rewrite(cache, text, code=b"longer than the metadata says")
    assert reason(cache) == "it is the entry of another kernel"
    for length in (0, 2**64 - 1, len(text) - 1):
        rewrite(cache, text, length=length)
        assert reason(cache) == "its description is no JSON object"
    rewrite(cache, text)
    assert cache.get("sm_90", KEY) == entry()


def test_a_file_above_the_limit_is_corrupt(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    size = file_of(cache).stat().st_size
    monkeypatch.setattr(cache_module, "MAX_ENTRY_BYTES", size)
    assert cache.get("sm_90", KEY) == entry()
    monkeypatch.setattr(cache_module, "MAX_ENTRY_BYTES", size - 1)
    assert reason(cache) == f"it has more than {size - 1} bytes"
