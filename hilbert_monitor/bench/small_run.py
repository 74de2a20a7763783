"""Small real training runs that can be copied in the middle, and into whose steps faults can be put."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hilbert_monitor.optim import ChainedOptimizer, warmup_cosine
from hilbert_monitor.pretrain.corpus import Corpus, corpus, standard_library
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig

MakeOptimizer = Callable[[Decoder], ChainedOptimizer]
"""From a decoder to the optimizers that train it, with the paper's names of the groups: matrix, embedding, head."""


@functools.cache
def small_corpus(vocab_size: int) -> Corpus:
    """The text of small runs, in tokens of a vocabulary of this size."""
    return corpus(standard_library(), vocab_size)


@dataclass(frozen=True)
class TrialSizes:
    """Sizes of a small run."""

    steps: int = 1000
    vocab_size: int = 2048
    width: int = 64
    context: int = 64
    batch: int = 8
    panel: int = 512
    validation: int = 64
    """Windows of held-out text that a validation loss is over."""


@dataclass
class StepChange:
    """What a fault changes in one training step, at the places where a real fault would."""

    batch: Callable[[Tensor], Tensor] | None = None
    """From the tokens of the batch to other tokens."""
    gradient: Callable[[Tensor], None] | None = None
    """Changes the gradient of the head in place, before clipping."""
    rate: float = 1.0
    """Factor on learning rates of this step."""
    groups: tuple[str, ...] = ()
    """Names of the parameter groups whose rate it is; none for all."""


class SmallRun:
    """A small decoder in training on the standard library's text.

    Args:
        seed: seed of weights and data.
        sizes: how large the run is.
        optimizer: makes the optimizers of the decoder.
    """

    def __init__(self, seed: int, sizes: TrialSizes, optimizer: MakeOptimizer) -> None:
        self.seed, self.sizes = seed, sizes
        text = small_corpus(sizes.vocab_size)
        self.text = torch.from_numpy(text.train.astype("int64"))
        self.held_out = torch.from_numpy(text.validation.astype("int64"))
        torch.manual_seed(seed)
        config = DecoderConfig(
            vocab_size=sizes.vocab_size, width=sizes.width, blocks=2, head_dim=32, context=sizes.context
        )
        self.model = Decoder(config)  # draws its own weights; a branch loads others
        self.optimizer = optimizer(self.model)
        self.schedule = warmup_cosine(self.optimizer, total_steps=sizes.steps)
        self.draw = torch.Generator().manual_seed(seed)
        self.absence = torch.zeros(sizes.vocab_size, dtype=torch.long)
        """Steps since each token last occurred."""
        self.updates = 0
        """Steps made so far."""

    def load(self, other: SmallRun) -> Self:
        """Go on from where another run of these sizes and optimizers is."""
        self.model.load_state_dict(other.model.state_dict())
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))  # loading alone would share it
        self.schedule.load_state_dict(other.schedule.state_dict())
        self.draw.set_state(other.draw.get_state())
        self.absence, self.updates = other.absence.clone(), other.updates
        return self

    def backward(self, change: StepChange) -> Tensor:
        """Draw a batch and compute the gradients; return its loss."""
        tokens = self._batch()
        tokens = tokens if change.batch is None else change.batch(tokens)
        loss = self.model.loss(tokens[:, :-1], tokens[:, 1:])
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if change.gradient is not None:
            assert self.model.lm_head.weight.grad is not None
            change.gradient(self.model.lm_head.weight.grad)
        self.absence += 1
        self.absence[tokens] = 0
        return loss.detach()

    @contextmanager
    def update(self, change: StepChange) -> Iterator[None]:
        """Change the learning rates for the step that is made in the block, and let the schedule go on after it."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            if not change.groups or group["name"] in change.groups:
                group["lr"] *= change.rate
        yield
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule.step()
        self.updates += 1

    def clip_gradients(self) -> Tensor:
        """Scale the gradients down to a norm of one, as the paper does; return the norm that they had."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss on windows spread evenly over the held-out text."""
        sizes = self.sizes
        starts = torch.linspace(0, len(self.held_out) - sizes.context - 1, sizes.validation).long()
        windows = _windows(self.held_out, starts, sizes.context)
        losses = [self.model.loss(part[:, :-1], part[:, 1:]) for part in torch.split(windows, 16)]
        return float(torch.stack(losses).mean())

    def _batch(self) -> Tensor:
        sizes = self.sizes
        starts = torch.randint(len(self.text) - sizes.context - 1, (sizes.batch,), generator=self.draw)
        return _windows(self.text, starts, sizes.context)


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return so many tokens, and the one after them, from each start."""
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()])
