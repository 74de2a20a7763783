"""Shards, the paper's order against a plain restatement, positions saved and restored, and the validation text."""

import logging
import os
import pickle
import struct
import warnings
from contextlib import suppress
from itertools import islice

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import SeedSequence, default_rng

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.pretrain import shards as shards_module
from hilbert_monitor.pretrain.data import (
    ENDLESS,
    Order,
    RankSampler,
    TrainingLoader,
    ValidationBlocks,
    validation_loader,
)
from hilbert_monitor.pretrain.shards import ShardWriter, find_shards, open_shard, write_shard
from tests.support.draws import draws

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
V = 50_000
SIZES = (301, 170, 7, 233)


def write_text(folder, sizes=SIZES, kind="train"):
    """Shards whose tokens say where they stand: shard k has 10,000 k, 10,000 k + 1, ..."""
    for k, size in enumerate(sizes):
        write_shard(folder / f"fineweb_{kind}_{k:06}.bin", np.arange(size) + 10_000 * k)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_text(write_text(tmp_path_factory.mktemp("shards")), (53, 4, 48), "val")


def loader(folder, **changes):
    sizes = {"context": 5, "global_batch": 6, "micro_batch": 2, "vocab_size": V}
    return TrainingLoader(folder, **{**sizes, **changes})


def take(batches, number):
    return list(islice(batches, number))


def firsts(batch):
    """The first token of each block, which names it."""
    return batch[0][:, 0].tolist()


# the layout


def test_a_shard_is_the_bytes_that_gpt2_speed_runs_read(tmp_path):
    write_shard(tmp_path / "x.bin", [0, 1, 50_256, 65_535])
    header = struct.pack("<256i", 20240520, 1, 4, *[0] * 253)
    assert (tmp_path / "x.bin").read_bytes() == header + struct.pack("<4H", 0, 1, 50_256, 65_535)


@given(st.lists(st.integers(0, 65_535), min_size=1, max_size=50))
@settings(max_examples=draws(20), deadline=None)
def test_what_is_written_is_read_back(tmp_path_factory, ids):
    path = tmp_path_factory.mktemp("shard") / "x.bin"
    assert write_shard(path, ids) == open_shard(path)
    read = open_shard(path).read(0, len(ids), 2**16)
    assert read.tolist() == ids
    assert isinstance(read, np.memmap)
    assert not read.flags.writeable
    assert [p.name for p in path.parent.iterdir()] == ["x.bin"]


def shard_bytes(magic=20240520, version=1, tokens=3, held=3):
    return struct.pack("<256i", magic, version, tokens, *[0] * 253) + bytes(2 * held)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "bad.bin has 0 bytes, less than the header"),
        (shard_bytes()[:1023], "bad.bin has 1023 bytes, less than the header"),
        (shard_bytes(magic=7), "bad.bin is not a shard: its first number must be 20240520, got 7"),
        (shard_bytes(version=2), "bad.bin has version 2 of the layout, but 1 is read"),
        (shard_bytes(tokens=0, held=0), "bad.bin has 0 tokens by its header"),
        (shard_bytes(tokens=-5), "bad.bin has -5 tokens by its header"),
        (shard_bytes(held=2), "bad.bin is cut short: its header says 3 tokens, but it holds 2"),
        (shard_bytes()[:-1], "bad.bin is cut short: its header says 3 tokens, but it holds 2"),
        (shard_bytes(held=4), "bad.bin is too long: its header says 3 tokens, but it holds 4"),
    ],
)
def test_a_file_that_is_no_whole_shard_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        open_shard(tmp_path / "bad.bin")


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([], "at least one integer"), ([[1]], "at least one integer"), ([1.0], "float64"), ([-1], "got -1 to -1"),
     ([65_536], "at most 65,536")],
)  # fmt: skip
def test_what_is_no_row_of_tokens_is_not_written(tmp_path, tokens, said):
    with pytest.raises(ValueError, match=said):
        write_shard(tmp_path / "x.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_file_that_was_there_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    write_shard(path, [1, 2])

    def fail(_):
        raise OSError("the disk is full")

    monkeypatch.setattr(shards_module.os, "fsync", fail)
    with pytest.raises(OSError, match="full"):
        write_shard(path, [3, 4, 5])
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]
    assert open_shard(path).read(0, 2, V).tolist() == [1, 2]


def test_a_folder_or_files_that_are_missing_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        find_shards(tmp_path / "nowhere", "*.bin")
    with pytest.raises(FileNotFoundError, match=r"is named \*_train_\*.bin: tokenize text"):
        loader(tmp_path)


