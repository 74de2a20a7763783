"""The increment S of one optimizer step on one parameter, without decoupled weight decay: U' = c U + S.

It is formed from the optimizer's state where that says what a step was: nothing is copied, and nothing lost to
cancellation. Otherwise it is the difference of the weights around a step, or, where something else moves the weights as
well (Lookahead, a patched step, weights that are swapped), around a whole update. Either way its rows are formed on
demand, and S itself is not held.

What is assumed of a step is compared with what the weights did, on a few hundred rows of the first steps and of some
later ones. Where the two differ, a source falls back to the next basis, for good.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from hilbert_monitor.geometry import RowShards, RowSource, compute_dtype
from hilbert_monitor.optim import Group, LastStep, Muon, options_of

from .deferred import reads_later
from .optimizers import (
    Decay,
    OptimizerStep,
    Rate,
    WeightDecay,
    group_of,
    increment_from_state,
    is_plain_sgd,
    knows_increment,
    state_of,
    stepping_optimizer,
    steps_as,
)
from .runtime import compute_device

DIFFERENT = 1e-3
"""Difference between an assumed and a real step, as a share of the step, from which on a source falls back."""
SAMPLES = 256
"""Rows of the weights that are sampled, at most."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Basis(IntEnum):
    """What the increment is computed from. A source only ever moves down; ranks agree on the minimum."""

    UPDATE = 0
    """The weights at the end of two updates."""
    STEP = 1
    """The weights before and after the optimizer's step."""
    STATE = 2
    """The optimizer's state: no copy, no cancellation."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What is measured of a step."""

    exact: bool = True
    """The exact diameter."""
    panel: bool = False
    """The perturbation of the panel."""
    bounds: bool = True
    """Bounds of the diameter."""
    check: bool = True
    """Whether what is assumed of the step is compared with what the weights did: an accelerator is waited for."""
    defer: bool = False
    """Whether the host asks the device for nothing, and reads the numbers later."""

    @property
    def measures(self) -> bool:
        """Whether the increment is needed at all."""
        return self.exact or self.panel or self.bounds


@dataclass(frozen=True, slots=True)
class Increment:
    """The increment of a step, and how far it may be from what the stored weights did."""

    rows: RowSource
    """This rank's rows, one for each token, in fp32 or better. They are formed from live weights and state."""
    rounding: Rate
    """Bound on the difference between an entry of S and the change of the stored weight, which is rounded: on the
    device where that is an accelerator. Zero where S was formed from state and the weights have at least fp32."""
    has_decay: bool = False
    """True if the weight decay is unknown, so that this is the change of the weights, with their decay."""


class LocalRows:
    """The rows of a weight that this rank has, one for each token: all, or its shard of a DTensor.

    Args:
        weight: (V, d) parameter, or a bias (V,).
        transposed: the weight is stored as (d, V).
    """

    def __init__(self, weight: Tensor, *, transposed: bool = False) -> None:
        self.transposed, self.device = transposed, compute_device(weight)
        self.sharded = hasattr(weight, "device_mesh")
        by_tokens: Any = weight.detach().t() if transposed else weight.detach()
        if self.sharded:
            _check_layout(by_tokens)
        width = None if weight.ndim > 1 else 1
        self._shards = RowShards.of(RowSource(by_tokens, width=width))
        self.number = self._shards.number
        self._counts = {self.number: len(self._shards.ids)}  # of this rank's tokens among so many

    def __len__(self) -> int:
        """Return the number of this rank's rows."""
        return len(self._shards.ids)

    def of(self, x: Tensor) -> Tensor:
        """Return this rank's rows (n, d) of a tensor that is laid out as the weight is. Nothing is copied."""
        local: Any = x.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        rows: Tensor = local[:, None] if local.ndim == 1 else local.t() if self.transposed else local.flatten(1)
        return rows

    def matrix(self, rows: RowSource | Tensor, number: int | None = None) -> RowShards:
        """Return rows (n, d) of this rank as its part of the whole matrix.

        Args:
            rows: one for each of this rank's tokens.
            number: tokens; rows after these are padding, and are left out.
        """
        number = self.number if number is None else min(number, self.number)
        if number not in self._counts:
            self._counts[number] = int((self._shards.ids < number).sum())
        mine = self._counts[number]  # the first ones: ids ascend
        source = rows if isinstance(rows, RowSource) else RowSource(rows)
        if source.device != self.device:  # shards that are kept on a CPU
            source = RowSource(source.matrix().to(self.device))
        source = RowSource(source, number=mine) if mine < len(source) else source
        return replace(self._shards, rows=source, ids=self._shards.ids[:mine].to(self.device), number=number)


