"""What a model does to its head's output before the softmax: a scale, or a soft cap, read from its config or measured.

Many models return logits that are not the head's output x but scale * x, or cap * tanh(scale * x / cap). The increment
of the logits' matrix is then scale times that of the head. A config says so in fields whose meaning depends on the
model: Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it, MiniCPM3 divides the head's input by it, and
MPT has a `logit_scale` that its code never reads. So a field is trusted for the models that are listed here, and
`explain_logits` measures what happens in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hilbert_monitor.runs.stops import handled_signals


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The logits as a function of the head's output x: scale * x, or softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    source: str = ""
    """Where the numbers come from, or why a field of the config was not used; empty if there was nothing to read."""

    def apply(self, x: Tensor) -> Tensor:
        """Return the logits of a head's output."""
        x = x * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)


@dataclass(frozen=True, slots=True)
class _ScaleField:
    """A field of a config that scales the logits."""

    name: str
    divides: bool
    models: tuple[str, ...]
    """Beginnings of the model types for which this is so."""


SCALES = (
    _ScaleField("logit_scale", divides=False, models=("cohere",)),
    _ScaleField("logits_scaling", divides=True, models=("granite",)),
    _ScaleField("logits_scaling", divides=False, models=("hyperclovax",)),
    _ScaleField("lm_head_multiplier", divides=False, models=("falcon_h1",)),
    _ScaleField("output_multiplier", divides=False, models=("muse",)),
)
"""Scales of the models in transformers 5.22."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Fields with a soft cap. They mean the same in every model that has one: Gemma, RecurrentGemma, nanochat, others."""
HARMLESS = (("mpt", "logit_scale"), ("minicpm", "logits_scaling"))
"""Fields of models whose code does not apply them to the head's output: beginnings of a model type, and a field."""
PARTS = ("text_config", "decoder", "language_config", "llm_config")
"""Where the config of a model of several parts has that of its language model."""


def logit_transform(model: Module, head: Module | None = None) -> LogitTransform:
    """Read from a Hugging Face style config how a model makes logits of its head's output.

    Looks at the config of every module, the innermost first, and takes the first that says something. A model may be
    wrapped, in a LightningModule for instance.

    Args:
        model: a language model.
        head: its LM head; only configs of modules that contain it count. By default all of them do.

    Returns:
        scale and soft cap; a scale of one and no cap if no config says anything.
    """
    doubt = ""
    for config in _configs(model, head):
        transform = config_transform(config)
        if transform.scale != 1 or transform.softcap is not None:
            return transform
        doubt = doubt or transform.source
    return LogitTransform(source=doubt)


def config_transform(config: Any) -> LogitTransform:
    """Read one config, an object or a mapping such as a config.json, and the parts of it that a language model has."""
    doubt = ""
    for part in (config, *(_read(config, name) for name in PARTS)):
        if part is None:
            continue
        transform = _transform_of(part, str(_read(part, "model_type") or _read(config, "model_type") or ""))
        if transform.scale != 1 or transform.softcap is not None:
            return transform
        doubt = doubt or transform.source
    return LogitTransform(source=doubt)


def _configs(model: Module, head: Module | None) -> Iterator[Any]:
    """Yield the configs of the modules that contain the head, the innermost first, each once."""
    seen = set()
    for module in reversed(list(model.modules())):
        config = getattr(module, "config", None)
        if config is None or id(config) in seen:
            continue
        if head is None or any(part is head for part in module.modules()):
            seen.add(id(config))
            yield config


def _read(config: Any, name: str) -> Any:
    """Return a field of a config, an object or a mapping; None if there is none."""
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception as error:  # a property may fail on a config that is incomplete
        if handled_signals(error):
            raise
        return None


