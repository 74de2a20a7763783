"""Ranks that share the rows of an increment: bytes moved against a full gather, two ranks against one process.

Every answer of the ranks, value and tokens, is checked against that of the whole matrix.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import RowShards, hilbert_perturbation, row_diameter, row_diameter_bracket
from hilbert_monitor.pretrain.recipe import HEADS, Head

from .measure import Result, collect, in_ranks

Answer = tuple[float, tuple[int, int]]
"""A number, and the tokens that attain it."""
TIMED = "bracket", "exact D(S)"


@dataclass(frozen=True)
class Cost:
    """What a measurement cost one rank, and what it found. Timed are the rank alone, and all ranks together."""

    answer: Answer
    bytes: int
    collectives: int
    seconds_alone: float
    seconds: float


def run(*, quick: bool) -> list[Result]:
    """Count bytes at V = 50,257, d = 256 for 2, 4 and 8 ranks; time two ranks there and at d = 1,024."""
    return collect(_results(quick))


def _results(quick: bool) -> Iterator[Result]:
    V, d, panel, worlds, repeat = (4096, 64, 256, [2], 2) if quick else (50_257, 256, 8192, [2, 4, 8], 25)
    for head in HEADS[:1] if quick else HEADS:
        yield from shared_rows(head, V, d, worlds=worlds, panel=panel, repeat=repeat)
    for head in () if quick else HEADS:
        yield from shared_rows(head, V, 1024, worlds=[2], panel=64, repeat=repeat, steps=6)


def shared_rows(
    head: Head, V: int, d: int, *, worlds: Sequence[int], panel: int, repeat: int, steps: int = 40
) -> Iterator[Result]:
    """Count the bytes that a rank receives for each measurement, as a ring moves them; time two ranks."""
    with _saved(head, V, d, panel=panel, steps=steps) as path:
        S, H = _load(path)
        whole = {name: measure(S, H) for name, measure in MEASURES.items()}
        for world in worlds:
            gather = V * d * 4 * (world - 1) // world
            ranks = in_ranks(_costs, path, repeat if world == 2 else 0, world=world)
            for name in MEASURES:
                costs = [rank[name] for rank in ranks]
                check(name, whole, [cost.answer for cost in costs], width=d)
                case = f"{name}, {head} {V:,} x {d:,}, {world} ranks"
                most = max(cost.bytes for cost in costs)
                note = f"{most / gather:.2%} of a gather, {costs[0].collectives} collectives"
                yield Result("bytes moved a rank", case, most, "full gather", gather, "B", note)
                if world == 2 and name in TIMED:
                    two, one = max(cost.seconds for cost in costs), costs[0].seconds_alone
                    note = f"one thread a process, shortest of {repeat} in turn"
                    yield Result("time of two ranks", case, two, "one process, whole matrix", one, note=note)


@contextmanager
def _saved(head: Head, V: int, d: int, *, panel: int, steps: int) -> Iterator[Path]:
    """Make an increment, in a file that all processes map, so that there is one copy in memory."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "increment.pt"
        made = make_increment(head, V, d, panel=panel, steps=steps)
        torch.save({"S": made.S, "H": made.H}, path)
        del made
        yield path


def _load(path: Path) -> tuple[Tensor, Tensor]:
    saved = torch.load(path, mmap=True, weights_only=True)
    return saved["S"], saved["H"]


def _bracket(S: Tensor | RowShards, H: Tensor) -> Answer:
    found = row_diameter_bracket(S)
    return found.lower, found.pair


def _exact(S: Tensor | RowShards, H: Tensor) -> Answer:
    found = row_diameter(S)
    return found.value, found.pair


def _perturbation(S: Tensor | RowShards, H: Tensor) -> Answer:
    found = hilbert_perturbation(S, H)
    return found.max, found.pair


MEASURES: dict[str, Callable[[Tensor | RowShards, Tensor], Answer]] = {
    "bracket": _bracket,
    "exact D(S)": _exact,
    "perturbation": _perturbation,
}


def check(name: str, whole: dict[str, Answer], answers: Sequence[Answer], *, width: int) -> None:
    """Raise unless all ranks found the same, and what the whole matrix gives; a bracket holds the exact value.

    Lengths are measured in fp64. A perturbation is a sum of `width` products in fp32, and ranks and the whole matrix
    have different centres: both round.
    """
    value, pair = whole["exact D(S)" if name == "bracket" else name]
    first, first_pair = answers[0]
    if any(answer != answers[0] for answer in answers):
        raise AssertionError(f"{name}: ranks found different answers {answers}")
    if name == "bracket":
        right = value / 2 <= first <= value * (1 + 1e-12)
    else:
        rounding = math.sqrt(width) * 2.0**-23 if name == "perturbation" else 1e-12
        right = math.isclose(first, value, rel_tol=rounding) and set(first_pair) == set(pair)
    if not right:
        raise AssertionError(f"{name}: ranks found {first} at {first_pair}, the whole matrix has {value} at {pair}")


def _costs(rank: int, world: int, path: Path, repeat: int) -> dict[str, Cost]:
    """Measure the rows of this rank together with the other ranks. Rank zero also measures all rows, in turns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    S, H = _load(path)
    sharded = distribute_tensor(S, init_device_mesh("cpu", (world,)), [Shard(0)], src_data_rank=None)
    costs = {}
    for name, measure in MEASURES.items():
        shards = RowShards.of(sharded)
        answer = measure(shards, H)
        moved, collectives = shards.ranks.bytes, shards.ranks.collectives
        alone, together = [math.inf], [math.inf]
        for _ in range(repeat if name in TIMED else 0):
            dist.barrier()
            if rank == 0:
                alone.append(_seconds(measure, S, H))
            dist.barrier()
            together.append(_seconds(measure, sharded, H))
        costs[name] = Cost(answer, moved, collectives, min(alone), min(together))
    return costs


def _seconds(measure: Callable[[Tensor, Tensor], Answer], S: Tensor, H: Tensor) -> float:
    start = time.perf_counter()
    measure(S, H)
    return time.perf_counter() - start
