"""Benchmarks of hilbert_monitor, each figure with a named baseline: ``python -m benchmarks``."""
