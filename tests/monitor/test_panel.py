"""The panel is a function of the validation text alone, and reading the states at it leaves no trace in a run."""

import copy
import itertools
import os
import random
from collections import namedtuple
from contextlib import nullcontext

import lightning
import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.monitor import hidden_states as module_of_states
from hilbert_monitor.monitor.hidden_states import HeadNotReached, SideEffects, hidden_states
from hilbert_monitor.monitor.panel import Panel, PanelCollector, input_ids, panel_from, positions_of
from hilbert_monitor.monitor.runtime import Ranks
from tests.support import training
from tests.support.decoders import Plain, Wrapper, seeded
from tests.support.ranks import in_ranks

V, T = 23, 7
TEXT = torch.randint(V, (12, T), generator=torch.Generator().manual_seed(5))
ALONE = Ranks.of(torch.device("cpu"), 1)


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def assert_same_generators(before):
    torch_state, python_state, numpy_state = before
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))


def counted_tokens(panel):
    """Tokens at the positions, in order."""
    pairs = zip(panel.batches, panel.positions, strict=True)
    return [token for batch, at in pairs for token in input_ids(batch).flatten()[at].tolist()]


def padded(rows, side="right", width=0):
    """A dict of rows of different lengths, as a tokenizer's collator makes it."""
    width = max(width, *map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, at], mask[i, at] = torch.as_tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


# Collected, given, saved


def collected(rank, world, *, batch_size, size=50, choice="loader", text=TEXT, more_to_come=False):
    """The panel that validation delivers to a rank, if each reads every `world`-th row."""
    collector, ranks = PanelCollector(choice, size), Ranks.of(torch.device("cpu"))
    collector.take(None, validates=True, ranks=ranks)
    collector.collect()
    for batch in text[rank::world].split(batch_size):
        collector.offer(batch)
    collector.finish(ranks=ranks, reader=rank, more_to_come=more_to_come)
    return collector.panel


@pytest.mark.parametrize("batch_size", [1, 5, 12])
def test_the_collected_panel_is_the_first_positions_whatever_the_batch_size(batch_size):
    panel = collected(0, 1, batch_size=batch_size)
    assert counted_tokens(panel) == TEXT.flatten()[:50].tolist()
    assert panel.hash == Panel.of_tokens(TEXT, 50).hash


def test_a_sanity_check_that_delivers_too_few_positions_makes_no_panel():
    assert collected(0, 1, batch_size=2, text=TEXT[:3], more_to_come=True) is None
    with pytest.warns(UserWarning, match="21 positions, fewer than the 50 asked for"):
        assert collected(0, 1, batch_size=2, text=TEXT[:3]).size == 21


def test_a_saved_panel_is_the_same_with_all_that_its_batches_have(tmp_path):
    batch = padded(TEXT.tolist(), width=9) | {"scale": torch.tensor([0.1, 1 / 3]), "n": 3, "name": ["a", None]}
    for panel in (Panel.of_batches([batch], 50), Panel.of_batches([("a", TEXT.to(torch.uint16))], 50)):
        text = msgspec.json.encode(panel.saved)
        (tmp_path / "panel.json").write_bytes(text)
        again = Panel.of_run(tmp_path)
        assert again.hash == panel.hash
        assert str(again.batches) == str(panel.batches)
        assert all(map(torch.equal, again.positions, panel.positions))
    with pytest.raises(ValueError, match="damaged"):
        Panel.restored(panel.saved | {"hash": "0"})


@pytest.mark.parametrize("choice", ["elsewhere", "loadr"])
def test_a_folder_without_a_panel_is_refused_at_once(choice):
    with pytest.raises(ValueError, match=rf"panel takes .* the folder of a run with a panel.json, got '{choice}'"):
        HilbertMonitor(panel=choice)


