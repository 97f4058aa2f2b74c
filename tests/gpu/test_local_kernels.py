"""Compare kernels without a Buffer (`torch/tensor_ops.py`) with NumPy and PyTorch, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from deepep_rt.arrays import dtypes as fp8  # noqa: E402
from deepep_rt.jit import compiler, launch  # noqa: E402
from deepep_rt.jit.launch import launch_zero_padding  # noqa: E402
from deepep_rt.kernels.tuning import has_fp8  # noqa: E402
from deepep_rt.torch import tensor_ops as torch_kernels  # noqa: E402

FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _of_this_rank(comm):
    """Kernels run on the current GPU, and every rank has another one."""
    torch.cuda.set_device(comm.Get_rank() % torch.cuda.device_count())


@pytest.fixture
def with_operators(monkeypatch):
    """Do the same with PyTorch's operators, also on GPUs."""

    def call(function, *given):
        with monkeypatch.context() as patch:
            patch.setattr(torch_kernels, "_has_kernels", lambda rows: False)
            return function(*given)

    return call


def all_numbers(dtype):
    """Return all 16-bit numbers, in groups of similar and of mixed sizes, or many random float32."""
    if dtype == torch.float32:
        bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32)
        return torch.from_numpy(np.concatenate([bits, np.random.default_rng(2).standard_normal(1 << 20).astype(np.float32)]))
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(dtype)
    return torch.cat([numbers, numbers[torch.from_numpy(np.random.default_rng(3).permutation(1 << 16))]])


