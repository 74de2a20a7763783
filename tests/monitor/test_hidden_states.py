"""Hidden states are those of a plain forward pass, and reading them leaves no trace in a run."""

import copy
import itertools
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hilbert_monitor.monitor import hidden_states as module_of_states
from hilbert_monitor.monitor.hidden_states import HeadNotReached, SideEffects, hidden_states
from hilbert_monitor.monitor.panel import Panel, input_ids
from tests.support.decoders import Plain, Wrapper, seeded
from tests.support.ranks import in_ranks

V, T = 23, 7
TEXT = torch.randint(V, (12, T), generator=torch.Generator().manual_seed(5))


def following(ids):
    """Labels as many a loader makes them: at each token the one after it."""
    return ids.roll(-1, 1)


def generators():
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def assert_same_generators(before):
    torch_state, python_state, numpy_state = before
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))


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
@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: {"input_ids": x, "attention_mask": torch.ones_like(x)}, lambda x: (x, x)]
)
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
    states = hidden_states(model, model.lm_head, panel, hidden=lambda module, batch: Plain.hidden(module, batch))
    assert torch.equal(states, Plain.hidden(model, TEXT[:8]).flatten(0, 1)[:50].detach())
    with pytest.raises(SideEffects, match=r"\ANumbered\.blocks\.0\.numbers, a \w+, could not be restored [^.]*\Z"):
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


def all_of_a_rank(rank, world):
    """What two ranks do, one after the other: processes take longer to start."""
    return [act(rank, world) for act in (states_of_a_rank, weights_under_fsdp)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks found."""
    return in_ranks(all_of_a_rank, tmp_path_factory.mktemp("ranks"))


def test_states_of_each_of_two_ranks_are_those_of_one_process(two_ranks):
    model, panel = seeded(Dropping), Panel.of_tokens(TEXT, 51)
    found = [rank[0] for rank in two_ranks]
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
    assert [rank[1] for rank in two_ranks] == [True, True]
