"""Shared by the GPU tests of prepared throughput calls."""

from __future__ import annotations

import torch
from gpu_buffers import cpu, make, routing, rows, same
from gpu_throughput import same_dispatch

TOKENS, HIDDEN = 60, 1024


def make_both(comm, **sizes):
    sizes = {"num_max_tokens_per_rank": 128, "hidden": HIDDEN, "num_experts": 8 * comm.Get_size(), **sizes}
    return make(comm, **sizes), make(comm, "host", **sizes)


def poison(result, *names):
    """Queue a fill of results with bytes that no test expects."""
    for name in names:
        if (array := getattr(result, name)) is not None:
            array.view(torch.uint8).fill_(0xA5)


class Step:
    """A prepared call with arrays that `write` fills in place. The host backend makes the same calls for comparison.

    Args:
        comm: The ranks.
        gpu: The Buffer on GPUs.
        host: The Buffer of the host backend.
        seed: Decides the routing and the first values.
        num_tokens: Of this rank.
        dtype: Of `x`.
        y_dtype: Of the rows of combines.
        scales: Whether dispatches send scales.
        with_idx: Whether dispatches send `topk_idx` and weights, and combines the weights of rows.
        num_biases: Biases of combines.
        compress: The form of rows in combines.
        how: Other options of `prepare_throughput`.
    """

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
        self.comm, self.gpu, self.host, self.compress = comm, gpu, host, compress
        config, num_topk = gpu.config, gpu.config.num_topk
        self.hidden = config.hidden
        self.idx, self.weights = routing(comm, seed, num_tokens, num_topk, config.num_experts)
        self.x = rows(comm, seed, num_tokens, self.hidden, dtype=dtype)
        self.handle = gpu.dispatch(self.x, self.idx).handle
        self.host_handle = host.dispatch(*cpu(self.x, self.idx)).handle
        num_rows = self.handle.num_recv_rows
        self.y = rows(comm, seed + 1, num_rows, self.hidden, dtype=y_dtype)
        self.scales = rows(comm, seed + 2, num_tokens, self.hidden // 128, dtype=torch.float32) if scales else None
        self.y_weights = rows(comm, seed + 3, num_rows, num_topk, dtype=torch.float32) if with_idx else None
        self.biases = [rows(comm, seed + 4 + i, num_tokens, self.hidden, dtype=y_dtype) for i in range(num_biases)] or None
        self.topk = (self.idx, self.weights) if with_idx else (None, None)
        arrays = dict(topk_idx=self.topk[0], topk_weights=self.topk[1], x_scales=self.scales)
        self.call = gpu.prepare_throughput(
            self.x, self.handle, **arrays, y_weights=self.y_weights, bias=self.biases, compress=compress, **how
        )

    def write(self, seed):
        """Queue new inputs on the current stream. The routing stays."""
        for number, array in enumerate((self.x, self.y, self.scales, self.y_weights, *(self.biases or ()))):
            if array is not None:
                array.copy_(rows(self.comm, seed + number, *array.shape, dtype=array.dtype))
        self.weights.copy_(torch.rand(self.weights.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))

    def expected(self):
        """Return what the host backend's dispatch and combine return for the current inputs."""
        x, y, scales, y_weights = cpu(self.x, self.y, self.scales, self.y_weights)
        want = self.host.dispatch(x, *cpu(*self.topk), x_scales=scales, handle=self.host_handle)
        biases = cpu(*self.biases) if self.biases else None
        how = dict(topk_weights=y_weights, bias=biases, compress=self.compress)
        return want, self.host.combine(y, self.host_handle, **how)

    def check(self, sent, back):
        """Compare the results of both calls with those of the host backend."""
        want, reference = self.expected()
        same_dispatch(sent, want)
        same(back.x, reference.x)
        same(back.topk_weights, reference.topk_weights)

    def run(self):
        return self.call.dispatch(), self.call.combine(self.y)

    def run_poisoned(self):
        """Make both calls. Before each, fill the results of the last one with other bytes."""
        sent = self.call.dispatch()
        poison(sent, "recv_x", "recv_x_scales", "recv_topk_idx", "recv_topk_weights", "recv_src_idx", "num_recv_tokens")
        sent = self.call.dispatch()
        poison(self.call.combine(self.y), "x", "topk_weights")
        return sent, self.call.combine(self.y)

    def ordinary(self):
        """Make the same calls as ordinary ones, with the same options."""
        sent = self.gpu.dispatch(self.x, *self.topk, x_scales=self.scales, handle=self.handle)
        how = dict(topk_weights=self.y_weights, bias=self.biases, compress=self.compress)
        return sent, self.gpu.combine(self.y, self.handle, **how)
