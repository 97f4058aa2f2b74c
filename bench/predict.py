"""Predict calls over 1 to 256 nodes from figures of the links. It measures nothing, and needs neither MPI nor a GPU.

python bench/predict.py                                              # 8 H200s a node, an InfiniBand NDR NIC for each GPU
python bench/predict.py --from measured/throughput.json --nic roce-200 --out predicted
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepep_rt._install import or_exit

with or_exit("the model", "bench"):
    import model
    import published

    from deepep_rt._console import printing
    from deepep_rt.bench.ranks import check_writable, need
    from deepep_rt.bench.report import ResultTable, markdown_table, print_table
    from deepep_rt.bench.results import Sizes, read
    from deepep_rt.doctor.links import NIC_KINDS
    from deepep_rt.errors import EPConfigError, EPError

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_NODES = 4096

NEAR_H200 = model.Link(386.0, 13.4)
NEAR_LOW_LATENCY_H200 = model.Link(295.0, 4.9)
"""Lines through bench/results/h200x8_2026-11-22*.json, for machines without a result of their own."""

FITTED_SHARE = published.FITTED_FAR_GB_S / published.NIC_GB_S
"""The part of a NIC's line rate that rows reach in DeepEP V1's published figures."""


class Asked(NamedTuple):
    """What the command line asks for. None: the default."""

    nodes: str | None = None
    node_size: int | None = None
    near_gb_s: float | None = None
    near_us: float | None = None
    nic: str = "ib-ndr"
    nic_gb_s: float | None = None
    nic_share: float | None = None
    nic_us: float | None = None
    nic_message_us: float = 0.0
    tokens: int = 4096
    low_latency_tokens: int = 128
    hidden: int = 7168
    topk: int = 8
    experts: int = 256
    groups: int = 4
    far_from: Path | None = None


def run(asked: Asked, files: Sequence[Path], out: Path | None, *, as_json: bool) -> None:
    """Predict, print, and write `model.json`, `model.md` and `model.png` if there is a folder.

    Args:
        asked: Figures and sizes.
        files: Results of `bench` on GPUs of one host, which give the near figures. Default: the newest ones in this folder, or those of 8
            H200s.
        out: The folder to write to.
        as_json: Print JSON instead of tables.

    Raises:
        EPConfigError: if a figure is out of range, or a file cannot be read or written.
        EPUnavailableError: if there is a folder, but no matplotlib.
    """
    for name in ("node_size", "near_gb_s", "nic_gb_s", "nic_share", "tokens", "low_latency_tokens", "hidden", "topk", "experts"):
        _check(name, getattr(asked, name), above_zero=True)
    for name in ("near_us", "nic_us", "nic_message_us", "groups"):
        _check(name, getattr(asked, name), above_zero=False)
    found = predict(asked, files or newest_results(Path()))
    if out is not None:
        need("matplotlib")
        check_writable(None, out, "--out")
        (out / "model.json").write_text(json.dumps(found, indent=1) + "\n")
        (out / "model.md").write_text(markdown(found))
        from model_figure import draw, png

        (out / "model.png").write_bytes(png(draw(found)))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for table in tables(found):
        print_table(table)
    print("Assumptions:", *(f"- {text}" for text in found["assumptions"]), sep="\n")


def _check(name: str, value: float | None, *, above_zero: bool) -> None:
    if value is not None and not (math.isfinite(value) and (value > 0 or (value == 0 and not above_zero))):
        expected = "a number above 0" if above_zero else "0 or more"
        raise EPConfigError(f"--{name.replace('_', '-')}={value}; expected {expected}. Give another number.")


def node_numbers(text: str | None) -> tuple[int, ...]:
    """Parse a list of numbers of nodes, such as 1,2,4."""
    if text is None:
        return NODES
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= MAX_NODES for number in numbers):
        raise EPConfigError(f"--nodes={text!r}; expected numbers of 1 to {MAX_NODES}, such as 1,2,4. Give such a list.")
    return tuple(sorted(set(numbers)))


def newest_results(folder: Path) -> list[Path]:
    """Find the results of the newest folder that `bench` wrote on several GPUs of one host. Empty: there are none.

    Args:
        folder: Where `bench` was called. It writes to `bench-DATE-TIME` there.
    """
    for made in sorted(folder.glob("bench-*"), reverse=True):
        files = [made / name for name in ("throughput.json", "low_latency.json") if (made / name).is_file()]
        try:
            if files and model.near_of_results([read(file) for file in files]):
                return files
        except EPConfigError:  # measured without GPUs, or damaged
            continue
    return []


def machine_of(asked: Asked, files: Sequence[Path]) -> model.Machine:
    """Put the figures of results, of options and of the kind of NIC together. Options win."""
    results = [read(file) for file in files]
    measured = model.near_of_results(results)
    sizes = {Sizes.of(result).num_ranks for result in results}
    if len(sizes) > 1:
        raise EPConfigError(
            f"--from has results of {sorted(sizes)} ranks; expected one number of ranks. Pass results of one machine."
        )
    if asked.nic not in NIC_KINDS:
        raise EPConfigError(
            f"--nic={asked.nic!r}; expected one of {', '.join(NIC_KINDS)}. Choose one, and change it with --nic-gb-s."
        )
    given = {"gb_s": asked.near_gb_s, "us": asked.near_us}
    near = model.with_figures(measured.get("near", NEAR_H200), **given)
    near_low_latency = model.with_figures(measured.get("near_low_latency", NEAR_LOW_LATENCY_H200), **given)
    if asked.far_from is None:
        kind, rate = asked.nic, NIC_KINDS[asked.nic].gb_s
        far = model.Link(rate * FITTED_SHARE, published.FITTED_US, rate)
    else:
        kind, far = _short(asked.far_from), model.far_of_result(read(asked.far_from), near)
    line, us = asked.nic_gb_s or far.ideal_gb_s, far.us if asked.nic_us is None else asked.nic_us
    far = model.Link(line * (asked.nic_share or far.gb_s / far.ideal_gb_s), us, line, asked.nic_message_us)
    source = ", ".join(map(_short, files)) or "8 H200s (docs/performance.md)"
    changed = " changed by options" if asked.near_gb_s or asked.near_us is not None else ""
    node_size = asked.node_size or (sizes.pop() if sizes else 8)
    return model.Machine(near, near_low_latency, far, node_size, f"near: {source}{changed}; far: {kind}, {line:g} GB/s a rank")


def _short(file: Path) -> str:
    return str(Path(file.parent.name) / file.name)


def predict(asked: Asked, files: Sequence[Path] = ()) -> dict[str, Any]:
    """Make the document of all estimates, with assumptions and published rows."""
    machine = machine_of(asked, files)
    work = model.Work(asked.tokens, asked.low_latency_tokens, asked.hidden, asked.topk, asked.experts, asked.groups or None)
    rows: list[dict[str, Any]] = []
    for nodes in node_numbers(asked.nodes):
        for call in model.CALLS:
            paths = ("hierarchical", "direct") if nodes > 1 else ("near",)
            estimates = {path: model.throughput(work, machine, nodes, call, path) for path in paths}
            auto = model.better_path(*estimates.values()) if nodes > 1 else "near"
            for path, estimate in estimates.items():
                rows.append(_row("throughput", call, nodes, machine, path, estimate, is_auto=path == auto))
            path = "direct" if nodes > 1 else "near"
            estimate = model.low_latency(work, machine, nodes, call)
            rows.append(_row("low-latency", call, nodes, machine, path, estimate, is_auto=True))
    on = published.machine()
    theirs = [
        {**row._asdict(), "model": value, "error": value / row.value - 1}
        for row in published.ROWS
        for value in [published.predict(row, on)]
    ]
    errors = [row["error"] for row in theirs]
    return {
        "assumptions": assumptions(),
        "machine": dataclasses.asdict(machine),
        "work": dataclasses.asdict(work),
        "rows": rows,
        "published": theirs,
        "published_rms": math.sqrt(sum(error * error for error in errors) / len(errors)),
        "published_worst": max(map(abs, errors)),
    }


def _row(
    mode: str, call: str, nodes: int, machine: model.Machine, path: str, estimate: model.Estimate, *, is_auto: bool
) -> dict[str, Any]:
    place = {"mode": mode, "call": call, "nodes": nodes, "ranks": nodes * machine.node_size, "path": path, "auto": is_auto}
    return {**place, **dataclasses.asdict(estimate)}


def assumptions() -> list[str]:
    """List the assumptions that the model's documentation names."""
    text = (model.__doc__ or "").partition("Assumptions:")[2]
    return [" ".join(part.split()) for part in text.split("\n- ")[1:]]


