"""The common part of RowNorm and Muon: how a step runs, is saved, rounded and asked for, and what is refused."""

import copy
import io
import math
import pickle
from functools import partial

import pytest
import torch
from torch.nn import Parameter

from hilbert_monitor.optim import Muon, RowNorm
from tests.support.optim_references import LRS, close, gradients, muon_steps, rownorm_steps, walk
from tests.support.references import normal

SHAPES = [(12, 5), (5, 12), (8, 8), (4, 30), (30, 4), (1, 6), (6, 1)]

MAKERS = {
    "RowNorm": RowNorm,
    "RowNorm-both": partial(RowNorm, center="both"),
    "Muon": Muon,
    "Muon-plain": partial(Muon, nesterov=False),
}
REFERENCES = {
    "RowNorm": rownorm_steps,
    "RowNorm-both": partial(rownorm_steps, center="both"),
    "Muon": muon_steps,
    "Muon-plain": partial(muon_steps, nesterov=False),
}
each = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
each_class = pytest.mark.parametrize("make", [RowNorm, Muon], ids=["RowNorm", "Muon"])


def matrices(seed=0, dtype=torch.float32):
    """A parameter of every shape and two of one."""
    return [Parameter(normal(seed + i, *shape).to(dtype)) for i, shape in enumerate([*SHAPES, SHAPES[0]])]


def give_gradients(params, seed, sign=1.0):
    for i, p in enumerate(params):
        p.grad = sign * normal(seed + i, *p.shape).to(p.dtype)


def take_steps(optimizer, params, steps, seed=100):
    for t in range(steps):
        give_gradients(params, seed + 100 * t)
        optimizer.step()
    return [p.detach().clone() for p in params]


def stepped(make, steps=3, dtype=torch.float32, **options):
    params = matrices(dtype=dtype)
    return take_steps(make(params, **{"lr": 0.1, "weight_decay": 0.1, **options}), params, steps)


