"""`.ci/lines.py` counts lines of code, and compares folders with a commit."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
from launch import run_command
from paths import ROOT

LINES = runpy.run_path(str(ROOT / ".ci/lines.py"))

PYTHON = '''"""A docstring
of two lines."""

# a comment
import os  # and one beside code

WIDTH = 3
"""A docstring of a name."""


def call(text="""a text
of two lines"""):
    """Do nothing."""
    # a comment
    return f"""{text}

    """
'''
CUDA = """// a comment
/* a comment
   of two lines */
#include "wait.cuh"  // beside code

asm("mov.u32 // no comment"); /* a comment */
  /* a comment */
"""


@pytest.mark.parametrize(("name", "text", "code"), [("a.py", PYTHON, 7), ("a.cu", CUDA, 2), ("a.py", "", 0)])
def test_code_is_counted_without_comments_and_docstrings(name: str, text: str, code: int) -> None:
    assert LINES["code_lines"](name, text) == code


def test_folders_are_counted_alone_and_trees_with_all_folders() -> None:
    files = {"deepep_rt/a.py": "x = 1\n", "deepep_rt/jit/b.py": "x = 1\n\n# y\n", "deepep_rt/jit/deep/c.py": "x = 1\ny = 2\n"}
    assert LINES["count"](files.items()) == {
        "deepep_rt": [3, 6, 4],
        "deepep_rt/": [1, 1, 1],
        "deepep_rt/jit": [1, 3, 1],
        "deepep_rt/jit/deep": [1, 2, 2],
    }


@pytest.mark.full
def test_the_table_has_the_difference_to_a_commit() -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("there is no git history")
    head, *rows = run_command(sys.executable, ".ci/lines.py", "HEAD")[0].splitlines()
    assert head.split() == ["folder", "files", "+/-", "lines", "+/-", "code", "+/-"]
    assert {"deepep_rt", "deepep_rt/", "deepep_rt/bench", "cuda_src/common", "tests/jit"} <= {row.split()[0] for row in rows}
