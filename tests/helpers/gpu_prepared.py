"""Shared by the GPU tests of prepared calls: calls of each kind, so that a test asks its question of all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import gpu_buffers
import gpu_low_latency
import gpu_throughput
import pytest
import torch
from gpu_buffers import cpu, make, routing, rows, same
from gpu_low_latency import formats, outputs
from transports import nodes, transports

TOKENS = 60


def received(result):
    """Call the hook of a result, if it has one."""
    if getattr(result, "hook", None):
        result.hook()
    return result


def _poison(result, *names):
    """Queue a fill of results with bytes that no test expects."""
    for name in names:
        if (array := getattr(result, name)) is not None:
            array.view(torch.uint8).fill_(0xA5)


class Calls(ABC):
    """Prepared calls with arrays that `write` fills in place. The host backend makes the same calls for comparison."""

    name: str
    hidden: int  # of most Buffers
    sizes: dict  # more of them
    how: ClassVar[dict] = {}  # options of all calls

    @classmethod
    def make_both(cls, comm, **sizes):
        sizes = {"num_max_tokens_per_rank": 128, "hidden": cls.hidden, "num_experts": 8 * comm.Get_size(), **cls.sizes, **sizes}
        return make(comm, **sizes), make(comm, "host", **sizes)

    @staticmethod
    @abstractmethod
    def most_arrays():
        """Return options with which calls send the most arrays."""

    @staticmethod
    @abstractmethod
    def round_trip(comm, gpu, host, seed, num_tokens):
        """Make ordinary calls with other tokens, and compare the results."""

    def __init__(self, comm, gpu, host, seed, num_tokens, idx_dtype=torch.int64):
        self.comm, self.gpu, self.host, self.num_tokens, config = comm, gpu, host, num_tokens, gpu.config
        self.idx, self.weights = routing(comm, seed, num_tokens, config.num_topk, config.num_experts, dtype=idx_dtype)

    @abstractmethod
    def write(self, seed):
        """Queue new inputs on the current stream. They depend on `seed` and less than ten numbers after it."""

    @abstractmethod
    def expected(self, rows_of=None):
        """Return the host backend's dispatch and combine for the current inputs. `rows_of` makes `y` from the dispatch."""

    @abstractmethod
    def check(self, sent, back):
        """Compare the results of both calls with those of the host backend."""

    @abstractmethod
    def plain(self):
        """Return a dispatch and a combine with the same inputs that are not prepared, for measurements."""

    @abstractmethod
    def ordinary(self):
        """Make the same calls as ordinary ones, with the same options."""

    def run(self):
        return received(self.call.dispatch()), received(self.call.combine(self.y))

    def run_anew(self):
        """Make both calls, after other bytes have come to the memory of results where a test can write it all."""
        return self.run()


