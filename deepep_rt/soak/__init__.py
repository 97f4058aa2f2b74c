"""Run random rounds of both modes on all ranks and check every byte (`python -m deepep_rt soak`)."""

from .kill import Kills
from .kill import lines as lines_of_kills
from .kill import run as run_kills
from .report import lines
from .runner import Asked, run

__all__ = ["Asked", "Kills", "lines", "lines_of_kills", "run", "run_kills"]
