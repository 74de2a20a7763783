"""A monitor next to a TrustRegion: records have the step that the optimizer made and the one that was stored."""

import copy
import math
import warnings

import lightning
import pytest
import torch
from torch.optim import SGD, AdamW, RMSprop
from torch.utils.data import DataLoader

from hilbert_monitor import ChainedOptimizer, HilbertMonitor, RowNorm, TrustRegion
from hilbert_monitor.monitor.probe import Probe
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.exposition import RunSamples
from hilbert_monitor.runs.reader import find_runs
from hilbert_monitor.runs.record import RunInfo
from tests.monitor.test_trust_region import Model, V, backward, diameter
from tests.support.training import QUIET, Module, Text, fit

OPTIMIZERS = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "SGD": lambda model: SGD(model.parameters(), lr=0.1),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.01),
    "chain": lambda model: ChainedOptimizer(
        AdamW([model.embedding.weight], lr=0.01), RowNorm([model.lm_head.weight], lr=0.01, weight_decay=0.1)
    ),
}


def asked_for(model, optimizer, name):
    """D of the step that a copy of the optimizer makes of a copy of the model, which nobody holds."""
    memo = {}
    gradients = [p.grad for p in model.parameters()]
    model, optimizer = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
    before = model.lm_head.weight.detach().double().clone()
    optimizer.step()
    keep = 1 - 0.01 * 0.1 if name in ("AdamW", "chain") else 1.0
    return diameter(model.lm_head.weight.detach().double() - keep * before)


@pytest.mark.few(3)
@pytest.mark.parametrize("first", ["monitor", "region"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_records_have_what_was_asked_for_and_what_was_made(name, first):
    model = Model()
    optimizer = OPTIMIZERS[name](model)
    probe = Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True)
    basis = probe.head.source.basis.name.lower()
    region = TrustRegion(0.01)
    if first == "region":
        region.watch(model, optimizer)
    probe.attach()
    if first == "monitor":
        region.watch(model, optimizer)
    for seed in range(8):
        optimizer.zero_grad()
        backward(model, seed)
        asked = asked_for(model, optimizer, name)
        optimizer.step()
        record = probe.record()
        assert record.diameter == pytest.approx(asked, rel=1e-4)
        assert record.trust_limit == 0.01
        assert record.made_diameter <= 0.01
        assert record.held_rows == region.last.held
        assert record.held_share == record.held_rows / V
        assert (record.held_tokens or ()) == region.last.tokens
    assert region.clipped
    assert probe.head.source.basis.name.lower() == basis
    assert not [text for text in probe.remarks if "from now on" in text]


def test_record_says_that_a_step_was_left_out():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=0.01)
    with Probe(model, optimizer, strict=True) as probe, TrustRegion(0.01).watch(model, optimizer):
        for bad in (False, True, False):
            optimizer.zero_grad()
            backward(model, 0, math.nan if bad else 1.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            record = probe.record()
            assert record.skipped == ("not finite" if bad else "")
            assert (record.diameter_lower is None) == bad
            assert (record.made_diameter is None) == bad


def test_alert_says_that_the_step_was_held_and_the_counter_counts():
    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples, alerts = RunSamples(RunInfo), []
    region = TrustRegion(0.02)
    with Probe(model, optimizer, diameter_every=1, judge=Judge(), strict=True) as probe, region.watch(model, optimizer):
        for step in range(60):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.param_groups[0]["lr"] = 0.1 if step == 50 else 1e-3
            optimizer.step()
            samples.write(probe.record())
            alerts += probe.alerts
    assert [alert.step for alert in alerts] == [51]
    assert alerts[0].value > 0.02
    assert "it was held to 0.02, in 41 rows" in alerts[0].message
    assert samples.samples().clipped == region.clipped == 1


@pytest.mark.parametrize("region_first", [True, False])
def test_lightning_holds_and_records(tmp_path, region_first):
    region = TrustRegion(limit=0.01)
    monitor = HilbertMonitor(run_dir=str(tmp_path), diameter_every=1, panel_size=32, strict=True)
    fit(Module("torch"), *([region, monitor] if region_first else [monitor, region]))
    (run,) = find_runs(tmp_path)
    records = list(run.steps())
    assert region.step == len(records) == 12
    assert sum(record.held_rows > 0 for record in records) == region.clipped > 0
    assert all(record.diameter >= record.made_diameter * (1 - 1e-6) for record in records if record.held_rows)


def test_lightning_resumes_bit_for_bit(tmp_path):
    def run(steps, path=None):
        region, module = TrustRegion(limit=lambda step: 0.05 / step), Module("torch")
        module.dropout.p = 0.0
        trainer = lightning.Trainer(max_steps=steps, callbacks=[region], max_epochs=-1, **QUIET)
        trainer.fit(module, DataLoader(Text(0, items=4), batch_size=4), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module.state_dict(), region

    whole, region = run(12)
    run(6)
    resumed, other = run(12, tmp_path / "6.ckpt")
    assert region.state_dict() == other.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
