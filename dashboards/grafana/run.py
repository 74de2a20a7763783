"""The dashboard Run: geometry, blow-ups, losses, cost of measuring, and health of one run."""

from __future__ import annotations

from panels import (
    BLOW_UPS,
    STATES,
    Json,
    Scope,
    coloured,
    dashboard,
    fixed,
    help_of,
    instant,
    is_logarithmic,
    lines,
    link_to,
    link_to_service,
    override,
    panel,
    query,
    row,
    silence,
    stat,
    steps,
    table,
    unit_of,
    variables,
)

from hilbert_monitor.runs.record import METRICS, Metric
from hilbert_monitor.service.figures.run_panels import PANELS, SECTIONS, RunPanel, Section, drawn_in
from hilbert_monitor.service.figures.style import COLOURS, GREY


def run() -> Json:
    """The dashboard of one run."""
    scope = Scope(runs='run="$run"')
    return dashboard(
        "hilbert-run",
        "Hilbert / Run",
        "One run: the geometry of its steps, its blow-ups, its losses, the cost of measuring, and whether it is alive.",
        scope,
        [
            *at_a_glance(scope),
            *(panel for section in SECTIONS for panel in (row(section), *drawn_panels(scope, section))),
            row("Health"),
            *health(scope),
        ],
        templating={"list": variables(several=False)},
        links=[
            link_to("hilbert-compare", "Compare runs", "The paper's panels, for several runs"),
            link_to_service("This run in hilbert-monitor", "/runs/${run:percentencode}"),
        ],
    )


def at_a_glance(scope: Scope) -> list[Json]:
    """The first row: state, step, blow-ups and last values."""
    pages = scope.last("blowups_total", ',severity="page"', "run, head, kind")
    counts = f"sum by (run, head) ({pages})"
    state = stat(
        "State",
        f"{help_of('run_status')} The state of the last attempt, as Prometheus last saw it.",
        [instant(scope.state(), "{{status}}")],
        text="name",
        overrides=[override(status, color=fixed(colour)) for status, colour in STATES.items()],
    )
    silent = [instant(scope.age(scope.last), "silent for")]
    return [
        state,
        stat("Silent for", help_of("heartbeat_timestamp_seconds"), silent, unit="s", **silence()),
        stat("Step", help_of("step"), [instant(scope.last("step"), "step")], unit="locale"),
        stat(
            "Pages",
            f"{help_of('blowups_total')} Pages since its last attempt began.",
            [instant(counts, "pages")],
            thresholds=steps(("green", None), ("red", 1)),
        ),
        single(scope, "step_diameter", "D(S)"),
        single(scope, "validation_loss", "Validation loss"),
        attempts(scope),
    ]


def single(scope: Scope, name: str, title: str) -> Json:
    """The last value of a metric."""
    return stat(title, help_of(name), [instant(scope.last(name), title)], unit=unit_of(name), decimals=3)


def attempts(scope: Scope) -> Json:
    """A table of the attempts at the run."""
    labels = ("name", "head", "model", "seed", "attempt", "host", "port", "ranks", "torch", "version")
    return table(
        "Attempts",
        f"{help_of('run_info')} One line for each process that trained it in the range of time.",
        [instant(scope.last("run_info", by=", ".join(labels)))],
        columns={label: label.title() for label in labels},
        hidden=["Value", "Value #A"],
        overrides=[coloured("Head", COLOURS)],
        size=(24, 4),
    )


# Panels of a run's page


def drawn_panels(scope: Scope, section: Section) -> list[Json]:
    """The panels of a section: those of a run's page, and those that show more than the metrics of a step."""
    of_the_page = [measured(scope, panel) for panel in PANELS if panel.section == section]
    if section == "Geometry":
        return [of_the_page[0], distribution(scope), *of_the_page[1:]]
    if section == "Blow-ups":
        return [*blow_ups(scope), *of_the_page]
    if section == "Cost of measuring":
        return [*of_the_page, seconds_by_part(scope)]
    return of_the_page


def measured(scope: Scope, panel: RunPanel) -> Json:
    """A panel of a run's page: its metrics over time, in the unit of the first."""
    metrics = [metric for metric in drawn_in(panel) if metric in METRICS]
    legends = {metric.name: legend(metric, metrics) for metric in metrics}
    return lines(
        panel.title,
        f"{panel.help} {help_of(*legends)}",
        [query(scope.now(name), text) for name, text in legends.items()],
        unit=unit_of(metrics[0].name),
        log=any(is_logarithmic(name) for name in legends),
        overrides=[look for metric in metrics for look in looks(metric, legends)],
        size=SIZES.get(panel.section, (12, 8)) if panel.on_page else (6, 7),
        **MORE.get(panel.name, {}),
    )


SIZES = {"What a step is worth": (8, 8)}
"""Sizes of panels, where a section does not have two beside each other."""
MORE: dict[str, Json] = {
    "saturation": {
        "min": 0,
        "thresholds": steps(("transparent", None), ("red", 1)),
        "custom": {"thresholdsStyle": {"mode": "line"}},
    },
    "cost": {
        "min": 0,
        "thresholds": steps(("green", None), ("orange", 0.02), ("red", 0.05)),
        "custom": {"thresholdsStyle": {"mode": "dashed"}},
    },
    "loss": {"decimals": 3},
    "nonfinite": {"min": 0},
}
"""Thresholds and other looks of panels, by their names."""
ENDS = {"_lower": "at least", "_upper": "at most", "_min": "at least", "_max": "at most"}


def legend(metric: Metric, metrics: list[Metric]) -> str:
    """The label of a metric; with its end, if it shares the label with another."""
    if [other.label for other in metrics].count(metric.label) == 1:
        return metric.label
    (end,) = (text for suffix, text in ENDS.items() if metric.name.endswith(suffix))
    return f"{metric.label}, {end}"


