"""The service as an app: pages, the JSON API and the stream of events.

`answers` and `figure_answers` work out what an answer says. This module checks requests, and encodes, caches and sends
the answers. Routes that compute are plain functions, which FastAPI runs in threads beside the event loop.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from hilbert_monitor import __version__
from hilbert_monitor.runs.alerts import KINDS
from hilbert_monitor.runs.run import Run, ShownStatus
from hilbert_monitor.service.figures import compare_figures
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.following.text import csv_lines

from . import answers, compare_schema, run_columns, schema, search
from .assets import PAGE, Assets
from .figure_answers import choose
from .notebook import Notebook
from .parameters import (
    POINTS,
    SEARCH,
    ColumnNames,
    CompareChoices,
    CompareOptions,
    ComparePanelName,
    Fields,
    Id,
    Ids,
    ModelName,
    Options,
    RunPanelName,
    failed,
    ids,
    misread,
    ok,
    problems,
    refused,
)
from .prometheus import PrometheusExport
from .prometheus_routes import add_prometheus
from .remark_routes import add_remarks
from .responder import Responder, json_response
from .security import LOOPBACK, AccessControl

DESCRIPTION = """Runs of hilbert-monitor, as they are now. No request changes a run; notes, tags and acknowledgements of
alerts are kept beside them.

