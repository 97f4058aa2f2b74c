"""Agree on a call: each rank sends a header to every other rank, and all ranks raise or go on together before a row moves.

A header begins with the signature of the call, which must be the same on all ranks, and with the limits and problems of its sender. It
ends with the numbers of rows that the sender sends to each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ...arrays.host_memory import values_of
from ...arrays.view import View
from ...comm import call_signature
from ...comm.call_signature import Signature
from ...config import Config
from ...errors import EPInputError
from ..purposes import missing_backward
from .messages import MessageChannel

MAX_MESSAGE_BYTES = 2**31 - 1
"""Most bytes of one message: MPI counts them in C ints."""

_NUM_WORST_TOKENS = call_signature.NUM_FIELDS
_PROBLEM = slice(_NUM_WORST_TOKENS + 1, _NUM_WORST_TOKENS + 4)  # its number, and two values that depend on it
_SENT, _EXPECTED = _NUM_WORST_TOKENS + 4, _NUM_WORST_TOKENS + 5  # for the receiver alone: rows along a known routing
_NUM_HEAD_WORDS = _NUM_WORST_TOKENS + 6  # then num_rows[num_ranks] for all, and num_choices[num_local_experts] for the receiver

_BAD_EXPERT, _TOO_LARGE, _OTHER_RANKS = 1, 2, 3
"""Problems: (token, expert number), (receiver, bytes), and expert numbers that choose other ranks than the handle."""

_LOW_LATENCY_PHASES = {
    "low_latency_dispatch": {"kPhaseRoute": "kPhaseLlCounts", "kPhaseDispatchRows": "kPhaseLlRows"},
    "low_latency_combine": {
        "kPhaseDispatchWindow": "kPhaseLlWeights",
        "kPhaseDispatchRows": "kPhaseLlWeights",
        "kPhaseCombineWindow": "kPhaseLlCombineRoom",
        "kPhaseCombineRows": "kPhaseLlCombineRows",
    },
}


class Headers:
    """The headers of a call: `words[rank]` goes to, or came from, that rank, `[num_ranks, words]` int64."""

    def __init__(self, words: np.ndarray, num_ranks: int) -> None:
        self.words = words
        self.signatures = words[:, :_NUM_WORST_TOKENS]
        self.num_worst_tokens = words[:, _NUM_WORST_TOKENS]
        self.problems = words[:, _PROBLEM]
        self.num_rows = words[:, _NUM_HEAD_WORDS : _NUM_HEAD_WORDS + num_ranks]
        self.num_choices = words[:, _NUM_HEAD_WORDS + num_ranks :]

    @property
    def has_problem(self) -> bool:
        return bool(self.problems[:, 0].any())

    def report_size(self, num_rows: Sequence[int] | np.ndarray, row_bytes: int) -> None:
        """Report a problem if the largest of the messages, with `num_rows[rank]` rows, is too large."""
        receiver = int(np.argmax(num_rows))
        num_bytes = int(num_rows[receiver]) * row_bytes
        if num_bytes > MAX_MESSAGE_BYTES:
            self.problems[:] = _TOO_LARGE, receiver, num_bytes

    def report_bad_expert(self, topk_idx: View, num_experts: int) -> None:
        """Report a problem if an expert number is out of range."""
        idx = values_of(topk_idx)
        bad = np.argwhere((idx < -1) | (idx >= num_experts))
        if len(bad):
            self.problems[:] = _BAD_EXPERT, bad[0, 0], idx[tuple(bad[0])]

    def report_other_ranks(self) -> None:
        """Report that expert numbers choose other ranks than the routing of the handle."""
        self.problems[:] = _OTHER_RANKS, 0, 0


class CallAgreement:
    """Let all ranks agree on each call."""

    def __init__(self, config: Config, channel: MessageChannel) -> None:
        self._config, self._channel = config, channel
        self._low_latency_call: Signature | None = None
        self._num_throughput_routings = 0  # the same on all ranks, because their calls succeed or fail together

    def begin_generation(self) -> None:
        """Count routings anew, as new members do."""
        self._num_throughput_routings = 0

    @contextmanager
    def low_latency_call(self, signature: Signature) -> Iterator[None]:
        """Make dispatches and combines as parts of one low-latency call, which excludes masked ranks."""
        self._low_latency_call = signature
        try:
            with self._channel.low_latency_call():
                yield
        finally:
            self._low_latency_call = None

    @property
    def is_low_latency(self) -> bool:
        """Whether dispatches and combines are parts of a low-latency call."""
        return self._low_latency_call is not None

    def next_serial(self) -> int:
        """Number a new routing. Masked ranks may miss low-latency calls, so those routings take the number of the call."""
        if self.is_low_latency:
            return self._channel.low_latency_calls
        self._num_throughput_routings += 1
        return self._num_throughput_routings

    def phase(self, name: str) -> str:
        """The phase that errors name for a wait: a dispatch in a low-latency call has that call's phases."""
        if self._low_latency_call is None:
            return name
        call = self._low_latency_call.kind.partition(" ")[0]  # the arguments that ranks agree on follow
        return _LOW_LATENCY_PHASES.get(call, {}).get(name, name)

    def new_headers(self, signature: Signature, serial: int) -> Headers:
        """Make the headers of this rank. A low-latency call has a signature of its own. `serial` is that of the routing; 0: a new one."""
        num_ranks = self._config.num_ranks
        words = np.zeros((num_ranks, _NUM_HEAD_WORDS + num_ranks + self._config.num_local_experts), np.int64)
        headers = Headers(words, num_ranks)
        if self._low_latency_call is not None:
            signature = self._low_latency_call._replace(x=signature.x)
        headers.signatures[:] = *call_signature.fields(signature), serial
        return headers

    def exchange(self, headers: Headers, phase: str) -> Headers:
        """Exchange headers with all ranks. Return those of all ranks; zeros for ranks that do not take part.

        Raise EPInputError on every rank that takes part, if the calls differ or a rank reports a problem.
        """
        words, ranks = self._channel.exchange_headers(headers.words, self.phase(phase))
        received = Headers(words, self._config.num_ranks)
        signatures = {int(rank): received.signatures[rank].tolist() for rank in ranks}
        if mismatch := call_signature.describe_mismatch(signatures):
            other = next((rank for rank in ranks if signatures[rank] != signatures[self._channel.rank]), -1)
            missing = missing_backward(other, self._channel.purposes.current).removesuffix(". ")
            raise EPInputError(mismatch + missing + self._channel.failure_notice.refusals())
        wrong = np.flatnonzero(received.problems[:, 0])
        if len(wrong):
            rank = self._channel.rank if self._channel.rank in wrong else int(wrong[0])
            raise EPInputError(self._describe(rank, *received.problems[rank].tolist()))
        return received

    def exchange_row_counts(
        self, headers: Headers, phase: str, num_sent: Sequence[int] | np.ndarray, num_expected: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Exchange headers of a call along a known routing.

        Two ranks disagree on the rows between them if one has masked the other since the routing was made, or while it was made. Then they
        send no rows to each other.

        Return `send_mask` and `recv_mask`, `[num_ranks]` bool: the ranks that get rows from this rank, and that send rows to it.
        """
        headers.words[:, _SENT], headers.words[:, _EXPECTED] = num_sent, num_expected
        words = self.exchange(headers, phase).words
        return words[:, _EXPECTED] == num_sent, words[:, _SENT] == num_expected

    def _describe(self, rank: int, problem: int, first: int, second: int) -> str:
        prefix = "" if rank == self._channel.rank else f"rank {rank}: "
        if problem == _BAD_EXPERT:
            last = self._config.num_experts - 1
            return (
                f"{prefix}topk_idx: token {first} chooses expert {second}; expected 0 to {last}, or -1 for none. Correct topk_idx"
            )
        if problem == _OTHER_RANKS:
            return (
                f"{prefix}topk_idx chooses other ranks than the routing of the handle; expected the topk_idx of its dispatch. Pass that "
                f"one, or None"
            )
        return f"{prefix}x: {second} bytes go to rank {first}; expected at most {MAX_MESSAGE_BYTES} on the host backend. Split the batch"
