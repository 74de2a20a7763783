"""Layers in their own rulers: the numbers of a decomposition, rules that name the first to move, and no trace left."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import SGD, AdamW

from hilbert_monitor import Muon, watch
from hilbert_monitor.monitor.layers import AttentionLogits, LayerMonitor
from hilbert_monitor.monitor.runtime import Guard
from hilbert_monitor.optim import ChainedOptimizer
from hilbert_monitor.runs.alerts import LayerJudge, Rules
from hilbert_monitor.runs.reader import LAYERS, RunReader
from hilbert_monitor.runs.record import Layer, LayerRecord, StepRecord

V, T = 31, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(V, 16), nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.lm_head = nn.Linear(16, V, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (part(x).view(*ids.shape, 2, 8).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.lm_head(self.norm(x))


def batches(number):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(V, (4, T + 1), generator=draw) for _ in range(number)]


def chained(model):
    matrices = [model.q.weight, model.k.weight, model.v.weight]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return ChainedOptimizer(Muon(matrices, lr=1e-2, weight_decay=0.1), AdamW(rest, lr=1e-2))


MAKES = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1),
    "Muon and AdamW": chained,
}


def train_step(model, optimizer, batch):
    loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def monitor_of(model, optimizer, **options):
    options = {"guard": Guard(strict=True), "every": 1} | options
    return LayerMonitor(model, [optimizer], model.lm_head.weight, **options)


def measured(layers, step, batch, model, optimizer):
    """Make a step, and return the record of the layers."""
    layers.begin(step)
    train_step(model, optimizer, batch)
    layers.end(step)
    return layers.complete(StepRecord(step=step, time=0.0))[1]


SIZES = {"embedding": lambda x: x.norm(dim=1).max(), "vector": lambda x: x.square().mean().sqrt()}


@pytest.mark.parametrize("make", MAKES)
def test_each_layer_is_measured_in_its_own_ruler(make):
    model = Model()
    optimizer = MAKES[make](model)
    layers = monitor_of(model, optimizer)
    for number, batch in enumerate(batches(12), 1):
        before = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        record = measured(layers, number, batch, model, optimizer)
    assert {*record.layers} == before.keys() - {"lm_head.weight"}
    kinds = {name: layer.kind for name, layer in record.layers.items()}
    assert (kinds["embed.weight"], kinds["q.weight"], kinds["norm.bias"]) == ("embedding", "matrix", "vector")
    for name, layer in record.layers.items():
        after = model.get_parameter(name).detach().double()
        decay = {"AdamW": 0.1, "SGD": 0.0}.get(make, 0.1 if layer.kind == "matrix" else 0.01)
        S = after - (1 - layer.lr * decay) * before[name]
        if layer.kind == "matrix":
            expected = [float(torch.linalg.matrix_norm(x, 2)) for x in (S, after)]
            assert 0.5 * expected[0] <= layer.step <= expected[0] * 1.001  # plain gradients turn from step to step
            assert 0.9 * expected[1] <= layer.weight <= expected[1] * 1.001
        else:
            assert layer.step == pytest.approx(float(SIZES[layer.kind](S)), rel=2e-3)
            assert layer.weight == pytest.approx(float(SIZES[layer.kind](after)), rel=1e-5, abs=1e-8)
        assert (layer.ratio is not None) == (make == "AdamW" or (make != "SGD" and layer.kind != "matrix"))
    if make == "AdamW":
        layer, v = record.layers["q.weight"], optimizer.state[model.q.weight]["exp_avg_sq"].double() / (1 - 0.999**12)
        expected = (model.q.weight.grad.double().square() / v).mean().sqrt()
        assert layer.ratio == pytest.approx(float(expected), rel=1e-5)


def test_a_step_whose_record_comes_later_keeps_its_layers():
    """On an accelerator the record of a step is made when the next one has begun, or later still."""
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    layers, steps = monitor_of(model, optimizer), {}
    for step, batch in enumerate(batches(3), 1):
        layers.begin(step)
        before = model.q.weight.detach().double().clone()
        train_step(model, optimizer, batch)
        layers.end(step)
        steps[step] = float(torch.linalg.matrix_norm(model.q.weight.detach().double() - (1 - 1e-4) * before, 2))
    for step, norm in steps.items():
        record, measured, _ = layers.complete(StepRecord(step=step, time=0.0, seconds={"bracket": 1.0}, share=0.5))
        assert measured.step == step
        assert 0.5 * norm <= measured.layers["q.weight"].step <= norm * 1.001
        assert record.layer_step == max(layer.relative for layer in measured.layers.values())
        assert record.seconds["layers"] > 0
        assert record.share > 0.5
        assert layers.complete(record)[1] is None  # once


class Own(AdamW):
    """With a step of its own, so that nothing is known of its weight decay."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("decay", [None, "decoupled"])
