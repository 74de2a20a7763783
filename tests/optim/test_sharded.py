"""The optimizers on sharded parameters, over real gloo processes: the steps are those of the whole matrices."""

import copy
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from hilbert_monitor import ChainedOptimizer, Muon, RowNorm
from tests.support.ranks import in_ranks

SHAPES = [(7, 5), (1, 4), (13, 1), (5, 12)]
"""Rows and columns that do not divide by the ranks, and fewer of them than ranks."""


def strided_layout(mesh):
    """What FSDP over tensor parallelism makes of a head."""
    head = nn.Linear(4, 8, bias=False)
    parallelize_module(head, mesh["tp"], ColwiseParallel())
    fully_shard(head, mesh=mesh["dp"])
    return head.weight.device_mesh, head.weight.placements


def layouts(world, case):
    """Kinds of layouts on so many ranks, by name: (mesh, placements).

    The plain case has each kind on a line, and on a square each pair of kinds in one order. The other cases take the
    two of four ranks that between them have replicas, rows and columns.
    """
    kinds = (Replicate(), Shard(0), Shard(1))
    if world < 4:
        line = init_device_mesh("cpu", (world,))
        return {repr(p): (line, [p]) for p in kinds if case == "plain"}
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, rows, columns = kinds
    pairs = [(replica, columns)]
    if case == "plain":
        pairs += [(rows, replica), (rows, rows), (columns, rows), (columns, columns)]
    found = {f"{a!r} {b!r}": (square, [a, b]) for a, b in pairs}
    return {**found, "strided": strided_layout(square)}


class Collectives(TorchDispatchMode):
    """Counts the collectives that this process enters, torch's own for DTensors among them."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function)
        return function(*args, **(kwargs or {}))


def draws(seed, shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wild(seed, shape, dtype=torch.float32):
    """Gradients with rows whose squares leave the range of their dtype, and rows that are not finite."""
    G, (tiny, huge) = draws(seed, shape, dtype), (1e-30, 1e25) if dtype == torch.float32 else (1e-220, 1e230)
    for row, factor in zip(G, [1, tiny, huge, 0, torch.inf, 1, torch.nan], strict=False):
        row[0 if factor in (torch.inf, torch.nan) else slice(None)] *= factor
    return G


def sharded(t, layout):
    return distribute_tensor(t, *layout, src_data_rank=None)


def walk(make, layout, shapes, *, gradients=draws, dtype=torch.float32, steps=3, without=(), options):
    """Steps on sharded matrices, or on whole ones where `layout` is None: all that is left of them."""
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
    """This rank's part of what a walk left: of its own shards, or of whole matrices once they are laid out."""

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
    "wild fp64": {"options": {"lr": 0.1, "eps": 1e-15}, "gradients": wild, "dtype": torch.float64},
    "bf16": {"options": {"lr": 0.1, "maximize": True}, "dtype": torch.bfloat16},
    "compensated": {"options": {"lr": 1e-3, "rounding": "compensated"}, "dtype": torch.bfloat16},
}


def rownorm_everywhere(rank, world):
    """For every layout and case: what the sharded and what the whole optimizer leaves of this rank's shards."""
    results = {}
    for case, kind in ROWNORM.items():
        whole = walk(RowNorm, None, SHAPES, **kind)
        for name, layout in layouts(world, case).items():
            ours = walk(RowNorm, layout, SHAPES, **kind)
            results[name, case] = shards(ours, layout), shards(whole, layout)
    return results


def assert_alike(results, whole, *, rtol, atol, case):
    for what in ("weights", "S", "state"):
        for a, b in zip(results[what], whole[what], strict=True):
            torch.testing.assert_close(
                a, b, equal_nan=True, rtol=rtol, atol=atol, msg=lambda text, what=what: f"{case} {what}: {text}"
            )


