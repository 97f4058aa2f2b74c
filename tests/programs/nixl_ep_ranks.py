"""Ranks of nixl_ep's Buffer that come and go. A parent forks processes, tells them what to do, and kills one in the middle of its calls.

Usage: nixl_ep_ranks.py comes_and_goes|losses [cpu|cuda]. It needs no MPI.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

import torch
from ports import free_port
from torch.distributed import PrefixStore, TCPStore

from deepep_rt import _shim

sys.path.insert(0, _shim.shim_path())
import nixl_ep

SLOTS, LOCAL, TOKENS, HIDDEN, TOPK = 4, 2, 8, 512, 3
DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cpu"


class Child:
    """A process that waits for commands. It is forked before there are threads, so it starts at once."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        if (pid := os.fork()) == 0:
            mine.close()
            serve(theirs.makefile("r"), theirs)
        theirs.close()
        self.pid, self._socket, self._lines = pid, mine, mine.makefile("r")

    def tell(self, command: str, **arguments: Any) -> None:
        self._socket.sendall(json.dumps([command, arguments]).encode() + b"\n")

    def hear(self) -> Any:
        line = self._lines.readline()
        assert line, f"process {self.pid} has ended"
        kind, value = json.loads(line)
        assert kind == "done", value
        return value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def serve(lines: Any, connection: socket.socket) -> None:
    rank: Any = None
    code = 0
    for line in lines:
        command, arguments = json.loads(line)
        try:
            if command == "begin":
                rank, value = Rank(**arguments), None
            else:
                value = getattr(rank, command)(**arguments)
            connection.sendall(json.dumps(["done", value]).encode() + b"\n")
        except BaseException:
            code = 1
            connection.sendall(json.dumps(["error", traceback.format_exc()]).encode() + b"\n")
    os._exit(code)


