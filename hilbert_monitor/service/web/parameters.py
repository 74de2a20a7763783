"""The parameters of requests, and the answers to requests that are wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Depends, Path, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hilbert_monitor.service.figures import compare_figures, run_figures
from hilbert_monitor.service.figures.plot_options import Axis, Choices, Group, PlotOptions, Scale

from .answers import FIELDS
from .schema import Problem
from .security import error_response, protect

if TYPE_CHECKING:
    RunPanelName = str
    ComparePanelName = str
else:
    RunPanelName = Literal[tuple(run_figures.PANELS)]
    ComparePanelName = Literal[(*compare_figures.PANELS, *compare_figures.METRIC_PANELS)]

SEARCH = (
    "Words that must all occur in a run's id, name, optimizer, model, state, settings, tags or note, and phrases in"
    " quotes. `lr=0.1` and `status:failed` ask for exactly that value of a field; `lr>0.01`, `<`, `<=`, `>=` and `!=`"
    " compare, also the last value of what is measured. `-` before any of them excludes; `OR` separates alternatives."
)
POINTS = "About how many records, at most: those where a field is smallest or largest are kept."
PROBLEMS: dict[int | str, str] = {
    400: "The host name is not one of this service.",
    401: "The token is missing or wrong.",
    404: "There is no such run.",
    405: "The path has no such method.",
    422: "A parameter is not what it should be.",
}
CHANGE_PROBLEMS = {
    400: "The host name is not one of this service, or the body is no JSON.",
    403: "The request comes from a page elsewhere, or nothing can be kept here.",
    411: "The length is missing.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    503: "It could not be kept.",
}
USUAL = {
    "Not Found": "There is no such page: / is the dashboard, and /api/openapi.json lists what a program can ask.",
    "Method Not Allowed": "This path has no such method: /api/openapi.json lists those that there are.",
}

Id = Annotated[str, Path(description="Id of a run, as /api/runs lists it.", examples=["190M-rownorm-seed0"])]
ModelName = Annotated[str, Query(max_length=300, description="Only runs of this model.", examples=["190M"])]
ColumnNames = Annotated[
    list[Annotated[str, Field(max_length=500)]],
    Query(max_length=30, description="Names of columns, as /api/columns lists them.", examples=[["lr", "last:share"]]),
]
Ids = Annotated[
    str,
    Query(
        max_length=30_000, description="Only these runs: ids with commas between them; within an id, a comma is %2C."
    ),
]


_NAMES = "|".join(["step", *(re.escape(name) for name in FIELDS), r"seconds\.[A-Za-z_]{1,30}"])
Fields = Annotated[
    str,
    Query(
        max_length=2000,
        description="Fields of a record with commas between them; without any, all that the run has.",
        examples=["train_loss,diameter"],
        json_schema_extra={"pattern": f"^(({_NAMES})(,({_NAMES})){{0,20}})?$"},
    ),
]


def plot_options(
    axis: Annotated[
        Axis | None, Query(description="The x axis; by default tokens, if all runs have them, else updates.")
    ] = None,
    smooth: Annotated[
        float, Query(ge=0, le=0.999, description="Weight of earlier values in a moving average; 0 for no smoothing.")
    ] = 0.0,
    scale: Annotated[Scale, Query(description="Scale of the y axis.")] = "auto",
    group: Annotated[
        Group, Query(description="A mean for each optimizer and its settings, or a line for each run.")
    ] = "optimizer",
    seeds: Annotated[bool, Query(description="Draw the line of each run behind the means.")] = False,
    x0: Annotated[
        float | None, Query(allow_inf_nan=False, description="Start of the range of x (time: in hours).")
    ] = None,
    x1: Annotated[float | None, Query(allow_inf_nan=False, description="End of the range of x.")] = None,
) -> PlotOptions:
    """The options of a plot, from the query."""
    return PlotOptions(axis=axis, smooth=smooth, scale=scale, group=group, seeds=seeds, x0=x0, x1=x1)


Options = Annotated[PlotOptions, Depends(plot_options)]


def compare_options(
    options: Options, logx: Annotated[bool, Query(description="Draw a logarithmic x axis.")] = False
) -> PlotOptions:
    """The options of a plot that compares runs, from the query."""
    return replace(options, log_x=logx)


SIDE = "Name of an optimizer or a group, or id of a run"
_METRICS = "|".join(map(re.escape, compare_figures.METRIC_PANELS))


def compare_choices(
    by: Annotated[
        str, Query(max_length=500, description="Key of the settings that groups are split and coloured by.")
    ] = "",
    base: Annotated[
        str, Query(max_length=300, description=f"{SIDE}: ratios are of this. By default AdamW.", examples=["AdamW"])
    ] = "",
    over: Annotated[
        str, Query(max_length=300, description=f"{SIDE}: ratios are to this. By default RowNorm.", examples=["Muon"])
    ] = "",
    panels: Annotated[
        str,
        Query(
            max_length=1000,
            description="Metrics that get a panel of their own: fields with commas between them.",
            examples=["efficiency_lower,gauge_waste"],
            json_schema_extra={"pattern": f"^(({_METRICS})(,({_METRICS})){{0,11}})?$"},
        ),
    ] = "",
) -> Choices:
    """What of the runs is compared, from the query."""
    for name in ids(panels):
        if name not in compare_figures.METRIC_PANELS:
            known = ", ".join(compare_figures.METRIC_PANELS)
            raise HTTPException(422, f"panels: there is no metric '{name[:80]}'; there are {known}.")
    return Choices(by=by, baseline=base, candidate=over, panels=tuple(dict.fromkeys(ids(panels))))


CompareOptions = Annotated[PlotOptions, Depends(compare_options)]
CompareChoices = Annotated[Choices, Depends(compare_choices)]


def ids(text: str) -> list[str]:
    """Split a list of ids at its commas. A comma within an id is %2C there, and a percent sign may be %25."""
    return [id.replace("%2C", ",").replace("%25", "%") for id in text.split(",") if id]


def problems(inline: bool = False) -> dict[int | str, dict[str, Any]]:
    """Entries of the OpenAPI document for errors; inline for routes that do not answer with JSON."""
    shape: dict[str, Any] = {"model": Problem}
    if inline:
        shape = {"content": {"application/json": {"schema": Problem.model_json_schema()}}}
    return {status: {"description": text, **shape} for status, text in PROBLEMS.items()}


def change_problems() -> dict[int | str, dict[str, Any]]:
    """Entries of the OpenAPI document for errors of requests that change something."""
    return {status: {"description": text, "model": Problem} for status, text in CHANGE_PROBLEMS.items()}


def ok(model: type[BaseModel], content: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """The entry of the OpenAPI document for a successful answer."""
    entry: dict[str, Any] = {"model": model, "description": (model.__doc__ or "").strip()}
    return {200: entry | ({"content": content} if content else {})}


# Errors


def refused(request: Request, error: Exception) -> Response:
    """Answer a request for something that does not exist, or with a wrong method."""
    assert isinstance(error, HTTPException)
    answer = error_response(request.scope, error.status_code, USUAL.get(error.detail, error.detail))
    answer.headers.update(error.headers or {})
    return answer


def misread(request: Request, error: Exception) -> Response:
    """Answer a request with a wrong parameter."""
    assert isinstance(error, RequestValidationError)
    return error_response(request.scope, 422, " ".join(_sentence(one) for one in error.errors()[:5]))


def failed(request: Request, error: Exception) -> Response:
    """Answer a request that raised an exception. The server logs it; the client is told no more."""
    path: str = request.scope["path"]
    answer = error_response(request.scope, 500, "The service failed: its own output says why.")
    protect(MutableHeaders(raw=answer.raw_headers), path)
    return answer


def _sentence(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return "The body is no JSON: /api/openapi.json says what it may hold."
    name, message = str(error["loc"][-1]), str(error["msg"])
    given = "" if error["type"] == "missing" else f", not {repr(error['input'])[:80]}"
    return f"{name}: {message[:1].lower()}{message[1:]}{given}."
