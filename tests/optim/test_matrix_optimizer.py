"""What RowNorm and Muon have in common: how a step runs, is saved, is asked for, and what is refused."""

import copy
import gc
import io
import math
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch.nn import Parameter

from hilbert_monitor.optim import Muon, RowNorm
from tests.support.optim_references import LRS, close, gradients, muon_steps, rownorm_steps, walk
from tests.support.references import normal

SHAPES = [(12, 5), (5, 12), (8, 8), (4, 30), (30, 4), (1, 6), (6, 1)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


# how a step runs


MAKERS = {
    "RowNorm": RowNorm,
    "RowNorm-both": partial(RowNorm, center="both"),
    "Muon": Muon,
    "Muon-plain": partial(Muon, nesterov=False),
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
    """Bit for bit and in dtype."""
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def contents(optimizer):
    """Copies of everything in the state."""
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


@each
def test_closure_is_called_once_with_grad_enabled_and_its_gradients_are_used(make):
    params, calls = matrices(), []
    optimizer = make(params, lr=0.1, weight_decay=0.1)

    def closure():
        give_gradients(params, 100)
        calls.append(torch.is_grad_enabled())
        return "loss"

    with torch.no_grad():
        assert optimizer.step(closure) == "loss"
    assert calls == [True]
    assert same(params, stepped(make, steps=1))
    assert optimizer.step() is None


@each
def test_autocast_reaches_the_closure_and_not_the_step(make):
    params, seen = matrices(), []
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    give_gradients(params, 100)
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.step(lambda: seen.append(torch.is_autocast_enabled("cpu")))
        increments = [optimizer.increment(p) for p in params]
        assert torch.is_autocast_enabled("cpu")
    assert seen == [True]
    assert same(params, stepped(make, steps=1))
    assert same(increments, [optimizer.increment(p) for p in params])


@each
def test_gradients_are_left_alone(make):
    params = matrices()
    optimizer = make(params, lr=0.1)
    for t in range(3):
        give_gradients(params, 100 * t)
        grads, copies = [p.grad for p in params], [p.grad.clone() for p in params]
        optimizer.step()
        assert all(p.grad is g for p, g in zip(params, grads, strict=True))
        assert same(grads, copies)


@each
def test_no_graph_is_built_and_parameters_stay_the_leaves_they_were(make):
    params = matrices()
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    places = [p.data_ptr() for p in params]
    take_steps(optimizer, params, 2)
    assert all(p.is_leaf and p.requires_grad for p in params)
    assert [p.data_ptr() for p in params] == places
    assert not any(optimizer.increment(p).requires_grad for p in params)


@each
def test_parameter_without_gradient_is_skipped_with_its_state(make):
    params, expected = matrices(), stepped(make, steps=3)
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    params[1].requires_grad_(False)
    take_steps(optimizer, params, 2)
    weight, state = params[1].detach().clone(), contents(optimizer)[1]
    give_gradients(params, 300)
    params[1].grad, fresh = None, Parameter(torch.ones(2, 2))
    optimizer.add_param_group({"params": [fresh]})
    optimizer.step()
    assert torch.equal(params[1], weight)
    assert same_state([contents(optimizer)[1]], [state])
    assert torch.equal(fresh, torch.ones(2, 2))
    assert not optimizer.state[fresh]
    assert all(torch.equal(p, e) for i, (p, e) in enumerate(zip(params, expected, strict=True)) if i != 1)


@pytest.mark.few(6)
@each
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_learning_rate_can_be_a_tensor_with_one_element(make, shape, dtype):
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
@pytest.mark.parametrize(
    ("dtype", "state_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_state_is_kept_in_at_least_fp32(make, dtype, state_dtype):
    params = matrices(dtype=dtype)
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 1)
    assert {optimizer.state[p]["momentum_buffer"].dtype for p in params} == {state_dtype}
    assert {optimizer.increment(p).dtype for p in params} == {state_dtype}
    optimizer.load_state_dict(optimizer.state_dict())
    assert {optimizer.state[p]["momentum_buffer"].dtype for p in params} == {state_dtype}


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
        alone, _ = walk(make, normal(0, 12, 5).to(p.dtype), grads, 3 * [0.1], weight_decay=0.1)[-1]
        assert same([p], [alone])


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


# saved and copied


@pytest.mark.few(4)
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_saved_state_resumes_to_the_bit(make, dtype):
    params = matrices(dtype=dtype)
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    take_steps(optimizer, params, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = [Parameter(p.detach().clone()) for p in params]
    other = make([{"params": resumed, "momentum": 0.1}], lr=9.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert same(take_steps(other, resumed, 3, seed=900), take_steps(optimizer, params, 3, seed=900))
    assert same_state(contents(other), contents(optimizer))


@each
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_copies_resume_to_the_bit_and_stand_alone(make, copied):
    params = matrices(dtype=torch.bfloat16)
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    take_steps(optimizer, params, 3)
    twins, twin = copied((params, optimizer))
    with pytest.raises(RuntimeError, match=r"\Ano step has moved this parameter since .*\Z"):
        twin.increment(twins[0])
    before = contents(optimizer)
    moved = take_steps(twin, twins, 3, seed=900)
    assert same_state(contents(optimizer), before)
    assert same(moved, take_steps(optimizer, params, 3, seed=900))
    assert same(map(twin.increment, twins), map(optimizer.increment, params))


def test_copies_of_muon_keep_how_it_shares_its_work():
    copied = copy.deepcopy(Muon(matrices(), distributed=False))
    assert copied.distributed is False
    assert copied.process_group is None


@each
@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.float64, torch.float32), (torch.bfloat16, torch.float64)], ids=str
)
def test_state_of_a_model_in_another_precision_is_cast_and_what_was_loaded_let_go(make, saved, loaded):
    params, others = matrices(dtype=saved), matrices(dtype=loaded)
    optimizer, other = make(params, lr=0.1), make(others, lr=0.1)
    take_steps(optimizer, params, 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    held = weakref.ref(state_dict["state"][0]["momentum_buffer"])
    other.load_state_dict(state_dict)
    del state_dict
    gc.collect()
    assert held() is None
    expected = [optimizer.state[p]["momentum_buffer"].to(loaded) for p in params]
    assert same([other.state[p]["momentum_buffer"] for p in others], expected)
    take_steps(other, others, 1)


@each
def test_hooks_of_the_user_see_a_load_as_usual_and_can_replace_it(make):
    params = matrices(dtype=torch.bfloat16)
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 2)
    saved, seen = copy.deepcopy(optimizer.state_dict()), []

    def doubled(_, state_dict):
        for state in state_dict["state"].values():
            state["momentum_buffer"] = 2 * state["momentum_buffer"]

    def after(loaded):
        seen.append(loaded.state[params[0]]["momentum_buffer"].dtype)

    before = contents(optimizer)
    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    assert seen == [torch.float32]
    expected = [2 * state["momentum_buffer"] for state in before]
    assert same([optimizer.state[p]["momentum_buffer"] for p in params], expected)


# the increment


REFERENCES = {
    "RowNorm": (RowNorm, rownorm_steps, {}),
    "RowNorm-both": (RowNorm, rownorm_steps, {"center": "both"}),
    "Muon": (Muon, muon_steps, {}),
    "Muon-plain": (Muon, muon_steps, {"nesterov": False}),
}

each_with_reference = pytest.mark.parametrize(("make", "reference", "options"), REFERENCES.values(), ids=REFERENCES)


@pytest.mark.few(4)
@each_with_reference
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(12, 5), (4, 30)], ids=str)
def test_increment_is_what_the_step_added_beside_the_decay(make, reference, options, dtype, shape):
    W, grads = normal(0, *shape).to(dtype), gradients(1, shape, dtype=dtype)
    options = {**options, "weight_decay": 0.2}
    expected = reference(W, grads, LRS, **options)
    before = W.double()
    for (after, S), (_, T), lr in zip(walk(make, W, grads, LRS, **options), expected, LRS, strict=True):
        close(S, T, 1e-5 * lr * math.sqrt(max(1, shape[0] / shape[1])))
        close(after, (1 - 0.2 * lr) * before + S.double(), 1e-6, rtol=torch.finfo(dtype).eps)
        before = after.double()


