"""Parts of Grafana's dashboards: queries that filter by the variables, panels, variables, links.

Metrics have the names of `record.METRICS`. An unknown name raises an error, so a renamed metric cannot leave an empty
panel. Prometheus may scrape the same run from its own process and from the service, so every query takes the
maximum over the series of a run, and never the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hilbert_monitor.runs.alerts import KINDS
from hilbert_monitor.runs.exposition import FAMILIES, Family
from hilbert_monitor.runs.reader import LOST_AFTER, STALLED_AFTER, STATUSES
from hilbert_monitor.runs.record import METRICS, Metric
from hilbert_monitor.service.figures.style import COLOURS

Json = dict[str, Any]

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAGS = ["hilbert-monitor", "training"]
STATES = dict(zip(STATUSES, ("green", "orange", "red", "dark-red", "purple", "blue"), strict=True))
"""Colours of the states of a run."""
BLOW_UPS = dict(zip(KINDS, ("dark-red", "red", "yellow", "orange", "purple", "blue", "green"), strict=True))
"""Colours of the kinds of blow-ups."""

RUNBOOKS = {
    "step_diameter": "StepDiameterBlowUp",
    "step_diameter_lower": "StepDiameterBlowUp",
    "step_diameter_distribution": "StepDiameterBlowUp",
    "step_diameter_saturation": "StepDiameterAboveCeiling",
    "learning_rate": "LearningRateJump",
    "perturbation_rms": "HilbertPerturbationBlowUp",
    "precision_loss_rms": "LogitPrecisionLoss",
    "layer_step_max": "LayerBlowUp",
    "blowups_total": "StepDiameterBlowUp",
    "blowup_step": "StepDiameterBlowUp",
    "nonfinite_rows": "IncrementNotFinite",
    "nonfinite_increments_total": "IncrementNotFinite",
    "run_status": "RunKilled",
    "run_start_timestamp_seconds": "RunKilled",
    "heartbeat_timestamp_seconds": "RunStalled",
    "monitor_share": "MonitorOverheadHigh",
    "monitor_seconds_total": "MonitorOverheadHigh",
    "monitor_failures_total": "MonitorFailing",
}
"""The alert that is about what a panel shows first, by the name of its metric."""
SERVICE = "${service}"
"""The address of `hilbert-monitor serve`, a variable of both dashboards."""

KNOWN: dict[str, Metric | Family] = {f"hilbert_{m.name}": m for m in METRICS if not m.counted} | {
    f.exported: f for f in FAMILIES
}


def known(name: str) -> Metric | Family:
    """Return a metric or a family by its name, or raise LookupError."""
    full = f"hilbert_{name}"
    if full not in KNOWN:
        raise LookupError(f"there is no metric '{full}': take one of runs/record.py, or add it there")
    return KNOWN[full]


def help_of(*names: str) -> str:
    """Return the help of some metrics."""
    return " ".join(known(name).help for name in names)


def unit_of(name: str) -> str:
    """Return Grafana's unit for a metric."""
    entry = known(name)
    if not isinstance(entry, Metric):
        return "none"
    plain = "sci" if entry.log or entry.scientific else "none"
    return {"ratio": "percentunit", "tokens": "short"}.get(entry.unit, plain)


def is_logarithmic(name: str) -> bool:
    """Return True if a metric has a logarithmic axis."""
    return getattr(known(name), "log", False)


# Queries


@dataclass(frozen=True)
class Scope:
    """The queries of a dashboard: all of them filter by its variables."""

    runs: str
    """The matcher that selects the series of the chosen runs."""

    def select(self, name: str, part: str = "", more: str = "") -> str:
        """The series of a metric."""
        return f'{known(name).exported}{part}{{job=~"$job",{self.runs},head=~"$head"{more}}}'

    def now(self, name: str, more: str = "", by: str = "run, head") -> str:
        """The present value of a gauge, one series a run."""
        return f"max by ({by}) ({self.select(name, more=more)})"

    def last(self, name: str, more: str = "", by: str = "run, head") -> str:
        """The last value of a gauge in the range of time, also of runs that have ended."""
        return f"max by ({by}) (last_over_time({self.select(name, more=more)}[$__range]))"

    def rate(self, name: str, by: str = "run, head") -> str:
        """The growth of a counter in a second."""
        return f"max by ({by}) (rate({self.select(name)}[$__rate_interval]))"

    def counted(self, name: str, by: str = "run, head", part: str = "") -> str:
        """The growth of a counter between two points of a graph."""
        return f"max by ({by}) (increase({self.select(name, part)}[$__rate_interval]))"

    def state(self) -> str:
        """The state of the last attempt at each run, as a label. The value is when the attempt began."""
        began = f"last_over_time({self.select('run_start_timestamp_seconds')}[$__range])"
        is_one = f"(last_over_time({self.select('run_status')}[$__range]) == 1)"
        once = f"max by (run, head, status) ({began} * on (job, instance, run, head) group_right () {is_one})"
        return f"topk by (run) (1, {once})"

    def age(self, of: Callable[[str], str]) -> str:
        """Seconds since the last heartbeat."""
        return f"time() - {of('heartbeat_timestamp_seconds')}"


