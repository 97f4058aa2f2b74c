"""Each way in which ranks share GPU memory, and the choice among them, between real processes without a GPU: see `virtual_gpu`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import virtual_gpu
from mpi4py import MPI
from spmd import idle_barrier, main, raises

from deepep_rt import EPConfigError, EPOutOfMemoryError, EPUnavailableError
from deepep_rt._env import MEMORY_WAYS
from deepep_rt.comm import convert, descriptors
from deepep_rt.cuda import heap
from deepep_rt.cuda.transport import MemoryRequest

GPU = virtual_gpu.install()
LIMIT_S, BYTES = 20.0, 3 * virtual_gpu.UNIT
_MEMORY, _FOLDER = "DEEPEP_RT_SYMMETRIC_MEMORY", "DEEPEP_RT_SOCKET_DIR"
_NEW_NETWORK = 0x40000000
_usual_socket, _usual_copy = socket.socket, descriptors._copy_out


class _NoNames(socket.socket):
    """A socket that can have no abstract name."""

    def bind(self, address: Any) -> None:
        if address.startswith("\0"):
            raise PermissionError(errno.EPERM, "not permitted")
        super().bind(address)


class _NoMessages(socket.socket):
    """A socket that cannot pass descriptors."""

    def sendmsg(self, body: Any, ancillary: Any = (), *more: Any) -> int:
        if ancillary:
            raise OSError(errno.ETOOMANYREFS, "too many")
        return super().sendmsg(body, ancillary, *more)


def _refuse(*_: Any) -> int:
    raise PermissionError(errno.EPERM, "not permitted")


@contextlib.contextmanager
def _machine(
    *, names: bool = True, copies: bool = True, fabric: bool = False, fail: str = "", **variables: str
) -> Iterator[None]:
    """Say what works on this rank, and which variables are set."""
    descriptors.socket.socket = socket.socket if names else _NoNames  # type: ignore[misc]
    descriptors._copy_out = _usual_copy if copies else _refuse
    GPU.has_fabric, GPU.fail = fabric, set(fail.split())
    os.environ.update(variables)
    try:
        yield
    finally:
        descriptors.socket.socket, descriptors._copy_out = _usual_socket, _usual_copy  # type: ignore[misc]
        GPU.has_fabric, GPU.fail = False, set()
        for name in variables:
            del os.environ[name]


@contextlib.contextmanager
def _folder(comm: MPI.Intracomm) -> Iterator[str]:
    """Yield a folder of all ranks, with a path that is too long for the name of a socket."""
    rank = comm.Get_rank()
    base = comm.bcast(tempfile.mkdtemp() if rank == 0 else None)
    path = Path(base, "x" * 120)
    if rank == 0:
        path.mkdir(mode=0o700)
    idle_barrier(comm)
    yield str(path)
    idle_barrier(comm)
    if rank == 0:
        shutil.rmtree(base)


def _open() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:gpu")


def _allocate(comm: MPI.Intracomm) -> heap.HeapMemory:
    return heap.HeapMemory(convert.communicator_of(comm), MemoryRequest(BYTES, LIMIT_S))


def _use(comm: MPI.Intracomm, memory: heap.HeapMemory) -> None:
    """Let each rank write to the region of the next one, and check what came from the rank before."""
    rank, size = comm.Get_rank(), comm.Get_size()
    virtual_gpu.words(memory.peers[(rank + 1) % size], BYTES)[:] = 1000 * size + rank
    idle_barrier(comm)
    assert (virtual_gpu.words(memory.ptr, BYTES) == 1000 * size + (rank - 1) % size).all()
    idle_barrier(comm)


def _chosen(comm: MPI.Intracomm) -> str:
    """Return the way of new memory, after its use."""
    before = _open()
    memory = _allocate(comm)
    _use(comm, memory)
    assert memory.all_free(True, LIMIT_S)
    memory.free()
    assert (_open(), GPU.left) == (before, (0, 0, 0)), memory.way
    assert len(set(comm.allgather(memory.way))) == 1
    return memory.way


def check_each_way_can_be_forced(comm: MPI.Intracomm) -> None:
    with _folder(comm) as folder:
        for way in MEMORY_WAYS:
            with _machine(fabric=True, **{_MEMORY: f"heap:{way}", _FOLDER: folder}):
                assert _chosen(comm) == way
        idle_barrier(comm)
        assert os.listdir(folder) == []


def check_memory_of_each_way_sleeps(comm: MPI.Intracomm) -> None:
    """At its addresses, also in another way than before. The addresses of "ipc" cannot be kept."""
    with _folder(comm) as folder:
        for way in MEMORY_WAYS:
            with _machine(fabric=True, **{_MEMORY: f"heap:{way}", _FOLDER: folder}):
                memory = _allocate(comm)
            places = memory.ptr, list(memory.peers)
            assert (memory.is_local, memory.heap) == ((False, None) if way == "ipc" else (True, memory))
            if memory.heap is not None:
                memory.sleep()
                with _machine(fabric=True, **{_FOLDER: folder}):
                    memory.wake(convert.communicator_of(comm), LIMIT_S)
                assert memory.way == way
                memory.sleep()
                with _machine(names=way != "sockets", **{_MEMORY: "heap:ipc" if way == "pidfd" else "heap"}):
                    memory.wake(convert.communicator_of(comm), LIMIT_S)
                assert memory.way == ("pidfd" if way in ("sockets", "pidfd") else "sockets")
            assert (memory.ptr, memory.peers) == places
            _use(comm, memory)
            assert memory.all_free(True, LIMIT_S)
            memory.free()
            assert GPU.left == (0, 0, 0)


def check_the_order(comm: MPI.Intracomm) -> None:
    """One rank decides: what does not work on the last one works on none."""
    is_last = comm.Get_rank() == comm.Get_size() - 1
    is_alone = comm.Get_size() == 1  # it copies from no process
    with _folder(comm) as folder:
        with _machine(fabric=True):
            assert _chosen(comm) == "sockets"
        with _machine(names=not is_last, **{_FOLDER: folder}):
            assert _chosen(comm) == "files"
        with _machine(names=not is_last):
            assert _chosen(comm) == "pidfd"
        if not is_alone:
            with _machine(names=not is_last, copies=not is_last, fabric=True):
                assert _chosen(comm) == "fabric"
            with _machine(names=not is_last, copies=not is_last, fabric=not is_last):
                assert _chosen(comm) == "ipc"
            with _machine(names=is_last, copies=not is_last, fabric=is_last, **({_FOLDER: folder} if is_last else {})):
                assert _chosen(comm) == "ipc"  # the ranks disagree about what works
        with _machine(fail="create"):
            assert _chosen(comm) == "ipc"  # a GPU without virtual memory


def check_no_way_works(comm: MPI.Intracomm) -> None:
    """The error names each way with its reason, on all ranks. Nothing stays."""
    if comm.Get_size() == 1:
        return
    before, last = _open(), comm.Get_size() - 1
    is_last = comm.Get_rank() == last
    for step, code in (("ipc", "NOT_SUPPORTED"), ("open", "MAP_FAILED")):
        with (
            _machine(names=not is_last, copies=not is_last, fabric=not is_last, fail=step if is_last else ""),
            raises(
                EPUnavailableError,
                f"sockets: rank {last} cannot open a socket: EPERM",
                "files: rank 0 cannot open a socket: DEEPEP_RT_SOCKET_DIR is not set",
                f"pidfd: rank {last} may not copy descriptors of rank 0: EPERM",
                f"fabric: rank {last}: the CUDA driver reports CUDA_ERROR_NOT_PERMITTED",
                f"ipc: rank {last}: the CUDA driver reports CUDA_ERROR_{code}",
            ) as caught,
        ):
            _allocate(comm)
        assert len(set(comm.allgather(str(caught.error)))) == 1
        assert (_open(), GPU.left) == (before, (0, 0, 0)), step
    assert _chosen(comm) == "sockets"


def check_a_forced_way_that_fails(comm: MPI.Intracomm) -> None:
    """No other way is tried. All ranks have to force the same."""
    before, is_last = _open(), comm.Get_rank() == comm.Get_size() - 1
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("sockets", {"names": not is_last}, "EPERM"),
        ("files", {}, "DEEPEP_RT_SOCKET_DIR is not set"),
        ("fabric", {"fabric": not is_last}, "CUDA_ERROR_NOT_PERMITTED"),
        ("ipc", {"fail": "ipc" if is_last else ""}, "CUDA_ERROR_NOT_SUPPORTED"),
    ]
    if comm.Get_size() > 1:
        cases.append(("pidfd", {"copies": not is_last}, "EPERM"))
    for way, works, reason in cases:
        with _machine(**works, **{_MEMORY: f"heap:{way}"}):
            with raises(EPUnavailableError, f"by {way}", reason, "DEEPEP_RT_SYMMETRIC_MEMORY=heap lets") as caught:
                _allocate(comm)
            assert not any(f"{other}:" in str(caught.error) for other in MEMORY_WAYS if other != way)
        assert (_open(), GPU.left) == (before, (0, 0, 0)), way
    if comm.Get_size() > 1:
        with (
            _machine(**{_MEMORY: "heap:pidfd" if is_last else "heap"}),
            raises(EPConfigError, "none", "pidfd", "same on all ranks"),
        ):
            _allocate(comm)
    assert GPU.left == (0, 0, 0)


def check_too_little_memory(comm: MPI.Intracomm) -> None:
    """Another way would not find more."""
    before = _open()
    for way in ("", ":fabric", ":ipc"):
        GPU.num_bytes = 0 if comm.Get_rank() == 0 else 1 << 30
        try:
            with _machine(fabric=True, **{_MEMORY: f"heap{way}"}), raises(EPOutOfMemoryError, "GB of memory for a Buffer"):
                _allocate(comm)
        finally:
            GPU.num_bytes = 1 << 30
        assert (_open(), GPU.left) == (before, (0, 0, 0)), way


def check_growth_in_each_way(comm: MPI.Intracomm) -> None:
    """It needs descriptors."""
    with _folder(comm) as folder:
        for way in MEMORY_WAYS:
            with _machine(fabric=True, **{_MEMORY: f"heap:{way}", _FOLDER: folder}):
                memory = _allocate(comm)
                idle_barrier(comm)
                if way in descriptors.WAYS:
                    offset, size = memory.grow(BYTES, LIMIT_S)
                    idle_barrier(comm)
                    virtual_gpu.words(memory.peers[0] + offset, size)[comm.Get_rank()] = 7 + comm.Get_rank()
                    idle_barrier(comm)
                    if comm.Get_rank() == 0:
                        found = virtual_gpu.words(memory.ptr + offset, size)[: comm.Get_size()]
                        assert found.tolist() == [7 + rank for rank in range(comm.Get_size())]
                else:
                    with raises(EPOutOfMemoryError, f"way={way}", "a way with descriptors"):
                        memory.grow(BYTES, LIMIT_S)
                idle_barrier(comm)
                assert memory.all_free(True, LIMIT_S)
                memory.free()
    assert GPU.left == (0, 0, 0)


def check_wrong_folders(comm: MPI.Intracomm) -> None:
    """All ranks refuse a folder that is wrong on the last one."""
    before, is_last = _open(), comm.Get_rank() == comm.Get_size() - 1
    with _folder(comm) as good:
        modes = {"shared": 0o777, "sticky": 0o1777, "group": 0o770, "foreign": 0o755}
        base = tempfile.mkdtemp()
        for name, mode in modes.items():
            os.mkdir(os.path.join(base, name))
            os.chmod(os.path.join(base, name), mode)
        Path(base, "file").touch()
        cases = [("relative", "expected an absolute path"), (f"{base}/none", "ENOENT"), (f"{base}/file", "ENOTDIR")]
        cases += [(f"{base}/{name}", f"other users may write to it (mode {mode:o})") for name, mode in list(modes.items())[:3]]
        if os.geteuid() == 0:
            os.chown(f"{base}/foreign", 12345, -1)
            cases += [(f"{base}/foreign", "user 12345 owns it")]
        for path, reason in cases:
            with (
                _machine(**{_MEMORY: "heap:files", _FOLDER: path if is_last else good}),
                raises(EPUnavailableError, f"rank {comm.Get_size() - 1} cannot open a socket", reason),
            ):
                _allocate(comm)
            assert (_open(), GPU.left) == (before, (0, 0, 0)), path
        idle_barrier(comm)
        assert os.listdir(good) == []
        shutil.rmtree(base)


def check_files_are_private_and_removed(comm: MPI.Intracomm) -> None:
    """Also after an error. Old files of ranks that were killed go, and no others do."""
    rank = comm.Get_rank()
    seen: set[int] = set()
    usual = descriptors._introduce

    def introduce(comm: Any, name: str, *more: Any) -> Any:
        found = usual(comm, name, *more)
        seen.update(stat.S_IMODE(os.lstat(os.path.join(folder, peer.name)).st_mode) for peer in found)
        comm.allgather(None)
        return found

    with _folder(comm) as folder:
        if rank == 0:
            for name, age_s in (("deepep_rt-old", 100), ("deepep_rt-new", 0), ("other", 100)):
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as leftover:
                    number = os.open(folder, os.O_RDONLY)
                    leftover.bind(f"/proc/self/fd/{number}/{name}")
                    os.close(number)
                os.utime(f"{folder}/{name}", (time.time() - age_s,) * 2)
            Path(folder, "deepep_rt-file").touch()
        idle_barrier(comm)
        before = _open()
        with _machine(**{_MEMORY: "heap:files", _FOLDER: folder}):
            descriptors._introduce = introduce
            try:
                assert _chosen(comm) == "files"
            finally:
                descriptors._introduce = usual
            assert seen == {0o600}
            if comm.Get_size() > 1:
                descriptors.socket.socket = _NoMessages  # type: ignore[misc]
                with raises(EPUnavailableError, "ETOOMANYREFS"):
                    _allocate(comm)
        assert (_open(), GPU.left) == (before, (0, 0, 0))
        idle_barrier(comm)
        assert sorted(os.listdir(folder)) == ["deepep_rt-file", "deepep_rt-new", "other"]


_STRANGER = """
import array, contextlib, os, socket, sys, time
folder, told = sys.argv[1:]
own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [own.fileno()]))]
os.chdir(folder)
print("ready", flush=True)
while os.getppid() > 1:
    with open(told) as file:
        tokens = file.read().split()
    for name in os.listdir("."):
        for body in (b"", b"x 0", b"\\xff" * 300, *(f"{token} {rank}".encode() for token in tokens for rank in range(3))):
            for ancillary in ([], rights, [*rights, *rights]):
                with contextlib.suppress(OSError):
                    own.sendmsg([body], ancillary, 0, name)
    time.sleep(5e-3)
