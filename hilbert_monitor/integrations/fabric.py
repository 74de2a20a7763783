"""Lightning Fabric: `watch` with what Fabric knows filled in, and a record of every step of its optimizer.

Example:
    ::

        model, optimizer = fabric.setup(model, optimizer)
        with hilbert_monitor.integrations.fabric.watch(fabric, model, optimizer, panel=validation_batches) as run:
            ...  # a loop of Fabric's as it is
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from hilbert_monitor.monitor.loop_arguments import check_loop_arguments
from hilbert_monitor.monitor.options import chosen_options, with_options
from hilbert_monitor.monitor.panel import GivenPanel
from hilbert_monitor.monitor.plain_loop import PlainLoop, logged_numbers
from hilbert_monitor.monitor.watch import Watch
from hilbert_monitor.runs.record import RunInfo, StepRecord


class FabricLoop(PlainLoop):
    """A loop of Fabric's, as a session sees it. It logs by `fabric.log_dict` and saves by `fabric.save`.

    Args:
        fabric: that set up the model.
        model: that `fabric.setup` returned.
        optimizer: that `fabric.setup` returned.
        checkpoint: what a checkpoint holds, for ``on_blowup="checkpoint"``.
        **arguments: those of `PlainLoop`.
    """

    def __init__(
        self, fabric: Fabric, model: Module, optimizer: Any, *, checkpoint: dict[str, Any] | None, **arguments: Any
    ) -> None:
        self._fabric, self._checkpoint = fabric, checkpoint
        precision: Any = fabric.strategy.precision
        super().__init__(
            model.module if isinstance(model, _FabricModule) else model,
            optimizer.optimizer,
            autocast=precision.forward_context,
            scaler=getattr(precision, "scaler", None),
            **arguments,
        )

    def describe(self) -> RunInfo:
        """Name the model's class, the seed and the version."""
        return RunInfo(
            model=type(self.model).__name__, seed=self.seed, versions={"lightning": str(lightning.__version__)}
        )

    def log(self, record: StepRecord, *, final: bool) -> None:
        """Give a record to Fabric's loggers."""
        self._fabric.log_dict(logged_numbers(record), step=record.step)

    def make_checkpoint(self) -> Any:
        """Return what `fabric.save` is given."""
        return self._checkpoint

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Save by Fabric, on every rank."""
        self._fabric.save(self.ranks.gather(path)[0], checkpoint)


class Gradients:
    """The gradients of an optimizer's parameters, as they are before a backward pass.

    Args:
        parameters: of the optimizer.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._before = [(p.grad, _version(p.grad)) for p in parameters]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Gradients:
        """Those of an optimizer."""
        return cls([p for group in optimizer.param_groups for p in group["params"]])

    def changed(self) -> bool:
        """Whether one of them has changed since, or may have: FSDP2 keeps what it accumulates elsewhere."""
        return any(
            isinstance(p, DTensor) or p.grad is not grad or _version(p.grad) != version
            for p, (grad, version) in zip(self._parameters, self._before, strict=True)
        )


def _version(gradient: Tensor | None) -> int:
    """A number that grows when a tensor is written to."""
    return 0 if gradient is None else gradient._version


