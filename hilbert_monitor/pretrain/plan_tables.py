"""Prints a plan as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hilbert_monitor.emulation.device import unavailable
from hilbert_monitor.emulation.monitor_work import ROWS, WIDTH

from .monitor_cost import MonitorCost
from .plan import Plan


def show(plan: Plan, console: Console) -> None:
    """Print a plan: the run, memory, FLOPs, what ranks exchange, the monitor, and what the hours assume."""
    ranks = f"{plan.nodes} x {plan.devices} {plan.device.name}, {plan.strategy}"
    title = f"{plan.size} with a {plan.head} head, {plan.precision}: {ranks}"
    console.print(_run_table(plan, title), _memory_table(plan), _flops_table(plan))
    if plan.exchange:
        console.print(_exchange_table(plan))
    if plan.monitor:
        console.print(_monitor_table(plan), _monitor_time_table(plan), _elsewhere_table(plan))
    else:
        console.print(f"What the monitor takes is not known, and no part of the hours: {unavailable()}.")
    d, shares = plan.device, plan.newton_schulz_share
    console.print(
        f"Newton-Schulz is {shares['shared']:.2%} of forward and backward by FLOPs. If every rank did all of it, it"
        f" would be {shares['replicated']:.2%}."
    )
    console.print(
        f"The hours are assumed; nobody has measured them. They assume {d.utilisation:.0%} of the data sheet of an"
        f" {d.name}: {d.bf16 / 1e12:.0f} TFLOP/s bf16, {d.fp32 / 1e12:.0f} fp32 without TF32 (Newton-Schulz, monitor),"
        f" {d.bandwidth / 1e12:.1f} TB/s, {d.link / 1e9:.0f} GB/s to devices of the same machine and"
        f" {d.network / 1e9:.0f} to others. They leave out what training exchanges, as if all of it went on while"
        " devices compute. The memory leaves out workspaces and what the allocator wastes.",
        style="dim",
    )
    if not plan.monitor:
        return
    console.print(
        "The monitor's kernels, waits, bytes and FLOPs are those of this code on an emulated device, counted at heads"
        f" of {ROWS:,} x {WIDTH} to {2 * ROWS:,} x {2 * WIDTH} and continued to this one. Its time assumes"
        f" {d.launch * 1e6:.0f} µs a kernel,"
        f" {d.wait * 1e6:.0f} µs a wait, {d.factorisation * 1e6:.0f} µs an eigenvalue problem or QR factorisation and"
        f" {d.collective * 1e6:.0f} µs a collective, one after the other; what is left beside the next forward pass is"
        " that of parts that wait, and of others the time in which the device is busy. It leaves out that a sort or a"
        " top-k is several kernels, what small kernels do not fill of a device, caches, and how kernels slow down those"
        " they run beside. The search is that of a synthetic increment, not of such a run; what its ranks exchange was"
        " counted on 2, 4 and 8.",
        style="dim",
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _run_table(plan: Plan, title: str) -> Table:
    table = _table(title, "run", "")
    for role, count in plan.parameters.items():
        table.add_row(f"parameters: {role}", f"{count:,}")
    table.add_row("parameters", f"{sum(plan.parameters.values()):,}")
    table.add_row("updates", f"{plan.updates:,}")
    table.add_row("tokens", f"{plan.tokens:,}")
    table.add_row("tokens in an update", f"{plan.tokens_per_update:,}")
    table.add_row("micro-batches in an update", f"{plan.accumulation} of {plan.micro_batch} sequences")
    for name, seconds in plan.seconds.items():
        table.add_row(f"assumed time of an update: {name}", f"{seconds * 1e3:,.2f} ms")
    table.add_row("assumed hours", f"{plan.hours:,.3g}")
    table.add_row("assumed device hours", f"{plan.hours * plan.devices * plan.nodes:,.3g}")
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("Memory of a rank", "part", "GiB")
    for name, size in plan.memory.items():
        table.add_row(name, f"{size / 2**30:,.4g}")
    table.add_section()
    table.add_row("all", f"{sum(plan.memory.values()) / 2**30:,.4g}")
    return table


def _flops_table(plan: Plan) -> Table:
    table = _table("One update on all ranks", "part", "TFLOP", "share")
    for name, flops in plan.flops.items():
        table.add_row(name, f"{flops / 1e12:,.4g}", f"{flops / plan.update_flops:.2%}")
    table.add_section()
    table.add_row("all", f"{plan.update_flops / 1e12:,.4g}", "")
    return table


def _exchange_table(plan: Plan) -> Table:
    table = _table("What a rank sends in an update", "part", "GB")
    for name, sent in plan.exchange.items():
        table.add_row(name, f"{sent / 1e9:,.4g}")
    table.add_section()
    table.add_row("all", f"{sum(plan.exchange.values()) / 1e9:,.4g}")
    table.add_row("assumed ms, were nothing else done", f"{plan.exchange_seconds * 1e3:,.2f}")
    return table


def _elsewhere_table(plan: Plan) -> Table:
    title = "The monitor for other heads and ranks, without the panel's forward pass"
    table = _table(title, "head", "MB received", "assumed ms")
    for name, cost in plan.monitor_elsewhere.items():
        table.add_row(name, f"{cost.received / 1e6:,.2f}", f"{cost.seconds * 1e3:.3f}")
    return table


def _monitor_table(plan: Plan) -> Table:
    title = "The monitor beside it, a mean over updates"
    table = _table(title, "part", "GFLOP", "GB moved", "MB received", "kernels", "waits")
    for name, cost in (plan.monitor | {"all": sum(plan.monitor.values(), MonitorCost())}).items():
        moved, received = f"{cost.bytes / 1e9:,.3f}", f"{cost.received / 1e6:,.3f}"
        table.add_row(name, f"{cost.flops / 1e9:,.3f}", moved, received, f"{cost.kernels:,.1f}", f"{cost.waits:,.1f}")
    table.add_row("of an update's FLOPs", f"{plan.monitor_share['flops']:.5%}")
    return table


def _monitor_time_table(plan: Plan) -> Table:
    table = _table("Its assumed time", "part", "ms, all waited for", "ms, beside the next forward pass")
    for name, cost in (plan.monitor | {"all": sum(plan.monitor.values(), MonitorCost())}).items():
        table.add_row(name, f"{cost.seconds * 1e3:.3f}", f"{cost.overlapped * 1e3:.3f}")
    table.add_row("of an update", f"{plan.monitor_share['seconds']:.2%}", f"{plan.overlapped_share:.2%}")
    return table
