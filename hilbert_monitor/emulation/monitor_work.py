"""What the monitor does in an update, counted: a head is trained on the emulated device, and measured there.

Counted at three small heads: the second has twice the rows of the first, the third twice the width too. On an
accelerator the number of kernels does not depend on the size of the head but through the number of chunks. Of the bytes
a part is that of every head, such as what an even sample of 2,048 rows takes, and a part grows with the rows; most grow
with the width, and those of norms and bounds do not. The three heads tell them apart. FLOPs are taken to grow with the
entries, and so do the products of a search, as far as optimizers' increments are alike at all sizes.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hilbert_monitor.geometry import RowShards, covering_radius, hilbert_perturbation, row_diameter, summarize_rows
from hilbert_monitor.geometry.arithmetic import MAX_BYTES
from hilbert_monitor.geometry.bracket import pending_bracket, row_diameter_bracket
from hilbert_monitor.monitor.agenda import CHECKED
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import RowNorm
from hilbert_monitor.optim.pretraining import HEAD_LR, WEIGHT_DECAY

from .counts import Count, Counts
from .device import NAME, EmulatedDevice
from .ranks import in_emulated_ranks
from .synthetic import NextTokens, softmax_gradient

ROWS, WIDTH, PANEL = 8_192, 128, 1_024
"""The smallest head that is counted, and the positions of its panel."""
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

    def __rmul__(self, factor: float) -> Work:
        return Work(factor * self.count, factor * self.collectives, factor * self.received)

    def grown(self, entries: float) -> Work:
        """Return the work for so many times the entries of S. Kernels and waits stay as they are."""
        c = self.count
        count = Count(c.kernels, c.factorisations, c.waits, c.copies, entries * c.bytes, entries * c.flops)
        return Work(count, self.collectives, self.received)

    def extended(self, twice: Work, wider: Work, rows: float, width: float, *, tiled: bool = False) -> Work:
        """Return the work for other rows and another width, in multiples of this one's.

        Waits are those for twice the rows, and so are kernels, unless there are more of them for more rows.

        Args:
            twice: the work for twice the rows.
            wider: the work for twice the rows and twice the width.
            rows: how many times the rows.
            width: how many times the width.
            tiled: whether rows are taken in tiles of one size, each with kernels of its own.
        """
        one, two, wide = self.count, twice.count, wider.count
        size = _line(one.bytes, two.bytes, rows) * _line(1, wide.bytes / max(two.bytes, 1), width)
        kernels = _line(one.kernels, two.kernels, rows) if tiled else two.kernels
        return replace(twice, count=replace(two, bytes=size, flops=rows * width * one.flops, kernels=kernels))


def _line(once: float, twice: float, number: float) -> float:
    """Return what a number of times takes, given what once and twice take; never less for more."""
    return once + (number - 1) * max(0.0, twice - once)


@dataclass(frozen=True, slots=True)
class MonitorWork:
    """Work of a rank by part."""

    forming: Work
    """Of S, with what else a probe does in an update: by one rank, which reads it later, or by several."""
    bracket: Work
    search: Work
    """D(S), the radius, and the rows of S and of the gradient."""
    quality: Work
    """Of the step, where the panel is due, without the model's forward pass."""
    product: Work
    """The perturbation of the panel."""


