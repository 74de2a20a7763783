"""The paper's decoder on several ranks: its parameters sharded by FSDP2, by tensor parallelism, or by both.

Every rank draws the same whole weights and keeps its shards, so that a sharded run begins where a DDP run does.
"""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .model import Decoder
from .recipes import Recipe


def trainer_strategy(recipe: Recipe) -> str | Strategy:
    """Return what the Trainer takes as its strategy."""
    if not recipe.sharded:
        return "ddp" if recipe.world > 1 else "auto"
    return ModelParallelStrategy(recipe.readers, recipe.tensor_parallel)


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    """Leave a rank with its shards of the parameters, all of them DTensors on one mesh.

    Over the tensor-parallel dimension the rows of q, k, v, gate, up and of the head are split, the columns of out, down
    and of the embedding; a rank has its attention heads and its tokens. Over the data-parallel dimension FSDP2 splits
    the rows of all that, with a unit for each block, one for the head, and one for the embedding.

    Args:
        model: with the same whole weights on every rank.
        mesh: with dimensions data_parallel and tensor_parallel.
    """
    data, tensor = mesh["data_parallel"], mesh["tensor_parallel"]
    if tensor.size() > 1:
        parallelize_module(model, tensor, _tensor_parallel_plan(), src_data_rank=None)  # none: nothing is sent
    if data.size() > 1:
        for part in (*model.blocks, model.lm_head, model):
            fully_shard(part, mesh=data)
        for part, method in ((model, "hidden"), (model, "loss"), (model.lm_head, "loss")):
            register_fsdp_forward_method(part, method)


def _tensor_parallel_plan() -> dict[str, ParallelStyle]:
    """Return how each kind of matrix is split. The stream between the blocks is whole on every rank."""
    blocks: dict[str, ParallelStyle] = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    return {
        "embed": ColwiseParallel(output_layouts=Replicate()),
        **blocks,
        **{f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")},
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
