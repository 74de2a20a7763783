"""What is measured of a step: functions from matrices to fields of its record, and when ranks run them together."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from hilbert_monitor.geometry import (
    DiameterBracket,
    Interval,
    RowShards,
    RowSource,
    centred_decrease,
    covering_radius,
    hilbert_perturbation,
    log_partition,
    row_diameter,
    row_diameter_bracket,
    row_statistics,
    spectral_norm,
    step_efficiency,
    tension_bracket,
    uniform_backward_bound,
)

from .head import Head, HeadIncrement, check_logit_scale
from .hidden_states import AutocastFactory, HiddenStates, hidden_states
from .increment import Basis, held
from .layers import AttentionLogits
from .optimizers import state_of
from .panel import Panel, next_tokens
from .runtime import Guard, Ranks

Fields = dict[str, Any]
"""Numbers of a step, named as the fields of a StepRecord."""
Matrix = Tensor | RowShards
T = TypeVar("T")

UNBALANCED = 0.01
"""|sum of the gradient's rows| / sum of their norms, from which on the loss is not that of a plain softmax."""
POSITIONS = 1024
"""Positions of the panel at which logits are looked at, evenly over it: an average needs no more."""
BUDGET = 1.0
"""Seconds in which the tension of a gradient is bracketed."""
MOMENTS = ("exp_avg", "momentum_buffer")
"""Names that optimizers have for their moment, the running average of their gradients."""


# From matrices to fields


def bounds_of(bracket: DiameterBracket) -> Fields:
    """Return the fields of certified bounds of D(S)."""
    return {
        "diameter_lower": bracket.lower,
        "diameter_upper": bracket.upper,
        "pair": bracket.pair,
        "nonfinite_rows": bracket.nonfinite_rows,
    }


def exact_diameter(S: Matrix) -> Fields:
    """Search an increment (V, d) for its diameter, and measure its covering radius and its longest row."""
    exact = row_diameter(S)
    radius = covering_radius(S, diameter=exact)
    rows = row_statistics(S)
    return bounds_of(exact) | {
        "diameter": exact.lower,
        "row_norm": rows.longest_norm,
        "row_token": rows.longest_row,
        "radius": radius.upper,
        "radius_lower": radius.lower,
    }


def stored_fields(diameter: Fields, moved_share: float) -> Fields:
    """Return the fields of the step that weights of less than fp32 really made, from those of its diameter."""
    names = ("diameter", "diameter_lower", "diameter_upper", "pair")
    return {f"stored_{name}": diameter.get(name) for name in names} | {"moved_share": moved_share}


def gradient_rows(G: Matrix, tokens: int | None = None) -> Fields:
    """Measure a gradient (V, d) whose first `tokens` rows are tokens; padding takes part in the softmax too."""
    rows = row_statistics(G, tokens=tokens)
    return {
        "gradient_row_norm": rows.longest_norm,
        "gradient_row_token": rows.longest_row,
        "gradient_balance": rows.balance,
    }


def panel_perturbation(S: Matrix, H: Tensor) -> Fields:
    """Measure an increment (V, d) at the hidden states (N, d) of a panel, the same on all ranks."""
    perturbation = hilbert_perturbation(S, H)
    norms = torch.linalg.vector_norm(H, dim=1).double()
    return {
        "perturbation_rms": perturbation.rms,
        "perturbation_max": perturbation.max,
        "perturbation_pair": perturbation.pair,
        "hidden_norm": float(norms.max()),
        "hidden_norm_rms": float(norms.square().mean().sqrt()),
    }


def head_rows(U: Matrix, scale: float = 1.0) -> Fields:
    """Measure the mean row of a head (V, d), which softmax does not see, and how long its rows are."""
    rows = row_statistics(U)
    return {"head_mean_row": rows.norm_of_mean * abs(scale), "head_row_norm": rows.mean_norm * abs(scale)}


