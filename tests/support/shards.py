"""A matrix that every rank of a test has, as one that is sharded over them."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hilbert_monitor.geometry import RowShards, RowSource


def sharded(S, *, first=None):
    """Return the rows of this rank: S (V, d) is cut into as many parts as there are ranks. Nothing is sent."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return RowShards.of(RowSource(distribute_tensor(S, mesh, [Shard(0)], src_data_rank=None), number=first))
