"""`TrustRegion`: Lightning's hooks over a `Region`. Nothing is held here."""

from __future__ import annotations

from typing import Any

from .probe import QUIET
from .region import Region
from .runtime import warn_user

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # a loop of one's own, or another trainer, needs none of it
    Callback = object  # type: ignore[assignment,misc]


class TrustRegion(Region, Callback):
    """Holds each step of an LM head to a limit of its diameter D(S), and leaves out steps that are not finite.

    After ``optimizer.step()``, and before anything sees the weights, U' = (1 - lr decay) U + S becomes
    (1 - lr decay) U + S_held with D(S_held) <= limit. A step whose centred rows are all in the ball of radius limit / 2
    is left to the bit. Weight decay and the backbone are outside: what they do to the log-odds is not held.

    Example:
        ``Trainer(callbacks=[HilbertMonitor(), TrustRegion(limit=0.02)])`` in Lightning. In a loop of one's own::

            with TrustRegion(limit=0.02).watch(model, optimizer) as region:
                for batch in batches:
                    ...
                    optimizer.step()
                    print(region.last.held, region.last.asked_upper, region.last.tokens)

    `last` is a frozen `RegionStep`: step (from 1), limit, asked_lower and asked_upper (bounds of the diameter that the
    optimizer made), made_upper, held and rows (how many rows were held, of how many), tokens (those held most), and
    left_out. `clipped` and `left_out` count steps. The padding of a head is held with it, and a bias that is trained
    extends the rows, as it does in the records of `HilbertMonitor`.

    Args:
        limit: largest D(S) that a step may have, or a function of the step's number, from 1. Infinity holds nothing.
        nats: in place of a limit, how far a step may move the log-odds of two tokens, at any hidden state of norm H.
        hidden_norm: H. By default sqrt(d) times the largest gain behind a final RMSNorm, and elsewhere the largest norm
            that the head has been given so far.
        how: "rows" projects the centred rows of S onto the ball of radius limit / 2; "scale" scales all of S by
            limit / D(S), which takes a search for D(S) in every step.
        head: the LM head, its name or that of its weight; by default it is looked for.
        decay: how an optimizer that is not known uses weight_decay.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        stop_after: steps in a row with gradients that are not finite, after which NonFiniteGradients is raised.
    """

    _updates = _seen = _unseen = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the head and its optimizer, and begin to hold."""
        if any(kind.__name__ == "FSDPStrategy" for kind in type(trainer.strategy).__mro__):
            raise ValueError(
                "TrustRegion cannot hold a head under Lightning's FSDPStrategy, which flattens its rows: use"
                " ModelParallelStrategy, with fully_shard in configure_model"
            )
        self.attach(pl_module, trainer.optimizers)
        self._updates, self._seen, self._unseen = trainer.global_step, self.step, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Say so if updates pass that no hook has seen."""
        if trainer.global_step > self._updates and pl_module.automatic_optimization and self.step == self._seen:
            self._unseen += 1
            if self._unseen == QUIET and trainer.global_rank == 0:
                warn_user(f"TrustRegion saw no step of the head's optimizer in {QUIET} updates: is it compiled?")
        self._updates = trainer.global_step

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Let go of the optimizer."""
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the optimizer."""
        self.detach()
