"""Roles: the head, the embeddings, the blocks' matrices and the rest, in any decoder, or as the caller names them."""

import pytest
import torch
from torch import nn

from hilbert_monitor.optim import find_head, parameter_roles
from tests.support.decoders import HuggingFace, Plain, RawPositions, Square, Tied, Wrapper

BLOCKS = {
    "blocks.0.norm.weight": "vector",
    "blocks.0.up.weight": "matrix",
    "blocks.0.down.weight": "matrix",
    "blocks.1.norm.weight": "vector",
    "blocks.1.up.weight": "matrix",
    "blocks.1.down.weight": "matrix",
    "norm.weight": "vector",
}
PLAIN = {"embed.weight": "embedding", **BLOCKS, "lm_head.weight": "head"}


def of_role(roles, role):
    return [name for name, its in roles.items() if its == role]


# Roles from the module tree


def test_plain_decoder():
    assert parameter_roles(Plain()) == PLAIN


def test_roles_come_in_the_models_order():
    model = RawPositions()
    assert list(parameter_roles(model)) == [name for name, _ in model.named_parameters()]


def test_biases_and_norms_are_vectors():
    roles = parameter_roles(Plain(bias=True))
    assert {name: role for name, role in roles.items() if not name.endswith("bias")} == PLAIN
    assert {role for name, role in roles.items() if name.endswith("bias") or "norm" in name} == {"vector"}


def test_head_is_the_module_that_the_model_names():
    model = HuggingFace(head_rows=40)
    assert find_head(model) == "projection"
    assert parameter_roles(model) == {"embed.weight": "embedding", **BLOCKS, "projection.weight": "head"}


def test_head_that_the_model_names_wins_over_shapes_and_names():
    class Misleading(HuggingFace):
        def __init__(self):
            super().__init__(head_rows=40)
            self.head = nn.Linear(6, 23)

    assert find_head(Misleading()) == "projection"


def with_head_called(name, **kwargs):
    model = Plain(**kwargs)
    head = model.lm_head
    del model.lm_head
    model.add_module(name, head)
    return model


@pytest.mark.parametrize("answer", [None, "lm_head", nn.Linear(6, 23)], ids=["none", "string", "stranger"])
def test_useless_answer_about_the_head_is_passed_over(answer):
    model = with_head_called("classifier")
    model.get_output_embeddings = lambda: answer
    assert find_head(model) == "classifier"


def test_answer_without_a_weight_is_passed_over():
    model = with_head_called("classifier")
    model.get_output_embeddings = lambda: model.blocks
    assert find_head(model) == "classifier"


def test_head_is_found_by_its_rows_whatever_its_name():
    assert find_head(with_head_called("classifier")) == "classifier"


@pytest.mark.parametrize("name", ["lm_head", "head", "unembed", "output", "embed_out", "to_logits"])
def test_head_among_matrices_of_one_shape_is_found_by_its_name(name):
    roles = parameter_roles(Square(head_name=name))
    assert of_role(roles, "head") == [f"{name}.weight"]
    assert of_role(roles, "matrix") == ["blocks.0.weight", "blocks.1.weight"]
    assert of_role(roles, "embedding") == ["embed.weight"]
    assert of_role(roles, "vector") == ["blocks.0.bias", "blocks.1.bias", f"{name}.bias"]


def test_head_among_matrices_of_one_shape_is_found_outside_the_blocks():
    assert of_role(parameter_roles(Square(head_name="last")), "head") == ["last.weight"]


def test_head_among_rivals_outside_the_blocks_is_found_by_its_name():
    model = Square(head_name="unembed")
    model.other = nn.Linear(6, 6)
    assert find_head(model) == "unembed"


def test_head_with_fewer_rows_than_a_block_is_found_by_its_name():
    assert find_head(with_head_called("head", head_rows=23, d=64)) == "head"


def test_a_module_called_head_with_too_few_rows_for_the_tokens_is_none():
    model = with_head_called("decoder")
    model.head = nn.Linear(6, 2)
    assert find_head(model) == "decoder"


def test_a_block_with_as_many_rows_as_there_are_positions_is_no_head():
    model = with_head_called("decoder", head_rows=32, d=8, blocks=1)
    model.positions = nn.Embedding(16, 8)
    assert find_head(model) == "decoder"


