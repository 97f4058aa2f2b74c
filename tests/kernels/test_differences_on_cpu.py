"""Ranks whose calls differ, on the CPU: no rank sends rows, all ranks name the argument and both values, and later calls match again."""

from __future__ import annotations

import re

import ml_dtypes  # noqa: F401  (dtypes for NumPy)
import numpy as np
import oracle
import pytest

from deepep_rt import EPInputError, EPTimeoutError
from deepep_rt.kernels import layout
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import LOW_LATENCY, THROUGHPUT, assert_same, inputs_of, throughput_rounds

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

NODES = pytest.mark.parametrize("nodes", [{}, dict(ranks_per_node=1)], ids=["one-node", "two-nodes"])


def raises_on_all(buffers, name, first, second):
    text = rf"the ranks disagree on the {re.escape(name)}.*rank 0: {first}, rank 1: {second}"
    for buffer in buffers:
        with pytest.raises(EPInputError, match=text):
            buffer.check()


@NODES
def test_dispatches_of_other_sizes_and_options(nodes):
    """Rows of a wide rank would be written past the result of a narrow rank."""
    with Machine(2, 1, weak_memory=True, transport="mpi") as machine:
        buffers = machine.buffers(**{**THROUGHPUT, "num_experts": 4, "hidden": 128}, **nodes)
        idx = np.tile(np.array([[0, 3]], np.int64), (9, 1))

        def x(width, dtype=np.uint8):
            return np.ones((9, width), dtype)

        def dispatch(rank, x, **how):
            how = {name: machine.put(rank, value) if isinstance(value, np.ndarray) else value for name, value in how.items()}
            return buffers[rank].dispatch(machine.put(rank, x), machine.put(rank, idx), num_worst_tokens=40, **how)

        known = [dispatch(rank, x(128)).handle for rank in range(2)]
        machine.run()
        for name, calls, values in (
            ("bytes of a row of x ", [dict(x=x(128)), dict(x=x(64))], (128, 64)),
            ("bytes of a row of x_scales", [dict(x=x(128), x_scales=x(n)) for n in (4, 8)], (4, 8)),
            ("expert_alignment", [dict(x=x(128), expert_alignment=n) for n in (1, 1 << 20)], (1, 1 << 20)),
            ("zero_padding", [dict(x=x(128), layout="expert", zero_padding=flag) for flag in (False, True)], (False, True)),
            (
                "scales_layout",
                [dict(x=x(128), x_scales=x(1, np.float32), layout="expert", scales_layout=name) for name in ("row", "column")],
                ("row", "column"),
            ),
        ):
            sent = [dispatch(rank, **how) for rank, how in enumerate(calls)]
            machine.run()
            raises_on_all(buffers, name, *values)
            for one, how in zip(sent, calls, strict=True):
                assert "layout" in how or (one.recv_x == 255).all(), "no rows, but NaN in all types"
        steps = [buffers[rank].prepare_throughput(machine.put(rank, x(128 >> rank)), known[rank]) for rank in range(2)]
        for step in steps:
            step.dispatch()
        machine.run()
        raises_on_all(buffers, "bytes of a row of x ", 128, 64)
        throughput_rounds(machine, buffers, 1, 1)


def test_low_latency_dispatches_with_other_scales():
    with Machine(2, 1) as machine:
        buffers = machine.buffers(**LOW_LATENCY)
        inputs = inputs_of(buffers[0].config, 3)
        for rank, buffer in enumerate(buffers):
            x, idx = machine.put(rank, inputs[rank].x), machine.put(rank, inputs[rank].topk_idx)
            buffer.low_latency_dispatch(x, idx, round_scale=bool(rank))
        machine.run()
        raises_on_all(buffers, "round_scale", False, "True.*cannot be used any more")


class Choices:
    """A dispatch by expert, and its combines with `reduce="topk"`. Each takes several launches."""

    def __init__(self, machine, seed, **sizes):
        self.machine = machine
        self.buffers = machine.buffers(num_max_tokens_per_rank=40, hidden=64, num_topk=5, num_experts=8, num_sms=2, **sizes)
        self.config = self.buffers[0].config
        self.inputs = inputs_of(self.config, seed)
        self.sent = machine.each_rank(self._dispatch)
        self.y = [np.array(one.recv_x) for one in self.sent]
        received = [oracle.expected_expert_rows(rank, self.inputs, self.config.num_experts) for rank in range(2)]
        self.wanted = [oracle.expected_choice_sums(rank, self.inputs, self.y, received, weighted=False) for rank in range(2)]

    def _dispatch(self, rank):
        mine, put = self.inputs[rank], self.machine.put
        return self.buffers[rank].dispatch(put(rank, mine.x), put(rank, mine.topk_idx), layout="expert")

    def combine(self, rank):
        return self.buffers[rank].combine(self.machine.put(rank, self.y[rank]), self.sent[rank].handle, reduce="topk")

    def check_calls(self):
        """Make a call of all ranks."""
        back = self.machine.each_rank(self.combine)
        for one, wanted in zip(back, self.wanted, strict=True):
            assert_same(one.x, wanted)

    def launch_instead(self, monkeypatch, number, act):
        """Call `act` instead of launch `number` of a combine on rank 0, from 0."""
        name = "combine_choices_nodes" if self.config.has_network else "combine_choices"
        launcher = self.buffers[0]._backend.runtime.launcher(name, "bfloat16")
        launch, count = launcher.launch, iter(range(100))
        monkeypatch.setattr(launcher, "launch", lambda *given: act() if next(count) == number else launch(*given))


@pytest.fixture
def small_windows(monkeypatch):
    monkeypatch.setattr(layout, "_MIN_CHOICE_WINDOW", 8)


def interrupt():
    raise KeyboardInterrupt


@NODES
def test_an_interruption_between_launches_of_a_combine(nodes, small_windows, monkeypatch):
    """A rank that repeats the call would send rows of other tokens than the others expect."""
    with Machine(2, 2) as machine:
        made = Choices(machine, 4, **nodes)
        made.check_calls()
        machine.launched.clear()
        made.launch_instead(monkeypatch, 1, interrupt)
        errors = {}

        def program(rank):
            for _ in range(2):
                try:
                    made.combine(rank)
                    made.buffers[rank].synchronize()
                except (KeyboardInterrupt, EPTimeoutError) as error:
                    errors[rank, type(error)] = str(error)

        machine.each_rank(program)
        assert set(errors) == {(0, KeyboardInterrupt), (0, EPTimeoutError), (1, EPTimeoutError)}
        assert "interrupted between its" in errors[0, EPTimeoutError]
        assert "rank 1 waited 1 s for rank 0" in errors[1, EPTimeoutError]


@NODES
def test_ranks_that_are_one_launch_apart(nodes, small_windows, monkeypatch):
    """They say so, and their later calls match again."""
    with Machine(2, 2) as machine:
        made = Choices(machine, 4, **nodes)
        num_launches = -(-40 // made.buffers[0]._backend.runtime.layout.choice_window)
        assert num_launches > 1
        made.launch_instead(monkeypatch, num_launches - 1, lambda: None)
        back = [made.combine(rank) for rank in (0, 1, 0)]  # the second call of rank 0 meets the last launch of rank 1
        machine.run()
        raises_on_all(made.buffers, "step (a rank did not end its last call)", 1, num_launches)
        assert all(np.isnan(one.x.astype(np.float32)).all() for one in back[1:])
        made.check_calls()
