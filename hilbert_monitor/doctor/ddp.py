"""Claim: under DDP the monitor measures what it measures in one process, and the ranks' weights stay equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.monitor.runtime import keep_random_state
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain.recipe import HEADS

from .decoder import TinyDecoder, loss_of
from .device import CheckSizes
from .finding import Check, Outcome, outcome_of
from .ranks import in_ranks
from .samples import synthetic_text

V, WIDTH, PANEL = 307, 32, 101
CLOSE = 1e-3
"""Relative difference that is allowed, since the ranks sum gradients in another order."""
NUMBERS = ("diameter", "perturbation_rms", "perturbation_max")
"""Fields of a record that are compared."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The numbers and weights of one rank after training."""

    numbers: list[float]
    """NUMBERS of every update. Only the first rank has a diameter; the others have nan."""
    weights: list[Tensor]


Work = Callable[[int, int, str, int], Trained]
"""From (rank, world, type of device, rows of a batch) to the result of that rank."""


def train(rank: int, world: int, kind: str, rows: int) -> Trained:
    """Train four updates with each head. Each rank takes an equal share of every batch, and of Muon's work."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    numbers, weights = [], []
    for head in HEADS:
        model = TinyDecoder(V, WIDTH).to(device)
        wrapped = DistributedDataParallel(model) if world > 1 else model
        optimizer = pretraining_optimizer(model, head)
        panel = Panel.of_tokens(synthetic_text(V, 8, 17, seed=99), PANEL)
        with Probe(model, optimizer, panel=panel, diameter_every=1, perturbation_every=2, strict=True) as probe:
            for update in range(4):
                text = synthetic_text(V, rows, 17, seed=update)
                optimizer.zero_grad()
                loss_of(wrapped, text.chunk(world)[rank].to(device)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                record = probe.record()
                numbers += [float(getattr(record, name) or "nan") for name in NUMBERS]
        weights += [p.detach().cpu() for p in model.parameters()]
    return Trained(numbers, weights)


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield a check over all visible GPUs; with fewer than two, over two processes on the CPU."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    world, backend, kind = (gpus, "nccl", "cuda") if gpus > 1 else (2, "gloo", "cpu")
    where = f"{world} GPUs over NCCL" if gpus > 1 else "2 processes on the CPU over gloo"
    where += ", for want of a second GPU" if gpus == 1 else ""
    yield Check("DDP", where, partial(_check, train, world, backend, kind, sizes.patience))


def _check(work: Work, world: int, backend: str, kind: str, patience: float) -> Outcome:
    rows = 4 * world
    ranks: list[Trained] = in_ranks(work, kind, rows, world=world, backend=backend, patience=patience)
    with keep_random_state():
        alone = train(0, 1, kind, rows)
    off = max(_relative(a, b) for a, b in zip(ranks[0].numbers, alone.numbers, strict=True))
    unequal = [r for r, other in enumerate(ranks) if not all(map(torch.equal, ranks[0].weights, other.weights))]
    weights = f"weights of ranks {unequal} DIFFERENT" if unequal else "weights equal to the bit"
    D = alone.numbers[-len(NUMBERS)]
    return outcome_of(
        off <= CLOSE and not unequal,
        f"last D(S) {ranks[0].numbers[-len(NUMBERS)]:.6g}, of one process {D:.6g}; all numbers off by {off:.0e} at most"
        f" (limit {CLOSE:.0e}); {weights}",
    )


def _relative(a: float, b: float) -> float:
    """Return the relative difference: 0 if neither number was measured, infinite if only one was."""
    if math.isnan(a) and math.isnan(b):
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b) / abs(b)
