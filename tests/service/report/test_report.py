"""The report, from logs that the real writer made: its numbers by hand, its page against hostile texts."""

import csv
import json
import math
import random
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.runs.log import RunReader, RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.service.figures.comparison import Spread, compare, spread
from hilbert_monitor.service.figures.series import RunSeries, Series, model_of, read_run
from hilbert_monitor.service.following.published import PAPER
from hilbert_monitor.service.report import page as pages
from hilbert_monitor.service.report import summary as service

LOSSES = {"AdamW": [3.25, 3.5, 3.0], "RowNorm": [3.5, 3.625, 3.375]}
DIAMETERS = {"AdamW": [0.5, 0.25, 0.75], "RowNorm": [0.015625, 0.03125, 0.046875]}


def write(root, optimizer="AdamW", seed=0, loss=3.0, diameter=0.5, rms=0.25, *, error=None, close=True, **info):
    """A run of 40 updates, with a validation every 20."""
    about = RunInfo(**{"name": f"{optimizer}-{seed}", "panel_hash": "p", "config": {"size": "tiny"}, **info})
    writer = RunWriter.open(root, RunInfo(**{**_fields(about), "head_optimizer": optimizer, "seed": seed}))
    for step in (10, 20, 30, 40):
        checked = step % 20 == 0
        writer.write(
            StepRecord(
                step=step,
                time=float(step),
                tokens=1000 * step,
                train_loss=loss + 40 - step,
                validation_loss=loss + 40 - step if checked else None,
                diameter=diameter * (41 - step),
                perturbation_rms=rms * (41 - step) if checked else None,
            )
        )
    if close:
        writer.close(error)
    return writer


def _fields(info):
    return {name: getattr(info, name) for name in info.__struct_fields__}


def six(root):
    for optimizer in LOSSES:
        for seed in range(3):
            write(root, optimizer, seed, LOSSES[optimizer][seed], DIAMETERS[optimizer][seed], rms=2.0**-seed)
    return root


def compared(root):
    return compare(run.series for run in service.load(root))


def page_of(root):
    runs = service.load(root)
    return pages.page(runs, compare(run.series for run in runs))


def invoke(*args):
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


def series(optimizer="AdamW", seed=0, *, status="finished", panel="p", name="", started=0.0, **finals):
    """A run of one record."""
    curves = {field: Series([1], [10.0], [], [value]) for field, value in finals.items()}
    about = {"status": status, "panel_hash": panel, "started": started}
    return RunSeries(id=name or f"{optimizer}-{seed}-{panel}", optimizer=optimizer, seed=seed, **about, **curves)


# Statistics


def test_means_deviations_ratios_and_pairs_are_those_computed_by_hand(tmp_path):
    (found,) = compared(six(tmp_path))
    for name in LOSSES:
        for metric, values in (("validation_loss", LOSSES[name]), ("step_diameter", DIAMETERS[name])):
            got = found.optimizers[name][metric]
            assert got.mean == pytest.approx(statistics.mean(values), rel=1e-12)
            assert got.deviation == pytest.approx(statistics.stdev(values), rel=1e-12)
            assert got.runs == 3
    assert found.ratios == {"step_diameter": 16.0, "perturbation_rms": 1.0}
    assert found.difference.mean == 0.25  # of 0.25, 0.125 and 0.375
    assert found.difference.deviation == 0.125
    assert (found.difference.runs, found.below, found.checkpoints, found.notes) == (3, 0, 2, ())


def test_the_checkpoints_where_rownorm_is_below_are_counted():
    losses = {"AdamW": [[5, 4, 3], [5, 4, 3]], "RowNorm": [[4, 5, 2], [5, 4, 3]]}
    runs = [
        RunSeries(
            id=f"{o}{seed}", optimizer=o, seed=seed, validation_loss=Series([1, 2, 3], [1.0, 2.0, 3.0], [], values)
        )
        for o, both in losses.items()
        for seed, values in enumerate(both)
    ]
    (found,) = compare(runs)
    assert (found.below, found.checkpoints) == (2, 3)


