"""`description`: what `Buffer.describe` prints."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from deepep_rt import BufferDescription, LinkRates

TEXT = """\
backend    cuda
ranks      4, on 2 nodes of 2
hosts      a (ranks 0 to 1); b (ranks 2 to 3)
GPUs       H100 (sm_90) (ranks 0, 2 to 3); A100 (sm_80) (rank 1)
transport  mpi: rank 1 on a has no RDMA NIC
path       direct: path='direct' was passed
measured   near 100 GB/s and 10 us, far 1.5 GB/s and 14300 us
memory     1.50 GB a rank (control 0.5 MB, pool 1500.0 MB)
provider   NVSHMEM"""


def test_the_table() -> None:
    description = BufferDescription(
        "cuda",
        4,
        2,
        ("a", "a", "b", "b"),
        ("H100 (sm_90)", "A100 (sm_80)", "H100 (sm_90)", "H100 (sm_90)"),
        "mpi",
        "rank 1 on a has no RDMA NIC",
        "direct",
        "path='direct' was passed",
        LinkRates(100e9, 10e-6, 1.5e9, 0.0143),
        {"control": 500_000, "pool": 1_500_000_000, "low_latency": 0, "total": 1_500_500_000},
        provider="NVSHMEM",
    )
    assert str(description) == TEXT
    assert description.num_nodes == 2
    assert pickle.loads(pickle.dumps(description)) == description
    assert "(control 0.5 MB, pool 1500.0 MB), and more if results fill it" in str(dataclasses.replace(description, grows=True))
    assert "measured   nothing" in str(dataclasses.replace(description, measured=None))
    with pytest.raises(dataclasses.FrozenInstanceError):
        description.path = "hierarchical"  # type: ignore[misc]


def test_one_node_has_no_path() -> None:
    text = str(BufferDescription("cuda", 2, 2, ("a", "a"), ("H100 (sm_90)",) * 2))
    assert text.splitlines() == [
        "backend    cuda",
        "ranks      2, on 1 node",
        "hosts      a (ranks 0 to 1)",
        "GPUs       H100 (sm_90) (ranks 0 to 1)",
    ]
