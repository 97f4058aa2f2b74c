"""Measure latency and bandwidth between ranks over MPI, from host memory (`doctor --network`).

The relay of `NetworkOptions(transport="mpi")` gets these rates. With `transport="nixl"`, and in jobs without MPI, relays over NIXL measure
theirs. Between GPUs, Buffers measure what their kernels reach.
`runner` calls `measure` in the child process in which the ranks meet, because MPI or a network may hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EPError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from ..comm.communicator import Communicator

MESSAGE_BYTES = 1 << 20
"""Bytes of a large message. The relay sends chunks of this size."""

WINDOW = 8
"""Messages in flight."""

SMALL_BYTES = 8

_BATCHES, _PER_BATCH = 5, 20
_SECONDS = 0.1  # of one measured rate, about
_MOST_WINDOWS = 64
_PAUSE_S = 1e-3  # ranks without a part poll slowly, because spinning would take the processors of the others
_TAG = 77
_RELAY_TIMEOUT_S = 30.0

Pair = tuple[int, int]


def measure(
    comm: Communicator,
    nodes: Sequence[Sequence[int]],
    *,
    mpi: Intracomm | None,
    with_gpus: bool,
    announce: Callable[[str], None],
    transport: str = "auto",
) -> dict[str, Any]:
    """Measure between neighbours within nodes, and between the same ranks of neighbouring nodes. Collective.

    `nodes` has the ranks of each node, and `mpi` is MPI's communicator of the same ranks, or None in a job without MPI. `announce` is
    called with the part that begins, so that a part that hangs can be named. With `with_gpus`, Buffers measure between the GPUs too.
    `transport` is the one between different nodes.

    Returns:
        `links`, over MPI: a dictionary for each pair of ranks, with `where` ("near" or "far"), `ranks`, `us` (a small message one way),
        `gb_s` and `back_gb_s` (large messages in each direction, while other ranks rest) and `together_gb_s` (one direction, while all
        pairs send both ways). With NIXL `relay`: what relays over it reach, as `measure_relays` returns it. `gpus`: rates between GPUs,
        or `reason` why there are none.
    """
    links = [] if mpi is None else _measure_messages(mpi, nodes, announce)
    found: dict[str, Any] = {"nodes": [list(node) for node in nodes], "links": links}
    if (transport == "nixl" or (transport == "auto" and mpi is None)) and len(nodes) > 1:
        found["relay"] = measure_relays(comm, nodes, announce)
    if with_gpus:
        announce("between the GPUs")
        found["gpus"] = measure_gpus(comm, nodes, transport)
    return found


def _measure_messages(mpi: Intracomm, nodes: Sequence[Sequence[int]], announce: Callable[[str], None]) -> list[dict[str, Any]]:
    links: dict[Pair, dict[str, Any]] = {}
    for where, first, every in (("near", *_near_pairs(nodes)), ("far", *_far_pairs(nodes))):
        for pairs in _rounds(first):
            announce(f"{where}, {_names(pairs)}")
            for pair, rates in _round(mpi, pairs, _alone):
                links[pair] = {"where": where, "ranks": list(pair), **rates}
        for pairs in _rounds(every):
            announce(f"{where}, all pairs at once")
            for pair, rates in _round(mpi, pairs, _together):
                links.setdefault(pair, {"where": where, "ranks": list(pair)}).update(rates)
    return list(links.values())


def _near_pairs(nodes: Sequence[Sequence[int]]) -> tuple[list[Pair], list[Pair]]:
    """Return a pair of each node, and as many disjoint pairs of each node as there are."""
    every = [(node[i], node[i + 1]) for node in nodes for i in range(0, len(node) - 1, 2)]
    return [(node[0], node[1]) for node in nodes if len(node) > 1], every


def _far_pairs(nodes: Sequence[Sequence[int]]) -> tuple[list[Pair], list[Pair]]:
    """Return a pair of each two neighbouring nodes, and the pairs of all their ranks."""
    neighbours = [(nodes[i], nodes[(i + 1) % len(nodes)]) for i in range(len(nodes) if len(nodes) > 2 else len(nodes) - 1)]
    every = [(x, y) for a, b in neighbours for x, y in zip(a, b, strict=False)]
    return [(a[0], b[0]) for a, b in neighbours], every


def _rounds(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Divide pairs into rounds, in each of which a rank has at most one part."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = (each for each in rounds if not any(set(pair) & set(other) for other in each))
        found = next(free, None)
        if found is None:
            rounds.append([pair])
        else:
            found.append(pair)
    return rounds


def _names(pairs: Sequence[Pair]) -> str:
    shown = ", ".join(f"rank {a} with rank {b}" for a, b in pairs[:4])
    return shown + (f" and {len(pairs) - 4} more pairs" if len(pairs) > 4 else "")


_Rates = dict[str, float]


def _round(comm: Intracomm, pairs: Sequence[Pair], part: Callable[[Intracomm, int, bool], _Rates]) -> list[tuple[Pair, _Rates]]:
    """Run a part on each pair at the same time. Return what the first rank of each pair measured, on all ranks."""
    rank, found = comm.Get_rank(), None
    _barrier(comm)
    for a, b in pairs:
        if rank in (a, b):
            rates = part(comm, b if rank == a else a, rank == a)
            found = ((a, b), rates) if rank == a else None
    _barrier(comm)
    return [each for each in comm.allgather(found) if each is not None]


def _barrier(comm: Intracomm) -> None:
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(_PAUSE_S)


def _alone(comm: Intracomm, peer: int, is_first: bool) -> _Rates:
    """Measure a small message, then large ones in one direction, then in the other."""
    us = _latency_us(comm, peer, is_first)
    there = _one_way(comm, peer, is_first)
    back = _one_way(comm, peer, not is_first)
    if is_first:
        back = comm.recv(source=peer, tag=_TAG)
    else:
        comm.send(back, dest=peer, tag=_TAG)
    return {"us": us, "gb_s": there, "back_gb_s": back}


def _latency_us(comm: Intracomm, peer: int, is_first: bool) -> float:
    """Return half of the time of a round trip in microseconds: of the best batch, because other processes only add."""
    data, batches = np.zeros(SMALL_BYTES, np.uint8), []
    for batch in range(_BATCHES + 1):  # the first one connects the ranks
        start = time.perf_counter()
        for _ in range(_PER_BATCH):
            if is_first:
                comm.Send(data, peer, _TAG)
                comm.Recv(data, peer, _TAG)
            else:
                comm.Recv(data, peer, _TAG)
                comm.Send(data, peer, _TAG)
        if batch:
            batches.append((time.perf_counter() - start) / _PER_BATCH / 2)
    return 1e6 * min(batches)


def _one_way(comm: Intracomm, peer: int, sends: bool) -> float:
    """Return the bandwidth of large messages to or from a peer in GB/s. The sender's clock counts, until the last message has arrived."""

    def window(sizes: np.ndarray) -> float:
        start = time.perf_counter()
        for _ in range(int(sizes[0])):
            _wait([(comm.Isend if sends else comm.Irecv)(row, peer, _TAG) for row in rows])
        word = np.zeros(1)
        if sends:
            comm.Recv(word, peer, _TAG)
        else:
            comm.Send(word, peer, _TAG)
        return time.perf_counter() - start

    rows = np.zeros((WINDOW, MESSAGE_BYTES), np.uint8)
    return _rate(comm, peer, sends, window)


