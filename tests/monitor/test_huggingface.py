"""HilbertMonitor on Hugging Face's GPT-2: its batches, head and labels, and the numbers of full forward passes."""

import copy
import logging
import warnings
from collections import Counter

import lightning
import pytest
import torch
from torch.optim import Adafactor, AdamW
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor, Probe
from hilbert_monitor.monitor import hidden_states as module_of_states
from hilbert_monitor.monitor.hidden_states import HeadNotReached, hidden_states
from hilbert_monitor.monitor.panel import Panel
from tests.support.references import all_pairs_diameter
from tests.support.sinks import Recorder
from tests.support.tried import tried

transformers = pytest.importorskip("transformers")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
V, WIDTH, UPDATES, POSITIONS = 211, 32, 6, 60
LR, DECAY, IGNORED = 1e-2, 0.1, -100


def gpt2(n_layer=2, **options):
    """A small GPT-2 with the dropout that it has by default, its weights a function of the seed."""
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=WIDTH, n_embd=32, n_layer=n_layer, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)


def texts(seed, number=24):
    """Prompts and answers: ids of 5 to 20 tokens, and how many of them are a prompt that is not learned."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 21, (number,), generator=draw).tolist()
    return [(torch.randint(1, V, (n,), generator=draw), n // 3) for n in lengths]


def collate(items):
    """Pad on the right; labels are the ids where they stand, -100 in the prompt and the padding."""
    width = max(len(ids) for ids, _ in items)
    batch = {
        "input_ids": torch.zeros(len(items), width, dtype=torch.long),
        "attention_mask": torch.zeros(len(items), width, dtype=torch.long),
        "labels": torch.full((len(items), width), IGNORED),
    }
    for row, (ids, prompt) in enumerate(items):
        batch["input_ids"][row, : len(ids)] = ids
        batch["attention_mask"][row, : len(ids)] = 1
        batch["labels"][row, prompt : len(ids)] = ids[prompt:]
    return batch


def encoded(items):
    """The same in the mapping that Hugging Face's tokenizers return."""
    return transformers.BatchEncoding(collate(items))


class Module(lightning.LightningModule):
    def __init__(self, model, kind=AdamW):
        super().__init__()
        self.model, self.kind = model.train(), kind

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def validation_step(self, batch, _):
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return self.kind(self.parameters(), lr=LR, weight_decay=DECAY)


class Snapshots(lightning.Callback):
    """Copies of the model in fp64 before and after every update; the first, of before any, is number 0."""

    def __init__(self):
        self.models = []

    def on_train_start(self, trainer, module):
        self.models.append(in_fp64(module.model))

    def on_train_batch_end(self, trainer, module, *_):
        self.models.append(in_fp64(module.model))

    def change(self, step):
        """What an update did to the head, decay left out."""
        before, after = (self.models[k].lm_head.weight for k in (step - 1, step))
        return after - (1 - LR * DECAY) * before


def in_fp64(model):
    return copy.deepcopy(getattr(model, "_orig_mod", model)).double().eval().requires_grad_(False)


def fit(model, monitor, *others, form=collate, kind=AdamW):
    """One micro-batch is one update."""
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=UPDATES,
        max_epochs=-1,
        val_check_interval=3,
        callbacks=[*others, monitor],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Module(model, kind)
    train = DataLoader(texts(0), batch_size=4, shuffle=True, collate_fn=form)
    trainer.fit(module, train, DataLoader(texts(1), batch_size=4, collate_fn=form))
    return module


def counted(batch):
    """Positions of the panel by the definition: a token that is not padding, before one whose label is not ignored."""
    following = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return ((batch["attention_mask"] == 1) & (following != IGNORED)).flatten()


def validation():
    data = texts(1)
    return [collate(data[start : start + 4]) for start in range(0, len(data), 4)]


