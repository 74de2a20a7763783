"""The report of runs on disk: its numbers, page, CSV and JSON, and the `report` command.

The runs are written by the real RunWriter. Their means and differences were computed by hand.
"""

import csv
import json
import math
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.reader import RunReader
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.service.figures.comparison import compare
from hilbert_monitor.service.following.published import PAPER
from hilbert_monitor.service.report import page, summary

LOSSES = {"AdamW": [3.25, 3.5, 3.0], "RowNorm": [3.5, 3.625, 3.375]}
DIAMETERS = {"AdamW": [0.5, 0.25, 0.75], "RowNorm": [0.015625, 0.03125, 0.046875]}


def write_run(root, optimizer="AdamW", seed=0, loss=3.0, diameter=0.5, rms=0.25, *, error=None, close=True, **info):
    """Write a run of 40 updates with a validation every 20, and return its writer."""
    defaults = {"name": f"{optimizer}-{seed}", "panel_hash": "p", "config": {"size": "tiny"}}
    writer = RunWriter.open(root, RunInfo(**{**defaults, **info, "head_optimizer": optimizer, "seed": seed}))
    for step in (10, 20, 30, 40):
        validated = step % 20 == 0
        writer.write(
            StepRecord(
                step=step,
                time=float(step),
                tokens=1000 * step,
                train_loss=loss + 40 - step,
                validation_loss=loss + 40 - step if validated else None,
                diameter=diameter * (41 - step),
                perturbation_rms=rms * (41 - step) if validated else None,
            )
        )
    if close:
        writer.close(error)
    return writer


def write_six_runs(root):
    """Write three runs of AdamW and three of RowNorm, and return their folder."""
    for optimizer in LOSSES:
        for seed in range(3):
            write_run(root, optimizer, seed, LOSSES[optimizer][seed], DIAMETERS[optimizer][seed], rms=2.0**-seed)
    return root


def comparisons_of(root):
    return compare(summary.load(root))


def page_of(root):
    runs = summary.load(root)
    return page.page(runs, compare(runs))


def invoke(*args):
    """Run the command line, and return its exit code and its output without boxes and line breaks."""
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result.exit_code, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


# Statistics


def test_means_deviations_ratios_and_differences_are_those_computed_by_hand(tmp_path):
    (comparison,) = comparisons_of(write_six_runs(tmp_path))
    for name in LOSSES:
        for metric, values in (("validation_loss", LOSSES[name]), ("step_diameter", DIAMETERS[name])):
            result = comparison.optimizers[name][metric]
            assert result.mean == pytest.approx(statistics.mean(values), rel=1e-12)
            assert result.deviation == pytest.approx(statistics.stdev(values), rel=1e-12)
            assert result.runs == 3
    assert comparison.ratios == {"step_diameter": 16.0, "perturbation_rms": 1.0}
    assert comparison.difference.mean == 0.25  # of 0.25, 0.125 and 0.375
    assert comparison.difference.deviation == 0.125
    assert (comparison.difference.runs, comparison.below, comparison.checkpoints, comparison.notes) == (3, 0, 2, ())


def test_runs_with_different_settings_are_no_seeds_of_one(tmp_path):
    for optimizer, seed, diameter, lr in (
        ("AdamW", 0, 10.5, 0.001),
        ("AdamW", 1, 1120.0, 0.1),
        ("RowNorm", 0, 1.0, 0.001),
        ("RowNorm", 1, 4.0, 0.001),
    ):
        write_run(tmp_path / "runs", optimizer, seed, diameter=diameter, config={"size": "tiny", "lr": lr})
    files = (tmp_path / "r.html", tmp_path / "r.json")
    code, text = invoke("report", tmp_path / "runs", "--out", files[0], "--json", files[1])
    assert code == 0, text
    assert "tiny, AdamW, lr=0.001 / RowNorm: row diameter 10.5" in text
    assert "Grouped by lr." in text
    report = json.loads(files[1].read_text())
    assert report["ratios"]["tiny"]["step_diameter"] == 10.5
    assert report["optimizers"]["tiny"].keys() == {"AdamW, lr=0.001", "AdamW, lr=0.1", "RowNorm"}
    shown = ParsedPage(files[0].read_text()).text
    assert "10.5×smaller steps" in shown  # noqa: RUF001
    assert "565" not in shown
    assert "Grouped by lr." in shown


