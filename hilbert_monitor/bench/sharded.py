"""Counts what ranks that share the rows of an increment send each other, and times two ranks beside one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.doctor.ranks import in_ranks
from hilbert_monitor.geometry import RowShards, hilbert_perturbation, row_diameter, row_diameter_bracket
from hilbert_monitor.pretrain.recipes import Head

from .increments import make_increment
from .measure import BenchResult

Measure = Literal["bracket", "exact", "perturbation"]
_PATIENCE = 3600.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a measurement cost one rank, and what it found."""

    found: tuple[float, tuple[int, int]]
    """The number, and the tokens that attain it."""
    bytes: int
    collectives: int


def traffic(
    head: Head, V: int, d: int, *, worlds: Sequence[int], panel: int, steps: int = 40, batch: int = 128
) -> Iterator[BenchResult]:
    """Count the bytes that a rank receives for each measurement, beside those of gathering all rows on every rank.

    Value and tokens are checked against those of the whole matrix.
    """
    with _saved(head, V, d, panel=panel, steps=steps, batch=batch) as path:
        whole = _found(*_load(path))
        for world in worlds:
            ranks = in_ranks(_count, path, world=world, backend="gloo", patience=_PATIENCE)
            gather = V * d * 4 * (world - 1) // world
            for name in whole:
                counts: list[Traffic] = [rank[name] for rank in ranks]
                _check(name, whole, [count.found for count in counts], width=d)
                most = max(count.bytes for count in counts)
                note = (
                    f"{most / gather:.2%} of a gather, {counts[0].collectives} collectives; the whole matrix's answer"
                )
                case = f"{name}, {head} {V:,} x {d:,}, {world} ranks"
                yield BenchResult("moved a rank", case, name, most, "full gather", gather, note, "B")


def split(head: Head, V: int, d: int, *, repeat: int = 15) -> Iterator[BenchResult]:
    """Time the bracket and the exact search of an increment by two processes of one thread, beside one process.

    Two processes that measure a half each, and tell each other nothing, show what the machine has to give.
    """
    with _saved(head, V, d, panel=1) as path:
        (times, processor), _ = in_ranks(_time, path, repeat, world=2, backend="gloo", patience=_PATIENCE)
    for name, (one, two, apart) in times.items():
        share = processor[name][1] / processor[name][0]
        note = f"halves without a word between them {one / apart:.2f}x; a rank takes {share:.0%} of the processor time"
        case = f"{name}, {head} {V:,} x {d:,}"
        yield BenchResult("shared by two ranks", case, "two processes", two, "one process", one, note)


@contextmanager
def _saved(head: Head, V: int, d: int, **options: int) -> Iterator[Path]:
    """Make an increment, in a file that all processes map, so that there is one copy in memory."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "increment.pt"
        made = make_increment(head, V, d, **options)
        torch.save({"S": made.S, "H": made.H}, path)
        del made
        yield path


def _load(path: Path) -> tuple[Tensor, Tensor]:
    saved = torch.load(path, mmap=True, weights_only=True)
    return saved["S"], saved["H"]


def _calls(S: Tensor | RowShards, H: Tensor) -> dict[Measure, Callable[[], tuple[float, tuple[int, int]]]]:
    def bracket() -> tuple[float, tuple[int, int]]:
        found = row_diameter_bracket(S)
        return found.lower, found.pair

    def exact() -> tuple[float, tuple[int, int]]:
        found = row_diameter(S)
        return found.value, found.pair

    def perturbation() -> tuple[float, tuple[int, int]]:
        found = hilbert_perturbation(S, H)
        return found.max, found.pair

    return {"bracket": bracket, "exact": exact, "perturbation": perturbation}


def _found(S: Tensor, H: Tensor) -> dict[Measure, tuple[float, tuple[int, int]]]:
    return {name: call() for name, call in _calls(S, H).items()}


def _check(
    name: Measure, whole: dict[Measure, Any], found: Sequence[tuple[float, tuple[int, int]]], *, width: int
) -> None:
    """Raise unless all ranks found the same, and what the whole matrix gives; a bracket holds the exact value.

    Lengths are measured in fp64. A perturbation is a sum of `width` products in fp32, and ranks and the whole matrix
    have different centres: both round.
    """
    value, pair = whole["exact" if name == "bracket" else name]
    first, first_pair = found[0]
    if any(each != found[0] for each in found):
        raise AssertionError(f"{name}: ranks found different answers {found}")
    if name == "bracket":
        right = value / 2 <= first <= value * (1 + 1e-12)
    else:
        rounding = math.sqrt(width) * 2.0**-23 if name == "perturbation" else 1e-12
        right = math.isclose(first, value, rel_tol=rounding) and set(first_pair) == set(pair)
    if not right:
        raise AssertionError(f"{name}: ranks found {first} at {first_pair}, the whole matrix has {value} at {pair}")


def _count(rank: int, world: int, path: Path) -> dict[Measure, Traffic]:
    S, H = _load(path)
    counts = {}
    for name in _calls(S, H):
        shards = RowShards.split(S)
        found = _calls(shards, H)[name]()
        counts[name] = Traffic(found, shards.ranks.bytes, shards.ranks.collectives)
    return counts


def _time(rank: int, world: int, path: Path, repeat: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the shortest times, on the clock and of the processor: one process alone, both together, and both apart.

    Each rank has its own rows as the monitor forms them: together in memory.
    """
    S, H = _load(path)
    shards = RowShards.split(S)
    shards = replace(shards, rows=shards.rows.contiguous())
    clock, processor = {}, {}
    for name in ("bracket", "exact"):
        calls = [_calls(part, H)[name] for part in (S, shards, shards.rows)]
        best = [[math.inf, math.inf] for _ in calls]
        for _ in range(repeat + 1):
            for which, call in enumerate(calls):
                dist.barrier()
                if which or rank == 0:
                    start = time.perf_counter(), time.thread_time()
                    call()
                    taken = time.perf_counter() - start[0], time.thread_time() - start[1]
                    best[which] = [min(pair) for pair in zip(best[which], taken, strict=True)]
        clock[name], processor[name] = ([b[0] for b in best], [b[1] for b in best])
    return clock, processor
