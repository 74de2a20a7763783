"""Set-up of all tests.

Under CI the same examples are drawn on every run; elsewhere new ones, so that they go on finding things.
"""

import gc
import os
import signal
import sys
import tempfile

import pytest
import pytest_timeout
from _pytest._io import TerminalWriter
from hypothesis import settings

from hilbert_monitor.doctor.bf16 import VARIABLE, WITHOUT_AMX, leave_out_broken_amx
from tests.support.draws import draws

# oneDNN reads the variable when torch is loaded; workers of pytest-xdist and children of tests inherit it.
assert "torch" not in sys.modules
BF16_KILLS = "PYTEST_XDIST_WORKER" not in os.environ and VARIABLE not in os.environ and leave_out_broken_amx()

# What tests load stays for good. Python's look for garbage would go through all of it, half a second each time.
gc.disable()

# Fresh interpreters load what an earlier one has compiled. Installed packages are compiled anyway, ours is not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell's background job ignores Ctrl-C and so do its children, among them the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Services that tests start keep their files here and not in the user's folders.
os.environ.setdefault("HILBERT_MONITOR_CACHE", tempfile.mkdtemp(prefix="hilbert-monitor-tests-"))
os.environ.setdefault("HILBERT_MONITOR_DATA", tempfile.mkdtemp(prefix="hilbert-monitor-tests-"))

# Tests of packages install some from an index, which may be slow.
os.environ.setdefault("PIP_TIMEOUT", "60")
os.environ.setdefault("PIP_RETRIES", "10")

settings.register_profile("here", deadline=None, max_examples=draws(100))
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=draws(100))
settings.load_profile("ci" if os.environ.get("CI") else "here")


def _dump_stacks(_, dump=pytest_timeout.dump_stacks):
    dump(TerminalWriter(sys.__stderr__))


# A worker of pytest-xdist has no stdout: the stacks of a test that hangs would be lost.
pytest_timeout.dump_stacks = _dump_stacks


LONGEST = (
    *("test_oncall.py", "test_demo.py", "test_page.py", "test_docker.py", "test_page_live.py", "test_rules.py"),
    *("test_log.py", "test_extras.py", "test_grafana.py", "test_examples.py", "test_page_runs.py", "test_server.py"),
    *("test_benchmarks.py", "test_page_compare.py", "test_page_shell.py", "test_page_access.py", "test_golden.py"),
    *("test_doctor.py", "test_noninterference.py", "test_perturbation.py", "test_alerts.py"),
    *("test_tension.py"),
)
"""Files that take long come first: at the end one process would wait for the others. Some compute, others wait."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    _mark_sweeps(items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def _mark_sweeps(items):
    """Of the cases of a test that has the mark `few`, those that it does not name or count are a sweep."""
    cases = {}
    for item in items:
        if mark := item.get_closest_marker("few"):
            cases.setdefault((item.path, item.originalname), (mark.args, []))[1].append(item)
    for wanted, those in cases.values():
        if isinstance(wanted[0], int):
            number = min(wanted[0], len(those))
            kept = {those[place * (len(those) - 1) // max(1, number - 1)].nodeid for place in range(number)}
        else:
            kept = {item.nodeid for item in those if item.callspec.id in wanted}
            assert len(kept) == len(wanted) or len(those) <= len(wanted), f"{those[0].nodeid}: no case {wanted}"
        for item in those:
            if item.nodeid not in kept:
                item.add_marker("sweep")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_report_header():
    return [f"bf16 products die with SIGILL here: {VARIABLE}={WITHOUT_AMX} for these tests"] if BF16_KILLS else []


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """What a test writes without saying where goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, sched):
    """Do not run a test again whose worker ended, as at its time limit: pytest-xdist would, in the next worker."""
    for scope, unit in list(sched.workqueue.items()):
        if crashitem in unit:
            unit[crashitem] = True
        if all(unit.values()):
            del sched.workqueue[scope]
