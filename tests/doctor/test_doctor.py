"""`python -m deepep_rt doctor` as users run it: here, on machines that C libraries imitate, under mpirun, with broken settings."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from entries import entry
from launch import mpirun
from paths import ROOT
from without import without

from deepep_rt import Buffer, _env
from deepep_rt.cli import app as cli
from deepep_rt.doctor import examine as doctor_examine
from deepep_rt.doctor import gpus as doctor_gpus
from deepep_rt.doctor import probes as doctor_probes
from deepep_rt.doctor import runner as doctor_run
from deepep_rt.jit.cache import SUFFIX, KernelCache

HERE = Path(__file__).resolve().parent
PAGE = (ROOT / "docs/when-it-does-not-work.md").read_text()


def _program(*options: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "deepep_rt", "doctor", *options]


class Doctor:
    """Runs doctor in an environment that is settled: no settings of whoever runs the tests, a cache of its own."""

    def __init__(self, cache: Path) -> None:
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("DEEPEP_RT_", "NVSHMEM_", "CUDA_", "FAKE_"))
        }
        self.environment["DEEPEP_RT_CACHE_DIR"] = str(cache)

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=200, check=False
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done

    def text(self, *options: str, status: int = 0, **environment: str) -> str:
        done = self.run(_program(*options), **environment)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def json(self, *options: str, command: Sequence[str] = (), status: int = 0, **environment: str) -> dict[str, Any]:
        done = self.run(command or _program("--json", *options), **environment)
        assert (done.returncode != 0) == (status != 0), done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert (answer["status"] == "broken") == (status != 0)
        return answer


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path / "cache")


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    """What the probes find here, for tests of what does not depend on it."""
    return doctor_run.run_probes()


def kinds(answer: dict[str, Any]) -> dict[str, str]:
    return {finding["kind"]: finding["level"] for finding in answer["findings"]}


def what(answer: dict[str, Any], kind: str) -> str:
    return "; ".join(finding["what"] for finding in answer["findings"] if finding["kind"] == kind)


# --- this machine --------------------------------------------------------------------------------------------------------------------


def test_what_is_installed_is_what_it_says(doctor: Doctor) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    answer = doctor.json()
    (report,) = answer["ranks"]
    assert report["failures"] == {}
    facts = report["facts"]
    for name, version in facts["python"]["packages"].items():
        assert importlib.metadata.version(name) == version
    assert facts["python"]["executable"] == sys.executable
    from deepep_rt.jit import libraries

    assert facts["nvrtc"]["version"] == libraries.nvrtc_version()
    assert facts["nvshmem_device"]["version"] == facts["nvshmem_host"]["version"] == libraries.nvshmem().version
    for probe in ("nvrtc", "nvjitlink", "nvshmem_host", "nvshmem_device", "mpi"):
        assert Path(facts[probe]["path"]).is_file(), probe
    assert facts["mpi"]["mpi4py"] == importlib.metadata.version("mpi4py")
    assert facts["bindings"] == {"module": None}
    assert not doctor.environment["DEEPEP_RT_CACHE_DIR"] or not Path(doctor.environment["DEEPEP_RT_CACHE_DIR"]).exists()
    sizes = dict(num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
    assert answer["size_hint"] == Buffer.size_hint(8, **sizes)


def test_sizes_are_options(doctor: Doctor) -> None:
    options = ["--ranks", "4", "--tokens", "128", "--hidden", "512", "--topk", "4", "--experts", "16"]
    options += ["--dtype", "float32", "--slots", "3", "--low-latency"]
    sizes = dict(
        num_max_tokens_per_rank=128, hidden=512, num_topk=4, num_experts=16, dtype="float32", num_slots=3, low_latency=True
    )
    assert doctor.json(*options)["size_hint"] == Buffer.size_hint(4, **sizes)
    answer = doctor.json("--ranks", "4", "--experts", "15", status=1)
    assert "num_experts=15" in what(answer, "wrong-sizes")
    assert answer["size_hint"] is None
    assert doctor.run(_program("--backend", "gpu")).returncode == 1


@pytest.mark.parametrize("option", ["--ranks", "--tokens", "--hidden", "--topk", "--experts", "--slots", "--ranks-per-node"])
def test_a_size_of_zero_is_no_default(
    probed: dict[str, Any], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_examine, "run_probes", lambda: probed)
    monkeypatch.setattr(doctor_examine, "gather", lambda report: (0, [{**report, **doctor_run.ALONE}], None))
    with pytest.raises(SystemExit) as caught:
        cli.run(["doctor", "--json", option, "0"])
    assert caught.value.code == 1
    assert "=0; expected" in what(json.loads(capsys.readouterr().out), "wrong-sizes")


def test_the_page_is_where_the_last_line_says(doctor: Doctor) -> None:
    last = doctor.text("--ranks", "0", status=1).strip().splitlines()[-1]
    (page,) = re.findall(r"\S+\.md", last)
    assert (ROOT / page).is_file()
    assert "source distribution" in last
    assert "/docs" in (ROOT / "pyproject.toml").read_text().partition("sdist]")[2].partition("]")[0]


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("stdout", "said"), [("&-", "is closed."), ("/dev/full", "cannot be written: No space left on device.")])
def test_an_output_that_cannot_be_written(
    doctor: Doctor, options: tuple[str, ...], unbuffered: str, stdout: str, said: str
) -> None:
    command = f"{shlex.join(_program('--backend', 'host', *options))} >{stdout}"
    done = doctor.run(["sh", "-c", command], PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: standard output {said}")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_that_cannot_show_every_letter(doctor: Doctor) -> None:
    assert "NVSHMEM_DEBUG_FILE=caf\\xe9" in doctor.text(NVSHMEM_DEBUG_FILE="caf\xe9", PYTHONIOENCODING="ascii")


# --- machines that are not here ------------------------------------------------------------------------------------------------------


def _compile(source: Path, library: Path, *options: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", str(library), str(source)], check=True, timeout=60)


@pytest.fixture(scope="session")
def gpu_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which doctor sees 8 H200s."""
    folder = tmp_path_factory.mktemp("driver")
    _compile(HERE / "fake_driver/cuda.c", folder / "libcuda.so.1")
    _compile(HERE / "fake_driver/nvml.c", folder / "libnvidia-ml.so.1")
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}