# --- tables ------------------------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> list[ResultTable]:
    """Make the tables: throughput, low latency, and published rows."""
    work, machine = found["work"], found["machine"]
    groups = f", top-{work['groups']} groups" if work["groups"] else ""
    problem = f"hidden {work['hidden']}, top-{work['topk']} of {work['experts']} experts"
    counted = "GB/s as DeepEP counts: a row for each node of a token, its own one included; on one node a row for each rank."
    heads = ["nodes", "ranks", "path", "dispatch us", "GB/s", "% of ideal", "limit", "combine us", "GB/s", "% of ideal", "limit"]
    made = []
    for mode, title, caption in (
        (
            "throughput",
            f"Throughput, {work['tokens']} tokens a rank, {problem}{groups}",
            f"{counted} *: the path that auto takes.",
        ),
        (
            "low-latency",
            f"Low latency, {work['low_latency_tokens']} tokens a rank, {problem}",
            "GB/s: a row for each expert of a token.",
        ),
    ):
        lines: dict[tuple[int, int, str], list[str]] = {}
        for row in found["rows"]:
            if row["mode"] == mode:
                cells = [f"{row['us']:.0f}", f"{row['gb_s']:.1f}", f"{100 * row['efficiency']:.0f}", row["bottleneck"]]
                lines.setdefault((row["nodes"], row["ranks"], row["path"]), []).extend(cells)
        stars = {(row["nodes"], row["path"]) for row in found["rows"] if row["mode"] == mode and row["auto"] and row["nodes"] > 1}
        shown = mode == "throughput"
        cells = [
            [str(nodes), str(ranks), path + (" *" if shown and (nodes, path) in stars else ""), *line]
            for (nodes, ranks, path), line in lines.items()
        ]
        made.append(ResultTable(title, heads, cells, caption))
    far = machine["far"]
    made[0] = made[0]._replace(
        caption=f"{made[0].caption} {machine['where']}. A NIC reaches {far['gb_s']:.1f} GB/s after {far['us']:.1f} us."
    )
    return [*made, published_table(found)]


