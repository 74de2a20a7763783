"""What a record says of the logits of the panel: those of the model itself, in whatever form the head comes."""

import math

import pytest
import torch
from hilbert_monitor.monitor.logit_shape import POSITIONS, LogitShape, panel_targets
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from hilbert_monitor.monitor.panel import Panel, next_tokens
from hilbert_monitor.monitor.probe import Probe
from tests.support.references import logit_numbers, normal

V, T = 53, 12
TEXT = torch.randint(V, (10 * T,), generator=torch.Generator().manual_seed(3))


class Model(nn.Module):
    def __init__(self, *, bias=False, cap=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(V, 16), nn.LayerNorm(16), nn.Linear(16, V, bias=bias)
        self.cap = cap
        if cap is not None:
            self.config = {"final_logit_softcapping": cap}
        with torch.no_grad():
            self.head.weight.mul_(20).add_(0.2)

    def forward(self, ids):
        logits = self.head(self.norm(self.embed(ids)))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def last_record(model, *, autocast=None, steps=10, **options):
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    panel = Panel.of_tokens(TEXT, len(TEXT), T)
    with Probe(
        model, optimizer, head="head", panel=panel, perturbation_every=5, autocast=autocast, strict=True, **options
    ) as probe:
        for _ in range(steps):
            loss = cross_entropy(model(TEXT.view(-1, T)[:, :-1]).flatten(0, 1), TEXT.view(-1, T)[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record = probe.record(train_loss=loss.item())
    return record, panel


@pytest.mark.parametrize("kind", ["plain", "bias", "frozen bias", "soft cap"])
def test_numbers_are_those_of_the_models_own_logits(kind):
    model = Model(bias="bias" in kind, cap=8.0 if kind == "soft cap" else None)
    if kind == "frozen bias":
        model.head.bias.requires_grad_(False).fill_(0.7)
    record, panel = last_record(model)
    with torch.no_grad():
        logits = torch.cat([model(batch).flatten(0, 1) for batch in panel.batches]).double()
    mean, log_z, largest = logits.mean(1), torch.logsumexp(logits, 1), logits.abs().max()
    for name, values in (("mean_logit", mean), ("log_z", log_z), ("centred_log_z", log_z - mean)):
        assert getattr(record, f"{name}_rms") == pytest.approx(float(values.square().mean().sqrt()), rel=1e-4)
        assert getattr(record, f"{name}_min") == pytest.approx(float(values.min()), rel=1e-4, abs=1e-4)
        assert getattr(record, f"{name}_max") == pytest.approx(float(values.max()), rel=1e-4, abs=1e-4)
    assert record.logit_max == pytest.approx(float(largest), rel=1e-4)
    assert record.centred_log_z_min >= math.log(V) - 1e-4
    assert record.precision_loss is None  # logits in fp32 lose nothing
    weight = model.head.weight.detach().double()
    assert record.head_mean_row == pytest.approx(float(weight.mean(0).norm()), rel=1e-5)
    assert record.head_row_norm == pytest.approx(float(weight.norm(dim=1).mean()), rel=1e-5)


def test_a_run_under_autocast_is_told_what_its_precision_costs():
    model = Model()
    record, panel = last_record(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    targets, errors = panel_targets(panel), []
    with torch.no_grad():
        states = torch.cat([model.norm(model.embed(batch)).flatten(0, 1) for batch in panel.batches])
    for rounded in (True, False):
        h, U = (x.bfloat16().double() if rounded else x.double() for x in (states, model.head.weight.detach()))
        logits = h @ U.T
        logits = logits.float().bfloat16().double() if rounded else logits
        errors.append(cross_entropy(logits, targets.clamp_min(0), reduction="none")[targets >= 0])
    error = errors[0] - errors[1]
    assert record.precision_loss_rms == pytest.approx(float(error.square().mean().sqrt()), rel=0.1)
    assert record.precision_loss == pytest.approx(float(error.mean()), abs=0.1 * record.precision_loss_rms)


def test_logits_of_an_fp32_head_inside_an_autocast_run_lose_nothing():
    class Careful(Model):
        def forward(self, ids):
            with torch.autocast("cpu", enabled=False):
                return super().forward(ids)

    record, _ = last_record(Careful(), autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert record.log_z_rms is not None
    assert record.precision_loss is None


@pytest.mark.parametrize("form", ["ids", "pair", "labels", "labels with ignored ones"])
def test_the_next_token_is_found_in_every_form_of_batch(form):
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = torch.tensor([[2, 3, 4, -100], [6, 7, 8, -100]])
    batch = ids
    if form == "pair":
        batch = (ids[:, :-1], ids[:, 1:])
        expected = ids[:, 1:]
    elif form == "labels":
        batch = {"input_ids": ids, "labels": ids.clone()}
    elif form == "labels with ignored ones":
        labels = ids.clone()
        labels[0, 2] = -100
        batch = {"input_ids": ids, "labels": labels}
        expected = expected.clone()
        expected[0, 1] = -100
    assert next_tokens(batch).tolist() == expected.tolist()


def test_padding_is_no_token_that_follows():
    ids = torch.tensor([[1, 2, 0, 0]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0, 0]])}
    assert next_tokens(batch).tolist() == [[2, -100, -100, -100]]


def test_a_large_panel_is_looked_at_evenly():
    U, H = normal(0, 30, 4).float(), normal(1, 5 * POSITIONS + 3, 4).float()
    targets = torch.full((len(H),), -1)
    shape = LogitShape.of(U, H, targets, round_to=torch.bfloat16)
    mean, *_ = logit_numbers(U, H[::6])
    assert shape.mean_logit_rms == pytest.approx(float(mean.square().mean().sqrt()), rel=1e-5)
    assert shape.precision_loss is None  # no position has a target
