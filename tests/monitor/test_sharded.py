"""Heads on several ranks: under FSDP2, tensor parallelism, both, and DDP, all as one process measures it."""

import multiprocessing
import os
import signal
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, RMSprop

import hilbert_monitor
from hilbert_monitor import ChainedOptimizer, Muon, RowNorm
from hilbert_monitor.geometry.points import CentredRows
from hilbert_monitor.monitor import runtime
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from tests.support import warm
from tests.support.decoders import Plain, Tied
from tests.support.ranks import in_ranks
from tests.support.sinks import Recorder
from tests.support.tried import OURS, tried
from tests.support.ways import assert_same_way

V, D, UPDATES = 101, 8, 2
SIZE = {"V": V, "d": D, "blocks": 1}
TEXT = torch.randint(0, V, (64, 9), generator=torch.Generator().manual_seed(5))
FIELDS = (
    "diameter", "diameter_lower", "pair", "row_norm", "row_token", "radius", "gradient_row_norm", "gradient_row_token",
    "perturbation_rms", "perturbation_max", "hidden_norm", "gauge_waste", "spectral_norm", "backward_bound",
)  # fmt: skip
OPTIMIZERS = {
    "AdamW": partial(AdamW, lr=1e-2, weight_decay=0.1),
    "Adam": partial(Adam, lr=1e-2),
    "SGD": partial(SGD, lr=0.3),
    "momentum": partial(SGD, lr=0.3, momentum=0.9),
    "RMSprop": partial(RMSprop, lr=1e-2),
    "RowNorm": partial(RowNorm, lr=1e-2),
    "centred RowNorm": partial(RowNorm, lr=1e-2, center="both"),
    "Muon": partial(Muon, lr=1e-2),
}


class HeadOnly:
    """An optimizer of the head, and AdamW for the rest, as one."""

    def __new__(cls, model, name):
        rest = [p for n, p in model.named_parameters() if n != "lm_head.weight"]
        return ChainedOptimizer(AdamW(rest, lr=1e-2), OPTIMIZERS[name]([model.lm_head.weight]))


def fsdp(model, mesh, **options):
    for part in (*model.blocks, model.lm_head, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})


def arranged(layout, world, model):
    """Shard a model; return what the training loop calls."""
    mesh = init_device_mesh("cpu", (world,)) if world > 1 and layout not in ("both", "last stage") else None
    if layout in CASES and mesh is not None:
        shard_case(layout, model, mesh)
    if layout == "FSDP":
        fsdp(model, mesh)
    if layout == "tensor parallel":
        tensor_parallel(model, mesh)
    if layout == "both":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        fsdp(tensor_parallel(model, mesh["tensor"]), mesh["data"])
    return nn.parallel.DistributedDataParallel(model) if layout == "DDP" else model


