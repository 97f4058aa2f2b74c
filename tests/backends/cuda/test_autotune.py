"""`Buffer.autotune` and Buffers that use its choice, on a fake GPU that records launches. The test decides their times."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import FakeCommunicator, FakeGpu, arguments, fake, make, region, routed

from deepep_rt import (
    Buffer,
    EPCacheError,
    EPConfigError,
    EPInputError,
    EPOutOfMemoryError,
    EPTimeoutError,
    EPUnavailableError,
    Tuning,
    _env,
)
from deepep_rt.backends import saved_tunings
from deepep_rt.backends.cuda import autotune
from deepep_rt.cuda import driver
from deepep_rt.kernels.tuning import shapes_to_try

__all__ = ["fake", "make"]

ROWS = 24
SIZES: dict[str, Any] = dict(hidden=2048)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of stored choices, which does not exist yet."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    for name in ("DEEPEP_RT_TUNING", "DEEPEP_RT_ASSERT_CACHED", "DEEPEP_RT_SHARE_GPUS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "tunings"


@pytest.fixture
def times(fake: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let `times.of(call, num_sms, shape)` decide the microseconds of a call. `times.built` has the kernels that were compiled."""
    found = SimpleNamespace(of=lambda call, num_sms, shape: 100.0 + 1000 / num_sms, built=[], measured=0, last=None)
    waiting: list[bool] = []

    def loop_ms(begin: Any, end: Any) -> float:
        launches = [call for call in fake.pop_launches() if call.kernel in ("dispatch", "combine")]
        assert len({(call.kernel, call.blocks) for call in launches}) == 1
        assert waiting.pop()
        found.measured += 1
        return (len(launches) - 1) * found.of(launches[0].kernel, launches[0].blocks, found.last) / 1e3

    real = autotune._loop_ms

    def noted(runtime: Any, trial: Any, gate: Any, num_calls: int) -> float:
        found.last = trial.shape
        fake.pop_launches()
        return real(runtime, trial, gate, num_calls)

    monkeypatch.setattr(autotune, "NUM_SMS", (8, 12, 16, 32, 48, 64))  # the fake GPU takes its time for each launch
    monkeypatch.setattr(autotune, "_MOST_CALLS", autotune._FEWEST_CALLS)
    monkeypatch.setattr(driver, "elapsed_ms", loop_ms)
    monkeypatch.setattr(driver, "wait_value", lambda stream, address, value: waiting.append(True))
    monkeypatch.setattr(autotune, "_loop_ms", noted)
    monkeypatch.setattr(autotune.build, "build", lambda kernel, constants, arch: found.built.append((kernel.name, constants)))
    return found


def _tune(fake: FakeGpu, buffer: Buffer, **given: Any) -> Any:
    fake.on_launch = routed(buffer, ROWS, [3] * 8)
    result = buffer.autotune(**given)
    fake.on_launch = lambda call: None
    fake.pop_launches()
    return result


def _blocks(fake: FakeGpu, buffer: Buffer) -> tuple[int, int]:
    """Return the blocks of the next dispatch and combine."""
    fake.on_launch = routed(buffer, ROWS, [3] * 8)
    fake.pop_launches()
    sent = buffer.dispatch(*arguments(fake, hidden=2048))
    buffer.combine(sent.recv_x, sent.handle)
    fake.on_launch = lambda call: None
    blocks = {call.kernel: call.blocks for call in fake.pop_launches()}
    return blocks["dispatch"], blocks["combine"]


def _constants(fake: FakeGpu, kernel: str) -> dict[str, int]:
    """Return the constants of the kernel of this name that was loaded last."""
    return [constants for found, constants in fake.constants.values() if found.name == kernel][-1]


