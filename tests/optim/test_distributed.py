"""The optimizers over real gloo processes, on whole and on sharded matrices: equal on all ranks, and as in one process.

Checkpoints of sharded decoders load on any number of ranks.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_monitor import Muon, RowNorm, pretraining_optimizer, warmup_cosine
from hilbert_monitor.optim import find_head, muon
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks
from tests.support.ways import assert_same_way


class Collectives(TorchDispatchMode):
    """Counts the collectives that this process enters, torch's own for DTensors among them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function)
        return function(*args, **(kwargs or {}))


def draws(seed, shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def refused(act):
    try:
        act()
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)


# Whole matrices on every rank

SHAPES = [(8, 8)] * 5 + [(12, 4)] * 3 + [(4, 12)] + [(6, 6)]


def whole_matrices(dtype=torch.float32, shapes=SHAPES):
    return [nn.Parameter(draws(i, shape, dtype)) for i, shape in enumerate(shapes)]


def put_gradients(params, seed, without=()):
    for i, p in enumerate(params):
        p.grad = None if i in without else draws(1000 * seed + i, p.shape, p.dtype)


def steps_with(options, missing, rank):
    """Two steps with all gradients, two without those in `missing[rank]`, one more with all."""
    params = whole_matrices(options.pop("dtype", torch.float32))
    optimizer = Muon(params, **options)
    counts = []
    for seed in range(5):
        put_gradients(params, seed, without=missing.get(rank, ()) if seed in (2, 3) else ())
        with Collectives() as collectives:
            optimizer.step()
        counts.append(collectives.count)
    return [p.detach() for p in params], optimizer.state_dict(), counts


BF16 = {"dtype": torch.bfloat16, "ns_dtype": torch.bfloat16}


def shared_steps(rank, world):
    return {
        "plain": steps_with({}, {}, rank),
        "off": steps_with({"distributed": False}, {}, rank),
        "bf16": steps_with(dict(BF16), {}, rank),
        "no gradient anywhere": steps_with({}, {r: (0, 5) for r in range(world)}, rank),
        "no gradient on rank 0": steps_with({}, {0: range(len(SHAPES))}, rank),
        "no gradient on rank 1": steps_with({}, {1: (0, 4, 5, 7, 8)}, rank),
    }


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def ranks(request, tmp_path_factory):
    return in_ranks(shared_steps, tmp_path_factory.mktemp("ranks"), world=request.param)


def test_whole_weights_are_equal_to_the_bit_on_all_ranks_whatever_gradients_are_missing(ranks):
    for case in ranks[0]:
        for other in ranks[1:]:
            assert all(torch.equal(a, b) for a, b in zip(ranks[0][case][0], other[case][0], strict=True)), case
        assert all(p.isfinite().all() for p in ranks[0][case][0]), case


def test_a_matrix_moves_on_no_rank_while_its_owner_has_no_gradient(ranks):
    expected = steps_with({}, {0: range(len(SHAPES))}, 0)[0]  # as if there were no gradient at all in two of the steps
    alike = [
        torch.allclose(a, b, atol=1e-6) for a, b in zip(ranks[0]["no gradient on rank 0"][0], expected, strict=True)
    ]
    assert any(alike), "rank zero owns some"
    assert not all(alike), "and others the rest"


