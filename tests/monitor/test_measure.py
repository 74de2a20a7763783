"""What is measured of a step: numbers from matrices, named as the fields of a record, and how they reach the host."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from hilbert_monitor import Probe
from hilbert_monitor.geometry import (
    Interval,
    row_diameter,
)
from hilbert_monitor.monitor import measure
from hilbert_monitor.monitor.panel import Panel, next_tokens
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.references import all_pairs_diameter, deltas, logit_numbers, normal

V, T = 53, 12
TEXT = torch.randint(V, (10 * T,), generator=torch.Generator().manual_seed(3))
S, G, H = normal(0, 40, 6).float(), normal(1, 40, 6).float(), normal(2, 9, 6).float()


# Numbers of matrices


def test_a_record_has_the_numbers_of_its_matrices():
    exact, gradient = measure.exact_diameter(S), measure.gradient_rows(G)
    assert exact["diameter"] == pytest.approx(all_pairs_diameter(S), rel=1e-6)
    assert exact["radius_lower"] <= exact["radius"] <= exact["diameter"] <= exact["diameter_upper"]
    assert exact["row_norm"] == pytest.approx(float(S.norm(dim=1).max()))
    assert gradient["gradient_row_token"] == int(G.norm(dim=1).argmax())
    assert gradient["gradient_balance"] == pytest.approx(float(G.sum(0).norm() / G.norm(dim=1).sum()))
    panel, head = measure.panel_perturbation(S, H), measure.head_rows(S, -2.0)
    assert panel["perturbation_rms"] == pytest.approx(float(deltas(S, H).square().mean().sqrt()), rel=1e-6)
    assert panel["hidden_norm"] == pytest.approx(float(H.norm(dim=1).max()))
    assert head["head_mean_row"] == pytest.approx(2 * float(S.mean(0).norm()), rel=1e-5)


def test_padding_takes_part_in_the_balance_and_is_no_token():
    G = torch.zeros(4, 2)
    G[0], G[3] = torch.tensor([1.0, 0.0]), torch.tensor([-3.0, 0.0])
    rows = measure.gradient_rows(G, tokens=3)
    assert (rows["gradient_row_token"], rows["gradient_row_norm"]) == (0, 1.0)
    assert rows["gradient_balance"] == pytest.approx(2 / 4)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_search_that_fails_leaves_the_bounds(monkeypatch):
    def fails(S):
        raise RuntimeError("no search")

    monkeypatch.setattr(measure, "row_diameter", fails)
    model = seeded(Plain, V=37, d=16)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with Probe(model, optimizer, diameter_every=1) as probe:
        loss_of(model, 0).backward()
        optimizer.step()
        record = probe.record()
    assert probe.guard.failures == {"diameter": 1}
    assert record.diameter is None
    assert 0 < record.diameter_lower <= record.diameter_upper


# Logits of the panel


class Model(nn.Module):
    def __init__(self, *, bias=False, cap=None, careful=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(V, 16), nn.LayerNorm(16), nn.Linear(16, V, bias=bias)
        self.cap, self.careful = cap, careful
        if cap is not None:
            self.config = {"final_logit_softcapping": cap}
        with torch.no_grad():
            self.head.weight.mul_(20).add_(0.2)

    def forward(self, ids):
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and not self.careful):
            logits = self.head(self.norm(self.embed(ids)))
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def last_record(model, *, autocast=None, steps=5, **options):
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    panel = Panel.of_tokens(TEXT, len(TEXT), T)
    options |= {"perturbation_every": 5, "autocast": autocast, "strict": True}
    with Probe(model, optimizer, head="head", panel=panel, **options) as probe:
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


def test_a_run_under_autocast_is_told_what_its_precision_costs():
    bf16 = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    model = Model()
    record, panel = last_record(model, autocast=bf16)
    targets, errors = measure.panel_targets(panel), []
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
    careful, _ = last_record(Model(careful=True), autocast=bf16)
    assert careful.log_z_rms is not None
    assert careful.precision_loss is None


def test_a_large_panel_is_looked_at_evenly():
    U, H = normal(0, 30, 4).float(), normal(1, 5 * measure.POSITIONS + 3, 4).float()
    fields = measure.panel_logits(U, H, torch.full((len(H),), -1), round_to=torch.bfloat16)
    mean, *_ = logit_numbers(U, H[::6])
    assert fields["mean_logit_rms"] == pytest.approx(float(mean.square().mean().sqrt()), rel=1e-5)
    assert "precision_loss" not in fields  # no position has a target


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
LABELS = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])
NEXT = [[2, 3, 4, -100], [6, 7, 8, -100]]
FORMS = {
    "ids": (IDS, NEXT),
    "pair": ((IDS[:, :-1], IDS[:, 1:]), IDS[:, 1:].tolist()),
    "labels": ({"input_ids": IDS, "labels": LABELS}, [[2, -100, 4, -100], NEXT[1]]),
    "padded": ({"input_ids": IDS[:1], "attention_mask": torch.tensor([[1, 1, 0, 0]])}, [[2, -100, -100, -100]]),
}


@pytest.mark.parametrize(("batch", "expected"), FORMS.values(), ids=FORMS)
def test_the_next_token_is_found_in_every_form_of_batch(batch, expected):
    assert next_tokens(batch).tolist() == expected


# Efficiency


def exact_efficiency(G, S):
    """-<P G, S> / (D(S) T(G)) of one column, in rational arithmetic: there T is half the sum of |P G|."""
    g, s = ([Fraction(entry) for entry in A.double().flatten().tolist()] for A in (G, S))
    centred = [entry - sum(g) / len(g) for entry in g]
    decrease = -sum(a * b for a, b in zip(centred, s, strict=True))
    return decrease / ((max(s) - min(s)) * sum(map(abs, centred)) / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_efficiency_of_one_column_is_within_its_bounds_in_exact_arithmetic(dtype, shift):
    for seed in range(5):
        G, S = (normal(seed, 9, 1) + shift).to(dtype), normal(seed + 100, 9, 1).float()
        D = row_diameter(S)
        fields = measure.efficiencies(S, G, {"exp_avg": G}, Interval(D.lower, D.upper), budget=0.0)
        exact = exact_efficiency(G, S)
        assert fields["efficiency_lower"] <= exact <= fields["efficiency_upper"]
        assert fields["moment_efficiency_lower"] <= exact <= fields["moment_efficiency_upper"]
        assert fields["efficiency_upper"] - fields["efficiency_lower"] < 1e-5


def test_a_run_measures_efficiency_only_where_it_is_asked_to():
    asked, _ = last_record(Model(), efficiency=True, diameter_every=1)
    assert 0 <= asked.gauge_waste < 1
    assert 0 < asked.moment_efficiency_lower <= asked.moment_efficiency_upper <= 1.001
    assert asked.backward_bound >= asked.diameter
    assert asked.spectral_norm > 0
    plain, _ = last_record(Model(), diameter_every=1)
    assert plain.efficiency_lower is None
    assert plain.spectral_norm > 0
