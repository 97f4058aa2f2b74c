"""The command line: `python -m deepep_rt --help`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .cli import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed; pip install typer rich")
    run()


if __name__ == "__main__":
    main()
