"""Run random rounds of both modes on all ranks and check every byte (`python -m deepep_rt soak`)."""

from .report import lines
from .runner import Asked, run

__all__ = ["Asked", "lines", "run"]
