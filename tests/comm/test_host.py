"""`host_identity`: processes of a host have one identity, and hosts have different ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepep_rt.comm import timed_collectives


def test_hosts_with_the_same_name_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(timed_collectives, "_BOOT_ID", boot)
    names = [timed_collectives.host_identity()]  # without the file, as in some containers
    for text in ("a", "b", "b"):
        boot.write_text(text)
        names.append(timed_collectives.host_identity())
    assert len(set(names)) == 3
    assert names[2] == names[3]


def test_containers_with_names_of_their_own_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have one boot identity, as network namespaces of a host do."""
    names = []
    for name in ("epA", "epB"):
        monkeypatch.setattr("platform.node", lambda name=name: name)
        names.append(timed_collectives.host_identity())
    assert len(set(names)) == 2
