"""`HilbertCallback`: Hugging Face's Trainer, and the trainers that TRL makes of it. Nothing is measured here.

What is particular about that Trainer, and what follows:

- Its callbacks are told of no loss, and its own average leaves out what is not finite. The loss of each micro-batch is
  read where it arises: from `training_step` of a trainer that the callback is attached to, otherwise from the output of
  the model.
- Loggers are callbacks that run before those of the user. To log, the callback has to be attached, and the Trainer's
  `log` is called (`TransformersLoop`).
- No callback hears of an exception. An attached one sees it leave `train`; another one, at the end of the process.
"""

from __future__ import annotations

import os
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hilbert_monitor.monitor.panel import GivenPanel, token_count
from hilbert_monitor.monitor.runtime import warn_user
from hilbert_monitor.monitor.session import MonitorOptions, chosen_options, with_options
from hilbert_monitor.monitor.watch import DEEPSPEED, PlainLoop, Watch, logged_numbers, sigterm_raises
from hilbert_monitor.runs.record import RunInfo, StepRecord

if TYPE_CHECKING:
    from hilbert_monitor.monitor.trust_region import TrustRegion

STATE = "hilbert_monitor.pt"
"""The file in a checkpoint's folder that has the state of the monitor."""
REGION = "trust_region.pt"
"""The file that has the state of a `TrustRegion`."""


