"""Watch a training loop of one's own with a Probe: no Lightning, no run folder, a record for every step."""

import torch
from torch import nn

from hilbert_monitor import Probe
from hilbert_monitor.monitor.panel import Panel

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1000, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
panel = Panel.of_tokens(torch.randint(1000, (4, 33)), size=100)  # validation text: the same positions every time

with Probe(model, optimizer, head="3", panel=panel, diameter_every=1, perturbation_every=5) as probe:
    for _ in range(10):
        tokens = torch.randint(1000, (8, 33))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record = probe.record(train_loss=loss.item())  # after every step, on every rank
        print(f"step {record.step}: D(S) = {record.diameter:.4f}, tokens {record.pair}")
        if record.perturbation_rms is not None:
            print(f"  Hilbert RMS {record.perturbation_rms:.4f}, {record.utilisation:.0%} of its worst case")