def _transform_of(config: Any, model_type: str) -> LogitTransform:
    """Read one config. `source` has the fields that were used, or what is wrong with the first that was not."""
    scale, cap, sources, doubts = 1.0, None, [], []
    for field in {field.name: field for field in SCALES}:
        value = _read(config, field)
        if value is None or any(model_type.startswith(kind) and field == name for kind, name in HARMLESS):
            continue
        use = next((f for f in SCALES if f.name == field and model_type.startswith(f.models)), None)
        number = _number(value)
        if number is None:
            doubts.append(f"{field} of the model's config is {value!r}, not a number other than zero, and was not used")
        elif use is not None:
            scale *= 1 / number if use.divides else number
            sources.append(f"{field} = {number:g}")
        elif number != 1:
            doubts.append(f"{field} = {number:g} of the config was not used: unknown for the model type {model_type!r}")
    for field in SOFTCAPS:
        value = _read(config, field)
        number = None if value is None else _number(value)
        if number is not None and number > 0:
            cap = number
            sources.append(f"{field} = {number:g}")
        elif value not in (None, False, 0):
            doubts.append(f"{field} of the model's config is {value!r}, not a positive number, and was not used")
    if sources and (scale != 1 or cap is not None):
        return LogitTransform(scale, cap, f"the config of {model_type or 'the model'}: {', '.join(sources)}")
    return LogitTransform(source=doubts[0] if doubts else "")


def _number(value: Any) -> float | None:
    """Return a finite number other than zero, or None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) and number != 0 else None


# Measured

SAMPLE = 8192
"""Entries of a batch that are compared."""
_CAPS = 64  # that are tried before the best is refined


@torch.no_grad()
def explain_logits(head_output: Tensor, logits: Tensor) -> LogitTransform | None:
    """Find the scale, or the scale and soft cap, that make a batch's logits of its head's output.

    A soft cap far above the logits of the batch is found only as far as their precision shows it: in bf16 a cap of 30
    does not show in logits below 3.

    Args:
        head_output: (..., V) what the head returned.
        logits: the same shape: what the model returned.

    Returns:
        the transform, or None if neither explains the logits to the precision of the tensors, if the shapes differ, or
        if there is nothing to compare.
    """
    if head_output.shape != logits.shape or not (head_output.is_floating_point() and logits.is_floating_point()):
        return None
    x, y = _sample(head_output, logits)
    if len(x) < 2 or not bool(x.any()) or not bool(y.any()):
        return None
    eps = max(torch.finfo(t.dtype).eps for t in (head_output, logits))
    tolerance = 4 * max(eps, torch.finfo(torch.float32).eps) * float(y.abs().max())
    scale = float((x * y).sum() / (x * x).sum())
    if float((scale * x - y).abs().max()) <= tolerance:
        scale = 1.0 if abs(scale - 1) <= 4 * eps else scale
        return LogitTransform(scale, None, "the head's output and the logits of one batch")
    transform = _fitted_cap(x, y)
    return transform if float((transform.apply(x) - y).abs().max()) <= 4 * tolerance else None


def _sample(head_output: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return entries of both (n,) in fp64: an even sample and the largest, without those that are not finite."""
    x, y = head_output.detach().reshape(-1), logits.detach().reshape(-1)
    finite = (x.isfinite() & y.isfinite()).nonzero().squeeze(1)
    even = finite[:: max(1, -(-len(finite) // SAMPLE))]
    largest = finite[x[finite].float().abs().topk(min(64, len(finite))).indices]
    at = torch.cat([even, largest])
    return x[at].double().cpu(), y[at].double().cpu()


def _fitted_cap(x: Tensor, y: Tensor) -> LogitTransform:
    """Fit y = cap tanh(scale x / cap): a search over the cap, in steps and then by thirds, for the smallest error."""

    def fit(log_cap: float) -> tuple[float, LogitTransform]:
        cap = math.exp(log_cap)
        share = (y / cap).clamp(-1 + 1e-12, 1 - 1e-12)
        weight = (1 - share * share).square()  # the inverse of tanh magnifies rounding near the cap
        scale = float((weight * cap * torch.atanh(share) * x).sum() / (weight * x * x).sum())
        transform = LogitTransform(scale, cap, "the head's output and the logits of one batch")
        return float((transform.apply(x) - y).square().sum()), transform

    start = math.log(float(y.abs().max()) * (1 + 1e-9))
    step = math.log(1e4) / _CAPS
    best = min(range(_CAPS), key=lambda k: fit(start + k * step)[0])
    low, high = start + max(best - 1, 0) * step, start + (best + 1) * step
    for _ in range(80):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, right) if fit(left)[0] < fit(right)[0] else (left, high)
    return fit((low + high) / 2)[1]
