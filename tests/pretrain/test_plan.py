"""A run on paper against small runs that are counted: FLOPs, bytes, and the paper's three sizes."""

import io
import json
import math
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hilbert_monitor.emulation.counts import Count
from hilbert_monitor.emulation.monitor_work import MonitorWork, Work
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.optim import pretraining_optimizer
from hilbert_monitor.pretrain import monitor_cost, plan_tables, training_cost, wire_cost
from hilbert_monitor.pretrain import plan as plan_module
from hilbert_monitor.pretrain.device import Device
from hilbert_monitor.pretrain.model import Decoder, DecoderConfig
from hilbert_monitor.pretrain.parallel import shard
from hilbert_monitor.pretrain.plan import memory, plan
from hilbert_monitor.pretrain.plan_tables import show
from hilbert_monitor.pretrain.recipes import HEADS, PAPER, Recipe, recipe
from tests.support.ranks import in_ranks

MESH = ("data_parallel", "tensor_parallel")
SIZES = [
    DecoderConfig(vocab_size=97, width=48, blocks=3, head_dim=16, context=40),
    DecoderConfig(vocab_size=201, width=96, blocks=2, head_dim=32, context=24, mlp_ratio=2),
    DecoderConfig(vocab_size=64, width=32, blocks=1, head_dim=8, context=128, mlp_ratio=1),
]


@pytest.fixture(autouse=True)
def _made_up_counts(monkeypatch):
    """Counts as they could be: tests on the emulated device count them."""

    def made_up(head, *, ranks, autocast, rows, width, positions):
        def work(kernels, waits, passes):
            entries = passes * rows * width / ranks
            return Work(Count(kernels, waits=waits, bytes=8 * entries, flops=entries), 5)

        product = work(150, 10, 2 + positions / 100)
        return MonitorWork(work(20, 0, 1), work(90, 0, 2), work(300, 10, 9), work(900, 40, 10), product)

    monkeypatch.setattr(monitor_cost, "grown_work", made_up)
    for module in (plan_module, plan_tables):
        monkeypatch.setattr(module, "unavailable", lambda: "")


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
    flops = training_cost.decoder_flops(config, 3, chunked=chunk is not None)
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
    assert training_cost.forward_flops(config, 2, head=head) == found - plain + plain * (T + 1) // (2 * T)


@pytest.mark.parametrize("config", SIZES)
def test_flops_of_newton_schulz_are_those_of_a_step_of_muon(config):
    model = Decoder(config)
    model.loss(*text(config, 1)).backward()
    found = counted(pretraining_optimizer(model).step)
    assert training_cost.newton_schulz(config, 1) == {"replicated": found, "shared": found, "busiest": found}


def test_the_busiest_rank_has_its_share_of_every_shape_rounded_up():
    work = training_cost.newton_schulz(SIZES[0], 5)
    square, wide = training_cost.newton_schulz_flops(48, 48), training_cost.newton_schulz_flops(192, 48)
    assert work["busiest"] == 3 * square + (2 + 1) * wide  # of 12, 6 and 3 matrices
    assert work["replicated"] == 5 * work["shared"] == 5 * (12 * square + 9 * wide)


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
    assert training_cost.optimizer_state(r) == found
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
    count = training_cost.parameters(config)
    copied = 2 * (count["matrices"] + (count["head"] if chunk is None else 0)) if bf16 else 0
    for batch, (activations, weights, logits) in found.items():
        assert activations == training_cost.activations(config, batch, bf16=bf16, chunked=chunk is not None)
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


@pytest.mark.parametrize(
    ("size", "parameters", "updates", "replicated"),
    [
        ("190M", 185_680_896, 7_083, 0.0158),
        ("380M", 379_184_640, 14_464, 0.0268),
        ("640M", 639_797_248, 24_406, 0.0383),
    ],
)
@pytest.mark.parametrize("head", HEADS)
def test_the_papers_sizes(size, head, parameters, updates, replicated):
    found = plan(recipe(size, head=head))
    assert sum(found.parameters.values()) == parameters
    assert (found.updates, found.tokens) == (updates, updates * 524_288)
    assert found.accumulation * found.micro_batch * 8 == 256
    assert found.newton_schulz_share["replicated"] == pytest.approx(replicated, rel=0.01)
    assert found.newton_schulz_share["shared"] == pytest.approx(replicated / 8, rel=0.01)
    assert found.monitor_share["flops"] < 2e-4  # nearly all of it the panel's forward pass, on every rank
    assert sum(found.memory.values()) < 141e9  # of an H200


