"""What ``hilbert-monitor bench`` measures: a subject a file, every figure beside its opponent in the same run."""
