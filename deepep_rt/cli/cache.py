"""Define `python -m deepep_rt cache`, which lists, shows, checks and clears the disk cache of compiled kernels, and stored tunings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .. import _env
from .._console import console
from ..backends import saved_tunings
from ..config import COMBINE_DTYPES
from ..errors import EPCacheError, EPConfigError
from ..jit import build
from ..jit.machine_code import MachineCode, broken_promises, machine_codes
from ..jit.store import CorruptEntry, Entry, KernelCache
from ..kernels.promises import PROMISES
from ..kernels.table import KERNELS
from . import tables
from .options import Json

app = typer.Typer(
    help="List, check and clear compiled kernels. The same folder has stored tunings.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_SIZES = ("kNumRanks", "kNumMaxTokens", "kHidden", "kNumTopk", "kNumExperts", "kRingDepth", "kRanksPerNode", "kHasSlots")
_MOST_CHOICES = 10  # keys in the answer to an ambiguous one


@app.command("list")
def list_(as_json: Json = False) -> None:
    """List the compiled kernels. Count the stored tunings."""
    store = KernelCache()
    entries = store.entries()
    if as_json:
        print(json.dumps([_described(entry) for entry in entries], indent=2))
        return
    if not entries:
        print(
            f"The cache {store.folder} is empty. Kernels are added when they are first used, or with: python -m deepep_rt compile"
        )
        _print_number_of_tunings()
        return
    numbers = ("bytes", "registers", "shared", "stack", "spills")
    table = tables.new_table("kernel", "arch", "key", "compiled for", *numbers, "NVSHMEM", "built with", "created")
    differences = _differences(entry for entry in entries if isinstance(entry, Entry))
    for entry in entries:
        if isinstance(entry, CorruptEntry):
            table.add_row("CORRUPT", entry.arch, entry.key[:12], *["-"] * 7, entry.reason, "rebuilt when it is needed")
            continue
        info = entry.info
        nvshmem = "linked" if info["nvshmem"] else "no"
        tools = [name for name in ("deepep_rt", "nvrtc", "nvjitlink", "nvshmem") if name in info["versions"]]
        built_with = ", ".join(f"{name} {info['versions'][name]}" for name in tools)
        first = (tables.title(info["kernel"], _dtype(entry)), entry.arch, entry.key[:12], differences[entry.arch, entry.key])
        table.add_row(*first, tables.number(info["bytes"]), *tables.usage(info), nvshmem, built_with, info["created"])
    console(tables.WIDTH_OF_LOGS).print(table)
    total = sum(len(entry.code) for entry in entries if isinstance(entry, Entry))
    print(f"{len(entries)} {tables.plural(len(entries))}, {total:,} bytes, in {store.folder}")
    _print_number_of_tunings()


@app.command()
def show(key: Annotated[str, typer.Argument(help="A key, or a unique beginning of one.")], as_json: Json = False) -> None:
    """Print what is recorded about a kernel."""
    if not key:
        raise EPConfigError("key=''; expected a key or its beginning. Choose one from: python -m deepep_rt cache list")
    store = KernelCache()
    found = [entry for entry in store.entries() if entry.key.startswith(key)]
    if len(found) != 1:
        matches = f"{len(found)} kernels have keys that begin with" if found else "no kernel has a key that begins with"
        choices = "".join(f"\n  {entry.key} {_described(entry)['kernel']} {entry.arch}" for entry in found[:_MOST_CHOICES])
        if len(found) > _MOST_CHOICES:
            choices += f"\n  ... and {len(found) - _MOST_CHOICES} more"
        raise EPConfigError(
            f"{matches} {key!r} in the cache {store.folder}. Choose a key from: python -m deepep_rt cache list{choices}"
        )
    described = _described(found[0])
    if as_json:
        print(json.dumps(described, indent=2))
        return
    for name, value in described.items():
        if not isinstance(value, dict):
            print(f"{name:22}{'-' if value is None else value}")
            continue
        print(name)
        for inner, number in value.items():
            print(f"  {inner:30}{number}")


@app.command()
def check(as_json: Json = False) -> None:
    """Check the machine code of all kernels. Compare it with what it must have, by nvdisasm. Exit status 1 if it lacks something."""
    store = KernelCache()
    found = store.entries()
    entries = [entry for entry in found if isinstance(entry, Entry) and _has_promises(entry)]
    if not entries:
        raise EPCacheError(
            f"the cache {store.folder} has no machine code of this installation; expected at least one kernel to check. "
            "Compile kernels first (python -m deepep_rt compile --arch sm_90)."
        )
    codes = machine_codes(entries)
    broken = [
        list(broken_promises(KERNELS[entry.info["kernel"]], PROMISES[entry.info["kernel"]], entry, code))
        for entry, code in zip(entries, codes, strict=True)
    ]
    rows = list(zip(entries, codes, broken, strict=True))
    if as_json:
        print(json.dumps([_checked(*row) for row in rows], indent=2))
    else:
        _print_checked(rows)
        left_out = len(found) - len(entries)
        print(f"{len(entries)} {tables.plural(len(entries))} checked, {left_out} left out, in {store.folder}")
    for entry, _, sentences in rows:
        for sentence in sentences:
            title = tables.title(entry.info["kernel"], _dtype(entry))
            typer.echo(f"error: {title} for {entry.arch} (key {entry.key[:12]}): {sentence}", err=True)
    raise typer.Exit(1 if any(broken) else 0)


@app.command()
def tunings(as_json: Json = False) -> None:
    """List the stored choices of Buffer.autotune."""
    found = saved_tunings.FILES.all()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    folder = _env.cache_dir() / saved_tunings.FILES.folder
    if not found:
        print(f"There are no stored tunings in {folder}. Buffer.autotune() makes them.")
        return
    table = tables.new_table("ranks", "GPUs", "tokens", "hidden", "dtype", "topk", "experts", "choice", "kernels", "created")
    for document in found:
        key = document[saved_tunings.FILES.key_name]
        sizes = [str(key[name]) for name in ("num_max_tokens_per_rank", "hidden", "dtype", "num_topk", "num_experts")]
        nodes = key["num_ranks"] // key["ranks_per_node"]
        ranks = f"{key['num_ranks']}, {nodes} nodes" if nodes > 1 else str(key["num_ranks"])
        choice = str(saved_tunings.of_plain(document["tuning"]))
        state = "these" if saved_tunings.is_current(key) else "others"
        table.add_row(ranks, ", ".join(dict.fromkeys(key["gpus"])), *sizes, choice, state, document["created"])
    console(tables.WIDTH_OF_LOGS).print(table)
    print(f"{len(found)} {_plural_of_tunings(len(found))} in {folder}")


@app.command()
def clear(
    tuning: Annotated[bool, typer.Option("--tuning", help="Delete the stored tunings instead, and no kernel.")] = False,
) -> None:
    """Delete every compiled kernel. Stored tunings stay, because they cost a measurement."""
    if tuning:
        folder = _env.cache_dir() / saved_tunings.FILES.folder
        try:
            number = saved_tunings.FILES.clear()
        except OSError as error:
            raise EPCacheError(
                f"stored tunings in {folder} cannot be deleted: {error}; expected a folder that this user can write. Set "
                f"DEEPEP_RT_CACHE_DIR to another folder"
            ) from error
        print(f"removed {number} {_plural_of_tunings(number)} from {folder}")
        return
    store = KernelCache()
    number = store.clear()
    print(f"removed {number} {tables.plural(number)} from {store.folder}")


def _print_number_of_tunings() -> None:
    if number := len(saved_tunings.FILES.all()):
        print(f"{number} {_plural_of_tunings(number)}; see: python -m deepep_rt cache tunings")


def _plural_of_tunings(number: int) -> str:
    return "stored tuning" if number == 1 else "stored tunings"


def _has_promises(entry: Entry) -> bool:
    """Return whether an entry is machine code that this installation would load, and a kernel: `nvshmem_calls` is none."""
    kernel = KERNELS.get(entry.info["kernel"])
    return kernel is not None and entry.arch.startswith("sm_") and build.is_current(kernel, entry)


def _checked(entry: Entry, code: MachineCode, broken: list[str]) -> dict[str, Any]:
    names = {"kernel": entry.info["kernel"], "dtype": _dtype(entry), "arch": entry.arch, "key": entry.key}
    spills = {name: entry.info[name] for name in ("spill_stores", "spill_loads")}
    return {**names, **asdict(code), **spills, "bytes": entry.info["bytes"], "broken": broken}


def _print_checked(rows: list[tuple[Entry, MachineCode, list[str]]]) -> None:
    accesses = ("16-byte loads", "at once", "16-byte stores", "bulk loads", "bulk stores", "1 or 2 bytes")
    table = tables.new_table("kernel", "arch", "key", "registers", "stack", "spills", *accesses, "instructions", "bytes", "")
    for entry, code, broken in rows:
        info = entry.info
        _, _, _, spills = tables.usage(info)
        numbers = (code.wide_loads, code.loads_at_once, code.wide_stores, code.bulk_loads, code.bulk_stores, code.narrow_accesses)
        table.add_row(
            tables.title(info["kernel"], _dtype(entry)),
            entry.arch,
            entry.key[:12],
            *map(tables.number, (code.registers, code.stack_bytes)),
            spills,
            *map(tables.number, (*numbers, code.instructions, info["bytes"])),
            "broken" if broken else "ok",
        )
    console(tables.WIDTH_OF_LOGS).print(table)


def _described(entry: Entry | CorruptEntry) -> dict[str, Any]:
    if isinstance(entry, CorruptEntry):
        return {"kernel": None, "arch": entry.arch, "key": entry.key, "corrupt": entry.reason}
    return {"kernel": entry.info["kernel"], "dtype": _dtype(entry), "arch": entry.arch, "key": entry.key, **entry.info}


def _dtype(entry: Entry) -> str | None:
    """Return the element type of a kernel that is compiled for one type. None: of another kernel."""
    index = entry.info["constants"].get("kElement")
    return COMBINE_DTYPES[index] if index in range(len(COMBINE_DTYPES)) else None


def _differences(entries: Iterable[Entry]) -> dict[tuple[str, str], str]:
    """List the constants in which entries of one kernel differ, by architecture and key.

    If the sizes alone distinguish all entries, only sizes are listed.
    """
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.arch, entry.info["kernel"], _dtype(entry)), []).append(entry)
    found = {}
    for group in groups.values():
        constants = [entry.info["constants"] for entry in group]
        names = sorted({name for each in constants for name in each if len({other.get(name) for other in constants}) > 1})
        sizes = [name for name in _SIZES if name in names]
        if len({tuple(each.get(name) for name in sizes) for each in constants}) == len(group):
            names = sizes
        for entry in group:
            values = {name: entry.info["constants"].get(name, "-") for name in names}
            found[entry.arch, entry.key] = ", ".join(f"{name} {value}" for name, value in values.items()) or "-"
    return found
