"""While calls run on the GPU: what the host hears of them, waits for, and raises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import driver, structs
from .communicator import Communicator
from .config import Config
from .errors import EPError, EPInputError, EPTimeoutError, EPUnavailableError
from .page import HostPage
from .together import LastWords

_GRACE_S = 5.0
"""The device reports a silent peer itself; only when the kernel does not even run does the host give up, this much later."""


class Watch:
    """Hears of the calls of one Buffer, from kernels by its page and from ranks that leave by a message.

    Args:
        comm: The ranks.
        config: The Buffer's sizes.
        page: Where kernels leave word.
        state: Address of the kernels' State.
        check_ended: Raises if the Buffer was destroyed; asked while the host waits.
    """

    def __init__(
        self, comm: Communicator, config: Config, page: HostPage, state: int, check_ended: Callable[[], None] = lambda: None
    ) -> None:
        self._check_ended = check_ended
        self._config, self._page, self._rank = config, page, comm.Get_rank()
        self._last_words = LastWords(comm)
        self._abort_at = state + structs.offset(structs.State.dtype({}), "abort")
        self._broken: EPError | None = None

    @property
    def is_broken(self) -> bool:
        """Whether no call can be made any more."""
        return self._broken is not None

    def check(self) -> None:
        """Raise what kernels have reported."""
        self.check_peers()
        self.check_inputs()

    def check_peers(self) -> None:
        """Raise what breaks the Buffer: time-outs, now and ever after."""
        if self._broken is not None:
            raise self._broken
        try:
            self._page.check_peers()
        except EPError as error:
            self._broken = error
            raise

    def check_inputs(self) -> None:
        """At the end of a call: raise what kernels found wrong in this one or an earlier one. The other ranks have made this call too."""
        try:
            self._page.check_inputs()
        except EPInputError as error:
            error.call_made = True
            raise

    def start_listening(self) -> None:
        """The host begins to wait."""
        self._last_words.start_listening()

    def listen(self) -> None:
        """While the host waits: raise if a rank has left, and end what waits for it on the GPU."""
        if self._config.on_timeout == "mask":
            return
        try:
            gone = self._last_words.gone()
            error: EPError | None = self._last_words.error(gone[0], "a call on the GPU") if gone else None
        except EPUnavailableError as lost:  # with the process that held the ranks' store
            error = lost
        if error is not None:
            self._broken = error
            driver.write_beside(self._abort_at, 1)
            raise error

    def await_counts(self) -> tuple[int, list[int]]:
        """Wait on the host until the routing is known: the one synchronisation of the library."""
        deadline = time.monotonic() + self._config.timeout_s + _GRACE_S
        counts = None
        self.start_listening()
        try:
            # Bad input is no reason to stop: the next call must not take these counts for its own.
            while (counts := self._page.counts()) is None:
                self._check_ended()
                self.check_peers()
                self.listen()
                os.sched_yield()  # with Python's lock: other threads would get it once in 5 ms
                if time.monotonic() > deadline:
                    raise self._timeout(
                        "kPhaseRoute", "the routing kernel did not run: the GPU is busy with other work, or stuck"
                    )
        finally:
            if counts is None and self._broken is None:
                self._broken = self._timeout("kPhaseRoute", "a dispatch was interrupted while it waited for its counts")
        return counts

    @contextmanager
    def half_a_call(self) -> Iterator[None]:
        """Around the launch of one half of a call: if something throws the host out of it (Ctrl-C), later halves would be taken for it."""
        try:
            yield
        except BaseException:
            self._broken = self._broken or self._timeout("kPhaseLlRows", "a low-latency call was interrupted between its halves")
            raise

    def say(self, error: BaseException) -> None:
        """Tell the other ranks why this one leaves."""
        self._last_words.say(error)

    def _timeout(self, phase: str, what: str) -> EPTimeoutError:
        return EPTimeoutError(what, rank=self._rank, peer=self._rank, phase=structs.PHASES[phase][1])
