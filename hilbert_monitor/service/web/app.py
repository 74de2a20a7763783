"""The service as an app: pages, the JSON API and the stream of events. It only reads.

`answers` and `figure_answers` work out what an answer says. This module checks requests, and encodes, caches and sends
the answers. Routes that compute are plain functions, which FastAPI runs in threads beside the event loop.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Header, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from hilbert_monitor import __version__
from hilbert_monitor.runs.alerts import KINDS
from hilbert_monitor.service.figures import compare_figures
from hilbert_monitor.service.following.index import Index
from hilbert_monitor.service.following.snapshot import RunSnapshot, ShownStatus
from hilbert_monitor.service.following.text import csv_lines

from . import answers, schema
from .assets import PAGE, Assets, respond
from .figure_answers import FigureAnswers, choose
from .parameters import (
    POINTS,
    SEARCH,
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
from .response_cache import Body, ResponseCache
from .security import LOOPBACK, AccessControl

DESCRIPTION = """Runs of hilbert-monitor, as they are now: read-only, no request changes anything.

Numbers that are nan or infinite are the strings "nan", "inf" and "-inf"; in figures, for plotly, they are null.
Where the service has a token, send it as `Authorization: Bearer TOKEN`."""
RETRY = 1000
"""Milliseconds after which a browser that lost its connection reconnects."""


class PlainText(Response):
    """Text in the format of Prometheus."""

    media_type = "text/plain"


class CSV(StreamingResponse):
    """A CSV file, written while it is sent."""

    media_type = "text/csv"


def create_app(
    index: Index,
    *,
    token: str | None = None,
    allowed_hosts: Collection[str] | None = LOOPBACK,
    reexport: bool = False,
) -> FastAPI:
    """The app over an index. The caller starts and stops the index.

    Args:
        index: the runs.
        token: the secret that a visitor must send; None for no secret.
        allowed_hosts: host names that requests may use; None for any.
        reexport: whether /metrics has the runs too that serve their metrics themselves.
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
    responder = Responder(index)
    _add_health(app, index)
    _add_runs(app, responder)
    _add_figures(app, responder)
    _add_events(app, index)
    _add_prometheus(app, PrometheusExport(lambda: index.runs.values(), everything=reexport))
    _add_pages(app, Assets())
    return app


# Answers


class Responder:
    """Answers requests about the runs of an index. An answer is worked out once as long as nothing changes."""

    def __init__(self, index: Index) -> None:
        self.index, self.cache, self.figures = index, ResponseCache(), FigureAnswers()

    def run(self, id: str, runs: Mapping[str, RunSnapshot] | None = None) -> RunSnapshot:
        """A run by its id; HTTPException if there is none. Ids are looked up in the index alone, never on the disk."""
        snapshot = (self.index.runs if runs is None else runs).get(id)
        if snapshot is None:
            name = id if len(id) <= 100 else f"{id[:100]}..."
            raise HTTPException(404, f"There is no run {name!r}: /api/runs lists those that there are.")
        return snapshot

    def cached(self, request: Request, key: tuple[Any, ...], make: Callable[[], Any]) -> Response:
        """The answer to a key: from the cache, or made and put there."""
        body = self.cache.get((request.scope["route"].path, *key), lambda: msgspec.json.encode(make()))
        return respond(request, body, "application/json")


def _json(request: Request, answer: Any) -> Response:
    return respond(request, Body(msgspec.json.encode(answer)), "application/json")


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
        return _json(request, state)


