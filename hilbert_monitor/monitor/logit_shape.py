"""Where the logits of the panel are, what they lose in the run's own precision, and the mean row of the head.

Measured under the weights after the step, on as many positions of the panel as a chunk of the product takes: every
eighth of 8,192.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hilbert_monitor.geometry import RowShards, RowSource, log_partition, row_statistics

from .batches import next_tokens
from .head import WatchedHead
from .head_rows import HeadRows, Matrix
from .panel import Panel

POSITIONS = 1024
"""Positions of the panel at which logits are looked at, evenly over it: an average needs no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitShape:
    """Mean logit z, A = log Z - z and log Z over the panel, the largest |logit|, and what precision costs."""

    mean_logit_rms: float
    mean_logit_min: float
    mean_logit_max: float
    centred_log_z_rms: float
    centred_log_z_min: float
    centred_log_z_max: float
    log_z_rms: float
    log_z_min: float
    log_z_max: float
    logit_max: float
    precision_loss: float | None = None
    precision_loss_rms: float | None = None

    @classmethod
    def of(
        cls,
        U: Matrix,
        H: Tensor,
        targets: Tensor,
        *,
        round_to: torch.dtype | None = None,
        softcap: float | None = None,
    ) -> LogitShape:
        """Measure a head (V, d) at hidden states (N, d), the same on all ranks.

        Args:
            U: makes logits of states.
            H: the states.
            targets: (N,) the tokens that follow, -1 where none does.
            round_to: the precision of the run's logits, if it is less than fp32.
            softcap: of the logits.
        """
        every = -(-len(H) // POSITIONS)
        H, targets = H[::every].contiguous(), targets[::every].contiguous()
        targets = targets.masked_fill(targets >= U.shape[0], -1)  # padding is no token
        exact = log_partition(U, H, targets, softcap=softcap)
        values = {"mean_logit": exact.mean, "centred_log_z": exact.centred, "log_z": exact.log_z}
        numbers = {f"{name}_{end}": number for name, x in values.items() for end, number in _ends(x).items()}
        if round_to is not None and bool((targets >= 0).any()):
            loss = log_partition(U, H, targets, softcap=softcap, round_to=round_to).loss - exact.loss
            loss = loss[(targets >= 0).to(loss.device)]
            numbers |= {"precision_loss": float(loss.mean()), "precision_loss_rms": float(loss.square().mean().sqrt())}
        return cls(**numbers, logit_max=float(exact.largest.max()))


def _ends(x: Tensor) -> dict[str, float]:
    rms, low, high = torch.stack([x.square().mean().sqrt(), x.min(), x.max()]).tolist()
    return {"rms": rms, "min": low, "max": high}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The mean row of the head, which softmax does not see, beside how long its rows are."""

    head_mean_row: float
    head_row_norm: float

    @classmethod
    def of(cls, U: Matrix, scale: float = 1.0) -> HeadShape:
        """Measure a head (V, d) whose logits are scaled by a factor."""
        rows = row_statistics(U)
        return cls(head_mean_row=rows.norm_of_mean * abs(scale), head_row_norm=rows.mean_norm * abs(scale))


def panel_targets(panel: Panel) -> Tensor:
    """Return the token that follows each position of a panel (N,), -1 where the text of the batch does not say."""
    parts = zip(panel.batches, panel.positions, strict=True)
    return torch.cat([next_tokens(batch).flatten()[positions].clamp_min(-1) for batch, positions in parts])


def logit_rows(head: WatchedHead) -> Matrix:
    """The matrix that makes logits of hidden states, after the step: (V, d), or (V, d + 1) with a bias.

    Nothing is sent, and without bias and scale nothing is copied.
    """
    U = head.weight_rows() if head.logit_scale == 1 else head.logit_matrix(torch.float32)
    bias = head.place.bias if head.bias is None else head.bias.param  # a frozen one may be anywhere
    if bias is None:
        return U
    entries = HeadRows(bias) if head.bias is None else head.bias.rows
    column = entries.matrix(entries.of(bias.detach()).float()[:, None] * head.logit_scale, head.vocab_size)
    if isinstance(U, RowShards) and isinstance(column, RowShards):
        rows = RowSource(U.rows, column.rows, form=lambda *x: torch.cat(x, 1), width=U.shape[1] + 1)
        return replace(U, rows=rows)
    assert isinstance(U, Tensor)
    assert isinstance(column, Tensor)
    return torch.cat([U, column], 1)


def logit_dtype(head: WatchedHead, output: torch.dtype | None) -> torch.dtype | None:
    """The precision in which the run's logits are formed, if it is less than fp32.

    Args:
        head: whose weight may be seen in less than it has.
        output: dtype of what the head returned in a forward pass, if that was seen.
    """
    dtype = output or head.source.seen_dtype or head.weight.dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None
