"""A key-value store for ranks that must survive the death of any of them. One process holds the values, and one thread serves all clients.

The operations are those of torch.distributed's TCPStore, but `get` does not wait for a key, and a client may leave a will: a value that the
server stores when the connection of the client ends. `store_client` has the client, and `store_frames` what both send.

A client that sends nonsense, or that does not show the token in time, loses its connection. While a client does not read a reply, the
server takes no more of its requests. So a client costs at most the memory of one request, one reply and its wills.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import re
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from .. import _env
from .._checks import instance, whole_number
from ..errors import EPConfigError, EPUnavailableError
from . import store_frames as frames
from .store_client import address

_GREETING_S = 10.0  # for a client to show that it knows the token
_FIRST_CLIENT_S = 60.0
_MAX_GREETED = 256  # connections that have shown nothing yet
_ACCEPTED_AT_ONCE = 64
_READ_BYTES = 256 << 10
_FULL_PAUSE_S = 0.01
_SERVE = "import sys; from deepep_rt.comm import store_server; store_server.serve(sys.argv[1], ends_with_last_client=True)"
_START_S, _LAST_OUTPUT_S = 60.0, 1.0
_BACKLOG = 1024
_INTEGER, _INT64 = re.compile(rb"-?[0-9]{1,19}"), 1 << 63


class StoreServer:
    """The process that holds the values. It listens from the start, and `serve` answers.

    Args:
        host: The address where it listens. One that other hosts reach needs a token.
        port: The port, or 0 for any free one.
        token: A secret of the server and its clients. With an empty one, any process that reaches the port may be a client.
        ends_with_last_client: Whether `serve` ends when the last client has gone, or when none has come for 60 s.

    Raises:
        EPConfigError: if other hosts could be clients without a token.
        EPUnavailableError: if the address cannot be used.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, token: str = "", ends_with_last_client: bool = False) -> None:
        self._token = instance(token, "token", str, "Pass a text.", error=EPConfigError)
        self._listener = _listen(host, port, token)
        self.host, self.port = self._listener.getsockname()[:2]
        self._ends_with_last_client, self._had_client = ends_with_last_client, False
        self._values: dict[bytes, bytes] = {}
        self._greeted: dict[_Connection, float] = {}  # until when they have to show that they know the token, oldest first
        self._clients: set[_Connection] = set()
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._selector = selectors.DefaultSelector()
        self._wakes, self._waker = socket.socketpair()
        self._is_closing = self._is_serving = False
        self._waker.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wakes, selectors.EVENT_READ, lambda events: None)  # `serve` then sees that it has to end

    @property
    def address(self) -> str:
        """The host and the port, as one text."""
        return address(self.host, self.port)

    def serve(self) -> None:
        """Answer clients until `close`, or until the last client has gone if the server ends with it."""
        self._is_serving = True
        first_client_by = time.monotonic() + _FIRST_CLIENT_S
        try:
            while not self._is_closing and (self._clients or self._greeted or self._may_wait(first_client_by)):
                for key, events in self._selector.select(self._longest_wait(first_client_by)):
                    key.data(events)
                self._drop_late()
        finally:
            self._release()

    def serve_in_thread(self) -> threading.Thread:
        """Start a thread that serves, and return it. It ends with its process."""
        thread = threading.Thread(target=self.serve, daemon=True, name="deepep_rt's store")
        thread.start()
        return thread

    def close(self) -> None:
        """Let `serve` end, from any thread or signal handler. Connections end, and no will counts."""
        self._is_closing = True
        if not self._is_serving:
            self._release()
        with suppress(OSError):  # it has ended, or has many such bytes to read
            self._waker.send(b"x")

    def _release(self) -> None:
        for connection in (*self._clients, *self._greeted):
            connection.socket.close()
        self._listener.close()
        self._selector.close()
        self._wakes.close()
        self._waker.close()

    # --- connections -------------------------------------------------------------------------------------------------------------

    def _may_wait(self, first_client_by: float) -> bool:
        """Return whether a server without clients goes on."""
        return not self._ends_with_last_client or (not self._had_client and time.monotonic() < first_client_by)

    def _longest_wait(self, first_client_by: float) -> float | None:
        """Return the seconds until the time of something is up, or None."""
        ends = [next(iter(self._greeted.values()))] if self._greeted else []
        if self._ends_with_last_client and not self._had_client:
            ends.append(first_client_by)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in [connection for connection, end in self._greeted.items() if end < now]:
            self._drop(connection)

    def _accept(self, events: int) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection = _Connection(self._listener.accept()[0])
            except BlockingIOError:
                return
            except OSError:  # the client has gone; or there are too many open files, and the next attempt fails as well
                time.sleep(_FULL_PAUSE_S)
                return
            if len(self._greeted) >= _MAX_GREETED:
                self._drop(next(iter(self._greeted)))
            self._greeted[connection] = time.monotonic() + _GREETING_S
            self._selector.register(connection.socket, selectors.EVENT_READ, functools.partial(self._go_on, connection))
            self._go_on(connection, 0)

    def _go_on(self, connection: _Connection, events: int) -> None:
        """Read, answer and write as far as that is possible now."""
        if connection not in self._clients and connection not in self._greeted:  # it was dropped after the selector named it
            return
        try:
            if events & selectors.EVENT_READ:
                connection.read(self._scratch)
            connection.send()
            while not connection.outgoing and (body := connection.next_frame()) is not None:
                number, fields = frames.unpack(body)
                reply = self._reply(connection, fields) if connection.is_client else self._admit(connection, fields)
                connection.send(frames.pack(number, reply))
            if connection.is_leaving and not connection.outgoing:
                self._drop(connection)
                return
            wanted = selectors.EVENT_WRITE if connection.outgoing else selectors.EVENT_READ
            if wanted != connection.wanted:
                connection.wanted = wanted
                self._selector.modify(connection.socket, wanted, self._selector.get_key(connection.socket).data)
        except Exception:  # also of a request that is too large for the memory: it must not disturb other clients
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._values.update(connection.wills)
        self._greeted.pop(connection, None)
        self._clients.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    # --- requests ----------------------------------------------------------------------------------------------------------------

    def _admit(self, connection: _Connection, fields: list[bytes]) -> list[bytes]:
        """Take a client that knows the token, and show it that this server knows it too."""
        answer, shown = fields
        if len(answer) != frames.CHALLENGE_BYTES:
            raise ValueError("a challenge of another length")
        if not hmac.compare_digest(shown, frames.proof(self._token, b"client", connection.challenge, answer)):
            connection.is_leaving = True
            return [frames.REFUSED]
        del self._greeted[connection]
        self._clients.add(connection)
        connection.is_client = self._had_client = True
        return [frames.OK, frames.proof(self._token, b"server", connection.challenge, answer)]

    def _reply(self, connection: _Connection, fields: list[bytes]) -> list[bytes]:
        """Do a request, and return its reply. Raise ValueError if the client does not follow the protocol."""
        values = self._values
        match fields:
            case [b"check", *keys]:
                return [frames.OK, b"%d" % all(key in values for key in keys)]
            case [b"get", key] | [b"multi_get", key]:
                return [frames.OK, values[key]] if key in values else _without_value(key)
            case [b"multi_get", *keys]:
                return self._several(keys)
            case [b"set", key, value]:
                values[key] = value
                return [frames.OK]
            case [b"delete_key", key]:
                return [frames.OK, b"%d" % (values.pop(key, None) is not None)]
            case [b"compare_set", key, expected, desired]:
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [frames.OK, values.get(key, expected)]
            case [b"add", key, amount]:
                return self._add(key, amount)
            case [b"will", key, value] if key in connection.wills or len(connection.wills) < frames.MAX_KEYS:
                connection.wills[key] = value
                return [frames.OK]
            case [b"will", _, _]:
                return [frames.REFUSED, b"a client may have %d wills" % frames.MAX_KEYS]
            case [b"close"]:
                connection.wills.clear()
                connection.is_leaving = True
                return [frames.OK]
        raise ValueError("no such request")

    def _several(self, keys: list[bytes]) -> list[bytes]:
        """Return as many values as fit in a reply. The client asks again for the others."""
        reply, size = [frames.OK], 0
        for key in keys:
            if key not in self._values:
                return _without_value(key)
            size += len(self._values[key])
            if size > frames.MAX_VALUE_BYTES and len(reply) > 1:
                break
            reply.append(self._values[key])
        return reply

    def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        held = self._values.get(key, b"0")
        if not _INTEGER.fullmatch(amount):
            raise ValueError("no number")
        if not _INTEGER.fullmatch(held) or not -_INT64 <= (total := int(held) + int(amount)) < _INT64:
            return [frames.REFUSED, b"key %s or the sum is no number of 64 bits" % _shown(key)]
        self._values[key] = b"%d" % total
        return [frames.OK, self._values[key]]