def test_whole_weights_and_momentum_are_those_of_one_process(ranks):
    for case, missing in (("plain", {}), ("off", {}), ("no gradient anywhere", {0: (0, 5)})):
        expected, state, _ = steps_with({}, missing, 0)
        for weights, saved, _ in (rank[case] for rank in ranks):
            for a, b in zip(weights, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            for index, s in state["state"].items():
                assert torch.equal(saved["state"][index]["momentum_buffer"], s["momentum_buffer"])
    for a, b in zip(ranks[0]["bf16"][0], steps_with(dict(BF16), {}, 0)[0], strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-3)


def test_a_step_makes_one_gather_and_the_first_two_more_to_agree(ranks):
    for rank in ranks:
        assert rank["plain"][2] == [3, 1, 1, 1, 1]
        assert rank["no gradient on rank 1"][2] == [3, 1, 1, 1, 1]
        assert rank["off"][2] == [0] * 5


def muon_refusal(params):
    put_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    message = refused(Muon(params).step)
    assert message is None or all(torch.allclose(a, b, 0, 0, True) for a, b in zip(params, before, strict=True))
    return message


def ranks_that_differ(rank, world):
    values, nans, one_nan = whole_matrices(), whole_matrices(), whole_matrices()
    values[3].data += rank
    nans[3].data[0, 0] = torch.nan
    one_nan[3].data[0, 0] = torch.nan if rank else 0.0
    group = dist.new_group([0, 1])
    with_empty_group, left_over = whole_matrices(), whole_matrices()
    put_gradients(with_empty_group, 0)
    Muon([{"params": []}, {"params": with_empty_group}]).step()
    put_gradients(left_over, 0, without=(1,) if rank else ())
    left_over[1].requires_grad_(False)  # frozen, with an old gradient on one rank only
    Muon(left_over).step()
    batched = whole_matrices()
    put_gradients(batched, 0)
    with mock.patch.object(muon, "BATCH_BYTES", 600), Collectives() as collectives:
        Muon(batched).step()
    return {
        "shapes": muon_refusal(whole_matrices(shapes=SHAPES[: 4 + rank])),
        "values": muon_refusal(values),
        "one nan": muon_refusal(one_nan),
        "same": muon_refusal(whole_matrices()),
        "nan on all": muon_refusal(nans),
        "copy": copy.deepcopy(Muon(whole_matrices(), process_group=group)).process_group is group,
        "weights": [p.detach() for p in (*with_empty_group, *left_over)],
        "batched": ([p.detach() for p in batched], collectives.count),
    }


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    return in_ranks(ranks_that_differ, tmp_path_factory.mktemp("differing"))


def test_only_ranks_with_different_parameters_are_refused_on_all_of_them_nan_or_not(differing):
    for rank in differing:
        for what in ("shapes", "values", "one nan"):
            assert "the ranks hold different parameters" in rank[what]
            assert "process_group" in rank[what]
        assert rank["same"] is None
        assert rank["nan on all"] is None
        assert rank["copy"], "a copy shares its work with the same ranks"


def test_ranks_agree_whatever_the_groups_and_the_gradients_that_are_left_over(differing):
    first, second = (rank["weights"] for rank in differing)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_matrices_are_gathered_in_batches(differing):
    """At most 600 bytes here: the (4, 12), the (6, 6) and an (8, 8), two of these, two more, and the three (12, 4)."""
    for rank in differing:
        batched, count = rank["batched"]
        for a, b in zip(batched, rank["weights"], strict=False):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert count == 4 + 2


# Sharded matrices: the steps are those of the whole ones

UNEVEN = [(7, 5), (1, 4), (13, 1), (5, 12)]
"""Rows and columns that do not divide by the ranks, and fewer of them than ranks."""


def strided_layout(mesh):
    """The layout that FSDP over tensor parallelism gives a head."""
    head = nn.Linear(4, 8, bias=False)
    parallelize_module(head, mesh["tp"], ColwiseParallel())
    fully_shard(head, mesh=mesh["dp"])
    return head.weight.device_mesh, head.weight.placements


def layouts(world, case):
    """Layouts by name: (mesh, placements).

    The plain case has each kind on a line, and on a square each pair of kinds in one order. The other cases take the
    two of four ranks that between them have replicas, rows and columns.
    """
    kinds = (Replicate(), Shard(0), Shard(1))
    if world < 4:
        line = init_device_mesh("cpu", (world,))
        return {repr(p): (line, [p]) for p in kinds if case in ("plain", "wild")}
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, rows, columns = kinds
    pairs = [(replica, columns)]
    if case == "plain":
        pairs += [(rows, replica), (rows, rows), (columns, rows), (columns, columns)]
    return {**{f"{a!r} {b!r}": (square, [a, b]) for a, b in pairs}, "strided": strided_layout(square)}


def wild(seed, shape, dtype=torch.float32):
    """Gradients with rows whose squares leave the range of fp32, and rows that are not finite."""
    G = draws(seed, shape, dtype)
    for row, factor in zip(G, [1, 1e-30, 1e25, 0, torch.inf, 1, torch.nan], strict=False):
        row[0 if factor in (torch.inf, torch.nan) else slice(None)] *= factor
    return G


def sharded(t, layout):
    return distribute_tensor(t, *layout, src_data_rank=None)


def walk(make, layout, shapes, *, gradients=draws, dtype=torch.float32, steps=3, without=(), options):
    """Steps on sharded matrices, or on whole ones where `layout` is None: weights, increments, state and counts."""
    put = (lambda t: t) if layout is None else (lambda t: sharded(t, layout))
    params = [nn.Parameter(put(draws(10 + i, shape, dtype))) for i, shape in enumerate(shapes)]
    optimizer = make(params, **options)
    counts = []
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * t  # the first is zero, as in a warm-up
        for i, p in enumerate(params):
            p.grad = None if i in without and t == 1 else put(gradients(100 * t + i, p.shape, dtype))
        with Collectives() as collectives:
            optimizer.step()
        counts.append(collectives.count)
    S = [optimizer.increment(p) for p in params]
    state = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    if layout is not None:
        tensors = [*S, *(value for value in state if isinstance(value, torch.Tensor))]
        assert all(t.placements == tuple(layout[1]) and t.device_mesh == layout[0] for t in tensors)
    return {"weights": [p.detach() for p in params], "S": S, "state": state, "counts": counts}


def shards(results, layout):
    """This rank's part of a walk's results, sharded or whole."""

    def part(value):
        if not isinstance(value, torch.Tensor):
            return torch.as_tensor(value)
        return (value if isinstance(value, DTensor) else sharded(value, layout)).to_local()

    kept = {name: [part(value) for value in results[name]] for name in ("weights", "S", "state")}
    return {**kept, "counts": results["counts"]}


ROWNORM = {
    "plain": {"options": {"lr": 0.1, "weight_decay": 0.1}},
    "centred": {"options": {"lr": 0.1, "center": "both"}},
    "wild": {"options": {"lr": 0.1, "eps": 1e-15}, "gradients": wild},
    "bf16": {"options": {"lr": 0.1, "maximize": True}, "dtype": torch.bfloat16},
    "compensated": {"options": {"lr": 1e-3, "rounding": "compensated"}, "dtype": torch.bfloat16},
}
MUON = {
    "plain": {"options": {}},
    "no nesterov": {"options": {"nesterov": False, "maximize": True}},
    "fp64": {"options": {"ns_dtype": torch.float64}, "dtype": torch.float64},
    "bf16": {"options": {"ns_dtype": torch.bfloat16}, "dtype": torch.bfloat16},
    "compensated": {"options": {"rounding": "compensated"}, "dtype": torch.bfloat16},
    "wild": {"options": {}, "gradients": wild, "steps": 1},
    "no gradient anywhere": {"options": {}, "without": (0, 3)},
}


def everywhere(rank, world):
    """For every layout and case: the sharded and the whole optimizer's results for this rank's shards."""
    results = {"RowNorm": {}, "Muon": {}}
    for make, cases, shapes in ((RowNorm, ROWNORM, UNEVEN), (Muon, MUON, [*UNEVEN, (7, 5), (6, 6), (0, 3)])):
        alone = {"distributed": False} if make is Muon else {}
        for case, kind in cases.items():
            whole = walk(make, None, shapes, **{**kind, "options": {**kind["options"], **alone}})
            for name, layout in layouts(world, case).items():
                ours = walk(make, layout, shapes, **kind)
                results[make.__name__][name, case] = shards(ours, layout), shards(whole, layout)
    return results


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.sweep)], ids="{} ranks".format)
def steps(request, tmp_path_factory):
    """Three ranks in a line, and four in a square, whose lines have two."""
    return in_ranks(everywhere, tmp_path_factory.mktemp("steps"), world=request.param)


