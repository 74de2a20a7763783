"""Children that are forked from the process of the tests."""

import os
import signal
import traceback


def forked(work):
    """Return the process id of a child that calls `work` and exits with status 0 if that raised nothing."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(120)  # a child that hangs is killed, and the test fails
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def outcome(work):
    """Return the exit code of a child that calls `work`; negative if a signal ended it, as the alarm does."""
    return os.waitstatus_to_exitcode(os.waitpid(forked(work), 0)[1])