def plain_rms(after, S, batches):
    """RMS of the range of the logits' change, from full forward passes with the head as it is and as it was."""
    earlier = copy.deepcopy(after)
    earlier.lm_head.weight = torch.nn.Parameter(after.lm_head.weight - S)
    ranges = []
    for batch in batches:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            change = (after(**inputs).logits - earlier(**inputs).logits).flatten(0, 1)[counted(batch)]
        ranges.append(change.amax(1) - change.amin(1))
    return float(torch.cat(ranges)[:POSITIONS].square().mean().sqrt())


@pytest.mark.parametrize("form", [collate, encoded])
def test_records_are_those_of_full_forward_passes_with_plain_logits(form):
    snapshots, kept = Snapshots(), Recorder()
    monitor = HilbertMonitor(diameter_every=2, perturbation_every=3, panel_size=POSITIONS, sinks=[kept])
    fit(gpt2(tie_word_embeddings=False), monitor, snapshots, form=form)
    assert not monitor.session.guard.failures
    assert monitor.session.probe.head.name == "model.lm_head"
    assert monitor.session.probe.remarks == []
    by_step = {record.step: record for record in kept.records}
    assert sorted(by_step) == list(range(1, UPDATES + 1))
    for step, record in by_step.items():
        S = snapshots.change(step)
        D = all_pairs_diameter(S)
        assert record.diameter_lower * (1 - 1e-5) <= D <= record.diameter_upper * (1 + 1e-5)
        assert (record.diameter is not None) == (step % 2 == 0)
        assert record.diameter is None or record.diameter == pytest.approx(D, rel=1e-5)
        assert (record.perturbation_rms is not None) == (step % 3 == 0)
        if record.perturbation_rms is not None:
            rms = plain_rms(snapshots.models[step], S, validation())
            assert record.perturbation_rms == pytest.approx(rms, rel=1e-4)
            assert record.perturbation_max <= record.hidden_norm * record.diameter_upper * (1 + 1e-5)
        assert record.train_loss > 0
        assert record.ceiling >= record.diameter_lower * (1 - 1e-5)
    assert by_step[UPDATES].gradient_balance < 1e-5
    libraries = ["transformers", "lightning"]
    tried(model="GPT2LMHeadModel", trainer="Lightning", optimizer="AdamW", libraries=libraries)


def test_positions_are_neither_padding_nor_ignored_labels():
    monitor = HilbertMonitor(diameter_every=0, perturbation_every=UPDATES, panel_size=POSITIONS, strict=True)
    fit(gpt2(tie_word_embeddings=False), monitor)
    panel = monitor.session.probe.panel
    assert panel.size == POSITIONS
    expected = Panel.of_batches(validation(), POSITIONS)
    assert panel.hash == expected.hash


def test_a_tied_head_is_warned_of_once_and_measured_all_the_same():
    model, snapshots, kept = gpt2(), Snapshots(), Recorder()
    assert model.lm_head.weight is model.transformer.wte.weight
    monitor = HilbertMonitor(diameter_every=2, perturbation_every=3, panel_size=POSITIONS, sinks=[kept])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(model, monitor, snapshots)
    said = [str(warning.message) for warning in seen if "hilbert_monitor" in str(warning.message)]
    assert len(said) == 1
    assert "an embedding's too" in said[0]
    assert monitor.session.probe.remarks == [said[0].partition("identity not exact, ")[2]]
    assert [record.step for record in kept.records] == list(range(1, UPDATES + 1))
    last = kept.records[-1]
    S = snapshots.change(UPDATES)
    assert last.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-5)
    assert last.perturbation_rms == pytest.approx(plain_rms(snapshots.models[-1], S, validation()), rel=1e-4)


