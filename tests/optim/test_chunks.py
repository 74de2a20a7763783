"""Chunks of rows: their best size is found while steps are made, and no result depends on it."""

import pytest
import torch

from hilbert_monitor.optim import RowNorm, _chunks, rownorm
from hilbert_monitor.optim._chunks import ChunkTrials


class Clock:
    """Time that passes as it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(_chunks, "time", fake)
    return fake


def sizes_taken(trials, clock, seconds, calls, matrix):
    """Sizes that some calls are given, each of which takes the seconds of its size."""
    taken = []
    for _ in range(calls):
        with trials.size(matrix) as size:
            taken.append(size)
            clock.now += seconds[size] + (10 if len(taken) <= len(ChunkTrials.SIZES) else 0)
    return taken


@pytest.mark.parametrize("best", ChunkTrials.SIZES)
def test_every_size_is_tried_in_turn_and_the_fastest_is_kept(monkeypatch, clock, best):
    monkeypatch.setattr(ChunkTrials, "LARGE", 1)
    seconds = {size: 1.0 if size == best else 2.0 for size in ChunkTrials.SIZES}
    taken = sizes_taken(ChunkTrials(), clock, seconds, ChunkTrials.CALLS + 3, torch.zeros(10, 4))
    assert taken == [*ChunkTrials.SIZES] * ChunkTrials.ROUNDS + [best] * 3


def test_a_call_that_other_work_slowed_does_not_decide(monkeypatch, clock):
    monkeypatch.setattr(ChunkTrials, "LARGE", 1)
    trials, matrix, best = ChunkTrials(), torch.zeros(10, 4), ChunkTrials.SIZES[2]
    for call in range(ChunkTrials.CALLS):
        with trials.size(matrix) as size:
            slowed = call < ChunkTrials.CALLS - len(ChunkTrials.SIZES)  # in all rounds but the last
            clock.now += 2.0 if size != best else 50.0 if slowed else 1.0
    with trials.size(matrix) as size:
        assert size == best


def test_small_matrices_and_mixed_dtypes_make_no_trials(monkeypatch):
    monkeypatch.setattr(_chunks, "time", None)  # a clock that cannot be read
    small, large = torch.zeros(10, 4), torch.zeros(ChunkTrials.LARGE // 16, 4)
    for matrices in ((small,), (large, large.bfloat16())):
        with ChunkTrials().size(*matrices) as size:
            assert size == _chunks.CACHE_BYTES


@pytest.mark.parametrize(("V", "d"), [(1001, 64), (129, 37), (5, 8)])
def test_the_steps_of_rownorm_are_the_same_to_the_bit_whatever_the_size(monkeypatch, V, d):
    """Also while sizes are tried, one after the other."""
    monkeypatch.setattr(ChunkTrials, "LARGE", 1)
    results = []
    for sizes in ((2**62,), (d * 4,), (7 * d * 4,), (128 * d * 4,), (d * 4, 2**62, 16 * d * 4)):
        monkeypatch.setattr(ChunkTrials, "SIZES", sizes)
        monkeypatch.setattr(rownorm, "_TRIALS", ChunkTrials())
        draw = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(V, d, generator=draw))
        optimizer = RowNorm([p], lr=1e-3, weight_decay=0.1)
        for _ in range(6):
            p.grad = torch.randn(V, d, generator=draw)
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["momentum_buffer"]))
    for p, buffer in results[1:]:
        assert torch.equal(p, results[0][0])
        assert torch.equal(buffer, results[0][1])