def test_eight_gpus(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("pynvml")
    answer = doctor.json("--backend", "cuda", **gpu_machine)
    facts = answer["ranks"][0]["facts"]
    assert facts["driver"]["cuda"] == "13.1"
    assert facts["driver"]["library"].startswith(gpu_machine["LD_LIBRARY_PATH"].split(os.pathsep)[0])
    assert facts["nvml"]["driver"] == "590.12.01"
    assert [gpu["uuid"] for gpu in facts["driver"]["gpus"]] == [gpu["uuid"] for gpu in facts["nvml"]["gpus"]]
    assert facts["driver"]["gpus"][2] == {
        "ordinal": 2, "uuid": "20212223-2425-2627-2829-2a2b2c2d2e2f", "name": "NVIDIA H200", "arch": "sm_90",
        "total_bytes": 150754820096,
    }  # fmt: skip
    assert [gpu["free_bytes"] for gpu in facts["nvml"]["gpus"]] == [*(150000000000 + i for i in range(7)), None]
    assert [gpu["mig"] for gpu in facts["nvml"]["gpus"]] == [False] * 7 + [None]
    assert facts["nvml"]["paths"] == [["-" if a == b else "NV18" for b in range(8)] for a in range(8)]
    assert facts["nvml"]["access"] == [[True] * 8] * 8
    assert not set(kinds(answer)) & {"no-gpu", "gpu-hidden", "no-nvlink", "no-peer-access", "mig", "not-enough-memory"}
    text = doctor.text("--backend", "cuda", **gpu_machine)
    assert all(gpu["uuid"] in text for gpu in facts["driver"]["gpus"])
    assert text.count("NV18") == 56
    assert "590.12.01, CUDA 13.1" in text
    narrow = doctor.text("--backend", "cuda", **gpu_machine, COLUMNS="90", FORCE_COLOR="1", FAKE_NO_ACCESS="1")
    assert narrow.count("NV18") == 54
    assert narrow.count("none\x1b") == 2, "GPUs 0 and 1 do not reach each other"
    assert "Paths between them" in narrow
    assert "\u2026" not in narrow, "nothing is cut off"


@pytest.mark.parametrize(
    ("fault", "kind", "level"),
    [
        ({"FAKE_INIT": "802"}, "driver-fails", "error"),
        ({"FAKE_INIT": "100", "CUDA_VISIBLE_DEVICES": ""}, "gpu-hidden", "warning"),
        ({"FAKE_CUDA": "11080"}, "driver-too-old", "error"),
        ({"FAKE_NO_ACCESS": "1"}, "no-peer-access", "warning"),
        ({"FAKE_PCIE": "1"}, "no-nvlink", "warning"),
        ({"FAKE_NVLINKS": "17"}, "nvlink-uneven", "warning"),
        ({"FAKE_LOST": "6"}, "gpu-lost", "warning"),
    ],
)
def test_faults_of_gpus(doctor: Doctor, gpu_machine: dict[str, str], fault: dict[str, str], kind: str, level: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("pynvml")
    assert kinds(doctor.json(status=int(level == "error"), **gpu_machine, **fault))[kind] == level


def test_nvml_may_be_broken_alone(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("pynvml")
    answer = doctor.json(FAKE_NVML="18", **gpu_machine)
    assert "version mismatch" in answer["ranks"][0]["facts"]["nvml"]["error"]
    assert "unknown" not in kinds(answer)
    text = doctor.text(FAKE_NVML="18", **gpu_machine)
    assert "? of 150.8" in text
    assert "version mismatch" in text


def test_pynvml_may_be_missing(doctor: Doctor, gpu_machine: dict[str, str], tmp_path: Path) -> None:
    text = doctor.text(**{**gpu_machine, **without(tmp_path, "pynvml")})
    assert "pip install nvidia-ml-py" in text
    assert text.count("? of 150.8") == 8
    assert "probe-failed" not in text


def test_too_little_memory(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("pynvml")
    answer = doctor.json("--tokens", "100000", "--slots", "40", status=1, **gpu_machine)
    assert re.search(r"GPU 00010203 has 150.00 GB free and is to hold [\d.]+ GB", what(answer, "not-enough-memory"))


def test_two_ranks_on_one_gpu(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    two_gpus = {"FAKE_GPUS": "2", **gpu_machine}
    three, four = ([*mpirun(), "-n", number, *_program("--json")] for number in "34")
    answer = doctor.json(command=three, status=1, **two_gpus)
    assert "ranks 0, 2 would use GPU 00010203" in what(answer, "shared-gpu")
    assert [(report["local_rank"], report["group"]) for report in answer["ranks"]] == [(0, 0), (1, 0), (2, 0)]
    two_gpus["DEEPEP_RT_SHARE_GPUS"] = "1"
    assert "they take turns" in what(doctor.json(command=four, **two_gpus), "shared-gpu")
    assert "have one to themselves" in what(doctor.json(command=three, status=1, **two_gpus), "shared-gpu")


# --- probes that do not come back ----------------------------------------------------------------------------------------------------


def test_a_probe_that_crashes_is_a_finding(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    answer = doctor.json(FAKE_INIT="-2", **gpu_machine)
    (report,) = answer["ranks"]
    assert list(report["failures"]) == ["driver"]
    assert set(report["facts"]) | {"driver"} == set(doctor_probes.PROBES), "the others were asked all the same"
    assert "driver: its process was killed by SIGABRT" in what(answer, "probe-failed")


def test_a_probe_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, gpu_machine: dict[str, str]) -> None:
    for name, value in {**gpu_machine, "FAKE_INIT": "-1"}.items():
        monkeypatch.setenv(name, value)
    examined = doctor_run.run_probes(["machine", "driver", "settings"], limit_s=4)
    assert examined["failures"] == {"driver": "did not end within 4 s"}
    assert set(examined["facts"]) == {"machine", "settings"}


def test_what_libraries_print_is_no_answer(tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "sitecustomize.py").write_text('print(\'{"name": "noise"}\', flush=True)')
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = doctor.run(
        [sys.executable, "-c", "from deepep_rt.doctor import runner; print(runner.run_probes(['settings']))"], PYTHONPATH=paths
    )
    assert "'failures': {}" in done.stdout


# --- broken settings -----------------------------------------------------------------------------------------------------------------


def test_settings_that_are_not_understood(doctor: Doctor) -> None:
    answer = doctor.json(status=1, DEEPEP_RT_TIMEOUT_S="-3", DEEPEP_RT_ARCH="hopper")
    assert "DEEPEP_RT_TIMEOUT_S: timeout_s=-3.0" in what(answer, "wrong-setting")
    assert "DEEPEP_RT_ARCH: arch='hopper'" in what(answer, "wrong-setting")
    answer = doctor.json(status=1, DEEPEP_RT_TIMEOUT_S="inf", DEEPEP_RT_ARCH="sm_70")
    assert "DEEPEP_RT_TIMEOUT_S: timeout_s=inf" in what(answer, "wrong-setting")
    assert "DEEPEP_RT_ARCH: arch='sm_70'; expected sm_80 or newer" in what(answer, "wrong-setting")
    answer = doctor.json(
        status=1, DEEPEP_RT_TIMEOUT_S="abc", DEEPEP_RT_DEBUG="maybe", DEEPEP_RT_ASSERT_CACHED="perhaps", DEEPEP_RT_TIMEOUT="5"
    )
    said = what(answer, "wrong-setting")
    assert all(value in said for value in ("'abc'", "'maybe'", "'perhaps'"))
    assert what(answer, "unknown-setting") == "DEEPEP_RT_TIMEOUT"
    assert "probe-failed" not in kinds(answer)
    assert what(doctor.json(status=1, DEEPEP_RT_CACHE_DIR="~nosuchuser/x"), "wrong-setting").startswith("DEEPEP_RT_CACHE_DIR=")


def test_an_architecture_that_the_compiler_does_not_know(doctor: Doctor, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    said = what(doctor.json(status=1, DEEPEP_RT_ARCH="sm_999"), "wrong-setting")
    assert re.match(r"DEEPEP_RT_ARCH: arch='sm_999'; expected one that NVRTC \S+ knows: .*sm_90", said)
    assert kinds(doctor.json(DEEPEP_RT_ARCH="compute_90")).keys().isdisjoint({"wrong-setting"})
    without_nvrtc = kinds(doctor.json(**without(tmp_path, "cuda"), DEEPEP_RT_ARCH="sm_999"))
    assert without_nvrtc.keys().isdisjoint({"wrong-setting", "probe-failed"}), "there is nobody to ask"


@pytest.mark.parametrize("name", list(_env._READERS))
def test_an_empty_setting_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _env._READERS[name]
    monkeypatch.delenv(name, raising=False)
    unset = read()
    monkeypatch.setenv(name, "")
    assert read() == unset


def test_every_setting_is_read() -> None:
    documented = set(re.findall(r'"""`(DEEPEP_RT_[A-Z_]+)', Path(_env.__file__).read_text()))
    assert documented == set(_env._READERS)


def test_variables_that_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"DEEPEP_RT_DEBUG", "NVSHMEM_DEBUG", "CUDA_CACHE_PATH", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES"}
    for name in (*names, "HOME"):
        monkeypatch.setenv(name, "x")
    assert names <= set(_env.variables())
    assert "HOME" not in _env.variables()


def test_a_launcher_that_does_not_say_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may set one of its variables for other ends."""
    for _, *names in _env._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    assert _env.launch() is None
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert _env.launch() == _env.Launch("Slurm", 1, 4)
    monkeypatch.setenv("PMI_SIZE", "2")  # of an mpirun inside of the job
    assert _env.launch() == _env.Launch("MPICH", 0, 2)


def test_a_cache_that_cannot_be_written(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")  # also a user who may write everything cannot write below it
    answer = doctor.json("--backend", "host", DEEPEP_RT_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert kinds(answer)["cache-not-writable"] == "warning"
    assert str(tmp_path / "file") in what(answer, "cache-not-writable")


def test_a_cache_with_a_corrupt_entry(doctor: Doctor, tmp_path: Path) -> None:
    store = KernelCache(tmp_path / "cache")
    for key in ("ab" * 32, "cd" * 32):
        store.put(entry(key))
    path = store.folder / "sm_90" / ("ab" * 32 + SUFFIX)
    path.write_bytes(path.read_bytes()[:-1])
    answer = doctor.json()
    assert what(answer, "cache-corrupt") == "sm_90/abababababab: wrong checksum"
    facts = answer["ranks"][0]["facts"]["cache"]
    assert (facts["entries"], facts["exists"], facts["error"]) == (1, True, None)
    assert facts["bytes"] == sum(file.stat().st_size for file in store.folder.glob("*/*"))
    assert "writable, 1 kernels" in doctor.text()
    assert len(list(store.folder.glob("*"))) == 1, "nothing is left of the test for writing"


def test_without_mpi4py(doctor: Doctor, tmp_path: Path) -> None:
    answer = doctor.json(status=1, **without(tmp_path, "mpi4py"))
    assert "No module named 'mpi4py'" in what(answer, "no-mpi4py")
    assert "mpi-does-not-start" not in kinds(answer), "what follows from it is not said"


def test_without_cuda_packages(doctor: Doctor, tmp_path: Path, gpu_machine: dict[str, str]) -> None:
    blocked = without(tmp_path, "cuda")
    levels = kinds(doctor.json("--backend", "host", **blocked))
    assert (levels["no-cuda-packages"], levels["no-nvshmem"]) == ("note", "note"), "the host backend needs neither"
    answer = doctor.json(status=1, **blocked, **gpu_machine)
    assert (kinds(answer)["no-cuda-packages"], kinds(answer)["no-nvshmem"]) == ("error", "error")
    assert len(answer["ranks"][0]["facts"]["driver"]["gpus"]) == 8, "the driver is asked without them"


def test_an_mpi_library_that_cannot_be_loaded(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mpi4py.MPI'] = None\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    assert kinds(doctor.json(status=1, PYTHONPATH=paths))["no-mpi4py"] == "error"


def test_an_old_nvshmem_that_is_found_first(doctor: Doctor, tmp_path: Path, gpu_machine: dict[str, str]) -> None:
    """An environment with a site folder of its own, which is what libraries are looked for in."""
    pytest.importorskip("cuda.bindings.nvrtc")
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    real = importlib.metadata.distribution("cuda-pathfinder").locate_file("")
    (site / "more.pth").write_text(f"{real}\n")
    headers = site / "nvidia/nvshmem/include/non_abi"
    headers.mkdir(parents=True)
    (headers.parent / "nvshmem.h").touch()
    parts = zip(("MAJOR", "MINOR", "PATCH"), (3, 3, 9), strict=True)
    (headers / "nvshmem_version.h").write_text("".join(f"#define NVSHMEM_VENDOR_{name}_VERSION {n}\n" for name, n in parts))
    library = site / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    library.parent.mkdir()
    (library.parent / "libnvshmem_device.a").touch()
    source = tmp_path / "host.c"
    source.write_text("void nvshmemx_vendor_get_version_info(int* a, int* b, int* c) { *a = 3; *b = 3; *c = 9; }\n")
    _compile(source, library)
    done = doctor.run(_program("--json", python=str(tmp_path / "env/bin/python")), **gpu_machine, PYTHONPATH=str(ROOT))
    assert done.returncode == 1
    said = what(json.loads(done.stdout), "nvshmem-too-old")
    assert f"the host library is 3.3.9 ({library})" in said
    assert "the device library is 3.3.9" in said


# --- what the page shows ---------------------------------------------------------------------------------------------------------------


def _shown(text: str, kind: str) -> str:
    """The words of a finding on a screen, from its level to its remedy."""
    (found,) = re.findall(rf"^(?:error|warning|note) +{kind}: .*?(?=\n *\n|^```)", text, re.M | re.S)
    return " ".join(found.split())


def test_the_page_shows_hidden_gpus_as_they_are_printed(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    printed = doctor.text(FAKE_INIT="100", CUDA_VISIBLE_DEVICES="", **gpu_machine)
    assert _shown(PAGE, "gpu-hidden") == _shown(printed, "gpu-hidden")


def test_the_page_shows_another_nvshmem_as_it_is_printed(doctor: Doctor, tmp_path: Path, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from deepep_rt.jit import libraries

    source, library = tmp_path / "host.c", tmp_path / "libnvshmem_host.so.3"
    source.write_text("void nvshmemx_vendor_get_version_info(int* a, int* b, int* c) { *a = 3; *b = 99; *c = 0; }\n")
    _compile(source, library, "-Wl,-soname,libnvshmem_host.so.3")  # as the loader knows it, so that no other is loaded
    library.with_name("libnvshmem_device.a").touch()
    printed = doctor.text(status=1, LD_PRELOAD=str(library), **gpu_machine, COLUMNS="500")
    expected = _shown(PAGE, "nvshmem-mismatch").replace("/opt/nvshmem/lib", str(tmp_path))
    expected = expected.replace("host 3.4.5", "host 3.99.0").replace("device 3.8.0", f"device {libraries.nvshmem().version}")
    assert _shown(printed, "nvshmem-mismatch") == expected


def test_the_page_shows_a_missing_mpi_as_it_is_printed(doctor: Doctor) -> None:
    nowhere = dict(MPI4PY_LIBMPI="/nowhere/libmpi.so")
    load = "try:\n    from mpi4py import MPI\nexcept RuntimeError:\n    raise SystemExit(1)"
    if doctor.run([sys.executable, "-c", load], **nowhere).returncode == 0:
        pytest.skip("this mpi4py was built for one MPI, and looks for no other")
    printed = doctor.run(_program(), **nowhere).stdout
    tried = r"\S+: cannot open shared object file: No such file or directory "
    assert re.sub(tried, "", _shown(PAGE, "no-mpi4py")) == re.sub(tried, "", _shown(printed, "no-mpi4py"))


def test_the_page_shows_todays_tables(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    printed, screens = doctor.text(**gpu_machine, COLUMNS="140"), re.findall(r"^deepep_rt \S+ on .*?^```", PAGE, re.M | re.S)
    assert len(screens) == 2
    for screen in screens:
        assert re.findall(r"^[A-Z]\S*(?: cache)?(?=  )", screen, re.M) == re.findall(r"^[A-Z]\S*(?: cache)?(?=  )", printed, re.M)
    header = r"name .*\d(?= *$)"
    assert re.findall(header, screens[1], re.M)[0].split() == re.findall(header, printed, re.M)[0].split()


# --- several ranks -------------------------------------------------------------------------------------------------------------------


def test_what_differs_between_ranks(doctor: Doctor, tmp_path: Path) -> None:
    other = ["env", "NVSHMEM_IB_SL=3", f"DEEPEP_RT_CACHE_DIR={tmp_path}/other", "CUDA_VISIBLE_DEVICES=1"]
    program = _program("--json", "--backend", "host")
    command = [*mpirun(), "-n", "1", *program, ":", "-n", "1", *other, *program]
    answer = doctor.json(command=command)
    assert [report["rank"] for report in answer["ranks"]] == [0, 1]
    different = answer["differences"]
    assert different["NVSHMEM_IB_SL"] == {"(none)": [0], "3": [1]}
    assert different["CUDA_VISIBLE_DEVICES"] == {"(none)": [0], "1": [1]}
    assert different["kernel cache"] == {str(tmp_path / "cache"): [0], f"{tmp_path}/other": [1]}
    assert what(answer, "environment-differs").startswith("DEEPEP_RT_CACHE_DIR")
    assert "NVSHMEM_IB_SL (none) on rank 0 and 3 on rank 1" in what(answer, "environment-differs")
    assert "CUDA_VISIBLE_DEVICES" not in what(answer, "environment-differs"), "that is as it should be"
    assert kinds(answer)["caches-differ"] == "warning"
    done = doctor.run([word for word in command if word != "--json"])
    assert done.stdout.count("Different between ranks") == 1, "rank 0 speaks, and no other"
    assert "2 ranks, started by" in done.stdout


def test_a_wrong_setting_on_one_rank(doctor: Doctor) -> None:
    command = [*mpirun(), "-n", "1", *_program("--json"), ":", "-n", "1", "env", "DEEPEP_RT_TIMEOUT_S=abc", *_program("--json")]
    answer = doctor.json(command=command, status=1)
    (finding,) = (finding for finding in answer["findings"] if finding["kind"] == "wrong-setting")
    assert finding["ranks"] == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_of_another_mpi(doctor: Doctor, rank: int) -> None:
    """As such a launcher leaves it: its variables say two processes, and MPI starts alone."""
    environment = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
    library = doctor.json()["ranks"][0]["facts"]["mpi"]["library"]
    if rank == 0:
        answer = doctor.json(status=1, **environment)
        assert f"(Open MPI) started 2 processes, but to mpi4py's MPI ({library}" in what(answer, "wrong-mpirun")
    else:  # one screen for the job, not one for each process that believes to be rank 0
        assert doctor.text(**environment) == ""


@pytest.mark.parametrize("local_rank", [0, 1])
def test_processes_of_torchrun(doctor: Doctor, local_rank: int) -> None:
    environment = {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "2"}
    if local_rank == 0:
        answer = doctor.json(**environment)
        assert kinds(answer)["other-launcher"] == "warning"
        assert "WORLD_SIZE is 2" in what(answer, "other-launcher")
    else:
        assert doctor.text(**environment) == ""


def test_the_variables_of_torchrun_may_be_anything(doctor: Doctor) -> None:
    assert "other-launcher" not in kinds(doctor.json(WORLD_SIZE="many", LOCAL_RANK="1"))
    assert kinds(doctor.json(WORLD_SIZE="2", LOCAL_RANK="", RANK="1"))["other-launcher"] == "warning", "and this process speaks"
    command = [*mpirun(), "-n", "2", *_program("--json", "--backend", "host")]
    assert "other-launcher" not in kinds(doctor.json(command=command, WORLD_SIZE="2", LOCAL_RANK="1"))


def test_an_mpi_that_does_not_start(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '--gather' in sys.orig_argv:\n    os.write(2, b'no such device\\n')\n    os.abort()\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    answer = doctor.json(status=1, PYTHONPATH=paths)
    assert what(answer, "mpi-does-not-start") == "its process was killed by SIGABRT: no such device"


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ("", ""),
        ("one\n---\n\n  two\n***\n", ": one two"),
        ("Traceback (most recent call last):\n  File\nOSError: gone\n", ": OSError: gone"),
        ("no ssh\nat all\nhere\nblah\nblah\nbye", ": no ssh at all here [...] bye"),
    ],
)
def test_what_a_dead_process_has_said(errors: str, said: str) -> None:
    assert doctor_run.exit_text(1, errors) == "its process ended with status 1" + said


def test_ranks_that_do_not_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys, time\nif '--gather' in sys.orig_argv:\n    time.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    rank, reports, failure = doctor_run.gather({"facts": {}, "failures": {}}, limit_s=2)
    assert (rank, len(reports), failure) == (0, 1, "the ranks did not find each other within 2 s")


# --- files of the kernel -------------------------------------------------------------------------------------------------------------


def test_nics_and_driver_parameters(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        folder = f"sys/class/infiniband/{name}"
        write(f"{folder}/hca_type", "MT4129\n")
        write(f"{folder}/ports/1/state", state)
        write(f"{folder}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
        write(f"{folder}/ports/1/link_layer", "InfiniBand\n")
        write(f"{folder}/device/infiniband_verbs/uverbs{name[-1]}/dev", "231:192\n")
    write("dev/infiniband/uverbs0", "")
    write("proc/modules", "nvidia_peermem 16384 0 - Live\ngdrdrv 24576 0 - Live\n")
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.12.01\n")
    write("proc/driver/nvidia/params", 'EnableMSI: 1\nEnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n')
    found = doctor_probes.network(tmp_path)
    port = {"port": "1", "rate": "400 Gb/sec (4X NDR)", "link": "InfiniBand"}
    assert found["nics"] == [
        {"name": "mlx5_0", "type": "MT4129", "ports": [{**port, "state": "ACTIVE"}], "usable": True},
        {"name": "mlx5_1", "type": "MT4129", "ports": [{**port, "state": "DOWN"}], "usable": False},
    ]
    assert (found["peermem"], found["gdrdrv"], found["open_driver"]) == (True, True, True)
    assert found["driver_parameters"]["RegistryDwords"] == "PeerMappingOverride=1;"
    assert doctor_probes.network(tmp_path / "nothing")["nics"] == []


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x8086", "0x030000")]
    ):
        folder = tmp_path / f"sys/bus/pci/devices/{number}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert doctor_probes.machine(tmp_path)["pci_gpus"] == 2, "NVSwitches and others' GPUs do not count"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 4.1.6", "Open MPI"),
        ("mpirun (OpenRTE) 4.0.3", "Open MPI"),
        ("Open MPI v5.0.8, package: x", "Open MPI"),
        ("HYDRA build details:\n    Version: 4.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "MPICH"),
        ("MVAPICH2 Version      :\t2.3.7", "MPICH"),
        ("something else", None),
    ],
)
def test_launchers_and_libraries_belong_to_families(text: str, family: str | None) -> None:
    assert doctor_probes.mpi_family(text) == family


def test_loaded_libraries_have_paths() -> None:
    assert doctor_gpus.loaded("libc.so") is not None
    assert doctor_gpus.loaded("libnothing.so") is None
