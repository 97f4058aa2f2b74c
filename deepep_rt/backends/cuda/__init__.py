"""The backend on GPUs."""
