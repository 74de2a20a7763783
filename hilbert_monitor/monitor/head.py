"""The LM head that is watched: which weight it is, and the increment of its last step as it acts on the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.optim.recipe import parameter_of

from .ceiling import diameter_ceiling
from .decay import Decay
from .effective import EffectiveSource
from .formulas import state_of
from .head_place import check_vocabulary, find_head_place, is_transposed, why_nobody_moves
from .head_rows import HeadRows, Matrix
from .head_step import HeadStep
from .increment import IncrementSource
from .logits import explain_logits, logit_transform
from .owners import owning_optimizer
from .runtime import Ranks
from .weight_increment import Increment


class LogitIncrement(NamedTuple):
    """The increment of the logits' matrix in one step."""

    S: Matrix
    """(V, d): scaled, padding dropped; (V, d + 1) for a head with a bias, whose increment is the last column."""
    rounding: float | Tensor
    """Bound on the error of D(S) from the rounding of this rank's weights; zero where there is none."""


class NobodyMovesIt(ValueError):
    """No optimizer has the head's weight, so far."""


class WatchedHead:
    """An LM head and the optimizer that moves it.

    Args:
        model: a language model.
        optimizers: one of them moves the head. One of them may be a ChainedOptimizer.
        head: the LM head, its name or that of its weight, or None to look for it.
        decay: how an unknown optimizer uses weight_decay.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        ranks: those that train together; by default this process alone.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        head: str | Module | Parameter | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.place = place = find_head_place(model, head)
        self.name, self.module, self.weight, self.effective = place
        self.logits = logit_transform(model, self.module)
        self.vocab_size, self.logit_scale = vocab_size, self.logits.scale if logit_scale is None else logit_scale
        self.transposed = is_transposed(model, place, vocab_size)
        check_vocabulary(place, vocab_size, dim=int(self.transposed))
        owners = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        owner = owning_optimizer(owners, self.weight)
        if owner is None:
            raise NobodyMovesIt(why_nobody_moves(place))
        self.ranks = ranks or Ranks.of(self.weight.device, 1)
        self.rows = HeadRows(place.like, dim=int(self.transposed))
        self.measuring = self.ranks if self.rows.sharded else Ranks.of(self.weight.device, 1)
        """The ranks that measure together: those that have the shards. Of a head that all have, rank zero alone."""
        self.source = (
            IncrementSource(owner, self.weight, decay=decay, rows=self.rows)
            if self.effective is None
            else EffectiveSource(owners, self.effective, rows=self.rows)
        )
        bias = place.bias
        bias_owner = None if bias is None else owning_optimizer(owners, bias)
        self.bias: IncrementSource | None = None
        """Of a bias that is trained; one that is frozen adds nothing to a step."""
        if bias is not None and bias_owner is not None:
            self.bias = IncrementSource(bias_owner, bias, decay=decay)
        embeddings = [m for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)]
        self.tied = any(self.weight is parameter_of(m, "weight") for m in embeddings)
        self._buffer: Tensor | None = None

    def remarks(self) -> list[str]:
        """Reasons why the bound H D(S) on the perturbation is not tight for this head."""
        remarks = []
        if self.effective is not None:
            remarks.append(
                f"the head's weight is computed ({self.effective.kind}): S is the difference of the effective weight,"
                " in which the decay of its parameters is included"
            )
        if self.bias is not None:
            remarks.append("the head has a bias: rows are extended by its increment, and sqrt(H^2 + 1) D is a bound")
        if self.tied:
            remarks.append("the head's weight is an embedding's too: a step also moves the hidden states through it")
        if self.logits.softcap is not None:
            remarks.append(f"the logits are soft-capped at {self.logits.softcap:g}, which makes their changes smaller")
        elif self.logits.scale == 1 and self.logits.source and self.logit_scale == 1:
            remarks.append(f"{self.logits.source}; if it scales the logits, pass logit_scale=...")
        return remarks

    def explain(self, output: Tensor, logits: Tensor) -> str:
        """Compare the logits of a batch with the head's output; return what is wrong with `logit_scale`, if it is."""
        measured = explain_logits(output, logits)
        if measured is None or abs(measured.scale - self.logit_scale) <= 0.01 * abs(self.logit_scale):
            return ""
        return (
            f"the model's logits are {measured.scale:.3g} times its head's output, and D(S) was measured for"
            f" {self.logit_scale:g} times: pass logit_scale={measured.scale:.3g}"
        )

    # Steps

    @property
    def measures(self) -> bool:
        """Whether this rank takes part in measuring."""
        return self.rows.sharded or self.ranks.rank == 0

    @property
    def waits_for_record(self) -> bool:
        """Whether a step is whole only when its record is made: the bias has an optimizer of its own, or more than the
        optimizer moves the weights."""
        apart = self.bias is not None and self.bias.optimizer is not self.source.optimizer
        return apart or any(source.basis == "update" for source in self._sources())

    @property
    def reads_later(self) -> bool:
        """Whether the next step asks nothing of the device: what it has there is read later."""
        return self.source.reads_later

    @reads_later.setter
    def reads_later(self, later: bool) -> None:
        for source in self._sources():
            source.reads_later = later

    def watch(
        self,
        on_step: Callable[[HeadStep], None],
        **options: Any,
    ) -> Callable[[], None]:
        """Call `on_step` after each step of the head; return a function that ends it. See IncrementSource.watch."""
        ends = []
        if self.bias is not None:  # first, so that its step is known when `on_step` runs for the weight
            ends.append(self.bias.watch(lambda step: None, **options))
        ends.append(self.source.watch(on_step, **options))

        def end() -> None:
            for stop in ends:
                stop()
            for source in self._sources():
                source.forget()
            self._buffer = None

        return end

    def moved_unseen(self) -> bool:
        """Whether an update that no hook saw moved this rank's weights."""
        return self.source.moved_unseen()

    def unseen(self) -> HeadStep:
        """Return the step of an update that no hook saw. Called on every rank if it moved the weights of one."""
        if self.bias is not None:
            self.bias.unseen()
        return self.source.unseen()

    def stands(self) -> bool:
        """Whether the weights are those that the last step left; if not, updates are measured from now on."""
        return all([source.stands() for source in self._sources()])

    def finish_update(self, *, measure: bool) -> None:
        """Note that an update is over, and whether the next will be measured."""
        for source in self._sources():
            source.finish_update(measure=measure)

    def agree(self, *mine: float) -> list[float]:
        """Return the least of what the ranks say, for each of some numbers; afterwards all believe the same of steps.

        Called on every rank. What one rank finds out of how the weights move, all must know.
        """
        sources = self._sources()
        belief = [number for source in sources for number in source.belief.numbers]
        numbers = self.ranks.all_min([*mine, *belief])
        for place, source in enumerate(sources):
            source.belief.numbers = numbers[len(mine) + 3 * place :][:3]
        return numbers[: len(mine)]

    def _sources(self) -> list[IncrementSource]:
        return [self.source] if self.bias is None else [self.source, self.bias]

    # Matrices

    def increment(self) -> LogitIncrement | None:
        """Form the increment of the last step as it acts on the logits; None if the weights did something else."""
        if self._buffer is None and self.weight.device.type == "cpu" and self.effective is None:
            mine = self.rows.of(self.weight.detach())
            self._buffer = torch.empty_like(mine, dtype=compute_dtype(mine))
        increment = self.source.form(self._buffer)
        bias = None if self.bias is None else self.bias.form()
        if increment is None or (self.bias is not None and bias is None):
            return None
        return self._on_logits(increment, bias)

    @property
    def is_believed(self) -> bool:
        """Whether this rank can form the whole increment by itself, from the optimizer's state."""
        return not self.rows.sharded and all(source.basis == "state" for source in self._sources())

    def believed_increment(self) -> LogitIncrement:
        """Form the whole increment of the last step, (V, d), as the optimizer's state says, without a check."""
        weight, *bias = (source.form_believed() for source in self._sources())
        return self._on_logits(weight, bias[0] if bias else None)

    @property
    def has_stored(self) -> bool:
        """Whether the step that was stored is another than the one intended, and can be formed."""
        return self.source.is_rounded and all(source.has_stored for source in self._sources())

    def moved_share(self, mine: tuple[float, float]) -> float:
        """Share of the stored weights that are not what they were before the step, from what each rank counted."""
        moved, number = self.measuring.sum([*mine])
        return moved / number

    def stored_increment(self) -> Matrix:
        """Form the increment that the stored weights made in the last step, as it acts on the logits. (V, d)."""
        return self._on_logits(self.source.stored(), None if self.bias is None else self.bias.stored()).S

    def seen_increment(self) -> Matrix | None:
        """Form the increment that the forward pass sees, where it computes in less than the weights have. (V, d)."""
        S = None if self.bias is not None else self.source.seen()
        return None if S is None else self._on_logits(Increment(S, 0.0), None).S

    def logit_matrix(self, dtype: torch.dtype) -> Matrix:
        """The matrix that makes logits of hidden states, (V, d), as it is now."""
        weight = self.weight.detach() if self.effective is None else self.effective.whole()
        U = self._by_tokens(weight).to(dtype) * self.logit_scale
        return self.rows.matrix(U, self.vocab_size)

    def weight_rows(self) -> Matrix:
        """The rows of the weight as it is now, (V, d), in its own dtype and without the logits' scale. No copy."""
        weight = self.weight.detach() if self.effective is None else self.effective.whole()
        return self.rows.matrix(self._by_tokens(weight), self.vocab_size)

    def gradient(self) -> Matrix | None:
        """The gradient of the head's weight, (V, d) with padding."""
        G = self._dense_gradient()
        return None if G is None else self.rows.matrix(self._by_tokens(G))

    def _dense_gradient(self) -> Tensor | None:
        G = self.weight.grad if self.effective is None else None
        return G.to_dense() if G is not None and G.is_sparse else G

    def _by_tokens(self, x: Tensor) -> Tensor:
        """This rank's rows of a tensor that is laid out as the weight is."""
        mine = self.rows.of(x)
        return mine.t() if self.transposed else mine

    @property
    def count(self) -> float | Tensor:
        """The optimizer's own count of steps, the last one included; zero if it has none."""
        count: float | Tensor = state_of(self.source.optimizer, self.weight).get("step", 0.0)
        return count

    def ceiling(self, *, count: float | None = None, lr: float | None = None) -> float | None:
        """The largest D(S) that the optimizer can make in a step like the last, where there is a theorem.

        Args:
            count: the optimizer's count of steps, if it has been read.
            lr: the learning rate of the step, if it has been read.
        """
        source, last = self.source, self.source.last
        if last is None or source.basis != "state" or self.bias is not None or self.transposed:
            return None
        if lr is not None:
            last = dataclasses.replace(last, options=last.options | {"lr": lr})
        count = float(self.count) if count is None else count
        ceiling = diameter_ceiling(source.optimizer, last, count=count, width=self.weight.shape[1])
        return None if ceiling is None else ceiling * abs(self.logit_scale)

    def _on_logits(self, weight: Increment, bias: Increment | None) -> LogitIncrement:
        S = weight.S.t() if self.transposed else weight.S
        squares = S.shape[1] * weight.rounding**2  # of the error of one row, at most
        if bias is not None:
            squares += bias.rounding**2
            S = torch.cat([S, bias.S.to(S.dtype)[:, None]], dim=1)
        S, rounding = S.contiguous(), 2 * squares**0.5 * abs(self.logit_scale)
        matrix = self.rows.matrix(S if self.logit_scale == 1 else S * self.logit_scale, self.vocab_size)
        return LogitIncrement(matrix, rounding)
