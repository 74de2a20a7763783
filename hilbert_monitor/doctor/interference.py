"""Claim: a Lightning run has the same weights, optimizer state and random numbers with the monitor and without it."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from hilbert_monitor.monitor.callback import HilbertMonitor
from hilbert_monitor.monitor.runtime import keep_random_state
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain.recipe import HEADS, Head
from hilbert_monitor.runs.record import StepRecord

from .decoder import TinyDecoder, loss_of
from .device import CheckSizes
from .finding import Check, Outcome, outcome_of
from .samples import synthetic_text

V, WIDTH, PANEL = 307, 32, 100
Precision = Literal["32-true", "bf16-mixed"]
State = dict[str, list[Tensor]]
"""Tensors that a run leaves behind, by the name that the report gives them."""
Run = Callable[[bool], tuple[State, list[StepRecord]]]
"""Trains with the monitor (True) or without; returns the state afterwards, and the monitor's records."""


class LanguageModel(lightning.LightningModule):
    """A decoder trained by the paper's recipe, with dropout so that the device draws random numbers too."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.model, self.head = TinyDecoder(V, WIDTH, dropout=0.1), head

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(tokens)
        return logits

    def training_step(self, text: Tensor, _: int) -> Tensor:
        """Return the loss of a batch."""
        return loss_of(self, text)

    def validation_step(self, text: Tensor, _: int) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", loss_of(self, text))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the recipe's chain."""
        return pretraining_optimizer(self, self.head)


class RecordList:
    """A sink that collects records in a list."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, record: StepRecord) -> None:
        """Append the record."""
        self.records.append(record)


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield checks with both heads, in full and in mixed precision."""
    precisions: tuple[Precision, ...] = ("32-true", "bf16-mixed")
    for precision in precisions:
        for head in HEADS:
            run = partial(train, head, precision, device, sizes.updates)
            case = f"{sizes.updates} updates, {head} head, {precision}"
            yield Check("non-interference", case, partial(_check, run, precision, device))


def _check(run: Run, precision: Precision, device: torch.device) -> Outcome:
    if precision == "bf16-mixed" and not _has_bf16(device):
        return Outcome("skipped", "no bf16 autocast on this device")
    outcome = compare_runs(run)
    if outcome is None:
        with _deterministic():
            outcome = compare_runs(run, "with deterministic algorithms, ")
    return outcome or Outcome("skipped", "training itself is not reproducible on this device: two runs differ")


def compare_runs(run: Run, prefix: str = "") -> Outcome | None:
    """Compare a monitored run with one before and one after it. Return None if those two differ."""
    before, (watched, records), after = run(False)[0], run(True), run(False)[0]
    if differing(before, after):
        return None
    changed = differing(before, watched)
    if changed and differing(before, run(False)[0]):
        return None  # two runs had been equal by chance
    exact, panels = (sum(getattr(r, name) is not None for r in records) for name in ("diameter", "perturbation_rms"))
    return outcome_of(
        not changed and bool(exact and panels),
        f"{prefix}{', '.join(changed)}: DIFFERENT"
        if changed
        else f"{prefix}{', '.join(before)}: equal to the bit; {exact} diameters, {panels} panels",
    )


def differing(a: State, b: State) -> list[str]:
    """Return the names of the parts that differ in a bit."""
    return [name for name in a if len(a[name]) != len(b[name]) or not all(map(_same_bits, a[name], b[name]))]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def monitor(sink: RecordList) -> HilbertMonitor:
    """Return a monitor that measures often and raises errors."""
    return HilbertMonitor(panel_size=PANEL, diameter_every=2, perturbation_every=3, sinks=[sink], strict=True)


def train(
    head: Head, precision: Precision, device: torch.device, updates: int, watched: bool
) -> tuple[State, list[StepRecord]]:
    """Train a decoder under a real Trainer, from the same start every time."""
    sink = RecordList()
    trainer = _trainer(precision, device, updates, [monitor(sink)] if watched else [])
    model, text = LanguageModel(head), synthetic_text(V, 64, 17)
    with keep_random_state(seed=1):
        torch.manual_seed(1)  # on the device too
        trainer.fit(model, _loader(text, shuffle=True), _loader(text[:8]))
        return _state(model, trainer.optimizers[0], device), sink.records


def _loader(text: Tensor, *, shuffle: bool = False) -> DataLoader[Tensor]:
    rows: Any = text  # a tensor is a dataset of its rows
    return DataLoader(rows, batch_size=4, shuffle=shuffle)


def _trainer(precision: Precision, device: torch.device, updates: int, callbacks: list[Callback]) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator=device.type,
        devices=[device.index or 0] if device.type == "cuda" else 1,
        precision=precision,
        max_steps=updates,
        max_epochs=-1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=4,
        callbacks=callbacks,
        plugins=[LightningEnvironment()],  # also where the doctor runs on a cluster
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )


def _state(model: LanguageModel, optimizer: torch.optim.Optimizer, device: torch.device) -> State:
    moments = [v for state in optimizer.state_dict()["state"].values() for v in state.values()]
    state = {
        "weights": list(model.state_dict().values()),
        "optimizer state": [torch.as_tensor(v) for v in moments],
        "random numbers": [torch.get_rng_state(), torch.tensor(random.getstate()[1])],
    }
    if numpy := sys.modules.get("numpy.random"):
        state["random numbers"].append(torch.tensor(numpy.get_state()[1].tolist()))
    if device.type == "cuda":
        state["the device's random numbers"] = [torch.cuda.get_rng_state(device)]
    elif device.type == "mps":
        state["the device's random numbers"] = [torch.mps.get_rng_state()]
    return {name: [t.detach().cpu().clone() for t in tensors] for name, tensors in state.items()}


def _has_bf16(device: torch.device) -> bool:
    return torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.amp.is_autocast_available(device.type)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Ask torch for algorithms that give the same bits every time, where it has some."""
    on, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn)
