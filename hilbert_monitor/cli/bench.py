"""``hilbert-monitor bench``: measure this package beside its opponents, one subcommand per subject."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import JsonFile, Quick, help_text

if TYPE_CHECKING:
    from rich.console import Console

    from hilbert_monitor.bench.suite import Job, Results

app = typer.Typer()


def _moved(form: str) -> Callable[[Any], None]:
    """Return a callback that refuses an old switch and names the form that replaced it."""

    def refuse(value: Any) -> None:
        if value:
            raise typer.BadParameter(f"this is a subcommand now: write hilbert-monitor bench {form}")

    return refuse


def _old(switch: str, form: str) -> Any:
    return typer.Option(switch, hidden=True, callback=_moved(form))


def bench(
    context: typer.Context,
    json: JsonFile = None,
    quick: Quick = False,
    optim: Annotated[bool, _old("--optim", "optimizers")] = False,
    faults: Annotated[bool, _old("--faults", "faults")] = False,
    service: Annotated[bool, _old("--service", "service")] = False,
    oracle: Annotated[bool, _old("--oracle", "oracle")] = False,
    increment: Annotated[list[Path] | None, _old("--increment", "geometry --increment FILE")] = None,
) -> None:
    """Measure speed, memory and detection beside opponents that run on the same machine.

    Without a subcommand this measures the geometry and the monitor: some minutes.

    Example: hilbert-monitor bench --json bench.json
    """
    subcommand = context.invoked_subcommand
    if subcommand is None:
        from hilbert_monitor.bench import suite

        _measure([*suite.geometry_jobs([], quick=quick), *suite.monitor_jobs(quick=quick)], json)
    elif json is not None or quick:
        option = "--quick" if quick else f"--json {json}"
        raise typer.BadParameter(
            f"options stand after the subcommand: write hilbert-monitor bench {subcommand} {option}"
        )


def geometry(
    increment: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure on this increment, a (V, d) tensor that torch.save wrote, instead of synthetic ones. May be"
            " given several times."
        ),
    ] = None,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Time the exact diameter D(S), its bounds and the Hilbert perturbation of a panel.

    The opponents are a search over all pairs of rows, one pass over the matrix, and the bare matrix product.

    Example: hilbert-monitor bench geometry --increment step50.pt --json geometry.json
    """
    from hilbert_monitor.bench import suite

    try:
        jobs = list(suite.geometry_jobs(increment or [], quick=quick))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--increment") from None
    _measure(jobs, json)


