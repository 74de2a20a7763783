"""The panel is a function of the validation text alone, and reading the states at it leaves no trace in a run."""

import copy
import functools
import random
import warnings
from collections import UserDict, namedtuple
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from hilbert_monitor.monitor import hidden
from hilbert_monitor.monitor.batches import input_ids, positions_of, token_ids
from hilbert_monitor.monitor.hidden import HeadNotReached, hidden_states
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.panel_source import PanelSource
from hilbert_monitor.monitor.runtime import Ranks
from tests.support.decoders import Plain, Wrapper, seeded
from tests.support.ranks import in_ranks

V, T = 23, 7
TEXT = torch.randint(V, (12, T), generator=torch.Generator().manual_seed(5))


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


# The loader is read, and not touched


class Untouchable(DataLoader):
    def __iter__(self):
        raise AssertionError("iterated")


class Noisy(Dataset):
    """Items draw from every generator there is."""

    def __len__(self):
        return len(TEXT)

    def __getitem__(self, i):
        drawn = int(torch.randint(V, ())) + random.randrange(V) + np.random.randint(V)
        return torch.cat([TEXT[i, :-1], torch.tensor([drawn % V])])


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"num_workers": 2, "persistent_workers": True},
        {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
        {"batch_size": 5, "drop_last": True},
        {"batch_sampler": BatchSampler(SequentialSampler(TEXT), 4, drop_last=False)},
        {"batch_size": None, "sampler": BatchSampler(range(12), 4, drop_last=False)},
    ],
    ids=lambda options: ", ".join(options),
)
def test_panel_of_a_loader_is_the_first_items_whatever_the_loader_does_with_them(options):
    loader = Untouchable(TEXT, **({} if "batch_sampler" in options else {"batch_size": 4}) | options)
    own = None if loader.generator is None else loader.generator.get_state()
    before = generators()
    panel = Panel.of_loader(loader, 50)
    assert_same_generators(before)
    assert own is None or torch.equal(loader.generator.get_state(), own)
    assert panel.size == 50
    assert len(panel.batches) == 2  # of four rows or five
    assert counted_tokens(panel) == TEXT.flatten()[:50].tolist()
    assert panel.hash == Panel.of_tokens(TEXT, 50).hash


def test_panel_of_a_loader_leaves_its_next_epoch_as_it_would_have_been():
    epochs = []
    for look in (False, True):
        torch.manual_seed(3)
        loader = DataLoader(TEXT, batch_size=4, shuffle=True)
        if look:
            Panel.of_loader(loader, 50)
        epochs.append(torch.cat(list(loader)))
    assert torch.equal(*epochs)


def test_items_that_draw_random_numbers_advance_no_generator_and_are_the_same_every_time():
    hashes = set()
    for seed in range(2):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        before = generators()
        hashes.add(Panel.of_loader(DataLoader(Noisy(), batch_size=4), 84).hash)
        assert_same_generators(before)
    assert len(hashes) == 1


def test_generators_are_given_back_also_when_an_item_fails():
    class Broken(Noisy):
        def __getitem__(self, i):
            super().__getitem__(i)
            raise OSError("no such item")

    before = generators()
    with pytest.raises(OSError, match="no such item"):
        Panel.of_loader(DataLoader(Broken()), 10)
    assert_same_generators(before)


class Augmented(Dataset):
    """Draws from generators of its own, and counts; another wrapper or a sibling may share both."""

    def __init__(self, seed=0):
        self.draw, self.count, self.cache = torch.Generator().manual_seed(seed), torch.zeros(1), {}

    def __len__(self):
        return len(TEXT)

    def __getitem__(self, i):
        self.count += 1
        self.cache.setdefault(i, int(torch.randint(V, (), generator=self.draw)))
        return torch.cat([TEXT[i, :-1], torch.tensor([self.cache[i]])])

    def state(self):
        return self.draw.get_state().tolist(), float(self.count), self.cache


def test_generators_and_counters_of_a_dataset_are_left_as_they_were():
    data = Augmented()
    training, validation = random_split(data, [8, 4])
    before = copy.deepcopy(data.state())
    Panel.of_loader(DataLoader(validation, batch_size=2), 20)
    assert data.state() == before
    assert training.dataset is data


