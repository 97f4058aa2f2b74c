"""`saved_tunings`: stored choices of `Buffer.autotune`, by everything that they depend on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deepep_rt import CopyShape, Tuning, TuningResult
from deepep_rt.backends import saved_tunings
from deepep_rt.config import Config
from deepep_rt.kernels.tuning import shapes_to_try

GPUS = ["NVIDIA H100 80GB HBM3 (sm_90)"] * 4


def _config(**changes: Any) -> Config:
    sizes = dict(num_ranks=4, num_max_tokens_per_rank=64, hidden=7168, num_topk=4, num_experts=32)
    return Config(**{**sizes, "timeout_s": 1.0, "check_inputs": False, "statistics": False, **changes})


CONFIG = _config()
TUNING = Tuning(16, shapes_to_try("dispatch", CONFIG, True)[0], None)
RESULT = TuningResult(TUNING, (), 64, "bfloat16", 1.0)
KEY = saved_tunings.key_of(CONFIG, GPUS)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of stored choices, which does not exist yet."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    for name in ("DEEPEP_RT_TUNING", "DEEPEP_RT_ASSERT_CACHED"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "tunings"


def test_a_choice_is_found_again(folder: Path) -> None:
    assert saved_tunings.load(KEY, CONFIG) is None
    file = saved_tunings.save(KEY, RESULT)
    assert [*folder.iterdir()] == [file]
    assert saved_tunings.load(KEY, CONFIG) == TUNING
    saved_tunings.save(KEY, dataclasses.replace(RESULT, chosen=Tuning(8)))
    assert saved_tunings.load(KEY, CONFIG) == Tuning(8)
    assert [*folder.iterdir()] == [file]


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_max_tokens_per_rank=128),
        dict(hidden=4096),
        dict(dtype="float16"),
        dict(num_topk=8),
        dict(num_experts=64),
        dict(statistics=True),
        dict(ranks_per_node=2),
        dict(num_ranks=2),
    ],
)
def test_other_buffers_have_other_choices(changes: dict[str, Any]) -> None:
    saved_tunings.save(KEY, RESULT)
    config = _config(**changes)
    assert saved_tunings.load(saved_tunings.key_of(config, GPUS[: config.num_ranks]), config) is None


def test_other_gpus_and_kernels_have_other_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    saved_tunings.save(KEY, RESULT)
    assert saved_tunings.load(saved_tunings.key_of(CONFIG, [*GPUS[:3], "NVIDIA A100 (sm_80)"]), CONFIG) is None
    assert saved_tunings.is_current(KEY)
    monkeypatch.setattr(saved_tunings, "_version_of_kernels", lambda over_nodes: "newer")
    assert not saved_tunings.is_current(KEY)
    assert saved_tunings.load(saved_tunings.key_of(CONFIG, GPUS), CONFIG) is None


def test_settings_without_an_effect_on_speed_share_a_choice() -> None:
    saved_tunings.save(KEY, RESULT)
    config = _config(num_sms=8, num_slots=4, timeout_s=5.0, check_inputs=True)
    assert saved_tunings.load(saved_tunings.key_of(config, GPUS), config) == TUNING


def test_the_version_of_kernels_depends_on_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = saved_tunings._version_of_kernels.__wrapped__
    before = [digest(over_nodes) for over_nodes in (False, True)]
    assert len({*before}) == 2
    real = saved_tunings.sources_of
    monkeypatch.setattr(saved_tunings, "sources_of", lambda kernel, folder: {**real(kernel, folder), "more.cuh": ""})
    assert digest(False) not in before


def test_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without new kernels, only the number of SMs counts: other shapes would be compiled, or raise."""
    saved_tunings.save(KEY, RESULT)
    monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    assert saved_tunings.load(KEY, CONFIG) == Tuning(16)
    monkeypatch.delenv("DEEPEP_RT_ASSERT_CACHED")
    monkeypatch.setenv("DEEPEP_RT_TUNING", "1")
    assert saved_tunings.load(KEY, CONFIG) == TUNING
    for text in ("0", "perhaps"):
        monkeypatch.setenv("DEEPEP_RT_TUNING", text)
        assert saved_tunings.load(KEY, CONFIG) is None


GOOD = {"num_sms": 16, "dispatch": None, "combine": None}


@pytest.mark.parametrize(
    "tuning",
    [
        None,
        [],
        {},
        {**GOOD, "num_sms": 0},
        {**GOOD, "num_sms": 1025},
        {**GOOD, "num_sms": True},
        {**GOOD, "num_sms": "16"},
        {**GOOD, "num_sms": 10**400},
        {**GOOD, "more": 1},
        {**GOOD, "dispatch": {"warps": True, "stages": 6, "copy_bytes": 16384}},
        {**GOOD, "dispatch": {"warps": 2}},
        {**GOOD, "dispatch": [2, 6, 16384]},
        {**GOOD, "combine": {"warps": 16, "stages": 12, "copy_bytes": 1 << 20}},  # more shared memory than a GPU has
        {**GOOD, "combine": {"warps": "2", "stages": 7, "copy_bytes": 14336}},
    ],
)
def test_damaged_choices_are_ignored(folder: Path, caplog: pytest.LogCaptureFixture, tuning: Any) -> None:
    saved_tunings.save(KEY, RESULT)
    (file,) = folder.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "tuning": tuning}))
    assert saved_tunings.load(KEY, CONFIG) is None
    assert f"stored tunings: {file} is ignored" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"created": "\x1b]0;title\x07"},
        {"created": None},
        {"num_tokens": -1},
        {"dtype_of_rows": 3},
        {"rows": [{"call": "dispatch"}]},
        {"buffer": {**KEY, "gpus": ["\x1b[2J"]}},
        {"buffer": {**KEY, "gpus": "H100"}},
        {"buffer": {**KEY, "num_ranks": 0}},
        {"buffer": {**KEY, "ranks_per_node": 0}},
        {"buffer": {**KEY, "ranks_per_node": 10**400}},
        {"buffer": []},
    ],
)
def test_damaged_files_are_not_listed(folder: Path, changes: dict[str, Any]) -> None:
    saved_tunings.save(KEY, RESULT)
    (file,) = folder.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    assert saved_tunings.FILES.all() == []


def test_shapes_of_a_buffer_over_nodes_are_refused() -> None:
    """Their kernels have none."""
    config = _config(ranks_per_node=2)
    key = saved_tunings.key_of(config, GPUS)
    saved_tunings.save(key, RESULT)
    assert saved_tunings.load(key, config) is None
    saved_tunings.save(key, dataclasses.replace(RESULT, chosen=Tuning(32)))
    assert saved_tunings.load(key, config) == Tuning(32)


@pytest.mark.parametrize("tuning", [Tuning(24), TUNING, Tuning(8, CopyShape(1, 2, 3), CopyShape(4, 5, 6))])
def test_choices_survive_files_and_communicators(tuning: Tuning) -> None:
    from deepep_rt.comm import store

    plain = saved_tunings.plain(tuning)
    assert saved_tunings.of_plain(json.loads(json.dumps(plain))) == tuning
    assert saved_tunings.of_plain(store.unpack(store.pack(plain))) == tuning
