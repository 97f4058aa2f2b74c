"""Run doctor's probes in child processes, and gather the reports of all ranks.

`python -m deepep_rt.doctor.runner NAME...` is a child that runs probes and prints a line of JSON for each. If it dies or hangs, the running
probe has failed, and another child runs the remaining ones. `python -m deepep_rt.doctor.runner --gather` reads this rank's report and
prints the reports of all ranks. On request it also measures the network between them. Only this child starts MPI, so that doctor can report
an MPI that does not start. Processes of torchrun meet in the store of torch.distributed instead.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from .. import _env
from ..comm.communicator import Communicator
from ..errors import EPError
from .gpus import loaded
from .probes import PROBES

PROBE_LIMIT_S = 30.0
"""Limit of one probe. A driver that initialises many GPUs takes seconds."""

GATHER_LIMIT_S = 90.0
"""Limit for the ranks to find each other. A rank with a probe that hangs is late."""

NETWORK_LIMIT_S = 180.0
"""Limit of the measurements between ranks. Compiling a kernel for the GPUs takes part of it."""

_END_S = 10.0
"""Limit of the wait for other ranks that still read from the store."""

ALONE = {"rank": 0, "local_rank": 0, "group": 0}
"""The entries that `gather` adds to the report of a single process."""

_MARK = "deepep_rt.doctor.runner: "
"""The beginning of an answer's line. Other lines, such as those of a sitecustomize, are ignored."""

_MODULE = [sys.executable, "-m", f"{__package__}.runner"]


def run_probes(names: Sequence[str] = tuple(PROBES), limit_s: float = PROBE_LIMIT_S) -> dict[str, Any]:
    """Run probes of `PROBES` in child processes, each in the limit.

    Return `facts` (results by probe) and `failures` (reasons by probe that failed).
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


def gather(
    report: dict[str, Any], limit_s: float = GATHER_LIMIT_S, network: NetworkRequest | None = None
) -> tuple[int, list[dict[str, Any]], str | None, dict[str, Any] | None]:
    """Exchange the reports of all ranks, and measure the network between them if asked for. Collective over MPI's world, or over the
    processes of torchrun.

    `limit_s` is for the exchange alone.

    Returns:
        This rank, the reports by rank, None, and the measurement. Each report gets `rank`, `local_rank` (number among the ranks of its
        host) and `group` (the lowest rank of that host). With MPI it gets `mpi_threads` (the level of thread support that MPI grants) and
        `mpi_cuda` (whether MPI sends from GPU memory), otherwise `no_mpi`, the reason why no relay over MPI can work. If the ranks do not
        meet: 0, this report, the reason, and None. If only the measurement fails, it has `failure`.
    """
    text = json.dumps({"report": report, "network": network and network._asdict()})
    child = [*_MODULE, "--gather"]
    limit_s += network.limit_s if network else 0
    # The child needs the launcher's pipes, which this process inherited.
    with subprocess.Popen(
        child,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        close_fds=False,
    ) as process:
        try:
            output, errors = process.communicate(text, timeout=limit_s)
            ended = None if process.returncode == 0 else exit_text(process.returncode, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()  # what it wrote before
            ended = f"did not end within {limit_s:g} s"
    return _read_answers(report, output, ended, limit_s, network)


class NetworkRequest(NamedTuple):
    """What to measure between ranks."""

    ranks_per_node: int | None = None  # None: those of a host
    with_gpus: bool = False  # whether to measure between GPUs too
    transport: str = "auto"  # between them, as for `NetworkOptions`
    without_mpi: bool = False  # the processes are those of torchrun
    limit_s: float = NETWORK_LIMIT_S  # of the measurement


def _read_answers(
    report: dict[str, Any], output: str, ended: str | None, limit_s: float, network: NetworkRequest | None
) -> tuple[int, list[dict[str, Any]], str | None, dict[str, Any] | None]:
    """Read what the child wrote. `ended`: how it ended, if that was no success."""
    answers = [answer for answer in map(_answer, output.splitlines()) if answer is not None]
    first = next((answer for answer in answers if "reports" in answer), None)
    if first is None or (ended is not None and network is None):
        late = ended is None or ended.startswith("did not end")
        failure = f"the ranks did not find each other within {limit_s:g} s" if late else ended
        return 0, [{**report, **ALONE}], failure, None
    measured = next((answer["network"] for answer in answers if "network" in answer), None)
    if network is not None and measured is None:
        part = next((answer["part"] for answer in reversed(answers) if "part" in answer), "the start")
        measured = {"failure": f"{ended or 'no answer'}, in this part: {part}"}
    return first["rank"], first["reports"], None, measured


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
    asked = json.loads(sys.stdin.read())
    report, network = asked["report"], asked["network"]
    with _met_without_mpi() if network is not None and network["without_mpi"] else _met_in_mpi() as (comm, mpi, facts):
        rank, here = comm.Get_rank(), comm.ranks_on_host()
        place = {"rank": rank, "local_rank": here.index(rank), "group": here[0], **facts}
        reports = comm.allgather({**report, **place})
        write({"rank": rank, "reports": reports})
        if network is not None:
            from .network_rates import measure

            nodes = nodes_of(reports, network["ranks_per_node"])
            with_gpus = network["with_gpus"] and all((each["facts"].get("driver") or {}).get("gpus") for each in reports)
            options: dict[str, Any] = {"mpi": mpi, "with_gpus": with_gpus, "transport": network["transport"]}
            write({"network": measure(comm, nodes, announce=lambda part: write({"part": part}), **options)})


_Met = tuple[Communicator, Any, dict[str, Any]]
"""The ranks, MPI's communicator of them or None, and entries of this rank's report."""


@contextmanager
def _met_in_mpi() -> Iterator[_Met]:
    """Start MPI."""
    from mpi4py import MPI

    from ..comm.mpi import MpiCommunicator

    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
    threads = levels.get(MPI.Query_thread(), "unknown")
    yield MpiCommunicator(MPI.COMM_WORLD), MPI.COMM_WORLD, {"mpi_threads": threads, "mpi_cuda": _knows_cuda()}


@contextmanager
def _met_without_mpi() -> Iterator[_Met]:
    """Meet in the store of torch.distributed, which rank 0 holds if torchrun does not."""
    import torch.distributed as dist

    from ..comm.store import StoreCommunicator

    store, rank, size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=GATHER_LIMIT_S)))
    yield StoreCommunicator(store, "deepep_rt/doctor", rank, size), None, {"no_mpi": StoreCommunicator.relay_objection}
    ends = [f"deepep_rt/doctor/end/{number}" for number in range(size)]
    store.set(ends[rank], "")
    if rank == 0:
        store.wait(ends, datetime.timedelta(seconds=_END_S))  # the store ends with this process


def _knows_cuda() -> bool | None:
    """Ask MPI whether it sends from GPU memory. None: it does not say. MPICH answers only once it has started."""
    path = loaded("libmpi")
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None) if path else None
    return None if query is None else bool(query())


def nodes_of(reports: Sequence[dict[str, Any]], ranks_per_node: int | None) -> list[list[int]]:
    """List the ranks of each node: of consecutive ranks as declared, or of each host if the number does not divide the ranks."""
    size = len(reports)
    if ranks_per_node and size % ranks_per_node == 0:
        return [list(range(first, first + ranks_per_node)) for first in range(0, size, ranks_per_node)]
    groups: dict[int, list[int]] = {}
    for report in reports:
        groups.setdefault(report["group"], []).append(report["rank"])
    return list(groups.values())


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