def test_a_loader_that_is_given_leaves_its_next_epoch_and_its_generator_as_they_were():
    epochs = []
    for look in (False, True):
        torch.manual_seed(3)
        loader = DataLoader(TEXT, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
        if look:
            panel_from(loader, 50, ranks=ALONE)
        epochs.append(torch.cat([*loader, torch.rand(1, 7)]))
    assert torch.equal(*epochs)


def monitored(folder, *, batch_size, shuffle, world=1, steps=4, **options):
    """A run of Lightning's; returns its monitor and what `on_train_end` saw of the panel."""
    monitor, seen = HilbertMonitor(panel_size=50, perturbation_every=2, run_dir=str(folder), strict=True, **options), []
    monitor.on_train_end = lambda *_: seen.append(monitor.session.panels.panel)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp" if world > 1 else "auto", devices=world, max_steps=steps, max_epochs=-1,
        val_check_interval=2, num_sanity_val_steps=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, callbacks=[monitor],
    )  # fmt: skip
    validation = DataLoader(training.Text(1), batch_size=batch_size, shuffle=shuffle)
    resumed = folder / "run.ckpt" if (folder / "run.ckpt").exists() else None
    trainer.fit(training.Module("torch"), DataLoader(training.Text(0), batch_size=4), validation, ckpt_path=resumed)
    return trainer, seen[0]


def start_of_a_run(rank, world, folder):
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test", "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517",
    }  # fmt: skip
    trainer, panel = monitored(folder, batch_size=2, shuffle=False, world=world)
    trainer.save_checkpoint(folder / "run.ckpt")
    return panel.hash


def test_a_run_that_goes_on_keeps_its_panel_whatever_the_ranks_batches_and_shuffling(tmp_path):
    first, second = in_ranks(start_of_a_run, tmp_path / "ranks", tmp_path)
    assert first == second == Panel.of_tokens(training.Text(1).ids, 50).hash
    _, panel = monitored(tmp_path, batch_size=5, shuffle=True, steps=8)
    assert panel.hash == first
    (run,) = [path.parent for path in tmp_path.glob("*/panel.json")]
    assert Panel.of_run(run).hash == first
    (tmp_path / "run.ckpt").unlink()
    _, another = monitored(tmp_path, batch_size=3, shuffle=True, panel=str(run))
    assert another.hash == first


def panels_of_ranks(rank, world):
    """What two ranks collect: their rows in turn, the paper's parts, text that both have, rows of any length."""
    rows = [[1, 2, 3, 4], [5], [6, 7], [8, 9, 10], [11]]
    collector, ranks = PanelCollector("loader", 8), Ranks.of(torch.device("cpu"))
    collector.collect()
    collector.offer(padded(rows[rank::world]))
    collector.finish(ranks=ranks, reader=rank)
    panels = {
        "in turn": collected(rank, world, batch_size=3 + rank),
        "paper": collected(rank, world, batch_size=4, choice="paper"),
        "the same": collected(0, 1, batch_size=4),
        "too few": collected(rank, world, batch_size=2, size=99, more_to_come=True),
        "ragged": collector.panel,
    }
    given = [panel_from(text, 40, ranks=ranks) for text in ([TEXT], [TEXT[rank::world]])]
    return {name: panel and (panel.size, panel.hash) for name, panel in panels.items()}, [p.hash for p in given]


