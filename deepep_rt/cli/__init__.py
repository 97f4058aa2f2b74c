"""The commands of `python -m deepep_rt`."""
