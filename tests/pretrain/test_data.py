"""Shards, the paper's order of blocks against a plain restatement, saved positions, and the validation text."""

import os
import struct
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.random import SeedSequence, default_rng

from hilbert_monitor.pretrain.data import (
    TrainingLoader,
    ValidationLoader,
    batch_at,
    find_shards,
    open_shard,
    write_shard,
)
from hilbert_monitor.pretrain.recipe import Recipe
from tests.support.draws import draws

V = 50_000
SIZES = (301, 170, 7, 233)


def write_text(folder, sizes=SIZES, kind="train"):
    """Write shards whose tokens say where they stand: shard k has 10,000 k, 10,000 k + 1, ..."""
    for k, size in enumerate(sizes):
        write_shard(folder / f"fineweb_{kind}_{k:06}.bin", np.arange(size) + 10_000 * k)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_text(write_text(tmp_path_factory.mktemp("shards")), (53, 4, 48), "val")


def loader(folder, kind=TrainingLoader, world=1, rank=0, **changes):
    sizes = {"context": 5, "global_batch": 6, "micro_batch": 2, "vocab_size": V, "updates": 60}
    return kind(folder, Recipe(devices=world, **sizes | changes), rank=rank)


def validation(folder, tokens=45, **changes):
    return loader(folder, ValidationLoader, validation_tokens=tokens, **{"global_batch": 24} | changes)


def firsts(batch):
    """Return the first token of each block, which names it."""
    return batch[0][:, 0].tolist()


def flat(lists):
    return [name for names in lists for name in names]


def take(batches, number):
    return [firsts(batch) for batch in islice(batches, number)]


# Shards


@given(st.lists(st.integers(0, 65_535), min_size=1, max_size=50))
@settings(max_examples=draws(20), deadline=None)
def test_a_shard_has_the_bytes_of_gpt2_speed_runs_and_is_read_back(tmp_path_factory, ids):
    path = tmp_path_factory.mktemp("shard") / "x.bin"
    assert write_shard(path, ids) == open_shard(path)
    header = struct.pack("<256i", 20240520, 1, len(ids), *[0] * 253)
    assert path.read_bytes() == header + struct.pack(f"<{len(ids)}H", *ids)
    read = open_shard(path).read(0, len(ids))
    assert read.tolist() == ids
    assert isinstance(read, np.memmap)
    assert not read.flags.writeable


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    write_shard(path, [1, 2])
    monkeypatch.setattr(os, "fsync", None)  # calling None fails
    with pytest.raises(TypeError):
        write_shard(path, [3, 4, 5])
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]
    assert open_shard(path).read(0, 2).tolist() == [1, 2]


def test_a_shard_has_the_permissions_of_the_umask_which_never_changes(tmp_path, monkeypatch):
    """Threads share the umask of the process: a change in between would open the files of others to everybody."""
    before = os.umask(0o027)
    change = os.umask
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask of the process changed"))
        write_shard(tmp_path / "x.bin", [1, 2])
    finally:
        change(before)
    assert (tmp_path / "x.bin").stat().st_mode & 0o777 == 0o640


def test_shards_are_found_by_pattern_in_the_order_of_their_names(tmp_path):
    for name in ("b_train_1", "a_train_2", "a_train_10", "a_val_0"):
        write_shard(tmp_path / f"{name}.bin", [1, 2])
    assert [s.path.stem for s in find_shards(tmp_path, "*train*.bin")] == ["a_train_10", "a_train_2", "b_train_1"]


def move(reader, other):
    """Resume a run with another loader."""
    other.load_state_dict(reader.state_dict())


def open_bytes(tmp_path, magic=20240520, version=1, tokens=3, held=6, header=1024):
    content = struct.pack("<256i", magic, version, tokens, *[0] * 253)[:header] + bytes(held)
    (tmp_path / "bad.bin").write_bytes(content)
    return open_shard(tmp_path / "bad.bin")


BAD_INPUT = [
    (lambda tmp, _: open_bytes(tmp, header=1023, held=0), "bad.bin has 1023 bytes, less than the header"),
    (lambda tmp, _: open_bytes(tmp, magic=7), "bad.bin is not a shard: its first number must be 20240520, got 7"),
    (lambda tmp, _: open_bytes(tmp, version=2), "bad.bin has version 2 of the layout, but 1 is read"),
    (lambda tmp, _: open_bytes(tmp, tokens=0, held=0), "bad.bin has 0 tokens by its header"),
    (lambda tmp, _: open_bytes(tmp, held=5), "bad.bin is cut short: its header says 3 tokens, but it holds 2"),
    (lambda tmp, _: open_bytes(tmp, held=8), "bad.bin is too long: its header says 3 tokens, but it holds 4"),
    (lambda tmp, _: write_shard(tmp / "x.bin", []), "at least one integer"),
    (lambda tmp, _: write_shard(tmp / "x.bin", [[1]]), "at least one integer"),
    (lambda tmp, _: write_shard(tmp / "x.bin", [1.0]), "float64"),
    (lambda tmp, _: write_shard(tmp / "x.bin", [-1]), "got -1 to -1"),
    (lambda tmp, _: write_shard(tmp / "x.bin", [65_536]), "at most 65,536"),
    (lambda tmp, _: find_shards(tmp / "nowhere", "*.bin"), "nowhere does not exist"),
    (lambda tmp, _: loader(tmp), r"is named \*_train_\*.bin: tokenize text"),
    (lambda _, data: loader(data, global_batch=100), "complete batch of 100 blocks of 5 tokens, the largest has 60"),
    (
        lambda _, data: take(loader(data, vocab_size=1), 1),
        r"has a token \d+ between its tokens .*the vocabulary has 1:",
    ),
    (lambda _, data: take(validation(data, vocab_size=1), 1), r"fineweb_val_000000\.bin has a token 5 between"),
    (
        lambda _, data: move(loader(data), loader(data, seed=1)),
        "is of a run with seed=0, got seed=1: resume with the data",
    ),
    (lambda _, data: move(loader(data), loader(data, global_batch=12)), "with global_batch=6, got global_batch=12"),
    (lambda tmp, data: move(loader(data), loader(write_text(tmp, (*SIZES, 100)))), "is of a run with shards="),
    (lambda _, data: validation(data, 4), "validation has 0 blocks, less than a micro-batch of 2 on each of 1 devices"),
]