@pytest.mark.parametrize("kind", [AdamW, Adafactor], ids=lambda kind: kind.__name__)
def test_the_last_update_is_measured_whatever_the_optimizer_and_the_cadence(kind):
    """Adafactor's increment is a difference of weights: a copy of them is needed from before the last update."""
    snapshots, kept = Snapshots(), Recorder()
    monitor = HilbertMonitor(diameter_every=4, perturbation_every=4, panel_size=POSITIONS, sinks=[kept])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(gpt2(tie_word_embeddings=False), monitor, snapshots, kind=kind)
    assert [str(warning.message) for warning in seen if "hilbert_monitor" in str(warning.message)] == []
    assert sorted({r.step for r in kept.records if r.diameter is not None}) == [4, UPDATES]
    last = kept.records[-1]
    assert last.perturbation_rms > 0
    assert last.diameter == pytest.approx(all_pairs_diameter(snapshots.change(UPDATES)), rel=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_probe_in_a_plain_loop_measures_it_and_leaves_it_as_it_was(compiled):
    runs, graphs = [], Counter()

    def eager(graph, _):
        graphs[watched] += 1
        return graph.forward

    torch.compiler.reset()
    model = gpt2(n_layer=1, tie_word_embeddings=False).train()  # each layer takes seconds to compile
    called, start = torch.compile(model, backend=eager) if compiled else model, copy.deepcopy(model.state_dict())
    for watched in (False, True):
        model.load_state_dict(start)
        optimizer = AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
        panel = Panel.of_batches(validation(), POSITIONS)
        probe = Probe(called, optimizer, panel=panel, diameter_every=1, perturbation_every=1, strict=True)
        torch.manual_seed(2)
        if watched:
            probe.attach()
        for batch in [validation()[0]] * 3:
            before = in_fp64(model)
            optimizer.zero_grad()
            called(**batch).loss.backward()
            optimizer.step()
            if not watched:
                continue
            record = probe.record()
            after = in_fp64(model)
            S = after.lm_head.weight - (1 - LR * DECAY) * before.lm_head.weight
            assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-5)
            assert record.perturbation_rms == pytest.approx(plain_rms(after, S, validation()), rel=1e-4)
            assert all(module.training for module in model.modules())
        probe.detach()
        runs.append(([p.detach().clone() for p in model.parameters()], torch.get_rng_state()))
    (weights, rng), (others, other_rng) = runs
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
    assert torch.equal(rng, other_rng)
    assert bool(graphs[False]) == compiled
    assert not graphs[True]  # it is not compiled again


def t5():
    config = transformers.T5Config(
        vocab_size=V, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).train()


def test_an_encoder_decoder_is_refused_in_one_sentence_that_says_what_to_pass():
    model, panel = t5(), Panel.of_batches(validation(), POSITIONS)
    with pytest.raises(HeadNotReached, match=r"\AT5ForConditionalGeneration is an encoder-decoder: pass hidden=, .*\Z"):
        hidden_states(model, model.lm_head, panel)

    def decoder_states(module, batch):
        ids = batch["input_ids"]
        return module(input_ids=ids, decoder_input_ids=ids, output_hidden_states=True).decoder_hidden_states[-1]

    assert hidden_states(model, model.lm_head, panel, hidden=decoder_states).shape == (POSITIONS, 16)


SMALL = {
    **{"vocab_size": V, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "max_position_embeddings": WIDTH},
}


def mixtral():
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=4, output_router_logits=True)
    )


def llama():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=rope))


@pytest.mark.parametrize("make", [gpt2, mixtral, llama])
def test_rows_of_a_padded_batch_give_the_states_of_the_whole_batch(make, monkeypatch):
    model = make().train()
    model.gradient_checkpointing_enable()
    panel = Panel.of_batches(validation(), POSITIONS)
    whole = hidden_states(model, model.lm_head, panel)
    with torch.no_grad():
        batches = [{name: batch[name] for name in ("input_ids", "attention_mask")} for batch in panel.batches]
        twin = copy.deepcopy(model).eval()
        plain = [twin(**batch, output_hidden_states=True).hidden_states[-1] for batch in batches]
    rows = [states.flatten(0, 1)[at] for states, at in zip(plain, panel.positions, strict=True)]
    torch.testing.assert_close(whole, torch.cat(rows))
    monkeypatch.setattr(module_of_states, "LOGIT_BYTES", 1)
    torch.testing.assert_close(hidden_states(model, model.lm_head, panel), whole)