def _add_runs(app: FastAPI, responder: Responder) -> None:
    index = responder.index

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

        def make() -> dict[str, Any]:
            page = answers.runs(
                known, q=q, status=status or "", optimizer=optimizer, model=model, limit=limit, after=after
            )
            about = {"root": str(index.given.absolute()), "progress": index.progress, "version": version}
            return {**about, "count": page.count, "next": page.next, "runs": page.runs}

        key = (q, status, optimizer, model, limit, after, version, index.progress)
        return responder.cached(request, key, make)

    @app.get("/api/runs/{id}", tags=["runs"], summary="A run, without its curves", responses=ok(schema.RunAnswer))
    def run(request: Request, id: Id) -> Response:
        snapshot = responder.run(id)
        return responder.cached(request, answers.stamp(snapshot), lambda: answers.run(snapshot))

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

    @app.get("/api/alerts", tags=["runs"], summary="Alerts, the newest first", responses=ok(schema.Alerts))
    def alerts(
        request: Request,
        run: Annotated[str, Query(max_length=300, description="Only alerts of the run with this id.")] = "",
        kind: Annotated[
            str,
            Query(max_length=100, description=f"Only alerts of this kind: {', '.join(KINDS)}.", examples=["diameter"]),
        ] = "",
        limit: Annotated[int, Query(ge=1, le=1000, description="How many, at most.")] = 200,
    ) -> Response:
        version, known = index.version, index.runs
        return responder.cached(
            request, (run, kind, limit, version), lambda: answers.alerts(known, run=run, kind=kind, limit=limit)
        )

    @app.get("/api/difference", tags=["runs"], summary="Settings of two runs", responses=ok(schema.Changes))
    def difference(
        request: Request,
        a: Annotated[str, Query(max_length=300, description="Id of a run.")],
        b: Annotated[str, Query(max_length=300, description="Id of another.")],
    ) -> Response:
        return _json(request, answers.difference(responder.run(a), responder.run(b)))


def _add_figures(app: FastAPI, responder: Responder) -> None:
    index, figures = responder.index, responder.figures

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
        "/api/compare", tags=["figures"], summary="Runs of a model, compared", responses=ok(schema.ComparisonAnswer)
    )
    def compare(request: Request, options: Options, model: ModelName = "", runs: Ids = "") -> Response:
        version, known = index.version, index.runs
        choice = choose(known, model, ids(runs))
        figures.forget_others(known.keys())
        key = (*choice.versions, options)
        return responder.cached(request, key, lambda: figures.compared(choice, options, version))

    @app.get(
        "/api/compare/{panel}.csv",
        tags=["figures"],
        summary="Every value of a panel",
        response_class=CSV,
        responses=problems(inline=True),
    )
    def compare_csv(
        panel: Annotated[ComparePanelName, Path(description="One of the figures.")],
        options: Options,
        model: ModelName = "",
        runs: Ids = "",
    ) -> Response:
        choice = choose(index.runs, model, ids(runs))
        return _csv(f"{choice.model or 'runs'}-{panel}", figures.compared_csv(choice, panel, options))

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

        Events: `hello` at first; `run` and `records` when a run changed; `alert`; `gone` for a run that was removed;
        `progress` of reading the logs; `reset` if events were missed that are no longer stored: fetch everything anew.
        """
        retry: int | None = RETRY
        async for event in index.feed.listen(last_event_id or after):
            yield ServerSentEvent(raw_data=event.data, event=event.name, id=event.id, retry=retry)
            retry = None


def _add_prometheus(app: FastAPI, export: PrometheusExport) -> None:
    @app.get(
        "/api/prometheus/targets",
        tags=["prometheus"],
        summary="Where runs serve their own metrics",
        responses=ok(schema.Targets),
    )
    def targets(request: Request) -> Response:
        """For http_sd_configs."""
        return _json(request, export.targets())

    @app.get(
        "/metrics", tags=["prometheus"], summary="Metrics of runs that do not serve them", response_class=PlainText
    )
    def metrics(accept: Annotated[str, Header(max_length=1000, description="Text or OpenMetrics.")] = "") -> Response:
        """The latest values of live runs, and of those that ended or were killed in the last ten minutes."""
        body, kind = export.metrics(accept)
        return Response(body, headers={"Content-Type": kind})


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
    app.add_route("/static/{name}", static, include_in_schema=False)
    app.add_route("/runbooks/{name}", runbook, include_in_schema=False)


def _or_404(answer: Response | None) -> Response:
    if answer is None:
        raise HTTPException(404)
    return answer
