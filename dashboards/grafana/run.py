"""The dashboard Run: geometry, blow-ups, losses, what measuring costs, and health of one run."""

from __future__ import annotations

from panels import (
    STATES,
    Json,
    Scope,
    coloured,
    dashboard,
    fixed,
    instant,
    lines,
    link_to,
    override,
    panel,
    query,
    row,
    silence,
    stat,
    steps,
    table,
    told,
    unit_of,
    variables,
)

from hilbert_monitor.service.figures.style import COLOURS, GREY


def run() -> Json:
    """All that is known of one run."""
    scope = Scope(runs='run="$run"')
    return dashboard(
        "hilbert-run",
        "Hilbert / Run",
        "One run: the geometry of its steps, its blow-ups, its losses, what measuring costs, and whether it lives.",
        scope,
        [
            *at_a_glance(scope),
            row("Geometry"),
            *geometry(scope),
            row("What a step is worth"),
            *worth(scope),
            row("Blow-ups"),
            *blown_up(scope),
            row("Training"),
            *training(scope),
            row("Cost of measuring"),
            *cost(scope),
            row("Health"),
            *health(scope),
        ],
        templating={"list": variables(several=False)},
        links=[link_to("hilbert-compare", "Compare runs", "The paper's panels, for several runs")],
    )


def at_a_glance(scope: Scope) -> list[Json]:
    """The first line."""
    counts = f"sum by (run, head) ({scope.last('blowups_total', by='run, head, kind')})"
    state = stat(
        "State",
        f"{told('run_status')} That of its last attempt, as it last said.",
        [instant(scope.state(), "{{status}}")],
        text="name",
        overrides=[override(status, color=fixed(colour)) for status, colour in STATES.items()],
    )
    silent = [instant(scope.age(scope.last), "silent for")]
    return [
        state,
        stat("Silent for", told("heartbeat_timestamp_seconds"), silent, unit="s", **silence()),
        stat("Step", told("step"), [instant(scope.last("step"), "step")], unit="locale"),
        stat(
            "Blow-ups",
            f"{told('blowups_total')} Since its last attempt began.",
            [instant(counts, "blow-ups")],
            thresholds=steps(("green", None), ("red", 1)),
        ),
        single(scope, "step_diameter", "D(S)"),
        single(scope, "validation_loss", "Validation loss"),
        attempts(scope),
    ]


def single(scope: Scope, name: str, title: str) -> Json:
    """A number of the catalogue, as it was last."""
    return stat(title, told(name), [instant(scope.last(name), title)], unit=unit_of(name), decimals=3)


def attempts(scope: Scope) -> Json:
    """What the run says of itself."""
    labels = ("name", "head", "model", "seed", "attempt", "host", "port", "ranks", "torch", "version")
    return table(
        "Attempts",
        f"{told('run_info')} One line for each process that has worked at it in the time shown.",
        [instant(scope.last("run_info", by=", ".join(labels)))],
        columns={label: label.title() for label in labels},
        hidden=["Value", "Value #A"],
        overrides=[coloured("Head", COLOURS)],
        size=(24, 4),
    )


def measured(scope: Scope, title: str, names: dict[str, str], *, also: str = "", **more: object) -> Json:
    """Metrics of the catalogue over time, on the axis and in the unit of the first."""
    unit = unit_of(next(iter(names)))
    look = {"unit": unit, "log": unit == "sci", **more}
    queries = [query(scope.now(name), legend) for name, legend in names.items()]
    return lines(title, f"{told(*names)}{also}", queries, **look)  # type: ignore[arg-type]


def geometry(scope: Scope) -> list[Json]:
    """Diameter, ceiling, perturbation, and what they are made of."""
    diameter = {
        "step_diameter": "D(S)",
        "step_diameter_upper": "upper bound",
        "step_diameter_lower": "lower bound",
        "step_diameter_ceiling": "ceiling",
    }
    bounds = [
        override("upper bound", color=fixed(GREY), custom__lineWidth=0, custom__fillBelowTo="lower bound"),
        override("lower bound", color=fixed(GREY), custom__lineWidth=0),
        override("/bound$/", regexp=True, custom__fillOpacity=20),
        override("ceiling", color=fixed("red"), custom__lineStyle={"fill": "dash", "dash": [8, 6]}),
        override("D(S)", color=fixed(COLOURS["RowNorm"]), custom__lineWidth=2),
    ]
    near = {"thresholds": steps(("transparent", None), ("red", 1)), "custom": {"thresholdsStyle": {"mode": "line"}}}
    norms = {"row_norm_max": "of the increment", "gradient_row_norm_max": "of the gradient"}
    return [
        measured(scope, "D(S), its bracket and its ceiling", diameter, overrides=bounds, size=(12, 9)),
        distribution(scope),
        measured(
            scope,
            "Hilbert perturbation of the panel",
            {"perturbation_rms": "root mean square", "perturbation_max": "max"},
        ),
        measured(
            scope,
            "Saturation",
            {"step_diameter_saturation": "D(S) / ceiling"},
            also=" More than 1 is impossible by theory: something else writes to the head.",
            unit="percentunit",
            min=0,
            **near,
        ),
        measured(scope, "Largest row", norms, size=(6, 7)),
        measured(
            scope, "Hidden states", {"hidden_norm_max": "largest norm", "hidden_norm_rms": "RMS norm"}, size=(6, 7)
        ),
        measured(scope, "Balance of the gradient", {"gradient_balance": "balance"}, unit="sci", size=(6, 7)),
        measured(
            scope,
            "Rounding of D(S)",
            {"step_diameter_rounding": "bound"},
            also=" Only where the increment is a difference of weights, for optimizers that are not known.",
            unit="sci",
            size=(6, 7),
        ),
    ]


