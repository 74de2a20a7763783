"""A TrustRegion on the emulated device: the CPU's weights, and one wait a step, for the gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from hilbert_monitor import TrustRegion
from tests.emulated.test_training import OPTIMIZERS, TEXT, V
from tests.support.decoders import Plain, seeded
from tests.support.emulation.device import NAME, EmulatedDevice


def trained(make, device, limit, how, updates=3):
    """The weights before and after some updates, in fp64, and what was held in each."""
    text, model = TEXT.to(device), seeded(Plain, V=V, d=16).double().to(device)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[make](model)
    region, held = TrustRegion(limit, how=how), []
    with region.watch(model, optimizer):
        for _ in range(updates):
            optimizer.zero_grad()
            cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            held.append(region.last)
    return before, [p.detach().cpu() for p in model.parameters()], held


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "how"), [("AdamW", "rows"), ("AdamW, lr a tensor", "rows"), ("SGD", "scale")])
def test_steps_are_held_as_on_the_cpu(make, how):
    with EmulatedDevice():
        for limit in (1e-3, 10.0):
            before, ours, held = trained(make, NAME, limit, how)
            _, theirs, on_cpu = trained(make, "cpu", limit, how)
            assert [(one.held, one.tokens) for one in held] == [(one.held, one.tokens) for one in on_cpu]
            for start, a, b in zip(before, ours, theirs, strict=True):
                way = float((b - start).abs().max())  # of which 3e-5 is rounding: of 1 - 0.999**t, in fp32
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * way)


def test_a_step_waits_for_the_gradients_alone():
    with EmulatedDevice() as device:
        text, model = TEXT.to(NAME), seeded(Plain, V=V, d=16).to(NAME)
        optimizer = AdamW(model.parameters(), lr=1e-3, foreach=True)
        with TrustRegion(1e-3).watch(model, optimizer) as region:
            for _ in range(2):
                cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
                with device.counted() as counts:
                    optimizer.step()
        ours = {line: n for (_, line), n in counts.waited.items() if line.startswith("monitor/")}
        last = [line for line in ours if not line.startswith(("monitor/finite_gradients.py", "monitor/held_step.py"))]
        assert last == [], counts.table()
        assert sum(n for line, n in ours.items() if "finite_gradients" in line) == 1
        assert region.clipped == 2