class HilbertCallback(TrainerCallback):
    """Measures the step geometry of a model's head while a Trainer trains it, and changes nothing.

    Example:
        ``Trainer(model, args, ..., callbacks=[HilbertCallback()])``, or ``HilbertCallback().attach(trainer)``, which
        also logs by the Trainer's loggers and notes what ends a run by an exception.

    Args:
        panel: "loader" for the first positions that an evaluation delivers; token ids, batches or a DataLoader of your
            own; or the folder of a run that has a panel.
        **options: those of `HilbertMonitor`.
    """

    def __init__(self, *, panel: str | GivenPanel = "loader", **options: Any) -> None:
        if isinstance(panel, str):
            options["panel"] = panel
        self.options: MonitorOptions = chosen_options("HilbertCallback()", options)
        self._panel = None if isinstance(panel, str) else panel
        self.run: Watch | None = None
        """What watches the run, while it trains."""
        self._trainer: Trainer | None = None
        self._logs, self._resumed_from = False, ""
        self._validation = ""
        self._hook: Any = None

    def attach(self, trainer: Trainer, *, log: bool = True) -> HilbertCallback:
        """Become a callback of a trainer that sees more of it: the loss of every step, and exceptions.

        Args:
            trainer: before it trains.
            log: give what is measured exactly to the trainer's loggers.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(f"attach() takes a Trainer of transformers, got {type(trainer).__name__}")
        if self._trainer is trainer:
            return self
        self._trainer, self._logs = trainer, log
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._wrap(trainer)
        return self

    # Hooks of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Find the head and its optimizer, and begin to watch: on all ranks, or on none."""
        self._close(RuntimeError("train() did not come to its end"))  # an earlier one, of which nobody told
        loop = TransformersLoop(args, state, control, parts, log_to=self._trainer if self._logs else None)
        self.run = run = Watch(loop, self.options, panel=self._panel)
        self._validation = ""
        with run.session.guard("checkpoint"):
            self._load(args, state)
        run.start()
        self._collect()
        if not args.torch_compile:  # a hook would be compiled into the model
            self._hook = parts["model"].register_forward_hook(self._after_forward, with_kwargs=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Make the record of the step, and hand it on."""
        if self.run is not None:
            self._loop.control = control
            self.run.step()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Write a heartbeat."""
        if self.run is not None:
            self.run.heartbeat()

    def on_evaluate(self, *_: Any, metrics: dict[str, float] | None = None, **__: Any) -> None:
        """Note the loss of the first evaluation set, and make the panel of what was delivered."""
        if self.run is None:
            return
        session, ranks = self.run.session, self._loop.ranks
        with session.guard("panel"):
            if session.panels.panel is None and session.options.perturbation_every:
                session.panels.finish(ranks=ranks, reader=ranks.rank)
                session.update_panel()
            self._collect()
        losses = [name for name in metrics or {} if name.startswith("eval_") and name.endswith("loss")]
        self._validation = self._validation or next(iter(losses), "")
        if metrics and self._validation in metrics:
            self.run.log_validation(metrics[self._validation])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the state beside the checkpoint's own files."""
        if self.run is not None and state.is_world_process_zero:
            with self.run.session.guard("checkpoint"):
                folder = _checkpoint_folder(args, state)
                if os.path.isdir(folder):
                    torch.save(self.run.state_dict(), os.path.join(folder, STATE))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure the last update, and close the outputs."""
        self._close()

    # How

    @property
    def _loop(self) -> TransformersLoop:
        assert self.run is not None
        loop = self.run.loop
        assert isinstance(loop, TransformersLoop)
        return loop

    def _close(self, error: BaseException | None = None) -> None:
        run, self.run = self.run, None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if run is not None:
            run.close(error)

    def _wrap(self, trainer: Trainer) -> None:
        """See what goes into `train`, what leaves it, and what `training_step` returns."""
        train, training_step = trainer.train, trainer.training_step

        @wraps(train)
        def noted_train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._resumed_from = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else ""
            with sigterm_raises():
                try:
                    return train(resume_from_checkpoint, *args, **kwargs)
                except BaseException as error:
                    self._close(error)
                    raise

        @wraps(training_step)
        def noted_training_step(model: Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            tokens = token_count(inputs)
            loss: Tensor = training_step(model, inputs, *args, **kwargs)
            self._add_part(loss, tokens)
            return loss

        trainer.train, trainer.training_step = noted_train, noted_training_step  # type: ignore[method-assign]

    def _after_forward(self, module: Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Read the loss of a forward pass in training, and collect what an evaluation delivers."""
        run = self.run
        if run is None or torch.compiler.is_compiling():
            return
        with run.session.guard("batch"):
            if not module.training:
                if "labels" in kwargs:  # not a step of a generation
                    batch = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
                    run.session.panels.offer(batch)
            elif self._trainer is None:
                loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
                tokens = token_count(kwargs)
                if kwargs.get("num_items_in_batch") is not None:  # divided by what all micro-batches have
                    self._add_part(loss, tokens)
                else:
                    run.accumulate(loss, tokens=tokens)

    def _collect(self) -> None:
        assert self.run is not None
        if self.run.session.options.perturbation_every:
            self.run.session.panels.collect()

    def _add_part(self, loss: Any, tokens: int) -> None:
        """Note a micro-batch whose loss is a part of the update's."""
        if self.run is not None:
            self.run.session.add_batch(loss=loss, tokens=tokens * self._loop.ranks.world)

    def _load(self, args: TrainingArguments, state: TrainerState) -> None:
        """Go on counting where the run was saved, if it goes on."""
        assert self.run is not None
        folders = [self._resumed_from, _checkpoint_folder(args, state)] if state.global_step else []
        paths = [os.path.join(folder, STATE) for folder in folders if folder]
        path = next((path for path in paths if os.path.isfile(path)), None)
        if path is None:
            return
        try:
            saved = torch.load(path, weights_only=True)
        except Exception as error:  # whatever a damaged file makes of the unpickler, which says a page
            why = f"{path} cannot be read ({type(error).__name__})"
            raise ValueError(f"{why}: the run goes on in a folder of its own, and counts its tokens anew") from None
        self.run.load_state_dict(saved)


with_options(HilbertCallback)


class TrustRegionCallback(TrainerCallback):
    """Lets a `TrustRegion` hold the steps of a Trainer's head.

    Example:
        ``Trainer(model, args, ..., callbacks=[HilbertCallback(), TrustRegionCallback(TrustRegion(limit=0.02))])``
    """

    def __init__(self, region: TrustRegion) -> None:
        self.region = region

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Find the head and its optimizer, and hold steps; continue the counts of a run that is resumed."""
        if getattr(args, "deepspeed", None):
            raise ValueError("TrustRegion cannot hold a head under DeepSpeed, which steps no optimizer of torch's")
        if state.global_step:
            path = os.path.join(_checkpoint_folder(args, state), REGION)
            try:
                self.region.load_state_dict(torch.load(path, weights_only=True))
            except Exception as error:  # of a damaged file, or of a checkpoint in another folder
                self.region.step = state.global_step
                why = f"{path} cannot be read ({type(error).__name__})"
                warn_user(f"{why}: TrustRegion resumes at step {state.global_step}, and counts its held steps anew")
        self.region.watch(parts["model"], parts["optimizer"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the region's counts in the checkpoint's folder."""
        folder = _checkpoint_folder(args, state)
        if state.is_world_process_zero and os.path.isdir(folder):
            torch.save(self.region.state_dict(), os.path.join(folder, REGION))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Detach."""
        self.region.detach()


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(args.output_dir or ".", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


class TransformersLoop(PlainLoop):
    """A Trainer as a session sees it, with model and optimizer in `parts`. The loggers of `log_to` get the records."""

    def __init__(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        parts: dict[str, Any],
        log_to: Trainer | None,
    ) -> None:
        self._args, self.control, self._log_to = args, control, log_to
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        super().__init__(
            parts["model"],
            parts["optimizer"],
            schedulers=parts.get("lr_scheduler"),
            autocast=None if dtype is None else lambda: torch.autocast(args.device.type, dtype),
            first_step=state.global_step,
            last_step=state.max_steps,
            seed=args.seed,
            folder=args.output_dir or ".",
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

    def log(self, record: StepRecord, *, behind: int, final: bool) -> None:
        """Give what was measured exactly to the Trainer's loggers: every record would be a line on the screen.

        The Trainer's own `log` is called, as subclasses empty their metrics in theirs. It clears `control.should_log`,
        which is put back.
        """
        trainer = self._log_to
        if trainer is None or (record.diameter is None and record.perturbation_rms is None):
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
