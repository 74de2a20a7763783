"""The catalogue and the records it reads."""

import msgspec
import pytest

from hilbert_monitor.runs.metrics import CATALOGUE, values
from hilbert_monitor.runs.record import StepRecord

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


def test_every_metric_is_a_field_of_a_record_and_has_a_name_of_its_own():
    for metric in CATALOGUE:
        assert hasattr(FULL, metric.field)
        assert metric.help.endswith(".")
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)


def test_the_fixed_names_are_there():
    assert {"hilbert/step_diameter", "hilbert/perturbation_rms"} <= {metric.logged for metric in CATALOGUE}


def test_values_are_those_a_record_has_and_no_others():
    found = {metric.name: value for metric, value in values(FULL)}
    assert found["step_diameter"] == 0.5
    assert found["step_diameter_saturation"] == 0.25
    assert "validation_loss" not in found


@pytest.mark.parametrize(("changes", "expected"), [({"diameter": None}, None), ({"ceiling": 0.0}, None)])
def test_saturation_is_of_an_exact_diameter_and_a_ceiling(changes, expected):
    assert msgspec.structs.replace(FULL, **changes).saturation is expected


def test_records_are_frozen_and_survive_json():
    with pytest.raises(AttributeError):
        FULL.step = 8
    assert msgspec.json.decode(msgspec.json.encode(FULL), type=StepRecord) == FULL