def test_a_collate_function_with_a_state_is_left_as_it_was():
    class Collator:
        def __init__(self):
            self.calls, self.draw = 0, np.random.default_rng(0)

        def __call__(self, rows):
            self.calls += 1
            return torch.stack(rows) * 0 + int(self.draw.integers(V))

        collate = __call__

    collator = Collator()
    before = collator.draw.bit_generator.state
    hashes = set()
    for collate in (collator, collator.collate, functools.partial(collator), lambda rows: collator(rows)):
        hashes.add(Panel.of_loader(DataLoader(TEXT, batch_size=2, collate_fn=collate), 20).hash)
        assert collator.calls == 0
        assert collator.draw.bit_generator.state == before
    assert len(hashes) == 1


def test_items_that_draw_from_a_generator_of_the_dataset_are_the_same_for_every_seed_and_batch_size():
    hashes = {Panel.of_loader(DataLoader(Augmented(seed), batch_size=2 + seed), 50).hash for seed in range(3)}
    assert len(hashes) == 1


class Streaming(Augmented):
    """Reads on where it was, whatever the index."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.lines = iter(TEXT)

    def __getitem__(self, i):
        return next(self.lines)


def test_a_dataset_with_state_that_cannot_be_put_back_is_not_read_and_one_sentence_says_why():
    data = Streaming()
    with pytest.warns(
        UserWarning, match=r"first validation batches: dataset.lines \(a \w+\) may change .* panel=\.\.\."
    ):
        assert Panel.of_loader(DataLoader(data, batch_size=2), 20) is None
    assert torch.equal(next(data.lines), TEXT[0])


def panels_of_ranks(rank, world, case):
    """What two ranks find whose datasets differ: rank one's has an iterator, a file that is missing, or other text."""
    text = {
        "an iterator": [Augmented(), Streaming()],
        "a failure": [TEXT, [None] * 12],
        "other text": [TEXT, TEXT.flip(0)],
        "another seed": [Augmented(0), Augmented(1)],
    }[case][rank]
    source, ranks = PanelSource("loader", 20), Ranks.of(torch.device("cpu"))
    with warnings.catch_warnings(), suppress(TypeError):
        warnings.simplefilter("ignore")
        source.take(DataLoader(text, batch_size=2), validates=True, ranks=ranks, model=Plain())
    taken = source.panel
    source.collect()
    for batch in (TEXT[:2], TEXT[2:4])[: 2 - rank]:
        source.offer(batch, readers=world)
    source.finish(ranks=ranks, reader=rank, readers=world)
    return taken and taken.hash, source.panel and (source.panel.size, source.panel.hash)


CASES = ("an iterator", "a failure", "other text", "another seed")


