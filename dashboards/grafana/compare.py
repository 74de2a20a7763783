"""The dashboard Compare: the paper's panels, the ratio of the two heads, the spread over seeds, a table of runs."""

from __future__ import annotations

from panels import (
    STATES,
    Json,
    Scope,
    coloured,
    dashboard,
    data_link,
    fixed,
    heads,
    help_of,
    instant,
    is_logarithmic,
    lines,
    link_to,
    link_to_service,
    override,
    query,
    row,
    silence,
    stat,
    steps,
    table,
    unit_of,
    variables,
)

from hilbert_monitor.service.figures.style import COLOURS

BASE, OURS = "AdamW", "RowNorm"
"""The optimizers of the LM head that the paper compares."""
PAPER = {
    "validation_loss": "Validation loss",
    "train_loss": "Training loss",
    "step_diameter": "D(S)",
    "perturbation_rms": "Hilbert RMS",
}
"""The metrics of the paper's figures, with their titles."""
GEOMETRY = ("step_diameter", "perturbation_rms")
CLOCK = (
    "Runs are compared at the same moment, not at the same update, so start them together. `hilbert-monitor serve`"
    " compares by update."
)


def compare() -> Json:
    """The dashboard that compares runs."""
    scope = Scope(runs='run=~"$run"')
    return dashboard(
        "hilbert-compare",
        "Hilbert / Compare",
        "Step geometry and losses of several runs: the paper's panels, AdamW over RowNorm, the spread over seeds.",
        scope,
        [
            row(f"{BASE} over {OURS}"),
            *(ratio_now(scope, name) for name in GEOMETRY),
            same_panel(scope),
            ratios(scope),
            row("Runs"),
            *(each_run(scope, name) for name in PAPER),
            row("Mean and spread over seeds"),
            *(spread(scope, name) for name in PAPER if name != "train_loss"),
            row("All runs"),
            runs(scope),
        ],
        templating={"list": variables(several=True)},
        links=[
            link_to("hilbert-run", "One run", "Geometry, cost and health of one run"),
            link_to_service("hilbert-monitor", "/"),
        ],
    )


def over(scope: Scope, name: str, *, last: bool) -> str:
    """The mean over the runs of BASE, divided by that over the runs of OURS."""
    of = scope.last if last else scope.now
    above, below = (of(name, more=f',head="{head}"') for head in (BASE, OURS))
    return f"avg({above}) / avg({below})"


def ratio_now(scope: Scope, name: str) -> Json:
    """The present ratio of a metric, as a big number."""
    return stat(
        f"{PAPER[name]}, {BASE} / {OURS}",
        f"{help_of(name)} Mean of the {BASE} runs over mean of the {OURS} runs, each by its last value.",
        [instant(over(scope, name, last=True), PAPER[name])],
        decimals=2,
        size=(4, 8),
        thresholds=steps((COLOURS[OURS], None), (COLOURS[BASE], 1)),
    )


def ratios(scope: Scope) -> Json:
    """The ratios over time."""
    return lines(
        f"{BASE} / {OURS}",
        f"{help_of(*GEOMETRY)} Mean of the {BASE} runs over mean of the {OURS} runs. {CLOCK}",
        [query(over(scope, name, last=False), PAPER[name]) for name in GEOMETRY],
        size=(12, 8),
        log=True,
        decimals=2,
    )


def same_panel(scope: Scope) -> Json:
    """The number of different validation panels: with more than one, perturbations cannot be compared."""
    different = scope.last("run_info", more=',panel!=""', by="panel")
    return stat(
        "Validation panels",
        "How many different panels (fixed sets of validation positions) these runs have. With more than one, the"
        " Hilbert RMS of one run cannot be compared with that of another.",
        [instant(f"count({different})", "panels")],
        size=(4, 8),
        thresholds=steps(("green", None), ("red", 2)),
    )


def each_run(scope: Scope, name: str) -> Json:
    """A metric of every run over time."""
    unit = unit_of(name)
    return lines(
        PAPER[name],
        help_of(name),
        [query(scope.now(name), "{{head}} {{run}}")],
        unit=unit,
        log=is_logarithmic(name),
        overrides=heads(),
        links=data_link("__field.labels.run"),
    )


def spread(scope: Scope, name: str) -> Json:
    """The mean over the runs of a head, and one standard deviation to both sides."""
    unit, value = unit_of(name), scope.now(name)
    mean, deviation = f"avg by (head) ({value})", f"stddev by (head) ({value})"
    bands = [
        look
        for head, colour in COLOURS.items()
        for look in (
            override(f"{head} mean", color=fixed(colour), custom__lineWidth=2),
            override(f"{head} + deviation", color=fixed(colour), custom__fillBelowTo=f"{head} - deviation"),
            override(f"{head} - deviation", color=fixed(colour)),
        )
    ]
    beside = override("/deviation$/", regexp=True, custom__lineWidth=0, custom__fillOpacity=15)
    return lines(
        f"{PAPER[name]}, mean and deviation",
        f"{help_of(name)} Mean over the runs of a head, and one standard deviation of theirs to both sides. {CLOCK}",
        [
            query(mean, "{{head}} mean"),
            query(f"{mean} + {deviation}", "{{head}} + deviation"),
            query(f"({mean} - {deviation}) > 0", "{{head}} - deviation"),  # a logarithmic axis has nothing below
        ],
        unit=unit,
        log=is_logarithmic(name),
        overrides=[beside, *bands],
        size=(8, 8),
    )


def runs(scope: Scope) -> Json:
    """A table of the runs, also of those that have ended."""
    numbers = {"step": "Step", **PAPER}
    values = {f"Value #{chr(ord('D') + i)}": title for i, title in enumerate(numbers.values())}
    columns = {
        "run": "Run",
        "head": "Head",
        "name": "Name",
        "model": "Model",
        "seed": "Seed",
        "status": "State",
        "Value #B": "Began",
        "Value #C": "Silent for",
        **values,
    }
    return table(
        "Runs",
        f"{help_of('run_info')} The state is what the run or the service last said, and how long ago the run was seen:"
        " without the service, a run that was killed stays 'running' and is silent.",
        [
            instant(scope.last("run_info", by="run, head, name, model, seed")),
            instant(f"1000 * {scope.state()}"),
            instant(scope.age(scope.last)),
            *(instant(scope.last(name)) for name in numbers),
        ],
        columns=columns,
        hidden=["Value #A"],
        overrides=[
            override("Run", links=data_link("__value.text")),
            coloured("State", STATES),
            coloured("Head", COLOURS),
            override("Began", unit="dateTimeAsIso"),
            override("Silent for", unit="s", **silence()),
            *(override(PAPER[name], unit=unit_of(name)) for name in PAPER),
        ],
        size=(24, 10),
    )
