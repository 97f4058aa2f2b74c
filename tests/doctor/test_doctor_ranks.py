"""Run doctor under mpirun and other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("typer")

from doctor_command import Doctor, found_text, levels, program
from launch import mpirun
from without import starting_with

from deepep_rt.comm.store_server import StoreServer
from deepep_rt.doctor import runner


@pytest.mark.full
def test_differences_between_ranks(doctor: Doctor, tmp_path: Path) -> None:
    other = ["env", "NVSHMEM_IB_SL=3", f"DEEPEP_RT_CACHE_DIR={tmp_path}/other", "CUDA_VISIBLE_DEVICES=1"]
    words = program("--json", "--backend", "host")
    command = [*mpirun(), "-n", "1", *words, ":", "-n", "1", *other, *words]
    answer = doctor.json(command=command)
    assert [report["rank"] for report in answer["ranks"]] == [0, 1]
    different = answer["differences"]
    assert different["NVSHMEM_IB_SL"] == {"(none)": [0], "3": [1]}
    assert different["CUDA_VISIBLE_DEVICES"] == {"(none)": [0], "1": [1]}
    assert different["kernel cache"] == {str(tmp_path / "cache"): [0], f"{tmp_path}/other": [1]}
    assert found_text(answer, "environment-differs").startswith("DEEPEP_RT_CACHE_DIR")
    assert "NVSHMEM_IB_SL (none) on rank 0 and 3 on rank 1" in found_text(answer, "environment-differs")
    assert "CUDA_VISIBLE_DEVICES" not in found_text(answer, "environment-differs"), "ranks may have different ones"
    assert levels(answer)["caches-differ"] == "warning"
    done = doctor.run([word for word in command if word != "--json"])
    assert done.stdout.count("Different between ranks") == 1, "only rank 0 prints"
    assert "2 ranks, started by" in done.stdout


@pytest.mark.full
def test_a_wrong_setting_on_one_rank(doctor: Doctor) -> None:
    command = [*mpirun(), "-n", "1", *program("--json"), ":", "-n", "1", "env", "DEEPEP_RT_TIMEOUT_S=abc", *program("--json")]
    answer = doctor.json(command=command, status=1)
    (finding,) = (finding for finding in answer["findings"] if finding["kind"] == "wrong-setting")
    assert finding["ranks"] == [1]


@pytest.mark.full
def test_a_launcher_of_another_mpi(doctor: Doctor) -> None:
    """Imitate a launcher of another MPI: its variables say two processes, but MPI starts with one."""
    answer = doctor.json(status=1, OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="2")
    library = answer["ranks"][0]["facts"]["mpi"]["library"]
    assert f"(Open MPI) started 2 processes, but to mpi4py's MPI ({library}" in found_text(answer, "wrong-mpirun")
    # One screen for the job, not one for each process that MPI calls rank 0.
    assert doctor.text(OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2") == ""


def test_processes_of_torchrun(doctor: Doctor) -> None:
    answer = doctor.json(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    assert levels(answer)["other-launcher"] == "warning"
    assert "WORLD_SIZE is 2" in found_text(answer, "other-launcher")
    assert doctor.text(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2") == ""


@pytest.mark.full
def test_odd_variables_of_torchrun(doctor: Doctor) -> None:
    assert "other-launcher" not in levels(doctor.json(WORLD_SIZE="many", LOCAL_RANK="1"))
    assert levels(doctor.json(WORLD_SIZE="2", LOCAL_RANK="", RANK="1"))["other-launcher"] == "warning", "this process prints"
    command = [*mpirun(), "-n", "2", *program("--json", "--backend", "host")]
    assert "other-launcher" not in levels(doctor.json(command=command, WORLD_SIZE="2", LOCAL_RANK="1"))


def test_slots_and_their_store(doctor: Doctor) -> None:
    server = StoreServer()
    server.serve_in_thread()
    options = "--backend", "host", "--max-ranks", "8", "--rendezvous"
    text = doctor.text(*options, f"{server.address}/decode", DEEPEP_RT_STORE_TOKEN="")
    assert f"8 slots can work here; store {server.address}/decode: answers; launcher: none" in " ".join(text.split())
    server.close()
    answer = doctor.json(*options, server.address, status=1)
    assert f"the store at {server.address} was not reached" in found_text(answer, "store-unreachable")
    for place, message in (("auto", "rank 0 starts that store"), ("nowhere", "rendezvous='nowhere'")):
        assert message in doctor.run(program(*options, place)).stderr
    assert "expected it only with --max-ranks" in doctor.run(program("--rendezvous", "a:1")).stderr


def test_an_mpi_that_does_not_start(doctor: Doctor, tmp_path: Path) -> None:
    code = "import os, sys\nif '--gather' in sys.orig_argv:\n    os.write(2, b'no such device\\n')\n    os.abort()\n"
    answer = doctor.json(status=1, **starting_with(tmp_path, code))
    assert found_text(answer, "mpi-does-not-start") == "its process was killed by SIGABRT: no such device"


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ("", ""),
        ("one\n---\n\n  two\n***\n", ": one two"),
        ("Traceback (most recent call last):\n  File\nOSError: gone\n", ": OSError: gone"),
        ("no ssh\nat all\nhere\nblah\nblah\nbye", ": no ssh at all here [...] bye"),
    ],
)
def test_the_end_of_a_child_is_described(errors: str, text: str) -> None:
    assert runner.exit_text(1, errors) == "its process ended with status 1" + text


def test_ranks_that_do_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "import sys, time\nif '--gather' in sys.orig_argv:\n    time.sleep(1000)\n"
    monkeypatch.setenv("PYTHONPATH", starting_with(tmp_path, code)["PYTHONPATH"])
    rank, reports, failure, network = runner.gather({"facts": {}, "failures": {}}, limit_s=2)
    assert (rank, len(reports), failure, network) == (0, 1, "the ranks did not find each other within 2 s", None)
