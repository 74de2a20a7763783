"""Random numbers of a run, left as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def preserve_random_state(seed: int | None = None) -> Iterator[None]:
    """Give every generator of torch, numpy and Python its state back at the end of the block.

    Args:
        seed: for the generators on the CPU within the block. torch.manual_seed would also seed a CUDA that has not
            started yet.
    """
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), sys.modules.get("numpy.random")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    legacy = numpy.get_state() if numpy else None
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy:
            numpy.set_state(legacy)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