class _Connection:
    """A client, or a process that may become one."""

    def __init__(self, made: socket.socket) -> None:
        frames.prepare(made)
        self.socket, self.wanted = made, selectors.EVENT_READ
        self.challenge = secrets.token_bytes(frames.CHALLENGE_BYTES)
        self.incoming, self.outgoing = bytearray(), memoryview(frames.pack(0, [frames.PROTOCOL, self.challenge]))
        self.is_client = self.is_leaving = False
        self.wills: dict[bytes, bytes] = {}

    def read(self, scratch: memoryview) -> None:
        """Take bytes that have come. Raise OSError at their end."""
        with suppress(BlockingIOError):
            if not (num_bytes := self.socket.recv_into(scratch)):
                raise ConnectionResetError("the client has gone")
            self.incoming += scratch[:num_bytes]

    def send(self, frame: bytes = b"") -> None:
        """Send as much of a frame, or of the rest of the last one, as the kernel takes."""
        if frame:
            self.outgoing = memoryview(frame)
        if self.outgoing:
            with suppress(BlockingIOError):
                self.outgoing = self.outgoing[self.socket.send(self.outgoing) :]

    def next_frame(self) -> bytes | None:
        """Return the next frame without its length, or None if it has not come. Raise ValueError if it is too long."""
        start = frames.LENGTH.size
        if self.is_leaving or len(self.incoming) < start:
            return None
        end = start + frames.LENGTH.unpack_from(self.incoming)[0]
        if end > (frames.MAX_FRAME_BYTES if self.is_client else frames.MAX_GREETING_BYTES):
            raise ValueError("a frame that is too long")
        if len(self.incoming) < end:
            return None
        body = bytes(self.incoming[start:end])
        del self.incoming[:end]
        return body