def test_rownorm_on_shards_is_rownorm_on_the_whole_matrix(rownorm):
    """To the bit where rows are sharded and none is subtracted, to rounding otherwise."""
    for ours in rownorm:
        for (layout, case), (results, whole) in ours.items():
            rtol, atol = (1e-2, 1e-3) if case in ("bf16", "compensated") else (1e-5, 1e-7)
            if "dim=1" not in layout and case != "centred":
                rtol = atol = 0
            assert_alike(results, whole, rtol=rtol, atol=atol, case=(layout, case))


def test_rownorm_sends_nothing_where_rows_are_sharded(rownorm):
    """Centering takes two sums of a row for each mesh dimension, sharded columns one sum of norms."""
    for ours in rownorm:
        for (layout, case), (results, _) in ours.items():
            placements = ["dim=0", "dim=0"] if layout == "strided" else layout.split()
            rows, columns = (sum(f"dim={dim}" in p for p in placements) for dim in (0, 1))
            a_step = len(SHAPES) * (columns + (2 * rows if case == "centred" else 0))
            assert results["counts"] == [a_step] * 3, (layout, case)


MUON = {
    "plain": {"options": {}},
    "no nesterov": {"options": {"nesterov": False, "maximize": True}},
    "fp64": {"options": {"ns_dtype": torch.float64}, "dtype": torch.float64},
    "bf16": {"options": {"ns_dtype": torch.bfloat16}, "dtype": torch.bfloat16},
    "compensated": {"options": {"rounding": "compensated"}, "dtype": torch.bfloat16},
    "wild": {"options": {}, "gradients": wild, "steps": 1},
    "no gradient anywhere": {"options": {}, "without": (0, 3)},
}
MATRICES = [*SHAPES, (7, 5), (6, 6), (0, 3)]


def muon_everywhere(rank, world):
    results = {}
    for case, kind in MUON.items():
        whole = walk(Muon, None, MATRICES, **{**kind, "options": {**kind["options"], "distributed": False}})
        for name, layout in layouts(world, case).items():
            ours = walk(Muon, layout, MATRICES, **kind)
            results[name, case] = shards(ours, layout), shards(whole, layout)
    return results


def everything(rank, world):
    return rownorm_everywhere(rank, world), muon_everywhere(rank, world)


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.sweep)], ids="{} ranks".format)
def steps(request, tmp_path_factory):
    """Three ranks in a line, and four in a square, whose lines have two."""
    return in_ranks(everything, tmp_path_factory.mktemp("steps"), world=request.param)


@pytest.fixture
def rownorm(steps):
    return [results for results, _ in steps]


@pytest.fixture
def muon(steps):
    return [results for _, results in steps]


def test_muon_on_shards_is_muon_on_the_whole_matrix(muon):
    for ours in muon:
        for (layout, case), (results, whole) in ours.items():
            rtol, atol = (2e-2, 4e-3) if case in ("bf16", "compensated") else (1e-5, 2e-6)
            assert_alike(results, whole, rtol=rtol, atol=atol, case=(layout, case))


def test_muon_gathers_and_scatters_all_matrices_of_a_mesh_by_two_collectives(muon):
    for ours in muon:
        for (layout, case), (results, _) in ours.items():
            first, *others = results["counts"]
            assert others == [2] * len(others), (layout, case)
            assert first == 4, (layout, case)  # two more to learn where the shards are


def settle(layout, *, gradients, make=RowNorm, **options):
    """One step of one matrix, with a gradient of each rank's own making; the weights are gathered."""
    p = nn.Parameter(sharded(draws(0, (7, 5)), layout))
    p.grad = gradients(p)
    make([p], lr=0.1, **options).step()
    return p.detach().full_tensor()


def refused(act):
    try:
        act()
    except TypeError as error:
        return str(error)


def mixed_group(make, rank, world):
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
        results.append([p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in params])
    return results


