"""`machine_code`: the figures of machine code, and the promises that broken kernels break. No GPU is needed."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest
from entries import entry
from tiny_kernel import CONSTANTS, TINY

from deepep_rt import EPUnavailableError
from deepep_rt.jit import build, cubin, disassembler
from deepep_rt.jit.cubin import Function, read_function
from deepep_rt.jit.machine_code import MachineCode, broken_promises, figures, machine_codes
from deepep_rt.jit.store import Entry
from deepep_rt.kernels.promises import PROMISES, Promise, loads_at_once
from deepep_rt.kernels.table import KERNELS

GOOD = MachineCode(
    registers=64,
    stack_bytes=0,
    max_threads=64,
    instructions=100,
    local_accesses=0,
    wide_loads=8,
    wide_stores=8,
    loads_at_once=8,
    narrow_accesses=0,
    bulk_loads=0,
    bulk_stores=0,
    accesses_before_wait=None,
)
COPY = Promise(bulk_copies=True)
SIZES = {"kNumRanks": 8, "kNumTopk": 8, "kRowBytes": 14336, "kTinyThreads": 64}


def _figures(*instructions: str) -> MachineCode:
    return figures(Function(b"", 32, 0, 64), instructions)


def _broken(promise: Promise, code: MachineCode, arch: str = "sm_80", *, overlaps: bool = False, **info: int) -> list[str]:
    cached = entry(arch=arch, constants=SIZES, **{"spill_stores": 0, "spill_loads": 0, **info})
    return list(broken_promises(replace(TINY, overlaps=overlaps), promise, cached, code))


# --- figures -----------------------------------------------------------------------------------------------------------------------


def test_accesses_are_counted_by_memory_and_size() -> None:
    code = _figures(
        "LDC.64 R2, c[0x0][0x210]",
        "@!P0 LDG.E.NA.128 R4, desc[UR8][R2.64]",
        "LD.E.128 R8, [R2.64+0x10]",
        "LDS.128 R12, [R0]",
        "@P1 STG.E.128.STRONG.SYS desc[UR8][R2.64], R4",
        "ST.E.64 [R2.64], R4",
        "STG.E.U16 desc[UR8][R2.64], R4",
        "LDG.E.S8 R4, desc[UR8][R2.64]",
        "LDS.U8 R4, [R0]",
        "@P6 STL [R1], R3",
        "LDL.64 R4, [R1]",
        "UBLKCP.S.G [UR4], [UR6], UR8",
        "@UP0 UBLKCP.G.S [UR4], [UR6], UR8",
    )
    assert (code.instructions, code.wide_loads, code.wide_stores, code.narrow_accesses) == (13, 2, 1, 2)
    assert (code.local_accesses, code.bulk_loads, code.bulk_stores) == (2, 1, 1)
    assert (code.registers, code.stack_bytes, code.max_threads) == (32, 0, 64)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("IADD3 R20, R2, 0x1, RZ", 2),
        ("FADD R20, R7, R20", 1),
        ("IMAD.WIDE R20, R6.64, 0x4, R22", 1),
        ("STG.E.64 desc[UR8][R2.64], R4", 1),
        ("FADD R20, R40, UR5", 2),
    ],
)
def test_loads_at_once_end_at_the_first_use(between: str, expected: int) -> None:
    code = _figures("LDG.E.128 R4, desc[UR8][R2.64]", between, "@P0 LDG.E.128 R8, desc[UR8][R2.64+0x200]")
    assert code.loads_at_once == expected


def test_loads_into_the_same_register_are_not_at_once() -> None:
    assert _figures("LDG.E.128 R4, [R2.64]", "LDG.E.128 R4, [R2.64]", "LDG.E.128 R6, [R2.64]").loads_at_once == 1
    assert _figures("LDG.E.128 R4, [R4.64]", "LDG.E.128 R8, [R2.64]").loads_at_once == 2
    assert _figures("LDG.E.128 R4, [R2.64]", "LDG.E.128 R8, [R6.64]").loads_at_once == 1


@pytest.mark.parametrize("access", ["LDG.E R4, [R2.64]", "ST.E [R2.64], R4", "RED.E.ADD.STRONG.GPU [R2], R4", "UBLKCP.S.G [UR4]"])
def test_accesses_before_the_wait_are_counted(access: str) -> None:
    assert _figures("LDC R1, c[0x0][0x28]", "ACQBULK", access).accesses_before_wait == 0
    assert _figures(access, "ACQBULK", access).accesses_before_wait == 1
    assert _figures(access).accesses_before_wait is None


# --- promises ----------------------------------------------------------------------------------------------------------------------


def test_good_code_breaks_nothing() -> None:
    assert not _broken(COPY, GOOD)
    assert not _broken(Promise(loads_at_once=8), GOOD, "sm_90")
    assert not _broken(COPY, replace(GOOD, loads_at_once=0, wide_stores=0, bulk_loads=1, bulk_stores=1), "sm_90")
    assert not _broken(Promise(), replace(GOOD, accesses_before_wait=0), "sm_90", overlaps=True)
    assert not _broken(Promise(), GOOD, "sm_80", overlaps=True)  # kernels do not overlap there
    assert not _broken(Promise(narrow_accesses=True), replace(GOOD, narrow_accesses=3))
    bulk = replace(GOOD, bulk_loads=1, bulk_stores=1)
    assert not _broken(Promise(bulk_if_no_relay=True), bulk, "sm_90")
    assert not _broken(Promise(bulk_stores=True), replace(GOOD, bulk_stores=1), "sm_90")
    with_relay = entry(arch="sm_90", constants={**SIZES, "kHasRelay": 1}, spill_stores=0, spill_loads=0)
    assert not list(broken_promises(TINY, Promise(bulk_if_no_relay=True), with_relay, GOOD))
    assert list(broken_promises(TINY, Promise(bulk_if_no_relay=True), with_relay, bulk))
    with_slots = entry(arch="sm_90", constants={**SIZES, "kHasSlots": 1}, spill_stores=0, spill_loads=0)
    assert not list(broken_promises(TINY, Promise(narrow_if_slots=True), with_slots, replace(GOOD, narrow_accesses=3)))


@pytest.mark.parametrize(
    ("promise", "changes", "arch", "message"),
    [
        (COPY, {"loads_at_once": 7}, "sm_80", "7 16-byte loads at once, of 8; expected at least 8 before one is used"),
        (COPY, {"wide_stores": 0}, "sm_80", "no 16-byte stores; expected rows to be stored with them"),
        (COPY, {"bulk_loads": 1}, "sm_80", "1 bulk loads and 0 bulk stores; expected none"),
        (COPY, {"bulk_loads": 2}, "sm_90", "2 bulk loads and 0 bulk stores; expected at least one of each"),
        (Promise(bulk_stores=True), {}, "sm_90", "0 bulk loads and 0 bulk stores; expected stores only"),
        (
            Promise(bulk_stores=True),
            {"bulk_loads": 1, "bulk_stores": 1},
            "sm_90",
            "1 bulk loads and 1 bulk stores; expected stores only",
        ),
        (Promise(bulk_if_no_relay=True), {}, "sm_90", "0 bulk loads and 0 bulk stores; expected at least one of each"),
        (Promise(), {"bulk_loads": 2, "bulk_stores": 1}, "sm_90", "2 bulk loads and 1 bulk stores; expected none"),
        (Promise(loads_at_once=9), {}, "sm_90", "8 16-byte loads at once, of 8; expected at least 9 before one is used"),
        (Promise(stores_rows=True), {"wide_stores": 0}, "sm_90", "no 16-byte stores; expected rows to be stored with them"),
        (Promise(), {"narrow_accesses": 2}, "sm_90", "2 loads and stores of 1 or 2 bytes; expected none"),
        (Promise(narrow_if_slots=True), {"narrow_accesses": 2}, "sm_90", "2 loads and stores of 1 or 2 bytes; expected none"),
        (Promise(), {"stack_bytes": 8}, "sm_90", "its stack frame has 8 bytes; expected at most 0 (max_stack_bytes)"),
        (Promise(), {"local_accesses": 4}, "sm_90", "4 loads and stores of local memory; expected none"),
        (Promise(), {"max_threads": None}, "sm_90", "__launch_bounds__ has None threads; expected 64, as the launch"),
    ],
)
def test_broken_promises_are_named(promise: Promise, changes: dict[str, int], arch: str, message: str) -> None:
    assert _broken(promise, replace(GOOD, **changes), arch) == [message]


def test_spills_and_registers_are_limited() -> None:
    assert _broken(Promise(), GOOD, spill_stores=8, spill_loads=4) == ["it spills 12 bytes of registers; expected none"]
    cached = entry(constants={**SIZES, "kTinyThreads": 1024}, spill_stores=0, spill_loads=0)
    fits, too_many = replace(GOOD, max_threads=1024), replace(GOOD, max_threads=1024, registers=65)
    assert not list(broken_promises(TINY, Promise(), cached, fits))
    (message,) = broken_promises(TINY, Promise(), cached, too_many)
    assert message == "1024 threads with 65 registers need 73,728; expected at most 65,536"


def test_a_kernel_that_overlaps_waits() -> None:
    assert _broken(Promise(), GOOD, "sm_90", overlaps=True) == [
        "it never waits for its predecessor; expected await_predecessor()"
    ]
    early = replace(GOOD, accesses_before_wait=2)
    (message,) = _broken(Promise(), early, "sm_90", overlaps=True)
    assert message == "2 accesses to global memory before it waits for its predecessor; expected none"


def test_promises_of_loads_hold_for_large_sizes() -> None:
    promise = Promise(loads_at_once=7)
    assert loads_at_once(promise, "sm_80", SIZES) == 7
    for name, value in (("kNumRanks", 3), ("kNumTopk", 7), ("kRowBytes", 4080)):
        assert loads_at_once(promise, "sm_80", {**SIZES, name: value}) == 0
        assert loads_at_once(COPY, "sm_80", {**SIZES, name: value}) == 0
    assert loads_at_once(Promise(loads_at_once=4), "sm_90", {"kHidden": 2048}) == 4
    assert loads_at_once(Promise(loads_at_once=4), "sm_90", {"kHidden": 2040}) == 0
    assert loads_at_once(Promise(loads_at_once=4), "sm_90", {}) == 4  # row sizes that are parameters
    assert [loads_at_once(COPY, arch, SIZES) for arch in ("sm_80", "sm_89", "sm_90")] == [8, 8, 0]
    assert loads_at_once(Promise(bulk_copies=True, loads_at_once=12), "sm_80", SIZES) == 12


def test_every_kernel_has_a_promise() -> None:
    assert PROMISES.keys() == KERNELS.keys()


# --- cubins and nvdisasm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [b"", b"code", b"\x7fELF\x02\x01", b"\x7fELF\x02\x01" + bytes(100), b"//\n.version 8.8\n"])
def test_bytes_that_are_no_cubin(code: bytes) -> None:
    with pytest.raises(ValueError, match="expected a cubin with the kernel tiny"):
        read_function(code, "tiny")


def test_a_missing_nvdisasm_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembler, "WHEEL", "no-such-package")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EPUnavailableError, match=r"nvdisasm is not installed\. Run pip install no-such-package"):
        disassembler.nvdisasm.__wrapped__()


@pytest.mark.parametrize("script", ["echo broken >&2; exit 1", "echo '  /*0000*/  NOP ;'"])
def test_output_that_is_cut_short_is_an_error(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(disassembler, "nvdisasm", lambda: str(tool))
    with pytest.raises(
        EPUnavailableError, match=r"expected one that reads the machine code of sm_90, but it printed \d of 2 instr"
    ):
        disassembler.disassemble([("sm_90", bytes(32))])


def _has_nvdisasm() -> bool:
    try:
        return bool(disassembler.nvdisasm())
    except EPUnavailableError:
        return False


needs_nvdisasm = pytest.mark.skipif(not _has_nvdisasm(), reason="nvdisasm comes with deepep_rt[dev]")
BULK = """
  __shared__ alignas(128) char stage[1024];
  __shared__ u64 barrier;
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(stage)), flag = static_cast<u32>(__cvta_generic_to_shared(&barrier));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];"
               ::"r"(to), "l"(p.out), "r"(flag));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(p.out + 4096), "r"(to));