def all_of_a_rank(rank, world):
    """What two ranks do, one after the other: processes take longer to start."""
    found = {case: panels_of_ranks(rank, world, case) for case in CASES}
    return found | {act.__name__: act(rank, world) for act in (states_of_a_rank, weights_under_fsdp)}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks found."""
    return in_ranks(all_of_a_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES)
def test_ranks_all_take_the_panel_or_all_collect_it(case, two_ranks):
    (first, collected), (second, other) = (rank[case] for rank in two_ranks)
    assert first == second
    assert (first is not None) == (case == "another seed")
    assert collected == other
    assert collected[0] == 20
    assert first is not None or collected[1] == Panel.joined([Panel.of_batches([TEXT[:2]], 10)] * 2).hash


def test_no_more_items_are_read_than_it_takes():
    read = []

    class Recording(Noisy):
        def __getitem__(self, i):
            read.append(i)
            return TEXT[i]

    Panel.of_loader(DataLoader(Recording(), batch_size=2), 3 * T)
    assert read == [0, 1, 2, 3]


def test_items_go_through_the_loaders_own_collate():
    panel = Panel.of_loader(DataLoader(TEXT.tolist(), batch_size=4, collate_fn=padded), 50)
    assert set(panel.batches[0]) == {"input_ids", "attention_mask"}
    assert counted_tokens(panel) == TEXT.flatten()[:50].tolist()


def test_dataset_that_gives_several_items_at_once_is_asked_for_them():
    class AtOnce(Noisy):
        def __getitems__(self, indices):
            return [TEXT[i] for i in indices]

    assert counted_tokens(Panel.of_loader(DataLoader(AtOnce(), batch_size=4), 50)) == TEXT.flatten()[:50].tolist()


def test_without_a_batch_size_an_item_is_a_batch():
    panel = Panel.of_loader(DataLoader([TEXT[:5].numpy(), TEXT[5:].numpy()], batch_size=None), 50)
    assert counted_tokens(panel) == TEXT.flatten()[:50].tolist()


def test_streams_and_what_is_no_loader_give_none_and_are_not_consumed():
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError("iterated")

        def __len__(self):
            return 12

    class Unsized(Dataset):
        def __getitem__(self, i):
            raise AssertionError("read")

    def batches():
        raise AssertionError("iterated")
        yield

    unsized = DataLoader(Unsized(), sampler=range(3))
    for loader in (DataLoader(Stream(), batch_size=4), unsized, batches(), [TEXT, TEXT], [], {}, None):
        assert Panel.of_loader(loader, 50) is None


def test_of_several_loaders_the_first_is_taken():
    from lightning.pytorch.utilities import CombinedLoader  # here, for the ranks that import this file

    first, second = Untouchable(TEXT, batch_size=4), Untouchable(TEXT.flip(0), batch_size=4)
    expected = Panel.of_loader(first, 50).hash
    both = {"a": first, "b": second}
    for loaders in ([first, second], (first, second), both, CombinedLoader(both, "sequential"), [[first], second]):
        assert Panel.of_loader(loaders, 50).hash == expected


# Batches of every form


def following(ids):
    """Labels as many a loader makes them: at each token the one after it."""
    return ids.roll(-1, 1)


Pair = namedtuple("Pair", "ids labels")


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x, x),
        lambda x: [x],
        lambda x: Pair(x, x),
        lambda x: (torch.rand(x.shape), "name", x, x.roll(1)),
        lambda x: {"input_ids": x, "labels": following(x), "id": ["a"], "length": torch.full((len(x),), T)},
        lambda x: UserDict(input_ids=x, attention_mask=torch.ones_like(x)),
        lambda x: {"input_ids": x, "attention_mask": torch.ones(len(x), 1, T, T)},
    ],
    ids=["tensor", "tuple", "list", "namedtuple", "others first", "dict", "mapping", "mask of pairs"],
)
def test_a_batch_keeps_its_form_and_its_rows_are_those_with_positions(form):
    batch = form(TEXT[:8])
    panel = Panel.of_batches([batch, form(TEXT[8:])], 17)
    assert type(panel.batches[0]) is type(batch)
    assert panel.size == 17
    assert counted_tokens(panel) == TEXT.flatten()[:17].tolist()
    assert input_ids(panel.batches[0]).shape == (3, T)  # no row for nothing
    assert panel.hash == Panel.of_tokens(TEXT, 17).hash


def test_what_goes_with_a_row_is_cut_with_it():
    batch = {"input_ids": TEXT, "length": torch.arange(12), "scale": torch.tensor(2.0), "places": torch.arange(T)[None]}
    (kept,) = Panel.of_batches([batch], 2 * T).batches
    batch["scale"].zero_()
    assert kept["length"].tolist() == [0, 1]
    assert kept["scale"] == 2
    assert kept["places"].shape == (1, T)


def test_panel_is_a_copy():
    text = TEXT.clone()
    panel = Panel.of_batches([(text, text)], 50)
    expected = counted_tokens(panel)
    text.zero_()
    assert counted_tokens(panel) == expected


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


def test_labels_of_another_shape_are_of_something_else():
    labels = torch.full((12, 1), -100)
    for batch in ((TEXT, labels), {"input_ids": TEXT, "labels": labels}):
        assert Panel.of_batches([batch], 84).size == 84


def test_fewer_positions_than_asked_for_are_taken_with_one_warning_that_says_both():
    with pytest.warns(UserWarning, match=r"84 positions, fewer than the 100 asked for") as caught:
        panel = Panel.of_loader(DataLoader(TEXT, batch_size=5), 100)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert panel.size == 84
    assert counted_tokens(panel) == TEXT.flatten().tolist()


def test_enough_positions_are_no_cause_for_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Panel.of_batches([TEXT], 84)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Panel.of_batches([], 10),
        lambda: Panel.of_batches([(TEXT, torch.full_like(TEXT, -100))], 10),
        lambda: Panel.of_loader(DataLoader([]), 10),
        lambda: Panel.of_tokens([], 10),
    ],
)
def test_no_position_at_all_is_refused(make):
    with pytest.raises(ValueError, match="found no position in the validation text, of 10 asked for"):
        make()


def test_what_cannot_be_a_panel_is_refused():
    for batch in (torch.rand(3, 4), torch.arange(3), {"x": TEXT}, ["text"], "text", None):
        assert token_ids(batch) is None
        with pytest.raises(
            ValueError, match=r"found no token ids in a batch of type .*give the ids of the text itself as panel="
        ):
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


# The hash


def test_hash_is_a_function_of_content_alone():
    expected = Panel.of_batches([TEXT], 80).hash
    assert len(bytes.fromhex(expected)) == 32
    for rows in (1, 3, 5):
        assert Panel.of_loader(DataLoader(TEXT, batch_size=rows), 80).hash == expected
    for dtype in (torch.int32, torch.uint8, torch.int16, torch.uint16):
        assert Panel.of_batches([TEXT.to(dtype)], 80).hash == expected


@pytest.mark.parametrize("side", ["right", "left"])
def test_hash_does_not_see_how_wide_the_padding_is(side):
    rows = [[1, 2, 3], [4], [5, 6]]
    expected = Panel.of_tokens(rows, 6).hash
    assert Panel.of_batches([padded(rows, side)], 6).hash == expected
    assert Panel.of_batches([padded(rows[:2], side), padded(rows[2:], side, 9)], 6).hash == expected


def test_hash_does_not_see_what_follows_the_last_position_of_a_row():
    rows = [[1, 2, 3], [4], [5, 6]]
    batch = padded(rows, width=9)
    labels = following(batch["input_ids"]).where(batch["attention_mask"] == 1, -100)
    assert Panel.of_batches([(batch["input_ids"], labels)], 6).hash == Panel.of_tokens(rows, 6).hash


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


# Parts


def test_panels_one_after_the_other_are_one():
    panel = Panel.of_loader(DataLoader(TEXT, batch_size=5), 50)
    parts = [Panel.of_batches([TEXT[:5]], 35), Panel.of_batches([TEXT[5:]], 15), Panel((), ())]
    assert counted_tokens(Panel.joined(parts)) == counted_tokens(panel)
    assert Panel.joined(parts).hash == panel.hash


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


class Catching(Plain):
    """Reports what goes wrong, and goes on after whatever else there is."""

    def forward(self, tokens):
        try:
            return super().forward(tokens)
        except Exception as error:
            raise AssertionError("an error to report") from error
        except BaseException:
            return None


class HeadOfParts(Plain):
    """The head stands in a module that takes states."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.out = nn.Sequential(nn.LayerNorm(6), self.lm_head)
        del self.lm_head

    def forward(self, tokens):
        return self.out(self.hidden(tokens))


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


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", [Plain, Dropping, Flat, LastOnly, Catching, ByName])
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


