"""The increment S of one optimizer step on one parameter, without decoupled weight decay: U' = c U + S.

Our own optimizers say what their last step was. For torch's Adam, AdamW and SGD it is formed again from their state, so
that nothing is copied and nothing lost to cancellation. For every other optimizer it is the difference of the weights,
which takes a copy of U on the steps that are measured and is exact to the rounding of U.

What is believed is compared with what the weights did, on a few hundred rows of the first steps and of some later ones.
Where the two part, the difference of the weights is taken from then on: that of a step, or, where something else moves
the weights as well (Lookahead, a patched step, weights that are swapped), that of a whole update.

Where the rows of the head are measured by several ranks, each rank forms and keeps its own rows alone; see `HeadRows`.
What one rank finds out, all come to know through `belief`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.optim import Group, options_of

from .decay import Decay, WeightDecay
from .device_numbers import reads_later
from .formulas import state_of
from .head_rows import HeadRows
from .head_step import HeadStep, learning_rate
from .kept_rows import KeptRows
from .observers import Outcome, observe
from .owners import group_of, inner_optimizers, stepping_optimizer
from .ranks import Ranks
from .state_increment import StateIncrement
from .step_hooks import hook_steps

Basis = Literal["state", "step", "update"]
"""What an increment is formed from: the optimizer's state, or the weights around its step, or around an update."""

PARTED = 1e-3
"""Difference between a believed and a real step, as a share of the step, from which on the belief is given up."""


@dataclass(frozen=True, slots=True)
class Increment:
    """The increment of a step, and how far it may be from what the stored weights did."""

    S: Tensor
    """This rank's entries, laid out as those of the parameter, in fp32 or better."""
    rounding: float | Tensor
    """Bound on the difference between an entry of S and the change of the stored weight, which is rounded: on the
    device of S where that is an accelerator. Zero where S was formed from state and U has at least fp32."""


