"""A device in Python that computes on the CPU, refuses what CUDA refuses, and counts what a GPU would do."""
