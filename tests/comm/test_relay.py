"""The relay without MPI: its ring, its memory, and what it knows of other ranks. Over MPI: tests/programs/relay.py."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
from launch import environment, python_on, run_checks
from memory_store import make_ranks
from paths import PROGRAMS

from deepep_rt import EPUnavailableError
from deepep_rt.comm.nixl_traffic import nixl_objection
from deepep_rt.comm.relay import Relay
from deepep_rt.comm.relay_puts import Mirror, Put, PutRing, RelayPeers
from deepep_rt.kernels import structs

needs_nixl = pytest.mark.skipif(bool(nixl_objection()), reason="NIXL is not installed")
DESCRIPTOR = structs.Descriptor.dtype({})


def test_relays_over_mpi() -> None:
    output = run_checks(3, "relay")
    assert "GB/s each way" in output


def test_a_bad_network_between_two_nodes() -> None:
    output = run_checks(4, "bad_network_rounds")
    assert "rounds of 4 ranks" in output


@needs_nixl
@pytest.mark.parametrize(("ranks", "program"), [(3, "relay"), (4, "bad_network_rounds")])
def test_relays_over_nixl(monkeypatch: pytest.MonkeyPatch, ranks: int, program: str) -> None:
    """All that relays over MPI do."""
    monkeypatch.setenv("RELAY_TRANSPORT", "nixl")
    run_checks(ranks, program)


@needs_nixl
@pytest.mark.parametrize("ways", ["", "tcp,self"])
@pytest.mark.parametrize("how", ["none", "no-agent", "no-network", "SIGKILL", "SIGSTOP"])
def test_relays_without_mpi(how: str, ways: str) -> None:
    """The loss of a process is an error at once over any of UCX's ways, and the others go on without it."""
    times = limits.slowness()
    done = subprocess.run(
        [sys.executable, PROGRAMS / "relays_without_mpi.py", "--how", how],
        env=environment(**{limits.VARIABLE: str(times)}, **({"UCX_TLS": ways} if ways else {})),
        capture_output=True,
        text=True,
        timeout=limits.seconds(120, times),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks: passed" in done.stdout
    raised = [float(after_s) for after_s in re.findall(r"raised after (\S+) s", done.stdout)]
    assert len(raised) == (2 if how.startswith("SIG") else 0)
    assert max(raised, default=0.0) < limits.seconds(1.0 if how == "SIGKILL" else 4.0, times), done.stdout


@pytest.mark.parametrize("how", [pytest.param("SIGSTOP", marks=pytest.mark.full), "SIGKILL"])
def test_a_process_that_is_lost_leaves_no_process(how: str) -> None:
    """If it is stopped, the other ranks raise within the time limit, and name the rank and its node. If it is killed, mpirun ends them."""
    times = limits.slowness()
    done = subprocess.run(
        python_on(4, "-m", "mpi4py", PROGRAMS / "lost_relay.py", how),
        env=environment(**{limits.VARIABLE: str(times)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limits.seconds(60, times),
        check=False,
    )
    assert done.returncode, done.stdout
    # Lines of two ranks may run together, so the pattern takes as little as it can.
    raised = re.findall(r"rank (\d) raised after (\S+) s: .*?the relay of rank 3 on node 1 has sent nothing for", done.stdout)
    if how == "SIGSTOP":
        assert sorted(rank for rank, _ in raised) == ["0", "1", "2"], done.stdout
        assert max(float(seconds) for _, seconds in raised) < limits.seconds(4.0, times), raised  # timeout_s there
    else:
        assert "signal 9" in done.stdout, done.stdout  # mpirun names the cause
    processes = re.findall(r"rank \d is process (\d+)", done.stdout)
    assert len(processes) == 4
    left = [process for process in processes if _is_alive(process)]
    assert not left, done.stdout


def _is_alive(process: str) -> bool:
    """Return whether a process still runs this program two seconds later."""
    for _ in range(20):
        try:
            if b"lost_relay" not in Path(f"/proc/{process}/cmdline").read_bytes():
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.1)
    return True


def test_a_relay_needs_mpi() -> None:
    with pytest.raises(
        EPUnavailableError, match=r"rank 0 has .*, which carries no rows; expected MPI .* Start the program with mpirun"
    ):
        Relay(make_ranks()[0], 0, 64, 0, 0, 4, DESCRIPTOR, 1.0, node_size=1, transport="mpi")


# --- the ring ------------------------------------------------------------------------------------------------------------------------


def write(ring: np.ndarray, number: int, **members: int) -> None:
    for name, value in {**members, "sequence": (number + 1) % 2**32}.items():
        ring[number % len(ring)][name] = value


@pytest.fixture
def ring() -> np.ndarray:
    return np.zeros(4, DESCRIPTOR)


def test_puts_are_read_in_order(ring: np.ndarray) -> None:
    puts = PutRing(ring.ctypes.data, 4, DESCRIPTOR)
    assert not puts.is_next_complete()
    write(ring, 1, to=8)
    assert puts.take(8) == [], "put 0 is not complete"
    members: dict[str, int] = {
        "from": 2**40,
        "to": 3 << 33,
        "num_bytes": 2**32 - 1,
        "word": 1 << 44,
        "value": 2**64 - 1,
        "rank": 7,
    }
    write(ring, 0, **members)
    assert puts.is_next_complete()
    assert puts.take(1) == [Put(7, 3 << 33, 2**40, 2**32 - 1, 1 << 44, 2**64 - 1)]
    assert [put.to for put in puts.take(8)] == [8]
    assert puts.num_taken == 2
    for number in range(2, 6):
        write(ring, number, to=number)
    assert [put.to for put in puts.take(8)] == [2, 3, 4, 5]


def test_only_awaited_puts_are_marked(ring: np.ndarray) -> None:
    puts = PutRing(ring.ctypes.data, 4, DESCRIPTOR, first_put=2**32 - 2)
    for number, is_awaited in ((2**32 - 2, 1), (2**32 - 1, 1), (2**32, 0)):
        write(ring, number, is_awaited=is_awaited)
    for put in reversed(puts.take(3)):
        puts.mark_sent(put)
    assert ring["sent"].tolist() == [0, 0, 2**32 - 1, 0], "number 2**32 - 1 has the sequence 0"


@pytest.mark.parametrize("sequence", [5, 3, 2**32 - 7])
def test_overwritten_entries_are_found(ring: np.ndarray, sequence: int) -> None:
    puts = PutRing(ring.ctypes.data, 4, DESCRIPTOR)
    ring[0]["sequence"] = sequence
    with pytest.raises(RuntimeError, match=f"put 0 has the sequence {sequence}; expected 1.*a ring of 4 entries is too small"):
        puts.take(1)


def test_the_depth_is_a_power_of_two(ring: np.ndarray) -> None:
    for depth in (0, 3, 6):
        with pytest.raises(ValueError, match=f"depth={depth}; expected a power of two"):
            PutRing(ring.ctypes.data, depth, DESCRIPTOR)


# --- the memory ----------------------------------------------------------------------------------------------------------------------


def test_offsets_begin_at_the_first_one() -> None:
    memory = np.zeros(64, np.uint8)
    mirror = Mirror(memory.ctypes.data, 64, 1000)
    mirror.part(1003, 2)[:] = b"ab"
    mirror.store(1056, 2**64 - 2)
    assert bytes(memory[3:5]) == b"ab"
    assert memory.view(np.uint64)[7] == 2**64 - 2
    assert len(mirror.part(1000, 64)) == 64
    for offset, num_bytes in ((999, 1), (1000, 65), (1064, 1), (0, 8)):
        with pytest.raises(ValueError, match=f"{num_bytes} bytes at offset {offset}; expected a place from 1000 to 1064"):
            mirror.part(offset, num_bytes)
    for word in (992, 1001, 1004, 1064):
        with pytest.raises(ValueError, match="multiples of 8"):
            mirror.store(word, 1)


@pytest.mark.parametrize("wrong", [(4, 64, 0), (0, 60, 0), (0, 64, 4)])
def test_memory_is_aligned(wrong: Any) -> None:
    memory = np.zeros(128, np.uint8)
    with pytest.raises(ValueError, match="expected multiples of 8"):
        Mirror(memory.ctypes.data + wrong[0], *wrong[1:])


# --- the peers -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def peers() -> RelayPeers:
    """Rank 1 of three ranks, with a limit of 80 s, so a heartbeat every 10 s."""
    return RelayPeers(1, 3, 80.0, 1000.0, node_size=1)


def test_heartbeats(peers: RelayPeers) -> None:
    assert peers.ranks == [0, 2]
    times = [1000.0, 1005.0, 1009.0, 1010.0, 1011.0, 1020.0]
    assert [peers.heartbeat_is_due(now) for now in times] == [True, False, False, True, False, True]


def test_silent_relays(peers: RelayPeers) -> None:
    for now in range(1000, 1060):
        peers.heartbeat_is_due(now)
        peers.heard(2)
        assert peers.error() is None
    peers.heartbeat_is_due(1061.0)
    error = peers.error()
    assert error is not None
    assert (error.rank, error.peer, error.phase) == (1, 0, "the relay")
    assert "the relay of rank 0 on node 0 has sent nothing for 61 s; expected a heartbeat every 10 s" in str(error)
    peers.ended.add(0)
    assert "the relay of rank 0 on node 0 ended 61 s ago" in str(peers.error())
    peers.failed(2, "KeyError: mine")
    peers.failed(2, "a later cause")
    assert "the relay of rank 2 on node 2 failed: KeyError: mine. Fix the cause on rank 2" in str(peers.error())


def test_errors_name_nodes() -> None:
    peers = RelayPeers(1, 6, 80.0, 1000.0, node_size=2)
    assert [peers.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    peers.failed(5, "KeyError: mine")
    error = peers.error()
    assert error is not None
    assert (error.rank, error.peer, error.node) == (1, 5, 2)
    assert "the relay of rank 5 on node 2 failed: KeyError: mine. Fix the cause on rank 5" in str(error)


def test_a_process_that_was_stopped_blames_no_rank(peers: RelayPeers) -> None:
    """It counts no more than the time of one heartbeat."""
    peers.heartbeat_is_due(1001.0)
    peers.heartbeat_is_due(5000.0)
    assert peers.error() is None
    assert peers.stuck_s(5003.0) == 3.0


def test_one_rank_has_no_peers() -> None:
    peers = RelayPeers(0, 1, 1.0, 0.0, node_size=1)
    peers.heartbeat_is_due(100.0)
    assert peers.error() is None