def poisoned(*shape, dtype):
    """Free memory full of 0xA5 bytes. PyTorch hands it out again, so tests see bytes that a kernel does not write."""
    torch.empty(shape, dtype=dtype, device="cuda").view(torch.uint8).fill_(0xA5)


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("hidden", [128, 7168])
def test_to_fp8(dtype, hidden):
    if not has_fp8(compiler.target_arch()):
        return  # PyTorch's operators do this here; the next test checks them
    numbers = all_numbers(dtype)
    rows = numbers[: len(numbers) // hidden * hidden].view(-1, hidden)
    given = rows.cuda()
    poisoned(*rows.shape, dtype=torch.uint8)
    got, scales = torch_kernels.to_fp8(given)
    want, want_scales = fp8.to_fp8(rows.float().numpy(), round_scale=False)
    assert (got.dtype, got.shape, scales.dtype) == (torch.float8_e4m3fn, rows.shape, torch.float32)
    np.testing.assert_array_equal(scales.cpu().numpy().view(np.uint32), want_scales.view(np.uint32))
    np.testing.assert_array_equal(got.cpu().view(torch.uint8).numpy(), want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_kept", [None, 0, 100, 300])
def test_from_fp8(dtype, num_kept, with_operators):
    codes = torch.arange(256, dtype=torch.uint8).repeat(300, 28).view(torch.float8_e4m3fn).cuda()
    scales = torch.rand(300, 56, generator=torch.Generator().manual_seed(4)).mul(20).sub(10).exp().cuda()
    kept = None if num_kept is None else torch.tensor([num_kept], dtype=torch.int32, device="cuda")
    poisoned(300, 7168, dtype=dtype)
    got = torch_kernels.from_fp8(codes, scales, dtype, kept)
    want = with_operators(torch_kernels.from_fp8, codes, scales, dtype, kept)
    assert (got.dtype, got.shape) == (dtype, (300, 7168))
    # the bits of NaN may differ
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(bits(got.nan_to_num(3)), bits(want.nan_to_num(3)))
    assert not got[num_kept if num_kept is not None else 300 :].any()
    assert got[: num_kept or 300].any() or num_kept == 0


def test_there_and_back_is_close():
    """GPUs without FP8 instructions give the same."""
    x = torch.randn(1000, 7168, device="cuda")
    back = torch_kernels.from_fp8(*torch_kernels.to_fp8(x), torch.float32)
    assert ((back - x).abs() <= (x.abs() / 16).clamp_min(x.abs().max().item() * 2**-18)).all()


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), [(1000, 2880), (5000, 16), (1, 16), (0, 16)])
def test_zero_padding(dtype, num_rows, hidden):
    for num_kept in {0, 1, num_rows // 3, num_rows} & set(range(num_rows + 1)):
        filled = torch.full(
            (num_rows, hidden * torch.empty(0, dtype=dtype).element_size()), 0x35, dtype=torch.uint8, device="cuda"
        )
        rows = torch_kernels.zero_padding(filled.view(dtype), torch.tensor([num_kept], dtype=torch.int32, device="cuda"))
        assert rows.data_ptr() == filled.data_ptr()
        assert (filled[:num_kept] == 0x35).all()
        assert not filled[num_kept:].any()


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(1000, 2880), (3000, 16), (40, 40000), (0, 16)])
@pytest.mark.parametrize("share", [0, 0.4, 1, 2])
def test_rows_are_kept_elsewhere(num_rows, row_bytes, share):
    """More rows may arrive than fit."""
    x = torch.randint(1, 256, (num_rows, row_bytes), dtype=torch.uint8, device="cuda")
    out, num_kept = torch.full_like(x, 0xA5), torch.tensor([int(num_rows * share)], dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    launch_zero_padding(stream, x.data_ptr(), out.data_ptr(), num_kept.data_ptr(), num_rows, row_bytes)
    kept = min(int(num_kept), num_rows)
    assert torch.equal(out[:kept], x[:kept])
    assert not out[kept:].any()
    assert x.all()


@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts", "num_ranks"),
    [
        (4096, 8, 256, 8),
        (1, 1, 1, 1),
        (0, 8, 256, 8),
        (5000, 9, 288, 3),
        (333, 32, 8192, 8),
        (100, 40, 4098, 6),
        (70, 4, 144, 72),
        (20000, 1, 6, 2),
    ],
)
def test_counts(idx_dtype, num_tokens, num_topk, num_experts, num_ranks):
    generator = torch.Generator().manual_seed(num_tokens)
    idx = torch.randint(
        -3, num_experts + 2, (num_tokens, num_topk), generator=generator, dtype=idx_dtype
    )  # some are out of range
    given = idx.cuda()
    poisoned(num_tokens, num_ranks, dtype=torch.bool)
    got, want = (torch_kernels.dispatch_layout(t, num_experts, num_ranks) for t in (given, idx))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.dtype, mine.is_contiguous()) == (theirs.dtype, True)
        assert torch.equal(mine.cpu(), theirs)
    turned = torch_kernels.dispatch_layout(idx.t().contiguous().t().cuda(), num_experts, num_ranks)
    assert all(torch.equal(a, b) for a, b in zip(turned, got, strict=True))


def test_the_first_call_may_be_captured():
    """The first call loads kernels, which a capture does not allow."""
    x, kept = torch.ones(64, 1024, device="cuda"), torch.tensor([10], dtype=torch.int32, device="cuda")
    launch._local_launcher.cache_clear()
    launch.LOADED.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_kernels.zero_padding(x, kept)
    for num_kept in (40, 20):
        x.fill_(1)
        kept.fill_(num_kept)
        graph.replay()
        assert x.sum().item() == 1024 * num_kept


def test_several_threads_and_streams():
    """A backward pass has another thread. Calls of two threads must not share Params."""
    x = [torch.full((256, 1024), float(i + 1), device="cuda") for i in range(8)]
    streams = [torch.cuda.Stream() for _ in x]
    torch.cuda.synchronize()

    def work(i):
        with torch.cuda.stream(streams[i]):
            for _ in range(200):
                back = torch_kernels.from_fp8(*torch_kernels.to_fp8(x[i]), torch.float32)
        streams[i].synchronize()
        return torch.allclose(back, x[i])

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


@pytest.mark.parametrize("function", [torch_kernels.to_fp8, lambda x: torch_kernels.zero_padding(x, x.view(torch.int32)[:1, 0])])
def test_a_thread_that_has_used_no_gpu(function):
    """No context is current in a new thread, such as that of a backward pass."""
    x = torch.zeros(256, 1024, device="cuda")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(function, x).result()
    torch.cuda.synchronize()