def test_a_head_that_is_no_module_is_not_guessed_at():
    model = with_head_called("decoder")
    del model.decoder
    model.proj_in = nn.Linear(6, 6)
    with pytest.raises(ValueError, match="could not tell which module is the LM head"):
        find_head(model)


def test_of_a_frozen_teacher_and_a_student_the_student_has_the_head():
    both = nn.ModuleDict({"teacher": Plain().requires_grad_(False), "student": Plain()})
    assert find_head(both) == "student.lm_head"


def test_a_parameter_can_be_the_head_without_a_module():
    model = nn.Module()
    model.embed, model.U = nn.Embedding(23, 6), nn.Parameter(torch.zeros(23, 6))
    assert parameter_roles(model, roles={"U": "head"}) == {"U": "head", "embed.weight": "embedding"}


def test_padded_head_without_a_heads_name_is_the_one_with_the_most_rows():
    assert find_head(with_head_called("classifier", head_rows=64)) == "classifier"


def test_padded_head_is_found_by_its_name():
    assert parameter_roles(Plain(head_rows=64)) == PLAIN


def test_head_named_in_a_block_is_no_rival_of_one_that_fits():
    model = Plain()
    model.blocks[0].head = nn.Linear(6, 5, bias=False)
    assert find_head(model) == "lm_head"


def test_raw_positions_are_a_vector_and_a_raw_matrix_in_a_block_is_a_matrix():
    roles = parameter_roles(RawPositions())
    assert roles["positions"] == "vector"
    assert roles["blocks.0.mix"] == "matrix"
    assert roles["lm_head.weight"] == "head"


def test_matrix_of_one_row_is_a_vector():
    assert parameter_roles(RawPositions())["gate.weight"] == "vector"


def test_every_embedding_is_one():
    model = Plain()
    model.positions = nn.Embedding(8, 6)
    model.bags = nn.EmbeddingBag(9, 6)
    assert of_role(parameter_roles(model), "embedding") == ["embed.weight", "positions.weight", "bags.weight"]


@pytest.mark.parametrize("name", ["lm_head", "head"])
@pytest.mark.parametrize(("d", "blocks"), [(16, 1), (32, 2)], ids=["one fits", "several fit"])
def test_context_longer_than_the_vocabulary_does_not_hide_the_head(d, blocks, name):
    model = with_head_called(name, V=20, d=d, blocks=blocks)
    model.positions = nn.Embedding(32, d)  # as many rows as matrices of the blocks have
    roles = parameter_roles(model)
    assert of_role(roles, "head") == [f"{name}.weight"]
    assert len(of_role(roles, "matrix")) == 2 * blocks


def test_weights_of_three_dimensions_are_tensors():
    model = Plain()
    model.blocks[0].conv = nn.Conv1d(6, 6, 3)
    assert parameter_roles(model)["blocks.0.conv.weight"] == "tensor"


@pytest.mark.parametrize("wrapper", ["model", "_orig_mod", "module"])
@pytest.mark.parametrize("kind", [Plain, HuggingFace, RawPositions, Square])
def test_a_wrapper_changes_only_the_names(kind, wrapper):
    model = kind()
    wrapped = parameter_roles(Wrapper(model, wrapper))
    assert wrapped == {f"{wrapper}.{name}": role for name, role in parameter_roles(model).items()}
    assert find_head(Wrapper(model, wrapper)) == f"{wrapper}.{find_head(model)}"


@pytest.mark.parametrize("frozen", ["embed.weight", "blocks.0.up.weight", "norm.weight", "lm_head.weight"])
def test_frozen_parameters_have_no_role(frozen):
    model = Plain()
    model.get_parameter(frozen).requires_grad_(False)
    assert parameter_roles(model) == {name: role for name, role in PLAIN.items() if name != frozen}


# Roles that the caller names, and refusals


def test_head_module_is_taken_at_its_word():
    roles = parameter_roles(Plain(), head_module="blocks.1.up")
    assert of_role(roles, "head") == ["blocks.1.up.weight"]
    assert roles["lm_head.weight"] == "matrix"


def test_exceptions_by_name_and_by_wildcard():
    model = RawPositions()
    plain = parameter_roles(model)
    roles = parameter_roles(model, roles={"positions": "embedding", "blocks.*.up.*": "vector"})
    changed = {name for name in plain if roles[name] != plain[name]}
    assert roles["positions"] == "embedding"
    assert changed == {"positions", "blocks.0.up.weight", "blocks.1.up.weight"}
    assert {roles[name] for name in changed} == {"embedding", "vector"}


