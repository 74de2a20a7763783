"""What a checkpoint says of its LM head: the head itself, and the step that its optimizer's moments would make next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from hilbert_monitor.geometry import Interval, row_diameter, row_statistics, spectral_norm
from hilbert_monitor.monitor.head import config_transform
from hilbert_monitor.monitor.measure import efficiencies, increment_quality

from .checkpoint import open_checkpoint
from .head_names import HeadTensor, find_head_tensor
from .moments import HeadMoments, head_moments
from .next_step import ASSUMED, NextStep, next_step
from .tensor_store import CheckpointError
from .token_names import token_names

Pair = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class StepLook:
    """The step that the moments would make next, as it acts on the logits."""

    optimizer: str
    learning_rate: float
    count: float | None
    diameter: float
    pair: Pair
    pair_text: tuple[str, str] | None
    ceiling: float | None
    saturation: float | None
    spectral_norm: float
    gauge_waste: float
    efficiency_lower: float | None
    efficiency_upper: float | None
    matched: str
    """How the optimizer's state was told to be the head's."""
    assumed: str = ASSUMED


@dataclass(frozen=True, kw_only=True)
class HeadLook:
    """The head of one checkpoint, as it acts on the logits."""

    path: str
    kind: str
    step: int | None
    head: str
    tokens: int
    width: int
    dtype: str
    transposed: bool
    tied: str
    bias: bool
    logit_scale: float
    diameter: float
    pair: Pair
    pair_text: tuple[str, str] | None
    mean_row: float
    """|mean of the rows|, which softmax does not see."""
    row_norm: float
    """Mean of the rows' norms."""
    spectral_norm: float
    nonfinite_rows: int
    remarks: list[str] = field(default_factory=list)
    next: StepLook | None = None


@torch.no_grad()
def look(
    path: Path,
    *,
    head: str | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    efficiency: float = 1.0,
    trust: bool = False,
) -> HeadLook:
    """Measure the head of a checkpoint.

    Cost: memory of about two matrices of the head's size; six with an optimizer's state, nine while the efficiency is
    bracketed. A random head of V = 50,257 and d = 768, the worst case of the search, takes half a minute of one core.

    Args:
        path: the checkpoint.
        head: name of the head's tensor or module; by default it is looked for.
        vocab_size: rows that are tokens, if the head is padded.
        tokenizer: a tokenizer.json; by default the one beside the weights.
        efficiency: seconds in which the best descent of the moment is bracketed; 0 for none.
        trust: unpickle objects of any class, which runs code of the file.
    """
    checkpoint = open_checkpoint(path, trust=trust)
    found = find_head_tensor(checkpoint.tensors, checkpoint.config, head=head)
    rows = found.info.shape[1 if found.transposed else 0]
    if vocab_size is not None and vocab_size > rows:
        raise CheckpointError(f"--vocab-size is at most the {rows:,} rows of {found.name}, got {vocab_size:,}")
    transform = config_transform(checkpoint.config)
    names = token_names(tokenizer or checkpoint.tokenizer)
    U = _token_rows(checkpoint.tensors.load(found.name), found, vocab_size)
    if not U.numel():
        raise CheckpointError(
            f"the head {found.name} is empty, {tuple(U.shape)}: it is the part of one rank, or was saved without its"
            " numbers; gather the model's weights and save them again"
        )
    exact, statistics, scale = row_diameter(U), row_statistics(U), abs(transform.scale)
    remarks = [] if transform.softcap is None else [f"the logits are soft-capped at {transform.softcap:g}"]
    moments = head_moments(checkpoint, found)
    if moments is None and checkpoint.optimizers:
        remarks.append("the optimizer's state was not told apart: no parameter of it is surely the head")
    following = None if moments is None else next_step(moments)
    if moments is not None and following is None:
        remarks.append("the optimizer is not Adam, AdamW, SGD, RowNorm or our Muon, and the step it makes is not known")
    return HeadLook(
        path=str(path),
        kind=checkpoint.kind,
        step=checkpoint.step,
        head=found.name,
        tokens=U.shape[0],
        width=U.shape[1],
        dtype=str(found.info.dtype).removeprefix("torch."),
        transposed=found.transposed,
        tied=found.tied,
        bias=bool(found.bias),
        logit_scale=transform.scale,
        diameter=exact.value * scale,
        pair=exact.pair,
        pair_text=names(exact.pair),
        mean_row=statistics.norm_of_mean * scale,
        row_norm=statistics.mean_norm * scale,
        spectral_norm=spectral_norm(U).upper * scale,
        nonfinite_rows=exact.nonfinite_rows,
        remarks=remarks,
        next=None
        if following is None or moments is None
        else _look_ahead(following, moments, found, vocab_size, scale, names, efficiency),
    )


def _look_ahead(
    step: NextStep,
    moments: HeadMoments,
    head: HeadTensor,
    vocab_size: int | None,
    scale: float,
    names: Callable[[Pair], tuple[str, str] | None],
    budget: float,
) -> StepLook:
    S = _token_rows(step.S, head, vocab_size)
    exact = row_diameter(S)
    moment = _token_rows(moments.moment, head, vocab_size) if budget else None
    quality = increment_quality(S)
    diameter = Interval(exact.lower, exact.upper)
    quality |= efficiencies(S, None, {"exp_avg": moment}, diameter, budget=budget)
    ceiling = None if step.ceiling is None or head.transposed else step.ceiling
    return StepLook(
        optimizer=step.optimizer,
        learning_rate=step.learning_rate,
        count=step.count,
        diameter=exact.value * scale,
        pair=exact.pair,
        pair_text=names(exact.pair),
        ceiling=None if ceiling is None else ceiling * scale,
        saturation=exact.value / ceiling if ceiling else None,
        spectral_norm=quality["spectral_norm"] * scale,
        gauge_waste=quality["gauge_waste"],
        efficiency_lower=quality.get("moment_efficiency_lower"),
        efficiency_upper=quality.get("moment_efficiency_upper"),
        matched=moments.matched,
    )


def _token_rows(x: Tensor, head: HeadTensor, vocab_size: int | None) -> Tensor:
    """The rows of tokens (V, d), in a dtype that the geometry takes."""
    rows = (x.t() if head.transposed else x)[:vocab_size]
    return rows if rows.dtype.itemsize >= 2 else rows.to(torch.float32)
