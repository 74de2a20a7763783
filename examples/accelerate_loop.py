"""A loop with Accelerate: model and optimizer as it prepared them, and gradients accumulated by it."""

import torch
from accelerate import Accelerator
from torch import nn

import hilbert_monitor

torch.manual_seed(0)
V, d = 1000, 64
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Embedding(V, d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, V, bias=False))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
text = torch.randint(V, (352, 33))


def show(numbers: dict[str, float], step: int) -> None:
    """Stand for accelerator.log, which takes the same."""
    if "hilbert/step_diameter" in numbers:
        print(f"step {step}: D(S) = {numbers['hilbert/step_diameter']:.4f}")


with hilbert_monitor.watch(
    model, optimizer, head="3", panel=text[320:], panel_size=256, autocast=accelerator.autocast, log=show
) as run:
    for tokens in text[:320].split(8):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss)  # knows from the optimizer whether there was an update
