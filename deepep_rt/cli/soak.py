"""Define `python -m deepep_rt soak`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .._console import printing
from ..errors import EPConfigError

_INTERRUPTED = 128 + signal.SIGINT  # as shells count


def soak(
    minutes: Annotated[
        float | None, typer.Option(help="How long to run. Default: 10, unless --rounds or --changes is given.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all rounds. Default: a new one, which is printed.")] = None,
    round_: Annotated[int | None, typer.Option("--round", help="Repeat only this round of a seed.")] = None,
    since: Annotated[int | None, typer.Option(help="With --round: begin with this round.")] = None,
    backend: Annotated[str, typer.Option(help="auto, cuda or host.")] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report, also during the run.")
    ] = None,
    groups: Annotated[
        str,
        typer.Option(help="Ranks of each group, such as 3,1. Each group runs by itself, with the next seed. Default: one group."),
    ] = "",
    tokens: Annotated[int | None, typer.Option(help="Most tokens of a rank in throughput Buffers. Default: changes.")] = None,
    low_latency_tokens: Annotated[int | None, typer.Option(help="The same for Buffers of both modes. Default: changes.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Elements of a row. Default: changes from Buffer to Buffer.")] = None,
    topk: Annotated[int | None, typer.Option(help="Experts of a token. Default: changes.")] = None,
    experts: Annotated[int | None, typer.Option(help="Experts over all ranks. Default: changes.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of a node. Default: changes on the host backend; on GPUs, the ranks of a host.")
    ] = None,
    rounds_per_buffer: Annotated[int, typer.Option(help="Rounds before the next Buffer is made.")] = 200,
    sleep_every: Annotated[int, typer.Option(help="Let Buffers sleep before one of so many rounds, on average.")] = 50,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a silent rank ends the run, or with --kill is left out. Default: 60, with --kill 10."
        ),
    ] = None,
    progress_s: Annotated[float, typer.Option(help="Seconds between lines of progress.")] = 10.0,
    kill: Annotated[
        bool,
        typer.Option("--kill", help="Kill, stop and add ranks of a Buffer with slots meanwhile. Without mpirun, on this host."),
    ] = False,
    ranks: Annotated[int | None, typer.Option(help="With --kill: ranks at the start. Default: 3.")] = None,
    slots: Annotated[int | None, typer.Option(help="With --kill: max_ranks. Default: one more than --ranks.")] = None,
    changes: Annotated[int | None, typer.Option(help="With --kill: how many kills, stops, joins and so on.")] = None,
    stops: Annotated[
        float | None, typer.Option(help="With --kill: share of lost ranks that are stopped, and go on later. Default: 0.1.")
    ] = None,
) -> None:
    """Check every byte of random calls. They are of both modes, on all ranks of this mpirun. Exit status 1 if a byte or a call is wrong."""
    from .. import soak

    only_with_kill: dict[str, Any] = {"ranks": ranks, "slots": slots, "changes": changes, "stops": stops}
    sizes = dict(low_latency_tokens=low_latency_tokens, hidden=hidden, topk=topk, experts=experts)
    if kill:
        without = {"rounds": rounds, "round": round_, "since": since, "groups": groups or None}
        _refuse({**without, "tokens": tokens, "ranks-per-node": ranks_per_node}, "without --kill")
        given: dict[str, Any] = {name: value for name, value in only_with_kill.items() if value is not None}
        given |= {} if timeout_s is None else {"timeout_s": timeout_s}
        kills = soak.Kills(
            **given,
            minutes=minutes,
            seed=seed,
            backend=backend,
            json_file=json_file,
            sizes=sizes,
            progress_s=progress_s,
        )
        _print(soak.run_kills(kills), soak.lines_of_kills)
    _refuse(only_with_kill, "with --kill")
    asked = soak.Asked(
        minutes=minutes,
        rounds=rounds,
        seed=seed,
        round=round_,
        since=since,
        backend=backend,
        json_file=json_file,
        groups=groups,
        sizes={
            **sizes,
            "tokens": tokens,
            "ranks_per_node": ranks_per_node,
            "rounds_per_buffer": rounds_per_buffer,
            "sleep_every": sleep_every,
        },
        **({} if timeout_s is None else {"timeout_s": timeout_s}),
        progress_s=progress_s,
    )
    document = soak.run(asked)
    if document is None:  # status 0: a launcher that sees a rank fail ends the others before rank 0 has printed
        return
    _print(document, soak.lines)


def _print(document: Mapping[str, Any], lines: Callable[[Mapping[str, Any]], Iterable[str]]) -> NoReturn:
    """Print a report, and end with its status."""
    with printing():
        print("\n".join(lines(document)))
    raise typer.Exit({"passed": 0, "interrupted": _INTERRUPTED}.get(document["status"], 1))


def _refuse(options: Mapping[str, Any], where: str) -> None:
    """Raise EPConfigError if one of these options is given."""
    for name, value in options.items():
        if value is not None:
            raise EPConfigError(f"--{name} is {value}; expected it only {where}. Leave it out.")
