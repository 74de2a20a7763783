"""The steps of one parameter, each seen once: after it was made, or before a `TrustRegion` writes to the weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer

from hilbert_monitor.runs.process_bound import ProcessBound

from .observers import Outcome, observe
from .owners import inner_optimizers
from .step_hooks import hook_steps


class SeenSteps(ProcessBound):
    """Sees the steps of an optimizer on one parameter, and what a `TrustRegion` makes of them; none in a forked child.

    Args:
        optimizer: that steps it.
        param: the parameter.
        on_held: called when a region has written to the weights.
    """

    def __init__(self, optimizer: Optimizer, param: Tensor, on_held: Callable[[], None]) -> None:
        self.optimizer, self.param, self._on_held = optimizer, param, on_held
        self.outcome: Outcome | None = None
        """Reads what a region made of the last step, where there is one."""
        self.has_holder = False
        """Whether a region holds the steps."""
        self.is_held = False
        """Whether the last step was held since it was seen, so that the weights say nothing of it any more."""
        self._see: Callable[[], None] | None = None

    def watch(
        self, begin: Callable[[], None], end: Callable[[], None], *, after_closure: Callable[[], bool]
    ) -> Callable[[], None]:
        """Call `begin` before each step and `end` once after it; return a function that ends it. See `hook_steps`."""
        is_open = False
        self.bind_to_process()

        def opened() -> None:
            nonlocal is_open
            if not self.inherited:
                is_open = True
                begin()

        def closed() -> None:
            nonlocal is_open
            if is_open and not self.inherited:  # or it was seen before somebody held it
                is_open = self.is_held = False
                end()

        self._see = closed
        leave = observe(self.param, self)
        optimizers = (self.optimizer, *inner_optimizers(self.optimizer, self.param))
        remove = hook_steps(optimizers, opened, closed, after_closure=after_closure)

        def stop() -> None:
            leave()
            remove()
            self._see = None

        return stop

    def before_hold(self) -> None:
        """See the step that was made, before a region writes to the weights."""
        if self._see is not None:
            self._see()

    def held(self, outcome: Outcome | None) -> None:
        """Note what was made of the step: the weights are believed to be as it left them."""
        if self.inherited:
            return
        self.outcome, self.has_holder, self.is_held = outcome, outcome is not None, outcome is not None
        self._on_held()
