"""`MessageCounts`: the ranks of several nodes tell each other their numbers of tokens with messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..comm.communicator import Communicator
from ..errors import EPTimeoutError


class MessageCounts:
    """The numbers of each rank for the current call, exchanged when the ranks read them. It has the methods of `SharedCounts`.

    The ranks read after the call. A rank whose arguments were wrong has then made no call and sends no message, so its next call meets the
    same call of the other ranks.

    Args:
        comm: The ranks. No other messages may use it, and `close` frees it.
        timeout_s: How long `read` waits for a rank.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self._comm, self._timeout_s = comm, timeout_s
        self._numbers: Sequence[int] = ()
        self._error: EPTimeoutError | None = None

    def post(self, numbers: Sequence[int]) -> None:
        """Set this rank's numbers for the current call. The rank may set them again until it reads."""
        self._numbers = numbers

    def read(self, count: int) -> np.ndarray:
        """Return the first `count` numbers of all ranks, `[num_ranks, count]` int64, and end the current call.

        Raises:
            EPTimeoutError: If a rank did not come. Every later call raises it too, because a late rank would meet the wrong messages.
        """
        if self._error is not None:
            raise self._error
        mine, found = np.array(self._numbers[:count], np.int64), np.zeros((self._comm.Get_size(), count), np.int64)
        hint = "all ranks to call dispatch in the same way, with topk_idx or without"
        try:
            self._comm.finish(self._comm.Iallgather(mine, found), "the number of tokens", hint, self._timeout_s)
        except EPTimeoutError as error:
            self._error = error
            raise
        return found

    def close(self, in_touch: bool) -> None:
        """Free the communicator. Collective, if `in_touch` says that all ranks are alive."""
        (self._comm.Free if in_touch and self._error is None else self._comm.abandon)()
