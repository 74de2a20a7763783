"""Small real training runs that can be copied in the middle, and into whose steps faults can be put."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer, warmup_cosine
from hilbert_monitor.pretrain.corpus import Corpus, corpus, standard_library
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig
from hilbert_monitor.pretrain.recipes import Head
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord


@functools.cache
def _corpus(vocab_size: int) -> Corpus:
    return corpus(standard_library(), vocab_size)


def study_text(vocab_size: int) -> NDArray[np.int64]:
    """The training text of small runs, in tokens of a vocabulary of this size."""
    return _corpus(vocab_size).train.astype("int64")


@dataclass(frozen=True)
class TrialSizes:
    """Sizes of a trial run."""

    steps: int = 1000
    vocab_size: int = 2048
    width: int = 64
    context: int = 64
    batch: int = 8
    panel: int = 512


@dataclass
class StepChange:
    """What a fault changes in one training step, at the places where a real fault would."""

    batch: Callable[[Tensor], Tensor] | None = None
    """From the tokens of the batch to other tokens."""
    gradient: Callable[[Tensor], None] | None = None
    """Changes the gradient of the head in place, before clipping."""
    rate: float = 1.0
    """Factor on every learning rate of this step."""


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


class TrialRun:
    """A small decoder in training on the standard library's text, by the paper's recipe and with a probe attached.

    Args:
        head: optimizer of the LM head.
        seed: seed of weights and data.
        sizes: how large the run is.
    """

    def __init__(self, head: Head, seed: int, sizes: TrialSizes) -> None:
        self.head, self.seed, self.sizes = head, seed, sizes
        text = _corpus(sizes.vocab_size)
        self.text = torch.from_numpy(text.train.astype("int64"))
        torch.manual_seed(seed)
        config = DecoderConfig(
            vocab_size=sizes.vocab_size, width=sizes.width, blocks=2, head_dim=32, context=sizes.context
        )
        self.model = Decoder(config)  # draws its own weights; a branch loads others
        self.optimizer = pretraining_optimizer(self.model, head)
        self.schedule = warmup_cosine(self.optimizer, total_steps=sizes.steps)
        self.draw = torch.Generator().manual_seed(seed)
        held_out = torch.from_numpy(text.validation.astype("int64"))
        self.panel = Panel.of_tokens(held_out, sizes.panel, sizes.context)
        self.absence = torch.zeros(sizes.vocab_size, dtype=torch.long)
        """Steps since each token last occurred."""
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
        other = TrialRun(self.head, self.seed, self.sizes)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))  # loading alone would share it
        other.schedule.load_state_dict(self.schedule.state_dict())
        other.draw.set_state(self.draw.get_state())
        other.absence = self.absence.clone()
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
        tokens = self._batch()
        tokens = tokens if change.batch is None else change.batch(tokens)
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        weight = self.model.lm_head.weight
        if change.gradient is not None:
            assert weight.grad is not None
            change.gradient(weight.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= change.rate
        before = weight.detach().double().clone() if reference else None
        self.optimizer.step()
        record = self.probe.record(train_loss=loss.item())
        assert record is not None
        truth = self._reference(before) if before is not None else (None, None)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule.step()
        self.absence += 1
        self.absence[tokens] = 0
        return TrialStep(record, self.probe.alerts, loss.item(), float(norm), *truth)

    def _batch(self) -> Tensor:
        sizes = self.sizes
        starts = torch.randint(len(self.text) - sizes.context - 1, (sizes.batch,), generator=self.draw)
        return torch.stack([self.text[start : start + sizes.context + 1] for start in starts.tolist()])

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
