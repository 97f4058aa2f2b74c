"""A client of the store that `store_server` serves. It has the methods of torch.distributed's stores that a StoreCommunicator uses."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from .._checks import argument_error, instance, is_int_in_range, seconds, whole_number
from .._env import MAX_TIMEOUT_S
from ..errors import EPInputError, EPUnavailableError
from . import store_frames as frames

_RETRY_PERIOD_S = 0.05  # while the server does not listen yet
_CLOSING_S = 5.0
_LEAST_READ_BYTES, _MOST_READ_BYTES = 64 << 10, 1 << 20
_LONGEST_POLL_S = 3600.0
_INT64 = 1 << 63


class StoreError(EPUnavailableError):
    """A store did not answer, or refused a request."""


class StoreClient:
    """A connection to a store. All threads of a process may use it, one request at a time.

    The connection is not made again after it ended, because the server has then set the keys of `will`. A request is sent once. If an
    exception such as Ctrl-C interrupts a request, the server may have done it, and the client stays usable.

    Args:
        host: The host of the server.
        port: Its port.
        token: Its token, or an empty text.
        timeout_s: The limit of each request in seconds, and of the wait for a server that does not listen yet.

    Raises:
        StoreError: if no such server answers, or if it has another token.
    """

    def __init__(self, host: str, port: int, token: str = "", timeout_s: float = 30.0) -> None:
        self._host = instance(host, "host", str, "Pass the name or the address of a host.").strip("[]")  # of IPv6
        self._port = whole_number(port, "port", 1, 65535)
        self._timeout_s = seconds(timeout_s, "timeout_s", MAX_TIMEOUT_S)
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._problem = ""  # why it takes no more requests
        self._connection = self._connect(instance(token, "token", str, "Pass the token of the server, or an empty text."))

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value, also in place of another one."""
        self._ask("set", _key(key), _value(value))

    def get(self, key: str) -> bytes:
        """Return a value. Raise StoreError at once if there is none."""
        return self._ask("get", _key(key))[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all these keys have values."""
        names = [_key(key) for key in keys]
        parts = [names[start : start + frames.MAX_KEYS] for start in range(0, len(names), frames.MAX_KEYS)]
        return all(self._ask("check", *part) == [b"1"] for part in parts)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values. It takes one request for up to 1024 keys and 8 MiB. Raise StoreError at once if one is missing."""
        names, values = [_key(key) for key in keys], list[bytes]()
        while len(values) < len(names):
            asked = names[len(values) : len(values) + frames.MAX_KEYS]
            values += self._ask("multi_get", *asked)[: len(asked)]  # as many as fit in one reply, at least one
        return values

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether there was one."""
        return self._ask("delete_key", _key(key)) == [b"1"]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the value is `expected`, or if there is none and `expected` is empty.

        Return the value that the key then has, or `expected` if there still is none.
        """
        return self._ask("compare_set", _key(key), _value(expected), _value(desired))[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 if there is none, and return the sum. Raise StoreError if the value is no number of 64 bits."""
        if not is_int_in_range(amount, -_INT64, _INT64 - 1):
            raise argument_error(amount, "amount", "a whole number of 64 bits", "Pass such a number.")
        return int(self._ask("add", _key(key), b"%d" % amount)[0])

    def will(self, key: str, value: str | bytes) -> None:
        """Let the server store this value when the connection ends without `close`, for example because the process was killed.

        A later will for the same key replaces it. There may be 1024 wills.
        """
        self._ask("will", _key(key), _value(value))

    def has_extended_api(self) -> bool:
        """Return True: there is `multi_get`."""
        return True

    def close(self) -> None:
        """End the connection and cancel its wills. Later requests raise StoreError."""
        if os.getpid() != self._pid:  # the connection is the parent's
            return
        with self._lock:
            if self._problem:
                return
            with suppress(OSError, ValueError):  # the server has ended: there is no will to cancel
                self._connection.ask([b"close"], time.monotonic() + min(self._timeout_s, _CLOSING_S))
            self._end("is closed here; expected no request after close(). Make another StoreClient.")

    def _ask(self, operation: str, *arguments: bytes) -> list[bytes]:
        """Make a request, and return the fields of its reply."""
        if os.getpid() != self._pid:  # the lock may be held by a thread that this process does not have
            raise self._error(
                "serves the process that forked this one; expected a client of this process. Make a StoreClient here."
            )
        with self._lock:
            if self._problem:
                raise self._error(self._problem)
            try:
                status, *fields = self._connection.ask([operation.encode(), *arguments], time.monotonic() + self._timeout_s)
                if status == frames.OK and not fields and operation not in ("set", "will"):
                    raise ValueError("a reply without a value")
            except _Late as error:
                raise self._error(
                    f"did not answer {operation} within {self._timeout_s:g} s; expected its process to run. Check whether that process or "
                    f"its host hangs, or raise timeout_s."
                ) from error
            except (OSError, ValueError) as error:
                self._end(
                    f"has ended the connection ({_reason(error)}); expected its process to run. Check whether that process has ended, and "
                    f"make another StoreClient."
                )
                raise self._error(self._problem) from error
        if status != frames.OK:
            reason = b"".join(fields).decode(errors="replace")
            raise self._error(f"refuses {operation} ({reason}); expected a request that it can do. Check the keys of all ranks.")
        return fields

    def _end(self, problem: str) -> None:
        self._problem = problem
        self._connection.socket.close()

    def _error(self, problem: str) -> StoreError:
        return StoreError(f"the store at {address(self._host, self._port)} {problem}")

    def _connect(self, token: str) -> _Connection:
        """Connect, as soon as the server listens."""
        end = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._try_to_connect(token, end)
            except socket.gaierror as error:
                raise self._error(f"has no address ({_reason(error)}); expected one. Check the name of its host.") from error
            except ValueError as error:
                raise self._error(f"is another program ({_reason(error)}); expected deepep_rt's. Check its port.") from error
            except OSError as error:
                if time.monotonic() + _RETRY_PERIOD_S > end:
                    raise self._error(
                        f"was not reached within {self._timeout_s:g} s ({_reason(error)}); expected its process to listen. Check the "
                        f"address, and that `python -m deepep_rt store` runs there."
                    ) from error
            time.sleep(_RETRY_PERIOD_S)

    def _try_to_connect(self, token: str, end: float) -> _Connection:
        made = socket.create_connection((self._host, self._port), max(end - time.monotonic(), _RETRY_PERIOD_S))
        try:
            if made.getsockname() == made.getpeername():  # Linux connects a socket to itself if it gave it this very port
                raise ConnectionRefusedError("nothing listens")
            frames.prepare(made)
            connection = _Connection(made)
            greeting = connection.read(end)[1]
            if greeting[:-1] != [frames.PROTOCOL]:
                raise ValueError("another protocol or version")
            challenge, answer = greeting[1], secrets.token_bytes(frames.CHALLENGE_BYTES)
            reply = connection.ask([answer, frames.proof(token, b"client", challenge, answer)], end)
            expected = frames.OK + frames.proof(token, b"server", challenge, answer)
            if not hmac.compare_digest(b"".join(reply), expected):
                raise self._error("has another token; expected the same. Set DEEPEP_RT_STORE_TOKEN to the token of the server.")
            return connection
        except BaseException:
            made.close()
            raise


class _Late(OSError):
    """The time of a request is up. The connection may still work."""


class _Connection:
    """A socket whose requests any exception may interrupt, such as one of a signal handler.

    One call of C moves bytes and notes them, so an exception comes before both or after both. The next request finishes what was begun.
    """

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._poll = select.poll()
        self._poll.register(made)
        self._number = 0
        self._outgoing: tuple[memoryview, list[int]] = memoryview(b""), []  # a frame, and the bytes of each part that was sent
        self._incoming: list[bytes] = []

    def ask(self, fields: Sequence[bytes], end: float) -> list[bytes]:
        """Send a request, and return its reply. Raise OSError or ValueError if the connection fails, and _Late at `end`."""
        self._send(end)  # the rest of a request that was interrupted
        self._number = number = (self._number + 1) % (1 << 32)
        self._outgoing = memoryview(frames.pack(number, fields)), []
        self._send(end)
        while True:
            found, reply = self.read(end)
            if found == number:  # others reply to requests that were interrupted
                return reply

    def read(self, end: float) -> tuple[int, list[bytes]]:
        """Return the number and the fields of the next frame. An exception may lose the reply to a request that it interrupts."""
        while True:
            held, missing = sum(map(len, self._incoming)), 0
            if held >= frames.LENGTH.size:
                if len(self._incoming[0]) < frames.LENGTH.size:
                    self._incoming = [b"".join(self._incoming)]
                needed = frames.LENGTH.size + frames.LENGTH.unpack_from(self._incoming[0])[0]
                if needed > frames.MAX_FRAME_BYTES:
                    raise ValueError("a frame that is too long")
                if held >= needed:
                    joined = b"".join(self._incoming)
                    self._incoming = [joined[needed:]] if held > needed else []
                    return frames.unpack(joined[frames.LENGTH.size : needed])
                missing = needed - held
            self._wait(select.POLLIN, end)
            with suppress(BlockingIOError):
                self._incoming.extend(map(self.socket.recv, (min(max(missing, _LEAST_READ_BYTES), _MOST_READ_BYTES),)))
                if not self._incoming[-1]:
                    raise ConnectionResetError("the server ended the connection")

    def _send(self, end: float) -> None:
        frame, sent = self._outgoing
        while (start := sum(sent)) < len(frame):
            try:
                sent.extend(map(self.socket.send, (frame[start:],)))
            except BlockingIOError:
                self._wait(select.POLLOUT, end)

    def _wait(self, event: int, end: float) -> None:
        """Wait until the socket can be read or written."""
        self._poll.modify(self.socket, event)
        while True:
            rest = end - time.monotonic()
            if self._poll.poll(1000 * min(max(rest, 0.0), _LONGEST_POLL_S)):
                return
            if rest <= 0:
                raise _Late("the time is up")


def address(host: str, port: int) -> str:
    """Return the text of an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _key(key: str) -> bytes:
    if not isinstance(key, str) or len(name := key.encode()) > frames.MAX_KEY_BYTES:
        raise argument_error(key, "key", f"a text of at most {frames.MAX_KEY_BYTES} bytes", "Pass such a key.")
    return name


def _value(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    if not isinstance(data, bytes) or len(data) > frames.MAX_VALUE_BYTES:
        size = f"value=<{type(value).__name__}{f' of {len(data)} bytes' if isinstance(data, bytes) else ''}>"
        raise EPInputError(f"{size}; expected text or bytes, {frames.MAX_VALUE_BYTES} bytes at most. Store it in parts.")
    return data


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
