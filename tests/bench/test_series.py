"""The bench on synthetic series: its machinery against cases that can be worked out by hand."""

import json
import math
import os
import statistics
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from hilbert_monitor.bench.series import NOISES, OPPONENTS, WINDOW, SeriesPlan, generator, measure, opponents_scores
from hilbert_monitor.bench.series_summary import count_alarms, fault_shares, poisson_tail, summarize, threshold
from hilbert_monitor.cli import app

QUICK = SeriesPlan.quick()
NORMAL, BOUNDS = QUICK.noises


class Fixed:
    """A detector with a fixed limit, which sees whether a branch goes on where its run was."""

    def __init__(self):
        self.next = 0

    def judge(self, record):
        assert record.step == self.next, "records come in their order, in branches too"
        self.next += 1
        return ["alert"] if record.diameter_lower > 1.9 else []


class TellsExact:
    """A detector that tells of every exact value."""

    def judge(self, record):
        return ["alert"] if record.diameter is not None and record.diameter == record.diameter_lower else []


@pytest.fixture(scope="module")
def normal():
    """A run that the fixed limit has judged, and its values."""
    return measure(NORMAL, 3, QUICK, Fixed), NOISES[NORMAL].draw(generator(NORMAL, 3), QUICK.steps)


def test_the_command_prints_every_fault_of_every_noise_and_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    result = CliRunner().invoke(app, ["bench", "faults", "--series", "--quick", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    normal, bounds = results["noises"]
    assert [len(normal["faults"]), len(bounds["faults"])] == [14, 12], "there is no growth in a series of bounds"
    assert {f["tried"] for f in normal["faults"]} == {10}
    assert normal["steps"] == 3000
    large = [f for f in (*normal["faults"], *bounds["faults"]) if f["fault"].startswith("x10")]
    assert [f["ours"] for f in large] == [1.0] * 6, "a factor of 10 is 23 spreads"
    assert all(f["fault"] in result.output for f in normal["faults"])
    assert results["sums"]["ours"] == pytest.approx(sum(f["ours"] for n in results["noises"] for f in n["faults"]))


def test_faults_are_told_where_a_fixed_limit_tells_them(normal):
    run, x = normal
    assert run.alarms == np.flatnonzero(np.exp(x) > 1.9).tolist()
    for factor, length in [(2, 1), (2, 5), (3, 1)]:
        fault = f"x{factor}, {length} step{'s' * (length > 1)}"
        expected = [bool((factor * np.exp(x[t : t + length]) > 1.9).any()) for t in QUICK.begins()]
        assert run.told[fault].tolist() == expected


def test_growth_is_followed_until_just_before_a_factor_of_four():
    *_, path = QUICK.paths(NOISES[NORMAL])
    assert path.faults == {"growth, x2 in 50 steps": len(path.heights)}
    assert np.exp(path.heights[[0, 49, -1]]) == pytest.approx([2 ** (1 / 50), 2, 4 / 2 ** (1 / 50)])
    assert QUICK.begins()[-1] + len(path.heights) < QUICK.steps


def test_scores_are_those_of_the_window_before_a_value_with_the_fault_in_it(normal):
    (run, x), begin = normal, QUICK.begins()[2]
    y = x.copy()
    y[begin : begin + 5] += math.log(2)
    z, mad = [], []
    for t in range(begin, begin + 5):
        window = y[t - WINDOW : t].tolist()
        middle = statistics.median(window)
        z.append((y[t] - statistics.mean(window)) / statistics.stdev(window))
        mad.append((y[t] - middle) / (1.4826 * statistics.median(abs(v - middle) for v in window)))
    for fault, length in [("x2, 1 step", 1), ("x2, 5 steps", 5)]:
        assert run.highest[fault]["z-score"][2] == pytest.approx(max(z[:length]))
        assert run.highest[fault]["MAD"][2] == pytest.approx(max(mad[:length]))
    assert run.scores["z-score"] == pytest.approx(opponents_scores(x)["z-score"])


def test_most_bounds_are_a_tenth_below_the_exact_value():
    run = measure(BOUNDS, 3, QUICK, TellsExact)
    assert run.alarms == list(range(0, QUICK.steps, 10))
    x = NOISES[BOUNDS].draw(generator(BOUNDS, 3), QUICK.steps)
    x[np.arange(QUICK.steps) % 10 != 0] += math.log(0.9)
    assert run.scores["z-score"] == pytest.approx(opponents_scores(x)["z-score"])


def test_alarms_within_five_steps_are_one():
    assert [count_alarms(steps) for steps in ([], [7], [7, 12], [7, 13], [1, 5, 9, 20])] == [0, 1, 1, 2, 2]


def test_a_threshold_gives_as_many_alarms_as_the_rules_had():
    a, b = np.zeros(50), np.zeros(50)
    a[[10, 12, 30]] = 9, 8, 5  # the first two are one alarm
    b[[0, 20]] = 7, 6
    runs = [a, b]
    assert [threshold(runs, alarms) for alarms in (0, 1, 2, 3, 4)] == [9, 7, 6, 5, 0]


def test_a_fault_is_flagged_if_the_better_opponent_is_more_than_two_errors_ahead():
    ours, all_told, none = np.arange(100) >= 10, np.ones(100, bool), np.zeros(100, bool)
    exact = {"z-score": 0.0, "MAD": 0.0}
    cell = fault_shares("x", ours, {"z-score": none, "MAD": all_told}, exact)
    assert (cell.ours, cell.opponents) == (0.9, {"z-score": 0.0, "MAD": 1.0})
    assert cell.behind == pytest.approx(0.1 / math.sqrt(0.1 * 0.9 / 99))
    assert cell.worse
    assert not fault_shares("x", np.arange(100) >= 3, {"z-score": none, "MAD": all_told}, exact).worse
    assert not fault_shares("x", all_told, {"z-score": ours, "MAD": none}, exact).worse
    assert fault_shares("x", none, {"z-score": all_told, "MAD": none}, exact).behind == 100


def test_a_threshold_from_few_false_alarms_is_a_part_of_the_error():
    ours, all_told = np.arange(100) >= 10, np.ones(100, bool)
    cell = fault_shares("x", ours, {"z-score": all_told, "MAD": ours}, {"z-score": 0.04, "MAD": 9.0})
    assert cell.behind == pytest.approx(0.1 / math.sqrt(0.1 * 0.9 / 99 + 0.04**2))


def test_the_error_of_a_threshold_is_what_a_few_more_or_fewer_false_alarms_make_of_it(normal):
    clean = np.zeros(1300)
    clean[10:1300:10] = np.arange(129) + 1.0  # 129 alarms of scores 1 to 129
    highest = np.arange(100) + 30.5
    run = replace(
        normal[0],
        alarms=list(range(0, 250, 10)),  # 25 of the rules
        scores=dict.fromkeys(OPPONENTS, clean),
        told={"x": np.zeros(100, bool)},
        highest={"x": dict.fromkeys(OPPONENTS, highest)},
    )
    (cell,) = summarize([run]).noises[0].faults
    told = 0.26  # 104.5 and more
    assert cell.opponents["MAD"] == pytest.approx(told)
    paired = math.sqrt(told * (1 - told) / 99)
    assert cell.behind == pytest.approx(told / math.hypot(paired, 0.05))  # 5 more or fewer


def test_the_dial_is_broken_only_beyond_chance(normal):
    assert poisson_tail(0, 20) == 1
    assert poisson_tail(1, 2) == pytest.approx(1 - math.exp(-2))
    assert poisson_tail(32, 20) < 0.01 < poisson_tail(31, 20)
    one = replace(normal[0], alarms=[100, 103])
    assert not summarize([one]).noises[0].above_dial, "one alarm where 0.15 are allowed"
    (noise,) = summarize([replace(one, alarms=[100, 200, 300])]).noises
    assert noise.above_dial
    assert (noise.false_alarms, noise.opponents_false_alarms) == (3, {"z-score": 3, "MAD": 3})