class Rank:
    def __init__(self, rank: int, port: int, prefix: str, timeout_ms: int) -> None:
        torch.set_num_threads(1)
        if DEVICE == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.set_default_device(DEVICE)
        self.rank, self.port, self.num_calls = rank, port, 0
        self.buffer = nixl_ep.Buffer(rank=rank, tcp_store_group=self.store(prefix), timeout_ms=timeout_ms)
        num_bytes = nixl_ep.Buffer.get_rdma_size_hint(TOKENS, HIDDEN, SLOTS, SLOTS * LOCAL)
        self.buffer.update_memory_buffers(num_ranks=SLOTS, num_experts_per_rank=LOCAL, num_rdma_bytes=num_bytes)

    def store(self, prefix: str) -> Any:
        limit = datetime.timedelta(seconds=60)
        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=limit)
        return PrefixStore(prefix, store)

    def connect(self, ranks: list[int], activate: bool = True, prefix: str | None = None) -> None:
        if prefix is not None:
            self.buffer.set_tcp_store_group(self.store(prefix))
        self.buffer.connect_ranks(ranks, activate)

    def disconnect(self, ranks: list[int]) -> None:
        self.buffer.disconnect_ranks(ranks)

    def unmask(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.buffer.update_mask_buffer(rank, mask=False)

    def mask(self) -> list[int]:
        status = torch.full((SLOTS,), 7, dtype=torch.int32)
        self.buffer.query_mask_buffer(status)
        return status.tolist()

    def barrier(self) -> list[int]:
        self.buffer.barrier()
        return self.mask()

    def steps(self, members: list[int], count: int = 2, num_experts: int | None = None) -> float:
        """Make calls, and compare every number. Return how long they took."""
        began = time.monotonic()
        for step in range(count):
            for how in ({}, {"return_recv_hook": True}, {"use_fp8": True}):
                self.step(members, step, num_experts, **how)
        return time.monotonic() - began

    def step(self, members: list[int], step: int, num_experts: int | None, use_fp8: bool = False, **how: Any) -> None:
        buffer, rank = self.buffer, self.rank
        x, idx, weights = inputs(rank, step)
        bound = max(members) + 1 if num_experts is None else num_experts // LOCAL
        stats, waits = torch.zeros(LOCAL, dtype=torch.int32), torch.zeros(bound, dtype=torch.int64)
        recv, count, handle, event, hook = buffer.dispatch(
            x, idx, TOKENS, num_experts, stats, dispatch_wait_recv_cost_stats=waits, use_fp8=use_fp8, **how
        )
        assert isinstance(event, nixl_ep.EventOverlap)
        assert (hook is not None) == bool(how)
        if hook is not None:
            hook()
        if use_fp8:
            rows, scales = recv
            assert scales.shape == (LOCAL, bound * TOKENS, HIDDEN // 128)
            assert scales.stride(1) == 1
            recv = (rows.float().view(*rows.shape[:2], -1, 128) * scales[..., None]).flatten(2).bfloat16()
        assert recv.shape == (LOCAL, bound * TOKENS, HIDDEN)
        assert recv.is_contiguous()
        assert recv.dtype == torch.bfloat16
        src_info, layout_range, max_tokens, hidden = handle
        assert (max_tokens, hidden) == (TOKENS, HIDDEN)
        assert src_info.shape == (LOCAL, bound * TOKENS)
        assert layout_range.shape == (LOCAL, bound)
        assert torch.equal(stats, count)
        assert (waits >= 0).all()
        everyone = {peer: inputs(peer, step) for peer in members}
        for local in range(LOCAL):
            at = 0
            for source in range(bound):
                tokens = (everyone[source][1] == rank * LOCAL + local).any(1).nonzero().flatten() if source in everyone else []
                number = len(tokens)
                assert int(layout_range[local, source]) & 0xFFFFFFFF == number, (members, source, number)
                if number:
                    assert int(layout_range[local, source]) >> 32 == at
                    assert torch.equal(src_info[local, at : at + number].long(), tokens)
                    assert torch.equal(recv[local, at : at + number], everyone[source][0][tokens])
                at += number
            assert int(count[local]) == at
        y = recv.clone()
        if step % 2:
            buffer.get_next_combine_buffer(handle).copy_(y)
        out = torch.empty_like(x)
        combined, _, hook = buffer.combine(y, idx, weights, handle, zero_copy=bool(step % 2), out=out, **how)
        if hook is not None:
            hook()
        present = torch.isin(torch.div(idx, LOCAL, rounding_mode="floor"), torch.tensor(members)) & (idx >= 0)
        expected = x.float() * (weights * present).sum(1, keepdim=True)
        assert combined is out
        # Not torch.testing.assert_close: its first call imports 500 modules, and the peers of a new process wait for that.
        assert torch.equal(out.float(), expected), (members, step, how)

    def call(self) -> list[int]:
        """Make a dispatch and a combine of random rows. Return the masks."""
        self.num_calls += 1
        x, idx, weights = inputs(self.rank, self.num_calls)
        recv, _, handle, _, _ = self.buffer.dispatch(x, idx, TOKENS, use_fp8=False)
        self.buffer.combine(recv, idx, weights, handle)
        return self.mask()

    def calls_until_killed(self) -> None:
        while True:
            self.call()

    def hidden_step(self, hidden: int) -> str:
        """Make a dispatch of another hidden size. Return the class of its error, or nothing."""
        x, idx, _ = inputs(self.rank, 0)
        try:
            recv, count, *_ = self.buffer.dispatch(x[:, :hidden].contiguous(), idx, TOKENS, SLOTS * LOCAL, use_fp8=False)
        except Exception as error:
            return type(error).__name__
        assert recv.shape == (LOCAL, SLOTS * TOKENS, hidden)
        assert int(count.sum()) > 0
        return ""

    def end(self) -> None:
        self.buffer.destroy()
        assert self.buffer.runtime is None


def inputs(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the arguments of a rank. Sums of its rows are exact."""
    generator, cpu = torch.Generator().manual_seed(100 * rank + step), dict(device="cpu")
    tokens = 1 + (rank + step) % TOKENS
    x = torch.randint(-2, 3, (tokens, 1), generator=generator, **cpu).expand(-1, HIDDEN).bfloat16().contiguous()
    idx = torch.rand((tokens, SLOTS * LOCAL), generator=generator, **cpu).topk(TOPK)[1]
    idx[torch.rand((tokens, TOPK), generator=generator, **cpu) < 0.1] = -1
    weights = 2.0 ** torch.randint(-1, 2, (tokens, TOPK), generator=generator, **cpu)
    return x.to(DEVICE), idx.to(DEVICE), weights.to(DEVICE)


def tell(children: dict[int, Child], command: str, **arguments: Any) -> list[Any]:
    """Give the same command to several processes, and return their answers."""
    for child in children.values():
        child.tell(command, **arguments)
    return [child.hear() for child in children.values()]


class Job:
    """The processes of a program, by their ranks."""

    def __init__(self) -> None:
        self._idle = [Child() for _ in range(8)]
        self.port = free_port()
        self._keep = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.living: dict[int, Child] = {}

    def begin(self, rank: int, connected: list[int], prefix: str = "first", timeout_ms: int = 20_000) -> Child:
        self.living[rank] = child = self._idle.pop()
        tell({rank: child}, "begin", rank=rank, port=self.port, prefix=prefix, timeout_ms=timeout_ms)
        tell({rank: child}, "connect", ranks=connected)
        return child

    def tell(self, command: str, **arguments: Any) -> list[Any]:
        return tell(self.living, command, **arguments)

    def replace(self, lost: int) -> None:
        """Give the rank of a process that has ended to another process."""
        self.tell("disconnect", ranks=[lost])
        self.tell("connect", ranks=[lost])
        self.begin(lost, [*self.living, lost], "second")

    def lose(self, *lost: int) -> list[list[int]]:
        """Kill processes in the middle of their calls. Return the masks of the others, which make as many calls as each other."""
        victims = [self.living.pop(rank) for rank in lost]
        for victim in victims:
            victim.tell("calls_until_killed")
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            self.tell("call")
        for child in self.living.values():
            child.tell("call")
        for victim in victims:
            victim.kill()
        masks = [child.hear() for child in self.living.values()]
        for _ in range(100):  # a rank may hear of a loss one call before another
            if all(mask[rank] for mask in masks for rank in lost):
                return masks
            masks = self.tell("call")
        raise AssertionError(f"no call has masked all of {lost}: {masks}")

    def close(self) -> None:
        for child in (*self.living.values(), *self._idle):
            child.kill()


def comes_and_goes(job: Job) -> None:
    for rank in (0, 1):
        job.begin(rank, [0, 1])
    assert job.tell("mask") == [[0, 0, 1, 1]] * 2
    job.tell("steps", members=[0, 1])
    job.tell("steps", members=[0, 1], num_experts=SLOTS * LOCAL)

    # A third one joins. The others make calls until it is active, as vLLM does, and the program has a new store.
    old = dict(job.living)
    job.begin(2, [0, 1, 2], "second")
    tell(old, "connect", ranks=[2], activate=False, prefix="second")
    tell(old, "steps", members=[0, 1])
    assert tell(old, "mask") == [[0, 0, 1, 1]] * 2
    tell(old, "unmask", ranks=[2])
    job.tell("steps", members=[0, 1, 2])
    assert job.tell("barrier") == [[0, 0, 0, 1]] * 3

    # One is killed in the middle of its calls. The others go on, disconnect it, and another process takes its number.
    assert job.lose(1) == [[0, 1, 0, 1]] * 2
    job.tell("disconnect", ranks=[1])
    job.tell("steps", members=[0, 2])
    job.tell("connect", ranks=[1])
    job.begin(1, [0, 1, 2], "second")
    job.tell("steps", members=[0, 1, 2])

    # Rank 0, which has started the store, leaves as it should. It is replaced at once.
    tell({0: job.living.pop(0)}, "end")
    job.replace(0)
    job.tell("steps", members=[0, 1, 2])
    assert job.tell("barrier") == [[0, 0, 0, 1]] * 3
    job.tell("end")


def losses(job: Job) -> None:
    for rank in range(4):
        job.begin(rank, [0, 1, 2, 3])
    job.tell("steps", members=[0, 1, 2, 3], count=1)

    # Two are killed. The program disconnects one first: the calls do not wait for the other one.
    assert job.lose(1, 3) == [[0, 1, 0, 1]] * 2
    job.tell("disconnect", ranks=[1])
    job.tell("steps", members=[0, 2], count=1, num_experts=SLOTS * LOCAL)
    assert job.tell("mask") == [[0, 1, 0, 1]] * 2
    job.tell("disconnect", ranks=[3])
    job.tell("steps", members=[0, 2], count=1)

    # Calls of another size make a Buffer of their own, whose first ranks have a gap.
    assert job.tell("hidden_step", hidden=128) == ["", ""]
    job.tell("connect", ranks=[1], prefix="second")
    job.begin(1, [0, 1, 2], "second")
    assert job.tell("hidden_step", hidden=128) == [""] * 3
    job.tell("steps", members=[0, 1, 2], count=1)

    # One stops, and the others go on without it. When it goes on, it is alone. It joins after all of them have connected again.
    stopped = job.living[2]
    os.kill(stopped.pid, signal.SIGSTOP)
    others = {rank: child for rank, child in job.living.items() if rank != 2}
    tell(others, "disconnect", ranks=[2])
    tell(others, "steps", members=[0, 1], count=1)
    os.kill(stopped.pid, signal.SIGCONT)
    assert tell({2: stopped}, "steps", members=[2], count=1)
    assert tell({2: stopped}, "mask") == [[1, 1, 0, 1]]
    tell({2: stopped}, "disconnect", ranks=[0, 1])
    tell({2: stopped}, "connect", ranks=[0, 1])
    tell(others, "connect", ranks=[2])
    job.tell("steps", members=[0, 1, 2], count=1)

    # Without rank 0, calls of the same sizes go on, and there are no new ones.
    leaves = job.living.pop(0)
    tell({0: leaves}, "end")
    job.tell("disconnect", ranks=[0])
    job.tell("steps", members=[1, 2], count=1)
    assert job.tell("hidden_step", hidden=256) == ["EPUnavailableError"] * 2

    # All end, and others begin with the same store of the program.
    leaves.kill()
    for rank in list(job.living):
        job.living.pop(rank).kill()
    time.sleep(1)
    for rank in (0, 1):
        job.begin(rank, [0, 1], "second")
    job.tell("steps", members=[0, 1], count=1)
    job.tell("end")


if __name__ == "__main__":
    job = Job()
    try:
        {"comes_and_goes": comes_and_goes, "losses": losses}[sys.argv[1]](job)
    finally:
        job.close()
    print("OK")
