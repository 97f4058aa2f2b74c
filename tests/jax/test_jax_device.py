"""Test on which GPU JAX computes. The tests pretend that there are GPUs, and JAX computes on the CPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("jax", exc_type=ImportError)
pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from deepep_rt import EPUnavailableError, _env
from deepep_rt.cuda import driver
from deepep_rt.jax import device as ep


@pytest.mark.parametrize(
    ("before", "index", "after"),
    [(None, 2, "2,0,1,3"), (None, 0, "0,1,2,3"), ("7,5,3,1", 1, "5,7,3,1"), ("GPU-a,GPU-b,-1,GPU-c", 1, "GPU-b,GPU-a")],
)
def test_a_gpu_is_put_first(monkeypatch: pytest.MonkeyPatch, before: str | None, index: int, after: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    _env.put_gpu_first(index, 2 if before and "-1" in before else 4)  # CUDA counts up to the first GPU that does not exist
    assert os.environ["CUDA_VISIBLE_DEVICES"] == after


COMM = SimpleNamespace(Get_rank=lambda: 0, ranks_on_host=lambda: [0], meet=lambda *_: COMM, release=lambda: None)


@pytest.fixture(autouse=True)
def _mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not start MPI in the process of the tests."""
    monkeypatch.setattr(ep, "communicator_of", lambda comm: comm)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.setattr(ep, "count_gpus", lambda: 2)
    monkeypatch.setattr(driver, "make_current", lambda ordinal: None)


@pytest.mark.usefixtures("two_gpus")
def test_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(driver, "has_started", lambda: False)
    monkeypatch.setattr(driver, "use_device", lambda local_rank: asked.append(local_rank) or local_rank)
    assert ep.use_gpu_of_rank(COMM) in ep.jax.local_devices()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert asked == [0]


@pytest.mark.usefixtures("two_gpus")
def test_after_cuda_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "has_started", lambda: True)
    monkeypatch.setattr(driver, "use_device", lambda local_rank: 1)  # another library chose it
    with pytest.raises(EPUnavailableError, match=r"as number 1.*before anything starts CUDA"):
        ep.use_gpu_of_rank(COMM)


def test_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ep, "count_gpus", lambda: 0)
    assert ep.use_gpu_of_rank(COMM) == ep.jax.local_devices()[0]
