"""An NVSHMEM that does nothing, for measurements with a driver that does nothing (start_time.py)."""
