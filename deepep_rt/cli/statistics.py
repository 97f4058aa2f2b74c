"""Define `python -m deepep_rt statistics`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .. import _statistics_files
from .._console import console, printable, printing
from .._documents import OTHER_VERSION
from ..errors import EPConfigError
from . import slow_ranks, tables
from .options import Json
from .slow_ranks import RankRates, Verdict

_FOLLOW_PERIOD_S = 1.0


def statistics(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder in DEEPEP_RT_STATISTICS of the job.")],
    follow: Annotated[bool, typer.Option("--follow", help="Print once a second, until the Buffers are destroyed.")] = False,
    as_json: Json = False,
) -> None:
    """Print calls, traffic and waits of a job. Name the rank that the others wait for."""
    if not folder.is_dir():
        raise EPConfigError(
            f"{folder} is no folder; expected the one that DEEPEP_RT_STATISTICS of the job names. Set the variable on all ranks to an "
            f"absolute path"
        )
    with printing():
        while _print_once(folder, as_json=as_json, with_destroyed=not follow) and follow:
            time.sleep(_FOLLOW_PERIOD_S)


def _print_once(folder: Path, *, as_json: bool, with_destroyed: bool) -> bool:
    """Print the Buffers of the folder. Return whether one of them runs, or none is there yet."""
    try:
        snapshots, unknown = _statistics_files.read(folder)
    except OSError as error:
        raise EPConfigError(f"{folder} cannot be read: {error.strerror}. Pass a folder that this user can read") from error
    time_now, found = time.time(), []
    for (buffer, num_ranks), of_buffer in slow_ranks.by_buffer(snapshots).items():
        rates = [slow_ranks.rates_of(snapshot, time_now) for snapshot in of_buffer]
        if with_destroyed or any(one.state != "destroyed" for one in rates):
            found.append((buffer, rates, slow_ranks.judge(rates, num_ranks)))
    if as_json:
        print(json.dumps([slow_ranks.document(*one) for one in found]), flush=True)
    else:
        for one in found:
            _print_buffer(*one)
        if not found:
            print(f"no Buffer writes statistics to {folder} now")
    for name, reason in unknown:
        more = "" if reason == OTHER_VERSION else f" ({reason})"
        typer.echo(f"{printable(name)}: no file of statistics of this version{more}", err=True)
    return not snapshots or any(one.state == "runs" for _, rates, _ in found for one in rates)


def _print_buffer(buffer: str, rates: Sequence[RankRates], verdict: Verdict) -> None:
    output = console(tables.WIDTH_OF_LOGS)
    columns = ("rank", "host", "calls/s", "sent GB/s", "received GB/s", "waited most for", "pool", "state")
    table = tables.new_table(*columns)
    for one in rates:
        waited_for = max(range(len(one.wait_shares)), key=one.wait_shares.__getitem__)
        pool = one.last.pool
        table.add_row(
            str(one.rank),
            one.host,
            f"{sum(one.calls_per_s.values()):.1f}",
            f"{one.sent_bytes_per_s / 1e9:.2f}",
            f"{one.received_bytes_per_s / 1e9:.2f}",
            f"rank {waited_for}, {one.wait_shares[waited_for]:.0%}" if one.wait_shares[waited_for] else "-",
            f"{pool.bytes_in_use / pool.capacity_bytes:.0%}" if pool.capacity_bytes else "-",
            one.state if one.state == "runs" else f"{one.state} for {one.age_s:.0f} s",
        )
    output.print(f"Buffer {buffer}, over {verdict.seconds:.0f} s")
    output.print(table)
    output.print(f"{verdict}\n")