@pytest.mark.parametrize(("call", "message"), BAD_INPUT, ids=[message for _, message in BAD_INPUT])
def test_bad_data_is_refused_in_one_sentence(folder, tmp_path, call, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(tmp_path, folder)
    assert not list(tmp_path.glob("x.bin"))


# The order


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


def test_the_shuffles_are_those_of_numpy_by_value():
    """Numbers by hand, lest reference and code change together: numpy 2's shuffles of [0, 1, 2, 3]."""
    order = [batch_at(step, (2, 0, 3, 1), 1) for step in range(12)]
    assert order[:6] == [(0, 1), (0, 0), (2, 2), (2, 1), (2, 0), (3, 0)]
    assert order[6:] == [(2, 2), (2, 0), (2, 1), (0, 1), (0, 0), (3, 0)]


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    context=st.integers(1, 9),
    split=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=draws(25), deadline=None)
def test_ranks_share_the_blocks_of_the_plain_order_to_the_token(tmp_path_factory, sizes, context, split, seed):
    world, micro, accumulation = split
    size = world * micro * accumulation
    folder = write_text(tmp_path_factory.mktemp("order"), sizes)
    epochs = [plain_epoch(sizes, context, size, seed, epoch) for epoch in range(2)]
    changes = {"context": context, "global_batch": size, "seed": seed, "micro_batch": micro, "updates": 1000}
    assume(epochs[0])
    ranks = [iter(loader(folder, world=world, rank=rank, **changes)) for rank in range(world)]
    for step in (step for epoch in epochs for step in epoch):
        parts = [next(batches) for _ in range(accumulation) for batches in ranks]
        tokens, targets = (torch.cat(side) for side in zip(*parts, strict=True))
        first = torch.tensor([10_000 * k + b * context for k, b in step])
        assert torch.equal(tokens, first[:, None] + torch.arange(context))
        assert torch.equal(targets, tokens + 1)


# Positions


@pytest.mark.parametrize(("world", "micro"), [(1, 2), (1, 6), (2, 3), (3, 2), (6, 1)])
def test_a_run_resumes_on_another_number_of_ranks_with_exactly_the_blocks_that_are_left(folder, world, micro):
    whole = flat(take(loader(folder), 3 * 20))
    for updates in range(20):
        first = loader(folder)
        taken = flat(take(first, 3 * updates))
        ranks = [loader(folder, world=world, micro_batch=micro, rank=rank, updates=20) for rank in range(world)]
        for reader in ranks:
            move(first, reader)
        parts = [list(reader) for reader in ranks]
        left = [name for together in zip(*parts, strict=True) for batch in together for name in firsts(batch)]
        assert taken + left == whole


def test_a_position_within_an_update_is_kept_where_micro_batches_end_there(folder):
    first = loader(folder)
    take(first, 4)
    finer, coarser = loader(folder, micro_batch=1), loader(folder, micro_batch=6)
    move(first, finer)
    assert flat(take(finer, 2)) == firsts(first.batch(4))
    with pytest.raises(ValueError, match=r"saved within an update, after 1 of 3 micro-batches: .* got 1"):
        move(first, coarser)


def test_the_position_counts_the_batches_that_were_read_until_the_last_update(folder):
    reader = loader(folder, updates=2)
    batches = iter(reader)
    iter(reader)  # Lightning makes one more
    for n in range(5):
        assert reader.state_dict()["taken"] == n
        next(batches)
    assert firsts(next(iter(reader))) == firsts(reader.batch(5))
    assert reader.state_dict()["taken"] == len(reader) == 6
    with pytest.raises(RuntimeError, match="all 2 updates of the data were taken: end training there"):
        list(reader)


# Validation


@example(number=13, world=2, micro=3)
@given(number=st.integers(1, 19), world=st.integers(1, 4), micro=st.integers(1, 4))
@settings(max_examples=draws(40), deadline=None)
def test_ranks_validate_on_disjoint_parts_of_the_first_blocks_in_complete_micro_batches(folder, number, world, micro):
    changes = {"tokens": 5 * number + 4, "micro_batch": micro, "global_batch": world * micro}
    assume(number >= world * micro)
    names = [10_000 * k + 5 * b for k, blocks in ((0, 10), (2, 9)) for b in range(blocks)][:number]
    ranks = [validation(folder, world=world, rank=rank, **changes) for rank in range(world)]
    for _ in range(2):  # the same in every validation
        parts = [[firsts(batch) for batch in rank] for rank in ranks]
        assert all(len(part) == len(rank) == number // (world * micro) for part, rank in zip(parts, ranks, strict=True))
        seen = [name for together in zip(*parts, strict=True) for part in together for name in part]
        assert seen == names[: number // (world * micro) * world * micro]
    tokens, targets = next(iter(ranks[0]))
    assert torch.equal(tokens + 1, targets)
    assert tokens.shape == (micro, 5)


def test_validation_on_more_tokens_than_there_are_warns_with_the_true_number(folder):
    message = "have 95 tokens in blocks of 5, but validation_tokens is 5242880: validating on 95"
    with pytest.warns(UserWarning, match=message):
        assert len(validation(folder, 5_242_880, micro_batch=1)) == 19