def test_a_pattern_chooses_the_files_and_their_names_the_order(tmp_path):
    for name in ("b_train_1", "a_train_2", "a_train_10", "a_val_0"):
        write_shard(tmp_path / f"{name}.bin", [1, 2])
    assert [s.path.stem for s in find_shards(tmp_path, "*train*.bin")] == ["a_train_10", "a_train_2", "b_train_1"]
    assert [s.path.stem for s in find_shards(tmp_path, "a_train_?.bin")] == ["a_train_2"]


def test_reading_leaves_no_file_open(folder):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    reader = loader(folder)
    batches = take(reader, 50)
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before
    assert len(batches) == 50


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(2, 7))
@settings(max_examples=draws(30), deadline=None)
def test_a_stream_is_cut_into_full_shards_and_a_rest(tmp_path_factory, lengths, size):
    folder = tmp_path_factory.mktemp("series")
    stream = np.arange(sum(lengths), dtype=np.uint16)
    with ShardWriter(folder, "x_train", size) as writer:
        for part in np.split(stream, np.cumsum(lengths)):
            writer.add(part)
    assert writer.tokens == len(stream)
    read = [shard.read(0, shard.tokens, V) for shard in writer.shards]
    assert [len(x) for x in read] == [min(size, len(stream) - i) for i in range(0, len(stream), size)]
    assert [p.name for p in sorted(folder.iterdir())] == [f"x_train_{k:06}.bin" for k in range(len(read))]
    assert np.concatenate([stream[:0], *read]).tolist() == stream.tolist()


def test_a_stream_that_breaks_off_leaves_no_rest(tmp_path):
    with suppress(Stop), ShardWriter(tmp_path, "x_train", 5) as writer:
        writer.add(np.arange(7, dtype=np.uint16))
        raise Stop
    assert [p.name for p in tmp_path.iterdir()] == ["x_train_000000.bin"]
    with pytest.raises(ValueError, match="at least two tokens"):
        ShardWriter(tmp_path, "x", 1)


# the order


