"""The recipe: the paper's optimizers with the paper's numbers on any decoder."""

import io

import pytest
import torch

from hilbert_monitor.optim import Muon, RowNorm, pretraining_optimizer, warmup_cosine
from tests.support.decoders import HuggingFace, Plain, RawPositions, Square, Tied, loss_of, seeded

HEADS = ["rownorm", "adamw"]
every_head = pytest.mark.parametrize("head", HEADS)
WIDTHS = [512, 768, 1024]


def groups_by_name(chain):
    return {group["name"]: group for group in chain.param_groups}


def names_by_group(chain):
    return {group["name"]: group["param_names"] for group in chain.param_groups}


# The paper's numbers


@every_head
@pytest.mark.parametrize("d", WIDTHS)
def test_blocks_have_the_papers_muon(d, head):
    with torch.device("meta"):
        chain = pretraining_optimizer(Plain(V=50_304, d=d, blocks=1), head)
    group = groups_by_name(chain)["matrix"]
    assert isinstance(chain.owner(group["params"][0]), Muon)
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (8e-3, 0.95, 0.1)
    assert (group["ns_steps"], group["eps"], group["nesterov"]) == (5, 1e-5, True)
    assert group["ns_dtype"] == "float32"


@every_head
def test_embedding_and_vectors_have_the_papers_adamw(head):
    chain = pretraining_optimizer(Plain(), head)
    for name, decay in (("embedding", 0.1), ("vector", 0.0)):
        group = groups_by_name(chain)[name]
        assert type(chain.owner(group["params"][0])) is torch.optim.AdamW
        assert (group["lr"], group["betas"], group["eps"]) == (4e-3, (0.9, 0.999), 1e-10)
        assert group["weight_decay"] == decay
        assert group["fused"] is True


@pytest.mark.parametrize(("d", "printed"), [(512, "4.000e-03"), (768, "2.667e-03"), (1024, "2.000e-03")])
def test_adamw_head_has_the_papers_rate(d, printed):
    with torch.device("meta"):
        chain = pretraining_optimizer(Plain(V=50_304, d=d, blocks=1), "adamw")
    group = groups_by_name(chain)["head"]
    assert type(chain.owner(group["params"][0])) is torch.optim.AdamW
    assert f"{group['lr']:.3e}" == printed
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-10, 0.1)


@pytest.mark.parametrize(("d", "printed"), [(512, "3.200e-03"), (768, "2.133e-03"), (1024, "1.600e-03")])
def test_rownorm_head_has_the_papers_rate(d, printed):
    with torch.device("meta"):
        chain = pretraining_optimizer(Plain(V=50_304, d=d, blocks=1), "rownorm")
    group = groups_by_name(chain)["head"]
    assert isinstance(chain.owner(group["params"][0]), RowNorm)
    assert f"{group['lr']:.3e}" == printed
    assert (group["momentum"], group["eps"], group["weight_decay"], group["center"]) == (0.95, 1e-8, 0, "none")


@every_head
def test_device_without_a_fused_kernel_gets_the_plain_one(head):
    with torch.device("meta"):
        chain = pretraining_optimizer(Plain(), head)
    assert not any(group.get("fused") for group in chain.param_groups)


def test_rownorm_is_the_head_by_default():
    assert isinstance(pretraining_optimizer(Plain()).optimizers[-1], RowNorm)


def test_adamw_head_is_fused_too():
    assert groups_by_name(pretraining_optimizer(Plain(), "adamw"))["head"]["fused"] is True


# Who owns what


@every_head
def test_every_trainable_parameter_is_in_the_group_of_its_role(head):
    chain = pretraining_optimizer(RawPositions(), head)
    groups = names_by_group(chain)
    assert list(groups) == ["matrix", "embedding", "vector", "head"]
    assert groups["head"] == ["lm_head.weight"]
    assert groups["embedding"] == ["embed.weight"]
    assert "positions" in groups["vector"]
    assert set(groups["matrix"]) == {
        "blocks.0.mix",
        *(f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")),
    }


@every_head
def test_frozen_parameters_are_left_out(head):
    model = Plain()
    model.embed.requires_grad_(False)
    model.norm.requires_grad_(False)
    groups = names_by_group(pretraining_optimizer(model, head))
    assert "embedding" not in groups
    assert "norm.weight" not in groups["vector"]


@every_head
def test_model_without_blocks_and_vectors_has_only_the_rest(head):
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9, bias=False))
    assert list(names_by_group(pretraining_optimizer(model, head))) == ["embedding", "head"]
    model[0].requires_grad_(False)
    assert list(names_by_group(pretraining_optimizer(model, head))) == ["head"]


