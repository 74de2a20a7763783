"""How a model makes logits of its head's output: read from its config, and measured, on models of transformers."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from hilbert_monitor.monitor.logits import LogitTransform, explain_logits, logit_transform
from torch import nn

from tests.support.causal_models import causal_model

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "Granite": ({"logits_scaling": 8.0}, 0.125, None),
    "Gemma2": ({"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}, 1.0, 3.0),
    "Llama": ({}, 1.0, None),
    "HyperCLOVAX": ({"logits_scaling": 0.25}, 0.25, None),
    "MiniCPM3": ({}, 1.0, None),
}
each_model = pytest.mark.parametrize("name", MODELS)


def tiny(name):
    """A model with random weights, large enough that its logits reach the cap."""
    made = causal_model(name, **SIZES, **MODELS[name][0]).eval()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        made.get_output_embeddings().weight.normal_(std=0.5)
    return made


@torch.no_grad()
def outputs(model, dtype=torch.float32):
    """The head's output and the logits of a batch."""
    seen = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, inputs, output: seen.append(output))
    tokens = torch.randint(97, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=tokens).logits
    handle.remove()
    return seen[0].clone(), logits


@each_model
def test_the_config_gives_what_the_model_does(name):
    model, (_, scale, cap) = tiny(name), MODELS[name]
    transform = logit_transform(model)
    x, logits = outputs(model)
    assert transform.scale == pytest.approx(scale)
    assert transform.softcap == cap
    assert (transform.source != "") == (scale != 1 or cap is not None)
    torch.testing.assert_close(transform.apply(x), logits, rtol=1e-5, atol=1e-5)


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_batch_shows_what_the_model_does(name, dtype):
    model, (_, scale, cap) = tiny(name), MODELS[name]
    x, logits = outputs(model, dtype)
    rel = 1e-4 if dtype == torch.float32 else 0.02
    transform = explain_logits(x, logits)
    assert transform.scale == pytest.approx(scale, rel=rel)
    assert transform.softcap == (None if cap is None else pytest.approx(cap, rel=rel))


class Wrapper(nn.Module):
    def __init__(self, model, **fields):
        super().__init__()
        self.model = model
        for name, value in fields.items():
            setattr(self, name, value)


def test_a_wrapped_model_is_read_and_a_config_beside_the_head_is_not():
    model = tiny("Granite")
    head = model.get_output_embeddings()
    assert logit_transform(Wrapper(model), head).scale == 0.125
    assert logit_transform(Wrapper(model, config={"learning_rate": 3}), head).scale == 0.125
    other = nn.Linear(4, 4)
    both = nn.ModuleList([model, Wrapper(other)])
    assert logit_transform(both, other) == LogitTransform()


def with_config(config):
    return Wrapper(nn.Linear(3, 5), config=config)


@pytest.mark.parametrize(
    ("config", "scale", "cap"),
    [
        (SimpleNamespace(model_type="x", text_config=SimpleNamespace(final_logit_softcapping=30.0)), 1.0, 30.0),
        ({"model_type": "granite4_vision", "text_config": {"logits_scaling": 4}}, 0.25, None),
        (SimpleNamespace(model_type="falcon_h1", lm_head_multiplier=0.5), 0.5, None),
        (SimpleNamespace(model_type="cohere", logit_scale=torch.tensor(0.5)), 0.5, None),
        ({"model_type": "muse_spark", "output_multiplier": 0.2, "final_logit_softcapping": 20.0}, 0.2, 20.0),
        ({"model_type": "recurrent_gemma", "logits_soft_cap": 30}, 1.0, 30.0),
        ({"model_type": "mpt", "logit_scale": "inv_sqrt_d_model"}, 1.0, None),
        ({"model_type": "minicpm3", "logits_scaling": 10.0}, 1.0, None),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, 1.0, None),
        ({"model_type": "cohere", "logit_scale": 1}, 1.0, None),
    ],
)
def test_configs_of_every_form_are_read(config, scale, cap):
    transform = logit_transform(with_config(config))
    assert (transform.scale, transform.softcap) == (scale, cap)


@pytest.mark.parametrize(
    ("config", "phrase"),
    [
        ({"model_type": "new", "logits_scaling": 8.0}, "unknown for the model type 'new'"),
        ({"model_type": "cohere", "logit_scale": "auto"}, "logit_scale of the model's config is 'auto'"),
        ({"model_type": "granite", "logits_scaling": 0}, "is 0, not a number other than zero"),
        ({"model_type": "granite", "logits_scaling": math.nan}, "is nan, not"),
        ({"model_type": "cohere", "logit_scale": True}, "is True, not"),
        ({"model_type": "gemma2", "final_logit_softcapping": -3.0}, "is -3.0, not a positive number"),
        ({"model_type": "gemma2", "final_logit_softcapping": [3.0]}, r"is \[3.0\], not a positive number"),
    ],
)
def test_a_field_that_cannot_be_used_leaves_the_logits_alone_and_is_named(config, phrase):
    transform = logit_transform(with_config(config))
    assert (transform.scale, transform.softcap) == (1.0, None)
    assert re.search(phrase, transform.source)


def test_a_model_without_a_config_or_with_one_that_fails_has_no_transform():
    class Broken:
        @property
        def logit_scale(self):
            raise RuntimeError("not yet")

    assert logit_transform(nn.Linear(3, 5)) == LogitTransform()
    assert logit_transform(with_config(Broken())) == LogitTransform()


@pytest.mark.parametrize("scale", [-2.0, 0.01, 1.0, 40.0])
@pytest.mark.parametrize("cap", [None, 2.0, 30.0])
def test_scale_and_cap_are_found_from_the_numbers_alone(scale, cap):
    x = 3 * torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    logits = LogitTransform(scale, cap).apply(x)
    logits[:, -3:] = -torch.inf  # padding of the vocabulary
    transform = explain_logits(x, logits)
    torch.testing.assert_close(transform.apply(x)[:, :-3], logits[:, :-3], rtol=1e-4, atol=1e-4)
    if cap is None:
        assert transform.scale == pytest.approx(scale, rel=1e-6)
        assert transform.softcap is None


def test_what_is_neither_a_scale_nor_a_cap_is_not_explained():
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    assert explain_logits(x, x.log_softmax(-1)) is None
    assert explain_logits(x, torch.randn(4, 50)) is None
    assert explain_logits(x, x.square()) is None
    assert explain_logits(x, x[:, :-1]) is None
    assert explain_logits(x, torch.zeros_like(x)) is None
    assert explain_logits(x, torch.full_like(x, torch.nan)) is None
    assert explain_logits(x, x.argmax(-1, keepdim=True).expand_as(x)) is None
