"""Numbers that travel from a device while the host goes on."""

import pytest
import torch
from hilbert_monitor.monitor.device_reads import HOST_COPIES, PendingRead


class Queue:
    """A device's queue: nothing is copied before somebody waits for it, or it is run."""

    def __init__(self):
        self.waiting, self.waits = [], 0

    def copy(self, numbers):
        copy = torch.full_like(numbers, torch.nan)
        self.waiting.append(lambda: copy.copy_(numbers))
        return copy, self

    def query(self):
        return not self.waiting

    def run(self):
        while self.waiting:
            self.waiting.pop(0)()

    def synchronize(self):
        self.waits += not self.query()
        self.run()


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setitem(HOST_COPIES, "cpu", queue.copy)
    return queue


NUMBERS = [0.1, -3e300, float("inf")]


def test_numbers_of_a_cpu_are_read_at_once():
    numbers = torch.tensor(NUMBERS, dtype=torch.float64)
    pending = PendingRead(numbers)
    numbers.zero_()
    assert pending.ready
    assert pending.read() == pending.read() == NUMBERS


def test_a_read_waits_only_for_what_has_not_arrived(queue):
    pending = PendingRead(torch.tensor(NUMBERS, dtype=torch.float64))
    assert not pending.ready
    assert queue.waits == 0
    assert pending.read() == NUMBERS
    assert queue.waits == 1

    later = PendingRead(torch.tensor(NUMBERS, dtype=torch.float64))
    queue.run()
    assert later.ready
    assert later.read() == NUMBERS
    assert queue.waits == 1


def test_what_was_read_stays(queue):
    numbers = torch.tensor(NUMBERS, dtype=torch.float64)
    pending = PendingRead(numbers)
    assert pending.read() == NUMBERS
    numbers.zero_()
    assert pending.ready
    assert pending.read() == NUMBERS
