"""Heads whose weight is computed: S is the difference of the whole weight, or the head is refused in a sentence."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.optim import SGD, AdamW

from hilbert_monitor import Probe
from hilbert_monitor.monitor.panel import Panel
from tests.support.allocations import Allocations
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.references import all_pairs_diameter, deltas
from tests.support.tried import tried

V, D, RANK, UPDATES = 43, 12, 3, 4
TEXT = torch.randint(3, V, (4, 9), generator=torch.Generator().manual_seed(1))


class Doubled(nn.Module):
    """A parametrization of one's own, that writes to a buffer and draws random numbers in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, X):
        self.calls += 1
        return 2 * X if not self.training else 2 * X + 0 * torch.rand_like(X)


class Adapter(nn.Module):
    """An adapter of one's own, on a head that is frozen."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.down, self.up = nn.Linear(D, RANK, bias=False), nn.Linear(RANK, V, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def lora(model, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["lm_head"], **options))


MEASURED = {
    "weight_norm": lambda m: parametrizations.weight_norm(m.lm_head),
    "orthogonal": lambda m: parametrizations.orthogonal(m.lm_head, orthogonal_map="cayley"),
    "custom": lambda m: parametrize.register_parametrization(m.lm_head, "weight", Doubled()),
    "LoRA": lambda m: lora(m, lora_dropout=0.1),
    "rsLoRA": lambda m: lora(m, use_rslora=True),
}
REFUSED = {
    "old weight_norm": (lambda m: weight_norm(m.lm_head), "computed by a hook"),
    "old spectral_norm": (lambda m: spectral_norm(m.lm_head), "computed by a hook"),
    "pruned": (lambda m: prune.random_unstructured(m.lm_head, "weight", amount=0.5), "computed by a hook"),
    "DoRA": (lambda m: lora(m, use_dora=True), "other than plain LoRA on a frozen nn.Linear"),
    "an adapter": (lambda m: setattr(m, "lm_head", Adapter(m.lm_head)), "an adapter, a Adapter, other than"),
}


def made(change, V=V, d=D, **options):
    model = seeded(Plain, V=V, d=d, **options)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        changed = change(model)
    return (changed if hasattr(changed, "merge_and_unload") else model).train()


def adamw(model, lr=1e-2):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.1)


def head_of(model):
    return model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith("lm_head")))


@torch.no_grad()
def weight_of(model):
    """The whole weight, as the head in eval mode makes it of the unit vectors in fp64. (V, d)"""
    head = copy.deepcopy(head_of(model)).double().eval()
    units = torch.eye(head.in_features, dtype=torch.float64)
    return (head(units) - head(torch.zeros_like(units[:1]))).t()


def train(model, optimizers, probe=None, updates=UPDATES):
    """Train; return the last record, and the change of the whole weight in the last update."""
    torch.manual_seed(5)
    record = change = None
    for update in range(updates):
        model.zero_grad()
        loss_of(model, update, V).backward()
        before = weight_of(model)
        for optimizer in optimizers:
            optimizer.step()
        record = probe.record() if probe else None
        change = weight_of(model) - before
    return record, change


def state(model, optimizer):
    """Everything of a run: parameters, buffers, moments, random numbers."""
    moments = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    return [*model.state_dict().values(), *moments, torch.get_rng_state(), torch.rand(1)]


@pytest.mark.parametrize("kind", MEASURED)
def test_the_step_is_that_of_the_whole_weight_and_training_is_the_same_to_the_bit(kind):
    runs = []
    options = {"panel": Panel.of_tokens(TEXT, 20), "diameter_every": 1, "perturbation_every": UPDATES}
    for watched in (False, True):
        model = made(MEASURED[kind])
        optimizer = adamw(model)
        probe = Probe(model, optimizer, efficiency=True, strict=True, **options).attach() if watched else None
        record, change = train(model, [optimizer], probe)
        runs.append(state(model, optimizer))
    assert all(map(torch.equal, *runs))
    assert record.diameter == pytest.approx(all_pairs_diameter(change), rel=1e-4)
    inputs = []
    head_of(model.eval()).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(TEXT)
    H = inputs[0].detach().reshape(-1, D)[:20].double()
    assert record.perturbation_rms == pytest.approx(float(deltas(change, H).square().mean().sqrt()), rel=1e-3)
    assert record.backward_bound > 0
    assert record.ceiling is None
    assert record.increment_from == "step"
    assert "S is the difference of the effective weight" in probe.remarks[0]


@pytest.mark.parametrize(("change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_weight_that_is_computed_in_another_way_is_refused(change, sentence):
    model = made(change)
    with pytest.raises(TypeError, match=sentence):
        Probe(model, adamw(model), head=head_of(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_lora_on_a_llama_is_what_peft_itself_merges(dtype):
    """A step below the spacing of the frozen bf16 weight is seen: the frozen weight cancels."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    model = lora(transformers.LlamaForCausalLM(config).to(dtype))
    optimizer, merged = adamw(model), []
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        for _ in range(UPDATES):
            optimizer.zero_grad()
            model(input_ids=TEXT, labels=TEXT).loss.backward()
            merged.append(copy.deepcopy(model).double().merge_and_unload().lm_head.weight.detach())
            optimizer.step()
            record = probe.record()
        merged.append(copy.deepcopy(model).double().merge_and_unload().lm_head.weight.detach())
    assert record.diameter == pytest.approx(all_pairs_diameter(merged[-1] - merged[-2]), rel=1e-3)
    tried(
        model="LlamaForCausalLM with LoRA", trainer="own loop", optimizer="AdamW",
        precision="fp32" if dtype == torch.float32 else "bf16", libraries=["transformers", "peft"],
    )  # fmt: skip


