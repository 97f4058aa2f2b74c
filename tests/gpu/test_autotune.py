"""`Buffer.autotune` on GPUs: the same bits with every choice, later Buffers that use it, and a sweep of all candidates against it.

`AUTOTUNE_SWEEP=full` sweeps more sizes and all numbers of SMs, which takes about four minutes on 2 H100. `pytest -s` shows the tables.
"""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import SHARED_GPUS, make, routing, rows, same  # noqa: E402

from deepep_rt import EPInputError, EPOutOfMemoryError  # noqa: E402
from deepep_rt.backends import saved_tunings  # noqa: E402
from deepep_rt.backends.cuda.autotune import NUM_SMS  # noqa: E402
from deepep_rt.config import usual_sms  # noqa: E402
from deepep_rt.cuda import driver  # noqa: E402
from deepep_rt.jit.store import SavedFiles  # noqa: E402
from deepep_rt.kernels.tuning import has_tma, shapes_to_try  # noqa: E402
from deepep_rt.tuned import CALLS, WITHIN, CopyShape  # noqa: E402

HIDDEN, TOPK = 7168, 8
IS_FULL = os.environ.get("AUTOTUNE_SWEEP") == "full"
alone = pytest.mark.skipif(SHARED_GPUS, reason="ranks that share a GPU tell nothing of its speed")


@pytest.fixture(autouse=True)
def files(comm, monkeypatch) -> Iterator[SavedFiles]:
    """Keep the choices of a test apart from those of the user, beside the same kernels."""
    monkeypatch.delenv("DEEPEP_RT_TUNING", raising=False)
    own = replace(saved_tunings.FILES, folder=f"tunings-of-test-{comm.bcast(secrets.token_hex(4))}")
    monkeypatch.setattr(saved_tunings, "FILES", own)
    yield own
    comm.Barrier()
    if comm.Get_rank() == 0:
        own.clear()


def shapes_of(buffer: Any, call: str) -> list[CopyShape | None]:
    """Return the usual shape and those that are tried."""
    return [None, *shapes_to_try(call, buffer.config, has_tma(buffer._backend.runtime.arch))]


def results(comm: Any, buffer: Any, num_tokens: int, *, seed: int = 1, dtype: Any = torch.bfloat16) -> list[Any]:
    """Make a dispatch with a new routing, one with its handle, and a combine. Return copies of what they give."""
    idx, weights = routing(comm, seed, num_tokens, TOPK, buffer.config.num_experts)
    x = rows(comm, seed, num_tokens, HIDDEN, dtype=dtype)
    sent = buffer.dispatch(x, idx, weights)
    again = buffer.dispatch(x, handle=sent.handle)
    y = rows(comm, seed + 2, sent.recv_x.shape[0], HIDDEN)
    back = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights)
    found = sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, sent.recv_src_idx, again.recv_x, back.x, back.topk_weights
    return [tensor.clone() for tensor in found]


def all_same(found: list[Any], expected: list[Any]) -> None:
    for got, want in zip(found, expected, strict=True):
        same(got, want)


def test_every_shape_gives_the_same_bits(comm):
    """Each rank has another shape, because no rank sees that of another one."""
    with make(comm, num_max_tokens_per_rank=512) as buffer:
        sizes = [(512, torch.bfloat16), (301, torch.uint8)]
        expected = [results(comm, buffer, number, dtype=dtype) for number, dtype in sizes]
        shapes = {call: shapes_of(buffer, call) for call in CALLS}
        for step in range(max(map(len, shapes.values()))):
            number = step + comm.Get_rank()
            mine = {call: shapes[call][number % len(shapes[call])] for call in CALLS}
            buffer.synchronize()
            buffer._backend.runtime.use_shapes({call: shape for call, shape in mine.items() if shape})
            for sms in (3, 24):
                buffer.num_sms = sms
                for (num_tokens, dtype), want in zip(sizes, expected, strict=True):
                    all_same(results(comm, buffer, num_tokens, dtype=dtype), want)


