"""`TrustRegion`: holds each step of an LM head to a limit of its diameter D(S), and skips steps that are not finite.

An optimizer makes U' = c U + S, where c is what decoupled weight decay leaves of the weights U. With S's mean row m and
r = limit / 2, a row with |s_i - m| > r becomes

    s_i' = m' + f_i (s_i - m),    f_i = (r - e_i) / |s_i - m|.

All rows are then within r of m', so that no two of them are farther apart than the limit. m' is m, shortened to r where
it is longer: log-odds ignore a shift that all rows share, but floating-point numbers and a tied embedding do not.

e_i makes room for rounding. A dtype with unit roundoff u and smallest positive number a moves a row t = c U_i + s_i' of
d entries by |t| u + sqrt(d) a / 2 at most, and |t| <= |c U_i| + |m'| + r. That is e_i, but never more than r / 2. A
rounded row outside the ball keeps its bits from before the step: zero is in the ball because |m'| <= r.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from hilbert_monitor.geometry import RowShards
from hilbert_monitor.optim import options_of

from .head import Head
from .increment import IncrementSource
from .optimizers import Decay, Rate, hooked_optimizer, inner_optimizers, on_steps
from .probe import QUIET, probes_of
from .runtime import Ranks, compute_device, warn_user

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # other training loops do not need it
    Callback = object  # type: ignore[assignment,misc]

TOP = 8  # tokens named in a `LimitedStep`
CHUNK_BYTES = {"cpu": 2**19}  # of rows in fp64: what fits a CPU's cache; an accelerator has 2^26
WINDOW = 50  # steps whose diameters have the median that `usual` multiplies


class NonFiniteGradients(RuntimeError):
    """Too many steps in a row had a gradient that is not finite."""


@dataclass(frozen=True, slots=True)
class LimitedStep:
    """One step under a `TrustRegion`: bounds of D(S) as the optimizer made it and as it was stored."""

    step: int  # from 1
    limit: float
    left_out: bool = False  # skipped because a gradient was not finite; the rest is then unknown
    asked_lower: float = 0.0
    asked_upper: float = 0.0
    made_upper: float = 0.0  # at most the limit
    held: int = 0  # rows outside the ball
    rows: int = 0  # of the head
    tokens: tuple[int, ...] = ()  # of the rows farthest outside the ball, the farthest first


class MovedRows(NamedTuple):
    """This rank's rows (n, d) of one parameter around a step, U' = c U + S."""

    before: Tensor  # a copy of U
    after: Tensor  # U', the stored rows that the projection writes to
    keep: Rate  # c


class RowBall:
    """A ball around the mean row of a step, with half the limit as its radius. Nothing here synchronizes.

    `parts` are rows of the weight, and of a trained bias, whose column extends them. `shards` is their matrix, if other
    ranks have rows of it.
    """

    def __init__(self, parts: list[MovedRows], limit: Rate, shards: RowShards | None = None) -> None:
        self.parts = parts
        self._shards = shards if shards is not None and shards.ranks.groups else None
        self.device = parts[0].after.device
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64  # mps has no fp64
        self.radius = self._zeros() + limit / 2
        self.number, self.width = len(parts[0].after), sum(part.after.shape[1] for part in parts)
        self.rows = self.number if self._shards is None else self._shards.number  # of all ranks
        chunk = max(1, CHUNK_BYTES.get(self.device.type, 2**26) // (8 * self.width))
        self._chunks = [slice(*ends) for ends in pairwise([*range(0, self.number, chunk), self.number])]
        self._scratch = self._zeros(2, min(chunk, self.number), self.width)

    def project(self) -> Tensor:
        """Project the rows onto the ball, in place. Rows inside keep their bits.

        Returns:
            (1 + 2 TOP,) rows outside the ball, and the largest distances from the mean row with their tokens.
        """
        mean, far = self._zeros(self.width), self._zeros(self.number)
        for at in self._chunks:
            mean += self._rows(at)[1].sum(0)
        mean = torch.nan_to_num(self._sum(mean) / self.rows, 0.0, 0.0, 0.0)  # any centre holds the limit
        for at in self._chunks:
            far[at] = torch.linalg.vector_norm(self._rows(at)[1].sub_(mean), dim=1)
        far = torch.nan_to_num(far, torch.inf, torch.inf)
        summary = self._summary(far)
        if self.device.type != "cpu" or summary[0] > 0:
            self._write(mean, far, summary[0])
        return summary

    def _summary(self, far: Tensor) -> Tensor:
        ranks, rank = (1, 0) if self._shards is None else (self._shards.ranks.number, self._shards.ranks.rank)
        top = far.topk(min(TOP, self.number))  # a rank may have no rows
        ids = top.indices if self._shards is None else self._shards.ids.to(self.device)[top.indices]
        table = self._zeros(ranks, 1 + 2 * TOP)  # a row of each rank
        table[rank, 0] = (far > self.radius).sum()
        table[rank, 1:] = -1.0
        table[rank, 1 : 1 + len(ids)] = top.values
        table[rank, 1 + TOP : 1 + TOP + len(ids)] = ids.to(self.dtype)
        table = self._sum(table)
        distances, order = table[:, 1 : 1 + TOP].reshape(-1).sort(descending=True, stable=True)
        tokens = table[:, 1 + TOP :].reshape(-1)[order]
        return torch.cat([table[:, 0].sum()[None], distances[:TOP], tokens[:TOP]])

    def _write(self, mean: Tensor, far: Tensor, outside: Tensor) -> None:
        length = torch.linalg.vector_norm(mean)
        shrinks = (length > self.radius) & (outside > 0)  # this shifts all rows, also those inside
        shift = torch.where(shrinks, mean * (self.radius / length), mean)
        infos = [torch.finfo(part.after.dtype) for part in self.parts]
        unit = max(info.eps for info in infos) / 2 * (1 + 2.0**-10)  # fp64 may be rounded to fp32 first
        least = max(info.smallest_normal * info.eps for info in infos)
        chosen = (far > self.radius) | shrinks
        for at in self._chunks:
            if self.device.type == "cpu" and not chosen[at].any():
                continue
            decayed, rows = self._rows(at)
            slack = unit * (torch.linalg.vector_norm(decayed, dim=1) + torch.linalg.vector_norm(shift) + self.radius)
            reach = torch.maximum(self.radius - slack - self.width**0.5 * least / 2, self.radius / 2)
            rows.sub_(mean).nan_to_num_(0.0, 0.0, 0.0).mul_((reach / far[at]).clamp(max=1.0)[:, None])
            centre = decayed.add_(shift)
            stored = []
            for part, x in zip(self.parts, self._columns(rows.add_(centre)), strict=True):
                stored.append(x.to(part.after.dtype, copy=True))
                x.copy_(stored[-1])
            fits = (torch.linalg.vector_norm(rows.sub_(centre), dim=1) <= self.radius) & torch.isfinite(far[at])
            for part, x in zip(self.parts, stored, strict=True):
                held = torch.where(fits[:, None], x, part.before[at])
                part.after[at] = torch.where(chosen[at, None], held, part.after[at])

    def _rows(self, at: slice) -> tuple[Tensor, Tensor]:
        """Return rows of c U and of S = U' - c U (n, d), until the next call: a CPU is slow to allocate them anew."""
        decayed, rows = self._scratch[:, : at.stop - at.start]
        for part, x, y in zip(self.parts, self._columns(decayed), self._columns(rows), strict=True):
            x.copy_(part.before[at]).mul_(part.keep)
            y.copy_(part.after[at])
        return decayed, rows.sub_(decayed)

    def _columns(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, [part.after.shape[1] for part in self.parts], 1)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _sum(self, x: Tensor) -> Tensor:
        if self._shards is None:
            return x
        sent = x.to(self._shards.rows.device)
        for group in self._shards.ranks.groups:
            dist.all_reduce(sent, group=group)
        return sent.to(self.device)


