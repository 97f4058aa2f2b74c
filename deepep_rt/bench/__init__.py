"""`python -m deepep_rt bench`, which travels with the wheel."""
