"""A run's writer for the tests."""

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import RunInfo


@pytest.fixture
def begin(tmp_path):
    """Opens writers under one root, and closes those that a test leaves open."""
    opened = []

    def open_run(name="a", **options):
        info = name if isinstance(name, RunInfo) else RunInfo(name=name)
        opened.append(RunWriter.open(tmp_path, info, **options))
        return opened[-1]

    yield open_run
    for writer in opened:
        writer.close()
