"""Hugging Face's Trainer as a session of the monitor sees it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.nn import Module
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from hilbert_monitor.monitor.hidden_states import AutocastFactory
from hilbert_monitor.monitor.plain_loop import DEEPSPEED, PlainLoop, logged_numbers
from hilbert_monitor.runs.record import RunInfo, StepRecord


class TransformersLoop(PlainLoop):
    """A Trainer as a session sees it.

    Args:
        args: of the Trainer.
        state: of the Trainer.
        control: of the Trainer.
        trainer: it, where the callback is attached.
        logs: whether records go to the Trainer's loggers.
        model: that is trained.
        optimizer: that moves it.
        **arguments: those of `PlainLoop`.
    """

    def __init__(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        trainer: Trainer | None,
        *,
        logs: bool,
        model: Module,
        optimizer: Any,
        **arguments: Any,
    ) -> None:
        self._args, self.control, self._trainer, self._logs = args, control, trainer, logs
        super().__init__(
            model,
            optimizer,
            autocast=_autocast(args),
            first_step=state.global_step,
            last_step=state.max_steps,
            seed=args.seed,
            folder=args.output_dir or ".",
            **arguments,
        )
        self.validates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"

    def refusal(self) -> str:
        """Why nothing can be measured."""
        return DEEPSPEED if getattr(self._args, "deepspeed", None) else super().refusal()

    def describe(self) -> RunInfo:
        """Name the model's class, the arguments of the Trainer, the seed and the version."""
        return RunInfo(
            model=type(self.model).__name__,
            seed=self.seed,
            config=self._args.to_sanitized_dict(),
            versions={"transformers": transformers.__version__},
        )

    def log(self, record: StepRecord, *, final: bool) -> None:
        """Give what was measured exactly to the Trainer's loggers: every record would be a line on the screen.

        The Trainer's own `log` is called, as subclasses empty their metrics in theirs. It clears `control.should_log`,
        which is put back.
        """
        trainer = self._trainer
        if trainer is None or not self._logs or (record.diameter is None and record.perturbation_rms is None):
            return
        should_log = self.control.should_log
        Trainer.log(trainer, logged_numbers(record))
        self.control.should_log = trainer.control.should_log = should_log

    def make_checkpoint(self) -> Any:
        """Leave it to the Trainer."""
        return True

    def save_checkpoint(self, checkpoint: Any, path: str) -> None:
        """Ask the Trainer for a checkpoint of its own after this step."""
        self.control.should_save = True

    def stop(self) -> None:
        """End training after this step."""
        self.control.should_training_stop = True


def _autocast(args: TrainingArguments) -> AutocastFactory | None:
    """The context in which Accelerate runs the model's forward pass."""
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    return None if dtype is None else lambda: torch.autocast(args.device.type, dtype)
