"""The map of a run's layers: multiples of what is usual, the head in D(S), and no more columns than a page has."""

import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import Batch
from hilbert_monitor.runs.record import Layer, LayerRecord, RunInfo, StepRecord
from hilbert_monitor.runs.table import Table, TableBuilder
from hilbert_monitor.service.figures.layer_map import COLUMNS, layer_map
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
    columns = TableBuilder()
    records = [StepRecord(step=step, time=float(step), diameter_lower=0.1 * step) for step in range(1, 40)]
    columns.append(Batch(records=records, keep=None, torn=0, offset=0))
    rows = layer_map([*layers(3)], columns.table, "lm_head")["rows"]
    assert (rows[0]["name"], rows[0]["ruler"]) == ("lm_head", "D(S)")
    assert rows[0]["cells"] == [0.5, 1.0, 1.5]


# The file


def test_layers_of_a_run_are_read_from_its_folder(tmp_path):
    writer = RunWriter.open(tmp_path, RunInfo(name="run"))
    for record in layers(5):
        writer.layers(record)
    assert [record.step for record in layers_of(writer.folder)] == [10, 20, 30, 40, 50]
    assert layers_of(tmp_path) == ()
    writer.close()
