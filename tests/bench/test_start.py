"""The stages of a start: which there are, and what counts. Times are of no interest here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, mpirun
from paths import HELPERS, ROOT

pytest.importorskip("rich")

import start

from deepep_rt import EPConfigError, EPUnavailableError

SIZES = ["--tokens", "8", "--hidden", "128", "--experts", "8", "--topk", "2", "--quick"]


LATER = [
    "second Buffer",
    "third Buffer",
    "new Buffer over half of the ranks",
    "new Buffer over all ranks but the last",
    "sleep of the first Buffer",
    "wake of the first Buffer",
]


def _stages_of(result: dict, memory: str = "") -> dict[str, float]:
    return {row["stage"]: row["median_ms"] for row in result["rows"] if row["memory"] == memory}


def _measure(*words: str, **more: str) -> tuple[dict, str]:
    """Run a program of this repository. Return the result that it writes, and what it prints."""
    file = Path(more.pop("file"))
    done = subprocess.run(
        [sys.executable, *words, *SIZES, "--json", str(file)],
        env=environment(**more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text()), done.stdout


def test_two_ranks_on_the_host(tmp_path: Path) -> None:
    launcher = " ".join([*mpirun(), "-n", "2"])
    result, printed = _measure(
        "bench/start.py", "--backend", "host", "--launcher", launcher, file=str(tmp_path / "a/result.json")
    )
    stages = _stages_of(result)
    assert {"date", "commit", "versions", "boundary", "machine", "python", "settings"} <= set(result)
    assert result["num_ranks"] == 2
    assert stages["Buffer: exchanges between ranks"] > 0
    assert "import cuda.bindings" not in stages
    names = list(stages)
    ours = names[names.index("import deepep_rt") : names.index(start.OURS)]
    assert min(stages[name] for name in ours) >= 0
    assert stages[start.OURS] == stages[start.OURS_WITHOUT_CUDA] == pytest.approx(sum(stages[name] for name in ours))
    assert names[-6:] == LATER
    assert min(stages[name] for name in LATER) > 0
    assert "| second Buffer |" in printed
    assert "| import deepep_rt |" in printed
    assert "2 ranks, 8 tokens, throughput mode. 1 starts" in printed


def test_the_cuda_backend_with_a_driver_that_does_nothing(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")
    result, printed = _measure(
        str(HELPERS / "start_time.py"), file=str(tmp_path / "result.json"), DEEPEP_RT_CACHE_DIR=str(tmp_path / "cache")
    )
    assert (result["machine"], result["num_ranks"]) == ("no GPU (sm_90)", 1)
    for memory in ("heap", "nvshmem"):
        stages = _stages_of(result, memory)
        for name in ("start of CUDA", "memory", "kernels found in the cache", "kernels loaded by the driver"):
            assert stages[f"Buffer: {name}"] > 0
        assert stages[start.OURS_WITHOUT_CUDA] == pytest.approx(stages[start.OURS] - stages["Buffer: start of CUDA"])
        sleeps = LATER[4:] if memory == "heap" else []
        assert [name for name in LATER if name in stages] == LATER[:2] + sleeps
        assert (stages["Buffer: NVSHMEM's bindings and library"] > 0) == (memory == "nvshmem")
    assert "| ms of a start | heap median | heap fastest | nvshmem median | nvshmem fastest |" in " ".join(printed.split())
    assert len(list((tmp_path / "cache/sm_90").glob("*.kernel"))) == 3, "the first start compiles, and does not count"


def test_a_start_under_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(EPConfigError, match=r'MPICH started this process.*--launcher "mpirun -n 4"'):
        start.run(start.Settings(backend="host"))


def test_a_start_that_fails_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    settings = start.Settings(backend="host", topk=3, experts=2)
    with pytest.raises(EPUnavailableError, match=r"ended with status 1(.|\n)*num_topk=3"):
        start.run(settings)


def test_kernels_of_a_counted_start_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    given: list[dict[str, str]] = []
    ms = {"import deepep_rt": 2.0, "Buffer: start of CUDA": 1.0, "Buffer: rest": 3.0}

    def run(words: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        given.append(env)
        if words[-1] == "--whole":
            Path(words[-4]).write_text(json.dumps({"whole_ms": 5.5}))
            return subprocess.CompletedProcess(words, 0, "", "")
        Path(words[-3]).write_text(json.dumps({"gpu": "", "num_ranks": 1, "later_ms": {"second Buffer": 1.0}, "ms": ms}))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(start._env, "launch", lambda: None)
    monkeypatch.setattr(start.subprocess, "run", run)
    monkeypatch.setattr(start, "provenance", lambda commit: {})
    result = start.run(start.Settings(starts=2, commit="1"))
    assert [env.get("DEEPEP_RT_ASSERT_CACHED") for env in given] == [None] * 2 + ["1"] * 8
    assert [env["DEEPEP_RT_SYMMETRIC_MEMORY"] for env in given] == (
        ["heap", "nvshmem"] + ["heap", "heap", "nvshmem", "nvshmem"] * 2
    ), "they take turns"
    assert not any("PYTHONDONTWRITEBYTECODE" in env for env in given)
    for memory in ("heap", "nvshmem"):
        stages = _stages_of(result, memory)
        assert (stages[start.OURS], stages[start.OURS_WITHOUT_CUDA], stages["second Buffer"]) == (6.0, 5.0, 1.0)
        assert stages[start.WHOLE] == 5.5
    for row in result["rows"]:
        assert row["median_ms"] == row["fastest_ms"]
    with pytest.raises(EPConfigError, match="starts=0"):
        start.Settings(starts=0)