@pytest.mark.parametrize(("size", "share"), [("190M", 0.027), ("380M", 0.042), ("640M", 0.058)])
def test_the_plain_loop_on_every_rank_would_cost_more(size, share):
    r = recipe(size)
    count, d = training_cost.parameters(r.model), r.width
    plain = 8 * r.blocks * 5 * (4 * 6 + 3 * 18) * d**3
    rough = (
        6 * (count["matrices"] + count["head"]) * r.tokens_per_update
    )  # without attention, and the head's forward twice
    assert plain / rough == pytest.approx(share, abs=0.001)
    assert training_cost.newton_schulz(r.model, 8)["replicated"] == pytest.approx(plain * 300 / 390)
    assert plain / 8 / rough < 0.008


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
    assert monitor_cost.panel_rows(r) == sum(map(len, panel.batches))


def test_a_monitor_that_measures_less_costs_less():
    every, seldom, never = (
        plan(recipe("640M", diameter_every=d, perturbation_every=p)) for d, p in ((1, 1), (10, 500), (0, 0))
    )
    assert every.monitor_share["flops"] > seldom.monitor_share["flops"] > never.monitor_share["flops"]
    assert every.monitor["bracket"].flops == 0  # the search takes its place
    assert never.monitor["exact search, typical"] == never.monitor["panel"] == monitor_cost.MonitorCost()


def test_what_waits_for_nothing_runs_beside_the_next_forward_pass():
    found = plan(recipe("190M"))
    forming, bracket, search = (found.monitor[name] for name in ("forming S", "bracket", "exact search, typical"))
    assert bracket.overlapped < bracket.seconds / 3
    assert search.overlapped == search.seconds
    assert forming.overlapped < 0.6 * forming.seconds
    shared = plan(recipe("190M", strategy="fsdp")).monitor["forming S"]
    assert shared.overlapped == shared.seconds  # ranks agree by a number that they wait for


def test_seconds_of_the_monitor_are_those_of_its_counts():
    device = Device(launch=1.0, wait=10.0, factorisation=100.0, bandwidth=2.0, fp32=4.0, utilisation=0.5)
    count = Count(kernels=3, copies=1, waits=2, factorisations=1, bytes=7, flops=6)
    assert device.seconds(count) == 4 + 20 + 100 + 7 + 3
    assert device.busy_seconds(count) == 7 + 3


def test_a_plan_without_an_emulated_device_leaves_the_monitor_out_and_says_so(monkeypatch):
    for module in (plan_module, plan_tables):
        monkeypatch.setattr(module, "unavailable", lambda: "this torch is too old")
    found, out = plan(recipe("190M")), io.StringIO()
    assert found.monitor == {}
    assert found.seconds["monitor"] == found.monitor_share["seconds"] == 0
    show(found, Console(file=out, width=120))
    assert "this torch is too old" in out.getvalue()


def test_twice_the_nodes_take_half_the_time_but_for_the_monitor():
    one, two = (plan(recipe("640M", nodes=n, micro_batch=4)) for n in (1, 2))
    for name in ("forward and backward", "newton-schulz", "validation"):
        assert one.seconds[name] == pytest.approx(2 * two.seconds[name])
    assert two.memory["monitor: increment"] == one.memory["monitor: increment"]  # rank zero's
    assert two.monitor["bracket"].bytes == pytest.approx(one.monitor["bracket"].bytes, rel=1e-3)
    assert one.seconds["monitor"] < 2 * two.seconds["monitor"]  # kernels are not shared
    assert one.update_flops == two.update_flops
    assert math.isclose(one.hours, one.updates * sum(one.seconds.values()) / 3600)


# Sharded runs


def sharded_recipe(world, strategy):
    sizes = {"vocab_size": 128, "width": 32, "head_dim": 8, "blocks": 2, "context": 16, "loss_chunk": 10}
    return recipe("demo", strategy=strategy, devices=world, micro_batch=2, global_batch=4, updates=1, **sizes)


class Wire(TorchDispatchMode):
    """Counts the bytes that a ring sends from this rank, for collectives of DTensor, of FSDP2 and of Muon."""

    def __init__(self, world):
        super().__init__()
        self.world, self.sent = world, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, others = str(function), self.world - 1
        if "_c10d_functional.all_reduce" in name:
            self.sent["all-reduce"] += 2 * others * args[0].nbytes // self.world
        elif "_c10d_functional.all_gather" in name:
            self.sent["gather"] += others * args[0].nbytes
        elif "allgather_base_" in name or "all_gather_into_tensor" in name:
            self.sent["parameters"] += others * args[1].nbytes
        elif "reduce_scatter" in name:
            self.sent["gradients"] += others * args[0].nbytes
        elif "alltoall_base_" in name:
            rank, sent = dist.get_rank(), args[4]
            self.sent["Muon"] += (sum(sent) - sent[rank]) * args[1].element_size()
        return function(*args, **(kwargs or {}))


