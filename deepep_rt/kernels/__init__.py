"""What is compiled: the kernels' table, structures, memory layout, tuning and sources."""
