"""The rules of Grafana's dashboard-linter. A rule yields what is wrong with a dashboard: a panel's title and a text.

They follow the published documentation of the linter. The docstring of a rule says where it is stricter.
"""

import re


def panels(board):
    """The panels of a dashboard, without its rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def targets(board):
    """Every query of a dashboard, with its panel."""
    return [(panel, target) for panel in panels(board) for target in panel["targets"]]


def query_variables(board):
    """The template variables whose values are queried from Prometheus, by name."""
    return {v["name"]: v for v in board["templating"]["list"] if v["type"] == "query"}


def template_datasource_rule(board):
    sources = [v for v in board["templating"]["list"] if v["type"] == "datasource"]
    if [(v["name"], v["label"], v["query"]) for v in sources] != [("datasource", "Data source", "prometheus")]:
        yield "", "there is not one variable for the data source, by its usual name"


def template_job_rule(board, name="job"):
    variable = query_variables(board).get(name)
    if variable is None:
        yield "", f"no variable {name}"
    else:
        expected = {"label": name.title(), "multi": True, "allValue": ".+"}
        if expected.items() - {k: v for k, v in variable.items() if k in expected}.items():
            yield "", f"variable {name} is not {expected}"
        if variable["datasource"]["uid"] != "${datasource}":
            yield "", f"variable {name} has a data source of its own"


def template_instance_rule(board):
    yield from template_job_rule(board, "instance")


def template_label_promql_rule(board):
    for name, variable in query_variables(board).items():
        if not re.fullmatch(r"label_values\(hilbert_\w+(\{[^{}]*\})?, \w+\)", variable["query"]):
            yield "", f"variable {name} asks {variable['query']}"


def template_on_time_change_reload_rule(board):
    for name, variable in query_variables(board).items():
        if variable["refresh"] != 2:
            yield "", f"variable {name} stays as it is when the time changes"


def panel_datasource_rule(board):
    for panel in panels(board):
        for part in (panel, *panel["targets"]):
            if part["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
                yield panel["title"], "does not use the data source that is chosen"


def panel_title_description_rule(board):
    for panel in panels(board):
        if not panel["title"] or not panel["description"]:
            yield panel["title"], "has no title or no description"


UNITS = {"none", "short", "sci", "locale", "percentunit", "s", "ops", "cps", "dateTimeAsIso"}
"""The units of Grafana that our dashboards use."""


def panel_units_rule(board):
    for panel in panels(board):
        config = panel["fieldConfig"]
        own = [p["value"] for o in config["overrides"] for p in o["properties"] if p["id"] == "unit"]
        if not {config["defaults"].get("unit"), *own} <= UNITS:
            yield panel["title"], "has no unit, or one that Grafana does not know"


def panel_no_targets_rule(board):
    for panel in panels(board):
        if not panel.get("targets"):
            yield panel["title"], "has no query"


def target_promql_rule(board):
    """No query is empty. Whether it is valid PromQL is tested with Prometheus itself."""
    for panel, target in targets(board):
        if not target["expr"].strip():
            yield panel["title"], "has an empty query"


def target_rate_interval_rule(board):
    """Stricter than the linter, which does not look at `increase`."""
    for panel, target in targets(board):
        for window in re.findall(r"\b(?:rate|irate|increase)\([^\[]*\[([^\]]*)\]", target["expr"]):
            if window != "$__rate_interval":
                yield panel["title"], f"has a rate over {window}"


def target_job_rule(board, matcher='job=~"$job"'):
    for panel, target in targets(board):
        for labels in re.findall(r"hilbert_\w+(\{[^{}]*\}|)", target["expr"]):
            if matcher not in labels:
                yield panel["title"], f"has a selector without {matcher}"


def target_instance_rule(board):
    yield from target_job_rule(board, 'instance=~"$instance"')


def target_counter_agg_rule(board):
    for panel, target in targets(board):
        for before in re.findall(r"(\w+\(|)hilbert_\w+_total\b", target["expr"]):
            if before not in ("rate(", "irate(", "increase("):
                yield panel["title"], "shows a counter itself"


def uneditable_dashboard(board):
    if board["editable"]:
        yield "", "can be edited"


RULES = {
    rule.__name__.replace("_", "-"): rule
    for rule in (
        template_datasource_rule,
        template_job_rule,
        template_instance_rule,
        template_label_promql_rule,
        template_on_time_change_reload_rule,
        panel_datasource_rule,
        panel_title_description_rule,
        panel_units_rule,
        panel_no_targets_rule,
        target_promql_rule,
        target_rate_interval_rule,
        target_job_rule,
        target_instance_rule,
        target_counter_agg_rule,
        uneditable_dashboard,
    )
}
