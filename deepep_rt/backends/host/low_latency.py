"""The low-latency calls of the host backend, put together from its dispatch and combine.

Rows travel as in dispatch, once to each rank, and are then laid out expert by expert. On the way back an expert rank adds its rows of a
token up and combine does the rest; or every row goes home by itself. Everything travels in the call; a hook only shows what came.

Masked ranks need little here: no rows come from them, and `HostBackend` leaves them out of what is sent and added up.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ...arrays import number_formats as fp8
from ...arrays.dtypes import FP8_GROUP
from ...arrays.host_memory import Result, from_float32, rows_of, to_float32
from ...arrays.view import Framework, View, host_bytes
from ...comm.communicator import Communicator
from ...config import Config
from ...errors import EPInputError
from ...results import Event, LowLatencyCombineResult, LowLatencyDispatchResult, LowLatencyHandle
from ..calls import Call, CombineInputs, DispatchInputs, LowLatencyCombineInputs, LowLatencyDispatchInputs, LowLatencyMemory
from ..hooks import Hooks, check_hook_called
from .backend import HostBackend, tells_of_memory
from .handle_tables import HostHandleTables
from .routing import ExpertRouting, Routing


class HostLowLatencyBackend(HostBackend):
    """The host backend with the low-latency calls."""

    def __init__(self, comm: Communicator, config: Config, serial: int) -> None:
        super().__init__(comm, config, serial)
        self._combine_memory: Result | None = None
        self.tables = HostHandleTables(self.info)
        self._hooks = Hooks(config.num_slots, self.call_lock)

    def low_latency_combine_view(self, framework: Framework) -> View:
        """The memory of `Buffer.get_low_latency_combine_buffer`, as a View of this framework."""
        if self._combine_memory is None:
            config = self._config
            shape = (config.num_local_experts, config.num_max_recv_tokens, config.hidden)
            self._combine_memory = Result(shape, "bfloat16", fill=0)
        return self._combine_memory.view(framework)

    def set_mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out of low-latency calls, or let it take part again."""
        self._hooks.check_none_open("masking or unmasking a rank")
        if masked:
            self._mail.mask(rank)
        else:
            self._mail.unmask(rank)

    def masked_ranks(self) -> list[int]:
        """The ranks that low-latency calls leave out, ascending."""
        return self._mail.masked

    @tells_of_memory
    def low_latency_dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        self._hooks.dispatch.check_can_start(with_hook)
        config, x, framework = self._config, inputs.x, inputs.x.framework
        scales = None
        if inputs.use_fp8:
            x, scales = _to_fp8(x, inputs)
        start = time.perf_counter_ns()
        with self._part_of("low_latency_dispatch"):
            sources = self._mail.peers
            sent = self.dispatch(DispatchInputs(x, inputs.topk_idx, inputs.topk_weights, scales, None, None, 1), call)
        waited = time.perf_counter_ns() - start

        shape = (config.num_local_experts, config.num_max_recv_tokens)
        made = {
            name: Result((*shape, view.shape[1]), view.dtype, fill=0)
            for name, view in (("x", x), ("scales", scales))
            if view is not None
        }
        num_recv = Result(shape[:1], "int32", fill=0)

        recv_idx, weights = sent.views["topk_idx"], sent.views["topk_weights"]
        assert recv_idx is not None
        routing = ExpertRouting.of(
            sent.handle,
            _values(inputs.topk_idx).astype(np.int64),
            _values(recv_idx),
            None if weights is None else _values(weights),
            None if inputs.topk_weights is None else _values(inputs.topk_weights).copy(),
            config,
        )

        def receive() -> None:
            fits = routing.slot >= 0
            for name, result in made.items():
                view = sent.views[name]
                assert view is not None
                rows = result.rows.reshape(shape[0] * shape[1], view.row_bytes)
                rows[routing.slot[fits]] = rows_of(view)[routing.row[fits]]
            counts = np.minimum(routing.counts, shape[1]).astype(np.int32)
            if not fits.all():
                fullest = int(routing.counts.argmax())
                self._overflow.expert(fullest, int(routing.counts[fullest]), shape[1])
            num_recv.rows.view(np.int32)[:, 0] = counts
            if inputs.recv_stats is not None:
                stats = host_bytes(inputs.recv_stats).view(np.int32)
                stats += counts
            if inputs.wait_stats is not None:
                # Messages come in one exchange, so each source is charged with all of it.
                stats = host_bytes(inputs.wait_stats).view(np.int64)
                stats[sources] += waited

        hook = self._hooks.dispatch.append(receive) if with_hook else None
        if hook is None:
            receive()
        views: dict[str, View | None] = {"scales": None, "num_recv_per_expert": num_recv.view(framework)}
        views.update({name: result.view(framework) for name, result in made.items()})
        kept = dataclasses.replace(routing, hook_state=hook.state if hook else None)
        handle = LowLatencyHandle(x.shape[0], self._serial, kept, weights is not None, framework)
        if inputs.into is not None:
            self._copy_into(inputs.into, views, handle)
        return LowLatencyDispatchResult(handle=handle, event=Event(), hook=hook, make_views=lambda: views)

    def _copy_into(self, into: LowLatencyMemory, views: dict[str, View | None], handle: LowLatencyHandle) -> None:
        for name, out in (("x", into.recv_x), ("scales", into.recv_scales)):
            if out is not None:
                made = views[name]
                assert made is not None
                self.copy(made.ptr, out, None)
        self.tables.save_low_latency(handle, into.tables)

    @tells_of_memory
    def low_latency_combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        routing: ExpertRouting = inputs.handle.routing
        check_hook_called(routing.hook_state)
        left_out = self._left_out(inputs, routing)
        if routing.own_weights is not None and not np.array_equal(
            _values(inputs.topk_weights), routing.own_weights, equal_nan=True
        ):
            raise EPInputError("topk_weights differ from those that low_latency_dispatch was given; pass the same, or none there")
        self._hooks.combine.check_can_start(with_hook)
        total = self._reduce_early(inputs, call, left_out) if inputs.reduce_early else self._reduce_at_home(inputs, left_out)
        out = inputs.out
        if out is None:
            out = Result((inputs.handle.num_tokens, self._config.hidden), "bfloat16", fill=0).view(inputs.y.framework)

        def receive() -> None:
            rows_of(out)[...] = total

        hook = self._hooks.combine.append(receive) if with_hook else None
        if hook is None:
            receive()
        return LowLatencyCombineResult(event=Event(), hook=hook, make_views=lambda: {"x": out})

    def _left_out(self, inputs: LowLatencyCombineInputs, routing: ExpertRouting) -> np.ndarray:
        """Find the choices of the dispatch that combine names no more, `[num_tokens, num_topk]` bool; raise if it names others.

        An expert rank that adds rows up sends one row for all of a token's choices there: they count together, or none does.
        """
        given, sent = _values(inputs.topk_idx), routing.topk_idx
        if given.shape != sent.shape:
            raise EPInputError(f"topk_idx.shape={given.shape}; expected {sent.shape}, as low_latency_dispatch got it")
        home = np.where(sent >= 0, sent // self._config.num_local_experts, -1)
        left_out = (given == -1) & (sent >= 0)
        differs = (given != sent) & ~left_out
        if inputs.reduce_early:
            for rank in set(home[left_out].tolist()) - set(self._mail.masked):  # nothing comes from masked ranks
                here = home == rank
                differs |= left_out & here & (here & ~left_out).any(axis=1, keepdims=True)
        if differs.any():
            token, choice = np.argwhere(differs)[0]
            raise EPInputError(
                f"topk_idx[{token}, {choice}]={given[token, choice]}; expected {sent[token, choice]}, as low_latency_dispatch got it, or "
                f"-1 for all of the token's experts on that rank. Pass the same topk_idx to both calls"
            )
        return left_out

    def _reduce_early(self, inputs: LowLatencyCombineInputs, call: Call, left_out: np.ndarray) -> np.ndarray:
        """Add up the rows of a token that are here, send the sum as bfloat16, and add up the sums at home."""
        routing: ExpertRouting = inputs.handle.routing
        with self._part_of("low_latency_combine"):
            weights = routing.weights
            if weights is None:
                sent = self.dispatch(DispatchInputs(inputs.topk_weights, None, None, None, routing.rows, None, 1), call)
                arrived = sent.views["x"]
                assert arrived is not None
                weights = _values(arrived)
            sums = Result((routing.rows.num_recv_rows, self._config.hidden), "bfloat16")
            fits = routing.slot >= 0
            rows = self._expert_rows(inputs)[routing.slot[fits]]
            _weighted_sum(rows, routing.row[fits], routing.choice[fits], weights, sums.rows)
            given = CombineInputs(sums.view(inputs.y.framework), routing.rows, None, ())
            without = np.zeros((len(left_out), self._num_ranks), bool)
            token, choice = np.nonzero(left_out)
            without[token, routing.topk_idx[token, choice] // self._config.num_local_experts] = True
            total = self._add_up(given, without).views["x"]
            assert total is not None
            return rows_of(total)

    def _reduce_at_home(self, inputs: LowLatencyCombineInputs, left_out: np.ndarray) -> np.ndarray:
        """Send the row of each choice, and add them up at home."""
        routing: ExpertRouting = inputs.handle.routing
        tokens: Routing = routing.rows.routing
        config, y = self._config, self._expert_rows(inputs)
        zero = np.zeros((1, y.shape[1]), np.uint8)
        spans = np.searchsorted(routing.row, [tokens.first_row, tokens.first_row + tokens.num_received])
        slots = [routing.slot[first:end] for first, end in spans.T]  # entries come in the order of their source ranks
        token, choice = np.nonzero(routing.topk_idx >= 0)
        peer = routing.topk_idx[token, choice] // config.num_local_experts
        by_peer = [np.flatnonzero(peer == rank) for rank in range(self._num_ranks)]
        with self._part_of("low_latency_combine with allow_multiple_reduction=False"), self._mail.call():
            notices = self._notices("combine", inputs.y, inputs, tokens.serial)
            sends, expects = [len(part) for part in slots], [len(entries) for entries in by_peer]
            self._note_size(notices, max(sends) * y.shape[1], int(np.argmax(sends)))
            goes, comes = self._agree_on_rows(notices, "kPhaseLlCombineRoom", sends, expects)
            slots = [part if there else part[:0] for part, there in zip(slots, goes, strict=True)]
            outgoing = [np.where(part[:, None] < 0, zero, y[part]) for part in slots]  # a row without room was not computed
            arrived = [
                np.empty((count if there else 0, y.shape[1]), np.uint8) for count, there in zip(expects, comes, strict=True)
            ]
            arrived[self._rank] = outgoing[self._rank]
            lost = self._mail.exchange([[part] for part in outgoing], [[part] for part in arrived], "kPhaseLlCombineRows")

        rows = np.empty((len(token), y.shape[1]), np.uint8)
        came = np.zeros(len(token), bool)
        for rank, (entries, part) in enumerate(zip(by_peer, arrived, strict=True)):
            if comes[rank] and rank not in lost:
                rows[entries] = part
                came[entries] = True
        came &= ~left_out[token, choice]
        total = np.empty((inputs.handle.num_tokens, y.shape[1]), np.uint8)
        _weighted_sum(rows[came], token[came], choice[came], _values(inputs.topk_weights), total)
        return total

    def _expert_rows(self, inputs: LowLatencyCombineInputs) -> np.ndarray:
        """`y` as `[experts * capacity, row_bytes]` uint8."""
        return host_bytes(inputs.y).reshape(inputs.y.shape[0] * inputs.y.shape[1], -1)

    @contextmanager
    def _part_of(self, kind: str) -> Iterator[None]:
        """What dispatch and combine do meanwhile is a part of this call: the other ranks are told so, and masked ranks left out."""
        self._calling = kind
        try:
            with self._mail.low_latency_call():
                yield
        finally:
            self._calling = None


def _weighted_sum(rows: np.ndarray, target: np.ndarray, choice: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """Add bfloat16 `rows[i]` times `weights[target[i], choice[i]]` to `out[target[i]]`, in the order of choices, in float32.

    Products and sums are rounded separately, and the end result to bfloat16; targets without rows become zero.
    """
    total = np.zeros((out.shape[0], out.shape[1] // 2), np.float32)
    with np.errstate(all="ignore"):  # inf - inf and the like are the caller's numbers, not our mistakes
        for k in range(weights.shape[1]):
            at = np.flatnonzero(choice == k)
            here = target[at]  # each at most once
            total[here] += weights[here, k][:, None] * to_float32(rows[at], "bfloat16")
        from_float32(total, "bfloat16", out)


def _to_fp8(x: View, inputs: LowLatencyDispatchInputs) -> tuple[View, View]:
    """Rows as FP8, and their scales."""
    codes, factors = fp8.to_fp8(to_float32(rows_of(x), "bfloat16"), inputs.round_scale)
    if inputs.use_ue8m0:
        factors = fp8.exponents(factors)
    rows = Result(x.shape, "float8_e4m3fn")
    rows.rows[...] = codes
    scales = Result((x.shape[0], x.shape[1] // FP8_GROUP), factors.dtype.name)
    scales.rows.view(factors.dtype)[...] = factors
    return rows.view(x.framework), scales.view(x.framework)


def _values(view: View) -> np.ndarray:
    """A matrix of a type that NumPy knows, without a copy."""
    return rows_of(view).view(view.dtype)
