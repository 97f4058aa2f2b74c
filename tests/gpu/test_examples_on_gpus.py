"""Run the examples on GPUs as a user does; they check themselves. JAX needs processes of its own: see tests/gpu_jax."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import sys

import pytest
from paths import ROOT

pytestmark = pytest.mark.gpu

EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(comm, monkeypatch, capsys):
    """Return the lines that rank 0 prints. The other ranks print none."""

    def run(name, *options):
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        comm.Barrier()
        lines = capsys.readouterr().out.splitlines()
        assert (lines == []) == (comm.Get_rank() > 0)
        return lines

    return run


@pytest.mark.parametrize("name", ["dispatch_combine.py", "low_latency_decode.py", "moe_torch.py"])
def test_example(name, run, comm):
    lines = run(name)
    if comm.Get_rank() == 0:
        assert lines[-1] == "OK"
        assert "cuda" in lines[0]


def test_the_readme(comm):
    """Run the example of the README. Check in the `with` block, because the gradient is memory of the Buffer."""
    torch = pytest.importorskip("torch")
    if comm.Get_size() > torch.cuda.device_count() or 64 % comm.Get_size():
        pytest.skip("the example needs a GPU for each rank, and as many experts on all ranks")
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    names = {}
    exec(program + "    found = buffer.backend, bool(x.grad.isfinite().all() and x.grad.any())\n", names)
    assert names["found"] == ("cuda", True)


def test_micro_batches_overlap(run, comm, tmp_path):
    """It gives the same bits in less time."""
    options = ["--picture", str(tmp_path / "timeline.png")] if importlib.util.find_spec("matplotlib") else []
    lines = run("overlap_micro_batches.py", *options)
    if comm.Get_rank():
        return
    assert lines[-1] == "OK"
    found = re.search(r"\(cuda\).*: (\d+) us overlapped, (\d+) us one after the other, same bits$", lines[-2])
    assert found, lines
    if comm.Get_size() > 1 and not os.environ.get("DEEPEP_RT_SHARE_GPUS"):
        assert int(found[1]) < int(found[2])
    assert not options or (tmp_path / "timeline.png").stat().st_size > 10_000


def test_a_profile_has_all_kernels(run, comm, tmp_path):
    """The trace of this rank has the kernels of both modes, and the shared expert on a second stream."""
    pytest.importorskip("torch")
    lines = run("profile_step.py", "--out", str(tmp_path), "--shared", "--tokens", "1024")
    assert comm.Get_rank() > 0 or lines[-1] == "OK"
    trace = json.loads((tmp_path / f"rank{comm.Get_rank()}.json").read_text())
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    expected = {"route", "dispatch", "expert_positions", "expand_rows", "sum_expert_rows", "combine", "ll_dispatch", "ll_combine"}
    assert expected <= {kernel["name"] for kernel in kernels}
    assert len({kernel["args"]["stream"] for kernel in kernels}) == 2
