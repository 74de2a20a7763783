"""The lists that the page shares with Python, and the style that depends on them."""

import json
import re
from importlib.resources import files

import hilbert_monitor.service.web
from hilbert_monitor.runs.reader import STATUSES
from hilbert_monitor.service.figures import style
from hilbert_monitor.service.figures.run_panels import PANELS
from hilbert_monitor.service.web import catalogue
from hilbert_monitor.service.web.assets import Assets

STATIC = files(hilbert_monitor.service.web).joinpath("static")


def constants():
    text = Assets().get("catalogue.js").content.decode()
    return {name: json.loads(value) for name, value in re.findall(r"^export const (\w+) = (.*);$", text, re.M)}


def test_the_script_has_the_panels_the_states_and_the_colours():
    lists = constants()
    assert [panel["key"] for panel in lists["RUN_PANELS"]] == [panel.name for panel in PANELS if panel.on_page]
    assert all(panel["title"] and panel["about"] and panel["none"] for panel in lists["RUN_PANELS"])
    assert lists["STATES"] == [*STATUSES, "unreadable"]
    assert lists["COLOURS"] == style.COLOURS


def test_no_file_takes_the_name_of_the_script():
    assert not STATIC.joinpath(catalogue.NAME).is_file()


def test_scripts_import_what_the_catalogue_has():
    imports = [
        names
        for file in STATIC.iterdir()
        if file.name.endswith(".js")
        for names in re.findall(r'import \{ ([^}]*) \} from "\./catalogue\.js"', file.read_text())
    ]
    assert {name for names in imports for name in names.split(", ")} == constants().keys()


def test_every_state_has_a_look():
    assert {*re.findall(r'data-state="(\w+)"', STATIC.joinpath("style.css").read_text())} == {*constants()["STATES"]}