class _Head(nn.Module):
    """A language model that is an embedding and a head."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(rows, width), nn.Linear(width, rows, bias=False)

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
    """Where the panel is due, without the perturbation."""


@cache
def monitor_work(
    head: Literal["rownorm", "adamw"],
    *,
    ranks: int,
    autocast: bool,
    chunks: int = 1,
    positions: int = PANEL,
    rows: int = ROWS,
    width: int = WIDTH,
) -> MonitorWork:
    """Count the work of one rank in an update.

    Args:
        head: optimizer of the head.
        ranks: that share its rows.
        autocast: whether the forward pass casts the weights to bf16.
        chunks: number of parts in which a rank takes its rows, at the real size.
        positions: of the panel.
        rows: of the head that is counted.
        width: of that head.
    """
    if another_accelerator():
        return _counted_apart(head, ranks, autocast, chunks, positions, rows, width)
    if chunks > 1:
        work = monitor_work(head, ranks=ranks, autocast=autocast, positions=positions, rows=rows, width=width)
        bounds, search = _second_chunk(head, autocast, rows, width, ranks)
        return replace(work, bracket=work.bracket + (chunks - 1) * bounds, search=work.search + (chunks - 1) * search)
    sample = _sample(head, autocast, rows, width)
    search = _shared(ranks, sample.S, _search) + _shared(ranks, sample.G, summarize_rows)
    return MonitorWork(
        forming=Work(sample.forming).grown(1 / ranks) + Work(sample.beside if ranks > 1 else sample.beside_later),
        bracket=_shared(ranks, sample.S, _bracket),
        search=search + Work(sample.beside_search),
        quality=Work(sample.quality).grown(1 / ranks),
        product=_shared(ranks, sample.S, partial(_perturbation, positions=positions)),
    )


def grown_work(
    head: Literal["rownorm", "adamw"], *, ranks: int, autocast: bool, rows: int, width: int, positions: int
) -> MonitorWork:
    """Return the work of one rank in an update for a head of any size, from that counted for three small ones.

    Args:
        head: optimizer of the head.
        ranks: that share its rows.
        autocast: whether the forward pass casts the weights to bf16.
        rows: of the head.
        width: of the head.
        positions: of the panel.
    """
    chunks = math.ceil(rows / ranks / max(1, MAX_BYTES // (4 * 3 * 4 * width)))
    counted = partial(monitor_work, head, ranks=ranks, autocast=autocast, chunks=chunks, positions=positions)
    one, twice, wider = counted(), counted(rows=2 * ROWS), counted(rows=2 * ROWS, width=2 * WIDTH)

    def grown(name: str) -> Work:
        first, second, third = (getattr(work, name) for work in (one, twice, wider))
        whole: Work = first.extended(second, third, rows / ROWS, width / WIDTH, tiled=name == "product")
        return whole

    return MonitorWork(**{f.name: grown(f.name) for f in fields(MonitorWork)})


def another_accelerator() -> bool:
    """Whether this process has a GPU, which would no longer be torch's accelerator once it hears of an emulated one."""
    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


def _counted_apart(
    head: str, ranks: int, autocast: bool, chunks: int, positions: int = PANEL, rows: int = ROWS, width: int = WIDTH
) -> MonitorWork:
    """Count in a process of its own, which sees no GPU."""
    command = [sys.executable, "-m", __name__, head, *map(str, (ranks, int(autocast), chunks, positions, rows, width))]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the monitor's work could not be counted: {done.stderr.strip().splitlines()[-1]}")
    return msgspec.json.decode(done.stdout, type=MonitorWork)


@cache
def _second_chunk(
    head: Literal["rownorm", "adamw"], autocast: bool, rows: int, width: int, ranks: int
) -> tuple[Work, Work]:
    """Return the kernels that bounds and a search take more where each pass over the rows is in two chunks."""
    S = _sample(head, autocast, rows, width).S
    max_bytes = math.ceil(math.ceil(rows / ranks) / 2) * 4 * 3 * 4 * width

    def more(measure: Callable[..., object]) -> Work:
        two, one = (_shared(ranks, S, call).count for call in (partial(measure, max_bytes=max_bytes), measure))
        return Work(Count(kernels=max(0.0, two.kernels - one.kernels)))

    return more(_bracket), more(_search)


def _bracket(S: Tensor | RowShards, max_bytes: int = MAX_BYTES) -> object:
    """Bound the diameter, as the monitor does on a device: without a wait where one rank has all rows."""
    if isinstance(S, RowShards):
        return row_diameter_bracket(S, max_bytes=max_bytes)
    return pending_bracket(S, max_bytes=max_bytes)


