"""A rank leaves its Buffer, or refuses a call, on the host backend: python leaving.py SCENARIO..., or --mpi SCENARIO FOLDER under mpirun.

A scenario is three processes over a store of files, forked by this program. They end as programs do: by an exception, SIGTERM, or their
last line. After good calls, one rank (the victim) leaves or refuses. The others must hear who and why long before `timeout_s`. The limit is
2 s and a slack, which grows with the time that the good calls took.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from expect import raises

from deepep_rt import Buffer, EPConfigError, EPInputError, EPPeerError, EPTimeoutError
from deepep_rt.backends import factory
from deepep_rt.backends.host import backend as host
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.timed_collectives import TimedCollectives

RANKS, VICTIM, HIDDEN = 3, 1, 32
LONG_S, LIMIT_S, HEARD_S, SLACK = 300.0, 150, 2.0, 15.0
X, IDX = np.ones((4, HIDDEN), np.float32), np.tile(np.arange(2), (4, 1))


class FileStore:
    """A store whose keys are files. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, key: str) -> Path:
        return self._folder / key.replace("/", "_")

    def set(self, key: str, value: bytes) -> None:
        number, name = tempfile.mkstemp(dir=self._folder)
        os.write(number, value)
        os.close(number)
        os.replace(name, self._path(key))

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        return all(self._path(key).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        self._path(key).unlink(missing_ok=True)
        return True


class Rank:
    """One rank of a scenario, and what it writes down for the parent."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.comm: Any = StoreCommunicator(FileStore(folder), "leaving", rank, RANKS)
        self.slack_s, self.at_return = 0.0, lambda mine: None

    def make(self, **settings: Any) -> Buffer:
        sizes = dict(
            num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=2, num_experts=2 * RANKS, dtype="float32", low_latency=False
        )
        return Buffer(self.comm, backend="host", **{**sizes, "timeout_s": LONG_S, **settings})

    def warm_up(self, **settings: Any) -> Buffer:
        """Make a Buffer and good calls. They tell how slow this machine is."""
        buffer, slowest_s = self.make(**settings), 0.0
        for _ in range(4):
            start = time.monotonic()
            buffer.combine(X[:0], buffer.dispatch(X[:0], IDX[:0]).handle)
            slowest_s = max(slowest_s, time.monotonic() - start)
        self.comm.Barrier()
        self.slack_s = SLACK * slowest_s
        return buffer

    def leave(self) -> None:
        """The victim leaves from now on."""
        (self.folder / "left_at").write_text(repr(time.monotonic()))

    def hear(self, call: Callable[[], Any], *words: str, kind: type[BaseException] = EPPeerError, quick: bool = True) -> Any:
        """Call until this raises an error that names the victim and contains `words`, in time."""
        with raises(kind, *words) as caught:
            while True:
                call()
        waited_s = time.monotonic() - float((self.folder / "left_at").read_text())
        assert not quick or waited_s < HEARD_S + self.slack_s, (waited_s, self.slack_s)
        (self.folder / f"heard{self.rank}").write_text(json.dumps([waited_s, self.slack_s, str(caught.error)]))
        return caught.error


# --- scenarios: the part of the victim, and that of the others ------------------------------------------------------------------------

kept: list[Any] = []  # what a program holds until it ends


def _calls(buffer: Buffer) -> Callable[[], Any]:
    return lambda: buffer.dispatch(X, IDX)


def _leaving(*words: str) -> Callable[[Callable[[Rank, Buffer], None]], Callable[[Rank], None]]:
    """Make a scenario in which the victim leaves and the others call on."""

    def make(victim: Callable[[Rank, Buffer], None]) -> Callable[[Rank], None]:
        def run(mine: Rank) -> None:
            buffer = mine.warm_up()
            if mine.rank == VICTIM:
                kept.append(buffer)
                mine.leave()
                victim(mine, buffer)
                del buffer
                mine.at_return(mine)
                return
            error = mine.hear(_calls(buffer), f"rank {VICTIM} left the Buffer", *words)
            assert error.peer == VICTIM
            assert all(word in error.reason for word in words), error.reason
            buffer.destroy()

        return run

    return make


@_leaving("ZeroDivisionError: mine")
def uncaught_exception(mine: Rank, buffer: Buffer) -> None:
    raise ZeroDivisionError("mine")


@_leaving("its program ended without destroy()")
def system_exit(mine: Rank, buffer: Buffer) -> None:
    sys.exit(3)


@_leaving("its program ended without destroy()")
def last_line(mine: Rank, buffer: Buffer) -> None:
    pass


@_leaving("dropped the Buffer without destroy()")
def dropped(mine: Rank, buffer: Buffer) -> None:
    kept.clear()
    buffer._cycle = buffer  # type: ignore[attr-defined]  (Python's garbage collector finds it)
    kept.append(mine)
    mine.at_return = _wait_until_heard


def _wait_until_heard(mine: Rank) -> None:
    """Live until the other ranks have heard of the victim."""
    gc.collect()
    end, heard = time.monotonic() + LIMIT_S, [mine.folder / f"heard{rank}" for rank in range(RANKS) if rank != VICTIM]
    while time.monotonic() < end and not all(path.exists() for path in heard):
        time.sleep(0.02)


@_leaving("SIGTERM ended its process")
def sigterm(mine: Rank, buffer: Buffer) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LIMIT_S)


@_leaving("SIGTERM ended its process")
def sigterm_in_a_library(mine: Rank, buffer: Buffer) -> None:
    """The main thread waits in a library, and runs no handler."""
    if not os.fork():
        time.sleep(0.2)
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)


@_leaving("SystemExit: 143")
def sigterm_of_the_program(mine: Rank, buffer: Buffer) -> None:
    """The program has a handler of its own, and its `with` block tells the others."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with buffer:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LIMIT_S)


@_leaving("KeyboardInterrupt", "mine")
def interrupted_call(mine: Rank, buffer: Buffer) -> None:
    """An exception within a call ends the Buffer of this rank, also if the program catches it."""
    backend: Any = buffer._backend

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt("mine")

    backend._channel._wait = fail
    with raises(KeyboardInterrupt):
        buffer.dispatch(X, IDX)
    _wait_until_heard(mine)


def normal_end(mine: Rank) -> None:
    """All programs forget destroy() and end at different times. No rank prints an error."""
    buffer = mine.warm_up()
    buffer.dispatch(X, IDX)
    kept.append(buffer)
    time.sleep(0.7 * mine.rank)


# --- refusals -------------------------------------------------------------------------------------------------------------------------

REFUSED = "EPInputError: x.shape=[4]"


def _refuse(buffer: Buffer) -> None:
    with raises(EPInputError, "x.shape=[4]"):
        buffer.dispatch(X[:, 0].copy(), IDX)


def refused_and_repeated(mine: Rank) -> None:
    """The others wait. Nothing of the refusal stays."""
    buffer = mine.warm_up()
    for _ in range(3):
        if mine.rank == VICTIM:
            for _ in range(3):
                _refuse(buffer)
            time.sleep(0.4)
        buffer.dispatch(X, IDX)
    kept.append(buffer)
    if mine.rank == VICTIM:
        mine.leave()
    else:
        error = mine.hear(_calls(buffer), f"rank {VICTIM} left the Buffer")
        assert "refused" not in str(error), error


def refused_and_left(mine: Rank) -> None:
    """The program catches the refusal and ends."""
    buffer = mine.warm_up()
    if mine.rank == VICTIM:
        kept.append(buffer)
        mine.leave()
        _refuse(buffer)
        return
    mine.hear(_calls(buffer), f"rank {VICTIM} left the Buffer", "it refused dispatch", REFUSED)


def refused_and_made_another_call(mine: Rank) -> None:
    """All ranks raise in this call, and their Buffers stay usable."""
    buffer = mine.warm_up()
    handle = buffer.dispatch(X, IDX).handle
    if mine.rank == VICTIM:
        mine.leave()
        _refuse(buffer)
        with raises(EPInputError, "the ranks disagree on the kind of this call", f"rank {VICTIM}: combine", "same order"):
            buffer.combine(np.ones((handle.num_recv_rows, HIDDEN), np.float32), handle)
    else:
        words = "disagree on the kind", f"rank {VICTIM}: combine", f"Rank {VICTIM}", "refused", REFUSED
        mine.hear(_calls(buffer), *words, kind=EPInputError)
    buffer.dispatch(X, IDX)
    buffer.destroy()


def refused_and_silent(mine: Rank) -> None:
    """The program neither repeats the call nor leaves. The time-outs of the others quote the refusal."""
    buffer = mine.warm_up(timeout_s=1.5)
    if mine.rank == VICTIM:
        mine.leave()
        _refuse(buffer)
        _wait_until_heard(mine)
    else:
        mine.hear(
            _calls(buffer),
            "waited 1.5 s",
            f"Rank {VICTIM} has refused a call and not repeated it: dispatch: {REFUSED}",
            quick=False,
        )
    buffer.destroy()


# --- the making of a Buffer -----------------------------------------------------------------------------------------------------------


def wrong_setting(mine: Rank) -> None:
    """The setting is an object whose methods raise. The others hear it in the making."""
    mine.warm_up().destroy()

    class Broken:
        def __str__(self) -> str:
            raise OSError("mine")

        __repr__ = __index__ = __eq__ = __hash__ = __str__  # type: ignore[assignment]

    mine.leave()
    if mine.rank == VICTIM:
        with raises(BaseException, ""):
            mine.make(dtype=Broken())
    else:
        mine.hear(mine.make, f"rank {VICTIM} cannot make this Buffer", kind=(EPConfigError, EPTimeoutError))  # type: ignore[arg-type]
    mine.make().destroy()


def failed_making(mine: Rank) -> None:
    """A rank fails after the ranks have compared their settings. The others hear it, and all can make the next Buffer."""
    mine.warm_up().destroy()
    if mine.rank == VICTIM:
        make_backend, factory._make = factory._make, _fail
        mine.leave()
        with raises(MemoryError, "mine"):
            mine.make()
        factory._make = make_backend
    else:
        time.sleep(0.1)
        mine.hear(mine.make, f"rank {VICTIM}", "MemoryError: mine")
    mine.make().destroy()


def _fail(*_: Any) -> Any:
    raise MemoryError("mine")


def interrupted_making(mine: Rank) -> None:
    """Ctrl-C at each step of the making. The others hear it in the making or in their first call, and all can make the next Buffer."""
    finish, num_steps = TimedCollectives.finish, 0

    def interrupt_at(step: int) -> None:
        nonlocal num_steps

        def run(self: TimedCollectives, *arguments: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == step:
                raise KeyboardInterrupt("mine")
            finish(self, *arguments)

        num_steps = 0
        TimedCollectives.finish = run  # type: ignore[method-assign]

    def fail_at(step: int) -> None:
        talk.Barrier()
        interrupt_at(step if mine.rank == VICTIM else 0)
        if mine.rank == VICTIM:
            mine.leave()
            with raises(KeyboardInterrupt, "mine"):
                mine.make()
        else:
            made: list[Buffer] = []
            mine.hear(
                lambda: _calls(made[0])() if made else made.append(mine.make()), f"rank {VICTIM}", "KeyboardInterrupt: mine"
            )
            for buffer in made:
                buffer.destroy()
        TimedCollectives.finish = finish  # type: ignore[method-assign]
        talk.Barrier()

    mine.slack_s, talk = 1.0, mine.comm.Dup()
    if hasattr(talk, "Idup"):  # over MPI, the first making waits for a duplication
        fail_at(1)
    mine.warm_up().destroy()
    interrupt_at(0)
    mine.make().destroy(in_touch=False)
    TimedCollectives.finish = finish  # type: ignore[method-assign]
    steps = talk.bcast(num_steps)
    assert steps > 4, steps
    for step in range(1, steps + 1):
        fail_at(step)
        mine.make().destroy()


def left_while_making(mine: Rank) -> None:
    """A rank ends its program while the others make a Buffer with it."""
    mine.warm_up().destroy()
    if mine.rank == VICTIM:
        factory._make = _exit
        mine.leave()
        mine.make()
    else:
        mine.hear(mine.make, f"rank {VICTIM}", "SystemExit: 5")


def _exit(*_: Any) -> Any:
    sys.exit(5)


# --- DeepEP V1's Buffer ---------------------------------------------------------------------------------------------------------------


def _compat(mine: Rank, **settings: Any) -> Any:
    from deepep_rt import compat

    os.environ["DEEPEP_RT_TIMEOUT_S"] = str(LONG_S)
    buffer = compat.Buffer(mine.comm, **{"num_nvl_bytes": 1 << 20, "low_latency_mode": True, **settings})
    kept.append(buffer)
    return buffer


def _low_latency(buffer: Any, tokens: int = 8, x: Any = None, idx: Any = None) -> None:
    import torch

    x = torch.ones(4, 512, dtype=torch.bfloat16) if x is None else x
    idx = torch.tensor([[0, 3]] * 4) if idx is None else idx
    buffer.low_latency_dispatch(x, idx, tokens, 2 * RANKS, use_fp8=False)


def _normal(buffer: Any, hidden: int = 256, tokens: int = 4) -> None:
    import torch

    x, idx = torch.ones(tokens, hidden, dtype=torch.bfloat16), torch.tensor([[0, 3]] * tokens)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 2 * RANKS)
    options = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    buffer.dispatch(x, topk_idx=idx, topk_weights=torch.ones(idx.shape), **options)


def _good_calls(mine: Rank) -> Any:
    mine.warm_up().destroy()
    buffer = _compat(mine)
    for _ in range(2):
        _low_latency(buffer)
        _normal(buffer)
    mine.comm.Barrier()
    return buffer


def compat_other_tokens(mine: Rank) -> None:
    """A rank passes another num_max_dispatch_tokens_per_rank than before: it makes a Buffer, which the others do not make."""
    buffer, words = _good_calls(mine), ("num_max_dispatch_tokens_per_rank=16", "and 8 in this call")
    if mine.rank == VICTIM:
        mine.leave()
        with raises(EPPeerError, "left the Buffer", *words):
            _low_latency(buffer, tokens=16)
    else:
        mine.hear(lambda: _low_latency(buffer), f"rank {VICTIM} does not make this call", *words)


def compat_other_tokens_at_first(mine: Rank) -> None:
    mine.warm_up().destroy()
    buffer = _compat(mine)
    mine.leave()
    words = "num_max_dispatch_tokens_per_rank: rank 0 8, rank 1 16, rank 2 8", "disagree"
    mine.hear(lambda: _low_latency(buffer, tokens=16 if mine.rank == VICTIM else 8), *words, kind=EPConfigError)


def compat_other_hidden(mine: Rank) -> None:
    """The same of the normal mode, which makes a Buffer for each shape."""
    buffer = _good_calls(mine)
    if mine.rank == VICTIM:
        mine.leave()
        with raises(EPPeerError, "left the Buffer", "hidden=512"):
            _normal(buffer, hidden=512)
    else:
        mine.hear(lambda: _normal(buffer), f"rank {VICTIM} does not make this call", "hidden=512")


def compat_growth(mine: Rank) -> None:
    """All ranks make a larger Buffer together, and no rank blames another one."""
    buffer = _good_calls(mine)
    for tokens in (200, 300, 600):
        _normal(buffer, tokens=tokens if mine.rank == VICTIM else 3)
        _low_latency(buffer, tokens=tokens)
    buffer.destroy()


def compat_refused(mine: Rank) -> None:
    """A rank without tokens passes tensors of other shapes, and its program ends."""
    import torch

    buffer = _good_calls(mine)
    if mine.rank == VICTIM:
        mine.leave()
        with raises(EPInputError, "topk_idx.shape=[0, 0]"):
            _low_latency(buffer, x=torch.empty(0, 512, dtype=torch.bfloat16), idx=torch.empty(0, 0, dtype=torch.int64))
        with raises(EPInputError, "x.shape=[0]"):
            _low_latency(buffer, x=torch.empty(0, dtype=torch.bfloat16))
        return
    mine.hear(
        lambda: _low_latency(buffer), f"rank {VICTIM} left the Buffer", "it refused low_latency_dispatch", "topk_idx.shape=[0, 0]"
    )


def compat_refused_at_first(mine: Rank) -> None:
    """The others wait in the making of the Buffer that their first call needs."""
    import torch

    mine.warm_up().destroy()
    buffer = _compat(mine)
    if mine.rank == VICTIM:
        mine.leave()
        _low_latency(buffer, x=torch.empty(0, dtype=torch.bfloat16))  # ends the program
    mine.hear(lambda: _low_latency(buffer), f"rank {VICTIM} left the Buffer", "EPInputError: x.shape=[0]")


def compat_wrong_setting(mine: Rank) -> None:
    mine.warm_up().destroy()
    mine.leave()
    if mine.rank == VICTIM:
        with raises(EPConfigError, "num_nvl_bytes"):
            _compat(mine, num_nvl_bytes=-1)
    else:
        mine.hear(lambda: _compat(mine), f"rank {VICTIM}", "EPConfigError: num_nvl_bytes=-1")
    _low_latency(_compat(mine))


# --- other steps of all ranks -----------------------------------------------------------------------------------------------------------


def left_before_destroy(mine: Rank) -> None:
    """The others destroy their Buffers, and do not wait long for the victim."""
    buffer, start = mine.warm_up(), time.monotonic()
    if mine.rank == VICTIM:
        kept.append(buffer)
    else:
        buffer.destroy()
        assert time.monotonic() - start < HEARD_S + mine.slack_s


def left_before_a_collective(mine: Rank) -> None:
    """The others wait in a step of all ranks that moves no rows."""
    buffer = mine.warm_up()
    if mine.rank == VICTIM:
        kept.append(buffer)
        mine.leave()
        raise ZeroDivisionError("mine")
    mine.hear(lambda: buffer.copy_ceiling(num_rows=1, iterations=1), f"rank {VICTIM} left the Buffer", "ZeroDivisionError: mine")


# --- the parent -----------------------------------------------------------------------------------------------------------------------

ENDS = {
    "uncaught_exception": 1,
    "left_before_a_collective": 1,
    "compat_refused_at_first": 1,
    "system_exit": 3,
    "left_while_making": 5,
    "sigterm": -signal.SIGTERM,
    "sigterm_in_a_library": -signal.SIGTERM,
    "sigterm_of_the_program": 143,
}
"""The exit status of the victim, unless it is 0."""
SCENARIOS: dict[str, Callable[[Rank], None]] = {
    name: run
    for name, run in globals().items()
    if callable(run) and getattr(run, "__module__", "") == __name__ and not isinstance(run, type) and not name.startswith("_")
}


def start(name: str, folder: Path) -> list[int]:
    """Fork the ranks of a scenario. A child continues this program, and ends as programs do."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            output = os.open(folder / f"output{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(output, 1)
            os.dup2(output, 2)
            signal.alarm(LIMIT_S)
            SCENARIOS[name](Rank(folder, rank))
            return []
        children.append(child)
    return children


def report(name: str, folder: Path, children: list[int]) -> bool:
    """Wait for the ranks of a scenario, and print what they did."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    outputs = [(folder / f"output{rank}").read_text() for rank in range(RANKS)]
    passed = codes == [ENDS.get(name, 0) if rank == VICTIM else 0 for rank in range(RANKS)]
    if name == "normal_end":
        passed = passed and not any("Error" in output for output in outputs)
    print(f"{name}: {'passed' if passed else 'failed'}", flush=True)
    for rank in range(RANKS):
        if (heard := folder / f"heard{rank}").exists():
            waited_s, slack_s, text = json.loads(heard.read_text())
            print(f"    rank {rank} heard after {waited_s:.2f} s (slack {slack_s:.2f} s): {text}")
        if not passed:
            print(f"  rank {rank} ended with {codes[rank]}\n{outputs[rank]}")
    return passed


def run_under_mpirun(name: str, folder: Path) -> None:
    """Run the part of this rank over MPI. The program ends after it."""
    from mpi4py import MPI

    mine = Rank(folder, MPI.COMM_WORLD.Get_rank())
    mine.comm = MPI.COMM_WORLD
    SCENARIOS[name](mine)
    print(f"rank {mine.rank}: {name} ends", flush=True)


def main() -> None:
    assert host  # loads its modules before the ranks are forked
    if sys.argv[1:2] == ["--mpi"]:
        return run_under_mpirun(sys.argv[2], Path(sys.argv[3]))
    made, started = Path(tempfile.mkdtemp()), []
    if any(name.startswith("compat") for name in sys.argv[1:]):
        import deepep_rt.compat  # noqa: F401  (once, and not in each rank)
    gc.freeze()  # a rank collects only what it has made
    for name in sys.argv[1:]:
        (made / name).mkdir()
        if not (children := start(name, made / name)):
            return None  # a rank, whose program ends here
        started.append((name, made / name, children))
    passed = [report(*scenario) for scenario in started]
    shutil.rmtree(made)
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
