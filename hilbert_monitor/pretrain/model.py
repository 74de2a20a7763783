"""The paper's decoder: pre-norm blocks of causal attention and SwiGLU, an untied LM head without bias.

Parameters are fp32. Under autocast matrix products are bf16; norms, rotary embeddings and the loss stay fp32.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder."""

    vocab_size: int
    width: int
    blocks: int
    head_dim: int
    context: int
    mlp_ratio: int = 4
    rope_base: float = 10_000.0
    eps: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "blocks", "head_dim", "context", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.head_dim or self.head_dim % 2:
            raise ValueError(
                f"width must be a multiple of head_dim and head_dim even, got {self.width} and {self.head_dim}: choose"
                " an even divisor of the width"
            )

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        block = (4 + 3 * self.mlp_ratio) * self.width**2
        return 2 * self.vocab_size * self.width + self.blocks * block


class Norm(nn.Module):
    """RMS norm x / sqrt(mean(x^2) + eps), in fp32, without a gain."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotation of coordinates i and i + n/2 of a head by the angle position * base^(-2i/n)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        angles = torch.outer(torch.arange(config.context, dtype=torch.float32), config.rope_base**-half)  # (T, n/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate queries or keys (B, heads, T, n)."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then the MLP. Each normalizes the residual stream and adds its output to it."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        d, inner = config.width, config.mlp_ratio * config.width
        self.head_dim = config.head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(d, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, d, bias=False)
        self.norm = Norm(config.eps)

    def forward(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """Return the residual stream (B, T, d) after this block."""
        x = x + self.attention(self.norm(x), rotary)
        h = self.norm(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]

    def attention(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """Return causal attention with normalized, rotated queries and keys. A tensor-parallel rank has some heads."""
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotary(self.norm(q)), rotary(self.norm(k))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, n)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Head(nn.Linear):
    """The LM head without bias: logits (B, T, V) of hidden states (B, T, d), and their loss in chunks."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config.width, config.vocab_size, bias=False)

    def loss(self, states: Tensor, targets: Tensor, *, chunk: int | None = None) -> Tensor:
        """Return the mean cross entropy of targets (B, T), see `Decoder.loss`.

        Each tensor-parallel rank computes the logits of its tokens and exchanges a few numbers per position. The
        backward pass must run under torch's `loss_parallel` too.
        """
        h, labels = states.flatten(0, 1), targets.flatten()
        with loss_parallel() if isinstance(self.weight, DTensor) else nullcontext():
            if chunk is None:
                return _loss(h, self.weight, labels, reduction="mean")
            parts = [
                checkpoint(_summed_loss, rows, self.weight, part, use_reentrant=False, preserve_rng_state=False)
                for rows, part in zip(torch.split(h, chunk), torch.split(labels, chunk), strict=True)
            ]
        return torch.stack(parts).sum() / labels.numel()


class Decoder(nn.Module):
    """The paper's decoder, from tokens (B, T) to logits (B, T, V) in fp32.

    Every weight has torch's default initialization first. Then it is drawn from N(0, init_std^2), in module order, so
    that a seed gives the weights of the paper's code.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = Norm(config.eps)
        self.lm_head = Head(config)
        self.rotary = RotaryEmbedding(config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=config.init_std)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the hidden states (B, T, d) that enter the LM head."""
        return self._states(tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token."""
        return self.lm_head(self._states(tokens)).float()  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor, targets: Tensor, *, chunk: int | None = None) -> Tensor:
        """Return the mean cross entropy of targets (B, T).

        The head's forward does not run, so a monitor needs ``hidden=lambda model, tokens: model.hidden(tokens)``.

        Args:
            tokens: (B, T).
            targets: (B, T).
            chunk: positions whose logits are in memory at a time; the backward pass recomputes them.
        """
        return self.lm_head.loss(self._states(tokens), targets, chunk=chunk)

    def _states(self, tokens: Tensor) -> Tensor:
        """Return the hidden states. FSDP wraps `hidden` and gathers parameters there, so we do not call it."""
        if tokens.shape[-1] > self.config.context:
            raise ValueError(f"the context is {self.config.context} tokens, got {tokens.shape[-1]}: cut the text")
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.rotary)
        return self.norm(x)  # type: ignore[no-any-return]


def _summed_loss(h: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    device = h.device.type
    if torch.is_autocast_enabled(device):  # autocast's one cached copy would sum the chunks' gradients in bf16
        h, head = (x.to(torch.get_autocast_dtype(device)) for x in (h, head))
    return _loss(h, head, targets, reduction="sum")


def _loss(h: Tensor, head: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    """Return the cross entropy of targets (N,) from states (N, d), which all tensor-parallel ranks have."""
    if not isinstance(head, DTensor):
        return cross_entropy(linear(h, head).float(), targets, reduction=reduction)
    whole = DTensor.from_local(h, head.device_mesh, [Replicate()], run_check=False)
    loss: Tensor = cross_entropy(linear(whole, head).float(), targets, reduction=reduction).to_local()  # type: ignore[attr-defined]
    return loss
