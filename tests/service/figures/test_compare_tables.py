"""Tables of the values behind the figures that compare runs."""

import csv
import math

import numpy as np
import pytest

from hilbert_monitor.service.figures.compare_tables import panel_table
from hilbert_monitor.service.figures.comparison import compare
from hilbert_monitor.service.figures.plot_options import PLAIN, PlotOptions
from hilbert_monitor.service.following.text import csv_lines
from tests.support.run_series import curve, make_run, moving_average, run_of


def rows_of(panel, runs, options=PLAIN):
    """The rows of a panel's CSV file."""
    (comparison,) = compare(runs, live=True)
    text = "".join(csv_lines(*panel_table(panel, comparison, options)))
    return list(csv.DictReader(text.splitlines()))


def test_a_panels_table_has_every_value_and_the_means():
    values = np.random.default_rng(0).random((2, 5000))
    rows = rows_of("diameter", [make_run(seed=seed, diameter=v.tolist()) for seed, v in enumerate(values)])
    assert [float(r["value"]) for r in rows if r["run"] == "AdamW-1"] == values[1].tolist()
    means = [r for r in rows if r["run"] == "mean"]
    assert [float(r["value"]) for r in means] == pytest.approx(values.mean(axis=0))
    assert [float(r["deviation"]) for r in means] == pytest.approx(values.std(axis=0, ddof=1))
    assert (rows[0]["step"], rows[0]["tokens"], float(rows[0]["hours"]), rows[0]["seed"]) == ("10", "1000", 0.1, "0")


def test_range_smoothing_and_grouping_apply_to_the_table():
    options = PlotOptions(axis="updates", x0=20, x1=30, smooth=0.5, group="run")
    rows = rows_of("loss", [make_run(validation_loss=[1.0, 2.0, 4.0, 8.0], train_loss=[5.0])], options)
    assert [(r["metric"], r["step"], r["value"]) for r in rows] == [
        ("validation_loss", "20", "2.0"),
        ("validation_loss", "30", "4.0"),
    ]
    assert [float(r["smoothed"]) for r in rows] == pytest.approx(moving_average([1.0, 2.0, 4.0], 0.5)[1:])


def test_the_table_of_ratios_has_the_number_of_pairs():
    runs = [make_run(seed=0, diameter=[8.0, 4.0]), make_run("RowNorm", seed=0, diameter=[2.0])]
    (row,) = rows_of("ratio", runs)
    assert row == {
        "metric": "diameter",
        "step": "",
        "tokens": "1000",
        "hours": "",
        "ratio": "4.0",
        "smoothed": "",
        "pairs": "1",
        "baseline": "AdamW",
        "candidate": "RowNorm",
    }


def test_nan_and_infinity_are_written_and_formulas_are_quoted():
    bad = run_of("=1+1", optimizer="@x", seed=1, diameter=curve([math.nan, math.inf]))
    rows = rows_of("diameter", [bad], PlotOptions(group="run"))
    assert [(r["run"], r["optimizer"], r["value"]) for r in rows] == [("'=1+1", "'@x", "nan"), ("'=1+1", "'@x", "inf")]
