"""The blow-up rules: what they say, what they are silent about, and that a replay says the same."""

import copy
import json
import math
import random

import msgspec
import pytest

from hilbert_monitor.runs.alerts import KINDS, SEVERITIES, Judge, LayerJudge, Rules, alerts_of, with_samples, with_texts
from hilbert_monitor.runs.record import Layer, LayerRecord, StepRecord


def record(step, lr=1e-3, ratio=10.0, **more):
    """A step whose D(S) is so many times its learning rate, which a scheduler has set."""
    values = {"diameter_lower": ratio * lr, "pair": (3, 14), "nonfinite_rows": 0, "scheduled": True} | more
    return StepRecord(step=step, time=float(step), learning_rate=lr, **values)


def run(ratios):
    """The steps of a run from 1 on, at one learning rate."""
    return [record(t + 1, ratio=ratio) for t, ratio in enumerate(ratios)]


def kinds(records, rules=None):
    return [(alert.step, alert.kind) for alert in alerts_of(records, rules)]


def steps_of(ratios, severity=None):
    """The steps with an alert, of one severity or any."""
    return [alert.step for alert in alerts_of(run(ratios)) if severity in (None, alert.severity)]


def noisy(steps, seed=0, spread=0.1):
    """Ratios of a calm run: their logarithm wanders a little."""
    draw = random.Random(seed)
    return [10 * math.exp(draw.gauss(0, spread)) for _ in range(steps)]


def warmup_cosine(t, total, peak=1e-3):
    warm = total // 10
    return peak * (t / warm if t < warm else 0.1 + 0.45 * (1 + math.cos(math.pi * (t - warm) / (total - warm))))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("at", "factor", "severities"),
    [
        *((2000, 1.2, []), (2000, 2.2, ["notice"]), (2000, 5, ["page"]), (2000, 1e6, ["page"]), (40, 10, ["notice"])),
        *((40, 1e6, ["page"]), (150, 2.6, ["notice"]), (150, 10, ["notice"]), (900, 2.6, ["notice"])),
        (900, 1e6, ["page"]),
    ],
)
def test_one_diameter_far_above_three_times_the_usual_is_a_page_and_a_smaller_one_a_notice(at, factor, severities):
    ratios = noisy(at + 1)
    ratios[at] = 10 * factor
    alerts = list(alerts_of(record(t + 1, warmup_cosine(t, 2100), ratio) for t, ratio in enumerate(ratios)))
    assert [alert.severity for alert in alerts] == severities
    assert all((alert.step, alert.kind) == (at + 1, "diameter") for alert in alerts)
    assert all("more than this run has shown before" in alert.message for alert in alerts if alert.severity == "page")


def test_a_learning_rate_accident_is_a_page_in_its_step_even_if_that_is_not_measured():
    records = [record(t, 1e-3 if t < 502 else 3e-3) for t in range(1, 901)]
    some = [msgspec.structs.replace(r, diameter_lower=None) if r.step % 10 else r for r in records]
    (alert,) = alerts_of(some)
    assert (alert.step, alert.kind, alert.severity) == (502, "rate", "page")
    assert (alert.value, alert.expected) == (3e-3, 1e-3)
    assert alert.message.startswith("the learning rate is 0.003, 3 times the 0.001 that earlier ones led to expect: ")


@pytest.mark.few(4)
@pytest.mark.parametrize("scheduled", [True, False, None])
@pytest.mark.parametrize("growth", [1.01, 1.02, 1.05, 1.2, 1.6])
def test_a_learning_rate_that_grows_without_end_is_told_before_it_has_trebled(growth, scheduled):
    ratios, at = noisy(1000, seed=3), 400
    rates = [warmup_cosine(t, 1000) * growth ** max(0, t - at) for t in range(at + 300)]
    records = (record(t + 1, rates[t], ratios[t], scheduled=scheduled and t < at) for t in range(at + 300))
    alert = next(alerts_of(records))
    assert alert.kind == "rate"
    assert at < alert.step
    assert growth ** (alert.step - at) < 3 * growth


