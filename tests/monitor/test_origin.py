"""Where a step comes from: the scheduler or other code that set its learning rate, its batch and its samples."""

import pickle
from collections import namedtuple
from functools import partial

import lightning
import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as torch_schedulers
from torch.utils.data import DataLoader, Dataset

from hilbert_monitor import HilbertMonitor, Probe, pretraining_optimizer, warmup_cosine
from hilbert_monitor.monitor.panel import sample_indices
from hilbert_monitor.runs.alerts import Judge
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.sinks import Recorder
from tests.support.training import QUIET, Module, Text

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
STEPS, FAULT = 8, 5


class Forgetful(torch_schedulers.LambdaLR):
    """Sets rates and never notes them, as many a scheduler with a step of its own."""

    def step(self, epoch=None):
        if not hasattr(self, "_last_lr"):
            return super().step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9


class OfItsOwn:
    """No class of torch's; notes its rates."""

    def __init__(self, optimizer):
        self.groups, self.rate = optimizer.param_groups, 0.1

    def step(self):
        self.rate *= 0.9
        for group in self.groups:
            group["lr"] = self.rate

    def get_last_lr(self):
        return [self.rate]


class Broken(OfItsOwn):
    """Raises when it is asked."""

    def get_last_lr(self):
        raise SystemError("not today")


PLATEAU = partial(torch_schedulers.ReduceLROnPlateau, patience=1)
WARMUP = partial(warmup_cosine, total_steps=STEPS)


def sequential(optimizer):
    parts = [torch_schedulers.LinearLR(optimizer, total_iters=2), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    return torch_schedulers.SequentialLR(optimizer, parts, milestones=[2])


def chained(optimizer):
    parts = [torch_schedulers.ConstantLR(optimizer, total_iters=2), torch_schedulers.ExponentialLR(optimizer, 0.9)]
    return torch_schedulers.ChainedScheduler(parts)


def two(optimizer):
    return [torch_schedulers.StepLR(optimizer, 3), torch_schedulers.LambdaLR(optimizer, lambda n: 1 / (n + 1))]


def of_other_weights(optimizer):
    other = SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    return torch_schedulers.StepLR(other, 1)


def scheduled(make, *, lr=0.1, optimizer=None, steps=STEPS, fault=FAULT):
    """What the records of a few steps say, one of which uses twice its rate."""
    model = seeded(Plain)
    optimizer = optimizer(model) if optimizer else SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    said, rates = [], []
    with Probe(model, optimizer, perturbation_every=0, schedulers=scheduler, strict=True) as probe:
        for step in range(1, steps + 1):
            loss_of(model, step).backward()
            if step == fault:
                for group in optimizer.param_groups:
                    group["lr"] *= 2
            optimizer.step()
            for one in scheduler if isinstance(scheduler, list) else [scheduler]:
                if isinstance(one, torch_schedulers.ReduceLROnPlateau):
                    one.step(1.0)
                elif one is not None:
                    one.step()
            record = probe.record()
            said.append(record.scheduled)
            rates.append(record.learning_rate)
    return said, rates


ONE_FAULT = [step != FAULT for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("make", [WARMUP, sequential, chained, PLATEAU, two])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_a_rate_that_other_code_wrote_is_not_the_schedulers(make, lr):
    said, _ = scheduled(make, lr=lr if isinstance(lr, float) else lr.clone())
    assert said == ONE_FAULT


def test_the_rate_of_a_head_within_a_chain_is_that_of_its_own_group():
    said, _ = scheduled(WARMUP, optimizer=lambda model: pretraining_optimizer(model, "rownorm"))
    assert said == ONE_FAULT


@pytest.mark.parametrize("make", [lambda optimizer: None, of_other_weights, Broken])
def test_without_a_scheduler_that_tells_nothing_is_known(make):
    assert scheduled(make)[0] == [None] * STEPS


def test_a_scheduler_with_a_step_of_its_own_is_believed_once_its_rates_are_used():
    said, _ = scheduled(OfItsOwn)
    assert said == ONE_FAULT
    said, _ = scheduled(OfItsOwn, fault=1)
    assert said == [None, *[True] * (STEPS - 1)]
    said, rates = scheduled(lambda optimizer: Forgetful(optimizer, lambda n: 1.0), fault=None)
    assert len(set(rates)) == STEPS
    assert said == [True] + [None] * (STEPS - 1)


def test_a_rate_of_zero_in_the_warm_up_is_the_schedulers():
    said, rates = scheduled(lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda n: n / 4), fault=None)
    assert rates[0] == 0
    assert said == [True] * STEPS


class Scheduled(Module):
    """A module with a schedule, a fault in its rate, and a step too large at a batch of the second epoch."""

    fault = None

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch_schedulers.LambdaLR(optimizer, lambda n: 0.97**n)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch, index):
        return self.loss(batch["ids"] if isinstance(batch, dict) else batch)

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.global_step + 1 == self.fault:
            for group in optimizer.param_groups:
                group["lr"] *= 50


