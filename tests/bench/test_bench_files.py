"""Read malformed files with `bench --from` and `--compare`: each is an error with a message."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("rich")

from deepep_rt.bench import report as bench_report
from deepep_rt.bench.references import load
from deepep_rt.bench.results import read
from deepep_rt.errors import EPConfigError

FILES = {
    "throughput": ROOT / "bench/results/h200x4_2026-11-22.json",
    "low latency": ROOT / "bench/results/h200x4_2026-11-22_low_latency.json",
    "references": ROOT / "bench/reference/h200x8_peers.json",
}
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 3, 7, 2**31, 10**30, 1e-300, 1e300, float("nan"), float("inf"), -0.5, "", "x", "24",
    "\x1b[31mred", "$\\frac$", "[/red]", "[bold]", ":smile:", "<script>", "\ud800", "\u202e", "a\nb", "x" * 5000, [], [1],
    {}, {"a": 1}, [[]], "cuda", "host",
]  # fmt: skip


def small(name: str) -> dict[str, Any]:
    """Make a file of a few figures, which is drawn quickly. "host" imitates a machine without GPUs."""
    found = json.loads(FILES["low latency" if name == "host" else name].read_text())
    if "rows" in found:
        tokens = sorted({row["tokens"] for row in found["rows"]})[:2]
        found["rows"] = [row for row in found["rows"] if row["tokens"] in tokens and row.get("sms", 8) < 24]
    if name == "host":
        found["settings"]["backend"] = "host"
        for row in found["rows"]:
            row.update({field: None for field in row if not field.startswith(("tokens", "call", "host"))})
    return found


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """List the container and the name of every member of objects and lists."""
    for name in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, name
        yield from places(value[name])


def mutated(name: str, chance: random.Random) -> bytes:
    """Make a file with one or two mistakes."""
    found = small(name)
    for _ in range(chance.choice((1, 1, 2))):
        every = list(places(found))
        # Prefer the head of the file, because it has far fewer places than the rows.
        holder, at = chance.choice([place for place in every if chance.random() < 0.5 or place[0] is found] or every)
        kind = chance.randrange(6)
        if kind == 0:
            del holder[at]
        elif kind == 1 and isinstance(holder, dict):
            holder[chance.choice(["0", "-1", "x", "²", "\x1b", "9" * 400, "work", "rows"])] = holder.pop(at)
        elif kind == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[at]))
        else:
            holder[at] = copy.deepcopy(chance.choice(ODD))
        if not list(places(found)):
            break
    text = json.dumps(found).encode()
    kind, start = chance.randrange(12), chance.randrange(len(text))
    if kind == 0:
        return text[:start]
    if kind == 1:
        return text[:start] + bytes([chance.randrange(256)]) + text[start + 1 :]
    return text


def show(path: Path, *, is_drawn: bool) -> bool:
    """Read and print a file like `bench --from` and `--compare`. Tell whether one accepts it. An error must be an EPConfigError."""
    plain = read(FILES["low latency"])
    results, references, messages = [], [], []
    for reader, into in ((read, results), (load, references)):
        try:
            found = reader(path)
        except EPConfigError as error:
            messages.append(str(error))
        else:
            into += found if isinstance(found, list) else [found]
    assert all(str(path) in text and text.isprintable() for text in messages)
    for result in results:
        bench_report.print_result(result, references)
    bench_report.print_result(plain, references)
    if is_drawn:
        from deepep_rt.bench import page as bench_page

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of characters that the font lacks
            bench_page.write(results, references, path.parent)
    return bool(results or references)


def trial(seed: int, folder: Path, *, is_drawn: bool) -> bool:
    chance = random.Random(seed)
    path = folder / f"{seed}.json"
    path.write_bytes(mutated(chance.choice(("throughput", "low latency", "host", "references")), chance))
    return show(path, is_drawn=is_drawn)


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_malformed_files(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Read 200 files. Some mistakes only change figures, so the file is accepted."""
    accepted = [trial(number, tmp_path, is_drawn=False) for number in range(seed, seed + 20)]
    assert "\x1b" not in capsys.readouterr().out
    assert not all(accepted)


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_malformed_files_are_drawn(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, which comes with deepep_rt[bench]")
    trial(seed, tmp_path, is_drawn=True)


@pytest.mark.parametrize("name", ["throughput", "low latency", "host", "references"])
def test_the_files_without_mistakes_are_accepted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.json").write_text(json.dumps(small(name)))
    assert show(tmp_path / "file.json", is_drawn=False)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("throughput", {"num_ranks": "8"}, "file.num_ranks='8'; expected a whole number from 1 to 65536"),
        ("throughput", {"num_ranks": 3}, "top-8 of 256 experts on 3 ranks"),
        ("low latency", {"rows": []}, "file.rows=[]; expected a list that is not empty"),
        ("throughput", {"machine": "\x1b[31m"}, r"file.machine='\x1b[31m'; expected printable text"),
        ("throughput", {"commit": None}, "file.commit=None; expected an object"),
        ("throughput", {"boundary": 10**400}, "expected a finite number"),
        ("low latency", {"low_latency_sms": None}, "file.low_latency_sms=None; expected a whole number"),
        ("references", {"systems": {"a": {"low_latency_us": {"x": {}}}}}, "file.systems.a.low_latency_us='x'; expected a whole number"),
        ("references", {"settings": {"hidden": 1}}, "file.settings has no experts, topk"),
        ("references", {"num_ranks": 7}, "top-8 of 256 experts on 7 ranks"),
    ],
)  # fmt: skip
def test_the_message_names_the_place(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**small(name), **change}))
    with pytest.raises(EPConfigError) as caught:
        (load if name == "references" else read)(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        *(b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"rows": ' + b"9" * 5000 + b"}", b"\xff", b"\x00"),
        *(b"", b"[]", b"{}", b'{"rows": [{"work": 1}]}', b'{"rows": []}', b'{"systems": {}}'),
    ],
)
def test_files_without_results_are_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(data)
    for reader in (read, load):
        with pytest.raises(EPConfigError, match=r"file\.json"):
            reader(path)
