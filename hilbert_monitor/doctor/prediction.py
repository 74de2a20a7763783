"""What a plan says of this device beside what is measured here: the same model, with figures of the device itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from hilbert_monitor.bench.increments import make_increment
from hilbert_monitor.bench.overhead import device_seconds
from hilbert_monitor.emulation.device import unavailable
from hilbert_monitor.emulation.monitor_work import PANEL, grown_work
from hilbert_monitor.geometry import covering_radius, full_precision, row_diameter, row_diameter_bracket, summarize_rows
from hilbert_monitor.pretrain.device import Device
from hilbert_monitor.pretrain.recipes import HEADS, Head

from .device import CheckSizes, device_name
from .finding import Check, Outcome

FACTOR = 3.0
"""By which measured and predicted seconds may differ before the model counts as wrong for a device."""


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield checks with both heads."""
    for head in HEADS:
        case = f"{head} head ({sizes.head[0]:,} x {sizes.head[1]})"
        yield Check("prediction", case, partial(_check, device, head, *sizes.head))


def _check(device: torch.device, head: Head, V: int, d: int) -> Outcome:
    """Time bounds and an exact search, and predict both from their counts and the figures of this device."""
    if reason := unavailable():
        return Outcome("skipped", f"nothing to compare with: {reason}")
    figures, S = measured_figures(device), make_increment(head, V, d, steps=10, panel=1).S.to(device)
    calls: dict[str, Callable[[], object]] = {
        "bounds": lambda: row_diameter_bracket(S),
        "D(S) and radius": lambda: (covering_radius(S, diameter=row_diameter(S)), summarize_rows(S)),
    }
    work = grown_work(head, ranks=1, autocast=False, rows=V, width=d, positions=PANEL)
    counted = (work.bracket, work.search)
    texts, ratios = [], []
    for (name, call), part in zip(calls.items(), counted, strict=True):
        predicted = figures.seconds(part.count)
        measured = _seconds(call, device, repeat=3)
        ratios.append(measured / predicted)
        texts.append(f"{name} {measured * 1e3:.2f} ms measured, {predicted * 1e3:.2f} ms predicted")
    text = f"{'; '.join(texts)}; {_shown(figures)}"
    if device.type == "cpu":
        return Outcome("skipped", f"the model is of accelerators, a CPU launches nothing: {text}")
    right = all(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    return Outcome("ok" if right else "not known", text if right else f"the model is off for this device: {text}")


def _shown(d: Device) -> str:
    return (
        f"here a launch takes {d.launch * 1e6:.1f} µs, a wait {d.wait * 1e6:.1f} µs, a factorisation"
        f" {d.factorisation * 1e6:.0f} µs; {d.bandwidth / 1e9:,.0f} GB/s, {d.fp32 / 1e12:.2f} TFLOP/s fp32"
    )


@full_precision
def measured_figures(device: torch.device) -> Device:
    """Measure in a second or so the figures of a device that the plan's model needs."""
    large = device.type == "cuda"
    number, matrix = torch.zeros(1, device=device), torch.randn(*[4096 if large else 512] * 2, device=device)
    field = torch.zeros(2**27 if large else 2**22, device=device)
    tall = torch.randn(512, 16, device=device)
    copy = torch.empty_like(field)
    launches = 200

    def launch() -> None:
        for _ in range(launches):
            number.add_(1)

    launch_seconds = _seconds(launch, device) / launches
    return Device(
        name=device_name(device),
        fp32=2 * len(matrix) ** 3 / _seconds(lambda: matrix @ matrix, device),
        bandwidth=2 * field.nbytes / _seconds(lambda: copy.copy_(field), device),
        launch=launch_seconds,
        wait=max(0.0, _seconds(lambda: number.add_(1).item(), device) - launch_seconds),
        factorisation=_seconds(lambda: torch.linalg.qr(tall), device),
        utilisation=1.0,
    )


def _seconds(call: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    """Return the shortest time of a call, after one to warm up."""
    return min([device_seconds(call, device) for _ in range(repeat + 1)][1:])
