"""The pace of a run: of its recent steps, and not of its pauses."""

import numpy as np
import pytest

from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.following.columns import MISSING, Table
from hilbert_monitor.service.following.pace import Pace, last_step, pace_of


def table(times, steps=None, tokens=1000):
    times = np.asarray(times, np.float64)
    steps = np.arange(1, len(times) + 1) if steps is None else np.asarray(steps)
    return Table(steps, {"time": times, "tokens": tokens * steps.astype(np.float64)})


def test_steps_and_tokens_a_second():
    pace = pace_of(table(0.25 * np.arange(400)))
    assert pace == (pytest.approx(4.0), pytest.approx(4000.0))


def test_a_night_without_a_step_does_not_count():
    times = 0.25 * np.arange(400)
    times[150:] += 8 * 3600
    times[310:] += 3600
    assert pace_of(table(times)).steps == pytest.approx(4.0, rel=0.02)


def test_regular_validation_does_count():
    times = np.cumsum(np.where(np.arange(1000) % 50 == 0, 25.5, 0.5))
    assert pace_of(table(times)).steps == pytest.approx(1.0, rel=0.1)


def test_it_is_the_pace_of_the_newest_records():
    times = np.cumsum(np.where(np.arange(20_000) < 14_000, 1.0, 0.1))
    assert pace_of(table(times)).steps == pytest.approx(10.0, rel=0.01)


def test_records_of_some_steps_count_the_steps_between():
    assert pace_of(table([0.0, 5.0, 10.0], steps=[10, 20, 30])).steps == pytest.approx(2.0)


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 1.0], [2.0, 1.0], [np.nan, 1.0], [MISSING, MISSING], [0.0, np.inf]])
def test_no_pace_without_two_moments(times):
    assert pace_of(table(times)) == Pace(None, None)


def test_without_tokens_there_are_steps():
    one = table([0.0, 1.0, 2.0])
    pace = pace_of(Table(one.steps, {"time": one.columns["time"]}))
    assert pace == (pytest.approx(1.0), None)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (RunInfo(last_step=50, config={"max_steps": 70}), 50),
        (RunInfo(config={"max_steps": 70}), 70),
        (RunInfo(config={"max_steps": -1, "updates": 300}), 300),
        (RunInfo(config={"max_steps": True, "total_steps": "9"}), None),
        (RunInfo(), None),
    ],
)
def test_the_last_step_is_the_trainers_or_that_of_the_settings(info, expected):
    assert last_step(info) == expected
