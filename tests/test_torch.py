"""deepep_rt.torch on the host backend: launches the programs of tests/mpi_host that need PyTorch."""

from __future__ import annotations

import importlib.util

import pytest
from ports import free_port
from test_examples import run
from test_host_backend import _launch

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def _run(program: str, num_ranks: int) -> None:
    output = _launch(num_ranks, program).stdout
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_communicator(num_ranks: int) -> None:
    _run("torch_groups", num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients(num_ranks: int) -> None:
    _run("torch_autograd", num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("options", [[], ["--distributed", "gloo"]], ids=["mpi", "distributed"])
def test_example(num_ranks: int, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares its loss curve with that of one rank itself."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines = run(num_ranks, "moe_torch.py", *options)
    assert lines[0].startswith(f"host: {num_ranks} ranks")
    steps = [line for line in lines if line.startswith("step ")]
    first, last = ([float(word.strip(",")) for word in line.split() if "." in word] for line in (steps[0], steps[-1]))
    assert all(b < 0.8 * a for a, b in zip(first, last, strict=True))
    assert lines[-1] == "OK"
