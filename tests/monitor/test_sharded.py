"""Heads that several ranks share: under FSDP2, tensor parallelism, both, and DDP, all as one process measures it."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, AdamW, RMSprop

from hilbert_monitor import ChainedOptimizer, Muon, RowNorm
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe
from tests.support.decoders import Plain
from tests.support.ranks import in_ranks

V, D, UPDATES = 101, 8, 4
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
    if layout == "FSDP":
        return fsdp(model, init_device_mesh("cpu", (world,)))
    if layout == "tensor parallel":
        return tensor_parallel(model, init_device_mesh("cpu", (world,)))
    if layout == "both":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        return fsdp(tensor_parallel(model, mesh["tensor"]), mesh["data"])
    if layout == "DDP":
        return nn.parallel.DistributedDataParallel(model)
    return model


def train(layout, world, name, *, make=Plain, watched=True, vocab_size=None, strict=True, **options):
    """Train a small decoder, on the same batch on every rank; return its records, weights and the remarks."""
    torch.manual_seed(0)
    model = make(V=V, d=D, **options)
    wrapped = arranged(layout, world, model)
    optimizer, records, remarks = HeadOnly(model, name), [], []
    panel = Panel.of_tokens(TEXT[:8], 50)
    probe = Probe(
        model, optimizer, panel=panel, diameter_every=2, perturbation_every=2, vocab_size=vocab_size, strict=strict,
    )  # fmt: skip
    if watched:
        probe.attach()
    for update in range(UPDATES):
        ids = TEXT[8 * update : 8 * update + 8]
        optimizer.zero_grad()
        logits = wrapped(ids[:, :-1])[..., :V]
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        if watched:
            records.append(probe.record())
            remarks = probe.remarks
    probe.detach()
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    numbers = [{field: getattr(record, field) for field in FIELDS} for record in records]
    return numbers, weights, remarks, [record.increment_from for record in records]


def all_of_a_rank(rank, world, layout, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: (train(layout, world, name), train(layout, world, name, watched=False)[1]) for name in names}


def whole(name, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train("one", 1, name, **options)


def check(numbers, expected):
    """Compare records of a rank with those of one process, whose sums are in another order."""
    for record, other in zip(numbers, expected, strict=True):
        for field in FIELDS:
            if isinstance(other[field], float):
                assert record[field] == pytest.approx(other[field], rel=2e-3), field
            elif field not in ("pair", "row_token"):  # the first steps of Adam and all rows of RowNorm tie
                assert record[field] == other[field], field


@pytest.mark.parametrize(
    ("layout", "world", "names"),
    [
        ("FSDP", 2, tuple(OPTIMIZERS)),
        ("FSDP", 3, ("AdamW", "RowNorm")),
        ("tensor parallel", 2, ("AdamW", "RowNorm", "SGD", "RMSprop")),
        ("both", 4, ("AdamW", "RowNorm", "centred RowNorm")),
        ("DDP", 2, tuple(OPTIMIZERS)),
        ("DDP", 3, ("AdamW", "RowNorm")),
    ],
)
def test_ranks_measure_what_one_process_measures_and_change_nothing(layout, world, names, tmp_path):
    ranks = in_ranks(all_of_a_rank, tmp_path, layout, names, world=world)
    for name in names:
        expected = whole(name)
        for (numbers, weights, remarks, origin), unwatched in (rank[name] for rank in ranks):
            assert numbers == ranks[0][name][0][0]  # the same on every rank
            local = layout == "DDP" or name not in ("centred RowNorm", "Muon")
            every = slice(None) if local else slice(1, None, 2)  # differences of weights are not formed for bounds
            check(numbers[every], expected[0][every])
            assert all(torch.equal(a, b) for a, b in zip(weights, unwatched, strict=True))
            assert remarks == expected[2]
            assert origin == (expected[3] if local else ["", "step"] * (UPDATES // 2))
