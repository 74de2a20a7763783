"""HilbertMonitor on a real Trainer: training unchanged to the bit, records whole, failures survived."""

import pickle
import threading
import time
import warnings

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset

from hilbert_monitor import ChainedOptimizer, HilbertMonitor, Probe, RowNorm, pretraining_optimizer
from hilbert_monitor.geometry import hilbert_perturbation
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.runs.alerts import Judge
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks
from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder
from tests.support.training import UPDATES, Module, Text, V, fit
from tests.support.tried import OURS, tried


def everything(module, trainer):
    (optimizer,) = trainer.optimizers
    state = [v for s in optimizer.state_dict()["state"].values() for v in s.values()]
    return [p.detach().clone() for p in module.parameters()], state, torch.get_rng_state()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(same(x, y) for x, y in zip(a, b, strict=True)) if isinstance(a, list | tuple) else a == b


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", ["adamw", "rownorm", "torch"])
def test_training_is_the_same_to_the_bit_with_and_without_the_monitor(make, precision):
    runs = []
    for callbacks in ((), (HilbertMonitor(diameter_every=3, perturbation_every=4, panel_size=50, strict=True),)):
        module = Module(make)
        runs.append(everything(module, fit(module, *callbacks, precision=precision)))
    assert same(*runs)
    optimizer = {"rownorm": "RowNorm (with Muon and AdamW)", "adamw": "AdamW (with Muon)", "torch": "AdamW"}[make]
    exact = "fp32" if precision == "32-true" else precision
    tried(model=OURS, trainer="Lightning", optimizer=optimizer, precision=exact, libraries=["lightning"])


class Reference(lightning.Callback):
    """Takes every increment by difference of fp64 copies, outside the optimizer's hooks."""

    def __init__(self):
        self.increments, self.hidden = {}, {}

    def on_train_batch_start(self, trainer, module, *_):
        self.before, self.steps = module.model.lm_head.weight.detach().double().clone(), trainer.global_step
        self.group = dict(trainer.optimizers[0].param_groups[-1])

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step > self.steps:
            kept = 1 - self.group["lr"] * self.group["weight_decay"]
            self.increments[trainer.global_step] = module.model.lm_head.weight.detach().double() - kept * self.before
            module.eval()
            with torch.no_grad():
                ids = Text(1).ids[:6]
                self.hidden[trainer.global_step] = module.model.hidden(ids).flatten(0, 1)[:50]
            module.train()


@pytest.mark.parametrize("make", ["adamw", "rownorm"])
def test_records_are_those_of_an_independent_reference(make):
    kept, reference = Recorder(), Reference()
    monitor = HilbertMonitor(diameter_every=3, perturbation_every=4, panel_size=50, sinks=[kept], strict=True)
    fit(Module(make), reference, monitor)
    by_step = {record.step: record for record in kept.records}
    assert sorted(by_step) == list(range(1, UPDATES + 1))
    for step, record in by_step.items():
        S = reference.increments[step]
        D = all_pairs_diameter(S)
        assert record.diameter_lower <= D * (1 + 1e-4)
        assert record.diameter_upper >= D * (1 - 1e-4)
        assert (record.diameter is not None) == (step % 3 == 0 or step == UPDATES)
        if record.diameter is not None:
            assert record.diameter == pytest.approx(D, rel=1e-4)
            assert 0 < record.saturation <= 1 + 1e-6
            assert record.gradient_balance < 1e-5
        assert (record.perturbation_rms is not None) == (step % 4 == 0 or step == UPDATES)
        if record.perturbation_rms is not None:
            found = hilbert_perturbation(S.float(), reference.hidden[step])
            assert record.perturbation_rms == pytest.approx(found.rms, rel=1e-3)
            assert record.perturbation_max <= record.hidden_norm * record.diameter_upper * (1 + 1e-5)
        assert record.tokens == step * 2 * 4 * 9
        assert record.seconds


