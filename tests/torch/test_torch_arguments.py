"""Wrong arguments of deepep_rt.torch: the same errors as those of a Buffer's calls, in plain and in compiled functions."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deepep_rt import Buffer, EPInputError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")

TOKENS, HIDDEN, TOPK = 4, 512, 2
FLAGS = [None, "yes", 2, 1.5, []]


@pytest.fixture(scope="module")
def held() -> Iterator[SimpleNamespace]:
    """A Buffer of one rank with valid arguments and handles."""
    import torch
    from mpi4py import MPI

    from deepep_rt import torch as ep

    sizes = dict(num_max_tokens_per_rank=8, hidden=HIDDEN, num_topk=TOPK, num_experts=2, dtype="bfloat16")
    with Buffer(MPI.COMM_SELF, low_latency=True, backend="host", timeout_s=60, **sizes) as buffer:
        x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
        idx = torch.arange(TOPK).expand(TOKENS, TOPK).contiguous()
        weights, y = torch.ones(TOKENS, TOPK), torch.ones(2, 8, HIDDEN, dtype=torch.bfloat16)
        sent = ep.dispatch(buffer, x, idx, weights)
        low = ep.low_latency_dispatch(buffer, x, idx, weights, use_fp8=False)
        yield SimpleNamespace(buffer=buffer, x=x, idx=idx, weights=weights, y=y, sent=sent, low=low, ep=ep)


def _dispatch(held: Any, x: Any = None, topk_idx: Any = None, topk_weights: Any = None, **more: Any) -> Any:
    given = (held.x if x is None else x, held.idx if topk_idx is None else topk_idx)
    return held.ep.dispatch(held.buffer, *given, held.weights if topk_weights is None else topk_weights, **more)


def _combine(held: Any, x: Any = None, **more: Any) -> Any:
    return held.ep.combine(held.buffer, held.sent.recv_x if x is None else x, held.sent.handle, **more)


def _round_trip(held: Any, **more: Any) -> Any:
    """Combine in the graph of the dispatch, because compiled functions refuse handles from outside."""
    sent = held.ep.dispatch(held.buffer, held.x, held.idx, held.weights)
    return held.ep.combine(held.buffer, sent.recv_x, sent.handle, **more)


def _low_latency_dispatch(held: Any, x: Any = None, topk_idx: Any = None, topk_weights: Any = None, **more: Any) -> Any:
    given = (held.x if x is None else x, held.idx if topk_idx is None else topk_idx)
    return held.ep.low_latency_dispatch(held.buffer, *given, held.weights if topk_weights is None else topk_weights, **more)


def _low_latency_combine(held: Any, x: Any = None, topk_idx: Any = None, topk_weights: Any = None, **more: Any) -> Any:
    given = (held.y if x is None else x, held.idx if topk_idx is None else topk_idx)
    weights = held.weights if topk_weights is None else topk_weights
    return held.ep.low_latency_combine(held.buffer, *given, weights, held.low.handle, **more)


WRONG_OPTIONS = [
    *((_low_latency_dispatch, {name: value}) for name in ("use_fp8", "round_scale", "use_ue8m0") for value in FLAGS),
    (_low_latency_dispatch, {"use_fp8": False, "use_ue8m0": True}),
    *((_low_latency_combine, {"allow_multiple_reduction": value}) for value in FLAGS),
    *((_low_latency_combine, {"compress": value}) for value in (b"fp8", "\ud800", 3, "zip", [])),
    (_low_latency_combine, {"compress": "fp8", "allow_multiple_reduction": False}),
    *((_dispatch, {"fp8": value}) for value in FLAGS),
    *((_dispatch, {"num_worst_tokens": value}) for value in (-1, 2.5, "8", True, 1 << 40)),
    *((_dispatch, {"expert_alignment": value}) for value in (0, -1, 2.5, "8", None, 1 << 40)),
    *((_dispatch, {"layout": value}) for value in ("", "x", 3, b"expert")),
    *((_dispatch, {"reduce": value}) for value in (None, "x", 3, "topk")),
    *((_round_trip, {"fp8_grad": value}) for value in FLAGS),
    *((_round_trip, {"reduce": value}) for value in (None, "x", 3, b"rank", "topk")),
    *((_round_trip, {"compress": value}) for value in (b"fp8", "\ud800", 3, "zip", [])),
    *((_round_trip, {"bias": value}) for value in (3, "x", [None])),
]


def _named(value: Any) -> str:
    return value.__name__ if callable(value) else ascii(value)


@pytest.mark.parametrize(("call", "wrong"), WRONG_OPTIONS, ids=_named)
def test_wrong_options(held: Any, call: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(EPInputError, match="|".join(wrong)):
        call(held, **wrong)


@pytest.mark.full
@pytest.mark.parametrize("call", list(dict.fromkeys(call for call, _ in WRONG_OPTIONS)), ids=_named)
def test_wrong_options_of_compiled_functions(held: Any, call: Any) -> None:
    """Tracing raises, before PyTorch's operators convert what they are given."""
    import torch

    for wrong in (wrong for of, wrong in WRONG_OPTIONS if of is call):
        torch._dynamo.reset()
        with pytest.raises(EPInputError, match="|".join(wrong)):
            torch.compile(call, backend="eager")(held, **wrong)


