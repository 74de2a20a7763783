"""Muon over real gloo processes: equal weights on every rank, and those of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from hilbert_monitor import ChainedOptimizer, Muon, pretraining_optimizer
from hilbert_monitor.optim import muon
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks
from tests.support.ways import assert_same_way

SHAPES = [(8, 8)] * 5 + [(12, 4)] * 3 + [(4, 12)] + [(6, 6)]


def matrices(dtype=torch.float32, shapes=SHAPES):
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in shapes]


def put_gradients(params, seed, without=()):
    draw = torch.Generator().manual_seed(seed)
    for index, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=draw).to(p.dtype)
        p.grad = None if index in without else gradient


class Gathers:
    """Counts the gathers that go over the wire, and lets them go."""

    def __enter__(self):
        self.count, self.real = 0, muon._gather
        muon._gather = self
        return self

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self.real(*args, **kwargs)

    def __exit__(self, *_):
        muon._gather = self.real


def steps_with(options, missing, rank):
    """Two steps with all gradients, two with those in `missing[rank]` left out, one more with all."""
    params = matrices(options.pop("dtype", torch.float32))
    optimizer = Muon(params, **options)
    gathers = []
    for seed in range(5):
        put_gradients(params, seed, without=missing.get(rank, ()) if seed in (2, 3) else ())
        with Gathers() as gather:
            optimizer.step()
        gathers.append(gather.count)
    return [p.detach() for p in params], optimizer.state_dict(), gathers


def shared_steps(rank, world):
    """Every way of running Muon that needs no separate processes."""
    whole = {r: (0, 5) for r in range(world)}
    return {
        "plain": steps_with({}, {}, rank),
        "off": steps_with({"distributed": False}, {}, rank),
        "bf16": steps_with({"dtype": torch.bfloat16, "ns_dtype": torch.bfloat16}, {}, rank),
        "no gradient anywhere": steps_with({}, whole, rank),
        "no gradient on rank 0": steps_with({}, {0: range(len(SHAPES))}, rank),
        "no gradient on rank 1": steps_with({}, {1: (0, 4, 5, 7, 8)}, rank),
    }


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def ranks(request, tmp_path_factory):
    return in_ranks(shared_steps, tmp_path_factory.mktemp("ranks"), world=request.param)


CASES = ["plain", "off", "bf16", "no gradient anywhere", "no gradient on rank 0", "no gradient on rank 1"]


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_weights_are_bit_for_bit_equal_on_all_ranks_and_no_rank_waits_for_ever(ranks, case):
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0][case][0], other[case][0], strict=True))
    assert all(p.isfinite().all() for p in ranks[0][case][0])


@pytest.mark.parametrize(("case", "missing"), [("plain", {}), ("off", {}), ("no gradient anywhere", {0: (0, 5)})])
def test_weights_and_momentum_are_those_of_one_process(ranks, case, missing):
    expected, state, _ = steps_with({}, missing, 0)
    for weights, saved, _ in (rank[case] for rank in ranks):
        for a, b in zip(weights, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for index, s in state["state"].items():
            assert torch.equal(saved["state"][index]["momentum_buffer"], s["momentum_buffer"])


def test_bf16_weights_are_those_of_one_process_to_their_rounding(ranks):
    expected, _, _ = steps_with({"dtype": torch.bfloat16, "ns_dtype": torch.bfloat16}, {}, 0)
    for a, b in zip(ranks[0]["bf16"][0], expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3)


def test_one_gather_for_each_shape_and_one_more_to_agree_at_the_first_step(ranks):
    shapes = len(set(SHAPES))
    for rank in ranks:
        assert rank["plain"][2] == [shapes + 1] + [shapes] * 4
        assert rank["no gradient on rank 1"][2] == [shapes + 1] + [shapes] * 4
        assert rank["off"][2] == [0] * 5


def refused(params):
    put_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    try:
        Muon(params).step()
    except ValueError as error:
        assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
        return str(error)


def ranks_that_differ(rank, world):
    others = matrices()
    others[3].data += rank
    group = dist.new_group([0, 1])
    copied = copy.deepcopy(Muon(matrices(), process_group=group))
    return {
        "shapes": refused(matrices(shapes=SHAPES[: 4 + rank])),
        "values": refused(others),
        "same": refused(matrices()),
        "copy": copied.process_group is group,
        "empty group": step_with_an_empty_group(),
        "left over": left_over_gradient(rank),
    }


def step_with_an_empty_group():
    params = matrices()
    put_gradients(params, 0)
    Muon([{"params": []}, {"params": params}]).step()
    return [p.detach() for p in params]


def left_over_gradient(rank):
    """A parameter that is frozen, and has an old gradient on one rank only."""
    params = matrices()
    put_gradients(params, 0, without=(1,) if rank else ())
    params[1].requires_grad_(False)
    Muon(params).step()
    return [p.detach() for p in params]


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    return in_ranks(ranks_that_differ, tmp_path_factory.mktemp("differing"))


@pytest.mark.parametrize("what", ["shapes", "values"])
def test_ranks_with_different_parameters_are_refused_on_all_of_them(differing, what):
    for rank in differing:
        assert "the ranks hold different parameters" in rank[what]
        assert "process_group" in rank[what]
        assert rank["same"] is None


def test_a_copy_shares_its_work_with_the_same_ranks(differing):
    assert all(rank["copy"] for rank in differing)


@pytest.mark.parametrize("what", ["empty group", "left over"])
def test_ranks_agree_whatever_the_groups_and_the_gradients_that_are_left_over(differing, what):
    first, second = (rank[what] for rank in differing)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def train(model, optimizer, batches, clip=1.0):
    for tokens in batches:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def global_batches(steps=6, size=6):
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(0, 37, (size, 9), generator=draw) for _ in range(steps)]


def ddp_run(rank, world):
    torch.manual_seed(rank)  # DDP hands out rank zero's weights
    model = nn.parallel.DistributedDataParallel(Plain(37, 16, bias=True))
    optimizer = pretraining_optimizer(model)
    shares = [b.chunk(world)[rank] for b in global_batches()]
    train(model, optimizer, shares[:3])
    saved = {"model": {k: v.clone() for k, v in model.module.state_dict().items()}, "optimizer": optimizer.state_dict()}
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved)
    train(model, optimizer, shares[3:])
    return saved, [p.detach() for p in model.parameters()]


def test_ddp_training_equals_one_process_and_rank_zeros_checkpoint_is_whole(tmp_path):
    (saved, weights), (_, others) = in_ranks(ddp_run, tmp_path / "r")
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))

    torch.manual_seed(0)
    alone = Plain(37, 16, bias=True)
    start = [p.detach().clone() for p in alone.parameters()]
    train(alone, pretraining_optimizer(alone), global_batches())
    assert_same_way(weights, alone.parameters(), start)

    resumed = Plain(37, 16, bias=True)
    resumed.load_state_dict(saved["model"])
    optimizer = pretraining_optimizer(resumed)
    optimizer.load_state_dict(saved["optimizer"])
    assert isinstance(optimizer, ChainedOptimizer)
    train(resumed, optimizer, global_batches()[3:])
    assert_same_way(weights, resumed.parameters(), start)
