"""A loop of Lightning Fabric's: two lines of it are ours."""

import torch
from lightning.fabric import Fabric
from torch import nn

import hilbert_monitor
from hilbert_monitor.runs.record import StepRecord


class Print:
    """A sink: anything with write(record)."""

    def write(self, record: StepRecord) -> None:
        """Print what was measured exactly."""
        if record.diameter is not None:
            print(f"step {record.step}: D(S) = {record.diameter:.4f}, tokens {record.pair}")


fabric = Fabric(accelerator="cpu", devices=1, precision="32-true")
fabric.launch()
torch.manual_seed(0)
V, d = 1000, 64
module = nn.Sequential(nn.Embedding(V, d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, V, bias=False))
model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
text = torch.randint(V, (192, 33))

with hilbert_monitor.watch(
    module,
    optimizer,
    head="3",
    panel=text[160:],
    panel_size=256,
    autocast=fabric.autocast,
    log=fabric.log_dict,
    sinks=[Print()],
) as run:
    for tokens in text[:160].split(8):
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
