"""Heads of all kinds are measured, or it is said why not: told apart by their rows, frozen, in bf16, two."""

import csv
import warnings
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.optim import SGD, AdamW, RMSprop
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor, Probe, RowNorm
from hilbert_monitor.monitor.head import LogitTransform, check_logit_scale, logit_transform
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.runs.alerts import Judge
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import StepRecord
from tests.support.causal_models import causal_model
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder
from tests.support.training import QUIET, UPDATES, Module, Text, V, fit

D = 16


class Bare(nn.Module):
    """Its head is a parameter, of (V, d) or (d, V), that its forward pass multiplies by."""

    def __init__(self, transposed=False):
        super().__init__()
        self.embed, self.norm = nn.Embedding(V, D), nn.LayerNorm(D)
        self.unembed = nn.Parameter(torch.randn((D, V) if transposed else (V, D)) / 4)
        self.transposed = transposed

    def hidden(self, tokens):
        return self.norm(self.embed(tokens))

    def forward(self, tokens):
        x = self.hidden(tokens)
        return x @ self.unembed if self.transposed else linear(x, self.unembed)


def train(model, probe, optimizer, updates=3):
    """Train a few updates; return the last record and the weight's last increment in fp64."""
    weight = probe.head.weight
    for update in range(updates):
        optimizer.zero_grad()
        loss_of(model, update, V).backward()
        before = weight.detach().double()
        optimizer.step()
        record = probe.record()
    return record, weight.detach().double() - before


def test_a_matrix_that_may_be_stored_either_way_is_asked_about():
    class Odd(Bare):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(V + 3, D)

    model = seeded(Odd)
    with pytest.raises(ValueError, match=r"as \(V, d\) or \(d, V\): no embedding has as many tokens; pass vocab_size"):
        Probe(model, SGD(model.parameters(), lr=0.1), head="unembed")
    assert not Probe(model, SGD(model.parameters(), lr=0.1), head="unembed", vocab_size=V).head.transposed


