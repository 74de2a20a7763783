"""Ranks never part: one that fails or has other rows costs a measurement on all, one that dies ends all of them."""

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hilbert_monitor.geometry import (
    bracket,
    covering_radius,
    diameter,
    gauge_waste,
    hilbert_perturbation,
    perturbation,
    radius,
    row_diameter,
    row_diameter_bracket,
    rows,
    spectral,
    spectral_norm,
)
from hilbert_monitor.geometry._cloud import PointCloud
from tests.support import warm
from tests.support.ranks import in_ranks
from tests.support.shards import sharded


def matrix(V=3000, d=32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(V, d, generator=draw) / torch.rand(V, 1, generator=draw)


def panel(S):
    return hilbert_perturbation(S, matrix(20, 32, seed=1)).max


FAULTS = [
    (row_diameter, diameter, "pad"),
    (row_diameter, PointCloud, "survey"),
    (row_diameter, diameter, "screen_tables"),
    (row_diameter, diameter, "largest_bounds"),
    (row_diameter, diameter.DiameterSearch, "_compute_in_full"),
    (row_diameter_bracket, PointCloud, "norms"),
    (row_diameter_bracket, bracket, "padded"),
    (row_diameter_bracket, bracket, "points"),
    (covering_radius, PointCloud, "norms"),
    (covering_radius, radius, "_best_weights"),
    (panel, perturbation._Panel, "run"),
    (panel, perturbation._Panel, "logits"),
    (spectral_norm, spectral, "_gram"),
    (gauge_waste, rows, "compute_dtype"),
]
"""A measurement, and a function inside it that fails on one rank."""


def _each_fault(rank, world):
    S = matrix()
    failures = []
    for measure, place, name in FAULTS:
        real = getattr(place, name)
        if rank == world - 1:

            def broken(*args, **kwargs):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            setattr(place, name, broken)
        try:
            measure(sharded(S))
            failures.append("none")
        except RuntimeError as error:
            failures.append(f"{type(error).__name__}: {error}")
        setattr(place, name, real)
        again, whole = measure(sharded(S)), measure(S)
        number = getattr(whole, "lower", whole)
        assert getattr(again, "lower", again) == pytest.approx(number, rel=0.02), name
    return failures


@pytest.mark.sweep
def test_a_rank_that_fails_inside_a_measurement_fails_on_all_and_the_next_one_works(tmp_path):
    *others, broken = in_ranks(_each_fault, tmp_path, world=3, patience=120)
    for (measure, _, name), failure, *theirs in zip(FAULTS, broken, *others, strict=True):
        assert failure.startswith("RuntimeError: CUDA error"), (measure, name)
        assert all(other.startswith("RankError: another rank failed") for other in theirs), (measure, name, theirs)


def _killed(rank, world, folder, patience):
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    timeout = timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timeout)
    if rank == 1:
        diameter.largest_bounds = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        row_diameter(sharded(matrix()))
    except Exception as error:
        (folder / f"{rank}.txt").write_text(f"{time.monotonic() - start:.1f}\n{type(error).__name__}: {error}")
    os._exit(0)


def test_a_rank_that_is_killed_ends_the_others_with_the_error_of_their_group(tmp_path):
    world, patience = 3, 30
    start = multiprocessing.get_context(warm.METHOD).Process
    ranks = [start(target=_killed, args=(rank, world, tmp_path, patience)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(4 * patience)
    hung = [rank for rank in ranks if rank.is_alive()]
    for rank in hung:
        rank.kill()
    assert not hung
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        seconds, error = (tmp_path / f"{rank}.txt").read_text().split("\n", 1)
        assert float(seconds) <= 2 * patience
        assert "RankError" not in error
        assert "gloo" in error.lower() or "Connection closed" in error or "timed out" in error.lower()


def _sentence(measure, *args, **options):
    try:
        measure(*args, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _different_inputs(rank, world):
    S, H = matrix(), matrix(20, 32, seed=1)
    shards, odd = sharded(S), rank == 1
    bracket = row_diameter_bracket(S)
    other = replace(bracket, pair=(0, 1))
    return [
        _sentence(row_diameter, sharded(S[:, :16] if odd else S)),
        _sentence(row_diameter, sharded(S.double() if odd else S)),
        _sentence(row_diameter_bracket, sharded(S[:100] if odd else S)),
        _sentence(spectral_norm, sharded(S.long() if odd else S)),
        _sentence(row_diameter, replace(shards, rows=S, ids=torch.arange(len(S))) if odd else shards),
        _sentence(hilbert_perturbation, shards, H[:7] if odd else H),
        _sentence(hilbert_perturbation, shards, H[:, :7] if odd else H),
        _sentence(covering_radius, shards, diameter=other if odd else bracket),
        "works" if row_diameter(shards).value == row_diameter(S).value else "broken",
    ]


def test_ranks_with_different_inputs_all_say_so_and_go_on(tmp_path):
    first, second = in_ranks(_different_inputs, tmp_path, world=2, patience=120)
    alike = "ValueError: ranks must measure one matrix alike, got "
    for sentences in (first, second):
        width, dtype, height, _, overlap, positions, _, pair, works = sentences
        assert alike in width
        assert "(3000, 32) torch.float32" in width
        assert "(3000, 16) torch.float32" in width
        assert alike in dtype
        assert "torch.float64" in dtype
        assert alike in height
        assert (
            overlap == "ValueError: ranks must hold each of 3000 rows once, got 1500, 3000 rows: check the ids of each"
        )
        assert alike in positions
        assert alike in pair
        assert works == "works"
    assert second[3].startswith("TypeError: S must be a real floating-point tensor")
    assert second[6].startswith("ValueError: S and H must have one width")
    assert first[3].startswith("RankError")
    assert first[6].startswith("RankError")


def _outside_the_mesh(rank, world):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    S = matrix()
    head = distribute_tensor(S, DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
    return _sentence(row_diameter, head) if rank == 2 else row_diameter(head).value == row_diameter(S).value


def test_a_rank_outside_the_mesh_is_told_so_and_the_others_do_not_wait_for_it(tmp_path):
    first, second, outside = in_ranks(_outside_the_mesh, tmp_path, world=3, patience=120)
    assert first
    assert second
    assert outside.startswith("ValueError: rank 2 is not in the mesh of S")
