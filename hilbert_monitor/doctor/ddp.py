"""Claim: under DDP the monitor's numbers are those of one process, and the ranks' weights are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hilbert_monitor.monitor.panel import Panel, random_state_kept
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer

from .decoder import TinyDecoder, loss_of, some_text
from .device import CheckSizes
from .finding import Check, Outcome, judged
from .ranks import in_ranks

V, WIDTH, PANEL = 307, 32, 101
CLOSE = 1e-3
"""Relative difference of a number over some steps: gradients are summed in another order."""
NUMBERS = ("diameter", "perturbation_rms", "perturbation_max")


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank has in the end."""

    numbers: list[float]
    """NUMBERS of every update; a diameter on the first rank alone, nan elsewhere."""
    weights: list[Tensor]


Work = Callable[[int, int, str, int], Trained]
"""(rank, world, type of device, rows of a batch) -> what it has in the end."""


def train(rank: int, world: int, kind: str, rows: int) -> Trained:
    """Four updates under each head, an equal share of every batch for each rank; Muon shares its work over them."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    numbers, weights = [], []
    heads: tuple[Literal["rownorm", "adamw"], ...] = ("rownorm", "adamw")
    for head in heads:
        model = TinyDecoder(V, WIDTH).to(device)
        wrapped = DistributedDataParallel(model) if world > 1 else model
        optimizer = pretraining_optimizer(model, head)
        panel = Panel.of_tokens(some_text(V, 8, 17, seed=99), PANEL)
        with Probe(model, optimizer, panel=panel, diameter_every=1, perturbation_every=2, strict=True) as probe:
            for update in range(4):
                text = some_text(V, rows, 17, seed=update)
                optimizer.zero_grad()
                loss_of(wrapped, text.chunk(world)[rank].to(device)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                record = probe.record()
                numbers += [float(getattr(record, name) or "nan") for name in NUMBERS]
        weights += [p.detach().cpu() for p in model.parameters()]
    return Trained(numbers, weights)


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield the run over all visible GPUs, or, where there are not two, over two processes on the CPU."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    world, backend, kind = (gpus, "nccl", "cuda") if gpus > 1 else (2, "gloo", "cpu")
    where = f"{world} GPUs over NCCL" if gpus > 1 else "2 processes on the CPU over gloo"
    where += ", for want of a second GPU" if gpus == 1 else ""
    yield Check("DDP", where, partial(_check, train, world, backend, kind, sizes.patience))


def _check(work: Work, world: int, backend: str, kind: str, patience: float) -> Outcome:
    rows = 4 * world
    ranks: list[Trained] = in_ranks(work, kind, rows, world=world, backend=backend, patience=patience)
    with random_state_kept():
        alone = train(0, 1, kind, rows)
    off = max(_relative(a, b) for a, b in zip(ranks[0].numbers, alone.numbers, strict=True))
    unequal = [r for r, other in enumerate(ranks) if not all(map(torch.equal, ranks[0].weights, other.weights))]
    weights = f"weights of ranks {unequal} DIFFERENT" if unequal else "weights equal to the bit"
    D = alone.numbers[-len(NUMBERS)]
    return judged(
        off <= CLOSE and not unequal,
        f"last D(S) {ranks[0].numbers[-len(NUMBERS)]:.6g}, of one process {D:.6g}; all numbers off by {off:.0e} at most"
        f" (limit {CLOSE:.0e}); {weights}",
    )


def _relative(a: float, b: float) -> float:
    """Relative difference; none between two numbers that were not measured, all of it where one was not."""
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b) / abs(b)