def test_states_are_rows_in_the_order_of_the_panel_over_micro_batches():
    model = seeded(Plain)
    panel = Panel.of_loader(DataLoader(TEXT, batch_size=3), 50)
    torch.testing.assert_close(hidden_states(model, model.lm_head, panel), reference(model, TEXT))


def test_states_follow_the_weights(panel):
    model = seeded(Plain)
    before = hidden_states(model, model.lm_head, panel)
    with torch.no_grad():
        model.embed.weight.mul_(2)
        model.norm.weight.mul_(3)
    after = hidden_states(model, model.lm_head, panel)
    assert torch.equal(after, reference(model, TEXT[:8]))
    assert not torch.allclose(before, after)


def test_dict_is_given_by_name_with_its_mask():
    model, batch = seeded(ByName), padded([[1, 2, 3], [4], [5, 6]])
    states = hidden_states(model, model.lm_head, Panel.of_batches([batch], 6))
    assert torch.equal(states, reference(model, batch["input_ids"], 9)[batch["attention_mask"].flatten() == 1])


def test_labels_that_cannot_be_left_out_are_given(panel):
    class Insists(Plain):
        def forward(self, input_ids, labels):
            assert labels is not None
            return self.lm_head(self.hidden(input_ids))

    model = seeded(Insists)
    for batch in (TEXT[:8], {"input_ids": TEXT[:8], "labels": following(TEXT[:8])}):
        states = hidden_states(model, model.lm_head, Panel.of_batches([batch], 50))
        assert torch.equal(states, reference(model, TEXT[:8]))


