"""Memory of one GPU that sleeps at its addresses, on a machine without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from virtual_gpu import UNIT, VirtualGpu, words

from deepep_rt import EPOutOfMemoryError
from deepep_rt.cuda import driver, local_heap, virtual_memory
from deepep_rt.cuda.local_heap import LocalHeap, SavedMemory
from deepep_rt.cuda.slots import Slots


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> VirtualGpu:
    made = VirtualGpu()
    monkeypatch.setattr(virtual_memory, "driver", made)
    monkeypatch.setattr(driver, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "relaxed_capture_mode", contextlib.nullcontext)
    monkeypatch.setattr(driver, "copy_async", lambda to, source, num_bytes, stream: ctypes.memmove(to, source, num_bytes))
    monkeypatch.setattr(driver, "synchronize", lambda stream: None)
    monkeypatch.setattr(driver, "CurrentContext", contextlib.nullcontext)
    monkeypatch.setattr(driver, "is_capturing", lambda stream: True)  # so that a slot records no event
    return made


def test_parts_of_any_size(gpu: VirtualGpu) -> None:
    """They are aligned and do not overlap. Small ones share a chunk."""
    heap, held = LocalHeap(), []
    for number, num_bytes in enumerate([1, 300, UNIT // 2, UNIT, 3 * UNIT + 8, 0, 40, UNIT - 256, 5] * 3):
        address = heap.allocate(num_bytes)
        assert address % 256 == 0
        words(address, num_bytes // 4 * 4)[:] = number
        held.append((address, num_bytes, number))
    assert all((words(address, num_bytes // 4 * 4) == number).all() for address, num_bytes, number in held)
    total = sum(num_bytes for _, num_bytes, _ in held)
    assert sum(chunk.num_bytes for chunk in heap._chunks) < 2 * total
    heap.free()
    assert gpu.left == (0, 0, 0)


def test_it_sleeps_at_its_addresses(gpu: VirtualGpu) -> None:
    heap = LocalHeap()
    slots = Slots(1000, 3, heap)
    first, second = slots.acquire(1), slots.acquire(1)
    words(first.ptr, 1000)[:], words(second.ptr, 1000)[:] = 11, 22
    assert sorted(slots.in_use()) == sorted([(first.ptr, 1000), (second.ptr, 1000)])
    free = next(ptr for ptr in slots._memory if ptr not in (first.ptr, second.ptr))
    saved = SavedMemory(slots.in_use())
    for _ in range(3):
        heap.sleep()
        assert gpu.left[2] == 0, "nothing is mapped"
        heap.wake()
        words(free, 1000)[:] = 7
        assert not (words(first.ptr, 1000) == 11).all(), "fresh memory"
        saved.restore()
        assert (words(first.ptr, 1000) == 11).all()
        assert (words(second.ptr, 1000) == 22).all()
        assert (words(free, 1000) == 7).all()
    slots.destroy()
    heap.free()
    assert gpu.left == (0, 0, 0)


def test_too_little_memory(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the middle of waking. Nothing stays mapped, and the heap wakes when there is memory."""
    heap = LocalHeap()
    held = [heap.allocate(UNIT) for _ in range(3)]
    left = gpu.left
    gpu.num_bytes = 3 * UNIT
    with pytest.raises(EPOutOfMemoryError):
        heap.allocate(UNIT)
    assert gpu.left == left
    heap.sleep()
    gpu.num_bytes = 2 * UNIT
    with pytest.raises(EPOutOfMemoryError):
        heap.wake()
    assert (gpu.left[0], gpu.left[2]) == (0, 0)
    gpu.num_bytes = 3 * UNIT
    heap.wake()
    words(held[2], UNIT)[:] = 1
    heap.sleep()
    heap.free()
    assert gpu.left == (0, 0, 0)

    def full(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(local_heap.np, "empty", full)
    with pytest.raises(EPOutOfMemoryError, match=r"host memory does not suffice to keep 2 MB.*keep_results=False"):
        SavedMemory([(0, 2_000_000)])