def same(actual, expected):
    """Return True if tensors are equal to the bit and in dtype."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def contents(optimizer):
    """Return copies of everything in the state."""
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def same_state(actual, expected):
    return all(
        a.keys() == b.keys() and same(map(torch.as_tensor, a.values()), map(torch.as_tensor, b.values()))
        for a, b in zip(actual, expected, strict=True)
    )


# A step


@each
def test_closure_is_called_once_with_grad_and_the_callers_autocast_and_the_step_has_neither(make):
    params, seen = matrices(), []
    optimizer = make(params, lr=0.1, weight_decay=0.1)

    def closure():
        give_gradients(params, 100)
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return "loss"

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert optimizer.step(closure) == "loss"
        increments = [optimizer.increment(p) for p in params]
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(True, True)]
    assert same(params, stepped(make, steps=1))
    assert same(increments, map(optimizer.increment, params))
    assert optimizer.step() is None


@pytest.mark.parametrize("base", [RowNorm, Muon])
def test_steps_and_increments_are_computed_outside_autocast(base):
    seen = []

    class Probe(base):
        def _step_group(self, *args):
            seen.append(torch.is_autocast_enabled("cpu"))
            super()._step_group(*args)

        def _increment_rows(self, *args):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super()._increment_rows(*args)

    p = Parameter(torch.ones(3, 2))
    p.grad, optimizer = torch.ones(3, 2), Probe([p], lr=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step()
        optimizer.increment(p)
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("make", "reference", "options"),
    [(RowNorm, rownorm_steps, {"center": "both"}), (Muon, muon_steps, {"nesterov": False, "ns_steps": 2})],
    ids=["RowNorm", "Muon"],
)
def test_each_group_steps_with_its_own_hyperparameters(make, reference, options):
    recipes = [{"lr": 0.1}, {"lr": 0.02, "momentum": 0.5, "weight_decay": 0.3}, {"lr": 0.5, "eps": 3.0, **options}]
    start, grads = ([normal(i, 7, 5) for i in range(3)], [gradients(10 * i, (7, 5), steps=3) for i in range(3)])
    params = [Parameter(W.clone()) for W in start]
    optimizer = make([{"params": [p], **recipe} for p, recipe in zip(params, recipes, strict=True)], lr=9.0)
    for t in range(3):
        for p, G in zip(params, grads, strict=True):
            p.grad = G[t].clone()
        optimizer.step()
    for p, W, G, recipe in zip(params, start, grads, recipes, strict=True):
        lr, others = recipe["lr"], {name: value for name, value in recipe.items() if name != "lr"}
        close(p, reference(W, G, 3 * [lr], **others)[-1][0], 1e-5 * lr)


@each
def test_parameter_without_gradient_is_skipped_with_its_state_and_its_increment_is_zero(make):
    params, expected = matrices(), stepped(make, steps=3)
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    params[0].requires_grad_(False)  # the last has its shape
    take_steps(optimizer, params, 2)
    weight, state = params[0].detach().clone(), contents(optimizer)[0]
    give_gradients(params, 300)
    params[0].grad, fresh = None, Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [fresh]})
    optimizer.step()
    assert same([params[0], fresh], [weight, torch.ones(2, 2)])
    assert same_state([contents(optimizer)[0]], [state])
    assert not optimizer.state[fresh]
    for p, e in zip(params[1:], expected[1:], strict=True):
        close(p, e, 1e-6)
    give_gradients(params, 7)  # after the step
    assert same([optimizer.increment(params[0])], [torch.zeros(params[0].shape)])


@each
@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_learning_rate_can_be_a_tensor_with_one_element(make, shape):
    for dtype in (torch.float32, torch.float64):
        for a, b in zip(stepped(make, lr=torch.full(shape, 0.2, dtype=dtype)), stepped(make, lr=0.2), strict=True):
            close(a, b, 1e-6)


@each
def test_maximize_is_a_step_on_the_negated_gradients(make):
    up, down = matrices(), matrices()
    climbing, falling = make(up, lr=0.1, weight_decay=0.1, maximize=True), make(down, lr=0.1, weight_decay=0.1)
    for t in range(3):
        give_gradients(up, 100 * t)
        give_gradients(down, 100 * t, sign=-1.0)
        climbing.step()
        falling.step()
    assert same(up, down)
    assert same(map(climbing.increment, up), map(falling.increment, down))


@each
def test_parameters_of_several_precisions_step_together_as_they_do_alone(make):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16]
    mixed = [Parameter(normal(0, 12, 5).to(dtype)) for dtype in dtypes]
    optimizer = make(mixed, lr=0.1, weight_decay=0.1)
    for t in range(3):
        for p in mixed:
            p.grad = normal(1 + t, 12, 5).to(p.dtype)
        optimizer.step()
    for p in mixed:
        grads = [normal(1 + t, 12, 5).to(p.dtype) for t in range(3)]
        alone, S = walk(make, normal(0, 12, 5).to(p.dtype), grads, 3 * [0.1], weight_decay=0.1)[-1]
        assert same([p, optimizer.increment(p)], [alone, S])


@pytest.mark.few(6)
@each
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (1, 1), (1, 7), (7, 1)], ids=str)
def test_thin_and_empty_matrices_are_matrices(make, shape):
    p = Parameter(torch.zeros(shape))
    p.grad = torch.ones(shape)
    optimizer = make([p], lr=0.1)
    optimizer.step()
    assert p.isfinite().all()
    assert optimizer.increment(p).shape == shape


@each
def test_transposed_storage_makes_the_same_step(make):
    params = [Parameter(p.detach().T.contiguous().T) for p in matrices()]
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    for t in range(3):
        give_gradients(params, 100 + 100 * t)
        for p in params[::2]:
            p.grad = p.grad.T.contiguous().T
        optimizer.step()
    for p, expected in zip(params, stepped(make), strict=True):
        close(p, expected, 2e-6)


# Weights below fp32


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_half_precision_are_the_fp32_result_rounded_once(make, dtype):
    params, twins = matrices(dtype=dtype), [Parameter(p.detach().float()) for p in matrices(dtype=dtype)]
    optimizer, twin = (make(some, lr=0.1, weight_decay=0.1) for some in (params, twins))
    for t in range(3):
        give_gradients(params, 100 * t)
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.float()
            q.data.copy_(p.detach())
        optimizer.step()
        twin.step()
        assert same(params, [q.detach().to(dtype) for q in twins])
        assert same_state(contents(optimizer), contents(twin))
        assert same(map(optimizer.increment, params), map(twin.increment, twins))


@each
def test_compensated_weights_and_their_errors_are_together_the_fp32_weights(make):
    start, G = normal(0, 12, 5).bfloat16(), normal(1, 12, 5).bfloat16()
    p, twin = Parameter(start.clone()), Parameter(start.float())
    optimizer, exact = make([p], lr=1e-4, rounding="compensated"), make([twin], lr=1e-4, rounding="compensated")
    for _ in range(20):
        p.grad, twin.grad = G.clone(), G.float()
        optimizer.step()
        exact.step()
        assert same([optimizer.increment(p)], [exact.increment(twin)])
    assert "compensation" not in exact.state[twin]
    lost = optimizer.state[p]["compensation"]
    assert lost.dtype == torch.bfloat16
    moved = (twin - start.float()).abs().max()
    assert (p.float() + lost.float() - twin).abs().max() < 0.1 * moved  # each error is itself rounded to bf16
    nearest = Parameter(start.clone())
    plain = make([nearest], lr=1e-4)
    for _ in range(20):
        nearest.grad = G.clone()
        plain.step()
    assert (nearest.float() - twin).abs().mean() > 3 * (p.float() + lost.float() - twin).abs().mean()


# Saved and copied


def reloaded(params, optimizer, make):
    """A new optimizer with other hyperparameters that has loaded what `optimizer` saved."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    twins = [Parameter(p.detach().clone()) for p in params]
    twin = make([{"params": twins, "momentum": 0.1}], lr=9.0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twins, twin


RESUME = {
    "copy": lambda params, optimizer, _: copy.deepcopy((params, optimizer)),
    "pickle": lambda params, optimizer, _: pickle.loads(pickle.dumps((params, optimizer))),
    "state dict": reloaded,
}


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("resume", RESUME.values(), ids=RESUME)
def test_what_is_saved_or_copied_resumes_to_the_bit_in_at_least_fp32_and_stands_alone(make, dtype, resume):
    params = matrices(dtype=dtype)
    optimizer = make(params, lr=0.1, weight_decay=0.1, rounding="compensated")
    take_steps(optimizer, params, 3)
    twins, twin = resume(params, optimizer, make)
    with pytest.raises(RuntimeError, match=r"\Ano step has moved this parameter since .*\Z"):
        twin.increment(twins[0])
    before = contents(optimizer)
    assert same_state(contents(twin), before)
    moved = take_steps(twin, twins, 3, seed=900)
    assert same_state(contents(optimizer), before)
    assert same(moved, take_steps(optimizer, params, 3, seed=900))
    assert same(map(twin.increment, twins), map(optimizer.increment, params))
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert {twin.state[p]["momentum_buffer"].dtype for p in twins} == {state_dtype}


@each_class
@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.float64, torch.float32), (torch.bfloat16, torch.float64)], ids=str
)
def test_state_of_a_model_in_another_precision_is_cast(make, saved, loaded):
    params, others = matrices(dtype=saved), matrices(dtype=loaded)
    optimizer, other = make(params, lr=0.1), make(others, lr=0.1)
    take_steps(optimizer, params, 2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = [optimizer.state[p]["momentum_buffer"].to(loaded) for p in params]
    assert same([other.state[p]["momentum_buffer"] for p in others], expected)
    take_steps(other, others, 1)


# The increment


@pytest.mark.parametrize(
    ("make", "reference"), list(zip(MAKERS.values(), REFERENCES.values(), strict=True)), ids=MAKERS
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_increment_is_the_step_without_the_decay_to_a_part_of_the_learning_rate(make, reference, dtype):
    for shape in ((12, 5), (4, 30)):
        W, grads = normal(0, *shape).to(dtype), gradients(1, shape, dtype=dtype)
        steps, expected = (f(W, grads, LRS, weight_decay=0.2) for f in (partial(walk, make), reference))
        before = W.double()
        for (after, S), (_, T), lr in zip(steps, expected, LRS, strict=True):
            close(S, T, 1e-5 * lr * math.sqrt(max(1, shape[0] / shape[1])))
            close(after, (1 - 0.2 * lr) * before + S.double(), 1e-6, rtol=torch.finfo(dtype).eps)
            before = after.double()


@each
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_increment_keeps_the_hyperparameters_of_its_step(make, kind):
    params = matrices()
    optimizer = make(params, lr=kind(0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 - 0.4 * t)
    take_steps(optimizer, params, 1)
    expected = [optimizer.increment(p) for p in params]
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.06)
    optimizer.param_groups[0].update(momentum=0.1, eps=3.0, maximize=True, weight_decay=5.0)
    assert same(map(optimizer.increment, params), expected)


@each
def test_a_step_changes_only_weights_and_state_in_place_and_asking_for_the_increment_nothing(make):
    params, expected, seen = matrices(), stepped(make), []
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    optimizer.register_step_post_hook(lambda self, *_: seen.append(self.increment(params[0])))
    places = [p.data_ptr() for p in params]
    for t in range(3):
        give_gradients(params, 100 + 100 * t)
        grads, copies = [p.grad for p in params], [p.grad.clone() for p in params]
        optimizer.step()
        state, generator = contents(optimizer), torch.get_rng_state()
        increments = [optimizer.increment(p) for p in params]
        first = [S.clone() for S in increments]
        for S in increments:
            S.zero_()
        assert same([optimizer.increment(p) for p in params], first)
        assert torch.equal(seen[-1], first[0])
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        assert same(grads, copies)
        assert same_state(contents(optimizer), state)
        assert torch.equal(torch.get_rng_state(), generator)
    assert same(params, expected)
    assert [p.data_ptr() for p in params] == places
    assert all(p.is_leaf and p.requires_grad for p in params)
    assert not any(S.requires_grad for S in increments)


@each_class
def test_increment_before_any_step_or_of_a_foreign_parameter_is_refused(make):
    params = matrices()
    optimizer = make(params, lr=0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"\Ano step has moved this parameter since .*\Z"):
            optimizer.increment(params[0])
        take_steps(optimizer, params, 1)
        assert optimizer.increment(params[0]).any()
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"\Athe parameter of shape \(12, 5\) is not one of this \w+'s\Z"):
        optimizer.increment(Parameter(params[0].detach()))


CHANGES = {
    "zeroed": lambda p: torch.optim.SGD([p]).zero_grad(set_to_none=False),
    "dropped": lambda p: torch.optim.SGD([p]).zero_grad(set_to_none=True),
    "replaced": lambda p: setattr(p, "grad", p.grad.clone()),
    "accumulated": lambda p: p.sum().backward(),
}


@each
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_only_the_increment_of_nesterov_muon_needs_the_gradient_of_its_step(make, change):
    params = matrices()
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 1)
    expected = optimizer.increment(params[0])
    change(params[0])
    if make is Muon:
        with pytest.raises(RuntimeError, match=r"\Athe gradient of the last step is gone .*ask before zero_grad.*\Z"):
            optimizer.increment(params[0])
        optimizer.increment(params[1])
    else:
        assert torch.equal(optimizer.increment(params[0]), expected)


