"""Newton-Schulz: both methods agree with the plain loop, singular values come near one, singular vectors stay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.optim.newton_schulz import orthogonalize
from tests.support.draws import draws
from tests.support.optim_references import newton_schulz, rotation
from tests.support.precision import MatmulPrecision
from tests.support.references import normal

examples = settings(max_examples=draws(30), deadline=None)
seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 12), st.integers(1, 40)).map(sorted)

SHAPES = [(1, 1), (1, 2), (1, 9), (5, 5), (6, 11), (6, 12), (7, 40), (24, 32), (16, 64)]

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def generic(seed, m, n):
    return normal(seed, m, n)


def rank_one(seed, m, n):
    return normal(seed, m, 1) @ normal(seed + 1, 1, n)


def zero(seed, m, n):
    return torch.zeros(m, n, dtype=torch.float64)


def badly_conditioned(seed, m, n):
    """Singular values from one down to 1e-9."""
    decay = 10 ** -torch.linspace(0, 9, m, dtype=torch.float64)
    return rotation(normal(seed, m, m)) * decay @ rotation(normal(seed + 1, n, n))[:m]


def repeated_rows(seed, m, n):
    return normal(seed, 1, n).expand(m, n)


KINDS = [generic, rank_one, zero, badly_conditioned, repeated_rows]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def one(N, steps=5, eps=1e-5):
    """Of a single matrix, which is left as it is."""
    return orthogonalize(N.clone()[None], steps=steps, eps=eps)[0]


@pytest.mark.few(6)
@every_shape
@every_kind
def test_result_is_the_plain_loops_after_any_number_of_steps(kind, shape):
    N = kind(3, *shape)
    for steps in range(1, 8):
        torch.testing.assert_close(one(N, steps), newton_schulz(N, steps), rtol=0, atol=1e-12)


@pytest.mark.few(6)
@every_shape
@every_kind
def test_fp32_result_is_the_plain_loops_to_fp32_rounding(kind, shape):
    N = kind(4, *shape).float()
    torch.testing.assert_close(one(N).double(), newton_schulz(N), rtol=0, atol=1e-5)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_shape
def test_result_has_the_dtype_of_the_input_and_its_precision(shape, dtype):
    N = normal(5, *shape).to(dtype)
    result = one(N)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), newton_schulz(N), rtol=0, atol=64 * torch.finfo(dtype).eps)


@every_shape
def test_stacked_matrices_do_not_see_each_other(shape):
    stack = torch.stack([kind(seed, *shape).float() for seed in range(3) for kind in KINDS])
    together = orthogonalize(stack.clone(), steps=5, eps=1e-5)
    torch.testing.assert_close(together, torch.stack([one(N) for N in stack]), rtol=0, atol=1e-5)


@pytest.mark.few(4)
@every_shape
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_spoils_itself_alone(shape, bad):
    stack = torch.stack([normal(seed, *shape).float() for seed in range(4)])
    clean = orthogonalize(stack.clone(), steps=5, eps=1e-5)
    stack[2, -1, -1] = bad
    result = orthogonalize(stack, steps=5, eps=1e-5)
    assert torch.equal(result[[0, 1, 3]], clean[[0, 1, 3]])
    assert result[2].isnan().any()


@examples
@given(seeds, shapes, st.sampled_from([0.0, 1e-5, 1.0]))
def test_stabiliser_is_added_to_the_frobenius_norm(seed, shape, eps):
    N = normal(seed, *shape, scale=0.1)
    torch.testing.assert_close(one(N, eps=eps), newton_schulz(N, eps=eps), rtol=0, atol=1e-12)


@examples
@given(seeds, shapes, st.floats(1.0, 5.0))
def test_singular_values_of_a_well_conditioned_matrix_come_near_one(seed, shape, condition):
    m, n = shape
    values = torch.linspace(1, 1 / condition, m, dtype=torch.float64)
    N = rotation(normal(seed, m, m)) * values @ rotation(normal(seed + 1, n, n))[:m]
    singular_values = torch.linalg.svdvals(one(N.float()))
    assert singular_values.min() > 0.3
    assert singular_values.max() < 1.3


@examples
@given(seeds, shapes, st.integers(1, 7))
def test_frame_can_be_rotated_on_both_sides(seed, shape, steps):
    m, n = shape
    N, left, right = normal(seed, m, n), rotation(normal(seed + 1, m, m)), rotation(normal(seed + 2, n, n))
    torch.testing.assert_close(one(left @ N @ right, steps), left @ one(N, steps) @ right, rtol=0, atol=1e-11)


@every_shape
@examples
@given(seed=seeds, exponent=st.integers(-40, 40))
def test_scale_of_the_matrix_changes_no_bit_without_a_stabiliser(shape, seed, exponent):
    N = normal(seed, *shape).float()
    assert torch.equal(one(N * 2.0**exponent, eps=0.0), one(N, eps=0.0))


@every_shape
def test_result_is_odd(shape):
    N = normal(8, *shape).float()
    assert torch.equal(one(-N), -one(N))


@pytest.mark.parametrize("shape", [(7, 9), (7, 40)], ids=str)
def test_lets_no_reduced_precision_and_no_graph_in(shape):
    N = normal(9, *shape).float()
    expected = one(N)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), MatmulPrecision() as products:
            result = one(N.requires_grad_())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(result, expected)
    assert not result.requires_grad
    assert {setting for _, *settings in products.seen for setting in settings} == {"ieee"}
    assert {dtype for dtype, *_ in products.seen} == {torch.float32}