def test_layers_whose_decay_is_not_known_are_left_out_unless_the_user_says_what_it_is(decay):
    model, remarks = Model(), []
    optimizer = Own(model.parameters(), lr=0.1, weight_decay=0.5)
    layers = monitor_of(model, optimizer, remark=remarks.append, decay=decay)
    before = model.norm.weight.detach().double().clone()
    record = measured(layers, 1, batches(1)[0], model, optimizer)
    if decay is None:
        assert record is None
        assert remarks == ["the weight decay of 6 layers is not known, and neither are their steps: they are left out"]
    else:
        S = model.norm.weight.detach().double() - (1 - 0.05) * before
        assert record.layers["norm.weight"].step == pytest.approx(float(SIZES["vector"](S)), rel=1e-5)
        assert remarks == []


def test_a_layer_that_cannot_be_measured_costs_numbers_and_not_the_run():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    guard = Guard()
    layers = monitor_of(model, optimizer, guard=guard)
    optimizer.register_step_post_hook(lambda *_: optimizer.state[model.embed.weight].pop("exp_avg", None))
    with pytest.warns(UserWarning, match="layers failed"):
        record = measured(layers, 1, batches(1)[0], model, optimizer)
    assert record.layers.keys() == {layer.name for layer in layers.layers} - {"embed.weight"}
    assert guard.failures["layers"] == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("make", MAKES)
def test_a_run_with_layers_is_bit_for_bit_the_run_without_and_its_file_is_read(make, tmp_path):
    def trained(layers):
        model = Model()
        optimizer = MAKES[make](model)
        panel = batches(1)[0][:, :-1]
        options = {"layers": layers, "run_dir": str(tmp_path / str(layers)), "perturbation_every": 20, "strict": True}
        options |= {"panel_size": 32}
        torch.manual_seed(7)
        with watch(model, optimizer, panel=panel, **options) as run:
            for batch in batches(40):
                run.step(loss=train_step(model, optimizer, batch))
        return model, optimizer, torch.get_rng_state()

    (plain, plain_optimizer, plain_rng), (model, optimizer, rng) = trained(False), trained(True)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(plain_rng, rng)
    assert repr(plain_optimizer.state_dict()) == repr(optimizer.state_dict())
    (folder,) = (tmp_path / "True").iterdir()
    records = RunReader(folder).layers()
    assert [record.step for record in records] == [10, 20, 30, 40]
    assert all("q.weight" in record.layers for record in records)
    steps = {record.step: record for record in RunReader(folder).steps()}
    assert steps[20].layer_step == max(layer.relative for layer in records[1].layers.values())
    assert steps[20].attention_logit > 0
    assert steps[11].layer_step is None
    (without,) = (tmp_path / "False").iterdir()
    assert RunReader(without).layers() == []
    assert not (without / LAYERS).exists()


# Attention


@pytest.mark.parametrize("mask", ["causal", "bool", "float", "none"])
def test_the_largest_attention_logit_is_that_of_positions_that_are_seen(mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4) for _ in range(3))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    masks = {"bool": ~later, "float": torch.zeros(5, 5).masked_fill(later, -torch.inf), "none": None, "causal": None}
    plain = scaled_dot_product_attention(q, k, v, masks[mask], is_causal=mask == "causal")
    with AttentionLogits() as seen:
        assert seen.largest is None
        output = scaled_dot_product_attention(q, k, v, masks[mask], is_causal=mask == "causal")
    logits = (q.double() @ k.double().mT / 2).masked_fill(later & torch.tensor(mask != "none"), 0.0)
    assert seen.largest == pytest.approx(float(logits.abs().max()), rel=1e-5)
    assert torch.equal(plain, output)


# Rules


def layer_records(number, names=("a", "b", "c"), seed=0):
    draw = random.Random(seed)
    for step in range(10, 10 * number + 1, 10):
        layers = {
            name: Layer(kind="matrix", step=0.01 * math.exp(draw.gauss(0, 0.1)), weight=1.0, lr=0.1) for name in names
        }
        yield LayerRecord(step=step, time=float(step), layers=layers)


def grown(record, factors):
    layers = {
        name: Layer(kind="matrix", step=layer.step * factors.get(name, 1.0), weight=layer.weight, lr=layer.lr)
        for name, layer in record.layers.items()
    }
    return LayerRecord(step=record.step, time=record.time, layers=layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_many_calm_layers_share_one_dial(seed):
    judge = LayerJudge(Rules(false_alarms_per_10k=1.0))
    names = [str(n) for n in range(60)]
    assert [alert for record in layer_records(150, names, seed) for alert in judge.judge(record)] == []
