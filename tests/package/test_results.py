"""Results and handles belong to a Buffer of their process: what becomes of those who want to send or copy them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from deepep_rt import Buffer

MPI = pytest.importorskip("mpi4py.MPI", reason="the host backend needs MPI")
pytest.importorskip("ml_dtypes", reason="low-latency calls take bfloat16")


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Any]]:
    """Whatever calls return, by the name of its class."""
    x, idx, weights = np.zeros((4, 128), "bfloat16"), np.zeros((4, 1), np.int64), np.ones((4, 1), np.float32)
    sizes = dict(num_max_tokens_per_rank=4, hidden=128, num_topk=1, num_experts=2)
    with Buffer(MPI.COMM_SELF, **sizes, low_latency=True, backend="host") as buffer:
        sent = buffer.dispatch(x, idx)
        soon = buffer.low_latency_dispatch(x, idx, use_fp8=False)
        back = buffer.low_latency_combine(soon.recv_x, idx, weights, soon.handle)
        results = [sent, buffer.combine(sent.recv_x, sent.handle), soon, back]
        yield {type(thing).__name__: thing for thing in (*results, sent.handle, soon.handle)}


HANDLES = ["DispatchHandle", "LowLatencyHandle"]
RESULTS = ["DispatchResult", "CombineResult", "LowLatencyDispatchResult", "LowLatencyCombineResult"]


@pytest.mark.parametrize("name", HANDLES)
def test_handles_are_not_sent(made: dict[str, Any], name: str) -> None:
    """Another process's Buffer might take one for its own: both count their Buffers from 1."""
    with pytest.raises(TypeError, match=f"a {name} cannot be pickled.*topk_idx"):
        pickle.dumps(made[name])


@pytest.mark.parametrize("name", HANDLES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_handle_is_the_handle(made: dict[str, Any], name: str, copied: Callable[[Any], Any]) -> None:
    """It names the Buffer's memory, which there is once."""
    assert copied({"routing": made[name]})["routing"] is made[name]


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_results_are_not_copied_but_their_arrays(made: dict[str, Any], name: str, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"a {name} cannot be pickled or copied: .*take its arrays"):
        copied(made[name])
