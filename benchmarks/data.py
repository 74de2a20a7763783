"""What benchmarks measure on: increments of a softmax head, rows that are hard to search, and small training runs."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hilbert_monitor.doctor.samples import SampleIncrement, softmax_residual
from hilbert_monitor.optim import ChainedOptimizer, warmup_cosine
from hilbert_monitor.pretrain.data import TRAIN, VALIDATION, find_shards
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig
from hilbert_monitor.pretrain.text import standard_library, tokenize

MakeOptimizer = Callable[[Decoder], ChainedOptimizer]
"""From a decoder to the optimizers that train it, with the paper's names of the groups: matrix, embedding, head."""


def load_increment(path: Path) -> SampleIncrement:
    """Read an increment that torch.save wrote: a (V, d) tensor, or a dict.

    A dict holds ``S``, or ``S_over_lr`` and ``lr``; and, if there is a panel, ``hidden``.

    Raises:
        ValueError: if the file holds none; the message is one sentence.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"there is no increment file {path}: check the path") from None
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a file that torch.load can read ({reason}): save it with torch.save") from None
    if isinstance(saved, Tensor):
        saved = {"S": saved}
    if isinstance(saved, dict) and {"S_over_lr", "lr"} <= saved.keys():
        saved["S"] = saved["S_over_lr"].float() * saved["lr"]
    if not isinstance(saved, dict) or not isinstance(saved.get("S"), Tensor):
        raise ValueError(f"{path} holds no increment: save a (V, d) tensor or a dict with the key 'S'")
    hidden = saved.get("hidden")
    return SampleIncrement(path.stem, saved["S"].float(), None if hidden is None else hidden.float())


def softmax_gradient(U: Tensor, h: Tensor, target: Tensor) -> Tensor:
    """Gradient (V, d) of the mean cross entropy by the head U, for hidden states h (n, d) and targets (n,)."""
    return softmax_residual(U, h, target).T @ h / len(h)


def hard_rows(V: int, d: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Return matrices of V rows, by name, on which a search for the longest pair has much to do.

    They have d columns; vertices of a product of three simplices, all of them different, as many as they need.
    """
    draw = torch.Generator().manual_seed(seed)

    def pick(n: int, choices: int) -> Tensor:
        return torch.randint(choices, (n,), generator=draw)

    k = math.ceil(V ** (1 / 3))
    at = torch.randperm(k**3, generator=draw)[:V]
    points = [torch.eye(k)[at // k**power % k] for power in range(3)]
    decay = torch.arange(1, d + 1) ** -0.5
    return {
        "points on a sphere": normalize(torch.randn(V, d, generator=draw), dim=1),
        "rows of signs": 2.0 * pick(V * d, 2).view(V, d) - 1,
        "vertices of a simplex": torch.eye(d)[pick(V, d)],
        "vertices of a product of simplices": torch.cat(points, 1),
        "each row twenty times": torch.randn(V // 20, d, generator=draw)[pick(V, V // 20)],
        "unit rows of a falling spectrum": normalize(torch.randn(V, d, generator=draw) * decay, dim=1),
    }


@dataclass(frozen=True)
class TrialSizes:
    """Sizes of a small run. A validation loss is over so many windows of held-out text.

    The text is one file in `one_file_in` of the standard library: to tokenize all of them takes seconds.
    """

    steps: int = 1000
    vocab_size: int = 2048
    width: int = 64
    context: int = 64
    batch: int = 8
    panel: int = 512
    validation: int = 64
    one_file_in: int = 1


@functools.cache
def small_corpus(vocab_size: int, one_file_in: int = 1) -> tuple[Tensor, Tensor]:
    """Return the training and the held-out tokens of small runs, of a vocabulary of this size."""
    with tempfile.TemporaryDirectory() as folder:
        tokenize(standard_library()[::one_file_in], Path(folder), vocab_size=vocab_size)
        sides = [np.concatenate([s.read(0, s.tokens) for s in find_shards(folder, p)]) for p in (TRAIN, VALIDATION)]
    train, held_out = (torch.from_numpy(side.astype(np.int64)) for side in sides)
    return train, held_out


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
    """A small decoder in training on the standard library's text. It can be copied in the middle.

    Args:
        seed: seed of weights and data.
        sizes: how large the run is.
        optimizer: makes the optimizers of the decoder.
    """

    def __init__(self, seed: int, sizes: TrialSizes, optimizer: MakeOptimizer) -> None:
        self.seed, self.sizes = seed, sizes
        self.text, self.held_out = small_corpus(sizes.vocab_size, sizes.one_file_in)
        torch.manual_seed(seed)
        config = DecoderConfig(
            vocab_size=sizes.vocab_size, width=sizes.width, blocks=2, head_dim=32, context=sizes.context
        )
        self.model = Decoder(config)  # draws its own weights; a copy loads others
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
        starts = torch.randint(len(self.text) - self.sizes.context - 1, (self.sizes.batch,), generator=self.draw)
        tokens = _windows(self.text, starts, self.sizes.context)
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


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return so many tokens, and the one after them, from each start."""
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()])
