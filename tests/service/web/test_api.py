import csv
import io
import json
import math
import shutil
import typing

import msgspec
import pytest

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord
from hilbert_monitor.runs.run import Run
from hilbert_monitor.runs.table import NUMBERS
from hilbert_monitor.service.figures.run_figures import PANELS as RUN_PANELS
from hilbert_monitor.service.following.summary import summary
from hilbert_monitor.service.web import schema
from tests.support.services import FORMULA, IMAGE, SCRIPT, client_of, record, write_run, write_zoo


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    root = tmp_path_factory.mktemp("zoo")
    write_zoo(root)
    with client_of(root) as client:
        yield client


def strict(text):
    """JSON without the nan and the infinities that Python's reader would let pass."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def get(client, path, **query):
    answer = client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return strict(answer.text)


# Runs


def test_runs_are_listed_with_their_states_the_newest_first(zoo):
    answer = get(zoo, "/api/runs")
    assert answer["root"] == str(zoo.index.root)
    assert answer["progress"] == 1.0
    started = [run["started"] for run in answer["runs"] if run["status"] != "unreadable"]
    assert started == sorted(started, reverse=True)
    states = {run["id"]: run["status"] for run in answer["runs"]}
    assert states["AdamW-0"] == states["empty"] == states[IMAGE] == "finished"
    assert states["failed"] == "failed"
    assert states["broken"] == "unreadable"
    assert "foreign" not in states
    (broken,) = (run for run in answer["runs"] if run["id"] == "broken")
    assert broken["problem"]


@pytest.mark.parametrize("query", [{}, {"status": "finished"}])
def test_the_list_of_runs_comes_in_pages(zoo, query):
    whole = get(zoo, "/api/runs", **query)
    assert whole["next"] is None
    assert whole["count"] == len(whole["runs"]) > 3
    runs, after = [], None
    while after is not None or not runs:
        page = get(zoo, "/api/runs", limit=3, **({"after": after} if after else {}), **query)
        assert (len(page["runs"]) == 3) if page["next"] else page["runs"]
        assert page["count"] == whole["count"]
        runs, after = runs + page["runs"], page["next"]
    assert runs == whole["runs"]
    assert get(zoo, "/api/runs", after=runs[-1]["id"], **query)["runs"] == []
    assert zoo.get("/api/runs?after=nobody").status_code == 404
    assert zoo.get("/api/runs?limit=0").status_code == 422


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"q": "adamw"}, {"AdamW-0", "AdamW-1"}),
        ({"q": "lr=0.2"}, {"failed"}),
        ({"q": "lr=0.20 status:failed"}, {"failed"}),
        ({"q": "lr=0.02"}, set()),
        ({"q": "deep.a=[1] seed=1"}, {"AdamW-1", "RowNorm-1"}),
        ({"q": "AdamW-0 finished"}, {"AdamW-0"}),
        ({"status": "failed"}, {"failed"}),
        ({"optimizer": "AdamW", "q": "status:finished"}, {"AdamW-0", "AdamW-1"}),
        ({"optimizer": FORMULA, "model": SCRIPT, "q": "onerror"}, {IMAGE}),
        ({"q": "lr>0.1"}, {"failed"}),
        ({"q": "lr>=0.1 lr<0.2 seed=0"}, {"AdamW-0", "RowNorm-0"}),
        ({"q": "lr!=0.1 optimizer:muon"}, {"failed", "empty"}),
        ({"q": "gpt -adamw -status:failed -optimizer:muon lr=0.1"}, {"RowNorm-0", "RowNorm-1"}),
        ({"q": "diameter>0.005 status:finished optimizer:adamw"}, {"AdamW-0", "AdamW-1"}),
        ({"q": "step=100 seed:1"}, {"AdamW-1", "RowNorm-1"}),
        ({"q": "alerts>0"}, {"failed"}),
        ({"q": '"AdamW 0"'}, {"AdamW-0"}),
        ({"q": 'name:"adamw 1"'}, {"AdamW-1"}),
        ({"q": "AdamW-0 OR status:failed"}, {"AdamW-0", "failed"}),
        ({"q": "OR AdamW-0 OR"}, {"AdamW-0"}),
        ({"q": "AdamW-0 or status:failed"}, set()),
        ({"q": "lr>abc"}, set()),
        ({"q": '"unfinished quote'}, set()),
        ({"q": '"" -'}, None),
        ({"q": "="}, None),
    ],
)
def test_runs_are_found_by_words_and_by_fields(zoo, query, expected):
    ids = {run["id"] for run in get(zoo, "/api/runs", **query)["runs"]}
    assert expected is None or ids == expected


def test_columns_list_what_differs_between_runs_first(zoo):
    answer = get(zoo, "/api/columns")
    names = [one["name"] for one in answer["settings"]]
    lr = next(one for one in answer["settings"] if one["name"] == "lr")
    assert (lr["values"], lr["runs"]) == (2, 5)
    assert names.index("lr") < names.index("ranks") or lr["runs"] < len(zoo.index.runs)
    assert {"name", "label", "about"} == answer["fields"][0].keys()
    assert "last:saturation" in {one["name"] for one in answer["fields"]}


def test_cells_of_columns_are_settings_and_last_values(zoo):
    answer = zoo.get("/api/columns/cells", params={"name": ["lr", "deep.a", "last:diameter", "last:nothing", "nobody"]})
    columns = strict(answer.text)["columns"]
    assert columns["lr"]["failed"] == "0.2"
    assert columns["deep.a"]["AdamW-0"] == "[1]"
    assert columns["last:diameter"]["failed"] == "inf"
    assert columns["last:diameter"]["RowNorm-0"] == pytest.approx(0.0002)
    assert columns["nobody"] == columns["last:nothing"] == {}
    assert zoo.get("/api/columns/cells").status_code == 422
    assert zoo.get("/api/columns/cells", params={"name": ["a"] * 31}).status_code == 422


def test_a_run_says_what_it_is(zoo):
    answer = get(zoo, "/api/runs/AdamW-0")
    assert answer["summary"]["step"] == 100
    assert answer["summary"]["saturation"] == pytest.approx(50 * 0.02 / 100 / 0.04)
    assert answer["info"]["config"] == {"lr": 0.1, "deep": {"a": [1]}}
    assert len(answer["attempts"]) == 1
    assert ["lr", "0.1"] in answer["config"]
    assert ["deep.a", "[1]"] in answer["config"]
    assert answer["cost"] == {
        "share_mean": pytest.approx(0.01),
        "share_last": 0.01,
        "seconds": {"diameter": 0.25, "panel": 0.5},
        "records": 100,
    }


def test_the_mean_cost_is_that_of_all_the_time_and_not_of_all_records(tmp_path):
    quick = [record(s, seconds={"bounds": 0.01}, share=0.01) for s in range(1, 10)]  # a second each
    slow = record(10, seconds={"diameter": 3.0, "panel": 1.0}, share=0.4)  # ten seconds
    write_run(tmp_path, "run", [*quick, slow])
    write_run(tmp_path, "bare", [record(s, time=10.0 * s, seconds={}, share=0.1 * s) for s in (1, 2, 3)])
    with client_of(tmp_path) as client:
        assert get(client, "/api/runs/run")["cost"]["share_mean"] == pytest.approx((9 * 0.01 + 4.0) / 19)
        assert get(client, "/api/runs/bare")["cost"]["share_mean"] == pytest.approx(0.25)


def test_a_run_tells_its_pace_and_the_time_that_is_left(tmp_path):
    writer = RunWriter.open(tmp_path, RunInfo(name="live", last_step=500))
    for step in range(1, 101):
        writer.write(record(step, time=1e9 + 0.5 * step))
    with client_of(tmp_path) as client:
        assert get(client, "/api/runs/live")["pace"] == {
            "steps_per_second": pytest.approx(2.0),
            "tokens_per_second": pytest.approx(2000.0),
            "last_step": 500,
            "seconds_left": pytest.approx(200.0),
        }
        writer.close()
        client.index.refresh()
        assert get(client, "/api/runs/live")["pace"]["seconds_left"] is None


def test_tokens_that_attained_the_diameter_are_counted_the_most_frequent_first(tmp_path):
    steps = [record(s, pair=(9, 4) if s % 2 else (4, 9), pair_text=None) for s in range(1, 8)]
    steps += [record(s, pair=(4, 5), pair_text=("four", "five"), diameter=5.0 + s) for s in (8, 9)]
    steps += [record(10, pair=(1, 2), diameter=None), record(11, pair=None, pair_text=None)]
    write_run(tmp_path, "run", steps)
    with client_of(tmp_path) as client:
        answer = get(client, "/api/runs/run")
    often, seldom = answer["tokens"]
    assert often["pair"] == [4, 9]
    assert often["texts"] == ["four", None]
    assert (often["count"], often["last_step"], often["largest"]) == (7, 7, 0.02)
    assert often["share"] == pytest.approx(7 / 9)
    assert (seldom["pair"], seldom["count"], seldom["largest"]) == ([4, 5], 2, 14.0)
    assert [(row["token"], row["count"]) for row in answer["token_rows"]] == [(4, 9), (9, 7), (5, 2)]


def test_settings_that_differ_are_listed(zoo):
    answer = get(zoo, "/api/difference", a="AdamW-0", b="failed")
    assert {"key": "lr", "a": "0.1", "b": "0.2"} in answer["rows"]
    assert {"key": "deep.a", "a": "[1]", "b": None} in answer["rows"]
    assert get(zoo, "/api/difference", a="AdamW-0", b="AdamW-0")["rows"] == []


def test_alerts_are_the_newest_first(tmp_path):
    alerts = [Alert(step=s, time=float(s), kind="diameter" if s % 2 else "ceiling", value=1.0) for s in range(1, 6)]
    write_run(tmp_path, "a", [record(1)], alerts[:3])
    write_run(tmp_path, "b", [record(1)], alerts[3:])
    with client_of(tmp_path) as client:
        answer = get(client, "/api/alerts")
        assert [(alert["run"], alert["step"]) for alert in answer["alerts"]] == [
            ("b", 5), ("b", 4), ("a", 3), ("a", 2), ("a", 1),
        ]  # fmt: skip
        assert get(client, "/api/alerts", limit=2)["count"] == 5
        assert [a["step"] for a in get(client, "/api/alerts", run="a", kind="diameter")["alerts"]] == [3, 1]


# Numbers that JSON has not


def floats(struct):
    hints = typing.get_type_hints(struct)
    return [name for name, hint in hints.items() if hint is float or hint == float | None]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_make_the_trip_in_every_field(tmp_path, value):
    name, fields = repr(value), floats(StepRecord)
    whole = {"tokens", "batch", "row_token", "gradient_row_token", "nonfinite_rows", "held_rows"}
    assert {*fields} == {*NUMBERS} - whole
    odd = record(2, seconds={"diameter": value}, **dict.fromkeys(fields, value))
    alert = Alert(step=2, kind="diameter", **dict.fromkeys(floats(Alert), value))
    write_run(tmp_path, "odd", [record(1), odd], [alert])
    with client_of(tmp_path) as client:
        columns = get(client, "/api/runs/odd/records")["columns"]
        assert {field: columns[field][1] for field in fields} == dict.fromkeys(fields, name)
        assert columns["seconds.diameter"] == [0.25, name]
        (line,) = get(client, "/api/runs")["runs"]
        shown = ("train_loss", "validation_loss", "diameter", "perturbation_rms", "learning_rate", "time")
        assert {key: line[key] for key in shown} == dict.fromkeys(shown, name)
        (alert,) = get(client, "/api/alerts")["alerts"]
        assert {key: alert[key] for key in floats(Alert)} == dict.fromkeys(floats(Alert), name)
        assert get(client, "/api/runs/odd")["alerts"][0]["value"] == name
        assert get(client, "/api/runs/odd/figures")["figures"]
        assert get(client, "/api/compare")["figures"]
        rows = list(csv.DictReader(io.StringIO(client.get("/api/runs/odd/records?format=csv").text)))
        assert rows[1]["train_loss"] == name


def test_what_was_not_measured_is_null_and_not_nan(tmp_path):
    write_run(tmp_path, "run", [record(1, train_loss=None), record(2, train_loss=math.nan), record(3)])
    with client_of(tmp_path) as client:
        columns = get(client, "/api/runs/run/records", fields="train_loss,ceiling,rounding")["columns"]
    assert columns == {
        "step": [1, 2, 3],
        "train_loss": [None, "nan", 10 / 3],
        "ceiling": [0.04] * 3,
        "rounding": [None] * 3,
    }


# Records


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    root = tmp_path_factory.mktemp("long")
    steps = [record(s, train_loss=3.0, diameter=1.0) for s in range(1, 5001)]
    steps[1234] = record(1235, train_loss=99.0, diameter=1.0)
    steps[2345] = record(2346, train_loss=3.0, diameter=0.001)
    steps[3456] = record(3457, train_loss=math.nan, diameter=1.0)
    write_run(root, "long", steps)
    with client_of(root) as client:
        yield client


@pytest.mark.parametrize("points", [10, 100, 2000])
def test_a_spike_of_one_step_survives(long, points):
    answer = get(long, "/api/runs/long/records", fields="train_loss,diameter", points=points)
    columns = answer["columns"]
    assert answer["of"] == 5000
    assert len(columns["step"]) <= points + 4
    at = dict(zip(columns["step"], zip(columns["train_loss"], columns["diameter"], strict=True), strict=True))
    assert at[1235][0] == 99.0
    assert at[2346][1] == 0.001
    assert at[3457][0] == "nan"
    assert {1, 5000} <= at.keys()


def test_records_of_some_steps_are_complete_where_there_is_room(long):
    answer = get(long, "/api/runs/long/records", fields="train_loss", first=1230, last=1240)
    assert answer["columns"]["step"] == list(range(1230, 1241))
    assert answer["of"] == 11
    assert get(long, "/api/runs/long/records", first=9000)["columns"]["step"] == []
    assert get(long, "/api/runs/long/records", first=10, last=5)["of"] == 0


def test_csv_has_every_record(long):
    answer = long.get("/api/runs/long/records?format=csv&fields=train_loss,pair.0&points=10")
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert len(rows) == 5000
    assert rows[1234] == {"step": "1235", "train_loss": "99.0", "pair.0": "2"}
    assert rows[3456]["train_loss"] == "nan"


# Comparing


def test_runs_are_compared_within_the_model_of_the_newest_run(zoo):
    answer = get(zoo, "/api/compare")
    assert answer["model"] == "GPT"
    assert {model["name"]: model["runs"] for model in answer["models"]} == {"GPT": 6, SCRIPT: 3}
    assert {*answer["figures"]} == {"loss", "diameter", "perturbation", "ratio"}
    assert answer["ratios"]["diameter"]["now"] == pytest.approx(50)
    assert answer["ratios"]["diameter"]["step"] == 100
    assert sorted(answer["pairs"]) == [["AdamW-0", "RowNorm-0"], ["AdamW-1", "RowNorm-1"]]
    assert "updates" in answer["axes"]


def test_some_runs_are_compared_by_their_ids(zoo):
    answer = get(zoo, "/api/compare", runs="AdamW-0,RowNorm-0,nobody")
    assert {*answer["counted"], *answer["aside"]} == {"AdamW-0", "RowNorm-0"}
    assert any("nobody" in note for note in answer["notes"])


def test_any_two_sides_are_compared_with_the_metrics_that_are_asked_for(zoo):
    asked = {"base": "RowNorm", "over": "AdamW-1", "panels": "gauge_waste,saturation", "by": "lr", "logx": "true"}
    answer = get(zoo, "/api/compare", **asked)
    assert answer["sides"] == ["RowNorm", "AdamW-1"]
    assert answer["ratios"]["diameter"]["now"] == pytest.approx(1 / 50)
    assert {"gauge_waste", "saturation"} <= answer["figures"].keys()
    assert answer["figures"]["saturation"]["layout"]["xaxis"]["type"] == "log"
    assert {"saturation", "efficiency_lower"} <= {*answer["measured"]}
    assert "lr" in answer["keys"]
    assert {group["name"] for group in answer["groups"]} == {
        "AdamW, lr=0.1",
        "RowNorm, lr=0.1",
        "Muon, lr=0.2",
        "Muon, no lr",
    }


def test_a_metric_that_there_is_not_is_refused_with_the_list_of_those_that_there_are(zoo):
    answer = zoo.get("/api/compare", params={"panels": "gauge_waste,moons"})
    assert answer.status_code == 422
    assert "there is no metric 'moons'; there are" in answer.json()["detail"]


def test_a_model_that_nobody_has_is_an_empty_comparison(zoo):
    answer = get(zoo, "/api/compare", model="none such")
    assert answer["figures"] == {}
    assert answer["counted"] == []
    assert answer["contrasts"] == answer["groups"] == []


@pytest.mark.parametrize("panel", ["loss", "diameter", "perturbation", "ratio", "saturation"])
def test_a_panel_is_had_as_csv(zoo, panel):
    answer = zoo.get(f"/api/compare/{panel}.csv", params={"axis": "updates", "x0": 1, "x1": 50})
    assert answer.status_code == 200
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert rows
    assert all(float(row["step"]) <= 50 for row in rows if row.get("step"))


@pytest.mark.parametrize("panel", [*RUN_PANELS])
def test_a_panel_of_a_run_is_had_as_csv(zoo, panel):
    answer = zoo.get(f"/api/runs/AdamW-0/panels/{panel}.csv")
    assert answer.status_code == 200
    assert len(answer.text.splitlines()) > 100


def test_a_run_is_drawn(zoo):
    figures = get(zoo, "/api/runs/AdamW-0/figures", axis="updates", smooth=0.5)["figures"]
    assert {"diameter", "saturation", "perturbation", "loss"} <= figures.keys()
    assert all(figure["data"] for figure in figures.values())
    assert get(zoo, "/api/runs/empty/figures")["id"] == "empty"
    assert get(zoo, "/api/runs/broken/figures")["id"] == "broken"


def test_an_empty_folder_has_answers(tmp_path):
    for root in (tmp_path, tmp_path / "not yet"):
        with client_of(root) as client:
            assert get(client, "/api/runs")["runs"] == []
            assert get(client, "/api/compare")["models"] == []
            assert get(client, "/api/alerts") == {"alerts": [], "count": 0, "acknowledged": 0}
            assert client.get("/api/compare/loss.csv").status_code == 200
            assert get(client, "/healthz")["status"] == "ok"


def test_answers_follow_a_run_that_grows(tmp_path):
    write_run(tmp_path, "a", [record(1)])
    with client_of(tmp_path) as client:
        assert get(client, "/api/runs/a/records")["of"] == 1
        first = get(client, "/api/compare")
        with (tmp_path / "a" / "steps.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(record(2, diameter=7.0)) + b"\n")
        client.index.refresh()
        assert get(client, "/api/runs/a/records")["of"] == 2
        assert get(client, "/api/runs/a")["summary"]["diameter"] == 7.0
        assert get(client, "/api/compare")["version"] > first["version"]
        assert get(client, "/api/compare")["optimizers"]["RowNorm"]["step_diameter"]["mean"] == 7.0


def test_a_run_that_takes_the_place_of_another_is_not_mistaken_for_it(tmp_path):
    write_run(tmp_path, "a", [record(1, train_loss=1.0)])
    with client_of(tmp_path) as client:
        assert get(client, "/api/runs/a/records", fields="train_loss")["columns"]["train_loss"] == [1.0]
        shutil.rmtree(tmp_path / "a")
        write_run(tmp_path, "a", [record(1, train_loss=2.0)])
        client.index.refresh()
        assert get(client, "/api/runs/a/records", fields="train_loss")["columns"]["train_loss"] == [2.0]


# What others wrote


def test_names_and_texts_of_others_are_escaped_where_they_could_act(zoo):
    line = next(run for run in get(zoo, "/api/runs")["runs"] if run["id"] == IMAGE)
    assert line["name"] == SCRIPT  # JSON holds what was written, and the page shows it as text
    for path in (f"/api/runs/{IMAGE}/figures", "/api/compare"):
        text = zoo.get(path, params={"model": SCRIPT} if "compare" in path else {}).text
        assert "figures" in text
        figures = json.dumps(json.loads(text)["figures"])
        assert "<script" not in figures
        assert "<img" not in figures


def test_csv_has_no_formulas(zoo):
    ids = f"{IMAGE},{FORMULA.replace('/', '')}"
    texts = [zoo.get("/api/compare/diameter.csv", params={"model": SCRIPT, "runs": ids, "group": "run"}).text]
    texts += [zoo.get(f"/api/runs/{IMAGE}/panels/{panel}.csv").text for panel in ("diameter", "perturbation")]
    for text in texts:
        rows = list(csv.reader(io.StringIO(text)))
        assert len(rows) > 10
        assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "@", "\t", "\r"))]


# Errors


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "id",
    [
        "..",
        "%2e%2e",
        "..%2f..%2fetc%2fpasswd",
        "%00",
        "AdamW-0%00",
        "AdamW-0%2f..",
        "x" * 5000,
        "%F0%9F%92%A9",
        "%ff%fe",
        ".%2fAdamW-0",
        "AdamW-0%2f",
    ],
)
@pytest.mark.parametrize(
    "path", ["/api/runs/{}", "/api/runs/{}/records", "/api/runs/{}/figures", "/api/runs/{}/panels/loss.csv"]
)
def test_an_id_that_no_run_has_is_not_found(zoo, id, path):
    answer = zoo.get(path.format(id))
    assert answer.status_code == 404
    assert answer.json().keys() == {"detail"}
    assert len(answer.text) < 400


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/api/compare?axis=moons", "axis"),
        ("/api/compare?smooth=1", "smooth"),
        ("/api/compare?smooth=nan", "smooth"),
        ("/api/compare?x0=inf", "x0"),
        ("/api/compare?scale=log10", "scale"),
        ("/api/compare?runs=" + "a," * 16_000, "runs"),
        ("/api/runs?q=" + "a" * 301, "q"),
        ("/api/runs/AdamW-0/records?points=9", "points"),
        ("/api/runs/AdamW-0/records?points=20001", "points"),
        ("/api/runs/AdamW-0/records?fields=secret", "secret"),
        ("/api/runs/AdamW-0/records?first=99999999999999999999999", "first"),
        ("/api/runs/AdamW-0/panels/moons.csv", "panel"),
        ("/api/alerts?limit=0", "limit"),
        ("/api/difference?a=AdamW-0", "b"),
        ("/api/events?after=" + "1" * 101, "after"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_gets_a_sentence(zoo, path, word):
    answer = zoo.get(path)
    assert answer.status_code == 422
    assert word in answer.json()["detail"]
    assert len(answer.json()["detail"]) < 700


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["/", "/runs/a", "/static/index.html", "/api/runs", "/api/events", "/healthz"])
def test_nothing_else_can_be_changed(zoo, method, path):
    answer = zoo.request(method, path, json={})
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]


# Documents


def test_the_schema_has_the_fields_that_answers_have():
    assert schema.Info.model_fields.keys() == {*RunInfo.__struct_fields__}
    assert schema.AlertAnswer.model_fields.keys() == {*Alert.__struct_fields__}
    assert schema.RunSummary.model_fields.keys() == summary(Run(id="a", info=RunInfo(id="a"))).keys()


def test_every_route_and_parameter_is_described(zoo):
    document = get(zoo, "/api/openapi.json")
    assert {"/healthz", "/api/runs", "/api/compare", "/api/events", "/api/themes"} <= document["paths"].keys()
    for path, methods in document["paths"].items():
        changes = {"/api/remarks": {"get", "post"}, "/api/acknowledgements": {"post"}}
        assert methods.keys() == changes.get(path, {"get"})
        for method in methods.values():
            assert method["summary"]
            for parameter in method.get("parameters", []):
                assert parameter.get("description"), (path, parameter["name"])
