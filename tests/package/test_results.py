"""Results and handles belong to one process: pickling them raises, and a copy of a handle is the handle."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from deepep_rt import Buffer

MPI = pytest.importorskip("mpi4py.MPI", reason="the host backend needs mpi4py and MPI")
pytest.importorskip("ml_dtypes", reason="low-latency calls take bfloat16")


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Any]]:
    """Map the class of each result and handle to an object of it."""
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
def test_pickling_a_handle_raises(made: dict[str, Any], name: str) -> None:
    """Every process numbers its Buffers from 1, so the Buffer of another process could accept the handle."""
    with pytest.raises(TypeError, match=f"a {name} cannot be pickled.*topk_idx"):
        pickle.dumps(made[name])


@pytest.mark.parametrize("name", HANDLES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_handle_is_the_handle(made: dict[str, Any], name: str, copied: Callable[[Any], Any]) -> None:
    """A handle refers to memory of its Buffer, and that memory is not copied."""
    assert copied({"routing": made[name]})["routing"] is made[name]


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_or_copying_a_result_raises(made: dict[str, Any], name: str, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"a {name} cannot be pickled or copied: .*take its arrays"):
        copied(made[name])