def all_counts_of_a_rank(rank, world):
    return {strategy: counts_of_a_rank(rank, world, strategy) for strategy in ("fsdp", "tp=2")}


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """What each of two ranks counted under each strategy."""
    return in_ranks(all_counts_of_a_rank, tmp_path_factory.mktemp("ranks"))


def counts_of_a_rank(rank, world, strategy):
    """What an update sends, and the bytes of the parameters that this rank has."""
    r = sharded_recipe(world, strategy)
    torch.manual_seed(0)
    model = Decoder(r.model)
    shard(model, init_device_mesh("cpu", (r.readers, r.tensor_parallel), mesh_dim_names=MESH))
    optimizer = pretraining_optimizer(model)
    with Wire(world) as wire:
        for _ in range(r.accumulation):
            loss = model.loss(*text(r.model, r.micro_batch), chunk=r.loss_chunk)
            with loss_parallel() if r.tensor_parallel > 1 else nullcontext():
                loss.backward()
    optimizer.step()  # which learns where the shards are
    with Wire(world) as muon:
        optimizer.step()
    return wire.sent + muon.sent, sum(p.to_local().nbytes for p in model.parameters())


@pytest.mark.parametrize("strategy", ["fsdp", "tp=2"])
def test_bytes_on_the_wire_are_those_that_an_update_sends(strategy, counts):
    r, ranks = sharded_recipe(2, strategy), [rank[strategy] for rank in counts]
    sent = wire_cost.exchange(r)
    assert max(count["Muon"] for count, _ in ranks) == pytest.approx(sent["Muon"], rel=0.02)  # and flags
    assert max(held for _, held in ranks) == memory(r)["parameters"]
    for count, _ in ranks:
        if strategy == "fsdp":
            assert count["gradients"] == sent["gradients"]
            assert count["parameters"] == sent["parameters, forward"] + sent["parameters, backward"]
        else:
            embedding = r.accumulation * r.micro_batch * r.context * r.width * 4 // 2
            streams = sent["stream, forward"] + sent["stream, backward"] - embedding
            assert count["gather"] == embedding
            few = r.accumulation * r.micro_batch * r.context * 8 * 4  # numbers of each position, for the loss
            assert streams <= count["all-reduce"] <= streams + few


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp=8"])
@pytest.mark.parametrize("world", [8, 512])
def test_a_plan_reaches_heads_of_262_144_rows_and_512_devices(strategy, world):
    sizes = {"vocab_size": 262_144, "width": 8192, "head_dim": 128, "micro_batch": 1, "global_batch": world}
    found = plan(recipe("640M", strategy=strategy, devices=8, nodes=world // 8, **sizes))
    whole = plan(recipe("640M", **sizes | {"global_batch": 8}))
    split = 1 if strategy == "ddp" else world
    assert found.memory["parameters"] == whole.memory["parameters"] // split
    assert found.memory["monitor: increment"] == 262_144 * 8192 * 4 // split
    assert 0 <= found.monitor["bracket"].received < 0.011 * 262_144 * 8192 * 4
    assert (found.monitor["bracket"].received > 0) == (strategy != "ddp")
    if strategy == "tp=8":
        assert found.memory["logits of a loss chunk"] == whole.memory["logits of a loss chunk"] // 8


def test_a_plan_says_what_the_monitor_takes_for_other_heads_and_ranks():
    elsewhere = plan(recipe("190M")).monitor_elsewhere
    assert len(elsewhere) == 9
    large = [elsewhere[f"262,144 x 8,192, {world} ranks"] for world in (8, 64, 512)]
    assert large[0].seconds > large[1].seconds
    assert large[0].received < large[1].received < large[2].received


@pytest.mark.parametrize("size", [*PAPER, "demo"])
def test_a_plan_is_printed_with_its_assumptions_and_is_plain_data(size):
    found, out = plan(recipe(size)), io.StringIO()
    show(found, Console(file=out, width=120))
    for words in ("nobody has measured", "40% of", f"{found.updates:,}", "gradient buckets of DDP", "exact search"):
        assert words in out.getvalue()
    again = json.loads(json.dumps(found.as_dict()))
    assert again["monitor"]["bracket"]["bytes"] == found.monitor["bracket"].bytes
    assert again["device_hours"] == found.hours * found.devices