@each
def test_increment_is_the_same_in_memory_that_is_given(make):
    params = matrices()
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 2)
    for p in params:
        S = optimizer.increment(p)
        assert torch.equal(optimizer.increment(p, out=torch.empty_like(S)), S)


@each
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["number", "tensor"])
def test_increment_is_of_the_step_whatever_has_become_of_the_hyperparameters(make, kind):
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
def test_asking_for_the_increment_changes_nothing(make):
    params, expected = matrices(), stepped(make)
    optimizer = make(params, lr=0.1, weight_decay=0.1)
    for t in range(3):
        give_gradients(params, 100 + 100 * t)
        optimizer.step()
        weights, grads = [p.detach().clone() for p in params], [p.grad.clone() for p in params]
        state, generator = contents(optimizer), torch.get_rng_state()
        first = [optimizer.increment(p) for p in params]
        copies = [S.clone() for S in first]
        for S in first:
            S.zero_()
        assert same(map(optimizer.increment, params), copies)
        assert same(params, weights)
        assert same([p.grad for p in params], grads)
        assert same_state(contents(optimizer), state)
        assert torch.equal(torch.get_rng_state(), generator)
    assert same(params, expected)


@each
def test_increment_can_be_asked_in_a_step_hook(make):
    params, seen = matrices(), []
    optimizer = make(params, lr=0.1)
    optimizer.register_step_post_hook(lambda self, *_: seen.extend(map(self.increment, params)))
    take_steps(optimizer, params, 1)
    assert same(seen, map(optimizer.increment, params))


