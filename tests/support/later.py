"""A CPU that is read later, as an accelerator is: what is sent arrives only when somebody waits for it."""

import pytest

from hilbert_monitor.monitor import deferred


class Arrival:
    """A copy on its way."""

    def query(self):
        return False

    def synchronize(self):
        pass


@pytest.fixture(name="read_later")
def read_later_fixture(monkeypatch):
    """Let numbers of the CPU be read later, and count the copies."""
    return pretend(monkeypatch)


def pretend(monkeypatch):
    """Let numbers of the CPU be read later; return the list that every copy is noted in."""
    copies = []

    def copy(numbers):
        copies.append(len(numbers))
        return numbers.clone(), Arrival()

    monkeypatch.setitem(deferred.HOST_COPIES, "cpu", copy)
    return copies
