"""backend="auto" chooses the host backend without a GPU, and raises if a GPU is there and does not work. The driver is a fake."""

from __future__ import annotations

from typing import Any

import pytest

from deepep_rt import EPUnavailableError
from deepep_rt.backends import agreement
from deepep_rt.comm import convert
from deepep_rt.config import Config

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")


class Ranks:
    """A communicator of this rank and of others, with their reasons for having no GPU."""

    def __init__(self, *others: str | None) -> None:
        self.others = others

    def meet(self, timeout_s: float, phase: str, hint: str) -> Ranks:
        return self

    def release(self) -> None: ...

    def allgather(self, mine: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        return [mine, *((mine[0], reason) for reason in self.others)]


def choose(
    monkeypatch: pytest.MonkeyPatch, status: str, backend: str = "auto", others: tuple[str | None, ...] = (), gpus: int = 1
) -> str:
    """Choose a backend with a driver that returns `status`."""

    def start(flags: int) -> tuple:
        if status == "no driver":
            raise RuntimeError("libcuda.so.1 was not found")
        return (getattr(driver.CUresult, status),)

    monkeypatch.setattr(driver, "cuInit", start)
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (driver.CUresult.CUDA_SUCCESS, gpus))
    return agreement.agree(Ranks(*others), Config(1 + len(others), 8, 64, 2, 4 * (1 + len(others))), backend, "copy")


def test_launcher_other_than_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun, MPI sees one rank in each process. This must not pass unnoticed."""
    mpi = pytest.importorskip("mpi4py.MPI")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="WORLD_SIZE=2, but MPI counts one process.*mpirun"):
        convert.communicator_of(mpi.COMM_SELF)
    for value in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", value)
        convert.communicator_of(mpi.COMM_SELF)


@pytest.mark.parametrize(
    ("status", "gpus", "chosen"),
    [
        ("CUDA_SUCCESS", 1, "cuda"),
        ("CUDA_SUCCESS", 0, "host"),
        ("CUDA_ERROR_NO_DEVICE", 1, "host"),
        ("CUDA_ERROR_STUB_LIBRARY", 1, "host"),
        ("no driver", 1, "host"),
    ],
)
def test_automatic_choice(monkeypatch: pytest.MonkeyPatch, status: str, gpus: int, chosen: str) -> None:
    assert choose(monkeypatch, status, gpus=gpus) == chosen


def test_broken_driver_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EPUnavailableError, match=r"on rank 0 the CUDA driver fails: CUDA_ERROR_SYSTEM_NOT_READY.*doctor.*'host'"):
        choose(monkeypatch, "CUDA_ERROR_SYSTEM_NOT_READY")
    with pytest.raises(EPUnavailableError, match="on rank 1 the CUDA driver fails: CUDA_ERROR_UNKNOWN"):
        choose(monkeypatch, "CUDA_SUCCESS", others=("the CUDA driver fails: CUDA_ERROR_UNKNOWN",))
    assert choose(monkeypatch, "CUDA_ERROR_SYSTEM_NOT_READY", backend="host") == "host"


def test_driver_that_cannot_count_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuInit", lambda flags: (driver.CUresult.CUDA_SUCCESS,))
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (driver.CUresult.CUDA_ERROR_UNKNOWN, 0))
    assert agreement.why_no_gpu() == "the CUDA driver fails: CUDA_ERROR_UNKNOWN"


def test_ranks_with_and_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EPUnavailableError, match=r"some ranks have a GPU and some have none \(without: \[1\], no CUDA driver"):
        choose(monkeypatch, "CUDA_SUCCESS", others=("no CUDA driver (libcuda.so.1 was not found)",))
    with pytest.raises(
        EPUnavailableError, match="backend='cuda', but rank 0 cannot use a GPU: the CUDA driver says CUDA_ERROR_NO_DEVICE"
    ):
        choose(monkeypatch, "CUDA_ERROR_NO_DEVICE", backend="cuda")
