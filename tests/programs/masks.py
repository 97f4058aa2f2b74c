"""Masked ranks: by hand, by a time-out, in the middle of a call, and taking part again.

Checks that begin with `if spmd.backend != "host"` reach into the host backend; the others run on GPUs too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import low_latency_oracle
import numpy as np
import oracle
import spmd
from low_latency import _buffer, _check_same, _inputs, _outputs
from mpi4py import MPI
from spmd import main, meet, raises

from deepep_rt import Buffer, EPInputError, EPTimeoutError

TIMEOUT_S = 2.0
STEPS_AFTER = 40
WAYS = tuple(dict(early=early, reduce_early=reduce_early) for early in (True, False) for reduce_early in (True, False))


def _possible(reduce_early: bool) -> bool:
    """GPUs leave ranks out only where sums are made early."""
    return reduce_early or spmd.backend != "host"


def _dispatch(buffer: Buffer, mine: oracle.RankInputs, early: bool = True, **options: Any) -> Any:
    weights = mine.topk_weights if early else None
    return buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=weights, **{"use_fp8": False, **options})


def _combine(buffer: Buffer, mine: oracle.RankInputs, y: np.ndarray, sent: Any, reduce_early: bool = True, **options: Any) -> Any:
    return buffer.low_latency_combine(
        y, mine.topk_idx, mine.topk_weights, sent.handle, allow_multiple_reduction=reduce_early, **options
    )


def _step(
    comm: MPI.Intracomm, buffer: Buffer, seed: int, live: Collection[int], *, early: bool = True, reduce_early: bool = True
) -> None:
    """Dispatch and combine; `live` are the ranks that this one should have to do with."""
    rank, experts, reduce_early = comm.Get_rank(), buffer.config.num_experts, _possible(reduce_early)
    inputs, y = _inputs(comm, seed, lambda rank: (5, 16, 0, 3)[(rank + seed) % 4]), _outputs(buffer, seed)
    sent = _dispatch(buffer, inputs[rank], early)
    back = _combine(buffer, inputs[rank], y[rank], sent, reduce_early)
    low_latency_oracle.check_dispatch(sent, low_latency_oracle.expected_dispatch(rank, inputs, experts, live=live))
    wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=reduce_early, live=live)
    _check_same(f"step {seed}", back.x, wanted)


def _all_ways(comm: MPI.Intracomm, buffer: Buffer, seed: int, live: Collection[int]) -> None:
    for number, way in enumerate(WAYS):
        _step(comm, buffer, seed + number, live, **way)


def _set_masks(comm: MPI.Intracomm, buffer: Buffer, outcasts: Collection[int], masked: bool) -> list[int]:
    """Every outcast is on its own, and the others are together. Returns the ranks that this one has to do with from now on."""
    rank = comm.Get_rank()
    everyone = range(comm.Get_size())
    live = [rank] if rank in outcasts else [peer for peer in everyone if peer not in outcasts]
    meet(comm)
    for peer in set(everyone) - set(live):
        (buffer.mask_rank if masked else buffer.unmask_rank)(peer)
    meet(comm)
    return live if masked else list(everyone)


def _unmask_all(comm: MPI.Intracomm, buffer: Buffer) -> None:
    meet(comm)
    for peer in buffer.query_masked_ranks():
        buffer.unmask_rank(peer)
    assert buffer.query_masked_ranks() == []
    meet(comm)


@contextmanager
def _left_by_some(comm: MPI.Intracomm, **settings: Any) -> Iterator[Buffer]:
    """A Buffer that some ranks are going to leave without a word."""
    buffer = _buffer(comm, timeout_s=TIMEOUT_S, **settings)
    with buffer:
        yield buffer
    meet(comm)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What the package warns of meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("deepep_rt")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def check_masked_by_hand(comm: MPI.Intracomm) -> None:
    """The first rank, the last, and both; all have the same calls, those that are masked on their own. Then all together again."""
    last, everyone = comm.Get_size() - 1, range(comm.Get_size())
    with _buffer(comm) as buffer:
        assert buffer.query_masked_ranks() == []
        _all_ways(comm, buffer, 100, everyone)
        for number, outcasts in enumerate(({last}, {0}, {0, last})):
            live = _set_masks(comm, buffer, outcasts, True)
            assert buffer.query_masked_ranks() == sorted(set(everyone) - set(live))
            _all_ways(comm, buffer, 110 + 20 * number, live)
            live = _set_masks(comm, buffer, outcasts, False)
            assert buffer.query_masked_ranks() == []
            _all_ways(comm, buffer, 120 + 20 * number, live)


def check_masked_in_fp8_and_with_hooks(comm: MPI.Intracomm) -> None:
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    with _buffer(comm) as buffer:
        experts = buffer.config.num_experts
        for outcasts in ({last}, ()):
            live = _set_masks(comm, buffer, {last}, bool(outcasts))
            inputs, y = _inputs(comm, 200), _outputs(buffer, 200)
            sent = _dispatch(buffer, inputs[rank], use_fp8=True, return_recv_hook=True)
            sent.hook()
            back = _combine(buffer, inputs[rank], y[rank], sent, return_recv_hook=True)
            back.hook()
            arrived = low_latency_oracle.expected_dispatch(rank, inputs, experts, fp8=True, live=live)
            low_latency_oracle.check_dispatch(sent, arrived)
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=True, live=live)
            _check_same("x", back.x, wanted)


def check_a_masked_rank_need_not_call(comm: MPI.Intracomm) -> None:
    """It does not in low-latency calls; throughput calls take no notice of masks, and all ranks make them."""
    rank, last = comm.Get_rank(), comm.Get_size() - 1
    with _left_by_some(comm) as buffer:
        live = _set_masks(comm, buffer, {last}, True)
        for seed in range(300, 303):
            if rank != last:
                _all_ways(comm, buffer, 4 * seed, live)
            inputs = _inputs(comm, seed)
            sent = buffer.dispatch(inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)
            oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, buffer.config.num_experts))
            assert buffer.combine(sent.recv_x, sent.handle).x.shape == inputs[rank].x.shape


def check_handles_from_before_a_mask(comm: MPI.Intracomm) -> None:
    """And from before the mask was taken away: rows travel between ranks that have known of each other all the time."""
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with _buffer(comm) as buffer:
        experts = buffer.config.num_experts
        inputs, y = _inputs(comm, 400, lambda rank: 9), _outputs(buffer, 400)
        mine = inputs[rank]
        before = [_dispatch(buffer, mine, early) for early in (True, False)]
        live = _set_masks(comm, buffer, {last}, True)
        during = [_dispatch(buffer, mine, early) for early in (True, False)]

        def check(sent: Any, sources: Collection[int], answering: Collection[int]) -> None:
            for reduce_early in sorted({True, _possible(False)}):
                wanted = low_latency_oracle.expected_combine(
                    rank, inputs, y, experts, reduce_early=reduce_early, live=sources, answering=answering
                )
                _check_same("x", _combine(buffer, mine, y[rank], sent, reduce_early).x, wanted)

        for sent in before:
            check(sent, everyone, live)
        for sent in during:
            check(sent, live, live)
        _set_masks(comm, buffer, {last}, False)
        for sent in before:
            check(sent, everyone, everyone)
        for sent in during:
            check(sent, live, live)
        _all_ways(comm, buffer, 410, everyone)


def check_a_rank_stops(comm: MPI.Intracomm) -> None:
    """The others mask it, say so once, wait no more, and go on."""
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with _left_by_some(comm, on_timeout="mask") as buffer, _warnings() as said:
        for seed in range(500, 505):
            _step(comm, buffer, seed, everyone, **WAYS[seed % 4])
        assert buffer.query_masked_ranks() == []
        if rank != last:
            start = time.monotonic()
            _step(comm, buffer, 505, everyone[:-1])
            took = time.monotonic() - start
            assert TIMEOUT_S * 0.9 <= took < TIMEOUT_S + 5, took
            assert buffer.query_masked_ranks() == [last]
            for seed in range(506, 506 + STEPS_AFTER):
                _step(comm, buffer, seed, everyone[:-1], **WAYS[seed % 4])
            assert buffer.query_masked_ranks() == [last]
            buffer.synchronize()
            if spmd.backend == "host":
                assert len(said) == 1, said
                assert f"waited 2 s for rank {last}" in said[0], said
        meet(comm)


def check_silent_between_dispatch_and_combine(comm: MPI.Intracomm) -> None:
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    for number, way in enumerate((WAYS[0], WAYS[3])):
        with _left_by_some(comm, on_timeout="mask") as buffer:
            inputs, y = _inputs(comm, 700 + number, lambda rank: 9), _outputs(buffer, 700)
            sent = _dispatch(buffer, inputs[rank], way["early"])
            arrived = low_latency_oracle.expected_dispatch(rank, inputs, buffer.config.num_experts)
            low_latency_oracle.check_dispatch(sent, arrived)
            if rank != last:
                back = _combine(buffer, inputs[rank], y[rank], sent, _possible(way["reduce_early"]))
                wanted = low_latency_oracle.expected_combine(
                    *(rank, inputs, y, buffer.config.num_experts),
                    reduce_early=_possible(way["reduce_early"]),
                    answering=everyone[:-1],
                )
                _check_same("x", back.x, wanted)
                assert buffer.query_masked_ranks() == [last]
                _all_ways(comm, buffer, 710, everyone[:-1])
            meet(comm)


def check_a_slow_rank_comes_back(comm: MPI.Intracomm) -> None:
    """What it sent late must not be taken for a part of later calls. How much of the others reached it in time is open."""
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with _buffer(comm, timeout_s=TIMEOUT_S, on_timeout="mask") as buffer:
        for seed in (800, 820):
            _all_ways(comm, buffer, seed, everyone)
            if rank == last:
                time.sleep(1.5 * TIMEOUT_S)
                for number, way in enumerate(WAYS):
                    inputs, y = _inputs(comm, seed + 4 + number, lambda rank: 9), _outputs(buffer, seed)
                    _combine(
                        buffer,
                        inputs[rank],
                        y[rank],
                        _dispatch(buffer, inputs[rank], way["early"]),
                        _possible(way["reduce_early"]),
                    )
            else:
                _all_ways(comm, buffer, seed + 4, everyone[:-1])
                assert buffer.query_masked_ranks() == [last]
            buffer.synchronize()
            _unmask_all(comm, buffer)
            _all_ways(comm, buffer, seed + 8, everyone)


def check_late_messages_of_every_kind(comm: MPI.Intracomm) -> None:
    """Large messages, and a slow rank that notices nothing: it gets no rows, and all of its own are late."""
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    settings = dict(hidden=4096, num_max_tokens_per_rank=20)  # 20 rows are beyond what MPI sends eagerly
    with _buffer(comm, timeout_s=TIMEOUT_S, on_timeout="mask", **settings) as buffer:
        inputs = _inputs(comm, 900, lambda rank: 20, hidden=4096, skip_probability=0)
        for one in inputs:
            one.topk_idx[:] = np.arange(4)  # experts of rank 0
        y = _outputs(buffer, 900)
        for _ in range(2):
            for live in (everyone, everyone[:-1], everyone):
                slow = rank == last and len(live) < len(everyone)
                if slow:
                    time.sleep(1.5 * TIMEOUT_S)
                sent = _dispatch(buffer, inputs[rank])
                if not slow:
                    experts = buffer.config.num_experts
                    low_latency_oracle.check_dispatch(
                        sent, low_latency_oracle.expected_dispatch(rank, inputs, experts, live=live)
                    )
                    if rank != last:
                        assert buffer.query_masked_ranks() == ([] if live is everyone else [last])
                buffer.synchronize()
                if live is not everyone:
                    _unmask_all(comm, buffer)
                    back = _combine(buffer, inputs[rank], y[rank], sent, reduce_early=False)  # that of the call in between
                    if rank != last:
                        wanted = low_latency_oracle.expected_combine(
                            rank, inputs, y, buffer.config.num_experts, reduce_early=False, live=live
                        )
                        _check_same("x", back.x, wanted)


def check_bad_ranks_to_mask(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with _buffer(comm) as buffer:
        for call in (buffer.mask_rank, buffer.unmask_rank):
            for wrong in (rank, -1, ranks, True, False, float(1 - min(rank, 1)), "1", None):
                with raises(EPInputError, repr(wrong)):
                    call(wrong)
        assert buffer.query_masked_ranks() == []
        _step(comm, buffer, 1000, range(ranks))
    with spmd.make_buffer(comm, num_experts=4 * ranks) as buffer:
        for call in (lambda: buffer.mask_rank(1), lambda: buffer.unmask_rank(1), buffer.query_masked_ranks):
            with raises(EPInputError, "low_latency=True"):
                call()


def check_open_hooks_come_first(comm: MPI.Intracomm) -> None:
    """Masks do not change in the middle of a call."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    peer = (rank + 1) % ranks
    with _buffer(comm) as buffer:
        inputs, y = _inputs(comm, 1200), _outputs(buffer, 1200)
        sent = _dispatch(buffer, inputs[rank], return_recv_hook=True)
        for call in (buffer.mask_rank, buffer.unmask_rank):
            with raises(EPInputError, "hooks of low_latency_dispatch are open"):
                call(peer)
        sent.hook()
        back = _combine(buffer, inputs[rank], y[rank], sent, return_recv_hook=True)
        with raises(EPInputError, "hooks of low_latency_combine are open"):
            buffer.mask_rank(peer)
        back.hook()
        assert buffer.query_masked_ranks() == []
        wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=True)
        _check_same("x", back.x, wanted)