def test_later_exception_wins():
    roles = parameter_roles(Plain(), roles={"blocks.*": "vector", "blocks.0.up.weight": "matrix"})
    assert of_role(roles, "matrix") == ["blocks.0.up.weight"]


def test_names_are_matched_with_their_case():
    with pytest.raises(ValueError, match="no such trainable parameter"):
        parameter_roles(Plain(), roles={"EMBED.weight": "vector"})


@pytest.mark.parametrize("tied", ["head", "embedding"])
def test_tied_weight_takes_the_role_it_is_given(tied):
    assert parameter_roles(Tied(), tied=tied) == {"embed.weight": tied, **BLOCKS}


@pytest.mark.parametrize("tied", ["head", "embedding"])
def test_tied_says_nothing_about_an_untied_model(tied):
    assert parameter_roles(Plain(), tied=tied) == PLAIN


# What is refused


@pytest.mark.parametrize("tied", [None, "both"])
def test_tied_weights_are_refused_in_one_sentence(tied):
    with pytest.raises(ValueError, match=r"\A'lm_head' and an embedding share one weight, .* untie them, or pass.*\Z"):
        parameter_roles(Tied(), tied=tied)


@pytest.mark.parametrize("name", ["", "heads", "blocks", "blocks.7", "lm_head.weight"])
def test_head_module_without_a_weight_is_refused_in_one_sentence(name):
    with pytest.raises(ValueError, match=rf"\Ahead_module must name a module with a weight, got '{name}'\Z"):
        parameter_roles(Plain(), head_module=name)


def test_unknown_role_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"\Aa role is one of matrix, .*, head, got 'norm' for 'norm.\*'\Z"):
        parameter_roles(Plain(), roles={"norm.*": "norm"})


def test_pattern_that_matches_nothing_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"\Aroles names 'layers.\*', and the model has no such trainable parameter\Z"):
        parameter_roles(Plain(), roles={"layers.*": "vector"})


def test_pattern_that_matches_only_frozen_parameters_is_refused():
    model = Plain()
    model.embed.requires_grad_(False)
    with pytest.raises(ValueError, match="no such trainable parameter"):
        parameter_roles(model, roles={"embed.weight": "vector"})


def test_ambiguous_head_is_refused_with_the_candidates():
    model = Square(head_name="last")
    model.other = nn.Linear(6, 6)
    sentence = r"\Acould not tell .* \(found .*last, other\): pass its name \(head=... .*, head_module=... .*\)\Z"
    with pytest.raises(ValueError, match=sentence):
        parameter_roles(model)
    assert parameter_roles(model, head_module="other")["other.weight"] == "head"


@pytest.mark.parametrize("model", [nn.LayerNorm(4), nn.ReLU(), nn.Embedding(5, 4)], ids=["norm", "empty", "embedding"])
def test_model_without_a_head_is_refused_in_one_sentence(model):
    with pytest.raises(
        ValueError, match=r"\Acould not tell which .* \(found no module with a matrix: is the model sharded\?\): .*\Z"
    ):
        find_head(model)


def test_model_on_meta_has_the_same_roles():
    with torch.device("meta"):
        assert parameter_roles(Plain()) == PLAIN


# Weights that are computed


def spectral_buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


OLD_AND_NEW = {
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", OLD_AND_NEW.values(), ids=OLD_AND_NEW)
def test_looking_for_the_head_and_the_roles_computes_no_weight(norm):
    model = Plain()
    norm(model.blocks[0].up), norm(model.embed)
    before = spectral_buffers(model)
    assert find_head(model) == "lm_head"
    roles = parameter_roles(model)
    assert of_role(roles, "head") == ["lm_head.weight"]
    assert {name.partition(".")[0] for name in of_role(roles, "embedding")} == {"embed"}
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", OLD_AND_NEW.values(), ids=OLD_AND_NEW)
@pytest.mark.parametrize("head_module", [None, "lm_head"])
def test_a_head_whose_weight_is_computed_is_refused_in_one_sentence(norm, head_module):
    model = Plain()
    norm(model.lm_head)
    before = spectral_buffers(model)
    with pytest.raises(
        TypeError, match=r"\Athe head's weight is computed by a parametrization \(\w*Linear\): 'lm_head'"
    ):
        parameter_roles(model, head_module=head_module)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


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