def plain_epoch(sizes, context, global_batch, seed, epoch):
    """The paper's order restated: for each optimizer batch of an epoch its (shard, block)s."""
    shards = list(range(len(sizes)))
    default_rng(SeedSequence([seed, epoch, 0])).shuffle(shards)
    steps = []
    for k in shards:
        batches = list(range((sizes[k] - 1) // context // global_batch))
        default_rng(SeedSequence([seed, epoch, k, 1])).shuffle(batches)
        steps += [[(k, b * global_batch + i) for i in range(global_batch)] for b in batches]
    return steps


def plain_part(step, world, micro, accumulation, rank, j):
    return step[j * world * micro : (j + 1) * world * micro][rank * micro : (rank + 1) * micro]


def test_the_order_is_the_plain_one_to_the_token(folder):
    texts = [np.arange(size) + 10_000 * k for k, size in enumerate(SIZES)]
    steps = [step for epoch in range(3) for step in plain_epoch(SIZES, 5, 6, 7, epoch)]
    batches = iter(loader(folder, seed=7))
    for step in steps:
        for j in range(3):
            tokens, targets = next(batches)
            assert tokens.dtype == targets.dtype == torch.int64
            part = plain_part(step, 1, 2, 3, 0, j)
            assert tokens.tolist() == [texts[k][b * 5 : b * 5 + 5].tolist() for k, b in part]
            assert targets.tolist() == [texts[k][b * 5 + 1 : b * 5 + 6].tolist() for k, b in part]


def test_the_shuffles_are_those_of_numpy_by_value():
    """Numbers by hand, lest reference and code change together: numpy 2's shuffles of [0, 1, 2, 3]."""
    order = Order([2, 0, 3, 1], seed=1)
    assert [order.at(step) for step in range(6)] == [(0, 1), (0, 0), (2, 2), (2, 1), (2, 0), (3, 0)]
    assert [order.at(step) for step in range(6, 12)] == [(2, 2), (2, 0), (2, 1), (0, 1), (0, 0), (3, 0)]


splits = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    context=st.integers(1, 9),
    split=splits,
    seed=st.integers(0, 2**40),
)
@settings(max_examples=draws(25), deadline=None)
def test_every_block_of_a_complete_batch_comes_once_an_epoch_on_one_rank(tmp_path_factory, sizes, context, split, seed):
    world, micro, accumulation = split
    size = world * micro * accumulation
    folder = write_text(tmp_path_factory.mktemp("order"), sizes)
    steps = [plain_epoch(sizes, context, size, seed, epoch) for epoch in range(2)]
    changes = {"context": context, "global_batch": size, "seed": seed, "world": world, "micro_batch": micro}
    if not steps[0]:
        with pytest.raises(ValueError, match="has a complete batch"):
            loader(folder, **changes)
        return
    ranks = [iter(loader(folder, rank=r, **changes)) for r in range(world)]
    for epoch in steps:
        seen = []
        for step in epoch:
            for j in range(accumulation):
                for rank, batches in enumerate(ranks):
                    got = firsts(next(batches))
                    part = plain_part(step, world, micro, accumulation, rank, j)
                    assert got == [10_000 * k + b * context for k, b in part]
                    seen += got
        whole = [n // context // size * size for n in (s - 1 for s in sizes)]
        assert sorted(seen) == [10_000 * k + b * context for k, blocks in enumerate(whole) for b in range(blocks)]


@pytest.mark.parametrize(("world", "micro"), [(1, 1), (1, 6), (2, 1), (2, 3), (3, 2), (6, 1)])
def test_a_global_batch_depends_on_no_number_of_ranks_nor_accumulation(folder, world, micro):
    whole = take(loader(folder, micro_batch=6), 40)
    ranks = [iter(loader(folder, world=world, micro_batch=micro, rank=r)) for r in range(world)]
    for tokens, _ in whole:
        parts = [next(batches)[0] for _ in range(6 // (world * micro)) for batches in ranks]
        assert torch.equal(torch.cat(parts), tokens)


def test_epochs_and_seeds_differ(folder):
    steps = sum((size - 1) // 5 // 6 for size in SIZES)
    run = [firsts(x) for x in take(loader(folder, micro_batch=6), 2 * steps)]
    assert run[:steps] != run[steps:]
    assert sorted(run[:steps]) == sorted(run[steps:])
    assert run != [firsts(x) for x in take(loader(folder, micro_batch=6, seed=1), 2 * steps)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"global_batch": 9}, "9 blocks does not divide into micro-batches of 2 on 1 devices: choose a multiple of 2"),
        ({"world": 4}, "does not divide into micro-batches of 2 on 4 devices: choose a multiple of 8"),
        ({"global_batch": 100}, "no shard in .* complete batch of 100 blocks of 5 tokens, the largest has 60 blocks"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"micro_batch": 0}, "micro_batch must be at least 1, got 0"),
        ({"rank": 1}, "rank must be at least 0 and below 1, got 1"),
        ({"rank": -1}, "rank must be at least 0 and below 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"steps": 0}, "steps at least 1, got 0 and 0"),
    ],
)
def test_sizes_that_cannot_be_are_refused(folder, changes, said):
    with pytest.raises(ValueError, match=said):
        loader(folder, **changes)


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(folder, tmp_path):
    reader = loader(folder, vocab_size=30_000, micro_batch=6)
    with pytest.raises(ValueError, match=r"fineweb_train_000003\.bin has a token 30\d\d\d .*the vocabulary has 30000"):
        take(reader, 40)
    shard = write_shard(tmp_path / "x.bin", [3, 8, 9])
    assert shard.read(0, 3, 10).tolist() == [3, 8, 9]
    assert shard.read(0, 2, 9).tolist() == [3, 8]  # what is not read is not looked at
    with pytest.raises(ValueError, match=r"x\.bin has a token 9 between its tokens 0 and 3, but the vocabulary has 9"):
        shard.read(0, 3, 9)


def test_changing_a_batch_changes_neither_its_targets_nor_the_file(folder):
    reader = loader(folder)
    tokens, targets = reader.batch(0)
    kept = targets.clone()
    tokens.zero_()
    assert torch.equal(targets, kept)
    assert not torch.equal(reader.batch(0)[0], tokens)


def test_pinned_memory_is_asked_for_where_there_is_cuda_and_not_elsewhere(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append(x) or x)
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        loader(folder, pin_memory=True).batch(0)
        assert len(asked) == 2 * there
    loader(folder).batch(0)
    assert len(asked) == 2


# positions


def test_a_restored_loader_goes_on_with_the_same_batches_from_every_position(folder):
    whole = [firsts(x) for x in take(loader(folder), 100)]
    for at in range(90):
        first, second = loader(folder), loader(folder)
        take(first, at)
        second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        assert [firsts(x) for x in take(second, 10)] == whole[at : at + 10]


def test_the_position_counts_batches_that_were_handed_out(folder):
    reader = loader(folder)
    batches = iter(reader)
    iter(reader)  # Lightning makes one more, to see that it can
    for n in range(5):
        assert reader.state_dict()["taken"] == n
        next(batches)
    assert firsts(next(iter(reader))) == firsts(reader.batch(5))


def test_a_batch_that_could_not_be_read_is_not_counted(folder):
    reader = loader(folder, vocab_size=1)
    with pytest.raises(ValueError, match="has a token"):
        next(iter(reader))
    assert reader.state_dict()["taken"] == 0


def test_a_loader_ends_at_the_number_of_steps_and_says_so_when_asked_for_more(folder):
    reader = loader(folder, steps=7)
    assert len(reader) == 21
    assert len(list(reader)) == 21
    with pytest.raises(RuntimeError, match="all 7 steps of the data were taken: end training there"):
        list(reader)
    assert len(loader(folder)) == ENDLESS


@pytest.mark.parametrize("changes", [{"seed": 1}, {"context": 4}, {"global_batch": 12}, {"micro_batch": 3}])
def test_a_position_in_another_order_is_refused(folder, changes):
    state = loader(folder).state_dict()
    name = {"micro_batch": "accumulation"}.get(*changes, *changes)
    with pytest.raises(ValueError, match=f"the saved position is of a run with {name}=.*resume with the data"):
        loader(folder, **changes).load_state_dict(state)


def test_a_position_in_other_shards_is_refused(folder, tmp_path):
    state = loader(folder).state_dict()
    with pytest.raises(ValueError, match="of a run with shards="):
        loader(write_text(tmp_path, (*SIZES, 100))).load_state_dict(state)
    with pytest.raises(ValueError, match="of a run with seed=None"):
        loader(folder).load_state_dict({"taken": 3})


def test_a_run_goes_on_with_other_ranks_and_more_steps_if_accumulation_is_the_same(folder):
    first = loader(folder, steps=4)
    take(first, 7)
    ranks = [loader(folder, world=2, rank=r, micro_batch=1, steps=9) for r in range(2)]
    for reader in ranks:
        reader.load_state_dict(first.state_dict())
    assert [x for reader in ranks for x in firsts(next(iter(reader)))] == firsts(loader(folder).batch(7))


class Seen(lightning.LightningModule):
    """Notes the batches it sees."""

    def __init__(self):
        super().__init__()
        self.w, self.seen, self.validated = torch.nn.Parameter(torch.zeros(())), [], []

    def training_step(self, batch, i):
        self.seen.append((i, firsts(batch)))
        return self.w * 1.0

    def validation_step(self, batch, i):
        self.validated.append(firsts(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


class Stop(Exception):
    pass


class SaveAndStop(lightning.Callback):
    def __init__(self, at, path):
        self.at, self.path = at, path

    def on_train_batch_end(self, trainer, module, *_):
        if len(module.seen) == self.at:
            trainer.save_checkpoint(self.path)
            raise Stop


def fit(train, *callbacks, val=None, path=None, **changes):
    module = Seen()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=30, accumulate_grad_batches=3, callbacks=list(callbacks),
        enable_checkpointing=False, **quiet, **changes,
    )  # fmt: skip
    try:
        trainer.fit(module, train, val, ckpt_path=path)
    except Stop:
        return module, None
    return module, trainer


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [30, None])
def test_a_lightning_run_resumed_anywhere_sees_the_batches_it_would_have_seen(folder, tmp_path, steps):
    whole, trainer = fit(loader(folder, steps=steps))
    assert trainer.global_step == 30
    assert [x for _, x in whole.seen] == [firsts(x) for x in take(loader(folder), 90)]
    for at in (1, 3, 65, 66, 67, 90):  # an epoch has 66: within accumulations and at their ends
        before, _ = fit(loader(folder, steps=steps), SaveAndStop(at, tmp_path / "c.ckpt"))
        after, trainer = fit(loader(folder, steps=steps), path=tmp_path / "c.ckpt")
        assert len(before.seen) == at
        assert before.seen + after.seen == whole.seen
        assert trainer.global_step == 30


def test_a_lightning_run_that_wants_more_than_the_steps_is_told(folder):
    with pytest.raises(RuntimeError, match="all 20 steps"):
        fit(loader(folder, steps=20))


def test_lightning_epochs_go_on_where_the_last_one_ended(folder, tmp_path):
    whole, _ = fit(loader(folder), limit_train_batches=6)
    assert [x for _, x in whole.seen] == [firsts(x) for x in take(loader(folder), 90)]
    for at in (5, 6, 7):
        before, _ = fit(loader(folder), SaveAndStop(at, tmp_path / "c.ckpt"), limit_train_batches=6)
        after, _ = fit(loader(folder), path=tmp_path / "c.ckpt", limit_train_batches=6)
        assert [x for _, x in before.seen + after.seen] == [x for _, x in whole.seen]


# validation


def blocks(folder, tokens=45, **changes):
    return ValidationBlocks(folder, **{"context": 5, "vocab_size": V, "tokens": tokens, **changes})


def test_validation_is_the_first_blocks_in_the_order_of_the_shards(folder):
    data = blocks(folder, 90)  # 10 blocks of the first shard, none of the second, 8 of the third
    assert len(data) == 18
    names = [10_000 * k + 5 * b for k, number in ((0, 10), (2, 9)) for b in range(number)]
    for i, name in enumerate(names[:18]):
        tokens, targets = data[i]
        assert tokens.tolist() == list(range(name, name + 5))
        assert targets.tolist() == list(range(name + 1, name + 6))
    for outside in (18, -1):
        with pytest.raises(IndexError, match="there are 18 validation blocks"):
            data[outside]
    assert len(blocks(folder, 94)) == 18


def test_validation_on_more_than_there_is_says_the_true_number_once(folder):
    said = "have 95 tokens in blocks of 5, fewer than the 5242880 asked for: validation is on 95"
    with pytest.warns(UserWarning, match=said) as caught:
        data = ValidationBlocks(folder, context=5, vocab_size=V)
    assert len(caught) == 1
    assert len(data) == 19
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(blocks(folder, 95)) == 19


@given(st.integers(1, 19), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=draws(40), deadline=None)
def test_ranks_validate_on_disjoint_parts_of_complete_micro_batches(folder, number, world, micro):
    data = blocks(folder, 5 * number)
    if number < world * micro:
        with pytest.raises(
            ValueError, match=f"has {number} blocks, less than a micro-batch of {micro} on each of {world}"
        ):
            RankSampler(data, micro_batch=micro, world=world)
        return
    names = [int(data[i][0][0]) for i in range(number)]
    ranks = [validation_loader(data, micro_batch=micro, rank=r, world=world) for r in range(world)]
    for _ in range(2):  # the same every time
        parts = [[firsts(batch) for batch in rank] for rank in ranks]
        assert all(len(part) == len(rank) == number // (world * micro) for part, rank in zip(parts, ranks, strict=True))
        seen = [name for together in zip(*parts, strict=True) for part in together for name in part]
        assert seen == names[: number // (world * micro) * world * micro]


def test_the_mean_of_all_ranks_mean_losses_is_the_mean_over_all_tokens(folder):
    data = blocks(folder, 90)
    every = torch.stack([data[i][0] for i in range(18)]).double()
    means = [x.double().mean() for r in range(3) for x, _ in validation_loader(data, micro_batch=2, rank=r, world=3)]
    assert torch.stack(means).mean() == every.mean()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": 4}, "at least a block of 5 tokens, got tokens=4"),
        ({"context": 100, "tokens": 1000}, "no shard named .* has a block of 100 tokens"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
    ],
)
def test_validation_that_cannot_be_is_refused(folder, changes, said):
    with pytest.raises(ValueError, match=said):
        blocks(folder, **changes)
    with pytest.raises(ValueError, match=r"fineweb_val_000002\.bin has a token 20005"):
        blocks(folder, 95, vocab_size=20_000)[10]
    with pytest.raises(FileNotFoundError, match="is named other"):
        blocks(folder, pattern="other")


def test_lightning_keeps_the_ranks_parts_and_restarts_validation_every_time(folder):
    data = blocks(folder, 90)
    module, trainer = fit(
        loader(folder), val=validation_loader(data, micro_batch=4), val_check_interval=30,
        check_val_every_n_epoch=None, num_sanity_val_steps=0,
    )  # fmt: skip
    once = [firsts(x) for x in validation_loader(data, micro_batch=4)]
    assert module.validated == once * 3
    trainer._accelerator_connector.use_distributed_sampler = True
    given = validation_loader(data, micro_batch=4, rank=1, world=2)
    assert not trainer._data_connector._requires_distributed_sampler(given)


def test_the_monitors_panel_of_the_validation_text_is_the_same_on_every_rank(folder):
    data = blocks(folder, 90)
    panels = [
        Panel.of_loader(validation_loader(data, micro_batch=m, rank=r, world=w), 40)
        for m, r, w in ((2, 0, 1), (2, 0, 2), (2, 1, 2), (3, 2, 3))
    ]
    assert {panel.hash for panel in panels} == {panels[0].hash}
    assert panels[0].size == 40
    assert torch.cat([x[0] for x in panels[0].batches])[:8].tolist() == [data[i][0].tolist() for i in range(8)]