def sharded(
    large: Annotated[
        bool,
        typer.Option("--large", help="Also count bytes at 128,256 x 4,096: it takes 10 GB of memory and many minutes."),
    ] = False,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Count what 2, 4 and 8 ranks that share the rows of a step send each other, and time two ranks beside one.

    The opponents are a gather of all rows on every rank, and one process that has the work to itself. Every answer is
    checked against that of the whole matrix.

    Example: hilbert-monitor bench sharded --json sharded.json
    """
    from hilbert_monitor.bench import suite

    _measure(suite.sharded_jobs(quick=quick, large=large), json)


def optimizers(json: JsonFile = None, quick: Quick = False) -> None:
    """Time one step of RowNorm and of Muon, and measure the memory that RowNorm holds.

    The opponents are torch's fused AdamW, torch's Muon, and Muon written as a plain loop. For sharded matrices, the
    time and the traffic of Muon in two and four processes, beside a gather of every matrix on every rank.

    Example: hilbert-monitor bench optimizers --json optimizers.json
    """
    from hilbert_monitor.bench import suite

    _measure(suite.optimizer_jobs(quick=quick), json)


def monitor(json: JsonFile = None, quick: Quick = False) -> None:
    """Time training steps with the monitor and without it.

    The model has the size of the demo's; D(S) is computed every 10 updates and the panel every 500, as in the paper.

    Example: hilbert-monitor bench monitor --json monitor.json
    """
    from hilbert_monitor.bench import suite

    _measure(suite.monitor_jobs(quick=quick), json)


def service(json: JsonFile = None, quick: Quick = False) -> None:
    """Time the dashboard's service on 200 long runs and 10,000 short ones: it takes 6 GB of disk and some minutes.

    Each figure stands beside a limit that the service should keep, or beside TensorBoard.

    Example: hilbert-monitor bench service --json service.json
    """
    from rich.console import Console

    from hilbert_monitor.bench import suite
    from hilbert_monitor.bench.service import ServiceLoad

    console = Console()
    try:
        results, remarks = suite.run_service(ServiceLoad.quick() if quick else ServiceLoad(), console)
    except RuntimeError as error:
        console.print(str(error), style="red", soft_wrap=True)
        raise typer.Exit(1) from None
    suite.show(results, console)
    for remark in remarks:
        console.print(remark, style="yellow", soft_wrap=True)
    _write(results, json, console)


def faults(
    series: Annotated[
        bool,
        typer.Option(
            "--series",
            help="Put known faults into synthetic series of many kinds of noise instead, beside a z-score and a"
            " median/MAD detector: half an hour.",
        ),
    ] = False,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Put faults into small training runs, and see which detector notices them: twenty minutes.

    The blow-up rules stand beside detectors of spikes in the loss and in the gradient norm. Faults that leave no trace
    in the optimizer step are marked.

    Example: hilbert-monitor bench faults --json faults.json
    """
    from rich.console import Console

    from hilbert_monitor.bench import series_summary, suite
    from hilbert_monitor.bench.fault_summary import show
    from hilbert_monitor.bench.faults import TrialPlan
    from hilbert_monitor.bench.series import SeriesPlan

    console = Console()
    if series:
        judged = suite.run_series(SeriesPlan.quick() if quick else SeriesPlan(), console)
        series_summary.show(judged, console)
        _write(judged, json, console)
        return
    summary = suite.run_faults(TrialPlan.quick() if quick else TrialPlan(), console)
    show(summary, console)
    _write(summary, json, console)


def instabilities(
    folder: Annotated[
        Path, typer.Option(help="Folder of the study. Runs that have ended there are not trained again.")
    ] = Path("instabilities"),
    full: Annotated[
        bool, typer.Option("--full", help="The whole grid, on both bases and with three seeds: a night.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Train nothing; judge the runs that have ended.")] = False,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw how often each signal came first, as an SVG.")
    ] = None,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Train small models at a high learning rate, and see which signals come before their loss spikes: an hour.

    Every signal has the same detector, and a threshold from clean twins. The definitions are in docs/instabilities.md.
    It trains by a process of one thread for each processor, and goes on where it was stopped.

    Example: hilbert-monitor bench instabilities --folder instabilities --json instabilities.json
    """
    import torch
    from rich.console import Console

    from hilbert_monitor.bench import instabilities as study
    from hilbert_monitor.bench.instability_figure import drawing

    console = Console()
    plan = study.StudyPlan.quick() if quick else study.StudyPlan.full() if full else study.StudyPlan()
    if not table:
        torch.set_num_threads(1)
        study.train(plan, folder, lambda text: console.print(text, soft_wrap=True))
    found = study.results(plan, folder)
    study.show(found, console)
    if figure is not None:
        figure.write_text(drawing(found.leads))
    _write(found.plain(), json, console)


def guard(json: JsonFile = None, quick: Quick = False) -> None:
    """Put faults into small training runs under safeguards, and see what each costs: twenty minutes.

    A trust region at the head stands beside gradient clipping, StableAdamW's update clipping, and steps that are
    skipped by loss and gradient norm. What counts is the validation loss 50 and 200 steps later, beside a clean twin.

    Example: hilbert-monitor bench guard --json guard.json
    """
    from rich.console import Console

    from hilbert_monitor.bench import guard_summary, suite
    from hilbert_monitor.bench.guarding import GuardPlan

    console = Console()
    summary = suite.run_guards(GuardPlan.quick() if quick else GuardPlan(), console)
    guard_summary.show(summary, console)
    _write(summary, json, console)


def diameter_curve(
    runs: Annotated[
        Path, typer.Option(help="Folder for the run logs. Runs that are finished there are not made again.")
    ] = Path("diameter/runs"),
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Train small runs whose steps of the head are held to a range of diameters, and compare their losses.

    AdamW held by rows and by scaling stands beside RowNorm, SGD held by rows, and AdamW whose learning rate is lowered
    instead: a quarter of an hour. The dashboard's page Diameter and the report draw the curves from the runs.

    Example: hilbert-monitor bench diameter-curve --runs diameter/runs --json curve.json
    """
    from rich.console import Console

    from hilbert_monitor.bench import curve_summary, suite
    from hilbert_monitor.bench.diameter_curve import CurvePlan

    console = Console()
    try:
        rows = suite.run_curve(CurvePlan.quick() if quick else CurvePlan(), runs, console)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--runs") from None
    curve_summary.show(rows, console)
    console.print(f"see it with hilbert-monitor serve {runs}", soft_wrap=True)
    _write(rows, json, console)


def oracle(
    increment: Annotated[
        list[Path] | None,
        typer.Option(
            help="Use this matrix, a (V, d) tensor that torch.save wrote, instead of a synthetic gradient. May be given"
            " several times."
        ),
    ] = None,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """Bound the best descent that a step of a given diameter can make, with more and more time.

    The gap between the upper and the lower bound stands beside the gaps of simpler bounds, on the gradient of a softmax
    head.

    Example: hilbert-monitor bench oracle --json oracle.json
    """
    from rich.console import Console

    from hilbert_monitor.bench import suite

    console = Console()
    try:
        gaps = suite.run_oracle(increment or [], console, quick=quick)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--increment") from None
    _write(gaps, json, console)


def _measure(jobs: Iterable[Job], json: Path | None) -> None:
    """Run jobs, print their results, and write them if a file is given."""
    from rich.console import Console

    from hilbert_monitor.bench import suite

    console = Console()
    results = suite.run(list(jobs), console)
    suite.show(results, console)
    _write(results, json, console)


def _write(results: Results, json: Path | None, console: Console) -> None:
    from hilbert_monitor.bench import suite

    if json is not None:
        suite.write_json(results, json)
        console.print(f"written to {json}", soft_wrap=True)


app.callback(invoke_without_command=True, help=help_text(bench))(bench)
COMMANDS = geometry, sharded, optimizers, monitor, service, faults, guard, diameter_curve, instabilities, oracle
for command in COMMANDS:
    app.command(help=help_text(command))(command)
