"""Routes of the page that shows what a diameter buys: runs whose steps were held to a range of diameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from hilbert_monitor.runs.diameter_sweep import KEY
from hilbert_monitor.runs.json_values import plain
from hilbert_monitor.service.figures import diameter_curves
from hilbert_monitor.service.figures.diameter_curves import DiameterSweep
from hilbert_monitor.service.following.snapshot import RunSnapshot
from hilbert_monitor.service.following.text import csv_lines

from .answers import newest, stamp
from .compare_schema import DiameterAnswer
from .figure_answers import spread_answer
from .parameters import ModelName, ok, problems
from .responder import Responder

COLUMNS = ("curve", "allowed", "runs", "loss", "loss_deviation", "made", "made_deviation")


def add_diameter(app: FastAPI, responder: Responder) -> None:
    """Add the routes."""

    def swept() -> list[RunSnapshot]:
        """The runs that say that they are points of a sweep, the newest first; not the archived ones."""
        responder.notebook.refresh()
        known = responder.index.runs
        archived = responder.notebook.archived(known)
        runs = [run for run in known.values() if run.attempts and KEY in run.info.config and run.id not in archived]
        return sorted(runs, key=newest, reverse=True)

    def sweeps(runs: list[RunSnapshot]) -> dict[str, DiameterSweep]:
        """The sweeps of all models, that of the newest run first."""
        series = [responder.figures.series(run) for run in runs]
        found = {sweep.model: sweep for sweep in diameter_curves.diameter_sweeps(series)}
        return {model: found[model] for model in dict.fromkeys(run.model for run in series) if model in found}

    @app.get(
        "/api/diameter",
        tags=["figures"],
        summary="Final losses over the diameter that steps were allowed",
        responses=ok(DiameterAnswer),
    )
    def diameter(request: Request, model: ModelName = "") -> Response:
        version, runs = responder.index.version, swept()
        key = (model, tuple(map(stamp, runs)), tuple(run.status for run in runs))
        return responder.cached(request, key, lambda: _answer(sweeps(runs), model, version))

    @app.get(
        "/api/diameter.csv",
        tags=["figures"],
        summary="Every point of its curves",
        response_class=StreamingResponse,
        responses=problems(inline=True),
    )
    def diameter_csv(model: ModelName = "") -> Response:
        sweep = _chosen(sweeps(swept()), model)
        headers = {"Content-Disposition": 'attachment; filename="diameter.csv"'}
        return StreamingResponse(csv_lines(COLUMNS, _rows(sweep)), media_type="text/csv", headers=headers)


def _chosen(found: dict[str, DiameterSweep], model: str) -> DiameterSweep | None:
    """The sweep of a model, by default of the newest run."""
    return found.get(model or next(iter(found), ""))


def _answer(found: dict[str, DiameterSweep], model: str, version: int) -> dict[str, Any]:
    sweep = _chosen(found, model)
    answer: dict[str, Any] = {"models": sorted(found), "model": sweep.model if sweep else None, "version": version}
    if sweep is None:
        return {**answer, "curves": [], "notes": [], "figures": {}}
    figures = {name: draw(sweep) for name, draw in diameter_curves.FIGURES.items()}
    curves = [
        {
            "name": name,
            "colour": diameter_curves.look(name, list(sweep.curves))["color"],
            "points": [
                {
                    "allowed": point.allowed if diameter_curves.is_limited(point) else None,
                    "loss": spread_answer(point.loss),
                    "made": spread_answer(point.made),
                    "runs": list(point.runs),
                }
                for point in points
            ],
        }
        for name, points in sweep.curves.items()
    ]
    return {**plain({**answer, "curves": curves, "notes": list(sweep.notes)}), "figures": figures}


def _rows(sweep: DiameterSweep | None) -> Iterator[tuple[Any, ...]]:
    for name, points in sweep.curves.items() if sweep else ():
        for point in points:
            allowed = point.allowed if diameter_curves.is_limited(point) else None
            numbers = (point.loss.mean, point.loss.deviation, point.made.mean, point.made.deviation)
            yield name, allowed, len(point.runs), *numbers