def assert_alike(results, whole, *, rtol, atol, case):
    for what in ("weights", "S", "state"):
        for a, b in zip(results[what], whole[what], strict=True):
            torch.testing.assert_close(
                a, b, equal_nan=True, rtol=rtol, atol=atol, msg=lambda text, what=what: f"{case} {what}: {text}"
            )


def test_rownorm_on_shards_is_rownorm_on_the_whole_matrix(steps):
    """To the bit where rows are sharded and none is subtracted, to rounding otherwise."""
    for ours in (rank["RowNorm"] for rank in steps):
        for (layout, case), (results, whole) in ours.items():
            rtol, atol = (1e-2, 1e-3) if case in ("bf16", "compensated") else (1e-5, 1e-7)
            if "dim=1" not in layout and case != "centred":
                rtol = atol = 0
            assert_alike(results, whole, rtol=rtol, atol=atol, case=(layout, case))


def test_rownorm_sends_nothing_where_rows_are_sharded(steps):
    """Centering takes two sums of a row for each mesh dimension, sharded columns one sum of norms."""
    for ours in (rank["RowNorm"] for rank in steps):
        for (layout, case), (results, _) in ours.items():
            placements = ["dim=0", "dim=0"] if layout == "strided" else layout.split()
            rows, columns = (sum(f"dim={dim}" in p for p in placements) for dim in (0, 1))
            a_step = len(UNEVEN) * (columns + (2 * rows if case == "centred" else 0))
            assert results["counts"] == [a_step] * 3, (layout, case)


