"""Shapes of dispatch and combine, and `Buffer.autotune`, with the real kernels on the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from deepep_rt.backends.cuda import autotune
from deepep_rt.cuda import driver
from deepep_rt.kernels.tuning import shapes_to_try
from deepep_rt.tuned import CALLS
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import assert_same, inputs_of, throughput_rounds

# Rows of 1 KB: 16 of them make a usual copy, and 32 a larger one.
SIZES = dict(num_max_tokens_per_rank=48, hidden=512, num_topk=2, num_experts=6, num_sms=2)


@pytest.mark.parametrize(
    "sizes", [pytest.param(dict(hidden=512), marks=pytest.mark.full), dict(hidden=64, ranks_per_node=2, num_max_recv_tokens=192)]
)
def test_autotune(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its calls end, and leave results of the program and later calls as they are, on one node and on two.

    On one node, ranks get different shapes then, some with larger copies. The bits stay the same.
    """
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune.build, "build", lambda *_: None)
    monkeypatch.setattr(autotune, "shapes_to_try", lambda *given: shapes_to_try(*given)[2:3])
    monkeypatch.setattr(autotune, "NUM_SMS", (1, 3))
    monkeypatch.setattr(autotune, "_MOST_ROUNDS", 2)
    monkeypatch.setattr(autotune, "_MOST_CALLS", 3)
    with Machine(4, 7) as machine:
        buffers = machine.buffers(**{**SIZES, "num_experts": 8, "timeout_s": 10.0, **sizes})
        fake = machine._driver

        def wait_value(stream: int, address: int, value: int) -> None:
            word = ctypes.c_uint32.from_address(address)
            fake.stream(stream).append(lambda: word.value == value)

        def elapsed_ms(begin: Any, end: Any) -> float:
            assert begin.handle != end.handle
            end.synchronize()
            return 0.1

        monkeypatch.setattr(driver, "wait_value", wait_value)
        monkeypatch.setattr(driver, "elapsed_ms", elapsed_ms)
        inputs = inputs_of(buffers[0].config, 3)

        def program(rank: int) -> Any:
            buffer, mine = buffers[rank], inputs[rank]
            x, idx = machine.put(rank, mine.x), machine.put(rank, mine.topk_idx)
            sent = buffer.dispatch(x, idx)
            buffer.synchronize()
            before = sent.recv_x.copy()
            result = buffer.autotune(num_tokens=20)
            assert_same(sent.recv_x, before)
            again = buffer.dispatch(x, idx)
            buffer.synchronize()
            assert_same(again.recv_x, before)
            return result

        results = machine.each_rank(program)
        assert {result.chosen for result in results} == {results[0].chosen}
        assert len(results[0].rows) == (4 if "ranks_per_node" in sizes else 8)
        if "ranks_per_node" not in sizes:
            tried = {call: shapes_to_try(call, buffers[0].config, True) for call in CALLS}
            shapes = [next(shape for shape in tried["dispatch"] if shape.copy_bytes == number) for number in (16384, 32768)]
            for buffer, shape in zip(buffers, shapes, strict=False):  # and not on all ranks
                buffer._backend.runtime.use_shapes({"dispatch": shape, "combine": tried["combine"][-1]})
        throughput_rounds(machine, buffers, 7, 2)