def published_table(found: dict[str, Any]) -> ResultTable:
    """Make the table of DeepEP's published rows and the model's values for them."""
    rows = [
        [
            row["mode"],
            row["call"],
            str(row["num_ranks"]),
            _value(row, row["value"]),
            _value(row, row["model"]),
            f"{100 * row['error']:+.1f} %",
        ]
        for row in found["published"]
    ]
    caption = (
        f"DeepEP V1 on H800, fitted with {published.FITTED_US:g} us, {published.FITTED_FAR_GB_S:g} GB/s far and "
        f"{published.FITTED_NEAR_GB_S:g} GB/s near: {100 * found['published_rms']:.1f} % rms, "
        f"{100 * found['published_worst']:.1f} % at worst."
    )
    return ResultTable("Published figures", ["mode", "call", "ranks", "published", "model", "difference"], rows, caption)


def _value(row: dict[str, Any], value: float) -> str:
    return f"{value:.1f} GB/s" if row["mode"] == "throughput" else f"{value:.0f} us"


def markdown(found: dict[str, Any]) -> str:
    """Write all tables and assumptions as Markdown."""
    parts = ["# The model of several nodes", "![Bandwidth and latency by nodes](model.png)"]
    for table in tables(found):
        parts += [f"## {table.title}", markdown_table(table.heads, table.rows), table.caption]
    parts += ["## Assumptions", "\n".join(f"- {text}" for text in found["assumptions"])]
    return "\n\n".join(parts) + "\n"


# --- the command -------------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[type, str]] = {
    "nodes": (str, "numbers of nodes; default: 1,2,4 and so on up to 256"),
    "node_size": (int, "ranks of a node; default: those of --from, or 8"),
    "near_gb_s": (float, "GB/s between GPUs of a node; default: of --from, or H200"),
    "near_us": (float, "microseconds of an empty call in a node"),
    "nic": (str, "kind of NIC of each rank: ib-ndr, roce-100, efa-200, tcp-25 or others"),
    "nic_gb_s": (float, "line rate of a rank's NIC, or of its share of one"),
    "nic_share": (float, "part of the line rate that rows reach; default: 0.864"),
    "nic_us": (float, "microseconds of an empty call over the network; default: 24.3"),
    "nic_message_us": (float, "microseconds of a NIC or proxy for each message"),
    "tokens": (int, "tokens of a rank in a throughput call"),
    "low_latency_tokens": (int, "tokens of a rank in a low-latency call"),
    "hidden": (int, "elements of a row"),
    "topk": (int, "experts of a token"),
    "experts": (int, "experts over all ranks"),
    "groups": (int, "most nodes of a token in throughput calls; 0: no limit"),
    "far_from": (Path, "far figures: a result of bench/throughput.py over --transport wire"),
}
"""Type and help of each field of `Asked`."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the program. After an EPError, print its message and exit with status 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (kind, text) in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=Asked._field_defaults[name], help=text)
    parser.add_argument("--from", dest="files", type=Path, action="append", metavar="FILE", help="near figures; may be repeated")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write model.json, model.md and model.png")
    parser.add_argument("--json", dest="as_json", action="store_true", help="machine-readable output")
    asked = vars(parser.parse_args(words))
    files, out, as_json = asked.pop("files"), asked.pop("out"), asked.pop("as_json")
    try:
        with printing():
            run(Asked(**asked), files or [], out, as_json=as_json)
    except EPError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
