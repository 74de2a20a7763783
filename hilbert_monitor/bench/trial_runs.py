"""A small real training run that can be stopped, branched, and have its steps spoiled."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import pretraining_optimizer, warmup_cosine
from hilbert_monitor.pretrain.corpus import Corpus, corpus, standard_library
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig
from hilbert_monitor.pretrain.recipes import HEAD_RATES, Head
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord


@functools.cache
def _corpus(vocab_size: int) -> Corpus:
    return corpus(standard_library(), vocab_size)


@dataclass(frozen=True)
class BedConfig:
    """Sizes of a run."""

    steps: int = 1000
    vocab_size: int = 2048
    width: int = 64
    context: int = 64
    batch: int = 8
    panel: int = 512


@dataclass
class Spoil:
    """What a fault may change in one step; each is called where a real one would strike."""

    batch: Callable[[Tensor], Tensor] | None = None
    gradient: Callable[[Tensor], None] | None = None
    """Of the head, before clipping."""
    rate: float = 1.0
    """Factor on every learning rate of this step."""


@dataclass(frozen=True)
class Outcome:
    """One step: what the monitor saw, what the judge said, what other detectors go by, and the truth in fp64."""

    record: StepRecord
    alerts: list[Alert]
    loss: float
    gradient_norm: float
    diameter: float | None = None
    perturbation: float | None = None


class Bed:
    """A decoder in training on the standard library's text, with the paper's recipe, clipping and schedule.

    Args:
        head: optimizer of the LM head.
        seed: of weights and data.
        config: sizes.
    """

    def __init__(self, head: Head, seed: int, config: BedConfig) -> None:
        self.head, self.seed, self.config = head, seed, config
        text = _corpus(config.vocab_size)
        self.text = torch.from_numpy(text.train.astype("int64"))
        torch.manual_seed(seed)
        sizes = DecoderConfig(
            vocab_size=config.vocab_size, width=config.width, blocks=2, head_dim=32, context=config.context
        )
        self.model = Decoder(sizes)  # its own draw of weights; a branch loads others
        self.optimizer = pretraining_optimizer(self.model, head, head_lr=HEAD_RATES[head] / config.width)
        self.schedule = warmup_cosine(self.optimizer, total_steps=config.steps)
        self.draw = torch.Generator().manual_seed(seed)
        held_out = torch.from_numpy(text.validation.astype("int64"))
        self.panel = Panel.of_tokens(held_out, config.panel, config.context)
        self.silence = torch.zeros(config.vocab_size, dtype=torch.long)
        """Steps since each token last occurred."""
        self.probe = Probe(
            self.model, self.optimizer, panel=self.panel, perturbation_every=25, judge=Judge(), strict=True
        ).attach()

    def branch(self) -> Bed:
        """Return a run of its own that goes on from here."""
        other = Bed(self.head, self.seed, self.config)
        other.model.load_state_dict(self.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))  # loading alone would share it
        other.schedule.load_state_dict(self.schedule.state_dict())
        other.draw.set_state(self.draw.get_state())
        other.silence = self.silence.clone()
        other.probe.judge = copy.deepcopy(self.probe.judge)
        other.probe.step = self.probe.step
        return other

    def step(self, spoil: Spoil | None = None, *, reference: bool = False) -> Outcome:
        """Make one training step.

        Args:
            spoil: a fault.
            reference: also compute D(S) and the Hilbert RMS in fp64, from the weights themselves.
        """
        spoil = spoil or Spoil()
        tokens = self._batch()
        tokens = tokens if spoil.batch is None else spoil.batch(tokens)
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        weight = self.model.lm_head.weight
        if spoil.gradient is not None:
            assert weight.grad is not None
            spoil.gradient(weight.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= spoil.rate
        before = weight.detach().double().clone() if reference else None
        self.optimizer.step()
        record = self.probe.record(train_loss=loss.item())
        assert record is not None
        truth = self._truth(before) if before is not None else (None, None)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule.step()
        self.silence += 1
        self.silence[tokens] = 0
        return Outcome(record, self.probe.alerts, loss.item(), float(norm), *truth)

    def _batch(self) -> Tensor:
        c = self.config
        starts = torch.randint(len(self.text) - c.context - 1, (c.batch,), generator=self.draw)
        return torch.stack([self.text[start : start + c.context + 1] for start in starts.tolist()])

    @torch.no_grad()
    def _truth(self, before: Tensor) -> tuple[float, float]:
        """D(S) over all pairs and the RMS of every position's largest minus smallest logit change."""
        group: dict[str, Any] = self.probe.source.group
        weight = self.model.lm_head.weight.double()
        S = weight - (1 - group["lr"] * group["weight_decay"]) * before
        ids = torch.cat(
            [batch.flatten()[at] for batch, at in zip(self.panel.batches, self.panel.positions, strict=True)]
        )
        rows = ids.view(-1, self.config.context)
        change = self.model.hidden(rows).flatten(0, 1).double() @ S.T
        spread = change.amax(1) - change.amin(1)
        longest = max(float(torch.cdist(part, S).max()) for part in S.split(512))
        return longest, float(spread.square().mean().sqrt())
