"""The framework-free core: watches the LM head of a model in any training loop, and makes records of its steps."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import Optimizer

from hilbert_monitor.geometry import (
    DiameterBracket,
    Interval,
    RowDiameter,
    compute_dtype,
    hilbert_perturbation,
    row_diameter,
    row_diameter_bracket,
)
from hilbert_monitor.optim import find_head
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.record import Alert, StepRecord

from . import step_quality as worth
from .ceiling import diameter_ceiling
from .guard import Guard, tell
from .hidden import AutocastFactory, HiddenStates, hidden_states
from .increment import Decay, HeadStep, IncrementSource
from .panel import Panel
from .ranks import Ranks

UNBALANCED = 0.01
"""|sum of the gradient's rows| / sum of their norms, from which on the loss is not that of a plain softmax."""


class Probe:
    """Measures the steps of an optimizer on a model's LM head.

    From ``attach`` to ``detach`` every step of the optimizer is seen by a hook; ``record`` returns what the last one
    was. Observation changes nothing: weights, state, gradients, random numbers and training flags stay as they were.

    Args:
        model: a language model with an untied LM head.
        optimizer: the one that moves the head, or a ChainedOptimizer.
        head: the LM head, its name, or None to look for it.
        panel: validation positions for the Hilbert perturbation; without it only the diameter is measured.
        diameter_every: steps between exact diameters; 0 for none.
        perturbation_every: steps between perturbations of the panel; 0 for none.
        bracket: bounds of the diameter on every step; by default where the increment is formed from state.
        hidden: how to get hidden states from a model that never calls its head: (model, batch) -> states.
        autocast: makes the context in which the model runs its forward pass.
        decay: how an unknown optimizer uses weight_decay.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits.
        decode: makes a token's text from its id.
        efficiency: also bracket, where the panel is due, how much descent the step makes of its diameter.
        judge: blow-up rules. Where the bounds of a step do not rule one out its diameter is searched for, and where
            that is one the panel is looked at too. Give it on every rank.
        world: ranks that train together, if they are not those of torch.distributed: 1 for a process by itself.
        strict: raise what fails, in place of counting it and warning once.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        head: str | Module | None = None,
        panel: Panel | None = None,
        diameter_every: int = 10,
        perturbation_every: int = 500,
        bracket: bool | None = None,
        hidden: HiddenStates | None = None,
        autocast: AutocastFactory | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
        decode: Callable[[int], str] | None = None,
        judge: Judge | None = None,
        efficiency: bool = False,
        world: int | None = None,
        strict: bool = False,
    ) -> None:
        self.model, self.panel = model, panel
        self.head_name, self.head = find_head_module(model, head)
        weight = self.head.weight
        if not isinstance(weight, Tensor) or weight.ndim != 2 or hasattr(weight, "device_mesh"):
            raise TypeError(f"the head '{self.head_name}' must have a whole (V, d) weight, not a sharded one: use DDP")
        self.weight = weight
        self.diameter_every, self.perturbation_every = diameter_every, perturbation_every
        self.hidden, self.autocast, self.decode = hidden, autocast, decode
        self.vocab_size, self.logit_scale, self.judge, self.efficiency = vocab_size, logit_scale, judge, efficiency
        self.source = IncrementSource(optimizer, weight, decay=decay)
        bias = getattr(self.head, "bias", None)
        self.bias = IncrementSource(optimizer, bias, decay=decay) if isinstance(bias, Tensor) else None
        self.bracket = self.source.from_state if bracket is None else bracket
        self.remarks: list[str] = []
        """Why H D(S) bounds the perturbation and is not its largest value, if it does."""
        if self.bias is not None:
            self._remark("the head has a bias: rows are extended by its increment, and sqrt(H^2 + 1) D is a bound")
        self.tied = any(weight is m.weight for m in model.modules() if isinstance(m, Embedding | EmbeddingBag))
        if self.tied:
            self._remark("the head's weight is an embedding's too: a step also moves the hidden states through it")
        self.ranks = Ranks.of(weight.device, world)
        self.alerts: list[Alert] = []
        """What the judge said of the last record."""
        self.step = 0
        self.last = math.inf
        """Number of the last step, where it is known before: it is measured like one that is due."""
        self.guard = Guard(strict=strict)
        self._ends: list[Callable[[], None]] = []
        self._increment: Tensor | None = None
        self._buffer: Tensor | None = None
        self._head_diameter: float | None = None
        self._measured: dict[str, Any] = {}
        self._recorded: dict[str, Any] = {}
        self._earlier: list[tuple[StepRecord, list[Alert]]] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    # Hooks

    def attach(self) -> Probe:
        """Begin to watch."""
        if self.bias is not None:  # before the weight: it has then been seen when the weight is
            self._ends.append(self.bias.watch(lambda step: None, measure=self._will_measure, guard=self.guard))
        self._ends.append(self.source.watch(self._on_step, measure=self._will_measure, guard=self.guard))
        return self

    @property
    def stepped(self) -> bool:
        """Whether there was a step since the last record."""
        return bool(self._measured)

    def skip(self, why: str) -> None:
        """Note a step that was due and that nobody called, such as one that a GradScaler left out."""
        self.step += 1
        self._increment, self._measured = None, {"skipped": why, "learning_rate": float(self.source.group["lr"])}

    def detach(self) -> None:
        """End it; the optimizer is left without a trace."""
        for end in self._ends:
            end()
        for source in filter(None, (self.source, self.bias)):
            source.forget()
        self._ends, self._increment, self._buffer = [], None, None

    def __enter__(self) -> Probe:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _will_measure(self) -> bool:
        due = self._due(self.step + 1, self.diameter_every) or self._due(self.step + 1, self.perturbation_every)
        return due or self.bracket

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.last)

    def _on_step(self, step: HeadStep) -> None:
        if self._measured:  # and nobody asked for it: several steps to a batch
            self._earlier.append((self._made(), self.alerts))
        self.step += 1
        self._increment, self._measured = None, {"skipped": step.skipped}
        with self._guarded("learning_rate"):
            self._measured["learning_rate"] = step.lr
        elsewhere = self.bias is not None and self.bias.optimizer is not self.source.optimizer
        if not elsewhere:
            self._measure_step()
        if self._increment is None and self._due(self.step, self.perturbation_every) and self.source.fleeting:
            with self._guarded("increment"):
                self._increment = self.increment()

    def _measure_step(self) -> None:
        """Measure a step that is new: in its hook, or at its record where the bias has an optimizer of its own."""
        if not self._measured["skipped"] and "diameter_lower" not in self._measured:
            self._measure(exact=self._due(self.step, self.diameter_every))
            if self.ranks.rank == 0 and self._due(self.step, self.perturbation_every):
                with self._guarded("worth"):
                    self._worth()

    # Measuring

    def _measure(self, *, exact: bool) -> None:
        """D(S) or its bracket, on the rank that writes."""
        if not (exact or self.bracket) or self.ranks.rank != 0:
            return
        S: Tensor | None = None
        with self._guarded("increment"):
            S = self.increment()
        if S is None:
            return
        if not exact:
            with self._guarded("bracket"):
                self._diameter(S, row_diameter_bracket(S))
                exact = self._exceeds("diameter_upper")
        if exact:
            with self._guarded("diameter"):
                self._diameter(S, row_diameter(S))
            self._increment = S  # for the panel, if it is due too
            with self._guarded("gradient"):
                self._gradient()

    def increment(self) -> Tensor:
        """S of the last step as it acts on the logits: scaled, padding dropped, extended by the bias."""
        weight = self.weight
        if self._buffer is None and weight.device.type == "cpu":
            self._buffer = torch.empty_like(weight, dtype=compute_dtype(weight), requires_grad=False)
        formed = self.source.form(self._buffer)
        S = formed.S
        if formed.rounding:
            self._measured["rounding"] = 2 * math.sqrt(S.shape[1]) * formed.rounding * self.logit_scale
        if self.bias is not None:
            S = torch.cat([S, self.bias.form().S.to(S.dtype)[:, None]], dim=1)
        if self.vocab_size is not None:
            S = S[: self.vocab_size]
        return S if self.logit_scale == 1 else S * self.logit_scale

    def _worth(self) -> None:
        """What the step is worth, while its gradient is there. A head with a bias has no gradient of S's shape."""
        if self._measured.get("nonfinite_rows"):
            return
        if self._increment is None:
            self._increment = self.increment()
        S, weight = self._increment, self.weight.detach()[: self.vocab_size]
        self._measured |= worth.of_increment(S)
        if self.bias is not None:
            return
        self._head_diameter = worth.head_diameter(weight.to(S.dtype) * self.logit_scale, S)
        if self.efficiency and "diameter_lower" in self._measured:
            bounds = Interval(self._measured["diameter_lower"], self._measured["diameter_upper"])
            state = self.source.optimizer.state[self.weight]
            self._measured |= worth.efficiencies(S, self.weight.grad, state, bounds)

    def _exceeds(self, name: str) -> bool:
        """Whether something that was measured is more than the rules allow."""
        lr = self._measured.get("learning_rate")
        if self.judge is None or name not in self._measured or lr is None:
            return False
        limit = self.judge.limit(self.step, lr)
        return limit is not None and self._measured[name] > limit

    def _diameter(self, S: Tensor, found: DiameterBracket) -> None:
        self._measured.update(
            diameter_lower=found.lower, diameter_upper=found.upper, pair=found.pair, nonfinite_rows=found.nonfinite_rows
        )
        if isinstance(found, RowDiameter):
            norms = torch.linalg.vector_norm(S, dim=1)
            token = int(norms.argmax())
            self._measured.update(diameter=found.lower, row_norm=float(norms[token]), row_token=token)
        self._measured["pair_text"] = self._texts(found.pair)
        if self.source.last is not None and self.bias is None:
            count = float(self.source.optimizer.state[self.weight].get("step", 0))
            ceiling = diameter_ceiling(self.source.optimizer, self.source.last, count=count, width=self.weight.shape[1])
            self._measured["ceiling"] = None if ceiling is None else ceiling * self.logit_scale

    def _remark(self, text: str) -> None:
        """Note once why the identity is not exact, and warn of it."""
        if text not in self.remarks:
            self.remarks.append(text)
            tell(f"identity not exact, {text}", stacklevel=3)

    @torch.no_grad()
    def _gradient(self) -> None:
        if self.weight.grad is None:
            return
        G = self.weight.grad.float()
        norms = torch.linalg.vector_norm(G, dim=1)
        token = int(norms[: self.vocab_size].argmax())
        balance = G.sum(0).norm() / norms.sum()  # padding takes part in a softmax
        self._measured.update(
            gradient_row_norm=float(norms[token]), gradient_row_token=token, gradient_balance=float(balance)
        )
        if float(balance) > UNBALANCED and not self.tied:  # an embedding's gradient is in it too
            self._remark(
                "the rows of the head's gradient do not sum to zero, as those of a softmax cross entropy do: a z-loss,"
                " or soft-capped logits?"
            )

    def _perturbation(self) -> None:
        """Perturbation of the panel: each rank takes its share, and all of them learn of a failure by one gather."""
        if self.panel is None and self.ranks.world == 1:
            return
        mine = torch.zeros(8, dtype=torch.float64)  # went well, positions, squares, max, its pair, largest |h|, squares
        with self._guarded("panel"):
            if self.panel is None:
                raise RuntimeError("this rank has no panel")
            share = self.panel.share(self.ranks.rank, self.ranks.world)
            mine[0] = 1
            if share.size:
                mine[0] = 0
                S = self.increment() if self._increment is None else self._increment
                H = hidden_states(self.model, self.head, share, hidden=self.hidden, autocast=self.autocast)
                if self.bias is not None:
                    H = torch.cat([H, H.new_ones(len(H), 1)], dim=1)
                found = hilbert_perturbation(S, H)
                norms = torch.linalg.vector_norm(H, dim=1).double()
                told = (found.max, *found.pair, float(norms.max()), float(norms.square().sum()))
                mine = torch.tensor([1, share.size, share.size * found.rms**2, *told], dtype=torch.float64)
        ranks = self.ranks.gathered(mine)
        if not bool(ranks[:, 0].all()):
            return
        worst = ranks[ranks[:, 3].argmax()]
        pair = int(worst[4]), int(worst[5])
        self._measured.update(
            perturbation_rms=math.sqrt(float(ranks[:, 2].sum() / ranks[:, 1].sum())),
            perturbation_max=float(worst[3]),
            perturbation_pair=pair,
            hidden_norm=float(ranks[:, 6].max()),
            hidden_norm_rms=math.sqrt(float(ranks[:, 7].sum() / ranks[:, 1].sum())),
        )
        if self._head_diameter is not None and (diameter := self._measured.get("diameter_upper")) is not None:
            with self._guarded("worth"):
                bound = worth.backward(diameter, self._head_diameter, self._measured["hidden_norm"])
                self._measured["backward_bound"] = bound
        self._measured["perturbation_pair_text"] = self._texts(pair)

    def _texts(self, pair: tuple[int, int]) -> tuple[str, str] | None:
        """Texts of two tokens, if there is a decoder and it knows them."""
        texts = None
        if self.decode is not None:
            with self.guard("decode"):
                texts = str(self.decode(pair[0])), str(self.decode(pair[1]))
        return texts

    def record(
        self,
        *,
        final: bool = False,
        train_loss: float | None = None,
        validation_loss: float | None = None,
        tokens: int | None = None,
    ) -> StepRecord | None:
        """Return the record of the last step, or None if there was none since the last call.

        Called on every rank after every step: the perturbation is measured here, under the new weights.

        Args:
            final: the run has ended with that step: measure what has not been, also of a step already recorded.
            train_loss: loss of the step.
            validation_loss: if it was computed since the last record.
            tokens: training tokens so far.
        """
        fresh = bool(self._measured)
        if fresh and self.bias is not None:
            self._measure_step()
        if final:
            self._measured = self._measured or dict(self._recorded)
        if not self._measured:
            return None
        if not self._measured["skipped"] and not (final and not self.source.formable):
            if final and self.diameter_every and "diameter" not in self._measured:
                fresh = True
                self._measure(exact=True)
            due = final or self._due(self.step, self.perturbation_every) or self._blown_up()
            if due and self.perturbation_every and "perturbation_rms" not in self._measured:
                fresh = True
                self._perturbation()
        if not fresh:
            return None
        told = {"train_loss": train_loss, "validation_loss": validation_loss, "tokens": tokens}
        self._measured |= {name: value for name, value in told.items() if value is not None}
        return self._made()

    def earlier(self) -> list[tuple[StepRecord, list[Alert]]]:
        """Return records, with their alerts, of steps that others followed before `record` was called."""
        made, self._earlier = self._earlier, []
        return made

    def _made(self) -> StepRecord:
        """Make the record of what was measured, and have it judged."""
        now = time.perf_counter()
        spent = sum(self._seconds.values())
        self._measured |= {
            "time": time.time(),
            "seconds": dict(self._seconds),
            "share": spent / (now - self._since) if now > self._since else None,
        }
        made = StepRecord(step=self.step, **self._measured)
        self.alerts = []
        if self.judge is not None and self.ranks.rank == 0:
            with self._guarded("rules"):
                self.alerts = self.judge.judge(made)
        self._recorded = self._measured
        self._increment, self._measured, self._seconds, self._since = None, {}, defaultdict(float), now
        self._head_diameter = None
        return made

    def amend(self, *, validation_loss: float) -> StepRecord | None:
        """Return the last record with what has become known of its step since, or None if there is no record yet."""
        if not self._recorded:
            return None
        self._recorded["validation_loss"] = validation_loss
        return StepRecord(step=self.step, **self._recorded)

    def _blown_up(self) -> bool:
        """Whether the step is a blow-up, as the rank that measures it says."""
        if self.judge is None or not self.perturbation_every:
            return False
        mine = False
        with self._guarded("rules"):
            mine = self._exceeds("diameter")
        return self.ranks.agreed(mine)

    @contextmanager
    def _guarded(self, part: str) -> Iterator[None]:
        """Time a part, and keep what it raises from the run."""
        start = time.perf_counter()
        with self.guard(part):
            yield
        self._seconds[part] += time.perf_counter() - start


def find_head_module(model: Module, head: str | Module | None) -> tuple[str, Module]:
    """Return the LM head and its name, given either of them or neither."""
    names = {module: name for name, module in model.named_modules()}
    if isinstance(head, Module):
        if head not in names:
            raise ValueError("the head is no module of this model: pass one of its modules, or the name of one")
        return names[head], head
    name = find_head(model) if head is None else head
    if name not in names.values():
        raise ValueError(f"the model has no module called {name!r}: pass the LM head or its name as head=...")
    return name, model.get_submodule(name)
