"""Thousands of bad calls: each must raise an error of deepep_rt, and the Buffers must stay usable.

The quick tests make a few hundred calls, and those marked `full` 2,000. The environment sets another number for these (`BAD_CALLS`),
and the seed (`BAD_CALLS_SEED`).
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import numpy as np
import pytest
from generated_calls import WRONG, Call, Caller, wrong_array
from launch import launch

from deepep_rt import Buffer, EPConfigError, EPDestroyedError, EPInputError, EPUnavailableError

FULL, SEED = int(os.environ.get("BAD_CALLS", "2000")), int(os.environ.get("BAD_CALLS_SEED", "1"))
SECONDS = 150  # of a program; then no further round begins, and the test fails
in_both_tiers = pytest.mark.parametrize("number", [400, pytest.param(FULL, marks=pytest.mark.full, id="full")])


@in_both_tiers
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, ""), (4, ""), (4, "2")])
def test_host_backend(num_ranks: int, ranks_per_node: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", ranks_per_node)
    output = launch(num_ranks, "random_bad_calls", str(number), str(SECONDS), str(SEED))
    assert ": passed" in output, output
    assert int(re.findall(r"(\d+) bad calls in", output)[0]) >= number, output


# --- the CUDA backend, on a GPU that computes nothing ------------------------------------------------------------------------------

try:
    from fake_gpu import Array, FakeGpu, arguments, fake, make

    __all__ = ["fake", "make"]
except ImportError:  # without cuda-python, pytest finds no fixture
    FakeGpu = Any  # type: ignore[assignment,misc]


def _wrong_device_array(fake: FakeGpu) -> Callable[[random.Random, Any], Any]:
    def wrong(r: random.Random, good: Any) -> Any:
        if good is None:
            return r.choice([5, "x", b"x", object(), Array(fake, "bfloat16", 3), np.zeros((1, 1, 1))])
        shape, dtype = list(good.shape), good.dtype
        choice = r.randrange(4)
        if choice == 0:
            at = r.randrange(1, len(shape))
            shape[at] = r.choice([0, 1, shape[at] + 1, 4096])
            return Array(fake, dtype, *shape)
        if choice == 1:
            return Array(fake, dtype, *r.choice([shape[:1], [*shape, 1], []]))
        if choice == 2:
            return Array(fake, dtype, *shape, offset=r.choice([1, 2, 3, 9]))
        return wrong_array(r, np.zeros(shape, "int64" if dtype == "int64" else "float32"))

    return wrong


def _device_calls(
    fake: FakeGpu, buffer: Buffer, given: tuple[Any, ...], results: tuple[Any, ...], foreign: tuple[Any, ...]
) -> list[Call]:
    """List valid calls with arrays in GPU memory."""
    (x, idx, weights), (sent, low, rows) = given, results
    wrong, options = _wrong_device_array(fake), {"async_finish": False, "previous_event": None, "stream": None}
    option_kinds = {"async_finish": "flag", "previous_event": "stream", "stream": "stream"}
    low_kinds = {"async_finish": "flag", "stream": "stream", "return_recv_hook": "flag"}
    flags = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), "flag")
    sizes = {
        "num_worst_tokens": "number",
        "expert_alignment": "number",
        "layout": "word",
        "zero_padding": "flag",
        "scales_layout": "word",
    }
    forms = {"reduce": "word", "compress": "word"}
    handles = {"handle": lambda r, _: r.choice([foreign[0], foreign[1], sent, 7, "h"])}
    low_handles = {"handle": lambda r, _: r.choice([foreign[1], sent.handle, low, None])}
    arrays = {"x": wrong, "topk_idx": wrong, "topk_weights": wrong}
    new = {"x": x, "topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 8, **options}
    known, kinds = {"x": x, "handle": sent.handle}, {"x": wrong, **option_kinds, **handles}
    back = {"y": rows, "topk_idx": idx, "topk_weights": weights, "handle": low.handle}
    back_kinds = {**arrays_of(back, wrong), "allow_multiple_reduction": "flag", "zero_copy": "flag", **forms, **low_kinds}
    combine = {"x": sent.recv_x, "handle": sent.handle}
    of_step = {**arrays, "y": wrong, "y_weights": wrong, "bias": wrong, "compress": "word", "async_finish": "flag", **handles}
    of_low_step = {**arrays, "y": wrong, "out": wrong, "allow_multiple_reduction": "flag", "zero_copy": "flag", **flags, **forms}
    return [
        Call("dispatch", buffer.dispatch, new, {**arrays, **sizes, **flags, **option_kinds, **handles}),
        Call("dispatch, expert", buffer.dispatch, {**new, "layout": "expert"}, {**arrays, **sizes, **flags, **option_kinds, **handles}),
        Call("dispatch, known", buffer.dispatch, known, {**kinds, **flags}),
        Call("combine", buffer.combine, combine, {**kinds, "weighted": "flag", "topk_weights": wrong, **forms}),
        Call("prepare_throughput", buffer.prepare_throughput, known, of_step),
        Call("low_latency_dispatch", buffer.low_latency_dispatch, {"x": x, "topk_idx": idx}, {**arrays, **flags, **low_kinds}),
        Call("low_latency_combine", buffer.low_latency_combine, back, {**back_kinds, **low_handles}),
        Call("prepare_low_latency", buffer.prepare_low_latency, dict(x=x, topk_idx=idx, topk_weights=weights), of_low_step),
        Call("mask_rank", buffer.mask_rank, {"rank": 1}, {"rank": "number"}),
        Call("copy_ceiling", buffer.copy_ceiling, {}, dict.fromkeys(("num_rows", "iterations", "row_bytes"), "number")),
        Call("autotune", buffer.autotune, {}, {"num_tokens": "number", "dtype": "any", "max_seconds": "seconds", "save": "flag"}),
        Call("num_sms", lambda num_sms: setattr(buffer, "num_sms", num_sms), {"num_sms": 8}, {"num_sms": "number"}, (EPConfigError,)),
    ]  # fmt: skip


@in_both_tiers
def test_cuda_backend_without_a_gpu(fake: FakeGpu, make: Any, number: int) -> None:
    """Bad calls launch nothing and lose no slot: two results fit, and a third would raise."""
    with make(low_latency=True, on_exhausted="error", num_slots=2) as buffer, make(low_latency=True) as other:
        x, idx, weights = arguments(fake)
        foreign = other.dispatch(x, idx, num_worst_tokens=8).handle, other.low_latency_dispatch(x, idx).handle

        def valid() -> tuple[Any, Any, Any]:
            """Make valid calls, and check the parameters of their launches."""
            fake.pop_launches()
            sent = buffer.dispatch(x, idx, weights, num_worst_tokens=8)
            y = Array(fake, "bfloat16", 8, 256)
            buffer.combine(y, sent.handle)
            low = buffer.low_latency_dispatch(x, idx)
            rows = Array(fake, "bfloat16", 8, 256, 256)
            buffer.low_latency_combine(rows, idx, weights, low.handle)
            route, dispatch, combine, ll_dispatch, ll_combine = fake.pop_launches()
            assert [c.kernel for c in (route, dispatch, combine, ll_dispatch)] == ["route", "dispatch", "combine", "ll_dispatch"]
            assert ll_combine.kernel in ("ll_combine", "ll_combine_large")
            assert (route.num_tokens, route.topk_idx, dispatch.x, dispatch.capacity) == (10, idx.ptr, x.ptr, 8)
            assert (combine.y, combine.num_tokens, ll_dispatch.x, ll_combine.y) == (y.ptr, 10, x.ptr, rows.ptr)
            return sent, low, rows

        caller = Caller((SEED, "fake GPU"), lambda: _device_calls(fake, buffer, (x, idx, weights), valid(), foreign))
        while caller.report.done < number:
            caller.make(20)
            assert fake.pop_launches() == [], "a call that raised has launched a kernel"
        valid()


def arrays_of(back: dict[str, Any], wrong: Callable[..., Any]) -> dict[str, Any]:
    return {name: wrong for name in back if name != "handle"}


# --- the wrappers ------------------------------------------------------------------------------------------------------------------


def _wrong_tensor(r: random.Random, good: Any) -> Any:
    import torch

    shape = list(good.shape)
    choice = r.randrange(5)
    if choice == 0:
        shape[-1] = r.choice([shape[-1] + 1, 0])
        return torch.zeros(shape, dtype=good.dtype)
    if choice == 1:
        return r.choice([good[..., None], good.to_sparse(), good.to(torch.complex64), good.to("meta")])
    if choice == 2:
        return torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=good.dtype)[..., ::2]
    return wrong_array(r, np.zeros(shape, np.float32))


def _wrong_jax_array(r: random.Random, good: Any) -> Any:
    import jax.numpy as jnp

    wrong = wrong_array(r, np.zeros(good.shape, np.float32))
    if isinstance(wrong, (list, tuple, np.ndarray, float, np.generic)) and not isinstance(wrong, np.ma.MaskedArray):
        return jnp.zeros((*good.shape, 1), good.dtype)  # JAX makes arrays of these, which may be valid
    return wrong


def _torch_calls(buffer: Buffer, tensors: dict[str, Any]) -> list[Call]:
    import torch

    from deepep_rt import torch as ep

    x, idx, _ = tensors.values()
    sent, rows = ep.dispatch(buffer, x, idx), ep.dispatch(buffer, **tensors, layout="expert")
    low = ep.low_latency_dispatch(buffer, **tensors, use_fp8=False)
    y = torch.ones(low.recv_x.shape, dtype=torch.bfloat16)
    wrong = {**dict.fromkeys(tensors, _wrong_tensor), "buffer": "any"}
    given = {"buffer": buffer, **tensors}
    options = {"num_worst_tokens": "number", "expert_alignment": "number", "fp8": "flag", "layout": "word", "reduce": "word"}
    forms = {"fp8_grad": "flag", "reduce": "word", "compress": "word"}
    back = {"buffer": buffer, "x": sent.recv_x, "handle": sent.handle, "bias": x}
    weighted = {"buffer": buffer, "x": rows.recv_x, "handle": rows.handle, "topk_weights": rows.recv_topk_weights}
    handles = {"handle": lambda r, _: r.choice([low.handle, sent, 7, None, "h"])}
    flags = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), "flag")
    low_handles = {"handle": lambda r, _: r.choice([low, sent.handle, 7, None, "h"])}
    return [
        Call("torch.dispatch", ep.dispatch, given, {**wrong, **options, "handle": "handle"}),
        Call("torch.dispatch, expert", ep.dispatch, {**given, "layout": "expert"}, {**wrong, **options, "handle": "handle"}),
        Call("torch.dispatch, FP8", ep.dispatch, {**given, "fp8": True}, {**wrong, **options, "handle": "handle"}),
        Call("torch.combine", ep.combine, back, {"buffer": "any", "x": _wrong_tensor, "bias": _wrong_tensor, **forms, **handles}),
        Call("torch.combine, expert", ep.combine, weighted,
             {"buffer": "any", "x": _wrong_tensor, "topk_weights": _wrong_tensor, **forms, **handles}),
        Call("torch.low_latency_dispatch", ep.low_latency_dispatch, given, {**wrong, **flags}),
        Call("torch.low_latency_combine", ep.low_latency_combine, {**given, "x": y, "handle": low.handle},
             {**wrong, "allow_multiple_reduction": "flag", "compress": "word", **low_handles}),
    ]  # fmt: skip


def _jax_calls(buffer: Buffer, arrays: dict[str, Any]) -> list[Call]:
    import jax.numpy as jnp

    from deepep_rt import jax as ep

    sent, rows = ep.dispatch(buffer, **arrays), ep.dispatch(buffer, **arrays, layout="expert")
    low = ep.low_latency_dispatch(buffer, **arrays, use_fp8=False)
    wrong: dict[str, Any] = {**dict.fromkeys(arrays, _wrong_jax_array), "buffer": "any", "after": "any"}
    given = {"buffer": buffer, **arrays}
    options = {"num_worst_tokens": "number", "expert_alignment": "number", "layout": "word", "reduce": "word"}
    forms = {"reduce": "word", "compress": "word"}
    back = {"buffer": buffer, "x": sent.recv_x, "handle": sent.handle}
    weighted = {"buffer": buffer, "x": rows.recv_x, "handle": rows.handle, "topk_weights": rows.recv_topk_weights}
    handles = {"handle": lambda r, _: r.choice([low.handle, sent, 7, None, "h"])}
    flags = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), "flag")
    low_handles = {"handle": lambda r, _: r.choice([low, sent.handle, 7, None, "h"])}
    y = {"x": jnp.ones(low.recv_x.shape, jnp.bfloat16), "handle": low.handle}
    return [
        Call("jax.dispatch", ep.dispatch, given, {**wrong, **options}),
        Call("jax.dispatch, expert", ep.dispatch, {**given, "layout": "expert"}, {**wrong, **options}),
        Call("jax.combine", ep.combine, back, {"buffer": "any", "x": _wrong_jax_array, "after": "any", **forms, **handles}),
        Call("jax.combine, expert", ep.combine, weighted,
             {"buffer": "any", "x": _wrong_jax_array, "topk_weights": _wrong_jax_array, "after": "any", **forms, **handles}),
        Call("jax.low_latency_dispatch", ep.low_latency_dispatch, given, {**wrong, **flags}),
        Call("jax.low_latency_combine", ep.low_latency_combine, {**given, **y},
             {**wrong, "allow_multiple_reduction": "flag", "compress": "word", **low_handles}),
    ]  # fmt: skip


def _wrong_counts(r: random.Random, good: Any) -> Any:
    return r.choice([good.float(), good[:, None], good.bool(), good.to("meta"), good.to_sparse(), good.tolist(), 8, None])


def _wrong_size(r: random.Random, _: Any) -> Any:
    return r.choice(["x", 3, [-1], [2.5], object(), [[1]], 1.5])


def _v1_calls(comm: Any, v1: Any, x: Any, layout: dict[str, Any], weights: Any) -> list[Call]:
    """Calls of DeepEP's interface."""
    import torch

    from deepep_rt import compat

    recv, *_, handle, _ = v1.dispatch(x, **layout)
    options = {"previous_event": "any", "async_finish": "flag", "config": "any"}
    low: dict[str, Any] = dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0", "async_finish", "return_recv_hook"), "flag")
    low |= dict.fromkeys(("num_max_dispatch_tokens_per_rank", "num_experts"), "number")
    low_sent = v1.low_latency_dispatch(x, layout["topk_idx"], 8, 8, use_fp8=False)
    low_back = {"x": torch.ones(low_sent[0].shape, dtype=x.dtype), "topk_idx": layout["topk_idx"], "topk_weights": weights}
    sizes_error = EPInputError, EPConfigError  # compat makes a Buffer for the sizes of a call
    return [
        Call("compat.dispatch", v1.dispatch, {"x": x, **layout},
             {"x": _wrong_tensor, "num_tokens_per_expert": _wrong_counts, "is_token_in_rank": "any", "expert_alignment": "number",
              "num_worst_tokens": "number", **options}, sizes_error),
        Call("compat.get_dispatch_layout", v1.get_dispatch_layout, {"topk_idx": layout["topk_idx"], "num_experts": 8},
             {"topk_idx": "any", "num_experts": "number", "previous_event": "any", "async_finish": "flag"}),
        Call("compat.combine", v1.combine, {"x": recv, "handle": handle}, {"x": _wrong_tensor, "handle": "handle", **options}),
        Call("compat.low_latency_dispatch", v1.low_latency_dispatch,
             {"x": x, "topk_idx": layout["topk_idx"], "num_max_dispatch_tokens_per_rank": 8, "num_experts": 8},
             {"x": "any", "topk_idx": "any", **low}, sizes_error),
        Call("compat.low_latency_combine", v1.low_latency_combine, {**low_back, "handle": low_sent[2]},
             {**dict.fromkeys(low_back, _wrong_tensor), "handle": "handle", "out": "any", "use_logfmt": "flag", "zero_copy": "flag",
              "async_finish": "flag", "return_recv_hook": "flag"}),
        Call("compat.get_local_buffer_tensor", v1.get_local_buffer_tensor, {"dtype": torch.int8, "use_rdma_buffer": True},
             {"dtype": "any", "size": _wrong_size, "use_rdma_buffer": "flag"}),
        Call("compat.Buffer", lambda **settings: compat.Buffer(comm, **settings).destroy(), {"num_nvl_bytes": 0},
             {"num_nvl_bytes": "bytes", "num_rdma_bytes": "bytes", "low_latency_mode": "flag"}, (EPConfigError,)),
        Call("compat.Config", compat.Config, {}, {"num_sms": "number", "num_max_nvl_chunked_recv_tokens": "bytes"}, (EPConfigError,)),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # JAX and PyTorch warn about some arguments
@in_both_tiers
def test_wrappers(number: int) -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    comm = pytest.importorskip("mpi4py.MPI").COMM_SELF
    from deepep_rt import compat
    from deepep_rt import jax as ep_jax
    from deepep_rt import torch as ep_torch

    sizes = dict(num_max_tokens_per_rank=8, hidden=256, num_topk=2, num_experts=8)
    x, idx, weights = torch.ones(5, 256).bfloat16(), torch.arange(10).reshape(5, 2) % 8, torch.ones(5, 2)
    tensors = {"x": x, "topk_idx": idx, "topk_weights": weights}
    arrays = {"x": jnp.ones((5, 256), jnp.bfloat16), "topk_idx": jnp.asarray(idx.numpy()), "topk_weights": jnp.ones((5, 2))}
    v1 = compat.Buffer(comm, num_nvl_bytes=1 << 20, low_latency_mode=True)
    per_rank, _, per_expert, is_in_rank, _ = v1.get_dispatch_layout(idx, 8)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=is_in_rank, num_tokens_per_expert=per_expert, topk_idx=idx)
    destroyed = Buffer(comm, backend="host", **sizes)
    destroyed.destroy()
    with Buffer(comm, backend="host", low_latency=True, **sizes) as buffer:
        calls = [*_torch_calls(buffer, tensors), *_jax_calls(buffer, arrays), *_v1_calls(comm, v1, x, layout, weights)]
        calls.append(
            Call(
                "destroyed", destroyed.dispatch, {"x": x, "topk_idx": idx}, {"x": _wrong_tensor}, (EPDestroyedError, EPInputError)
            )
        )
        caller = Caller((SEED, "wrappers"), lambda: calls, (EPUnavailableError,))
        while caller.report.done < number // 4:
            caller.make(20)
            assert torch.equal(ep_torch.dispatch(buffer, **tensors).recv_x, x)
            sent = v1.dispatch(x, **layout)
            assert torch.equal(v1.combine(sent[0], sent[-2])[0], x)
        assert (ep_jax.dispatch(buffer, **arrays).recv_x[:5] == arrays["x"]).all()
    v1.destroy()


def test_same_seed_makes_same_calls() -> None:
    """A failure can be repeated. Wrong values are never valid."""
    made = []
    for _ in range(2):
        r = random.Random("7")
        made.append([repr(type(WRONG[kind](r))) for kind in WRONG for _ in range(50)])
    assert made[0] == made[1]
    r = random.Random("8")
    assert not any(type(WRONG["flag"](r)) is bool for _ in range(1000))
    assert EPInputError in Call("", print, {}, {}).errors
