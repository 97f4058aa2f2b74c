"""The relay between ranks that share a host: puts, signals, a lost put, and relays that fail. A bad network: bad_network_rounds.py."""

from __future__ import annotations

import gc
import sys
import threading
import time
from typing import Any
from unittest import mock

import numpy as np
from bad_network import BadNetwork, bad_network
from limits import seconds
from mpi4py import MPI
from relay_rank import DESCRIPTOR, TRANSPORT, Exchange, RelayRank
from spmd import idle_barrier, main, raises

from deepep_rt import EPTimeoutError, EPUnavailableError
from deepep_rt._finalizers import finalize, run_waiting, waiting
from deepep_rt.comm.convert import communicator_of
from deepep_rt.comm.relay import Relay
from deepep_rt.doctor.relay_rates import relay_rates

TIMEOUT_S = seconds(1.0)


def _no_relay_is_left() -> bool:
    return not [thread for thread in threading.enumerate() if "relay" in thread.name] and sys.getswitchinterval() == 5e-3


def _exchange(comm: MPI.Intracomm, num_puts: int, max_bytes: int, **settings: Any) -> None:
    """Exchange puts, and close the relay."""
    exchange = Exchange(comm, num_puts, max_bytes, **settings)
    exchange.run()
    traffic = exchange.rank.relay._traffic
    assert exchange.rank.relay.close()
    assert exchange.rank.relay.close(), "a second call does nothing"
    expected = 2 * num_puts * len(exchange.peers)
    assert (traffic.puts_sent, traffic.puts_received) == (expected, expected)
    num_bytes = sum(exchange.size_of(exchange.mine, peer, number) for peer in exchange.peers for number in range(num_puts))
    assert traffic.bytes_sent == num_bytes
    assert f"its relay has sent {expected} puts and received {expected};" in exchange.rank.relay.progress
    assert _no_relay_is_left()


def check_puts_of_random_sizes(comm: MPI.Intracomm) -> None:
    _exchange(comm, 200, 96 << 10)


def check_finalizers_do_not_run_in_the_relay(comm: MPI.Intracomm) -> None:
    """A finalizer may call CUDA, and wait there for a kernel that waits for the relay."""

    class Cycle:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            finalize(threads.append, threading.get_ident())

    threads: list[int] = []
    rank = RelayRank(comm, 4096)
    turn, collected = rank.relay._traffic.turn, threading.Event()

    def collect() -> bool:
        Cycle()
        gc.collect()
        collected.set()
        return turn()

    rank.relay._traffic.turn = collect
    assert collected.wait(seconds(20))
    assert rank.relay.close()
    assert threads == []
    assert waiting
    run_waiting()
    assert rank.relay._thread.ident in threads, "the object died in the relay's thread"
    assert not waiting
    assert _no_relay_is_left()


def check_numbers_of_puts_wrap_around(comm: MPI.Intracomm) -> None:
    """The ring has four entries, and the number of puts passes 2**32."""
    _exchange(comm, 40, 16, depth=4, first_put=2**32 - 50)


def check_an_awaited_put_whose_sequence_is_zero(comm: MPI.Intracomm) -> None:
    """Nothing was awaited in this entry before, so the relay's answer holds 0 too."""
    rank = RelayRank(comm, 4096, depth=4, first_put=2**32 - 1)
    traffic = rank.relay._traffic
    turn = traffic.turn
    traffic.turn = lambda: (time.sleep(0.05), turn())[1]
    before = traffic.puts_sent
    rank.put((comm.Get_rank() + 1) % comm.Get_size(), 0, 2048, 8, 1024, 1, is_awaited=True)
    rank.wait_until_sent()
    assert traffic.puts_sent == before + 1, "the wait ended before the relay had the bytes"
    while rank.memory[1024] != 1:
        rank.relay.check()
        time.sleep(1e-3)
    assert rank.relay.close()
    assert _no_relay_is_left()


def check_many_large_puts_at_once(comm: MPI.Intracomm) -> None:
    """More than MPI gets at a time. They wait in the relay, and small puts pass them."""
    _exchange(comm, 60, 64 << 10, slots=30, depth=256)


def check_a_put_that_is_lost(comm: MPI.Intracomm) -> None:
    """No other put waits for it, and no relay is blamed: this is for the limits of the kernels' waits."""
    left = [1] if comm.Get_rank() == 1 else []
    with bad_network(
        BadNetwork(seed=6, drops=lambda number, put: number > 3 and put.num_bytes > 0 and bool(left) and bool(left.pop()))
    ):
        exchange = Exchange(comm, 20, 1024, slots=20, timeout_s=TIMEOUT_S)
    end = time.monotonic() + 1.2 * TIMEOUT_S
    while time.monotonic() < end:
        exchange.step()
        exchange.rank.relay.check()
        time.sleep(1e-4)
    dropped = exchange.rank.relay._traffic.dropped
    assert len(dropped) == (comm.Get_rank() == 1)
    lost_on = comm.bcast(dropped and dropped[0].rank, root=1)
    assert exchange.is_over == (comm.Get_rank() not in (1, lost_on))
    assert exchange.rank.relay.close()


