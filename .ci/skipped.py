"""Fail if a test was skipped in all environments that collected it: python .ci/skipped.py JUNIT_FILE...

A test that needs a library runs where the library is installed. If it runs nowhere, nothing tests what it is for.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

OF_THE_MACHINE = ("only root can", "there is a GPU", "this mpi4py was built for one MPI")
"""Reasons that no installation changes. Such tests are listed, and do not fail the command."""


def skipped_everywhere(files: Sequence[str]) -> dict[str, str]:
    """Return the tests that ran in no environment, each with the reason that the last environment gave."""
    ran: set[str] = set()
    skipped: dict[str, str] = {}
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            # A module that is skipped as a whole has no class name, and its own name is that of the module.
            module, name = case.get("classname", ""), case.get("name", "")
            if (module or name).startswith("tests.gpu"):
                continue  # CI needs no GPU
            reason = case.find("skipped")
            if reason is None:
                ran |= {f"{module}::{name}", module}
            else:
                skipped[f"{module}::{name}" if module else name] = f"{reason.get('message')} {reason.text or ''}".strip()
    return {test: reason for test, reason in skipped.items() if test not in ran}


def main(files: Sequence[str]) -> int:
    """Print the tests that ran nowhere; return the exit status."""
    found = skipped_everywhere(files)
    unexpected = {test: reason for test, reason in found.items() if not any(words in reason for words in OF_THE_MACHINE)}
    for test, reason in sorted(found.items()):
        print(f"skipped in every environment: {test}: {reason}")
    if unexpected:
        print(f"error: {len(unexpected)} tests ran in no environment; expected each in one. Install what they need in .ci/run.")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