class FabricWatch(Watch):
    """A run of Fabric's that is watched: its loss is read in `fabric.backward`, its steps after the optimizer's.

    The loss of a record is the sum of what `fabric.backward` was given since the step before, of passes that brought
    gradients to the optimizer's parameters: another model that the same Fabric trains has losses of its own.
    """

    def __init__(
        self, fabric: Fabric, optimizer: _FabricOptimizer, loop: PlainLoop, options: Any, **arguments: Any
    ) -> None:
        super().__init__(loop, options, **arguments)
        self._fabric, self._wrapper = fabric, optimizer
        self._backward: Callable[..., Any] | None = None
        self._noted: Callable[..., Any] | None = None

    def on_after_optimizer_step(self, **_: Any) -> None:
        """Make the record of a step. Fabric calls this."""
        super().step()

    def step(self, loss: Tensor | float | None = None, *, tokens: int | None = None) -> None:
        """Note tokens. Steps and losses are seen without this call, which other loops need."""
        self.accumulate(tokens=tokens)

    def start(self) -> FabricWatch:
        """Begin to watch."""
        super().start()
        if self._running and self._backward is None:
            self._backward = backward = self._fabric.backward

            def noted_backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
                guard, before = self.session.guard, None
                with guard("batch"):
                    if self._running:  # not closed before another run that was begun later
                        before = Gradients.of(self._wrapper.optimizer)
                backward(tensor, *args, **kwargs)
                with guard("batch"):  # gradients add up, and so do the parts of an update's loss
                    if before is not None and tensor.numel() == 1 and before.changed():
                        self.session.add_batch(loss=tensor.detach(), tokens=0)

            self._fabric.backward = self._noted = noted_backward  # type: ignore[method-assign]
            wrapper: Any = self._wrapper
            wrapper._callbacks = [*wrapper._callbacks, self]  # Fabric's list may be that of its other optimizers too
        return self

    def close(self, error: BaseException | None = None) -> None:
        """Let go of Fabric, and end as `Watch` does."""
        if self._backward is not None:
            if self._fabric.backward is self._noted:  # not one of a run that was begun later, which calls it
                self._fabric.backward = self._backward  # type: ignore[method-assign]
            callbacks: list[Any] = self._wrapper._callbacks
            self._wrapper._callbacks = [callback for callback in callbacks if callback is not self]
            self._backward = self._noted = None
        super().close(error)


@with_options
def watch(
    fabric: Fabric,
    model: Module,
    optimizer: Any,
    *,
    panel: GivenPanel | None = None,
    schedulers: Any = (),
    last_step: int | None = None,
    first_step: int = 0,
    state: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    seed: int | None = None,
    data_ranks: int | None = None,
    **options: Any,
) -> FabricWatch:
    """Watch a loop of Fabric's. Every step of the optimizer has its record, without a call in the loop.

    Args:
        fabric: that set up the model and the optimizer.
        model: as `fabric.setup` returned it.
        optimizer: as `fabric.setup` returned it.
        panel: validation text, see `hilbert_monitor.watch`.
        schedulers: of the learning rate, see `hilbert_monitor.watch`.
        last_step: the number of updates at the end of training.
        first_step: updates that were made before, in a run that goes on without a `state`.
        state: what `state_dict()` returned, for a run that goes on.
        checkpoint: what `fabric.save` is given for ``on_blowup="checkpoint"``, such as the model and the optimizer.
        seed: of the run.
        data_ranks: ranks that read data of their own, if they are not all.
        **options: those of `HilbertMonitor`, besides `progress_bar`.
    """
    if not isinstance(fabric, Fabric):
        raise TypeError(f"Fabric comes first, got {type(fabric).__name__}: watch(fabric, model, optimizer, ...)")
    if not isinstance(optimizer, _FabricOptimizer):
        raise TypeError(
            f"the optimizer has to be the one that fabric.setup returned, got {type(optimizer).__name__}: its steps are"
            " seen through it"
        )
    chosen = chosen_options("watch()", options)
    check_loop_arguments(
        model,
        optimizer,
        panel=panel,
        first_step=first_step,
        last_step=last_step,
        seed=seed,
        data_ranks=data_ranks,
    )
    if panel is None:
        chosen.perturbation_every = 0
    if checkpoint is None:
        checkpoint = {"model": model, "optimizer": optimizer}
    loop = FabricLoop(
        fabric,
        model,
        optimizer,
        checkpoint=checkpoint,
        schedulers=schedulers,
        last_step=last_step,
        first_step=first_step,
        seed=seed,
        folder=chosen.run_dir or ".",
    )
    run = FabricWatch(fabric, optimizer, loop, chosen, panel=panel, data_ranks=data_ranks)
    if state is not None:
        run.load_state_dict(state)
    return run