def test_muon_on_shards_is_muon_on_the_whole_matrix(steps):
    for ours in (rank["Muon"] for rank in steps):
        for (layout, case), (results, whole) in ours.items():
            rtol, atol = (2e-2, 4e-3) if case in ("bf16", "compensated") else (1e-5, 2e-6)
            assert_alike(results, whole, rtol=rtol, atol=atol, case=(layout, case))


def test_muon_exchanges_all_matrices_of_a_mesh_by_two_collectives(steps):
    for ours in (rank["Muon"] for rank in steps):
        for (layout, case), (results, _) in ours.items():
            first, *others = results["counts"]
            assert others == [2] * len(others), (layout, case)
            assert first == 4, (layout, case)  # two more to learn where the shards are


# Gradients and groups of other kinds


def settle(layout, *, gradients, make=RowNorm):
    """One step of one matrix, with a gradient that each rank makes; the weights are gathered."""
    p = nn.Parameter(sharded(draws(0, (7, 5)), layout))
    p.grad = gradients(p)
    make([p], lr=0.1).step()
    return whole(p.detach())


def mixed_group(make, world):
    """A group with whole matrices, sharded ones on two meshes, a frozen one, and one without a gradient anywhere."""
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2))
    mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]  # the ranks {0, 1} or {2, 3}
    kinds = [None, (line, [Shard(0)]), (square, [Shard(1), Shard(0)]), None, (line, [Shard(1)]), (mine, [Shard(0)])]

    def place(t, layout):
        return t if layout is None else sharded(t, layout)

    results = []
    for kind in (kinds, [None] * len(kinds)):
        params = [nn.Parameter(place(draws(i, (6, 5)), layout)) for i, layout in enumerate(kind)]
        params[3].requires_grad_(False)
        optimizer = make(params, lr=0.1)
        for t in range(3):
            for i, layout in enumerate(kind):
                params[i].grad = None if i in (3, 4) else place(draws(10 * t + i, (6, 5)), layout)
            optimizer.step()
            if t == 1:
                optimizer = copy.deepcopy(optimizer)  # a copy goes on where the original was
                params = optimizer.param_groups[0]["params"]
        results.append([whole(p.detach()) for p in params])
    return results


def missing_gradients(rank, layout):
    """Muon where one rank has no gradient for its shard: the matrices that moved."""
    params = [nn.Parameter(sharded(draws(i, (7, 5)), layout)) for i in range(3)]
    before = [whole(p.detach()).clone() for p in params]
    for i, p in enumerate(params):
        p.grad = None if (rank, i) == (1, 1) else sharded(draws(5, (7, 5)), layout)
    Muon(params).step()
    return [not torch.equal(whole(p.detach()), b) for p, b in zip(params, before, strict=True)]


