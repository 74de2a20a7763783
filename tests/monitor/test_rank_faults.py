"""One rank fails, or has something else than the others: it costs a measurement, and nobody waits for it."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, NAdam

from hilbert_monitor.monitor.head import Head
from hilbert_monitor.monitor.increment import IncrementSource, SampledRows
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks

V, D, UPDATES, FAULT = 53, 6, 3, 1
TEXT = torch.randint(0, V, (64, 9), generator=torch.Generator().manual_seed(5))
PATIENCE = 90  # seconds: ranks that wait for each other do so for ever


class Clearing(AdamW):
    """Its step clears the gradients, as where memory is short."""

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def train(world, *, layout="FSDP", kind=AdamW, dtype=torch.float32, rows=V, panel=None, before=None, **options):
    """Train with a probe; return its records, failures and remarks, diameters by whole weights, and the weights."""
    torch.manual_seed(0)
    model = Plain(V=V, d=D, blocks=1, head_rows=rows).to(dtype)
    wrapped = DistributedDataParallel(model) if layout == "DDP" else model
    if layout == "FSDP":
        for part in (*model.blocks, model.lm_head, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
    optimizer, records, expected = kind(model.parameters(), lr=1e-2, weight_decay=0.0), [], []
    probe = Probe(
        model, optimizer, panel=panel or Panel.of_tokens(TEXT[:8], 50), diameter_every=1, perturbation_every=2,
        **options,
    )  # fmt: skip
    with warnings.catch_warnings(), probe:
        warnings.simplefilter("ignore")
        for update in range(UPDATES):
            ids = TEXT[8 * update : 8 * update + 8]
            optimizer.zero_grad()
            cross_entropy(wrapped(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten() % rows).backward()
            U = whole(model.lm_head.weight)
            if before is not None:
                before(update)
            optimizer.step()
            records.append(probe.record())
            S = whole(model.lm_head.weight) - U
            expected.append(float(torch.cdist(S, S).max()))
    weights = [whole(p) for p in model.parameters()]
    return records, dict(probe.guard.failures), probe.remarks, expected, weights


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().double()


BF16 = {"dtype": torch.bfloat16}
DDP = {"layout": "DDP"}
PLACES = {
    "end of a step": (IncrementSource, "end", {}),
    "rows kept before a step": (SampledRows, "compare", {}),
    "weights kept before a step": (SampledRows, "compare", {"kind": NAdam}),
    "rows kept after a step": (SampledRows, "see", {}),
    "rows compared at the record": (Head, "unchanged", {}),
    "head after the step": (Head, "logit_matrix", {}),
    "stored step": (Head, "stored_increment", BF16),
    "entries that moved": (IncrementSource, "moved", BF16),
    "ceiling of a stored step": (Head, "ceiling", BF16),
    "end of a step that rank zero measures": (IncrementSource, "end", DDP),
    "rows kept where rank zero measures": (SampledRows, "see", DDP),
}
ON_RANK_ZERO = {
    "increment": (Head, "increment", DDP),
    "end of its step": (IncrementSource, "end", DDP),
    "rows compared at its record": (Head, "unchanged", DDP),
    "efficiency": (Head, "ceiling", DDP | {"efficiency": True}),
}
"""What rank zero alone does, where every rank has the whole head."""


def failing_rank(rank, world, failing, places):
    """Fail on one rank in one update, in each of the places; return the runs with that and without."""
    runs, undisturbed = {}, {}
    for name, (owner, method, options) in places.items():
        real, fails = getattr(owner, method), [False]

        def faulty(*args, real=real, fails=fails, **kwargs):
            if fails[0]:
                raise MemoryError("out of memory on this rank alone")
            return real(*args, **kwargs)

        def before(update, fails=fails):
            fails[0] = rank == failing and update == FAULT

        key = str(options)
        undisturbed[key] = undisturbed.get(key) or train(world, **options)
        setattr(owner, method, faulty)
        runs[name] = train(world, before=before, **options), undisturbed[key]
        setattr(owner, method, real)
    return runs


def all_of_a_rank(rank, world):
    faults = [failing_rank(rank, world, failing, places) for failing, places in enumerate((ON_RANK_ZERO, PLACES))]
    return faults, other_panels(rank, world)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two ranks found."""
    return in_ranks(all_of_a_rank, tmp_path_factory.mktemp("two"), patience=PATIENCE)


@pytest.mark.sweep
@pytest.mark.parametrize("failing", [0, 1])
def test_whatever_fails_on_one_rank_costs_a_measurement_alone(two, failing):
    for name, ((records, _, remarks, _, weights), undisturbed) in two[0][0][failing].items():
        others, _, usual, _, unfailed = undisturbed
        assert [bool(faults[failing][name][0][1]) for faults, _ in two] == [failing == 0, failing == 1], name
        assert remarks == usual, name  # nobody believes that the weights did something else
        assert all(torch.equal(a, b) for a, b in zip(weights, unfailed, strict=True)), name
        for update, (record, other) in enumerate(zip(records, others, strict=True)):
            for field in ("diameter", "perturbation_rms", "stored_diameter", "moved_share"):
                got, expected = getattr(record, field), getattr(other, field)
                assert got == expected or (got is None and update == FAULT), (name, update, field)


def empty_shard(rank, world):
    return train(world, kind=Clearing, rows=2)[:4]


@pytest.mark.sweep
def test_a_rank_without_rows_does_not_take_a_cleared_gradient_for_a_missing_one(tmp_path):
    for records, failures, _, expected in in_ranks(empty_shard, tmp_path, world=3, patience=PATIENCE):
        assert not failures
        assert [record.skipped for record in records] == [""] * UPDATES
        assert [record.diameter for record in records] == pytest.approx(expected, rel=1e-5)
        assert records[1].perturbation_rms


def other_panels(rank, world):
    texts = {"text": Panel.of_tokens(TEXT[8 * rank :][:8], 50), "number": Panel.of_tokens(TEXT[: 8 + 16 * rank], 150)}
    return {name: train(world, panel=panel)[:4] for name, panel in texts.items()}


@pytest.mark.sweep
def test_ranks_with_different_panels_measure_none_and_say_so(two):
    for _, runs in two:
        for records, failures, _, expected in runs.values():
            assert failures == {"panel": 1}
            assert all(record.perturbation_rms is None for record in records)
            assert [record.diameter for record in records] == pytest.approx(expected, rel=1e-5)