Numbers that are nan or infinite are the strings "nan", "inf" and "-inf"; in figures, for plotly, they are null.
Where the service has a token, send it as `Authorization: Bearer TOKEN`."""
RETRY = 1000
"""Milliseconds after which a browser that lost its connection reconnects."""


class CSV(StreamingResponse):
    """A CSV file, written while it is sent."""

    media_type = "text/csv"


def create_app(
    index: Index,
    *,
    token: str | None = None,
    allowed_hosts: Collection[str] | None = LOOPBACK,
    reexport: bool = False,
    notebook: Notebook | None = None,
) -> FastAPI:
    """The app over an index. The caller starts and stops the index.

    Args:
        index: the runs.
        token: the secret that a visitor must send; None for no secret.
        allowed_hosts: host names that requests may use; None for any.
        reexport: whether /metrics has the runs too that serve their metrics themselves.
        notebook: what people say about the runs; None for a service that keeps nothing.
    """
    app = FastAPI(
        title="hilbert-monitor",
        version=__version__,
        description=DESCRIPTION,
        openapi_url="/api/openapi.json",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        responses=problems(),
    )
    app.add_middleware(AccessControl, token=token, hosts=allowed_hosts)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, misread)
    app.add_exception_handler(Exception, failed)
    responder = Responder(index, notebook or Notebook())
    _add_health(app, index)
    _add_runs(app, responder)
    _add_columns(app, responder)
    add_remarks(app, responder)
    _add_figures(app, responder)
    _add_events(app, index)
    export = PrometheusExport(lambda: index.runs.values(), everything=reexport)
    add_prometheus(app, export, lambda: index.problem)
    _add_pages(app, Assets())
    return app


def _csv(name: str, lines: Iterator[str]) -> CSV:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:80]
    return CSV(lines, headers={"Content-Disposition": f'attachment; filename="{safe}.csv"'})


# Routes


def _add_health(app: FastAPI, index: Index) -> None:
    @app.get(
        "/healthz",
        tags=["service"],
        summary="Whether the service works",
        responses={**ok(schema.Health), 503: {"model": schema.Problem, "description": "The runs are not followed."}},
    )
    def health(request: Request) -> Response:
        """Answered without a token."""
        if index.problem:
            raise HTTPException(503, index.problem)
        state = {"status": "ok", "version": __version__, "runs": len(index.runs), "progress": index.progress}
        return json_response(request, state)


def _add_runs(app: FastAPI, responder: Responder) -> None:
    index, notebook = responder.index, responder.notebook

    @app.get("/api/runs", tags=["runs"], summary="The runs, the newest first", responses=ok(schema.Runs))
    def runs(
        request: Request,
        q: Annotated[str, Query(max_length=300, description=SEARCH, examples=["rownorm lr=0.1"])] = "",
        status: Annotated[ShownStatus | None, Query(description="Only runs in this state.")] = None,
        optimizer: Annotated[str, Query(max_length=100, description="Only runs with this LM head.")] = "",
        model: ModelName = "",
        limit: Annotated[
            int | None, Query(ge=1, le=10_000, description="How many runs, at most; without it, all of them.")
        ] = None,
        after: Annotated[
            str, Query(max_length=300, description="Only runs after this one: the `next` of the page before.")
        ] = "",
    ) -> Response:
        version, known = index.version, index.runs
        if after:
            responder.run(after, known)
        notebook.refresh()
        fields, wanted = {"status": status, "optimizer": optimizer, "model": model}, search.parse(q)

        def is_wanted(run: Run) -> bool:
            named = {
                "status": run.status,
                "optimizer": run.info.head_optimizer or "unknown",
                "model": run.model,
            }
            if any(value and value != named[name] for name, value in fields.items()):
                return False
            return search.SearchedRun(run, responder.settings.of(run), notebook.of(run)).matches(wanted)

        def make() -> dict[str, Any]:
            filtered = is_wanted if wanted or any(fields.values()) else None
            page = answers.runs(known, filtered, limit=limit, after=after)
            about = {"root": str(index.given.absolute()), "progress": index.progress, "version": version}
            return {**about, "count": page.count, "next": page.next, "runs": page.runs}

        key = (q, status, optimizer, model, limit, after, version, index.progress, notebook.version)
        return responder.cached(request, key, make)

    @app.get("/api/runs/{id}", tags=["runs"], summary="A run, without its curves", responses=ok(schema.RunAnswer))
    def run(request: Request, id: Id) -> Response:
        notebook.refresh()
        snapshot = responder.run(id)
        remarks, key = notebook.of(snapshot), (*answers.stamp(snapshot), notebook.version)
        return responder.cached(request, key, lambda: answers.run(snapshot, remarks))

    @app.get(
        "/api/runs/{id}/records",
        tags=["runs"],
        summary="Columns of a run's records",
        responses=ok(schema.Records, {"text/csv": {"schema": {"type": "string"}}}),
    )
    def records(
        request: Request,
        id: Id,
        fields: Fields = "",
        first: Annotated[int | None, Query(ge=-(2**62), le=2**62, description="The first step.")] = None,
        last: Annotated[
            int | None, Query(ge=-(2**62), le=2**62, description="The last step, which is included.")
        ] = None,
        points: Annotated[int, Query(ge=10, le=20_000, description=POINTS)] = 2000,
        format: Annotated[Literal["json", "csv"], Query(description="CSV has every record.")] = "json",
    ) -> Response:
        snapshot = responder.run(id)
        try:
            names = answers.fields(snapshot.table, [name for name in fields.split(",") if name][:64])
        except ValueError as error:
            raise HTTPException(422, f"fields: {error}.") from None
        rows = answers.rows_of(snapshot.table, first, last)
        if format == "csv":
            return _csv(id, csv_lines(("step", *names), answers.csv_rows(snapshot.table, names, rows)))
        key = (*answers.stamp(snapshot), tuple(names), rows.start, rows.stop, points)
        return responder.cached(request, key, lambda: answers.records(snapshot, names, rows, points))

    @app.get(
        "/api/runs/{id}/layers", tags=["runs"], summary="The layers of a run over time", responses=ok(schema.Layers)
    )
    def layers(request: Request, id: Id) -> Response:
        """Empty for a run that does not measure its layers."""
        snapshot = responder.run(id)
        key = answers.stamp(snapshot)
        return responder.cached(request, key, lambda: answers.layers(snapshot, index.root))

    @app.get("/api/alerts", tags=["runs"], summary="Alerts, the newest first", responses=ok(schema.Alerts))
    def alerts(
        request: Request,
        run: Annotated[str, Query(max_length=300, description="Only alerts of the run with this id.")] = "",
        kind: Annotated[
            str,
            Query(max_length=100, description=f"Only alerts of this kind: {', '.join(KINDS)}.", examples=["diameter"]),
        ] = "",
        state: Annotated[
            answers.AlertState,
            Query(description="Those that nobody has acknowledged, of runs that are not archived; or the others."),
        ] = "all",
        limit: Annotated[int, Query(ge=1, le=1000, description="How many, at most.")] = 200,
    ) -> Response:
        notebook.refresh()
        version, known = index.version, index.runs
        return responder.cached(
            request,
            (run, kind, state, limit, version, notebook.version),
            lambda: answers.alerts(known, notebook.of, run=run, kind=kind, state=state, limit=limit),
        )

    @app.get("/api/difference", tags=["runs"], summary="Settings of two runs", responses=ok(schema.Changes))
    def difference(
        request: Request,
        a: Annotated[str, Query(max_length=300, description="Id of a run.")],
        b: Annotated[str, Query(max_length=300, description="Id of another.")],
    ) -> Response:
        return json_response(request, answers.difference(responder.run(a), responder.run(b)))


def _add_columns(app: FastAPI, responder: Responder) -> None:
    index, settings = responder.index, responder.settings

    @app.get("/api/columns", tags=["runs"], summary="Columns of the table of runs", responses=ok(schema.RunColumns))
    def columns(request: Request) -> Response:
        known = index.runs
        settings.forget_others(known)
        return responder.cached(request, (index.version,), lambda: run_columns.available(known, settings))

    @app.get("/api/columns/cells", tags=["runs"], summary="Their cells", responses=ok(schema.Cells))
    def cells(request: Request, name: ColumnNames) -> Response:
        version, known = index.version, index.runs

        def make() -> dict[str, Any]:
            return {"version": version, "columns": run_columns.cells(known.values(), name, settings)}

        return responder.cached(request, (tuple(name), version), make)


def _add_figures(app: FastAPI, responder: Responder) -> None:
    index, figures, notebook = responder.index, responder.figures, responder.notebook

    def compared(known: Mapping[str, Run], named: str) -> Mapping[str, Run]:
        """The runs to choose from: not the archived ones, unless runs are named."""
        notebook.refresh()
        archived = () if named else notebook.archived(known)
        return {id: run for id, run in known.items() if id not in archived} if archived else known

    @app.get("/api/runs/{id}/figures", tags=["figures"], summary="Figures of a run", responses=ok(schema.RunFigures))
    def run_figures_(request: Request, id: Id, options: Options) -> Response:
        snapshot = responder.run(id)
        key = (*answers.stamp(snapshot), options)
        return responder.cached(request, key, lambda: figures.of_run(snapshot, options))

    @app.get(
        "/api/runs/{id}/panels/{panel}.csv",
        tags=["figures"],
        summary="Every value of a panel",
        response_class=CSV,
        responses=problems(inline=True),
    )
    def run_csv(
        id: Id, panel: Annotated[RunPanelName, Path(description="One of its figures.")], options: Options
    ) -> Response:
        return _csv(f"{id}-{panel}", figures.run_csv(responder.run(id), panel, options))

    @app.get(
        "/api/compare",
        tags=["figures"],
        summary="Runs of a model, compared",
        responses=ok(compare_schema.ComparisonAnswer),
    )
    def compare(
        request: Request, options: CompareOptions, choices: CompareChoices, model: ModelName = "", runs: Ids = ""
    ) -> Response:
        version, known = index.version, index.runs
        choice = choose(compared(known, runs), model, ids(runs))
        key = (*choice.versions, options, choices)
        return responder.cached(request, key, lambda: figures.compared(choice, options, choices, version))

    @app.get(
        "/api/compare/{panel}.csv",
        tags=["figures"],
        summary="Every value of a panel",
        response_class=CSV,
        responses=problems(inline=True),
    )
    def compare_csv(
        panel: Annotated[ComparePanelName, Path(description="One of the figures.")],
        options: CompareOptions,
        choices: CompareChoices,
        model: ModelName = "",
        runs: Ids = "",
    ) -> Response:
        choice = choose(compared(index.runs, runs), model, ids(runs))
        return _csv(f"{choice.model or 'runs'}-{panel}", figures.compared_csv(choice, panel, options, choices))

    @app.get("/api/themes", tags=["figures"], summary="Plotly's templates", responses=ok(schema.Themes))
    def themes(request: Request) -> Response:
        return responder.cached(
            request, (), lambda: {name: compare_figures.template(name) for name in ("light", "dark")}
        )


def _add_events(app: FastAPI, index: Index) -> None:
    @app.get(
        "/api/events",
        tags=["events"],
        summary="Events of all runs, as they happen",
        response_class=EventSourceResponse,
        responses=problems(inline=True),
    )
    async def events(
        after: Annotated[
            str | None,
            Query(
                max_length=100, description="Id of the last event that the client has: those after it are sent first."
            ),
        ] = None,
        last_event_id: Annotated[
            str | None, Header(max_length=100, description="The same, as a browser sends it when it reconnects.")
        ] = None,
    ) -> AsyncIterator[ServerSentEvent]:
        """An endless stream.

        Events: `hello` at first; `run` and `records` when a run changed; `alert`; `remarks` when somebody changed a
        note, a tag or the archive, or acknowledged alerts; `gone` for a run that was removed; `progress` of reading the
        logs; `ping` after two seconds without another event; `reset` if events were missed that are no longer stored:
        fetch everything anew.
        """
        retry: int | None = RETRY
        async for event in index.feed.listen(last_event_id or after):
            yield ServerSentEvent(raw_data=event.data, event=event.name, id=event.id, retry=retry)
            retry = None


def _add_pages(app: FastAPI, assets: Assets) -> None:
    """All pages are the same file, whose scripts ask the API. No name in an address is looked up on the disk."""

    def page(request: Request) -> Response:
        return _or_404(assets.answer(request, PAGE))

    def static(request: Request) -> Response:
        return _or_404(assets.answer(request, request.path_params["name"]))

    def runbook(request: Request) -> Response:
        return _or_404(assets.runbook(request, request.path_params["name"]))

    for path in ("/", "/runs", "/runs/{id}", "/alerts"):
        app.add_route(path, page, include_in_schema=False)
    for path in ("/static/{name}", "/static/{version}/{name}"):
        app.add_route(path, static, include_in_schema=False)
    app.add_route("/runbooks/{name}", runbook, include_in_schema=False)


def _or_404(answer: Response | None) -> Response:
    if answer is None:
        raise HTTPException(404)
    return answer
