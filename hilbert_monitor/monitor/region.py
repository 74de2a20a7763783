"""The core of `TrustRegion`, which knows no framework: holds each step of an LM head to a limit of its diameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hilbert_monitor.optim import options_of

from .finite_gradients import FiniteGradients
from .head import Head
from .held_rows import HeldRows, MovedRows
from .held_step import How, RegionStep, hold
from .hidden_norm import HiddenNorm
from .increment import IncrementSource
from .optimizers import Decay, hooked_optimizer, inner_optimizers, on_steps
from .probe import Probe, probes_of
from .runtime import Ranks, compute_device, warn_user

Limit = float | Callable[[int], float]
"""A limit of D(S), or a function that makes it of the number of the step."""


class Region:
    """Holds each step of an LM head to a limit of its diameter D(S), and leaves out steps that are not finite.

    A context manager: ``with region.watch(model, optimizer): ...``, or `attach` and `detach`. The arguments
    are those of `TrustRegion`.
    """

    def __init__(
        self,
        limit: Limit | None = None,
        *,
        nats: float | None = None,
        hidden_norm: float | None = None,
        how: How = "rows",
        head: str | Module | Parameter | None = None,
        decay: Decay | None = None,
        logit_scale: float | None = None,
        stop_after: int = 10,
    ) -> None:
        if (limit is None) == (nats is None):
            got = "none" if limit is None else "both"
            raise TypeError(f"TrustRegion needs limit=... or nats=..., got {got}: pass limit=0.02, or nats=0.5")
        if not callable(limit):
            _checked(nats if limit is None else limit)
        if hidden_norm is not None and not 0 < hidden_norm < math.inf:
            raise ValueError(f"hidden_norm must be a positive number, got {hidden_norm}")
        if how not in ("rows", "scale"):
            raise ValueError(f'how must be "rows" or "scale", got {how!r}')
        if stop_after < 1:
            raise ValueError(f"stop_after must be at least 1, got {stop_after}")
        self.limit, self.nats, self.hidden_norm = limit, nats, hidden_norm
        self.how, self.stop_after = how, stop_after
        self._options: dict[str, Any] = {"head": head, "decay": decay, "logit_scale": logit_scale}
        self.step = 0
        """Steps so far."""
        self.clipped = 0
        """Steps in which something was held back, as far as they have been read."""
        self.left_out = 0
        """Steps that were left out whole."""
        self._hidden: HiddenNorm | None = None
        self._largest: float | None = None  # norm of a hidden state, before it was attached
        self._head: Head | None = None
        self._gradients: FiniteGradients | None = None
        self._remove: Callable[[], None] | None = None
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
        head = Head(model, optimizer, **self._options)
        _check_head(head)
        outer = hooked_optimizer(head.owner, head.weight)
        ranks = Ranks.of(compute_device(head.weight), group=process_group)
        self._head, self._gradients = head, FiniteGradients(outer, ranks, stop_after=self.stop_after)
        if self.nats is not None and self.hidden_norm is None:
            if head.module is None:
                raise ValueError(f"nats=... needs hidden_norm=...: the head '{head.name}' is no module that is called")
            self._hidden = HiddenNorm(model, head.module, ranks)
            self._hidden.largest = self._largest
        if any(source.decay.share(source.group) is None for source in head.sources):
            warn_user(
                f"it is not known how {type(outer).__name__} uses weight_decay, so TrustRegion holds the whole change"
                ' of the weights; pass decay="decoupled" | "coupled" | a number | a function of the group'
            )
        steps = (outer, *inner_optimizers(outer, head.weight))
        self._remove = on_steps(steps, self._begin, self._end, after_closure=lambda: True)

    def detach(self) -> None:
        """Hold nothing any more; the optimizer is left without a trace."""
        if self._remove is not None:
            self._remove()
        self._remove = None
        _ = self.last
        if self._gradients is not None:
            self._gradients.restore()
        if self._hidden is not None:
            self._largest = self._hidden.largest
            self._hidden.remove()
            self._hidden = None
        if self._head is not None:
            self._tell_probes(self._head, lambda probe: probe.after_limit(None))
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
            self.clipped += self._last.held > 0
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint should have, of plain types. Steps themselves need nothing of it."""
        _ = self.last
        largest = self._largest if self._hidden is None else self._hidden.largest
        return {"step": self.step, "clipped": self.clipped, "left_out": self.left_out, "hidden_norm": largest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where a run was saved: a limit that is a function of the step goes on there."""
        self.step, self.clipped, self.left_out = (int(state_dict[name]) for name in ("step", "clipped", "left_out"))
        self._largest = state_dict.get("hidden_norm")

    # Steps

    @torch.no_grad()
    def _begin(self) -> None:
        """Look at the gradients, and keep the weights from before the step."""
        head, gradients = self._head, self._gradients
        assert head is not None
        assert gradients is not None
        gradients.restore()  # of a step that raised
        self._is_left_out = gradients.check()
        _ = self.last  # now that the device has nothing left to do
        if self._is_left_out:
            return
        weights = [source.rows.of(source.param) for source in _sources(head)]
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
        limit = self._limit_now(head)
        if self._is_left_out:
            self._leave_out(head, gradients, RegionStep(self.step, limit, left_out=True))
            return
        self._tell_probes(head, Probe.before_limit)
        step, scale = self.step, abs(head.logit_scale)
        held = hold(self._moved_rows(head), limit / scale, how=self.how)
        self._pending = outcome = cache(lambda: held.read(step, limit, scale))
        self._tell_probes(head, lambda probe: probe.after_limit(outcome))
        if head.rows.sharded:
            torch.autograd.graph.increment_version([source.param for source in _sources(head)])

    def _limit_now(self, head: Head) -> float:
        """The limit of D(S) in this step."""
        if self.nats is None:
            assert self.limit is not None
            return _checked(self.limit(self.step) if callable(self.limit) else self.limit)
        if self._is_left_out:  # with hidden states that may be anything
            return math.inf if self._last is None else self._last.limit
        norm = self.hidden_norm if self._hidden is None else self._hidden.value()
        assert norm is not None
        return self.nats / (
            norm if head.bias_source is None else math.hypot(norm, 1.0)
        )  # rows are extended by the bias

    def _leave_out(self, head: Head, gradients: FiniteGradients, step: RegionStep) -> None:
        """Note a step that was not made, and say so."""
        self.left_out += 1
        self._tell_probes(head, Probe.before_limit)
        gradients.restore()
        self._last = step
        self._tell_probes(head, lambda probe: probe.after_limit(lambda: step))
        gradients.tell(step.step)

    def _tell_probes(self, head: Head, tell: Callable[[Probe], None]) -> None:
        for probe in probes_of(head.weight):
            tell(probe)

    def _moved_rows(self, head: Head) -> HeldRows:
        """This rank's rows of the head around the step."""
        parts = [
            MovedRows(before, after, 1 - _decay_share(source, before, after))
            for source, before in zip(_sources(head), self._copies, strict=True)
            for after in [source.rows.of(source.param)]
        ]
        return HeldRows(parts, among=head.rows.matrix(parts[0].after))


def _sources(head: Head) -> list[IncrementSource]:
    return list(reversed(head.sources))  # the weight first


def _decay_share(source: IncrementSource, before: Tensor, after: Tensor) -> float | Tensor:
    """Return the share of the weights that decoupled decay took away in the step just made; zero if it was no step.

    Of a decay that is not known it is zero: then the whole change is held.
    """
    if source.param.grad is None and not bool((before != after).any()):
        return 0.0
    stated = source.decay.share(options_of(source.group))
    share = 0.0 if stated is None else stated
    overflow = getattr(source.optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer
    if overflow is not None:
        share = share * (1 - overflow.double()) if isinstance(overflow, Tensor) else share * (1 - bool(overflow))
    return share.double() if isinstance(share, Tensor) and share.device.type != "mps" else share


def _check_head(head: Head) -> None:
    """Refuse heads whose log-odds a limit of D(S) does not hold."""
    if head.computed is not None:
        raise ValueError(
            f"TrustRegion writes the head's weight, and that of '{head.name}' is computed from other parameters"
            f" ({head.computed.kind}): hold nothing here, or train a head with a weight of its own"
        )
    if head.logits.softcap is not None:
        raise ValueError(
            f"TrustRegion holds log-odds by D(S), and the logits of this model are soft-capped at"
            f" {head.logits.softcap:g}: a shift of all rows moves their log-odds, which D(S) does not see"
        )


def _checked(limit: float | None) -> float:
    """A limit as a number, zero or more."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ValueError(f"the limit of D(S) must be zero or a positive number, got {limit!r}")
    return float(limit)
