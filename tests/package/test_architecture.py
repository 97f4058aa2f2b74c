"""ARCHITECTURE.md and CONTRIBUTING.md name files and terms that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
SOURCES = [*(ROOT / "deepep_rt").rglob("*.py"), *(ROOT / "cuda_src").rglob("*.cu*")]
TERMS = re.findall(r"^\| [^|]+ \| `(\w+)` \| [^|]+ \|$", TEXT.partition("## Glossary")[2], re.MULTILINE)


def test_the_glossary_is_short() -> None:
    assert 10 <= len(TERMS) <= 25


@pytest.mark.parametrize("term", TERMS)
def test_terms_of_the_glossary_occur_in_the_code(term: str) -> None:
    assert any(re.search(rf"\b{term}\b", path.read_text()) for path in SOURCES)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_pages_name_files_that_exist(page: str) -> None:
    named = set(re.findall(r"`([\w./]+/[\w.]+\.(?:py|cuh?|md|sh))`", (ROOT / page).read_text()))
    assert named
    missing = {name for name in named if not any(_exists(ROOT / folder, name) for folder in ("", "deepep_rt", "cuda_src"))}
    assert not missing


def _exists(folder: Path, name: str) -> bool:
    return (folder / name).exists()