def all_of_a_rank(rank, world):
    """What two ranks do, one after the other: processes take longer to start."""
    return [act(rank, world) for act in (panels_of_ranks, states_of_a_rank, weights_under_fsdp)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks found."""
    return in_ranks(all_of_a_rank, tmp_path_factory.mktemp("ranks"))


def test_rows_of_two_ranks_take_turns_and_the_papers_parts_follow_each_other(two_ranks):
    (first, given), other = two_ranks[0][0], two_ranks[1][0]
    assert (first, given) == other
    parts = Panel.joined([Panel.of_batches([TEXT[rank::2]], 25) for rank in (0, 1)])
    ragged = Panel.of_tokens([[1, 2, 3, 4], [5], [6, 7], [8]], 8)
    assert first == {
        "in turn": (50, Panel.of_tokens(TEXT, 50).hash),
        "paper": (50, parts.hash),
        "the same": (50, Panel.of_tokens(TEXT, 50).hash),
        "too few": None,
        "ragged": (8, ragged.hash),
    }
    assert given == [Panel.of_tokens(TEXT, 40).hash] * 2


# Batches of every form


def following(ids):
    """Labels as many a loader makes them: at each token the one after it."""
    return ids.roll(-1, 1)


Pair = namedtuple("Pair", "ids labels")


@pytest.mark.parametrize(
    "form",
    [
        lambda x: (x, x),
        lambda x: Pair(x, x),
        lambda x: (torch.rand(x.shape), "name", x, x.roll(1)),
        lambda x: {"input_ids": x, "labels": following(x), "id": ["a"], "length": torch.full((len(x),), T)},
        lambda x: {"input_ids": x, "attention_mask": torch.ones(len(x), 1, T, T)},
    ],
    ids=["tuple", "namedtuple", "others first", "dict", "mask of pairs"],
)
def test_of_a_batch_of_any_form_the_rows_with_positions_are_kept(form):
    panel = Panel.of_batches([form(TEXT[:8]), form(TEXT[8:])], 17)
    assert panel.size == 17
    assert counted_tokens(panel) == TEXT.flatten()[:17].tolist()
    assert input_ids(panel.batches[0]).shape == (3, T)  # no row for nothing
    assert panel.hash == Panel.of_tokens(TEXT, 17).hash


def test_panel_taken_in_inference_mode_serves_outside_of_it():
    with torch.inference_mode():
        panel = Panel.of_batches([TEXT.clone()], 50)
        states = hidden_states(model := seeded(Plain), model.lm_head, panel)
    assert not panel.batches[0].is_inference()
    assert not states.is_inference()


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_no_position(side):
    panel = Panel.of_batches([padded([[1, 2, 3], [4], [5, 6]], side)], 6)
    assert counted_tokens(panel) == [1, 2, 3, 4, 5, 6]
    assert positions_of(padded([[1, 2], [3]], side)).tolist() == ([0, 1, 2] if side == "right" else [0, 1, 3])


def test_ignored_labels_are_no_positions_and_a_row_of_them_is_left_out():
    labels = following(TEXT)
    labels[0, :3], labels[2], labels[3, -1] = -100, -100, -100
    expected = TEXT[labels != -100].tolist()[:30]
    for batch in ((TEXT, labels), {"input_ids": TEXT, "labels": labels}):
        panel = Panel.of_batches([batch], 30)
        assert counted_tokens(panel) == expected
        assert len(input_ids(panel.batches[0])) == len({0, 1, 3, 4, 5})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Panel.of_batches([], 10),
        lambda: Panel.of_batches([(TEXT, torch.full_like(TEXT, -100))], 10),
        lambda: Panel.of_tokens([], 10),
    ],
)
def test_no_position_at_all_is_refused(make):
    with pytest.raises(ValueError, match="found no position in the validation text, of 10 asked for"):
        make()


def test_what_cannot_be_a_panel_is_refused():
    for batch in (torch.rand(3, 4), torch.arange(3), {"x": TEXT}, ["text"], "text", None):
        with pytest.raises(ValueError, match=r"found no token ids in a batch of type .* as panel="):
            Panel.of_batches([batch], 10)
    with pytest.raises(ValueError, match="at least one position, got size=0"):
        Panel.of_batches([TEXT], 0)
    with pytest.raises(ValueError, match=r"integer ids.*shape \(7,\) and dtype torch.float32"):
        Panel.of_tokens(torch.rand(2, T), 10)
    with pytest.raises(ValueError, match="context must be at least one token, got 0"):
        Panel.of_tokens(TEXT, 10, context=0)


def test_tokens_are_cut_to_the_context_and_the_rest_is_a_row_too():
    flat = TEXT.flatten()  # 84 tokens
    for tokens in (flat, flat.tolist(), flat.int()):
        panel = Panel.of_tokens(tokens, 84, context=10)
        assert counted_tokens(panel) == flat.tolist()
        assert [tuple(batch.shape) for batch in panel.batches] == [(8, 10), (1, 4)]
        assert all(batch.dtype == torch.long for batch in panel.batches)
    for tokens in (TEXT.tolist(), TEXT.numpy()):
        assert Panel.of_tokens(tokens, 50).hash == Panel.of_tokens(TEXT, 50).hash
    assert counted_tokens(Panel.of_tokens([[1, 2, 3], [4], [5, 6]], 6, context=2)) == [1, 2, 3, 4, 5, 6]


ANSWER = torch.tensor([[5, 6, 7, 8, 9]])  # a prompt of two tokens, an answer of two, padding
TRAINED = torch.tensor([[-100, -100, 7, 8, -100]])


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": ANSWER, "labels": TRAINED},
        (ANSWER, torch.ones_like(ANSWER), TRAINED),
        (ANSWER, torch.tensor([[-100, 7, 8, -100, -100]])),
    ],
    ids=["unshifted", "unshifted tuple with a mask", "shifted tuple"],
)
def test_positions_are_those_that_predict_a_label_wherever_the_label_stands(batch):
    assert positions_of(batch).tolist() == [1, 2]


def test_texts_packed_without_padding_predict_nothing_across_their_borders():
    """As transformers' DataCollatorWithFlattening packs two texts into a row: the first label of each is ignored."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    labels, places = torch.tensor([[-100, 6, 7, -100, 9, 10]]), torch.tensor([[0, 1, 2, 0, 1, 2]])
    borders = torch.tensor([0, 3, 6], dtype=torch.int32)
    batch = {"input_ids": ids, "labels": labels, "position_ids": places, "cu_seq_lens_q": borders}
    assert positions_of(batch).tolist() == [0, 1, 3, 4]
    panel = Panel.of_batches([batch], 4)
    assert panel.batches[0]["cu_seq_lens_q"].tolist() == [0, 3, 6]
    elsewhere = batch | {"position_ids": torch.arange(6)[None]}
    assert panel.hash != Panel.of_batches([elsewhere], 4).hash  # the same tokens, other hidden states


# The hash


def test_the_hash_of_a_text_is_that_of_earlier_versions():
    assert Panel.of_tokens(torch.arange(84).view(12, 7), 50).hash == (
        "c75d046de7294ee2a324a7fed238629d72d2ad7c62eee2eaaf291f1c18149221"
    )
    assert Panel.of_batches([padded([[1, 2, 3], [4], [5, 6]], "left")], 6).hash == (
        "ae0bc80a6ebba963feda425ca219d1e918233cb3ed25597783df8fa82323fc02"
    )
    packed = {"input_ids": ANSWER, "labels": TRAINED, "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    assert Panel.of_batches([packed], 2).hash == "c1a5a9f279f285c36752c58503dd4a3bbbda673e1efab96b573459c066ffbc1d"


def test_hash_is_a_function_of_content_alone():
    expected = Panel.of_batches([TEXT], 80).hash
    for rows in (1, 3, 5):
        assert Panel.of_batches(TEXT.split(rows), 80).hash == expected
    for dtype in (torch.int32, torch.int16, torch.uint16):
        assert Panel.of_batches([TEXT.to(dtype)], 80).hash == expected


def test_hash_sees_one_token_a_position_the_order_and_where_rows_begin():
    one = TEXT.clone()
    one[4, 3] += 1
    labels = following(TEXT)
    labels[4, 3] = -100
    texts = [
        TEXT,
        one,
        TEXT.flip(0),
        (TEXT, labels),
        (TEXT, labels.roll(2, dims=1)),
        TEXT.reshape(-1, 4),
        TEXT.reshape(1, -1),
    ]
    hashes = [Panel.of_batches([text], 80).hash for text in texts] + [Panel.of_batches([TEXT], 79).hash]
    assert len(set(hashes)) == len(hashes)


# States


class Dropping(Plain):
    """Dropout and batch norm; in eval mode neither is felt."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop, self.batch = nn.Dropout(0.5), nn.BatchNorm1d(6)

    def hidden(self, tokens):
        x = self.drop(super().hidden(tokens))
        return self.batch(x.transpose(1, 2)).transpose(1, 2)


class ByName(Dropping):
    """Takes what a tokenizer makes, as Hugging Face's models do."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, **kwargs):
        assert labels is None
        assert not use_cache
        x = self.hidden(input_ids)
        return {"logits": self.lm_head(x if attention_mask is None else x * attention_mask[..., None])}


class Flat(Plain):
    def forward(self, tokens):
        return self.lm_head(input=self.hidden(tokens).flatten(0, 1))


class LastOnly(Plain):
    """Gives its head the last position, unless there are targets to learn."""

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        return self.lm_head(x[:, [-1]] if targets is None else x)


class Headless(Plain):
    """Never calls its head, as fused losses do not."""

    def forward(self, tokens):
        return self.hidden(tokens) @ self.lm_head.weight.T


class Normless(Headless):
    """Nor does a norm of its own make the last states."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = nn.Identity()


class WithForward(Wrapper):
    def forward(self, batch):
        raise AssertionError("the model itself is nearer to its head")


def unwritten(model):
    """A LightningModule without a forward pass, and with the head under a shorter name too."""
    from lightning import LightningModule

    module = LightningModule()
    module.head, module.model = model.lm_head, model
    return module


def reference(model, tokens, size=50):
    """The states by a plain forward pass in eval mode."""
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        return twin.hidden(tokens).flatten(0, 1)[:size]


@pytest.fixture
def panel():
    return Panel.of_batches([TEXT[:8]], 50)


@pytest.mark.few(5)
@pytest.mark.parametrize("kind", [Plain, Dropping, Flat, LastOnly, ByName])
@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: (x, x), lambda x: {"input_ids": x, "labels": following(x), "n": 3}]
)
def test_states_are_those_of_a_plain_forward_pass_in_eval_mode(kind, form):
    model = seeded(kind)
    states = hidden_states(model, model.lm_head, Panel.of_batches([form(TEXT[:8])], 50))
    assert states.shape == (50, 6)
    assert states.dtype == torch.float32
    assert not states.requires_grad
    assert torch.equal(states, reference(model, TEXT[:8]))


@pytest.mark.parametrize(("rows", "passes"), [(3, [3, 3, 2]), (1, [1] * 8), (0.1, [1] * 8), (100, [8])])
@pytest.mark.parametrize("form", [lambda x: x, lambda x: padded(x.tolist(), width=9), lambda x: (x, x)])
def test_logits_of_one_pass_are_bounded_and_the_states_are_those_of_the_whole_batch(rows, passes, form, monkeypatch):
    calls, batch = [], form(TEXT[:8])

    class Recording(ByName):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            calls.append(len(input_ids))
            return super().forward(input_ids, attention_mask, **kwargs)

    model, panel = seeded(Recording), Panel.of_batches([batch], 50)
    whole = hidden_states(model, model.lm_head, panel)
    monkeypatch.setattr(module_of_states, "LOGIT_BYTES", int(rows * 4 * V * input_ids(batch).shape[1]))
    calls.clear()
    torch.testing.assert_close(hidden_states(model, model.lm_head, panel), whole)
    assert calls == passes


@pytest.mark.parametrize("dim", ["flat", 1])
def test_a_head_that_is_called_in_chunks_is_given_all_of_them(dim, panel):
    class InChunks(Plain):
        def forward(self, tokens):
            x = self.hidden(tokens)
            x, along = (x.flatten(0, 1), 0) if dim == "flat" else (x, dim)
            return torch.cat([self.lm_head(part) for part in x.split(3, along)], along)

    model = seeded(InChunks)
    assert torch.equal(hidden_states(model, model.lm_head, panel), reference(model, TEXT[:8]))


def test_what_fails_or_writes_after_the_head_does_not_lose_the_states(panel):
    class LossFirst(Plain):
        def forward(self, tokens, labels=None):
            x = self.hidden(tokens)
            logits = self.lm_head(x)
            x.zero_()
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = seeded(LossFirst)
    assert torch.equal(hidden_states(model, model.lm_head, panel), reference(model, TEXT[:8]))


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_states_under_autocast_are_those_of_a_plain_forward_pass_under_it(panel):
    model = seeded(Plain)
    states = hidden_states(model, model.lm_head, panel, autocast=autocast)
    with autocast():
        expected = reference(model, TEXT[:8])
    assert states.dtype == torch.float32
    assert torch.equal(states, expected.float())
    assert not torch.equal(states, reference(model, TEXT[:8]))


def test_weights_cast_for_the_states_are_neither_taken_from_the_cache_nor_left_there(panel):
    model, enabled = seeded(Plain), []

    def hidden(module, batch):
        enabled.append(torch.is_autocast_cache_enabled())
        return module.hidden(batch)

    for context in (None, autocast):
        hidden_states(model, model.lm_head, panel, hidden=hidden, autocast=context)
        assert torch.is_autocast_cache_enabled()
    assert enabled == [False, False]


@pytest.mark.parametrize(
    "wrap",
    [Wrapper, WithForward, unwritten, lambda m: Wrapper(Wrapper(m, "inner"), "outer"), lambda m: nn.ModuleList([m])],
    ids=["without a forward", "with a forward", "LightningModule", "twice", "list"],
)
def test_called_is_the_model_nearest_to_the_head(wrap, panel):
    model = seeded(Plain)
    expected = reference(model, TEXT[:8])
    assert torch.equal(hidden_states(wrap(model), model.lm_head, panel), expected)


def test_states_of_a_head_that_is_never_called_are_those_of_the_last_norm(panel):
    model, remarks = seeded(Headless), []
    found = hidden_states(model, model.lm_head, panel, remark=remarks.append)
    assert torch.equal(found, reference(model, TEXT[:8]))
    assert remarks == [
        "the forward pass never calls the head: hidden states are the output of 'norm'; if they are others, pass"
        " hidden=..."
    ]


def test_head_that_is_never_called_is_an_error_that_says_what_to_do(panel):
    model = seeded(Normless)
    with pytest.raises(HeadNotReached, match="forward pass of Normless does not call its head, a Linear: pass hidden="):
        hidden_states(model, model.lm_head, panel)
    bare = unwritten(Plain())
    bare.lm_head = nn.Linear(6, V)
    with pytest.raises(HeadNotReached, match=r"no module of LightningModule .* has a forward pass: pass hidden="):
        hidden_states(bare, bare.lm_head, panel)
    with pytest.raises(ValueError, match="is no module of Plain"):
        hidden_states(seeded(Plain), model.lm_head, panel)


def test_states_that_are_not_one_to_a_token_are_refused(panel):
    class TimeFirst(Plain):
        def forward(self, tokens):
            return self.lm_head(self.hidden(tokens).transpose(0, 1))

    model = seeded(TimeFirst)
    with pytest.raises(HeadNotReached, match=r"\(8, 7\) tokens have shape \(7, 8, 6\).*pass hidden="):
        hidden_states(model, model.lm_head, panel)


def test_hidden_is_given_the_module_and_the_batch_in_eval_mode():
    model, seen = seeded(Dropping), []

    def hidden(module, batch):
        seen.append((module, type(batch), module.training, torch.is_grad_enabled()))
        return module.hidden(batch[0])

    states = hidden_states(model, model.lm_head, Panel.of_batches([(TEXT[:8], following(TEXT[:8]))], 50), hidden=hidden)
    assert seen == [(model, tuple, False, False)]
    assert torch.equal(states, reference(model, TEXT[:8]))


# Nothing of the run is touched


class Fails(Dropping):
    def hidden(self, tokens):
        raise FloatingPointError("broken")


@pytest.mark.parametrize(("kind", "error"), [(Dropping, None), (Fails, FloatingPointError), (Normless, HeadNotReached)])
def test_modes_hooks_and_generators_are_as_before_also_after_an_error(kind, error, panel):
    model = seeded(kind).train()
    model.blocks[1].eval()  # frozen, by its owner
    modes = {name: module.training for name, module in model.named_modules()}
    before = generators()
    with nullcontext() if error is None else pytest.raises(error) as raised:
        hidden_states(model, model.lm_head, panel, autocast=autocast)
    if raised is not None:
        assert "hidden=" in " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert modes == {name: module.training for name, module in model.named_modules()}
    assert not model.lm_head._forward_pre_hooks
    assert torch.is_grad_enabled()
    assert torch.is_autocast_cache_enabled()
    assert_same_generators(before)


class Counting(Dropping):
    """Writes in any mode: buffers, an attribute, a list, a dict, a parameter and generators; draws from all others."""

    calls = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("load", torch.zeros(V)), self.register_buffer("rope", torch.zeros(2), persistent=False)
        self.bias, self.recent, self.seen = nn.Parameter(torch.zeros(6), requires_grad=False), [], {}
        self.noise, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def hidden(self, tokens):
        self.load += tokens.flatten().bincount(minlength=V)
        self.load.data.mul_(0.9)
        drawn = torch.rand(3), random.random(), np.random.rand(), self.numpy.random(), self.python.random()
        self.rope, self.late = torch.ones(tokens.shape[1]), torch.rand(1, generator=self.noise) + NOISE.random()
        self.calls += 1
        self.recent.append(tokens)
        self.seen[self.calls] = drawn
        with torch.no_grad():
            self.bias += 1
        return super().hidden(tokens)

    def state(self):
        tensors = {name: b.tolist() for name, b in (*self.named_buffers(), *self.named_parameters())}
        own = self.noise.get_state().tolist(), self.numpy.bit_generator.state, self.python.getstate(), NOISE.getstate()
        return tensors, *own, self.calls, self.recent, self.seen, hasattr(self, "late"), "calls" in vars(self)


NOISE = random.Random(1)


def test_what_a_forward_pass_writes_in_any_mode_is_put_back(panel):
    model = seeded(Counting).train()
    model(TEXT).sum().backward()
    gradients, buffers = [None if p.grad is None else p.grad.clone() for p in model.parameters()], [*model.buffers()]
    del model.late
    before, drawn = copy.deepcopy(model.state()), generators()
    hidden_states(model, model.lm_head, panel)
    assert str(model.state()) == str(before)
    assert_same_generators(drawn)
    assert [id(b) for b in model.buffers()] == [id(b) for b in buffers]
    assert all(g is None or torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("make", [lambda: iter([1, 2]), itertools.count, lambda: (x for x in range(9))])
def test_a_model_with_an_iterator_that_would_advance_is_refused_in_one_sentence(make, panel):
    class Numbered(Plain):
        def hidden(self, tokens):
            next(self.blocks[0].numbers)
            return super().hidden(tokens)

    model = seeded(Numbered)
    model.blocks[0].numbers = make()
    with pytest.raises(SideEffects, match=r"\ANumbered\.blocks\.0\.numbers, a \w+, could not be put back [^.]*\Z"):
        hidden_states(model, model.lm_head, panel)


def test_a_head_that_is_a_bare_parameter_needs_hidden(panel):
    model = seeded(Plain)
    with pytest.raises(HeadNotReached, match="the head is a bare parameter, which no module is called with: pass hid"):
        hidden_states(model, model.lm_head.weight, panel)


def test_a_graph_that_holds_a_buffer_can_still_be_run_back_after_the_panel(panel):
    class Scaled(Plain):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.register_buffer("scale", torch.ones(6))

        def hidden(self, tokens):
            return super().hidden(tokens) * self.scale

    model = seeded(Scaled)
    loss = model(TEXT).sum()
    hidden_states(model, model.lm_head, panel)
    loss.backward()


def test_a_weight_too_large_to_copy_that_is_written_to_is_told_of(panel, monkeypatch):
    class Averaging(Plain):
        def hidden(self, tokens):
            self.embed.weight.mul_(0.5)
            return super().hidden(tokens)

    model = seeded(Averaging)
    monkeypatch.setattr(module_of_states, "KEPT_BYTES", 100)
    with pytest.warns(UserWarning, match=r"forward pass writes to Averaging.embed.weight, too large .* pass hidden="):
        hidden_states(model, model.lm_head, panel)


def test_compiled_model_stays_compiled(panel):
    calls, compilations = [], []

    def backend(graph, inputs):
        compilations.append(graph)

        def run(*args):
            calls.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    model = seeded(Plain)
    compiled, expected = torch.compile(model, backend=backend), reference(model, TEXT[:8])
    compiled(TEXT)
    before, made = len(calls), len(compilations)
    assert torch.equal(hidden_states(compiled, model.lm_head, panel), expected)
    assert len(calls) == before  # the states are formed eagerly
    compiled(TEXT)
    assert (len(calls), len(compilations)) == (2 * before, made)


def states_of_a_rank(rank, world):
    torch.manual_seed(rank)
    model = seeded(Dropping)
    wrapped = DistributedDataParallel(model)
    panel = Panel.of_batches(TEXT.split(2 + rank), 51)
    return panel.hash, hidden_states(wrapped, model.lm_head, panel)


def test_states_of_each_of_two_ranks_are_those_of_one_process(two_ranks):
    model, panel = seeded(Dropping), Panel.of_tokens(TEXT, 51)
    found = [rank[1] for rank in two_ranks]
    assert {digest for digest, _ in found} == {panel.hash}
    for _, states in found:
        torch.testing.assert_close(states, hidden_states(model, model.lm_head, panel))


def weights_under_fsdp(rank, world):
    """The weights after a few updates of a sharded model: without the panel, and with it after each update."""
    runs = []
    for watched in (False, True):
        model = seeded(Counting)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        panel = Panel.of_batches([TEXT[:8]], 50)
        torch.manual_seed(rank)
        for _ in range(3):
            model(TEXT[4 * rank :][:4]).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                hidden_states(model, model.lm_head, panel)
        runs.append([p.full_tensor() for p in model.parameters() if p.requires_grad] + [model.load, model.calls])
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*runs, strict=True))


def test_a_model_sharded_by_fsdp_is_left_as_it_was(two_ranks):
    assert [rank[2] for rank in two_ranks] == [True, True]
