"""Combine with compressed rows on GPUs, against the host backend, bit for bit: sizes, graphs, streams, and GPUs without FP8."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import cpu, make, poison, replays, rows, same, some, tokens  # noqa: E402

from deepep_rt import EPUnavailableError  # noqa: E402
from deepep_rt.arrays.compressed_rows import COMPRESSIONS  # noqa: E402
from deepep_rt.jit import compiler  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402

SMALL = dict(hidden=1024, num_max_tokens_per_rank=256)


def forms():
    """List the formats that these GPUs convert to."""
    return [form for form in COMPRESSIONS if form != "fp8" or has_fp8(compiler.target_arch())]


def send_on_both(comm, gpu, host, seed, num_tokens, **options):
    """Dispatch the same tokens on both backends."""
    given = tokens(comm, gpu, seed, num_tokens)
    return gpu.dispatch(*given, **options), host.dispatch(*cpu(*given), **options)


def sum_on_both(comm, gpu, host, got, want, y, compress, *, num_tokens, seed, num_biases=1, **options):
    """Combine on both backends, and compare the results bit for bit."""
    biases = [rows(comm, seed + i, num_tokens, gpu.config.hidden, dtype=y.dtype) for i in range(num_biases)]
    how = dict(compress=compress, **options)
    back = gpu.combine(y, got.handle, topk_weights=got.recv_topk_weights, bias=biases, **how)
    reference = host.combine(y.cpu(), want.handle, topk_weights=want.recv_topk_weights, bias=cpu(*biases), **how)
    same_numbers(back.x, reference.x)
    same(back.topk_weights, reference.topk_weights)


def same_numbers(got, want):
    """Compare bit for bit, but for the bits of NaN, which differ between processors."""
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    same(torch.where(got.isnan(), torch.zeros_like(got), got), torch.where(want.isnan(), torch.zeros_like(want), want))


# 640: the last pass of a warp is not full. 128: a row has one group.
@pytest.mark.parametrize("hidden", [128, 640, 7168])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits(comm, hidden, dtype):
    sizes = dict(hidden=hidden, dtype="float32" if dtype == torch.float32 else "bfloat16")
    with make(comm, **sizes) as gpu, make(comm, "host", **sizes) as host:
        for seed, tokens in enumerate((37 + 11 * comm.Get_rank(), 0 if comm.Get_rank() % 2 else 200, 1)):
            got, want = send_on_both(comm, gpu, host, 10 * seed, tokens)
            y = rows(comm, 10 * seed + 1, got.recv_x.shape[0], hidden, dtype=dtype)
            for compress in (*forms(), None):
                # The sums come to memory that holds other bytes, and recv_topk_weights are read before it is overwritten.
                weights = got.recv_topk_weights.clone()
                poison(gpu)
                got.recv_topk_weights.copy_(weights)
                gpu.num_sms = (24, 3, 64)[seed]
                common = dict(num_tokens=tokens, seed=10 * seed + 2, num_biases=seed)
                sum_on_both(comm, gpu, host, got, want, y, compress, **common)


@pytest.mark.parametrize("num_topk", [1, 9, 32])
def test_more_choices(comm, num_topk):
    sizes = dict(SMALL, num_topk=num_topk)
    with make(comm, **sizes) as gpu, make(comm, "host", **sizes) as host:
        got, want = send_on_both(comm, gpu, host, 1, 100)
        y = rows(comm, 2, got.recv_x.shape[0], 1024)
        for compress in forms():
            sum_on_both(comm, gpu, host, got, want, y, compress, num_tokens=100, seed=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unusual_rows(comm, dtype):
    """Rows with zeros, with channels of very different sizes, with equal channels, with tiny ones, and with infinities and NaN."""
    sizes = dict(SMALL, dtype="float32" if dtype == torch.float32 else "bfloat16")
    with make(comm, **sizes) as gpu, make(comm, "host", **sizes) as host:
        got, want = send_on_both(comm, gpu, host, 1, 100)
        shape = got.recv_x.shape[0], 1024
        plain = rows(comm, 2, *shape, dtype=torch.float32)
        generator = torch.Generator("cuda").manual_seed(comm.Get_rank())
        drawn = torch.rand(shape, device="cuda", generator=generator)
        octaves, most = (20, 10) if dtype == torch.float16 else (40, 120)  # so that no sum overflows
        exponents = torch.randint(-140, most, (shape[0], 1), device="cuda", generator=generator)
        chosen = {
            "zero": torch.zeros_like(plain),
            "sparse": torch.where(drawn < 0.05, plain, torch.zeros_like(plain)),
            "wide": plain * torch.exp2(octaves * (drawn - 0.5)),
            "equal": plain[:, :1].expand(shape).contiguous(),
            "tiny and large": torch.ldexp(plain, exponents),
            "infinite": torch.where(drawn < 0.001, torch.full_like(plain, float("-inf")), plain),
            "NaN": torch.where(drawn < 0.001, torch.full_like(plain, float("nan")), plain),
        }
        for seed, y in enumerate(chosen.values()):
            for compress in forms():
                common = dict(num_tokens=100, seed=seed, num_biases=0)
                sum_on_both(comm, gpu, host, got, want, y.to(dtype), compress, **common)


def test_rows_by_expert(comm):
    """A rank adds up its rows of a token, and compresses the sum."""
    with make(comm, **SMALL) as gpu, make(comm, "host", **SMALL) as host:
        got, want = send_on_both(comm, gpu, host, 1, 130, layout="expert", expert_alignment=16)
        y = rows(comm, 2, got.recv_x.shape[0], 1024)
        for compress in forms():
            for weighted in (True, False):
                sum_on_both(comm, gpu, host, got, want, y, compress, num_tokens=130, seed=3, weighted=weighted)


def test_graph(comm):
    """Capture combines of all kinds once. Replay them with other tokens into memory that holds other bytes, among ordinary calls."""
    num_tokens, hidden, kinds = 96, 1024, [*forms(), None]

    def step(buffer, x, idx, weights):
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=num_tokens * comm.Get_size())
        y, how = sent.recv_x * 2, dict(topk_weights=sent.recv_topk_weights)
        backs = [buffer.combine(y, sent.handle, compress=kind, **how) for kind in kinds]
        return [(back.x, back.topk_weights) for back in backs], backs, sent

    with make(comm, hidden=hidden) as gpu, make(comm, "host", hidden=hidden) as host:
        for seed, got, want in replays(comm, gpu, host, range(2, 10), num_tokens, step, lambda: poison(gpu)):
            for (out, out_weights), (reference, reference_weights) in zip(got[0], want[0], strict=True):
                same(out, reference)
                same(out_weights, reference_weights)
            if seed % 3 == 0:
                sent, reference = send_on_both(comm, gpu, host, seed, 50)
                y = rows(comm, seed, sent.recv_x.shape[0], hidden)
                for kind in kinds:
                    sum_on_both(comm, gpu, host, sent, reference, y, kind, num_tokens=50, seed=seed)


def test_50_rounds(comm):
    """Compressed and plain combines without pauses, in random order and on two streams, with a delay on one rank in every fifth round."""
    rng = np.random.default_rng(7)  # the same on all ranks
    kinds = [None, *forms()]
    streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
    with make(comm, **SMALL) as gpu, make(comm, "host", **SMALL) as host:
        pending = []
        for i in range(50):
            late = int(rng.integers(comm.Get_size()))
            gpu.num_sms = (24, 3, 64)[i % 3]
            with torch.cuda.stream(streams[i % 2]):
                if i % 5 == 0 and comm.Get_rank() == late:
                    torch.cuda._sleep(int(20e6))
                got, want = send_on_both(comm, gpu, host, 10 * i, some(comm, i, 256))
                for number in range(3):
                    compress = kinds[int(rng.integers(len(kinds)))]
                    y = rows(comm, 10 * i + number, got.recv_x.shape[0], 1024)
                    pending.append((gpu.combine(y, got.handle, compress=compress), y, want.handle, compress))
            if i % 5 == 4:
                torch.cuda.synchronize()
                for back, y, handle, compress in pending:
                    same(back.x, host.combine(y.cpu(), handle, compress=compress).x)
                pending.clear()


@pytest.mark.parametrize("who", ["all ranks", "the last rank"])
def test_without_fp8(comm, monkeypatch, who):
    """With kernels for older GPUs, all ranks refuse FP8, also if only one rank has such kernels. The Buffer stays usable."""
    if who == "all ranks" or comm.Get_rank() == comm.Get_size() - 1:
        monkeypatch.setenv("DEEPEP_RT_ARCH", "compute_80")
    with make(comm, **SMALL) as gpu, make(comm, "host", **SMALL) as host:
        for layout in ("token", "expert"):
            got, want = send_on_both(comm, gpu, host, 1, 100, layout=layout)
            y = rows(comm, 2, got.recv_x.shape[0], 1024)
            message = r"compress='fp8'; expected GPUs with FP8 on all ranks, but rank \d+ has \w+_\d+"
            with pytest.raises(EPUnavailableError, match=message):
                gpu.combine(y, got.handle, compress="fp8")
            for compress in ("log10", None, "log10"):
                sum_on_both(comm, gpu, host, got, want, y, compress, num_tokens=100, seed=3)