def test_a_sweep_has_a_line_and_rows_for_every_setting(tmp_path):
    for optimizer, factor in (("AdamW", 6.0), ("RowNorm", 2.0)):
        for lr in (1, 2):
            write_run(
                tmp_path, optimizer, diameter=factor * lr, name=f"{optimizer} {lr}", config={"size": "tiny", "lr": lr}
            )
    (comparison,) = comparisons_of(tmp_path)
    lines = summary.headline(comparison).splitlines()
    assert [line.partition(",")[2].split(":")[0].strip() for line in lines[:2]] == [
        f"AdamW / RowNorm, lr={lr}" for lr in (1, 2)
    ]
    assert [c["ratios"]["step_diameter"] for c in summary.as_json([], [comparison])["contrasts"]["tiny"]] == [3.0, 3.0]
    assert "RowNorm against AdamW, lr=2" in ParsedPage(page_of(tmp_path)).text


def test_runs_of_different_models_are_compared_separately(tmp_path):
    write_run(tmp_path, seed=0, config={"size": "190M"})
    write_run(tmp_path, "RowNorm", seed=0, config={"size": "380M"})
    comparisons = comparisons_of(tmp_path)
    assert [c.model for c in comparisons] == ["190M", "380M"]
    assert all(c.ratios["step_diameter"] is None for c in comparisons)


# The page

HOSTILE = "<script>alert(1)</script>\"'&</title>--> 🦉 \u2028 %{x}" + "x" * 10_000


class ParsedPage(HTMLParser):
    """A page whose tags are closed in order: its text, its tags, and the attributes that load or run something."""

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
    """The data of the page's script: figures and themes."""
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.S)[1])


def test_the_page_is_well_formed_and_loads_nothing(tmp_path):
    text = page_of(write_six_runs(tmp_path))
    parsed = ParsedPage(text)
    assert parsed.open == []
    assert parsed.loads == []
    assert parsed.counts["script"] == 3
    assert text.count("plotly.js v") == 1
    assert "@import" not in text
    assert "url(" not in page.STYLE
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_page_has_the_numbers(tmp_path):
    text = ParsedPage(page_of(write_six_runs(tmp_path))).text
    for expected in ("16.0×smaller steps", "+0.2500validation loss", "3.2500 ± 0.2500", "(5.000 ± 2.500) × 10−1"):  # noqa: RUF001
        assert expected in text
    assert "RowNorm minus AdamW ± 0.1250, 3 pairs; below at 0 of 2 checkpoints" in text
    assert "paper" not in text


def test_the_page_has_four_figures_with_the_exact_values(tmp_path):
    data = figures_in(page_of(write_six_runs(tmp_path)))
    assert len(data["figures"]) == 4
    assert {*data["themes"]} == {"light", "dark"}
    diameter = data["figures"][1]["data"]
    assert diameter[0]["y"] == [15.5, 10.5, 5.5, 0.5]
    assert diameter[0]["x"] == [10_000, 20_000, 30_000, 40_000]


def test_hostile_texts_are_escaped(tmp_path):
    writer = write_run(tmp_path, HOSTILE, name=HOSTILE, model=HOSTILE, config={HOSTILE[:99]: HOSTILE}, close=False)
    writer.describe(remarks=(HOSTILE,), panel_hash=HOSTILE, versions={HOSTILE: HOSTILE})
    for message in (HOSTILE, ""):
        writer.alert(Alert(step=1, time=0.0, kind=HOSTILE, value=math.nan, pair_text=(HOSTILE, "'"), message=message))
    writer.close(RuntimeError(HOSTILE))
    write_run(tmp_path, seed=1)
    text = page_of(tmp_path)
    parsed = ParsedPage(text)
    assert parsed.open == []
    assert (parsed.counts["script"], parsed.loads, parsed.handlers) == (3, [], [])
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>\"'&" in parsed.text
    assert "🦉" in parsed.text
    assert max(map(len, re.findall("x+", parsed.text))) < 1000
    assert figures_in(text)


