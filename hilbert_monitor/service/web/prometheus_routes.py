"""The routes for Prometheus."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from . import schema
from .parameters import ok
from .prometheus import PrometheusExport
from .responder import json_response


class PlainText(Response):
    """Text in the format of Prometheus."""

    media_type = "text/plain"


def add_prometheus(app: FastAPI, export: PrometheusExport) -> None:
    """Add the routes."""

    @app.get(
        "/api/prometheus/targets",
        tags=["prometheus"],
        summary="Where runs serve their own metrics",
        responses=ok(schema.Targets),
    )
    def targets(request: Request) -> Response:
        """For http_sd_configs."""
        return json_response(request, export.targets())

    @app.get(
        "/metrics", tags=["prometheus"], summary="Metrics of runs that do not serve them", response_class=PlainText
    )
    def metrics(accept: Annotated[str, Header(max_length=1000, description="Text or OpenMetrics.")] = "") -> Response:
        """The latest values of live runs, and of those that ended in the last ten minutes, for an hour if killed."""
        body, kind = export.metrics(accept)
        return Response(body, headers={"Content-Type": kind})
