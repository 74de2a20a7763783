"""Sharded decoders trained by the paper's recipe over gloo processes: the run of one process, and its checkpoints."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from hilbert_monitor import pretraining_optimizer, warmup_cosine
from tests.support.decoders import Plain

BF16 = {"rownorm": {"rounding": "compensated"}, "muon": {"rounding": "stochastic"}}


def decoder(kind="whole", dtype=torch.float32, mesh=None):
    """A decoder whose 37 tokens do not divide by the ranks, with its optimizer and schedule."""
    torch.manual_seed(0)
    model = Plain(37, 16, bias=True).to(dtype)
    if kind in ("tp", "2-D"):
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind in ("fsdp", "2-D"):
        options = {} if mesh is None else {"mesh": mesh["dp"]}
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = pretraining_optimizer(model, **(BF16 if dtype == torch.bfloat16 else {}))
    return model, optimizer, warmup_cosine(optimizer, 10)


def train(run, updates, micro_batches=2):
    """Updates with accumulation, clipping and the schedule; every rank has the whole batch."""
    model, optimizer, schedule = run
    for t in updates:
        draw = torch.Generator().manual_seed(t)
        for _ in range(micro_batches):
            tokens = torch.randint(0, 37, (6, 9), generator=draw)
            loss = cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / micro_batches).backward()
        clip(model)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def clip(model):
    """Clip as torch does. It cannot mix whole and sharded gradients in one norm, so here each kind has its own."""
    gradients = [p.grad for p in model.parameters()]
    kinds = [[g for g in gradients if isinstance(g, DTensor) is kind] for kind in (True, False)]
    norms = [whole(nn.utils.get_total_norm(some)) for some in kinds if some]
    total = torch.stack(norms).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, total, foreach=False)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def weights(run):
    return [whole(p.detach()).clone() for p in run[0].parameters()]


def state(run):
    """All that the optimizer holds for each parameter, gathered, and in which group."""
    optimizer = run[1]
    return [
        {**{key: torch.as_tensor(whole(value)).clone() for key, value in optimizer.state[p].items()}}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def options(flat):
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def save(run, folder, flat):
    model, optimizer = get_state_dict(run[0], run[1], options=options(flat))
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(run, folder, flat):
    model, optimizer = get_state_dict(run[0], run[1], options=options(flat))
    both = {"model": model, "optimizer": optimizer}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(
        run[0], run[1], model_state_dict=both["model"], optim_state_dict=both["optimizer"], options=options(flat)
    )
    for _ in range(4):
        run[2].last_epoch += 1
    return state(run)


def resumed(kind, folder, dtype, flat):
    run = decoder(kind, dtype)
    loaded = load(run, folder, flat)
    train(run, range(4, 6))
    return loaded, weights(run)