@each
def test_increment_is_zero_where_the_last_step_found_no_gradient(make):
    params = matrices(dtype=torch.bfloat16)
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 2)
    params[2].grad = None
    optimizer.step()
    S = optimizer.increment(params[2])
    assert same([S], [torch.zeros(params[2].shape)])
    assert optimizer.increment(params[0]).any()
    give_gradients(params, 7)  # a gradient that came after the step
    assert not optimizer.increment(params[2]).any()


@each
def test_increment_before_any_step_is_refused(make):
    params = matrices()
    optimizer = make(params, lr=0.1)
    with pytest.raises(RuntimeError, match=r"\Ano step has moved this parameter since .*\Z"):
        optimizer.increment(params[0])
    take_steps(optimizer, params, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"\Ano step has moved this parameter since .*\Z"):
        optimizer.increment(params[0])
    take_steps(optimizer, params, 1)
    assert optimizer.increment(params[0]).any()


@each
def test_increment_of_a_foreign_parameter_is_refused(make):
    params = matrices()
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 1)
    with pytest.raises(ValueError, match=r"\Athe parameter of shape \(12, 5\) is not one of this \w+'s\Z"):
        optimizer.increment(Parameter(params[0].detach()))


def zeroed(p):
    torch.optim.SGD([p]).zero_grad(set_to_none=False)


def dropped(p):
    torch.optim.SGD([p]).zero_grad(set_to_none=True)


def replaced(p):
    p.grad = p.grad.clone()


def accumulated(p):
    (p * torch.ones_like(p)).sum().backward()


@pytest.mark.parametrize("change", [zeroed, dropped, replaced, accumulated], ids=lambda f: f.__name__)
def test_increment_of_muon_is_refused_once_the_gradient_has_changed(change):
    params = matrices()
    optimizer = Muon(params)
    take_steps(optimizer, params, 1)
    optimizer.increment(params[0])
    change(params[0])
    with pytest.raises(
        RuntimeError, match=r"\Athe gradient of the last step is gone or changed.*ask before zero_grad.*\Z"
    ):
        optimizer.increment(params[0])
    optimizer.increment(params[1])


@pytest.mark.parametrize("make", [RowNorm, partial(RowNorm, center="both"), partial(Muon, nesterov=False)])
@pytest.mark.parametrize("change", [zeroed, dropped, replaced, accumulated], ids=lambda f: f.__name__)
def test_increment_that_needs_no_gradient_outlives_it(make, change):
    params = matrices()
    optimizer = make(params, lr=0.1)
    take_steps(optimizer, params, 1)
    expected = optimizer.increment(params[0])
    change(params[0])
    assert torch.equal(optimizer.increment(params[0]), expected)


