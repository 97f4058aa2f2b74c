"""Calls of all kinds on several streams, in random order, with hooks, delays and replays of a graph in between.

A chain is the work of a layer on one stream: dispatch, experts, combine. All ranks advance the same chain in each turn. The host waits only
for counts of a dispatch, so GPUs have much queued work, and results are made and dropped during other calls. At the end the test compares
all results with the host backend, bit for bit.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import TAKE_TURNS, make  # noqa: E402

from deepep_rt import NetworkOptions  # noqa: E402
from deepep_rt.jit import compiler  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402

SIZES = dict(num_max_tokens_per_rank=48, hidden=1024, num_topk=4, low_latency=True, num_slots=3)
TURNS = 150 if TAKE_TURNS else 600
MAX_CHAINS = 5
OVER_RELAY = {"ranks_per_node": 1, "network": NetworkOptions(transport="mpi")}


class Mix:
    """The open chains, and the results that they have read so far.

    `turns` draws the same numbers on all ranks. `mine` draws other numbers on each rank.
    """

    def __init__(self, comm, seed, gpu, host):
        self.comm, self.gpu, self.host = comm, gpu, host
        self.turns, self.mine = np.random.default_rng(seed), np.random.default_rng([seed, comm.Get_rank()])
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.chains = []
        self.open = {"dispatch": deque(), "combine": deque()}  # chains with an open hook, oldest first
        self.seen = []  # copies of results, and the expected values
        self.last_event = None  # of the last call
        self.replayed = Replayed(self)
        self.closing = False
        self.formats = [False, True] if has_fp8(compiler.target_arch()) else [False]

    def tokens(self, n=None):
        """Make random tokens and a routing, on the CPU and on the current stream of the GPU."""
        config = self.gpu.config
        n = int(self.mine.integers(0, config.num_max_tokens_per_rank + 1)) if n is None else n
        x = torch.from_numpy(self.mine.standard_normal((n, config.hidden), np.float32)).bfloat16()
        idx = np.argsort(self.mine.random((n, config.num_experts)), axis=1)[:, : config.num_topk]
        idx = torch.from_numpy(np.where(self.mine.random(idx.shape) < 0.1, -1, idx))
        weights = torch.from_numpy(self.mine.random(idx.shape, np.float32))
        return (x, idx, weights), tuple(t.cuda(non_blocking=True) for t in (x, idx, weights))

    def made(self, result):
        self.last_event = result.event
        return result

    def expect(self, what, got, want):
        """Copy a result in the order of the stream, for the comparison at the end."""
        self.seen.append((what, got.clone(), want))

    def chance(self, share):
        return self.turns.random() < share

    def turn(self):
        if self.mine.random() < 0.1:
            with torch.cuda.stream(self.streams[self.mine.integers(3)]):
                torch.cuda._sleep(int(self.mine.integers(1, 8)) * 10**6)
        able = [chain for chain in self.chains if chain.can_go_on()]
        if able and (self.closing or len(self.chains) >= MAX_CHAINS or self.chance(0.6)):
            chain = able[self.turns.integers(len(able))]
        else:
            chain = self.turns.choice([Throughput, LowLatency, Replay], p=[0.4, 0.5, 0.1])(self)
            if not chain.can_go_on():
                return
            self.chains.append(chain)
        with torch.cuda.stream(chain.stream):
            if next(chain.steps, "end") == "end":
                self.chains.remove(chain)

    def finish(self):
        self.closing = True
        while self.chains:
            self.turn()
        torch.cuda.synchronize()
        for number, (what, got, want) in enumerate(self.seen):
            assert torch.equal(got.cpu().view(torch.uint8), want.contiguous().view(torch.uint8)), f"{what}, result {number}"


class Throughput:
    def __init__(self, mix):
        self.mix, self.stream = mix, mix.streams[mix.turns.integers(3)]
        self.steps = self.run()

    def can_go_on(self):
        return True

    def run(self):
        mix, gpu, host = self.mix, self.mix.gpu, self.mix.host
        (x, idx, weights), (gx, gidx, gweights) = mix.tokens()
        fixed, later = mix.chance(0.5), mix.chance(0.5)
        most = gpu.config.num_max_tokens_per_rank * gpu.config.num_ranks if fixed else None
        sent = mix.made(gpu.dispatch(gx, gidx, gweights, num_worst_tokens=most, async_finish=later))
        want = host.dispatch(x, idx, weights, num_worst_tokens=most)
        for _ in range(int(mix.turns.integers(1, 3))):
            n = int(want.num_recv_tokens[0])
            sent.event.wait()
            mix.expect("dispatch", sent.recv_x[:n], want.recv_x[:n])
            mix.expect("experts", sent.recv_topk_idx, want.recv_topk_idx)
            y = sent.recv_x * 2
            yield
            back = mix.made(gpu.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, async_finish=later))
            del y
            reference = host.combine(want.recv_x * 2, want.handle, topk_weights=want.recv_topk_weights)
            yield
            back.event.wait()
            mix.expect("combine", back.x, reference.x)
            mix.expect("weights", back.topk_weights, reference.topk_weights)
            yield
            # Dispatch again with the same routing.
            sent = mix.made(gpu.dispatch(gx, gidx, gweights, handle=sent.handle, async_finish=later))


class LowLatency:
    def __init__(self, mix):
        self.mix, self.stream = mix, mix.streams[mix.turns.integers(3)]
        self.steps, self.next_call = self.run(), "dispatch"

    def can_go_on(self):
        """Whether the order of hooks, and their maximum number, allow the next step."""
        for call, waiting in self.mix.open.items():
            if self in waiting:
                return waiting[0] is self
            if self.next_call == call:
                return len(waiting) < SIZES["num_slots"]
        return True

    def received(self, call, result):
        """Let other chains run before the hook, if the call has one; then receive."""
        waiting = self.mix.open[call]
        if result.hook is not None:
            waiting.append(self)
            yield
            waiting.popleft()
            result.hook()
            self.mix.made(result)
        result.event.wait()

    def run(self):
        mix, gpu, host = self.mix, self.mix.gpu, self.mix.host
        (x, idx, weights), (gx, gidx, gweights) = mix.tokens()
        use_fp8, early, later = mix.formats[mix.turns.integers(len(mix.formats))], mix.chance(0.5), mix.chance(0.5)
        given = dict(use_fp8=use_fp8, topk_weights=gweights if early else None, async_finish=later)
        hook = mix.chance(0.5) or bool(mix.open["dispatch"])
        sent = mix.made(gpu.low_latency_dispatch(gx, gidx, return_recv_hook=hook, **given))
        want = host.low_latency_dispatch(x, idx, use_fp8=use_fp8, topk_weights=weights if early else None)
        self.next_call = "combine"
        yield from self.received("dispatch", sent)
        counts = want.num_recv_tokens_per_expert
        mix.expect("counts", sent.num_recv_tokens_per_expert, counts)
        for expert, n in enumerate(counts.tolist()):
            mix.expect("low-latency dispatch", sent.recv_x[expert, :n], want.recv_x[expert, :n])
        y = sent.recv_x.to(torch.bfloat16)
        yield
        hook = mix.chance(0.5) or bool(mix.open["combine"])
        back = mix.made(gpu.low_latency_combine(y, gidx, gweights, sent.handle, return_recv_hook=hook, async_finish=later))
        reference = host.low_latency_combine(want.recv_x.to(torch.bfloat16), idx, weights, want.handle)
        self.next_call = ""
        del sent, y
        yield from self.received("combine", back)
        mix.expect("low-latency combine", back.x, reference.x)


class Replayed:
    """A graph with both modes, and its input tensors."""

    TOKENS = 32

    def __init__(self, mix):
        gpu = mix.gpu
        self.most = self.TOKENS * gpu.config.num_ranks
        _, self.given = mix.tokens(self.TOKENS)
        held = self.step(gpu)  # allocates the memory of results before the capture
        gpu.synchronize()
        mix.comm.Barrier()
        del held
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = self.step(gpu)

    def step(self, buffer, given=None):
        x, idx, weights = self.given if given is None else given
        sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        decoded = buffer.low_latency_combine(sent.recv_x, idx, weights, sent.handle).x
        routed = buffer.dispatch(x, idx, weights, num_worst_tokens=self.most)
        return sent, decoded, routed, buffer.combine(routed.recv_x, routed.handle).x


class Replay:
    """A replay of the graph. The program orders it after other calls, and no call may have an open hook."""

    def __init__(self, mix):
        self.mix, self.stream = mix, mix.streams[mix.turns.integers(3)]
        self.steps = self.run()

    def can_go_on(self):
        return not any(self.mix.open.values())

    def run(self):
        mix, replayed = self.mix, self.mix.replayed
        given, given_gpu = mix.tokens(replayed.TOKENS)
        for other in mix.streams:
            self.stream.wait_stream(other)
        if mix.last_event is not None:
            mix.last_event.wait()
        for mine, new in zip(replayed.given, given_gpu, strict=True):
            mine.copy_(new)
        replayed.graph.replay()
        want = replayed.step(mix.host, given)
        _, decoded, routed, summed = replayed.results
        n = int(want[2].num_recv_tokens[0])
        mix.expect("replayed low latency", decoded, want[1])
        mix.expect("replayed dispatch", routed.recv_x[:n], want[2].recv_x[:n])
        mix.expect("replayed combine", summed, want[3])
        for other in mix.streams:
            other.wait_stream(self.stream)
        return
        yield


@pytest.mark.parametrize(("seed", "settings"), [(1, {}), (2, {}), (3, {"ranks_per_node": 1}), (4, OVER_RELAY)])
def test_mixed(comm, seed, settings):
    """Over NVLink, and as nodes of one rank over NVSHMEM and over the relay."""
    sizes = {**SIZES, "num_experts": 8 * comm.Get_size(), **settings}
    with make(comm, **sizes) as gpu, make(comm, "host", **sizes) as host:
        mix = Mix(comm, seed, gpu, host)
        for _ in range(TURNS):
            mix.turn()
        mix.finish()
