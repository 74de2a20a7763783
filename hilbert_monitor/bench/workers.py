"""Runs jobs in processes of one thread each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def in_processes(
    function: Callable[..., Result],
    jobs: Sequence[tuple[Any, ...]],
    *,
    workers: int,
    after_each: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Call a function with the arguments of each job, and return the results in the order of the jobs.

    Args:
        function: what is called; it can be pickled, as its arguments and results.
        jobs: the arguments of each call.
        workers: number of processes; a single one is this process.
        after_each: called with each result, in the order in which they come.
    """
    if workers == 1:
        results = []
        for job in jobs:
            results.append(function(*job))
            after_each(results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(function, *job) for job in jobs]
        for future in as_completed(futures):
            after_each(future.result())
        return [future.result() for future in futures]