def test_a_run_without_records_and_a_failed_run_are_listed(tmp_path):
    RunWriter.open(tmp_path, RunInfo(name="empty", config={"size": "tiny"})).close()
    write_run(tmp_path, seed=1, error=RuntimeError("out of memory"))
    text = ParsedPage(page_of(tmp_path)).text
    assert "failed: RuntimeError out of memory" in text
    assert "No run is finished: these are the last values so far." in text
    write_run(tmp_path, seed=2)
    text = ParsedPage(page_of(tmp_path)).text
    assert "in no mean: AdamW-1, empty." in text


def test_states_remarks_settings_and_nonfinite_values_are_listed(tmp_path):
    first = write_run(tmp_path, seed=0, config={"size": "tiny", "lr": {"head": 0.5}}, remarks=("Weights are rounded.",))
    write_run(tmp_path, seed=1, config={"size": "tiny", "lr": {"head": 0.25}}, close=False).write(
        StepRecord(step=50, time=0.0, train_loss=math.nan)
    )
    text = ParsedPage(page_of(tmp_path)).text
    assert first.id in text
    for expected in (
        "running",
        "Weights are rounded.",
        "lr.head",
        "train_loss is nan or infinite at 1 step, first at 50.",
    ):
        assert expected in text
    assert not re.search(r"Configuration differences.*size", text)


@pytest.mark.parametrize("config", [{"size": "190M"}, {"parameters": 185_680_896}])
def test_runs_of_a_size_of_the_paper_are_shown_with_its_numbers(tmp_path, config):
    write_run(tmp_path, "AdamW", loss=3.1600, diameter=0.0287 * 1.1, config=config)
    write_run(tmp_path, "RowNorm", loss=3.1741, diameter=6.369e-4, config=config)
    text = ParsedPage(page_of(tmp_path)).text
    assert "3.1600paper 3.1588 ± 0.0027, here +0.0012" in text
    assert "paper (2.870 ± 0.140) × 10−2, here +10.0 %" in text  # noqa: RUF001
    assert "in the paper 45.1×" in text  # noqa: RUF001
    assert "The paper trained this model for 7,083 updates, these runs made 40." in text


def test_the_published_ratios_and_differences_follow_from_the_published_means():
    for published in PAPER.values():
        adamw, rownorm = published.optimizers["AdamW"], published.optimizers["RowNorm"]
        for metric, ratio in published.ratios.items():
            assert adamw[metric].mean / rownorm[metric].mean == pytest.approx(ratio.mean, abs=0.06)
        difference = rownorm["validation_loss"].mean - adamw["validation_loss"].mean
        assert difference == pytest.approx(published.difference.mean, abs=1.1e-4)
        assert published.tokens == published.updates * 524_288


@pytest.mark.sweep
def test_a_long_run_makes_a_small_page(tmp_path):
    writer = RunWriter.open(tmp_path, RunInfo(name="long", head_optimizer="AdamW"))
    with (writer.folder / "steps.jsonl").open("a") as log:
        log.writelines(
            f'{{"step":{i},"time":0.0,"tokens":{i},"train_loss":{1 + (i == 31_234)},"diameter":0.5}}\n'
            for i in range(1, 50_001)
        )
    writer.close()
    figures = figures_in(page_of(tmp_path))["figures"]
    assert max(len(trace["y"]) for figure in figures for trace in figure["data"]) <= 2000
    assert max(max(trace["y"]) for figure in figures for trace in figure["data"]) == 2.0


# CSV, JSON and the command line


def test_the_csv_files_have_the_exact_values(tmp_path):
    summary.write_csv(comparisons_of(write_six_runs(tmp_path / "runs")), tmp_path / "csv")
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


def test_names_are_not_formulas_in_a_spreadsheet(tmp_path):
    write_run(tmp_path, '=HYPERLINK("http://x")', config={"size": "@a"})
    summary.write_csv(comparisons_of(tmp_path), tmp_path)
    with (tmp_path / "table.csv").open() as file:
        assert {cell[0] for row in csv.reader(file) for cell in row[:2]} <= {"'", "m", "o", "A", "R"}


