"""The study of instabilities: its definitions on series that are known, and the whole of it on tiny runs."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilbert_monitor.bench import instabilities as study
from hilbert_monitor.bench.instability_alarms import Judged, alarms, lead_of, matched, robust_score, threshold
from hilbert_monitor.bench.instability_arms import ARMS, Job, without_qk_norm
from hilbert_monitor.bench.instability_events import Instability, divergence_of, instabilities, spikes_of
from hilbert_monitor.bench.instability_model import StudySizes
from hilbert_monitor.bench.instability_runs import StudyRuns, lower_diameter
from hilbert_monitor.cli import app
from tests.support.references import all_pairs_diameter, normal

WARM = 100


def calm(length=2000, seed=0, level=3.0):
    return level + np.random.default_rng(seed).normal(0, 0.02, length)


# Events


def test_a_calm_loss_has_no_instability():
    assert instabilities(calm(), WARM) == []


def test_three_high_updates_of_ten_are_a_spike_and_two_are_none():
    loss = calm()
    loss[900] = loss[905] = 4.0
    assert spikes_of(loss, WARM) == []
    loss[909] = 4.0
    assert spikes_of(loss, WARM) == [900]
    loss[909], loss[910] = 3.0, 4.0
    assert spikes_of(loss, WARM) == []


def test_spikes_within_fifty_updates_are_one_and_later_ones_another():
    loss = calm()
    for start in (600, 640, 900):
        loss[start : start + 5] = 4.0
    assert spikes_of(loss, WARM) == [600, 900]


def test_a_spike_in_the_warm_up_does_not_count():
    loss = calm()
    loss[150:160] = 5.0
    assert instabilities(loss, WARM) == []


@pytest.mark.parametrize(("after", "bad"), [(0.0, False), (0.05, True)])
def test_a_spike_after_which_the_loss_stays_worse_is_bad(after, bad):
    loss = calm()
    loss[1000:1010] = 5.0
    loss[1010:] += after
    assert instabilities(loss, WARM) == [Instability(1000, "spike", bad)]


def test_a_falling_loss_must_go_on_falling_after_a_spike():
    loss = calm() - 0.0005 * np.arange(2000)
    loss[1000:1010] = 5.0
    assert instabilities(loss, WARM)[0].bad is False
    loss[1010:] = loss[990:1000].mean() + 0.0 * loss[1010:]
    assert instabilities(loss, WARM)[0].bad is True


def test_a_loss_that_leaves_for_good_diverges_where_it_left():
    loss = calm()
    loss[1500:] += np.minimum(0.01 * np.arange(500), 2.0)
    (event,) = instabilities(loss, WARM)
    assert event.kind == "divergence"
    assert 1500 <= event.onset <= 1580  # the median of 100 follows


def test_a_loss_that_comes_back_does_not_diverge():
    loss = calm()
    loss[1000:1300] += 2.0
    assert divergence_of(loss, WARM) is None


def test_a_loss_that_is_not_finite_diverges_there():
    loss = calm()
    loss[1234:] = np.nan
    assert instabilities(loss, WARM) == [Instability(1234, "divergence", True)]


# Alarms


def test_scores_are_deviations_from_the_last_128_values():
    values = calm(400)
    values[300] = 5.0
    score = robust_score(values)
    past = values[172:300]
    spread = 1.4826 * np.median(np.abs(past - np.median(past)))
    assert score[300] == pytest.approx((5.0 - np.median(past)) / spread)
    assert np.isneginf(score[:128]).all()
    values[350] = np.nan
    assert robust_score(values)[350] == np.inf


def test_alarms_within_fifty_updates_are_one():
    score = np.zeros(1000)
    score[[200, 230, 275, 400]] = 9.0
    assert alarms(score, 5.0, 0) == [200, 400]
    assert alarms(score, 5.0, 210) == [230, 400]


def test_the_threshold_allows_one_alarm_in_ten_thousand_updates():
    scores = [np.random.default_rng(seed).normal(size=10_100) for seed in range(3)]
    level = threshold(scores, 100)
    assert sum(len(alarms(score, level, 100)) for score in scores) == 3
    assert threshold([scores[0][:5000]], 100) == scores[0][100:5000].max()


def test_an_alarm_counts_up_to_200_updates_ahead_and_not_after():
    events = [Instability(1000), Instability(1600, "divergence", True)]
    leads, true, false = matched([700, 850, 990, 1100, 1390, 1700], events)
    assert leads == [150, None]  # 1390 is more than 200 ahead
    assert (true, false) == (2, 2)
    assert matched([1000], events)[0] == [0, None]


def test_a_signal_that_tells_is_above_chance_and_one_that_rings_always_is_not():
    event, length = [Instability(1000)], 2000
    score = np.full(length, 0.0)
    score[950] = 9.0
    told = lead_of("x", 5.0, [Judged("run", {"x": score}, event, 228)])
    assert (told.recall(10), told.precision, told.median) == (1.0, 1.0, 50)
    assert told.chance_recall(1) < 0.2
    score[::60] = 9.0
    always = lead_of("x", 5.0, [Judged("run", {"x": score}, event, 228)])
    assert always.chance_recall(1) > 0.9


# Runs

SMALL = StudySizes(updates=3, vocab_size=260, width=16, head_dim=8, blocks=1, context=8, batch=2, rate=0.01)


@pytest.mark.sweep
def test_a_run_is_the_same_beside_others_as_alone():
    jobs = [Job(arm, 3) for arm in (*ARMS, without_qk_norm(ARMS[0]))]
    together = StudyRuns(jobs, SMALL)
    for _ in range(3):
        together.step()
    for place in (0, 3, len(jobs) - 1):
        alone = StudyRuns([jobs[place]], SMALL)
        for _ in range(3):
            alone.step()
        for name, values in alone.table(0).items():
            assert together.table(place)[name] == pytest.approx(values, rel=2e-3, abs=1e-5), name


@pytest.mark.sweep
def test_arms_do_what_they_say():
    by_name = {arm.name: place for place, arm in enumerate(ARMS)}
    runs = StudyRuns([Job(arm, 0) for arm in ARMS], SMALL)
    for _ in range(3):
        runs.step()
    weights = {name: w.detach() for name, w in runs.weights.items()}
    tied, centred = by_name["tied"], by_name["centred head"]
    assert torch.equal(weights["head"][tied], weights["embed"][tied])
    assert not torch.equal(weights["head"][0], weights["embed"][0])
    assert float(weights["head"][centred].mean(0).norm()) < 1e-6 < float(weights["head"][0].mean(0).norm())
    for name in ("no head decay", "independent head decay", "z-loss", "head alone", "beta2 0.999", "bf16 logits"):
        assert not torch.equal(weights["head"][by_name[name]], weights["head"][0]), name
    assert runs.table(0)["hidden norm"][0] < 0.5 * SMALL.width**0.5  # behind the final norm it is the root of the width
    losses = [runs.table(place)["loss"][0] for place in range(len(ARMS))]
    assert losses == pytest.approx(
        [losses[0]] * len(ARMS), abs=0.1
    )  # one seed, before the first step; a tied head begins elsewhere


def test_the_lower_bound_of_the_diameter_is_one():
    S = normal(0, 3, 50, 6).float()
    for run, bound in enumerate(lower_diameter(S).tolist()):
        exact = all_pairs_diameter(S[run])
        assert 0.8 * exact < bound <= exact * (1 + 1e-5)


@pytest.mark.sweep
def test_the_command_trains_once_and_judges_what_there_is(tmp_path):
    words = ["bench", "instabilities", "--quick", "--folder", str(tmp_path / "study")]
    files = {"--json": tmp_path / "out.json", "--figure": tmp_path / "leads.svg"}
    first = CliRunner().invoke(app, [*words, *(str(word) for option in files.items() for word in option)])
    assert first.exit_code == 0, first.output
    drawn = "".join(ElementTree.parse(tmp_path / "leads.svg").getroot().itertext())
    assert "gradient norm, six deviations" in drawn
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "study").iterdir()}
    assert len(files) == len(study.StudyPlan.quick().jobs())
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {"signals", "runs", "clean twins"} <= {*found}
    next(iter(files)).unlink()
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0, again.output
    changed = [path for path in files if path.stat().st_mtime_ns != files[path]]
    assert changed == [next(iter(files))]
