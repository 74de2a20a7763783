"""The increment S of one optimizer step on one parameter, without decoupled weight decay: U' = c U + S.

It is formed from the optimizer's state, where that says what a step was (`state_increment`): nothing is copied, and
nothing lost to cancellation. Otherwise it is the difference of the weights (`weight_increment`).

What is believed (`belief`) is compared with what the weights did, on a few hundred rows of the first steps and of some
later ones. Where the two part, the difference of the weights is taken from then on: that of a step, or, where something
else moves the weights as well (Lookahead, a patched step, weights that are swapped), that of a whole update.

Of a sharded head each rank forms and keeps its own rows alone; see `HeadRows`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.optim import Group, options_of

from .belief import Belief
from .decay import Decay, WeightDecay
from .formulas import state_of
from .head_rows import HeadRows
from .head_step import HeadStep, learning_rate
from .kept_rows import KeptRows
from .owners import group_of, stepping_optimizer
from .seen_steps import SeenSteps
from .state_increment import StateIncrement
from .weight_increment import Increment, WeightIncrement, largest

Basis = Literal["state", "step", "update"]
"""What an increment is formed from: the optimizer's state, or the weights around its step, or around an update."""


class IncrementSource:
    """Tells what each step of an optimizer does to one of its parameters.

    Args:
        optimizer: a torch optimizer, or what wraps one; of a ChainedOptimizer the one that owns the parameter is
            watched.
        param: a parameter of it.
        decay: how an unknown optimizer uses weight_decay. Without it "decoupled" is assumed, with a warning.
        rows: the entries of the parameter that this rank has, where its rows may be columns.
    """

    def __init__(
        self, optimizer: Optimizer, param: Tensor, *, decay: Decay | None = None, rows: HeadRows | None = None
    ) -> None:
        self.optimizer = stepping_optimizer(optimizer, param)
        self.param = param
        self.rows = rows or HeadRows(param)
        self._by_state = StateIncrement(self.optimizer, param, self.rows)
        self._by_weights = WeightIncrement(self._weights)
        self.decay = WeightDecay(self.optimizer, decay)
        self.belief = Belief(self.optimizer, self.decay, self._by_weights)
        self.steps = SeenSteps(self.optimizer, param, on_held=self._see_rows)
        self.last: HeadStep | None = None
        self._kept = self._watched()
        self.checks = True
        """Whether what is believed of the step is compared with what the weights did."""
        self._has_stepped = False  # before the first step anybody may load other weights
        self.reads_later = False
        """Whether the next step asks nothing of the device: its `HeadStep` says what is to be read."""
        self.seen_dtype: torch.dtype | None = None
        """What the forward pass casts the weights to, if it is less than they have."""
        self._next: Group | None = None  # options at the end of the last update, if the next step starts there
        _ = self.group  # refuses a parameter of somebody else

    # What is known

    @property
    def basis(self) -> Basis:
        """What the increment is formed from."""
        return "update" if self.belief.by_update else "state" if self.from_state else "step"

    @property
    def from_state(self) -> bool:
        """Whether the increment is formed without a copy of the weights."""
        return self.belief.trusts_state and self._by_state.known

    @property
    def is_rounded(self) -> bool:
        """Whether the weights have less than fp32, so that a step that is stored is not the one that was intended."""
        return self.param.dtype.itemsize < 4

    @property
    def fleeting(self) -> bool:
        """Whether the increment is lost soon: formed from the gradient, or from weights that are held."""
        if self.steps.has_holder and not self.from_state:
            return True  # the weights tell it until they are held
        return self.from_state and self._by_state.needs_gradient(self.last)

    @property
    def formable(self) -> bool:
        """Whether the increment of the last step can still be formed: nothing has moved the weights since."""
        if self.last is None or self._kept.are_others():
            return False
        if self.from_state and self._by_state.is_plain_sgd(self.last):
            return self._by_state.has_gradient
        if self.belief.by_update:
            return self.has_stored and self._next is None
        return self.from_state or self.has_stored

    @property
    def decoupled(self) -> bool:
        """Whether weight decay is apart from the increment."""
        return self.decay.decoupled(self.group)

    @property
    def group(self) -> Group:
        """The group of the parameter, as it is now."""
        group = group_of(self.optimizer, self.param)
        if group is None:
            raise ValueError(
                f"the parameter of shape {tuple(self.param.shape)} is in no group of {type(self.optimizer).__name__}:"
                " give the optimizer that moves it"
            )
        return group

    # Steps

    def watch(
        self,
        on_step: Callable[[HeadStep], None],
        *,
        measure: Callable[[], bool] = lambda: True,
        check: Callable[[], bool] = lambda: True,
        guard: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        doubt: Callable[[str], None] = lambda text: None,
        before_step: Callable[[], None] = lambda: None,
        after_closure: Callable[[], bool] = lambda: False,
    ) -> Callable[[], None]:
        """Call `on_step` after each step; return a function that ends it.

        Args:
            on_step: called when the parameter has moved, or would have.
            measure: asked before each step whether its increment will be; only then are weights copied, where needed.
            check: asked before each step whether what is believed is compared with what the weights do.
            guard: makes the context for what runs inside the optimizer's step, by the name of the part.
            doubt: told in a sentence where the weights did something else than was believed.
            before_step: called before each step, while the parameter and its state are as the last step left them.
            after_closure: asked whether a step that is given a closure begins when that has run. Until then the device
                has no new work: whoever waits for it then, lets it run dry.
        """
        self.decay.warn_of_guess(self.group)
        self.belief.doubt = doubt

        def begin() -> None:
            with guard("increment"):
                before_step()
            with guard("increment"):
                self.checks = check()
                self._begin(measure())

        def end() -> None:
            step: HeadStep | None = None
            with guard("increment"):
                step = self._end(options_of(self.group))
            if step is None:
                self.forget()
            with guard("increment"):  # also of a step that could not be noted: other ranks wait for this one there
                on_step(step or HeadStep("", {}))

        return self.steps.watch(begin, end, after_closure=after_closure)

    def moved_unseen(self) -> bool:
        """Whether an update that no hook saw moved this rank's weights."""
        return self._next is not None and self._kept.are_others()

    def unseen(self) -> HeadStep:
        """Return the step of an update that no hook saw. Called on every rank if it moved the weights of one."""
        now = options_of(self.group)
        candidates = [now] if self._next is None else [self._next, now]
        tells = len(candidates) > 1 and self.from_state and not self._by_state.is_plain_sgd(self.last)
        step = self._end(self._by_state.likelier(candidates, self._kept, self.decay) if tells else candidates[0])
        if not self.belief.by_update and not self.from_state:
            self.belief.follow_updates(f"no hook saw the step of {type(self.optimizer).__name__}")
        return step

    def finish_update(self, *, measure: bool) -> None:
        """Note that an update is over, and whether the next will be measured."""
        if self.checks:  # the next check is of other rows
            self._kept.compare()
            self._kept.go_on()
            self._kept.see()
        self._kept.begin()
        self._next = options_of(self.group)
        if self.belief.by_update:
            self._by_weights.keep(wanted=measure)

    def stands(self) -> bool:
        """Whether the weights are those that the last step left; if not, updates are measured from now on.

        Without checks nothing is compared here: what has moved them is still seen when the next step begins.
        """
        if not self.checks:
            return True
        self._kept.compare()
        if not self.belief.by_update and self._kept.moved():
            self.belief.follow_updates(self.belief.others_move)
            return False
        return True

    def forget(self) -> None:
        """Forget the last step."""
        self.last = self._next = None
        self._by_weights.forget()
        self._kept.forget()

    def _begin(self, measured: bool) -> None:
        """Keep what the step's increment needs of the weights before it."""
        starts_update, self._next, self.belief.found_out = self._next is not None, None, False
        if self.belief.by_update:
            if not starts_update:  # several steps to an update; the weights at the end of the last update are kept
                self._by_weights.keep(wanted=measured)
            return
        self._by_weights.forget()  # first: if anything fails here, those of an earlier step are no help
        self._kept.compare()
        if self.checks and self._kept.moved():
            self._kept.see()
            if self._has_stepped:
                self.belief.follow_updates(self.belief.others_move)
        self._kept.begin()
        if not self.from_state:
            self.last = None
        self._by_weights.keep(wanted=measured and (self.is_rounded or not self.from_state))
        if measured and self.checks and self.seen_dtype is not None:
            self._by_weights.keep_cast(self.seen_dtype)

    def _end(self, options: Group) -> HeadStep:
        """Note the step that was made."""
        group_lr = options.get("lr")
        options["lr"] = learning_rate(self.optimizer, options, state_of(self.optimizer, self.param))
        skipped, overflow = self._skipped()
        self.last, self._next, self._has_stepped = HeadStep(skipped, options, group_lr, overflow), None, True
        if self._by_state.note(self.last) and self.belief.trusts_state:
            self.belief.distrust(f"a step of {type(self.optimizer).__name__} clears its gradient")
        self._kept.see()
        return self.last

    # Increments

    @torch.no_grad()
    def form(self, out: Tensor | None = None) -> Increment | None:
        """Return the increment of the last step: after it, and before the next or a change of its gradient.

        Args:
            out: memory for S, used where it can be: on a CPU new memory costs more than S itself.

        Returns:
            The increment; None if the weights did something else than was believed before this step.

        Raises:
            RuntimeError: if there was no step, or it was not to be measured and has left nothing to form it from.
        """
        if self.last is None:
            raise RuntimeError("there has been no step to form an increment of")
        if self.last.skipped:
            return Increment(torch.zeros_like(self._weights(), dtype=compute_dtype(self.param)), 0.0)
        if self._by_weights.before is None and (self.belief.by_update or self.belief.found_out):
            return None
        if self.belief.by_update or not self.from_state:
            return self.stored()
        S = self._by_state.form(self.last, out)
        fresh = self._next is None and not self.steps.is_held  # or the rows of before the step are no longer kept
        if self.checks and fresh and not self._agrees(S, self.last):
            return None
        return self._rounded(S)

    @torch.no_grad()
    def form_believed(self) -> Increment:
        """Return the increment of the last step as the optimizer's state says it was, without a check."""
        if self.last is None or not self.from_state:
            raise RuntimeError("there has been no step whose increment can be formed from the optimizer's state")
        return self._rounded(self._by_state.form(self.last, None))

    def _rounded(self, S: Tensor) -> Increment:
        """Bound what is lost in weights of less than fp32."""
        return Increment(S, torch.finfo(self.param.dtype).eps * largest(self._weights()) if self.is_rounded else 0.0)

    @torch.no_grad()
    def stored(self) -> Increment:
        """Return the increment that the stored weights made in the last step: U' - c U."""
        before = self._by_weights.before
        if self.last is None or before is None:
            raise RuntimeError(
                f"the increment of {type(self.optimizer).__name__} is a difference of weights, and none were kept of"
                " before this step: it was not to be measured"
            )
        increment = self._by_weights.form(self.decay.share(self.last))
        if before.ndim == 2 and len(before) and self.checks and self.basis == "step" and not self.is_rounded:
            seen = self.decay.correct(self._kept.of(before), self._kept.of(increment.S), self.last)
            if seen:
                self.belief.doubt(seen)
                return self._by_weights.form(self.decay.share(self.last))
        return increment

    @torch.no_grad()
    def seen(self) -> Tensor | None:
        """Return the increment that a forward pass in less than the weights' precision sees, if it was to be measured.

        That is cast(U') - c cast(U): steps smaller than the spacing of the cast weights are not seen.
        """
        if self.last is None or self._by_weights.cast is None:
            return None
        return self._by_weights.form_cast(self.decay.share(self.last))

    @property
    def has_stored(self) -> bool:
        """Whether the weights of before the last step were kept."""
        return self.last is not None and self._by_weights.before is not None

    @torch.no_grad()
    def moved(self) -> tuple[Tensor, int]:
        """How many of this rank's weights are not what they were before the step, and how many there are."""
        return self._by_weights.moved()

    def _agrees(self, S: Tensor, last: HeadStep) -> bool:
        """Whether the rows that were kept moved as `S` says."""
        before = self._kept.before
        if before is None or not len(before):
            return True
        return self.belief.check(before, self._kept.now(), self._kept.of(S), self.decay.share(last))

    def _see_rows(self) -> None:
        """Take the rows as they are for those that the step left."""
        self._kept.see()

    def _watched(self) -> KeptRows:
        """The rows by which it is seen what moves the parameter."""
        return KeptRows(self._some_weights, len(self._weights()))

    def _some_weights(self, at: slice) -> Tensor:
        """Some of this rank's rows of the parameter, as they are now."""
        return self._weights()[at]

    def _weights(self) -> Tensor:
        """This rank's entries of the parameter, as they are now."""
        return self.rows.of(self.param.detach())

    def _skipped(self) -> tuple[str, Tensor | None]:
        """Why nothing moved, or empty; and what says so on the device, where that is read later."""
        if self.param.grad is None and not self._kept.stepped():  # or the step has cleared it
            return "no gradient", None
        overflow = getattr(self.optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer
        if self.reads_later and isinstance(overflow, Tensor):
            return "", overflow
        return "overflow" if overflow is not None and bool(overflow) else "", None
