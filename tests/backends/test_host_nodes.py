"""The host backend over several nodes: the rounding of their sums, the most rows of a dispatch, and handles that grow with the ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import oracle
import pytest
from launch import run_checks
from memory_store import make_ranks

from deepep_rt import Buffer
from deepep_rt.arrays.view import HOST
from deepep_rt.backends.base import BufferInfo
from deepep_rt.backends.host.handle_tables import HostHandleTables
from deepep_rt.buffer import backend_of
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.config import Config


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), *(pytest.param(4, n, marks=pytest.mark.full) for n in (2, 1))])
@pytest.mark.parametrize("program", ["table", "prepared_throughput"])
def test_program(program: str, num_ranks: int, ranks_per_node: int) -> None:
    run_checks(num_ranks, program, "--ranks-per-node", str(ranks_per_node))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nodes(num_ranks: int) -> None:
    run_checks(num_ranks, "nodes")


def run_on_threads(num_ranks: int, run: Callable[[StoreCommunicator], None]) -> None:
    """Run a function on each rank, and raise the first error."""
    failed: list[BaseException] = []

    def guarded(comm: StoreCommunicator) -> None:
        try:
            run(comm)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(comm,)) for comm in make_ranks(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failed:
        raise failed[0]


@pytest.mark.full
def test_64_ranks_of_8_nodes() -> None:
    """What a rank keeps of a routing has no table of all pairs of ranks."""
    ranks, node, tokens, topk = 64, 8, 3, 4
    experts = 2 * ranks
    inputs = [oracle.make_inputs(1, rank, tokens, 16, topk, experts, dtype="bfloat16") for rank in range(ranks)]
    expected = [oracle.expected_dispatch(rank, inputs, experts) for rank in range(ranks)]
    rows = [received.x for received in expected]
    kept: dict[int, int] = {}

    def run(comm: StoreCommunicator) -> None:
        mine, rank = inputs[comm.rank], comm.rank
        sizes = dict(num_max_tokens_per_rank=tokens, hidden=16, num_topk=topk, num_experts=experts)
        with Buffer(comm, **sizes, ranks_per_node=node, backend="host", timeout_s=60) as buffer:
            sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            oracle.check_dispatch(sent, expected[rank])
            back = buffer.combine(sent.recv_x, sent.handle)
            oracle.check_sums(back, rank, inputs, rows, experts, node_size=node)
            first = backend_of(buffer).tables.first_rows(sent.handle, sent.views["x"].framework).to_framework()
            sources = expected[rank].src_idx[:, 0]
            assert first.tolist() == [int((sources < peer).sum()) for peer in range(ranks)]
            arrays = vars(sent.handle.routing).values()
            flat = [array for value in arrays for array in (value if isinstance(value, tuple) else (value,))]
            kept[rank] = sum((array if array.base is None else array.base).size for array in flat if hasattr(array, "base"))

    run_on_threads(ranks, run)
    assert len(kept) == ranks
    assert max(kept.values()) <= 3 * ranks + tokens * topk < ranks * ranks


@pytest.mark.parametrize(("hosts", "num_nodes"), [([[0, 1], [2, 3]], 2), ([[0, 1, 2], [3]], 1)])
def test_nodes_are_hosts(hosts: list[list[int]], num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `ranks_per_node`, the nodes are those of the CUDA backend, and one where that backend refuses the placement."""
    here = {rank: ranks for ranks in hosts for rank in ranks}
    monkeypatch.setattr(StoreCommunicator, "ranks_on_host", lambda comm: here[comm.rank])
    found = []

    def run(comm: StoreCommunicator) -> None:
        sizes = dict(num_max_tokens_per_rank=4, hidden=16, num_topk=2, num_experts=4)
        with Buffer(comm, **sizes, backend="host", timeout_s=60) as buffer:
            found.append(buffer.config.num_nodes)

    run_on_threads(4, run)
    assert found == [num_nodes] * 4


def test_tables_grow_with_the_ranks() -> None:
    words = [
        HostHandleTables(BufferInfo(1, Config(ranks, 8, 64, 8, 4096, ranks_per_node=8), HOST)).num_words for ranks in (1024, 2048)
    ]
    assert words[1] - words[0] == 4 * 1024
    assert words[1] < 5 * 2048
