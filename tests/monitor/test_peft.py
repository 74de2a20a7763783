"""Heads that peft adapts: LoRA, DoRA, LoHa, a trained copy, and single tokens, on a tiny Llama."""

import copy

import pytest
import torch
from torch.optim import AdamW

from hilbert_monitor import Probe
from hilbert_monitor.monitor.panel import Panel
from tests.support.references import all_pairs_diameter, deltas
from tests.support.tried import tried

transformers = pytest.importorskip("transformers")
V, UPDATES = 97, 3
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
ADAPTERS = {
    "lora": lambda peft: peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["lm_head", "q_proj"]),
    "dora": lambda peft: peft.LoraConfig(r=4, use_dora=True, target_modules=["lm_head", "q_proj"]),
    "rslora": lambda peft: peft.LoraConfig(r=4, use_rslora=True, target_modules=["lm_head"]),
    "loha": lambda peft: peft.LoHaConfig(r=4, target_modules=["lm_head"]),
    "copy": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tokens": lambda peft: peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices={"lm_head": [5, 9]}),
}
NAMES = {
    **{"lora": "LoRA", "dora": "DoRA", "rslora": "rsLoRA", "loha": "LoHa"},
    **{"copy": "modules_to_save", "tokens": "trainable_token_indices"},
}
FAST = ("lora", "rslora")


def adapted(kind, dtype=torch.float32):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    return peft.get_peft_model(model, ADAPTERS[kind](peft)).train()


def effective(model):
    """The head that peft itself merges, in a copy in fp64. (V, d)"""
    merged = copy.deepcopy(model).double().merge_and_unload()
    return merged.lm_head.weight.detach()


def train(model, watched):
    torch.manual_seed(1)
    decay = 0.0
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=decay)
    tokens = [torch.randint(3, V, (2, 9), generator=torch.Generator().manual_seed(k)) for k in range(UPDATES)]
    probe = record = None
    if watched:
        options = {"diameter_every": 1, "perturbation_every": UPDATES, "strict": True}
        probe = Probe(model, optimizer, panel=Panel.of_tokens(tokens[0], 15), **options).attach()
    for ids in tokens:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        before = effective(model)
        optimizer.step()
        record = probe.record() if probe else None
    return probe, record, effective(model) - before, tokens[0]


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapted_head_is_measured_and_trains_to_the_bit_as_without_the_monitor(kind, dtype):
    if dtype == torch.bfloat16 and kind == "copy":
        pytest.skip("an ordinary head in bf16, which other tests have")
    bare, model = adapted(kind, dtype), adapted(kind, dtype)
    train(bare, False)
    probe, record, S, tokens = train(model, True)
    for name, x in bare.state_dict().items():
        assert torch.equal(model.state_dict()[name], x), name
    assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-4 if dtype == torch.float32 else 1e-3)
    assert record.increment_from == ("state" if kind == "copy" else "step")
    assert (probe.head.effective is not None and probe.head.effective._fixed is not None) == (kind in FAST)
    inputs = []
    twin = copy.deepcopy(model).eval()
    twin.get_submodule(probe.head.name).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        twin(input_ids=tokens)
    H = inputs[0].reshape(-1, 32)[:15].double()
    assert record.perturbation_rms == pytest.approx(float(deltas(S, H).square().mean().sqrt()), rel=1e-3)
    tried(
        model=f"LlamaForCausalLM with {NAMES[kind]}", trainer="own loop", optimizer="AdamW",
        precision="fp32" if dtype == torch.float32 else "bf16", libraries=["transformers", "peft"],
    )  # fmt: skip