class IncrementSource:
    """Tells what each step of an optimizer does to one of its parameters.

    Args:
        optimizer: a torch optimizer, or what wraps one; of a ChainedOptimizer the one that owns the parameter is
            watched.
        param: a parameter of it.
        decay: how an unknown optimizer uses weight_decay. Without it "decoupled" is assumed, with a warning.
        rows: the entries of the parameter that this rank measures; by default all that this process has.
    """

    def __init__(
        self, optimizer: Optimizer, param: Tensor, *, decay: Decay | None = None, rows: HeadRows | None = None
    ) -> None:
        self.optimizer = stepping_optimizer(optimizer, param)
        self.param = param
        self.rows = rows or HeadRows(param, Ranks.of(param.device, 1))
        self._by_state = StateIncrement(self.optimizer, param, self.rows)
        self.last: HeadStep | None = None
        self.decay = WeightDecay(self.optimizer, decay)
        self._kept = self._watched()
        self._trusted, self._by_update = True, False
        self.checks = True
        """Whether what is believed of the step is compared with what the weights did."""
        self._has_stepped = False  # before the first step anybody may load other weights
        self._found_out = False  # in this step: the weights of before it were not kept
        self.reads_later = False
        """Whether the next step asks nothing of the device: its `HeadStep` says what is to be read."""
        self._before: Tensor | None = None
        self.seen_dtype: torch.dtype | None = None
        """What the forward pass casts the weights to, if it is less than they have."""
        self._seen_before: Tensor | None = None
        self._next: Group | None = None  # options at the end of the last update, if the next step starts there
        self._doubt: Callable[[str], None] = lambda text: None
        self.outcome: Outcome | None = None
        """Reads what a `TrustRegion` made of the last step, where there is one."""
        self._has_holder = False
        self._is_held = False  # since the step was seen, so that the weights say nothing of it any more
        self._see_step: Callable[[], None] | None = None
        _ = self.group  # refuses a parameter of somebody else

    # What is known

    @property
    def basis(self) -> Basis:
        """What the increment is formed from."""
        return "update" if self._by_update else "state" if self.from_state else "step"

    @property
    def from_state(self) -> bool:
        """Whether the increment is formed without a copy of the weights."""
        return self._trusted and self._by_state.known

    @property
    def is_rounded(self) -> bool:
        """Whether the weights have less than fp32, so that a step that is stored is not the one that was intended."""
        return self.param.dtype.itemsize < 4

    @property
    def fleeting(self) -> bool:
        """Whether the increment is lost soon: formed from the gradient, or from weights that are held."""
        if self._has_holder and not self.from_state:
            return True  # the weights tell it until they are held
        return self.from_state and self._by_state.needs_gradient(self.last)

    @property
    def formable(self) -> bool:
        """Whether the increment of the last step can still be formed: nothing has moved the weights since."""
        if self.last is None or self._kept.are_others():
            return False
        if self.from_state and self._by_state.is_plain_sgd(self.last):
            return self._by_state.has_gradient
        if self._by_update:
            return self._before is not None and self._next is None
        return self.from_state or self._before is not None

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
        self._doubt = doubt

        open_step = False

        def begin() -> None:
            nonlocal open_step
            open_step = True
            with guard("increment"):
                before_step()
            with guard("increment"):
                self.checks = check()
                self._begin(measure())

        def end() -> None:
            nonlocal open_step
            if not open_step:  # it was seen before somebody held it
                return
            open_step, self._is_held = False, False
            step: HeadStep | None = None
            with guard("increment"):
                step = self._end(options_of(self.group))
            if step is None:
                self.forget()
            with guard("increment"):  # also of a step that could not be noted: other ranks wait for this one there
                on_step(step or HeadStep("", {}))

        optimizers = (self.optimizer, *inner_optimizers(self.optimizer, self.param))
        self._see_step = end
        leave = observe(self.param, self)
        remove = hook_steps(optimizers, begin, end, after_closure=after_closure)

        def stop() -> None:
            leave()
            remove()
            self._see_step = None

        return stop

    def before_hold(self) -> None:
        """See the step that was made, before a `TrustRegion` writes to the weights."""
        if self._see_step is not None:
            self._see_step()

    def held(self, outcome: Outcome | None) -> None:
        """Note what was made of the step: the weights are believed to be as it left them."""
        self.outcome, self._has_holder, self._is_held = outcome, outcome is not None, outcome is not None
        self._kept.see()

    def moved_unseen(self) -> bool:
        """Whether an update that no hook saw moved this rank's weights."""
        return self._next is not None and self._kept.are_others()

    def unseen(self) -> HeadStep:
        """Return the step of an update that no hook saw. Called on every rank if it moved the weights of one."""
        now = options_of(self.group)
        step = self._end(now if self._next is None else self._likelier(self._next, now))
        if not self._by_update and not self.from_state:
            self._follow_updates(f"no hook saw the step of {type(self.optimizer).__name__}")
        return step

    def finish_update(self, *, measure: bool) -> None:
        """Note that an update is over, and whether the next will be measured."""
        if self.checks:  # the next check is of other rows
            self._kept.compare()
            self._kept.go_on()
            self._kept.see()
        self._kept.begin()
        self._next = options_of(self.group)
        if self._by_update:
            self._before = self._weights().clone() if measure else None

    def stands(self) -> bool:
        """Whether the weights are those that the last step left; if not, updates are measured from now on.

        Without checks nothing is compared here: what has moved them is still seen when the next step begins.
        """
        if not self.checks:
            return True
        self._kept.compare()
        if not self._by_update and self._kept.moved():
            self._follow_updates(self._elsewhere())
            return False
        return True

    @property
    def belief(self) -> list[float]:
        """How increments are formed, in numbers of which the least over the ranks is what all of them believe."""
        return [float(self._trusted), float(not self._by_update), self.decay.belief]

    @belief.setter
    def belief(self, numbers: list[float]) -> None:
        trusted, by_steps, self.decay.belief = numbers
        if self._trusted and not trusted:
            self._distrust("the rows of another rank moved otherwise than the optimizer's state says")
        if not self._by_update and not by_steps:
            self._follow_updates(f"on another rank, {self._elsewhere()}")

    def take_rows(self, rows: HeadRows) -> None:
        """Measure other entries of the parameter from now on."""
        self.forget()
        self.rows = self._by_state.rows = rows
        self._kept = self._watched()

    def forget(self) -> None:
        """Forget the last step."""
        self._before = self._seen_before = self.last = self._next = None
        self._kept.forget()

    def _begin(self, measured: bool) -> None:
        """Keep what the step's increment needs of the weights before it."""
        starts_update, self._next, self._found_out = self._next is not None, None, False
        if self._by_update:
            if not starts_update:  # several steps to an update; the weights at the end of the last update are kept
                self._before = None
                self._before = self._weights().clone() if measured else None
            return
        self._before = self._seen_before = None  # first: if anything fails here, those of an earlier step are no help
        self._kept.compare()
        if self.checks and self._kept.moved():
            self._kept.see()
            if self._has_stepped:
                self._follow_updates(self._elsewhere())
        self._kept.begin()
        if not self.from_state:
            self.last = None
        if measured and (self.is_rounded or not self.from_state):
            self._before = self._weights().clone()
        if measured and self.checks and self.seen_dtype is not None:
            self._seen_before = self._weights().to(self.seen_dtype)

    def _end(self, options: Group) -> HeadStep:
        """Note the step that was made."""
        group_lr = options.get("lr")
        options["lr"] = learning_rate(self.optimizer, options, state_of(self.optimizer, self.param))
        skipped, overflow = self._skipped()
        self.last, self._next, self._has_stepped = HeadStep(skipped, options, group_lr, overflow), None, True
        if self._by_state.note(self.last) and self._trusted:
            self._distrust(f"a step of {type(self.optimizer).__name__} clears its gradient")
        self._kept.see()
        return self.last

    def _likelier(self, *candidates: Group) -> Group:
        """The options with which the rows that were kept moved: a schedule may set them before a step or after it."""
        before = self._kept.before
        if before is None or not len(before) or not self.from_state or self._by_state.is_plain_sgd(self.last):
            return candidates[0]

        def gap(options: Group) -> float:
            S = self._by_state.of_rows(before, options, self._kept.at)
            if S is None:
                return 0.0
            kept = before.to(S.dtype) * (1 - self.decay.share(HeadStep("", options)))
            return float((self._kept.now().to(S.dtype) - kept - S).abs().amax())

        return min(candidates, key=gap)

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
        if self._before is None and (self._by_update or self._found_out):
            return None
        if self._by_update or not self.from_state:
            return self.stored()
        S = self._by_state.form(self.last, out)
        fresh = self._next is None and not self._is_held  # or the rows of before the step are no longer kept
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
        return Increment(S, torch.finfo(self.param.dtype).eps * _largest(self._weights()) if self.is_rounded else 0.0)

    @torch.no_grad()
    def stored(self) -> Increment:
        """Return the increment that the stored weights made in the last step: U' - c U."""
        if self.last is None or self._before is None:
            raise RuntimeError(
                f"the increment of {type(self.optimizer).__name__} is a difference of weights, and none were kept of"
                " before this step: it was not to be measured"
            )
        U, before, dtype = self._weights(), self._before, compute_dtype(self.param)
        moved = torch.sub(U.to(dtype), before.to(dtype))  # near U the subtraction is exact
        S = moved + before.to(dtype) * self.decay.share(self.last)
        if U.ndim == 2 and len(U) and self.checks and self.basis == "step" and not self.is_rounded:
            seen = self.decay.correct(self._kept.of(before), self._kept.of(S), self.last)
            if seen:
                self._doubt(seen)
                S = moved + before.to(dtype) * self.decay.share(self.last)
        return Increment(S, 2 * torch.finfo(U.dtype).eps * _largest(U, before))

    @torch.no_grad()
    def seen(self) -> Tensor | None:
        """Return the increment that a forward pass in less than the weights' precision sees, if it was to be measured.

        That is cast(U') - c cast(U): steps smaller than the spacing of the cast weights are not seen.
        """
        before = self._seen_before
        if before is None or self.last is None:
            return None
        after, dtype = self._weights().to(before.dtype), compute_dtype(self.param)
        return (after.to(dtype) - before.to(dtype)).add_(before.to(dtype) * self.decay.share(self.last))

    @property
    def has_stored(self) -> bool:
        """Whether the weights of before the last step were kept."""
        return self.last is not None and self._before is not None

    @torch.no_grad()
    def moved(self) -> tuple[Tensor, int]:
        """How many of this rank's weights are not what they were before the step, and how many there are."""
        assert self._before is not None
        return (self._before != self._weights()).sum(), self._before.numel()

    def _agrees(self, S: Tensor, last: HeadStep) -> bool:
        """Whether the rows that were kept moved as `S` says."""
        before = self._kept.before
        if before is None or not len(before):
            return True
        after, step = self._kept.now().to(S.dtype), self._kept.of(S)
        moved = after - before.to(S.dtype) * (1 - self.decay.share(last))
        largest = torch.maximum(after.abs().amax(), before.abs().amax().to(S.dtype))
        numbers = ((moved - step).abs().amax(), step.abs().amax(), moved.abs().amax(), largest)
        difference, believed, real, weight = torch.stack(numbers).tolist()
        allowed = PARTED * max(believed, real) + 4 * torch.finfo(self.param.dtype).eps * weight
        if not difference > allowed:  # also where something is nan
            return True
        kind = type(self.optimizer).__name__
        self._distrust(
            f"a step of {kind} moved a weight {difference:.3g} away from where its state says, by {real:.3g}"
        )
        return False

    def _watched(self) -> KeptRows:
        """The rows by which it is seen what moves the parameter."""
        return KeptRows(self._some_weights, len(self._weights()))

    def _some_weights(self, at: slice) -> Tensor:
        """Some of this rank's rows of the parameter, as they are now."""
        return self.rows.some(self.param.detach(), at)

    def _weights(self) -> Tensor:
        """This rank's entries of the parameter, as they are now."""
        return self.rows.of(self.param.detach())

    def _distrust(self, why: str) -> None:
        self._trusted, self._found_out = False, True
        self._doubt(f"{why}: the increment is the difference of the weights from now on")

    def _follow_updates(self, why: str) -> None:
        self._by_update, self._before = True, None
        self._doubt(f"{why}: the increment is the difference of the weights over whole updates from now on")

    def _elsewhere(self) -> str:
        return (
            f"something besides the step of {type(self.optimizer).__name__} moves the head's weights (Lookahead, a"
            " patched step, swapped or projected weights?)"
        )

    def _skipped(self) -> tuple[str, Tensor | None]:
        """Why nothing moved, or empty; and what says so on the device, where that is read later."""
        if self.param.grad is None and not self._kept.stepped():  # or the step has cleared it
            return "no gradient", None
        overflow = getattr(self.optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer
        if self.reads_later and isinstance(overflow, Tensor):
            return "", overflow
        return "overflow" if overflow is not None and bool(overflow) else "", None


def _largest(*matrices: Tensor) -> float | Tensor:
    """The largest |entry|, zero if there is none; on an accelerator, which is not waited for, in fp64."""
    maxima = [x.abs().amax() for x in matrices if x.numel()]
    if not maxima:
        return 0.0
    largest = torch.stack(maxima).amax()
    return largest.double() if reads_later(largest.device) else float(largest)
