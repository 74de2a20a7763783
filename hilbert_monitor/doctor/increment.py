"""Claim: a probe's increment is what the step did to the weights, decoupled weight decay left out."""

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
from hilbert_monitor.optim.pretraining import FUSED_DEVICES
from hilbert_monitor.runs.record import StepRecord

from .decoder import TinyDecoder, loss_of, some_text
from .device import CheckSizes
from .exactness import all_pairs
from .finding import Check, Outcome, judged

V, WIDTH = 307, 32
RATES = (1.0, 0.5, 2.0)
"""Factors of the learning rate, in turns."""


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer of a decoder, and whether its weight decay is apart from the increment."""

    make: Callable[[TinyDecoder], Optimizer]
    decoupled: bool = True


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield every optimizer's increments, and steps that a GradScaler leaves out."""
    for name, kind in _kinds(device).items():
        yield Check("increment", name, partial(_against_weights, kind, device, sizes.updates))
    yield Check("increment", "GradScaler's overflow, AdamW fused", partial(_overflow, device, fused=True))
    yield Check("increment", "GradScaler's overflow, recipe chain", partial(_overflow, device, fused=False))


def _kinds(device: torch.device) -> dict[str, Kind]:
    def of_head(
        kind: Any, lr: float, *, lr_on: str | torch.device | None = None, decoupled: bool = True, **options: Any
    ) -> Kind:
        def make(model: TinyDecoder) -> Optimizer:
            rate = lr if lr_on is None else torch.tensor(lr, device=lr_on)
            made: Optimizer = kind([model.lm_head.weight], lr=rate, weight_decay=0.1, **options)
            return made

        return Kind(make, decoupled)

    kinds = {
        "AdamW, one by one": of_head(AdamW, 1e-2, foreach=False),
        "AdamW, one by one, lr a tensor": of_head(AdamW, 1e-2, lr_on="cpu", foreach=False),
        "AdamW foreach": of_head(AdamW, 1e-2, foreach=True),
    }
    if device.type in FUSED_DEVICES:
        kinds["AdamW fused"] = of_head(AdamW, 1e-2, fused=True)
        kinds["AdamW fused, lr a tensor"] = of_head(AdamW, 1e-2, lr_on=device, fused=True)
    if device.type == "cuda":
        kinds["AdamW capturable, lr a tensor"] = of_head(AdamW, 1e-2, lr_on=device, capturable=True)
    return kinds | {
        "Adam": of_head(Adam, 1e-2, decoupled=False),
        "SGD with momentum": of_head(SGD, 1.0, momentum=0.9, decoupled=False),
        "NAdam, by difference of weights": of_head(NAdam, 1e-2, decoupled=False),
        "RowNorm": of_head(RowNorm, 1e-1),
        "RowNorm, lr a tensor": of_head(RowNorm, 1e-1, lr_on=device),
        "Muon": of_head(Muon, 1e-2),
        "Muon, lr a tensor": of_head(Muon, 1e-2, lr_on=device),
        "recipe chain, RowNorm head": Kind(partial(pretraining_optimizer, head="rownorm")),
        "recipe chain, AdamW head": Kind(partial(pretraining_optimizer, head="adamw")),
    }


def _against_weights(kind: Kind, device: torch.device, updates: int) -> Outcome:
    """Take steps on a decoder's loss, and compare each increment with the weights before and after it."""
    model = TinyDecoder(V, WIDTH).to(device)
    optimizer, weight, worst = kind.make(model), model.lm_head.weight, _Gap(0.0, 0.0, 1.0)
    group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
    first = float(group["lr"])
    with Probe(model, optimizer, head="lm_head", diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(updates):
            _set_rate(group, first * RATES[update % len(RATES)])
            kept = 1 - float(group["lr"]) * group["weight_decay"] if kind.decoupled else 1.0
            before = weight.detach().cpu().double()
            _backward(model, optimizer, update)
            optimizer.step()
            S, record = probe.increment().cpu().double(), probe.record()
            after = weight.detach().cpu().double()
            gap = _gap(S, record, after - kept * before, largest=float(torch.maximum(before.abs(), after.abs()).max()))
            worst = max(worst, gap, key=lambda gap: gap.off / gap.limit)
    return judged(
        worst.off <= worst.limit,
        f"off by {worst.off:.0e} from the weights' change in fp64 (limit {worst.limit:.0e}), which is up to"
        f" {worst.size:.0e}",
    )


@dataclass(frozen=True, slots=True)
class _Gap:
    """How far an increment is from a difference of weights, what rounding allows, and how large the increment is."""

    off: float
    size: float
    limit: float


def _gap(S: Tensor, record: StepRecord | None, moved: Tensor, *, largest: float) -> _Gap:
    """Compare the increment, and the diameter on record, with how the weights moved."""
    assert record is not None
    assert record.diameter is not None
    size, width = float(moved.abs().max()), moved.shape[1]
    limit = 3 * torch.finfo(torch.float32).eps * largest + 1e-5 * size
    apart = abs(record.diameter - all_pairs(moved)) / (2 * width**0.5)  # what an entry's error does to a length
    return _Gap(max(float((S - moved).abs().max()), apart), size, limit)


def _overflow(device: torch.device, *, fused: bool) -> Outcome:
    """Take three steps in fp16, and overflow the second: it is skipped on record, or was never called for."""
    if device.type not in ("cpu", "cuda"):
        return Outcome("skipped", f"GradScaler is not used on {device.type}")
    model = TinyDecoder(V, WIDTH).to(device)
    head, moved, said = model.lm_head.weight, [], list[str]()
    optimizer: Optimizer = AdamW([head], lr=1e-2, fused=True) if fused else pretraining_optimizer(model)
    scaler = torch.amp.GradScaler(device.type, init_scale=16)
    with Probe(model, optimizer, head="lm_head", diameter_every=1, perturbation_every=0, strict=True) as probe:
        for next_scale in (2.0**120, 16.0, 16.0):
            before = head.detach().clone()
            _backward(model, optimizer, 0, scaler)
            scaler.step(optimizer)
            scaler.update(next_scale)
            record = probe.record()
            said.append("no step" if record is None else record.skipped or "a step")
            moved.append(not torch.equal(head, before))
    return judged(
        moved == [True, False, True] and said == ["a step", "overflow" if fused else "no step", "a step"],
        f"weights {'MOVED' if moved[1] else 'unmoved'}, on record: {', '.join(said)}",
    )


def _backward(model: TinyDecoder, optimizer: Optimizer, seed: int, scaler: torch.amp.GradScaler | None = None) -> None:
    device = model.lm_head.weight.device
    text = some_text(V, 8, 33, seed=seed).to(device)
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.float16, enabled=scaler is not None):
        loss = loss_of(model, text)
    (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]


def _set_rate(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
