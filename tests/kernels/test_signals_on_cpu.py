"""Dispatches with `signals=True` with the kernels on the CPU: a consumer reads each tile of rows as soon as its word says so."""

import numpy as np
import pytest

from tests.kernels_on_cpu.device_arrays import array_at
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import THROUGHPUT, assert_same, inputs_of, seeds

SIZES = {**THROUGHPUT, "num_max_tokens_per_rank": 90, "num_sms": 3}
OPTIONS = dict(layout="expert", expert_alignment=64, zero_padding=True)


class Consumer:
    """Work on the caller's stream that copies the rows of each tile once it is ready."""

    def __init__(self, machine, rank, sent):
        views = sent.views
        self._rows = array_at(views["x"].ptr, (sent.handle.num_recv_rows, views["x"].row_bytes), "uint8")
        self._ready = array_at(views["tile_ready"].ptr, views["tile_ready"].shape, "int32")
        self._tile_rows, self._signal, self._owner = sent.handle.tile_rows, sent.signal, sent
        self.seen = np.full(self._rows.shape, 77, np.uint8)
        self.order = []
        self._left = set(range(len(self._ready)))
        machine.queue(rank, self._read)

    def _read(self):
        for tile in sorted(self._left):
            assert self._ready[tile] in (0, self._signal)
            if self._ready[tile]:
                rows = slice(tile * self._tile_rows, (tile + 1) * self._tile_rows)
                self.seen[rows] = self._rows[rows]
                self.order.append(tile)
        self._left -= set(self.order)
        return not self._left


def signal_round(machine, buffers, seed, **options):
    """Compare what consumers see with an ordinary dispatch, for a new routing and along the routing of its handle."""
    inputs = inputs_of(buffers[0].config, seed)

    def run(rank):
        given, buffer, mine = {**OPTIONS, **options}, buffers[rank], inputs[rank]
        x, idx, weights = (machine.put(rank, values) for values in (mine.x, mine.topk_idx, mine.topk_weights))
        plain = buffer.dispatch(x, idx, weights, **given)
        wanted = {name: view and array_at(view.ptr, view.shape, view.dtype, plain) for name, view in plain.views.items()}
        sent = buffer.dispatch(x, idx, weights, **given, signals=True)
        first = Consumer(machine, rank, sent)
        again = machine.put(rank, mine.x[::-1].copy())
        order = dict(zero_padding=True, signals=True)
        second = Consumer(machine, rank, buffer.dispatch(again, handle=sent.handle, **order))
        third = Consumer(machine, rank, buffer.dispatch(x, handle=plain.handle, **order))
        return plain, wanted, sent, first, second, third, buffer.dispatch(again, handle=plain.handle, zero_padding=True)

    for plain, wanted, sent, first, second, third, repeated in machine.each_rank(run):
        rows = plain.views["x"]
        as_bytes = array_at(rows.ptr, (rows.shape[0], rows.row_bytes), "uint8")
        assert_same(first.seen, as_bytes)
        assert_same(third.seen, as_bytes)
        rows = repeated.views["x"]
        assert_same(second.seen, array_at(rows.ptr, (rows.shape[0], rows.row_bytes), "uint8"))
        for name, view in sent.views.items():
            if name in wanted and name != "x" and view is not None:
                assert_same(array_at(view.ptr, view.shape, view.dtype), wanted[name])


@pytest.mark.parametrize("seed", seeds(6))
def test_tiles(seed):
    arch = ("sm_90", "sm_80")[seed % 3 == 2]
    with Machine(3, seed, arch, weak_memory=seed % 2 == 0) as machine:
        buffers = machine.buffers(**SIZES, statistics=seed == 4)
        for step in range(2):
            signal_round(machine, buffers, 10 * seed + step)
        signal_round(machine, buffers, 10 * seed + 2, num_worst_tokens=(704, 330)[seed % 2], expert_alignment=(64, 128)[seed % 2])
