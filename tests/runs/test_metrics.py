"""Records, their metrics, and the panels that draw these."""

from collections import Counter

import msgspec
import pytest

from hilbert_monitor.runs.record import DERIVED_LINES, METRICS, StepRecord, measured
from hilbert_monitor.service.figures.run_panels import PANELS, drawn_in

FULL = StepRecord(
    step=7,
    time=1.0,
    diameter=0.5,
    diameter_lower=0.5,
    diameter_upper=0.5,
    pair=(3, 9),
    pair_text=("a", "\u00e9"),
    ceiling=2.0,
    perturbation_rms=0.1,
    seconds={"diameter": 0.01},
)


def test_every_metric_is_a_field_of_a_record_or_a_formula_of_fields():
    for metric in (*METRICS, *DERIVED_LINES):
        fields = metric.fields
        assert {*fields} <= {*StepRecord.__struct_fields__}, metric.name
        assert (metric.field in StepRecord.__struct_fields__) == (metric.formula is None), metric.name


def test_names_and_fields_and_helps_are_each_metrics_own():
    for part in ("name", "field", "help"):
        assert max(Counter(getattr(metric, part) for metric in (*METRICS, *DERIVED_LINES)).values()) == 1, part


def test_a_help_is_a_sentence_that_stands_alone():
    for metric in (*METRICS, *DERIVED_LINES):
        assert metric.help[0].isupper(), metric.name
        assert metric.help.endswith("."), metric.name
        assert "the same" not in metric.help.lower().replace("the same row diameter", ""), metric.name


def test_every_metric_is_drawn_in_a_panel_or_says_that_it_is_not():
    assert {metric.panel for metric in (*METRICS, *DERIVED_LINES)} - {None} == {panel.name for panel in PANELS}
    drawn = {metric.name for panel in PANELS for metric in drawn_in(panel)}
    assert {metric.name for metric in METRICS} - drawn == {m.name for m in METRICS if m.panel is None}
    assert {name for panel in PANELS for name in panel.beside} <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_only_a_lower_and_an_upper_bound_share_a_label_and_look_alike(panel):
    for label, count in Counter(metric.label for metric in drawn_in(panel)).items():
        pair = [metric for metric in drawn_in(panel) if metric.label == label]
        if count > 1:
            assert [metric.name.rpartition("_")[2] for metric in pair] in (["lower", "upper"], ["min", "max"])
            assert pair[0].line == pair[1].line
        else:
            assert pair[0].line != "band"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_the_lines_of_a_panel_have_one_unit(panel):
    assert len({metric.unit for metric in drawn_in(panel)}) == 1


def test_the_fixed_names_are_there():
    assert {"hilbert/step_diameter", "hilbert/perturbation_rms"} <= {metric.logged for metric in METRICS}


def test_measured_metrics_are_those_a_record_has_and_no_others():
    numbers = {metric.name: value for metric, value in measured(FULL)}
    assert numbers["step_diameter"] == 0.5
    assert numbers["step_diameter_saturation"] == 0.25
    assert "validation_loss" not in numbers


@pytest.mark.parametrize(("changes", "expected"), [({"diameter": None}, None), ({"ceiling": 0.0}, None)])
def test_saturation_is_of_an_exact_diameter_and_a_ceiling(changes, expected):
    assert msgspec.structs.replace(FULL, **changes).saturation is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, pytest.approx(0.05)),
        ({"diameter": 0.0}, None),
        ({"hidden_norm_rms": None}, None),
        ({"perturbation_rms": 0.0}, 0.0),
    ],
)
def test_utilisation_is_the_perturbation_over_its_worst_case(changes, expected):
    record = msgspec.structs.replace(FULL, **({"hidden_norm_rms": 4.0} | changes))
    assert record.utilisation == expected


def test_records_are_frozen_and_survive_json():
    with pytest.raises(AttributeError):
        FULL.step = 8
    assert msgspec.json.decode(msgspec.json.encode(FULL), type=StepRecord) == FULL
