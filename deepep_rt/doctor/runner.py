"""Runs doctor's probes, each where it can do no harm, and brings the answers of all ranks together.

`python -m deepep_rt.doctor.runner NAME...` is the process in which probes run: one line of JSON for each. When it dies or hangs, that is
an answer too, and another process takes the remaining probes. `python -m deepep_rt.doctor.runner --gather` reads this rank's answers
and writes those of all ranks; only that process starts MPI, so that an MPI that does not start can be reported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .. import _env
from ..errors import EPError
from .probes import PROBES

PROBE_LIMIT_S = 30.0
"""How long one probe may take; a driver that initialises many GPUs takes seconds."""

GATHER_LIMIT_S = 90.0
"""How long the ranks may take to find each other. Ranks whose probes hang come late."""

ALONE = {"rank": 0, "local_rank": 0, "group": 0}
"""What `gather` would add to the report of a process without others."""

_MARK = "deepep_rt.doctor.runner: "
"""How an answer's line begins; whatever else is printed (by a sitecustomize, say) is none."""

_MODULE = [sys.executable, "-m", f"{__package__}.runner"]


def examine(names: Sequence[str] = tuple(PROBES), limit_s: float = PROBE_LIMIT_S) -> dict[str, Any]:
    """Run probes in other processes.

    Args:
        names: Of `PROBES`.
        limit_s: Seconds that each may take.

    Returns:
        `facts` (what a probe returned, by its name) and `failures` (why one returned nothing).
    """
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        ended = _run(waiting, facts, failures, limit_s)
        waiting = [name for name in waiting if name not in facts and name not in failures]
        if waiting:  # the process ended in the middle of this one
            failures[waiting.pop(0)] = ended
    return {"facts": facts, "failures": failures}


def _run(names: list[str], facts: dict[str, Any], failures: dict[str, str], limit_s: float) -> str:
    """One process; returns how it ended."""
    with subprocess.Popen(
        [*_MODULE, *names], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        expired = threading.Event()

        def stop() -> None:
            expired.set()
            process.kill()

        line = " "
        while line:
            timer = threading.Timer(limit_s, stop)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if (answer := _answer(line)) is not None:
                (failures if "failure" in answer else facts)[answer["name"]] = answer.get("failure") or answer["facts"]
        status = process.wait()
        reader.join(1)
    if expired.is_set():
        return f"did not end within {limit_s:g} s"
    return _ending(status, "".join(errors))


def _ending(status: int, errors: str) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = [line.strip() for line in errors.splitlines() if line.strip(" -*")]
    if lines[:1] == ["Traceback (most recent call last):"]:
        lines = lines[-1:]
    if len(lines) > 4:  # libraries say first what went wrong, or last
        lines[3:-1] = ["[...]"]
    return f"its process {how}" + (": " + " ".join(lines) if lines else "")


def gather(report: dict[str, Any], limit_s: float = GATHER_LIMIT_S) -> tuple[int, list[dict[str, Any]], str | None]:
    """Exchange the reports of all ranks. Collective over whatever MPI's world is.

    Returns:
        This rank, the reports by rank, each with `rank`, `local_rank` (number among the ranks of its host) and `group` (the lowest rank
        of that host), and None; or, instead of None, why MPI did not bring any other report than this one.
    """
    alone = 0, [{**report, **ALONE}]
    try:
        done = subprocess.run(  # the child speaks to the launcher through pipes that this process inherited
            [*_MODULE, "--gather"],
            input=json.dumps(report),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            close_fds=False,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return *alone, f"the ranks did not find each other within {limit_s:g} s"
    answers = [answer for answer in map(_answer, done.stdout.splitlines()) if answer is not None]
    if done.returncode == 0 and answers:
        return answers[0]["rank"], answers[0]["reports"], None
    return *alone, _ending(done.returncode, done.stderr)


def _answer(line: str) -> dict[str, Any] | None:
    return json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else None


def _probe(names: Sequence[str]) -> None:
    tell = _answers()
    for name in names:
        try:
            answer = {"name": name, "facts": PROBES[name]()}
        except Exception as error:
            kind = "" if isinstance(error, EPError) else f"{type(error).__name__}: "  # ours speak for themselves
            answer = {"name": name, "failure": kind + " ".join(str(error).split())}
        tell(answer)


def _gather() -> None:
    tell = _answers()
    report = json.loads(sys.stdin.read())
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    place = {"rank": comm.Get_rank(), "local_rank": host.Get_rank(), "group": min(host.allgather(comm.Get_rank()))}
    reports = comm.allgather({**report, **place})
    host.Free()
    tell({"rank": comm.Get_rank(), "reports": reports})


def _answers() -> Callable[[dict[str, Any]], None]:
    """A way to standard output that is for answers alone; what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(_MARK + json.dumps(answer), file=answers, flush=True)


def launch() -> dict[str, Any] | None:
    """What the launcher of this process says: `launcher`, `rank`, `size`."""
    found = _env.launch()
    return vars(found) if found else None


if __name__ == "__main__":
    _gather() if sys.argv[1:] == ["--gather"] else _probe(sys.argv[1:])
