"""Decoders in training on the emulated device: the CPU's weights and records, and what a step waits for."""

import math

import msgspec
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, NAdam

from hilbert_monitor import Probe, pretraining_optimizer
from hilbert_monitor.geometry import tension_bracket
from hilbert_monitor.monitor import measure
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import CHECKED
from hilbert_monitor.optim import Muon, RowNorm
from tests.support.decoders import Plain, seeded
from tests.support.emulation.device import NAME, EmulatedDevice
from tests.support.ways import assert_same_way

V, WIDTH = 1000, 16
TEXT = (V * torch.rand(8, 33, generator=torch.Generator().manual_seed(1)) ** 3).long()


def matrices(model):
    return [p for p in model.parameters() if p.ndim == 2]


def rate(model):
    return torch.tensor(1e-3, device=model.lm_head.weight.device)


OPTIMIZERS = {
    "AdamW": lambda m: AdamW(m.parameters(), lr=1e-3),
    "AdamW, lr a tensor": lambda m: AdamW(
        m.parameters(), lr=rate(m), foreach=False, capturable=not m.embed.weight.is_cpu
    ),
    "Adam": lambda m: Adam(m.parameters(), lr=1e-3, weight_decay=0.1),
    "SGD": lambda m: SGD(m.parameters(), lr=0.1),
    "SGD with momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "NAdam, by difference": lambda m: NAdam(m.parameters(), lr=1e-3),
    "RowNorm": lambda m: RowNorm(matrices(m), lr=1e-2),
    "RowNorm, lr a tensor": lambda m: RowNorm(matrices(m), lr=rate(m)),
    "Muon": lambda m: Muon(matrices(m), lr=1e-2),
    "recipe, RowNorm head": lambda m: pretraining_optimizer(m, "rownorm"),
    "recipe, AdamW head": lambda m: pretraining_optimizer(m, "adamw"),
}
NOT_COMPARED = {"time": 0.0, "seconds": {}, "share": None}