def stale_graph(layout):
    """The error of a backward pass through weights that a step has changed since the forward pass."""
    p = nn.Parameter(sharded(draws(0, (7, 5)), layout))
    loss = p.square().sum()
    p.grad = torch.ones_like(p)
    RowNorm([p], lr=0.1).step()
    return refused(loss.backward)


def unusual(rank, world):
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))["tp"]
    G, rows, one = draws(3, (7, 5)), (line, [Shard(0)]), (alone, [Shard(0)])
    part = torch.zeros(7, 5) if rank else G
    strided = strided_layout(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    whole = (strided[0], [Replicate(), Replicate()])

    def put_by_hand(gradient):
        p = nn.Parameter(sharded(draws(0, (7, 5)), rows))
        optimizer = RowNorm([p], lr=0.1)
        with mock.patch.object(type(p), "grad", gradient):
            optimizer.step()

    def settled(layout, gradient):
        return [settle(layout, gradients=gradient, make=make) for make in (RowNorm, Muon)]

    return {
        "as laid out": settled(rows, lambda p: sharded(G, rows)),
        "replicated": settled(rows, lambda p: sharded(G, (line, [Replicate()]))),
        "columns": settled(rows, lambda p: sharded(G, (line, [Shard(1)]))),
        "partial": settled(rows, lambda p: DTensor.from_local(part, line, [Partial()])),
        "one rank": settled(one, lambda p: sharded(G, one)),
        "refused": {
            "plain": refused(lambda: put_by_hand(G)),
            "mesh": refused(lambda: put_by_hand(sharded(G, (square, [Shard(0), Replicate()])))),
            "strided": refused(lambda: settle(strided, gradients=lambda p: sharded(G, whole))),
            "sum": refused(lambda: RowNorm([nn.Parameter(DTensor.from_local(G, line, [Partial()]))], lr=0.1)),
        },
        "mixed": [mixed_group(make, world) for make in (RowNorm, Muon)],
        "missing": missing_gradients(rank, rows),
        "stale graph": stale_graph(rows),
    }


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return in_ranks(unusual, tmp_path_factory.mktemp("odd"), world=4)


@pytest.mark.parametrize("gradient", ["replicated", "columns", "partial", "one rank"])
def test_a_gradient_of_another_layout_is_laid_out_as_its_parameter(odd, gradient):
    for rank in odd:
        for a, b in zip(rank[gradient], rank["as laid out"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_laid_out_is_refused_by_a_sentence(odd):
    for refusals in (rank["refused"] for rank in odd):
        assert refusals["plain"].startswith("RowNorm got a plain gradient of a sharded parameter, number 0 (7, 5):")
        assert refusals["mesh"].startswith("RowNorm got a gradient on DeviceMesh")
        assert "_StridedShard" in refusals["strided"]
        assert "a sum that the ranks have not taken yet" in refusals["sum"]


def test_a_group_may_mix_whole_matrices_and_shards_on_several_meshes(odd):
    for rank in odd:
        for ours, whole in rank["mixed"]:
            for a, b in zip(ours, whole, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert torch.equal(ours[3], draws(3, (6, 5)))
            assert torch.equal(ours[4], draws(4, (6, 5)))


def test_muon_moves_a_sharded_matrix_on_no_rank_if_one_has_no_gradient(odd):
    assert [rank["missing"] for rank in odd] == [[True, False, True]] * 4


def test_autograd_sees_that_a_step_has_changed_a_sharded_matrix(odd):
    assert all("modified by an inplace operation" in rank["stale graph"] for rank in odd)


def second_groups_that_differ(rank, world):
    """Muon where the second group has a known layout on rank zero and a new one on the other."""
    layout = init_device_mesh("cpu", (world,)), [Shard(0)]
    params = [nn.Parameter(sharded(draws(i, (rows, 4)), layout)) for i, rows in enumerate((6, 6 + 2 * rank))]
    for p in params:
        p.grad = torch.ones_like(p)
    return refused(Muon([{"params": [p]} for p in params]).step)


def test_ranks_whose_later_groups_differ_are_refused_on_all_of_them_and_do_not_hang(tmp_path):
    for message in in_ranks(second_groups_that_differ, tmp_path / "r", patience=60):
        assert message.startswith("the ranks of a mesh hold shards of different matrices")


# Decoders, and their checkpoints

BEFORE, AFTER = range(3), range(3, 4)
"""Updates before a checkpoint and after it."""
COMPENSATED = {name: {"rounding": "compensated"} for name in ("rownorm", "muon")}


def decoder(kind="whole", dtype=torch.float32, mesh=None):
    """A decoder whose 37 tokens do not divide by the ranks, with its optimizer and schedule."""
    torch.manual_seed(0)
    model = Plain(37, 16, bias=True).to(dtype)
    if kind == "tp":
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = pretraining_optimizer(model, **(COMPENSATED if dtype == torch.bfloat16 else {}))
    return model, optimizer, warmup_cosine(optimizer, 10)


def train(run, updates):
    """Updates with two micro-batches and the schedule. Every rank has the whole batch."""
    model, optimizer, schedule = run
    for t in updates:
        draw = torch.Generator().manual_seed(t)
        for _ in range(2):
            tokens = torch.randint(0, 37, (6, 9), generator=draw)
            loss = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / 2).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def weights(run):
    return [whole(p.detach()).clone() for p in run[0].parameters()]


def state(run):
    """All that the optimizer holds for each parameter, gathered."""
    held = [run[1].state[p] for group in run[1].param_groups for p in group["params"]]
    return [{key: torch.as_tensor(whole(value)).clone() for key, value in s.items()} for s in held]


def save(run, folder, flat):
    model, optimizer = get_state_dict(run[0], run[1], options=StateDictOptions(flatten_optimizer_state_dict=flat))
    both = {"model": model, "optimizer": optimizer, "schedule": run[2].state_dict()}
    dcp.save(both, checkpoint_id=f"{folder}/{flat}")


def resumed(kind, folder, *, dtype=torch.float32, flat):
    """Resume a new run of this kind from a checkpoint: the state it loaded, and its weights an update later."""
    run, options = decoder(kind, dtype), StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(run[0], run[1], options=options)
    saved = {"model": model, "optimizer": optimizer, "schedule": run[2].state_dict()}
    dcp.load(saved, checkpoint_id=f"{folder}/{flat}")
    parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
    set_state_dict(run[0], run[1], **parts, options=options)
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
    run = decoder("tp", mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    train(run, [*BEFORE, *AFTER])
    return {**results, "tp": weights(run), "head": find_head(decoder("fsdp")[0]), "from whole": from_whole()}


def from_whole():
    """The state of a sharded run that has loaded the ordinary state dict of a whole one, and the whole one's."""
    one, other = decoder(), decoder("fsdp")
    train(one, range(2))
    other[1].load_state_dict(one[1].state_dict())
    held = state(other), state(one)
    train(other, range(1))
    return held


def three_ranks(rank, world, folder):
    return [resumed("fsdp", f"{folder}/{torch.float32}", flat=flat) for flat in (False, True)]


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


@pytest.mark.parametrize("kind", ["fsdp", "tp"])
def test_a_sharded_decoder_trains_as_a_whole_one(saved, alone, kind):
    for rank in saved:
        assert_follow(rank["tp"] if kind == "tp" else rank[torch.float32][1], alone)
        assert rank["head"] == "lm_head"


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


def test_a_checkpoint_of_two_ranks_loads_on_three_ranks_under_ddp_and_in_one_process(saved, folder):
    held, expected = saved[0][torch.float32]
    three = in_ranks(three_ranks, folder / "three", str(folder), world=3)
    one = [resumed("whole", f"{folder}/{torch.float32}", flat=flat) for flat in (False, True)]
    for loaded, reached in (*(run for rank in three for run in rank), *one, *(rank["ddp"] for rank in saved)):
        assert_equal(loaded, held)
        assert_follow(reached, expected)
