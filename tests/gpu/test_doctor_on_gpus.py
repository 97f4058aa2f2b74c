"""Run doctor on a machine with GPUs. Compare its facts with torch and with the log line of a Buffer.

Under mpirun, rank 0 runs doctor without a launcher. A job cannot start `mpirun -n N python -m deepep_rt doctor`, so
`test_all_ranks_together` gathers the reports of this job's ranks instead.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import uuid

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")
pytest.importorskip("typer")

from gpu_buffers import make  # noqa: E402

from deepep_rt import Buffer  # noqa: E402
from deepep_rt.comm.mpi import MpiCommunicator  # noqa: E402
from deepep_rt.doctor import network_rates  # noqa: E402
from deepep_rt.doctor import runner as doctor_run  # noqa: E402
from deepep_rt.doctor.facts import JobReport, gpu_of  # noqa: E402
from deepep_rt.doctor.report import findings  # noqa: E402
from deepep_rt.jit import build, compiler  # noqa: E402

LAUNCHERS = ("OMPI_", "PMI", "PMIX_", "PRTE_", "MPI_", "HYDI_", "SLURM_", "DEEPEP_RT_SHARE_GPUS")


def run(*options, **environment):
    """Run doctor outside of this job. Return its answer, broken or not."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm": "isolated"}  # root, and no ssh
    words = [sys.executable, "-m", "deepep_rt", "doctor", "--json", *options]
    done = subprocess.run(words, env={**kept, **environment}, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert done.returncode == (answer["status"] == "broken"), done.stderr
    return answer


def findings_text(answer, *levels):
    return "\n".join(f"{f['level']} {f['kind']}: {f['what']}" for f in answer["findings"] if not levels or f["level"] in levels)


@pytest.fixture
def only_rank_0(comm):
    if comm.Get_rank():
        pytest.skip("rank 0 runs it")


def measured(comm, nodes, **options):
    """Measure over MPI and between the GPUs, as `doctor --network` does."""
    return network_rates.measure(MpiCommunicator(comm), nodes, mpi=comm, with_gpus=True, announce=lambda part: None, **options)


def test_rates_between_ranks(comm):
    """`doctor --network` on this job's ranks: over MPI, and between the GPUs of the node with a Buffer."""
    found = measured(comm, [list(range(comm.Get_size()))])
    assert "reason" not in found["gpus"], found["gpus"]
    if comm.Get_size() > 1:
        assert found["gpus"]["near"]["0"] > 1
        assert {link["where"] for link in found["links"]} == {"near"}
        assert found["links"][0]["gb_s"] > 0


@pytest.mark.parametrize("transport", ["nvshmem", "mpi"])
def test_rates_between_nodes_of_one_rank(comm, transport):
    if comm.Get_size() == 1:
        pytest.skip("one rank has no other node")
    nodes = [[rank] for rank in range(comm.Get_size())]
    found = measured(comm, nodes, transport=transport)
    assert "reason" not in found["gpus"], found["gpus"]
    far = found["gpus"]["far"]
    assert far["gb_s"] > 0
    assert far["us"] > 0
    assert far["transport"] == transport


@pytest.mark.usefixtures("only_rank_0")
def test_gpus_are_those_that_torch_sees():
    answer = run("--backend", "cuda", "--tokens", "128")
    facts = answer["ranks"][0]["facts"]
    assert facts["driver"]["init"] == "CUDA_SUCCESS", facts["driver"]
    assert len(facts["driver"]["gpus"]) == torch.cuda.device_count()
    for index, gpu in enumerate(facts["driver"]["gpus"]):
        seen = torch.cuda.get_device_properties(index)
        assert gpu["name"] == seen.name
        assert gpu["arch"] == f"sm_{seen.major}{seen.minor}"
        assert abs(gpu["total_bytes"] - seen.total_memory) < 1 << 20
        assert uuid.UUID(gpu["uuid"]) == uuid.UUID(str(seen.uuid).removeprefix("GPU-"))
        for other in range(torch.cuda.device_count()):
            if other != index:
                assert facts["driver"]["access"][index][other] == torch.cuda.can_device_access_peer(index, other), (index, other)


@pytest.mark.usefixtures("only_rank_0")
def test_nvml_knows_the_same_gpus():
    pytest.importorskip("pynvml")
    facts = run()["ranks"][0]["facts"]
    nvml = facts["nvml"]
    assert "error" not in nvml, nvml
    assert nvml["driver"].count("."), nvml["driver"]
    by_uuid = {gpu["uuid"]: gpu for gpu in nvml["gpus"]}
    for gpu in facts["driver"]["gpus"]:
        seen = by_uuid[gpu["uuid"]]
        assert seen["mig"] is not True, "these tests expect whole GPUs"
        assert 0 < seen["free_bytes"] <= seen["total_bytes"]
        assert seen["nvlinks"] == nvml["gpus"][0]["nvlinks"]
    paths, number = nvml["paths"], len(nvml["gpus"])
    assert [[paths[a][b] == "-" for b in range(number)] for a in range(number)] == [
        [a == b for b in range(number)] for a in range(number)
    ]
    assert "unknown" not in {path for row in paths for path in row}


@pytest.mark.usefixtures("only_rank_0")
def test_this_machine_is_not_broken():
    """The other tests run on this machine, so an error would be a mistake of doctor."""
    answer = run("--backend", "cuda", "--tokens", "128", "--hidden", "1024")
    assert answer["status"] == "ok", findings_text(answer, "error")
    assert answer["ranks"][0]["failures"] == {}, answer["ranks"][0]["failures"]
    assert "no-nvlink" not in findings_text(answer) or "H200" not in str(answer["ranks"][0]["facts"]["driver"]), findings_text(
        answer
    )


@pytest.mark.usefixtures("only_rank_0")
def test_hidden_gpus_are_found():
    answer = run(CUDA_VISIBLE_DEVICES="")
    (finding,) = (f for f in answer["findings"] if f["kind"] in ("gpu-hidden", "no-gpu", "driver-fails"))
    assert (finding["kind"], finding["level"]) == ("gpu-hidden", "warning"), findings_text(answer)
    assert "CUDA_VISIBLE_DEVICES is ''" in finding["what"]
    assert run("--backend", "cuda", CUDA_VISIBLE_DEVICES="")["status"] == "broken"


@pytest.mark.usefixtures("only_rank_0")
def test_too_little_memory():
    pytest.importorskip("pynvml")
    answer = run("--tokens", "1000000", "--hidden", "16384", "--slots", "8")
    assert "not-enough-memory" in findings_text(answer, "error"), findings_text(answer)


def test_all_ranks_together(comm, monkeypatch):
    """Apply the rules to the reports of all ranks. Each rank has a GPU, or there is a finding."""
    monkeypatch.delenv("DEEPEP_RT_SHARE_GPUS", raising=False)
    report = {**doctor_run.run_probes(), "launch": doctor_run.launch_variables()}
    assert report["failures"] == {}, report["failures"]
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = {"rank": comm.Get_rank(), "local_rank": host.Get_rank(), "group": min(host.allgather(comm.Get_rank()))}
    reports = comm.allgather({**report, **place})
    host.Free()
    sizes = dict(num_max_tokens_per_rank=64, hidden=1024, num_topk=4)
    job = JobReport(reports, sizes, backend="cuda")
    found = {finding.type.name: finding for finding in findings(job)}
    shares = len({gpu_of(one)["uuid"] for one in reports}) < len(reports)
    assert ("shared-gpu" in found) == shares, found
    errors = {name: finding.what for name, finding in found.items() if finding.level == "error"}
    assert set(errors) <= {"shared-gpu"}, errors
    if not shares:  # doctor expects the GPU that torch chose for this rank, which a Buffer takes
        mine = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        assert uuid.UUID(gpu_of(reports[comm.Get_rank()])["uuid"]) == uuid.UUID(str(mine).removeprefix("GPU-"))


def test_the_log_line_of_a_buffer(comm, caplog):
    before = build.stats.hits + build.stats.misses
    with caplog.at_level(logging.INFO, logger="deepep_rt"), make(comm, num_max_tokens_per_rank=64, hidden=1024):
        arch = compiler.target_arch()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Buffer of ")]
    if comm.Get_rank():
        assert lines == []
        return
    hint = Buffer.size_hint(
        comm.Get_size(), num_max_tokens_per_rank=64, hidden=1024, num_topk=8, num_experts=32 * comm.Get_size()
    )
    (line,) = lines
    assert line.startswith(f"Buffer of {comm.Get_size()} ranks: CUDA ({arch}), NVLink or PCIe peer access"), line
    assert f"{hint['total'] / 1e9:.2f} GB a rank" in line
    assert line.endswith(f"kernels: {build.stats.hits} from the cache and {build.stats.misses} compiled"), line
    assert build.stats.hits + build.stats.misses > before or before > 0
