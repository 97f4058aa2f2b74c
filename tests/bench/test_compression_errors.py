"""The table of errors in docs/dispatch-and-combine.md is the one that `bench/compression_errors.py` prints."""

from __future__ import annotations

import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("rich")

from deepep_rt.arrays.compressed_rows import COMPRESSIONS, compressed_row_bytes

PAGE = (ROOT / "docs/dispatch-and-combine.md").read_text()


def test_the_page_has_the_table_of_the_program() -> None:
    words = [sys.executable, "bench/compression_errors.py"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=100, cwd=ROOT, check=True).stdout
    assert printed.count("\n") == 2 + 5
    assert printed in PAGE


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_page_has_the_bytes_of_a_row(compression: str) -> None:
    num_bytes = compressed_row_bytes(7168, compression)
    (line,) = (line for line in PAGE.splitlines() if line.startswith(f'| `"{compression}"` |'))
    assert line.endswith(f"| {num_bytes} | {100 * num_bytes / (2 * 7168):.0f} % |")
