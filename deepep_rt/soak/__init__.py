"""Run random rounds of both modes on all ranks and check every byte (`python -m deepep_rt soak`)."""

from .asked import Asked
from .report import lines
from .runner import run

__all__ = ["Asked", "lines", "run"]
