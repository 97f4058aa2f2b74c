"""Run the command line: `python -m deepep_rt --help`."""

from __future__ import annotations

from ._install import or_exit


def main() -> None:
    with or_exit("the command line", "cli"):
        from .cli.app import run
    run()


if __name__ == "__main__":
    main()