def update(forward, optimizer, number):
    """Make an update on the same batch on every rank."""
    ids = TEXT[8 * number : 8 * number + 8]
    optimizer.zero_grad()
    cross_entropy(forward(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    optimizer.step()


def whole_weights(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def train(layout, world, name="AdamW", *, watched=True, group=None, updates=UPDATES):
    """Train a small decoder; return its records, weights, the remarks, and where increments came from."""
    torch.manual_seed(0)
    kind = {"tied": Tied, "fused loss": Fused}.get(layout, Plain)
    padded = layout == "padded"
    model = kind(**SIZE, bias=layout == "bias", head_rows=V + 27 if padded else None)
    wrapped = fsdp(model, DeviceMesh.from_group(group, "cpu")) if group else arranged(layout, world, model)
    if layout in CASES:
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        evaluated(model)
    else:
        optimizer = HeadOnly(model, name)
    records = []
    probe = Probe(
        model, optimizer, panel=Panel.of_tokens(TEXT[:8], 50), diameter_every=2, perturbation_every=2,
        vocab_size=V if padded else None, process_group=group, strict=True,
    )  # fmt: skip
    if watched:
        probe.attach()
    for number in range(updates):
        with loss_parallel() if layout == "vocabulary-parallel loss" and world > 1 else nullcontext():
            update(wrapped, optimizer, number)
        if layout in CASES:
            evaluated(model)
        if watched:
            records.append(probe.record())
    probe.detach()
    numbers = [{field: getattr(record, field) for field in FIELDS} for record in records]
    return numbers, whole_weights(model), probe.remarks, [record.increment_from for record in records]


@cache
def whole(name, layout="one"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(layout, 1, name)


def check(numbers, expected):
    """Compare records of a rank with those of one process, whose sums are in another order.

    The radius is an upper bound, up to 1 % above, that is another where rows tie. The gauge waste is a square, of
    nothing but rounding where gradients have no mean row: Newton-Schulz makes that up to 500 times larger.
    """
    tolerances = {"radius": {"rel": 1e-2}, "gauge_waste": {"rel": 2e-3, "abs": (500 * 2**-23) ** 2}}
    for record, other in zip(numbers, expected, strict=True):
        for field in FIELDS:
            if isinstance(other[field], float):
                assert record[field] == pytest.approx(other[field], **tolerances.get(field, {"rel": 2e-3})), field
            elif field not in ("pair", "row_token"):  # the first steps of Adam and all rows of RowNorm tie
                assert record[field] == other[field], field


LAYOUTS = {
    ("FSDP", 2): tuple(OPTIMIZERS),
    ("FSDP", 3): ("AdamW", "RowNorm"),
    ("tensor parallel", 2): ("AdamW", "RowNorm", "SGD", "RMSprop"),
    ("both", 4): ("AdamW", "RowNorm", "centred RowNorm"),
    ("DDP", 2): tuple(OPTIMIZERS),
    ("DDP", 3): ("AdamW", "RowNorm"),
}


def all_of_a_rank(rank, world):
    """All that so many ranks do, one after the other: processes take longer to start than any of it."""
    layouts = {layout: names for (layout, ranks), names in LAYOUTS.items() if ranks == world}
    if world == 2:
        layouts |= dict.fromkeys(CASES, ("AdamW",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            layout: {name: (train(layout, world, name), train(layout, world, name, watched=False)[1]) for name in names}
            for layout, names in layouts.items()
        }
        if world == 2:
            found["columns_sharded"] = columns_sharded(rank, world)
            found |= {where: failing_rank(rank, world, where) for where in PLACES}
            found["apart"] = {case: apart(rank, world, case) for case in ("absent", "settings")}
        if world == 4:
            found["pipeline"] = pipeline(rank, world)
    return found


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """What each of so many ranks found."""
    return cache(lambda world: in_ranks(all_of_a_rank, tmp_path_factory.mktemp("ranks"), world=world))


@pytest.mark.few("FSDP-2", "tensor parallel-2", "DDP-2")
@pytest.mark.parametrize(("layout", "world"), LAYOUTS)
def test_ranks_measure_what_one_process_measures_and_change_nothing(layout, world, ranks_of):
    names, ranks = LAYOUTS[layout, world], [rank[layout] for rank in ranks_of(world)]
    for name in names:
        expected = whole(name)
        for (numbers, weights, remarks, origin), unwatched in (found[name] for found in ranks):
            assert all(torch.equal(a, b) for a, b in zip(weights, unwatched, strict=True))
            assert numbers == ranks[0][name][0][0]  # the same on every rank
            local = layout == "DDP" or name not in ("centred RowNorm", "Muon")
            every = slice(None) if local else slice(1, None, 2)  # differences of weights are not formed for bounds
            check(numbers[every], expected[0][every])
            assert remarks == expected[2]
            assert origin == (expected[3] if local else ["", "step"] * (UPDATES // 2))
        kinds = {"momentum": "SGD with momentum", "centred RowNorm": "RowNorm (centred)"}
        strategies = {"FSDP": "FSDP2", "both": "FSDP2 and tensor parallel"}
        strategy = f"{strategies.get(layout, layout)}, {world} ranks"
        tried(model=OURS, trainer="own loop", optimizer=kinds.get(name, name), strategy=strategy)


# How teams run it


class Fused(Plain):
    """Its loss multiplies by the head's weight itself, as fused losses do, and never calls the head."""

    def forward(self, tokens):
        states = self.hidden(tokens)
        if self.training:
            weight = self.lm_head.weight
            return states @ (weight.full_tensor() if isinstance(weight, DTensor) else weight).T
        return states


def evaluated(model):
    """A validation of one batch, after which a root that stays gathered shows other parameters."""
    model.eval()
    with torch.no_grad():
        model(TEXT[:2])
    model.train()


def shard_case(case, model, mesh):
    if case == "vocabulary-parallel loss":
        plan = {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        parallelize_module(model, mesh, plan)
        return
    options = {"mesh": mesh}
    if case == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    if case == "head and norm in one unit":
        fully_shard([model.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)


CASES = (
    "tied",
    "padded",
    "bias",
    "head and norm in one unit",
    "fused loss",
    "vocabulary-parallel loss",
    "mixed precision",
)


@pytest.mark.few(3)
@pytest.mark.parametrize("case", CASES)
def test_a_sharded_head_is_measured_as_teams_shard_it(case, ranks_of):
    expected = whole("AdamW", case)[0]
    for (numbers, weights, *_), unwatched in (rank[case]["AdamW"] for rank in ranks_of(2)):
        assert all(torch.equal(a, b) for a, b in zip(weights, unwatched, strict=True))
        if case == "mixed precision":  # other numbers than in fp32, but not by much
            for record, other in zip(numbers[1::2], expected[1::2], strict=True):
                assert 0.5 < record["diameter"] / other["diameter"] < 2
                assert record["perturbation_rms"] > 0
        else:
            check(numbers, expected)


def columns_sharded(rank, world):
    model = parallelize_module(Plain(**SIZE), init_device_mesh("cpu", (world,)), {"lm_head": RowwiseParallel()})
    with pytest.raises(
        ValueError, match=r"sharded by rows, one for each token.*fully_shard and ColwiseParallel"
    ) as error:
        Probe(model, AdamW(model.parameters()))
    return str(error.value)


def test_a_head_sharded_by_columns_is_refused_with_what_to_do(ranks_of):
    first, second = (rank["columns_sharded"] for rank in ranks_of(2))
    assert first == second


def apart(rank, world, case):
    """Watch a sharded model with a monitor that only rank zero has, or that has other settings there."""
    runtime.MEETING_SECONDS = 2.0
    model, kept = Plain(**SIZE), Recorder()
    fsdp(model, init_device_mesh("cpu", (world,)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    every = 1 + (rank if case == "settings" else 0)
    run = hilbert_monitor.watch(model, optimizer, diameter_every=every, sinks=[kept], run_dir=None, strict=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if case != "absent" or rank == 0:
            run.start()
        for number in range(2):
            update(model, optimizer, number)
            if case != "absent" or rank == 0:
                run.step()
        run.close()
    return len(kept.records), [str(w.message) for w in caught if "nothing is measured" in str(w.message)]


@pytest.mark.parametrize(
    ("case", "why"), [("absent", "only 1 of 2 ranks have"), ("settings", "monitors with different settings")]
)
def test_ranks_whose_monitors_differ_measure_nothing_and_say_so_once(case, why, ranks_of):
    (records, told), (others, _) = (rank["apart"][case] for rank in ranks_of(2))
    assert records == others == 0
    assert len(told) == 1
    assert why in told[0]


def pipeline(rank, world):
    """The last of two stages has the head on two ranks; the others train without us."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return train("last stage", world, group=groups[1])[0] if rank >= 2 else None


@pytest.mark.sweep
def test_in_a_pipeline_only_the_stage_with_the_head_measures(ranks_of):
    first, second, third, fourth = (rank["pipeline"] for rank in ranks_of(4))
    assert first is second is None
    assert third == fourth
    check(third, whole("AdamW")[0])


# Faults


def failing_rank(rank, world, where):
    """One rank fails in a measurement; the run goes on, and so does measuring."""
    torch.manual_seed(0)
    model = fsdp(Plain(**SIZE), init_device_mesh("cpu", (world,)))
    optimizer, diameters = HeadOnly(model, "AdamW"), []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0) as probe:
        target, name = (probe.head, "increment") if where == "increment" else (CentredRows, "norms")
        for number in range(UPDATES + 1):
            fails = mock.patch.object(target, name, side_effect=MemoryError("out of memory on this rank alone"))
            with fails if rank == 1 and number == 1 else nullcontext():
                update(model, optimizer, number)
            diameters.append(probe.record().diameter)
    return diameters, dict(probe.guard.failures), whole_weights(model)


PLACES = ("increment", "search")


@pytest.mark.parametrize("where", PLACES)
def test_a_rank_that_fails_costs_a_measurement_and_never_the_run(where, ranks_of):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = train("one", 1, "AdamW", watched=False, updates=UPDATES + 1)[1]
    first, second = (rank[where] for rank in ranks_of(2))
    assert first[0] == second[0]
    assert [d is None for d in first[0]] == [False, True, False]
    assert second[1]
    for rank in (first, second):
        torch.manual_seed(0)
        assert_same_way(rank[2], weights, Plain(**SIZE).parameters())


def dying_rank(rank, folder):
    """Rank one is killed while the ranks measure; rank zero notes the error that ends its own run, and when."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=100)
    )
    torch.manual_seed(0)
    model = Plain(**SIZE)
    wrapped = fsdp(model, init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    warnings.simplefilter("ignore")
    probe = Probe(model, optimizer, diameter_every=1, perturbation_every=0).attach()
    agree = probe.head.agree

    def killed(*mine):
        if rank == 1 and probe.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return agree(*mine)

    probe.head.agree = killed
    step, error, start = 0, None, time.monotonic()
    try:
        for step in range(1, 7):
            update(wrapped, optimizer, step)
            probe.record()
    except RuntimeError as raised:
        error = str(raised)
    torch.save((step, error, time.monotonic() - start, dict(probe.guard.failures)), f"{folder}/{rank}.pt")
    os._exit(0)  # the process group would wait for its peer


def test_a_rank_that_is_killed_while_measuring_ends_the_run_as_without_the_monitor(tmp_path):
    ranks = [
        multiprocessing.get_context(warm.METHOD).Process(target=dying_rank, args=(rank, str(tmp_path)))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL]
    step, error, seconds, failures = torch.load(tmp_path / "0.pt", weights_only=False)
    assert step == 4  # the step after: its own gradients' exchange fails
    assert error
    assert seconds < 100
    assert failures  # the measurement of step 3, of which it only warns
