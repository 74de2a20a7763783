"""Promises that every function of rows keeps: bad input, precision, memory, and the caller's tensors."""

import dataclasses
import math
import threading

import pytest
import torch

from benchmarks.measure import peak_bytes
from hilbert_monitor.geometry import (
    RowSource,
    center_rows,
    covering_radius,
    full_precision,
    hilbert_perturbation,
    log_partition,
    projected_row_norm,
    row_diameter,
    row_diameter_bracket,
    row_norm,
    row_statistics,
    spectral_norm,
    tension_bracket,
)
from tests.support import clouds
from tests.support.precision import MatmulPrecision
from tests.support.warm import Program


def states(S):
    """Hidden states of the width of S."""
    width = S.shape[-1] if isinstance(S, torch.Tensor | RowSource) and S.shape else 4
    return clouds.gaussian(40, width, 1)


def panel(S, **options):
    return hilbert_perturbation(S, states(S), **options)


def partition(S, **options):
    return log_partition(S, states(S), **options)


MEASURES = (row_diameter, row_diameter_bracket, covering_radius, panel, partition, row_statistics, spectral_norm)
OPERATIONS = (center_rows, row_norm, projected_row_norm)
every_measure = pytest.mark.parametrize("measure", MEASURES, ids=lambda f: f.__name__)
every_function = pytest.mark.parametrize("function", [*MEASURES, *OPERATIONS], ids=lambda f: f.__name__)


def numbers(result):
    """Flatten a result to a list of floats, without its counts of work."""
    if isinstance(result, torch.Tensor):
        return result.double().flatten().tolist()
    if dataclasses.is_dataclass(result):
        names = [
            f.name for f in dataclasses.fields(result) if f.name not in ("pairs_screened", "pairs_computed", "products")
        ]
        result = [getattr(result, name) for name in names]
    if isinstance(result, tuple | list):
        return [x for each in result for x in numbers(each)]
    return [float(result)]


def assert_same(one, other, rel=0.0):
    for a, b in zip(numbers(one), numbers(other), strict=True):
        assert math.isclose(a, b, rel_tol=rel, abs_tol=rel) or (math.isnan(a) and math.isnan(b))


BAD_INPUT = [
    (torch.zeros(0, 4), ValueError, "at least one row"),
    (torch.zeros(4, 0), ValueError, "at least one row and one column"),
    (torch.zeros(4), ValueError, r"\(V, d\) matrix"),
    (torch.zeros(2, 3, 4), ValueError, r"\(V, d\) matrix"),
    (torch.zeros(3, 4, dtype=torch.int64), TypeError, "floating-point"),
    (torch.zeros(3, 4, dtype=torch.complex64), TypeError, "real"),
    (torch.zeros(3, 4).to(torch.float8_e5m2), TypeError, "float8_e5m2"),
    (torch.zeros(3, 4).to_sparse(), TypeError, "dense"),
    ([[1.0, 2.0]], TypeError, "torch.Tensor"),
]


@every_function
def test_bad_input_gets_one_sentence(function):
    for A, error, words in BAD_INPUT:
        with pytest.raises(error, match=rf"\A[SUAH] must .*{words}.*\Z"):
            function(A)


@every_function
def test_too_little_scratch_memory_is_refused(function):
    with pytest.raises(ValueError, match=r"\Amax_bytes=8 is .*\Z"):
        function(torch.ones(30, 100), max_bytes=8)


@every_function
def test_input_graph_and_random_state_stay_as_they_were(function):
    S = clouds.heavy_tailed(1500, 32, 0).requires_grad_()
    before, state = S.detach().clone(), torch.get_rng_state()
    result = function(S)
    assert torch.equal(S, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert S.grad is None
    assert torch.is_grad_enabled()
    if isinstance(result, torch.Tensor):
        assert not result.requires_grad
        result.fill_(7.0)
        assert torch.equal(S, before)


@every_function
def test_reduced_precision_around_a_call_does_not_leak_in(function):
    S = clouds.row_normalised(3000, 64, 0)
    expected = function(S)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), MatmulPrecision() as products:
            assert_same(function(S), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {setting for _, *settings in products.seen for setting in settings} <= {"ieee"}
    assert {dtype for dtype, *_ in products.seen} <= {torch.float32, torch.float64}


def test_a_call_that_ends_first_leaves_true_fp32_to_calls_of_other_threads():
    began, ended, seen = threading.Event(), threading.Event(), []

    @full_precision
    def short():
        began.wait(10)

    @full_precision
    def long():
        began.set()
        ended.wait(10)
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)

    torch.set_float32_matmul_precision("medium")
    try:
        threads = [threading.Thread(target=call) for call in (short, long)]
        for thread in threads:
            thread.start()
        threads[0].join()
        ended.set()
        threads[1].join()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == ["ieee"]


