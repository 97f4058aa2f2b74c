"""Exceptions, where pytest does not run the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[SimpleNamespace]:
    """Expect an exception whose message contains all `words`; it is `.error` of what the block gets."""
    caught = SimpleNamespace(error=None)
    try:
        yield caught
    except kind as error:
        caught.error = error
    if caught.error is None:
        raise AssertionError(f"{kind.__name__} was not raised")
    missing = [word for word in words if word not in str(caught.error)]
    assert not missing, f"{missing} not in the message: {caught.error}"
