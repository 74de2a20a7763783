"""A head sharded by FSDP2, in a loop of one's own: torchrun --standalone --nproc-per-node 2 examples/sharded_loop.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hilbert_monitor import RowNorm
from hilbert_monitor.monitor.panel import Panel
from hilbert_monitor.monitor.probe import Probe

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_rank())
torch.manual_seed(0)  # the same weights on every rank, before they are sharded

V, d = 1001, 64
model = nn.Sequential(nn.Embedding(V, d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, V, bias=False)).to(device)
mesh = init_device_mesh(device, (dist.get_world_size(),))
for part in (model[3], model):  # the head: Shard(0), 501 and 500 rows on two ranks
    fully_shard(part, mesh=mesh)
body = torch.optim.AdamW([*model[0].parameters(), *model[1].parameters()], lr=1e-3)
head = RowNorm(model[3].parameters(), lr=1e-3)  # no communication: its rows are where they are needed

text = torch.randint(V, (256, 17), generator=torch.Generator().manual_seed(dist.get_rank()))
panel = Panel.of_tokens(torch.arange(2000) % V, 512)  # the same on every rank
with Probe(model, head, head="3", panel=panel, diameter_every=5, perturbation_every=10) as probe:
    for step in range(20):
        tokens = text[12 * step : 12 * step + 12].to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for optimizer in (body, head):
            optimizer.step()
            optimizer.zero_grad()
        record = probe.record(train_loss=loss.item())  # on every rank: they measure together
        if record.diameter is not None and dist.get_rank() == 0:
            print(f"step {record.step}: D(S) = {record.diameter:.4f}, tokens {record.pair}")
dist.destroy_process_group()
