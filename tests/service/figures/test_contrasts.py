"""Pairs, ratios and differences between two sides: which runs are compared with which, and what is said of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.figures.comparison import compare
from hilbert_monitor.service.figures.grouping import find_roles
from hilbert_monitor.service.figures.plot_options import Choices
from tests.support.run_series import make_run

SWEEPS = st.lists(
    st.tuples(st.sampled_from(["AdamW", "RowNorm"]), st.integers(0, 2), st.sampled_from([0.1, 0.2]), st.booleans()),
    min_size=2,
    max_size=12,
)


def compared(runs, **choices):
    """The live comparison of runs of one model."""
    (comparison,) = compare(runs, live=True, choices=Choices(**choices))
    return comparison


def head(optimizer, seed, diameter, **more):
    return make_run(optimizer, seed, diameter=[diameter], **more)


def four_runs():
    """AdamW with two learning rates and batches, and RowNorm twice with those of the first."""
    return [
        head("AdamW", 0, 10.5, config={"lr": 0.001, "batch": 16}),
        head("AdamW", 1, 1120.7, config={"lr": 0.1, "batch": 64}),
        head("RowNorm", 0, 1.0, config={"lr": 0.001, "batch": 16}),
        head("RowNorm", 1, 1.0, config={"lr": 0.001, "batch": 16}),
    ]


def test_a_pair_differs_in_the_head_alone():
    comparison = compared(four_runs())
    assert comparison.pairs == (("AdamW-0", "RowNorm-0"),)
    assert comparison.current_ratios["diameter"].ratio == pytest.approx(10.5)
    assert comparison.contrast.baseline == "AdamW, batch=16, lr=0.001"
    assert comparison.optimizers["RowNorm"]["step_diameter"].runs == 2
    assert comparison.optimizers["AdamW, batch=64, lr=0.1"]["step_diameter"].mean == 1120.7
    assert comparison.about == "Grouped by batch and lr."


def test_the_report_has_the_same_pairs_as_the_page():
    (report,) = compare(four_runs())
    assert report.pairs == (("AdamW-0", "RowNorm-0"),)
    assert report.ratios["step_diameter"] == pytest.approx(10.5)


@given(SWEEPS)
def test_the_runs_of_a_pair_agree_in_seed_and_in_all_settings_that_split(specs):
    runs = [
        head(optimizer, seed, 1.0, id=str(number), config={"lr": lr, "clip": clip})
        for number, (optimizer, seed, lr, clip) in enumerate(specs)
    ]
    roles, known = find_roles(runs), {run.id: run for run in runs}
    for pair in compared(runs).pairs:
        a, b = (known[id] for id in pair)
        assert (a.optimizer, b.optimizer) == ("AdamW", "RowNorm")
        assert (a.seed, roles.settings(a)) == (b.seed, roles.settings(b))


def test_a_failed_run_is_not_replaced_by_one_of_another_learning_rate():
    runs = [head("AdamW", seed, 1.0, id=f"a{lr}{seed}", config={"lr": lr}) for lr in (1, 2) for seed in (0, 1)]
    failed = head("AdamW", 2, 9.0, id="failed", status="failed", config={"lr": 2})
    waiting = make_run("AdamW", 1, id="waiting", status="running", config={"lr": 3})
    alone = head("AdamW", 0, 5.0, id="alone", status="failed", config={"lr": 3})
    comparison = compared([*runs, failed, alone, waiting])
    assert [run.id for run in comparison.excluded] == ["failed"]
    assert comparison.optimizers["AdamW, lr=2"]["step_diameter"].mean == 1.0
    assert comparison.optimizers["AdamW, lr=3"]["step_diameter"].mean == 5.0


def test_runs_with_one_seed_and_different_settings_are_all_counted():
    runs = [head("AdamW", 0, float(lr), id=str(lr), config={"lr": lr}) for lr in (1, 2, 3)]
    assert len(compared(runs).counted) == 3


def test_every_setting_that_both_optimizers_have_is_a_contrast_of_its_own():
    runs = [
        head(name, seed, factor * lr, id=f"{name}{lr}{seed}", config={"lr": lr})
        for name, factor in (("AdamW", 6.0), ("RowNorm", 2.0))
        for lr in (1, 2, 3)
        for seed in (0, 1)
        if (name, lr) != ("RowNorm", 3)
    ]
    comparison = compared(runs)
    assert [(c.baseline, c.candidate, len(c.pairs)) for c in comparison.contrasts] == [
        ("AdamW, lr=1", "RowNorm, lr=1", 2),
        ("AdamW, lr=2", "RowNorm, lr=2", 2),
    ]
    assert comparison.sides == ("AdamW", "RowNorm")
    assert comparison.ratios["step_diameter"] is None


def test_optimizers_without_a_setting_in_common_have_no_ratio_and_a_note_says_why():
    runs = [
        head(name, 0, 1.0, id=f"{name}{lr}", config={"lr": lr})
        for name, lrs in (("AdamW", (1, 2)), ("RowNorm", (3, 4)))
        for lr in lrs
    ]
    comparison = compared(runs)
    assert comparison.contrasts == ()
    assert comparison.notes == ("No run of RowNorm has the lr of one of AdamW: there is no ratio of the two.",)


# What a reader chooses


def three_optimizers():
    values = {"AdamW": 12.0, "RowNorm": 3.0, "Muon": 2.0}
    return [head(name, seed, value) for name, value in values.items() for seed in (0, 1)]


@pytest.mark.parametrize(
    ("choices", "sides", "ratio"),
    [
        ({}, ("AdamW", "RowNorm"), 4.0),
        ({"candidate": "Muon"}, ("AdamW", "Muon"), 6.0),
        ({"baseline": "Muon"}, ("Muon", "AdamW"), 1 / 6),
        ({"baseline": "RowNorm", "candidate": "AdamW"}, ("RowNorm", "AdamW"), 0.25),
        ({"baseline": "AdamW-0", "candidate": "Muon-1"}, ("AdamW-0", "Muon-1"), 6.0),
    ],
)
def test_any_two_optimizers_or_runs_can_be_compared(choices, sides, ratio):
    comparison = compared(three_optimizers(), **choices)
    assert comparison.sides == sides
    assert comparison.current_ratios["diameter"].ratio == pytest.approx(ratio)


def test_two_optimizers_are_compared_whatever_they_are_called():
    comparison = compared([head("Lion", 0, 3.0), head("Shampoo", 0, 2.0)])
    assert comparison.sides == ("Lion", "Shampoo")
    assert comparison.current_ratios["diameter"].ratio == 1.5


def test_a_run_as_the_baseline_is_compared_with_every_group_and_never_with_itself():
    comparison = compared(three_optimizers(), baseline="AdamW-0")
    assert [(c.candidate, len(c.pairs)) for c in comparison.contrasts] == [("AdamW", 1), ("RowNorm", 2), ("Muon", 2)]
    assert all(a != b for a, b in comparison.pairs)


def test_groups_that_differ_in_settings_are_compared_on_request_and_it_is_said():
    comparison = compared(four_runs(), baseline="AdamW, batch=64, lr=0.1", candidate="RowNorm")
    assert comparison.pairs == (("AdamW-1", "RowNorm-1"),)
    assert comparison.notes == (
        "AdamW, batch=64, lr=0.1 and RowNorm also differ in batch (64 against 16) and lr (0.1 against 0.001).",
    )


def test_an_optimizer_against_itself_is_no_comparison_and_a_note_says_so():
    comparison = compared(three_optimizers(), baseline="AdamW", candidate="AdamW")
    assert comparison.contrasts == ()
    assert len(comparison.notes) == 1
    assert "nothing to compare" in comparison.notes[0]


def test_a_side_that_nothing_is_called_is_named_in_a_note():
    comparison = compared(four_runs(), baseline="Nobody")
    assert comparison.contrasts == ()
    assert "'Nobody'" in comparison.notes[0]


def test_splitting_by_a_key_leaves_the_pairs_as_they_are():
    runs = [
        head(name, seed, value, config={"head_lr": len(name)})
        for name, value in (("AdamW", 8.0), ("RowNorm", 2.0))
        for seed in (0, 1)
    ]
    comparison = compared(runs, by="head_lr")
    assert [*comparison.optimizers] == ["AdamW, head_lr=5", "RowNorm, head_lr=7"]
    assert (len(comparison.pairs), comparison.ratios["step_diameter"]) == (2, 4.0)
    assert comparison.about == "AdamW and RowNorm also differ in head_lr."
