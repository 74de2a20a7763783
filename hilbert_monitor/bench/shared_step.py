"""Times the measurement of one step by two ranks that share the rows of the head, beside one process.

As under DDP, every rank has the whole head and the state of its optimizer. A measurement is what the monitor does in a
step: it forms the increment from that state, then bounds its diameter or finds it. Of two ranks each forms half
of the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from hilbert_monitor.doctor.ranks import in_ranks
from hilbert_monitor.emulation.synthetic import NextTokens, softmax_gradient
from hilbert_monitor.geometry import row_diameter, row_diameter_bracket
from hilbert_monitor.monitor.head_rows import HeadRows, Matrix
from hilbert_monitor.monitor.head_step import HeadStep
from hilbert_monitor.monitor.ranks import Ranks
from hilbert_monitor.monitor.state_increment import StateIncrement
from hilbert_monitor.optim import RowNorm, options_of
from hilbert_monitor.optim.pretraining import HEAD_LR, WEIGHT_DECAY
from hilbert_monitor.pretrain.recipes import Head

from .measure import BenchResult

_PATIENCE = 3600.0
_CPU = torch.device("cpu")
_MEASURES: dict[str, Callable[[Matrix], float]] = {
    "bounds": lambda S: row_diameter_bracket(S).lower,
    "exact D(S)": lambda S: row_diameter(S).value,
}


def shared_step(head: Head, V: int, d: int, *, steps: int = 40, repeat: int = 15) -> Iterator[BenchResult]:
    """Time a measurement by two processes of one thread, beside one process.

    Two processes that measure a half each, and tell each other nothing, show what the machine has to give.
    """
    (clock, processor), _ = in_ranks(_time, head, V, d, steps, repeat, world=2, backend="gloo", patience=_PATIENCE)
    for name, (one, two, apart) in clock.items():
        share = processor[name][1] / processor[name][0]
        note = f"halves without a word between them {one / apart:.2f}x; a rank takes {share:.0%} of the processor time"
        case = f"{name}, {head} {V:,} x {d:,}"
        yield BenchResult("a step measured by two ranks", case, "two processes", two, "one process", one, note)


def _time(
    rank: int, world: int, head: Head, V: int, d: int, steps: int, repeat: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the shortest times on the clock and of the processor: of one process, of both together, of both apart."""
    optimizer, weight = _trained(head, V, d, steps)
    alone, together = (_Former(optimizer, weight, Ranks.of(_CPU, size)) for size in (1, world))
    clock, processor = {}, {}
    for name, measure in _MEASURES.items():
        calls: list[Callable[[], float]] = [
            lambda measure=measure: measure(alone.matrix()),  # type: ignore[misc]
            lambda measure=measure: measure(together.matrix()),  # type: ignore[misc]
            lambda measure=measure: measure(together.rows()),  # type: ignore[misc]
        ]
        best = [[math.inf, math.inf] for _ in calls]
        found = [0.0] * len(calls)
        for _ in range(repeat + 1):
            for which, call in enumerate(calls):
                dist.barrier()
                if which or rank == 0:
                    start = time.perf_counter(), time.thread_time()
                    found[which] = call()
                    taken = time.perf_counter() - start[0], time.thread_time() - start[1]
                    best[which] = [min(pair) for pair in zip(best[which], taken, strict=True)]
        if rank == 0 and name != "bounds" and not math.isclose(found[0], found[1], rel_tol=1e-12):
            raise AssertionError(f"two ranks found {found[1]}, and one process {found[0]}")
        clock[name], processor[name] = ([b[0] for b in best], [b[1] for b in best])
    return clock, processor


class _Former:
    """Forms the increment of the last step, or the rows of it that this rank measures."""

    def __init__(self, optimizer: Optimizer, weight: Tensor, ranks: Ranks) -> None:
        self._rows = HeadRows(weight, ranks)
        self._source = StateIncrement(optimizer, weight, self._rows)
        self._last = HeadStep("", options_of(optimizer.param_groups[0]))
        self._memory = torch.empty_like(self._rows.of(weight.detach()))

    def rows(self) -> Tensor:
        return self._source.form(self._last, self._memory)

    def matrix(self) -> Matrix:
        return self._rows.matrix(self.rows())


def _trained(head: Head, V: int, d: int, steps: int) -> tuple[Optimizer, Parameter]:
    """Train a head on synthetic next-token data, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    data = NextTokens(V, d, draw, decay=1.0, shuffled=True)
    weight = Parameter(0.02 * torch.randn(V, d, generator=draw))
    lr = HEAD_LR[head] / d
    optimizer: Optimizer = RowNorm([weight], lr=lr)
    if head == "adamw":
        optimizer = AdamW([weight], lr=lr, betas=(0.9, 0.999), eps=1e-10, weight_decay=WEIGHT_DECAY, fused=True)
    for _ in range(steps):
        weight.grad = softmax_gradient(weight.detach(), *data.sample(128))
        optimizer.step()
    return optimizer, weight
