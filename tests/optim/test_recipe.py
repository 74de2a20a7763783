"""The recipe: the roles of a decoder's parameters, the paper's optimizers and numbers, and the schedule."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hilbert_monitor.optim import (
    Muon,
    RowNorm,
    find_head,
    parameter_roles,
    pretraining_optimizer,
    warmup_cosine,
    warmup_cosine_scale,
)
from tests.support.decoders import HuggingFace, Plain, RawPositions, Square, Tied, Wrapper, loss_of, seeded
from tests.support.draws import draws

every_head = pytest.mark.parametrize("head", ["rownorm", "adamw"])

# The optimizers


def groups_of(chain):
    return {group["name"]: group for group in chain.param_groups}


def names_of(chain):
    return {group["name"]: group["param_names"] for group in chain.param_groups}


@pytest.mark.parametrize(
    ("d", "rownorm", "adamw"),
    [(512, "3.200e-03", "4.000e-03"), (768, "2.133e-03", "2.667e-03"), (1024, "1.600e-03", "2.000e-03")],
)
def test_the_numbers_are_the_papers(d, rownorm, adamw):
    for head, printed in (("rownorm", rownorm), ("adamw", adamw)):
        with torch.device("meta"):
            chain = pretraining_optimizer(Plain(V=50_304, d=d, blocks=1), head)
        groups = groups_of(chain)
        owners = {name: type(chain.owner(group["params"][0])) for name, group in groups.items()}
        last = RowNorm if head == "rownorm" else torch.optim.AdamW
        assert owners == {"matrix": Muon, "embedding": torch.optim.AdamW, "vector": torch.optim.AdamW, "head": last}
        matrix = groups["matrix"]
        assert (matrix["lr"], matrix["momentum"], matrix["weight_decay"]) == (8e-3, 0.95, 0.1)
        assert (matrix["ns_steps"], matrix["eps"], matrix["nesterov"]) == (5, 1e-5, True)
        assert matrix["ns_dtype"] == "float32"
        for name, decay in (("embedding", 0.1), ("vector", 0.0)):
            group = groups[name]
            assert (group["lr"], group["betas"], group["eps"]) == (4e-3, (0.9, 0.999), 1e-10)
            assert group["weight_decay"] == decay
        group = groups["head"]
        assert f"{group['lr']:.3e}" == printed
        if head == "rownorm":
            assert (group["momentum"], group["eps"], group["weight_decay"]) == (0.95, 1e-8, 0)
            assert group["center"] == "none"
        else:
            assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-10, 0.1)
    assert isinstance(pretraining_optimizer(Plain()).optimizers[-1], RowNorm), "the default"


def test_adamw_is_fused_where_torch_has_a_kernel():
    for device, fused in (("cpu", True), ("meta", False)):
        with torch.device(device):
            chain = pretraining_optimizer(Plain(), "adamw")
        assert {bool(group["fused"]) for group in chain.param_groups if "fused" in group} == {fused}


def test_frozen_and_absent_parameters_have_no_group():
    model = Plain()
    model.embed.requires_grad_(False)
    model.norm.requires_grad_(False)
    groups = names_of(pretraining_optimizer(model))
    assert "embedding" not in groups
    assert "norm.weight" not in groups["vector"]
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9, bias=False))
    assert list(names_of(pretraining_optimizer(model))) == ["embedding", "head"]


def test_rates_decay_and_further_arguments_can_be_others():
    rates = {"head_lr": 1e-4, "matrix_lr": 2e-4, "embedding_lr": 3e-4, "weight_decay": 0.02}
    groups = groups_of(pretraining_optimizer(Plain(), "adamw", **rates, muon={"ns_steps": 3}))
    expected = {"matrix": (2e-4, 0.02), "embedding": (3e-4, 0.02), "vector": (3e-4, 0.0), "head": (1e-4, 0.02)}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == expected
    assert groups["matrix"]["ns_steps"] == 3
    head = groups_of(pretraining_optimizer(Plain(), head_lr=0.0, rownorm={"rounding": "compensated"}))["head"]
    assert (head["lr"], head["rounding"]) == (0.0, "compensated")


def test_head_with_vectors_in_its_group_takes_its_rate_from_the_matrix():
    chain = pretraining_optimizer(Plain(d=6), "adamw", roles={"norm.weight": "head"})
    assert groups_of(chain)["head"]["lr"] == pytest.approx(2.048 / 6)


@every_head
@pytest.mark.parametrize("kind", [Plain, HuggingFace, RawPositions])
def test_loss_falls_and_every_parameter_moves(kind, head):
    model = seeded(kind, d=16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    chain = pretraining_optimizer(model, head)
    scheduler, losses = warmup_cosine(chain, 30), []
    for _ in range(30):
        chain.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        chain.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


def frozen_head():
    model = Plain()
    model.lm_head.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "arguments", "sentence"),
    [
        (Plain, {"head": "muon"}, r'head must be "rownorm" or "adamw", got \'muon\''),
        (Plain, {"head": None}, r'head must be "rownorm" or "adamw", got None'),
        (frozen_head, {}, "the LM head is frozen: .*"),
        (Tied, {}, "'lm_head' and an embedding share one weight, .* untie them, or pass.*"),
        (Tied, {"tied": "both"}, "'lm_head' and an embedding share one weight.*"),
        (Plain, {"roles": {"norm.weight": "matrix"}}, r"Muon moves matrices, and parameter 'norm.weight' \(6,\) is .*"),
        (Plain, {"roles": {"norm.*": "norm"}}, r"a role is one of matrix, .*, head, got 'norm' for 'norm.\*'"),
        (Plain, {"roles": {"layers.*": "vector"}}, r"roles names 'layers.\*', and the model has no such trainable p.*"),
        (Plain, {"roles": {"EMBED.weight": "vector"}}, "roles names 'EMBED.weight', and .*"),
        (frozen_head, {"roles": {"lm_head.weight": "vector"}}, "roles names 'lm_head.weight', and .*"),
        (Plain, {"head_module": ""}, "head_module must name a module with a weight, got ''"),
        (Plain, {"head_module": "blocks"}, "head_module must name a module with a weight, got 'blocks'"),
        (
            Plain,
            {"head_module": "lm_head.weight"},
            "head_module must name a module with a weight, got 'lm_head.weight'",
        ),
    ],
)
def test_a_bad_recipe_is_refused_in_one_sentence(make, arguments, sentence):
    with pytest.raises(ValueError, match=rf"\A{sentence}\Z"):
        pretraining_optimizer(make(), **arguments)


# Roles

BLOCKS = {
    f"blocks.{i}.{name}.weight": "vector" if name == "norm" else "matrix"
    for i in (0, 1)
    for name in ("norm", "up", "down")
}
PLAIN = {"embed.weight": "embedding", **BLOCKS, "norm.weight": "vector", "lm_head.weight": "head"}


def of_role(roles, role):
    return [name for name, its in roles.items() if its == role]


def with_head_called(name, **kwargs):
    model = Plain(**kwargs)
    head = model.lm_head
    del model.lm_head
    model.add_module(name, head)
    return model


def test_plain_decoder_on_any_device():
    assert parameter_roles(Plain()) == PLAIN
    assert parameter_roles(Plain(head_rows=64)) == PLAIN
    with torch.device("meta"):
        assert parameter_roles(Plain()) == PLAIN


def test_roles_of_unusual_parameters_come_in_the_models_order():
    model = RawPositions()
    model.bags = nn.EmbeddingBag(9, 6)
    model.blocks[0].conv = nn.Conv1d(6, 6, 3)
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    assert of_role(roles, "embedding") == ["embed.weight", "bags.weight"]
    assert of_role(roles, "tensor") == ["blocks.0.conv.weight"]
    assert {role for name, role in roles.items() if name.endswith("bias") or "norm" in name} == {"vector"}
    assert roles["positions"] == roles["gate.weight"] == "vector"
    assert roles["blocks.0.mix"] == "matrix"


def test_head_that_the_model_names_wins_over_shapes_and_names():
    model = HuggingFace(head_rows=40)
    expected = {**PLAIN, "projection.weight": "head"}
    del expected["lm_head.weight"]
    assert parameter_roles(model) == expected
    model.head = nn.Linear(6, 23)
    assert find_head(model) == "projection"


def test_useless_answer_about_the_head_is_passed_over():
    model = with_head_called("classifier")
    for answer in (None, "lm_head", nn.Linear(6, 23), model.blocks):
        model.get_output_embeddings = lambda answer=answer: answer
        assert find_head(model) == "classifier"


@pytest.mark.parametrize("name", ["lm_head", "head", "unembed", "output", "embed_out", "to_logits", "last"])
def test_head_among_matrices_of_one_shape_is_found_by_its_name_or_outside_the_blocks(name):
    roles = parameter_roles(Square(head_name=name))
    assert of_role(roles, "head") == [f"{name}.weight"]
    assert of_role(roles, "matrix") == ["blocks.0.weight", "blocks.1.weight"]
    assert of_role(roles, "embedding") == ["embed.weight"]


def with_module(model, name, module):
    (model.blocks[0] if name == "blocks.0.head" else model).add_module(name.rpartition(".")[2], module)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (with_head_called("classifier"), "classifier"),  # as many rows as the embedding
        (with_head_called("classifier", head_rows=64), "classifier"),  # the most rows
        (with_head_called("head", head_rows=23, d=64), "head"),  # fewer rows than a block has
        (with_module(Square(head_name="unembed"), "other", nn.Linear(6, 6)), "unembed"),
        (with_module(with_head_called("decoder"), "head", nn.Linear(6, 2)), "decoder"),  # too few rows for the tokens
        (with_module(with_head_called("decoder", head_rows=32, d=8, blocks=1), "pos", nn.Embedding(16, 8)), "decoder"),
        (with_module(with_head_called("head", V=20, d=16, blocks=1), "pos", nn.Embedding(32, 16)), "head"),
        (with_module(with_head_called("lm_head", V=20, d=32), "pos", nn.Embedding(32, 32)), "lm_head"),
        (with_module(Plain(), "blocks.0.head", nn.Linear(6, 5, bias=False)), "lm_head"),
        (nn.ModuleDict({"teacher": Plain().requires_grad_(False), "student": Plain()}), "student.lm_head"),
    ],
)
def test_head_is_found(model, expected):
    assert find_head(model) == expected


def headless():
    model = with_head_called("decoder")
    del model.decoder
    model.proj_in = nn.Linear(6, 6)
    return model


@pytest.mark.parametrize(
    ("model", "candidates"),
    [
        (headless(), ".*"),
        (with_module(Square(head_name="last"), "other", nn.Linear(6, 6)), ".*last, other"),
        (nn.LayerNorm(4), r"no module with a matrix: is the model sharded\?"),
        (nn.Embedding(5, 4), r"no module with a matrix: is the model sharded\?"),
    ],
    ids=["headless", "rivals", "norm", "embedding"],
)
def test_head_that_cannot_be_told_is_refused_with_the_candidates(model, candidates):
    sentence = rf"\Acould not tell .* \(found {candidates}\): pass its name \(head=... .*, head_module=... .*\)\Z"
    with pytest.raises(ValueError, match=sentence):
        parameter_roles(model)


@pytest.mark.parametrize("wrapper", ["model", "_orig_mod"])
@pytest.mark.parametrize("kind", [Plain, HuggingFace, RawPositions, Square])
def test_a_wrapper_changes_only_the_names(kind, wrapper):
    model = kind()
    wrapped = parameter_roles(Wrapper(model, wrapper))
    assert wrapped == {f"{wrapper}.{name}": role for name, role in parameter_roles(model).items()}
    assert find_head(Wrapper(model, wrapper)) == f"{wrapper}.{find_head(model)}"


def test_the_caller_can_name_the_head_and_exceptions():
    roles = parameter_roles(Plain(), head_module="blocks.1.up")
    assert of_role(roles, "head") == ["blocks.1.up.weight"]
    assert roles["lm_head.weight"] == "matrix"
    model = nn.Module()
    model.embed, model.U = nn.Embedding(23, 6), nn.Parameter(torch.zeros(23, 6))
    assert parameter_roles(model, roles={"U": "head"}) == {"U": "head", "embed.weight": "embedding"}
    roles = parameter_roles(Plain(), roles={"blocks.*": "vector", "blocks.0.up.weight": "matrix"})
    assert of_role(roles, "matrix") == ["blocks.0.up.weight"]  # the later exception wins


@pytest.mark.parametrize("tied", ["head", "embedding"])
def test_tied_weight_takes_the_role_it_is_given(tied):
    assert names_of(pretraining_optimizer(Tied(), tied=tied))[tied] == ["embed.weight"]
    assert parameter_roles(Tied(), tied=tied) == {"embed.weight": tied, **BLOCKS, "norm.weight": "vector"}
    assert parameter_roles(Plain(), tied=tied) == PLAIN


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("module", [nn.utils.parametrizations, nn.utils], ids=["new", "old"])
@pytest.mark.parametrize("norm", ["spectral_norm", "weight_norm"])
def test_weights_that_are_computed_are_not_computed_for_the_roles_and_refused_as_head(module, norm):
    model, other, norm = Plain(), Plain(), getattr(module, norm)
    norm(model.blocks[0].up), norm(model.embed), norm(other.lm_head)
    before = [{name: buffer.clone() for name, buffer in m.named_buffers()} for m in (model, other)]
    assert find_head(model) == "lm_head"
    roles = parameter_roles(model)
    assert of_role(roles, "head") == ["lm_head.weight"]
    assert {name.partition(".")[0] for name in of_role(roles, "embedding")} == {"embed"}
    for head_module in (None, "lm_head"):
        with pytest.raises(TypeError, match=r"\Athe head's weight is computed by a parametrization \(\w*Linear\): 'lm"):
            parameter_roles(other, head_module=head_module)
    for m, buffers in zip((model, other), before, strict=True):
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in m.named_buffers())


def test_a_head_that_borrows_the_embeddings_weight_by_a_property_is_found():
    class Borrowing(nn.Module):
        def __init__(self, embed):
            super().__init__()
            self.borrowed = [embed]

        @property
        def weight(self):
            return self.borrowed[0].weight

    model = Plain()
    model.lm_head = Borrowing(model.embed)
    assert find_head(model) == "lm_head"
    assert of_role(parameter_roles(model, tied="head"), "head") == ["embed.weight"]


# The schedule

examples = settings(max_examples=draws(100), deadline=None)


def expected_scale(t, T, twentieths=2, floor=0.1):
    """From the definition, with the warm-up in integers and the cosine as a square: (1 + cos 2a) / 2 = cos^2 a."""
    w = T * twentieths // 20
    if t < w:
        return t / w
    return floor if t >= T - 1 else floor + (1 - floor) * math.cos(math.pi * (t - w) / (T - 1 - w) / 2) ** 2


@examples
@given(st.integers(1, 3000), st.sampled_from([0, 2, 5, 10]), st.sampled_from([0.05, 0.1, 0.3]), st.data())
def test_scale_is_linear_from_zero_then_a_cosine_to_exactly_the_floor(T, twentieths, floor, data):
    def scale(t):
        return warmup_cosine_scale(t, total_steps=T, warmup=twentieths / 20, floor=floor)

    t, w = data.draw(st.integers(0, T + 20)), T * twentieths // 20
    assert scale(t) == pytest.approx(expected_scale(t, T, twentieths, floor), rel=1e-12, abs=1e-15)
    assert scale(0) == (0 if w else 1 if T > 1 else floor)
    assert scale(w) == (1 if w < T - 1 else floor)
    assert {scale(t) for t in (T - 1, T, T + 1, 10 * T)} == {floor}
    scales = [scale(t) for t in range(T)]
    assert all(a < b for a, b in pairwise(scales[: w + 1]))
    assert all(a > b for a, b in pairwise(scales[w:]))


@pytest.mark.parametrize(("T", "w"), [(7_083, 708), (14_464, 1_446), (24_406, 2_440)])
def test_schedule_of_the_papers_runs(T, w):
    def scale(t):
        return warmup_cosine_scale(t, total_steps=T)

    assert [scale(0), scale(1), scale(w - 1), scale(w), scale(T - 1)] == [0, 1 / w, (w - 1) / w, 1, 0.1]
    assert scale(w + (T - 1 - w) / 2) == pytest.approx(0.55, rel=1e-12)
    assert scale(T - 2) > 0.1


def test_peak_that_is_also_the_last_update_is_the_floor_and_a_share_is_not_rounded_down():
    scales = [warmup_cosine_scale(t, total_steps=4, warmup=0.75, floor=0.5) for t in range(5)]
    assert scales == [0, 1 / 3, 2 / 3, 0.5, 0.5]
    assert warmup_cosine_scale(28, total_steps=100, warmup=0.29) == 28 / 29


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("T", [1, 2, 9, 40])
def test_update_t_is_made_with_the_scale_of_t_for_every_group(T, kind):
    peaks = 0.125, 2.0
    o = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))], "lr": kind(lr)} for lr in peaks])
    scheduler = warmup_cosine(o, T)
    for t in range(T + 3):
        expected = [lr * expected_scale(t, T) for lr in peaks]
        assert [float(group["lr"]) for group in o.param_groups] == pytest.approx(expected, rel=1e-6)
        assert isinstance(o.param_groups[0]["lr"], torch.Tensor) == (kind is torch.tensor)
        o.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("phrase", "arguments"),
    [
        ("total_steps must be a number of updates, at least 1, got 0.*", {"total_steps": 0}),
        ("total_steps must be a number of updates, at least 1, got -3.*", {"total_steps": -3}),
        ("warmup must be a share of the run, from 0 to below 1, got 2", {"total_steps": 10, "warmup": 2}),
        ("warmup must be a share of the run, from 0 to below 1, got nan", {"total_steps": 10, "warmup": math.nan}),
        ("floor must be between 0 and 1, got 1.5", {"total_steps": 10, "floor": 1.5}),
        ("floor must be between 0 and 1, got -1", {"total_steps": 10, "floor": -1}),
    ],
)
def test_impossible_schedule_is_refused_in_one_sentence(phrase, arguments):
    o = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    with pytest.raises(ValueError, match=rf"\A{phrase}\Z"):
        warmup_cosine(o, **arguments)
    assert o.param_groups[0]["lr"] == 0.5
