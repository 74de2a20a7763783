"""A run on paper, before anything runs: parameters, memory, FLOPs, the cost of the monitor, and hours.

A multiply-add counts as two FLOPs. For the decoder and for Newton-Schulz only matrix products count; for the monitor
the passes over the increment count too. Memory is what PyTorch holds at the end of a forward pass, plus what the loss
adds. It leaves out gradients of activations, the chunk-wise sum of the head's gradient, Muon's gathered results (they
come when the activations are gone), workspaces of kernels and of NCCL, and what the allocator wastes. `torch.compile`
may hold less. What ranks exchange is in no hours but the monitor's: training does it while it computes, as far as it
can.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hilbert_monitor.emulation.device import unavailable

from .device import Device
from .monitor_cost import MonitorCost, monitor_at, monitor_costs, own_rows, panel_memory
from .recipes import Head, Recipe
from .training_cost import (
    BF16,
    FP32,
    activations,
    decoder_flops,
    newton_schulz,
    optimizer_state,
    parameters,
    validation_flops,
)
from .wire_cost import busiest_owner, exchange

HEADS_ELSEWHERE, RANKS_ELSEWHERE = ((50_257, 1_024), (128_256, 4_096), (262_144, 8_192)), (8, 64, 512)
"""Heads, and numbers of ranks, for which a plan says what the monitor would take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a recipe takes. Parts of a whole are dicts, in the order in which they are printed."""

    size: str
    head: Head
    precision: str
    strategy: str
    devices: int
    nodes: int
    parameters: dict[str, int]
    """Parameters by role: embedding, matrices, head."""
    updates: int
    tokens: int
    tokens_per_update: int
    micro_batch: int
    accumulation: int
    memory: dict[str, int]
    """Bytes of one rank, by part."""
    flops: dict[str, int]
    """FLOPs of one update over all ranks, by part."""
    validation_flops: int
    """FLOPs of all ranks, as a mean over the updates."""
    newton_schulz: dict[str, int]
    """FLOPs of one update: over all ranks if each did everything, over all ranks when shared, and of the busiest."""
    exchange: dict[str, float]
    """Bytes that a rank sends in an update, by part; without the monitor's."""
    monitor: dict[str, MonitorCost]
    """Empty where this torch can host no emulated device to count it on."""
    seconds: dict[str, float]
    """Seconds of one update, by part."""
    monitor_elsewhere: dict[str, MonitorCost] = field(default_factory=dict)
    """What the monitor takes for other heads on other numbers of ranks, without the panel's forward pass."""
    device: Device = field(default_factory=Device)

    @property
    def update_flops(self) -> int:
        """FLOPs of one update over all ranks, without validation and monitor."""
        return sum(self.flops.values())

    @property
    def monitor_share(self) -> dict[str, float]:
        """Fraction that the monitor adds to an update, by FLOPs and by assumed seconds."""
        seconds, flops = self.seconds["monitor"], sum(cost.flops for cost in self.monitor.values())
        return {"flops": flops / self.update_flops, "seconds": seconds / (sum(self.seconds.values()) - seconds)}

    @property
    def overlapped_share(self) -> float:
        """Fraction of an update's assumed seconds that is left where the monitor runs beside the next forward pass."""
        left = sum(cost.overlapped for cost in self.monitor.values())
        return left / (sum(self.seconds.values()) - self.seconds["monitor"])

    @property
    def exchange_seconds(self) -> float:
        """Assumed seconds of an update's exchange, if nothing else were done meanwhile; streams stay in a machine."""
        return sum(
            self.device.wire_seconds(sent, 0, nodes=1 if name.startswith("stream") else self.nodes)
            for name, sent in self.exchange.items()
        )

    @property
    def newton_schulz_share(self) -> dict[str, float]:
        """FLOPs of Newton-Schulz as a fraction of forward and backward, replicated and shared."""
        rest = self.update_flops - self.flops["newton-schulz"]
        return {name: self.newton_schulz[name] / rest for name in ("replicated", "shared")}

    @property
    def hours(self) -> float:
        """Hours of the run at the assumed speed."""
        return self.updates * sum(self.seconds.values()) / 3600

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for JSON, with the numbers that follow from them."""
        return {
            **asdict(self),
            "update_flops": self.update_flops,
            "monitor_share": self.monitor_share,
            "overlapped_share": self.overlapped_share,
            "exchange_seconds": self.exchange_seconds,
            "newton_schulz_share": self.newton_schulz_share,
            "hours": self.hours,
            "device_hours": self.hours * self.devices * self.nodes,
        }


def plan(recipe: Recipe, device: Device | None = None) -> Plan:
    """Compute what a run takes.

    Args:
        recipe: the run; it need not be resolved.
        device: the device that hours are computed for; by default an H200 at 40 %.
    """
    r, device = recipe.resolved, device or Device()
    assert r.updates is not None
    orthogonalisation = newton_schulz(r.model, r.world)
    if r.sharded:
        orthogonalisation["busiest"] = busiest_owner(r)
    monitor = {} if unavailable() else monitor_costs(r, device)
    flops = decoder_flops(r.model, r.global_batch, chunked=r.loss_chunk is not None)
    flops["newton-schulz"] = orthogonalisation["shared"]
    validation = validation_flops(r)
    return Plan(
        size=r.size,
        head=r.head,
        precision=r.precision,
        strategy=r.strategy,
        devices=r.devices,
        nodes=r.nodes,
        parameters=parameters(r.model),
        updates=r.updates,
        tokens=r.updates * r.tokens_per_update,
        tokens_per_update=r.tokens_per_update,
        micro_batch=r.micro_batch,
        accumulation=r.accumulation,
        memory=memory(r),
        flops=flops,
        validation_flops=validation,
        newton_schulz=orthogonalisation,
        exchange=exchange(r),
        monitor=monitor,
        seconds=_seconds(r, flops, orthogonalisation["busiest"], validation, monitor, device),
        monitor_elsewhere={}
        if unavailable()
        else {
            f"{V:,} x {d:,}, {world} ranks": monitor_at(r, device, vocab_size=V, width=d, world=world)
            for V, d in HEADS_ELSEWHERE
            for world in RANKS_ELSEWHERE
        },
        device=device,
    )


def memory(r: Recipe) -> dict[str, int]:
    """Return the bytes of one rank, by part."""
    count, ranks = parameters(r.model), r.tensor_parallel
    total, bf16, shards = sum(count.values()), r.autocast, r.world if r.sharded else 1
    positions = r.micro_batch * r.context
    chunk = positions if r.loss_chunk is None else min(r.loss_chunk, positions)
    return {
        "parameters": FP32 * total // shards,
        "gradients": FP32 * total // shards,
        **{f"optimizer: {name}": size // shards for name, size in optimizer_state(r).items()},
        "gradient buckets of DDP": FP32 * total if r.world > 1 and not r.sharded else 0,
        "gathered units of FSDP": _gathered(r) if r.sharded and r.readers > 1 else 0,
        "bf16 copies of weights": BF16 * (count["matrices"] + count["head"]) // ranks if bf16 else 0,
        "activations of a micro-batch": activations(
            r.model, r.micro_batch, bf16=bf16, chunked=r.loss_chunk is not None, tensor_parallel=ranks
        ),
        "logits of a loss chunk": 3 * FP32 * chunk * -(-r.vocab_size // ranks),  # log-probabilities, two gradients
        "monitor: increment": FP32 * own_rows(r) * r.width,
        "monitor: panel": panel_memory(r),
    }


def _gathered(r: Recipe) -> int:
    """Return the bytes of the embedding, the head and two blocks in whole, and of the gradient of the largest unit."""
    count = parameters(r.model)
    block = count["matrices"] // r.blocks
    numbers = count["embedding"] + count["head"] + 2 * block + max(block, count["head"])
    return FP32 * numbers // r.tensor_parallel


def _seconds(
    r: Recipe,
    flops: dict[str, int],
    newton_schulz: int,
    validation: int,
    monitor: dict[str, MonitorCost],
    device: Device,
) -> dict[str, float]:
    """Return the seconds of an update by part. Newton-Schulz is fp32 work, of which the busiest rank counts."""
    training, ranks = sum(flops.values()) - flops["newton-schulz"], r.world * device.decoder_speed(bf16=r.autocast)
    return {
        "forward and backward": training / ranks,
        "newton-schulz": newton_schulz / (device.utilisation * device.fp32),
        "validation": validation / ranks,
        "monitor": sum(cost.seconds for cost in monitor.values()),
    }