@pytest.mark.parametrize("embedded", [V, V + 9, V - 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_padded_matrix_is_told_by_its_tokens_however_it_is_stored(transposed, embedded):
    model = seeded(lambda: Bare(transposed))
    model.embed = nn.Embedding(embedded, D)
    model.unembed = nn.Parameter(torch.randn((D, V + 9) if transposed else (V + 9, D)))
    optimizer = SGD(model.parameters(), lr=0.1)
    assert Probe(model, optimizer, head="unembed", vocab_size=V).head.transposed is transposed
    told = f"vocab_size is at most the {V + 9} rows of the head 'unembed', got 1,000"
    with pytest.raises(ValueError, match=told if embedded > V else "vocab_size=1000 does not tell: look at it"):
        Probe(model, optimizer, head="unembed", vocab_size=1000)


# Below fp32


@pytest.mark.parametrize("make", [AdamW, RMSprop, lambda p, lr: RowNorm([p[-1]], lr=lr)])
def test_a_head_in_bf16_has_the_step_that_was_stored_beside_the_one_intended(make):
    model = seeded(Plain, V=V, d=D)
    model.lm_head.to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5).mul_(1 + 0.1 * torch.randn(V, D).bfloat16())
    optimizer = make([*model.parameters()], lr=1e-5)
    decay = optimizer.param_groups[0]["weight_decay"] * 1e-5
    head = model.lm_head.weight
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for update in range(3):
            model.zero_grad()
            logits = model.hidden(torch.arange(V)[None]).bfloat16() @ head.T
            cross_entropy(logits.float().flatten(0, 1), (torch.arange(V) + update) % V).backward()
            before = head.detach().double()
            optimizer.step()
            record = probe.record()
    stored = head.detach().double() - (1 - decay) * before
    assert record.stored_diameter == pytest.approx(all_pairs_diameter(stored), rel=1e-4, abs=1e-9)
    assert record.stored_diameter_lower <= record.stored_diameter <= record.stored_diameter_upper
    assert record.moved_share == pytest.approx(float((head.detach().double() != before).double().mean()))
    if make is not RMSprop:
        assert 0 < record.diameter < 1e-3
        assert record.increment_from == "state"


def test_blow_ups_are_looked_for_in_the_stored_step():
    judge, alerts = Judge(), []
    for step in range(1, 40):
        stored = 1.0 if step < 39 else 30.0
        record = StepRecord(
            step=step, time=0.0, learning_rate=0.1, diameter=1.0, pair=(1, 2), stored_diameter=stored,
            stored_pair=(3, 4), ceiling=2.0,
        )  # fmt: skip
        alerts += judge.judge(record)
    (alert,) = alerts
    assert (alert.kind, alert.value, alert.pair) == ("diameter", 30.0, (3, 4))


# Nothing to measure, so far


class Loop(Module):
    """A module whose head is frozen, or whose optimizer changes, in mid-run."""

    def __init__(self, frozen=False):
        super().__init__("torch")
        self.model.lm_head.requires_grad_(not frozen)

    def configure_optimizers(self):
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class At(lightning.Callback):
    """Does something before an update."""

    def __init__(self, update, action):
        self.update, self.action = update, action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.update and self.action is not None:
            self.action(trainer, pl_module)
            self.action = None


def monitored(module, *callbacks, **options):
    sink = Recorder()
    monitor = HilbertMonitor(
        diameter_every=1, perturbation_every=4, panel_size=40, run_dir=None, sinks=[sink], on_blowup=[], **options
    )
    fit(module, *callbacks, monitor, accumulate=1)
    return monitor, [record for record in sink.records if record.diameter is not None]


def unfreeze(trainer, module):
    module.model.lm_head.requires_grad_(True)
    trainer.optimizers[0].add_param_group({"params": list(module.model.lm_head.parameters()), "lr": 1e-2})


def rebuild(trainer, module):
    trainer.strategy.optimizers = [AdamW(module.parameters(), lr=1e-2)]


def test_a_head_that_is_unfrozen_later_is_watched_from_then_on():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, records = monitored(Loop(frozen=True), At(4, unfreeze), strict=True)
    assert {record.step for record in records} == set(range(6, UPDATES + 1))


def test_an_optimizer_that_is_rebuilt_is_followed():
    with pytest.warns(UserWarning, match="the head has another optimizer, which is watched"):
        monitor, records = monitored(Loop(), At(4, rebuild))
    assert {record.step for record in records} == set(range(1, UPDATES + 1)) - {5}
    assert not monitor.session.guard.failures


@pytest.mark.filterwarnings("ignore")
def test_with_a_scaler_a_step_that_no_hook_saw_is_no_overflow():
    options = {"diameter_every": 1, "perturbation_every": 5, "panel_size": 40, "run_dir": None, "on_blowup": []}
    monitor = HilbertMonitor(sinks=[sink := Recorder()], strict=True, **options)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    trainer = lightning.Trainer(
        max_steps=8, max_epochs=-1, plugins=[plugin], callbacks=[At(4, rebuild), monitor], **QUIET
    )
    trainer.fit(Loop(), *(DataLoader(Text(seed), batch_size=4) for seed in (0, 1)))
    assert {record.skipped for record in sink.records} == {""}
    assert {record.step for record in sink.records if record.diameter} >= {1, 2, 3, 4, 6, 7, 8}


def test_a_head_that_stays_frozen_is_said_to_be_so_once():
    told = "as soon as an optimizer has it: the head 'model.lm_head' is frozen"
    with pytest.warns(UserWarning, match=told) as caught:
        _, records = monitored(Loop(frozen=True))
    assert records == []
    assert sum("nothing is measured" in str(warning.message) for warning in caught) == 1


def test_a_head_that_no_gradient_reaches_is_said_to_be_so():
    model = seeded(Plain, V=V, d=D)
    model.lm_head.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0) as probe:

        def update():
            optimizer.step()
            probe.record()

        for _ in range(19):
            update()
        with pytest.warns(UserWarning, match="'lm_head' has not moved in 20 updates; it is frozen, and is measured"):
            update()
        model.lm_head.requires_grad_(True)
        loss_of(model, 0, V).backward()
        optimizer.step()
        assert probe.record().diameter > 0


# Two at once


