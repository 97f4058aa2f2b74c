"""`python -m deepep_rt doctor`: facts of a machine, and what is wrong with it."""
