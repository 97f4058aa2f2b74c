"""What the machine code of a kernel does, in figures, and which promises of `kernels.promises` it breaks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..kernels.promises import Promise, loads_at_once
from ..kernels.table import Kernel
from ..kernels.tuning import has_overlap, has_tma
from .cubin import Function, read_function
from .disassembler import disassemble
from .store import Entry

_REGISTERS_OF_A_BLOCK = 65536
_REGISTER_UNIT = 8  # a thread gets a multiple of it

_LOADS, _STORES, _ATOMICS = ("LDG", "LD"), ("STG", "ST"), ("ATOMG", "ATOM", "REDG", "RED")  # of global memory
_BULK = "UBLKCP"
_ACCESSES = {*_LOADS, *_STORES, *_ATOMICS, _BULK}
_WIDE = ("128", "256")  # bits
_NARROW = ("U8", "S8", "U16", "S16")
_WAIT = "ACQBULK"  # griddepcontrol.wait
_PARTS = re.compile(r"(?:@!?U?P\w+\s+)?(\S+)\s*(.*)")
_REGISTER = re.compile(r"(?<![A-Z])R(\d+)(\.64)?")


@dataclass(frozen=True)
class MachineCode:
    """The machine code of a kernel in figures."""

    registers: int  # of a thread
    stack_bytes: int  # its stack frame
    max_threads: int | None  # of a block, from `__launch_bounds__`. None: without
    instructions: int  # all
    local_accesses: int  # loads and stores of the thread's local memory: spilled registers and the stack
    wide_loads: int  # loads of at least 16 bytes from global memory
    wide_stores: int  # stores of at least 16 bytes to global memory
    loads_at_once: int  # the most `wide_loads` that start before an instruction uses the result of one of them
    narrow_accesses: int  # loads and stores of 1 or 2 bytes of global memory
    bulk_loads: int  # copies of the copy engine from global memory
    bulk_stores: int  # copies of the copy engine to global memory
    accesses_before_wait: int | None  # to global memory, before it waits for its predecessor. None: it does not wait


def machine_codes(entries: Sequence[Entry]) -> list[MachineCode]:
    """Read the machine code of entries of the kernel cache.

    Raise EPUnavailableError if nvdisasm is not installed, or does not know an architecture, and ValueError if an entry is no cubin.
    """
    functions = [read_function(entry.code, entry.info["kernel"]) for entry in entries]
    texts = disassemble([(entry.arch, function.code) for entry, function in zip(entries, functions, strict=True)])
    return [figures(function, text) for function, text in zip(functions, texts, strict=True)]


def figures(function: Function, instructions: Sequence[str]) -> MachineCode:
    """Count what the promises speak of."""
    parts = [_PARTS.match(text) for text in instructions]
    words = [(match[1].split("."), match[2]) for match in parts if match]
    kinds = [word[0] for word, _ in words]
    accesses = [word for word, _ in words if word[0] in _LOADS + _STORES]
    wide = [word[0] for word in accesses if not set(word).isdisjoint(_WIDE)]
    bulk = [word[1:3] for word, _ in words if word[0] == _BULK]
    before_wait = kinds[: kinds.index(_WAIT)] if _WAIT in kinds else None
    return MachineCode(
        registers=function.registers,
        stack_bytes=function.stack_bytes,
        max_threads=function.max_threads,
        instructions=len(instructions),
        local_accesses=sum(kind in ("LDL", "STL") for kind in kinds),
        wide_loads=sum(kind in _LOADS for kind in wide),
        wide_stores=sum(kind in _STORES for kind in wide),
        loads_at_once=_loads_at_once(words),
        narrow_accesses=sum(not set(word).isdisjoint(_NARROW) for word in accesses),
        bulk_loads=bulk.count(["S", "G"]),
        bulk_stores=bulk.count(["G", "S"]),
        accesses_before_wait=None if before_wait is None else sum(kind in _ACCESSES for kind in before_wait),
    )


def _loads_at_once(words: Iterable[tuple[list[str], str]]) -> int:
    """Return the most wide loads in a row before an instruction names a register that one of them fills.

    The order is that of addresses. This is exact for the unrolled loops over rows, whose loads have predicates and no branches.
    """
    most = count = 0
    filled: set[int] = set()
    for word, arguments in words:
        loads = word[0] in _LOADS and not set(word).isdisjoint(_WIDE)
        if not (loads or filled):
            continue
        target, _, rest = arguments.partition(",") if loads else ("", "", arguments)
        if not filled.isdisjoint(_registers(rest)):
            filled, count = set(), 0
        if loads:
            target_register = _registers(target)
            if not filled.isdisjoint(target_register):
                filled, count = set(), 0
            count += 1
            most = max(most, count)
            filled |= {register + index for register in target_register for index in range(4)}
    return most


def _registers(arguments: str) -> set[int]:
    found = set()
    for number, is_pair in _REGISTER.findall(arguments):
        found |= {int(number), int(number) + 1} if is_pair else {int(number)}
    return found


def broken_promises(kernel: Kernel, promise: Promise, entry: Entry, code: MachineCode) -> Iterator[str]:
    """List the promises that the machine code of a cached kernel breaks, one sentence each."""
    yield from _broken_sizes(kernel, entry, code)
    yield from _broken_accesses(promise, entry, code)
    if kernel.overlaps and has_overlap(entry.arch):
        if code.accesses_before_wait is None:
            yield "it never waits for its predecessor; expected await_predecessor()"
        elif code.accesses_before_wait:
            yield f"{code.accesses_before_wait} accesses to global memory before it waits for its predecessor; expected none"


def _broken_sizes(kernel: Kernel, entry: Entry, code: MachineCode) -> Iterator[str]:
    info = entry.info
    threads = info["constants"][kernel.threads]
    if code.max_threads != threads:
        yield f"__launch_bounds__ has {code.max_threads} threads; expected {threads}, as the launch"
    needed = threads * -(-code.registers // _REGISTER_UNIT) * _REGISTER_UNIT
    if needed > _REGISTERS_OF_A_BLOCK:
        yield f"{threads} threads with {code.registers} registers need {needed:,}; expected at most {_REGISTERS_OF_A_BLOCK:,}"
    if spills := (info["spill_stores"] or 0) + (info["spill_loads"] or 0):
        yield f"it spills {spills} bytes of registers; expected none"
    if code.stack_bytes > kernel.max_stack_bytes:
        yield f"its stack frame has {code.stack_bytes} bytes; expected at most {kernel.max_stack_bytes} (max_stack_bytes)"
    if code.local_accesses and not kernel.max_stack_bytes:
        yield f"{code.local_accesses} loads and stores of local memory; expected none"


def _broken_accesses(promise: Promise, entry: Entry, code: MachineCode) -> Iterator[str]:
    constants = entry.info["constants"]
    loads = loads_at_once(promise, entry.arch, constants)
    has_bulk_copies = promise.bulk_copies or (promise.bulk_if_no_relay and not constants.get("kHasRelay"))
    if has_bulk_copies and has_tma(entry.arch):
        if not (code.bulk_loads and code.bulk_stores):
            yield f"{code.bulk_loads} bulk loads and {code.bulk_stores} bulk stores; expected at least one of each"
    elif promise.bulk_stores and has_tma(entry.arch):
        if code.bulk_loads or not code.bulk_stores:
            yield f"{code.bulk_loads} bulk loads and {code.bulk_stores} bulk stores; expected stores only"
    elif code.bulk_loads or code.bulk_stores:
        yield f"{code.bulk_loads} bulk loads and {code.bulk_stores} bulk stores; expected none"
    if code.loads_at_once < loads:
        yield f"{code.loads_at_once} 16-byte loads at once, of {code.wide_loads}; expected at least {loads} before one is used"
    if (loads or promise.stores_rows) and not code.wide_stores:
        yield "no 16-byte stores; expected rows to be stored with them"
    may_be_narrow = promise.narrow_accesses or (promise.narrow_if_slots and constants.get("kHasSlots"))
    if code.narrow_accesses and not may_be_narrow:
        yield f"{code.narrow_accesses} loads and stores of 1 or 2 bytes; expected none"
