"""What an object's plain state is, that it comes back, and that data are neither copied nor walked through."""

import copy
import functools
import itertools
import queue
import random
import tempfile
import threading
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from hilbert_monitor.monitor.object_state import SavedState, kept_state, same_packages


def kept(x, memory=1_000_000, follow=lambda kind: True):
    return kept_state([("x", x)], follow=follow, memory=memory)


@dataclass
class Inner:
    count: int = 0
    seen: list = field(default_factory=list)


class Slotted:
    __slots__ = ("count", "unset")

    def __init__(self):
        self.count = 0


class Everything:
    total = 0
    history: list = []  # noqa: RUF012

    def __init__(self):
        self.inner, self.slotted = Inner(), Slotted()
        self.dict, self.ordered, self.counter = {"a": [1]}, OrderedDict(b=2, a=1), Counter("aab")
        self.set, self.deque, self.bytes = {1, 2}, deque([1, 2], maxlen=2), bytearray(b"ab")
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.generators = torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)

    def change(self):
        type(self).total += 1
        self.history.append(1)
        self.inner.count += 1
        self.inner.seen.append(self.inner)
        self.slotted.count, self.slotted.unset, self.extra = 5, 6, 7
        self.dict["a"].append(2)
        self.dict["b"] = self.ordered.pop("b")
        self.counter.update("abc"), self.set.add(3), self.deque.append(3), self.bytes.extend(b"c")
        self.tensor.data.add_(1)
        self.array += 1
        for generator in self.generators:
            generator.random() if hasattr(generator, "random") else torch.rand(1, generator=generator)

    def view(self):
        own = {
            name: copy.deepcopy(value) for name, value in vars(self).items() if name not in ("generators", "slotted")
        }
        torch_generator, numpy_generator, legacy, python = self.generators
        states = torch_generator.get_state(), numpy_generator.bit_generator.state, legacy.get_state()[1]
        return str(
            (
                own,
                self.slotted.count,
                hasattr(self.slotted, "unset"),
                states,
                python.getstate(),
                self.total,
                self.history,
            )
        )


def test_all_plain_state_that_can_be_reached_comes_back():
    x = Everything()
    before = x.view()
    identities = {name: id(value) for name, value in vars(x).items()}
    with kept(x) as state:
        x.change()
        x.inner = None
        assert x.view() != before
    assert x.view() == before
    assert {name: id(value) for name, value in vars(x).items()} == identities
    assert list(x.ordered) == ["b", "a"]
    assert not state.unseen
    assert not state.lost


def test_it_comes_back_after_an_error_too():
    x = Everything()
    before = x.view()

    def fail():
        with kept(x):
            x.change()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert x.view() == before


def test_what_callables_carry_comes_back():
    count, counter, by_default = 0, Everything(), []

    def closure(_, seen=by_default):
        nonlocal count
        count += 1
        seen.append(1)
        closure.calls += 1

    closure.calls = 0
    for function in (closure, functools.partial(closure, 0), functools.partial(functools.partial(closure), 0)):
        with kept(function):
            closure(0)
        assert (count, by_default, closure.calls) == (0, [], 0)
    before = counter.view()
    for function in (counter.change, functools.partial(counter.change), lambda: counter.change()):
        with kept(function):
            function()
        assert counter.view() == before


class Text(Dataset):
    def __init__(self, items=8):
        self.items, self.count = items, 0

    def __len__(self):
        return self.items

    def __getitem__(self, index):
        self.count += 1
        return index


def test_datasets_inside_others_are_reached():
    data = Text()
    for wrapped in (Subset(data, [0, 1]), ConcatDataset([Text(), data]), random_split(data, [4, 4])[1]):
        with kept(wrapped):
            data[0]
        assert data.count == 0


def test_a_file_is_read_on_where_it_was():
    with tempfile.TemporaryFile() as file:
        file.write(b"abcdef")
        file.seek(2)
        with kept([file]) as state:
            file.read(3)
        assert file.read(1) == b"c"
    assert not state.unseen


@pytest.mark.parametrize(
    "make",
    [
        lambda: (i for i in range(3)),
        lambda: iter([1]),
        itertools.count,
        lambda: zip([1], [2], strict=True),
        threading.Thread,
        queue.Queue,
        lambda: functools.partial(next, iter([1])),
        lambda: iter([1]).__next__,
    ],
)
def test_what_cannot_be_seen_is_named(make):
    x = Inner(seen=[make()])
    with kept(x) as state:
        pass
    assert len(state.unseen) == 1
    assert state.unseen[0].startswith("x.seen[...]")


@pytest.mark.sweep
def test_data_are_neither_copied_nor_walked_through():
    x = Inner(seen=[{"ids": [i]} for i in range(300_000)])
    x.text, x.large = torch.zeros(30_000_000, dtype=torch.uint8), np.zeros(30_000_000, dtype=np.uint8)
    start = time.thread_time()
    with kept(x):
        pass
    assert time.thread_time() - start < 0.1


def test_a_tensor_too_large_to_copy_is_named_if_it_was_written_to():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(100, 100))
    with (
        kept_state(model.named_modules(prefix="model"), follow=lambda kind: True, memory=1_000) as state,
        torch.no_grad(),
    ):
        model[0].weight.add_(1)
        model[1].weight.add_(1)
    assert state.lost == ["model.1.weight"]


def test_another_thread_or_library_is_left_alone():
    class Threaded:
        def __init__(self):
            self.thread, self.count = threading.Thread(), 0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.logger, self.inner, self.stranger = Threaded(), Inner(), argparse_like()

    model = Model()
    with kept_state([("model", model)], follow=same_packages([model]), memory=1_000):
        model.logger.count = model.inner.count = model.stranger.count = 1
    assert (model.logger.count, model.inner.count, model.stranger.count) == (1, 0, 1)


def argparse_like():
    """An object of another package."""
    import argparse

    return argparse.Namespace(count=0)


def test_generators_are_seeded_alike():
    numbers = []
    for seed in (1, 2):
        draws = [
            torch.Generator().manual_seed(seed),
            *(np.random.default_rng(seed), np.random.RandomState(seed), random.Random(seed), np.random.MT19937(seed)),
        ]
        state = SavedState([("x", draws)], follow=lambda kind: True, memory=0)
        state.seed(0)
        numbers.append(
            [float(torch.rand(1, generator=draws[0])), *(x.random() for x in draws[1:4]), draws[4].random_raw()]
        )
    assert numbers[0] == numbers[1]
