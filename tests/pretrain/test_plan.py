"""A plan against small runs that are counted: FLOPs, bytes, and the paper's three sizes."""

import io
import json
from collections import Counter

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain import plan as plan_module
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig
from hilbert_monitor.pretrain.plan import memory, plan, show
from hilbert_monitor.pretrain.recipes import HEADS, PAPER, Recipe, recipe

SIZES = [
    DecoderConfig(vocab_size=97, width=48, blocks=3, head_dim=16, context=40),
    DecoderConfig(vocab_size=201, width=96, blocks=2, head_dim=32, context=24, mlp_ratio=2),
    DecoderConfig(vocab_size=64, width=32, blocks=1, head_dim=8, context=128, mlp_ratio=1),
]


def text(config, batch):
    ids = torch.randint(config.vocab_size, (2, batch, config.context), generator=torch.Generator().manual_seed(0))
    return ids[0].clone(), ids[1].clone()


def counted(work):
    """FLOPs of matrix products; attention as plain ones, since the CPU's flash kernel is not counted."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return counter.get_total_flops()


def plain_attention(config, sequences, products):
    """FLOPs of attention that masks what it has computed."""
    return products * 2 * config.context**2 * config.width * config.blocks * sequences


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("config", SIZES)
def test_flops_of_forward_and_backward_are_those_counted(config, chunk):
    model = Decoder(config)
    found = counted(lambda: model.loss(*text(config, 3), chunk=chunk).backward())
    flops = plan_module.decoder_flops(config, 3, chunked=chunk is not None)
    plain = plain_attention(config, 3, products=6)
    assert found == sum(flops.values()) - flops["attention"] + plain
    T = config.context  # a causal kernel leaves out the pairs above the diagonal, a flash kernel has a seventh product
    assert flops["attention"] == pytest.approx(plain * 7 / 6 * (T + 1) / (2 * T))


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("config", SIZES)
def test_flops_of_a_forward_pass_are_those_counted(config, head):
    model = Decoder(config).requires_grad_(False)
    tokens, _ = text(config, 2)
    found = counted(lambda: model(tokens) if head else model.hidden(tokens))
    plain, T = plain_attention(config, 2, products=2), config.context
    assert plan_module.forward_flops(config, 2, head=head) == found - plain + plain * (T + 1) // (2 * T)


@pytest.mark.parametrize("config", SIZES)
def test_flops_of_newton_schulz_are_those_of_a_step_of_muon(config):
    model = Decoder(config)
    model.loss(*text(config, 1)).backward()
    found = counted(pretraining_optimizer(model).step)
    assert plan_module.newton_schulz(config, 1) == (found, found)


@pytest.mark.parametrize("head", HEADS)
def test_bytes_of_parameters_gradients_and_state_are_those_of_a_run(head):
    r = recipe("demo", head=head)
    model = Decoder(r.model)
    optimizer = pretraining_optimizer(model, head)
    model.loss(*text(r.model, 1)).backward()
    optimizer.step()
    found = Counter()
    for p, state in optimizer.state.items():
        found[type(optimizer.owner(p)).__name__] += sum(x.nbytes for x in state.values() if torch.is_tensor(x))
    part = plan(r).memory
    assert plan_module.optimizer_state(r) == found
    assert part["parameters"] == sum(p.nbytes for p in model.parameters())
    assert part["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    assert part["gradient buckets of DDP"] == part["bf16 copies of weights"] == 0


def kept(config, batch, *, bf16, chunk):
    """Bytes that autograd keeps of a forward pass: (activations, copies of weights, log-probabilities)."""
    model, tokens = Decoder(config), text(config, batch)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    shapes = {tuple(sorted(p.shape)) for p in model.parameters()}
    held, sizes = [], {}

    def pack(x):
        held.append(x)  # or another storage might take its place
        storage = x.untyped_storage()
        if storage.data_ptr() not in own and x.ndim:
            weight = x.dtype == torch.bfloat16 and tuple(sorted(x.shape)) in shapes
            kind = "weight" if weight else "logits" if x.shape[-1] == config.vocab_size else "activation"
            sizes[storage.data_ptr()] = kind, storage.nbytes()
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model.loss(*tokens, chunk=chunk)
    return tuple(
        sum(size for kind, size in sizes.values() if kind == wanted) for wanted in ("activation", "weight", "logits")
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("config", SIZES)
def test_bytes_of_activations_are_those_that_autograd_keeps(config, bf16, chunk):
    found = {batch: kept(config, batch, bf16=bf16, chunk=chunk) for batch in (3, 6)}
    count = plan_module.parameters(config)
    copied = 2 * (count["matrices"] + (count["head"] if chunk is None else 0)) if bf16 else 0
    for batch, (activations, weights, logits) in found.items():
        assert activations == plan_module.activations(config, batch, bf16=bf16, chunked=chunk is not None)
        assert weights == copied  # a chunked loss makes its copy of the head in the backward pass
        assert logits == (0 if chunk else 4 * batch * config.context * config.vocab_size)
    assert found[6][0] == 2 * found[3][0]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("chunk", [None, 20])
def test_a_loss_holds_three_tables_of_logits_at_its_peak(bf16, chunk):
    config = DecoderConfig(vocab_size=3001, width=16, blocks=1, head_dim=8, context=40)
    model, tokens = Decoder(config), text(config, 2)
    positions = chunk or 80
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiled:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model.loss(*tokens, chunk=chunk)
        loss.backward()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    tables = {size * positions * config.vocab_size for size in (2, 4)}
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) in tables:
            held += event.nbytes()
            peak = max(peak, held)
    r = Recipe(
        vocab_size=3001, width=16, blocks=1, head_dim=8, context=40, micro_batch=2, global_batch=2, loss_chunk=chunk
    )
    assert memory(r)["logits of a loss chunk"] == peak


def test_a_plan_allocates_no_model():
    found = plan(Recipe(width=2**16, head_dim=128, blocks=1000))
    assert sum(found.memory.values()) > 2**50


@pytest.mark.parametrize(
    ("readers", "size", "kind"), [(1, 100, "loader"), (3, 100, "loader"), (3, 100, "paper"), (7, 5, "paper")]
)
def test_every_rank_runs_the_rows_that_the_panels_positions_stand_in(readers, size, kind):
    sizes = {"context": 16, "head_dim": 64, "micro_batch": 1, "global_batch": readers}
    r = Recipe(panel_size=size, panel=kind, devices=2 * readers, strategy="tp=2", **sizes)
    batches = [torch.zeros(4, 16, dtype=torch.long) for _ in range(8)]
    parts = [size]
    if kind == "paper":
        parts = [size * (n + 1) // readers - size * n // readers for n in range(readers)]
    panel = Panel.joined(Panel.of_batches(batches, part) for part in parts if part)
    assert plan_module.panel_rows(r) == sum(map(len, panel.batches))


def test_the_busiest_rank_has_its_share_of_every_shape_rounded_up():
    shared, busiest = plan_module.newton_schulz(SIZES[0], 5)
    square, wide = plan_module.newton_schulz_flops(48, 48), plan_module.newton_schulz_flops(192, 48)
    assert busiest == 3 * square + (2 + 1) * wide  # of 12, 6 and 3 matrices
    assert shared == 12 * square + 9 * wide


@pytest.mark.parametrize(
    ("size", "parameters", "updates", "newton_schulz"),
    [
        ("190M", 185_680_896, 7_083, 0.0158),
        ("380M", 379_184_640, 14_464, 0.0268),
        ("640M", 639_797_248, 24_406, 0.0383),
    ],
)
@pytest.mark.parametrize("head", HEADS)
def test_the_papers_sizes(size, head, parameters, updates, newton_schulz):
    found = plan(recipe(size, head=head))
    assert sum(found.parameters.values()) == parameters
    assert (found.updates, found.tokens) == (updates, updates * 524_288)
    training = sum(found.flops.values()) - found.flops["Newton-Schulz"] - found.flops["validation"]
    assert found.flops["Newton-Schulz"] / training == pytest.approx(newton_schulz / 8, rel=0.01)
    assert sum(found.memory.values()) < 141e9  # of an H200


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=8"])
def test_a_plan_reaches_heads_of_262_144_rows_and_512_devices(strategy):
    sizes = {"vocab_size": 262_144, "width": 8192, "head_dim": 128, "micro_batch": 1, "global_batch": 512}
    found = plan(recipe("640M", strategy=strategy, devices=8, nodes=64, **sizes))
    whole = plan(recipe("640M", **sizes | {"global_batch": 8}))
    split = 1 if strategy == "ddp" else 512
    assert found.memory["parameters"] == whole.memory["parameters"] // split
    assert found.memory["monitor: increment"] == 262_144 * 8192 * 4 // split
    if strategy == "tp=8":
        assert found.memory["logits of a loss chunk"] == whole.memory["logits of a loss chunk"] // 8


def test_twice_the_nodes_take_half_the_time():
    one, two = (plan(recipe("640M", nodes=n, micro_batch=4)) for n in (1, 2))
    for name in one.seconds:
        assert one.seconds[name] == pytest.approx(2 * two.seconds[name])
    assert one.flops == two.flops
    assert one.hours == pytest.approx(one.updates * sum(one.seconds.values()) / 3600)


@pytest.mark.parametrize("size", [*PAPER, "demo"])
def test_a_plan_is_printed_with_its_assumptions_and_is_plain_data(size):
    found, out = plan(recipe(size)), io.StringIO()
    show(found, Console(file=out, width=120))
    for words in ("nobody has measured", "40% of", f"{found.updates:,}", "monitor: increment", "assumed hours"):
        assert words in out.getvalue()
    again = json.loads(json.dumps(found.as_dict()))
    assert (again["hours"], again["memory"]) == (found.hours, found.memory)
