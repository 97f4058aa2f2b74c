"""The throughput calls on GPUs with wrong input, and with ranks that differ, are late or leave."""

from __future__ import annotations

import os
import time

import pytest

pytestmark = pytest.mark.gpu
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX allocates most of every GPU, in every rank
torch = pytest.importorskip("torch")

from gpu_buffers import make, routing, rows, tokens  # noqa: E402
from gpu_throughput import round_trip  # noqa: E402

from deepep_rt import EPCompileError, EPConfigError, EPInputError, EPTimeoutError, EPUnavailableError  # noqa: E402
from deepep_rt.cuda import driver  # noqa: E402
from deepep_rt.jit import launch  # noqa: E402


def test_bad_input_leaves_the_buffer_usable(comm):
    with make(comm, check_inputs=True) as gpu, make(comm, "host") as host:
        x, idx, weights = tokens(comm, gpu, 90, 40)
        with pytest.raises(EPInputError, match="contiguous"):
            gpu.dispatch(rows(comm, 90, 7168, 40).t(), idx, weights)
        if torch.cuda.device_count() > 1:
            other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
            with pytest.raises(EPInputError, match="where this Buffer works"):
                gpu.dispatch(x.to(other), idx, weights)
        bad = idx.clone()
        bad[3, 2] = gpu.config.num_experts
        with pytest.raises(EPInputError, match=rf"topk_idx\[3\] holds expert {gpu.config.num_experts}"):
            gpu.dispatch(x, bad, weights)
        round_trip(comm, gpu, host, 91, 40, 8)


def test_ranks_that_differ(comm):
    """With such arguments, ranks would overwrite each other's results. All ranks raise, and the Buffer stays usable."""
    if comm.Get_size() == 1:
        return
    odd = comm.Get_rank() % 2
    with make(comm) as gpu, make(comm, "host") as host:
        x, idx, weights = tokens(comm, gpu, 92, 40)
        sent, other = (gpu.dispatch(x, idx, weights) for _ in range(2))
        wide = rows(comm, 92, 40, 7168, dtype=torch.uint8)
        packed = wide[:, :3584].contiguous() if odd else wide  # rows of the others would be written past this rank's result
        wrong = (
            ("bytes of a row of x ", lambda: gpu.dispatch(packed, idx, num_worst_tokens=40 * comm.Get_size())),
            ("bytes of a row of x ", lambda: gpu.dispatch(packed, handle=sent.handle)),
            ("bytes of a row of x ", lambda: gpu.prepare_throughput(packed, sent.handle).dispatch()),
            ("bytes of a row of x_scales", lambda: gpu.dispatch(wide, idx, x_scales=wide[:, : 4 << odd].contiguous())),
            ("expert_alignment", lambda: gpu.dispatch(x, idx, expert_alignment=1 << 20 * odd)),
            ("zero_padding", lambda: gpu.dispatch(x, idx, layout="expert", zero_padding=bool(odd))),
            ("topk_weights", lambda: gpu.dispatch(x, idx, weights if odd else None)),
            ("topk_idx", lambda: gpu.dispatch(x, idx.int() if odd else idx, num_worst_tokens=40 * comm.Get_size())),
            ("x of", lambda: gpu.dispatch(x.to(torch.float8_e4m3fn) if odd else x, handle=sent.handle)),
            ("handle", lambda: gpu.combine(sent.recv_x, (other if odd else sent).handle)),
            ("topk_weights", lambda: gpu.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights if odd else None)),
        )
        for what, call in wrong:
            torch.cuda.synchronize()
            torch.cuda._sleep(50_000_000)  # so a call that does not wait for counts returns before its kernel runs
            result = None
            with pytest.raises(EPInputError, match=rf"the ranks disagree on the {what}.*rank \d: .*rank \d: .*No rows were sent"):  # noqa: PT012
                result = call()  # raises if the host waits for counts
                gpu.synchronize()
            if what == "topk_idx":
                assert (result.recv_topk_idx == -1).all()  # a caller that uses the result finds no token
            round_trip(comm, gpu, host, 93, 40, 8)


