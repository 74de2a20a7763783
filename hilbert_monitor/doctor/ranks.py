"""Runs a function in several processes of torch.distributed, and ends all of them if one fails or hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .finding import describe


def in_ranks(work: Callable[..., Any], *args: Any, world: int, backend: str, patience: float) -> list[Any]:
    """Call ``work(rank, world, *args)`` in new processes; return their results in the order of the ranks.

    Args:
        work: a function at the top of a module, so that a new process can import it.
        args: its further arguments.
        world: number of processes.
        backend: backend of torch.distributed. With nccl each process uses the GPU of its rank.
        patience: seconds within which all must end.

    Raises:
        TimeoutError: if they do not end in time. All are killed.
        RuntimeError: if one fails; the message has its error. The others are killed.
    """
    start = mp.get_context("spawn")
    with TemporaryDirectory() as name:
        folder = Path(name)
        children = [
            start.Process(target=_child, args=(rank, world, backend, name, patience, work, args), daemon=True)
            for rank in range(world)
        ]
        try:
            for child in children:
                child.start()
            _wait(children, folder, patience)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                if child.pid is not None:
                    child.join()
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _wait(children: Sequence[Any], folder: Path, patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        codes = [child.exitcode for child in children]  # read once: a child that ends meanwhile is for the next turn
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(f"rank {rank}: {_last_line(folder, rank, code)}")
        running = [child for child, code in zip(children, codes, strict=True) if code is None]
        left = deadline - time.monotonic()
        if not running:
            return
        if left <= 0:
            raise TimeoutError(f"no answer from {len(running)} of {len(children)} processes within {patience:g} s")
        wait([child.sentinel for child in running], timeout=left)


def _last_line(folder: Path, rank: int, code: int) -> str:
    for suffix in ("error", "output"):
        path = folder / f"{rank}.{suffix}"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        if lines:
            return lines[-1]
    return f"ended with code {code}"


def _child(
    rank: int, world: int, backend: str, folder: str, patience: float, work: Callable[..., Any], args: Sequence[Any]
) -> None:
    _redirect(f"{folder}/{rank}.output")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=patience),
        )
        torch.save(work(rank, world, *args), f"{folder}/{rank}.pt")
    except Exception as error:
        Path(f"{folder}/{rank}.error").write_text(describe(error))
        os._exit(1)  # at once: an orderly exit would wait for the other ranks
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the doctor ends, so that none is left behind."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _redirect(path: str) -> None:
    """Send all output to a file, also that of libraries which do not print through Python."""
    out = os.open(path, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(out, stream)
