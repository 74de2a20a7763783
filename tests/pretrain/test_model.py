"""The paper's decoder: its size, its mathematics against plain references, and the chunked loss against the whole."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from hilbert_monitor.pretrain.model import Decoder, DecoderConfig, Norm
from hilbert_monitor.pretrain.recipe import PAPER

SMALL = DecoderConfig(vocab_size=61, width=32, blocks=3, head_dim=8, context=24)


def small(seed=0, config=SMALL):
    torch.manual_seed(seed)
    return Decoder(config)


def text(batch=2, length=24, V=61):
    ids = torch.randint(V, (batch, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize(("size", "parameters"), [("190M", 185_680_896), ("380M", 379_184_640), ("640M", 639_797_248)])
def test_the_papers_sizes_have_the_papers_numbers_of_parameters(size, parameters):
    config = PAPER[size].model
    assert (config.mlp_ratio, config.rope_base, config.eps, config.init_std) == (4, 10_000, 1e-6, 0.02)
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == parameters == config.parameters


def reference(model, tokens):
    """The decoder written out in fp64, with complex rotations and a softmax over the past."""
    c, T = model.config, len(tokens)
    W = {name: p.detach().double() for name, p in model.named_parameters()}
    half, future = c.head_dim // 2, torch.ones(T, T).triu(1).bool()
    angles = torch.outer(torch.arange(T).double(), c.rope_base ** (-torch.arange(half).double() / half))

    def norm(x):
        return x / (x.square().mean(-1, keepdim=True) + c.eps).sqrt()

    def heads(x):
        return x.unflatten(-1, (-1, c.head_dim)).transpose(0, 1)  # (heads, T, n)

    def rotated(x):
        z = torch.complex(*norm(x).split(half, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([z.real, z.imag], dim=-1)

    x = W["embed.weight"][tokens]  # (T, d)
    for k in range(c.blocks):
        names = ("q", "k", "v", "out", "gate", "up", "down")
        q, key, v, out, gate, up, down = (W[f"blocks.{k}.{name}.weight"].T for name in names)
        h = norm(x)
        scores = rotated(heads(h @ q)) @ rotated(heads(h @ key)).mT / math.sqrt(c.head_dim)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ heads(h @ v)
        x = x + mixed.transpose(0, 1).flatten(1) @ out
        h = norm(x)
        x = x + (nn.functional.silu(h @ gate) * (h @ up)) @ down
    return norm(x) @ W["lm_head.weight"].T


def test_logits_are_those_of_a_plain_reference_in_fp64():
    model = small()
    for p in model.parameters():
        p.data.mul_(10)  # or attention would be all but uniform
    tokens, _ = text(1, 9)
    assert_close(model(tokens)[0].double(), reference(model, tokens[0]), rtol=1e-4, atol=1e-4)


def test_a_norm_computes_in_fp32_and_returns_the_dtype_of_its_input():
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # whose squares fp16 cannot hold
    out = Norm(1e-6)(x)
    assert out.dtype == torch.float16
    assert_close(out, torch.ones_like(x))


def test_weights_are_drawn_in_the_order_of_the_modules_after_torchs_default_initialization():
    model = small(5)
    torch.manual_seed(5)
    nn.Embedding(61, 32)
    for _ in range(3):
        for inner, outer in [(32, 32)] * 4 + [(32, 128)] * 2 + [(128, 32)]:
            nn.Linear(inner, outer, bias=False)
    nn.Linear(32, 61, bias=False)
    for p in model.parameters():
        assert torch.equal(p, nn.init.normal_(torch.empty_like(p), std=0.02))


def loss_and_gradients(chunk, bf16):
    model = small()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model.loss(*text(), chunk=chunk)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_chunked_loss_and_its_gradients_are_the_plain_ones_and_in_bf16_as_near_to_fp32(chunk):
    exact, plain = loss_and_gradients(None, False), loss_and_gradients(None, True)
    for whole, parts in zip(exact, loss_and_gradients(chunk, False), strict=True):
        assert_close(whole, parts, rtol=1e-4, atol=1e-7)
    loss, gradients = loss_and_gradients(chunk, True)
    assert_close(plain[0], loss, rtol=1e-5, atol=1e-6)
    assert (gradients - exact[1]).norm() <= 1.05 * (plain[1] - exact[1]).norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 12}, "even divisor"),
        ({"width": 9, "head_dim": 3}, "even divisor"),
        ({"blocks": 0}, "blocks must be at least 1, got 0"),
        ({"context": 23}, "context is 23 tokens, got 24: cut the text"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(config=replace(SMALL, **changes))(text()[0])