def check_raising_is_the_default(comm: MPI.Intracomm) -> None:
    """A silent rank still breaks a Buffer that was not told otherwise, whoever is masked by hand."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 2:
        return
    silent, masked = ranks - 1, 0
    with _left_by_some(comm) as buffer:
        live = _set_masks(comm, buffer, {masked}, True)
        _step(comm, buffer, 1100, live)
        if rank not in (silent, masked):
            inputs = _inputs(comm, 1101)
            with raises(EPTimeoutError, f"rank {silent}") as caught:
                _dispatch(buffer, inputs[rank])
                buffer.synchronize()
            assert caught.error.peer == silent
            assert buffer.query_masked_ranks() == [masked]
            with raises(EPTimeoutError, "broken" if spmd.backend == "host" else "cannot be used any more"):
                _dispatch(buffer, inputs[rank])
        meet(comm)


def _die_after_notices(buffer: Buffer, call: Any) -> None:
    """Make a call, and stop when its notices are on their way."""

    def fail(*_: Any) -> None:
        raise InterruptedError("between notices and rows")

    backend: Any = buffer._backend
    backend._channel._wait = fail
    with raises(InterruptedError):
        call()


def _survivors_of(comm: MPI.Intracomm, heard_by: Collection[int], topk_idx: Any) -> None:
    """The last rank dies between its notices, which reach some ranks, and its rows. The others go on together."""
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with _left_by_some(comm, on_timeout="mask") as buffer:
        _step(comm, buffer, 1200, everyone)
        inputs, y = _inputs(comm, 1201, lambda rank: 9), _outputs(buffer, 1201)
        inputs[last].topk_idx[:] = topk_idx
        mine, live = inputs[rank], everyone[:-1]
        if rank == last:
            for peer in set(live) - set(heard_by):
                buffer.mask_rank(np.int64(peer))
            _die_after_notices(buffer, partial(_dispatch, buffer, mine))
        else:
            sent = _dispatch(buffer, mine)
            experts = buffer.config.num_experts
            low_latency_oracle.check_dispatch(sent, low_latency_oracle.expected_dispatch(rank, inputs, experts, live=live))
            for reduce_early in sorted({True, _possible(False)}):
                wanted = low_latency_oracle.expected_combine(rank, inputs, y, experts, reduce_early=reduce_early, live=live)
                _check_same("x", _combine(buffer, mine, y[rank], sent, reduce_early).x, wanted)
            assert buffer.query_masked_ranks() == [last]
            for seed in range(1210, 1220):
                _step(comm, buffer, seed, live, **WAYS[seed % 4])
            assert buffer.query_masked_ranks() == [last]
        meet(comm)


def check_notices_but_no_rows(comm: MPI.Intracomm) -> None:
    """Everybody waits for its rows, or only one rank does while the others are in the next call already, and wait for that rank."""
    if spmd.backend != "host":
        return
    everyone = range(comm.Get_size())
    experts = 4 * comm.Get_size()
    _survivors_of(comm, everyone, np.arange(36).reshape(9, 4) % experts)
    _survivors_of(comm, everyone, np.arange(4))  # experts of rank 0


def check_notices_that_reach_one_rank(comm: MPI.Intracomm) -> None:
    """It waits for the rows, and for the other ranks, which wait for notices."""
    if spmd.backend != "host":
        return
    _survivors_of(comm, {0}, np.arange(4))
    _survivors_of(comm, {comm.Get_size() // 2}, np.arange(36).reshape(9, 4) % (4 * comm.Get_size()))


def check_notices_of_combine_but_no_rows(comm: MPI.Intracomm) -> None:
    if spmd.backend != "host":
        return
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    for number, way in enumerate(WAYS[:3]):
        with _left_by_some(comm, on_timeout="mask") as buffer:
            inputs, y = _inputs(comm, 1250 + number, lambda rank: 9), _outputs(buffer, 1250)
            sent = _dispatch(buffer, inputs[rank], way["early"])
            if rank == last:
                _die_after_notices(buffer, partial(_combine, buffer, inputs[rank], y[rank], sent, _possible(way["reduce_early"])))
            else:
                wanted = low_latency_oracle.expected_combine(
                    *(rank, inputs, y, buffer.config.num_experts),
                    reduce_early=_possible(way["reduce_early"]),
                    answering=everyone[:-1],
                )
                _check_same("x", _combine(buffer, inputs[rank], y[rank], sent, _possible(way["reduce_early"])).x, wanted)
                assert buffer.query_masked_ranks() == [last]
                _all_ways(comm, buffer, 1260, everyone[:-1])
            meet(comm)


def check_throughput_calls_throw_old_notices_away(comm: MPI.Intracomm) -> None:
    """A rank that missed low-latency calls finds notices of them when it comes to a throughput call."""
    if spmd.backend != "host":
        return
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with _left_by_some(comm, on_timeout="mask") as buffer:
        if rank != last:
            _all_ways(comm, buffer, 1300, everyone[:-1])
        meet(comm)
        inputs = _inputs(comm, 1301)
        sent = buffer.dispatch(inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights)
        oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, buffer.config.num_experts))
        meet(comm)


def check_unmasked_out_of_step(comm: MPI.Intracomm) -> None:
    """Host only: a rank that missed calls is told so, and the others raise or mask it; nobody takes one call for another."""
    if spmd.backend != "host":
        return
    rank, last, everyone = comm.Get_rank(), comm.Get_size() - 1, range(comm.Get_size())
    with _left_by_some(comm, on_timeout="mask") as buffer:
        live = _set_masks(comm, buffer, {last}, True)
        if rank != last:
            _all_ways(comm, buffer, 1400, live)
        _unmask_all(comm, buffer)
        if rank == last:
            with raises(EPInputError, "low-latency call 1 of this rank meets call 9", "expected the same number of calls"):
                _dispatch(buffer, _inputs(comm, 1404)[rank])
        else:
            _step(comm, buffer, 1404, everyone[:-1])
            assert buffer.query_masked_ranks() == [last]
        meet(comm)


if __name__ == "__main__":
    main(__name__)
