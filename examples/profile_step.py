"""Profile a few steps of a mixture-of-experts layer with torch.profiler, and write a trace for each rank.

mpirun -n 2 python examples/profile_step.py --out traces   # traces/rank0.json, ...: for Perfetto, chrome://tracing and trace_picture.py
nsys profile --trace=cuda,nvtx mpirun -n 2 python examples/profile_step.py   # no --out: only one profiler at a time sees the GPU

The steps: many tokens with the throughput calls, the same while the last rank is late, and few tokens with the low-latency calls. They are
forward passes. Each part of a step is a named range on the host, with its sizes.
"""

import os
import time

from common import comm, need, parse, rank_on_host, say
from mpi4py import MPI

torch = need("torch")

from deepep_rt import Buffer  # noqa: E402
from deepep_rt.torch import combine, dispatch, low_latency_combine, low_latency_dispatch  # noqa: E402

grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # its name before PyTorch 2.10
part = torch.profiler.record_function
ATTENTION = 4  # products that take the time of attention, so that the host is ahead of the GPU; a late rank makes twice as many


class Layer:
    """A layer with its inputs. The results of all its steps agree."""

    def __init__(self, buffer, decoder, args, device):
        self.buffer, self.decoder, self.topk, self.num_decoded = buffer, decoder, args.topk, args.decoded
        local, hidden, inner = args.experts // comm.size, args.hidden, args.inner

        def random(seed, *shape, scale):
            generator = torch.Generator(device).manual_seed(seed)
            return (torch.randn(shape, generator=generator, device=device) * scale).bfloat16()

        self.x = random(1 + comm.rank, args.tokens, hidden, scale=1)
        self.square, self.router = (random(0, hidden, width, scale=hidden**-0.5) for width in (hidden, args.experts))
        self.w1 = random(1 + comm.rank, local, hidden, inner, scale=hidden**-0.5)
        self.w2 = random(1 + comm.rank, local, inner, hidden, scale=inner**-0.5)
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.has_shared_expert = args.shared  # its weights are those of an expert

    def many_tokens(self, is_late=False):
        x, topk_idx, weights = self.attention(is_late)
        shared = self.begin_shared_expert(x)
        with part(f"dispatch: {rows(x)}"):  # the host waits until it knows how many rows arrive
            sent = dispatch(self.buffer, x, topk_idx, weights, layout="expert")
        with part(f"experts: {rows(sent.recv_x)}"):
            ends = sent.expert_offsets[1:]
            y = grouped_mm(torch.nn.functional.silu(grouped_mm(sent.recv_x, self.w1, offs=ends)), self.w2, offs=ends)
        with part(f"combine: {rows(y)}"):
            out = combine(self.buffer, y, sent.handle, topk_weights=sent.recv_topk_weights)
        return self.end(out, shared)

    def last_rank_is_late(self):
        return self.many_tokens(comm.rank == comm.size - 1)

    def few_tokens(self):
        x, topk_idx, weights = (tensor[: self.num_decoded] for tensor in self.attention())
        shared = self.begin_shared_expert(x)
        with part(f"low_latency_dispatch: {rows(x)}"):
            sent = low_latency_dispatch(self.decoder, x, topk_idx, weights, use_fp8=False)
        with part(f"experts: {len(self.w1)} x {rows(sent.recv_x[0])}"):  # also the undefined rows, which no rank reads
            y = torch.bmm(torch.nn.functional.silu(torch.bmm(sent.recv_x, self.w1)), self.w2)
        with part(f"low_latency_combine: {rows(x)}"):
            out = low_latency_combine(self.decoder, y, topk_idx, weights, sent.handle)
        return self.end(out, shared)

    def attention(self, is_late=False):
        """Return the rows for the experts, and their routing."""
        with part("attention"):
            for _ in range(ATTENTION * (2 if is_late else 1)):
                x = self.x @ self.square
            weights, topk_idx = (x @ self.router).float().softmax(1).topk(self.topk)
        return x, topk_idx, weights

    def begin_shared_expert(self, x):
        """Queue the shared expert on a stream of its own, where there are streams. It may run while rows travel."""
        if not self.has_shared_expert:
            return None
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        with part("shared expert"), torch.cuda.stream(self.side):  # None: the current stream
            return torch.nn.functional.silu(x @ self.w1[0]) @ self.w2[0]

    def end(self, out, shared):
        if shared is not None:
            if self.side is not None:
                torch.cuda.current_stream().wait_stream(self.side)
            out = out + shared
        if self.side is not None:
            with part("wait for the GPU"):
                torch.cuda.synchronize()
        return out


