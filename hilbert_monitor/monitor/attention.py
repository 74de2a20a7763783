"""The largest attention logit of a forward pass, where the model calls torch's scaled_dot_product_attention.

The calls are seen by a mode of torch, so that nothing of the model changes. A model that computes its attention by
other means (a kernel of its own, matrix products by hand) is not seen, and has no number: none is guessed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class AttentionLogits(TorchFunctionMode):
    """Within the block, `largest` is the largest |logit| that a softmax of attention was given; None if none was.

    Positions that a mask excludes do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._maxima: list[Tensor] = []

    @property
    def largest(self) -> float | None:
        """Over all calls so far."""
        return float(torch.stack([x.float() for x in self._maxima]).amax()) if self._maxima else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at a call of attention, and pass every call on."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            with torch.no_grad():
                self._look(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> None:
        q, k = query.detach().float(), key.detach().float()
        if enable_gqa and q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        logits = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        excluded: Tensor | None = None
        if is_causal:
            excluded = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        elif attn_mask is not None and attn_mask.dtype == torch.bool:
            excluded = ~attn_mask
        elif attn_mask is not None:
            excluded = attn_mask < -1e4
        if excluded is not None:
            logits = logits.masked_fill(excluded, 0.0)
        if logits.numel():
            self._maxima.append(logits.abs().amax())
