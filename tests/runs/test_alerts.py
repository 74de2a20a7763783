"""The blow-up rules: what they say, what they are silent about, and that a replay says the same."""

import json
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.alerts import Judge, Rules, alerts_of, with_texts
from hilbert_monitor.runs.record import StepRecord


def record(step, lr=1e-3, ratio=10.0, **more):
    """A step whose D(S) is so many times its learning rate."""
    values = {"diameter_lower": ratio * lr, "pair": (3, 14), "nonfinite_rows": 0} | more
    return StepRecord(step=step, time=float(step), learning_rate=lr, **values)


def kinds(records, rules=None):
    return [(alert.step, alert.kind) for alert in alerts_of(records, rules)]


def noisy(steps, seed=0, spread=0.1):
    """Ratios of a calm run: their logarithm wanders a little."""
    draw = random.Random(seed)
    return [10 * math.exp(draw.gauss(0, spread)) for _ in range(steps)]


def warmup_cosine(t, total, peak=1e-3):
    warm = total // 10
    return peak * (t / warm if t < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * (t - warm) / (total - warm))))


@pytest.mark.parametrize("seed", range(5))
def test_a_calm_run_through_warm_up_and_decay_is_silent(seed):
    ratios = noisy(2000, seed)
    assert kinds(record(t + 1, warmup_cosine(t, 2000), ratio) for t, ratio in enumerate(ratios)) == []


def test_a_learning_rate_that_starts_at_zero_enters_no_logarithm():
    records = [record(1, 0.0, 0.0), *(record(t + 1, t * 1e-5) for t in range(1, 50))]
    assert kinds(records) == []
    judge = Judge()
    for each in records:
        judge.judge(each)
    assert len(judge.diameter.logs) == 49


@pytest.mark.parametrize("factor", [2.6, 10, 1e6])
@pytest.mark.parametrize("at", [40, 150, 900])
def test_a_diameter_far_above_the_last_ones_is_reported_in_its_step(factor, at):
    ratios = noisy(1000)
    ratios[at] *= factor
    ratios[at] = max(ratios[at], 40)
    assert kinds(record(t + 1, warmup_cosine(t, 1000), r) for t, r in enumerate(ratios))[:1] == [(at + 1, "diameter")]


@pytest.mark.parametrize("at", [50, 150, 900])
@pytest.mark.parametrize(("factor", "steps"), [(10, 1), (3, 1), (3, 1000)])
def test_a_learning_rate_that_jumps_is_not_divided_out(at, factor, steps):
    rates = [warmup_cosine(t, 1000) * (factor if at <= t < at + steps else 1) for t in range(1000)]
    alerts = kinds(record(t + 1, lr, ratio) for t, (lr, ratio) in enumerate(zip(rates, noisy(1000), strict=True)))
    assert alerts == [(at + 1, "diameter")]


def test_an_alert_for_a_jump_says_that_it_is_the_learning_rate():
    records = [record(t, 1e-3) for t in range(1, 50)] + [record(50, 1e-2)]
    (alert,) = alerts_of(records)
    assert "the learning rate jumped from 0.001 to 0.01" in alert.message
    assert alert.expected == pytest.approx(1e-2)
    assert alert.value == pytest.approx(1e-1)


@pytest.mark.parametrize("growth", [1.02, 1.09])
def test_a_learning_rate_that_grows_steadily_is_a_schedule(growth):
    assert kinds(record(t, 1e-6 * growth**t) for t in range(1, 120)) == []


def test_a_triangular_schedule_may_turn():
    rates = [1e-3 * (1 + abs(t % 40 - 20)) / 21 for t in range(200)]
    assert kinds(record(t + 1, lr) for t, lr in enumerate(rates)) == []


def test_restarts_are_jumps_unless_the_rules_say_otherwise():
    rates = [1e-3 * (1 + math.cos(math.pi * (t % 50) / 50)) / 2 for t in range(200)]
    records = [record(t + 1, lr) for t, lr in enumerate(rates)]
    assert [step for step, _ in kinds(records)] == [51, 101, 151]
    assert kinds(records, Rules(jump=math.inf)) == []


def test_nothing_is_said_before_there_is_enough_history():
    wild = [record(t, ratio=10.0 ** (t % 3)) for t in range(1, 20)]
    assert kinds(wild) == []


def test_a_learning_rate_of_before_lost_records_is_led_on():
    """Of every tenth step only: the rate has grown tenfold between them as it did before."""
    assert kinds(record(t, t * 1e-5) for t in range(10, 1000, 10)) == []


def test_a_lasting_blow_up_is_reported_once_and_again_when_it_has_doubled():
    ratios = [10.0] * 50 + [40.0] * 10 + [100.0] * 5 + [10.0] * 20 + [40.0]
    steps = [step for step, _ in kinds(record(t + 1, ratio=r) for t, r in enumerate(ratios))]
    assert steps == [51, 61, 86]


def test_a_new_level_becomes_the_usual_one():
    judge = Judge()
    for t in range(1, 401):
        judge.judge(record(t, ratio=10.0 if t <= 100 else 40.0))
    assert judge.judge(record(401, ratio=40.0)) == []
    assert judge.limit(302, 1e-3) == pytest.approx(70e-3)
    assert judge.diameter.expected(1e-3) == pytest.approx(40e-3)


def test_the_limit_is_a_factor_over_all_but_two_of_the_last_values():
    judge = Judge(Rules(window=50))
    for t, ratio in enumerate([500.0] * 30 + [10.0] * 47 + [40.0, 90.0, 20.0]):
        judge.judge(record(t + 1, ratio=ratio))
    assert judge.limit(81, 1e-3) == pytest.approx(1.75 * 20e-3)
    assert judge.limit(81, 3e-3) == pytest.approx(1.65 * 10e-3)  # the learning rate has jumped


