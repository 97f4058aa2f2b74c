"""`ResultMemory`: where results go, with and without room in the pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from deepep_rt import EPOutOfMemoryError
from deepep_rt.backends.base import Call
from deepep_rt.backends.cuda.result_memory import Reservation, ResultMemory
from deepep_rt.cuda import captured_graph, driver
from deepep_rt.cuda.captured_graph import CapturedGraph
from deepep_rt.cuda.pool import Block
from deepep_rt.kernels.regions import align_up, arrange

BASE, STREAM, CALLERS = 1 << 30, 9, 1
REGIONS = arrange([("control", 256), ("landing", 4096), ("pool", 4096), ("sums", 2048)])
POOL, SUMS, LANDING = (REGIONS.offsets[name] for name in ("pool", "sums", "landing"))


class OtherMemory:
    """Memory outside of the pools. It records requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int | None]] = []
        self.is_empty = False

    def allocate(self, num_bytes: int, stream: int, reader: int | None) -> Any:
        if self.is_empty:
            raise EPOutOfMemoryError("the CUDA driver reports CUDA_ERROR_OUT_OF_MEMORY")
        self.asked.append((num_bytes, stream, reader))
        return SimpleNamespace(ptr=77)


class Gpu:
    def __init__(self) -> None:
        self.capturing: int | None = None
        self.copies: list[tuple[int, ...]] = []
        self.ended_calls: list[Call] = []
        self.outside = OtherMemory()

    def move_end(self, call: Call) -> None:
        self.ended_calls.append(call)

    def memory(self, copy_when_full: bool = True, growing: Any = None) -> ResultMemory:
        order: Any = SimpleNamespace(move_end=self.move_end)
        outside: Any = self.outside
        return ResultMemory(BASE, REGIONS, 2, order, outside, copy_when_full, growing=growing)


class Room:
    """Memory that a pool grows by, in units of 1024 bytes. It is full after 8 of them."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def add(self, num_bytes: int) -> tuple[int, int]:
        size = align_up(num_bytes, 1024)
        offset = next(
            at for at in range(1 << 16, 1 << 20, 1024) if not any(a < at + size and at < b for a, b in self.held.items())
        )
        if sum(end - begin for begin, end in self.held.items()) + size > 8 * 1024:
            raise EPOutOfMemoryError("rank 2: no room")
        self.held[offset] = offset + size
        return offset, size

    def remove(self, offset: int) -> None:
        del self.held[offset]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()

    class Nothing:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(driver, "CurrentContext", Nothing)
    monkeypatch.setattr(driver, "CudaEvent", Nothing)
    monkeypatch.setattr(captured_graph, "GraphEnd", lambda stream: SimpleNamespace(has_come=lambda: False))
    monkeypatch.setattr(driver, "is_capturing", lambda stream: stream == gpu.capturing)
    monkeypatch.setattr(driver, "copy_async", lambda *how: gpu.copies.append(how))
    return gpu


def call(capture: CapturedGraph | None = None) -> Call:
    return Call(STREAM, CALLERS, False, None, None, capture)


def place_and_streams(block: Any) -> tuple[int, tuple[int, ...]]:
    """Return a block's offset, and the streams that use it."""
    return block.ptr - BASE, block._streams


def test_results_go_to_cells_of_the_pool(gpu: Gpu) -> None:
    memory = gpu.memory()
    reserved = [memory.reserve(2000, call(), CALLERS) for _ in range(2)]
    assert [each.offset for each in reserved] == [POOL, POOL + 2048]
    assert [place_and_streams(each.block) for each in reserved] == [(POOL, (STREAM, CALLERS)), (POOL + 2048, (STREAM, CALLERS))]
    owner, ptr = memory.keep(reserved[1], 300, call(), CALLERS)
    assert (owner, ptr, owner.num_bytes) == (reserved[1].block, BASE + POOL + 2048, 512)
    assert (gpu.copies, gpu.ended_calls, gpu.outside.asked) == ([], [], [])