class Locked(Plain):
    """Refuses a forward pass while one has not ended."""

    busy = False

    def forward(self, tokens):
        assert not self.busy, "the last forward pass has not ended"
        self.busy = True
        logits = super().forward(tokens)
        self.busy = False
        ENDED.append(len(tokens))
        return logits


ENDED = []


def test_the_forward_pass_ends_so_that_the_next_one_can_begin(panel):
    model = seeded(Locked)
    ENDED.clear()
    for _ in range(2):
        assert torch.equal(hidden_states(model, model.lm_head, panel), reference(model, TEXT[:8]))
    model(TEXT)
    assert ENDED == [8, 8, 12]


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
    monkeypatch.setattr(hidden, "LOGIT_BYTES", int(rows * 4 * V * input_ids(batch).shape[1]))
    calls.clear()
    torch.testing.assert_close(hidden_states(model, model.lm_head, panel), whole)
    assert calls == passes


def test_at_most_256_mb_of_logits_are_asked_for():
    text = torch.zeros(16, 1024, dtype=torch.long)  # of a vocabulary of 50,257: 206 MB a row
    parts = list(hidden._passes(Panel.of_tokens(text, text.numel()), 50_257))
    assert [tuple(batch.shape) for batch, _ in parts] == [(1, 1024)] * 16
    assert sum(len(positions) for _, positions in parts) == text.numel()


@pytest.mark.parametrize("dim", ["flat", 0, 1])
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


@pytest.mark.parametrize("form", [tuple, lambda parts: dict(zip(("input_ids", "segments"), parts, strict=True))])
def test_a_forward_pass_that_needs_more_than_ids_gets_it_from_the_batch(form):
    class Segmented(Plain):
        def forward(self, input_ids, segments):
            return self.lm_head(self.norm(self.embed(input_ids) * (1 + segments[..., None])))

    model, segments = seeded(Segmented), torch.rand(8, T)
    states = hidden_states(model, model.lm_head, Panel.of_batches([form((TEXT[:8], segments))], 50))
    expected = model.norm(model.embed(TEXT[:8]) * (1 + segments[..., None])).flatten(0, 1)[:50]
    assert torch.equal(states, expected.detach())


def test_labels_are_given_where_the_model_fails_without_them():
    class NeedsLabels(Plain):
        def forward(self, input_ids, labels=None):
            return self.lm_head(self.hidden(input_ids)[labels.new_ones(len(labels)).bool()])

    model = seeded(NeedsLabels)
    batch = {"input_ids": TEXT[:8], "labels": following(TEXT[:8])}
    states = hidden_states(model, model.lm_head, Panel.of_batches([batch], 50))
    assert torch.equal(states, reference(model, TEXT[:8]))


def test_a_head_whose_rows_are_computed_gives_its_inputs_all_the_same(panel):
    model = seeded(Plain)
    nn.utils.parametrizations.weight_norm(model.lm_head)
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


def test_model_in_bfloat16_gives_fp32_rows_also_when_there_are_none(panel):
    model = seeded(Plain).bfloat16()
    empty = Panel((), ())
    for part in (panel, empty):
        states = hidden_states(model, model.lm_head, part)
        assert states.shape == (part.size, 6)
        assert states.dtype == torch.float32


