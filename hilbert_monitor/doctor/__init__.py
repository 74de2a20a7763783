"""The checks of ``hilbert-monitor doctor``: one claim of the package per file, each tested on this machine."""