def test_an_interruption_breaks_the_buffer(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    """The other ranks have made another number of calls by then."""

    def interrupt(call: Any) -> None:
        act(call)
        if call.kernel == "combine":
            raise KeyboardInterrupt

    with make(**SIZES) as buffer:
        act = routed(buffer, ROWS, [3] * 8)
        fake.on_launch = interrupt
        with pytest.raises(KeyboardInterrupt):
            buffer.autotune()
        with pytest.raises(EPTimeoutError, match="KeyboardInterrupt interrupted a call of rank 0"):
            buffer.dispatch(*arguments(fake, hidden=2048))


def test_the_choice_is_used_at_once_and_by_later_buffers(fake: FakeGpu, make: Any, times: SimpleNamespace, folder: Path) -> None:
    with make(**SIZES) as buffer:
        shape = shapes_to_try("dispatch", buffer.config, True)[1]
        times.of = lambda call, sms, its: (50.0 if sms >= 32 else 100.0) * (0.8 if (call, its) == ("dispatch", shape) else 1.0)
        assert buffer.num_sms == 24
        result = _tune(fake, buffer)
        assert result.chosen == Tuning(32, dispatch=shape)
        assert (buffer.num_sms, _blocks(fake, buffer)) == (32, (32, 32))
        assert _constants(fake, "dispatch")["kDispatchStages"] == shape.stages
        assert buffer.describe().tuning == str(result.chosen)
        assert result.file == str(next(folder.iterdir()))
    with make(**SIZES) as later:
        assert (later.num_sms, later.config.num_sms, _blocks(fake, later)) == (32, 32, (32, 32))
        assert _constants(fake, "dispatch")["kStageBytes"] == shape.copy_bytes + 128
        assert _constants(fake, "combine")["kCombineStages"] == 6, "the usual shape"
        assert "32 SMs" in str(later.describe())
    with make(hidden=1024) as other:
        assert (other.num_sms, other.describe().tuning) == (24, "")


def test_a_number_of_the_program_wins(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    """Passed, or set. The shapes of the choice are used with it."""
    times.of = lambda call, sms, its: 50.0
    with make(**SIZES, num_sms=20) as buffer:
        assert _tune(fake, buffer).chosen.num_sms == 8
        assert buffer.num_sms == 20
    with make(**SIZES, num_sms=20) as later:
        assert later.num_sms == later.config.num_sms == 20
    with make(**SIZES) as later:
        assert later.num_sms == 8
        later.num_sms = 16
        _tune(fake, later)
        assert (later.num_sms, _blocks(fake, later)) == (16, (16, 16))


def test_the_number_of_sms_is_compared_between_ranks() -> None:
    """A rank that passes 24 and one that leaves it to a stored choice would have different numbers."""
    from deepep_rt.config import Config

    sizes = dict(num_ranks=4, num_max_tokens_per_rank=64, hidden=256, num_topk=4, num_experts=32, timeout_s=1.0)
    passed, left = Config(**sizes, num_sms=24), Config(**sizes, leaves_sms=True)
    assert (passed.settings()["num_sms"], left.settings()["num_sms"]) == (24, None)
    assert passed.settings().keys() == left.settings().keys()


def test_every_rank_uses_the_choice_of_rank_0(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """Also if it has another file. Rank 0 alone reads, and what it gathers with the others' memory counts."""
    with make(**SIZES) as buffer:
        _tune(fake, buffer)
        shape = shapes_to_try("combine", buffer.config, True)[0]
    theirs = saved_tunings.plain(Tuning(12, combine=shape))
    real = FakeCommunicator.allgather

    def allgather(self: Any, value: Any) -> list[Any]:
        is_memory = isinstance(value, tuple) and len(value) == 3 and value[1] == "sm_90"
        return [(*value[:2], theirs), *[value] * 3] if is_memory else real(self, value)

    monkeypatch.setattr(FakeCommunicator, "allgather", allgather)
    monkeypatch.setattr(FakeCommunicator, "Get_rank", lambda self: 1)
    monkeypatch.setattr(saved_tunings, "load", lambda *_: pytest.fail("rank 1 read a file"))
    with make(**SIZES) as later:
        assert later.num_sms == 12
        assert later._backend.runtime.shapes == {"combine": shape}


def test_a_damaged_file_is_no_error(
    fake: FakeGpu, make: Any, times: SimpleNamespace, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(**SIZES) as buffer:
        _tune(fake, buffer)
    (file,) = folder.iterdir()
    file.write_text(file.read_text()[:-20])
    with make(**SIZES) as later:
        assert later.num_sms == 24
    assert f"{file} is ignored" in caplog.text


def test_the_variable_turns_stored_choices_off(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(**SIZES) as buffer:
        chosen = _tune(fake, buffer).chosen.num_sms
    assert chosen != 24
    with _env.without_tunings(), make(**SIZES) as later:
        assert (later.num_sms, later._backend.runtime.shapes) == (24, {})
    assert "DEEPEP_RT_TUNING" not in os.environ
    monkeypatch.setenv("DEEPEP_RT_TUNING", "perhaps")
    with pytest.raises(EPConfigError, match="DEEPEP_RT_TUNING='perhaps'; expected 0 or 1"):
        make(**SIZES)
    monkeypatch.setenv("DEEPEP_RT_TUNING", "1")
    with make(**SIZES) as later:
        assert later.num_sms == chosen


def test_every_candidate_is_measured(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    with make(**SIZES) as buffer:
        rows = _tune(fake, buffer).rows
        for call in ("dispatch", "combine"):
            shapes = [None, *shapes_to_try(call, buffer.config, True)]
            assert {(row.num_sms, row.shape) for row in rows if row.call == call} == {
                (sms, shape) for sms in autotune.NUM_SMS for shape in shapes
            }
        assert len(times.built) == len({(row.call, row.shape) for row in rows if row.shape})


def test_slow_candidates_are_left_out_after_some_rounds(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    """The usual shape stays, because the choice prefers it to one that is hardly faster."""
    counted: dict[Any, int] = {}

    def of(call: str, sms: int, shape: Any) -> float:
        counted[call, sms, shape] = counted.get((call, sms, shape), 0) + 1
        return 100.0 if shape is None else 50.0 if shape.warps == 1 else 80.0

    times.of = of
    with make(**SIZES) as buffer:
        _tune(fake, buffer)
    rounds = {shape: number for (call, sms, shape), number in counted.items() if (call, sms) == ("dispatch", 16)}
    most = autotune._MOST_ROUNDS
    assert {number for shape, number in rounds.items() if shape is None or shape.warps == 1} == {most}
    assert {number for shape, number in rounds.items() if shape and shape.warps > 1} == {autotune._FIRST_ROUNDS}


def test_the_slowest_rank_and_the_median_count(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 2 is slow with many SMs. One round of all is disturbed."""
    real, rounds = FakeCommunicator.allgather, []

    def allgather(self: Any, value: Any) -> list[Any]:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], list):
            rounds.append(len(value[0]))
            if len(rounds) == 2:
                value = [1e3 * time for time in value[0]], value[1]
            slow = [1.5 * time if time < 0.05 else time for time in value[0]]
            return [value, value, (slow, value[1]), value]
        return real(self, value)

    monkeypatch.setattr(FakeCommunicator, "allgather", allgather)
    times.of = lambda call, sms, shape: 40.0 if sms == 64 else 55.0 if sms == 12 else 100.0
    with make(**SIZES) as buffer:
        result = _tune(fake, buffer)
    assert result.chosen.num_sms == 12
    assert [row.us for row in result.rows if row.num_sms == 64] == pytest.approx(
        [60.0] * (len(result.rows) // len(autotune.NUM_SMS))
    )
    assert len(rounds) == autotune._MOST_ROUNDS


def test_kernels_are_launched_before_a_stream_is_held(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may load a kernel at its first launch and wait for all streams, also for one that is held."""
    launched: list[Any] = []

    def wait_value(*_: Any) -> None:
        launched.extend(fake.pop_launches())

    monkeypatch.setattr(driver, "wait_value", wait_value)
    monkeypatch.setattr(driver, "elapsed_ms", lambda *_: pytest.fail("the first loop is enough for this test"))
    monkeypatch.setattr(autotune.build, "build", lambda *_: None)
    with make(**SIZES) as buffer:
        number = sum(1 + len(shapes_to_try(call, buffer.config, True)) for call in ("dispatch", "combine"))
        with pytest.raises(pytest.fail.Exception):
            _tune(fake, buffer)
        fake.on_launch = lambda call: None
    alone = [call for call in launched if call.kernel == "combine" or (call.kernel == "dispatch" and not call.follows_route)]
    assert len(alone) == number


def test_rounds_alternate_the_order(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    seen: list[Any] = []
    times.of = lambda call, sms, shape: seen.append((call, sms, shape)) or 100.0
    with make(**SIZES) as buffer:
        number = len(_tune(fake, buffer).rows)
    rounds = [seen[-number * n : len(seen) - number * (n - 1)] for n in range(autotune._MOST_ROUNDS, 0, -1)]
    assert all({*one} == {*rounds[0]} for one in rounds)
    assert len({tuple(one) for one in rounds}) == len(rounds)


def test_the_time_limit(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]
) -> None:
    """Kernels that are not compiled in time are left out, and the first round is the last."""

    def build(kernel: Any, constants: Any, arch: str) -> None:
        times.built.append(kernel.name)
        time.sleep(seconds(0.05))

    monkeypatch.setattr(autotune.build, "build", build)
    monkeypatch.setattr(autotune, "_MOST_THREADS", 1)
    times.of = lambda call, sms, shape: time.sleep(seconds(0.005)) or 100.0
    with make(**SIZES) as buffer:
        result = _tune(fake, buffer, max_seconds=seconds(0.2))
    tried = {(row.call, row.shape) for row in result.rows if row.shape}
    assert 1 <= len(tried) <= len(times.built) <= 4
    extra = 4  # loops that find out how long a call takes
    assert times.measured == len(result.rows) + extra


def test_kernels_that_cannot_be_compiled_are_left_out(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(kernel: Any, constants: Any, arch: str) -> None:
        if kernel.name == "dispatch":
            raise EPCacheError("it is not in the cache, and DEEPEP_RT_ASSERT_CACHED is set")

    monkeypatch.setattr(autotune.build, "build", build)
    with make(**SIZES) as buffer:
        rows = _tune(fake, buffer).rows
    assert {row.shape for row in rows if row.call == "dispatch"} == {None}
    assert len({row.shape for row in rows if row.call == "combine"}) > 1


def test_rows_land_apart_from_results_of_the_program(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    with make(**SIZES) as buffer:
        places: list[int] = []

        def act(call: SimpleNamespace) -> None:
            routed(buffer, ROWS, [3] * 8)(call)
            if call.kernel == "dispatch" and not call.follows_route:
                places.append(call.recv_x_offset)

        fake.on_launch = act
        held = buffer.dispatch(*arguments(fake, hidden=2048))
        buffer.autotune()
        fake.on_launch = lambda call: None
        landing = region(buffer, "landing")
        first = buffer._backend.runtime.memory.ptr
        assert {*places} <= {offset for offset in places if first + offset in landing}
        assert held.recv_x.ptr in region(buffer, "pool")
        assert len(fake.freed) >= 4, "arrays of the measurement"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(num_tokens=65), "num_tokens=65; expected a whole number from 1 to 64"),
        (dict(num_tokens=0), "num_tokens=0"),
        (dict(dtype="float32"), "dtype='float32'; expected rows no wider than those of bfloat16"),
        (dict(dtype="bf16"), "dtype='bf16'; expected an element type"),
        (dict(max_seconds=0), "max_seconds=0; expected a positive number of seconds"),
        (dict(save="yes"), "save='yes'; expected True or False"),
    ],
)
def test_wrong_arguments(fake: FakeGpu, make: Any, given: dict[str, Any], words: str) -> None:
    with make(**SIZES) as buffer, pytest.raises(EPInputError) as caught:
        buffer.autotune(**given)
    assert words in str(caught.value)
    assert not fake.launched


def test_fp8_rows_and_few_tokens(fake: FakeGpu, make: Any, times: SimpleNamespace, folder: Path) -> None:
    with make(**SIZES) as buffer:
        seen: list[Any] = []
        act = routed(buffer, ROWS, [3] * 8)

        def on_launch(call: SimpleNamespace) -> None:
            act(call)
            seen.append(call)

        fake.on_launch = on_launch
        result = buffer.autotune(num_tokens=5, dtype="float8_e4m3fn", save=False)
        fake.on_launch = lambda call: None
    assert (result.num_tokens, result.dtype, result.file) == (5, "float8_e4m3fn", None)
    assert not folder.exists()
    assert {(call.row_bytes, call.scale_bytes) for call in seen if call.kernel == "dispatch"} == {(2048, 64)}
    assert next(call for call in seen if call.kernel == "route").num_tokens == 5


def test_a_buffer_whose_rows_cannot_be_added_up(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    with make(**SIZES, dtype="float8_e4m3fn") as buffer:
        result = _tune(fake, buffer)
    assert {row.call for row in result.rows} == {"dispatch"}
    assert result.chosen.combine is None
    assert " -  " in str(result)


def test_shared_gpus_are_refused(fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_SHARE_GPUS", "1")
    with make(**SIZES) as buffer, pytest.raises(EPUnavailableError, match="DEEPEP_RT_SHARE_GPUS=1; expected a GPU for each rank"):
        buffer.autotune()


def test_a_full_pool_is_an_error_of_all_ranks(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    with make(**SIZES, on_exhausted="error") as buffer:
        before = buffer._backend.runtime.shapes
        held = [
            buffer.dispatch(*arguments(fake, hidden=2048), num_worst_tokens=buffer.config.num_max_recv_tokens) for _ in range(2)
        ]
        fake.pop_launches()
        with pytest.raises(EPOutOfMemoryError, match="autotune: rank 0: no room for a result"):
            buffer.autotune()
        assert len(held) == 2
        assert not [call for call in fake.launched if call.kernel in ("route", "dispatch")], (
            "no rank waits for a call of this one"
        )
        assert buffer._backend.runtime.shapes == before


def test_an_error_of_another_rank_is_one_here(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeCommunicator.allgather

    def fail_on_rank_2(self: Any, value: Any) -> list[Any]:
        return [None, None, (True, "the GPU is full"), None] if value is None else real(self, value)

    with make(**SIZES) as buffer, monkeypatch.context() as patches:
        patches.setattr(FakeCommunicator, "allgather", fail_on_rank_2)
        with pytest.raises(EPOutOfMemoryError, match="autotune: rank 2: the GPU is full"):
            buffer.autotune()


def test_shapes_end_with_an_error(fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Buffer goes on as before, and nothing is stored."""
    with make(**SIZES) as buffer:
        calls: list[Callable[..., Any]] = []

        def broken(*_: Any) -> float:
            calls.append(broken)
            if len(calls) > 20:
                raise EPUnavailableError("the driver fails")
            return 0.1

        monkeypatch.setattr(autotune, "_loop_ms", broken)
        with pytest.raises(EPUnavailableError, match="the driver fails"):
            _tune(fake, buffer)
        fake.on_launch = lambda call: None
        assert (buffer._backend.runtime.shapes, buffer.num_sms) == ({}, 24)
        assert saved_tunings.FILES.all() == []


def test_several_nodes_have_sm_counts_only(
    fake: FakeGpu, make: Any, times: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loop_ms(runtime: Any, trial: Any, gate: Any, num_calls: int) -> float:
        return 0.05 if trial.num_sms >= 48 else 0.1

    monkeypatch.setattr(autotune, "_loop_ms", loop_ms)
    with make(**SIZES, ranks_per_node=2, path="hierarchical") as buffer:
        result = _tune(fake, buffer)
        assert result.chosen == Tuning(48)
        assert {row.shape for row in result.rows} == {None}
    assert not times.built
    with make(**SIZES, ranks_per_node=2, path="hierarchical") as later:
        assert later.num_sms == 48
    with make(**SIZES, ranks_per_node=2, path="direct") as later:
        assert later.num_sms == 24


def test_ranks_with_different_gpus_have_sm_counts_only(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    with make(**SIZES) as buffer:
        buffer._backend._archs = ("sm_90", "sm_90", "sm_100", "sm_90")
        assert {row.shape for row in _tune(fake, buffer).rows} == {None}


def test_launches_after_a_choice_overlap_as_before(fake: FakeGpu, make: Any, times: SimpleNamespace) -> None:
    """Blocks that start early hold SMs, so kernels of two low-latency Buffers may not overlap. New shapes change nothing in that."""
    with make(**SIZES, low_latency=True) as first, make(**SIZES, low_latency=True):
        _tune(fake, first)
        first._backend.runtime.launcher("dispatch")
        assert {launcher._config.numAttrs for launcher in first._backend.runtime.launchers.values()} == {0}


def test_the_file_tells_what_was_measured(fake: FakeGpu, make: Any, times: SimpleNamespace, folder: Path) -> None:
    with make(**SIZES) as buffer:
        result = _tune(fake, buffer, num_tokens=32)
    (document,) = [json.loads(path.read_text()) for path in folder.iterdir()]
    assert (document["num_tokens"], document["dtype_of_rows"], len(document["rows"])) == (32, "bfloat16", len(result.rows))
    assert document["buffer"]["gpus"] == ["Fake GPU (sm_90)"] * 4