class Two(Module):
    """A decoder with a second head, for the token after the next."""

    def __init__(self):
        super().__init__("torch")
        self.second = nn.Linear(D, V, bias=False)

    def forward(self, tokens):
        states = self.model.hidden(tokens)
        return self.model.lm_head(states), self.second(states)

    def loss(self, tokens):
        first, second = self(tokens[:, :-2])
        pairs = ((first, tokens[:, 1:-1]), (second, tokens[:, 2:]))
        return sum(cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits, targets in pairs)


HEADS = ("model.lm_head", "second")


def test_two_monitors_change_nothing_log_under_the_names_of_their_heads_and_have_states_of_their_own(tmp_path):
    sinks = [Recorder(), Recorder()]
    options = {"diameter_every": 2, "perturbation_every": 4, "panel_size": 20, "strict": True}
    monitors = [
        HilbertMonitor(head, run_name=head, sinks=[sink], **options) for head, sink in zip(HEADS, sinks, strict=True)
    ]
    plain, module, logger = Two(), Two(), CSVLogger(tmp_path)
    fit(plain)
    fit(module, *monitors, logger=logger, log_every_n_steps=1)
    assert all(map(torch.equal, plain.parameters(), module.parameters()))
    with open(f"{logger.log_dir}/metrics.csv") as file:
        names = set(csv.DictReader(file).fieldnames)
    assert {f"hilbert/{head}/step_diameter" for head in HEADS} <= names
    assert "hilbert/step_diameter" not in names
    for head, sink in zip(HEADS, sinks, strict=True):
        assert {record.head for record in sink.records} == {RunReader(f"runs/{head}").info.head_name} == {head}
        assert sink.records[-1].perturbation_rms > 0
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    states = torch.load(tmp_path / "last.ckpt")["callbacks"]
    assert [states[monitor.state_key]["step"] for monitor in monitors] == [UPDATES, UPDATES]
    again = HilbertMonitor("second", run_dir=None, **options)
    again.load_state_dict(states[again.state_key])
    fit(Two(), again)  # a second run


def test_a_monitor_watches_one_head_and_a_head_has_one_monitor():
    with pytest.raises(ValueError, match=r"a monitor watches one head, got .*: use one monitor for each"):
        HilbertMonitor(["model.lm_head", "second"])
    options = {"run_dir": None, "panel_size": 40}
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        fit(Module("torch"), HilbertMonitor(**options), HilbertMonitor(**options))
    named = HilbertMonitor("model.lm_head", strict=True, **options)
    with pytest.raises(ValueError, match=r"another HilbertMonitor watches the head 'model\.lm_head'"):
        fit(Module("torch"), HilbertMonitor(**options), named)


