"""A sink that keeps its records in memory."""


class Recorder:
    """Keeps the last record of each step, which is the most complete one."""

    def __init__(self):
        self.by_step = {}

    @property
    def records(self):
        return list(self.by_step.values())

    def write(self, record):
        self.by_step[record.step] = record
