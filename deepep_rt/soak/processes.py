"""The processes of the ranks of `soak --kill`: start them, hear their events within a limit, and find what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import _env
from ..errors import EPError
from .member import DONE, EVICTED, FAILED, SHOWS_STACKS, Given

COMMAND = [sys.executable, "-c", "import sys; from deepep_rt.soak import member; sys.exit(member.main(sys.argv[1:]))"]
"""The command of a member, which gets what it is given as one more word."""

_TRACE_S = 0.3  # for a process that hangs to print its stacks
_POLL_S = 0.25
_CLOCK_S = 1.0  # times of files and segments are this coarse
_SHARED_MEMORY = Path("/dev/shm")
_SYSTEM_V = Path("/proc/sysvipc/shm")


@dataclass(eq=False)
class Process:
    """One process. `facts` are those that it told last."""

    popen: subprocess.Popen[str]
    rank: int = -1  # -1: it has not joined
    is_killed: bool = False
    is_stopped: bool = False  # for long, so the others leave it out
    members: tuple[int, ...] | None = None  # with whom it has made a whole round
    facts: dict[str, Any] = field(default_factory=dict)
    events: set[str] = field(default_factory=set)  # that it has told since `expect`

    @property
    def pid(self) -> int:
        return self.popen.pid

    def send(self, command: str) -> None:
        """Tell the process what to do."""
        assert self.popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its missing event says so
            self.popen.stdin.write(f"{command}\n")
            self.popen.stdin.flush()

    def expect(self) -> None:
        """Forget what the process has told."""
        self.members = None
        self.events.clear()

    def __str__(self) -> str:
        return f"{'a process that joins' if self.rank < 0 else f'rank {self.rank}'} (process {self.pid})"


class Processes:
    """All processes of a run. `on_event` hears of each event."""

    def __init__(self, on_event: Callable[[Process, dict[str, Any]], None]) -> None:
        self.all: list[Process] = []
        self._on_event = on_event
        self._events: queue.Queue[tuple[Process, dict[str, Any] | None]] = queue.Queue()
        self._folder = tempfile.TemporaryDirectory(prefix="deepep_rt_soak_")
        self._start_s = time.time() - _CLOCK_S

    def start(self, given: Given) -> Process:
        """Start a process. It is the leader of a session, so what it starts can be found."""
        process = Process(
            subprocess.Popen(
                [*COMMAND, json.dumps(asdict(given))],
                env=_env.with_temporary_folder(self._folder.name),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the parent only
            ),
            given.rank,
        )
        self.all.append(process)
        threading.Thread(target=self._read, args=(process,), daemon=True, name="deepep_rt soak events").start()
        return process

    def _read(self, process: Process) -> None:
        assert process.popen.stdout is not None
        for line in process.popen.stdout:
            try:
                self._events.put((process, json.loads(line)))
            except ValueError:  # a library that wrote to the descriptor itself
                self._events.put((process, {"event": FAILED, "error": f"it printed {line.strip()!r}"}))
        self._events.put((process, None))

    def wait(self, waiting: Callable[[], Iterable[Process]], limit_s: float, what: str) -> None:
        """Hear events until no process is waited for.

        Raises:
            EPError: if a process fails, ends or tells nothing in time.
        """
        end = time.monotonic() + limit_s
        while silent := list(waiting()):
            try:
                process, event = self._events.get(timeout=min(_POLL_S, max(end - time.monotonic(), 0)) or 1e-3)
            except queue.Empty:
                if time.monotonic() > end:
                    self._show_stacks(silent)
                    names = ", ".join(map(str, silent))
                    raise EPError(
                        f"{names}: nothing heard within {limit_s:g} s; expected {what}. Read its stacks above."
                    ) from None
                continue
            self._hear(process, event, what)

    def _hear(self, process: Process, event: dict[str, Any] | None, what: str) -> None:
        if process.is_killed:
            return
        if event is None:
            status = process.popen.wait()
            if status or process.facts.get("event") not in (DONE, EVICTED):
                raise EPError(f"{process} ended with status {status}; expected {what}. Read what it printed.")
            return
        if event["event"] == FAILED:
            raise EPError(f"{process}: {event['error']}")
        if event["event"] == EVICTED and not process.is_stopped:
            raise EPError(f"{process} was left out by the others; expected {what}. On a slow machine, pass a larger --timeout-s.")
        process.events.add(event["event"])
        process.facts |= event
        self._on_event(process, event)

    def _show_stacks(self, silent: Iterable[Process]) -> None:
        """Let processes that hang print the stacks of their threads."""
        for process in silent:
            if process.popen.poll() is None:
                print(f"soak: the stacks of {process}:", file=sys.stderr, flush=True)
                process.popen.send_signal(signal.SIGCONT)
                process.popen.send_signal(SHOWS_STACKS)
                time.sleep(_TRACE_S)

    def end(self) -> None:
        """End all processes, whatever they do."""
        for process in self.all:
            if process.popen.poll() is None:
                process.popen.kill()
        for process in self.all:
            process.popen.wait()
            with contextlib.suppress(BrokenPipeError):
                for stream in (process.popen.stdin, process.popen.stdout):
                    assert stream is not None
                    stream.close()

    def left_behind(self) -> list[str]:
        """After `end`: name the processes, files and shared memory that the processes have left. End those, and delete the files."""
        pids, found = {process.pid for process in self.all}, []
        for pid, leader in _sessions():
            if leader in pids:
                found.append(f"process {pid}, which process {leader} started")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        found += [f"temporary file {path.name}" for path in Path(self._folder.name).iterdir()]
        found += [str(path) for path in self._shared_files(pids)]
        if _SYSTEM_V.exists():
            rows = [line.split() for line in _SYSTEM_V.read_text().splitlines()[1:]]
            found += [f"shared memory segment {row[1]}" for row in rows if int(row[4]) in pids and int(row[13]) >= self._start_s]
        self._folder.cleanup()
        return found

    def _shared_files(self, pids: set[int]) -> Iterable[Path]:
        """Yield the files of shared memory that name a process of this run.

        Other programs name such files too, and a number of theirs can be one of ours, in decimal or in hexadecimal digits.
        So the file is younger than the run, and no living process uses it.
        """
        names = {text for pid in pids for text in (str(pid), f"{pid:x}")}
        for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # another program has removed it
                if names & set(_words(path.name)) and path.stat().st_mtime >= self._start_s and not _is_used(path):
                    yield path


def _words(name: str) -> list[str]:
    """Split a name of shared memory, such as `cuda.shm.0.1f3.1`, at what is no letter or digit."""
    return "".join(one if one.isalnum() else " " for one in name).split()


def _is_used(path: Path) -> bool:
    """Check whether a living process maps a file or has it open."""
    number = path.stat().st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(line.split()[4:6] == [str(number), str(path)] for line in (process / "maps").read_text().splitlines()):
                return True
            if any(os.path.samestat(one.stat(), path.stat()) for one in (process / "fd").iterdir() if one.exists()):
                return True
    return False


def _sessions() -> Iterable[tuple[int, int]]:
    """Yield each living process with the leader of its session."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            state, _, _, session = Path(f"/proc/{int(name)}/stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z":
                yield int(name), int(session)
