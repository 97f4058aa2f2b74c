"""A rank that is lost in the middle of a call: python gpu_faults.py cuda|host KIND CALL DELAY_US N starts N processes without mpirun.

The last rank is the victim. After good rounds it launches CALL, waits DELAY_US, and is killed (KIND "killed", and "killed_masked" with
on_timeout="mask"), sleeps, or raises. The other ranks either finish the call, or raise in time and name the victim. If time-outs mask, they
go on, and the rows of the remaining ranks stay right.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from ports import free_port

from deepep_rt import Buffer, EPError, EPTimeoutError, _env
from deepep_rt.torch import communicator

TOKENS, HIDDEN, LOCAL_EXPERTS, TOPK = 32, 512, 2, 2
TIMEOUT_S, QUICK_S, NOTICE_TIMEOUT_S, STEPS_AFTER, LIMIT_S = 3.0, 15.0, 60.0, 50, 110
CALLS = ("dispatch", "dispatch_no_wait", "combine", "low_latency_dispatch", "low_latency_combine", "hook")


class Rank:
    """The calls of one rank. `check` accepts results without the rows of lost ranks."""

    def __init__(self, buffer: Buffer, rank: int, size: int, device: str) -> None:
        self.buffer, self.rank, self.size = buffer, rank, size
        generator = torch.Generator().manual_seed(rank)
        idx = torch.rand(TOKENS, size * LOCAL_EXPERTS, generator=generator).argsort(1)[:, :TOPK]
        self.owner, self.idx = idx // LOCAL_EXPERTS, idx.contiguous().to(device)
        self.x = (torch.arange(TOKENS) % 8 + 8 * rank + 1.0)[:, None].repeat(1, HIDDEN).bfloat16().to(device)
        self.weights = torch.full((TOKENS, TOPK), 0.5, device=device)

    def prepare(self) -> None:
        self.sent = self.buffer.dispatch(self.x, self.idx, self.weights)
        self.check(self.buffer.combine(self.sent.recv_x, self.sent.handle).x, self.copies())
        self.quick = self.low_latency_dispatch()
        self.check(self.low_latency_combine(), self.share())

    def copies(self) -> torch.Tensor:
        """Count the ranks that each token goes to."""
        return torch.stack([(self.owner == rank).any(1) for rank in range(self.size)]).sum(0).float()

    def share(self, lost: int = -1) -> torch.Tensor:
        """Add up the weights of each token, without those of the experts of a lost rank."""
        return 0.5 * (self.owner != lost).sum(1).float()

    def check(self, out: torch.Tensor, least: torch.Tensor, most: torch.Tensor | None = None) -> None:
        """Check that each row of `out` is its token times a factor from `least` to `most`."""
        found, x = out.float().cpu(), self.x.float().cpu()
        most = least if most is None else most
        assert ((found >= x * least[:, None]) & (found <= x * most[:, None])).all()

    def dispatch(self) -> Any:
        return self.buffer.dispatch(self.x, self.idx, self.weights)

    def dispatch_no_wait(self) -> Any:
        return self.buffer.dispatch(self.x, self.idx, self.weights, num_worst_tokens=self.size * TOKENS)

    def combine(self) -> Any:
        return self.buffer.combine(self.sent.recv_x, self.sent.handle).x

    def low_latency_dispatch(self, **options: Any) -> Any:
        return self.buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, use_fp8=False, **options)

    def low_latency_combine(self) -> Any:
        return self.buffer.low_latency_combine(self.quick.recv_x, self.idx, self.weights, self.quick.handle).x

    def hook(self) -> Any:
        sent = self.low_latency_dispatch(return_recv_hook=True)
        time.sleep(0.01)
        sent.hook()
        return sent


def run_victim(kind: str, mine: Rank, call: str, delay_s: float) -> None:
    """Make the call with the fault. A timer raises the fault, because a call may wait on the host."""
    signal.signal(signal.SIGALRM, lambda *_: _fault(kind))
    signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))
    if call == "hook":
        mine.low_latency_dispatch(return_recv_hook=True)  # between the halves
    else:
        getattr(mine, call)()
    time.sleep(1)


def _fault(kind: str) -> None:
    if kind == "asleep":
        time.sleep(2.5 * TIMEOUT_S)
    elif kind == "raises":
        raise KeyError("mine")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def run_on_without_victim(mine: Rank, call: str, victim: int) -> None:
    """With time-outs that mask: check that later steps are right, and that only the first one takes long."""
    start = time.monotonic()
    getattr(mine, call)()
    mine.buffer.synchronize()
    for _ in range(STEPS_AFTER):
        mine.quick = mine.low_latency_dispatch()
        mine.check(mine.low_latency_combine(), mine.share(victim), mine.share())
    assert mine.buffer.query_masked_ranks() == [victim]
    mine.quick = mine.low_latency_dispatch()
    mine.check(mine.low_latency_combine(), mine.share(victim))
    assert time.monotonic() - start < 2 * TIMEOUT_S + QUICK_S
    mine.buffer.destroy()


def run_until_error(mine: Rank, call: str, victim: int, kind: str) -> None:
    """With time-outs that raise: check that a call, or the wait for it, names the victim."""
    caught, start = None, time.monotonic()
    try:
        with mine.buffer:
            for _ in range(3):
                getattr(mine, call)()
                mine.buffer.synchronize()
    except EPTimeoutError as error:
        caught = error
    assert caught is not None, "the loss of the victim was not reported"
    assert f"rank {victim}" in str(caught), caught
    if kind == "raises":
        assert "mine" in str(caught), caught
    assert time.monotonic() - start < (QUICK_S if kind == "raises" else TIMEOUT_S + QUICK_S)
    mine.buffer.destroy()


def run_on_as_survivors(backend: str, rank: int, size: int) -> None:
    """Make a new Buffer over the ranks that live, while the memory of the dead one is still mapped elsewhere."""
    group = communicator(dist.new_group(list(range(size)), use_local_synchronization=True))
    begin = time.monotonic()
    with Buffer(group, **sizes_of(size), backend=backend) as buffer:
        print(f"rank {rank}: new Buffer in {time.monotonic() - begin:.3f} s", flush=True)
        mine = Rank(buffer, rank, size, "cuda" if backend == "cuda" else "cpu")
        for _ in range(20):
            mine.prepare()


def sizes_of(size: int) -> dict[str, Any]:
    return dict(num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=size * LOCAL_EXPERTS, low_latency=True)


def run_rank(backend: str, kind: str, call: str, delay_s: float, size: int, rank: int, port: int) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    if backend == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    victim = size - 1
    buffer = Buffer(
        communicator(),
        **sizes_of(size),
        timeout_s=NOTICE_TIMEOUT_S if kind == "raises" else TIMEOUT_S,
        on_timeout="mask" if kind == "killed_masked" else "raise",
        backend=backend,
    )
    mine = Rank(buffer, rank, size, device)
    for _ in range(2):
        mine.prepare()
    getattr(mine, call)()
    buffer.synchronize()
    dist.barrier()
    if rank != victim:
        run_on_without_victim(mine, call, victim) if kind == "killed_masked" else run_until_error(mine, call, victim, kind)
        if kind == "killed" and (backend == "host" or _env.symmetric_memory() != "nvshmem"):
            run_on_as_survivors(backend, rank, size - 1)
    else:
        try:
            with buffer:
                run_victim(kind, mine, call, delay_s)
        except (KeyError, EPError):
            assert kind in ("raises", "asleep")
    print(f"rank {rank} passed", flush=True)
    time.sleep(1 if rank else 3 * TIMEOUT_S)  # rank 0 holds the store
    os._exit(0)  # the process group has lost a rank and cannot be destroyed


def main() -> None:
    backend, kind, call, delay_us, size = sys.argv[1:6]
    if len(sys.argv) > 6:
        return run_rank(backend, kind, call, float(delay_us) / 1e6, int(size), *map(int, sys.argv[6:]))
    port = free_port()
    command = [sys.executable, *sys.argv[:6]]
    ranks = [subprocess.Popen([*command, str(rank), str(port)]) for rank in range(int(size))]
    codes = [process.wait(LIMIT_S + 10) for process in ranks]
    assert codes[:-1] == [0] * (len(codes) - 1), codes
    assert codes[-1] == (-signal.SIGKILL if kind.startswith("killed") else 0), codes
    return None


if __name__ == "__main__":
    main()