def worth(scope: Scope) -> list[Json]:
    """Descent, waste, and what other rulers say."""
    ends = {"lower": "at least", "upper": "at most"}
    shares = {"unit": "percentunit", "log": False}
    return [
        *(
            measured(
                scope,
                f"Step efficiency, for the {name}",
                {f"{prefix}_efficiency_{end}": text for end, text in ends.items()},
                also=" Measured with HilbertMonitor(efficiency=True).",
                size=(6, 7),
                **shares,
            )
            for name, prefix in {"moment": "moment", "gradient": "step"}.items()
        ),
        measured(
            scope,
            "Utilisation and gauge waste",
            {"perturbation_utilisation": "utilisation", "gauge_waste": "gauge waste"},
            size=(6, 7),
            **shares,
        ),
        measured(
            scope,
            "What other rulers say",
            {"spectral_norm": "spectral norm", "backward_bound": "backward bound"},
            size=(6, 7),
        ),
    ]


def distribution(scope: Scope) -> Json:
    """Every diameter, also those between two scrapes."""
    name = "step_diameter_distribution"
    counts = scope.counted(name, "le", part="_bucket")
    return panel(
        "heatmap",
        "D(S) of all steps",
        f"{told(name)} Nothing between two scrapes is lost. The colour says how many steps.",
        [query(counts, "{{le}}", format="heatmap")],
        (12, 9),
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


def blown_up(scope: Scope) -> list[Json]:
    """How many, when, and how bad the last of each kind was."""
    bars = {"drawStyle": "bars", "fillOpacity": 80, "stacking": {"mode": "normal", "group": "A"}}
    kinds = {"nonfinite": "dark-red", "ceiling": "red", "diameter": "orange", "perturbation": "purple"}
    colours = [override(kind, color=fixed(colour)) for kind, colour in kinds.items()]
    when = [query(f"round({scope.counted('blowups_total', 'run, head, kind')})", "{{kind}}")]
    last = ("blowup_step", "blowup_value", "blowup_expected")
    others = {"nonfinite_increments_total": "not finite", "skipped_steps_total": "skipped"}
    return [
        lines("Blow-ups by kind", told("blowups_total"), when, size=(8, 8), custom=bars, overrides=colours, min=0),
        table(
            "Last blow-up of each kind",
            told(*last),
            [instant(scope.last(name, by="run, head, kind")) for name in last],
            columns={"kind": "Kind", "Value #A": "Step", "Value #B": "Value", "Value #C": "Expected at most"},
            hidden=["run", "head"],
            overrides=[coloured("Kind", kinds), override("/Value|Expected/", regexp=True, unit="sci")],
            size=(8, 8),
        ),
        lines(
            "Steps that moved nothing, or not to numbers",
            f"{told(*others, 'nonfinite_rows')}",
            [
                *(query(f"round({scope.counted(name)})", legend) for name, legend in others.items()),
                query(scope.now("nonfinite_rows"), "rows that are not finite, last"),
            ],
            size=(8, 8),
            min=0,
        ),
    ]


def training(scope: Scope) -> list[Json]:
    """Losses and what drives them."""
    losses = {"train_loss": "training", "validation_loss": "validation"}
    return [
        measured(scope, "Loss", losses, decimals=3),
        measured(scope, "Learning rate of the head", {"learning_rate": "learning rate"}, unit="sci"),
    ]


def cost(scope: Scope) -> list[Json]:
    """What measuring takes."""
    by_part = f"{scope.rate('monitor_seconds_total', 'run, head, part')} / on (run, head) group_left ()"
    stacked = {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return [
        measured(
            scope,
            "Share of the time",
            {"monitor_share": "share"},
            min=0,
            thresholds=steps(("green", None), ("orange", 0.02), ("red", 0.05)),
            custom={"thresholdsStyle": {"mode": "dashed"}},
        ),
        lines(
            "Seconds a step, by part",
            f"{told('monitor_seconds_total')} Over the steps of the same time.",
            [query(f"{by_part} {scope.rate('steps_total')}", "{{part}}")],
            unit="s",
            custom=stacked,
            min=0,
        ),
    ]


def health(scope: Scope) -> list[Json]:
    """Whether it lives, how fast it goes, and what failed."""
    states = f"{scope.now('run_status', by='run, head, status')} == 1"
    mappings = [{"type": "value", "options": {"1": {"text": "yes", "index": 0}}}]
    return [
        panel(
            "state-timeline",
            "State over time",
            told("run_status"),
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
            told("heartbeat_timestamp_seconds", "stalled_after_seconds"),
            [query(scope.age(scope.now), "age"), query(scope.now("stalled_after_seconds"), "stalled from here on")],
            unit="s",
            size=(12, 6),
            overrides=[override("stalled from here on", color=fixed("red"))],
            min=0,
        ),
        lines(
            "Steps a second", told("steps_total"), [query(scope.rate("steps_total"), "steps")], unit="ops", size=(8, 7)
        ),
        lines(
            "Tokens a second",
            told("tokens_total"),
            [query(scope.rate("tokens_total"), "tokens")],
            unit="cps",
            size=(8, 7),
        ),
        lines(
            "Failures of the monitor, by sink",
            f"{told('monitor_failures_total')} Since its last attempt began.",
            [query(scope.now("monitor_failures_total", by="run, head, sink"), "{{sink}}")],
            size=(8, 7),
            min=0,
        ),
    ]
