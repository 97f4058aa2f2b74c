"""Compare docs/when-it-does-not-work.md with the page that `.ci/doctor_page.py` writes from doctor's catalog, and run its commands."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import run_command
from paths import ROOT

from deepep_rt.doctor.catalog import FINDING_TYPES, FindingType

DOCS = ROOT / "docs"
PAGE = (DOCS / "when-it-does-not-work.md").read_text()
WRITER = runpy.run_path(str(ROOT / ".ci/doctor_page.py"))


def test_the_page_is_the_one_that_the_command_writes() -> None:
    assert WRITER["written"](PAGE) == PAGE, "docs/when-it-does-not-work.md is stale; run python .ci/doctor_page.py"


def test_the_command_writes_what_the_catalog_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps what was written by hand, adds sections behind the ones before them, and drops those of findings that are gone."""
    one, two, three = (FindingType(name, f"{name} is so.", f"Change {name}.") for name in ("one", "two", "three"))
    monkeypatch.setitem(WRITER["written"].__globals__, "FINDING_TYPES", {"one": one, "two": two, "three": three})
    page = "# Page\n\n## MPI\n\n### `one`\n\nOld.\n\n**What to do:** Old,\nold.\n\nBy hand.\n\n### `gone`\n\nOld.\n\n"
    page += "## GPUs\n\n### `three`\n\nthree is so.\n\n**What to do:** Change three.\n"
    assert WRITER["written"](page) == (
        "# Page\n\n## MPI\n\n### `one`\n\none is so.\n\n**What to do:** Change one.\n\nBy hand.\n\n"
        "### `two`\n\ntwo is so.\n\n**What to do:** Change two.\n\n"
        "## GPUs\n\n### `three`\n\nthree is so.\n\n**What to do:** Change three.\n"
    )


def test_meanings_and_remedies_are_sentences() -> None:
    texts = [text for kind in FINDING_TYPES.values() for text in (kind.meaning, kind.remedy)]
    assert not [text for text in texts if not text.endswith(".") or "  " in text]


def test_the_examples_have_todays_texts() -> None:
    """The examples have the meaning and remedy of the catalog."""
    shown = re.findall(r"^(?:error|warning|note) +([\w-]+)\b(.*?)(?=^$|^```|^(?:error|warning|note) )", PAGE, re.M | re.S)
    assert len(shown) >= 9
    for name, text in shown:
        shown = " ".join(text.split())
        assert FINDING_TYPES[name].meaning in shown, name
        assert f"What to do: {FINDING_TYPES[name].remedy}".replace(str(ROOT), ".") in shown, name


_QUICK = ("python -m deepep_rt doctor", 'mpirun -n 2 python -c "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"')


def _commands() -> list[Any]:
    """List the commands of the pages that need no program of the reader, no Slurm and no second host."""
    blocks = "\n".join(
        text for page in ("when-it-does-not-work.md", "slurm-and-mpirun.md") for text in _shell_blocks(DOCS / page)
    )
    lines = (line.partition("  #")[0].strip() for line in blocks.splitlines())
    found = sorted({line for line in lines if line.startswith(("python ", "mpirun ")) and "program.py" not in line})
    return [line if line in _QUICK else pytest.param(line, marks=pytest.mark.full) for line in found]


def _shell_blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("command", _commands())
def test_commands_run(command: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # Without these, Open MPI refuses to run as root and to start more ranks than cores.
    mpi = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"), "1")
    printed, errors = run_command("sh", "-c", command, status=None, PATH=path, **mpi)
    assert "Traceback" not in printed + errors
    if "COMM_WORLD" in command:
        assert "".join(printed.split()) == "22", "two ranks, whose lines may be mixed"
    else:
        assert "Broken: " in printed or "Usable" in printed or '"status"' in printed, errors
