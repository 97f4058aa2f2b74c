"""Run `soak --kill` with ranks that this program damages: `damaged_kills.py DAMAGE OPTIONS...`. It starts itself for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp

import limits

from deepep_rt import Buffer
from deepep_rt.arrays.view import host_bytes
from deepep_rt.backends.host.backend import HostBackend
from deepep_rt.cli import app as cli
from deepep_rt.soak import kill, member, processes

shrink, combine = Buffer.shrink, HostBackend.combine


def flip_a_bit_after_a_change(backend, *arguments):
    """Change the last bit of a sum once members have gone or come."""
    result = combine(backend, *arguments)
    sums = host_bytes(result.views["x"]).reshape(-1)
    if backend.info.since and sums.size:
        sums[-1] ^= 1
    return result


def hang(buffer, lost=None):
    time.sleep(1000)


def leak(buffer, lost=None):
    """Keep descriptors, a file, shared memory and a process at each change."""
    found = shrink(buffer, lost)
    for _ in range(5):
        os.open("/dev/null", os.O_RDONLY)
    mkdtemp()
    Path(f"/dev/shm/test.{os.getpid()}").touch()
    subprocess.Popen(["sleep", "100"])
    return found


DAMAGES = {
    "bit": (HostBackend, "combine", flip_a_bit_after_a_change),
    "hang": (Buffer, "shrink", hang),
    "leak": (Buffer, "shrink", leak),
}


def main():
    damage, *words = sys.argv[1:]
    if words[0].startswith("{"):
        setattr(*DAMAGES[damage])
        sys.exit(member.main(words))
    kill._GRACE_S = limits.seconds(4)
    processes.COMMAND = [sys.executable, __file__, damage]
    cli.run(["soak", "--kill", "--backend", "host", *words])


main()