# What a model does to its head's output

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "Granite": ({"logits_scaling": 8.0}, 0.125, None),
    "Gemma2": ({"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}, 1.0, 3.0),
    "Llama": ({}, 1.0, None),
    "HyperCLOVAX": ({"logits_scaling": 0.25}, 0.25, None),
    "MiniCPM3": ({}, 1.0, None),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_config_of_a_model_gives_what_the_model_does_to_its_heads_output(name):
    options, scale, cap = MODELS[name]
    model, outputs = causal_model(name, **SIZES, **options).eval(), []
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)  # large enough for the cap
    model.get_output_embeddings().register_forward_hook(lambda *args: outputs.append(args[-1].clone()))
    logits = model(input_ids=torch.randint(97, (4, 12), generator=torch.Generator().manual_seed(0))).logits
    transform, (x,) = logit_transform(model), outputs
    assert (transform.scale, transform.softcap) == (pytest.approx(scale), cap)
    assert (transform.source != "") == (scale != 1 or cap is not None)
    made = scale * x if cap is None else cap * torch.tanh(scale * x / cap)
    torch.testing.assert_close(made, logits, rtol=1e-5, atol=1e-5)
    assert check_logit_scale(x, logits, scale, cap) == ""
    assert "pass logit_scale=" in check_logit_scale(x, logits, 3 * scale, cap)


class With(nn.Module):
    """A model in another module, with a config."""

    def __init__(self, model, config):
        super().__init__()
        self.model, self.config = model, config


def test_the_config_is_that_of_the_module_that_has_the_head():
    model, other = With(nn.Linear(3, 5), {"model_type": "granite", "logits_scaling": 8.0}), nn.Linear(4, 4)
    assert logit_transform(With(model, {"learning_rate": 3}), model.model).scale == 0.125
    assert logit_transform(nn.ModuleList([model, other]), other) == LogitTransform()
    assert logit_transform(nn.Linear(3, 5)) == LogitTransform()


CONFIGS = [
    (SimpleNamespace(model_type="x", text_config=SimpleNamespace(final_logit_softcapping=30.0)), 1.0, 30.0, ""),
    ({"model_type": "granite4_vision", "text_config": {"logits_scaling": 4}}, 0.25, None, ""),
    (SimpleNamespace(model_type="cohere", logit_scale=torch.tensor(0.5)), 0.5, None, ""),
    ({"model_type": "muse_spark", "output_multiplier": 0.2, "final_logit_softcapping": 20.0}, 0.2, 20.0, ""),
    ({"model_type": "mpt", "logit_scale": "inv_sqrt_d_model"}, 1.0, None, ""),
    ({"model_type": "minicpm3", "logits_scaling": 10.0}, 1.0, None, ""),
    ({"model_type": "new", "logits_scaling": 8.0}, 1.0, None, "unknown for the model type 'new'"),
    ({"model_type": "cohere", "logit_scale": "auto"}, 1.0, None, "logit_scale of the model's config is 'auto'"),
    ({"model_type": "granite", "logits_scaling": 0}, 1.0, None, "is 0, not a number other than zero"),
    ({"model_type": "cohere", "logit_scale": True}, 1.0, None, "is True, not"),
    ({"model_type": "gemma2", "final_logit_softcapping": -3.0}, 1.0, None, "is -3.0, not a positive number"),
]


@pytest.mark.parametrize(("config", "scale", "cap", "sentence"), CONFIGS)
def test_configs_of_every_form_are_read_and_what_cannot_be_used_is_named(config, scale, cap, sentence):
    transform = logit_transform(With(nn.Linear(3, 5), config))
    assert (transform.scale, transform.softcap) == (scale, cap)
    assert sentence in transform.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("scale", "cap"), [(-2.0, None), (0.01, None), (40.0, None), (1.0, 30.0)])
def test_a_scale_that_is_another_is_named_and_one_that_fits_is_not(scale, cap, dtype):
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = scale * x if cap is None else cap * torch.tanh(scale * x / cap)
    logits[:, -3:] = -torch.inf  # padding of the vocabulary
    assert check_logit_scale(x, logits, scale, cap) == ""
    assert f"pass logit_scale={scale:.3g}" in check_logit_scale(x, logits, 2 * scale, cap)


def test_nothing_is_said_of_logits_that_are_no_multiple_of_the_output():
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    others = (x.log_softmax(-1), torch.randn(4, 50), x.square(), x[:, :-1], torch.zeros_like(x), x * torch.nan)
    assert [check_logit_scale(x, logits, 3.0) for logits in others] == [""] * len(others)


def test_a_scale_that_the_user_gives_is_in_the_increment():
    model = seeded(Plain, V=V, d=D)
    model.config = {"model_type": "cohere", "logit_scale": 0.0625}
    optimizer = SGD(model.parameters(), lr=0.1)
    assert Probe(model, optimizer).head.logit_scale == 0.0625
    with Probe(model, optimizer, logit_scale=-2.0, diameter_every=1, perturbation_every=0, strict=True) as probe:
        record, S = train(model, probe, optimizer)
    assert record.diameter == pytest.approx(2 * all_pairs_diameter(S), rel=1e-5)


def test_a_scale_that_nobody_told_of_is_found_on_the_panel():
    class Scaled(Plain):
        def forward(self, tokens):
            return 0.25 * super().forward(tokens)

    model = seeded(Scaled, V=V, d=D)
    optimizer = SGD(model.parameters(), lr=0.1)
    panel = Panel.of_tokens(torch.randint(0, V, (4, 9)), 30)
    with (
        pytest.warns(UserWarning, match=r"logits are 0\.25 times its head's output, .* pass logit_scale=0\.25"),
        Probe(model, optimizer, panel=panel, diameter_every=1, perturbation_every=1, strict=True) as probe,
    ):
        record, _ = train(model, probe, optimizer)
    assert record.perturbation_rms > 0
    assert len(probe.remarks) == 1
