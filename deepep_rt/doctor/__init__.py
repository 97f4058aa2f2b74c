"""Examine a machine and report its faults (`python -m deepep_rt doctor`)."""
