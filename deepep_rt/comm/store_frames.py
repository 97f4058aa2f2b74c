"""Frames that the server and the clients of a store send each other, and the proofs that they know the same token.

A frame holds its length, a number, and fields of bytes. The first field of a request names an operation. The reply has the number of its
request. A receiver checks every length, and runs nothing of a frame.

The server sends the first frame of a connection. It names the protocol and holds a challenge. The client answers with a challenge of its
own and a proof. Then the server sends its proof. Neither sends the token.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import weakref
from collections.abc import Iterable

PROTOCOL = b"deepep_rt store 1"
OK, REFUSED = b"ok", b"refused"
"""The first field of a reply. After a refusal, a field tells the reason."""
CHALLENGE_BYTES = 32
MAX_VALUE_BYTES = 8 << 20  # as of a TCPStore
MAX_KEY_BYTES = 4096
MAX_KEYS = 1024  # of a request
MAX_GREETING_BYTES = 256  # a frame of a peer that has not shown that it knows the token
MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + (64 << 10)  # compare_set carries two values

LENGTH = struct.Struct(">I")
_HEAD = struct.Struct(">II")  # the length of what follows it, and the number
_KEEPALIVE_IDLE_S, _KEEPALIVE_PERIOD_S, _SILENCE_S = 10, 5, 25


def pack(number: int, fields: Iterable[bytes]) -> bytes:
    """Return a frame."""
    parts: list[bytes] = []
    for field in fields:
        parts += (LENGTH.pack(len(field)), field)
    body = b"".join(parts)
    return _HEAD.pack(LENGTH.size + len(body), number) + body


def unpack(body: bytes) -> tuple[int, list[bytes]]:
    """Return the number and the fields of a frame, without its length. Raise ValueError if `pack` did not make it."""
    if len(body) < LENGTH.size:
        raise ValueError("a frame without a number")
    fields: list[bytes] = []
    start, end = LENGTH.size, len(body)
    while start < end:
        if start + LENGTH.size > end or len(fields) > MAX_KEYS:
            raise ValueError("a frame with a part of a field, or with too many")
        (length,) = LENGTH.unpack_from(body, start)
        start += LENGTH.size
        if length > min(end - start, MAX_VALUE_BYTES):
            raise ValueError("a field that is too long")
        fields.append(body[start : start + length])
        start += length
    return LENGTH.unpack_from(body)[0], fields


def proof(token: str, side: bytes, challenge: bytes, answer: bytes) -> bytes:
    """Return what shows that a side, "server" or "client", knows the token. Both challenges count, so a proof serves one connection."""
    message = b"|".join((PROTOCOL, side, challenge, answer))
    return hmac.digest(token.encode("utf-8", "surrogateescape"), message, "sha256")


def prepare(made: socket.socket) -> None:
    """Send small frames at once, and end a connection whose other host is silent. Processes that are forked later close their copy."""
    _sockets.add(made)
    made.setblocking(False)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_PERIOD_S),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S),
    ):
        made.setsockopt(level, option, value)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_after_fork() -> None:
    """Close the copies of a forked process: a connection lasts until its last copy is closed, so peers would not hear of a death."""
    for copy in list(_sockets):
        copy.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_after_fork)
