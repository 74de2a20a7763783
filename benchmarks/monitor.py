"""What the monitor adds to a training step, at the paper's cadence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch

from hilbert_monitor.doctor.overhead import TimedTraining, step_cost
from hilbert_monitor.monitor.layers import EVERY, LayerMonitor
from hilbert_monitor.monitor.runtime import Guard
from hilbert_monitor.pretrain.recipe import HEADS, Head

from .measure import Result, collect


def run(*, quick: bool) -> list[Result]:
    """Time steps of a four-block decoder of the demo's size with the monitor and without."""
    V, d, steps = (512, 32, 1) if quick else (8192, 128, 15)
    return collect(_results(V, d, steps))


def _results(V: int, d: int, steps: int) -> Iterator[Result]:
    cpu = torch.device("cpu")
    for head in HEADS:
        cost = step_cost(cpu, V, d, steps, head)
        case = f"{head} head, {V:,} x {d}"
        yield Result("training step", case, cost.monitored, "no monitor", cost.plain, note=cost.note)
    yield layer_cost(cpu, V, d, steps, "rownorm")


def layer_cost(device: torch.device, V: int, d: int, steps: int, head: Head) -> Result:
    """Time steps of the same decoder with `layers=True` and without, one measured step in ten.

    Only what happens in the optimizer's step and around it is timed twice. Forward and backward run once.
    """
    plain, watched = (TimedTraining(device, V, d, head) for _ in range(2))
    weight = watched.model.lm_head.weight
    layers = LayerMonitor(watched.model, [watched.optimizer], weight, guard=Guard(strict=True), every=1)
    passes, without, extra = [], [], list[float]()
    for step in range(1, steps + 3):  # two to warm up
        passes.append(plain.gradient(step))
        without.append(plain.update())
        watched.take_gradient(plain)
        start = time.perf_counter()
        layers.begin(step)
        begun = time.perf_counter() - start
        extra.append(begun + watched.update(lambda step=step: layers.end(step)) - without[-1])  # type: ignore[misc]
    measured, update = max(0.0, median(extra[2:])), median(without[2:])
    step_time = median(passes[2:]) + update
    share = measured / EVERY / step_time
    note = f"{share:.2%} more: {len(layers.layers)} layers {measured * 1e3:.1f} ms every {EVERY}th"
    case = f"{head} head, {V:,} x {d}, layers=True"
    return Result("training step", case, step_time + measured / EVERY, "no monitor", step_time, note=note)
