import json
import os
import re
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from typer.testing import CliRunner

from hilbert_monitor.bench import service, service_client, service_opponents
from hilbert_monitor.bench.service_runs import ContinuedRun, make_runs, records_of
from hilbert_monitor.cli import app
from hilbert_monitor.runs.log import RunReader
from hilbert_monitor.service.following.index import Index
from tests.support.services import running_service

STARTS = {"service start", "service memory", "service folders"}
SUBJECTS = STARTS | {"first paint", "refresh", "browsers", "scalars of TensorBoard"}


def run(*args):
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The whole bench, in small."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "tmp"))
        (folder / "tmp").mkdir()
        result, text = run("bench", "service", "--quick", "--json", folder / "out.json")
    assert result.exit_code == 0, text
    return json.loads((folder / "out.json").read_text())["results"], text, folder / "tmp"


@pytest.mark.sweep
def test_every_figure_is_there_beside_its_limit_or_opponent(measured):
    results, text, _ = measured
    assert {r["subject"] for r in results} == SUBJECTS
    for r in results:
        assert r["amount"] > 0
        assert r["opponent_amount"] > 0
        assert r["case"] in text
    limits = {r["opponent_amount"] for r in results if r["opponent"] == "limit"}
    assert limits == {60, 30, 10, 2, 1, 0.1, 0.02, 1 << 30}
    opponents = {"limit", "1 browser", "EventAccumulator", "data server", "all of them"}
    assert {r["opponent"] for r in results} == opponents


@pytest.mark.sweep
def test_figures_are_of_a_plausible_size(measured):
    by_case = {r["case"]: r for r in measured[0]}
    assert (
        by_case["first answer of a later start"]["amount"]
        <= by_case["4 runs of 300 records there again, from the cache"]["amount"]
    )
    assert 30 << 20 < by_case["peak memory of the first indexing"]["amount"] < 1 << 30
    assert "comparison of 4 runs" in by_case["all that the page fetches, one after the other"]["note"]
    (read,) = (r for r in measured[0] if r["case"].endswith("bytes read"))
    assert read["ratio"] > 0.3, "eight browsers cost one reader"


@pytest.mark.sweep
def test_nothing_is_left_on_the_disk(measured):
    assert not [path for path in measured[2].iterdir() if path.name.startswith("hilbert-monitor")]


def test_without_a_browser_or_tensorboard_a_line_says_so(monkeypatch):
    class Idle:
        port = 0

        def until(self, ready):
            return 0.0

        def stop(self):
            return 0.0

    bench = service.ServiceBench
    monkeypatch.setattr(bench, "_serve", lambda self: Idle())
    monkeypatch.setattr(bench, "jobs", lambda self: [("paint", self._paint), ("TensorBoard", self._opponents)])
    monkeypatch.setattr(service_opponents, "installed", lambda: False)
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    result, text = run("bench", "service", "--quick")
    assert result.exit_code == 0, text
    assert "The first paint in Chromium was not measured: playwright is not installed." in text
    assert "TensorBoard is not installed" in text
    assert "EventAccumulator" not in text


def test_a_disk_without_room_is_one_sentence_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(service.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(10**9))
    result, text = run("bench", "service")
    assert result.exit_code == 1
    assert "GB: make room there, or set TMPDIR to a folder with more" in text
    assert not list(tmp_path.iterdir())


def test_a_service_that_never_sees_a_continued_run_ends_the_bench(tmp_path):
    (id, _) = make_runs(tmp_path, 2, 5)
    with running_service(tmp_path, "--port", 0, "--no-cache") as (_, url, _first):
        port = urlsplit(url).port
        with pytest.raises(RuntimeError, match=f"shows run '{id}' as finished, 0.2 s after it was continued"):
            service._moment_it_runs(port, id, patience=0.2)
        run = ContinuedRun(tmp_path, 0, 5)
        (written,) = run.write()
        assert 0 < service._moment_it_runs(port, run.id) - written < 60
        run.close()


def test_synthetic_runs_read_as_runs_that_were_written(tmp_path):
    ids = make_runs(tmp_path, 8, 60)
    index = Index(tmp_path)
    index.refresh()
    assert set(index.runs) == set(ids)
    for run in index.runs.values():
        assert (run.status, run.torn, len(run.table)) == ("finished", 0, 60)
        assert run.table.steps.tolist() == list(range(1, 61))
        assert run.table.last("perturbation_rms") is not None
    a, b = (index.runs[f"adamw-seed{seed}"] for seed in (0, 3))
    assert a.info.seed != b.info.seed
    assert np.array_equal(a.table.column("diameter_lower"), b.table.column("diameter_lower"))


def test_synthetic_optimizers_differ_as_the_real_ones_do():
    adamw, rownorm = ([*records_of(head, 0, 2000, began=0.0)] for head in ("AdamW", "RowNorm"))
    assert all(r.diameter_upper <= 1.05 * r.ceiling for r in rownorm)
    late = slice(100, None)
    ratio = np.median([a.diameter_lower / r.diameter_lower for a, r in zip(adamw[late], rownorm[late], strict=True)])
    assert 4 < ratio < 20
    assert max(r.row_norm or 0 for r in adamw) > 3 * np.median([r.row_norm for r in adamw if r.row_norm])


def test_a_run_continues_in_its_own_process(tmp_path):
    (id, _) = make_runs(tmp_path, 2, 50)
    run = ContinuedRun(tmp_path, 0, 50)
    try:
        moments = run.write(3)
        assert len(moments) == 3
        reader = RunReader(tmp_path / id)
        assert reader.state().status == "running"
        assert (reader.state().step, run.step) == (53, 53)
        assert reader.attempts[-1].pid != os.getpid()
    finally:
        run.close()
    assert reader.state().status == "finished"


def test_a_service_that_cannot_start_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    process = service_client.Service(tmp_path / "file", tmp_path / "log", tmp_path / "cache")
    with pytest.raises(RuntimeError, match="the service ended; the last that it said"):
        process.until()
    process.stop()


def test_tensorboard_loads_every_number_of_a_record(tmp_path):
    make_runs(tmp_path / "runs", 1, 40)
    index = Index(tmp_path / "runs")
    index.refresh()
    (run,) = index.runs.values()
    written = service_opponents.write_events(run.table, tmp_path / "events", 2)
    numbers = sum(int(service_opponents.present(v).sum()) for n, v in run.table.columns.items() if n != "time")
    assert service_opponents.accumulate(tmp_path / "events")[1] == 2 * written == 2 * numbers


def test_the_process_that_continues_a_run_needs_no_torch():
    code = "import sys, hilbert_monitor.bench.service_runs; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
