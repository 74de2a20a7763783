"""Causal language models of transformers, each a tiny one made of its configuration: D(S), the panel, and the bits."""

import copy
import logging

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, RMSprop

from hilbert_monitor import ChainedOptimizer, Muon, Probe, RowNorm
from hilbert_monitor.monitor.panel import Panel
from tests.support.causal_models import causal_model
from tests.support.references import all_pairs_diameter, deltas
from tests.support.tried import tried

pytest.importorskip("transformers")
logging.getLogger("transformers").setLevel(logging.ERROR)

V, D, UPDATES, POSITIONS, LR, DECAY = 97, 32, 2, 20, 1e-2, 0.1
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Apertus": {},
    "Arcee": {},
    "BioGpt": {},
    "BitNet": {},
    "Bloom": {},
    "Cohere": {},
    "Cohere2": {},
    "CTRL": {},
    "DiffLlama": {},
    "Doge": {},
    "Ernie4_5": {},
    "Exaone4": {},
    "Falcon": {},
    "FalconMamba": {},
    "GPT2": {},
    "GPTBigCode": {},
    "GPTJ": {"rotary_dim": 8},
    "GPTNeo": {"attention_types": [[["local"], 1]]},
    "GPTNeoX": {},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0},
    "Glm": {"head_dim": 16},
    "Glm4": {"head_dim": 16},
    "GptOss": {"head_dim": 16, "num_local_experts": 4},
    "Granite": {"logits_scaling": 4.0},
    "GraniteMoe": {"num_local_experts": 4},
    "Helium": {"head_dim": 16},
    "HunYuanDenseV1": {"head_dim": 16},
    "HyperCLOVAX": {"logits_scaling": 0.5},
    "JetMoe": {"kv_channels": 16},
    "Lfm2": {},
    "Llama": {},
    "Mamba": {},
    "MiniCPM3": {},
    "Mistral": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4},
    "Mpt": {},
    "NanoChat": {},
    "Nemotron": {},
    "OPT": {"word_embed_proj_dim": D},
    "Olmo": {},
    "Olmo2": {},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "OpenAIGPT": {},
    "Persimmon": {},
    "Phi": {},
    "Phi3": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Rwkv": {"num_hidden_layers": 2},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {},
    "XGLM": {},
}
"""What a configuration needs besides SIZES."""


def with_rest(make):
    """An optimizer of ours for the head, beside AdamW for the rest."""

    def chain(model):
        head = model.get_output_embeddings().weight
        rest = [p for p in model.parameters() if p is not head]
        return ChainedOptimizer(AdamW(rest, lr=LR, weight_decay=0.0), make([head]))

    return chain


OPTIMIZERS = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=LR, weight_decay=DECAY),
    "SGD": lambda model: SGD(model.parameters(), lr=LR, momentum=0.9),
    "RowNorm": with_rest(lambda head: RowNorm(head, lr=LR)),
    "Adam": lambda model: Adam(model.parameters(), lr=LR),
    "Muon": with_rest(lambda head: Muon(head, lr=LR, weight_decay=0.0)),
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=1e-3),
}
PRECISIONS = {"fp32": None, "bf16-mixed": torch.bfloat16}


def made(name):
    """A model with random weights, in training mode."""
    return causal_model(name, **(SIZES | MODELS[name])).train()


def autocast(precision):
    return torch.autocast("cpu", PRECISIONS[precision] or torch.bfloat16, enabled=PRECISIONS[precision] is not None)


def texts():
    return [torch.randint(3, V, (2, 12), generator=torch.Generator().manual_seed(k)) for k in range(UPDATES)]


def train(model, optimizer, precision, probe=None):
    """Train; return the last record and the last increment of the head and of its bias, in fp64 without decay."""
    torch.manual_seed(1)
    head, record = model.get_output_embeddings(), None
    parts = [head.weight] if head.bias is None else [head.weight, head.bias]
    kept = 1 - LR * DECAY if type(optimizer) is AdamW else 1
    for ids in texts():
        optimizer.zero_grad()
        with autocast(precision):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        before = [p.detach().double().clone() for p in parts]
        optimizer.step()
        record = probe.record() if probe else None
    changes = [p.detach().double() - kept * old for p, old in zip(parts, before, strict=True)]
    return record, torch.cat([x if x.ndim == 2 else x[:, None] for x in changes], 1)


def states(model, ids, precision):
    """What the head is given in a forward pass of a copy, with ones for its bias; and the logits over its output."""
    twin, inputs, outputs = copy.deepcopy(model).eval(), [], []
    head = twin.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    head.register_forward_hook(lambda _, args, output: outputs.append(output.detach().clone()))
    with torch.no_grad(), autocast(precision):
        logits = twin(input_ids=ids).logits
    H = inputs[0].reshape(-1, D)[:POSITIONS].double()
    scale = float((logits / outputs[0])[outputs[0].abs() > 1e-2].double().median())
    return (H if head.bias is None else torch.cat([H, torch.ones(len(H), 1)], 1)), scale


CASES = [
    (name, [*OPTIMIZERS][number % len(OPTIMIZERS)], "bf16-mixed" if number % 4 == 3 else "fp32")
    for number, name in enumerate(MODELS)
]


@pytest.mark.few("GPT2-RowNorm-fp32", "Llama-SGD-bf16-mixed", "Mamba-RowNorm-fp32")
@pytest.mark.parametrize(("name", "optimizer", "precision"), CASES)
def test_a_causal_model_is_measured_and_trains_to_the_bit_as_without_the_monitor(name, optimizer, precision):
    bare, model = made(name), made(name)
    train(bare, OPTIMIZERS[optimizer](bare), precision)
    chosen = OPTIMIZERS[optimizer](model)
    panel, context = Panel.of_tokens(texts()[0], POSITIONS), lambda: autocast(precision)
    with Probe(
        model, chosen, panel=panel, diameter_every=1, perturbation_every=UPDATES, autocast=context, strict=True
    ) as probe:
        record, S = train(model, chosen, precision, probe)
    for key, x in bare.state_dict().items():
        assert torch.equal(model.state_dict()[key], x), key
    H, scale = states(model, texts()[0], precision)
    assert probe.head.logit_scale == pytest.approx(scale, rel=0.1 if probe.head.logits.softcap else 1e-2)
    S = S * probe.head.logit_scale
    assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-4)
    assert record.perturbation_rms == pytest.approx(float(deltas(S, H).square().mean().sqrt()), rel=1e-3)
    tried(
        model=type(model).__name__, trainer="own loop", optimizer=optimizer, precision=precision,
        libraries=["transformers"],
    )  # fmt: skip