def rows(tensor):
    return f"{tensor.shape[0]} rows of {tensor.shape[1] * tensor.element_size()} bytes"


def run(steps):
    """Run each step once. Return their results, and the seconds of each on the slowest rank."""
    outs, seconds = [], []
    for title, step in steps.items():
        comm.Barrier()
        start = time.perf_counter()
        with part(title):
            out = step()
        seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
        outs.append(out.float().cpu())  # `out` is memory of the Buffer; the GPU is idle before the next step
    return outs, seconds


def profile(steps, on_gpu):
    kinds = torch.profiler.ProfilerActivity
    for _ in range(2):  # the first profile starts CUPTI, which delays the steps
        with torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if on_gpu else [])]) as profiler:
            run(steps)
    return profiler


def main():
    numbers = {"tokens": ("tokens of each rank", 8192, 64), "decoded": ("of them in the low-latency step", 64, 8)}
    numbers |= {"hidden": ("length of a row", 2048, 128), "inner": ("length of a row inside an expert", 768, 64)}
    numbers |= {"topk": ("experts of a token", 8, 2), "experts": ("of all ranks, rounded down to a multiple of them", 128, 8)}
    out = dict(metavar="FOLDER", help="profile the steps, and write a chrome trace for each rank")
    shared = dict(action="store_true", help="add a shared expert, on a stream of its own")
    args = parse(__doc__, numbers, out=out, shared=shared)
    args.experts -= args.experts % comm.size
    device = torch.device("cpu")
    if args.backend != "host" and torch.cuda.is_available():
        device = torch.device("cuda", rank_on_host() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    sizes = dict(hidden=args.hidden, num_topk=args.topk, num_experts=args.experts, backend=args.backend)
    with (
        Buffer(comm, num_max_tokens_per_rank=args.tokens, **sizes) as buffer,
        Buffer(comm, num_max_tokens_per_rank=args.decoded, low_latency=True, **sizes) as decoder,
        torch.no_grad(),
    ):
        layer = Layer(buffer, decoder, args, device)
        steps = {
            f"{args.tokens} tokens of each rank": layer.many_tokens,
            f"{args.tokens} tokens of each rank, rank {comm.size - 1} is late": layer.last_rank_is_late,
            f"{args.decoded} tokens of each rank, low latency": layer.few_tokens,
        }
        for _ in range(3):  # compile, allocate, and measure without the profiler
            outs, seconds = run(steps)
        many, late, few = outs
        assert torch.equal(many, late), f"rank {comm.rank}: other results when rank {comm.size - 1} is late"
        error = float((many[: len(few)] - few).abs().max() / many.abs().max())
        assert error < 0.05, f"rank {comm.rank}: the low-latency step is off by {error:.1e} of the largest number"
        say(f"{buffer.backend}: {comm.size} ranks, hidden {args.hidden}, top-{args.topk} of {args.experts} experts")
        for title, slowest in zip(steps, seconds, strict=True):
            say(f"{title}: {1e6 * slowest:.0f} us without the profiler")
        if args.out:
            profiler = profile(steps, device.type == "cuda")
            os.makedirs(args.out, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(args.out, f"rank{comm.rank}.json"))
    comm.Barrier()
    say("OK")


if __name__ == "__main__":
    main()