class Numbered(Dataset):
    """Text whose items know their number."""

    def __init__(self, seed):
        self.text = Text(seed)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        return {"ids": self.text[index], "sample_index": 1000 + index}


def test_lightning_says_batch_schedule_and_the_samples_of_an_alert(tmp_path):
    module, sink, alerts, seen = Scheduled("rownorm"), Recorder(), [], []
    module.fault = 30

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((trainer.global_step + 1, batch_idx, batch["sample_index"].tolist()))

    torch.manual_seed(1)
    monitor = HilbertMonitor(
        run_dir=str(tmp_path), diameter_every=1, perturbation_every=0, sinks=[sink], on_blowup=alerts.append
    )
    trainer = lightning.Trainer(max_steps=34, accumulate_grad_batches=2, callbacks=[monitor, Watch()], **QUIET)
    trainer.fit(module, DataLoader(Numbered(0), batch_size=4, shuffle=True))
    batches = {}
    for step, index, samples in seen:
        batches.setdefault(step, []).append((index, samples))
    assert {step: record.batch for step, record in sink.by_step.items()} == {
        step: parts[-1][0] for step, parts in batches.items()
    }
    assert [step for step, record in sink.by_step.items() if record.scheduled is not True] == [30]
    assert sink.by_step[30].scheduled is False
    assert {alert.step for alert in alerts} == {30}
    assert sink.by_step[30].samples == tuple(index for _, samples in batches[30] for index in samples)
    assert all(record.samples is None for step, record in sink.by_step.items() if step != 30)
    assert pickle.loads(pickle.dumps(monitor)).session.state_dict()["step"] == 34  # it holds on to no scheduler


def test_samples_are_read_only_for_an_alert_and_64_at_most():
    class Unread(torch.Tensor):
        reads = 0

        def tolist(self):
            Unread.reads += 1
            return super().tolist()

    model = seeded(Plain)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    judge = Judge()
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, judge=judge, strict=True) as probe:
        for step in range(40):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step == 39:
                optimizer.param_groups[0]["lr"] *= 1000
            for part in range(2):
                probe.begin_batch(2 * step + part, torch.arange(50).add(50 * part).as_subclass(Unread))
            optimizer.step()
            record = probe.record()
            assert record.batch == 2 * step + 1
            assert Unread.reads == (0 if step < 39 else 2)
    assert probe.alerts
    assert record.samples == tuple(range(64))


@pytest.mark.parametrize(
    ("batch", "indices"),
    [
        ({"input_ids": torch.ones(2, 3), "idx": torch.tensor([4, 5])}, [4, 5]),
        ((torch.ones(2, 3), {"sample_ids": [7, 8]}), [7, 8]),
        (namedtuple("Batch", "ids index")(torch.ones(2, 3), torch.tensor([1, 2])), [1, 2]),
        ({"index": torch.zeros(2, 3, dtype=torch.long)}, None),
        ({"idx": ["a", "b"]}, None),
        ({"index": torch.tensor([0.5])}, None),
        ([torch.ones(2, 3)], None),
        (torch.ones(2, 3), None),
        (None, None),
    ],
)
def test_samples_are_found_under_their_usual_names(batch, indices):
    found = sample_indices(batch)
    assert (found if found is None else [int(index) for index in found]) == indices