def test_parameters_can_be_swapped_after_a_step(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = torch.nn.Linear(3, 3, bias=False)
    optimizer = Muon(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    layer.to(torch.float64)
    assert layer.weight.dtype == torch.float64


def test_a_step_that_was_broken_off_is_not_answered_for():
    params = [Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = RowNorm(params, lr=0.1)
    give_gradients(params, 0)
    optimizer.step()
    params[1].grad = None

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert optimizer.increment(params[0]).any()  # nothing has moved since


# what they refuse


BAD = [
    *((make, "lr", value) for make in (RowNorm, Muon) for value in (-1e-9, math.nan, math.inf, "fast", True, None, 1j)),
    *((make, "lr", torch.tensor(v)) for make in (RowNorm, Muon) for v in (-0.1, math.nan, [0.1, 0.2], [], 1j, True)),
    *((make, name, torch.tensor(0.1)) for make in (RowNorm, Muon) for name in ("momentum", "weight_decay", "eps")),
    *((make, "momentum", value) for make in (RowNorm, Muon) for value in (1, 1.5, -0.1, math.nan, "0.9")),
    *((make, "weight_decay", value) for make in (RowNorm, Muon) for value in (-0.1, math.nan, math.inf, None)),
    *((make, "eps", value) for make in (RowNorm, Muon) for value in (-1e-8, math.nan, math.inf, "small")),
    *((make, "maximize", value) for make in (RowNorm, Muon) for value in (None, 1, "yes")),
    *((make, "rounding", value) for make in (RowNorm, Muon) for value in ("up", None, True)),
    *((RowNorm, "eps", value) for value in (0, 1e-16)),
    *((RowNorm, "center", value) for value in ("rows", None, True, "")),
    *((Muon, "ns_steps", value) for value in (0, -1, 100, 2.5, 5.0, True, None, torch.tensor(5))),
    *((Muon, "ns_dtype", value) for value in (int, torch.int32, torch.complex64, "float16", None)),
    *((Muon, "nesterov", value) for value in ("yes", None, 1)),
]


@pytest.mark.few(12)
@pytest.mark.parametrize(("make", "name", "value"), BAD, ids=lambda x: x.__name__ if isinstance(x, type) else str(x))
def test_a_bad_hyperparameter_is_refused_by_one_sentence_that_names_it(make, name, value):
    refused = partial(pytest.raises, (TypeError, ValueError), match=rf"\A{name} must .+, got .+\Z")
    with refused():
        make(matrices(), **{"lr": 0.1, name: value})
    with refused():
        make([{"params": matrices(), name: value}], lr=0.1)
    params = matrices()
    optimizer = make(params, lr=0.1)
    with refused():
        optimizer.add_param_group({"params": matrices(seed=20), name: value})
    assert len(optimizer.param_groups) == 1
    take_steps(optimizer, params, 1)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (RowNorm, {"lr": 0, "momentum": 0, "eps": 1e-15, "weight_decay": 0}),
        (Muon, {"lr": 0, "momentum": 0, "eps": 0, "weight_decay": 0, "ns_steps": 1}),
        (Muon, {"ns_steps": 99}),
    ],
    ids=["RowNorm", "Muon", "Muon-99"],
)
def test_hyperparameters_at_their_limits_are_taken(make, options):
    params = matrices()
    take_steps(make(params, **options), params, 2)
    assert all(p.isfinite().all() for p in params)


@each_class
def test_what_is_no_matrix_is_refused_by_name_and_sent_to_adamw(make):
    norm = torch.nn.LayerNorm(4)
    optimizer = make(matrices(), lr=0.1)
    name = make.__name__
    with pytest.raises(ValueError, match=rf"\A{name} moves matrices, .*'weight' \(4,\).*torch.optim.AdamW.*\Z"):
        make(norm.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"\A{name} moves matrices, .*number 1 \(2, 3, 4\).*torch.optim.AdamW.*\Z"):
        make([Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 3, 4))], lr=0.1)
    with pytest.raises(ValueError, match=r"number 0 \(4,\)"):
        optimizer.add_param_group({"params": norm.weight})
    assert len(optimizer.param_groups) == 1


@each_class
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32], ids=str)
def test_what_is_not_real_floating_point_is_refused(make, dtype):
    p = torch.ones(3, 2, dtype=dtype)
    with pytest.raises(TypeError, match=rf"\A{make.__name__} moves real floating-point matrices, got {dtype} .*\Z"):
        make([p], lr=0.1)


@each_class
def test_a_sparse_gradient_is_refused_before_anything_has_moved(make):
    params = matrices()
    optimizer = make([{"params": params[:3]}, {"params": params[3:]}], lr=0.1, weight_decay=0.1)
    take_steps(optimizer, params, 1)
    give_gradients(params, 7)
    params[-1].grad = params[-1].grad.to_sparse()
    weights, state = [p.detach().clone() for p in params], contents(optimizer)
    with pytest.raises(
        TypeError, match=rf"\A{make.__name__} needs dense real gradients, got a sparse one .*number 4.*\Z"
    ):
        optimizer.step()
    assert same(params, weights)
    assert same_state(contents(optimizer), state)


@each
def test_decay_is_declared_to_be_decoupled(make):
    optimizer = make(matrices(), lr=0.1)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
