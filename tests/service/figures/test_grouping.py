"""Which runs are seeds of one: what settings mean, which groups there are, and what they are called."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.figures.grouping import differences, find_roles, group_runs, offered_keys
from tests.support.run_series import make_run

OPTIMIZERS = st.sampled_from(["AdamW", "RowNorm", "Muon"])
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "lr": st.sampled_from([0.1, 0.2]),
        "batch": st.sampled_from([16, 32]),
        "schedule": st.sampled_from(["cosine", "linear"]),
        "out": st.sampled_from(["/runs/1", "/runs/2", "/runs/3"]),
    },
)
SWEEPS = st.lists(st.tuples(OPTIMIZERS, st.integers(0, 2), CONFIGS), min_size=1, max_size=12)


def sweep(runs):
    """Runs made of (optimizer, seed, configuration)."""
    return [
        make_run(optimizer, seed, id=str(number), config=config, diameter=[1.0])
        for number, (optimizer, seed, config) in enumerate(runs)
    ]


def groups_of(runs, by=""):
    """The ids of the runs of each group, by its name."""
    return {group.name: [run.id for run in group.runs] for group in group_runs(runs, find_roles(runs), by)}


def grid(optimizers=("AdamW", "RowNorm"), seeds=2, **settings):
    """Runs of every optimizer and seed with the same settings, which may be functions of optimizer and seed."""
    return [
        (
            optimizer,
            seed,
            {key: value(optimizer, seed) if callable(value) else value for key, value in settings.items()},
        )
        for optimizer in optimizers
        for seed in range(seeds)
    ]


# Invariances


@given(SWEEPS)
def test_runs_of_a_group_differ_in_seeds_and_names_alone(specs):
    runs = sweep(specs)
    roles = find_roles(runs)
    for group in group_runs(runs, roles):
        assert len({run.optimizer for run in group.runs}) == 1
        for run in group.runs:
            different = {key for key, _ in run.settings.items() ^ group.runs[0].settings.items()}
            assert different <= {*roles.seeding, *roles.naming}


@given(SWEEPS)
def test_every_run_is_in_one_group_and_no_two_groups_have_one_name(specs):
    runs = sweep(specs)
    groups = group_runs(runs, find_roles(runs))
    assert sorted(run.id for group in groups for run in group.runs) == sorted(run.id for run in runs)
    assert len({group.name for group in groups}) == len(groups)


@given(SWEEPS, st.randoms(use_true_random=False))
def test_the_order_of_the_runs_does_not_matter(specs, shuffler):
    runs = sweep(specs)
    shuffled = runs[:]
    shuffler.shuffle(shuffled)
    assert {name: {*ids} for name, ids in groups_of(runs).items()} == {
        name: {*ids} for name, ids in groups_of(shuffled).items()
    }


@given(
    SWEEPS,
    st.sampled_from(
        [
            ("constant", lambda optimizer, seed, number: 1),
            ("tuned", lambda optimizer, seed, number: {"AdamW": 0.1, "RowNorm": 0.2, "Muon": 0.3}[optimizer]),
            ("data.seed", lambda optimizer, seed, number: 7 * seed + 1),
            ("path", lambda optimizer, seed, number: f"/home/me/{number}"),
            ("began", lambda optimizer, seed, number: f"2026-01-01T00:00:{number:02}"),
        ]
    ),
)
def test_keys_that_say_nothing_split_nothing(specs, key):
    name, value = key
    more = [(o, s, {**config, name: value(o, s, number)}) for number, (o, s, config) in enumerate(specs)]
    before = group_runs(sweep(specs), find_roles(sweep(specs)))
    after = group_runs(sweep(more), find_roles(sweep(more)))
    if name in ("path", "began"):  # runs that were equal in everything are told apart by it
        assert name not in find_roles(sweep(more)).splitting
    else:
        assert [[run.id for run in group.runs] for group in before] == [[run.id for run in g.runs] for g in after]


# What keys mean


def test_a_key_with_several_values_for_one_optimizer_splits_and_one_for_each_optimizer_does_not():
    specs = [
        ("AdamW", 0, {"lr": 0.001, "batch": 16, "head": "adamw", "head_lr": 4e-3}),
        ("AdamW", 1, {"lr": 0.1, "batch": 64, "head": "adamw", "head_lr": 4e-3}),
        ("RowNorm", 0, {"lr": 0.001, "batch": 16, "head": "rownorm", "head_lr": 5e-2}),
        ("RowNorm", 1, {"lr": 0.001, "batch": 16, "head": "rownorm", "head_lr": 5e-2}),
    ]
    runs = sweep(specs)
    roles = find_roles(runs)
    assert (roles.splitting, roles.following) == (("batch", "lr"), ("head", "head_lr"))
    assert groups_of(runs) == {
        "AdamW, batch=16, lr=0.001": ["0"],
        "AdamW, batch=64, lr=0.1": ["1"],
        "RowNorm": ["2", "3"],
    }
    assert differences(runs, roles) == "Grouped by batch and lr. AdamW and RowNorm also differ in head_lr."


def test_a_number_that_differs_in_every_run_splits_and_a_path_does_not():
    rng = random.Random(0)
    runs = sweep([("AdamW", 0, {"lr": rng.random(), "out": f"/runs/{number}"}) for number in range(6)])
    roles = find_roles(runs)
    assert (roles.splitting, roles.naming) == (("lr",), ("out",))
    assert len(groups_of(runs)) == 6


@pytest.mark.parametrize("values", [("cosine", "linear"), ([0.9, 0.95], [0.9, 0.99]), (None, 100), (True, False)])
def test_words_lists_and_flags_are_no_names_even_if_every_run_has_its_own(values):
    runs = sweep([("AdamW", 0, {"setting": value}) for value in values])
    assert find_roles(runs).splitting == ("setting",)


@pytest.mark.parametrize("key", ["seed", "data.seed", "data_seed", "loader.seeds", "seed_everything", "number"])
def test_seeds_split_nothing_whatever_they_are_called(key):
    runs = sweep(grid(**{key: lambda optimizer, seed: seed}))
    assert find_roles(runs).seeding == (key,)
    assert [*groups_of(runs)] == ["AdamW", "RowNorm"]


def test_a_run_that_was_made_again_under_its_name_is_not_split_from_the_others():
    specs = grid(seeds=3, out=lambda optimizer, seed: f"/runs/{optimizer}-{seed}")
    specs = [*specs, specs[0]]
    assert find_roles(sweep(specs)).naming == ("out",)
    dated = sweep([(o, s, {**config, "date": f"day {day}"}) for day, (o, s, config) in enumerate(specs)])
    assert find_roles(dated).naming == ("date", "out")
    assert [*groups_of(dated)] == ["AdamW", "RowNorm"]


def test_a_missing_key_is_a_value():
    runs = sweep([("AdamW", 0, {"clip": 1.0}), ("AdamW", 0, {}), ("RowNorm", 0, {})])
    assert [*groups_of(runs)] == ["AdamW, clip=1", "AdamW, no clip", "RowNorm"]


def test_equal_numbers_are_one_value_however_they_are_written():
    runs = sweep([("AdamW", 0, {"decay": 0, "lr": 1e-3}), ("AdamW", 1, {"decay": 0.0, "lr": 0.001})])
    assert [*groups_of(runs)] == ["AdamW"]


def test_a_run_without_a_curve_has_no_say():
    runs = [*sweep([("AdamW", 0, {"lr": 0.1}), ("AdamW", 1, {"lr": 0.1})]), make_run(seed=2, config={"lr": 9})]
    assert find_roles(runs[:2]).splitting == find_roles(runs).splitting == ()


# Groups


def test_groups_are_in_the_order_of_optimizers_and_numbers():
    runs = sweep([(name, 0, {"lr": lr}) for name in ("Lion", "RowNorm", "AdamW") for lr in (1e-2, 3e-4, 10)])
    lrs = ("0.0003", "0.01", "10")
    assert [*groups_of(runs)] == [f"{name}, lr={lr}" for name in ("AdamW", "RowNorm", "Lion") for lr in lrs]


def test_keys_that_end_alike_are_named_in_full():
    runs = sweep([("AdamW", 0, {"head": {"lr": a}, "body": {"lr": b}}) for a in (1, 2) for b in (1, 2)])
    assert next(iter(groups_of(runs))) == "AdamW, body.lr=1, head.lr=1"


def test_settings_that_read_alike_once_they_are_cut_have_names_of_their_own():
    runs = sweep([("AdamW", 0, {"text": "x" * 100 + end}) for end in "abc"])
    assert [name.partition("…")[2] for name in groups_of(runs)] == ["", " (2)", " (3)"]


@pytest.mark.parametrize("text", ["[" * 499, "\ud800/1", "{1", "1" * 400])
def test_any_text_may_be_a_setting(text):
    assert len(groups_of(sweep([("AdamW", 0, {"text": text}), ("AdamW", 1, {"text": "/2"})]))) in (1, 2)


def test_a_reader_can_split_by_a_key_that_splits_nothing_by_itself():
    runs = sweep(
        grid(head_lr=lambda optimizer, seed: len(optimizer), out=lambda optimizer, seed: f"/{optimizer}{seed}")
    )
    assert [*groups_of(runs, "head_lr")] == ["AdamW, head_lr=5", "RowNorm, head_lr=7"]
    assert [*groups_of(runs, "out")] == ["AdamW, out=/AdamW0", "AdamW, out=/AdamW1"] + [
        f"RowNorm, out=/RowNorm{seed}" for seed in (0, 1)
    ]
    assert [*groups_of(runs, "nothing")] == ["AdamW, no nothing", "RowNorm, no nothing"]


def test_keys_that_differ_are_offered_and_those_that_split_come_first():
    runs = sweep(grid(a="same", b=lambda o, s: o, seed=lambda o, s: s, z=lambda o, s: s + len(o)))
    assert offered_keys(runs, find_roles(runs)) == ["z", "b", "seed"]
