"""Times what the monitor costs: two equal training runs make updates in turns, and one of them is monitored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from hilbert_monitor.emulation.synthetic import synthetic_text
from hilbert_monitor.monitor.guard import Guard
from hilbert_monitor.monitor.layers import EVERY as LAYERS_EVERY
from hilbert_monitor.monitor.layers import LayerWatch
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig
from hilbert_monitor.pretrain.recipes import Head
from hilbert_monitor.runs.alerts import Judge

from .measure import BenchResult

DIAMETER_EVERY, PERTURBATION_EVERY = 10, 500
"""Updates from one measurement to the next, as in the paper."""


def overhead(device: torch.device, V: int, d: int, steps: int, head: Head) -> Iterator[BenchResult]:
    """Time steps of a four-block decoder on a (V, d) head with a probe and without.

    A probe works in the optimizer's step and after it, and nowhere else. That part is timed by itself, because what it
    adds is small beside the noise of forward and backward passes. These are the same for both and run once. Nine
    updates of ten have bounds and rules, the tenth has D(S), and one of five hundred has the panel. The panel's hidden
    states are those of `Decoder.hidden`, as in pretraining, which makes no logits.
    """
    plain, watched = (_Training(device, V, d, head) for _ in range(2))
    panel = Panel.of_tokens(synthetic_text(V, 8, 1024, seed=99), context=plain.context)
    passes, without, times = [], [], {"bounds": list[float](), "exact": list[float]()}
    with Probe(
        watched.model,
        watched.optimizer,
        panel=panel,
        diameter_every=2,
        perturbation_every=0,
        bracket=True,
        hidden=lambda model, tokens: model.hidden(tokens),  # type: ignore[operator]
        judge=Judge(),
        strict=True,
    ) as probe:
        for step in range(-2, 2 * steps):  # two to warm up
            passes.append(plain.gradient(step + 3))
            without.append(plain.update())
            watched.take_gradient(plain)
            times["exact" if step % 2 else "bounds"].append(watched.update(probe.record) - without[-1])
        probe.agenda.perturbation_every = 1
        with_panel = watched.update(probe.record)
    update = median(without[2:])
    bounds, exact = (max(0.0, median(samples[1:])) for samples in times.values())
    perturbation = max(0.0, with_panel - update)
    share = 1 / DIAMETER_EVERY
    extra = (1 - share) * bounds + share * exact + perturbation / PERTURBATION_EVERY
    step_time = median(passes[2:]) + update
    note = (
        f"{extra / step_time:.2%} more: bounds {bounds * 1e3:.2f} ms, D(S) {exact * 1e3:.1f} ms every 10th, panel of"
        f" {panel.size:,} {perturbation * 1e3:.0f} ms every 500th; {plain.tokens:,} tokens a step"
    )
    case = f"{head} head ({V:,} x {d})"
    yield BenchResult("monitored training step", case, "with", step_time + extra, "without", step_time, note)


def layer_overhead(device: torch.device, V: int, d: int, steps: int, head: Head) -> Iterator[BenchResult]:
    """Time steps of the same decoder with `layers=True` and without, one measured step in ten.

    As above, only what happens in the optimizer's step and around it is timed twice.
    """
    plain, watched = (_Training(device, V, d, head) for _ in range(2))
    weight = watched.model.lm_head.weight
    layers = LayerWatch(watched.model, [watched.optimizer], weight, guard=Guard(strict=True), every=1)
    passes, without, extra = [], [], list[float]()
    for step in range(1, steps + 3):  # two to warm up
        passes.append(plain.gradient(step))
        without.append(plain.update())
        watched.take_gradient(plain)
        start = time.perf_counter()
        layers.begin(step)
        begun = time.perf_counter() - start
        number = step
        extra.append(begun + watched.update(lambda number=number: layers.end(number)) - without[-1])  # type: ignore[misc]
    measured, update = max(0.0, median(extra[2:])), median(without[2:])
    step_time = median(passes[2:]) + update
    share = measured / LAYERS_EVERY / step_time
    note = f"{share:.2%} more: {len(layers.layers)} layers {measured * 1e3:.1f} ms every {LAYERS_EVERY}th"
    case = f"{head} head ({V:,} x {d}), layers=True"
    seconds = step_time + measured / LAYERS_EVERY
    yield BenchResult("layers of a training step", case, "with", seconds, "without", step_time, note)


class _Training:
    """A decoder in training, which times the parts of each update."""

    def __init__(self, device: torch.device, V: int, d: int, head: Head) -> None:
        self.micro_batches, self.rows, self.context = (1, 16, 128) if device.type == "cpu" else (16, 4, 1024)
        torch.manual_seed(0)
        sizes = DecoderConfig(vocab_size=V, width=d, blocks=4, head_dim=min(32, d), context=self.context)
        self.model, self.device, self.V = Decoder(sizes).to(device), device, V
        self.optimizer = pretraining_optimizer(self.model, head)

    @property
    def tokens(self) -> int:
        """Tokens of one update."""
        return self.micro_batches * self.rows * self.context

    def gradient(self, seed: int) -> float:
        """Run forward and backward passes of one update; return the seconds."""
        texts = [
            synthetic_text(self.V, self.rows, self.context + 1, seed=seed + k).to(self.device)
            for k in range(self.micro_batches)
        ]

        def passes() -> None:
            self.optimizer.zero_grad()
            for text in texts:
                self.model.loss(text[:, :-1], text[:, 1:]).backward()  # type: ignore[no-untyped-call]

        return device_seconds(passes, self.device)

    def take_gradient(self, other: _Training) -> None:
        """Copy the gradient of a training run that is equal to this one."""
        for p, q in zip(self.model.parameters(), other.model.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()

    def update(self, then: Callable[[], object] = lambda: None) -> float:
        """Make the optimizer's step, in which a monitor measures, and call `then`; return the seconds."""
        return device_seconds(lambda: (self.optimizer.step(), then()), self.device)


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds from an idle device to an idle device."""
    module = torch.get_device_module(device)
    module.synchronize()
    start = time.perf_counter()
    call()
    module.synchronize()
    return time.perf_counter() - start