def looks(metric: Metric, legends: dict[str, str]) -> list[Json]:
    """How the line of a metric looks."""
    name = legends[metric.name]
    if metric.line == "reference":
        return [override(name, color=fixed(GREY), custom__lineStyle={"fill": "dash", "dash": [8, 6]})]
    if metric.line in ("dotted", "other"):
        return [override(name, custom__lineStyle={"fill": "dot", "dash": [0, 6]})]
    if metric.line == "strong":
        return [override(name, custom__lineWidth=2)]
    if metric.line == "band":
        area = {"color": fixed(GREY), "custom__lineWidth": 0, "custom__fillOpacity": 20}
        lower = legends.get(metric.name.replace("_upper", "_lower").replace("_max", "_min"), name)
        return [override(name, **area, **({} if lower == name else {"custom__fillBelowTo": lower}))]
    return []


# Panels that show more than the metrics of a step


def distribution(scope: Scope) -> Json:
    """A heatmap of the diameters of all steps, also those between two scrapes."""
    name = "step_diameter_distribution"
    counts = scope.counted(name, "le", part="_bucket")
    return panel(
        "heatmap",
        "D(S) of all steps",
        f"{help_of(name)} No step between two scrapes is lost. The colour is the number of steps.",
        [query(counts, "{{le}}", format="heatmap")],
        (12, 8),
        fieldConfig={
            "defaults": {"unit": "short", "custom": {"scaleDistribution": {"type": "linear"}}},
            "overrides": [],
        },
        options={
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64},
            "filterValues": {"le": 1e-9},
            "rowsFrame": {"layout": "auto"},
            "showValue": "never",
            "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": False},
            "yAxis": {"axisPlacement": "left", "unit": "sci", "reverse": False},
            "cellValues": {"unit": "short"},
            "legend": {"show": True},
        },
    )


def blow_ups(scope: Scope) -> list[Json]:
    """How many blow-ups there were, when, and how bad the last of each kind was."""
    bars = {"drawStyle": "bars", "fillOpacity": 80, "stacking": {"mode": "normal", "group": "A"}}
    colours = [override(kind, color=fixed(colour)) for kind, colour in BLOW_UPS.items()]
    when = [query(f"round({scope.counted('blowups_total', 'run, head, kind')})", "{{kind}}")]
    last = ("blowup_step", "blowup_value", "blowup_expected")
    others = {
        "nonfinite_increments_total": "not finite",
        "skipped_steps_total": "skipped",
        "clipped_steps_total": "held back",
    }
    return [
        lines("Blow-ups by kind", help_of("blowups_total"), when, size=(6, 7), custom=bars, overrides=colours, min=0),
        table(
            "Last blow-up of each kind",
            help_of(*last),
            [instant(scope.last(name, by="run, head, kind, severity")) for name in last],
            columns={
                "kind": "Kind",
                "severity": "Severity",
                "Value #A": "Step",
                "Value #B": "Value",
                "Value #C": "Usual",
            },
            hidden=["run", "head"],
            overrides=[coloured("Kind", BLOW_UPS), override("/Value|Usual/", regexp=True, unit="sci")],
            size=(6, 7),
        ),
        lines(
            "Steps that were skipped, held back or not finite",
            help_of(*others),
            [query(f"round({scope.counted(name)})", text) for name, text in others.items()],
            size=(6, 7),
            min=0,
        ),
    ]


def seconds_by_part(scope: Scope) -> Json:
    """What each part of measuring takes of a step."""
    by_part = f"{scope.rate('monitor_seconds_total', 'run, head, part')} / on (run, head) group_left ()"
    return lines(
        "Seconds a step, by part",
        f"{help_of('monitor_seconds_total')} Over the steps of the same time.",
        [query(f"{by_part} {scope.rate('steps_total')}", "{{part}}")],
        unit="s",
        custom={"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}},
        min=0,
    )


def health(scope: Scope) -> list[Json]:
    """Whether the run is alive, how fast it is, and what failed in the monitor."""
    states = f"{scope.now('run_status', by='run, head, status')} == 1"
    mappings = [{"type": "value", "options": {"1": {"text": "yes", "index": 0}}}]
    return [
        panel(
            "state-timeline",
            "State over time",
            help_of("run_status"),
            [query(states, "{{status}}")],
            (12, 6),
            fieldConfig={
                "defaults": {"unit": "none", "mappings": mappings, "custom": {"fillOpacity": 80}},
                "overrides": [override(status, color=fixed(colour)) for status, colour in STATES.items()],
            },
            options={"showValue": "never", "mergeValues": True, "legend": {"showLegend": False}},
        ),
        lines(
            "Age of the heartbeat",
            help_of("heartbeat_timestamp_seconds", "stalled_after_seconds"),
            [query(scope.age(scope.now), "age"), query(scope.now("stalled_after_seconds"), "stalled from here")],
            unit="s",
            size=(12, 6),
            overrides=[override("stalled from here", color=fixed("red"))],
            min=0,
        ),
        lines(
            "Steps a second",
            help_of("steps_total"),
            [query(scope.rate("steps_total"), "steps")],
            unit="ops",
            size=(8, 7),
        ),
        lines(
            "Tokens a second",
            help_of("tokens_total"),
            [query(scope.rate("tokens_total"), "tokens")],
            unit="cps",
            size=(8, 7),
        ),
        lines(
            "Failures of the monitor, by sink",
            f"{help_of('monitor_failures_total')} Since its last attempt began.",
            [query(scope.now("monitor_failures_total", by="run, head, sink"), "{{sink}}")],
            size=(8, 7),
            min=0,
        ),
    ]
