"""Claim: the increment S of a probe is the change that the step made to the weights, without decoupled decay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.optim import Muon, RowNorm, pretraining_optimizer
from hilbert_monitor.optim.recipe import FUSED_DEVICES
from hilbert_monitor.runs.record import StepRecord

from .decoder import TinyDecoder, loss_of
from .device import CheckSizes
from .exactness import all_pairs
from .finding import Check, Outcome, outcome_of
from .samples import synthetic_text

V, WIDTH = 307, 32
RATES = (1.0, 0.5, 2.0)
"""Factors on the learning rate, which take turns."""


@dataclass(frozen=True, slots=True)
class OptimizerCase:
    """An optimizer of a decoder, and whether its weight decay is decoupled, that is, no part of the increment."""

    make: Callable[[TinyDecoder], Optimizer]
    decoupled: bool = True


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield checks of every optimizer's increments, and of steps that a GradScaler skips."""
    for name, case in _cases(device).items():
        yield Check("increment", name, partial(_against_weights, case, device, sizes.updates))
    yield Check("increment", "GradScaler's overflow, AdamW fused", partial(_overflow, device, fused=True))
    yield Check("increment", "GradScaler's overflow, recipe chain", partial(_overflow, device, fused=False))


def _cases(device: torch.device) -> dict[str, OptimizerCase]:
    def of_head(
        optimizer_class: Any,
        lr: float,
        *,
        lr_on: str | torch.device | None = None,
        decoupled: bool = True,
        **options: Any,
    ) -> OptimizerCase:
        def make(model: TinyDecoder) -> Optimizer:
            rate = lr if lr_on is None else torch.tensor(lr, device=lr_on)
            optimizer: Optimizer = optimizer_class([model.lm_head.weight], lr=rate, weight_decay=0.1, **options)
            return optimizer

        return OptimizerCase(make, decoupled)

    cases = {
        "AdamW, one by one": of_head(AdamW, 1e-2, foreach=False),
        "AdamW, one by one, lr a tensor": of_head(AdamW, 1e-2, lr_on="cpu", foreach=False),
        "AdamW foreach": of_head(AdamW, 1e-2, foreach=True),
    }
    if device.type in FUSED_DEVICES:
        cases["AdamW fused"] = of_head(AdamW, 1e-2, fused=True)
        cases["AdamW fused, lr a tensor"] = of_head(AdamW, 1e-2, lr_on=device, fused=True)
    if device.type == "cuda":
        cases["AdamW capturable, lr a tensor"] = of_head(AdamW, 1e-2, lr_on=device, capturable=True)
    return cases | {
        "Adam": of_head(Adam, 1e-2, decoupled=False),
        "SGD with momentum": of_head(SGD, 1.0, momentum=0.9, decoupled=False),
        "NAdam, by difference of weights": of_head(NAdam, 1e-2, decoupled=False),
        "RowNorm": of_head(RowNorm, 1e-1),
        "RowNorm, lr a tensor": of_head(RowNorm, 1e-1, lr_on=device),
        "Muon": of_head(Muon, 1e-2),
        "Muon, lr a tensor": of_head(Muon, 1e-2, lr_on=device),
        "recipe chain, RowNorm head": OptimizerCase(partial(pretraining_optimizer, head="rownorm")),
        "recipe chain, AdamW head": OptimizerCase(partial(pretraining_optimizer, head="adamw")),
    }


def _against_weights(case: OptimizerCase, device: torch.device, updates: int) -> Outcome:
    """Train a decoder for some steps, and compare each increment with the weights before and after it."""
    model = TinyDecoder(V, WIDTH).to(device)
    optimizer, weight, worst = case.make(model), model.lm_head.weight, _Gap(0.0, 0.0, 1.0)
    group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
    first = float(group["lr"])
    with Probe(model, optimizer, head="lm_head", diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(updates):
            _set_rate(group, first * RATES[update % len(RATES)])
            decay = 1 - float(group["lr"]) * group["weight_decay"] if case.decoupled else 1.0
            before = weight.detach().cpu().double()
            _backward(model, optimizer, update)
            optimizer.step()
            S, record = probe.increment(), probe.record()
            assert isinstance(S, torch.Tensor)
            S = S.cpu().double()
            after = weight.detach().cpu().double()
            gap = _gap(S, record, after - decay * before, largest=float(torch.maximum(before.abs(), after.abs()).max()))
            worst = max(worst, gap, key=lambda gap: gap.off / gap.limit)
    return outcome_of(
        worst.off <= worst.limit,
        f"off by {worst.off:.0e} from the weights' change in fp64 (limit {worst.limit:.0e}), which is up to"
        f" {worst.size:.0e}",
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """How far an increment is off from the change of the weights, how large that is, and what rounding allows."""

    off: float
    size: float
    limit: float


def _gap(S: Tensor, record: StepRecord | None, change: Tensor, *, largest: float) -> _Gap:
    """Compare the increment, and the diameter in the record, with the change of the weights."""
    assert record is not None
    assert record.diameter is not None
    size, width = float(change.abs().max()), change.shape[1]
    limit = 3 * torch.finfo(torch.float32).eps * largest + 1e-5 * size
    diameter_off = abs(record.diameter - all_pairs(change)) / (2 * width**0.5)  # as the error of an entry
    return _Gap(max(float((S - change).abs().max()), diameter_off), size, limit)


def _overflow(device: torch.device, *, fused: bool) -> Outcome:
    """Make three steps in fp16 of which the second overflows: its record must say so, or be missing."""
    if device.type not in ("cpu", "cuda"):
        return Outcome("skipped", f"GradScaler is not used on {device.type}")
    model = TinyDecoder(V, WIDTH).to(device)
    head, moved, steps = model.lm_head.weight, list[bool](), list[str]()
    optimizer: Optimizer = AdamW([head], lr=1e-2, fused=True) if fused else pretraining_optimizer(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=16)
    with Probe(model, optimizer, head="lm_head", diameter_every=1, perturbation_every=0, strict=True) as probe:
        for next_scale in (2.0**120, 16.0, 16.0):
            before = head.detach().clone()
            _backward(model, optimizer, 0, scaler)
            scaler.step(optimizer)
            scaler.update(next_scale)
            record = probe.record()
            steps.append("no step" if record is None else record.skipped or "a step")
            moved.append(not torch.equal(head, before))
    return outcome_of(
        moved == [True, False, True] and steps == ["a step", "overflow" if fused else "no step", "a step"],
        f"weights {'MOVED' if moved[1] else 'unmoved'}, on record: {', '.join(steps)}",
    )


def _backward(model: TinyDecoder, optimizer: Optimizer, seed: int, scaler: torch.amp.GradScaler | None = None) -> None:
    device = model.lm_head.weight.device
    text = synthetic_text(V, 8, 33, seed=seed).to(device)
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.float16, enabled=scaler is not None):
        loss = loss_of(model, text)
    (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]


def _set_rate(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
