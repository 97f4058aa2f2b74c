"""Arrays of PyTorch and JAX in CPU memory. A check is skipped if its library is not installed."""

from __future__ import annotations

import importlib
import importlib.util

import numpy as np
import oracle
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer

from deepep_rt.arrays.view import View

SIZES = dict(hidden=128, num_topk=4)


def _inputs(comm: MPI.Intracomm, **options):
    experts = 4 * comm.Get_size()
    inputs = inputs_of_all(comm, 1, lambda rank: 6 * (rank % 3) + 2, num_experts=experts, **SIZES, **options)
    rank = comm.Get_rank()
    return inputs[rank], oracle.expected_dispatch(rank, inputs, experts), dict(SIZES, num_experts=experts)


def check_torch(comm: MPI.Intracomm) -> None:
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: skipped")
        return
    torch = importlib.import_module("torch")
    mine, expected, sizes = _inputs(comm)
    with make_buffer(comm, **sizes) as buffer:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            x = torch.from_numpy(mine.x).to(dtype)
            sent = buffer.dispatch(x, torch.from_numpy(mine.topk_idx), torch.from_numpy(mine.topk_weights))
            assert isinstance(sent.recv_x, torch.Tensor)
            assert sent.recv_x.dtype == dtype
            assert torch.equal(sent.recv_x, torch.from_numpy(expected.x).to(dtype))
            assert torch.equal(sent.recv_topk_idx, torch.from_numpy(expected.topk_idx))
            assert torch.equal(sent.recv_topk_weights, torch.from_numpy(expected.topk_weights))
            assert sent.num_recv_tokens.tolist() == [expected.num_recv]
            out = buffer.combine(sent.recv_x, sent.handle, bias=x).x
            assert out.dtype == dtype
            assert out.shape == x.shape
        if hasattr(torch, "float8_e4m3fn"):
            x = torch.from_numpy(mine.x).to(torch.float8_e4m3fn)
            sent = buffer.dispatch(
                x, mine.topk_idx
            )  # arguments may come from several frameworks; results are of the framework of x
            wanted = torch.from_numpy(expected.x).to(torch.float8_e4m3fn)
            assert torch.equal(sent.recv_x.view(torch.uint8), wanted.view(torch.uint8))
            assert isinstance(sent.recv_topk_idx, torch.Tensor)


def check_jax(comm: MPI.Intracomm) -> None:
    if importlib.util.find_spec("jax") is None:
        print("jax is not installed: skipped")
        return
    jnp = importlib.import_module("jax.numpy")
    mine, expected, sizes = _inputs(comm, idx_dtype="int32")
    with make_buffer(comm, **sizes) as buffer:
        for dtype in ("bfloat16", "float32", "float16"):
            x = jnp.asarray(mine.x.astype(dtype))
            sent = buffer.dispatch(x, jnp.asarray(mine.topk_idx), jnp.asarray(mine.topk_weights))
            assert isinstance(sent.recv_x, type(x))
            np.testing.assert_array_equal(np.asarray(sent.recv_x), expected.x.astype(dtype))
            np.testing.assert_array_equal(np.asarray(sent.recv_topk_idx), expected.topk_idx)
            assert buffer.combine(sent.recv_x, sent.handle, bias=x).x.shape == x.shape


def check_any_dlpack_producer(comm: MPI.Intracomm) -> None:
    class Producer:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **options: object) -> object:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    mine, expected, sizes = _inputs(comm)
    with make_buffer(comm, **sizes) as buffer:
        sent = buffer.dispatch(Producer(mine.x), Producer(mine.topk_idx))
        assert isinstance(sent.recv_x, View)
        np.testing.assert_array_equal(np.from_dlpack(sent.recv_x), expected.x)
        np.testing.assert_array_equal(np.from_dlpack(sent.recv_topk_idx), expected.topk_idx)
        back = buffer.combine(sent.recv_x, sent.handle).x
        assert np.from_dlpack(back).shape == mine.x.shape


if __name__ == "__main__":
    main(__name__)
