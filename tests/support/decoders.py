"""Small decoders of the kinds that people train: plain, tied, with raw parameters, inside a wrapper."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, d, bias):
        super().__init__()
        self.norm = nn.LayerNorm(d, bias=bias)
        self.up = nn.Linear(d, 2 * d, bias=bias)
        self.down = nn.Linear(2 * d, d, bias=bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Plain(nn.Module):
    """An embedding, blocks, a norm and an untied LM head."""

    def __init__(self, V=23, d=6, blocks=2, bias=False, head_rows=None):
        super().__init__()
        self.embed = nn.Embedding(V, d)
        self.blocks = nn.ModuleList(Block(d, bias) for _ in range(blocks))
        self.norm = nn.LayerNorm(d, bias=bias)
        self.lm_head = nn.Linear(d, head_rows or V, bias=bias)

    def hidden(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.lm_head(self.hidden(tokens))


class Tied(Plain):
    """Head and embedding share their weight."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lm_head.weight = self.embed.weight


class HuggingFace(Plain):
    """Its head has an unusual name, and `get_output_embeddings` returns it, as in Hugging Face models."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.projection = self.lm_head
        del self.lm_head

    def get_output_embeddings(self):
        return self.projection

    def forward(self, tokens):
        return self.projection(self.hidden(tokens))


class Square(nn.Module):
    """Vocabulary and width are equal, so that by its shape every matrix could be the head."""

    def __init__(self, d=6, blocks=2, head_name="unembed"):
        super().__init__()
        self.embed = nn.Embedding(d, d)
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(blocks))
        self.add_module(head_name, nn.Linear(d, d))
        self.head_name = head_name

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.get_submodule(self.head_name)(x)


class RawPositions(Plain):
    """Has matrices that belong to no Linear or Embedding, biases everywhere, and a matrix of one row."""

    def __init__(self, **kwargs):
        super().__init__(bias=True, **kwargs)
        d = self.embed.embedding_dim
        self.positions = nn.Parameter(0.1 * torch.randn(8, d))
        self.gate = nn.Linear(d, 1)
        self.blocks[0].mix = nn.Parameter(torch.randn(d, d))

    def hidden(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[-1]]
        x = x * self.gate(x).sigmoid() + x @ self.blocks[0].mix
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Wrapper(nn.Module):
    """A module that has a model as a child: "model" in a LightningModule, "_orig_mod" under torch.compile."""

    def __init__(self, model, name="model"):
        super().__init__()
        self.add_module(name, model)


def seeded(kind, seed=0, **kwargs):
    """A decoder whose weights depend only on the seed. The global random state is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind(**kwargs)


def batch(seed, V=23, length=7):
    """Random tokens, and the token that follows each of them."""
    text = torch.randint(V, (4, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


def loss_of(model, seed, V=23):
    """The cross entropy of the next token on the batch with this seed."""
    tokens, targets = batch(seed, V)
    return cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
