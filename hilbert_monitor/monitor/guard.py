"""A monitor never kills its run: what fails in it is counted and warned of once.

What is caught, and what passes:

- Around code of ours, every `Exception` is caught.
- Around a function that the user supplied (`hidden`, a response to a blow-up, the items of a validation set),
  everything is caught, `SystemExit` and the panic of a Rust extension included, which is no `Exception`.
- `decode` and sinks run in threads of ours, where everything is caught. Python runs signal handlers in the main thread
  only, so nothing that arrives there is meant for the program.
- In a process that such a function has forked, everything passes: a child that calls `sys.exit` would go on training.
- `KeyboardInterrupt`, `GeneratorExit` and whatever a signal handler raises always pass: they are meant for the program,
  and only happened to arrive while the monitor was at work.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hilbert_monitor.runs.stops import handled_signals


def tell(text: str, *, stacklevel: int = 2) -> None:
    """Warn; where warnings are errors, log it instead."""
    try:
        warnings.warn(f"hilbert_monitor: {text}", stacklevel=stacklevel + 1)
    except UserWarning:
        logging.getLogger("hilbert_monitor").warning(text)


class Guard:
    """``with guard("panel"): ...`` keeps what that part raises from the run.

    Args:
        strict: let it through.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: Counter[str] = Counter()

    @contextmanager
    def __call__(self, part: str, *, user_code: bool = False) -> Iterator[None]:
        """Count what the part raises, and warn of the first.

        Args:
            part: its name in the warning.
            user_code: it calls a function that the user supplied, which may raise anything.
        """
        process = os.getpid()
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            if os.getpid() != process:  # it was forked in the block, and ends itself
                raise
            if self.strict or not (user_code or isinstance(error, Exception)) or handled_signals(error):
                raise
            self.count(part, error, stacklevel=4)

    def count(self, part: str, error: BaseException, *, stacklevel: int = 2) -> None:
        """Count a failure of a part, and warn of the first."""
        self.failures[part] += 1
        if self.failures[part] == 1:
            tell(f"{part} failed ({describe(error)}); training goes on", stacklevel=stacklevel)


def describe(error: BaseException) -> str:
    """Return the class, the message and the notes of an exception, for a warning."""
    try:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    except Exception:  # its message is code of the user too
        return type(error).__name__
