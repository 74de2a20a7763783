"""Loops of one's own around a small decoder, watched by the monitor."""

import torch

import hilbert_monitor
from hilbert_monitor.runs.reader import RunReader
from tests.support.decoders import Plain, loss_of, seeded


def watched(model=None, **options):
    """Return a run that is not yet started, its model and its optimizer."""
    model = model or seeded(Plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"run_dir": None, "strict": True, "diameter_every": 1} | options
    return hilbert_monitor.watch(model, optimizer, **options), model, optimizer


def steps(run, model, optimizer, numbers, **loss):
    """Make an update on the batch of each number, and tell the run of it."""
    for number in numbers:
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(**loss)


def only_run(folder):
    """The reader of the one run in a folder."""
    (run,) = folder.iterdir()
    return RunReader(run)
