"""Sinks that keep their records in memory or call a function, and functions that fail."""


class Recorder:
    """Keeps the last record of each step, which is the most complete one."""

    def __init__(self):
        self.by_step = {}

    @property
    def records(self):
        return list(self.by_step.values())

    def write(self, record):
        self.by_step[record.step] = record


class Sink:
    """Calls a function with each record."""

    def __init__(self, write):
        self.write = write


class Panic(BaseException):
    """As a Rust extension raises it."""


def panics(*_):
    """Raise what is no Exception."""
    raise Panic("a panic in Rust")
