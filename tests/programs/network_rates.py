"""Measure between ranks of declared nodes."""

from __future__ import annotations

from mpi4py import MPI
from spmd import main

from deepep_rt.comm.mpi import MpiCommunicator
from deepep_rt.comm.nixl_traffic import nixl_objection
from deepep_rt.doctor.network_rates import measure, measure_relays


def check_pairs_and_rates(comm: MPI.Intracomm) -> None:
    """Two nodes of two ranks: each node's pair, the pair between the nodes, and all pairs at once. All ranks know everything."""
    parts: list[str] = []
    found = measure(MpiCommunicator(comm), [[0, 1], [2, 3]], mpi=comm, with_gpus=False, announce=parts.append)
    assert comm.allgather(found) == [found] * 4
    assert found["nodes"] == [[0, 1], [2, 3]]
    links = {(each["where"], *each["ranks"]): each for each in found["links"]}
    assert set(links) == {("near", 0, 1), ("near", 2, 3), ("far", 0, 2), ("far", 1, 3)}
    for name, each in links.items():
        rates = {"together_gb_s"} if name == ("far", 1, 3) else {"us", "gb_s", "back_gb_s", "together_gb_s"}
        assert set(each) == {"where", "ranks", *rates}
        assert all(each[rate] > 0 for rate in rates)
    assert "gpus" not in found
    assert parts == [
        "near, rank 0 with rank 1, rank 2 with rank 3",
        "near, all pairs at once",
        "far, rank 0 with rank 2",
        "far, all pairs at once",
    ]


def check_relays_over_nixl(comm: MPI.Intracomm) -> None:
    """Between three nodes of a rank. Without NIXL, all ranks know why there are no rates."""
    ranks = comm.Split(comm.Get_rank() == 3)
    if comm.Get_rank() == 3:
        return
    parts: list[str] = []
    found = measure_relays(MpiCommunicator(ranks), [[0], [1], [2]], parts.append)
    assert ranks.allgather(found) == [found] * 3
    if nixl_objection():
        assert "cannot make an agent of NIXL: " in found["reason"]
        return
    assert [link["ranks"] for link in found["links"]] == [[0, 1], [1, 2], [2, 0]]
    assert all(link[rate] > 0 for link in found["links"] for rate in ("us", "gb_s", "back_gb_s"))
    assert parts == [
        "relays over NIXL, rank 0 with rank 1",
        "relays over NIXL, rank 1 with rank 2",
        "relays over NIXL, rank 2 with rank 0",
    ]
    if comm.Get_rank() == 0:
        print(f"relays over NIXL: {found['links'][0]}", flush=True)


if __name__ == "__main__":
    main(__name__)