@alone
def test_a_choice_changes_no_bit_and_is_used_later(comm, monkeypatch, files):
    sizes = dict(num_max_tokens_per_rank=1024, num_slots=3)
    with make(comm, **sizes) as buffer:
        assert buffer.num_sms == usual_sms(comm.Get_size())
        expected = results(comm, buffer, 777)
        idx, _ = routing(comm, 9, 500, TOPK, buffer.config.num_experts)
        x = rows(comm, 9, 500, HIDDEN)
        handle = buffer.dispatch(x, idx).handle
        y = rows(comm, 10, handle.num_recv_rows, HIDDEN)
        step = buffer.prepare_throughput(x, handle, y=y)
        before = step.dispatch().recv_x.clone(), step.combine().x.clone()
        tuned = buffer.autotune(max_seconds=20)
        if comm.Get_rank() == 0:
            print(f"\n{tuned}")
        assert comm.allgather(tuned) == [tuned] * comm.Get_size(), "all ranks return the same"
        assert buffer.num_sms == tuned.chosen.num_sms
        assert tuned.seconds < 60
        all_same(results(comm, buffer, 777), expected)
        same(step.dispatch().recv_x, before[0])  # prepared with the shapes from before
        same(step.combine().x, before[1])
        mixed = buffer.prepare_throughput(x, handle, y=y) if comm.Get_rank() else step
        same(mixed.dispatch().recv_x, before[0])
        same(mixed.combine().x, before[1])
    with make(comm, **sizes) as later:
        assert (later.num_sms, later._backend.runtime.shapes) == (tuned.chosen.num_sms, tuned.chosen.shapes)
        assert later.describe().tuning == str(tuned.chosen)
        all_same(results(comm, later, 777), expected)
    with make(comm, **sizes, num_sms=20) as explicit:
        assert (explicit.num_sms, explicit._backend.runtime.shapes) == (20, tuned.chosen.shapes)
        all_same(results(comm, explicit, 777), expected)
    with make(comm, num_max_tokens_per_rank=512) as other:
        assert (other.num_sms, other._backend.runtime.shapes) == (usual_sms(comm.Get_size()), {})
    if comm.Get_rank() == 1:
        monkeypatch.setenv("DEEPEP_RT_TUNING", "0")  # only that of rank 0 counts
    with make(comm, **sizes) as later:
        assert later.num_sms == tuned.chosen.num_sms
    monkeypatch.setenv("DEEPEP_RT_TUNING", "0")
    with make(comm, **sizes) as untuned:
        assert (untuned.num_sms, untuned._backend.runtime.shapes) == (usual_sms(comm.Get_size()), {})
        all_same(results(comm, untuned, 777), expected)


@alone
def test_results_that_the_program_holds_stay(comm):
    with make(comm, num_max_tokens_per_rank=256, num_slots=3) as buffer:
        idx, weights = routing(comm, 3, 256, TOPK, buffer.config.num_experts)
        sent = buffer.dispatch(rows(comm, 3, 256, HIDDEN), idx, weights)
        back = buffer.combine(rows(comm, 4, *sent.recv_x.shape), sent.handle)
        kept = sent.recv_x.clone(), back.x.clone()
        tuned = buffer.autotune(num_tokens=64, dtype=torch.float8_e4m3fn, max_seconds=5, save=False)
        assert (tuned.num_tokens, tuned.dtype, tuned.file) == (64, "float8_e4m3fn", None)
        same(sent.recv_x, kept[0])
        same(back.x, kept[1])


@alone
def test_errors_reach_all_ranks(comm):
    with make(comm, num_max_tokens_per_rank=64, on_exhausted="error") as buffer:
        if comm.Get_size() > 1:
            with pytest.raises(EPInputError, match=r"expected the same on all ranks\. Pass the same arguments to autotune"):
                buffer.autotune(num_tokens=8 + comm.Get_rank())
        idx, _ = routing(comm, 5, 64, TOPK, buffer.config.num_experts)
        x, most = rows(comm, 5, 64, HIDDEN), buffer.config.num_max_recv_tokens
        held = [buffer.dispatch(x, idx, num_worst_tokens=most) for _ in range(2)]
        with pytest.raises(EPOutOfMemoryError, match="autotune: rank 0: no room for a result"):
            buffer.autotune()
        same(held[0].recv_x[:1], held[1].recv_x[:1])
        del held
        expected = buffer.dispatch(x, idx).recv_x.clone()
        assert buffer.autotune(max_seconds=1, save=False).rows
        same(buffer.dispatch(x, idx).recv_x, expected)


# --- sweep ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """What a sweep measures."""

    tokens: int
    dtype: Any = torch.bfloat16


SIZES = [Size(4096), Size(4096, torch.uint8), Size(1024), Size(128)] if IS_FULL else [Size(2048)]
SWEPT_SMS = NUM_SMS if IS_FULL else (8, 16, 24, 32, 64)
ROUNDS, PLAY_OFF_ROUNDS = (7, 31) if IS_FULL else (3, 15)