def test_one_seed_has_no_deviation():
    assert spread([2.0]) == Spread(2.0, None, 1)
    assert spread([]) == Spread()


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
def test_spread_is_that_of_the_statistics_module(values):
    found = spread(values)
    assert found.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6)
    assert found.deviation == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)


@given(st.randoms(use_true_random=False))
def test_the_order_of_the_runs_does_not_matter(shuffler):
    rng = random.Random(7)
    runs = [
        series(o, s, validation_loss=rng.random(), diameter=rng.random(), perturbation_rms=rng.random())
        for o in ("AdamW", "RowNorm", "Lion")
        for s in range(4)
    ]
    mixed = runs[:]
    shuffler.shuffle(mixed)
    assert compare(mixed) == compare(runs)


@given(st.floats(1e-6, 1e6))
def test_scaling_the_diameters_scales_means_and_deviations_and_leaves_ratios(c):
    def at(factor):
        pairs = [(o, s, factor * d) for o, ds in DIAMETERS.items() for s, d in enumerate(ds)]
        return compare([series(o, s, diameter=d) for o, s, d in pairs])[0]

    one, scaled = at(1.0), at(c)
    for name in DIAMETERS:
        before, after = one.optimizers[name]["step_diameter"], scaled.optimizers[name]["step_diameter"]
        assert after.mean == pytest.approx(c * before.mean)
        assert after.deviation == pytest.approx(c * before.deviation)
    assert scaled.ratios["step_diameter"] == pytest.approx(16.0)


def test_different_panels_have_no_ratio_of_hilbert_rms_and_are_no_pair():
    runs = [
        series("AdamW", diameter=8.0, perturbation_rms=4.0, validation_loss=3.0),
        series("RowNorm", panel="q", diameter=2.0, perturbation_rms=1.0, validation_loss=3.0),
    ]
    (found,) = compare(runs)
    assert found.ratios == {"step_diameter": 4.0, "perturbation_rms": None}
    assert found.difference == Spread()
    assert "AdamW and RowNorm have different panels: there is no ratio of their Hilbert RMS." in found.notes
    assert any("no paired difference" in note for note in found.notes)


