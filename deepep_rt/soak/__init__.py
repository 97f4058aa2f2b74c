"""`python -m deepep_rt soak`: random rounds of both modes on all ranks, every byte checked."""

from .asked import Asked
from .report import lines
from .runner import run

__all__ = ["Asked", "lines", "run"]
