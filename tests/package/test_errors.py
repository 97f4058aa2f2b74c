"""`errors`: exceptions keep all attributes when they are pickled or copied."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from deepep_rt import EPPeerError, EPTimeoutError, errors

TIMED_OUT: dict[str, Any] = dict(rank=0, peer=3, phase="rows of a dispatch", expected=7, seen=6, call_idx=9)
KINDS = [kind for name, kind in vars(errors).items() if name.startswith("EP")]


def _pickled(error: Exception) -> Any:
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("transfer", [_pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: type[Exception], transfer: Callable[[Exception], Any]) -> None:
    error = kind("a text", **TIMED_OUT) if issubclass(kind, EPTimeoutError) else kind("a text")
    if kind is EPPeerError:
        error.reason = "KeyError: mine"
    if issubclass(kind, errors.EPError):
        assert not transfer(error).call_made
        error.call_made = True
    error.note = "set later"  # type: ignore[attr-defined]
    copied = transfer(error)
    assert type(copied) is kind
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))


def _time_out() -> None:
    raise EPTimeoutError("rank 0 waited", **TIMED_OUT)


def test_a_process_pool_raises_the_same_error() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool, pytest.raises(EPTimeoutError, match="rank 0 waited") as caught:
        pool.submit(_time_out).result(timeout=60)
    assert (caught.value.peer, caught.value.phase, caught.value.call_idx) == (3, "rows of a dispatch", 9)