def test_an_interruption_between_the_windows_of_a_combine(comm, monkeypatch):
    """Rank 0 would repeat the call, and send rows of other tokens than the others expect."""
    if comm.Get_size() == 1:
        return
    sizes = dict(num_max_tokens_per_rank=256, hidden=512, num_experts=8 * comm.Get_size(), timeout_s=2.0)
    gpu = make(comm, **sizes, num_topk=8 * min(comm.Get_size(), 4))
    runtime, num_topk = gpu._backend.runtime, gpu.config.num_topk
    assert runtime.layout.choice_window < 256, "the combine takes several launches"
    idx, _ = routing(comm, 97, 256, num_topk, gpu.config.num_experts, skip=0)
    sent = gpu.dispatch(rows(comm, 97, 256, 512), idx, layout="expert")
    y = sent.recv_x.clone()
    gpu.synchronize()
    comm.Barrier()

    def combine():
        gpu.combine(y, sent.handle, reduce="topk")
        gpu.synchronize()

    if comm.Get_rank() == 0:
        launcher = runtime.launcher("combine_choices", "bfloat16")
        launch, numbers = launcher.launch, iter(range(100))

        def interrupt(*given):
            if next(numbers) == 1:
                raise KeyboardInterrupt
            launch(*given)

        monkeypatch.setattr(launcher, "launch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            combine()
    with pytest.raises(
        EPTimeoutError, match="interrupted between its windows" if comm.Get_rank() == 0 else "rank 0 left the Buffer"
    ):
        combine()
    gpu.destroy()
    comm.Barrier()


def test_late_rank(comm):
    """The last rank makes no call. The others name it and a phase, within the limit. A dispatch waits for counts and address at once."""
    if comm.Get_size() == 1:
        return
    late = comm.Get_size() - 1
    idx, weights = routing(comm, 95, 40, 8, 32 * comm.Get_size())
    x = rows(comm, 95, 40, 7168)
    in_dispatch = ("the token counts of dispatch", "the address where dispatch may write")
    for phases in (in_dispatch, ("the address where combine may write",)):
        gpu = make(comm, timeout_s=2.0)
        sent = gpu.dispatch(x, idx, weights)
        torch.cuda.synchronize()
        comm.Barrier()
        if comm.Get_rank() != late:
            start = time.monotonic()
            with pytest.raises(EPTimeoutError) as caught:  # noqa: PT012  (combine only tells when the host looks)
                if phases is in_dispatch:
                    gpu.dispatch(x, idx, weights)
                else:
                    gpu.combine(sent.recv_x, sent.handle)
                    gpu.synchronize()
            assert (caught.value.rank, caught.value.peer) == (comm.Get_rank(), late)
            assert caught.value.phase in phases
            assert time.monotonic() - start < 4
            with pytest.raises(EPTimeoutError):
                gpu.combine(sent.recv_x, sent.handle)
        gpu.destroy()
        comm.Barrier()


def test_a_rank_that_leaves_after_an_exception(comm):
    """The others stop waiting for it, also on the GPU, and quote its error. No rank waits in destroy, and the next Buffer works."""

    class Mistake(Exception): ...

    last = comm.Get_size() - 1
    idx, weights = routing(comm, 94, 40, 8, 32 * comm.Get_size())
    x = rows(comm, 94, 40, 7168)
    start = time.monotonic()
    if comm.Get_rank() == last:
        with pytest.raises(Mistake), make(comm, timeout_s=30) as gpu:  # noqa: PT012
            gpu.dispatch(x, idx, weights)
            raise Mistake("no more data")
    else:
        left = rf"rank {last}( on node \d+)? left the Buffer.*Mistake: no more data"
        with pytest.raises(EPTimeoutError, match=left), make(comm, timeout_s=30) as gpu:  # noqa: PT012
            gpu.dispatch(x, idx, weights)
            gpu.dispatch(x, idx, weights)
    assert time.monotonic() - start < 8
    comm.Barrier()
    gpu, host = make(comm), make(comm, "host")
    with gpu, host:
        round_trip(comm, gpu, host, 93, 40, 8)


def test_two_ranks_on_one_gpu_are_refused(comm, monkeypatch):
    monkeypatch.delenv("DEEPEP_RT_SHARE_GPUS", raising=False)
    if comm.Get_size() == 1:
        return
    mine = torch.cuda.current_device()
    torch.cuda.set_device(0)
    try:
        with pytest.raises(EPConfigError, match="one rank on each GPU"):
            make(comm)
    finally:
        torch.cuda.set_device(mine)


def test_a_buffer_that_one_rank_cannot_make(comm, monkeypatch):
    """All ranks learn of the failure and free their memory, so a program can try again."""
    real, last = launch.load, comm.Get_size() - 1

    def load(kernel, *given):
        if kernel.name == "combine":
            raise EPCompileError("not here")
        return real(kernel, *given)

    sizes = dict(hidden=4096, num_max_tokens_per_rank=2048)
    with make(comm, **sizes):
        pass
    before = driver.free_bytes()
    for _ in range(12):  # NVSHMEM's heap has no room for so many, if they stay allocated
        with monkeypatch.context() as broken:
            if comm.Get_rank() == last:
                broken.setattr(launch, "load", load)
            with pytest.raises(EPCompileError if comm.Get_rank() == last else EPUnavailableError, match=r"not here|another rank"):
                make(comm, **sizes)
    comm.Barrier()  # ranks may share a GPU
    assert driver.free_bytes() > before - (64 << 20)
    with make(comm, **sizes) as buffer:
        sent = buffer.dispatch(*tokens(comm, buffer, 5, 100))
        assert buffer.combine(sent.recv_x, sent.handle).x.shape == (100, 4096)
