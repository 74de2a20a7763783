"""Steps that the host reads later: the same records in the same order, alerts of the right step, nothing lost.

The CPU stands for an accelerator here. What a device really counts is in `tests/emulated`.
"""

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from hilbert_monitor import HilbertMonitor, Muon, Probe, RowNorm
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.runs.alerts import Judge
from tests.support.decoders import Plain, seeded
from tests.support.later import pretend, read_later_fixture  # noqa: F401
from tests.support.ranks import in_ranks
from tests.support.sinks import Recorder
from tests.support.training import Module, fit

V = 61
TEXT = torch.randint(V, (4, 17), generator=torch.Generator().manual_seed(1))
COST = ("time", "seconds", "share")


OPTIMIZERS = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adam, its rate on the device": lambda p: Adam(p, lr=torch.tensor(1e-2), amsgrad=True, foreach=False),
    "sgd": lambda p: SGD(p, lr=1e-1),
    "sgd with momentum": lambda p: SGD(p, lr=1e-1, momentum=0.9),
    "rownorm": lambda p: RowNorm([x for x in p if x.ndim == 2], lr=1e-2),
    "muon": lambda p: Muon([x for x in p if x.ndim == 2], lr=1e-2),
}


def train(make, *, steps=14, immediate=False, closure=False, dtype=None, bias=False, fault=None, panel=None, **options):
    """Train a small decoder; return its weights, and the records with their alerts in the order in which they came."""
    model = seeded(Plain, V=V, d=16, bias=bias).to(dtype)
    optimizer = make(list(model.parameters()))
    scheduler = LambdaLR(optimizer, lambda step: 10.0 if step + 1 == fault else 1.0)
    judged = []
    options = {"diameter_every": 5, "perturbation_every": 0, "judge": Judge(), "strict": True} | options
    with Probe(model, optimizer, immediate=immediate, schedulers=scheduler, panel=panel, **options) as probe:
        for step in range(1, steps + 1):

            def backward():
                optimizer.zero_grad()
                loss = cross_entropy(model(TEXT[:, :-1]).float().flatten(0, 1), TEXT[:, 1:].flatten())
                loss.backward()
                return loss

            loss = optimizer.step(backward) if closure else backward()
            if not closure:
                optimizer.step()
            scheduler.step()
            probe.begin_batch(step, [step])
            record = probe.record(train_loss=loss.detach(), tokens=step)
            judged += [*probe.earlier(), *([(record, probe.alerts)] if record is not None else [])]
        record = probe.record(final=True)
        judged += [*probe.earlier(), *([(record, probe.alerts)] if record is not None else [])]
    return [p.detach() for p in model.parameters()], judged


def without_cost(record):
    return msgspec.structs.replace(record, **dict.fromkeys(COST))


def assert_same(later, now):
    (weights, judged), (weights_now, judged_now) = later, now
    assert all(map(torch.equal, weights, weights_now))
    assert [without_cost(record) for record, _ in judged] == [without_cost(record) for record, _ in judged_now]
    assert [alerts for _, alerts in judged] == [alerts for _, alerts in judged_now]


CLOSURES = ("adamw", "sgd", "muon")


@pytest.mark.parametrize(("name", "closure"), [*((name, False) for name in OPTIMIZERS), *((n, True) for n in CLOSURES)])
def test_what_is_read_later_is_what_would_have_been_read_at_once(read_later, name, closure):
    now = train(OPTIMIZERS[name], immediate=True, closure=closure)
    assert not read_later
    later = train(OPTIMIZERS[name], closure=closure)
    assert len(read_later) == 8  # all but two exact steps, and the first five, which are compared with the weights
    assert_same(later, now)