def test_values_reach_the_loggers_without_a_name_of_their_own_making(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(Module(), HilbertMonitor(diameter_every=3, panel_size=50, strict=True), logger=logger, log_every_n_steps=1)
    logger.save()
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {"hilbert/step_diameter", "hilbert/perturbation_rms", "hilbert/step_diameter_upper"} <= set(
        header.split(",")
    )


class Raises:
    def write(self, record):
        raise OSError("disk full")


class Blocks:
    def __init__(self):
        self.free = threading.Event()

    def write(self, record):
        self.free.wait(300)


def decode(token):
    raise KeyError(token)


def hidden(module, batch):
    raise RuntimeError("no states")


@pytest.fixture(scope="module")
def plain():
    """What a run without the monitor leaves."""
    module = Module("rownorm")
    return everything(module, fit(module))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [{"decode": decode}, {"hidden": hidden}, {"head": "nothing"}, {"panel": [10**9] * 99}],
    ids=lambda o: next(iter(o)),
)
def test_what_fails_costs_records_and_not_the_run(options, plain):
    module = Module("rownorm")
    monitor = HilbertMonitor(diameter_every=3, perturbation_every=4, panel_size=50, **options)
    assert same(everything(module, fit(module, monitor)), plain)
    assert monitor.session.guard.failures
    with pytest.raises(Exception, match=r".+"):
        fit(Module("rownorm"), HilbertMonitor(diameter_every=3, perturbation_every=4, strict=True, **options))


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
def test_a_sink_that_raises_and_one_that_blocks_cost_records_and_no_time(plain):
    blocks, kept = Blocks(), Recorder()
    monitor = HilbertMonitor(diameter_every=1, perturbation_every=0, sinks=[Raises(), blocks, kept])
    module = Module("rownorm")
    start = time.monotonic()
    run = everything(module, fit(module, monitor))
    assert time.monotonic() - start < 150
    blocks.free.set()
    assert same(run, plain)
    assert len(kept.records) >= UPDATES


def test_rownorm_alone_is_named_and_bounded():
    module, kept = Module("rownorm"), Recorder()
    monitor = HilbertMonitor(diameter_every=1, perturbation_every=0, sinks=[kept], strict=True)
    fit(module, monitor)
    assert isinstance(monitor.session.probe.head.source.optimizer, RowNorm)
    assert all(r.diameter <= r.ceiling * (1 + 1e-6) for r in kept.records)


class Overflows(Module):
    """Has an infinite loss at its third batch."""

    def training_step(self, tokens, index):
        return super().training_step(tokens, index) * (torch.inf if index == 2 else 1)


@pytest.mark.parametrize("fused", [False, True])
def test_an_update_that_a_grad_scaler_skips_is_recorded_as_a_skip(fused):
    module, kept = Overflows(), Recorder()
    module.configure_optimizers = lambda: AdamW(module.parameters(), lr=1e-2, fused=fused)
    trainer = lightning.Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))],
        max_steps=5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[HilbertMonitor(diameter_every=1, perturbation_every=0, sinks=[kept], strict=True)],
    )
    trainer.fit(module, DataLoader(Text(0), batch_size=4))
    assert [(r.step, r.skipped) for r in kept.records[:5]] == [(i, "overflow" if i == 3 else "") for i in range(1, 6)]
    assert all((r.diameter is None) == bool(r.skipped) for r in kept.records)


