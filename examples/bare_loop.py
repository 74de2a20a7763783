"""The whole monitor in a training loop of one's own: run folder, alerts, metrics, resume. Two lines of it are ours."""

import torch
from torch import nn

import hilbert_monitor

torch.manual_seed(0)
V, d = 1000, 64
model = nn.Sequential(nn.Embedding(V, d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, V, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(V, (256, 33))
training, validation = text[:240].split(8), text[240:].split(8)


def loss_of(tokens: torch.Tensor) -> torch.Tensor:
    """The cross entropy of the next token."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def show(numbers: dict[str, float], step: int) -> None:
    """Stand for a logger: wandb.log, trackio.log, or add_scalar of a TensorBoard writer."""
    if "hilbert/step_diameter" in numbers:
        print(f"step {step}: D(S) = {numbers['hilbert/step_diameter']:.4f}")


with hilbert_monitor.watch(  # the first line
    model,
    optimizer,
    head="3",
    panel=validation,
    panel_size=256,
    perturbation_every=20,
    last_step=len(training),
    run_name="bare-loop",
    log=show,
) as run:
    for tokens in training:
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss, tokens=tokens.numel())  # the second
        if run.should_stop:  # a blow-up asked for it: on_blowup="stop"
            break
    with torch.no_grad():
        run.log_validation(torch.stack([loss_of(tokens) for tokens in validation]).mean())
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "monitor": run.state_dict()}