def test_one_optimizer_with_two_panels_has_no_mean_of_hilbert_rms():
    (found,) = compare([series(seed=s, panel=p, perturbation_rms=1.0, diameter=1.0) for s, p in enumerate("pq")])
    assert found.optimizers["AdamW"]["perturbation_rms"] == Spread()
    assert found.optimizers["AdamW"]["step_diameter"].runs == 2
    assert any("their Hilbert RMS has no mean" in note for note in found.notes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_last_value_that_is_not_finite_is_left_out_and_said(value):
    runs = [series(seed=0, validation_loss=2.0), series(seed=1, validation_loss=value)]
    (found,) = compare([*runs, series("RowNorm", 1, validation_loss=3.0)])
    assert found.optimizers["AdamW"]["validation_loss"] == Spread(2.0, None, 1)
    assert found.difference == Spread()
    assert any("not finite" in note and "AdamW-1" in note for note in found.notes)


def test_values_that_are_missing_make_no_mean():
    (found,) = compare([series(diameter=1.0), series("RowNorm", diameter=0.0)])
    assert found.optimizers["AdamW"]["perturbation_rms"] == Spread()
    assert found.ratios == {"step_diameter": None, "perturbation_rms": None}  # nothing is zero times larger


def test_once_a_run_is_finished_only_finished_ones_count():
    runs = [series(seed=0, diameter=1.0), series(seed=1, diameter=9.0, status="killed")]
    (found,) = compare(runs)
    assert found.optimizers["AdamW"]["step_diameter"] == Spread(1.0, None, 1)
    assert [run.seed for run in found.aside] == [1]
    assert "Not finished, or without a value, and therefore in no mean: AdamW-1-p." in found.notes
    (live,) = compare([series(seed=s, diameter=1.0 + s, status="running") for s in range(2)])
    assert live.optimizers["AdamW"]["step_diameter"].mean == 1.5
    assert live.notes == ("No run is finished: these are the last values so far.",)


def test_of_two_runs_with_the_same_seed_the_later_counts():
    old, new = (series(diameter=d, name=n, started=t) for d, n, t in ((1.0, "b", 1.0), (2.0, "a", 2.0)))
    (found,) = compare([new, old])
    assert found.optimizers["AdamW"]["step_diameter"] == Spread(2.0, None, 1)
    assert found.aside == (old,)


def test_runs_without_a_seed_are_all_counted_and_never_paired():
    runs = [series("AdamW", None, name="a", validation_loss=1.0), series("AdamW", None, name="b", validation_loss=2.0)]
    (found,) = compare([*runs, series("RowNorm", None, name="c", validation_loss=1.0)])
    assert found.optimizers["AdamW"]["validation_loss"].runs == 2
    assert found.difference == Spread()
    assert (found.below, found.checkpoints) == (1, 1)


def test_models_are_compared_apart(tmp_path):
    write(tmp_path, seed=0, config={"size": "190M"})
    write(tmp_path, "RowNorm", seed=0, config={"size": "380M"})
    found = compared(tmp_path)
    assert [c.model for c in found] == ["190M", "380M"]
    assert all(c.ratios["step_diameter"] is None for c in found)


# Reading


@pytest.mark.parametrize(
    ("info", "model"),
    [
        ({"config": {"size": "640M"}}, "640M"),
        ({"config": {"parameters": 379_184_640}, "model": "Decoder"}, "380M"),
        ({"config": {"size": "190M", "parameters": 7}}, "190M, 7 parameters"),
        ({"config": {"parameters": 1234}, "model": "Decoder"}, "Decoder, 1,234 parameters"),
        ({"config": {"size": ["odd"], "parameters": True}, "model": "Decoder"}, "Decoder"),
        ({}, "model"),
    ],
)
def test_the_model_is_named_by_size_or_parameters_or_class(info, model):
    assert model_of(RunInfo(**info)) == model


def test_curves_are_in_the_order_of_their_steps_though_a_record_was_amended(tmp_path):
    writer = write(tmp_path, close=False)
    writer.write(StepRecord(step=20, time=0.0, diameter=7.0))
    writer.close()
    found = read_run(RunReader(writer.folder))
    assert list(found.diameter.steps) == [10, 20, 30, 40]
    assert list(found.diameter.values) == [15.5, 7.0, 5.5, 0.5]
    assert found.diameter.last == 0.5
    assert math.isnan(found.diameter.tokens[1])


# The page

HOSTILE = "<script>alert(1)</script>\"'&</title>--> 🦉 \u2028 %{x}" + "x" * 10_000


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what loads or runs something."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text):
        super().__init__()
        self.open, self.loads, self.counts, self.texts, self.handlers = [], [], {}, [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.texts))


def figures_in(text):
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1])


def test_the_page_is_whole_and_loads_nothing(tmp_path):
    text = page_of(six(tmp_path))
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert page.counts["script"] == 3
    assert text.count("plotly.js v") == 1
    assert "@import" not in text
    assert "url(" not in pages.STYLE
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_page_says_the_numbers(tmp_path):
    text = Page(page_of(six(tmp_path))).text
    for said in ("16.0×smaller steps", "+0.2500validation loss", "3.2500 ± 0.2500", "(5.000 ± 2.500) × 10−1"):  # noqa: RUF001
        assert said in text
    assert "RowNorm minus AdamW ± 0.1250, 3 pairs; below at 0 of 2 checkpoints" in text
    assert "paper" not in text


def test_the_page_has_four_figures_with_the_exact_values(tmp_path):
    drawn = figures_in(page_of(six(tmp_path)))
    assert len(drawn["figures"]) == 4
    assert {*drawn["themes"]} == {"light", "dark"}
    diameter = drawn["figures"][1]["data"]
    assert diameter[0]["y"] == [15.5, 10.5, 5.5, 0.5]
    assert diameter[0]["x"] == [10_000, 20_000, 30_000, 40_000]


