"""Heads whose weight is computed from other parameters: S is the difference of the effective weight, and nothing else
of the run is another than without the monitor."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.optim import SGD, AdamW

from hilbert_monitor import Probe
from hilbert_monitor.monitor.panel import Panel
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.references import all_pairs_diameter, deltas

V, D, RANK, UPDATES = 43, 12, 3, 4


class Doubled(nn.Module):
    """A parametrization of one's own, that writes to a buffer and draws random numbers in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, X):
        self.calls += 1
        return 2 * X if not self.training else 2 * X + 0 * torch.rand_like(X)


class Lora(nn.Module):
    """An adapter of one's own, on a head that is frozen."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(D, RANK, bias=False), nn.Linear(RANK, V, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(self.dropout(x)))


class Beside(nn.Linear):
    """An adapter that is the frozen head itself, with two matrices beside its weight."""

    def __init__(self):
        super().__init__(D, V, bias=False)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(RANK, D)), nn.Parameter(0.1 * torch.randn(V, RANK))

    def forward(self, x):
        return super().forward(x) + x @ self.a.t() @ self.b.t()


def adapted(model):
    model.lm_head = Lora(model.lm_head)


def beside(model):
    model.lm_head = Beside()


def old_weight_norm(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight_norm(model.lm_head)


KINDS = {
    "weight_norm": lambda m: parametrizations.weight_norm(m.lm_head),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m.lm_head),
    "orthogonal": lambda m: parametrizations.orthogonal(m.lm_head, orthogonal_map="cayley"),
    "custom": lambda m: parametrize.register_parametrization(m.lm_head, "weight", Doubled()),
    "old weight_norm": old_weight_norm,
    "old spectral_norm": lambda m: spectral_norm(m.lm_head),
    "pruned": lambda m: prune.random_unstructured(m.lm_head, "weight", amount=0.5),
    "adapter": adapted,
    "beside": beside,
}


def made(kind, **options):
    model = seeded(Plain, V=V, d=D, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        KINDS[kind](model)
    return model.train()


def matrix(model):
    """The effective weight, as the head in eval mode makes it of the unit vectors. (V, d) fp64."""
    head = model.lm_head.eval()
    with torch.no_grad():
        U = head(torch.eye(D)).double() - head(torch.zeros(1, D)).double()
    head.train()
    return U.t()


def train(model, optimizers, probe=None, updates=UPDATES):
    """Train; return the last record, and the change of the effective weight in the last update."""
    torch.manual_seed(5)
    record = change = None
    for update in range(updates):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, update, V).backward()
        before = matrix(model)
        for optimizer in optimizers:
            optimizer.step()
        record = probe.record() if probe else None
        change = matrix(model) - before
    return record, change


def state(model, optimizer):
    """Everything of a run: parameters, buffers, moments, random numbers."""
    moments = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    return [*model.state_dict().values(), *moments, torch.get_rng_state(), torch.rand(1)]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_of_a_computed_head_is_that_of_its_effective_weight_and_training_is_the_same_to_the_bit(kind):
    runs = []
    for watched in (False, True):
        model = made(kind)
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
        panel = torch.randint(V, (4, 7), generator=torch.Generator().manual_seed(1))
        probe = None
        if watched:
            probe = Probe(
                model, optimizer, panel=Panel.of_tokens(panel, 20), diameter_every=1, perturbation_every=UPDATES,
                efficiency=True, strict=True,
            ).attach()  # fmt: skip
        record, change = train(model, [optimizer], probe)
        runs.append(state(model, optimizer))
    assert all(map(torch.equal, *runs))
    assert record.diameter == pytest.approx(all_pairs_diameter(change), rel=1e-4)
    H = model.eval().hidden(panel).detach().reshape(-1, D)[:20].double()
    assert record.perturbation_rms == pytest.approx(float(deltas(change, H).square().mean().sqrt()), rel=1e-3)
    assert record.backward_bound > 0
    assert record.ceiling is None
    assert record.increment_from == "step"
    assert "S is the difference of the effective weight" in probe.remarks[0]


def test_the_effective_weight_is_formed_on_measured_steps_alone():
    model, calls = made("custom"), []
    optimizer = SGD(model.parameters(), lr=0.1)
    head = model.lm_head.parametrizations.weight
    with Probe(model, optimizer, diameter_every=4, perturbation_every=0, strict=True) as probe:
        compute = probe.head.effective._compute
        probe.head.effective._compute = lambda: (calls.append(probe.step), compute())[1]
        for update in range(8):
            optimizer.zero_grad()
            loss_of(model, update, V).backward()
            optimizer.step()
            record = probe.record()
            assert (record.diameter is not None) == (update % 4 == 3)
            assert (record.diameter_upper is not None) == (update % 4 == 3)
    assert set(calls) <= {3, 4, 7, 8}
    assert int(head[0].calls) == 8 * 1 + int(seeded(Doubled).calls) + 1  # one a forward pass, one when it was made


def test_parts_with_optimizers_of_their_own_are_measured_over_whole_updates():
    model = made("adapter")
    rest = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("lm_head.up")]
    optimizers = [SGD(rest, lr=0.1), SGD(model.lm_head.up.parameters(), lr=0.3)]
    with Probe(model, optimizers, diameter_every=1, perturbation_every=0, strict=True) as probe:
        record, change = train(model, optimizers, probe)
    assert record.increment_from == "update"
    assert record.diameter == pytest.approx(all_pairs_diameter(change), rel=1e-4)


def test_the_bias_of_a_computed_head_is_a_column_of_its_step():
    model = made("weight_norm", bias=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = model.lm_head.bias.detach().double().clone()
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        record, change = train(model, [optimizer], probe, updates=1)
    S = torch.cat([change, (model.lm_head.bias.detach().double() - before)[:, None]], 1)
    assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-4)


def test_an_adapter_that_is_no_linear_map_is_refused():
    model = made("adapter")
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: torch.relu(forward(x))
    with pytest.raises(TypeError, match=r"an adapter, a Lora, and no linear map of its input"):
        Probe(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), head="lm_head")


def test_a_step_below_the_spacing_of_a_frozen_bf16_weight_is_seen():
    model = made("adapter")
    model.lm_head.base_layer.bfloat16()
    base = model.lm_head.base_layer
    base.forward = lambda x: nn.functional.linear(x.to(base.weight.dtype), base.weight).float()
    optimizer = SGD(model.lm_head.up.parameters(), lr=1e-5)
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        before = model.lm_head.up.weight.detach().double().clone()
        loss_of(model, 0, V).backward()
        optimizer.step()
        record = probe.record()
    change = (model.lm_head.up.weight.detach().double() - before) @ model.lm_head.down.weight.detach().double()
    assert record.diameter == pytest.approx(all_pairs_diameter(change), rel=0.02)
