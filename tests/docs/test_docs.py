"""What the documents show is run, and what they name exists."""

import ast
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml

import hilbert_monitor
from hilbert_monitor import HilbertMonitor, geometry
from hilbert_monitor.cli import app
from hilbert_monitor.monitor.session import MonitorOptions
from hilbert_monitor.runs import alerts
from hilbert_monitor.runs.exposition import FAMILIES
from hilbert_monitor.runs.record import METRICS, StepRecord
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.web.app import create_app

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hilbert_monitor"
DOCS, RUNBOOKS = ROOT / "docs", ROOT / "dashboards" / "runbooks"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (*PAGES, *sorted(RUNBOOKS.glob("*.md")))}
INCLUDED = re.compile(r"<!-- file: (\S+) -->.*?<!-- end -->", re.S)
RULES = yaml.safe_load((ROOT / "dashboards" / "prometheus" / "rules" / "hilbert.yml").read_text())
ALERTS = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}

each_text = pytest.mark.parametrize("name", TEXTS)


def spans(text):
    """What stands in code within a line."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S))


def blocks(text, *languages):
    """Blocks of code, without those that are a file of the tree, which has a test of its own."""
    return re.findall(rf"^ *```(?:{'|'.join(languages)})\n(.*?)^ *```", INCLUDED.sub("", text), re.M | re.S)


# Code


PYTHON = [
    pytest.param(code, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, code in enumerate(blocks(text, "python"))
]


@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run_and_say_what_they_measured(code, capsys):
    torch.manual_seed(0)
    exec(compile(code, "document", "exec"), {})
    if "print(" in code:
        assert "D(S) = " in capsys.readouterr().out


def test_parts_that_come_from_the_code_are_current(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(DOCS / "generate.py"), run_name="__main__")
    assert (end.value.code, *capsys.readouterr()) == (0, "", "")


def test_every_function_of_the_geometrys_table_has_a_cost():
    rows = re.findall(r"^\| `(\w+)\(.*?\)` \|.*\| (.*?) ?\|$", TEXTS["docs/theory.md"], re.M)
    assert {"row_diameter", "hilbert_perturbation"} <= {name for name, _ in rows} <= set(vars(geometry))
    assert [name for name, cost in rows if not cost] == []


# Commands


def known_command(words):
    """The command that some words name, and the words that are left."""
    command = typer.main.get_command(app)
    while (commands := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        assert words[0] in commands, f"there is no command {words[0]!r}"
        command, words = commands[words[0]], words[1:]
    return command, words


def code_of(text):
    """Everything in a document that is code."""
    return "\n".join([*spans(text), *blocks(text, "sh", "bash", "python", "yaml")])


def options_of(command):
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@each_text
def test_every_command_and_option_that_is_named_exists(name):
    for call in re.findall(r"(?:hilbert-monitor|-m hilbert_monitor) ([a-z](?:[^\n`#|]|\\\n)*)", code_of(TEXTS[name])):
        command, rest = known_command(call.replace("\\\n", " ").split())
        assert {word for word in rest if re.fullmatch(r"--[a-z-]+", word)} <= options_of(command), call


def test_the_readme_and_the_pages_name_every_command():
    everything = "\n".join(TEXTS.values())
    for command in typer.main.get_command(app).commands:
        assert f"hilbert-monitor {command}" in everything


def every_option(command):
    """Options of a command and of all commands below it."""
    below = getattr(command, "commands", {}).values()
    return options_of(command).union(*map(every_option, below))


@each_text
def test_every_option_that_stands_alone_is_one_of_some_command(name):
    others = {"--check", "--profile"}  # of docs/generate.py and of docker compose
    named = {span.split()[0] for span in spans(TEXTS[name]) if span.startswith("--")}
    assert named <= every_option(typer.main.get_command(app)) | others


@each_text
def test_every_make_target_that_is_named_exists(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"^make ([a-z-]+)", code_of(TEXTS[name]), re.M)
    assert set(named) <= targets


def test_two_commands_head_exactly_two_rows():
    section = TEXTS["README.md"].partition("## Two commands\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (.*?) \|", section, re.M)[1:] == ["`make demo`", "`make test`"]


def test_the_readme_is_read_in_a_few_minutes():
    assert TEXTS["README.md"].count("\n") <= 200


# Names


@each_text
def test_every_metric_that_is_named_exists(name):
    exported = {entry.exported for entry in (*METRICS, *FAMILIES)}
    exported |= {f"{family.exported}{end}" for family in FAMILIES for end in ("_bucket", "_count", "_sum")}
    others = {"hilbert_monitor", "hilbert_url", *vars(geometry)}
    named = re.findall(r"(?<![\w:/.])hilbert_[a-z_]+", re.sub(r"hilbert_monitor[./]\S+", "", TEXTS[name]))
    assert set(named) <= exported | others
    assert set(re.findall(r"`hilbert/(\w+)`", TEXTS[name])) <= {metric.name for metric in METRICS}


def test_alerts_and_runbooks_are_the_same_and_all_in_the_table():
    table = set(re.findall(r"^\| \[(\w+)\]\(", TEXTS["docs/on-call.md"], re.M))
    assert table == ALERTS == {path.stem for path in RUNBOOKS.glob("*.md")}


@pytest.fixture(scope="module")
def classes():
    """Names of all classes of the package."""
    return {
        name for path in PACKAGE.rglob("*.py") for name in re.findall(r"^ *class (\w+)[(:]", path.read_text(), re.M)
    }


OTHERS = {"YourSink", "ColwiseParallel", "RowwiseParallel", "MixedPrecisionPolicy", "ModelParallelStrategy"}
"""Names in code that are not ours."""


@each_text
def test_every_alert_and_class_that_is_named_exists(name, classes):
    named = {word for span in spans(TEXTS[name]) for word in re.findall(r"^[A-Z][a-z]+(?:[A-Z][a-z0-9]+)+\b", span)}
    assert named <= ALERTS | classes | OTHERS


@each_text
def test_every_argument_that_is_named_exists(name):
    for span in spans(TEXTS[name]):
        try:
            calls = [node for node in ast.walk(ast.parse(span, mode="eval")) if isinstance(node, ast.Call)]
        except SyntaxError:
            continue
        for call in calls:
            called = {**vars(alerts), "HilbertMonitor": HilbertMonitor}.get(getattr(call.func, "id", ""))
            if called is not None:
                assert {keyword.arg for keyword in call.keywords} <= inspect.signature(called).parameters.keys(), span


@each_text
def test_every_address_of_the_service_that_is_named_exists(name):
    routes = {re.sub(r"{\w+}", "{}", getattr(route, "path", "")) for route in create_app(Index(Path("runs"))).routes}
    addresses = {span for span in spans(TEXTS[name]) if re.match(r"/(api|metrics|healthz|runs|alerts)\b", span)}
    patterns = [re.sub(r"{\w+}|ID|RUN", "{}", address.partition("?")[0]) for address in addresses]
    assert set(patterns) <= routes


def test_every_field_of_a_record_is_in_one_of_the_two_tables():
    section = TEXTS["docs/callback.md"].partition("## What a record holds")[2]
    cells = re.findall(r"^\| (`.*?) \|", section, re.M)
    named = [field for cell in cells for field in re.findall(r"`(\w+)`", cell)]
    derived = {name for name, value in vars(StepRecord).items() if isinstance(value, property)}
    assert sorted(named) == sorted({*StepRecord.__struct_fields__, *derived})


def test_every_optimizer_name_in_its_table_is_public():
    table = TEXTS["docs/optimizers.md"].partition("| name | what |")[2].partition("The names live")[0]
    named = set(re.findall(r"^\| `(\w+)", table, re.M))
    assert named == {name for name, home in hilbert_monitor._HOMES.items() if home == "optim"}


def test_every_action_on_a_blow_up_is_one_that_is_taken():
    table = TEXTS["docs/on-call.md"].partition("`on_blowup` takes any of")[2].partition("\n[Benchmarks]")[0]
    named = re.findall(r'^\| `"(.*?)"`', table, re.M)
    assert len(named) == 4
    for action in named:
        MonitorOptions(on_blowup=action)


# Places


def anchors(path):
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_text
def test_every_link_anchor_and_picture_is_there(name):
    here = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (here.parent / file).resolve() if file else here
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@each_text
def test_every_path_that_is_named_is_in_the_tree(name):
    first = "hilbert_monitor|dashboards|docker|docs|examples|tests|geometry|monitor|runs|service"
    words = re.split(r"[\s`'\"]+", code_of(TEXTS[name]))
    paths = [word for word in words if re.fullmatch(rf"(?:{first})/[\w./*-]*[\w*/]", word)]
    missing = [path for path in paths if not (any(ROOT.glob(path)) or any(PACKAGE.glob(path)))]
    assert missing == []


def test_every_page_can_be_reached_from_the_index_and_from_the_readme():
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert pages <= set(re.findall(r"\]\((\w[\w-]*\.md)\)", TEXTS["docs/index.md"]))
    assert pages <= set(re.findall(r"\]\(docs/([\w-]+\.md)", TEXTS["README.md"]))