def test_hostile_texts_stay_texts(tmp_path):
    writer = write(tmp_path, HOSTILE, name=HOSTILE, model=HOSTILE, config={HOSTILE[:99]: HOSTILE}, close=False)
    writer.describe(remarks=(HOSTILE,), panel_hash=HOSTILE, versions={HOSTILE: HOSTILE})
    for message in (HOSTILE, ""):
        writer.alert(Alert(step=1, time=0.0, kind=HOSTILE, value=math.nan, pair_text=(HOSTILE, "'"), message=message))
    writer.close(RuntimeError(HOSTILE))
    write(tmp_path, seed=1)
    text = page_of(tmp_path)
    page = Page(text)
    assert page.open == []
    assert (page.counts["script"], page.loads, page.handlers) == (3, [], [])
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>\"'&" in page.text
    assert "🦉" in page.text
    assert max(map(len, re.findall("x+", page.text))) < 1000
    assert figures_in(text)


def test_a_run_without_a_record_and_one_that_fails_have_their_place(tmp_path):
    RunWriter.open(tmp_path, RunInfo(name="empty", config={"size": "tiny"})).close()
    write(tmp_path, seed=1, error=RuntimeError("out of memory"))
    text = Page(page_of(tmp_path)).text
    assert "failed: RuntimeError out of memory" in text
    assert "No run is finished: these are the last values so far." in text
    write(tmp_path, seed=2)
    text = Page(page_of(tmp_path)).text
    assert "in no mean: AdamW-1, empty." in text


def test_states_remarks_settings_and_lost_values_are_listed(tmp_path):
    first = write(tmp_path, seed=0, config={"size": "tiny", "lr": {"head": 0.5}}, remarks=("Weights are rounded.",))
    write(tmp_path, seed=1, config={"size": "tiny", "lr": {"head": 0.25}}, close=False).write(
        StepRecord(step=50, time=0.0, train_loss=math.nan)
    )
    text = Page(page_of(tmp_path)).text
    assert first.id in text
    for said in ("running", "Weights are rounded.", "lr.head", "train_loss is nan or infinite at 1 step, first at 50."):
        assert said in text
    assert not re.search(r"Configuration differences.*size", text)


@pytest.mark.parametrize("config", [{"size": "190M"}, {"parameters": 185_680_896}])
def test_the_paper_stands_beside_runs_of_its_size(tmp_path, config):
    write(tmp_path, "AdamW", loss=3.1600, diameter=0.0287 * 1.1, config=config)
    write(tmp_path, "RowNorm", loss=3.1741, diameter=6.369e-4, config=config)
    text = Page(page_of(tmp_path)).text
    assert "3.1600paper 3.1588 ± 0.0027, here +0.0012" in text
    assert "paper (2.870 ± 0.140) × 10−2, here +10.0 %" in text  # noqa: RUF001
    assert "in the paper 45.1×" in text  # noqa: RUF001
    assert "The paper trained this model for 7,083 updates, these runs made 40." in text


def test_the_published_ratios_and_differences_are_those_of_the_published_means():
    for published in PAPER.values():
        base, ours = published.optimizers["AdamW"], published.optimizers["RowNorm"]
        for metric, ratio in published.ratios.items():
            assert base[metric].mean / ours[metric].mean == pytest.approx(ratio.mean, abs=0.06)
        difference = ours["validation_loss"].mean - base["validation_loss"].mean
        assert difference == pytest.approx(published.difference.mean, abs=1.1e-4)
        assert published.tokens == published.updates * 524_288


def test_a_long_run_makes_a_small_page(tmp_path):
    writer = RunWriter.open(tmp_path, RunInfo(name="long", head_optimizer="AdamW"))
    with (writer.folder / "steps.jsonl").open("a") as log:
        log.writelines(
            f'{{"step":{i},"time":0.0,"tokens":{i},"train_loss":{1 + (i == 31_234)},"diameter":0.5}}\n'
            for i in range(1, 50_001)
        )
    writer.close()
    drawn = figures_in(page_of(tmp_path))["figures"]
    assert max(len(trace["y"]) for figure in drawn for trace in figure["data"]) <= 2000
    assert max(drawn[0]["data"][0]["y"]) == 2.0


# CSV, JSON and the command line