def test_rows_of_lora_are_formed_on_demand_and_no_matrix_of_the_vocabulary_is_allocated():
    many, width = 60_000, 64
    model = made(MEASURED["LoRA"], V=many, d=width, blocks=0)
    optimizer = adamw(model)
    with Probe(model, optimizer, diameter_every=2, perturbation_every=0, strict=True) as probe:
        for update in range(4):
            model.zero_grad()
            loss_of(model, update, many).backward()
            before = weight_of(model)
            with Allocations(many * width // 2) as seen:
                optimizer.step()
                record = probe.record()
            assert seen.made == []
            assert (record.diameter is not None) == (update % 2 == 1)
        rows = probe.head.increment().S.rows
    change = weight_of(model) - before
    index = torch.tensor([5, many - 1, 77])
    for rows_there, expected in ((rows.take(index), change[index]), (rows.chunk(30, 60), change[30:60])):
        torch.testing.assert_close(rows_there.double(), expected, rtol=1e-3, atol=1e-6 * float(change.abs().max()))


def test_parts_with_optimizers_of_their_own_are_measured_over_whole_updates():
    model = made(MEASURED["LoRA"])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers = [SGD([p for name, p in trained.items() if part in name], lr=0.1) for part in ("lora_A", "lora_B")]
    with Probe(model, optimizers, diameter_every=1, perturbation_every=0, strict=True) as probe:
        record, change = train(model, optimizers, probe)
    assert record.increment_from == "update"
    assert record.diameter == pytest.approx(all_pairs_diameter(change), rel=1e-4)


def test_the_bias_of_a_computed_head_is_a_column_of_its_step():
    model = made(MEASURED["weight_norm"], bias=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = model.lm_head.bias.detach().double().clone()
    with Probe(model, optimizer, diameter_every=1, perturbation_every=0, strict=True) as probe:
        record, change = train(model, [optimizer], probe, updates=1)
    S = torch.cat([change, (model.lm_head.bias.detach().double() - before)[:, None]], 1)
    assert record.diameter == pytest.approx(all_pairs_diameter(S), rel=1e-4)
