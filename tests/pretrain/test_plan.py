"""A plan against small runs that are counted: FLOPs, bytes, and the paper's three sizes."""

import io
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain import plan as plans
from hilbert_monitor.pretrain.model import Decoder
from hilbert_monitor.pretrain.plan import memory, plan, show
from hilbert_monitor.pretrain.recipe import HEADS, Recipe, recipe

RECIPES = [
    Recipe(vocab_size=97, width=48, blocks=3, head_dim=16, context=40, micro_batch=3, global_batch=3),
    Recipe(vocab_size=64, width=32, blocks=1, head_dim=8, context=120, micro_batch=1, global_batch=1),
]


def text(r):
    ids = torch.randint(r.vocab_size, (2, r.micro_batch, r.context), generator=torch.Generator().manual_seed(0))
    return ids[0].clone(), ids[1].clone()


def counted(work):
    """Count FLOPs of matrix products, attention as plain ones: the CPU's flash kernel is not counted."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("r", RECIPES)
def test_flops_are_those_counted(r, chunk):
    """A causal kernel skips the pairs above the diagonal, and a flash kernel has a seventh product."""
    r = replace(r, loss_chunk=chunk)
    model, T = Decoder(r.model), r.context
    plain = 2 * T**2 * r.width * r.blocks * r.micro_batch  # of an attention that masks afterwards
    flops = plans.training_flops(r)
    found = counted(lambda: model.loss(*text(r), chunk=chunk).backward())
    assert found == sum(flops.values()) - flops["attention"] + 6 * plain
    assert flops["attention"] == pytest.approx(7 * plain * (T + 1) / (2 * T))
    total = counted(pretraining_optimizer(model).step)
    assert plans.newton_schulz_flops(r) == (total, total)
    forward = counted(lambda: model.requires_grad_(False)(text(r)[0]))
    assert plans.forward_flops(r, r.micro_batch) == forward - 2 * plain + plain * (T + 1) // T


def test_the_busiest_rank_has_its_share_of_every_shape_rounded_up():
    one, five = (plans.newton_schulz_flops(replace(RECIPES[0], devices=n, global_batch=15)) for n in (1, 5))
    square, wide = 5 * 6 * 48**3, (9 + 5 + 2 * 2 * 4) * 2 * 48**3  # plain steps; steps in threes and twos
    assert one == (12 * square + 9 * wide,) * 2
    assert five == (one[0], 3 * square + (2 + 1) * wide)  # of 12, 6 and 3 matrices


@pytest.mark.parametrize("head", HEADS)
def test_bytes_of_parameters_gradients_and_state_are_those_of_a_run(head):
    r = recipe("demo", head=head)
    model = Decoder(r.model)
    optimizer = pretraining_optimizer(model, head)
    model.loss(*text(replace(r, micro_batch=1))).backward()
    optimizer.step()
    state = Counter()
    for p, tensors in optimizer.state.items():
        state[type(optimizer.owner(p)).__name__] += sum(x.nbytes for x in tensors.values() if torch.is_tensor(x))
    part = memory(r)
    assert plans.optimizer_state(r) == state
    assert part["parameters"] == sum(p.nbytes for p in model.parameters())
    assert part["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    assert part["gradient buckets of DDP"] == part["bf16 copies of weights"] == 0


@pytest.mark.few(3)
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("r", RECIPES)
def test_bytes_of_activations_are_those_that_autograd_holds(r, bf16, chunk):
    r = replace(r, precision="bf16-mixed" if bf16 else "32-true", loss_chunk=chunk)
    model, tokens = Decoder(r.model), text(r)
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    shapes = {tuple(sorted(p.shape)) for p in model.parameters()}
    held, sizes = [], {}

    def pack(x):
        held.append(x)  # or another tensor might take its storage
        storage = x.untyped_storage()
        if storage.data_ptr() not in own and x.ndim:
            weight = x.dtype == torch.bfloat16 and tuple(sorted(x.shape)) in shapes
            kind = "weight" if weight else "logits" if x.shape[-1] == r.vocab_size else "activation"
            sizes[storage.data_ptr()] = kind, storage.nbytes()
        return x

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model.loss(*tokens, chunk=chunk)
    found = Counter()
    for kind, size in sizes.values():
        found[kind] += size
    count = plans.parameters(r)
    assert found["activation"] == plans.activations(r)
    # a chunked loss copies the head in the backward pass
    assert found["weight"] == (2 * (count["matrices"] + (0 if chunk else count["head"])) if bf16 else 0)


@pytest.mark.parametrize("chunk", [None, 20])
def test_a_loss_holds_three_tables_of_logits_at_its_peak(chunk):
    r = replace(RECIPES[0], vocab_size=3001, width=16, blocks=1, head_dim=8, loss_chunk=chunk)
    model, tokens = Decoder(r.model), text(r)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiled:
        model.loss(*tokens, chunk=chunk).backward()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) >= 4 * (chunk or 120) * r.vocab_size:  # nothing else is as large
            held += event.nbytes()
            peak = max(peak, held)
    assert memory(r)["logits of a loss chunk"] == peak


@pytest.mark.parametrize(
    ("size", "parameters", "updates", "newton_schulz"),
    [
        ("190M", 185_680_896, 7_083, 0.0158),
        ("380M", 379_184_640, 14_464, 0.0268),
        ("640M", 639_797_248, 24_406, 0.0383),
    ],
)
def test_the_papers_sizes_are_printed_with_their_assumptions(size, parameters, updates, newton_schulz):
    found, out = plan(recipe(size)), io.StringIO()
    assert sum(found.parameters.values()) == parameters
    assert found.hours == pytest.approx(updates * sum(found.seconds.values()) / 3600)
    training = sum(plans.training_flops(found.recipe).values())
    assert found.flops["Newton-Schulz"] / training == pytest.approx(newton_schulz / 8, rel=0.01)
    assert sum(found.memory.values()) < 141e9  # of an H200
    show(found, Console(file=out, width=120))
    for words in ("not measured: 40%", f"{updates:,}", f"{updates * 524_288:,}", "monitor: increment", "assumed hours"):
        assert words in out.getvalue()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=8"])
def test_only_sharded_strategies_split_memory_over_512_devices(strategy):
    sizes = {"vocab_size": 262_144, "width": 8192, "head_dim": 128, "micro_batch": 1}
    found = memory(recipe("640M", strategy=strategy, devices=8, nodes=64, global_batch=512, **sizes))
    whole = memory(recipe("640M", global_batch=8, **sizes))
    split = 1 if strategy == "ddp" else 512
    assert found["parameters"] == whole["parameters"] // split
    assert found["monitor: increment"] == 262_144 * 8192 * 4 // split
    assert found["logits of a loss chunk"] == whole["logits of a loss chunk"] // (8 if strategy == "tp=8" else 1)