def test_rounded_weights_and_a_bias_are_read_later_too(read_later):
    now = train(OPTIMIZERS["adamw"], immediate=True, dtype=torch.bfloat16, bias=True)
    assert_same(train(OPTIMIZERS["adamw"], dtype=torch.bfloat16, bias=True), now)
    assert len(read_later) >= 8


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_blow_up_is_searched_before_the_next_step_moves_anything(read_later, name):
    """The exact diameter and the panel are those of the step, whose gradient is gone."""
    options = {"steps": 24, "fault": 23, "panel": Panel.of_tokens(TEXT, 40), "perturbation_every": 100}
    (_, now), (_, later) = (train(OPTIMIZERS[name], immediate=now, **options) for now in (True, False))
    (at_once, alerts_at_once), (settled, alerts) = now[22], later[22]
    assert settled.step == 23
    assert [(a.step, a.kind) for a in alerts] == [(a.step, a.kind) for a in alerts_at_once] != []
    assert (settled.diameter, settled.pair, settled.samples) == (at_once.diameter, at_once.pair, (23,))
    assert settled.perturbation_rms == pytest.approx(at_once.perturbation_rms, rel=1e-6)
    assert settled.gradient_row_norm is None


def test_a_fused_step_that_a_grad_scaler_skipped_is_known_later(read_later):
    def judged(immediate):
        model = seeded(Plain, V=V, d=16)
        optimizer, records = AdamW(model.parameters(), fused=True), []
        with Probe(model, optimizer, immediate=immediate, diameter_every=0, perturbation_every=0, strict=True) as probe:
            for step in range(1, 10):
                optimizer.found_inf = torch.tensor(float(step == 7))  # a GradScaler leaves it to a fused optimizer
                cross_entropy(model(TEXT[:, :-1]).flatten(0, 1), TEXT[:, 1:].flatten()).backward()
                optimizer.step()
                records += [probe.record(), *(r for r, _ in probe.earlier())]
            probe.flush()
            records += [r for r, _ in probe.earlier()]
        return {r.step: without_cost(r) for r in records if r is not None}

    later, now = judged(False), judged(True)
    assert later == now
    assert (later[7].skipped, later[7].diameter_upper) == ("overflow", None)


def test_a_checkpoint_has_the_record_of_its_step_in_the_log(read_later):
    kept = Recorder()
    monitor = HilbertMonitor(diameter_every=100, perturbation_every=0, sinks=[kept], strict=True)
    states = []

    class Save(Module):
        def on_train_batch_end(self, *_):
            if self.trainer.global_step == 8 and not states:
                states.append(monitor.session.state_dict())
                monitor.session.outputs.close()
                states.append([record.step for record in kept.records])

    fit(Save("torch"), monitor)
    assert states[0]["step"] == states[1][-1] == 8


@pytest.mark.parametrize("action", ["stop", "checkpoint", print, "builtins.print"])
def test_whatever_acts_on_a_blow_up_does_it_in_its_step(read_later, action):
    fit(
        Module("torch"), HilbertMonitor(diameter_every=0, perturbation_every=0, on_blowup=["warn", action], strict=True)
    )
    assert not read_later


def rank(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        copies, collectives = pretend(patch), []
        for name in ("all_reduce", "broadcast", "all_gather_object"):
            patch.setattr(torch.distributed, name, lambda *_, name=name: collectives.append(name))
        weights, judged = train(OPTIMIZERS["adamw"], steps=9, diameter_every=0)
        return weights, [(without_cost(record), alerts) for record, alerts in judged], copies, collectives


def test_of_ranks_that_all_have_the_head_each_measures_alone_and_nothing_is_sent(tmp_path):
    first, second = in_ranks(rank, tmp_path)
    _, now = train(OPTIMIZERS["adamw"], steps=9, diameter_every=0, immediate=True)
    for weights, judged, copies, collectives in (first, second):
        assert all(map(torch.equal, weights, first[0]))
        assert judged == [(without_cost(record), alerts) for record, alerts in now]
        assert len(copies) == 4  # the first five steps are compared with the weights
        assert collectives == []
