"""Owners and permissions of files that may be trusted."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepep_rt.jit import trusted_files
from deepep_rt.jit.trusted_files import objection


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Pretend to be user 1000, with a group of the same number and name, and with group 50 that has more members."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    users, groups = {1000: "ann", 1001: "bob", 0: "root"}, {1000: ("ann", []), 50: ("staff", ["ann", "bob"]), 0: ("root", [])}
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=users[uid], pw_gid=uid))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=groups[gid][0], gr_mem=groups[gid][1]))
    monkeypatch.setattr(trusted_files, "_number_of_unmapped_root", lambda: None)
    return users


def status(uid: int, mode: int, gid: int = 1000) -> Any:
    return SimpleNamespace(st_uid=uid, st_gid=gid, st_mode=mode)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (status(1000, 0o755), None),
        (status(1000, 0o775), None),  # the user's own group
        (status(1000, 0o775, gid=50), "group 50 (staff) may write it"),
        (status(1000, 0o775, gid=99), "group 99 may write it"),
        (status(1000, 0o777), "every user may write it"),
        (status(1000, 0o757), "every user may write it"),
        (status(0, 0o555), None),
        (status(0, 0o755, gid=0), None),
        (status(0, 0o775, gid=0), "group 0 (root) may write it"),
        (status(1001, 0o755), "user 1001 (bob) owns it"),
        (status(1001, 0o777), "user 1001 (bob) owns it"),
        (status(1234, 0o755), "user 1234 owns it"),
        (status(65534, 0o755), "user 65534 owns it"),
    ],
)
@pytest.mark.parametrize("is_enclosed", [False, True])
def test_a_user_trusts_this_user_and_root(file: Any, reason: str | None, is_enclosed: bool) -> None:
    assert objection(file, is_enclosed) == reason


def test_root_trusts_all_owners_in_enclosed_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert objection(status(1001, 0o755), True) is None
    assert objection(status(1001, 0o755), False) == "user 1001 (bob) owns it"
    assert objection(status(1001, 0o777), True) == "every user may write it"


def test_root_of_the_host_has_another_number_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trusted_files, "_number_of_unmapped_root", lambda: 65534)
    assert objection(status(65534, 0o755), True) is None
    assert objection(status(65534, 0o755), False) == "user 65534 owns it"
    assert objection(status(1001, 0o755), True) == "user 1001 (bob) owns it"


@pytest.mark.parametrize(
    ("uid_map", "number"),
    [
        ("         0          0 4294967295\n", None),
        ("         0       1000          1\n         1     100000      65536\n", 65534),
        ("      1000       1000          1\n", 65534),
        (None, None),
        ("", 65534),
        ("nonsense\n", None),
    ],
)
def test_user_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid_map: str | None, number: int | None) -> None:
    files = {"/proc/self/uid_map": tmp_path / "map", "/proc/sys/kernel/overflowuid": tmp_path / "overflow"}
    if uid_map is not None:
        files["/proc/self/uid_map"].write_text(uid_map)
    files["/proc/sys/kernel/overflowuid"].write_text("65534\n")
    monkeypatch.undo()
    monkeypatch.setattr(trusted_files, "Path", files.__getitem__)
    assert trusted_files._number_of_unmapped_root.__wrapped__() == number


def test_a_folder_is_enclosed_if_no_other_user_may_write_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "middle" / "inner"
    inner.mkdir(parents=True)
    above = trusted_files._folders_above
    monkeypatch.setattr(trusted_files, "_folders_above", lambda path: [at for at in above(path) if at.is_relative_to(tmp_path)])

    def is_enclosed() -> tuple[bool, bool]:
        with trusted_files.open_folder(inner.parent) as outer, trusted_files.open_inner("inner", outer) as folder:
            return outer.is_enclosed, folder.is_enclosed

    assert is_enclosed() == (True, True)
    for path, mode, expected in (
        (tmp_path, 0o1777, (False, False)),
        (inner.parent, 0o770, (False, False)),
        (inner, 0o702, (True, False)),
    ):
        path.chmod(mode)
        assert is_enclosed() == expected
        path.chmod(0o755)
