"""The README keeps its word: its commands are the ones that CI runs, its code runs, and its tables are complete. Code in docs/ runs too."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepep_rt
from deepep_rt import errors

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))


def command(name):
    """The command in the code block that `<!-- name -->` stands over."""
    return re.search(rf"<!-- {name} -->\n```bash\n(.+)\n```", README)[1]


def test_ci_runs_the_readmes_test_command():
    assert command("tests") in (ROOT / ".ci/run").read_text().splitlines()


def test_example_command_installs_and_runs_the_example():
    setup, install, run = command("example").split(" && ")
    assert setup == "python3 -m venv .venv"
    assert install.startswith(".venv/bin/pip install")
    assert (ROOT / run.split()[-1]).is_file()


def run_python_blocks(text, tmp_path, check=""):
    """Run all Python blocks of a document as one program, on two ranks."""
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks) + check)
    mpirun = Path(sys.executable).with_name("mpirun")
    words = [str(mpirun) if mpirun.exists() else "mpirun", "-n", "2", sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_python_blocks_run(tmp_path):
    run_python_blocks(README, tmp_path, "\nassert np.isfinite(out).all() and (again.recv_x == sent.recv_x).all()\n")


@pytest.mark.parametrize("path", [path for path in DOCS if "```python\n" in path.read_text()], ids=lambda path: path.name)
def test_python_blocks_of_the_documents_run(path, tmp_path):
    if "import jax" in path.read_text():
        pytest.importorskip("jax")
    run_python_blocks(path.read_text(), tmp_path)


def test_every_variable_is_in_the_table():
    read = set(re.findall(r"DEEPEP_RT_[A-Z_]+[A-Z]", (ROOT / "deepep_rt/_env.py").read_text()))
    assert read == set(re.findall(r"^\| `(DEEPEP_RT_[A-Z_]+)` \|", README, re.MULTILINE))


@pytest.mark.parametrize("name", sorted(name for name in dir(errors) if name.startswith("EP") and name != "EPError"))
def test_every_error_is_in_the_table(name):
    assert f"`{name}`" in README
    assert name in deepep_rt.__all__