def serve(host: str, port: int = 0, *, ends_with_last_client: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, with the token of `DEEPEP_RT_STORE_TOKEN`. Print the address first."""
    server = StoreServer(host, port, _env.store_token(), ends_with_last_client)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.close())
    print(server.address, flush=True)
    server.serve()


def start_in_background(token: str, host: str = "127.0.0.1") -> tuple[str, int]:
    """Start a server that outlives this process and ends with its last client. Return its host and port.

    Args:
        token: As of `StoreServer`. It passes through the environment of the process, which only this user can read.
        host: The address where it listens.

    Raises:
        EPUnavailableError: if it does not start within 60 s. The message quotes its error.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, host],  # the command line needs packages that a Buffer does not
        env=_env.with_store_token(token),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a launcher's signals to the ranks, and Ctrl-C, do not reach it
    )
    output, errors = process.stdout, process.stderr
    assert output is not None
    assert errors is not None
    with output, errors:
        try:
            line = output.readline() if select.select([output], [], [], _START_S)[0] else b""
        except BaseException:
            process.kill()
            raise
        if (found := re.fullmatch(rb"\S+:(\d+)\n", line)) is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_OUTPUT_S)
            process.kill()
            reason = errors.read().decode(errors="replace").strip().splitlines() or ["it printed no address"]
            raise EPUnavailableError(
                f"the store does not start ({reason[-1]}); expected its address within {_START_S:g} s. Run python -m deepep_rt store, and "
                f"see what it prints."
            )
    # The thread takes the exit status, or a server that ends before this process would stay a zombie.
    threading.Thread(target=process.wait, daemon=True, name="deepep_rt's end of the store").start()
    return host, int(found[1])


def _listen(host: str, port: int, token: str) -> socket.socket:
    """Open the socket that listens."""
    name = instance(host, "host", str, "Pass the name or the address of a host.", error=EPConfigError)
    number = whole_number(port, "port", 0, 65535, error=EPConfigError)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            name or None, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if not token and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            raise EPConfigError(
                f"host={name!r} without a token; expected one, because other hosts can reach this address. Set DEEPEP_RT_STORE_TOKEN to a "
                f"long random text, or listen on 127.0.0.1."
            )
        made = socket.socket(family, kind, protocol)
        try:
            frames.prepare(made)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server may follow another one at its port
            made.bind(place)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise EPUnavailableError(
            f"host={name!r}, port={number}: the store cannot listen ({error.strerror}); expected an address of this machine and a free "
            f"port. Pass others, or port 0 for any free one."
        ) from error
    return made


def _without_value(key: bytes) -> list[bytes]:
    return [frames.REFUSED, b"key %s has no value" % _shown(key)]


def _shown(key: bytes) -> bytes:
    return repr(key.decode(errors="replace")).encode()