def test_a_matmul_setting_that_is_inherited_stays_inherited():
    code = """if True:
        import torch
        from hilbert_monitor import row_diameter
        torch.backends.fp32_precision = "tf32"
        row_diameter(torch.randn(600, 8))
        print(torch.backends.cuda.matmul.fp32_precision)
        torch.backends.fp32_precision = "ieee"
        print(torch.backends.cuda.matmul.fp32_precision)
    """
    program = Program("-c", code)
    assert program.wait() == 0, program.output
    assert program.output.split() == ["tf32", "ieee"]


@every_function
def test_views_give_what_their_copies_give(function):
    S = clouds.heavy_tailed(1200, 64, 0)
    for view in (S.T.contiguous().T, S[::2], S[:, ::3], S[100:900, 5:50], S.flip(0)[1:], S[:1].expand(5, -1)):
        copy = view.clone(memory_format=torch.contiguous_format)
        assert_same(function(view), function(copy), rel=1e-5)


@every_measure
@pytest.mark.parametrize("kind", [clouds.heavy_tailed, pytest.param(clouds.row_normalised, marks=pytest.mark.sweep)])
def test_scratch_memory_stays_within_its_bound(measure, kind):
    S = kind(12_000, 96, 0)
    beyond = 3 * 96 * 96 * 8 if measure is spectral_norm else 0
    for mebibytes in (3, 64):
        assert peak_bytes(lambda: measure(S, max_bytes=mebibytes * 2**20)) <= mebibytes * 2**20 + beyond  # noqa: B023


@every_function
def test_rows_in_bf16_are_not_copied_whole(function):
    S = clouds.heavy_tailed(40_000, 64, 0).bfloat16()
    result = S.nbytes if function in OPERATIONS else 0
    step = 2 * S.nbytes if function is projected_row_norm else 0  # its unit rows, in fp32
    assert peak_bytes(lambda: function(S, max_bytes=8 * 2**20)) <= result + step + 8 * 2**20


# Rows on demand


def difference(S):
    """Return S as a source that is formed from two matrices, as a difference of weights is."""
    weights = clouds.gaussian(*S.shape, 9)
    return RowSource(weights + S, weights, form=torch.sub), weights + S - weights


@every_measure
def test_a_source_is_measured_as_its_rows_are_and_never_formed_whole(measure):
    source, S = difference(clouds.heavy_tailed(20_000, 96, 3))
    assert_same(measure(source), measure(S), rel=1e-5)
    assert S.nbytes > 6 * 2**20
    assert peak_bytes(lambda: measure(source, max_bytes=6 * 2**20)) <= 6 * 2**20


@every_measure
def test_sources_of_sources_without_padding_are_measured_as_their_rows_are(measure):
    _, S = difference(clouds.heavy_tailed(900, 12, 3))
    bias = clouds.gaussian(900, 1, 4)
    inner = RowSource(S, number=800)
    source = RowSource(inner, bias, form=lambda s, b: torch.cat([2 * s, b], 1), width=13)
    assert source.shape == (800, 13)
    assert_same(measure(source), measure(torch.cat([2 * S, bias], 1)[:800]), rel=1e-5)


@every_measure
def test_rows_that_are_not_finite_or_out_of_range_are_measured_through_a_source(measure):
    for factor in (1e-30, 1e30, math.nan):
        S = clouds.gaussian(700, 8, 0)
        S[77] *= factor
        assert_same(measure(RowSource(S, form=torch.clone)), measure(S), rel=1e-5)


def test_a_form_that_returns_the_caller_s_rows_leaves_them_alone():
    S = clouds.heavy_tailed(3000, 32, 0)
    before = S.clone()
    for form in (lambda s: s, lambda s: s.float(), lambda s: s[:, :16]):
        for measure in MEASURES:
            measure(RowSource(S, form=form, width=form(S[:1]).shape[1]))
    assert torch.equal(S, before)


def test_bad_input_of_a_source_names_what_is_wrong():
    with pytest.raises(TypeError, match=r"S must be a real floating-point tensor, got torch\.int64"):
        row_diameter(RowSource(torch.ones(3, 2).long(), form=lambda x: x))
    with pytest.raises(ValueError, match="at least one row"):
        row_diameter_bracket(RowSource(torch.ones(3, 2), number=0))


def test_the_tension_leaves_its_gradient_as_it_was():
    G = clouds.gaussian(200, 6, 0).requires_grad_()
    before = G.detach().clone()
    tension_bracket(G, budget_seconds=0)
    assert torch.equal(G, before)