def run_of_a_rank(rank, world, raises=False):
    """The monitored run of one of two DDP processes, by hand: each has its half of every batch."""
    kept = []
    torch.manual_seed(0)
    model = Plain(V, 16)
    wrapped = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    optimizer = pretraining_optimizer(model, "adamw")
    panel = Panel.of_tokens(Text(1).ids, 50)

    def states(module, batch):
        if raises and rank == 1:
            raise RuntimeError("no states here")
        return module.hidden(batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Probe(model, optimizer, panel=panel, diameter_every=2, perturbation_every=2, hidden=states) as probe:
            for step in range(4):
                ids = Text(0).ids[8 * step : 8 * step + 8].chunk(world)[rank]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(wrapped(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                kept.append(probe.record())
    fields = ("diameter", "perturbation_rms", "perturbation_max", "hidden_norm")  # Adam's first pairs tie
    return [{name: getattr(record, name) for name in fields} for record in kept], [
        p.detach() for p in model.parameters()
    ]


def runs_of_a_rank(rank, world):
    return [run_of_a_rank(rank, world, raises) for raises in (False, True)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """The runs of each of two ranks: one in which all goes well, and one in which the second has no states."""
    return in_ranks(runs_of_a_rank, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_give_the_numbers_of_one(two_ranks):
    (first, weights), (second, others) = (shares for shares, _ in two_ranks)
    (alone, _) = run_of_a_rank(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    for record, expected in zip(first, alone, strict=True):
        for name, value in expected.items():
            assert record[name] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value)
    assert second == first  # each measures its own copy, alone
    assert first[1]["perturbation_rms"] > 0


def test_a_panel_that_raises_on_one_rank_costs_that_rank_alone_its_numbers(two_ranks):
    (first, weights), (second, others) = (raises for _, raises in two_ranks)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert all(record["perturbation_rms"] is None for record in second)
    assert first[1]["perturbation_rms"] > 0
    assert first[1]["diameter"] > 0


def test_a_resumed_run_goes_on_counting(tmp_path):
    module, kept = Module("rownorm"), Recorder()
    fit(module, HilbertMonitor(diameter_every=3, panel_size=50, sinks=[kept], strict=True)).save_checkpoint(
        tmp_path / "run.ckpt"
    )
    again = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=UPDATES + 3,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[HilbertMonitor(diameter_every=3, panel_size=50, sinks=[again], strict=True)],
    )
    data = DataLoader(Text(0), batch_size=4)
    trainer.fit(Module("rownorm"), data, DataLoader(Text(1), batch_size=4), ckpt_path=tmp_path / "run.ckpt")
    assert [r.step for r in again.records if r.step <= UPDATES] == []
    assert {r.step for r in again.records} == {UPDATES + 1, UPDATES + 2, UPDATES + 3}
    assert again.records[0].tokens > kept.records[-1].tokens


class Returns(Module):
    """Gives no loss at every third batch."""

    def training_step(self, tokens, index):
        return None if index % 3 == 2 else super().training_step(tokens, index)


def test_a_step_without_a_loss_is_recorded_as_a_skip():
    kept = Recorder()
    monitor = HilbertMonitor(diameter_every=1, perturbation_every=0, sinks=[kept], strict=True)
    fit(Returns("rownorm"), monitor, accumulate=1)
    skipped = [record for record in kept.records if record.skipped]
    assert {record.skipped for record in skipped} == {"no gradient"}
    assert all(record.diameter is None for record in skipped)


class Stream(IterableDataset):
    """Validation text that can be had once in order, and counts who asks."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        self.asked += 1
        yield from Text(1).ids


def run_on(validation, monitor, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=UPDATES,
        max_epochs=-1,
        val_check_interval=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[monitor],
        **options,
    )
    trainer.fit(Module("rownorm"), DataLoader(Text(0), batch_size=4), validation)
    return monitor


def test_a_validation_loss_belongs_to_the_step_before_it():
    class Losses(lightning.Callback):
        def __init__(self):
            self.seen = {}

        def on_validation_end(self, trainer, *_):
            if not trainer.sanity_checking:
                self.seen[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    kept, losses = Recorder(), Losses()
    monitor = HilbertMonitor(diameter_every=1, panel_size=50, sinks=[kept], strict=True)
    fit(Module("rownorm"), losses, monitor)
    assert {r.step: r.validation_loss for r in kept.records if r.validation_loss is not None} == losses.seen
    assert len(losses.seen) > 1
    assert all(r.train_loss > 0 and r.diameter > 0 and r.tokens > 0 for r in kept.records)


def test_of_a_stream_the_first_validation_is_kept_and_nobody_else_asks_for_it():
    data, kept = Stream(), Recorder()
    monitor = HilbertMonitor(diameter_every=0, perturbation_every=4, panel_size=50, sinks=[kept], strict=True)
    run_on(DataLoader(data, batch_size=4), monitor, num_sanity_val_steps=0)
    assert data.asked == UPDATES // 4
    assert monitor.session.probe.panel.hash == Panel.of_batches([Text(1).ids[:4], Text(1).ids[4:8]], 50).hash
    assert [r.step for r in kept.records if r.perturbation_rms is not None] == [8, 12]


def test_a_sanity_check_that_delivers_enough_gives_the_panel_to_the_first_step():
    kept = Recorder()
    monitor = HilbertMonitor(diameter_every=0, perturbation_every=2, panel_size=50, sinks=[kept], strict=True)
    run_on(DataLoader(Stream(), batch_size=4), monitor, num_sanity_val_steps=2)
    assert [r.step for r in kept.records if r.perturbation_rms is not None] == list(range(2, UPDATES + 1, 2))


def test_the_papers_panel_is_the_first_validation_batches_as_they_come():
    monitor = HilbertMonitor(panel="paper", panel_size=50, perturbation_every=4, strict=True)
    seen = []
    monitor.on_train_end = lambda *_: seen.append(monitor.session.probe.panel)
    run_on(DataLoader(Text(1), batch_size=4, sampler=range(47, -1, -1)), monitor)
    assert seen[0].hash == Panel.of_batches(Text(1).ids.flip(0).split(4), 50).hash


def test_without_validation_data_the_diameter_is_measured_alone_and_one_sentence_says_so():
    kept = Recorder()
    with pytest.warns(UserWarning, match="found no validation data and measures the diameter alone"):
        run_on(None, HilbertMonitor(diameter_every=3, sinks=[kept], strict=True), limit_val_batches=0)
    assert kept.records[-1].diameter > 0
    assert all(r.perturbation_rms is None for r in kept.records)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: setattr(model.lm_head, "weight", model.embed.weight), "an embedding's too"),
        (lambda model: setattr(model.lm_head, "bias", nn.Parameter(torch.zeros(V))), "has a bias"),
    ],
    ids=["tied", "bias"],
)
def test_a_head_for_which_the_identity_is_a_bound_is_remarked_on(change, said):
    model = Plain(V, 16)
    change(model)
    with pytest.warns(UserWarning, match=said):
        probe = Probe(model, AdamW(model.parameters()))
    assert len(probe.remarks) == 1


def test_a_loss_that_is_no_plain_softmax_is_remarked_on_once():
    model = Plain(V, 16)
    optimizer = AdamW(model.parameters())
    with Probe(model, optimizer, diameter_every=1) as probe, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            model(Text(0).ids[:4]).square().mean().backward()
            optimizer.step()
            probe.record()
    assert ["do not sum to zero" in str(warning.message) for warning in seen] == [True]


@pytest.mark.parametrize("order", [1, -1], ids=["bias with it or first", "bias last"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_bias_extends_the_rows_and_the_states(apart, order):
    torch.manual_seed(0)
    model = Plain(V, 16, bias=True)
    others = [p for name, p in model.named_parameters() if name != "lm_head.weight"]
    parts = [SGD(others, lr=0.1), SGD([model.lm_head.weight], lr=0.1)][::order]
    optimizer = ChainedOptimizer(*parts) if apart else SGD(model.parameters(), lr=0.1)
    panel = Panel.of_tokens(Text(1).ids, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe = Probe(model, optimizer, panel=panel, diameter_every=1, perturbation_every=1, vocab_size=V - 2)
    before = [p.detach().clone() for p in (model.lm_head.weight, model.lm_head.bias)]
    with probe:
        nn.functional.cross_entropy(model(Text(0).ids[:4]).flatten(0, 1), Text(0).ids[:4].flatten()).backward()
        optimizer.step()
        record = probe.record()
    S, b = (p.detach() - q for p, q in zip((model.lm_head.weight, model.lm_head.bias), before, strict=True))
    extended = torch.cat([S, b[:, None]], 1)[: V - 2]
    assert record.diameter == pytest.approx(all_pairs_diameter(extended), rel=1e-4)
    change = (model.hidden(Text(1).ids).detach().flatten(0, 1)[:20] @ S.T + b)[:, : V - 2]
    assert record.perturbation_rms == pytest.approx(
        float((change.amax(1) - change.amin(1)).square().mean().sqrt()), rel=1e-4
    )


@pytest.mark.parametrize("nesterov", [False, True], ids=["from state", "by difference"])
def test_what_fails_inside_the_optimizers_step_does_not_reach_it(nesterov):
    model = Plain(V, 16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    with Probe(model, optimizer, diameter_every=1) as probe:
        optimizer.param_groups[0]["params"] = list(model.blocks.parameters())  # the head has left it
        model(Text(0).ids[:4]).square().mean().backward()
        with pytest.warns(UserWarning, match="increment failed"):
            optimizer.step()
        assert probe.record().diameter is None
    assert probe.guard.failures["increment"]


def trained(probe, optimizer, model, steps=3, **record):
    """Some steps of a loop of one's own; the records."""
    made = []
    for step in range(steps):
        optimizer.zero_grad()
        ids = Text(0).ids.roll(-4 * step, 0)[:4]
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        made.append(probe.record(**record))
    return made


def test_warnings_that_are_errors_do_not_end_a_run():
    model = Plain(V, 16)
    optimizer = AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        panel = Panel.of_tokens(Text(1).ids, 20)
        with Probe(model, optimizer, panel=panel, diameter_every=1, perturbation_every=1, hidden=hidden) as probe:
            assert all(r.diameter > 0 for r in trained(probe, optimizer, model))
        assert probe.guard.failures["panel"] == 3


def test_every_one_of_several_steps_in_a_batch_is_recorded_and_judged():
    model = Plain(V, 16)
    optimizer, judge = AdamW(model.parameters(), lr=1e-3), Judge()
    with Probe(model, optimizer, diameter_every=2, judge=judge) as probe:
        trained(probe, optimizer, model, 24)
        for rate in (1e-1, 1e-3, 1e-3):
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        last = probe.record()
        earlier = probe.earlier()
    assert [record.step for record, _ in earlier] == [25, 26]
    assert last.step == 27
    assert [record.diameter is not None for record, _ in earlier] == [True, True]  # the first was searched on suspicion
    assert [[alert.kind for alert in alerts] for _, alerts in earlier] == [["rate"], []]
    assert probe.earlier() == []


class Rateless(torch.optim.Optimizer):
    """Has a learning rate of its own making."""

    def __init__(self, params, step=1e-3):
        super().__init__(params, {"lr": None, "weight_decay": 0.1})
        self.size = step

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.size * p.grad)


def test_an_optimizer_without_a_learning_rate_is_measured_and_a_nan_of_it_reported():
    model = Plain(V, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = Rateless(model.parameters())
        with Probe(model, optimizer, diameter_every=1, decay="coupled", judge=Judge()) as probe:
            records = trained(probe, optimizer, model)
            assert all(r.diameter > 0 and r.learning_rate is None and r.ceiling is None for r in records)
            optimizer.size = float("nan")
            trained(probe, optimizer, model, 1)
    assert [alert.kind for alert in probe.alerts] == ["nonfinite"]
    assert not probe.guard.failures


def test_plain_sgd_is_measured_though_its_gradient_is_gone_before_the_record():
    model = Plain(V, 16)
    optimizer, panel = SGD(model.parameters(), lr=0.1), Panel.of_tokens(Text(1).ids, 20)
    with Probe(model, optimizer, panel=panel, diameter_every=0, perturbation_every=1, strict=True) as probe:
        for step in range(3):
            ids = Text(0).ids[4 * step : 4 * step + 4]
            nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert probe.record().perturbation_rms > 0


@pytest.mark.parametrize("make", ["torch", "rownorm"])
def test_weights_that_cannot_hold_the_step_are_told_by_its_rounding(make):
    torch.manual_seed(0)
    model = Plain(V, 16).bfloat16()
    optimizer = AdamW(model.parameters(), lr=1e-3) if make == "torch" else RowNorm([model.lm_head.weight], lr=1e-3)
    before = model.lm_head.weight.detach().clone()
    with Probe(model, optimizer, diameter_every=1) as probe:
        model(Text(0).ids[:4]).float().logsumexp(-1).mean().backward()
        optimizer.step()
        record = probe.record()
    decay = 1 - 1e-3 * 0.01 if make == "torch" else 1
    moved = all_pairs_diameter(model.lm_head.weight.detach().double() - decay * before.double())
    assert abs(record.diameter - moved) <= record.rounding


def test_two_monitors_of_one_trainer_watch_two_heads():
    class Twice(Module):
        def __init__(self):
            super().__init__("torch")
            self.other = nn.Linear(16, V, bias=False)

        def training_step(self, tokens, index):
            return super().training_step(tokens, index) + self.other(self.model.hidden(tokens)).square().mean()

    kept = Recorder(), Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monitors = [
            HilbertMonitor(head=head, perturbation_every=0, diameter_every=1, sinks=[sink], run_dir=None)
            for head, sink in zip(("model.lm_head", "other"), kept, strict=True)
        ]
        fit(Twice(), *monitors)
    assert all(len(sink.records) == UPDATES for sink in kept)
    assert kept[0].records[-1].diameter != kept[1].records[-1].diameter


def test_a_callback_that_has_been_used_can_be_pickled():
    monitor = HilbertMonitor(panel_size=50, strict=True)
    fit(Module("torch"), monitor)
    assert pickle.loads(pickle.dumps(monitor)).session.state_dict() == monitor.session.state_dict()


def test_a_loss_for_each_token_of_a_manual_module_costs_the_loss_alone():
    class Manual(Module):
        def __init__(self):
            super().__init__("torch")
            self.automatic_optimization = False

        def training_step(self, tokens, index):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(
                self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            self.manual_backward(losses.mean())
            optimizer.step()
            return losses

    kept = Recorder()
    monitor = HilbertMonitor(diameter_every=1, panel_size=50, sinks=[kept], strict=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[monitor],
    )
    trainer.fit(Manual(), DataLoader(Text(0), batch_size=4), DataLoader(Text(1), batch_size=4))
    assert [r.step for r in kept.records] == [1, 2, 3]


def test_a_head_whose_weight_is_computed_is_measured_by_its_effective_weight():
    module, kept = Module("torch"), Recorder()
    torch.nn.utils.parametrizations.weight_norm(module.model.lm_head)
    fit(module, HilbertMonitor(panel_size=20, diameter_every=2, run_dir=None, sinks=[kept], strict=True))
    assert {r.step for r in kept.records if r.diameter} == {r.step for r in kept.records if r.step % 2 == 0}
    assert {r.increment_from for r in kept.records if r.diameter} == {"step"}