@every_head
@pytest.mark.parametrize(
    ("tied", "groups"), [("head", ["matrix", "vector", "head"]), ("embedding", ["matrix", "embedding", "vector"])]
)
def test_tied_weight_is_moved_by_the_optimizer_it_is_given_to(tied, groups, head):
    chain = pretraining_optimizer(Tied(), head, tied=tied)
    assert list(names_by_group(chain)) == groups
    assert names_by_group(chain)[tied] == ["embed.weight"]


def test_rates_and_decay_can_be_others():
    chain = pretraining_optimizer(
        Plain(), "adamw", head_lr=1e-4, matrix_lr=2e-4, embedding_lr=3e-4, weight_decay=0.02, muon={"ns_steps": 3}
    )
    groups = groups_by_name(chain)
    assert {name: group["lr"] for name, group in groups.items()} == {
        "matrix": 2e-4,
        "embedding": 3e-4,
        "vector": 3e-4,
        "head": 1e-4,
    }
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "matrix": 0.02,
        "embedding": 0.02,
        "vector": 0.0,
        "head": 0.02,
    }
    assert groups["matrix"]["ns_steps"] == 3


def test_head_rate_of_rownorm_can_be_another_and_zero():
    for lr in (0.25, 0.0):
        assert groups_by_name(pretraining_optimizer(Plain(), head_lr=lr))["head"]["lr"] == lr


def test_head_and_exceptions_reach_the_roles():
    chain = pretraining_optimizer(
        Square(head_name="last"), head_module="blocks.0", roles={"last.weight": "vector", "blocks.0.bias": "vector"}
    )
    groups = names_by_group(chain)
    assert groups["head"] == ["blocks.0.weight"]
    assert "last.weight" in groups["vector"]


def test_head_with_vectors_in_its_group_takes_its_rate_from_the_matrix():
    chain = pretraining_optimizer(Plain(d=6), "adamw", roles={"norm.weight": "head"})
    assert groups_by_name(chain)["head"]["lr"] == pytest.approx(2.048 / 6)


def test_description_names_every_optimizer_and_group():
    out = io.StringIO()
    pretraining_optimizer(Plain()).describe(file=out)
    for word in ("Muon", "AdamW", "RowNorm", "matrix", "embedding", "vector", "head", "lm_head.weight", "0.008"):
        assert word in out.getvalue()


def test_description_does_not_break_a_name():
    out = io.StringIO()
    pretraining_optimizer(RawPositions()).describe(file=out)
    for name in ("blocks.*.up.weight", "blocks.*.down.weight", "blocks.*.norm.bias"):
        assert name in out.getvalue()


# It trains


@every_head
@pytest.mark.parametrize("kind", [Plain, HuggingFace, RawPositions])
def test_loss_falls(kind, head):
    model = seeded(kind, d=16)
    chain = pretraining_optimizer(model, head)
    scheduler = warmup_cosine(chain, 30)
    losses = []
    for _ in range(30):
        chain.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        chain.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


@every_head
def test_every_parameter_moves(head):
    model = seeded(RawPositions)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chain = pretraining_optimizer(model, head)
    for seed in range(2):
        chain.zero_grad()
        loss_of(model, seed).backward()
        chain.step()
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name


# What is refused


@pytest.mark.parametrize("head", ["muon", "RowNorm", None, ""])
def test_unknown_head_is_refused_in_one_sentence(head):
    with pytest.raises(ValueError, match=rf'\Ahead must be "rownorm" or "adamw", got {head!r}\Z'):
        pretraining_optimizer(Plain(), head)


@every_head
def test_frozen_head_is_refused_in_one_sentence(head):
    model = Plain()
    model.lm_head.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\Athe LM head is frozen: .*\Z"):
        pretraining_optimizer(model, head)


@every_head
def test_tied_model_is_refused_in_one_sentence(head):
    with pytest.raises(ValueError, match=r"\A'lm_head' and an embedding share one weight.*\Z"):
        pretraining_optimizer(Tied(), head)


def test_vector_among_the_matrices_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"\AMuon moves matrices, and parameter 'norm.weight' \(6,\) is none: .*\Z"):
        pretraining_optimizer(Plain(), roles={"norm.weight": "matrix"})