def panel_logits(
    U: Matrix, H: Tensor, targets: Tensor, *, round_to: torch.dtype | None = None, softcap: float | None = None
) -> Fields:
    """Measure mean logit z, A = log Z - z and log Z over the panel, the largest |logit|, and what precision costs.

    Args:
        U: (V, d) makes logits of states.
        H: (N, d) the states, the same on all ranks.
        targets: (N,) the tokens that follow, -1 where none does.
        round_to: the precision of the run's logits, if it is less than fp32.
        softcap: of the logits.
    """
    every = -(-len(H) // POSITIONS)
    H, targets = H[::every].contiguous(), targets[::every].contiguous()
    targets = targets.masked_fill(targets >= U.shape[0], -1)  # padding is no token
    exact = log_partition(U, H, targets, softcap=softcap)
    fields: Fields = {"logit_max": float(exact.largest.max())}
    for name, x in {"mean_logit": exact.mean, "centred_log_z": exact.centred, "log_z": exact.log_z}.items():
        ends = torch.stack([x.square().mean().sqrt(), x.min(), x.max()]).tolist()
        fields |= {f"{name}_{end}": number for end, number in zip(("rms", "min", "max"), ends, strict=True)}
    if round_to is not None and bool((targets >= 0).any()):
        loss = log_partition(U, H, targets, softcap=softcap, round_to=round_to).loss - exact.loss
        loss = loss[(targets >= 0).to(loss.device)]
        fields |= {"precision_loss": float(loss.mean()), "precision_loss_rms": float(loss.square().mean().sqrt())}
    return fields


def panel_targets(panel: Panel) -> Tensor:
    """Return the token that follows each position of a panel (N,), -1 where the text of the batch does not say."""
    parts = zip(panel.batches, panel.positions, strict=True)
    return torch.cat([next_tokens(batch).flatten()[positions].clamp_min(-1) for batch, positions in parts])


def increment_quality(S: Matrix) -> Fields:
    """Measure how much of an increment (V, d) reaches the predictions, and its spectral norm."""
    return {"gauge_waste": row_statistics(S).gauge_waste, "spectral_norm": spectral_norm(S).upper}


def efficiencies(
    S: Tensor, gradient: Tensor | None, state: Mapping[str, Any], diameter: Interval, *, budget: float = BUDGET
) -> Fields:
    """Bracket how much descent a step makes of its diameter, for the batch's gradient and for the optimizer's moment.

    An efficiency is a ratio in which the scale of the gradient cancels, so a moment needs no bias correction.

    Args:
        S: (V, d) increment.
        gradient: (V, d) of the batch.
        state: the optimizer's, of the weight.
        diameter: bounds of D(S).
        budget: seconds for each of the two.
    """
    moment = next((state[name] for name in MOMENTS if isinstance(state.get(name), Tensor)), None)
    fields: Fields = {}
    for name, G in (("efficiency", gradient), ("moment_efficiency", moment)):
        if G is None or not bool(torch.isfinite(G).all()):
            continue
        G = G[: len(S)]  # in its own dtype: a centred copy in bf16 would be another gradient
        tension = tension_bracket(G, budget_seconds=budget)
        decrease = centred_decrease(G, S)  # softmax sees the centred rows alone
        found = step_efficiency(decrease, diameter=diameter, tension=Interval(tension.lower, tension.upper))
        if found is not None:
            fields |= {f"{name}_lower": found.lower, f"{name}_upper": found.upper}
    return fields


def backward_bound(diameter: float, head: float, hidden_norm: float) -> float:
    """Bound what a step changes of the gradient at a hidden state, for every target.

    Args:
        diameter: D(S), from above.
        head: the smaller of D of the head before the step and after it, from above.
        hidden_norm: largest norm of a hidden state.
    """
    norm = torch.tensor(hidden_norm, dtype=torch.float64)
    return float(uniform_backward_bound(norm, diameter_step=diameter, diameter_head=head, diameter_updated=head))


def limit_fields(limit: float, made: Any) -> Fields:
    """Return what a TrustRegion made of a step. Of a step that was skipped, nothing is known but that."""
    fields: Fields = {"trust_limit": limit if math.isfinite(limit) else None}
    if made.left_out:
        return fields | {"skipped": "not finite"}
    return fields | {
        "made_diameter": made.made_upper,
        "held_rows": made.held,
        "held_share": made.held / made.rows,
        "held_tokens": made.tokens or None,
    }


# On all ranks, or on none


class Measurer:
    """Measures one step after the other, times each part, and keeps what fails from the run.

    Each method is called on every rank that measures. Ranks agree before a part that sends anything; what then fails on
    one rank fails on all (see `geometry`).

    Args:
        model: a language model.
        head: its LM head.
        ranks: those that measure together.
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
        head: Head,
        *,
        ranks: Ranks,
        guard: Guard,
        remark: Callable[[str], None],
        efficiency: bool = False,
        attention: bool = False,
        hidden: HiddenStates | None = None,
        autocast: AutocastFactory | None = None,
    ) -> None:
        self.model, self.head, self.ranks, self.guard, self.remark = model, head, ranks, guard, remark
        self.efficiency, self.attention, self.hidden, self.autocast = efficiency, attention, hidden, autocast
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """What measuring has cost since the last record, by part."""
        self.increment: HeadIncrement | None = None
        """The increment of the step, where it is at hand."""
        self._head_diameter: float | None = None
        self._compared = False  # whether the logits of a batch were compared with the head's output
        self._output_dtype: torch.dtype | None = None  # of the head's output, once one was seen

    def forget(self) -> None:
        """Forget the step."""
        self.increment = self._head_diameter = None

    @contextmanager
    def timed(self, part: str, *, user_code: bool = False) -> Iterator[None]:
        """Time a part, and keep what it raises from the run."""
        start = time.perf_counter()
        with self.guard(part, user_code=user_code):
            yield
        self.seconds[part] += time.perf_counter() - start

    def run(self, part: str, form: Callable[[], T | None], measure: Callable[[T], Fields]) -> Fields:
        """Run one measurement on every rank, or on none.

        `form` builds this rank's input and may fail. All ranks then agree whether each has its input. `measure` returns
        fields and may communicate. A failure costs these fields only.
        """
        value: T | None = None
        fields: Fields = {}
        with self.timed(part):
            value = form()
        if self.ranks.all_agree(value is not None):
            assert value is not None
            with self.timed(part):
                fields = measure(value)
        return fields

    def form_increment(self, *, hold: bool = False, ready: bool = True) -> Fields | None:
        """Form the increment, unless it is at hand; return its own fields, or None if a rank has none.

        Args:
            hold: keep its rows in memory, as they cannot be formed later.
            ready: whether this rank can go on with it.
        """
        rounding = 0.0
        with self.timed("increment"):
            if self.increment is None and ready:
                self.increment = self.head.increment()
            if hold and self.increment is not None:
                self.increment = self.increment._replace(S=held(self.increment.S))
            rounding = 0.0 if self.increment is None else float(self.increment.rounding)
        everybody, minus_rounding = 0.0, 0.0
        with self.timed("increment"):
            have = float(ready and self.increment is not None)
            everybody, minus_rounding = self.head.agree(self.ranks, have, -rounding)
        if not everybody or self.increment is None:
            self.increment = None
            return None
        return {"increment_from": self.increment.basis.name.lower(), "rounding": -minus_rounding or None}

    def diameter(self, *, exact: bool, suspects: Callable[[Fields], bool]) -> Fields:
        """Measure D(S), or its bounds; D(S) as well if rank zero finds the bounds suspicious."""
        self.increment = None
        fields = self.form_increment()
        if fields is None or self.increment is None:
            return {}
        S = self.increment.S
        if self.increment.has_decay:
            fields |= self._change(S) if exact else {}
            return fields if "change_diameter" in fields else {}
        if not exact:
            fields |= self._with_stored("bracket", S, lambda S: bounds_of(row_diameter_bracket(S)))
            with self.timed("rules"):
                exact = suspects(fields)
            exact = self.ranks.from_rank_zero(exact)
        if not exact:
            self.increment = None
            return fields
        found = self._with_stored("diameter", S, exact_diameter)
        if not self.ranks.all_agree(bool(found)):
            found = self._with_stored("bracket", S, lambda S: bounds_of(row_diameter_bracket(S)))
        fields |= found | self.run("gradient", self.head.gradient, self._gradient)
        return fields | self.run("logits", self.head.weight_rows, lambda U: head_rows(U, self.head.logit_scale))

    def _change(self, S: RowShards) -> Fields:
        """Measure the change of the weights, where their decay is unknown."""

        def measure(S: RowShards) -> Fields:
            exact = row_diameter(S)
            return {"change_diameter": exact.lower, "pair": exact.pair, "nonfinite_rows": exact.nonfinite_rows}

        return self.run("diameter", lambda: S, measure) | {"decay": "unknown"}

    def _with_stored(self, part: str, S: RowShards, measure: Callable[[RowShards], Fields]) -> Fields:
        """Measure the increment, and the step that rounded weights really made, where it is not the one intended."""
        head, moved = self.head, (0.0, 0.0)

        def form() -> RowShards | None:
            nonlocal moved
            if not head.has_stored:
                return None
            count, number = head.source.moved()
            moved = float(count), float(number)
            return head.stored_increment()

        def stored(stored: RowShards) -> Fields:
            count, number = self.ranks.sum([*moved])
            diameter = measure(stored) if head.source.basis is Basis.STATE else fields
            return stored_fields(diameter, count / number)

        fields = self.run(part, lambda: S, lambda S: measure(S) | {"ceiling": head.ceiling()})
        if head.source.is_rounded and self.ranks.all_agree(bool(fields)):
            return fields | self.run("diameter", form, stored)
        return fields

    def search_alone(self, increment: HeadIncrement | None, fields: Fields) -> Fields:
        """Search a step whose numbers were read later for D(S), on this rank alone; its gradient may be gone.

        Args:
            increment: of the step, if it cannot be formed again; what is measured next has it too.
            fields: measured so far.
        """
        found: Fields = {}
        with self.timed("diameter"):
            self.increment = self.head.increment(check=False) if increment is None else increment
            assert self.increment is not None
            found = exact_diameter(self.increment.S)
            if "moved_share" in fields:
                found |= stored_fields(exact_diameter(self.head.stored_increment()), fields["moved_share"])
        return found

    def _gradient(self, G: RowShards) -> Fields:
        fields = gradient_rows(G, self.head.vocab_size)
        if fields["gradient_balance"] > UNBALANCED and not self.head.tied:  # an embedding's is in a tied weight's too
            self.remark(
                "the rows of the head's gradient do not sum to zero, as those of a plain softmax cross entropy do:"
                " gradients clipped by value, a z-loss or soft-capped logits can be why"
            )
        return fields

    def quality(self, fields: Fields) -> Fields:
        """Measure how good the step is, while its gradient is there. `fields` are those measured so far."""
        formed = self.form_increment(ready=not fields.get("nonfinite_rows") and not fields["skipped"])
        if formed is None or self.increment is None or self.increment.has_decay:
            return {}
        head, S = self.head, self.increment.S
        bounded = "diameter_upper" in fields and self.efficiency and head.bias_source is None and not head.rows.sharded

        def measure(S: RowShards) -> Fields:
            found = increment_quality(S)
            if bounded:
                state = (
                    {} if head.transposed or head.computed is not None else state_of(head.source.optimizer, head.weight)
                )
                diameter, G = Interval(fields["diameter_lower"], fields["diameter_upper"]), head.gradient()
                found |= efficiencies(S.rows.matrix(), None if G is None else G.rows.matrix(), state, diameter)
            return found

        def heads_around(S: RowShards) -> list[RowShards]:
            U = head.logit_matrix(bias=False)
            before = RowSource(U.rows, S.rows, form=lambda u, s: u.to(s.dtype) - s, dtype=S.rows.dtype)
            return [U, replace(U, rows=before)]

        def around(heads: list[RowShards]) -> Fields:
            self._head_diameter = min(row_diameter_bracket(U).upper for U in heads)
            return {}

        found = formed | self.run("quality", lambda: S, measure)
        if head.bias_source is None:
            self.run("quality", partial(heads_around, S), around)
        return found

    def panel(self, panel: Panel | None, fields: Fields) -> Fields:
        """Measure the panel. Every rank runs the model on all of it: the passes of a sharded model are collective."""
        if not self._have_one_panel(panel):
            return {}
        assert panel is not None
        found: Fields = {}
        H: Tensor | None = None
        with self.timed("panel", user_code=True):
            with AttentionLogits() if self.attention else nullcontext() as attention:
                H = self._hidden_states(panel)
            found["attention_logit"] = None if attention is None else attention.largest
        formed = self.form_increment(ready=H is not None)
        if formed is None or H is None or self.increment is None or self.increment.has_decay:
            return found
        S, biased = self.increment.S, self.increment.S.shape[1] > H.shape[1]
        extended = torch.cat([H, H.new_ones(len(H), 1)], 1) if biased or self.head.bias is not None else H
        found |= formed | self.run("panel", lambda: S, lambda S: panel_perturbation(S, extended if biased else H))
        found |= self.run("logits", self.head.logit_matrix, lambda U: self._logits(U, extended, panel))
        upper = fields.get("diameter_upper")
        if "hidden_norm" in found and upper is not None and self._head_diameter is not None:
            with self.timed("quality"):
                found["backward_bound"] = backward_bound(upper, self._head_diameter, found["hidden_norm"])
        return found

    def _logits(self, U: RowShards, H: Tensor, panel: Panel) -> Fields:
        dtype = self._output_dtype or self.head.weight.dtype
        round_to = dtype if dtype in (torch.bfloat16, torch.float16) else None
        return panel_logits(
            U, H, panel_targets(panel).to(H.device), round_to=round_to, softcap=self.head.logits.softcap
        )

    def _have_one_panel(self, panel: Panel | None) -> bool:
        """Return whether every rank has the panel, and the same: a sharded model runs on all at once."""
        mine, collected = 0.0, False
        with self.timed("panel"):
            if panel is not None:
                mine, collected = float(panel.number), True
        everywhere, least, minus_most = self.ranks.all_min([float(collected), mine, -mine])
        if everywhere and least != -minus_most:
            with self.timed("panel"):
                raise ValueError("the ranks have panels of different text or batches: make it of the same text on each")
        return bool(everywhere) and least == -minus_most

    def _hidden_states(self, panel: Panel) -> Tensor:
        states = hidden_states(
            self.model,
            self.head.module or self.head.weight,
            panel,
            hidden=self.hidden,
            autocast=self.autocast,
            on_logits=None if self._compared else self._compare_logits,
            remark=self.remark,
        )
        self._compared = True
        return states

    def _compare_logits(self, output: Tensor, logits: Tensor) -> None:
        self._output_dtype = output.dtype
        if text := check_logit_scale(output, logits, self.head.logit_scale, self.head.logits.softcap):
            self.remark(text)
