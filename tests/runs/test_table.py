"""TableBuilder that grow, against a plain dictionary of records."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.runs.reader import Batch
from hilbert_monitor.runs.record import StepRecord
from hilbert_monitor.runs.table import NUMBERS, Table, TableBuilder, present

floats = st.none() | st.floats(allow_nan=True, allow_infinity=True)
records = st.builds(
    StepRecord,
    step=st.integers(1, 40),
    time=st.floats(0, 1e9),
    skipped=st.sampled_from(["", "overflow"]),
    train_loss=floats,
    diameter=floats,
    tokens=st.none() | st.integers(0, 2**53),
    pair=st.none() | st.tuples(st.integers(0, 99), st.integers(0, 99)),
    seconds=st.dictionaries(st.sampled_from(["increment", "panel"]), st.floats(0, 1)),
)
pieces = st.tuples(st.lists(records, max_size=8, unique_by=lambda r: r.step), st.none() | st.integers(0, 40))


def batch(new, keep=None):
    return Batch(records=new, keep=keep, torn=0, offset=0)


def check(table, expected):
    assert table.steps.tolist() == sorted(expected)
    for name in NUMBERS:
        values = table.column(name)
        for row, step in enumerate(sorted(expected)):
            value = getattr(expected[step], name)
            assert present(values)[row] == (value is not None)
            assert value is None or repr(float(values[row])) == repr(float(value))
    for row, step in enumerate(sorted(expected)):
        assert bool(present(table.column("skipped"))[row]) == bool(expected[step].skipped)
        pair = expected[step].pair
        assert pair is None or [table.column(f"pair.{end}")[row] for end in (0, 1)] == list(pair)
        for part in ("increment", "panel"):
            value = table.column(f"seconds.{part}")[row : row + 1]
            assert bool(present(value)[0]) == (part in expected[step].seconds)


@given(st.lists(pieces, max_size=8))
def test_tables_hold_what_a_dictionary_by_step_would(written):
    columns, expected, given_out = TableBuilder(), {}, []
    for new, keep in written:
        if keep is not None:
            expected = {step: record for step, record in expected.items() if step <= keep}
        expected |= {record.step: record for record in new}
        columns.append(batch(new, keep))
        given_out.append((columns.table, dict(expected)))
    for table, then in given_out:  # what was given out has not changed since
        check(table, then)


def test_a_value_that_is_nan_is_not_one_that_is_missing_also_in_copies_and_files(tmp_path):
    columns = TableBuilder()
    columns.append(batch([StepRecord(step=1, time=0, train_loss=math.nan), StepRecord(step=2, time=0)]))
    values = columns.table.column("train_loss")
    np.save(tmp_path / "v.npy", values)
    for copy in (values, np.load(tmp_path / "v.npy", mmap_mode="r"), np.array(values.tolist())):
        assert present(copy).tolist() == [True, False]
    assert math.isnan(columns.table.last("train_loss"))


def test_the_last_value_is_found_far_back():
    columns = TableBuilder()
    columns.append(batch([StepRecord(step=1, time=0, diameter=2.0)]))
    columns.append(batch([StepRecord(step=s, time=0) for s in range(2, 10_000)]))
    assert columns.table.last("diameter") == 2.0
    assert Table().last("diameter") is None


def test_texts_belong_to_records_that_have_a_pair_and_texts_and_are_clipped():
    pairs = [((1, 2), ("a", "b" * 500)), ((3, 4), None), (None, ("x", "y")), (None, None), ((5, 1), ("c", "z"))]
    columns = TableBuilder()
    before = columns.table
    columns.append(batch([StepRecord(step=s, time=0, pair=p, pair_text=t) for s, (p, t) in enumerate(pairs)]))
    assert columns.table.texts == {1: "z", 2: "b" * 80, 5: "c"}
    assert before.texts == {}


def test_a_log_cannot_make_columns_without_end():
    columns = TableBuilder()
    for step in range(1, 40):
        columns.append(batch([StepRecord(step=step, time=0, seconds={f"part {step}-{i}": 0.1 for i in range(9)})]))
    assert len(columns.table.columns) < 40


def test_a_number_that_fits_into_no_column_costs_its_record_alone():
    columns = TableBuilder()
    whole = [StepRecord(step=step, time=step, train_loss=0.5 * step) for step in range(1, 30)]
    whole[3] = StepRecord(step=4, time=4, train_loss=2.0, tokens=10**400)
    whole[20] = StepRecord(step=21, time=21, pair=(1, 10**400))
    assert columns.append(batch([*whole, StepRecord(step=2**70, time=0)])) == 3
    check(columns.table, {record.step: record for record in whole if record.step not in (4, 21)})
