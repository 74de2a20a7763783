"""What the monitor does in an update, counted: a head is trained on the emulated device, and measured there.

Counted at a small head. On an accelerator the number of kernels does not depend on the size of the head but through the
number of chunks, which is kept; bytes and FLOPs grow with the rows and the width, and so do the products of a search,
as far as optimizers' increments are alike at all sizes.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hilbert_monitor.geometry import RowShards, covering_radius, hilbert_perturbation, row_diameter, summarize_rows
from hilbert_monitor.geometry.arithmetic import MAX_BYTES
from hilbert_monitor.geometry.bracket import pending_bracket, row_diameter_bracket
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import CHECKED, Probe
from hilbert_monitor.optim import RowNorm
from hilbert_monitor.optim.pretraining import HEAD_LR, WEIGHT_DECAY

from .counts import Count, Counts
from .device import NAME, EmulatedDevice
from .ranks import in_emulated_ranks
from .synthetic import NextTokens, softmax_gradient

ROWS, WIDTH, PANEL = 8_192, 128, 1_024
"""The head that is counted, and the positions of its panel."""
UPDATES, BATCH = 20, 128


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does for a part of the monitor, and exchanges with the others."""

    count: Count
    collectives: float = 0.0
    received: float = 0.0
    """Bytes."""

    def __add__(self, other: Work) -> Work:
        return Work(self.count + other.count, self.collectives + other.collectives, self.received + other.received)

    def grown(self, entries: float) -> Work:
        """Return the work for so many times the entries of S. Kernels and waits stay as they are."""
        c = self.count
        count = Count(c.kernels, c.factorisations, c.waits, c.copies, entries * c.bytes, entries * c.flops)
        return Work(count, self.collectives, self.received)


@dataclass(frozen=True, slots=True)
class MonitorWork:
    """Work of a rank by part, for a head of ROWS x WIDTH."""

    forming: Work
    """Of S, with what else a probe does in an update: by one rank, which reads it later, or by several."""
    bracket: Work
    search: Work
    """D(S), the radius, and the rows of S and of the gradient."""
    panel: Work
    """The perturbation at PANEL positions, and the quality of the step; without the model's forward pass."""
    product: Work
    """Of these, the perturbation: it grows with the positions too."""


class _Head(nn.Module):
    """A language model that is an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.embed(tokens))  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Sample:
    """An update of a head: its matrices, and what a probe did in it beside the geometry."""

    S: Tensor
    G: Tensor
    forming: Count
    beside: Count
    """In every update, beside forming S."""
    beside_later: Count
    """The same in an update that is read later: no wait, and a copy behind an event."""
    beside_search: Count
    """In an update with D(S), besides."""
    quality: Count
    """Where the panel is due, with its geometry."""


@cache
def monitor_work(head: Literal["rownorm", "adamw"], *, ranks: int, autocast: bool, chunks: int = 1) -> MonitorWork:
    """Count the work of one rank in an update.

    Args:
        head: optimizer of the head.
        ranks: that share its rows.
        autocast: whether the forward pass casts the weights to bf16.
        chunks: number of parts in which a rank takes its rows, at the real size.
    """
    if another_accelerator():
        return _counted_apart(head, ranks, autocast, chunks)
    if chunks > 1:
        return _in_chunks(monitor_work(head, ranks=ranks, autocast=autocast), head, ranks, autocast, chunks)
    sample = _sample(head, autocast)
    product = _shared(ranks, sample.S, _perturbation)
    search = _shared(ranks, sample.S, _search) + _shared(ranks, sample.G, summarize_rows)
    return MonitorWork(
        forming=Work(sample.forming).grown(1 / ranks) + Work(sample.beside if ranks > 1 else sample.beside_later),
        bracket=_shared(ranks, sample.S, _bracket),
        search=search + Work(sample.beside_search),
        panel=product + Work(sample.quality).grown(1 / ranks),
        product=product,
    )


def another_accelerator() -> bool:
    """Whether this process has a GPU, which would no longer be torch's accelerator once it hears of an emulated one."""
    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