def check_two_relays_in_a_process(comm: MPI.Intracomm) -> None:
    """Buffers are independent. The switch interval is restored after the last."""
    first, second = (Exchange(comm, 20, 4096) for _ in range(2))
    first.run()
    assert first.rank.relay.close()
    assert sys.getswitchinterval() < 2e-4
    second.run()
    assert second.rank.relay.close()
    assert _no_relay_is_left()


def check_pauses_end(comm: MPI.Intracomm) -> None:
    """A relay that pauses uses little of a core, and still carries a put soon."""
    rank, peer = RelayRank(comm, 64), (comm.Get_rank() + 1) % comm.Get_size()
    time.sleep(0.3)
    used = time.process_time()
    time.sleep(0.3)
    used = time.process_time() - used
    assert used < 0.15, f"{used:.2f} s"
    idle_barrier(comm)
    rank.relay.wake()
    rank.put(peer, 0, 0, 0, 8, 7)
    end = time.monotonic() + seconds(5)
    while rank.words[1] != 7:
        assert time.monotonic() < end
        time.sleep(1e-4)
    assert rank.relay.close()


def check_bandwidth(comm: MPI.Intracomm) -> None:
    """Print it: CI has no cores for a threshold."""
    chunk, slots, count = 1 << 20, 8, 100
    peer, source = ((comm.Get_rank() + step) % comm.Get_size() for step in (1, -1))
    rank = RelayRank(comm, 2 * slots * (chunk + 8))
    arrived, credits, data = rank.words[:slots], rank.words[slots : 2 * slots], 16 * slots
    sent = received = 0
    idle_barrier(comm)
    start = time.monotonic()
    while min(sent, received) < count:
        rank.relay.check()
        while sent < count and credits[sent % slots] >= sent // slots:
            rank.put(peer, data + slots * chunk, data, chunk, 8 * (sent % slots), sent // slots + 1)
            sent += 1
        while received < count and arrived[received % slots] > received // slots:
            rank.put(source, 0, 0, 0, 8 * (slots + received % slots), received // slots + 1)
            received += 1
        time.sleep(2e-5)
    seconds = time.monotonic() - start
    if comm.Get_rank() == 0:
        print(f"the relay carries {count * chunk / seconds / 1e9:.2f} GB/s each way, in chunks of {chunk >> 10} KB", flush=True)
    assert rank.relay.close()


# --- failures ------------------------------------------------------------------------------------------------------------------------


def _await_error(relay: Relay, limit_s: float) -> Exception:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            relay.check()
        except (EPTimeoutError, EPUnavailableError) as error:
            return error
        time.sleep(1e-3)
    raise AssertionError("no error in time")


def _check_error(comm: MPI.Intracomm, rank: RelayRank, victim: int, cause: str, limit_s: float = TIMEOUT_S) -> None:
    """All ranks name the victim and its cause, and can close their relays."""
    error = _await_error(rank.relay, limit_s + seconds(0.5))
    if comm.Get_rank() == victim:
        assert isinstance(error, EPUnavailableError)
        assert f"the relay of rank {victim} on node {victim}, which" in str(error)
    else:
        assert isinstance(error, EPTimeoutError)
        assert (error.rank, error.peer, error.node, error.phase) == (comm.Get_rank(), victim, victim, "the relay")
        assert f"the relay of rank {victim} on node {victim} " in str(error)
    assert cause in str(error)
    idle_barrier(comm)
    start = time.monotonic()
    assert rank.relay.close()
    assert time.monotonic() - start < seconds(4)
    assert _no_relay_is_left()
    with raises(type(error)):
        rank.relay.check()


def check_a_relay_that_fails(comm: MPI.Intracomm) -> None:
    """Its peers know the cause at once."""
    rank, victim = RelayRank(comm, 64), 1
    if comm.Get_rank() == victim:
        rank.relay._traffic.turn = mock.Mock(side_effect=KeyError("mine"))
    _check_error(comm, rank, victim, "failed: KeyError: 'mine'")


def check_a_failure_in_the_middle_of_puts(comm: MPI.Intracomm) -> None:
    """Messages of all kinds are on their way. No receive is left that could take a later message."""
    exchange, victim = Exchange(comm, 10**6, 64 << 10, awaits=False), 1
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        exchange.step()
    if comm.Get_rank() == victim:
        exchange.rank.relay._traffic.turn = mock.Mock(side_effect=MemoryError("mine"))
    error = _await_error(exchange.rank.relay, seconds(20.0))
    assert "failed: MemoryError: mine" in str(error)
    idle_barrier(comm)
    exchange.rank.relay.close()
    assert _no_relay_is_left()
    _exchange(comm, 10, 4096)


def check_a_silent_relay(comm: MPI.Intracomm) -> None:
    rank, victim = RelayRank(comm, 64, timeout_s=TIMEOUT_S), 1
    if comm.Get_rank() == victim:
        turn = rank.relay._traffic.turn
        rank.relay._traffic.turn = lambda: (time.sleep(2 * TIMEOUT_S), setattr(rank.relay._traffic, "turn", turn))[0]
        error = _await_error(rank.relay, TIMEOUT_S + seconds(0.5))
        assert (
            f"the relay of rank 1 on node 1, which sends over {TRANSPORT.upper()} for transport='{TRANSPORT}', has made no turn for "
            in str(error)
        )
    else:
        error = _await_error(rank.relay, TIMEOUT_S + seconds(0.2))
        assert "the relay of rank 1 on node 1 has sent nothing for " in str(error)
        assert error.peer == victim
    idle_barrier(comm)
    time.sleep(2 * TIMEOUT_S)
    rank.relay.check()  # it was only late, and this rank's Buffer decides whether that matters
    assert rank.relay.close()


def check_a_rank_that_closes_early(comm: MPI.Intracomm) -> None:
    """The others have their time to finish. Then they learn that it has ended."""
    rank, victim = RelayRank(comm, 64, timeout_s=TIMEOUT_S), 1
    if comm.Get_rank() == victim:
        assert rank.relay.close(2.5 * TIMEOUT_S), "the other ranks close before the limit"
        return
    time.sleep(TIMEOUT_S / 2)
    rank.relay.check()
    error = _await_error(rank.relay, TIMEOUT_S)
    assert error.peer == victim
    assert "the relay of rank 1 on node 1 ended " in str(error)
    assert rank.relay.close()


def check_an_overwritten_entry(comm: MPI.Intracomm) -> None:
    rank, victim = RelayRank(comm, 64, depth=4), 1
    if comm.Get_rank() == victim:
        rank.ring[0]["sequence"] = 5
    _check_error(comm, rank, victim, "the ring entry of put 0 has the sequence 5; expected 1")


def check_a_put_outside_of_the_memory(comm: MPI.Intracomm) -> None:
    """The relay of the rank that made the put finds wrong sources, the receiver wrong places."""
    for what, place in {"bytes": (0, 64, 8, 0), "word": (0, 0, 0, 64), "target": (64, 0, 8, 0)}.items():
        rank, sender, receiver = RelayRank(comm, 64), 1, 0
        if comm.Get_rank() == sender:
            to, start, num_bytes, word = place
            rank.put(receiver, to, start, num_bytes, word, 1)
        _check_error(comm, rank, sender if what == "bytes" else receiver, "a put names 8 bytes at offset 4160")
    rank = RelayRank(comm, 64)
    if comm.Get_rank() == 1:
        rank.put(comm.Get_size(), 0, 0, 0, 0, 1)
    _check_error(comm, rank, 1, f"a put names rank {comm.Get_size()}")


def check_rates(comm: MPI.Intracomm) -> None:
    """While the relays of two ranks are measured, the programs sleep: they would take Python's lock from them, as no kernel does."""
    pair = comm.Split(comm.Get_rank() > 1)
    if comm.Get_rank() <= 1:
        with mock.patch.object(Relay, "check", autospec=True, side_effect=Relay.check) as check:
            start = time.monotonic()
            found = relay_rates(communicator_of(pair), TRANSPORT, TIMEOUT_S)
        assert set(found) == {"us", "gb_s", "back_gb_s"}
        assert min(found.values()) > 0
        assert pair.allgather(found) == [found] * 2
        assert check.call_count <= (time.monotonic() - start) / 0.05 + 1
        assert _no_relay_is_left()
    pair.Free()


def check_threads_of_mpi(comm: MPI.Intracomm) -> None:
    memory = np.zeros(8, np.uint64).ctypes.data
    with (
        mock.patch.object(MPI, "Query_thread", return_value=MPI.THREAD_SERIALIZED),
        raises(EPUnavailableError, "no MPI_THREAD_MULTIPLE"),
    ):
        Relay(communicator_of(comm), memory, 64, 0, memory, 1, DESCRIPTOR, 1.0, node_size=1, transport="mpi")


if __name__ == "__main__":
    main(__name__)