@pytest.mark.parametrize(
    "wrap",
    [Wrapper, WithForward, unwritten, lambda m: Wrapper(Wrapper(m, "inner"), "outer"), lambda m: nn.ModuleList([m])],
    ids=["without a forward", "with a forward", "LightningModule", "twice", "list"],
)
def test_called_is_the_model_nearest_to_the_head(wrap, panel):
    model = seeded(Plain)
    expected = reference(model, TEXT[:8])
    assert torch.equal(hidden_states(wrap(model), model.lm_head, panel), expected)


def test_module_around_the_head_that_takes_states_is_not_called_with_tokens(panel):
    model = seeded(HeadOfParts)
    expected = model.out[0](reference(model, TEXT[:8]))
    torch.testing.assert_close(hidden_states(model, model.out[1], panel), expected.detach())


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
    class Trained(Headless, Dropping):
        pass

    model, seen = seeded(Trained), []

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


def test_weights_gradients_buffers_and_random_numbers_are_not_touched(panel):
    class Drawing(Dropping):
        def hidden(self, tokens):
            torch.rand(3), random.random(), np.random.rand()
            return super().hidden(tokens)

    model = seeded(Drawing).train()
    model(TEXT).sum().backward()
    weights, gradients = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    before = generators()
    hidden_states(model, model.lm_head, panel)
    assert_same_generators(before)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights.values(), strict=True))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert weights["batch.num_batches_tracked"] == 1


class Counting(Dropping):
    """Writes in any mode: a buffer in place, another anew, an attribute, a list, a parameter and a generator."""

    calls = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("load", torch.zeros(V)), self.register_buffer("rope", torch.zeros(2), persistent=False)
        self.bias, self.recent = nn.Parameter(torch.zeros(6), requires_grad=False), []
        self.noise, self.teacher = torch.Generator().manual_seed(0), [nn.Linear(2, 2)]

    def hidden(self, tokens):
        self.load += tokens.flatten().bincount(minlength=V)
        self.load.data.mul_(0.9)
        self.rope, self.late = torch.ones(tokens.shape[1]), torch.rand(1, generator=self.noise)
        self.calls += 1
        self.recent.append(tokens)
        with torch.no_grad():
            self.bias += 1
            self.teacher[0].weight.zero_()
        return super().hidden(tokens)

    def state(self):
        buffers = {name: b.tolist() for name, b in (*self.named_buffers(), *self.named_parameters())}
        more = self.noise.get_state().tolist(), self.teacher[0].weight.tolist()
        return buffers, *more, self.calls, self.recent, hasattr(self, "late"), "calls" in vars(self)


def test_what_a_forward_pass_writes_in_any_mode_is_put_back(panel):
    model = seeded(Counting).train()
    before, buffers = copy.deepcopy(model.state()), [id(b) for b in model.buffers()]
    hidden_states(model, model.lm_head, panel)
    assert model.state() == before
    assert [id(b) for b in model.buffers()] == buffers


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
    monkeypatch.setattr(hidden, "KEPT_BYTES", 100)
    with pytest.warns(UserWarning, match=r"forward pass writes to Averaging.embed.weight, too large .* pass hidden="):
        hidden_states(model, model.lm_head, panel)


def test_own_train_method_of_a_module_is_not_called(panel):
    class Merges(Plain):
        def train(self, mode=True):
            raise AssertionError("would merge its adapters")

    model = seeded(Merges)
    assert torch.equal(hidden_states(model, model.lm_head, panel), Plain.hidden(model, TEXT[:8]).flatten(0, 1)[:50])


@pytest.mark.parametrize("how", ["wrapped", "in place", "in a module"])
def test_compiled_model_stays_compiled(how, panel):
    calls, compilations = [], []

    def backend(graph, inputs):
        compilations.append(graph)

        def run(*args):
            calls.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    model = seeded(Plain)
    head, expected = model.lm_head, reference(model, TEXT[:8])
    if how == "in place":
        model.compile(backend=backend)
        compiled = model
    else:
        compiled = torch.compile(model, backend=backend)
    owner = Wrapper(compiled) if how == "in a module" else compiled
    compiled(TEXT)
    per_pass, made = len(calls), len(compilations)
    assert per_pass
    for _ in range(2):
        assert torch.equal(hidden_states(owner, head, panel), expected)
        assert len(calls) == per_pass  # the states are formed eagerly
    calls.clear()
    compiled(TEXT)
    assert (len(calls), len(compilations)) == (per_pass, made)


