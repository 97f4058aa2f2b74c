"""Check the machine of a benchmark."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from deepep_rt import EPUnavailableError
from deepep_rt.bench import machine as bench_machine


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_machine, "why_no_gpu", lambda: "the CUDA driver sees no GPU")
    with pytest.raises(EPUnavailableError, match=r"sees no GPU\. Pass --backend host, which needs none"):
        bench_machine.Machine(MPI.COMM_SELF, "cuda")
    assert not bench_machine.Machine(MPI.COMM_SELF, "host").on_gpu
