"""The core of `TrustRegion`, which knows no framework: holds each step of an LM head to a limit of its diameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.geometry import RowShards, row_diameter
from hilbert_monitor.optim import options_of

from .decay import Decay
from .finite_gradients import FiniteGradients
from .formulas import state_of
from .head import WatchedHead
from .head_step import HeadStep, learning_rate
from .held_rows import TOP, HeldRows, MovedRows
from .increment import IncrementSource
from .owners import hooked_optimizer, inner_optimizers, owning_optimizer
from .ranks import Ranks, compute_device
from .step_hooks import hook_steps

Limit = float | Callable[[int], float]
"""A limit of D(S), or a function that makes it of the number of the step."""
How = Literal["rows", "scale"]
"""How a step is held: its centred rows are projected onto a ball, or all of it is scaled."""


@dataclass(frozen=True, slots=True)
class RegionStep:
    """What a `TrustRegion` made of one step."""

    step: int
    """Number of the step, from 1."""
    limit: float
    """Of D(S) in this step."""
    left_out: bool = False
    """Whether the step was left out whole, because a gradient was not finite. Then nothing else is known of it."""
    asked_lower: float = 0.0
    """At least D(S) of the step that the optimizer made."""
    asked_upper: float = 0.0
    """At most D(S) of the step that the optimizer made; with ``how="scale"`` the exact value, or next to it."""
    made_upper: float = 0.0
    """At most D(S) of the step that was stored: never more than the limit."""
    held: int = 0
    """Rows that were held back."""
    rows: int = 0
    """Rows of the head."""
    tokens: tuple[int, ...] = ()
    """Of the rows that were held back most, the farthest first."""

    @property
    def acted(self) -> bool:
        """Whether the step that was stored is another than the one that the optimizer made."""
        return self.held > 0 or self.left_out


class Region:
    """Holds each step of an LM head to a limit of its diameter D(S), and leaves out steps that are not finite.

    A context manager: ``with region.watch(model, optimizer): ...``, or `attach` and `detach`.

    Args:
        limit: largest D(S) that a step may have, or a function of the step's number, from 1. Infinity holds nothing.
        how: "rows" projects the centred rows of S onto the ball of radius limit / 2; "scale" scales all of S by
            limit / D(S), which takes a search for D(S) in every step.
        head: the LM head, its name or that of its weight; by default it is looked for.
        decay: how an optimizer that is not known uses weight_decay.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        stop_after: steps in a row with gradients that are not finite, after which NonFiniteGradients is raised.
    """

    def __init__(
        self,
        limit: Limit | None = None,
        *,
        how: How = "rows",
        head: str | Module | Parameter | None = None,
        decay: Decay | None = None,
        logit_scale: float | None = None,
        stop_after: int = 10,
    ) -> None:
        if limit is None:
            raise TypeError("TrustRegion needs a limit, got none: pass limit=0.02, or a function of the step")
        if not callable(limit):
            _checked(limit)
        if how not in ("rows", "scale"):
            raise ValueError(f'how must be "rows" or "scale", got {how!r}')
        if stop_after < 1:
            raise ValueError(f"stop_after must be at least 1, got {stop_after}")
        self.limit, self.how, self.stop_after = limit, how, stop_after
        self._options: dict[str, Any] = {"head": head, "decay": decay, "logit_scale": logit_scale}
        self.step = 0
        """Steps so far."""
        self.clipped = 0
        """Steps in which something was held back, as far as they have been read."""
        self.left_out = 0
        """Steps that were left out whole."""
        self._head: WatchedHead | None = None
        self._gradients: FiniteGradients | None = None
        self._remove: Callable[[], None] = lambda: None
        self._copies: list[Tensor] = []
        self._pending: Callable[[], RegionStep] | None = None
        self._last: RegionStep | None = None
        self._is_left_out = False

    # From start to end

    def watch(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        process_group: ProcessGroup | None = None,
    ) -> Region:
        """Begin to hold steps; the same as `attach`, for a ``with`` block at whose end it is detached."""
        self.attach(model, optimizer, process_group=process_group)
        return self

    def attach(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        process_group: ProcessGroup | None = None,
    ) -> None:
        """Begin to hold the steps of the optimizer that moves the head, on every rank.

        Args:
            model: a language model.
            optimizer: the one that moves the head, a ChainedOptimizer, or several of which one does.
            process_group: the ranks that train together, if they are not all.
        """
        self.detach()
        head = WatchedHead(model, optimizer, **self._options)
        _check_head(head)
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        owner = owning_optimizer(optimizers, head.weight)
        assert owner is not None
        outer = hooked_optimizer(owner, head.weight)
        ranks = Ranks.of(compute_device(head.weight), group=process_group)
        self._head, self._gradients = head, FiniteGradients(outer, ranks, stop_after=self.stop_after)
        for source in _sources(head):
            source.decay.warn_of_guess(source.group)
        steps = (outer, *inner_optimizers(outer, head.weight))
        self._remove = hook_steps(steps, self._begin, self._end, after_closure=lambda: True)

    def detach(self) -> None:
        """Hold nothing any more; the optimizer is left without a trace."""
        self._remove()
        self._remove = lambda: None
        _ = self.last
        if self._gradients is not None:
            self._gradients.restore()
        self._head, self._gradients, self._copies = None, None, []

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def last(self) -> RegionStep | None:
        """What was made of the last step; None before the first. On an accelerator, it waits for it."""
        if self._pending is not None:
            self._last, self._pending = self._pending(), None
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should have, of plain types. Steps themselves need nothing of it."""
        _ = self.last
        return {"step": self.step, "clipped": self.clipped, "left_out": self.left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where a run was saved: a limit that is a function of the step goes on there."""
        self.step, self.clipped, self.left_out = (int(state_dict[name]) for name in ("step", "clipped", "left_out"))

    # Steps

    @torch.no_grad()
    def _begin(self) -> None:
        """Look at the gradients, and keep the weights from before the step."""
        head, gradients = self._head, self._gradients
        assert head is not None
        assert gradients is not None
        _ = self.last
        gradients.restore()  # of a step that raised
        self._is_left_out = gradients.check()
        if self._is_left_out:
            return
        weights = [_rows(head, source) for source in _sources(head)]
        if [x.shape for x in weights] != [x.shape for x in self._copies]:
            self._copies = [torch.empty_like(x) for x in weights]
        for copy, x in zip(self._copies, weights, strict=True):
            copy.copy_(x)

    @torch.no_grad()
    def _end(self) -> None:
        """Hold the step that was made."""
        head, gradients = self._head, self._gradients
        assert head is not None
        assert gradients is not None
        self.step += 1
        if self._is_left_out:
            self.left_out += 1
            gradients.restore()
            self._last = RegionStep(self.step, math.nan, left_out=True)
            gradients.tell(self.step)
            return
        limit = _checked(self.limit(self.step) if callable(self.limit) else self.limit)
        parts = [
            MovedRows(before, _rows(head, source), 1 - _decay_share(source, before, _rows(head, source)))
            for source, before in zip(_sources(head), self._copies, strict=True)
        ]
        shards = head.rows.matrix(parts[0].after)
        spread = isinstance(shards, RowShards)
        rows = HeldRows(
            parts,
            groups=shards.ranks.groups if isinstance(shards, RowShards) else (),
            ids=shards.ids if isinstance(shards, RowShards) else None,
            meeting=head.rows.device,
        )
        self._pending = self._hold(rows, limit, shards if spread else None)
        if head.rows.sharded:
            torch.autograd.graph.increment_version([source.param for source in _sources(head)])

    def _hold(self, rows: HeldRows, limit: float, shards: Any) -> Callable[[], RegionStep]:
        """Hold the rows of a step; return what reads of it what the host wants to know."""
        head, step = self._head, self.step
        assert head is not None
        scale = abs(head.logit_scale)
        allowed = torch.full((), limit / scale, dtype=rows.wide, device=rows.device)
        mean = rows.mean()
        distances = rows.distances(mean)
        survey = rows.survey(distances, allowed / 2)
        diameter: float | None = None
        if self.how == "rows":
            if rows.device.type != "cpu" or survey[0] > 0:
                rows.project(mean, distances, allowed / 2, survey[0])
        else:
            S = rows.centred(mean)
            diameter = _upper(row_diameter(S if shards is None else _replaced(shards, S)).upper)
            if not diameter <= limit / scale:
                rows.scale(mean, distances, allowed, torch.full_like(allowed, diameter))
        number = head.rows.number

        def read() -> RegionStep:
            held, *top = survey.tolist()
            far, tokens = top[:TOP], top[TOP:]
            upper = far[0] + max(far[1], 0.0) if diameter is None else diameter
            acts = held > 0 if diameter is None else not diameter <= limit / scale
            count = int(held) if diameter is None else number
            self.clipped += acts
            return RegionStep(
                step,
                limit,
                asked_lower=far[0] * scale if diameter is None else diameter * scale,
                asked_upper=upper * scale,
                made_upper=min(limit, upper * scale) if not acts else limit,
                held=count if acts else 0,
                rows=number,
                tokens=tuple(int(t) for t, x in zip(tokens, far, strict=True) if acts and x > limit / scale / 2),
            )

        return read


def _upper(diameter: float) -> float:
    """An upper bound for rows that were rounded to fp32: each by 2^-24 of its length, which is D at most."""
    return diameter * (1 + 2.0**-22)


def _replaced(shards: RowShards, S: Tensor) -> RowShards:
    return RowShards(S.to(shards.rows.device), shards.ids, shards.number, shards.ranks)


def _sources(head: WatchedHead) -> list[IncrementSource]:
    return [head.source] if head.bias is None else [head.source, head.bias]


def _rows(head: WatchedHead, source: IncrementSource) -> Tensor:
    """This rank's rows of a parameter, one for each token, as they are stored: writing to them writes the weights."""
    mine = source.rows.of(source.param.detach())
    if mine.ndim == 1:
        return mine[:, None]
    return mine.t() if head.transposed else mine


def _decay_share(source: IncrementSource, before: Tensor, after: Tensor) -> float | Tensor:
    """The share of the weights that decoupled decay took away in the step just made; zero if it was no step."""
    if source.param.grad is None and not bool((before != after).any()):
        return 0.0
    options = options_of(source.group)
    options["lr"] = learning_rate(source.optimizer, options, state_of(source.optimizer, source.param))
    share = source.decay.share(HeadStep("", options))
    overflow = getattr(source.optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer
    if overflow is not None:
        share = share * (1 - overflow.double()) if isinstance(overflow, Tensor) else share * (1 - bool(overflow))
    return share.double() if isinstance(share, Tensor) and share.device.type != "mps" else share


def _check_head(head: WatchedHead) -> None:
    """Refuse heads whose log-odds a limit of D(S) does not hold."""
    if head.effective is not None:
        raise ValueError(
            f"TrustRegion writes the head's weight, and that of '{head.name}' is computed from other parameters"
            f" ({head.effective.kind}): hold nothing here, or train a head with a weight of its own"
        )
    if head.logits.softcap is not None:
        raise ValueError(
            f"TrustRegion holds log-odds by D(S), and the logits of this model are soft-capped at"
            f" {head.logits.softcap:g}: a shift of all rows moves their log-odds, which D(S) does not see"
        )


def _checked(limit: float) -> float:
    """A limit as a number, zero or more."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ValueError(f"the limit of D(S) must be zero or a positive number, got {limit!r}")
    return float(limit)