def _check_layout(weight: Any) -> None:
    """Refuse a DTensor whose rows are in pieces."""
    if any(not p.is_replicate() and getattr(p, "dim", None) != 0 for p in weight.placements):
        raise ValueError(
            f"the head has placements {tuple(weight.placements)}, and only a head sharded by rows, one for each token,"
            " is measured: shard it with Shard(0), as fully_shard and ColwiseParallel do"
        )


class SampledRows:
    """Evenly spaced rows of a parameter, as they were before its last step and as they were last seen.

    They tell what moved the weights, for a few kernels a step and without a copy of the weights. Each check uses other
    rows, so that a change of a single row is found too, once it is its turn.

    Args:
        rows: of the parameter that this rank has.
        param: the parameter.
    """

    def __init__(self, rows: LocalRows, param: Tensor) -> None:
        self._rows, self._param = rows, param
        self._stride = max(1, len(rows) // SAMPLES)
        self._start, self._starts = 0, random.Random(0)  # the same on every rank
        self.before: Tensor | None = None
        """The rows before the last step."""
        self._seen: Tensor | None = None
        self._differ: Tensor | None = None

    def of(self, source: RowSource) -> Tensor:
        """Return the same rows of a source of this rank's rows."""
        return source.chunk(self._start, len(source), self._stride)

    def now(self) -> Tensor:
        """Return the rows as they are."""
        return self.of(RowSource(self._rows.of(self._param)))

    def see(self) -> None:
        """Keep the rows as they are: nobody but the next step should move them."""
        self._seen = self.now().clone()

    def begin(self) -> None:
        """Take the rows last seen as those before a step."""
        self.before = self._seen

    def choose_others(self) -> None:
        """Take other rows from now on."""
        self._start = self._starts.randrange(self._stride)

    def compare(self) -> None:
        """Compare the rows with those last seen, for `moved` to say. An accelerator is not waited for."""
        differ = self._difference()
        if differ is not None:
            self._differ = differ if self._differ is None else self._differ | differ

    def moved(self) -> bool:
        """Return True if a comparison has found a difference since this was last asked."""
        moved, self._differ = self._differ is not None and bool(self._differ), None
        return moved

    def are_others(self) -> bool:
        """Return True if the rows are not those last seen."""
        differ = self._difference()
        return differ is not None and bool(differ)

    def stepped(self) -> bool:
        """Return True if the rows are not those of before the step, as far as can be seen: a rank may have none."""
        return self.before is not None and (not len(self.before) or bool(_differ(self.before, self.now())))

    def forget(self) -> None:
        """Let go of them."""
        self.before = self._seen = self._differ = None

    def _difference(self) -> Tensor | None:
        rows, seen = self.now(), self._seen
        if seen is None or seen.shape != rows.shape or seen.dtype != rows.dtype or seen.device != rows.device:
            return None
        return _differ(seen, rows)


def _differ(one: Tensor, other: Tensor) -> Tensor:
    """Return whether a bit differs; a nan is equal to itself."""
    bits = BITS[one.dtype.itemsize]
    return torch.ne(one.view(bits), other.view(bits)).any()


class IncrementSource:
    """Tells what each step of an optimizer does to one of its parameters: `begin` before a step, `end` after it.

    Args:
        optimizer: a torch optimizer, or what wraps one.
        param: a parameter of it.
        decay: how it uses weight_decay, where the user says so.
        rows: of the parameter that this rank has; by default all.
        basis: what increments are computed from at most.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        param: Tensor,
        *,
        decay: Decay | None = None,
        rows: LocalRows | None = None,
        basis: Basis = Basis.STATE,
    ) -> None:
        self.optimizer = stepping_optimizer(optimizer, param)
        self.param = param
        self.rows = rows or LocalRows(param)
        self.decay = WeightDecay(self.optimizer, decay)
        self.last: OptimizerStep | None = None
        """The last step."""
        self.limited = False
        """Whether a TrustRegion has written to the weights since the last step, which say nothing of it any more."""
        self.fallbacks: list[str] = []
        """Sentences about what is assumed no more, for the reader of the run's remarks."""
        self._lowest = basis
        self._plan = StepPlan()
        self._lost = False  # a fallback in this step: the weights of before it were not kept
        self._before: Any = None  # the weights before the step, where they were kept
        self._samples = SampledRows(self.rows, param)
        self._has_stepped = False  # before the first step anybody may load other weights
        self._next: Group | None = None  # options at the end of the last update, if the next step starts there
        self._gradient: LastStep | None = None
        _ = self.group  # refuses a parameter of somebody else

    # What is known

    @property
    def group(self) -> Group:
        """The group of the parameter, as it is now."""
        group = group_of(self.optimizer, self.param)
        if group is None:
            raise ValueError(
                f"the parameter of shape {tuple(self.param.shape)} is in no group of {type(self.optimizer).__name__}:"
                " give the optimizer that moves it"
            )
        return group

    @property
    def basis(self) -> Basis:
        """What the increment is computed from."""
        return min(self._lowest, Basis.STATE if self._state_tells else Basis.STEP)

    @basis.setter
    def basis(self, agreed: Basis) -> None:
        """Take what all ranks have found out."""
        if agreed < self.basis:
            others = "the rows of another rank moved otherwise than the optimizer's state says"
            self.fall_back(agreed, others if agreed is Basis.STEP else f"on another rank, {self._others_move}")

    @property
    def is_rounded(self) -> bool:
        """Whether the weights have less than fp32, so that a step that is stored is not the one that was intended."""
        return self.param.dtype.itemsize < 4

    @property
    def has_before(self) -> bool:
        """Whether the weights of before the last step were kept."""
        return self.last is not None and self._before is not None

    @property
    def needs_gradient(self) -> bool:
        """Whether the increment cannot be formed any more once the gradient is cleared."""
        plain = self.last is not None and is_plain_sgd(self.optimizer, self.last.options)
        return self.basis is Basis.STATE and (plain or isinstance(self.optimizer, Muon))

    @property
    def formable(self) -> bool:
        """Whether the increment of the last step can still be formed: nothing has moved the weights since."""
        if self.last is None or self._samples.are_others():
            return False
        if self.basis is Basis.STATE:
            return not is_plain_sgd(self.optimizer, self.last.options) or self._has_gradient
        return self.has_before and (self.basis is Basis.STEP or self._next is None)

    @property
    def _state_tells(self) -> bool:
        group = group_of(self.optimizer, self.param)
        return group is not None and knows_increment(self.optimizer, group, sharded=self.rows.sharded)

    @property
    def _has_gradient(self) -> bool:
        """Whether the gradient is still that of the last step."""
        return self._gradient is not None and self._gradient.had(self.param.grad)

    @property
    def _others_move(self) -> str:
        return (
            f"something besides the step of {type(self.optimizer).__name__} moves the head's weights (Lookahead, a"
            " patched step, swapped or projected weights?)"
        )

    def fall_back(self, basis: Basis, why: str) -> None:
        """Compute increments from something else from now on."""
        whole = "" if basis is Basis.STEP else " over whole updates"
        self.fallbacks.append(f"{why}: the increment is the difference of the weights{whole} from now on")
        self._lowest, self._lost = min(self._lowest, basis), True
        if basis is Basis.UPDATE:
            self._before = None

    # Steps

    def begin(self, plan: StepPlan) -> None:
        """Note that a step begins, and keep what its increment needs of the weights before it."""
        starts_update, self._next, self._lost, self._plan = self._next is not None, None, False, plan
        if self.basis is Basis.UPDATE:
            if not starts_update:  # several steps to an update; the weights at the end of the last update are kept
                self._keep(plan.measures)
            return
        self._before = None  # first: if anything fails here, those of an earlier step are no help
        self._samples.compare()
        if plan.check and self._samples.moved():
            self._samples.see()
            if self._has_stepped:
                self.fall_back(Basis.UPDATE, self._others_move)
        self._samples.begin()
        if self._lost:
            return
        if self.basis is not Basis.STATE:
            self.last = None
        self._keep(plan.measures and (self.is_rounded or self.basis is Basis.STEP))

    def end(self) -> OptimizerStep:
        """Note the step that was made, and return it."""
        return self._note(options_of(self.group))

    def end_update(self, plan: StepPlan) -> None:
        """Note that an update is over; `plan` is that of the next."""
        if self._plan.check:  # the next check is of other rows
            self._samples.compare()
            self._samples.choose_others()
            self._samples.see()
        self._samples.begin()
        self._next = options_of(self.group)
        if self.basis is Basis.UPDATE:
            self._keep(plan.measures)

    def unchanged(self) -> bool:
        """Return whether the weights are those that the last step left; if not, updates are measured from now on.

        Without a check nothing is compared here: what has moved them is still seen when the next step begins.
        """
        if not self._plan.check:
            return True
        self._samples.compare()
        if self.basis is not Basis.UPDATE and self._samples.moved():
            self.fall_back(Basis.UPDATE, self._others_move)
            return False
        return True

    def moved_unseen(self) -> bool:
        """Return whether an update that no hook saw moved this rank's weights."""
        return self._next is not None and self._samples.are_others()

    def end_unseen(self) -> OptimizerStep:
        """Return the step of an update that no hook saw. Called on every rank if it moved the weights of one."""
        now = options_of(self.group)
        candidates = [now] if self._next is None else [self._next, now]
        step = self._note(self._likelier(candidates) if len(candidates) > 1 else now)
        if self.basis is Basis.STEP:
            self.fall_back(Basis.UPDATE, f"no hook saw the step of {type(self.optimizer).__name__}")
            self._lost = False  # nothing was lost: weights are kept at the end of an update from now on
        return step

    def end_missing(self) -> None:
        """Note that an update is over in which the optimizer made no step, if so."""
        if self._next is None:
            return
        if self._samples.are_others():
            self.fall_back(Basis.UPDATE, f"{type(self.optimizer).__name__} made no step, and its weights moved")
        else:
            self._note(options_of(self.group), skipped="no step")

    def weights_limited(self, limited: bool) -> None:
        """Note that a TrustRegion has written to the weights, or holds them no more: they are as it left them."""
        self.limited = limited
        self._samples.see()

    def forget(self) -> None:
        """Forget the last step."""
        self.last = self._next = self._before = None
        self._samples.forget()

    def _keep(self, wanted: bool) -> None:
        self._before = None  # first, for its memory
        if wanted:
            self._before = self._snapshot()

    def _note(self, options: Group, *, skipped: str = "") -> OptimizerStep:
        skipped, overflow = (skipped, None) if skipped else self._skipped()
        self.last, self._next = OptimizerStep(skipped, options, overflow), None
        self._has_stepped, self.limited = True, False
        if steps_as(self.optimizer, SGD) and self.param.grad is not None:
            self._gradient = LastStep.of(self.param.grad, options)
        elif is_plain_sgd(self.optimizer, options) and not skipped and self.basis is Basis.STATE:
            self.fall_back(Basis.STEP, f"a step of {type(self.optimizer).__name__} clears its gradient")
        self._samples.see()
        return self.last

    def _skipped(self) -> tuple[str, Tensor | None]:
        """Return why nothing moved, or empty; and what says so on the device, where that is read later."""
        if self.param.grad is None and not self._samples.stepped():  # or the step has cleared it
            return "no gradient", None
        overflow = getattr(self.optimizer, "found_inf", None)  # a GradScaler leaves it to a fused optimizer
        if self._plan.defer and isinstance(overflow, Tensor):
            return "", overflow
        return "overflow" if overflow is not None and bool(overflow) else "", None

    # Increments

    @torch.no_grad()
    def increment(self, *, check: bool = True) -> Increment | None:
        """Return the increment of the last step: after it, and before the next or a change of its gradient.

        Args:
            check: compare it with what the weights did, where the step's plan says so.

        Returns:
            The increment; None if the weights did something else than was assumed before this step.

        Raises:
            RuntimeError: if there was no step, or it was not to be measured and has left nothing to form it from.
        """
        if self.last is None:
            raise RuntimeError("there has been no step to form an increment of")
        if self.last.skipped:
            U, dtype = self._weights(), compute_dtype(self.param)
            return Increment(RowSource(U, form=lambda u: torch.zeros_like(u, dtype=dtype), dtype=dtype), 0.0)
        if self._lost or (self._before is None and self.basis is Basis.UPDATE):
            return None
        if self.basis is not Basis.STATE:
            return self.stored()
        if is_plain_sgd(self.optimizer, self.last.options) and not self._has_gradient:
            raise RuntimeError("the gradient of the last step is gone or changed, and SGD's increment needs it")
        rows = self._from_state(self.last.options)
        fresh = self._next is None and not self.limited  # or the rows of before the step are no longer kept
        if check and self._plan.check and fresh and not self._agrees(rows, self.last):
            return None
        rounding = torch.finfo(self.param.dtype).eps * largest(self._weights()) if self.is_rounded else 0.0
        return Increment(rows, rounding)

    @torch.no_grad()
    def stored(self) -> Increment:
        """Return the increment that the stored weights made in the last step: U' - c U.

        Where the weight decay is unknown it is U' - U, with the decay in it.
        """
        if self.last is None or self._before is None:
            raise RuntimeError(
                f"the increment of {type(self.optimizer).__name__} is a difference of weights, and none were kept of"
                " before this step: it was not to be measured"
            )
        share = self.decay.share(self.last.options)
        return Increment(self._difference(0.0 if share is None else share), self._rounding(), has_decay=share is None)

    @torch.no_grad()
    def moved(self) -> tuple[Tensor, int]:
        """Return how many of this rank's weights are not what they were before the step, and how many there are."""
        U, before = self._weights(), self._before
        changed = RowSource(U, before, form=lambda u, b: (u != b).sum(1, keepdim=True), width=1, dtype=torch.int64)
        return changed.matrix().sum(), before.numel()

    def _snapshot(self) -> Any:
        """Return what is kept of the weights before a step."""
        return self._weights().clone()

    def _weights(self) -> Tensor:
        """Return this rank's rows of the parameter, as they are now."""
        return self._rows_of(self.param)

    def _difference(self, share: Rate) -> RowSource:
        """Return the rows of U' - (1 - share) U."""
        dtype = compute_dtype(self.param)

        def form(after: Tensor, before: Tensor) -> Tensor:
            before = before.to(dtype)
            return torch.sub(after.to(dtype), before).add_(before * share)  # near U the subtraction is exact

        return RowSource(self._weights(), self._before, form=form, dtype=dtype)

    def _rounding(self) -> Rate:
        """Return a bound on the error of an entry of `_difference`."""
        return 2 * torch.finfo(self.param.dtype).eps * largest(self._weights(), self._before)

    def _from_state(self, options: Group) -> RowSource:
        """Return the rows of the last step, made with these options, as the optimizer's state says."""
        transposed = self.rows.transposed
        return increment_from_state(self.optimizer, self.param, options, self._rows_of, transposed=transposed)

    def _rows_of(self, x: Tensor) -> Tensor:
        return self.rows.of(x.to_dense() if x.is_sparse else x)

    def _agrees(self, rows: RowSource, last: OptimizerStep) -> bool:
        """Compare the sampled rows with what the state says of them; where they differ, fall back to the weights."""
        before, share = self._samples.before, self.decay.share(last.options)
        if before is None or not len(before) or share is None:
            return True
        step = self._samples.of(rows)
        after = self._samples.now().to(step.dtype)
        moved = after - before.to(step.dtype) * (1 - share)
        most = torch.maximum(after.abs().amax(), before.abs().amax().to(step.dtype))
        numbers = ((moved - step).abs().amax(), step.abs().amax(), moved.abs().amax(), most)
        difference, assumed, real, weight = torch.stack(numbers).tolist()
        allowed = DIFFERENT * max(assumed, real) + 4 * torch.finfo(before.dtype).eps * weight
        if not difference > allowed:  # also where something is nan
            return True
        kind = type(self.optimizer).__name__
        why = f"a step of {kind} moved a weight {difference:.3g} away from where its state says, by {real:.3g}"
        self.fall_back(Basis.STEP, why)
        return False

    def _likelier(self, candidates: Sequence[Group]) -> Group:
        """Return the options with which the sampled rows moved: a schedule may set them before a step or after it."""
        before = self._samples.before
        if self.basis is not Basis.STATE or before is None or not len(before):
            return candidates[0]
        if any(is_plain_sgd(self.optimizer, options) for options in candidates):
            return candidates[0]

        def gap(options: Group) -> float:
            step = self._samples.of(self._from_state(options))
            kept = before.to(step.dtype) * (1 - (self.decay.share(options) or 0.0))
            return float((self._samples.now().to(step.dtype) - kept - step).abs().amax())

        return min(candidates, key=gap)

    @property
    def count(self) -> Rate:
        """The optimizer's own count of steps, the last one included; zero if it has none."""
        count: Rate = state_of(self.optimizer, self.param).get("step", 0.0)
        return count


def held(S: RowShards) -> RowShards:
    """Return rows that are kept in memory, for when they cannot be formed any more."""
    return replace(S, rows=RowSource(S.rows.matrix()))


def largest(*matrices: Tensor) -> Rate:
    """Return the largest |entry|, zero if there is none; on an accelerator, which is not waited for, in fp64."""
    ends = [end for x in matrices if x.numel() for end in torch.aminmax(x)]
    if not ends:
        return 0.0
    most = torch.stack(ends).abs().amax()
    return most.double() if reads_later(most.device) else float(most)