def test_parameters_can_be_swapped_after_a_step(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = torch.nn.Linear(3, 3, bias=False)
    optimizer = Muon(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    layer.to(torch.float64)
    assert layer.weight.dtype == torch.float64


# Bad input

BOTH = [
    (
        "lr",
        (-1e-9, math.nan, math.inf, "fast", True, None, 1j, *map(torch.tensor, (-0.1, math.nan, [0.1, 0.2], [], 1j))),
    ),
    ("momentum", (1, 1.5, -0.1, math.nan, "0.9", torch.tensor(0.1))),
    ("weight_decay", (-0.1, math.nan, math.inf, None, torch.tensor(0.1))),
    ("eps", (-1e-8, math.nan, math.inf, "small", torch.tensor(0.1))),
    ("maximize", (None, 1, "yes")),
    ("rounding", ("up", "stochastic", None, True)),
]
BAD = [
    *((make, name, values) for make in (RowNorm, Muon) for name, values in BOTH),
    (RowNorm, "eps", (0, 1e-16)),
    (RowNorm, "center", ("rows", None, True, "")),
    (Muon, "ns_steps", (0, -1, 100, 2.5, 5.0, True, None, torch.tensor(5))),
    (Muon, "ns_dtype", (int, torch.int32, torch.complex64, "float16", None)),
    (Muon, "nesterov", ("yes", None, 1)),
]


@pytest.mark.parametrize(("make", "name", "values"), BAD, ids=[f"{make.__name__}-{name}" for make, name, _ in BAD])
def test_a_bad_hyperparameter_is_refused_by_one_sentence_that_names_it(make, name, values):
    for value in values:
        params = matrices()
        optimizer = make(params, lr=0.1)
        for refused in (
            lambda value=value: make(matrices(), **{"lr": 0.1, name: value}),
            lambda value=value: make([{"params": matrices(), name: value}], lr=0.1),
            lambda value=value, o=optimizer: o.add_param_group({"params": matrices(seed=20), name: value}),
        ):
            with pytest.raises((TypeError, ValueError), match=rf"\A{name} must .+, got .+\Z"):
                refused()
        assert len(optimizer.param_groups) == 1


@each_class
def test_other_tensors_than_real_matrices_are_refused_by_name(make):
    norm, name, optimizer = torch.nn.LayerNorm(4), make.__name__, make(matrices(), lr=0.1)
    with pytest.raises(ValueError, match=rf"\A{name} moves matrices, .*'weight' \(4,\).*torch.optim.AdamW.*\Z"):
        make(norm.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"\A{name} moves matrices, .*number 1 \(2, 3, 4\).*torch.optim.AdamW.*\Z"):
        optimizer.add_param_group({"params": [Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 3, 4))]})
    assert len(optimizer.param_groups) == 1
    for dtype in (torch.complex64, torch.int32):
        with pytest.raises(TypeError, match=rf"\A{name} moves real floating-point matrices, got {dtype} .*\Z"):
            make([torch.ones(3, 2, dtype=dtype)], lr=0.1)


@each_class
def test_a_sparse_gradient_is_refused_before_anything_has_moved(make):
    params = matrices()
    optimizer = make([{"params": params[:3]}, {"params": params[3:]}], lr=0.1, weight_decay=0.1)
    weights = take_steps(optimizer, params, 1)
    params[-1].grad, state = params[-1].grad.to_sparse(), contents(optimizer)
    with pytest.raises(
        TypeError, match=rf"\A{make.__name__} needs dense real gradients, got a sparse one .*number 4.*"
    ):
        optimizer.step()
    assert same(params, weights)
    assert same_state(contents(optimizer), state)
