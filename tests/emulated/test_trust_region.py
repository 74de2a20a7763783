"""A TrustRegion on the emulated device: the CPU's weights, and one synchronization a step, for the gradients."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from hilbert_monitor import TrustRegion
from tests.emulated.test_training import OPTIMIZERS, TEXT, V
from tests.support.decoders import Plain, seeded
from tests.support.emulation.device import NAME, EmulatedDevice


def trained(make, device, limit, updates=3):
    """The weights before and after some updates, in fp64, and what was held in each."""
    text, model = TEXT.to(device), seeded(Plain, V=V, d=16).double().to(device)
    before = [p.detach().cpu().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[make](model)
    region, held = TrustRegion(**limit), []
    with region.watch(model, optimizer):
        for _ in range(updates):
            optimizer.zero_grad()
            cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            held.append(region.last)
    return before, [p.detach().cpu() for p in model.parameters()], held


@pytest.mark.few(1)
@pytest.mark.parametrize("make", ["AdamW", "AdamW, lr a tensor", "SGD"])
def test_steps_are_held_as_on_the_cpu(make):
    with EmulatedDevice():
        for limit in ({"limit": 1e-3}, {"limit": 10.0}, {"lr_multiple": 0.1}):
            before, ours, held = trained(make, NAME, limit)
            _, theirs, on_cpu = trained(make, "cpu", limit)
            assert [(one.held, one.tokens) for one in held] == [(one.held, one.tokens) for one in on_cpu]
            for start, a, b in zip(before, ours, theirs, strict=True):
                way = float((b - start).abs().max())  # of which 3e-5 is rounding: of 1 - 0.999**t, in fp32
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * way)


def test_step_synchronizes_for_the_gradients_alone():
    with EmulatedDevice() as device:
        text, model = TEXT.to(NAME), seeded(Plain, V=V, d=16).to(NAME)
        optimizer = AdamW(model.parameters(), lr=1e-3, foreach=True)
        with TrustRegion(1e-3).watch(model, optimizer) as region:
            for _ in range(2):
                cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
                with device.counted() as counts:
                    optimizer.step()
        ours = {line: n for (_, line), n in counts.waited.items() if line.startswith("monitor/")}
        assert sorted(ours.values()) == [1, 1], counts.table()  # for the gradients; then the last step is read
        assert all(line.startswith("monitor/trust_region.py") for line in ours), counts.table()
        assert region.clipped == 2
