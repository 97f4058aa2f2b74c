"""`store_server` and `store_client`: the operations, wills, tokens, bad clients, the ends of both, and communicators over them."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from launch import environment
from memory_store import on_all
from ports import free_port

from deepep_rt import Buffer, EPConfigError, EPInputError, EPUnavailableError, _env
from deepep_rt.comm import store_client, store_server
from deepep_rt.comm import store_frames as frames
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient, StoreError
from deepep_rt.comm.store_server import StoreServer, start_in_background

TOKEN = "correct horse"
Seconds = Callable[[float], float]
Connect = Callable[..., StoreClient]
Start = Callable[..., subprocess.Popen[str]]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
needs_typer = pytest.mark.skipif(importlib.util.find_spec("typer") is None, reason="needs typer")

CLIENT = """
import os, sys, time
from deepep_rt.comm.store_client import StoreClient
client = StoreClient("127.0.0.1", int(sys.argv[1]), sys.argv[2])
"""
"""The begin of programs with a client."""


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(token=TOKEN)
    thread = made.serve_in_thread()
    yield made
    made.close()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def connect(server: StoreServer) -> Iterator[Connect]:
    """Return a function that makes clients of the server."""
    made: list[StoreClient] = []

    def connect(timeout_s: float = 60.0) -> StoreClient:
        made.append(StoreClient("127.0.0.1", server.port, TOKEN, timeout_s))
        return made[-1]

    yield connect
    for client in made:
        client.close()


@pytest.fixture
def client(connect: Connect) -> StoreClient:
    return connect()


@pytest.fixture
def python() -> Iterator[Start]:
    """Return a function that starts a program in a session of its own. All of that end with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(subprocess.Popen(command, env=environment(), start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def values(server: StoreServer) -> dict[str, bytes]:
    """Return what the server holds, without a request."""
    return {key.decode(): value for key, value in dict(server._values).items()}


# --- operations --------------------------------------------------------------------------------------------------------------------


def test_operations(client: StoreClient) -> None:
    assert client.has_extended_api()
    assert not client.check(["a"])
    assert client.check([])
    client.set("a", "text")
    client.set("b", b"\0bytes\xff")
    assert (client.get("a"), client.get("b")) == (b"text", b"\0bytes\xff")
    assert client.multi_get(["b", "a", "b"]) == [b"\0bytes\xff", b"text", b"\0bytes\xff"]
    assert client.multi_get([]) == []
    assert client.check(["a", "b"])
    assert not client.check(["a", "c"])
    assert [client.delete_key("a"), client.delete_key("a")] == [True, False]
    assert [client.add("n", 5), client.add("n", -7), client.get("n")] == [5, -2, b"-2"]


def test_compare_set(client: StoreClient) -> None:
    assert client.compare_set("a", "other", "new") == b"other"
    assert not client.check(["a"])
    assert client.compare_set("a", "", "first") == b"first"
    assert client.compare_set("a", "", "second") == b"first"
    assert client.compare_set("a", "first", "second") == b"second"
    assert client.compare_set("a", "first", "third") == b"second"
    client.set("empty", "")
    assert client.compare_set("empty", "x", "y") == b""
    assert client.compare_set("empty", "", "y") == b"y"


def random_calls(rng: random.Random, number: int) -> Iterator[tuple[str, list[Any]]]:
    keys = ["a", "b", "c", "key with blanks", "ä"]
    texts = ["", "x", "y", "5", "-3"]
    for _ in range(number):
        key = rng.choice(keys)
        yield rng.choice(
            [
                ("set", [key, rng.choice(texts)]),
                ("compare_set", [key, rng.choice(texts), rng.choice(texts)]),
                ("add", [key, rng.randrange(-9, 9)]),
                ("delete_key", [key]),
                ("check", [rng.sample(keys, rng.randrange(4))]),
                ("get", [key]),
                ("multi_get", [rng.choices(keys, k=rng.randrange(4))]),
            ]
        )


@needs_torch
@pytest.mark.parametrize("seed", range(4))
def test_operations_are_those_of_torchs_store(client: StoreClient, seed: int) -> None:
    """The same calls give the same results, except that TCPStore waits for missing keys, and ends connections that add to texts."""
    from torch.distributed import TCPStore

    other = TCPStore("127.0.0.1", free_port(), 1, True, wait_for_workers=False)
    made = 0
    for name, arguments in random_calls(random.Random(seed), 1500):
        asked = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
        if name in ("get", "multi_get") and not client.check(asked):
            with pytest.raises(StoreError, match="has no value"):
                getattr(client, name)(*arguments)
        elif name == "add" and client.check(asked) and not re.fullmatch(rb"-?\d+", client.get(asked[0])):
            with pytest.raises(StoreError, match="no number"):
                client.add(*arguments)
        else:
            made += 1
            assert getattr(client, name)(*arguments) == getattr(other, name)(*arguments), (name, arguments)
    assert made > 1000


def test_sums_have_64_bits(client: StoreClient) -> None:
    assert client.add("n", (1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(StoreError, match="no number of 64 bits"):
        client.add("n", 1)
    for text in ("1_0", " 1", "1.0", "²", "1" * 5000):
        client.set("m", text)
        with pytest.raises(StoreError, match="refuses add"):
            client.add("m", 1)
    for amount in (1 << 63, 1.0, True, "1"):
        with pytest.raises(EPInputError, match="amount="):
            client.add("n", amount)
    assert client.get("n") == b"%d" % ((1 << 63) - 1)


def test_large_values(connect: Connect) -> None:
    a, b = connect(), connect()
    data = [os.urandom(size) for size in (0, 1, 100_000, 3 << 20, 8 << 20)]
    for i, value in enumerate(data):
        a.set(str(i), value)
    assert b.multi_get([str(i) for i in range(len(data))]) == data
    assert b.multi_get(["4"] * 4) == data[4:] * 4  # more than a frame holds
    assert b.compare_set("4", data[4], data[4][::-1]) == data[4][::-1]
    for value in (bytes((8 << 20) + 1), "ä" * (5 << 20)):
        with pytest.raises(EPInputError, match=r"value=<.* of \d+ bytes>; expected text or bytes, 8388608 bytes at most"):
            a.set("large", value)


def test_many_keys(client: StoreClient) -> None:
    keys = [f"{i:0>4000}" for i in range(2500)]
    for key in keys:
        client.set(key, key[-4:])
    assert client.multi_get(keys) == [key[-4:].encode() for key in keys]
    assert client.check(keys)
    client.delete_key(keys[-1])
    assert not client.check(keys)
    with pytest.raises(StoreError, match="has no value"):
        client.multi_get(keys)


@pytest.mark.parametrize("key", ["x" * 4097, "ä" * 2100, b"bytes", None, 5])
def test_wrong_keys(client: StoreClient, key: Any) -> None:
    with pytest.raises(EPInputError, match="key="):
        client.get(key)
    with pytest.raises(EPInputError, match="key="):
        client.check(["a", key])


@pytest.mark.parametrize("value", [None, 5, bytearray(3), ["x"]])
def test_wrong_values(client: StoreClient, value: Any) -> None:
    with pytest.raises(EPInputError, match="value=<"):
        client.set("a", value)


def test_threads_share_a_client(connect: Connect) -> None:
    clients = [connect(), connect()]

    def work(number: int) -> None:
        for i in range(100):
            clients[number % 2].add("sum", 1)
            clients[number % 2].set(f"own {number}", str(i))
            assert clients[number % 2].get(f"own {number}") == b"%d" % i

    found: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found
    assert clients[0].get("sum") == b"1000"


def test_processes_share_a_server(server: StoreServer, python: Start, client: StoreClient) -> None:
    """They add without a lock, and with one that compare_set makes."""
    code = """
for _ in range(100):
    client.add("sum", 1)
    while client.compare_set("lock", "", str(os.getpid())) != b"%d" % os.getpid():
        pass
    client.set("guarded", str(int(client.get("guarded")) + 1))
    assert client.delete_key("lock")
client.close()
"""
    client.set("guarded", "0")
    started = [python(CLIENT + code, server.port, TOKEN) for _ in range(4)]
    assert [process.wait(120) for process in started] == [0] * 4
    assert client.multi_get(["sum", "guarded"]) == [b"400", b"400"]
    assert not server._clients - {next(iter(server._clients))}


# --- wills -------------------------------------------------------------------------------------------------------------------------

ENDS = {
    "kill": "os.kill(os.getpid(), 9)",
    "exception": "raise SystemExit(3)",
    "end": "",
    "drop": "del client; print('dropped', flush=True); time.sleep(600)",
    "fork": "time.sleep(600) if os.fork() == 0 else os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_will_counts_after_an_end_without_close(server: StoreServer, python: Start, end: str) -> None:
    """A forked process, such as a data loader, keeps no connection of a parent that was killed."""
    python(f"{CLIENT}client.will('gone', 'first')\nclient.will('gone', 'yes')\n{ENDS[end]}", server.port, TOKEN)
    wait_until(lambda: values(server) == {"gone": b"yes"})
    assert not server._clients


def test_close_cancels_the_wills(server: StoreServer, connect: Connect) -> None:
    first, second = connect(), connect()
    first.will("gone", "yes")
    second.will("other", "yes")
    first.close()
    first.close()
    second._connection.socket.close()
    wait_until(lambda: not server._clients)
    assert values(server) == {"other": b"yes"}
    with pytest.raises(StoreError, match="is closed here"):
        first.get("a")


def test_a_will_comes_after_the_last_request(server: StoreServer, connect: Connect) -> None:
    for number in range(20):
        one = connect()
        one.will("key", f"will {number}")
        one.set("key", "request")
        one._connection._outgoing = memoryview(frames.pack(9, [b"set", b"last", b"%d" % number])), []
        one._connection._send(time.monotonic() + 60)
        one._connection.socket.close()  # before the reply
        wait_until(lambda number=number: values(server)["key"] == f"will {number}".encode())
        assert values(server)["last"] == b"%d" % number


def test_a_client_has_few_wills(client: StoreClient) -> None:
    for number in range(1024):
        client.will(str(number), "x")
    client.will("0", "y")
    with pytest.raises(StoreError, match="refuses will"):
        client.will("one more", "x")


# --- tokens and addresses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + " "])
def test_another_token(server: StoreServer, client: StoreClient, token: str) -> None:
    start = time.monotonic()
    with pytest.raises(StoreError, match=r"the store at 127.0.0.1:\d+ has another token; .* DEEPEP_RT_STORE_TOKEN"):
        StoreClient("127.0.0.1", server.port, token, 120.0)
    assert time.monotonic() - start < 60, "the client does not try again"
    client.set("a", "others go on")
    wait_until(lambda: not server._greeted)


def test_no_token(connect: Connect) -> None:
    made = StoreServer()
    made.serve_in_thread()
    try:
        StoreClient("localhost", made.port).close()
        with pytest.raises(StoreError, match="has another token"):
            StoreClient("127.0.0.1", made.port, "some")
    finally:
        made.close()


def read_frame(connection: socket.socket) -> list[bytes]:
    (length,) = frames.LENGTH.unpack(connection.recv(4, socket.MSG_WAITALL))
    return frames.unpack(connection.recv(length, socket.MSG_WAITALL))[1]


def test_a_false_server_learns_no_token_and_gets_no_request() -> None:
    heard = b""

    def serve(listener: socket.socket) -> None:
        nonlocal heard
        with listener.accept()[0] as connection:
            connection.sendall(frames.pack(0, [frames.PROTOCOL, b"c" * frames.CHALLENGE_BYTES]))
            while part := connection.recv(1 << 16):
                heard += part
                connection.sendall(frames.pack(1, [frames.OK, b"p" * 32]))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        with pytest.raises(StoreError, match="has another token"):
            StoreClient("127.0.0.1", listener.getsockname()[1], TOKEN)
        thread.join(60)
    assert TOKEN.encode() not in heard
    assert len(heard) < frames.MAX_GREETING_BYTES


def test_a_proof_serves_one_connection(server: StoreServer) -> None:
    answer = b"a" * frames.CHALLENGE_BYTES
    replies = []
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        _, challenge = read_frame(connection)
        shown = [answer, frames.proof(TOKEN, b"client", challenge, answer)]
        connection.sendall(frames.pack(1, shown))
        replies.append(read_frame(connection))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        read_frame(connection)
        connection.sendall(frames.pack(1, shown))
        replies.append(read_frame(connection))
        assert connection.recv(1) == b""
    assert replies == [[frames.OK, frames.proof(TOKEN, b"server", challenge, answer)], [frames.REFUSED]]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_other_hosts_need_a_token(host: str, connect: Connect) -> None:
    with pytest.raises(EPConfigError, match=r"host='.*' without a token; .* DEEPEP_RT_STORE_TOKEN"):
        StoreServer(host)
    made = StoreServer(host, token=TOKEN)
    made.serve_in_thread()
    try:
        StoreClient("localhost" if host == "::" else "127.0.0.1", made.port, TOKEN).close()
    finally:
        made.close()


def test_addresses_that_cannot_be_used(server: StoreServer) -> None:
    for host, port in (("127.0.0.1", server.port), ("192.0.2.1", 0), ("no such host.invalid", 0)):
        with pytest.raises(EPUnavailableError, match=f"host={host!r}, port={port}: the store cannot listen"):
            StoreServer(host, port, TOKEN)
    for wrong in (dict(port=65536), dict(port=-1), dict(port="1"), dict(host=None), dict(token=None)):
        with pytest.raises(EPConfigError, match=rf"{next(iter(wrong))}="):
            StoreServer(**wrong)
    for wrong in (dict(port=0), dict(host=None), dict(token=b"x"), dict(timeout_s=0)):
        with pytest.raises(EPInputError, match=rf"{next(iter(wrong))}="):
            StoreClient(**{"host": "127.0.0.1", "port": server.port, **wrong})
    with pytest.raises(StoreError, match="has no address"):
        StoreClient("no such host.invalid", 1)


def test_an_address_of_ip_version_6() -> None:
    try:
        made = StoreServer("::1")
    except EPUnavailableError:
        pytest.skip("this machine has no IPv6")
    thread = made.serve_in_thread()
    host, _, port = made.address.rpartition(":")
    assert host == "[::1]"
    for name in (host, "::1"):
        StoreClient(name, int(port)).close()
    made.close()
    thread.join(60)
    with pytest.raises(StoreError, match=rf"the store at \[::1\]:{port} was not reached"):
        StoreClient(host, int(port), timeout_s=0.1)


def test_a_server_may_follow_another_one_at_its_port() -> None:
    port = 0
    for _ in range(3):
        made = StoreServer(port=port)
        port = made.port
        thread = made.serve_in_thread()
        one = StoreClient("127.0.0.1", port)
        made.close()
        thread.join(60)
        with pytest.raises(StoreError, match="has ended"):
            one.get("a")


def test_a_client_waits_for_its_server() -> None:
    port = free_port()
    made: list[StoreServer] = []

    def start() -> None:
        time.sleep(0.3)
        made.append(StoreServer(port=port))
        made[0].serve_in_thread()

    threading.Thread(target=start).start()
    StoreClient("127.0.0.1", port, timeout_s=60.0).close()
    made[0].close()
    start_time = time.monotonic()
    with pytest.raises(StoreError, match=r"was not reached within 0.3 s \(Connection refused\).* Check the address"):
        StoreClient("127.0.0.1", port, timeout_s=0.3)
    assert time.monotonic() - start_time < 30


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frames.pack(0, [b"deepep_rt store 2", b"c" * 32]), frames.pack(0, [])]
)
def test_another_program_at_the_port(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].sendall(said), daemon=True).start()
        with pytest.raises(StoreError, match="is another program"):
            StoreClient("127.0.0.1", listener.getsockname()[1])


def test_a_silent_program_at_the_port(seconds: Seconds) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(StoreError, match=r"was not reached within 0.2 s"):
        StoreClient("127.0.0.1", listener.getsockname()[1], timeout_s=0.2)


# --- bad clients -------------------------------------------------------------------------------------------------------------------


def raw(server: StoreServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 60)


def ended(connection: socket.socket) -> bool:
    """Read until the server ends the connection."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def test_garbage(server: StoreServer, client: StoreClient) -> None:
    rng = random.Random(1)
    for number in range(100):
        with raw(server) as connection:
            with suppress(ConnectionError):  # the server may have ended it
                connection.sendall(
                    rng.choice([b"", b"GET / HTTP/1.1\r\n\r\n", frames.LENGTH.pack(rng.randrange(80))]) + rng.randbytes(200)
                )
                connection.shutdown(socket.SHUT_WR)
            assert ended(connection)
        client.set("number", str(number))
        assert client.get("number") == b"%d" % number
    wait_until(lambda: not server._greeted)
    assert len(server._clients) == 1


@pytest.mark.parametrize(
    "data",
    [
        frames.LENGTH.pack(frames.MAX_FRAME_BYTES + 1),
        frames.LENGTH.pack(0xFFFFFFFF),
        frames.LENGTH.pack(0),
        frames.LENGTH.pack(6) + bytes(6),
        frames.LENGTH.pack(12) + bytes(4) + frames.LENGTH.pack(5) + bytes(4),
        frames.LENGTH.pack(8) + bytes(4) + frames.LENGTH.pack(0xFFFFFFFF),
        frames.pack(1, []),
        frames.pack(1, [b"nonsense"]),
        frames.pack(1, [b"set", b"key"]),
        frames.pack(1, [b"add", b"key", b"x"]),
        frames.pack(1, [b"check"] + [b"key"] * (frames.MAX_KEYS + 1)),
        frames.pack(1, [b"set", b"key", bytes(frames.MAX_VALUE_BYTES + 1)]),
    ],
    ids=range(12),
)
def test_a_client_that_breaks_the_protocol(server: StoreServer, connect: Connect, data: bytes) -> None:
    bad, good = connect(), connect()
    bad.will("gone", "yes")
    bad._connection._outgoing = memoryview(data), []
    with suppress(OSError):
        bad._connection._send(time.monotonic() + 60)
    with pytest.raises(StoreError, match="has ended the connection"):
        bad.get("gone")
    assert good.get("gone") == b"yes"
    assert values(server) == {"gone": b"yes"}


def test_frames_of_any_bytes() -> None:
    rng = random.Random(2)
    for _ in range(20_000):
        with suppress(ValueError):
            number, fields = frames.unpack(
                rng.randbytes(4)
                + b"".join(bytes((0, 0, 0, rng.randrange(9))) + rng.randbytes(rng.randrange(9)) for _ in range(3))
            )
            assert frames.unpack(frames.pack(number, fields)[4:]) == (number, fields)


def test_connections_that_show_nothing_are_dropped(
    server: StoreServer, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "_GREETING_S", 0.2)
    with raw(server) as silent, raw(server) as slow:
        slow.sendall(frames.LENGTH.pack(100))
        assert ended(silent)
        assert ended(slow)
    client.set("a", "b")


def test_many_silent_connections_keep_out_nobody(server: StoreServer, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_MAX_GREETED", 20)
    monkeypatch.setattr(store_server, "_GREETING_S", 600.0)
    silent = [raw(server) for _ in range(50)]
    connect().set("a", "b")
    assert all(ended(connection) for connection in silent[:30])
    assert len(server._greeted) == 19, "all but the client"
    for connection in silent:
        connection.close()


def test_the_selector_may_name_a_connection_that_was_dropped() -> None:
    made = StoreServer()
    with raw(made):
        made._accept(selectors.EVENT_READ)
        (connection,) = made._greeted
        made._drop(connection)
        made._go_on(connection, selectors.EVENT_READ)
    made.close()


def test_long_frames_need_a_token(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_GREETING_S", 600.0)
    with raw(server) as connection:
        connection.sendall(frames.LENGTH.pack(frames.MAX_GREETING_BYTES))
        assert ended(connection)


def test_a_slow_reader(server: StoreServer, connect: Connect, seconds: Seconds) -> None:
    """The server holds one reply for it, and answers the others meanwhile."""
    slow, other = connect(), connect()
    key = "large " * 600
    other.set(key, bytes(4 << 20))
    requests = b"".join(frames.pack(number, [b"get", key.encode()]) for number in range(1, 5000))  # more than sockets take
    slow._connection._outgoing = memoryview(requests), []
    with pytest.raises(store_client._Late):
        slow._connection._send(time.monotonic() + seconds(1.0))
    for number in range(50):
        assert other.add("sum", 1) == number + 1
    (connection,) = [one for one in server._clients if one.wanted == selectors.EVENT_WRITE]
    assert len(connection.outgoing) <= 5 << 20
    assert len(connection.incoming) < 1 << 20
    slow._connection._outgoing = memoryview(b""), []
    for number in range(1, 10):
        assert slow._connection.read(time.monotonic() + 60) == (number, [frames.OK, bytes(4 << 20)])
    slow._connection.socket.close()


def test_a_client_may_be_forked(server: StoreServer, python: Start) -> None:
    """The child makes a client of its own, and the parent's goes on. The lock of the parent's may be held at the fork."""
    code = """
from deepep_rt.comm.store_client import StoreError
client.will("gone", "yes")
client._lock.acquire()
if os.fork() == 0:
    try:
        client.get("a")
    except StoreError as error:
        assert "expected a client of this process" in str(error), error
    client.close()
    own = StoreClient("127.0.0.1", int(sys.argv[1]), sys.argv[2])
    own.set("child", "1")
    own.close()
    os._exit(0)
client._lock.release()
assert os.wait()[1] == 0
assert client.get("child") == b"1"
client.close()
"""
    assert python(CLIENT + code, server.port, TOKEN).wait(120) == 0
    assert values(server) == {"child": b"1"}


def test_a_fork_of_the_server_keeps_no_connection(python: Start) -> None:
    code = """
import os, time
from deepep_rt.comm.store_server import StoreServer
server = StoreServer()
server.serve_in_thread()
print(server.port, flush=True)
input()
time.sleep(600) if os.fork() == 0 else os.kill(os.getpid(), 9)
"""
    process = python(code)
    one = StoreClient("127.0.0.1", int(read_line(process)), timeout_s=300.0)
    process.stdin.write("\n")
    process.stdin.flush()
    process.wait(60)
    with pytest.raises(StoreError, match="has ended"):
        one.get("a")


class Interrupt(Exception):
    """What a handler of a signal raises, as Ctrl-C does."""


def test_signals_interrupt_requests(client: StoreClient) -> None:
    """The client stays usable, and each request is done once or not at all."""
    rng, armed = random.Random(3), False
    numbers_interrupted: list[int] = []
    held, total = b"", 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Interrupt

    before = signal.signal(signal.SIGALRM, handle)
    try:
        start = time.perf_counter()
        for _ in range(100):
            client.add("sum", 0)
        usual_s = (time.perf_counter() - start) / 100
        for number in itertools.count():
            size = rng.choice([0, 0, 0, 300_000])
            after_s = rng.uniform(0.01, 3.0) * usual_s * (10 if size else 1)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, after_s)
                client.set("key", f"{number} {size * 'x'}")
                client.add("sum", 1)
                armed = False
            except Interrupt:
                numbers_interrupted.append(number)
            signal.setitimer(signal.ITIMER_REAL, 0)
            known = (held, total)
            held, total = client.get("key").split()[0], client.add("sum", 0)
            done = (b"%d" % number, known[1] + 1)
            possible = [known, (done[0], known[1]), done] if number in numbers_interrupted[-1:] else [done]
            assert (held, total) in possible
            if len(numbers_interrupted) == 500:
                break
    finally:
        signal.signal(signal.SIGALRM, before)


# --- ends of the server ------------------------------------------------------------------------------------------------------------

SERVER = f"""
from deepep_rt.comm.store_server import StoreServer
server = StoreServer(token={TOKEN!r})
print(server.port, flush=True)
server.serve()
"""


@pytest.mark.parametrize("ends_during_a_request", [False, True])
def test_a_killed_server(python: Start, ends_during_a_request: bool, seconds: Seconds) -> None:
    process = python(SERVER)
    one = StoreClient("127.0.0.1", int(read_line(process)), TOKEN, timeout_s=300.0)
    one.set("a", "b")
    if ends_during_a_request:
        process.send_signal(signal.SIGSTOP)
        threading.Timer(0.3, process.kill).start()
    else:
        process.kill()
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"the store at 127.0.0.1:\d+ has ended the connection .* Check whether"):
            one.get("a")
    assert time.monotonic() - start < seconds(5)
    one.close()


def test_a_server_that_hangs(python: Start, seconds: Seconds) -> None:
    """Requests raise in time. The client works again when the server does, and takes no late reply for another one."""
    process = python(SERVER)
    one = StoreClient("127.0.0.1", int(read_line(process)), TOKEN, timeout_s=60.0)
    one.set("a", "b")
    one._timeout_s = 0.3
    process.send_signal(signal.SIGSTOP)
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"did not answer get within 0\.3 s"):
            one.get("a")
    with pytest.raises(StoreError, match=r"did not answer set within 0\.3 s"):
        one.set("large", bytes(8 << 20))  # of which the kernel takes a part
    for _ in range(3):
        with pytest.raises(StoreError, match=r"did not answer add within 0\.3 s"):
            one.add("n", 1)
    assert time.monotonic() - start < seconds(10)
    process.send_signal(signal.SIGCONT)
    one._timeout_s = 60.0
    assert one.get("a") == b"b"
    assert one.get("large") == bytes(8 << 20)
    assert not one.check(["n"]), "a request that cannot begin is not kept"


def test_a_server_ends_with_its_last_client(seconds: Seconds) -> None:
    made = StoreServer(ends_with_last_client=True)
    thread = made.serve_in_thread()
    thread.join(0.2)
    assert thread.is_alive()
    first, second = (StoreClient("127.0.0.1", made.port) for _ in range(2))
    first.close()
    thread.join(0.2)
    assert thread.is_alive()
    second._connection.socket.close()
    thread.join(seconds(5))
    assert not thread.is_alive()


def test_a_server_without_a_first_client_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_FIRST_CLIENT_S", 0.2)
    for ends in (True, False):
        made = StoreServer(ends_with_last_client=ends)
        thread = made.serve_in_thread()
        thread.join(60.0 if ends else 0.6)
        assert thread.is_alive() is not ends
        made.close()
        thread.join(60)
        assert not thread.is_alive()


def test_a_server_that_never_served() -> None:
    made = StoreServer()
    made.close()
    made.serve()
    with pytest.raises(StoreError):
        StoreClient("127.0.0.1", made.port, timeout_s=0.1)


# --- communicators -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(connect: Connect) -> list[StoreCommunicator]:
    return [StoreCommunicator(connect(), "test", rank, 3) for rank in range(3)]


def test_collectives_and_messages(server: StoreServer, ranks: list[StoreCommunicator]) -> None:
    for number in range(20):
        assert (
            on_all(ranks, lambda comm, number=number: comm.allgather((number, comm.Get_rank())))
            == [[(number, rank) for rank in range(3)]] * 3
        )
    outgoing = [np.arange(3)[:, None] + 10 * rank for rank in range(3)]
    incoming = [np.zeros((3, 1), int) for _ in range(3)]
    on_all(ranks, lambda comm: comm.Alltoall(outgoing[comm.Get_rank()], incoming[comm.Get_rank()]))
    assert [array[:, 0].tolist() for array in incoming] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    sent = np.random.default_rng(1).integers(0, 255, 20 << 20, np.uint8)
    received = np.zeros_like(sent)
    ranks[0].Isend(sent, 1, tag=1)
    assert ranks[1].Irecv(received, 0, tag=1).Test()
    assert (received == sent).all()
    assert len(values(server)) == 3, "all keys but the last are deleted"


def test_a_buffer(ranks: list[StoreCommunicator], seconds: Seconds) -> None:
    sizes = dict(
        num_max_tokens_per_rank=8, hidden=64, num_topk=1, num_experts=3, timeout_s=seconds(20.0), backend="host", dtype="float32"
    )

    def call(comm: StoreCommunicator) -> int:
        with Buffer(comm, **sizes) as buffer:
            x = np.full((8, 64), comm.Get_rank(), np.float32)
            sent = buffer.dispatch(x, np.arange(8)[:, None] % 3)
            return int(buffer.combine(sent.recv_x, sent.handle).x[0, 0])

    assert on_all(ranks, call) == [0, 1, 2]


def test_a_communicator_whose_store_has_ended(server: StoreServer, ranks: list[StoreCommunicator]) -> None:
    server.close()
    with pytest.raises(EPUnavailableError, match=r"does not answer \(the store at 127.0.0.1:\d+ has ended the connection"):
        ranks[0].allgather(1)


def test_processes_of_which_one_is_killed(server: StoreServer, python: Start) -> None:
    code = """
from deepep_rt.comm.store import StoreCommunicator
rank = int(sys.argv[3])
client.will(f"lost {rank}", "yes")
comm = StoreCommunicator(client, "ranks", rank, 3)
for number in range(50):
    assert comm.allgather((number, rank)) == [(number, other) for other in range(3)]
if rank == 2:
    os.kill(os.getpid(), 9)
while not client.check(["lost 2"]):
    time.sleep(0.001)
comm = StoreCommunicator(client, "survivors", rank, 2)
assert comm.allgather(rank) == [0, 1]
client.close()
"""
    started = [python(CLIENT + code, server.port, TOKEN, rank) for rank in range(3)]
    assert [process.wait(120) for process in started] == [0, 0, -signal.SIGKILL]
    assert {key for key in values(server) if key.startswith("lost")} == {"lost 2"}


# --- processes of their own --------------------------------------------------------------------------------------------------------


@needs_typer
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(number: int) -> None:
    command = [sys.executable, "-m", "deepep_rt", "store"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=environment(DEEPEP_RT_STORE_TOKEN=TOKEN), **pipes)
    try:
        host, _, port = read_line(process).rpartition(":")
        with pytest.raises(StoreError, match="has another token"):
            StoreClient(host, int(port))
        one = StoreClient(host, int(port), TOKEN)
        one.set("a", "b")
        process.send_signal(number)
        assert process.communicate(timeout=60) == ("", "")
    finally:
        process.kill()
    assert process.returncode == 0
    with pytest.raises(StoreError, match="has ended"):
        one.get("a")


@needs_typer
def test_the_command_needs_a_token_for_other_hosts() -> None:
    command = [sys.executable, "-m", "deepep_rt", "store", "--host", "0.0.0.0"]
    done = subprocess.run(
        command, env=environment(DEEPEP_RT_STORE_TOKEN=""), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: host='0.0.0.0' without a token")


@needs_typer
def test_a_server_in_the_background_outlives_the_rank_that_started_it(python: Start) -> None:
    """It ends with its last client. Neither a command line nor a report shows the token."""
    code = f"""
import os
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import start_in_background
host, port = start_in_background({TOKEN!r})
client = StoreClient(host, port, {TOKEN!r})
client.will("gone", "yes")
print(port, flush=True)
input()
"""
    process = python(code)
    port = int(read_line(process))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (pid,) = [int(child) for child in children if b"store" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert os.getsid(pid) == pid
    one = StoreClient("127.0.0.1", port, TOKEN)
    process.kill()
    wait_until(lambda: one.check(["gone"]))
    one.close()
    wait_until(lambda: not Path(f"/proc/{pid}/exe").exists())


@needs_typer
def test_a_server_in_the_background_leaves_no_zombie() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/children").read_text().split())

    before = children()
    host, port = start_in_background("")
    (child,) = children() - before
    StoreClient(host, port).close()
    wait_until(lambda: not Path(f"/proc/{child}").exists())


def test_a_server_in_the_background_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(program))
    for script, limit_s, message in (
        ("echo no address; sleep 0.1; echo why >&2", 60.0, r"\(why\)"),
        ("exit 0", 60.0, r"\(it printed no address\)"),
        ("exec sleep 600", 0.5, r"\(it printed no address\); expected its address within 0.5 s"),
    ):
        monkeypatch.setattr(store_server, "_START_S", limit_s)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        with pytest.raises(EPUnavailableError, match=f"the store does not start {message}"):
            start_in_background("x")


def test_reports_hide_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_STORE_TOKEN", TOKEN)
    assert _env.store_token() == TOKEN
    assert _env.variables()["DEEPEP_RT_STORE_TOKEN"] == "(a secret)"
    assert _env.with_store_token("other")["DEEPEP_RT_STORE_TOKEN"] == "other"
    assert _env.store_token() == TOKEN
    assert not [text for text in (*_env.unknown(), *_env.mistakes()) if "STORE" in text]
