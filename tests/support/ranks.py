"""Run a function in several processes, the ranks of a gloo process group, and collect their results."""

import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support import warm


def in_ranks(function, folder, *args, world=2, patience=300):
    """Call `function(rank, world, *args)` in `world` processes; return their results in the order of the ranks.

    Ranks that could not meet are started once more. None has called the function then: they wait for each other.

    Args:
        function: a function of a module, so that it can be pickled.
        folder: where the processes meet and leave their results.
        args: further arguments of the function.
        world: the number of processes.
        patience: seconds after which the processes are killed.
    """
    try:
        return _results(function, folder, args, world, patience)
    except mp.ProcessRaisedException as error:
        if NotMetError.__name__ not in str(error):
            raise
        return _results(function, folder / "again", args, world, patience)


class NotMetError(RuntimeError):
    """A connection between ranks was closed while they met, as gloo's sometimes are on a busy machine."""


def _results(function, folder, args, world, patience):
    folder.mkdir(exist_ok=True, parents=True)
    ranks = mp.start_processes(
        _rank, (function, world, str(folder), args), nprocs=world, join=False, start_method=warm.METHOD
    )
    deadline = time.monotonic() + patience
    while not ranks.join(max(0.1, deadline - time.monotonic())):
        if time.monotonic() > deadline:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError(f"the ranks did not end within {patience} s")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _rank(rank, function, world, folder, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    except RuntimeError as error:
        if "connectFullMesh" in str(error) or "Connection closed by peer" in str(error):
            raise NotMetError(f"rank {rank}: {error}") from error
        raise
    try:
        torch.save(function(rank, world, *args), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()
