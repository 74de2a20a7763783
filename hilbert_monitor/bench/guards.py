"""Safeguards against bad training steps, each as a way to make the step: the arms of `guarding`.

None of them is told what the fault is. What they look at:

- `Nothing`: at nothing.
- `GradientClipping`: at the norm of all gradients, which it scales down to one.
- `UpdateClipping`: at each matrix under AdamW, whose learning rate it divides by the RMS of g / sqrt(v) where that is
  above one (StableAdamW). Muon and RowNorm have no v: it leaves them alone.
- `SkippedSteps`: at the loss and the norm of all gradients. A step is left out where one of them is six standard
  deviations above the mean of the last 128 (OLMo-core). Its optimizer multiplies a step by zero, which leaves a nan a
  nan, and remembers it for 128 steps, all of which it leaves out. Here a step is left out whole, and what is not finite
  is not remembered: the opponent is better than the original.
- `HeldSteps`: ours, a `TrustRegion` at the head.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import mean, stdev

import torch
from torch import Tensor
from torch.optim import AdamW

from hilbert_monitor.monitor.trust_region import TrustRegion
from hilbert_monitor.optim.schedule import warmup_cosine_scale

from .small_run import SmallRun

WINDOW, DEVIATIONS, QUIET = 128, 6.0, 64
"""Of skipped steps: values that it remembers, deviations above their mean that it allows, values that it needs."""


class Nothing:
    """Makes every step.

    Args:
        run: the run whose steps it makes.
    """

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        self.left_out = 0
        """Steps that were not made."""
        self.held = 0
        """Steps that were made smaller."""

    def step(self, loss: float) -> None:
        """Make the optimizer's step from the gradients that are there.

        Args:
            loss: of the batch.
        """
        self.run.optimizer.step()

    def load(self, other: Nothing) -> None:
        """Take over what another has learned from the steps before."""

    def close(self) -> None:
        """Let go of the run."""


class GradientClipping(Nothing):
    """Scales gradients down to a norm of one."""

    def step(self, loss: float) -> None:
        """Clip, and make the step."""
        self.held += not float(self.run.clip_gradients()) <= 1
        super().step(loss)


class UpdateClipping(Nothing):
    """Divides the learning rate of a matrix under AdamW by max(1, RMS(g / sqrt(v))), as StableAdamW does."""

    def step(self, loss: float) -> None:
        """Lower the rates for this step."""
        rates = [(group, group["lr"]) for owner in self._owners() for group in owner.param_groups]
        for owner in self._owners():
            for group in owner.param_groups:
                (param,) = group["params"]
                group["lr"] /= max(1.0, _update_rms(owner, group["betas"][1], group["eps"], param))
        self.held += any(group["lr"] != rate for group, rate in rates)
        super().step(loss)
        for group, rate in rates:
            group["lr"] = rate

    def _owners(self) -> Sequence[AdamW]:
        return [owner for owner in self.run.optimizer.optimizers if isinstance(owner, AdamW)]


@torch.no_grad()
def _update_rms(owner: AdamW, beta: float, eps: float, param: Tensor) -> float:
    """Return the RMS over a matrix of g / sqrt(v), with v after this gradient has entered it."""
    assert param.grad is not None
    state = owner.state.get(param, {})
    count = float(state.get("step", 0)) + 1
    squares = param.grad.square()
    v = squares * (1 - beta) if not state else state["exp_avg_sq"] * beta + squares * (1 - beta)
    rms = float((squares / (v / (1 - beta**count)).clamp(min=eps**2)).mean().sqrt())
    return rms if math.isfinite(rms) else 1.0  # it has no answer to that


class SkippedSteps(Nothing):
    """Leaves out a step whose loss or gradient norm is far above the last ones."""

    def __init__(self, run: SmallRun) -> None:
        super().__init__(run)
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.norms: deque[float] = deque(maxlen=WINDOW)

    def step(self, loss: float) -> None:
        """Make the step, or leave it out."""
        gradients = [p.grad for p in self.run.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if _is_usual(loss, self.losses) and _is_usual(norm, self.norms):
            super().step(loss)
        else:
            self.left_out += 1
        for value, past in ((loss, self.losses), (norm, self.norms)):
            if math.isfinite(value):
                past.append(value)

    def load(self, other: Nothing) -> None:
        """Take over the values of the last steps."""
        assert isinstance(other, SkippedSteps)
        self.losses.extend(other.losses)
        self.norms.extend(other.norms)


def _is_usual(value: float, past: Sequence[float]) -> bool:
    if not math.isfinite(value):
        return False
    return len(past) < QUIET or value - mean(past) <= DEVIATIONS * stdev(past)


class HeldSteps(Nothing):
    """Holds the step of the head within a ball that follows the schedule, by a `TrustRegion`.

    Args:
        run: the run whose steps it makes.
        limit: the diameter of the ball at the peak of the schedule.
    """

    def __init__(self, run: SmallRun, limit: float) -> None:
        super().__init__(run)
        self.limit = limit
        self.region = TrustRegion(limit=lambda step: self._allowed())
        self.region.attach(run.model, run.optimizer)

    def _allowed(self) -> float:
        """Return the diameter of this step's ball."""
        return self.limit * warmup_cosine_scale(self.run.updates, total_steps=self.run.sizes.steps)

    def step(self, loss: float) -> None:
        """Make the step, which is held or left out inside."""
        super().step(loss)
        self.left_out, self.held = self.region.left_out, self.region.clipped

    def close(self) -> None:
        """Let go of the optimizer."""
        self.region.detach()