def query(expr: str, legend: str = "", **options: Any) -> Json:
    """A query over the range of time."""
    return {"expr": expr, "legendFormat": legend, "range": True, "instant": False, "format": "time_series", **options}


def instant(expr: str, legend: str = "", **options: Any) -> Json:
    """A query at one moment."""
    return query(expr, legend, **{"range": False, "instant": True, **options})


# Panels


def panel(kind: str, title: str, description: str, queries: list[Json], size: tuple[int, int], **more: Any) -> Json:
    """The parts that all panels have. Their places follow from their sizes: columns of 24, and rows."""
    targets = [{"refId": chr(ord("A") + i), "datasource": SOURCE, **q} for i, q in enumerate(queries)]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "targets": targets,
        "gridPos": {"w": size[0], "h": size[1]},
        **more,
    }


def override(name: str, *, regexp: bool = False, **properties: Any) -> Json:
    """Properties of the series of a name; `__` stands for a dot in their names."""
    return {
        "matcher": {"id": "byRegexp" if regexp else "byName", "options": name},
        "properties": [{"id": key.replace("__", "."), "value": value} for key, value in properties.items()],
    }


def fixed(colour: str) -> Json:
    """One colour."""
    return {"mode": "fixed", "fixedColor": colour}


def heads(mode: str = "shades") -> list[Json]:
    """Give each head its colour, and its runs shades of that."""
    return [
        override(f"/^{head}\\b/", regexp=True, color={"mode": mode, "fixedColor": colour})
        for head, colour in COLOURS.items()
    ]


def steps(*limits: tuple[str, float | None]) -> Json:
    """Thresholds: each colour applies from a value on."""
    return {"mode": "absolute", "steps": [{"color": colour, "value": value} for colour, value in limits]}


