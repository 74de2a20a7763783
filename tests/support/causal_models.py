"""Tiny causal language models of transformers, made of their configurations: nothing is downloaded."""

import pytest
import torch


def causal_model(name, **config):
    """The model of a name such as Llama, its weights a function of its configuration; skips one that is not there.

    Names are asked for one by one: `dir(transformers)` takes a second.
    """
    transformers = pytest.importorskip("transformers")
    models = (getattr(transformers, f"{name}{end}", None) for end in ("ForCausalLM", "LMHeadModel"))
    model, settings = next(filter(None, models), None), getattr(transformers, f"{name}Config", None)
    if model is None or settings is None:
        pytest.skip(f"this version of transformers has no {name}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model(settings(**config))
