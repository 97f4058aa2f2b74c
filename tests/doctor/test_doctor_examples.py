"""Compare the examples of docs/when-it-does-not-work.md with today's output."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from doctor_command import PAGE, Doctor, compile_library, program
from paths import ROOT


def _shown(text: str, kind: str) -> str:
    """Extract a finding from a screen, from its level to its remedy. This checkout becomes the current folder."""
    (found,) = re.findall(rf"^(?:error|warning|note) +{kind}: .*?(?=\n *\n|^```)", text, re.M | re.S)
    return " ".join(found.split()).replace(str(ROOT), ".")


def test_the_page_shows_hidden_gpus_as_they_are_printed(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    printed = doctor.text(FAKE_INIT="100", CUDA_VISIBLE_DEVICES="", **gpu_machine)
    assert _shown(PAGE, "gpu-hidden") == _shown(printed, "gpu-hidden")


def test_the_page_shows_another_nvshmem_as_it_is_printed(doctor: Doctor, tmp_path: Path, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from deepep_rt.jit import libraries

    source, library = tmp_path / "host.c", tmp_path / "libnvshmem_host.so.3"
    source.write_text("void nvshmemx_vendor_get_version_info(int* a, int* b, int* c) { *a = 3; *b = 99; *c = 0; }\n")
    compile_library(source, library, "-Wl,-soname,libnvshmem_host.so.3")  # as the loader knows it, so that no other is loaded
    library.with_name("libnvshmem_device.a").touch()
    printed = doctor.text(status=1, LD_PRELOAD=str(library), **gpu_machine, COLUMNS="500", DEEPEP_RT_SYMMETRIC_MEMORY="nvshmem")
    expected = _shown(PAGE, "nvshmem-mismatch").replace("/opt/nvshmem/lib", str(tmp_path))
    expected = expected.replace("host 3.4.5", "host 3.99.0").replace("device 3.8.0", f"device {libraries.nvshmem().version}")
    assert _shown(printed, "nvshmem-mismatch") == expected


def test_the_page_shows_a_missing_mpi_as_it_is_printed(doctor: Doctor) -> None:
    nowhere = dict(MPI4PY_LIBMPI="/nowhere/libmpi.so")
    load = "try:\n    from mpi4py import MPI\nexcept RuntimeError:\n    raise SystemExit(1)"
    if doctor.run([sys.executable, "-c", load], **nowhere).returncode == 0:
        pytest.skip("this mpi4py was built for one MPI, and looks for no other")
    printed = doctor.run(program(), **nowhere).stdout
    tried = r"\S+: cannot open shared object file: No such file or directory "
    assert re.sub(tried, "", _shown(PAGE, "no-mpi4py")) == re.sub(tried, "", _shown(printed, "no-mpi4py"))


def test_the_page_shows_todays_tables(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    printed, screens = doctor.text(**gpu_machine, COLUMNS="140"), re.findall(r"^deepep_rt \S+ on .*?^```", PAGE, re.M | re.S)
    assert len(screens) == 2
    for screen in screens:
        assert re.findall(r"^[A-Z]\S*(?: cache)?(?=  )", screen, re.M) == re.findall(r"^[A-Z]\S*(?: cache)?(?=  )", printed, re.M)
    header = r"name .*\d(?= *$)"
    assert re.findall(header, screens[1], re.M)[0].split() == re.findall(header, printed, re.M)[0].split()