def test_a_full_pool_raises_or_copies(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    refusing = gpu.memory(copy_when_full=False)
    held = refusing.reserve(4096, call(), CALLERS)
    with pytest.raises(
        EPOutOfMemoryError, match=r"no room for a result of 2 MB \(0 MB of the pool are free\)\. Drop earlier results"
    ):
        refusing.reserve(2_000_000, call(), CALLERS)
    memory, caplog.handler.level = gpu.memory(), 0
    held = memory.reserve(4096, call(), None)
    with caplog.at_level("INFO", "deepep_rt"):
        for _ in range(2):
            assert memory.reserve(2000, made := call(), CALLERS) == Reservation(LANDING, None)
    assert [record.message for record in caplog.records] == [
        "the pool is full: results of dispatch are copied until earlier results are dropped; raise num_slots for room"
    ], "once"
    assert memory.keep(Reservation(LANDING, None), 300, made, CALLERS)[1] == 77
    assert gpu.outside.asked == [(300, STREAM, CALLERS)]
    assert gpu.copies == [(77, BASE + LANDING, 300, STREAM)]
    assert gpu.ended_calls == [made], "the next call writes to the same region, and waits for the copy"
    del held


def test_too_little_memory_for_a_copy(gpu: Gpu) -> None:
    """The rows have arrived. The other ranks do not know of this error."""
    gpu.outside.is_empty = True
    with pytest.raises(EPOutOfMemoryError) as caught:
        gpu.memory().keep(Reservation(LANDING, None), 300, call(), None)
    assert caught.value.call_made is True
    assert (gpu.copies, gpu.ended_calls) == ([], [])


def test_sums_use_their_own_pool_and_then_other_memory(gpu: Gpu) -> None:
    memory = gpu.memory()
    held = [memory.allocate_sums(1024, call()) for _ in range(2)]
    assert [place_and_streams(block) for block in held] == [(SUMS, (STREAM, CALLERS)), (SUMS + 1024, (STREAM, CALLERS))]
    held.append(memory.allocate_sums(1000, call()))
    assert (held[2].ptr, gpu.outside.asked) == (77, [(1000, STREAM, CALLERS)])


def test_sums_of_a_capture_also_use_the_pool_of_results(gpu: Gpu) -> None:
    """A capture cannot allocate."""
    memory, gpu.capturing = gpu.memory(), STREAM
    graph = CapturedGraph(5)
    held: list[Any] = [memory.allocate_sums(2048, call(graph)) for _ in range(3)]
    assert [place_and_streams(block) for block in held] == [(place, (STREAM, CALLERS)) for place in (SUMS, POOL, POOL + 2048)]
    full = r"the pool is full \(0 MB free\), and a captured CUDA graph cannot allocate; expected room in the pool\. Drop earlier results"
    for ask in (lambda: memory.allocate_sums(1024, call(graph)), lambda: memory.reserve(1024, call(graph), CALLERS)):
        with pytest.raises(EPOutOfMemoryError, match=full):
            ask()
    assert all(isinstance(block, Block) for block in held)
    assert gpu.outside.asked == []


def test_a_full_pool_grows(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    """Until there is no memory: then results are copied. It gives back what no result holds."""
    room = Room()
    memory, caplog.handler.level = gpu.memory(growing=room), 0
    with caplog.at_level("INFO", "deepep_rt"):
        held = [memory.reserve(4096, call(), None) for _ in range(3)]
        assert [each.offset for each in held] == [POOL, *room.held]
        assert memory.reserve(2000, call(), None) == Reservation(LANDING, None)
    assert sum("it grows by" in record.message for record in caplog.records) == 2
    assert "does not grow: rank 2: no room" in caplog.text
    assert (memory.use.capacity_bytes, memory.use.bytes_in_use) == (3 * 4096, 3 * 4096)
    assert memory.in_use() == [(BASE + POOL, 4096), *((BASE + at, 4096) for at in room.held)]
    assert memory.shrink() == 0
    owner, ptr = memory.keep(held.pop(), 300, call(), None)
    assert ptr == BASE + max(room.held)
    assert memory.shrink() == 0, "a part is in use"
    small = memory.reserve(2000, call(), None)
    assert small.offset > max(room.held), "the rest of that segment"
    del small, owner
    assert memory.shrink() == 4096
    assert len(room.held) == 1
    held.clear()
    assert memory.shrink() == 4096
    assert not room.held
    assert memory.use.capacity_bytes == 4096
    assert memory.reserve(4096, call(), None).offset == POOL


def test_which_memory_lies_in_the_pool(gpu: Gpu) -> None:
    """The pool, and segments that it has grown by and still has."""
    memory, last = gpu.memory(growing=Room()), POOL + 4096
    held = [memory.reserve(4096, call(), None) for _ in range(2)]
    segment = held[1].offset
    for offset, num_bytes in ((POOL, 4096), (POOL + 48, 512), (last - 16, 16), (segment, 4096), (segment + 2048, 2048)):
        assert memory.offset_in_pool(BASE + offset, num_bytes) == offset
    for offset, num_bytes in (
        (POOL - 16, 32),
        (last - 16, 32),
        (last, 16),
        (LANDING, 16),
        (SUMS, 16),
        (-BASE, 0),
        (segment, 4097),
    ):
        assert memory.offset_in_pool(BASE + offset, num_bytes) is None
    del held[1]
    memory.shrink()
    assert memory.offset_in_pool(BASE + segment, 16) is None


def test_captured_sums_take_memory_that_grows(gpu: Gpu) -> None:
    """A capture cannot allocate other memory."""
    room, capture = Room(), CapturedGraph(STREAM)
    memory, gpu.capturing = gpu.memory(growing=room), STREAM
    held = [memory.allocate_sums(2000, call(capture)) for _ in range(5)]
    assert len({block.ptr for block in held}) == 5
    assert room.held
    assert not gpu.outside.asked


def test_a_program_that_wants_an_error_gets_one(gpu: Gpu) -> None:
    room = Room()
    memory = gpu.memory(copy_when_full=False, growing=room)
    held = memory.reserve(4096, call(), CALLERS)
    with pytest.raises(EPOutOfMemoryError, match="no room for a result"):
        memory.reserve(300, call(), CALLERS)
    assert not room.held
    del held
