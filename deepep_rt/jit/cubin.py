"""Read a cubin: the instructions of a kernel, and the figures that ptxas and the linker recorded of it.

A cubin is an ELF file. NVIDIA describes neither its sections nor its attributes, so this reads only a few that have not changed since
CUDA 11: they are the same from NVRTC 12.8 to 13.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_FRAME_SIZE, _REGISTERS, _MAX_THREADS = 0x11, 0x2F, 0x05  # attributes in .nv.info
_SIZED = 4  # the format of an attribute whose value has a length of its own
_WITHOUT_BYTES = 8  # the type of a section that takes no place in the file


@dataclass(frozen=True)
class Function:
    """A kernel in a cubin."""

    code: bytes  # its instructions, of 16 bytes each
    registers: int  # of a thread
    stack_bytes: int  # its own stack frame, without those of functions that it calls
    max_threads: int | None  # of a block, from `__launch_bounds__`. None: without


def read_function(cubin: bytes, name: str) -> Function:
    """Read the kernel `name` from a cubin. Raise ValueError if the bytes are no cubin, or it has no such kernel."""
    try:
        sections = dict(_sections(cubin))
        number = _symbol(sections, name)
        code, figures = sections[f".text.{name}"], dict(_of_symbol(sections[".nv.info"], number))
        bounds = [
            struct.unpack("<3I", value)
            for attribute, value in _attributes(sections[f".nv.info.{name}"])
            if attribute == _MAX_THREADS
        ]
        max_threads = bounds[0][0] * bounds[0][1] * bounds[0][2] if bounds else None
        return Function(code, figures[_REGISTERS], figures[_FRAME_SIZE], max_threads)
    except (struct.error, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"{len(cubin)} bytes; expected a cubin with the kernel {name} ({error!r})") from error


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    if not elf.startswith(b"\x7fELF\x02\x01"):
        raise ValueError("no ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_at = struct.unpack_from("<3H", elf, 0x3A)
    # name, type, flags, address, offset, size, ...
    headers = [struct.unpack_from("<IIQQQQ", elf, start + size * index) for index in range(count)]
    names = elf[headers[names_at][4] :]
    for header in headers:
        name = _text(names, header[0])
        yield name, b"" if header[1] == _WITHOUT_BYTES else elf[header[4] : header[4] + header[5]]


def _symbol(sections: dict[str, bytes], name: str) -> int:
    """Return the number of a symbol."""
    names = [_text(sections[".strtab"], offset) for offset, *_ in struct.iter_unpack("<IBBHQQ", sections[".symtab"])]
    return names.index(name)


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, place)
        place += 4
        if kind == _SIZED:
            yield attribute, data[place : place + value]
            place += value


def _of_symbol(data: bytes, number: int) -> Iterator[tuple[int, int]]:
    """Return the attributes of a symbol that are numbers."""
    for attribute, value in _attributes(data):
        if attribute in (_FRAME_SIZE, _REGISTERS):
            symbol, figure = struct.unpack("<2I", value)
            if symbol == number:
                yield attribute, figure
