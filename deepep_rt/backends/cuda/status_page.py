"""The status page: pinned host memory where kernels report time-outs, wrong arguments, and the counts of a routing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ...comm import call_signature
from ...cuda import driver
from ...errors import EPInputError, EPTimeoutError
from ...kernels import structs
from ...kernels.layout import Layout
from ..overflow import OverflowLog, too_many_rows
from ..purposes import Purposes, missing_backward

_LOW_HALF = 0xFFFFFFFF
_BROKEN = "The buffer cannot be used any more"


class StatusPage:
    """A Buffer's status page.

    Args:
        layout: Of the Buffer.
        rank: This rank.
        purposes: Of its calls.
        purpose_of_wait: Returns the purpose of the call in which a kernel waits: of a phase and an epoch.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        purposes: Purposes | None = None,
        purpose_of_wait: Callable[[int, int], str] = lambda phase, epoch: "",
    ) -> None:
        self._purposes, self._purpose_of_wait = purposes or Purposes(), purpose_of_wait
        self._layout, self._config, self._overflow = layout, layout.config, OverflowLog(rank)
        self._map = layout.status_page
        self.ptr = driver.allocate_pinned(self._map.num_bytes)
        ctypes.memset(self.ptr, 0, self._map.num_bytes)
        self.report = self._struct("report", structs.Report)
        self.mailbox = self._struct("mailbox", structs.Mailbox)
        masked: Any = (ctypes.c_uint32 * self._config.num_ranks).from_address(self.ptr + self._map.offsets["masked"])
        self.masked = np.frombuffer(masked, np.uint32)
        """`[num_ranks]`: 1 for the ranks that low-latency calls exclude, after the calls that this GPU has finished."""
        self.timed_out = self._flag("report", self.report, "flag")
        self.bad_input = self._flag("report", self.report, "bad_flag")
        self.ranks_differ = self._flag("report", self.report, "differs")
        self.has_events = self._flag("report", self.report, "has_events")
        self.counted = self._flag("mailbox", self.mailbox, "flag")
        self.started = self._flag("mailbox", self.mailbox, "started")

    def free(self) -> None:
        """Free the memory. Events may still call the checks; they find nothing."""
        self.timed_out = self.bad_input = self.ranks_differ = self.has_events = ctypes.c_uint32(0)
        driver.free_pinned(self.ptr)

    def expect_counts(self) -> None:
        """Clear the mailbox before the launch of a routing that reports counts."""
        self.counted.value = self.started.value = 0

    def has_started(self) -> bool:
        """Whether the GPU has started that routing."""
        return bool(self.started.value)

    def counts(self) -> tuple[int, list[int]] | None:
        """Rows that arrive, in all and for each local expert; None until the routing has reported them."""
        if not self.counted.value:
            return None
        return int(self.mailbox["num_recv"][0]), self.mailbox["num_recv_per_expert"][0].tolist()

    def check_peers(self) -> None:
        """Raise what breaks the Buffer.

        Raises:
            EPTimeoutError: if a wait on the device ran out of time.
            EPInputError: if the arguments of low-latency calls differ between ranks, or a graph was replayed between the halves of a call.
        """
        if self.ranks_differ.value and self._is_low_latency():
            raise self._mismatch(_BROKEN)
        if self.timed_out.value:
            raise self._open_hook() if self.report[0]["phase"] == structs.LL_OPEN_HOOK else self._timeout()

    def check_inputs(self) -> None:
        """Raise what kernels found wrong in arguments, once. Log, once, that rows did not fit.

        Raises:
            EPInputError: if arguments differ between ranks, a token chose an expert that does not exist, or a combine got other choices
                than its dispatch.
        """
        if self.ranks_differ.value:
            self.check_peers()
            self.ranks_differ.value = 0
            raise self._mismatch("No rows were sent")
        if self.bad_input.value:
            self.bad_input.value = 0
            token, expert = int(self.report["bad_token"][0]), int(self.report["bad_expert"][0])
            raise EPInputError(
                f"topk_idx[{token}] holds expert {expert}; expected -1 or 0 to {self._config.num_experts - 1}. It was skipped"
            )
        if self.has_events.value:
            self.has_events.value = 0
            if rows := self._pop("no_room"):
                self._overflow.warn_of_rows(rows >> 32, rows & _LOW_HALF)
            if rows := self._pop("full_expert"):
                self._overflow.warn_of_expert((rows >> 32) - 1, rows & _LOW_HALF, self._config.worst_recv_tokens)
            if rows := self._pop("too_many"):
                self.has_events.value = 1  # the page may hold another event, of a low-latency call
                raise too_many_rows((rows >> 32) - 1, rows & _LOW_HALF, self._config.num_max_recv_tokens)
            if choice := self._pop("other_choice"):
                raise self._other_choice(choice)

    def _pop(self, name: str) -> int:
        """Read a word of the report, and clear it."""
        word = int(self.report[0][name])
        self.report[0][name] = 0
        return word

    def _other_choice(self, word: int) -> EPInputError:
        token, choice = divmod(word >> 32 & 0x7FFFFFFF, self._config.num_topk)
        now, then = (word >> 16 & 0xFFFF) - 1, (word & 0xFFFF) - 1
        given = "an expert that does not exist" if now == self._config.num_experts else now
        return EPInputError(
            f"low_latency_combine: topk_idx[{token}, {choice}]={given}; expected {then}, as low_latency_dispatch got it, or -1 for all of "
            f"the token's experts on that rank. The sum counts what the dispatch got. Pass the same topk_idx to both calls"
        )

    def _is_low_latency(self) -> bool:
        return call_signature.is_low_latency(call_signature.unpack(int(self.report[0]["call_signature"][0])))

    def _mismatch(self, consequence: str) -> EPInputError:
        report = self.report[0]
        ranks = (int(report["rank"]), int(report["other"]))
        signatures = {
            rank: (*call_signature.unpack(int(number)), serial)
            for rank, number, serial in zip(ranks, report["call_signature"], report["serial"], strict=True)
        }
        newest = self._purposes.newest and f"{self._purposes.newest}, or of a later call"  # the host may be some calls ahead
        text = call_signature.describe_mismatch(dict(sorted(signatures.items())))
        return EPInputError(f"{text}{missing_backward(ranks[1], newest)}{consequence}")

    def _open_hook(self) -> EPInputError:
        return EPInputError(
            f"a CUDA graph with a whole low-latency call was replayed while a hook of such a call was open; expected no open hook, because "
            f"the hook would receive the rows of the replay. Call hooks before a replay. {_BROKEN}"
        )

    def _timeout(self) -> EPTimeoutError:
        report = self.report[0]
        rank, peer, number = int(report["rank"]), int(report["peer"]), int(report["phase"])
        expected, seen, phase = int(report["expected"]), int(report["seen"]), structs.phase_name(number)
        call_idx = expected
        if number in structs.ROOM_PHASES:  # the kernel waits for the call that used the same ring slot before
            call_idx += self._config.low_latency_ring_depth
        node = self._config.node_of(peer)
        where = "" if node is None else f" on node {node}"
        return EPTimeoutError(
            f"rank {rank} waited {self._config.timeout_s:g} s for rank {peer}{where}: {phase}, call {call_idx} of its kind "
            f"(rank {peer} was at {seen}); expected rank {peer} to be alive and to make the same calls"
            f"{missing_backward(peer, self._purpose_of_wait(number, expected))}"
            f"Check that it does, or raise timeout_s (DEEPEP_RT_TIMEOUT_S) if it is only slow. {_BROKEN}",
            rank=rank,
            peer=peer,
            phase=phase,
            expected=expected,
            seen=seen,
            call_idx=call_idx,
            node=node,
        )

    def _struct(self, region: str, struct: structs.CStruct) -> Any:
        dtype = struct.dtype(self._layout.constants)
        memory: Any = (ctypes.c_char * dtype.itemsize).from_address(self.ptr + self._map.offsets[region])
        return np.frombuffer(memory, dtype)

    def _flag(self, region: str, struct: Any, member: str) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.ptr + self._map.offsets[region] + structs.offset(struct.dtype, member))