class Prepared:
    """A dispatch and a combine with these shapes. They keep the shapes when the Buffer gets others."""

    def __init__(self, comm: Any, buffer: Any, handle: Any, x: Any, y: Any, shapes: dict[str, CopyShape]) -> None:
        self._comm, self._buffer = comm, buffer
        buffer._backend.runtime.use_shapes(shapes)
        self._step = buffer.prepare_throughput(x, handle, y=y)
        self._step.dispatch()
        self._step.combine()

    def us(self, call: str, num_sms: int) -> float:
        """Return the microseconds of a call on the slowest rank, in a loop."""
        self._buffer.num_sms = num_sms
        run: Callable[[], Any] = self._step.dispatch if call == "dispatch" else self._step.combine
        num_calls, begin, end = 10, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._comm.Barrier()
        run()
        begin.record()
        for _ in range(num_calls):
            run()
        end.record()
        end.synchronize()
        return max(self._comm.allgather(1e3 * begin.elapsed_time(end) / num_calls))


@alone
@pytest.mark.parametrize("size", SIZES, ids=[f"{size.tokens}-{str(size.dtype).partition('.')[2]}" for size in SIZES])
def test_sweep(comm, size):
    """Measure all candidates through prepared calls, and then the best of them and the choice in turns.

    The least of many measured times is too small, so the second measurement decides.
    """
    with make(comm, num_max_tokens_per_rank=size.tokens, num_slots=4) as buffer:
        name = "float8_e4m3fn" if size.dtype == torch.uint8 else None
        tuned = buffer.autotune(dtype=name, save=False)
        idx, _ = routing(comm, 20, size.tokens, TOPK, buffer.config.num_experts, skip=0.0)
        x = rows(comm, 20, size.tokens, HIDDEN, dtype=size.dtype)
        handle = buffer.dispatch(x, idx).handle
        y = rows(comm, 21, handle.num_recv_rows, HIDDEN)
        most = driver.num_sms(torch.cuda.current_device())
        all_sms = [sms for sms in SWEPT_SMS if sms <= most]
        times: dict[tuple[str, int], dict[CopyShape | None, float]] = {}
        for call in CALLS:
            for shape in shapes_of(buffer, call):
                prepared = Prepared(comm, buffer, handle, x, y, {call: shape} if shape else {})
                for sms in all_sms:
                    found = statistics.median(prepared.us(call, sms) for _ in range(ROUNDS))
                    times.setdefault((call, sms), {})[shape] = found
                del prepared
        best = {sms: {call: min(times[call, sms], key=times[call, sms].__getitem__) for call in CALLS} for sms in all_sms}
        total = {sms: sum(times[call, sms][best[sms][call]] for call in CALLS) for sms in all_sms}
        best_sms = min(all_sms, key=total.__getitem__)
        chosen = tuned.chosen
        candidates = {
            "chosen": (chosen.num_sms, chosen.shapes),
            "best": (best_sms, {call: shape for call, shape in best[best_sms].items() if shape}),
        }
        both = {name: Prepared(comm, buffer, handle, x, y, shapes) for name, (_, shapes) in candidates.items()}
        play_off: dict[str, list[float]] = {name: [] for name in candidates}
        for number in range(PLAY_OFF_ROUNDS):
            for name in list(candidates)[:: 1 if number % 2 else -1]:
                play_off[name].append(sum(both[name].us(call, candidates[name][0]) for call in CALLS))
        us = {name: statistics.median(found) for name, found in play_off.items()}
        if comm.Get_rank() == 0:
            print(f"\nautotune:\n{tuned}\n\nsweep of {len(all_sms)} numbers of SMs:")
            for sms in all_sms:
                picked = "; ".join(
                    f"{call} {times[call, sms][best[sms][call]]:.1f} us ({best[sms][call] or 'usual'})" for call in CALLS
                )
                usual = sum(times[call, sms][None] for call in CALLS)
                print(f"{sms:4} SMs: {total[sms]:8.1f} us, usual shapes {usual:8.1f} us; {picked}")
            for name, (sms, shapes) in candidates.items():
                other = ", ".join(f"{call}: {shape}" for call, shape in shapes.items())
                print(f"{name}: {us[name]:.1f} us with {sms} SMs, {other or 'usual shapes'}")
            print(f"the choice takes {us['chosen'] / us['best'] - 1:+.2%} of the best, limit {WITHIN:+.0%}")
        assert us["chosen"] <= (1 + WITHIN) * us["best"]
