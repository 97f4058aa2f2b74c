"""Disassemble machine code with NVIDIA's nvdisasm. No GPU is needed."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import EPUnavailableError

WHEEL = "nvidia-cuda-nvdisasm"
"""The package with nvdisasm. It reads the machine code of older versions of CUDA too."""

INSTRUCTION_BYTES = 16

_BATCH_BYTES = 1 << 20  # of a process: this takes about a second, and starting one takes 0.3 s
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", re.MULTILINE)


def disassemble(codes: Sequence[tuple[str, bytes]]) -> list[list[str]]:
    """Disassemble functions, several at a time. `codes` are the architecture of each, such as "sm_90", and its machine code.

    Return the instructions of each function, such as `@!P0 LDG.E.128 R4, desc[UR8][R2.64]`.

    Raise EPUnavailableError if nvdisasm is not installed, or does not know an architecture.
    """
    tool = nvdisasm()
    batches = _batches(codes)
    found: list[list[str]] = [[] for _ in codes]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_run, tool, codes[batch[0]][0], b"".join(codes[index][1] for index in batch), Path(folder) / str(number))
            for number, batch in enumerate(batches)
        ]
        for batch, job in zip(batches, jobs, strict=True):
            lines, place = job.result(), 0
            for index in batch:
                end = place + len(codes[index][1]) // INSTRUCTION_BYTES
                found[index], place = lines[place:end], end
    return found


@functools.cache
def nvdisasm() -> str:
    """Find nvdisasm: in its wheel, or in the folders of PATH. Raise EPUnavailableError if it is in neither."""
    try:
        files = importlib.metadata.distribution(WHEEL)
        for file in files.files or ():
            if file.name == "nvdisasm":
                return str(files.locate_file(file))
    except importlib.metadata.PackageNotFoundError:
        pass
    if found := shutil.which("nvdisasm"):
        return found
    raise EPUnavailableError(
        f"nvdisasm is not installed. Run pip install {WHEEL}, or add the folder bin of a CUDA toolkit to PATH."
    )


def _batches(codes: Sequence[tuple[str, bytes]]) -> list[list[int]]:
    """Group the indices of functions of one architecture, so that a process disassembles many small functions."""
    batches: list[list[int]] = []
    held = 0
    for index in sorted(range(len(codes)), key=lambda index: codes[index][0]):
        arch, code = codes[index]
        if not batches or codes[batches[-1][0]][0] != arch or held + len(code) > _BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append(index)
        held += len(code)
    return batches


def _run(tool: str, arch: str, code: bytes, path: Path) -> list[str]:
    path.write_bytes(code)
    words = [tool, "--binary", arch.replace("sm_", "SM"), "--no-dataflow", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = _INSTRUCTION.findall(done.stdout)
    if done.returncode or len(lines) * INSTRUCTION_BYTES != len(code):
        raise EPUnavailableError(
            f"nvdisasm={tool!r}; expected one that reads the machine code of {arch}, but it printed {len(lines)} of "
            f"{len(code) // INSTRUCTION_BYTES} instructions: {done.stderr.strip()[:500]}. Run pip install --upgrade {WHEEL}."
        )
    return lines
