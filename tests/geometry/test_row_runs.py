"""Runs of rows that ranks take in turn of a matrix that each of them has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.geometry import RowRuns

CPU = torch.device("cpu")
numbers, worlds = st.integers(0, 20_000), st.integers(1, 9)


def parts(number, ranks):
    return [RowRuns(number, ranks, rank) for rank in range(ranks)]


@given(numbers, worlds)
def test_every_row_is_taken_once_and_each_rank_takes_its_share(number, ranks):
    ids = [part.ids(CPU) for part in parts(number, ranks)]
    assert torch.equal(torch.cat(ids).sort().values, torch.arange(number))
    assert max(map(len, ids)) - min(map(len, ids)) <= 1
    assert all(bool((one.diff() > 0).all()) for one in ids)


@given(numbers, worlds)
def test_ranks_have_alike_shares_of_the_first_rows_however_many(number, ranks):
    """So that long rows are shared where frequent tokens come first."""
    ids = [part.ids(CPU) for part in parts(number, ranks)]
    for first in (number // 20, number // 5):
        counts = [int((one < first).sum()) for one in ids]
        assert max(counts) - min(counts) <= parts(number, ranks)[0].length


@given(numbers, worlds)
def test_views_share_memory_with_the_matrix_and_places_have_their_shapes(number, ranks):
    x = torch.arange(2 * number).view(number, 2)
    for part in parts(number, ranks):
        rows, views = part.of(x), part.views(x)
        assert torch.equal(rows, x[part.ids(CPU)])
        assert part.memory(x, torch.float64).shape == rows.shape
        for view, place in zip(views, part.places(rows), strict=True):
            assert torch.equal(view, place)
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize(("number", "ranks"), [(50_257, 2), (50_257, 8), (128_256, 8)])
def test_runs_of_a_real_vocabulary_are_long(number, ranks):
    assert RowRuns(number, ranks, 0).length > 32
