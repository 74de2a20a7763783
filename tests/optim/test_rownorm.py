"""RowNorm: the paper's step, its diameter bounded by twice the learning rate, and what it does not depend on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from hilbert_monitor.geometry import row_diameter
from hilbert_monitor.optim import RowNorm, rownorm
from tests.support.draws import draws
from tests.support.optim_references import LRS, assert_walks_agree, gradients, rotation, rownorm_steps, walk
from tests.support.references import normal

examples = settings(max_examples=draws(30), deadline=None)
seeds = st.integers(0, 2**31)
heights = st.integers(1, 30)
widths = st.integers(1, 20)
momenta = st.sampled_from([0.0, 0.5, 0.95, 0.999])

every_center = pytest.mark.parametrize("center", ["none", "both"])


# The paper's step


@every_center
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.float64, 1e-13)], ids=str)
@examples
@given(
    seed=seeds,
    V=heights,
    d=widths,
    momentum=momenta,
    weight_decay=st.sampled_from([0.0, 0.1]),
    eps=st.sampled_from([1e-2, 0.3, 10.0]),
    scale=st.sampled_from([2.0**-10, 1.0, 2.0**14]),
)
def test_steps_are_the_papers(center, dtype, atol, seed, V, d, momentum, weight_decay, eps, scale):
    W = normal(seed, V, d).to(dtype)
    grads = [G.to(dtype) for G in gradients(seed + 1, (V, d), scale=scale)]
    options = {"momentum": momentum, "weight_decay": weight_decay, "eps": eps * scale, "center": center}
    expected = rownorm_steps(W, grads, LRS, **options)
    assert_walks_agree(walk(RowNorm, W, grads, LRS, **options), expected, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-8])
def test_defaults_are_the_papers(scale, dtype, atol):
    W, grads = normal(0, 9, 5).to(dtype), [G.to(dtype) for G in gradients(1, (9, 5), scale=scale)]
    expected = rownorm_steps(W, grads, LRS, momentum=0.95, eps=1e-8, weight_decay=0.0, center="none")
    assert_walks_agree(walk(RowNorm, W, grads, LRS), expected, atol=atol)


@every_center
@examples
@given(seed=seeds, V=heights, d=widths, rows=st.integers(1, 8), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_taken_a_few_at_a_time_make_the_same_step(center, seed, V, d, rows, dtype):
    W, grads = normal(seed, V, d).to(dtype), [G.to(dtype) for G in gradients(seed + 1, (V, d), steps=3)]
    options = {"lrs": [0.1, 0.2, 0.3], "eps": 0.1, "weight_decay": 0.1, "center": center}
    whole = walk(RowNorm, W, grads, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rownorm, "CHUNK_BYTES", {"cpu": rows * d * 4})
        chunked = walk(RowNorm, W, grads, **options)
    if center == "none":
        assert_walks_agree(chunked, whole)
    else:  # the mean row is summed in another order
        assert_walks_agree(chunked, whole, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


# The bound


@examples
@given(
    seed=seeds,
    V=heights,
    d=widths,
    lr=st.sampled_from([0.0, 1e-6, 3.2e-3, 1.0, 30.0]),
    momentum=momenta,
    center=st.sampled_from(["none", "both"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_step_has_a_diameter_over_twice_the_learning_rate(seed, V, d, lr, momentum, center, dtype, zeros):
    generator = torch.Generator().manual_seed(seed)
    grads = []
    for G in gradients(seed, (V, d), steps=4):
        exponents = 45 * torch.rand(V, 1, generator=generator, dtype=torch.float64) - 30
        nonzero = torch.rand(V, 1, generator=generator) >= zeros
        grads.append((G * 10**exponents * nonzero).to(dtype))
    W = torch.zeros(V, d, dtype=dtype)
    for _, S in walk(RowNorm, W, grads, 4 * [lr], momentum=momentum, center=center):
        assert S.isfinite().all()
        assert row_diameter(S).value <= 2 * lr * (1 + 1e-6)
        if center == "none":
            assert (S.double().norm(dim=1) <= lr * (1 + 1e-6)).all()


@pytest.mark.few(8)
@every_center
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1e17, 1e30, 3e38, 1e200])
def test_rows_whose_squares_overflow_move_by_the_learning_rate_beside_others(center, dtype, size):
    if size > torch.finfo(dtype).max or (center == "both" and size == 3e38):
        return  # in fp32 the mean of such rows overflows too, and the step is nan
    G = normal(0, 9, 40).sign().to(dtype)
    G[3:] *= size
    options = {"momentum": 0.5, "center": center}
    _, S = walk(RowNorm, torch.zeros(9, 40, dtype=dtype), [G], [1.0], **options)[0]
    expected = rownorm_steps(G, [G.double() / size], [1.0], **options)[0][1]
    if center == "none":
        expected[:3] = -G[:3].double() / 40**0.5
    torch.testing.assert_close(S.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1e-19, 1e-23, 1e-30, 1e-44])
def test_rows_whose_squares_underflow_step_as_far_as_the_stabiliser_lets_them(size):
    G, momentum = (normal(0, 9, 40) * size).float(), 1 - 1e-9
    expected = rownorm_steps(G, [G], [1.0], momentum=momentum, eps=1e-15)[0][1]
    _, S = walk(RowNorm, torch.zeros(9, 40), [G], [1.0], momentum=momentum, eps=1e-15)[0]
    torch.testing.assert_close(S.double(), expected, rtol=1e-5, atol=1e-10)
    assert S.norm(dim=1).max() <= 1 + 1e-6


def test_an_infinite_gradient_is_not_taken_for_a_large_one():
    G = torch.ones(4, 3)
    G[1, 1] = torch.inf
    _, S = walk(RowNorm, torch.zeros(4, 3), [G], [1.0])[0]
    assert not S[1].isfinite().all()
    assert S[[0, 2, 3]].isfinite().all()


# The projection


def train_head(center, weight_decay, steps=12):
    """A softmax head on fixed states: its probabilities, losses, and increments."""
    U, H, targets = Parameter(normal(0, 20, 6)), normal(1, 50, 6), torch.arange(50) % 17
    optimizer = RowNorm([U], lr=0.1, weight_decay=weight_decay, center=center)
    history = []
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (t + 1) / steps
        optimizer.zero_grad()
        logits = H @ U.T
        loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        history.append((logits.detach().softmax(1), loss.item(), optimizer.increment(U)))
    return history


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_projection_changes_nothing_that_a_softmax_head_computes(weight_decay):
    plain, projected = train_head("none", weight_decay), train_head("both", weight_decay)
    assert plain[-1][1] < plain[0][1]
    for (p, loss, S), (q, projected_loss, T) in zip(plain, projected, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=0)
        assert projected_loss == pytest.approx(loss, rel=1e-12)
        assert row_diameter(T).value == pytest.approx(row_diameter(S).value, rel=1e-10)
    assert (plain[-1][2] - projected[-1][2]).abs().max() > 1e-4  # the steps themselves differ, by a common row


# What it does not depend on


@examples
@given(seed=seeds, V=heights, d=widths, exponent=st.integers(-20, 40))
def test_scaling_gradient_and_stabiliser_together_changes_no_bit(seed, V, d, exponent):
    W, grads = normal(seed, V, d).float(), [G.float() for G in gradients(seed + 1, (V, d))]
    scaled = [G * 2.0**exponent for G in grads]
    plain = walk(RowNorm, W, grads, LRS, eps=1e-3)
    assert_walks_agree(walk(RowNorm, W, scaled, LRS, eps=1e-3 * 2.0**exponent), plain)


@every_center
@examples
@given(seed=seeds, V=heights, d=widths)
def test_tokens_can_be_renamed_and_the_hidden_basis_rotated(center, seed, V, d):
    order, Q = torch.randperm(V, generator=torch.Generator().manual_seed(seed)), rotation(normal(seed + 99, d, d))
    W, grads = normal(seed, V, d), gradients(seed + 1, (V, d))
    options = {"eps": 1e-3, "weight_decay": 0.1, "center": center}
    changed = walk(RowNorm, W[order] @ Q, [G[order] @ Q for G in grads], LRS, **options)
    plain = [(U[order] @ Q, S[order] @ Q) for U, S in walk(RowNorm, W, grads, LRS, **options)]
    assert_walks_agree(changed, plain, atol=1e-11)