class TrustRegion(Callback):
    """Holds each step of an LM head to a limit of its diameter D(S), and skips steps that are not finite.

    If all centred rows of S are in the ball of radius limit / 2, no bit changes. It does not hold weight decay, nor
    what the backbone does to the log-odds.

    Example:
        ``Trainer(callbacks=[HilbertMonitor(), TrustRegion(limit=0.02)])`` in Lightning. In another loop::

            with TrustRegion(limit=0.02).watch(model, optimizer) as region:
                ...
                optimizer.step()
                print(region.last.held, region.last.asked_upper, region.last.tokens)

    It holds the padding of a head with it. A trained bias extends the rows, as in the records of `HilbertMonitor`.

    Args:
        limit: largest D(S) of a step, or a function of the step's number, from 1. Infinity holds nothing.
        lr_multiple: the limit in learning rates of the step, in place of `limit`. RowNorm's steps reach 2.
        usual: the limit in medians of the diameters (`made_upper`) of the last 50 steps, in place of `limit`. The first
            50 steps are not held.
        head: the LM head, its name or that of its weight, or None to look for it.
        decay: how the optimizer uses weight_decay, where its class is unknown.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
        stop_after: skipped steps in a row after which NonFiniteGradients is raised.
    """

    def __init__(
        self,
        limit: float | Callable[[int], float] | None = None,
        *,
        lr_multiple: float | None = None,
        usual: float | None = None,
        head: str | Module | Parameter | None = None,
        decay: Decay | None = None,
        logit_scale: float | None = None,
        stop_after: int = 10,
    ) -> None:
        given = [x for x in (limit, lr_multiple, usual) if x is not None]
        if len(given) != 1:
            raise TypeError(f"TrustRegion takes one of limit=, lr_multiple= and usual=, got {len(given)}: limit=0.02")
        if not callable(given[0]):
            _check_limit(given[0])
        if stop_after < 1:
            raise ValueError(f"stop_after must be at least 1, got {stop_after}")
        self.limit, self.lr_multiple, self.usual, self.stop_after = limit, lr_multiple, usual, stop_after
        self._options: dict[str, Any] = {"head": head, "decay": decay, "logit_scale": logit_scale}
        self.step = 0  # steps so far
        self.clipped = 0  # those with rows outside the ball, counted when they are read
        self.left_out = 0  # those skipped
        self._head: Head | None = None
        self._sources: list[IncrementSource] = []  # the weight's, and a trained bias's
        self._remove: Callable[[], None] | None = None
        self._copies: list[Tensor] = []  # of the weights before the step
        self._bad: list[tuple[Tensor, Tensor]] | None = None  # gradients of a step that is skipped
        self._bad_in_a_row = 0
        self._diameters: deque[float] = deque(maxlen=WINDOW)
        self._last: LimitedStep | None = None
        self._pending: Callable[[], LimitedStep] | None = None
        self._updates = self._seen = self._unseen = 0  # of Lightning

    def watch(
        self,
        model: Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        process_group: ProcessGroup | None = None,
    ) -> TrustRegion:
        """Hold steps from now on; call it on every rank.

        Args:
            model: a language model.
            optimizer: the one that moves the head, a ChainedOptimizer, or several of which one does.
            process_group: the ranks that train together, if they are not all.
        """
        self.detach()
        head = Head(model, optimizer, **self._options)
        if head.computed is not None:
            raise ValueError(
                f"TrustRegion writes the head's weight, and that of '{head.name}' is computed from other parameters,"
                f" {head.computed.kind}"
            )
        if head.logits.softcap is not None:
            raise ValueError(
                f"the logits are soft-capped at {head.logits.softcap:g}: a shift of all rows moves their log-odds, and"
                " D(S) does not bound it"
            )
        if self.lr_multiple is not None and "lr" not in head.source.group:
            raise ValueError("lr_multiple=... needs an optimizer with lr: pass limit=... or usual=...")
        outer = hooked_optimizer(head.owner, head.weight)
        if any(source.decay.share(source.group) is None for source in head.sources):
            warn_user(
                f"it is not known how {type(outer).__name__} uses weight_decay, so TrustRegion holds the whole change"
                ' of the weights; pass decay="decoupled" | "coupled" | a number | a function of the group'
            )
        self._head, self._sources = head, head.sources[::-1]
        self._optimizer, self._ranks = outer, Ranks.of(compute_device(head.weight), group=process_group)
        steps = (outer, *inner_optimizers(outer, head.weight))
        self._remove = on_steps(steps, self._begin, self._end, after_closure=lambda: True)
        return self

    def detach(self) -> None:
        """Hold no more steps, and remove the hooks of the optimizer."""
        if self._head is None or self._remove is None:
            return
        self._remove()
        _ = self.last
        self._restore_gradients()
        for probe in probes_of(self._head.weight):
            probe.after_limit(None)
        self._head, self._remove, self._sources, self._copies = None, None, [], []
        del self._optimizer, self._ranks

    def __enter__(self) -> TrustRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def last(self) -> LimitedStep | None:
        """The last step; None before the first. Reading it synchronizes with an accelerator."""
        if self._pending is not None:
            self._last, self._pending = self._pending(), None
            self.clipped += self._last.held > 0
            if 0 < self._last.made_upper < math.inf:  # a step without a learning rate is not usual
                self._diameters.append(self._last.made_upper)
        return self._last

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, in plain types."""
        _ = self.last
        counts = {"step": self.step, "clipped": self.clipped, "left_out": self.left_out}
        return counts | {"diameters": list(self._diameters)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a run was saved."""
        self.step, self.clipped, self.left_out = (int(state_dict[name]) for name in ("step", "clipped", "left_out"))
        self._diameters = deque(map(float, state_dict.get("diameters", ())), maxlen=WINDOW)

    @torch.no_grad()
    def _begin(self) -> None:
        self._restore_gradients()  # of a step that raised
        params = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        scaled = getattr(self._optimizer, "found_inf", None) is not None  # a GradScaler has a fused optimizer skip it
        finite = scaled or self._ranks.all_agree(_are_finite(p.grad.detach() for p in params))
        _ = self.last  # the check has synchronized
        if not finite:  # an optimizer moves no parameter without a gradient, and leaves its state alone
            self._bad_in_a_row += 1
            self._bad = [(p, p.grad) for p in params]
            for p in params:
                p.grad = None
            return
        self._bad_in_a_row = 0
        weights = [source.rows.of(source.param) for source in self._sources]
        if [x.shape for x in weights] != [x.shape for x in self._copies]:
            self._copies = [torch.empty_like(x) for x in weights]
        for copy, x in zip(self._copies, weights, strict=True):
            copy.copy_(x)

    @torch.no_grad()
    def _end(self) -> None:
        head = self._head
        assert head is not None
        self.step += 1
        step, limit, scale, probes = self.step, self._limit(), abs(head.logit_scale), probes_of(head.weight)
        for probe in probes:
            probe.before_limit()
        if self._bad is None:
            parts = [_moved_rows(*pair) for pair in zip(self._sources, self._copies, strict=True)]
            ball = RowBall(parts, limit / scale, head.rows.matrix(parts[0].after))
            summary = ball.project()
            self._pending = cache(lambda: _limited_step(step, float(limit), ball.rows, scale, summary.tolist()))
        else:
            self._restore_gradients()
            self.left_out += 1
            self._pending = cache(lambda: LimitedStep(step, float(limit), left_out=True))
        for probe in probes:
            probe.after_limit(self._pending)
        if head.rows.sharded:
            torch.autograd.graph.increment_version([source.param for source in self._sources])
        number, text = self._bad_in_a_row, f"the gradient of step {step} is not finite"
        if number >= self.stop_after:
            raise NonFiniteGradients(
                f"{text}, and the {number} last steps were skipped for that: look at their batches, losses and hidden"
                " states, or pass a larger stop_after=..."
            )
        if number == 1:
            warn_user(f"{text}: the step was skipped, for all parameters", stacklevel=2)

    def _limit(self) -> Rate:
        if self.usual is not None:
            return self.usual * median(self._diameters) if len(self._diameters) == WINDOW else math.inf
        if self.lr_multiple is not None:
            multiple: Rate = self._sources[0].group["lr"] * self.lr_multiple  # perhaps a tensor
            return multiple
        return _check_limit(self.limit(self.step) if callable(self.limit) else self.limit)

    def _restore_gradients(self) -> None:
        for p, gradient in self._bad or ():
            p.grad = gradient if p.grad is None else p.grad
        self._bad = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the head and its optimizer, and hold steps."""
        if any(kind.__name__ == "FSDPStrategy" for kind in type(trainer.strategy).__mro__):
            raise ValueError(
                "TrustRegion cannot hold a head under Lightning's FSDPStrategy, which flattens its rows: use"
                " ModelParallelStrategy, with fully_shard in configure_model"
            )
        self.watch(pl_module, trainer.optimizers)
        self._updates, self._seen, self._unseen = trainer.global_step, self.step, 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Warn if no hook sees the updates."""
        if trainer.global_step > self._updates and pl_module.automatic_optimization and self.step == self._seen:
            self._unseen += 1
            if self._unseen == QUIET and trainer.global_rank == 0:
                warn_user(f"TrustRegion saw no step of the head's optimizer in {QUIET} updates: is it compiled?")
        self._updates = trainer.global_step

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Detach."""
        self.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Detach."""
        self.detach()