def test_json_has_the_statistics_and_the_runs(tmp_path):
    write_six_runs(tmp_path / "runs")
    write_run(tmp_path / "runs", seed=3, loss=math.nan)
    code, text = invoke("report", tmp_path / "runs", "--json", tmp_path / "r.json", "--csv", tmp_path / "csv")
    assert code == 0, text
    assert "tiny, AdamW / RowNorm: row diameter 16.0, Hilbert RMS 1.0; RowNorm - AdamW: loss +0.2500" in text
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ratios"]["tiny"]["step_diameter"] == pytest.approx(16.0)
    assert report["paired_difference"]["tiny"] == {
        "mean": 0.25,
        "deviation": 0.125,
        "pairs": 3,
        "below": 0,
        "checkpoints": 2,
    }
    assert report["optimizers"]["tiny"]["RowNorm"]["validation_loss"]["mean"] == 3.5
    assert len(report["runs"]) == 7
    nonfinite = next(run for run in report["runs"] if run["seed"] == 3)
    assert (nonfinite["validation_loss"], nonfinite["status"], nonfinite["counted"]) == (None, "finished", True)
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "csv" / "curves.csv").exists()


def test_the_folder_of_a_single_run_is_accepted(tmp_path):
    folder = write_run(tmp_path / "runs").folder
    code, text = invoke("report", folder, "--out", tmp_path / "one.html")
    assert code == 0, text
    assert "tiny, AdamW: validation loss 3, row diameter 0.5, Hilbert RMS 0.25" in text
    assert "written to" in text


def test_errors_say_what_to_do(tmp_path):
    (tmp_path / "none").mkdir()
    code, text = invoke("report", tmp_path / "none")
    assert code == 2
    assert "there are no runs in" in text
    assert "train with HilbertMonitor(run_dir=" in text
    code, text = invoke("report", tmp_path / "nowhere")
    assert code == 2
    assert "there is no folder" in text
    write_run(tmp_path / "runs")
    code, text = invoke("report", tmp_path / "runs", "--out", tmp_path / "no" / "r.html")
    assert code == 2
    assert "create it first" in text
    code, text = invoke("report", tmp_path / "runs", "--json", tmp_path)
    assert code == 2
    assert "cannot read or write" in text


def test_the_report_never_loads_torch(tmp_path):
    write_six_runs(tmp_path)
    command = (
        "import sys\n"
        "from hilbert_monitor.service.report import summary, page\n"
        "from hilbert_monitor.service.figures import compare_figures, comparison\n"
        f"runs = summary.load({str(tmp_path)!r})\n"
        "page.page(runs, comparison.compare(runs))\n"
        "print(*sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    loaded = set(process.stdout.split())
    assert not {"torch", "lightning", "pandas"} & loaded
    ours = {name.split(".")[1] for name in loaded if name.startswith("hilbert_monitor.")}
    assert ours == {"runs", "service"}


def test_a_run_that_cannot_be_read_is_named_and_costs_no_other(tmp_path, monkeypatch):
    for name in ("bad", "good"):
        write_run(tmp_path / "runs", name=name)
    with (tmp_path / "runs" / "bad" / "steps.jsonl").open("a") as file:
        file.write('{"step": 9223372036854775808, "time": 1.0}\n')
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "--out", str(tmp_path / "report.html")])
    assert result.exit_code == 0, result.output
    follow = RunReader.follow
    monkeypatch.setattr(RunReader, "follow", lambda self: 1 / 0 if self.folder.name == "bad" else follow(self))
    runs = {run.info.id: run for run in summary.load(tmp_path / "runs")}
    assert (runs["bad"].status, runs["good"].status) == ("unreadable", "finished")
    assert "ZeroDivisionError" in page.page([*runs.values()], compare(runs.values()))
    assert "ZeroDivisionError" in str(summary.as_json([*runs.values()], []))


def test_a_run_that_was_asked_to_stop_is_shown_and_in_no_mean(tmp_path):
    for seed, name in enumerate(("stopped", "done")):
        write_run(tmp_path, seed=seed, name=name)
    end = tmp_path / "stopped" / "end.jsonl"
    end.write_text(end.read_text().replace("}", ',"stopped":"SIGTERM"}'))
    runs = summary.load(tmp_path)
    (comparison,) = compare(runs)
    assert [run.id for run in comparison.counted] == ["done"]
    assert '<em class="stopped">stopped</em>' in page.page(runs, [comparison])
    (live,) = compare(runs, live=True)
    assert {run.id for run in live.counted} == {"done", "stopped"}
    assert live.notes == ()