def test_more_than_the_optimizer_can_make_is_reported_and_what_it_lives_at_is_not():
    records = [record(t, ratio=1.99, ceiling=2e-3) for t in range(1, 30)]
    assert kinds(records) == []
    assert kinds([*records, record(30, ratio=2.019, ceiling=2e-3)]) == []
    assert kinds([*records, record(30, ratio=2.021, ceiling=2e-3)]) == [(30, "ceiling")]
    assert kinds([record(1, ratio=2.021, ceiling=2e-3)]) == [(1, "ceiling")]  # theory needs no history


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_increment_that_is_not_finite_is_reported_once(value):
    bad = {"diameter_lower": value, "diameter_upper": value, "nonfinite_rows": 7, "pair_text": (" the", "x")}
    (alert,) = alerts_of([record(1, **bad), record(2, **bad), record(3, **bad)])
    assert (alert.step, alert.kind, alert.value) == (1, "nonfinite", 7.0)
    assert "token 3 ' the'" in alert.message


def test_a_skipped_step_says_nothing():
    records = [record(t) for t in range(1, 40)]
    assert kinds([*records, StepRecord(step=40, time=0.0, skipped="overflow", learning_rate=1.0)]) == []


def test_the_perturbation_has_a_history_of_its_own():
    records = [
        record(t, perturbation_rms=0.1 if t % 10 == 0 else None, perturbation_pair=(5, 6)) for t in range(1, 100)
    ]
    blown = record(100, perturbation_rms=0.3, perturbation_pair=(5, 6))
    (alert,) = alerts_of([*records, blown])
    assert (alert.kind, alert.pair) == ("perturbation", (5, 6))
    assert kinds([*records[:39], blown]) == []  # three values so far


def test_the_exact_value_counts_where_there_is_one():
    records = [record(t) for t in range(1, 50)]
    assert kinds([*records, record(50, ratio=10, diameter=50e-3)]) == [(50, "diameter")]
    assert kinds([*records, record(50, ratio=50, diameter=10e-3)]) == []


def test_an_alert_names_step_value_expectation_tokens_and_what_to_look_at():
    records = [record(t) for t in range(1, 50)]
    blown = record(50, ratio=70, pair_text=("foo", "bar"), gradient_row_token=14)
    (alert,) = alerts_of([*records, blown])
    assert alert.message == (
        "D(S) = 0.07, 7 times the 0.01 of the last 49 measured, between tokens 3 'foo' and 14 'bar': the head's"
        " gradient is largest at one of them, look at how they occur in the batch of this step"
    )
    assert (alert.pair, alert.pair_text, alert.time) == ((3, 14), ("foo", "bar"), 50.0)


steps = st.builds(
    lambda lr, ratio, rms, bad: {"lr": lr, "ratio": ratio, "perturbation_rms": rms, "nonfinite_rows": bad},
    st.one_of(st.just(0.0), st.floats(1e-9, 1.0)),
    st.one_of(st.floats(0, 1e6), st.just(math.nan), st.just(math.inf)),
    st.one_of(st.none(), st.floats(0, 10), st.just(math.nan)),
    st.integers(0, 2),
)


@given(st.lists(steps, max_size=60), st.integers(0, 60))
def test_a_judge_that_was_saved_and_restored_says_what_it_would_have_said(seen, cut):
    rules = Rules(diameter_quiet=3, perturbation_quiet=2, calm=1)
    records = [record(t + 1, **values) for t, values in enumerate(seen)]
    whole, first, second = Judge(rules), Judge(rules), Judge(rules)
    for each in records[:cut]:
        whole.judge(each)
        first.judge(each)
    second.restore(json.loads(json.dumps(first.state())))
    for each in records[cut:]:
        assert second.limit(each.step, each.learning_rate) == whole.limit(each.step, each.learning_rate)
        whole.judge(each)
        second.judge(each)


@given(st.lists(steps, max_size=60))
def test_whatever_the_records_alerts_can_be_written_and_a_replay_gives_the_same(seen):
    records = [record(t + 1, **values) for t, values in enumerate(seen)]
    first, again = list(alerts_of(records)), list(alerts_of(records))
    assert [msgspec.json.encode(alert) for alert in first] == [msgspec.json.encode(alert) for alert in again]


@given(st.lists(st.floats(5, 15), min_size=30, max_size=60), st.floats(1e-6, 1e3))
def test_alerts_do_not_depend_on_the_unit_of_the_learning_rate(ratios, unit):
    ratios[-1] *= 3.0137
    assert kinds(record(t + 1, 1.0, r) for t, r in enumerate(ratios)) == kinds(
        record(t + 1, unit, r) for t, r in enumerate(ratios)
    )


def test_texts_that_are_known_later_make_the_alerts_that_they_would_have_made_at_once():
    usual = {"perturbation_rms": 0.1, "perturbation_pair": (7, 3), "ceiling": 1.0}
    blown = {"perturbation_rms": 9.0, "nonfinite_rows": 2, "ratio": 2000.0}
    records = [record(step + 1, **usual | (blown if step == 40 else {})) for step in range(41)]
    alerts = list(alerts_of(records))
    assert {alert.kind for alert in alerts} == {"nonfinite", "ceiling", "diameter", "perturbation"}
    texts = {(3, 14): (" the", "tokens 3 and 14"), (7, 3): ("'", " the")}
    pairs = {"pair_text": texts[3, 14], "perturbation_pair_text": texts[7, 3]}
    complete = alerts_of(msgspec.structs.replace(r, **pairs) for r in records)
    assert [with_texts(alert, texts[alert.pair]) for alert in alerts] == list(complete)
