"""Commands in messages and pages that install extras: what they name must exist, because no index has the package."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from paths import ROOT

from deepep_rt import _install


def test_nothing_installs_the_package_from_an_index() -> None:
    """Messages take their commands from `_install`. Pages write '.[extra]', for a checkout."""
    folders = ("deepep_rt", "bench", "examples", "docs", "tests/helpers")
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    texts = {path: path.read_text() for path in files if path.suffix in (".py", ".md")}
    assert len(texts) > 200
    assert not [path for path, text in texts.items() if re.search(r"deepep_rt\[\w", text)]


def test_a_checkout_is_named() -> None:
    assert _install.pip_install("cli") == f"pip install -e '{ROOT}[cli]'"


@pytest.mark.parametrize(
    ("recorded", "named"),
    [
        ('{{"url": "{folder}/a%20b/deepep_rt.whl"}}', "{path}/a b/deepep_rt.whl"),
        ('{{"url": "{folder}/a%20b", "dir_info": {{}}}}', "{path}/a b"),
        ('{{"url": "{folder}/gone.whl"}}', _install.UNKNOWN),
        ('{{"url": "https://example.org/deepep_rt.git", "vcs_info": {{}}}}', _install.UNKNOWN),
        ("not JSON", _install.UNKNOWN),
        (None, _install.UNKNOWN),
    ],
)
def test_an_installation_names_what_it_came_from(
    recorded: str | None, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/deepep_rt.whl").touch()
    info = tmp_path / "deepep_rt-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepep_rt\nVersion: 0.1.0\n")
    if recorded is not None:
        (info / "direct_url.json").write_text(recorded.format(folder=tmp_path.as_uri()))
    found = importlib.metadata.Distribution.at(info)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: found)
    monkeypatch.setattr(_install, "CHECKOUT", tmp_path)
    assert _install.pip_install("cli") == f"pip install '{named.format(path=tmp_path)}[cli]'"


def test_a_package_that_was_only_copied_names_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", fail)
    monkeypatch.setattr(_install, "CHECKOUT", tmp_path)
    assert _install.pip_install("cli") == f"pip install '{_install.UNKNOWN}[cli]'"