SCHEDULES = {
    "constant": lambda t: 1.0,
    "warm-up and cosine": lambda t: warmup_cosine(t, 2000, 1.0),
    "one cycle": lambda t: 0.04 + 0.48 * (1 - math.cos(math.pi * t / 600)) if t < 600 else 1 - 0.999 * (t - 600) / 1400,
    "warm-up with the square of the time": lambda t: min(1.0, (t / 400) ** 2),
    "warm-up, stable, decay": lambda t: min(1.0, t / 100, max(0.01, (2000 - t) / 400)),
    "steps": lambda t: 0.1 ** (t // 500),
    "plateaus": lambda t: 0.5 ** (t // 130),
    "triangles": lambda t: (1 + abs(t % 200 - 100)) / 101,
    "warm restarts": lambda t: 0.5 * (1 + math.cos(math.pi * (t % 250) / 250)),
    "restarts with a decaying peak": lambda t: 0.8 ** (t // 250) * 0.5 * (1 + math.cos(math.pi * (t % 250) / 250)),
    "epochs of a warm-up": lambda t: min(1.0, 0.33 + 0.134 * (t // 100)),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_followed_without_a_setting_and_an_accident_is_told_in_its_step(name, seed):
    """An accident lasts one step, or goes on."""
    rates, ratios = [1e-3 * SCHEDULES[name](t) for t in range(2000)], noisy(2000, seed)
    assert kinds(record(t + 1, rates[t], ratios[t]) for t in range(2000)) == []
    for at, factor, end in ((1140, 3, 1141), (1140, 10, 1190)):
        changed = [lr * (factor if at <= t < end else 1) for t, lr in enumerate(rates[: at + 50])]
        records = [record(t + 1, lr, ratios[t], scheduled=t < at) for t, lr in enumerate(changed)]
        assert kinds(records) == [(at + 1, "rate")]


def test_a_jump_to_a_rate_already_had_is_a_restart_only_if_the_scheduler_made_it():
    rates = [1e-3] * 100 + [1e-4] * 100 + [1e-3] * 50
    assert kinds(record(t + 1, lr) for t, lr in enumerate(rates)) == []
    (alert,) = alerts_of(record(t + 1, lr, scheduled=t != 200) for t, lr in enumerate(rates))
    assert (alert.step, alert.kind, alert.value, alert.expected) == (201, "rate", 1e-3, 1e-4)
    higher = [1e-3] * 100 + [3e-3] * 50  # a rate that it never had, by whomever
    assert kinds(record(t + 1, lr) for t, lr in enumerate(higher)) == [(101, "rate")]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("begins", "doubling", "spread", "most"),
    [
        *((600, doubling, 0.2, 2.6) for doubling in (5, 20, 100, 200)),
        *((begins, doubling, 0.05, None) for doubling in (200, 300, 600) for begins in (0, 300, 1000)),
    ],
)
def test_growth_is_told_and_does_not_become_usual(begins, doubling, spread, most):
    """Growth raises the last values with itself, but not those of two hundred steps ago, and not the lowest level.

    The slow level is told at eight times its lowest. It is 99 steps late, and its lowest is at best the mean of the
    first 100: a value is then eight times the first, and by the growth of 150 steps larger. 3 % are for the noise.
    """
    steps = begins + (2 if most else 5) * doubling
    ratios = [r * 2 ** (max(0, t - begins) / doubling) for t, r in enumerate(noisy(steps, spread=spread))]
    alerts = list(alerts_of(run(ratios)))
    assert most or {alert.pattern for alert in alerts} <= {"level", "trend"}
    assert begins < alerts[0].step
    assert 2 ** ((alerts[0].step - 1 - begins) / doubling) < (most or 8 * 1.03 * 2 ** (150 / doubling))


def test_a_run_may_repeat_its_own_bursts_and_an_accident_excuses_nothing():
    draw, ratios = random.Random(4), noisy(6000, spread=0.05)
    for t in range(300, 6000, 300):
        ratios[t] = 10 * draw.uniform(1.5, 3)
    steps = steps_of(ratios)
    assert steps[0] == 301
    assert len(steps) <= 3
    assert max(steps) < 3000
    calm = noisy(1000)
    calm[500], calm[700] = 500.0, 200.0
    assert steps_of(calm) == [501, 701]
    again = noisy(4000)
    for t, ratio in ((2000, 60.0), (2300, 60.0), (2600, 60.0), (3000, 60.0), (3500, 200.0)):
        again[t] = ratio
    assert steps_of(again, "page") == [2001, 2301, 3501]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "factors",
    [
        *({30: 20, 60: 20, 2000: 10}, {30: 20, 60: 20, 15_000: 10}, {100: 4, 29_000: 3}),
        {**dict.fromkeys(range(40, 1600, 40), 20), 14_000: 10},
    ],
)
def test_bursts_excuse_nothing_once_they_are_over(factors):
    steps = steps_of(r * factors.get(t, 1) for t, r in enumerate(noisy(max(factors) + 20, spread=0.05)))
    assert steps == [t + 1 for t in (*sorted(factors)[:-1][:2], max(factors))]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("ratios", "most"),
    [
        *(([r * (6 if t % n == 0 else 1) for t, r in enumerate(noisy(2000))], 4) for n in (6, 7, 10, 11, 50)),
        *(([10.0] * 1000 + noisy(4000, seed, spread=0.3), 6) for seed in range(3)),
    ],
)
def test_what_comes_again_and_again_is_told_a_few_times(ratios, most):
    assert len(steps_of(ratios)) <= most


def test_bounds_and_exact_values_have_one_history():
    """Nine of ten steps have a lower bound, a fifth below the exact value: the tenth is no event."""
    exact = noisy(1500, seed=7, spread=0.03)

    def records(ratios):
        for t, ratio in enumerate(ratios):
            more = {"diameter": ratio * 1e-3} if t % 10 == 9 else {"diameter_upper": 1.2 * ratio * 1e-3}
            yield record(t + 1, ratio=ratio if t % 10 == 9 else 0.8 * ratio, **more)

    assert kinds(records(exact)) == []
    for at in (1004, 1009):
        assert kinds(records([2 * r if t == at else r for t, r in enumerate(exact)])) == [(at + 1, "diameter")]
    judge = Judge()
    for each in records(exact):
        judge.judge(each)
    assert not judge.suspects(1501, 1e-3, 8e-3, 12e-3, scheduled=True)
    assert judge.suspects(1501, 1e-3, 8e-3, 24e-3, scheduled=True)
    assert judge.suspects(1501, 1e-3, 16e-3, 16e-3, scheduled=True)


@pytest.mark.sweep
def test_the_dial_is_the_rate_of_false_alarms():
    ratios = noisy(20_000, seed=11, spread=0.45)
    few, many = (len(kinds(run(ratios), Rules(false_alarms_per_10k=dial))) for dial in (0.1, 20.0))
    assert few <= 2
    assert 10 <= many <= 60


@pytest.mark.parametrize("values", [20, 25, 40, 60])
def test_ten_times_the_usual_is_told_however_few_values_there_are(values):
    runs = [run([*noisy(values, seed, spread=0.2), 100.0]) for seed in range(10)]
    assert sum(kinds(records) == [(values + 1, "diameter")] for records in runs) >= 9


@pytest.mark.parametrize("dial", [0, -1, 101, math.nan, "1", None])
def test_a_dial_that_cannot_be_is_refused(dial):
    with pytest.raises(ValueError, match=r"a number from 0\.001 to 100"):
        Rules(false_alarms_per_10k=dial)


def test_a_lasting_blow_up_is_reported_once_and_again_when_it_has_doubled_or_becomes_a_page():
    assert steps_of([10.0] * 50 + [40.0] * 10 + [100.0] * 5 + [10.0] * 20 + [60.0]) == [51, 61, 86]
    alerts = list(alerts_of(run([*noisy(2000), 20.0, 39.0, 39.0])))
    assert [(alert.step, alert.severity) for alert in alerts] == [(2001, "notice"), (2002, "page")]


def test_the_limit_is_the_largest_diameter_that_is_no_blow_up():
    judge = Judge()
    assert judge.limit(1, 1e-3) is None
    for t, ratio in enumerate(noisy(500, spread=0.2)):
        judge.judge(record(t + 1, ratio=ratio, diameter=ratio * 1e-3))
    limit = judge.limit(501, 1e-3, scheduled=True)
    assert judge.limit(501, 2e-3, scheduled=False) == 0.0  # any step at an unexpected rate is a blow-up
    assert judge.limit(501, 0.0) is None
    for value, told in ((limit * (1 - 1e-9), 0), (limit * (1 + 1e-9), 1)):
        assert len(copy.deepcopy(judge).judge(record(501, ratio=value / 1e-3, diameter=value))) == told


def test_more_than_the_optimizer_can_make_is_reported_and_what_it_lives_at_is_not():
    records = [record(t, ratio=1.99, ceiling=2e-3) for t in range(1, 30)]
    assert kinds(records) == []
    assert kinds([*records, record(30, ratio=2.019, ceiling=2e-3)]) == []
    assert kinds([*records, record(30, ratio=2.021, ceiling=2e-3)]) == [(30, "ceiling")]
    assert kinds([record(1, ratio=2.021, ceiling=2e-3)]) == [(1, "ceiling")]  # theory needs no history


def test_the_perturbation_has_a_history_of_its_own():
    records = [record(t, **{"perturbation_rms": 0.1} if t % 10 == 0 else {}) for t in range(1, 100)]
    blown = record(100, perturbation_rms=0.4, perturbation_pair=(5, 6))
    (alert,) = alerts_of([*records, blown])
    assert (alert.kind, alert.severity, alert.pair) == ("perturbation", "notice", (5, 6))
    assert kinds([*records[:69], blown]) == []  # six values so far


def test_an_alert_names_step_value_rarity_tokens_batch_and_what_to_look_at():
    blown = record(5001, ratio=25.5, pair_text=("foo", "bar"), gradient_row_token=14, batch=812)
    (alert,) = alerts_of([*run(noisy(5000, spread=0.2)), blown])
    assert alert.message == (
        f"D(S) = 0.0255, {0.0255 / alert.expected:.3g} times the usual {alert.expected:.3g}, seen once in"
        f" {float(f'{alert.rarity:.1g}'):,.0f} steps, between tokens 3 'foo' and 14 'bar': the head's gradient is"
        " largest at one of them, look at how they occur in the batch of this step; it was batch 812 of its epoch"
    )
    assert 1e4 < alert.rarity < 1e7  # 4.7 deviations: one in 770,000
    assert (alert.pair, alert.pair_text, alert.time, alert.batch) == ((3, 14), ("foo", "bar"), 5001.0, 812)


def test_what_is_read_later_makes_the_alerts_that_it_would_have_made_at_once():
    usual = {"perturbation_rms": 0.1, "perturbation_pair": (7, 3), "ceiling": 1.0, "batch": 8}
    blown = {"perturbation_rms": 9.0, "nonfinite_rows": 2, "ratio": 2000.0}
    records = [record(step + 1, **usual | (blown if step == 40 else {})) for step in range(41)]
    alerts = list(alerts_of(records))
    assert {alert.kind for alert in alerts} == {"nonfinite", "ceiling", "diameter", "perturbation"}
    texts = {(3, 14): (" the", "tokens 3 and 14"), (7, 3): ("'", " the")}
    later = {"pair_text": texts[3, 14], "perturbation_pair_text": texts[7, 3], "samples": (3, 17, 29, 31, 44, 61, 70)}
    complete = list(alerts_of(msgspec.structs.replace(r, **later) for r in records))
    assert [with_samples(with_texts(alert, texts[alert.pair]), later["samples"]) for alert in alerts] == complete
    assert complete[0].message.endswith("; it was batch 8 of its epoch, with samples 3, 17, 29, 31, 44 and 2 more")


def test_a_stray_value_at_the_start_of_a_correlated_run_excuses_no_accident_later():
    draw, values = random.Random(3), [0.0]
    for step in range(3000):
        values.append(0.95 * values[-1] + draw.gauss(0, 0.06) + (0.45 if step == 50 else 0.0))
    values[2500] += math.log(1.7)
    steps = steps_of(10 * math.exp(value) for value in values)
    assert 2501 in steps
    assert len(steps) <= 2


@pytest.mark.parametrize(
    ("factors", "patterns"),
    [
        ({700: 100.0}, {"step"}),
        (dict.fromkeys(range(700, 1000), 2.0), {"level"}),
        ({t: 2 ** ((t - 500) / 150) for t in range(500, 1000)}, {"level", "trend"}),
        ({t: 1.6 ** ((t - 400) // 20) for t in range(400, 1000)}, {"level", "trend"}),
    ],
    ids=["spike", "level", "growth", "staircase"],
)
def test_the_pattern_says_what_was_broken(factors, patterns):
    ratios = [r * factors.get(t, 1) for t, r in enumerate(noisy(1000, seed=1, spread=0.5))]
    first = next(alerts_of(run(ratios)))
    assert first.pattern in patterns
    assert first.step > min(factors)


@pytest.mark.parametrize(
    ("before", "factor", "after"),
    [(100, 4, 300), (300, 0.1, 30), (5, 0.02, 95)],
    ids=["a higher level", "a level that has fallen", "an early burst"],
)
def test_a_new_level_becomes_the_usual_one(before, factor, after):
    ratios = noisy(before) + [r * factor for r in noisy(after, seed=2)]
    judge = Judge()
    for each in run(ratios):
        judge.judge(each)
    step = len(ratios) + 1
    assert judge.judge(record(step, ratio=10 * factor)) == []
    assert [alert.kind for alert in judge.judge(record(step + 1, ratio=80 * factor))] == ["diameter"]


def test_nothing_is_said_of_diameters_before_there_is_enough_history_or_of_steps_that_made_none():
    assert kinds(record(t, ratio=10.0 ** (t % 3)) for t in range(1, 20)) == []
    calm = [*(record(t, 0.0, 0.0) for t in range(1, 40)), *(record(t, ratio=r) for t, r in enumerate(noisy(60), 40))]
    assert kinds([*calm, StepRecord(step=100, time=0.0, skipped="overflow", learning_rate=1.0)]) == []
    assert kinds([*calm, record(100, ratio=10, diameter=50e-3)]) == [(100, "diameter")]
    assert kinds([*calm, record(100, ratio=50, diameter=10e-3)]) == []


def test_a_change_with_unknown_decay_is_judged_like_the_diameter_and_named_as_what_it_is():
    values = {"diameter_lower": None, "decay": "unknown"}
    records = [record(t + 1, **values, change_diameter=r * 1e-3) for t, r in enumerate(noisy(1000))]
    (alert,) = alerts_of([*records, record(1001, **values, change_diameter=0.1)])
    assert (alert.step, alert.kind, alert.severity, alert.value) == (1001, "diameter", "page", 0.1)
    assert alert.message.startswith("The diameter of the weights' change with its unknown decay = 0.1, ")
    assert "D(S)" not in alert.message


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nonfinite_rows": 7}, "7 rows of the increment are not finite, that of token 14 'x' first: "),
        ({"nonfinite_rows": 1, "pair_text": None}, "1 row of the increment is not finite, that of token 14: "),
        ({"nonfinite_rows": 1, "pair": (0, 1)}, "1 row of the increment is not finite, that of token 0 or 1 'x': "),
        ({"nonfinite_rows": 2, "pair": None}, "2 rows of the increment are not finite: "),
        ({"train_loss": math.nan}, "the training loss is nan: "),
        ({"train_loss": -math.inf, "skipped": "overflow"}, "the training loss is -inf: "),
    ],
)
def test_what_is_not_finite_is_a_page_in_its_step_and_told_once(values, says):
    bad = {"diameter_lower": math.nan, "diameter_upper": math.nan, "pair_text": ("", "x")} | values
    (alert,) = alerts_of([record(1, train_loss=2.0), *(record(t, **bad) for t in (2, 3, 4))])
    assert (alert.step, alert.kind, alert.severity) == (2, "nonfinite", "page")
    assert alert.value == values.get("nonfinite_rows", 0)
    assert alert.message.startswith(says)


def test_logits_that_outgrow_their_precision_are_told_of_once_with_what_helps():
    losses = [*(0.0009 * ratio for ratio in noisy(200)), *[0.05] * 4]
    records = [record(500 * (t + 1), 1e-3 * 0.97**t, precision_loss_rms=loss) for t, loss in enumerate(losses)]
    (alert,) = alerts_of(records)  # whatever the learning rate does
    assert (alert.step, alert.kind, alert.severity, alert.pattern) == (100_500, "precision", "notice", "step")
    assert alert.expected == pytest.approx(0.009, rel=0.2)
    assert "z-loss" in alert.message


def test_growth_within_noise_is_a_notice_however_far_it_goes():
    assert [kind for kind in KINDS if "page" in SEVERITIES[kind]] == ["nonfinite", "ceiling", "rate", "diameter"]
    ratios = [r * 2 ** (max(0, t - 2000) / 100) for t, r in enumerate(noisy(2150, seed=3, spread=0.6))]
    assert {alert.severity for alert in alerts_of(run(ratios))} == {"notice"}


def test_a_history_of_an_earlier_version_is_left_out():
    judge = Judge()
    for old in ({"diameter": [1.0, 2.0], "rates": []}, {"baselines": {"diameter": {}}, "rates": {"last": []}}):
        with pytest.raises(ValueError, match="another version of the rules"):
            judge.restore(old)
    assert judge.state() == Judge().state()


def test_the_tokens_of_an_alert_are_those_of_what_it_is_about():
    usual = {"pair_text": ("a", "b"), "precision_loss_rms": 0.01, "stored_pair": (7, 8), "stored_diameter": 0.01}
    records = [record(t, **usual) for t in range(1, 60)]
    blown = record(60, **usual | {"precision_loss_rms": 1.0, "stored_diameter": 1.0, "ceiling": 1e-3})
    by_kind = {alert.kind: alert for alert in alerts_of([*records, blown])}
    stored, intended, precision = (by_kind[kind] for kind in ("diameter", "ceiling", "precision"))
    assert (stored.pair, stored.pair_text) == ((7, 8), None)
    assert "between tokens 7 and 8: " in stored.message
    assert (intended.pair, intended.pair_text) == ((3, 14), ("a", "b"))
    assert (precision.pair, precision.pair_text) == (None, None)
    assert "token" not in precision.message


def layers(step, **relative):
    """Layers whose steps are so many times their weight."""
    found = {name: Layer(kind="matrix", step=ratio, weight=1.0) for name, ratio in relative.items()}
    return LayerRecord(step=step, time=float(step), layers=found)


def test_the_layer_furthest_above_its_history_is_named_once_and_the_judge_can_be_restored():
    draw, judge = random.Random(1), LayerJudge()
    for step in range(0, 400, 10):
        assert judge.judge(layers(step, q=math.exp(draw.gauss(-5, 0.1)), k=math.exp(draw.gauss(-4, 0.1)))) == []
    other = LayerJudge()
    other.restore(json.loads(json.dumps(judge.state())))
    for each in (judge, other):
        (alert,) = each.judge(layers(400, q=1.0, k=0.2))
        assert (alert.kind, alert.severity, alert.step) == ("layer", "notice", 400)
        assert alert.message.startswith("q moved first: ")
        assert "and 1 other layer with it" in alert.message
        assert each.judge(layers(410, q=1.0, k=0.2)) == []
    assert other.state() == judge.state()


ODD = (0.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1e-320, 1e308, 1.0, None)
MEASURED = ("diameter", "diameter_lower", "diameter_upper", "learning_rate", "perturbation_rms", "ceiling")
STORED = ("stored_diameter", "stored_diameter_lower", "precision_loss_rms")


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(20))
def test_no_record_however_odd_breaks_the_rules_or_a_judge_that_is_saved_and_restored_all_the_time(seed):
    draw, judge, step = random.Random(seed), Judge(), 0
    for ratio in noisy(draw.choice((0, 10, 25, 400)), seed, spread=0.3):
        step += 1
        judge.judge(record(step, ratio=ratio * (20 if draw.random() < 0.02 else 1), perturbation_rms=ratio))
    state = judge.state()
    for _ in range(60):
        step += draw.choice((1, 1, 1, 0, -3, 10**12))
        values = {name: draw.lognormvariate(-5, 0.3) for name in (*MEASURED, *STORED) if draw.random() < 0.8}
        values |= {name: draw.choice(ODD) for name in values if draw.random() < 0.3}
        rows, scheduled = draw.choice((None, 0, 1, 10**9)), draw.choice((None, True, False))
        odd = StepRecord(step=step, time=float(step), nonfinite_rows=rows, scheduled=scheduled, **values)
        other = Judge()
        other.restore(json.loads(json.dumps(state, allow_nan=False)))
        bounds = [values.get(name) or 1.0 for name in MEASURED[3:0:-1]]
        assert other.suspects(step, *bounds) == judge.suspects(step, *bounds)
        assert other.limit(step, bounds[0]) == judge.limit(step, bounds[0])
        alerts = judge.judge(odd)
        assert other.judge(odd) == alerts
        assert all(alert.message for alert in alerts)
        state = other.state()
    assert state == judge.state()
