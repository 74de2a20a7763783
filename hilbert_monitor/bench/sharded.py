"""Counts what ranks that share the rows of an increment send each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
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
