"""The geometry on the emulated device: the CPU's numbers, from a bounded number of kernels and waits."""

import dataclasses
import math

import torch

from hilbert_monitor import geometry as g
from hilbert_monitor.doctor.samples import make_increment
from tests.support.emulation.device import DeviceTensor, EmulatedDevice

V, WIDTH, PANEL = 4000, 32, 256


CASES = {
    "bracket": (lambda S, G, H: g.row_diameter_bracket(S), 70, 1),
    "deferred bracket": (lambda S, G, H: g.deferred_bracket(S).numbers, 70, 0),
    "exact": (lambda S, G, H: g.row_diameter(S), 300, 10),
    "perturbation": (lambda S, G, H: g.hilbert_perturbation(S, H), 100, 12),
    "radius": (lambda S, G, H: g.covering_radius(S), 200, 25),
    "rows": (lambda S, G, H: g.row_statistics(S), 30, 1),
    "centred rows": (lambda S, G, H: g.center_rows(S), 20, 0),
    "row norm": (lambda S, G, H: g.row_norm(S), 60, 6),
    "projected row norm": (lambda S, G, H: g.projected_row_norm(S), 60, 6),
    "spectral norm": (lambda S, G, H: g.spectral_norm(S), 100, 4),
    "decrease": (lambda S, G, H: g.first_order_decrease(G, S), 20, 4),
    "centred decrease": (lambda S, G, H: g.centred_decrease(G, S), 120, 12),
    "Hilbert distance": (lambda S, G, H: g.hilbert_distance(H, H.flip(0), logits=True), 30, 4),
    "variation": (lambda S, G, H: g.variation_seminorm(H), 10, 2),
    "tension": (lambda S, G, H: g.tension_bracket(G[:60], budget_seconds=0), math.inf, math.inf),
}
"""A function, and the most kernels and waits that it may take: with room, unless it is to have none.

The tension is solved row by row, which no device likes."""


EFFORT = ("seconds", "pairs_screened", "pairs_computed")
"""Fields that tell how hard it was: tiles are larger on a device."""


def leaves(result):
    """The numbers of a result, each tensor on the host."""
    if dataclasses.is_dataclass(result):
        names = [f.name for f in dataclasses.fields(result) if f.name not in EFFORT]
        return [leaf for name in names for leaf in leaves(getattr(result, name))]
    if isinstance(result, tuple | list):
        return [leaf for each in result for leaf in leaves(each)]
    if isinstance(result, DeviceTensor):
        return [result.host]
    return [result]


def same(a, b):
    """Whether two numbers of fp64 are equal but for its rounding, which the search for a tension takes to 1e-8."""
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and bool(((a - b).abs() <= 1e-6 * a.abs().max()).all())
    return a == b or (isinstance(a, float) and abs(a - b) <= 1e-6 * abs(a))


def similar(a, b):
    """Whether numbers of fp32 agree: rows and pairs may tie there, and bounds of a radius are up to 1 % apart."""
    return not isinstance(a, float) or a == b or abs(a - b) <= 1e-2 * abs(a)


def test_numbers_are_the_cpus_and_kernels_and_waits_are_few():
    increment = make_increment("rownorm", V, WIDTH, steps=6, panel=PANEL)
    G = torch.randn(V, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs = [increment.S, G - G.mean(0), increment.H]
    wrong = []
    for name, (call, kernels, waits) in CASES.items():
        for dtype, agree in ((torch.float64, same), (torch.float32, similar)):
            expected = call(*(x.to(dtype) for x in inputs))
            with EmulatedDevice() as device:
                on_device = [device.tensor(x.to(dtype)) for x in inputs]
                with device.counted() as counts:
                    found = call(*on_device)
            if not all(agree(a, b) for a, b in zip(leaves(expected), leaves(found), strict=True)):
                wrong.append(f"{name}, {dtype}: {found} in place of {expected}")
        if counts.total.kernels > kernels or counts.total.waits > waits:
            wrong.append(f"{name}, at most {kernels} kernels and {waits} waits: {counts.table()}")
    assert not wrong, "\n".join(wrong)
