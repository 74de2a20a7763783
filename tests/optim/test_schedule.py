"""The schedule: linear from zero, one after the warm-up, a cosine to exactly the floor at the last update."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilbert_monitor.optim import RowNorm, warmup_cosine, warmup_cosine_scale
from tests.support.decoders import Plain, loss_of, seeded
from tests.support.draws import draws

examples = settings(max_examples=draws(100), deadline=None)
totals = st.integers(1, 3000)


def expected_scale(t, T):
    """From the definition, with T/10 in integers and the cosine as a square: (1 + cos 2a) / 2 = cos^2 a."""
    w = T // 10
    if t < w:
        return t / w
    if t >= T - 1:
        return 0.1
    return 0.1 + 0.9 * math.cos(math.pi * (t - w) / (T - 1 - w) / 2) ** 2


def optimizer(lr=0.5):
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2, 3))], lr=lr)


@examples
@given(totals, st.data())
def test_scale_is_linear_then_a_cosine(T, data):
    t = data.draw(st.integers(0, T + 20))
    assert warmup_cosine_scale(t, total_steps=T) == pytest.approx(expected_scale(t, T), rel=1e-12, abs=1e-15)


@examples
@given(totals)
def test_first_peak_and_last_are_exact(T):
    w = T // 10
    assert warmup_cosine_scale(0, total_steps=T) == (0 if w else 1 if T > 1 else 0.1)
    assert warmup_cosine_scale(w, total_steps=T) == (1 if w < T - 1 else 0.1)
    for t in (T - 1, T, T + 1, 2 * T, 10 * T):
        assert warmup_cosine_scale(t, total_steps=T) == 0.1


@examples
@given(totals)
def test_scale_rises_through_the_warm_up_and_falls_after(T):
    scales = [warmup_cosine_scale(t, total_steps=T) for t in range(T)]
    w = T // 10
    assert all(a < b for a, b in pairwise(scales[: w + 1]))
    assert all(a > b for a, b in pairwise(scales[w:]))


@pytest.mark.parametrize(("T", "w"), [(7_083, 708), (14_464, 1_446), (24_406, 2_440)])
def test_the_papers_runs(T, w):
    def scale(t):
        return warmup_cosine_scale(t, total_steps=T)

    assert [scale(0), scale(w), scale(T - 1)] == [0, 1, 0.1]
    assert scale(1) == 1 / w
    assert scale(w - 1) == (w - 1) / w
    assert scale(w + 1) < 1
    assert scale(T - 2) > 0.1
    assert scale(w + (T - 1 - w) / 2) == pytest.approx(0.55, rel=1e-12)
    for t in range(0, T, 97):
        assert scale(t) == pytest.approx(expected_scale(t, T), rel=1e-12, abs=1e-15)


@examples
@given(st.integers(1, 60), st.sampled_from([0.0, 0.25, 0.5]), st.sampled_from([0.0, 0.3, 1.0]))
def test_warm_up_and_floor_can_be_others(T, warmup, floor):
    w = int(warmup * T)
    for t in range(w):
        assert warmup_cosine_scale(t, total_steps=T, warmup=warmup, floor=floor) == t / w
    for t in range(w, T - 1):
        angle = math.pi * (t - w) / (T - 1 - w)
        expected = floor + (1 - floor) * (1 + math.cos(angle)) / 2
        assert warmup_cosine_scale(t, total_steps=T, warmup=warmup, floor=floor) == pytest.approx(expected, abs=1e-12)
    assert warmup_cosine_scale(T - 1, total_steps=T, warmup=warmup, floor=floor) == floor


def test_peak_that_is_also_the_last_update_is_the_floor():
    scales = [warmup_cosine_scale(t, total_steps=4, warmup=0.75, floor=0.5) for t in range(5)]
    assert scales == [0, 1 / 3, 2 / 3, 0.5, 0.5]


@pytest.mark.parametrize("T", [1, 2, 9, 10, 40])
@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_update_t_is_made_with_the_scale_of_t(T, kind):
    o = optimizer(kind(0.5))
    scheduler = warmup_cosine(o, T)
    seen = []
    for _ in range(T + 3):
        seen.append(float(o.param_groups[0]["lr"]))
        o.step()
        scheduler.step()
    assert seen == pytest.approx([0.5 * expected_scale(t, T) for t in range(T + 3)], rel=1e-6)
    assert isinstance(o.param_groups[0]["lr"], torch.Tensor) == (kind is torch.tensor)


def test_every_group_keeps_its_own_peak():
    o = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 3.0)])
    scheduler = warmup_cosine(o, 20, warmup=0.2, floor=0.5)
    for t in range(25):
        scale = warmup_cosine_scale(t, total_steps=20, warmup=0.2, floor=0.5)
        assert [group["lr"] for group in o.param_groups] == pytest.approx([0.1 * scale, 3.0 * scale])
        o.step()
        scheduler.step()


def test_first_update_moves_nothing():
    model = seeded(Plain)
    o = RowNorm([model.lm_head.weight], lr=1.0)
    warmup_cosine(o, 100)
    before = model.lm_head.weight.detach().clone()
    loss_of(model, 0).backward()
    o.step()
    assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_saved_schedule_resumes_where_it_was(tmp_path, kind):
    o, again = optimizer(kind(0.5)), optimizer(kind(0.5))
    scheduler = warmup_cosine(o, 30)
    for _ in range(11):
        o.step()
        scheduler.step()
    torch.save({"optimizer": o.state_dict(), "scheduler": scheduler.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed = warmup_cosine(again, 30)
    again.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["scheduler"])
    for _ in range(22):
        assert float(again.param_groups[0]["lr"]) == float(o.param_groups[0]["lr"])
        for one, its in ((o, scheduler), (again, resumed)):
            one.step()
            its.step()
    assert float(again.param_groups[0]["lr"]) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("phrase", "arguments"),
    [
        ("total_steps must be a number of updates, at least 1, got 0.*", {"total_steps": 0}),
        ("total_steps must be a number of updates, at least 1, got -3.*", {"total_steps": -3}),
        ("warmup must be a share of the run, from 0 to below 1, got 2", {"total_steps": 10, "warmup": 2}),
        ("warmup must be a share of the run, from 0 to below 1, got -0.1", {"total_steps": 10, "warmup": -0.1}),
        ("warmup must be a share of the run, from 0 to below 1, got nan", {"total_steps": 10, "warmup": math.nan}),
        ("floor must be between 0 and 1, got 1.5", {"total_steps": 10, "floor": 1.5}),
        ("floor must be between 0 and 1, got -1", {"total_steps": 10, "floor": -1}),
    ],
)
def test_impossible_schedule_is_refused_in_one_sentence(phrase, arguments):
    o = optimizer()
    with pytest.raises(ValueError, match=rf"\A{phrase}\Z"):
        warmup_cosine(o, **arguments)
    assert o.param_groups[0]["lr"] == 0.5
