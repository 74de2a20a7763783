"""Measures the parts of one step: what there is to form, to bound, to search and to run on the panel.

Ranks that have the shards of a head measure together. Of a head that all ranks have, rank zero measures alone. Each of
these methods is called on all ranks. Before a part that sends anything they agree that each can take part. What then
fails on one rank that measures fails on all (see `geometry`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from hilbert_monitor.geometry import row_diameter_bracket

from .attention import AttentionLogits
from .head import WatchedHead
from .head_rows import Matrix
from .hidden import AutocastFactory, HiddenStates, hidden_states
from .logit_shape import HeadShape, LogitShape, logit_dtype, logit_rows, panel_targets
from .measurement import (
    DiameterBounds,
    ExactDiameter,
    GradientRows,
    Measurement,
    PanelPerturbation,
    SeenStep,
    StoredStep,
)
from .panel import Panel
from .runtime import Guard, Ranks
from .step_quality import backward_bound, head_quality, heads_around

UNBALANCED = 0.01
"""|sum of the gradient's rows| / sum of their norms, from which on the loss is not that of a plain softmax."""


class StepMeter:
    """Measures one step after the other, times each part, and keeps what fails from the run.

    Args:
        model: a language model.
        ranks: those that train together.
        guard: counts what fails.
        remark: told why the identity is not exact.
        efficiency: also bracket how much descent the step makes of its diameter.
        attention: also look at the attention logits of the panel.
        hidden: how to get hidden states from a model that never calls its head.
        autocast: makes the context in which the model runs its forward pass.
    """

    def __init__(
        self,
        model: Module,
        *,
        ranks: Ranks,
        guard: Guard,
        remark: Callable[[str], None],
        efficiency: bool = False,
        attention: bool = False,
        hidden: HiddenStates | None = None,
        autocast: AutocastFactory | None = None,
    ) -> None:
        self.model, self.ranks, self.guard, self.remark = model, ranks, guard, remark
        self.efficiency, self.attention, self.hidden, self.autocast = efficiency, attention, hidden, autocast
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """What measuring has cost since the last record, by part."""
        self._increment: Matrix | None = None
        self._rounding = 0.0
        self._head_diameter: float | None = None
        self._compared = False  # whether the logits of a batch were compared with the head's output
        self._output_dtype: torch.dtype | None = None  # of the head's output, once one was seen

    def forget(self) -> None:
        """Forget the step."""
        self._increment = self._head_diameter = None

    @property
    def holds_increment(self) -> bool:
        """Whether the increment of the step is at hand."""
        return self._increment is not None

    def take_increment(self, head: WatchedHead, step: Measurement) -> None:
        """Form this rank's rows of the increment, if it measures, and keep them: of some they are lost later."""
        if not head.measures:
            return
        with self.timed("increment"):
            increment = head.increment()
            if increment is not None:
                self._increment, self._rounding = increment.S, float(increment.rounding)
                step.increment_from = head.source.basis

    def measure_diameter(
        self, head: WatchedHead, step: Measurement, *, exact: bool, suspects: Callable[[float, float], bool]
    ) -> None:
        """Measure D(S), or its bounds; D(S) as well if rank zero finds the bounds suspicious."""
        self._increment = None
        if not step.skipped:
            self.take_increment(head, step)
        S = self._increment
        if not self._agree(head, step) or not head.measures:
            return
        assert S is not None
        if not exact:
            self._bound(head, step, S)
            exact = head.measuring.from_rank_zero(self.is_suspicious(step, suspects))
            self._increment = S if exact else None
        if exact:
            self._search(head, step, S)
            self._measure_gradient(head, step)
            self._measure_head_rows(head, step)

    def _agree(self, head: WatchedHead, step: Measurement, *, ready: bool = True) -> bool:
        """Whether every rank that measures has formed its rows, and all are ready for what comes next."""
        agreed = False
        with self.timed("increment"):
            mine = ready and (self._increment is not None or not head.measures)
            everybody, minus_rounding = head.agree(float(mine), -self._rounding if mine else 0.0)
            agreed, step.rounding = bool(everybody), -minus_rounding or None
        if not agreed:
            self._increment = None
        return agreed

    def _bound(self, head: WatchedHead, step: Measurement, S: Matrix) -> None:
        with self.timed("bracket"):
            step.bounds, step.ceiling = DiameterBounds.of(S), head.ceiling()
        self._measure_stored(head, step, DiameterBounds)

    def _search(self, head: WatchedHead, step: Measurement, S: Matrix) -> None:
        with self.timed("diameter"):
            step.bounds, step.ceiling = ExactDiameter.of(S), head.ceiling()
        self._measure_stored(head, step, ExactDiameter)
        if not head.measuring.all_agree(step.exact is not None):
            self._bound(head, step, S)

    def search_alone(self, head: WatchedHead, step: Measurement, S: Matrix | None) -> None:
        """Search the last step for D(S) on this rank alone, after its numbers were read; its gradient may be gone.

        Args:
            head: whose weights are still those that the step left.
            step: to be completed.
            S: the increment, if it cannot be formed again.
        """
        with self.timed("diameter"):
            self._increment = head.believed_increment().S if S is None else S
            step.bounds = ExactDiameter.of(self._increment)
            if step.stored is not None:
                stored = ExactDiameter.of(head.stored_increment())
                step.stored = StoredStep.of(stored, moved_share=step.stored.moved_share)

    def is_suspicious(self, step: Measurement, suspects: Callable[[float, float], bool]) -> bool:
        """Whether the rules want to know the exact diameter of a step with its bounds."""
        with self.timed("rules"):
            if step.stored is not None:
                return suspects(step.stored.stored_diameter_lower, step.stored.stored_diameter_upper)
            if step.bounds is not None:
                return suspects(step.bounds.diameter_lower, step.bounds.diameter_upper)
        return False

    def _measure_stored(self, head: WatchedHead, step: Measurement, kind: type[DiameterBounds]) -> None:
        """Measure the step that rounded weights really made, where it is not the one intended."""
        if not head.source.is_rounded:
            return
        S: Matrix | None = None
        bounds, moved = step.bounds, (0.0, 0.0)
        with self.timed("diameter"):
            if head.has_stored and bounds is not None:
                count, number = head.source.moved()
                moved, S = (float(count), float(number)), head.stored_increment()
        if not head.measuring.all_agree(S is not None):
            return
        assert S is not None
        assert bounds is not None
        with self.timed("diameter"):
            bounds = kind.of(S) if head.source.basis == "state" else bounds
            step.stored = StoredStep.of(bounds, moved_share=head.moved_share(moved))

    def _measure_seen(self, head: WatchedHead, step: Measurement) -> None:
        """Measure the step that the forward pass sees, where it casts the weights."""
        if head.source.seen_dtype is None:
            return
        S: Matrix | None = None
        with self.timed("quality"):
            S = head.seen_increment()
        if head.measuring.all_agree(S is not None):
            assert S is not None
            with self.timed("quality"):
                step.seen = SeenStep.of(S)

    def measure_quality(self, head: WatchedHead, step: Measurement) -> None:
        """Measure how good the step is, while its gradient is there."""
        finite = step.bounds is None or not step.bounds.nonfinite_rows
        if finite and self._increment is None and not step.skipped:
            self.take_increment(head, step)
        S = self._increment
        if not self._agree(head, step, ready=finite) or not head.measures:
            return
        assert S is not None
        self._measure_seen(head, step)
        bounded = self.efficiency and head.measuring.all_agree(step.bounds is not None)
        with self.timed("quality"):
            step.quality = head_quality(head, S, step.bounds if bounded else None)
        if head.bias is None:
            self._measure_head(head, S)

    def _measure_head(self, head: WatchedHead, S: Matrix) -> None:
        heads: list[Matrix] = []
        with self.timed("quality"):
            heads = heads_around(head, S)
        if head.measuring.all_agree(bool(heads)):
            with self.timed("quality"):
                self._head_diameter = min(row_diameter_bracket(U).upper for U in heads)

    def _measure_gradient(self, head: WatchedHead, step: Measurement) -> None:
        G: Matrix | None = None
        with self.timed("gradient"):
            G = head.gradient()
        if not head.measuring.all_agree(G is not None):
            return
        assert G is not None
        with self.timed("gradient"):
            step.gradient = GradientRows.of(G, head.vocab_size)
            # An embedding's gradient is in that of a tied weight too.
            if step.gradient.gradient_balance > UNBALANCED and not head.tied:
                self.remark(
                    "the rows of the head's gradient do not sum to zero, as those of a plain softmax cross entropy do:"
                    " gradients clipped by value, a z-loss or soft-capped logits can be why"
                )

    def measure_panel(self, head: WatchedHead, step: Measurement, panel: Panel | None) -> None:
        """Measure the panel. Every rank runs the model on all of it: the passes of a sharded model are collective."""
        if not self._have_one_panel(panel):
            return
        assert panel is not None
        H: Tensor | None = None
        with self.timed("panel", user_code=True):
            with AttentionLogits() if self.attention else nullcontext() as attention:
                H = self._hidden_states(head, panel)
            step.attention_logit = None if attention is None else attention.largest
        if H is not None and self._increment is None:
            self.take_increment(head, step)
        S = self._increment
        if not self._agree(head, step, ready=H is not None) or not head.measures:
            return
        assert H is not None
        assert S is not None
        with self.timed("panel"):
            step.panel = PanelPerturbation.of(S, H)
        self._measure_logits(head, step, panel, H)
        if step.panel is not None and step.bounds is not None and self._head_diameter is not None:
            with self.timed("quality"):
                step.backward_bound = backward_bound(
                    step.bounds.diameter_upper, self._head_diameter, step.panel.hidden_norm
                )

    def _measure_logits(self, head: WatchedHead, step: Measurement, panel: Panel, H: Tensor) -> None:
        """Measure where the logits of the panel are, and what they lose in the run's precision."""
        U: Matrix | None = None
        with self.timed("logits"):
            U = logit_rows(head)
        if not head.measuring.all_agree(U is not None):
            return
        assert U is not None
        with self.timed("logits"):
            round_to, targets = logit_dtype(head, self._output_dtype), panel_targets(panel).to(H.device)
            if U.shape[1] > H.shape[1]:  # a bias that is frozen
                H = torch.cat([H, H.new_ones(len(H), 1)], dim=1)
            step.logits = LogitShape.of(U, H, targets, round_to=round_to, softcap=head.logits.softcap)

    def _measure_head_rows(self, head: WatchedHead, step: Measurement) -> None:
        U: Matrix | None = None
        with self.timed("logits"):
            U = head.weight_rows()
        if head.measuring.all_agree(U is not None):
            assert U is not None
            with self.timed("logits"):
                step.head_shape = HeadShape.of(U, head.logit_scale)

    def _have_one_panel(self, panel: Panel | None) -> bool:
        """Whether the panel has been collected on every rank, and is the same: a sharded model runs on all at once."""
        mine, collected = 0.0, False
        with self.timed("panel"):
            if panel is not None:
                mine, collected = float(panel.number), True
        everywhere, least, minus_most = self.ranks.all_min([float(collected), mine, -mine])
        if everywhere and least != -minus_most:
            with self.timed("panel"):
                raise ValueError("the ranks have panels of different text or batches: make it of the same text on each")
        return bool(everywhere) and least == -minus_most

    def _hidden_states(self, head: WatchedHead, panel: Panel) -> Tensor:
        H = hidden_states(
            self.model,
            head.module or head.weight,
            panel,
            hidden=self.hidden,
            autocast=self.autocast,
            on_logits=None if self._compared else partial(self._compare_logits, head),
            remark=self.remark,
        )
        self._compared = True
        return H if head.bias is None else torch.cat([H, H.new_ones(len(H), 1)], dim=1)

    def _compare_logits(self, head: WatchedHead, output: Tensor, logits: Tensor) -> None:
        self._output_dtype = output.dtype
        if text := head.explain(output, logits):
            self.remark(text)

    @contextmanager
    def timed(self, part: str, *, user_code: bool = False) -> Iterator[None]:
        """Time a part, and keep what it raises from the run."""
        start = time.perf_counter()
        with self.guard(part, user_code=user_code):
            yield
        self.seconds[part] += time.perf_counter() - start