"""


def check_strangers_at_the_files(comm: MPI.Intracomm) -> None:
    """Another process of this user knows the sockets and even the tokens, and sends what a peer would send."""
    before, usual, receive = _open(), descriptors._introduce, descriptors._receive
    notes = comm.bcast(tempfile.mkdtemp() if comm.Get_rank() == 0 else None)
    told = os.path.join(notes, "tokens")
    Path(told).touch()
    received: list[int] = []

    def introduce(*arguments: Any) -> Any:
        found = usual(*arguments)
        Path(told).write_text(" ".join(peer.token for peer in found))
        time.sleep(0.05)
        return found

    def count(own: socket.socket, peers: Any, rank: int, found: dict[int, int]) -> None:
        known = len(found)
        receive(own, peers, rank, found)
        received.append(len(found) - known)

    with _folder(comm) as folder:
        strangers = []
        if comm.Get_rank() == 0:
            words = [sys.executable, "-c", _STRANGER, folder, told]
            strangers = [subprocess.Popen(words, stdout=subprocess.PIPE)]
            assert strangers[0].stdout is not None
            assert strangers[0].stdout.readline()
        idle_barrier(comm)
        descriptors._introduce, descriptors._receive = introduce, count
        try:
            with _machine(**{_MEMORY: "heap:files", _FOLDER: folder}):
                for _ in range(3):
                    assert _chosen(comm) == "files"
        finally:
            descriptors._introduce, descriptors._receive = usual, receive
            for stranger in strangers:
                stranger.kill()
                stranger.communicate()
        assert comm.Get_size() == 1 or received.count(0), "no stranger has sent anything"
        assert received.count(1) == 2 * 3 * (comm.Get_size() - 1), "of the memory, and of the ends of mailboxes"
    if comm.Get_rank() == 0:
        shutil.rmtree(notes)
    assert _open() == before


def check_separate_network_namespaces(comm: MPI.Intracomm) -> None:
    """As one container a rank. Abstract names exist in one namespace only."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    moved = libc.unshare(_NEW_NETWORK) == 0
    try:
        if all(comm.allgather(moved)) and comm.Get_size() > 1:
            with _folder(comm) as folder, _machine(**{_FOLDER: folder}):
                assert _chosen(comm) == "files"
            assert _chosen(comm) == "pidfd"
            with _machine(**{_MEMORY: "heap:sockets"}), raises(EPUnavailableError, "ECONNREFUSED"):
                _allocate(comm)
        elif comm.Get_rank() == 0:
            print("this user may not make network namespaces", flush=True)
    finally:
        if moved:
            assert libc.setns(home, _NEW_NETWORK) == 0
        os.close(home)


if __name__ == "__main__":
    main(__name__)
