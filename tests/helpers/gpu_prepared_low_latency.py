"""Shared by the GPU tests of prepared low-latency calls."""

from __future__ import annotations

import torch
from gpu_buffers import cpu, routing, rows, same
from gpu_low_latency import outputs, same_sent

TOKENS = 60


class Step:
    """A prepared call with arrays that `write` fills in place. The host backend makes the same calls for comparison."""

    def __init__(self, comm, gpu, host, seed, *, num_tokens=TOKENS, idx_dtype=torch.int64, **options):
        self.comm, self.gpu, self.host, self.num_tokens = comm, gpu, host, num_tokens
        config = gpu.config
        self.idx, self.weights = routing(comm, seed, num_tokens, config.num_topk, config.num_experts, dtype=idx_dtype)
        self.x, self.y = rows(comm, seed, num_tokens, config.hidden), outputs(comm, gpu, seed + 1)
        names = {"use_fp8", "round_scale", "use_ue8m0"}
        self.format = {"use_fp8": True, **{name: value for name, value in options.items() if name in names}}
        self.form = {name: value for name, value in options.items() if name in ("allow_multiple_reduction", "compress")}
        self.call = gpu.prepare_low_latency(self.x, self.idx, self.weights, **{**options, **self.format})

    def write(self, seed):
        """Queue new inputs on the current stream."""
        config = self.gpu.config
        idx, weights = routing(self.comm, seed, self.num_tokens, config.num_topk, config.num_experts)
        self.idx.copy_(idx), self.weights.copy_(weights)
        self.x.copy_(rows(self.comm, seed, self.num_tokens, config.hidden))
        self.y.copy_(outputs(self.comm, self.gpu, seed + 1))

    def expected(self):
        """Return what the host backend's dispatch and combine return for the current inputs."""
        x, idx, weights, y = cpu(self.x, self.idx, self.weights, self.y)
        want = self.host.low_latency_dispatch(x, idx, topk_weights=weights, **self.format)
        return want, self.host.low_latency_combine(y, idx, weights, want.handle, **self.form).x

    def check(self, sent, back):
        """Compare the results of both calls with those of the host backend."""
        want, reference = self.expected()
        same_sent(sent, want)
        same(back.x, reference)

    def run(self):
        return self.call.dispatch(), self.call.combine(self.y)

    def ordinary(self):
        """Make the same calls as ordinary ones, with the same options."""
        sent = self.gpu.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, **self.format)
        return sent, self.gpu.low_latency_combine(self.y, self.idx, self.weights, sent.handle, **self.form)
