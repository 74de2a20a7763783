"""Each of these tests runs in a process of its own: torch hears of the device there, before its first backward pass.

torch starts a thread for every device with the first backward pass, and none for a device that comes later.
"""

import multiprocessing
import traceback

import pytest

from tests.support import warm
from tests.support.emulation.device import unavailable

PATIENCE = 300


def pytest_runtest_setup(item):
    if reason := unavailable():
        pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    context = multiprocessing.get_context(warm.METHOD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(pyfuncitem.obj, arguments, theirs))
    process.start()
    theirs.close()
    try:
        failure = ours.recv() if ours.poll(PATIENCE) else f"it did not end within {PATIENCE} s"
    except EOFError:
        failure = "its process died"
    if failure:
        process.kill()
    process.join()
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


def _run(test, arguments, pipe):
    import torch

    torch.set_num_threads(1)
    try:
        test(**arguments)
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