class Training:
    """A decoder with a probe, on the CPU or on the emulated device."""

    def __init__(self, make, device="cpu", V=V, dtype=torch.float32, **options):
        self.text = (TEXT * V // TEXT.max().add(1)).to(device)
        self.model = seeded(Plain, V=V, d=WIDTH).to(device, dtype)
        self.start, self.head_steps = self.weights, []
        self.optimizer = OPTIMIZERS[make](self.model)
        panel = Panel.of_tokens(self.text.cpu(), 200)
        self.probe = Probe(self.model, self.optimizer, panel=panel, strict=True, **options).attach()

    def gradient(self, autocast=None):
        self.optimizer.zero_grad()
        with torch.autocast(self.text.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            logits = self.model(self.text[:, :-1])
        return cross_entropy(logits.to(self.start[0].dtype).flatten(0, 1), self.text[:, 1:].flatten())

    def update(self):
        before = self.head
        self.gradient().backward()
        self.optimizer.step()
        self.head_steps.append(self.head - before)
        return self.probe.record()

    def run(self, updates):
        return [self.update() for _ in range(updates)]

    @property
    def weights(self):
        return [p.detach().cpu().clone() for p in self.model.parameters()]

    @property
    def head(self):
        return self.model.lm_head.weight.detach().cpu().clone()


def plain(record):
    """The numbers of a record, by name, pairs as two of them."""
    values = msgspec.to_builtins(msgspec.structs.replace(record, **NOT_COMPARED))
    pairs = {name: value for name, value in values.items() if isinstance(value, list | tuple)}
    ends = {f"{name}[{k}]": end for name, pair in pairs.items() for k, end in enumerate(pair)}
    return {name: value for name, value in values.items() if name not in pairs} | ends


def differences(ours, theirs):
    """Entries of two records that differ by more than rounding."""
    names = ours.keys() | theirs.keys()
    pairs = {name: (ours.get(name), theirs.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if not alike(*pair)}


def alike(a, b):
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-7))


def both_trained(dtype, **options):
    """For each optimizer the trainings on the CPU and on the device, and the records of both."""
    with EmulatedDevice():
        found = {make: Training(make, NAME, dtype=dtype, **options) for make in OPTIMIZERS}  # before the CPU's first
        records = {make: training.run(3) for make, training in found.items()}  # backward pass
    for make, theirs in found.items():
        ours = Training(make, dtype=dtype, **options)
        yield make, ours, theirs, ours.run(3), records[make]


def deviations(ours, theirs):
    """How far each weight is from the CPU's, in units of the longest way that a weight of its matrix went."""
    for start, p, q in zip(ours.start, ours.weights, theirs.weights, strict=True):
        yield (p - q).abs() / (p - start).abs().max().clamp(min=1e-30)  # some do not move at all


def test_weights_and_records_are_the_cpus():
    """In fp64: Adam divides rounding of a gradient near zero by as little, in fp32 by up to a whole step.

    Pairs are compared by the length that they attain, since two of them may tie.
    """
    cadence = {"diameter_every": 2, "perturbation_every": 3, "bounds": True}
    for make, on_cpu, on_device, expected, found in both_trained(torch.float64, **cadence):
        for S, ours, theirs in zip(on_cpu.head_steps, expected, found, strict=True):
            lengths = [float((S[r.pair[0]] - S[r.pair[1]]).norm()) for r in (ours, theirs)]
            assert alike(*lengths), f"{make}: {ours.pair} and {theirs.pair} are {lengths} apart"
            found_else = differences(*(plain(msgspec.structs.replace(r, pair=None)) for r in (ours, theirs)))
            assert found_else == {}, f"{make}: {found_else}"
        # With a rate that is a tensor 1 - 0.999**t is formed in fp32: its root is wrong by 2**-24 / 1e-3 / 2 = 3e-5.
        assert max(float(d.max()) for d in deviations(on_cpu, on_device)) < 1e-4, make


def test_weights_in_fp32_go_the_cpus_way():
    for _, ours, theirs, *_ in both_trained(torch.float32, diameter_every=0, perturbation_every=0, bounds=True):
        assert_same_way(theirs.weights, ours.weights, ours.start)


def waits_of_a_step(make, V, updates=CHECKED + 2, **options):
    """What the monitor counts in the last of a few updates, and its record."""
    with EmulatedDevice() as device:
        training = Training(make, NAME, V=V, **options)
        training.run(updates - 1)
        training.gradient().backward()
        with device.counted() as counts:
            training.optimizer.step()
            record = training.probe.record()
    return counts, record


BRACKET = {"diameter_every": 0, "perturbation_every": 0, "bounds": True}
EXACT = {"diameter_every": 1, "perturbation_every": 0}
PERTURBATION = {"diameter_every": 0, "perturbation_every": 1, "bounds": False}
SIZES = (1000, 4000)
HEADS = ("AdamW", "recipe, RowNorm head")


def measured(counts):
    return counts.within("monitor/", "geometry/")


@pytest.mark.few(1)
@pytest.mark.parametrize("make", HEADS)
def test_bounds_of_a_step_take_a_few_kernels_and_waits_whatever_the_vocabulary(make):
    found = [waits_of_a_step(make, V, **BRACKET) for V in SIZES]
    assert all(record.diameter_upper >= record.diameter_lower > 0 for _, record in found)
    small, large = (measured(counts) for counts, _ in found)
    assert large.waits <= 1, found[1][0].table()
    assert large.kernels <= 120, found[1][0].table()
    assert (small.kernels, small.waits, large.copies) == (large.kernels, large.waits, 0)


LATER = ("AdamW, lr a tensor", "SGD", "Muon", "recipe, RowNorm head", "recipe, AdamW head")


@pytest.mark.few(1)
@pytest.mark.parametrize("make", LATER)
def test_an_ordinary_step_that_is_read_later_waits_for_nothing(make):
    """Nor do the reads of the step before it, which the device has passed: the backward pass was queued since."""
    with EmulatedDevice(backlog=20) as device:
        later, now = (Training(make, NAME, V=200, immediate=immediate, **BRACKET) for immediate in (False, True))
        records = []
        for update in range(CHECKED + 4):
            loss = later.gradient()
            loss.backward()
            with device.counted() as counts:
                later.optimizer.step()
                record = later.probe.record(train_loss=loss.detach())
            if update > CHECKED:
                assert record is None
                assert measured(counts).waits == 0, counts.table()
                assert measured(counts).kernels <= 120, counts.table()
            records += [r for r, _ in later.probe.earlier()] + [record] * (record is not None)
        later.probe.flush()
        records += [r for r, _ in later.probe.earlier()]
        expected = now.run(CHECKED + 4)
    assert [r.step for r in records] == list(range(1, CHECKED + 5))
    for ours, theirs in zip(records, expected, strict=True):
        assert ours.train_loss > 0
        assert differences(plain(ours) | {"train_loss": None}, plain(theirs)) == {}


@pytest.mark.few(1)
@pytest.mark.parametrize("make", HEADS)
def test_an_exact_step_waits_for_its_hubs_and_not_for_every_row(make):
    """The search reads back what each round left, and the rounds are as many as the hubs ask for.

    A bound with room, since a pair more or less in the walk changes the rounds; nothing bounds them on a sphere, where
    every row is a hub. AdamW's rows are formed from its state wherever they are read, in six kernels each time.
    """
    for V in SIZES:
        counts, record = waits_of_a_step(make, V, updates=3, **EXACT)
        assert record.diameter > 0
        assert measured(counts).waits <= 40, counts.table()
        assert measured(counts).kernels <= 600, counts.table()


@pytest.mark.sweep
@pytest.mark.parametrize("make", HEADS)
def test_the_perturbation_of_a_panel_takes_as_many_waits_whatever_the_vocabulary(make):
    found = [waits_of_a_step(make, V, updates=3, **PERTURBATION) for V in SIZES]
    assert all(record.perturbation_rms > 0 for _, record in found)
    small, large = (measured(counts) for counts, _ in found)
    assert large.waits <= 40, found[1][0].table()
    assert small.waits == large.waits


def test_a_step_that_is_not_measured_does_not_wait():
    counts, record = waits_of_a_step("AdamW", V, diameter_every=0, perturbation_every=0, bounds=False)
    assert record.diameter_lower is None
    assert measured(counts).waits == 0, counts.table()
    assert measured(counts).kernels <= 5, counts.table()  # a few rows are kept for a comparison that may come


def test_a_run_under_autocast_is_measured():
    with EmulatedDevice():
        training = Training(
            "AdamW", NAME, autocast=lambda: torch.autocast(NAME, torch.bfloat16), **EXACT | PERTURBATION
        )
        for _ in range(2):
            training.gradient(torch.bfloat16).backward()
            training.optimizer.step()
            record = training.probe.record()
    assert record.perturbation_rms > 0


def test_a_step_that_a_grad_scaler_skips_is_none():
    with EmulatedDevice():
        training = Training("AdamW", NAME, **EXACT)
        scaler, steps = torch.amp.GradScaler(NAME, init_scale=16), []
        for next_scale in (2.0**120, 16.0, 16.0):
            before = training.model.lm_head.weight.detach().clone()
            scaler.scale(training.gradient(torch.float16)).backward()
            scaler.step(training.optimizer)
            scaler.update(next_scale)
            record = training.probe.record()
            moved = not torch.equal(training.model.lm_head.weight, before)
            steps.append((moved, record is not None and not record.skipped))
    assert steps == [(True, True), (False, False), (True, True)]


@pytest.mark.sweep
def test_the_efficiency_of_a_step_is_measured():
    measure.tension_bracket = lambda G, **_: tension_bracket(G, budget_seconds=0)
    with EmulatedDevice():
        training = Training("recipe, RowNorm head", NAME, V=24, efficiency=True, diameter_every=1, perturbation_every=1)
        record = training.update()
    assert 0 < record.efficiency_lower <= record.efficiency_upper <= 1 + 1e-6
