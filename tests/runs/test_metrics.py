"""Records, their metrics, and the panels that draw these."""

from collections import Counter

import msgspec
import pytest

from hilbert_monitor.runs.record import DERIVED_LINES, METRICS, StepRecord, measured
from hilbert_monitor.service.figures.run_panels import PANELS, drawn_in

EVERY = (*METRICS, *DERIVED_LINES)
FULL = StepRecord(step=7, time=1.0, diameter=0.5, pair=(3, 9), pair_text=("a", "\u00e9"), ceiling=2.0)


def test_every_metric_is_a_field_or_a_formula_of_fields_with_a_name_and_help_that_stand_alone():
    for metric in EVERY:
        assert {*metric.fields} <= {*StepRecord.__struct_fields__}, metric.name
        assert (metric.field in StepRecord.__struct_fields__) == (metric.formula is None), metric.name
        assert metric.help[0].isupper(), metric.name
        assert metric.help.endswith("."), metric.name
        assert "the same" not in metric.help.lower().replace("the same row diameter", ""), metric.name
    for part in ("name", "field", "help"):
        assert max(Counter(getattr(metric, part) for metric in EVERY).values()) == 1, part
    assert {"hilbert/step_diameter", "hilbert/perturbation_rms"} <= {metric.logged for metric in METRICS}


def test_every_metric_is_drawn_in_a_panel_or_says_that_it_is_not():
    assert {metric.panel for metric in EVERY} - {None} == {panel.name for panel in PANELS}
    drawn = {metric.name for panel in PANELS for metric in drawn_in(panel)}
    assert {metric.name for metric in METRICS} - drawn == {m.name for m in METRICS if m.panel is None}
    assert {name for panel in PANELS for name in panel.beside} <= {metric.name for metric in METRICS}


def test_a_panel_has_one_unit_and_only_a_lower_and_an_upper_bound_share_a_label():
    for panel in PANELS:
        assert len({metric.unit for metric in drawn_in(panel)}) == 1
        for label, count in Counter(metric.label for metric in drawn_in(panel)).items():
            pair = [metric for metric in drawn_in(panel) if metric.label == label]
            if count > 1:
                assert [metric.name.rpartition("_")[2] for metric in pair] in (["lower", "upper"], ["min", "max"])
                assert pair[0].line == pair[1].line
            else:
                assert pair[0].line != "band"


def test_measured_metrics_are_those_a_record_has_and_no_others():
    numbers = {metric.name: value for metric, value in measured(FULL)}
    assert numbers == {"step_diameter": 0.5, "step_diameter_ceiling": 2.0, "step_diameter_saturation": 0.25}


@pytest.mark.parametrize(
    ("changes", "saturation", "utilisation"),
    [
        ({}, 0.25, pytest.approx(0.05)),
        ({"diameter": None}, None, None),
        ({"ceiling": 0.0, "diameter": 0.0}, None, None),
        ({"hidden_norm_rms": None, "ceiling": None}, None, None),
        ({"perturbation_rms": 0.0}, 0.25, 0.0),
    ],
)
def test_formulas_need_all_their_fields_and_no_division_by_zero(changes, saturation, utilisation):
    record = msgspec.structs.replace(FULL, **({"hidden_norm_rms": 4.0, "perturbation_rms": 0.1} | changes))
    assert (record.saturation, record.utilisation) == (saturation, utilisation)