CALLS = [
    (_dispatch, ("x", "topk_idx", "topk_weights")),
    (_combine, ("x",)),
    (_low_latency_dispatch, ("x", "topk_idx", "topk_weights")),
    (_low_latency_combine, ("x", "topk_idx", "topk_weights")),
]


def _good(held: Any, call: Any, name: str) -> Any:
    return {"topk_idx": held.idx, "topk_weights": held.weights}.get(name, held.y if call is _low_latency_combine else held.x)


plain_and_compiled = pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.full)])


@pytest.mark.filterwarnings("ignore")  # PyTorch warns about sparse tensors
@plain_and_compiled
@pytest.mark.parametrize(("call", "name"), [(call, name) for call, names in CALLS for name in names], ids=_named)
def test_tensors_without_values_make_no_call(held: Any, call: Any, name: str, is_compiled: bool) -> None:
    """PyTorch would make results without data, and no call, and the other ranks would wait."""
    import torch

    good = _good(held, call, name)
    for wrong, words in (
        (good.to("meta"), "meta tensor; expected a tensor with values"),
        (good.to_sparse(), "expected a dense tensor"),
    ):
        torch._dynamo.reset()
        run = torch.compile(call, backend="eager") if is_compiled else call
        with pytest.raises(EPInputError, match=f"{name} is a .*{words}"):
            run(held, **{name: wrong})


@plain_and_compiled
def test_wrong_shapes_and_types(held: Any, is_compiled: bool) -> None:
    import torch

    for call, names in CALLS:
        if is_compiled and call is _combine:  # compiled functions refuse handles from outside
            continue
        for name in names:
            good = _good(held, call, name)
            shown = "y" if (call, name) == (_low_latency_combine, "x") else name
            for wrong in (good[..., :-1].contiguous(), good[None], good[0], good[0].sum(), good.to(torch.complex64)):
                torch._dynamo.reset()
                run = torch.compile(call, backend="eager") if is_compiled else call
                with pytest.raises(EPInputError, match=f"^({shown}|x|y)[.:]"):
                    run(held, **{name: wrong})


@pytest.mark.parametrize("shape", [(4, HIDDEN - 1), (4, 500), (0, 500), (4, 640), (HIDDEN,), (1, 4, HIDDEN), ()])
def test_rows_that_cannot_become_fp8(held: Any, shape: tuple[int, ...]) -> None:
    """The conversion comes before the Buffer's checks."""
    import torch

    with pytest.raises(EPInputError, match=r"x\.shape="):
        held.ep.dispatch(held.buffer, torch.ones(shape).bfloat16(), held.idx, fp8=True)
