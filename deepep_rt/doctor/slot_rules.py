"""Define the rules about Buffers with slots, for `doctor --max-ranks`: functions of the job's reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..config import MAX_RANKS_PER_NODE
from .facts import Finding, JobReport, fact, format_ranges, numbers_of
from .memory_facts import setting_of, unshared


def obstacles(job: JobReport) -> list[str]:
    """List why ranks cannot come and go in a Buffer of this job."""
    found, num_ranks, most = [], len(job.reports), job.max_ranks or 0
    declared = job.declared_ranks_per_node
    if len(job.hosts) > 1:
        found.append(f"the ranks are on {len(job.hosts)} hosts")
    if declared is not None and declared < most:
        found.append(f"nodes of {declared} ranks are declared")
    if most < num_ranks:
        found.append(f"there are {num_ranks} ranks for {most} slots")
    if job.uses_gpus:
        if most > MAX_RANKS_PER_NODE:
            found.append(f"NVLink connects {MAX_RANKS_PER_NODE} ranks, and there are {most} slots")
        if setting_of(job) == "nvshmem":
            found.append("DEEPEP_RT_SYMMETRIC_MEMORY=nvshmem")
        elif failed := unshared(job):
            rank, why = next(iter(failed.items()))
            found.append(f"GPUs share no virtual memory (rank {rank}: {why})")
    return found


def launcher_of(job: JobReport) -> str:
    """Return the launcher that decides what becomes of the survivors. Empty: there is none, or it started one process."""
    report = job.reports[0]
    launch, other = report.get("launch") or {}, report.get("other_launch") or {}
    if launch.get("size", 0) > 1:
        return str(launch["launcher"])
    return "torchrun" if other.get("size", 0) > 1 else ""


def _no_slots(job: JobReport) -> Iterator[Finding]:
    if job.max_ranks is not None and (found := obstacles(job)):
        yield Finding.of("no-slots", "error", "; ".join(found))


def _store(job: JobReport) -> Iterator[Finding]:
    """Say which ranks do not reach the store of `--rendezvous`."""
    errors: dict[str, list[int]] = {}
    for report in job.reports:
        if error := (report.get("store") or {}).get("error"):
            errors.setdefault(error, []).append(report["rank"])
    for error, ranks in errors.items():
        where = f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}: " if len(job.reports) > 1 else ""
        yield Finding.of("store-unreachable", "error", where + error)


def _survivors(job: JobReport) -> Iterator[Finding]:
    if job.max_ranks is None or not (launcher := launcher_of(job)):
        return
    if launcher == "MPICH":
        why = fact(job.reports[0], "mpi", "survivors_end")
        if why is None:
            yield Finding.of("survivors-end", "note", "whether MPICH's mpirun has -disable-auto-cleanup cannot be seen from here")
        elif why:
            yield Finding.of("survivors-end", "warning", f"MPICH's mpirun {why}")
    elif launcher == "Slurm":
        yield Finding.of("survivors-end", "note", "whether srun has --no-kill and --kill-on-bad-exit=0 cannot be seen from here")
    elif launcher == "Open MPI" and numbers_of(fact(job.reports[0], "mpi", "library")) >= (5,):
        yield Finding.of("survivors-end", "note", f"what {fact(job.reports[0], 'mpi', 'library')} does was not tried")
    else:
        yield Finding.of("survivors-end", "warning", f"{launcher} started the ranks")


SLOT_RULES: tuple[Callable[[JobReport], Iterator[Finding]], ...] = (_no_slots, _store, _survivors)
