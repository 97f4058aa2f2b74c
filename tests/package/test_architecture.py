"""ARCHITECTURE.md and CONTRIBUTING.md name files and terms that exist."""

from __future__ import annotations

import re

import pytest
from paths import ROOT

from deepep_rt import Buffer

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
SOURCES = [*(ROOT / "deepep_rt").rglob("*.py"), *(ROOT / "cuda_src").rglob("*.cu*")]
WALKS = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to change things")[2].partition("\n## ")[0]
STEPS = re.findall(r"^(\d+)\. (.+?)(?=\n\d+\. |\n\n|\Z)", WALKS, re.MULTILINE | re.DOTALL)
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
    assert not {name for name in named if not any((ROOT / folder / name).exists() for folder in ("", "deepep_rt", "cuda_src"))}


def test_the_page_is_short() -> None:
    assert len(TEXT.encode()) <= 20 * 1024, "let the head of a file say what concerns this file alone"


def test_the_walks_have_numbered_steps() -> None:
    assert WALKS.count("\n### ") == 4
    assert [int(number) for number, _ in STEPS] == [*range(1, 6)] * 4


@pytest.mark.parametrize("step", [step for _, step in STEPS], ids=lambda step: re.sub(r"\W+", " ", step)[:40])
def test_a_step_of_a_walk_names_its_files_and_what_is_in_them(step: str) -> None:
    """Find each name in backticks in a file of the same step. Calls of a Buffer and commands need none."""
    codes = re.findall(r"`([^`]+)`", step)
    files = [code for code in codes if re.fullmatch(r"[\w-]+(?:/[\w.-]+)+\.\w+", code)]
    assert files
    assert not [file for file in files if not (ROOT / file).is_file()]
    text = "\n".join((ROOT / file).read_text() for file in files)
    names = {re.split("::|[.]", code)[-1] for code in codes if code not in files and not re.search("[ /]", code)}
    assert not [name for name in names - set(dir(Buffer)) if not re.search(rf"\b{re.escape(name)}\b", text)]