class Throughput(Calls):
    """Dispatches with a handle, and combines.

    `with_idx`: dispatches send `topk_idx` and weights, and combines the weights of rows. `how`: other options of `prepare_throughput`.
    """

    name, hidden, sizes = "throughput", 1024, {}

    @staticmethod
    def most_arrays():
        return dict(with_idx=True)

    @staticmethod
    def round_trip(comm, gpu, host, seed, num_tokens):
        gpu_throughput.round_trip(comm, gpu, host, seed, num_tokens, gpu.config.num_topk)

    def __init__(
        self,
        comm,
        gpu,
        host,
        seed,
        *,
        num_tokens=TOKENS,
        dtype=torch.bfloat16,
        y_dtype=torch.bfloat16,
        scales=False,
        with_idx=False,
        num_biases=0,
        compress=None,
        **how,
    ):
        super().__init__(comm, gpu, host, seed, num_tokens)
        self.compress, hidden, num_topk = compress, gpu.config.hidden, gpu.config.num_topk
        self.x = rows(comm, seed, num_tokens, hidden, dtype=dtype)
        self.handle = gpu.dispatch(self.x, self.idx).handle
        self.host_handle = host.dispatch(*cpu(self.x, self.idx)).handle
        num_rows = self.handle.num_recv_rows
        self.y = rows(comm, seed + 1, num_rows, hidden, dtype=y_dtype)
        self.scales = rows(comm, seed + 2, num_tokens, hidden // 128, dtype=torch.float32) if scales else None
        self.y_weights = rows(comm, seed + 3, num_rows, num_topk, dtype=torch.float32) if with_idx else None
        self.biases = [rows(comm, seed + 4 + i, num_tokens, hidden, dtype=y_dtype) for i in range(num_biases)] or None
        self.topk = (self.idx, self.weights) if with_idx else (None, None)
        arrays = dict(topk_idx=self.topk[0], topk_weights=self.topk[1], x_scales=self.scales)
        self.call = gpu.prepare_throughput(
            self.x, self.handle, **arrays, y_weights=self.y_weights, bias=self.biases, compress=compress, **how
        )

    def write(self, seed):
        """The routing stays."""
        for number, array in enumerate((self.x, self.y, self.scales, self.y_weights, *(self.biases or ()))):
            if array is not None:
                array.copy_(rows(self.comm, seed + number, *array.shape, dtype=array.dtype))
        self.weights.copy_(torch.rand(self.weights.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))

    def expected(self, rows_of=None):
        x, y, scales, y_weights = cpu(self.x, self.y, self.scales, self.y_weights)
        want = self.host.dispatch(x, *cpu(*self.topk), x_scales=scales, handle=self.host_handle)
        biases = cpu(*self.biases) if self.biases else None
        how = dict(topk_weights=y_weights, bias=biases, compress=self.compress)
        return want, self.host.combine(rows_of(want) if rows_of else y, self.host_handle, **how)

    def check(self, sent, back):
        want, reference = self.expected()
        gpu_throughput.same_dispatch(sent, want)
        same(back.x, reference.x)
        same(back.topk_weights, reference.topk_weights)

    def plain(self):
        return lambda: self.gpu.dispatch(self.x, handle=self.handle), lambda: self.gpu.combine(self.y, self.handle)

    def ordinary(self):
        sent = self.gpu.dispatch(self.x, *self.topk, x_scales=self.scales, handle=self.handle)
        how = dict(topk_weights=self.y_weights, bias=self.biases, compress=self.compress)
        return sent, self.gpu.combine(self.y, self.handle, **how)

    def run_anew(self):
        sent = self.call.dispatch()
        _poison(sent, "recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", "recv_src_idx", "num_recv_tokens")
        sent = self.call.dispatch()
        _poison(self.call.combine(self.y), "x", "topk_weights")
        return sent, self.call.combine(self.y)


class LowLatency(Calls):
    name, hidden, sizes = "low latency", 512, {"low_latency": True}

    @staticmethod
    def most_arrays():
        return dict(use_fp8=len(formats()) > 1)

    @staticmethod
    def round_trip(comm, gpu, host, seed, num_tokens):
        gpu_low_latency.round_trip(comm, gpu, host, seed, num_tokens, use_fp8=False)

    def __init__(self, comm, gpu, host, seed, *, num_tokens=TOKENS, idx_dtype=torch.int64, use_fp8=False, **options):
        super().__init__(comm, gpu, host, seed, num_tokens, idx_dtype)
        self.x, self.y = rows(comm, seed, num_tokens, gpu.config.hidden), outputs(comm, gpu, seed + 1)
        names = ("round_scale", "use_ue8m0")
        self.format = {"use_fp8": use_fp8, **{name: value for name, value in options.items() if name in names}}
        self.form = {name: value for name, value in options.items() if name in ("allow_multiple_reduction", "compress")}
        self.call = gpu.prepare_low_latency(self.x, self.idx, self.weights, **{**self.how, **options, **self.format})

    def write(self, seed):
        config = self.gpu.config
        idx, weights = routing(self.comm, seed, self.num_tokens, config.num_topk, config.num_experts)
        self.idx.copy_(idx), self.weights.copy_(weights)
        self.x.copy_(rows(self.comm, seed, self.num_tokens, config.hidden))
        self.y.copy_(outputs(self.comm, self.gpu, seed + 1))

    def expected(self, rows_of=None):
        x, idx, weights, y = cpu(self.x, self.idx, self.weights, self.y)
        want = self.host.low_latency_dispatch(x, idx, topk_weights=weights, **self.format)
        return want, self.host.low_latency_combine(rows_of(want) if rows_of else y, idx, weights, want.handle, **self.form)

    def check(self, sent, back):
        want, reference = self.expected()
        gpu_low_latency.same_sent(sent, want)
        same(back.x, reference.x)

    def plain(self):
        gpu, x, idx, weights, handle = self.gpu, self.x, self.idx, self.weights, self.call.dispatch().handle
        return (
            lambda: gpu.low_latency_dispatch(x, idx, topk_weights=weights, **self.format),
            lambda: gpu.low_latency_combine(self.y, idx, weights, handle),
        )

    def ordinary(self):
        sent = self.gpu.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, **self.format)
        return sent, self.gpu.low_latency_combine(self.y, self.idx, self.weights, sent.handle, **self.form)


class WithHooks(LowLatency):
    name, how = "low latency with hooks", {"return_recv_hook": True}


@pytest.fixture
def kind(request, monkeypatch):
    """The class of the calls. Its Buffers have the nodes and the transport that `each` chose."""
    found, settings = request.param
    monkeypatch.setattr(gpu_buffers, "more", settings)
    return found


def each(*kinds, on_nodes=False):
    """Ask a test of kinds of calls: low latency over each transport, throughput on one node.

    `on_nodes` lets throughput calls also run on two nodes, over each path and transport.
    """
    found = []
    for calls in kinds:
        settings = transports() if issubclass(calls, LowLatency) else nodes() if on_nodes else [("nvlink", {})]
        found += [pytest.param((calls, more), id=f"{calls.name}, {name}") for name, more in settings]
    return pytest.mark.parametrize("kind", found, indirect=True)
