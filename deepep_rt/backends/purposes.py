"""What calls are for, if they belong to a backward pass: errors of the ranks that wait in such a call name it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_LAUNCHES = 4096  # more calls than a GPU has queued


class Purposes:
    """The purposes of the calls of one Buffer."""

    def __init__(self) -> None:
        self.current = ""
        """Of the call that this rank makes now. Empty: it is no part of a backward pass."""
        self.newest = ""
        """Of the newest call on the GPU."""
        self._numbers: Counter[str] = Counter()
        self._launches: deque[tuple[str, int, int, str]] = deque(maxlen=_MOST_LAUNCHES)

    def next_number(self, kind: str) -> int:
        """Number the calls of a kind, from 1. All ranks give a call the same number, because they make the same calls."""
        self._numbers[kind] += 1
        return self._numbers[kind]

    @contextmanager
    def during(self, purpose: str) -> Iterator[None]:
        """Enter for a call with this purpose."""
        before, self.current = self.current, purpose
        try:
            yield
        finally:
            self.current = before

    def note_launches(self, epoch: str, first: int, last: int) -> None:
        """Note the launches of the current call, numbers `first` to `last` of those that advance `epoch`, for errors that come later."""
        self.newest = self.current
        if self.current:
            self._launches.append((epoch, first, last, self.current))

    def of_launch(self, epoch: str, number: int) -> str:
        """Return the purpose of the call that has made a launch. Empty: none."""
        return next((text for name, first, last, text in self._launches if name == epoch and first <= number <= last), "")


def not_run(peer: int, purpose: str) -> str:
    """Return a part of a sentence: a peer does not take part in a call with this purpose. Empty without a purpose."""
    return f"; rank {peer} does not run {purpose}" if purpose else ""


def missing_backward(peer: int, purpose: str) -> str:
    """Return the same, and what to do, as the end of a sentence."""
    remedy = (
        "Run the same backward pass on all ranks: compute each rank's loss from the result of that call, with gradients enabled. "
    )
    return f"{not_run(peer, purpose)}. {remedy if purpose else ''}"