def _together(comm: Intracomm, peer: int, is_first: bool) -> _Rates:
    """Measure large messages in both directions at once."""

    def window(sizes: np.ndarray) -> float:
        start = time.perf_counter()
        for _ in range(int(sizes[0])):
            _wait([comm.Irecv(row, peer, _TAG) for row in incoming] + [comm.Isend(row, peer, _TAG) for row in outgoing])
        return time.perf_counter() - start

    outgoing, incoming = np.zeros((WINDOW, MESSAGE_BYTES), np.uint8), np.zeros((WINDOW, MESSAGE_BYTES), np.uint8)
    return {"together_gb_s": _rate(comm, peer, is_first, window)}


def _rate(comm: Intracomm, peer: int, decides: bool, window: Callable[[np.ndarray], float]) -> float:
    """Time one window after a first one, which connects the ranks. Then time as many as fit `_SECONDS`. Return GB/s."""
    number = np.ones(1)
    window(number)
    seconds = window(number)
    if decides:
        number[0] = min(max(_SECONDS // max(seconds, 1e-6), 1), _MOST_WINDOWS)
        comm.Send(number, peer, _TAG)
    else:
        comm.Recv(number, peer, _TAG)
    seconds = window(number)
    return float(number[0]) * WINDOW * MESSAGE_BYTES / seconds / 1e9


def _wait(requests: Sequence[Any]) -> None:
    for request in requests:
        request.Wait()


# --- over NIXL --------------------------------------------------------------------------------------------------------------------


def measure_relays(comm: Communicator, nodes: Sequence[Sequence[int]], announce: Callable[[str], None]) -> dict[str, Any]:
    """Measure between the first ranks of neighbouring nodes with relays over NIXL. Collective.

    Returns:
        `links`: a dictionary for each pair, with `ranks`, `us`, `gb_s` and `back_gb_s`. Instead `reason`: why there is no relay.
    """
    from .relay_rates import relay_rates

    links, rank = [], comm.Get_rank()
    for pairs in _rounds(_far_pairs(nodes)[0]):
        announce(f"relays over NIXL, {_names(pairs)}")
        mine = next((pair for pair in pairs if rank in pair), None)
        ranks = comm.sub_comm(mine or (rank,))
        found: dict[str, Any] = {}
        if mine:
            try:
                found = {"ranks": list(mine), **relay_rates(ranks, "nixl", _RELAY_TIMEOUT_S)}
            except EPError as error:
                found = {"reason": f"rank {rank}: {error}"}
        for source, answer in enumerate(comm.allgather(found)):
            if "reason" in answer:
                return answer
            if answer and answer["ranks"][0] == source:
                links.append(answer)
        ranks.Free()
    return {"links": links}


# --- between GPUs ------------------------------------------------------------------------------------------------------------------


def measure_gpus(comm: Communicator, nodes: Sequence[Sequence[int]], transport: str) -> dict[str, Any]:
    """Measure between the GPUs with Buffers, while all ranks send at the same time. Collective. The arguments are those of `measure`.

    Returns:
        `near`: GB/s that the slowest rank of a node pushes to the others, by the number of the node. With several nodes `far`: `gb_s` that
        the slowest rank puts to other nodes, `transport`, `us` (a word one way to another node), and `near_us` (to a rank of the same node)
        if nodes have several ranks. Instead `reason`: why there is no Buffer.
    """
    found: dict[str, Any] = {}
    if len({len(node) for node in nodes}) > 1:
        return {"reason": "the nodes have different numbers of ranks"}
    try:
        if len(nodes) > 1:  # first, because NVSHMEM starts over the ranks of the first Buffer
            found["far"] = _far_gpus(comm, len(nodes[0]), transport)
        if len(nodes[0]) > 1:
            mine = next(i for i, node in enumerate(nodes) if comm.Get_rank() in node)
            found["near"] = {str(mine): _near_gpus(comm, nodes[mine])}
    except EPError as error:
        found = {"reason": f"rank {comm.Get_rank()}: {error}"}
    answers = comm.allgather(found)  # also after a failure of some ranks, so that all of them come here once
    for answer in answers:
        if "reason" in answer:
            return answer
        found.get("near", {}).update(answer.get("near", {}))
    return found


def _far_gpus(comm: Communicator, node_size: int, transport: str) -> dict[str, Any]:
    from ..buffer import Buffer, backend_of
    from ..network import NetworkOptions

    network, sizes = NetworkOptions(transport=transport), _sizes(comm.Get_size(), node_size)
    ranks: Any = comm
    with Buffer(ranks, **sizes, network=network) as buffer:
        rate, description = buffer.copy_ceiling(), buffer.describe()
        if (measured := description.measured) is not None:
            latencies = {"near_us": 1e6 * measured.near_latency_s, "us": 1e6 * measured.far_latency_s}
        else:  # nodes of one rank have no path to choose
            backend: Any = backend_of(buffer)
            latencies = {"us": 1e6 * backend.throughput.far_latency()}
    return {"gb_s": rate / 1e9, "transport": description.transport, **latencies}


def _near_gpus(comm: Communicator, node: Sequence[int]) -> float:
    from ..buffer import Buffer

    group: Any = comm.sub_comm(node)
    with Buffer(group, **_sizes(group.Get_size(), group.Get_size())) as buffer:
        return buffer.copy_ceiling() / 1e9


def _sizes(num_ranks: int, node_size: int) -> dict[str, Any]:
    experts = dict(num_topk=1, num_experts=num_ranks, ranks_per_node=node_size)
    return dict(num_max_tokens_per_rank=2048, hidden=7168, num_slots=1, backend="cuda", timeout_s=60, **experts)