def _search(S: Tensor | RowShards, max_bytes: int = MAX_BYTES) -> object:
    exact = row_diameter(S, max_bytes=max_bytes)
    return covering_radius(S, diameter=exact, max_bytes=max_bytes), summarize_rows(S)


def _perturbation(S: Tensor | RowShards, positions: int) -> object:
    return hilbert_perturbation(S, torch.randn(positions, S.shape[1], device=NAME))


def _shared(ranks: int, S: Tensor, measure: Callable[[Any], object]) -> Work:
    """Return the work of the rank that has the most kernels."""
    works = in_emulated_ranks(ranks, S, lambda rows, device: measure(rows))
    busiest = max(works, key=lambda work: work.counts.total.kernels)
    return Work(busiest.counts.total, busiest.collectives, busiest.received)


@cache
def _sample(head: Literal["rownorm", "adamw"], autocast: bool, rows: int, width: int) -> _Sample:
    """Train a head for some updates with a probe, and count the last ones at every cadence."""
    with torch.random.fork_rng(devices=[]), EmulatedDevice() as device:
        torch.manual_seed(0)
        model = _Head(rows, width).to(device.device)
        optimizer, gradients = _optimizer(model, head), _gradients(model)
        text = torch.arange(PANEL)[None] % rows
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
            probe.agenda.diameter_every, probe.agenda.perturbation_every = every, panel
            next(gradients)
            with device.counted() as counts:
                optimizer.step()
                probe.record()
            return counts

        with probe:
            for _ in range(CHECKED + 1):
                counted(0, 0)
            bounds, exact = (counted(every, 0).within("monitor/") for every in (0, 1))
            probe.agenda.immediate = False
            counted(0, 0)
            later = counted(0, 0).within("monitor/")
            probe.agenda.immediate = True
            next(gradients)
            optimizer.step()
            with device.counted() as forming:
                S = probe.increment()
            G = model.lm_head.weight.grad
            assert isinstance(S, Tensor)
            assert G is not None
            S, G, probe.agenda.bracket = S.cpu(), G.cpu(), False
            quality = counted(0, 1).within("monitor/", "geometry/")
    beside, beside_later = (count - forming.within("monitor/") for count in (bounds, later))
    product = _shared(1, S, partial(_perturbation, positions=PANEL)).count
    return _Sample(S, G, forming.total, beside, beside_later, exact - bounds, quality - product)


def _optimizer(model: _Head, head: Literal["rownorm", "adamw"]) -> Optimizer:
    """Return the recipe's optimizer of the head, as it is on CUDA."""
    params, lr = [model.lm_head.weight], HEAD_LR[head] / model.lm_head.in_features
    if head == "rownorm":
        return RowNorm(params, lr=lr)
    return AdamW(params, lr=lr, betas=(0.9, 0.999), eps=1e-10, weight_decay=WEIGHT_DECAY, fused=True)


def _gradients(model: _Head) -> Iterator[None]:
    """Give the head the gradient of another batch of made-up text, without end."""
    weight = model.lm_head.weight
    V, d = weight.shape
    data = NextTokens(V, d, torch.Generator().manual_seed(0), decay=1.0, shuffled=True)
    while True:
        gradient = softmax_gradient(weight.detach().cpu(), *data.sample(BATCH))
        weight.grad = gradient.to(weight.device)
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, (ranks, autocast, chunks, *sizes) = sys.argv[1], map(int, sys.argv[2:])
    positions, rows, width = sizes
    assert name in ("rownorm", "adamw")
    work = monitor_work(
        name, ranks=ranks, autocast=bool(autocast), chunks=chunks, positions=positions, rows=rows, width=width
    )
    print(msgspec.json.encode(work).decode())
