"""Run the command line: `python -m deepep_rt --help`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from .cli.app import run
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {missing}, which is not installed. Run pip install 'deepep_rt[cli]'.")
    run()


if __name__ == "__main__":
    main()
