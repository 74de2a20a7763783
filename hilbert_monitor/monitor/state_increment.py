"""The increment of an optimizer's last step, formed again from its state: nothing is copied, nothing is lost.

Our own optimizers say what their last step was. For torch's Adam, AdamW and SGD there is a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import SGD, Optimizer

from hilbert_monitor.optim import Group, LastStep, MatrixOptimizer, Muon, RowNorm

from .decay import WeightDecay
from .formulas import formula_of, sgd, state_of, steps_as
from .head_rows import HeadRows
from .head_step import HeadStep
from .kept_rows import KeptRows
from .owners import group_of


class StateIncrement:
    """Forms the increment of one parameter from the state of its optimizer.

    Args:
        optimizer: the one that steps it.
        param: the parameter.
        rows: the entries of it that this rank has.
    """

    def __init__(self, optimizer: Optimizer, param: Tensor, rows: HeadRows) -> None:
        self.optimizer, self.param, self.rows = optimizer, param, rows
        self._gradient: LastStep | None = None

    @property
    def known(self) -> bool:
        """Whether the state says what a step was."""
        group = group_of(self.optimizer, self.param)
        if group is None:
            return False
        if isinstance(self.optimizer, MatrixOptimizer):
            alone = isinstance(self.optimizer, RowNorm) and group["center"] == "none"
            return alone or not self.rows.sharded  # of a shard others need what the ranks tell each other
        return formula_of(self.optimizer, group) is not None

    def note(self, last: HeadStep) -> bool:
        """Note the gradient of a step just made; return whether it is gone although the increment needs it."""
        if steps_as(self.optimizer, SGD) and self.param.grad is not None:
            self._gradient = LastStep.of(self.param.grad, last.options)
            return False
        return self.is_plain_sgd(last) and not last.skipped

    def is_plain_sgd(self, last: HeadStep | None) -> bool:
        """Whether a step is formed from its gradient alone."""
        return last is not None and formula_of(self.optimizer, last.options) is sgd and not last.options["momentum"]

    def needs_gradient(self, last: HeadStep | None) -> bool:
        """Whether a step cannot be formed any more once its gradient is cleared."""
        return self.is_plain_sgd(last) or isinstance(self.optimizer, Muon)

    @property
    def has_gradient(self) -> bool:
        """Whether the gradient is still that of the last step."""
        return self._gradient is not None and self._gradient.had(self.param.grad)

    def form(self, last: HeadStep, out: Tensor | None) -> Tensor:
        """Return this rank's entries of the increment of the last step.

        Args:
            last: that step.
            out: memory for it, used where it can be.
        """
        if isinstance(self.optimizer, MatrixOptimizer):
            return self.rows.of(self.optimizer.increment(self.param, out=out))
        if self.is_plain_sgd(last) and not self.has_gradient:
            raise RuntimeError("the gradient of the last step is gone or changed, and SGD's increment needs it")
        formula = formula_of(self.optimizer, last.options)
        assert formula is not None
        return formula(self.rows.of(self.param.detach()), self._state(self.rows.of), last.options, out)

    def likelier(self, candidates: Sequence[Group], kept: KeptRows, decay: WeightDecay) -> Group:
        """Return the hyperparameters with which some rows moved: a schedule may set them before a step or after it.

        Args:
            candidates: what they may be; the first if nothing can be said.
            kept: rows of before the step.
            decay: of the weights.
        """
        before = kept.before
        if before is None or not len(before):
            return candidates[0]

        def gap(options: Group) -> float:
            formula = formula_of(self.optimizer, options)
            if formula is None:
                return 0.0
            S = formula(before, self._state(lambda x: self.rows.of(x)[kept.at]), options, None)
            stayed = before.to(S.dtype) * (1 - decay.share(HeadStep("", options)))
            return float((kept.now().to(S.dtype) - stayed - S).abs().amax())

        return min(candidates, key=gap)

    def _state(self, of: Callable[[Tensor], Tensor]) -> Group:
        """The optimizer's state of some entries of the parameter; the gradient too."""
        state = {**state_of(self.optimizer, self.param), "gradient": self.param.grad}
        if isinstance(self.param.grad, Tensor) and self.param.grad.is_sparse:
            state["gradient"] = self.param.grad.to_dense()
        return {
            name: of(x) if isinstance(x, Tensor) and x.shape == self.param.shape else x for name, x in state.items()
        }