def _moved_rows(source: IncrementSource, before: Tensor) -> MovedRows:
    """Return the rows of a parameter around the step. If the weight decay is unknown, S is their whole change."""
    after, share = source.rows.of(source.param), source.decay.share(options_of(source.group))
    if share is None or (source.param.grad is None and not bool((before != after).any())):  # nothing moved
        return MovedRows(before, after, 1.0)
    overflow = getattr(source.optimizer, "found_inf", None)  # a fused optimizer skips the step for a GradScaler
    return MovedRows(before, after, 1 - _wide(share) * (1 if overflow is None else 1 - _wide(overflow)))


def _wide(x: Rate) -> Rate:
    return x.double() if isinstance(x, Tensor) and x.device.type != "mps" else x


def _limited_step(step: int, limit: float, rows: int, scale: float, summary: list[float]) -> LimitedStep:
    outside, far, tokens = int(summary[0]), [x * scale for x in summary[1 : 1 + TOP]], summary[1 + TOP :]
    upper = far[0] + max(far[1], 0.0)
    return LimitedStep(
        step,
        limit,
        asked_lower=far[0],
        asked_upper=upper,
        made_upper=limit if outside else min(limit, upper),
        held=outside,
        rows=rows,
        tokens=tuple(int(token) for token, x in zip(tokens, far, strict=True) if outside and x > limit / 2),
    )


def _check_limit(limit: Any) -> float:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise ValueError(f"the limit of D(S) must be zero or a positive number, got {limit!r}")
    return float(limit)


def _are_finite(gradients: Iterable[Any]) -> bool:
    local = [x.to_local() if hasattr(x, "to_local") else x for x in gradients]
    entries = [x for x in (x.coalesce().values() if x.is_sparse else x for x in local) if x.numel()]
    here, there = [x for x in entries if x.device.type == "cpu"], [x for x in entries if x.device.type != "cpu"]
    if not all(torch.isfinite(end) for x in here for end in torch.aminmax(x)):  # ten times faster than the norm there
        return False
    return not there or bool(torch.isfinite(get_total_norm(there, float("inf"))))  # no square that could overflow
