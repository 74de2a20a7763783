"""What every part of the monitor needs: a guard against failures, the ranks of a run, and random state left alone."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.runs.stops import handled_signals


def warn_user(text: str, *, stacklevel: int = 2) -> None:
    """Warn; where warnings are errors, log instead."""
    try:
        warnings.warn(f"hilbert_monitor: {text}", stacklevel=stacklevel + 1)
    except UserWarning:
        logging.getLogger("hilbert_monitor").warning(text)


class Guard:
    """``with guard("panel"): ...`` keeps what the block raises from the run: it is counted, and warned of once.

    Around code of ours every `Exception` is caught. Around a function of the user's everything is, `SystemExit` and the
    panic of a Rust extension included. `KeyboardInterrupt`, `GeneratorExit` and whatever a signal handler raises always
    pass: they are meant for the program. In a child that the block has forked everything passes.

    Args:
        strict: let exceptions through.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.failures: Counter[str] = Counter()

    @contextmanager
    def __call__(self, part: str, *, user_code: bool = False) -> Iterator[None]:
        """Guard a block.

        Args:
            part: its name in the warning.
            user_code: it calls a function of the user's, which may raise anything.
        """
        process = os.getpid()
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            caught = isinstance(error, Exception) or user_code
            if self.strict or not caught or os.getpid() != process or handled_signals(error):
                raise
            self.count(part, error, stacklevel=4)

    def count(self, part: str, error: BaseException, *, stacklevel: int = 2) -> None:
        """Count a failure of a part, and warn of the first."""
        self.failures[part] += 1
        if self.failures[part] == 1:
            warn_user(f"{part} failed ({describe(error)}); training goes on", stacklevel=stacklevel)


def describe(error: BaseException) -> str:
    """Return the class, the message and the notes of an exception, for a warning."""
    try:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    except Exception:  # its message is code of the user's too
        return type(error).__name__


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together. Every rank calls each method, or none does; one process sends nothing."""

    world: int
    rank: int
    device: torch.device
    """Device of what is sent."""
    group: dist.ProcessGroup | None = None
    """The processes, if they are not all: in a pipeline, those that have the head."""

    @classmethod
    def of(cls, device: torch.device, world: int | None = None, group: dist.ProcessGroup | None = None) -> Ranks:
        """Return those of torch.distributed, or of one of its groups; with `world=1`, this process alone."""
        started = dist.is_available() and dist.is_initialized()
        world = (dist.get_world_size(group) if started else 1) if world is None else world
        return cls(world, dist.get_rank(group) if world > 1 else 0, device, group)

    def from_rank_zero(self, mine: bool) -> bool:
        """Return what rank zero passes."""
        if self.world == 1:
            return mine
        flag = torch.tensor([float(mine)], device=self.device)
        dist.broadcast(flag, group=self.group, group_src=0)
        return bool(flag.item())

    def all_min(self, mine: list[float]) -> list[float]:
        """Return, for each number, the least that a rank passes. None of them may be nan."""
        return self._reduced(mine, dist.ReduceOp.MIN)

    def sum(self, mine: list[float]) -> list[float]:
        """Return the sums of what the ranks pass."""
        return self._reduced(mine, dist.ReduceOp.SUM)

    def all_agree(self, mine: bool) -> bool:
        """Return True if every rank passes True."""
        return bool(self.all_min([float(mine)])[0])

    def gather(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks, in their order. They are pickled."""
        if self.world == 1:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def _reduced(self, mine: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return mine
        numbers = torch.tensor(mine, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=operation, group=self.group)
        return numbers.tolist()


MEETING_SECONDS = 60.0
"""How long ranks wait for each other before they measure together for the first time."""


def meet(ranks: Ranks, purpose: str, settings: str) -> str:
    """Return an empty text if every rank has come here with the same settings, or else a sentence that says what is so.

    It goes through the store of the process group, so that a rank that never comes is waited for no longer than
    MEETING_SECONDS. All ranks that came in time get the same answer; one that comes later is alone.
    """
    if ranks.world == 1:
        return ""
    store: Any = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(ranks.group or dist.group.WORLD)
    key = f"hilbert_monitor/{purpose}/{members[0]}"
    key += f"/{store.add(key, 0)}"  # the number of meetings that have ended
    everyone = [f"{key}/{rank}" for rank in range(ranks.world)]
    store.set(everyone[ranks.rank], settings)
    end = time.monotonic() + MEETING_SECONDS
    while not store.check([f"{key}/verdict"]):
        all_here = store.check(everyone)
        if (all_here or time.monotonic() > end) and store.add(f"{key}/judge", 1) == 1:
            here = [rank for rank in everyone if store.check([rank])]
            verdict = "" if all_here else f"only {len(here)} of {ranks.world} ranks have the monitor"
            if len({store.get(rank) for rank in here}) > 1:
                verdict = "the ranks have monitors with different settings"
            store.add(key.rpartition("/")[0], 1)
            store.set(f"{key}/verdict", verdict or "all")
        time.sleep(0.01)
    verdict = store.get(f"{key}/verdict").decode()
    return "" if verdict == "all" else verdict


def compute_device(weight: Tensor) -> torch.device:
    """Return the device that computes with a weight: its own, or that of its mesh if its shards are kept on a CPU."""
    mesh: Any = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@contextmanager
def keep_random_state(seed: int | None = None) -> Iterator[None]:
    """Give every generator of torch, NumPy and Python its state back at the end of the block.

    Args:
        seed: of the generators on the CPU within the block. torch.manual_seed would also seed a CUDA that has not
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
