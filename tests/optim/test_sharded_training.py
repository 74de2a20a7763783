"""Sharded decoders trained by the paper's recipe over gloo processes: the run of one process, and its checkpoints."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from hilbert_monitor import pretraining_optimizer, warmup_cosine
from hilbert_monitor.optim import find_head
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks
from tests.support.ways import assert_same_way

BEFORE, AFTER = range(3), range(3, 4)
"""Updates before a checkpoint and after it."""
BF16 = {"rownorm": {"rounding": "compensated"}, "muon": {"rounding": "compensated"}}


def decoder(kind="whole", dtype=torch.float32, mesh=None):
    """A decoder whose 37 tokens do not divide by the ranks, with its optimizer and schedule."""
    torch.manual_seed(0)
    model = Plain(37, 16, bias=True).to(dtype)
    if kind in ("tp", "2-D"):
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind in ("fsdp", "2-D"):
        options = {} if mesh is None else {"mesh": mesh["dp"]}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = pretraining_optimizer(model, **(BF16 if dtype == torch.bfloat16 else {}))
    return model, optimizer, warmup_cosine(optimizer, 10)


def train(run, updates, micro_batches=2):
    """Updates with accumulation, clipping and the schedule; every rank has the whole batch."""
    model, optimizer, schedule = run
    for t in updates:
        draw = torch.Generator().manual_seed(t)
        for _ in range(micro_batches):
            tokens = torch.randint(0, 37, (6, 9), generator=draw)
            loss = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / micro_batches).backward()
        clip(model)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def clip(model):
    """Clip as torch does. It takes gradients of one mesh at a time, and tensor parallelism makes several."""
    meshes = {}
    for p in model.parameters():
        meshes.setdefault(getattr(p, "device_mesh", None), []).append(p.grad)
    if len(meshes) == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    total = torch.stack([whole(nn.utils.get_total_norm(gradients)) for gradients in meshes.values()]).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total, foreach=False)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def weights(run):
    return [whole(p.detach()).clone() for p in run[0].parameters()]


def state(run):
    """All that the optimizer holds for each parameter, gathered."""
    optimizer = run[1]
    return [
        {key: torch.as_tensor(whole(value)).clone() for key, value in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def options(flat):
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def save(run, folder, flat):
    model, optimizer = get_state_dict(run[0], run[1], options=options(flat))
    both = {"model": model, "optimizer": optimizer, "schedule": run[2].state_dict()}
    dcp.save(both, checkpoint_id=f"{folder}/{flat}")


def resumed(kind, folder, *, dtype=torch.float32, flat):
    """A new run of this kind that goes on from a checkpoint: the state it loaded, and its weights an update on."""
    run = decoder(kind, dtype)
    model, optimizer = get_state_dict(run[0], run[1], options=options(flat))
    saved = {"model": model, "optimizer": optimizer, "schedule": run[2].state_dict()}
    dcp.load(saved, checkpoint_id=f"{folder}/{flat}")
    parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
    set_state_dict(run[0], run[1], **parts, options=options(flat))
    run[2].load_state_dict(saved["schedule"])
    loaded = state(run)
    train(run, AFTER)
    return loaded, weights(run)


def two_ranks(rank, world, folder):
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        run = decoder("fsdp", dtype)
        train(run, BEFORE)
        for flat in (False, True):
            save(run, f"{folder}/{dtype}", flat)
        saved, plain = state(run), copy.deepcopy(run[1].state_dict())
        train(run, AFTER)
        results[dtype] = saved, weights(run)
        again = decoder("fsdp", dtype)
        again[1].load_state_dict(plain)
        results[dtype, "fsdp"] = resumed("fsdp", f"{folder}/{dtype}", dtype=dtype, flat=False)
        results[dtype, "plain state dict"] = state(again)
    results["ddp"] = resumed("ddp", f"{folder}/{torch.float32}", flat=True)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    run = decoder("tp", mesh=mesh)
    train(run, [*BEFORE, *AFTER])
    return {**results, "tp": weights(run), "head": find_head(decoder("fsdp")[0]), "from whole": from_whole()}


def from_whole():
    """What a sharded run holds after it has loaded the ordinary state dict of a whole one, and what that held."""
    one, other = decoder(), decoder("fsdp")
    train(one, range(2))
    other[1].load_state_dict(one[1].state_dict())
    held = state(other), state(one)
    train(other, range(1))
    return held


def three_ranks(rank, world, folder):
    return [resumed("fsdp", f"{folder}/{torch.float32}", flat=flat) for flat in (False, True)]


def four_ranks(rank, world):
    run = decoder("2-D", mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    train(run, [*BEFORE, *AFTER])
    return weights(run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder):
    return in_ranks(two_ranks, folder / "two", str(folder))


@pytest.fixture(scope="module")
def alone():
    run = decoder()
    train(run, [*BEFORE, *AFTER])
    return weights(run)


def assert_follow(actual, expected):
    assert_same_way(actual, expected, weights(decoder()))


def assert_equal(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert ours[key].dtype == value.dtype
            assert torch.equal(ours[key], value), key


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_a_sharded_decoder_trains_as_a_whole_one(saved, alone, kind):
    for rank in saved:
        assert_follow(rank["tp"] if kind == "tp" else rank[torch.float32][1], alone)
        assert rank["head"] == "lm_head"


@pytest.mark.sweep
def test_a_decoder_sharded_over_two_dimensions_trains_as_a_whole_one(alone, tmp_path):
    for ours in in_ranks(four_ranks, tmp_path / "four", world=4):
        assert_follow(ours, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_resumes_to_the_bit_on_as_many_ranks(saved, dtype):
    for rank in saved:
        held, expected = rank[dtype]
        loaded, reached = rank[dtype, "fsdp"]
        assert_equal(loaded, held)
        assert_equal(rank[dtype, "plain state dict"], held)
        assert all(torch.equal(a, b) for a, b in zip(reached, expected, strict=True))


def test_a_state_dict_of_whole_tensors_is_laid_out_where_it_is_loaded(saved):
    for rank in saved:
        assert_equal(*rank["from whole"])


@pytest.mark.sweep
def test_a_checkpoint_of_two_ranks_loads_on_three_ranks_under_ddp_and_in_one_process(saved, folder):
    held, expected = saved[0][torch.float32]
    three = in_ranks(three_ranks, folder / "three", str(folder), world=3)
    one = [resumed("whole", f"{folder}/{torch.float32}", flat=flat) for flat in (False, True)]
    for loaded, reached in (*(run for rank in three for run in rank), *one, *(rank["ddp"] for rank in saved)):
        assert_equal(loaded, held)
        assert_follow(reached, expected)
