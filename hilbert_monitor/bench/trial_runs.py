"""Small training runs with a probe attached, whose steps are judged by the blow-up rules."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain.recipes import Head
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord

from .small_run import SmallRun, StepChange, TrialSizes


@dataclass(frozen=True)
class TrialStep:
    """One step: the monitor's record and alerts, what other detectors look at, and a reference in fp64."""

    record: StepRecord
    alerts: list[Alert]
    loss: float
    gradient_norm: float
    diameter: float | None = None
    """D(S) in fp64, if the reference was asked for."""
    perturbation: float | None = None
    """The Hilbert RMS in fp64, likewise."""


class TrialRun(SmallRun):
    """A small run by the paper's recipe, with a probe attached.

    Args:
        head: optimizer of the LM head.
        seed: seed of weights and data.
        sizes: how large the run is.
    """

    def __init__(self, head: Head, seed: int, sizes: TrialSizes) -> None:
        super().__init__(seed, sizes, lambda model: pretraining_optimizer(model, head))
        self.head = head
        self.panel = Panel.of_tokens(self.held_out, sizes.panel, sizes.context)
        self.probe = Probe(
            self.model,
            self.optimizer,
            panel=self.panel,
            perturbation_every=25,
            schedulers=self.schedule,
            judge=Judge(),
            strict=True,
        ).attach()

    def branch(self) -> TrialRun:
        """Return an independent copy that continues from this step."""
        other = TrialRun(self.head, self.seed, self.sizes).load(self)
        other.probe.judge = copy.deepcopy(self.probe.judge)
        other.probe.step = self.probe.step
        return other

    def step(self, change: StepChange | None = None, *, reference: bool = False) -> TrialStep:
        """Make one training step.

        Args:
            change: what a fault changes in it.
            reference: also compute D(S) and the Hilbert RMS in fp64, from the weights themselves.
        """
        change = change or StepChange()
        loss = self.backward(change)
        norm = self.clip_gradients()
        with self.update(change):
            before = self.model.lm_head.weight.detach().double().clone() if reference else None
            self.optimizer.step()
            record = self.probe.record(train_loss=loss.item())
            truth = self._reference(before) if before is not None else (None, None)
        assert record is not None
        return TrialStep(record, self.probe.alerts, loss.item(), float(norm), *truth)

    @torch.no_grad()
    def _reference(self, before: Tensor) -> tuple[float, float]:
        """Return D(S) over all pairs, and the RMS over positions of the largest minus the smallest logit change."""
        group: dict[str, Any] = self.probe.source.group
        weight = self.model.lm_head.weight.double()
        S = weight - (1 - group["lr"] * group["weight_decay"]) * before
        ids = torch.cat(
            [batch.flatten()[at] for batch, at in zip(self.panel.batches, self.panel.positions, strict=True)]
        )
        rows = ids.view(-1, self.sizes.context)
        logits = self.model.hidden(rows).flatten(0, 1).double() @ S.T
        spread = logits.amax(1) - logits.amin(1)
        longest = max(float(torch.cdist(part, S).max()) for part in S.split(512))
        return longest, float(spread.square().mean().sqrt())