def _counted_apart(head: str, ranks: int, autocast: bool, chunks: int) -> MonitorWork:
    """Count in a process of its own, which sees no GPU."""
    command = [sys.executable, "-m", __name__, head, str(ranks), str(int(autocast)), str(chunks)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the monitor's work could not be counted: {done.stderr.strip().splitlines()[-1]}")
    return msgspec.json.decode(done.stdout, type=MonitorWork)


def _in_chunks(
    whole: MonitorWork, head: Literal["rownorm", "adamw"], ranks: int, autocast: bool, chunks: int
) -> MonitorWork:
    """Return work in which each pass over the rows is in chunks, each with as many kernels as the second of two.

    A search has about as many passes as a bracket.
    """
    rows = math.ceil(math.ceil(ROWS / ranks) / 2)
    in_two = _in_two(head, ranks, autocast, rows * 4 * 3 * 4 * WIDTH)
    more = Work(Count(kernels=(chunks - 1) * (in_two - whole.bracket.count.kernels)))
    return replace(whole, bracket=whole.bracket + more, search=whole.search + more)


@cache
def _in_two(head: Literal["rownorm", "adamw"], ranks: int, autocast: bool, max_bytes: int) -> float:
    return _shared(ranks, _sample(head, autocast).S, partial(_bracket, max_bytes=max_bytes)).count.kernels


def _bracket(S: Tensor | RowShards, max_bytes: int = MAX_BYTES) -> object:
    """Bound the diameter, as the monitor does on a device: without a wait where one rank has all rows."""
    if isinstance(S, RowShards):
        return row_diameter_bracket(S, max_bytes=max_bytes)
    return pending_bracket(S, max_bytes=max_bytes)


def _search(S: Tensor | RowShards) -> object:
    return covering_radius(S, diameter=row_diameter(S)), summarize_rows(S)


def _perturbation(S: Tensor | RowShards) -> object:
    return hilbert_perturbation(S, torch.randn(PANEL, WIDTH, device=NAME))


def _shared(ranks: int, S: Tensor, measure: Callable[[Any], object]) -> Work:
    """Return the work of the rank that has the most kernels."""
    works = in_emulated_ranks(ranks, S, lambda rows, device: measure(rows))
    busiest = max(works, key=lambda work: work.counts.total.kernels)
    return Work(busiest.counts.total, busiest.collectives, busiest.received)


@cache
def _sample(head: Literal["rownorm", "adamw"], autocast: bool) -> _Sample:
    """Train a head for some updates with a probe, and count the last ones at every cadence."""
    with torch.random.fork_rng(devices=[]), EmulatedDevice() as device:
        torch.manual_seed(0)
        model = _Head().to(device.device)
        optimizer, gradients = _optimizer(model, head), _gradients(model)
        text = torch.arange(PANEL)[None] % ROWS
        probe = Probe(
            model,
            optimizer,
            panel=Panel.of_tokens(text, PANEL),
            hidden=lambda model, tokens: model.embed(tokens),  # type: ignore[operator]
            diameter_every=0,
            perturbation_every=0,
            bracket=True,
            autocast=(lambda: torch.autocast(NAME, torch.bfloat16)) if autocast else None,
            strict=True,
        )
        for _ in range(UPDATES):
            next(gradients)
            optimizer.step()

        def counted(every: int, panel: int) -> Counts:
            probe.diameter_every, probe.perturbation_every = every, panel
            next(gradients)
            with device.counted() as counts:
                optimizer.step()
                probe.record()
            return counts

        with probe:
            for _ in range(CHECKED + 1):
                counted(0, 0)
            bounds, exact = (counted(every, 0).within("monitor/") for every in (0, 1))
            probe.immediate = False
            counted(0, 0)
            later = counted(0, 0).within("monitor/")
            probe.immediate = True
            next(gradients)
            optimizer.step()
            with device.counted() as forming:
                S = probe.increment()
            G = model.lm_head.weight.grad
            assert isinstance(S, Tensor)
            assert G is not None
            S, G, probe.bracket = S.cpu(), G.cpu(), False
            quality = counted(0, 1).within("monitor/", "geometry/")
    beside, beside_later = (count - forming.within("monitor/") for count in (bounds, later))
    return _Sample(S, G, forming.total, beside, beside_later, exact - bounds, quality)


def _optimizer(model: _Head, head: Literal["rownorm", "adamw"]) -> Optimizer:
    """Return the recipe's optimizer of the head, as it is on CUDA."""
    params, lr = [model.lm_head.weight], HEAD_LR[head] / WIDTH
    if head == "rownorm":
        return RowNorm(params, lr=lr)
    return AdamW(params, lr=lr, betas=(0.9, 0.999), eps=1e-10, weight_decay=WEIGHT_DECAY, fused=True)


def _gradients(model: _Head) -> Iterator[None]:
    """Give the head the gradient of another batch of made-up text, without end."""
    data = NextTokens(ROWS, WIDTH, torch.Generator().manual_seed(0), decay=1.0, shuffled=True)
    weight = model.lm_head.weight
    while True:
        gradient = softmax_gradient(weight.detach().cpu(), *data.sample(BATCH))
        weight.grad = gradient.to(weight.device)
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, ranks, autocast, chunks = sys.argv[1:]
    assert name in ("rownorm", "adamw")
    work = monitor_work(name, ranks=int(ranks), autocast=autocast == "1", chunks=int(chunks))
    print(msgspec.json.encode(work).decode())