def test_model_under_ddp_is_seen_through(tmp_path, panel):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = seeded(Dropping)
        wrapped = DistributedDataParallel(Wrapper(model))
        expected = reference(model, TEXT[:8])
        assert torch.equal(hidden_states(wrapped, model.lm_head, panel), expected)
        assert torch.equal(hidden_states(DistributedDataParallel(model), model.lm_head, panel), expected)
    finally:
        dist.destroy_process_group()


def states_of_a_rank(rank, world):
    torch.manual_seed(rank)
    model = seeded(Dropping)
    wrapped = DistributedDataParallel(model)
    panel = Panel.of_loader(DataLoader(TensorDataset(TEXT, following(TEXT)), batch_size=2 + rank, shuffle=True), 51)
    return panel.hash, hidden_states(wrapped, model.lm_head, panel)


def test_states_of_each_of_two_ranks_are_those_of_one_process(two_ranks):
    model, panel = seeded(Dropping), Panel.of_tokens(TEXT, 51)
    found = [rank["states_of_a_rank"] for rank in two_ranks]
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
    assert [rank["weights_under_fsdp"] for rank in two_ranks] == [True, True]


def test_of_a_sampler_of_a_subset_only_its_items_are_taken():
    data = torch.arange(60).view(10, 6)
    loader = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([7, 2, 5]))
    panel = Panel.of_loader(loader, 18)
    assert torch.cat(panel.batches).tolist() == data[[2, 5, 7]].tolist()


ANSWER = torch.tensor([[5, 6, 7, 8, 9]])  # a prompt of two tokens, an answer of two, padding
TRAINED = torch.tensor([[-100, -100, 7, 8, -100]])


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": ANSWER, "labels": TRAINED},
        (ANSWER, TRAINED),
        (ANSWER, torch.ones_like(ANSWER), TRAINED),
        {"input_ids": ANSWER, "labels": torch.tensor([[-100, 7, 8, -100, -100]])},
        (ANSWER, torch.tensor([[-100, 7, 8, -100, -100]])),
    ],
    ids=["unshifted", "unshifted tuple", "unshifted tuple with a mask", "shifted", "shifted tuple"],
)
def test_positions_are_those_that_predict_a_label_wherever_the_label_stands(batch):
    assert positions_of(batch).tolist() == [1, 2]


def test_labels_of_masked_tokens_belong_to_the_position_they_stand_at():
    ids, mask = torch.tensor([[5, 3, 7, 3, 9]]), 3
    labels = torch.tensor([[-100, 6, -100, 8, -100]])
    assert (ids[labels != -100] == mask).all()
    assert positions_of({"input_ids": ids, "labels": labels}).tolist() == [1, 3]


def test_named_labels_of_one_repeated_token_are_taken_for_unshifted():
    ids, labels = torch.full((1, 4), 7), torch.tensor([[-100, -100, 7, 7]])
    assert positions_of({"input_ids": ids, "labels": labels}).tolist() == [1, 2]


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


def test_a_mask_that_numbers_the_samples_of_a_row_leaves_out_its_padding():
    ids, samples = torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([[1, 1, 2, 2, 0]])
    labels = torch.tensor([[-100, 6, -100, 8, -100]])
    batch = {"input_ids": ids, "attention_mask": samples, "labels": labels}
    assert positions_of(batch).tolist() == [0, 2]


def test_ignored_labels_of_a_tuple_count_wherever_they_stand():
    ids, mask, labels = torch.ones(2, 3).long(), torch.ones(2, 3).long(), torch.tensor([[1, -100, 1], [-100, 1, 1]])
    assert positions_of((ids, mask, labels)).tolist() == [0, 2, 4, 5]
