"""The map of a run's layers: multiples of what is usual, the head in D(S), and no more columns than a page has."""

import msgspec
import pytest

from hilbert_monitor.runs.layers import LAYERS, LayerFile, read_layers
from hilbert_monitor.runs.log import News
from hilbert_monitor.runs.record import Layer, LayerRecord, StepRecord
from hilbert_monitor.service.figures.layer_map import COLUMNS, layer_map
from hilbert_monitor.service.following.columns import Columns, Table
from hilbert_monitor.service.following.layer_rows import layers_of


def layers(number, grown=()):
    for step in range(10, 10 * number + 1, 10):
        sizes = {"a": 0.01 * (5 if step in grown else 1), "b": 0.2}
        found = {name: Layer(kind="matrix", step=size, weight=1.0, lr=0.1) for name, size in sizes.items()}
        yield LayerRecord(step=step, time=float(step), layers=found)


def test_a_run_without_layers_has_an_empty_map(tmp_path):
    assert layer_map(layers_of(tmp_path), Table()) == {"steps": [], "rows": []}


def test_cells_are_multiples_of_what_is_usual():
    found = layer_map([*layers(5, grown={30})], Table())
    assert found["steps"] == [10, 20, 30, 40, 50]
    assert [row["name"] for row in found["rows"]] == ["a", "b"]
    assert found["rows"][0]["cells"] == [1, 1, 5, 1, 1]
    assert found["rows"][1]["usual"] == pytest.approx(0.2)


def test_a_long_run_keeps_its_peaks():
    found = layer_map([*layers(3000, grown={17_770})], Table())
    assert len(found["steps"]) == len(found["rows"][0]["cells"]) == COLUMNS
    assert found["steps"][-1] == 30_000
    assert max(found["rows"][0]["cells"]) == 5


def test_the_head_stands_first_in_its_own_ruler():
    columns = Columns()
    records = [StepRecord(step=step, time=float(step), diameter_lower=0.1 * step) for step in range(1, 40)]
    columns.take(News(records=records, attempts=[], torn=0, offset=0))
    rows = layer_map([*layers(3)], columns.table, "lm_head")["rows"]
    assert (rows[0]["name"], rows[0]["ruler"]) == ("lm_head", "D(S)")
    assert rows[0]["cells"] == [0.5, 1.0, 1.5]


# The file


def test_an_attempt_that_goes_on_drops_what_came_after_its_checkpoint(tmp_path):
    first = LayerFile(tmp_path, 1, 0)
    for record in layers(5):
        first.append(record)
    first.close()
    second = LayerFile(tmp_path, 2, 20)
    second.append(LayerRecord(step=30, time=1.0, layers={}))
    second.close()
    assert [record.step for record in read_layers(tmp_path)] == [10, 20, 30]
    assert [record.step for record in layers_of(tmp_path)] == [10, 20, 30]


def test_a_torn_line_costs_itself_alone_and_values_survive(tmp_path):
    file = LayerFile(tmp_path, 1, 0)
    records = [*layers(2)]
    odd = msgspec.structs.replace(
        records[1], layers={"c": Layer(kind="vector", step=float("nan"), weight=float("inf"))}
    )
    file.append(records[0])
    file.append(odd)
    file.close()
    with (tmp_path / LAYERS).open("ab") as raw:
        raw.write(b'{"step": 3, "ti')
    first, second = read_layers(tmp_path)
    assert first == records[0]
    assert second.layers["c"].step != second.layers["c"].step
    assert second.layers["c"].weight == float("inf")