def missing_gradients(rank, world):
    """Muon where one rank has no gradient for its shard."""
    layout = init_device_mesh("cpu", (world,)), [Shard(0)]
    params = [nn.Parameter(sharded(draws(i, (7, 5)), layout)) for i in range(3)]
    before = [p.detach().full_tensor().clone() for p in params]
    optimizer = Muon(params)
    for p in params:
        p.grad = sharded(draws(5, (7, 5)), layout)
    params[1].grad = None if rank == 1 else params[1].grad
    optimizer.step()
    return [not torch.equal(p.detach().full_tensor(), b) for p, b in zip(params, before, strict=True)]


def scaled_steps(rank, world):
    """Steps through a GradScaler where one rank's shard has an infinite gradient in the second."""
    layout = init_device_mesh("cpu", (world,)), [Shard(0)]
    p = nn.Parameter(sharded(draws(0, (8, 5)), layout))
    optimizer, scaler, weights = ChainedOptimizer(RowNorm([p], lr=0.1)), torch.amp.GradScaler("cpu"), []
    for t in range(3):
        G = draws(t, (8, 5))
        G[-1] = torch.inf if t == 1 else G[-1]
        scaler.scale(torch.ones(()))  # which sets it up
        p.grad = sharded(G, layout)
        scaler.step(optimizer)
        scaler.update()
        weights.append(p.detach().full_tensor().clone())
    return [not torch.equal(a, b) for a, b in pairwise(weights)]


def unusual(rank, world):
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, 2))
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "tp"))["tp"]
    G = draws(3, (7, 5))
    part = torch.zeros(7, 5) if rank else G
    elsewhere = {
        "replicated": lambda p: sharded(G, (line, [Replicate()])),
        "columns": lambda p: sharded(G, (line, [Shard(1)])),
        "partial": lambda p: DTensor.from_local(part, line, [Partial()]),
    }
    makers = (RowNorm, Muon)
    strided = strided_layout(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))

    def put_by_hand(gradient):
        p = nn.Parameter(sharded(draws(0, (7, 5)), (line, [Shard(0)])))
        optimizer = RowNorm([p], lr=0.1)
        with mock.patch.object(type(p), "grad", gradient):
            optimizer.step()

    def settled(layout, gradient):
        return [settle(layout, gradients=gradient, make=make) for make in makers]

    rows, one = (line, [Shard(0)]), (alone, [Shard(0)])
    whole = (strided[0], [Replicate(), Replicate()])
    return {
        "as laid out": settled(rows, lambda p: sharded(G, rows)),
        **{name: settled(rows, gradient) for name, gradient in elsewhere.items()},
        "one rank": settled(one, lambda p: sharded(G, one)),
        "refused": {
            "plain": refused(lambda: put_by_hand(G)),
            "mesh": refused(lambda: put_by_hand(sharded(G, (square, [Shard(0), Replicate()])))),
            "strided": refused(lambda: settle(strided, gradients=lambda p: sharded(G, whole))),
            "sum": refused(lambda: RowNorm([nn.Parameter(DTensor.from_local(G, line, [Partial()]))], lr=0.1)),
        },
        "mixed": [mixed_group(m, rank, world) for m in makers],
        "missing": missing_gradients(rank, world),
        "scaled": scaled_steps(rank, world),
    }


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return in_ranks(unusual, tmp_path_factory.mktemp("odd"), world=4)


@pytest.mark.few(1)
@pytest.mark.parametrize("gradient", ["replicated", "columns", "partial", "one rank"])
def test_a_gradient_of_another_layout_is_laid_out_as_its_parameter(odd, gradient):
    for rank in odd:
        for a, b in zip(rank[gradient], rank["as laid out"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_laid_out_is_refused_by_a_sentence(odd):
    for rank in odd:
        refusals = rank["refused"]
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


def test_muon_moves_a_matrix_on_no_rank_if_one_has_no_gradient(odd):
    assert [rank["missing"] for rank in odd] == [[True, False, True]] * 4


def test_a_step_that_a_scaler_skips_is_skipped_on_all_ranks(odd):
    assert [rank["scaled"] for rank in odd] == [[False, True]] * 4
