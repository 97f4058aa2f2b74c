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

from deepep_rt import Buffer, EPConfigError, EPInputError

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


@in_both_tiers
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_wrappers(num_ranks: int, number: int) -> None:
    pytest.importorskip("torch"), pytest.importorskip("jax")
    output = launch(num_ranks, "random_bad_wrapper_calls", str(number // 4), str(SECONDS), str(SEED))
    assert ": passed" in output, output
    assert int(re.findall(r"(\d+) bad calls in", output)[0]) >= number // 4, output


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