"""
COPIES = """
  {type}* x = reinterpret_cast<{type}*>(p.out) + threadIdx.x;
  {type} held[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) held[i] = x[i * kTinyThreads];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[(8 + i) * kTinyThreads] = held[i];
"""
SPILLS = """
  float* x = reinterpret_cast<float*>(p.out) + threadIdx.x;
  float held[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) held[i] = x[i * 64];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) x[i * 64] = held[i] * held[127 - i];
"""
LAST_FIRST = """
  reinterpret_cast<volatile u32*>(p.out)[threadIdx.x] = 1;
  asm volatile("griddepcontrol.wait;" ::: "memory");
"""


def _compiled(sources: Path, body: str, arch: str, threads: int) -> Entry:
    """Compile a kernel with this body, and return it as an entry of the cache."""
    (sources / "tiny.cu").write_text(
        "struct alignas(16) Four { u32 word[4]; };\n"
        f'extern "C" __global__ void __launch_bounds__({threads}) tiny(const __grid_constant__ Params p) {{{body}}}\n'
    )
    built = build.build(TINY, {**CONSTANTS, "kNumRanks": 8}, arch, folder=sources)
    return Entry(built.key, arch, built.code, built.info)


@needs_nvdisasm
def test_kernels_that_break_their_promises(sources: Path, cache: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")
    wide, words, halves = (COPIES.replace("{type}", kind) for kind in ("Four", "u32", "unsigned short"))
    loads = Promise(loads_at_once=4)
    no_loads, no_stores = "0 16-byte loads at once, of 0; expected at least 4 before one is used", "no 16-byte stores"
    cases = [  # what the kernel does, where, for how many threads, what it promises, and the start of each message
        (wide, "sm_80", 64, loads, ()),
        (wide, "sm_90", 64, loads, ()),
        (words, "sm_80", 64, loads, (no_loads, no_stores)),
        (words, "sm_90", 64, loads, (no_loads, no_stores)),
        (halves, "sm_90", 64, Promise(), ("16 loads and stores of 1 or 2 bytes",)),
        (BULK, "sm_90", 64, COPY, ()),
        (BULK, "sm_90", 64, Promise(), ("1 bulk loads and 1 bulk stores; expected none",)),
        (wide, "sm_90", 64, COPY, ("0 bulk loads and 0 bulk stores; expected at least one of each",)),
        (wide, "sm_80", 32, loads, ("__launch_bounds__ has 32 threads; expected 64",)),
        (SPILLS, "sm_90", 1024, Promise(), ("__launch_bounds__", "it spills ", "its stack frame has ", "")),  # and local accesses
        (LAST_FIRST, "sm_90", 64, Promise(), ("1 accesses to global memory before it waits",)),
    ]
    entries = [_compiled(sources, body, arch, threads) for body, arch, threads, _, _ in cases]
    for (body, arch, _, promise, expected), cached, code in zip(cases, entries, machine_codes(entries), strict=True):
        found = list(broken_promises(replace(TINY, overlaps=body == LAST_FIRST), promise, cached, code))
        assert len(found) == len(expected), (body, arch, found)
        assert all(message.startswith(start) for message, start in zip(found, expected, strict=True)), found
        assert code.registers == cached.info["registers"]
        assert code.stack_bytes == cached.info["stack_bytes"]


@needs_nvdisasm
def test_many_functions_are_told_apart(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of one architecture are disassembled together. Their instructions must not mix."""
    monkeypatch.setattr(disassembler, "_BATCH_BYTES", 1000)
    wide = COPIES.replace("{type}", "Four")
    kernels = [(BULK, "sm_90"), ("", "sm_90"), ("", "sm_80"), (wide, "sm_90"), (wide, "sm_80")]
    entries = [_compiled(sources, body, arch, 64) for body, arch in kernels]
    together = machine_codes(entries)
    assert together == [machine_codes([each])[0] for each in entries]
    assert [code.bulk_loads for code in together] == [1, 0, 0, 0, 0]
    assert [code.wide_loads for code in together] == [0, 0, 0, 8, 8]


def test_the_registers_are_those_of_the_kernel() -> None:
    """A cubin with NVSHMEM has figures of other functions too."""
    data = struct.pack("<BBHII", 4, 0x2F, 8, 7, 99) + struct.pack("<BBH", 3, 0x1B, 255) + struct.pack("<BBHII", 4, 0x2F, 8, 5, 33)
    assert dict(cubin._of_symbol(data, 5)) == {0x2F: 33}
