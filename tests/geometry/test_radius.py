"""The bracket of the covering radius, against smallest enclosing balls that are found in other ways."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import covering_radius, jung_ratio, points, radius, row_diameter, row_diameter_bracket
from tests.support import clouds
from tests.support.draws import draws
from tests.support.references import regular_simplex

seeds = st.integers(0, 2**31)
kinds = st.sampled_from(clouds.KINDS)
few = st.tuples(st.integers(1, 8), st.integers(1, 3))


def enclosing_radius(S):
    """Radius of the smallest enclosing ball, in fp64, from all balls that have up to d + 1 rows on their surface."""
    points = S.double().numpy()
    smallest = math.inf
    for size in range(1, min(len(points), points.shape[1] + 1) + 1):
        for subset in itertools.combinations(points, size):
            edges = np.array(subset[1:]).reshape(size - 1, points.shape[1]) - subset[0]
            center = subset[0] + np.linalg.lstsq(edges, (edges**2).sum(1) / 2, rcond=None)[0]
            smallest = min(smallest, float(np.linalg.norm(points - center, axis=1).max()))
    return smallest


def assert_certified(S, **options):
    """Both bounds follow from their certificates in fp64, with the chain of the paper; return the bracket."""
    r = covering_radius(S, **options)
    rows = S.double()
    assert 0 <= r.lower <= r.upper <= r.ball_radius
    assert r.nonfinite_rows == 0
    assert r.center.shape == S.shape[1:]
    shift = float(rows.abs().max())
    assert float((rows - r.center).norm(dim=1).max()) <= r.ball_radius * (1 + 1e-15) + 1e-15 * shift
    assert len(r.support) == len(r.weights)
    assert float(r.weights.min()) > 0
    assert float(r.weights.sum()) == pytest.approx(1, abs=1e-12)
    support = rows[r.support] - rows[0]
    center = r.weights @ support
    proof = math.sqrt(float(r.weights @ (support - center).square().sum(1)))
    assert r.lower <= proof * (1 + 1e-15) + 1e-15 * shift
    k = min(S.shape[1], len(S) - 1)
    if k:
        D = row_diameter(S)
        assert D.lower <= 2 * r.upper
        assert r.lower <= D.upper / (2 * jung_ratio(k))
    return r


def assert_brackets(r, radius, gap=0.01):
    assert r.lower <= radius * (1 + 1e-12)
    assert r.upper >= radius * (1 - 1e-12)
    assert r.upper <= (1 + gap) * r.lower


@settings(max_examples=draws(50), deadline=None)
@given(seed=seeds, shape=few, kind=kinds, dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_the_radius_of_few_rows_is_bracketed(seed, shape, kind, dtype):
    S = kind(*shape, seed).to(dtype)
    radius = enclosing_radius(S)
    for diameter in (None, row_diameter(S), row_diameter_bracket(S)):
        assert_brackets(assert_certified(S, diameter=diameter), radius)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", clouds.KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=draws(4), deadline=None)
@given(seed=seeds, V=st.integers(3000, 9000), d=st.sampled_from([2, 17, 64]))
def test_the_bounds_are_close_on_every_kind_of_cloud(kind, seed, V, d):
    for dtype in (torch.float32, torch.float16):
        r = assert_certified(kind(V, d, seed).to(dtype))
        assert r.upper <= (1.12 if kind is clouds.repeated else 1.03) * r.lower


@pytest.mark.few(1)
@pytest.mark.parametrize("head", ["adamw", "rownorm"])
@pytest.mark.parametrize("V", [1500, 10_000])
def test_the_bounds_are_within_a_percent_on_increments_of_optimizers(head, V):
    S = make_increment(head, V, 64, panel=1).S
    for diameter in (None, row_diameter(S)):
        r = assert_certified(S, diameter=diameter)
        assert r.upper <= 1.01 * r.lower


# The ends of the chain D <= 2 rad <= 2 J_k D.


@pytest.mark.parametrize("k", [1, 2, 7, 100])
def test_a_regular_simplex_attains_jungs_bound(k):
    S = regular_simplex(k)
    for diameter in (None, row_diameter(S)):
        assert_brackets(assert_certified(S, diameter=diameter), 1 / (2 * jung_ratio(k)), gap=1.5e-3)


@settings(max_examples=draws(40), deadline=None)
@given(seed=seeds, V=st.integers(2, 80), d=st.integers(1, 20), kind=kinds)
def test_a_known_diameter_bounds_the_radius_from_both_sides(seed, V, d, kind):
    S = kind(V, d, seed)
    D = row_diameter(S)
    r = assert_certified(S, diameter=D)
    assert r.lower >= D.lower / 2 * (1 - 1e-9)
    assert r.upper <= D.upper / (2 * jung_ratio(min(d, V - 1))) * (1 + 1e-9)


# Shift, scale, order, copies.


@settings(max_examples=draws(25), deadline=None)
@given(seed=seeds, V=st.integers(2, 60), d=st.integers(1, 20))
def test_shift_permutation_rotation_and_copies_of_rows_change_nothing(seed, V, d):
    S = clouds.gaussian(V, d, seed).double()
    r = covering_radius(S)
    rotation, _ = torch.linalg.qr(clouds.gaussian(d, d, seed + 1).double())
    order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
    for same in (S + clouds.gaussian(1, d, seed + 2), S[order], S @ rotation, S.repeat(3, 1)):
        other = assert_certified(same)
        assert other.lower <= r.upper * (1 + 1e-12)
        assert r.lower <= other.upper * (1 + 1e-12)
        assert other.upper <= 1.01 * r.lower


def test_a_common_shift_of_a_million_times_the_spread():
    for kind in (clouds.gaussian, clouds.heavy_tailed, clouds.row_normalised):
        S = kind(3000, 32, 5)
        r = assert_certified(S / S.std() + 1e6 * clouds.gaussian(1, 32, 0))
        assert r.upper <= 1.01 * r.lower


FP32_SCALES = [(torch.float32, scale) for scale in (1e-44, 1e-38, 1e-20, 1e13, 1e37, 3e38)]
FP64_SCALES = [(torch.float64, scale) for scale in (1e-310, 1e-200, 1e200, 1e307)]


@pytest.mark.parametrize(("dtype", "scale"), FP32_SCALES + FP64_SCALES)
def test_from_denormals_to_the_largest_floats(dtype, scale):
    S = clouds.heavy_tailed(900, 8, 2).double()
    S = (S / S.abs().max()).mul(scale).to(dtype)
    r, exact = covering_radius(S), covering_radius(S.double() / scale)
    assert exact.lower * scale <= r.upper * (1 + 1e-12)
    assert r.lower <= exact.upper * scale * (1 + 1e-12)
    assert r.upper <= 1.01 * r.lower


def test_the_bounds_hold_between_two_denormals():
    r = covering_radius(torch.tensor([[5e-324, 0.0], [0.0, 5e-324]], dtype=torch.float64))
    assert r.lower == 0
    assert r.upper >= 5e-324


@pytest.mark.parametrize("V", [1, 2, 5000])
def test_only_equal_rows_have_radius_zero(V):
    S = clouds.gaussian(1, 9, V).double().repeat(V, 1)
    r = covering_radius(S)
    assert r.lower == r.upper == r.ball_radius == 0
    assert torch.equal(r.center, S[0])
    S[V // 2, 3] += 2.0**-20
    assert (covering_radius(S).lower > 0) == (V > 1)


# Non-finite rows, and arguments that are refused.


@pytest.mark.parametrize(
    ("bad", "value"),
    [([math.inf], math.inf), ([-math.inf, math.inf], math.inf), ([math.nan, math.inf], math.nan)],
)
@pytest.mark.parametrize("V", [1, 5000])
def test_non_finite_rows_are_counted(V, bad, value):
    S = clouds.gaussian(V, 8, 0)
    where = [V // 2, V - 1][: len(bad)]
    for row, x in zip(where, bad, strict=False):
        S[row, 3] = x
    r = covering_radius(S)
    expected = row_diameter(S)
    assert str((r.lower, r.upper)) == str((expected.lower, expected.upper))
    assert r.nonfinite_rows == expected.nonfinite_rows
    if V > 2:
        assert r.lower == value or (math.isnan(value) and math.isnan(r.lower))


def test_a_diameter_of_other_rows_is_refused():
    S = clouds.gaussian(50, 4, 0)
    with pytest.raises(ValueError, match=r"diameter must be that of S, got one with rows .* where S has 10"):
        covering_radius(S[:10], diameter=row_diameter(S))
    with pytest.raises(ValueError, match="diameter must be that of S, got at most"):
        covering_radius(S, diameter=row_diameter(1e-3 * S))


def test_two_passes_over_the_rows(monkeypatch):
    loads = []
    real = points.CentredRows.points

    def counted(self, rows, out=None):
        x = real(self, rows, out)
        loads.append(len(x))
        return x

    monkeypatch.setattr(points.CentredRows, "points", counted)
    S = clouds.row_normalised(20_000, 32, 0)
    covering_radius(S)
    assert sum(loads) <= 2 * len(S) + radius._SAMPLE + 2 * 512
