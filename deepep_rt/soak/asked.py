"""Hold and check the options of a soak run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .._checks import is_int_in_range
from ..config import MAX_TIMEOUT_S
from ..errors import EPConfigError


@dataclass(frozen=True)
class Asked:
    """The options of the command line. None: the default."""

    minutes: float | None = None
    rounds: int | None = None
    seed: int | None = None
    round: int | None = None
    since: int | None = None
    backend: str = "auto"
    json_file: Path | None = None
    sizes: dict[str, int | None] = field(default_factory=dict)
    timeout_s: float = 60.0
    progress_s: float = 10.0

    def check(self) -> None:
        """Check the values and their combination.

        Raises:
            EPConfigError: if a value is out of range, or two values contradict each other.
        """
        if self.minutes is not None and not 0 < self.minutes < MAX_TIMEOUT_S:
            raise EPConfigError(f"--minutes is {self.minutes:g}; expected a positive number. Pass one.")
        for name, least in (("rounds", 1), ("round", 0), ("since", 0)):
            value = getattr(self, name)
            if value is not None and not is_int_in_range(value, least, 1 << 62):
                raise EPConfigError(f"--{name} is {value}; expected a whole number from {least} on. Pass one.")
        if self.since is not None and (self.round is None or self.since > self.round):
            raise EPConfigError(f"--since is {self.since}; expected --round with a round from {self.since} on. Pass both.")
        if self.round is not None and self.seed is None:
            raise EPConfigError(f"--round is {self.round}; expected the --seed of the run that it repeats. Pass it too.")
        if self.backend not in ("auto", "cuda", "host"):
            raise EPConfigError(f"--backend is {self.backend!r}; expected auto, cuda or host. Choose one of these.")
        for name in ("timeout_s", "progress_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                option = "--" + name.replace("_", "-")
                raise EPConfigError(f"{option} is {getattr(self, name):g}; expected a positive number of seconds. Pass one.")
