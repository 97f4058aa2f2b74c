"""The steps of a call: what is wrapped, what is counted, and the table. Times are of no interest here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import Array, FakeGpu, fake, make, routed  # noqa: F401  (fixtures)
from launch import run_bench
from limits import seconds
from paths import HELPERS, pythonpath

pytest.importorskip("rich")
pytest.importorskip("ml_dtypes")

import host_path
from stages import Stages, wrapper_costs


class _Work:
    def outer(self, times: int, *, first: str = "") -> str:
        return first + "".join(self.inner(i) for i in range(times))

    def inner(self, number: int) -> str:
        if number > 8:
            raise ValueError(number)
        return str(number)


def test_stages_are_counted_and_undone() -> None:
    stages, originals = Stages(), dict(vars(_Work))
    with stages.installed([("outer", _Work, "outer"), ("inner", _Work, "inner")]):
        assert _Work().outer(3, first="a") == "a012"
        with pytest.raises(ValueError, match="9"):
            _Work().outer(11)
    assert dict(vars(_Work)) == originals
    outer, inner = stages.spent["outer"], stages.spent["inner"]
    assert (outer.calls, outer.inner_calls, inner.calls, inner.inner_calls) == (2, 13, 13, 0)
    assert min(outer.ns, inner.ns) > 0
    stages.reset()
    assert stages.corrected((1.0, 1.0), 5.0) == {}


def test_wrappers_are_subtracted() -> None:
    """Stages share what is too much: each call of a stage has the first cost, each call inside of it the second."""
    stages = Stages()
    with stages.installed([("outer", _Work, "outer"), ("inner", _Work, "inner")]):
        _Work().outer(4)
    stages.spent["outer"].ns, stages.spent["inner"].ns = 1000, 800
    # shares: outer 1 * 2 + 4 * 3 = 14, inner 4 * 2 = 8
    assert stages.corrected((2.0, 3.0), 1580.0) == {"outer": (860.0, 1), "inner": (720.0, 4)}
    assert min(wrapper_costs()) >= 1.0


def test_the_steps_of_calls(fake: FakeGpu, make: Any) -> None:  # noqa: F811
    with make(low_latency=True) as buffer:
        shapes = (("bfloat16", 10, 256), ("int64", 10, 4), ("float32", 10, 4), ("bfloat16", 8, 256, 256), ("bfloat16", 40, 256))
        arrays = host_path.Arrays(*(Array(fake, *shape) for shape in shapes))  # type: ignore[arg-type]
        fake.on_launch = routed(buffer, 3, [3] + [0] * 7)
        before = [vars(owner)[name] for _, owner, name in host_path.FUNCTIONS]
        rows = {row.call: row for row in host_path.measure(buffer, arrays, 8, 2, lambda: None)}
        assert [vars(owner)[name] for _, owner, name in host_path.FUNCTIONS] == before
    for row in rows.values():
        assert sum(us for us, _ in row.steps.values()) == pytest.approx(row.us)
    times = {name: {step: count for step, (_, count) in row.steps.items()} for name, row in rows.items()}
    for name in ("low-latency dispatch", "low-latency combine", "dispatch, known routing", "combine"):
        counted = times[name]
        assert (counted[host_path.LOOK], counted[host_path.FORM], counted["cuLaunchKernelEx"]) == (1, 1, 1)
        assert not {host_path.VIEWS, host_path.CHECKS} & set(counted)
        assert {"lock and context", host_path.ORDER, host_path.MEMORY, host_path.LAUNCH} <= set(counted)
    counted = times["dispatch, new routing"]
    assert (counted["wait for counts"], counted[host_path.VIEWS], counted["cuLaunchKernelEx"]) == (1, 3, 2)
    for name in ("prepared dispatch", "prepared combine"):
        assert not {host_path.VIEWS, host_path.CHECKS, host_path.MEMORY} & set(times[name])
        assert times[name]["cuLaunchKernelEx"] == 1
    table = host_path.markdown([vars(row) for row in rows.values()]).splitlines()
    assert table[0].count("|") == len(rows) + 2
    assert [line.split(" | ")[0].strip("| ") for line in table[-4:]] == [
        *("cuLaunchKernelEx", "sum", "with wrappers", "requests to the driver"),
    ]


def test_the_program_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ["--quick", "--tokens", "4", "--hidden", "128", "--experts", "8", "--topk", "2", "--calls", "10"]
    done = run_bench(1, "bench/host_path.py", *sizes, "--json", file)
    result = json.loads(file.read_text())
    assert {"date", "commit", "versions", "boundary", "machine", "python", "has_global_lock", "settings"} <= set(result)
    assert "arrays of numpy, 4 tokens" in done.stdout
    for row in result["rows"]:
        assert row["us"] > 0
        assert host_path.REST in row["steps"]


def test_the_program_without_a_gpu() -> None:
    """`tests/helpers/host_time.py` still makes its Buffer and its calls."""
    pytest.importorskip("torch")
    environment = {**os.environ, "PYTHONPATH": pythonpath()}
    words = [sys.executable, str(HELPERS / "host_time.py"), "--once"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=seconds(100), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" us\n") == 16
