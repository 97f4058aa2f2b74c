"""Write the sections of docs/when-it-does-not-work.md that doctor prints too: python .ci/doctor_page.py.

A section has the name of a finding. It begins with the meaning and the remedy of `deepep_rt/doctor/catalog.py`, which this command writes.
What follows, and the rest of the page, is written by hand and stays. A new finding gets a section behind that of the finding before it.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from deepep_rt.doctor.catalog import FINDING_TYPES, FindingType

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/when-it-does-not-work.md"
_WIDTH = 140


def begin_of(finding: FindingType) -> str:
    """Write the beginning of a section. This checkout becomes the current folder."""
    paragraphs = finding.meaning, f"**What to do:** {finding.remedy}"
    filled = (
        textwrap.fill(text.replace(str(ROOT), "."), _WIDTH, break_long_words=False, break_on_hyphens=False) for text in paragraphs
    )
    return "\n\n".join((f"### `{finding.name}`", *filled)) + "\n"


def written(page: str) -> str:
    """Write the page anew, with a section for each finding. Sections of findings that no longer exist go, with all that they hold."""
    head, *parts = re.split(r"(?m)^(?=##)", page)
    names = [found[1] if (found := re.match(r"### `([\w-]+)`\n", part)) else None for part in parts]
    place = -1
    for name, finding in FINDING_TYPES.items():
        if name not in names:
            # The next heading needs a blank line before it.
            parts[place : place + 1] = [parts[place].rstrip() + "\n\n", begin_of(finding) + "\n"]
            names[place : place + 1] = [names[place], name]
        place = names.index(name)
        begin = re.match(r".*?^\*\*What to do:\*\*.*?\n(?=\n|\Z)", parts[place], re.MULTILINE | re.DOTALL)
        parts[place] = begin_of(finding) + (parts[place][begin.end() :] if begin else "\n")
    kept = (part for part, name in zip(parts, names, strict=True) if name is None or name in FINDING_TYPES)
    return (head + "".join(kept)).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
