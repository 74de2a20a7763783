"""The panel is a function of the validation text alone, and a run that goes on keeps it."""

import os
from collections import namedtuple

import lightning
import msgspec
import pytest
import torch
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor
from hilbert_monitor.monitor.panel import Panel, PanelCollector, input_ids, panel_from, positions_of
from hilbert_monitor.monitor.runtime import Ranks
from tests.support import training
from tests.support.ranks import in_ranks

V, T = 23, 7
TEXT = torch.randint(V, (12, T), generator=torch.Generator().manual_seed(5))
ALONE = Ranks.of(torch.device("cpu"), 1)


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
    scale = torch.tensor([0.1, 1 / 3, -torch.inf])
    batch = padded(TEXT.tolist(), width=9) | {"scale": scale, "n": 3, "name": ["a", None]}
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


def test_rows_of_two_ranks_take_turns_and_the_papers_parts_follow_each_other(tmp_path):
    (first, given), other = in_ranks(panels_of_ranks, tmp_path)
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
        panels = Panel.of_batches([TEXT.clone()], 50), collected(0, 1, batch_size=5, text=TEXT.clone())
    assert not any(batch.is_inference() for panel in panels for batch in panel.batches)


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
