"""Exceptions and warnings, where pytest does not run the test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[SimpleNamespace]:
    """Expect an exception whose message contains all `words`. The block gets an object with the exception in `.error`."""
    caught = SimpleNamespace(error=None)
    try:
        yield caught
    except kind as error:
        caught.error = error
    if caught.error is None:
        raise AssertionError(f"{kind.__name__} was not raised")
    missing = [word for word in words if word not in str(caught.error)]
    assert not missing, f"{missing} not in the message: {caught.error}"


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """Collect the warnings that deepep_rt logs."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logger = logging.getLogger("deepep_rt")
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)
