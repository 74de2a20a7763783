"""A monitor never kills its run: what fails in it is counted and warned of once."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


def tell(text: str, *, stacklevel: int = 2) -> None:
    """Warn; where warnings are errors, log it instead."""
    try:
        warnings.warn(f"hilbert_monitor: {text}", stacklevel=stacklevel + 1)
    except UserWarning:
        logging.getLogger("hilbert_monitor").warning(text)


class Guard:
    """``with guard("panel"): ...`` keeps an exception of that part from the run.

    Args:
        strict: let it through.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: Counter[str] = Counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what the part raises, and warn of the first."""
        try:
            yield
        except Exception as error:
            if self.strict:
                raise
            self.failures[part] += 1
            if self.failures[part] == 1:
                tell(f"{part} failed ({type(error).__name__}: {error}); training goes on", stacklevel=3)
