"""What watching costs: training steps with the monitor and without, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig

from .measure import Comparison

DIAMETER_EVERY, PERTURBATION_EVERY = 10, 500
"""The paper's cadence."""


def overhead(
    head: Literal["adamw", "rownorm"],
    *,
    V: int,
    d: int,
    context: int,
    batch: int,
    positions: int,
    rounds: int,
    device: str = "cpu",
) -> Iterator[Comparison]:
    """Time a decoder's training steps, ten without the monitor and ten with it in turns, and the panel by itself.

    The perturbation of the panel falls on every 500th step: its cost is divided by that.
    """
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocab_size=V, width=d, blocks=4, head_dim=32, context=context)).to(device)
    optimizer = pretraining_optimizer(model, head)
    text = torch.randint(V, (64, batch, context + 1), device=device)
    panel = Panel.of_tokens(torch.randint(V, (positions,)), positions, context)
    probe = Probe(model, optimizer, panel=panel, diameter_every=DIAMETER_EVERY, perturbation_every=0, strict=True)
    spent: dict[str, list[float]] = {"without": [], "with": [], "own": []}
    for turn in range(rounds + 1):
        plain = _ten_steps(model, optimizer, text, device)
        with probe:
            watched, own = _ten_steps(model, optimizer, text, device, probe)
            panel_seconds = _panel(probe) if turn == rounds else 0.0
        if turn:  # the first warms up
            spent["without"].append(plain[0])
            spent["with"].append(watched)
            spent["own"].append(own)
    step, watched, own = (statistics.median(spent[name]) / DIAMETER_EVERY for name in ("without", "with", "own"))
    panel_share = panel_seconds / PERTURBATION_EVERY
    case = f"{head} head, {V:,} x {d}, {batch} x {context} tokens a step"
    note = f"panel of {positions:,} every 500 steps: {panel_seconds:.2f} s, included"
    yield Comparison("monitor", case, "step, monitored", watched + panel_share, "the same step, bare", step, note)
    share = (own + panel_share) / step
    note = f"{share:.2%} of a step by the monitor's own clock: bracket each step, D(S) every 10th, panel every 500th"
    yield Comparison("monitor", case, "measuring", own + panel_share, "the step it measures", step, note)


def _ten_steps(
    model: Decoder, optimizer: Optimizer, text: Tensor, device: str, probe: Probe | None = None
) -> tuple[float, float]:
    """Seconds of ten steps, and of those the monitor's own by its records."""
    own, start = 0.0, time.perf_counter()
    for i in range(DIAMETER_EVERY):
        tokens = text[i % len(text)]
        optimizer.zero_grad()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if probe is not None:
            record = probe.record(train_loss=loss.item())
            assert record is not None
            own += sum(record.seconds.values())
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start, own


def _panel(probe: Probe) -> float:
    """Seconds of one perturbation of the panel."""
    probe.perturbation_every = PERTURBATION_EVERY
    record = probe.record(final=True)
    probe.perturbation_every = 0
    assert record is not None
    assert record.perturbation_rms is not None
    return record.seconds["panel"]