def lines(
    title: str,
    description: str,
    queries: list[Json],
    *,
    unit: str = "none",
    size: tuple[int, int] = (12, 8),
    log: bool = False,
    overrides: list[Json] | None = None,
    custom: Json | None = None,
    **defaults: Any,
) -> Json:
    """Values over time."""
    scale = {"type": "log", "log": 10} if log else {"type": "linear"}
    style = {"lineWidth": 1, "fillOpacity": 0, "showPoints": "never", "scaleDistribution": scale, **(custom or {})}
    return panel(
        "timeseries",
        title,
        description,
        queries,
        size,
        fieldConfig={"defaults": {"unit": unit, "custom": style, **defaults}, "overrides": overrides or []},
        options={
            "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def stat(
    title: str,
    description: str,
    queries: list[Json],
    *,
    unit: str = "none",
    size: tuple[int, int] = (4, 4),
    thresholds: Json | None = None,
    overrides: list[Json] | None = None,
    text: str = "auto",
    **defaults: Any,
) -> Json:
    """Big numbers."""
    limits = thresholds or steps(("text", None))
    return panel(
        "stat",
        title,
        description,
        queries,
        size,
        fieldConfig={"defaults": {"unit": unit, "thresholds": limits, **defaults}, "overrides": overrides or []},
        options={
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "textMode": text,
        },
    )


def table(
    title: str,
    description: str,
    queries: list[Json],
    *,
    columns: dict[str, str],
    hidden: list[str],
    overrides: list[Json],
    size: tuple[int, int],
) -> Json:
    """A table with a row for each set of labels; `columns` are its fields in order, with their titles."""
    organize = {
        "excludeByName": dict.fromkeys(["Time", *hidden], True),
        "indexByName": {field: i for i, field in enumerate(columns)},
        "renameByName": columns,
    }
    return panel(
        "table",
        title,
        description,
        [{**q, "format": "table"} for q in queries],
        size,
        fieldConfig={
            "defaults": {"unit": "none", "custom": {"align": "auto", "filterable": True}},
            "overrides": overrides,
        },
        options={"showHeader": True, "cellHeight": "sm"},
        transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
    )


def row(title: str) -> Json:
    """A heading over panels."""
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": 24, "h": 1}}


def coloured(column: str, colours: dict[str, str]) -> Json:
    """Colour the words of a column."""
    options = {word: {"text": word, "color": colour, "index": i} for i, (word, colour) in enumerate(colours.items())}
    return override(
        column, mappings=[{"type": "value", "options": options}], custom__cellOptions={"type": "color-text"}
    )


def silence() -> Json:
    """Thresholds for the seconds since the last heartbeat."""
    return {"thresholds": steps(("green", None), ("orange", LOST_AFTER), ("red", STALLED_AFTER))}


# Dashboards


def variable(name: str, of: str, *, several: bool = True, sort: int = 1) -> Json:
    """A variable with the values of a label; `several`: whether one may choose more than one, or all."""
    values = f"label_values({known('run_info').exported}{of}, {name})"
    choice = {"current": {"text": ["All"], "value": ["$__all"]}, "allValue": ".+"} if several else {"current": {}}
    return {
        "type": "query",
        "name": name,
        "label": name.title(),
        "datasource": SOURCE,
        "query": values,
        "definition": values,
        "refresh": 2,
        "sort": sort,
        "multi": several,
        "includeAll": several,
        "options": [],
        "hide": 0,
        **choice,
    }


def variables(*, several: bool) -> list[Json]:
    """The variables of both dashboards. Runs without a name begin with their date, so the newest comes first."""
    source = {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1}
    return [
        {**source, "current": {}, "hide": 0, "includeAll": False, "multi": False, "options": [], "regex": ""},
        address_of_service(),
        variable("job", ""),
        variable("head", '{job=~"$job"}'),
        variable("run", '{job=~"$job",head=~"$head"}', several=several, sort=2),
    ]


def address_of_service() -> Json:
    """The variable with the address of `hilbert-monitor serve`, that links lead to: a text that one can change."""
    value = "http://localhost:8000"  # as in docker/compose.yml
    choice = {"text": value, "value": value}
    return {
        "type": "textbox",
        "name": "service",
        "label": "hilbert-monitor",
        "description": "Address of hilbert-monitor serve, for links",
        "query": value,
        "current": choice,
        "options": [{**choice, "selected": True}],
        "hide": 0,
    }


def blow_ups(scope: Scope) -> Json:
    """Annotations that mark blow-ups in all panels."""
    return {
        "name": "Blow-ups",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": f"{scope.counted('blowups_total', 'run, head, kind, severity')} > 0",
        "titleFormat": "{{kind}} {{severity}}",
        "textFormat": "{{head}} {{run}}",
        "tagKeys": "kind,severity,head",
    }


def link_to(uid: str, title: str, about: str) -> Json:
    """A link to the other dashboard with the same time, data source and jobs."""
    url = f"/d/{uid}?${{datasource:queryparam}}&${{job:queryparam}}&${{service:queryparam}}"
    return {"type": "link", "title": title, "tooltip": about, "icon": "dashboard", "url": url, "keepTime": True}


def link_to_service(title: str, path: str) -> Json:
    """A link to a page of the service."""
    about = "In hilbert-monitor serve: by update, with tokens and alerts"
    return {"type": "link", "title": title, "tooltip": about, "icon": "external link", **_elsewhere(path)}


def data_link(run: str) -> list[Json]:
    """Links from a series or a cell to the dashboard of its run, and to the run's page in the service."""
    settings = "${__url_time_range}&${datasource:queryparam}&${job:queryparam}&${service:queryparam}"
    return [
        {"title": "This run", "url": f"/d/hilbert-run?{settings}&var-run=${{{run}:percentencode}}"},
        {"title": "In hilbert-monitor", **_elsewhere(f"/runs/${{{run}:percentencode}}")},
    ]


def runbook(panel: Json) -> list[Json]:
    """The link of a panel to the runbook of the alert that is about what it shows."""
    asked = panel["targets"][0]["expr"] if panel.get("targets") else ""
    named = [(asked.find(f"hilbert_{name}{{"), alert) for name, alert in RUNBOOKS.items()]
    named += [(asked.find(f"hilbert_{name}_bucket{{"), alert) for name, alert in RUNBOOKS.items()]
    first = min((one for one in named if one[0] >= 0), default=None)
    return [{"title": f"Runbook {first[1]}", **_elsewhere(f"/runbooks/{first[1]}")}] if first else []


def _elsewhere(path: str) -> Json:
    return {"url": f"{SERVICE}{path}", "targetBlank": True}


def dashboard(uid: str, title: str, description: str, scope: Scope, panels: list[Json], **more: Any) -> Json:
    """A dashboard; its panels stand side by side while there is room."""
    x = y = height = 0
    for number, one in enumerate(panels, start=1):
        place = one["gridPos"]
        if x + place["w"] > 24:
            x, y, height = 0, y + height, 0
        one["id"], one["gridPos"] = number, {**place, "x": x, "y": y}
        if links := runbook(one):
            one["links"] = links
        x, height = x + place["w"], max(height, place["h"])
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": TAGS,
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [blow_ups(scope)]},
        "panels": panels,
        **more,
    }
