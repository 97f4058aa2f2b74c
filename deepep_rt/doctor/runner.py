"""Run doctor's probes in child processes, and gather the reports of all ranks.

`python -m deepep_rt.doctor.runner NAME...` is a child that runs probes and prints a line of JSON for each. If it dies or hangs, the running
probe has failed, and another child runs the remaining ones. `python -m deepep_rt.doctor.runner --gather` reads this rank's report and
prints the reports of all ranks. Only this child starts MPI, so that doctor can report an MPI that does not start.
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
"""Limit of one probe. A driver that initialises many GPUs takes seconds."""

GATHER_LIMIT_S = 90.0
"""Limit for the ranks to find each other. A rank with a probe that hangs is late."""

ALONE = {"rank": 0, "local_rank": 0, "group": 0}
"""The entries that `gather` adds to the report of a single process."""

_MARK = "deepep_rt.doctor.runner: "
"""The beginning of an answer's line. Other lines, such as those of a sitecustomize, are ignored."""

_MODULE = [sys.executable, "-m", f"{__package__}.runner"]


def run_probes(names: Sequence[str] = tuple(PROBES), limit_s: float = PROBE_LIMIT_S) -> dict[str, Any]:
    """Run probes in child processes.

    Args:
        names: Names in `PROBES`.
        limit_s: Limit of each probe in seconds.

    Returns:
        `facts` (results by probe) and `failures` (reasons by probe that failed).
    """
    facts: dict[str, Any] = {}
    failures: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        ended = _run_child(waiting, facts, failures, limit_s)
        waiting = [name for name in waiting if name not in facts and name not in failures]
        if waiting:  # the child ended in the middle of this probe
            failures[waiting.pop(0)] = ended
    return {"facts": facts, "failures": failures}


def _run_child(names: list[str], facts: dict[str, Any], failures: dict[str, str], limit_s: float) -> str:
    """Run one child and add its answers. Return how it ended."""
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
    return exit_text(status, "".join(errors))


def exit_text(status: int, errors: str) -> str:
    """Describe how a child ended, with the important lines of its standard error."""
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    lines = [line.strip() for line in errors.splitlines() if line.strip(" -*")]
    if lines[:1] == ["Traceback (most recent call last):"]:
        lines = lines[-1:]
    if len(lines) > 4:  # the first or the last lines name the cause
        lines[3:-1] = ["[...]"]
    return f"its process {how}" + (": " + " ".join(lines) if lines else "")


def gather(report: dict[str, Any], limit_s: float = GATHER_LIMIT_S) -> tuple[int, list[dict[str, Any]], str | None]:
    """Exchange the reports of all ranks. Collective over MPI's world.

    Returns:
        This rank, the reports by rank, and None. Each report gets `rank`, `local_rank` (number among the ranks of its host) and `group`
        (the lowest rank of that host). If MPI fails: 0, this report, and the reason.
    """
    alone = 0, [{**report, **ALONE}]
    try:
        done = subprocess.run(  # the child needs the launcher's pipes, which this process inherited
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
    return *alone, exit_text(done.returncode, done.stderr)


def _answer(line: str) -> dict[str, Any] | None:
    return json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else None


def _probe(names: Sequence[str]) -> None:
    write = _answer_writer()
    for name in names:
        try:
            answer = {"name": name, "facts": PROBES[name]()}
        except Exception as error:
            prefix = "" if isinstance(error, EPError) else f"{type(error).__name__}: "
            answer = {"name": name, "failure": prefix + " ".join(str(error).split())}
        write(answer)


def _gather() -> None:
    write = _answer_writer()
    report = json.loads(sys.stdin.read())
    from mpi4py import MPI

    from ..comm.mpi import MpiCommunicator

    comm = MpiCommunicator(MPI.COMM_WORLD)
    rank, here = comm.Get_rank(), comm.ranks_on_host()
    reports = comm.allgather({**report, "rank": rank, "local_rank": here.index(rank), "group": here[0]})
    write({"rank": rank, "reports": reports})


def _answer_writer() -> Callable[[dict[str, Any]], None]:
    """Reserve standard output for answers, and redirect the prints of libraries to standard error. Return the function that answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(_MARK + json.dumps(answer), file=answers, flush=True)


def launch_variables() -> dict[str, Any] | None:
    """Read `launcher`, `rank` and `size` from the launcher's variables. None: no launcher."""
    found = _env.launch()
    return vars(found) if found else None


if __name__ == "__main__":
    _gather() if sys.argv[1:] == ["--gather"] else _probe(sys.argv[1:])
