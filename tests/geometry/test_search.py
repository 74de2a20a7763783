"""The exact search where it is hard: ties, equal rows, many hubs with few pairs each; and on a device far away."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import peak_bytes
from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import _cloud, bracket, diameter, row_diameter
from tests.support import clouds
from tests.support.draws import draws
from tests.support.references import blocked_diameter, length

seeds = st.integers(0, 2**31)
aten = torch.ops.aten


def fp64_diameter(S):
    """All pairs in fp64, by differences."""
    x = S.double()
    return max(
        float(torch.cdist(x[i : i + 512], x, compute_mode="donot_use_mm_for_euclid_dist").max())
        for i in range(0, len(x), 512)
    )


def assert_longest(S, expected):
    """The pair is as long as it is said to be, and no pair is longer than the upper bound."""
    found = row_diameter(S)
    assert found.value == pytest.approx(length(S.double(), found.pair), rel=1e-13, abs=0)
    assert found.value <= expected * (1 + 1e-13)
    assert found.upper >= expected
    assert found.upper <= found.value * (1 + 1e-12)
    assert found.pair[0] < found.pair[1]
    return found


def anisotropic(V, d, seed, decay=0.5):
    """Unit rows whose spread falls slowly over the coordinates: almost every row is in some pair of a long bound."""
    return normalize(clouds.gaussian(V, d, seed) * torch.arange(1, d + 1) ** -decay, dim=1)


@settings(max_examples=draws(10), deadline=None)
@given(seed=seeds, k=st.integers(11, 14), noise=st.sampled_from([0.0, 1e-9, 1e-7, 1e-5]))
def test_ties_of_different_rows_are_settled_in_fp64(seed, k, noise):
    """Vertices of a product of three simplices: most pairs have the largest distance, or one that fp32 takes for it."""
    S = clouds.simplex_product(1200, k, seed) + noise * clouds.gaussian(1200, 3 * k, seed)
    assert_longest(S, fp64_diameter(S))


@settings(max_examples=draws(10), deadline=None)
@given(seed=seeds, kinds=st.integers(2, 700), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_of_equal_rows_one_is_searched_and_named(seed, kinds, dtype):
    distinct = clouds.gaussian(kinds, 24, seed).to(dtype)
    at = torch.randint(kinds, (3000,), generator=torch.Generator().manual_seed(seed))
    S = distinct[at]
    found = assert_longest(S, fp64_diameter(distinct[at.unique()]))
    assert found.pairs_computed + found.pairs_screened <= 8 * kinds**2 + 50 * 3000


def test_rows_that_are_equal_but_for_one_are_all_different():
    S = clouds.sphere(40, 16, 0).repeat(100, 1)
    S[1234] *= 1.5
    assert 1234 in assert_longest(S, fp64_diameter(S)).pair


@pytest.mark.sweep
@settings(max_examples=draws(4), deadline=None)
@given(seed=seeds, d=st.sampled_from([40, 160]), decay=st.sampled_from([0.5, 0.7]))
def test_many_hubs_with_few_long_pairs_each(seed, d, decay):
    S = anisotropic(6000, d, seed, decay)
    assert row_diameter(S).value == pytest.approx(blocked_diameter(S), rel=1e-6)


@pytest.mark.parametrize("row", [6012, 3500])
def test_the_longest_pair_is_found_where_the_guess_does_not_look(row):
    """The rows have almost equal norms."""
    S = anisotropic(6013, 64, 1)
    i, j = row_diameter(S).pair
    S = S[[k for k in range(6013) if k not in (i, j)]]
    hidden = torch.cat([S[:row], -S[17:18], S[row:]])
    found = row_diameter(hidden)
    assert found.value == pytest.approx(blocked_diameter(hidden), rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("mebibytes", [4, 64])
@pytest.mark.parametrize("make", [anisotropic, clouds.repeated, lambda V, d, seed: clouds.simplex_product(V, 32, seed)])
def test_hard_cases_stay_within_the_memory_bound(make, mebibytes):
    S = make(8000, 96, 0)
    assert peak_bytes(lambda: row_diameter(S, max_bytes=mebibytes * 2**20)) <= mebibytes * 2**20


@pytest.mark.parametrize("scale", [1e-30, 1e25, 3e38])
def test_rows_out_of_range_are_searched_again_in_range(scale):
    S = clouds.heavy_tailed(900, 40, 2)
    S = (S / S.abs().max()).double().mul(scale).float()
    assert_longest(S, fp64_diameter(S))


@pytest.mark.parametrize("x", [math.inf, math.nan])
@pytest.mark.parametrize("row", [0, 899])
def test_rows_that_are_not_finite_are_counted_where_directions_are_taken(x, row):
    S = clouds.heavy_tailed(900, 40, 2)
    S[row, 3] = x
    found = row_diameter(S)
    assert not math.isfinite(found.value)
    assert found.nonfinite_rows == 1
    assert row in found.pair


# A device that is far away: every read waits for all that is queued. Its code paths run here on the CPU.


class Launches(TorchDispatchMode):
    """Counts kernels, and what would wait: items, sizes that depend on data, solvers that check themselves."""

    WAITS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._linalg_eigh)

    def __init__(self, monkeypatch):
        super().__init__()
        self.kernels, self.waits = Counter(), Counter()
        tolist = torch.Tensor.tolist
        monkeypatch.setattr(
            torch.Tensor, "tolist", lambda x: (self.waits.update(["tolist"]), tolist(x))[1], raising=False
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        boolean = packet is aten.index and any(getattr(i, "dtype", None) == torch.bool for i in args[1])
        if packet in self.WAITS or boolean:
            self.waits[str(packet)] += 1
        if not func.is_view:
            self.kernels[str(packet)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def far_away(monkeypatch):
    for module in (_cloud, bracket, diameter):
        monkeypatch.setattr(module, "on_host", lambda x: False)


@pytest.mark.few(1)
@pytest.mark.parametrize("head", ["adamw", "rownorm"])
@pytest.mark.parametrize("shape", [(3000, 64), (6000, 96)])
def test_a_search_on_a_device_waits_at_most_ten_times(far_away, monkeypatch, head, shape):
    S = make_increment(head, *shape, panel=1).S
    with Launches(monkeypatch) as found:
        value = row_diameter(S).value
    assert value == pytest.approx(blocked_diameter(S), rel=1e-6)
    assert 3 <= found.waits.total() <= 10, found.waits
    assert found.kernels.total() <= 330, found.kernels


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", [*clouds.KINDS, clouds.simplex_vertices], ids=lambda kind: kind.__name__)
def test_a_device_finds_what_the_host_finds(far_away, kind):
    for V in (400, 2500):
        S = kind(V, 40, 5)
        assert row_diameter(S).value == pytest.approx(blocked_diameter(S), rel=1e-6)
        assert row_diameter(S, max_bytes=2**21).value == row_diameter(S).value