def test_csv_comes_back_as_it_was(tmp_path):
    service.write_csv(compared(six(tmp_path / "runs")), tmp_path / "csv")
    with (tmp_path / "csv" / "table.csv").open() as file:
        table = {(row["optimizer"], row["metric"]): row for row in csv.DictReader(file)}
    assert float(table["AdamW", "validation_loss"]["deviation"]) == statistics.stdev(LOSSES["AdamW"])
    assert float(table["AdamW / RowNorm", "step_diameter"]["mean"]) == 16.0
    assert float(table["RowNorm - AdamW", "validation_loss"]["mean"]) == 0.25
    with (tmp_path / "csv" / "curves.csv").open() as file:
        rows = [
            r
            for r in csv.DictReader(file)
            if (r["optimizer"], r["seed"], r["metric"]) == ("RowNorm", "1", "step_diameter")
        ]
    assert [(int(r["step"]), int(r["tokens"]), float(r["value"])) for r in rows] == [
        (step, 1000 * step, 0.03125 * (41 - step)) for step in (10, 20, 30, 40)
    ]


def test_a_name_is_no_formula_in_a_spreadsheet(tmp_path):
    write(tmp_path, '=HYPERLINK("http://x")', config={"size": "@a"})
    service.write_csv(compared(tmp_path), tmp_path)
    with (tmp_path / "table.csv").open() as file:
        assert {cell[0] for row in csv.reader(file) for cell in row[:2]} <= {"'", "m", "o", "A", "R"}


def test_json_has_the_statistics_and_the_runs(tmp_path):
    six(tmp_path / "runs")
    write(tmp_path / "runs", seed=3, loss=math.nan)
    code, text = invoke("report", tmp_path / "runs", "--json", tmp_path / "r.json", "--csv", tmp_path / "csv")
    assert code == 0, text
    assert "tiny, AdamW / RowNorm: row diameter 16.0, Hilbert RMS 0.9; RowNorm - AdamW: loss +0.2500" in text
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["ratios"]["tiny"]["step_diameter"] == pytest.approx(16.0)
    assert found["paired_difference"]["tiny"] == {
        "mean": 0.25,
        "deviation": 0.125,
        "pairs": 3,
        "below": 0,
        "checkpoints": 2,
    }
    assert found["optimizers"]["tiny"]["RowNorm"]["validation_loss"]["mean"] == 3.5
    assert len(found["runs"]) == 7
    lost = next(run for run in found["runs"] if run["seed"] == 3)
    assert (lost["validation_loss"], lost["status"], lost["counted"]) == (None, "finished", True)
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "csv" / "curves.csv").exists()


def test_one_runs_own_folder_will_do(tmp_path):
    folder = write(tmp_path / "runs").folder
    code, text = invoke("report", folder, "--out", tmp_path / "one.html")
    assert code == 0, text
    assert "no ratio of AdamW to RowNorm" in text
    assert "written to" in text


def test_the_command_says_what_to_do(tmp_path):
    (tmp_path / "none").mkdir()
    code, text = invoke("report", tmp_path / "none")
    assert code == 2
    assert "there are no runs in" in text
    assert "train with HilbertMonitor(run_dir=" in text
    code, text = invoke("report", tmp_path / "nowhere")
    assert code == 2
    assert "there is no folder" in text
    write(tmp_path / "runs")
    code, text = invoke("report", tmp_path / "runs", "--out", tmp_path / "no" / "r.html")
    assert code == 2
    assert "create it first" in text
    code, text = invoke("report", tmp_path / "runs", "--json", tmp_path)
    assert code == 2
    assert "cannot read or write" in text


def test_the_report_never_loads_torch(tmp_path):
    six(tmp_path)
    command = (
        "import sys\n"
        "from hilbert_monitor.service.report import summary, page\n"
        "from hilbert_monitor.service.figures import compare_figures, comparison\n"
        f"runs = summary.load({str(tmp_path)!r})\n"
        "page.page(runs, comparison.compare(run.series for run in runs))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not {"torch", "lightning", "pandas"} & loaded
    ours = {name.split(".")[1] for name in loaded if name.startswith("hilbert_monitor.")}
    assert ours == {"runs", "service"}
