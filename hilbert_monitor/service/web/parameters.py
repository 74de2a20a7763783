"""What a request may ask, and the sentence that it gets if it asks for something else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Depends, Path, Query
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hilbert_monitor.service.figures import compare_figures, run_figures
from hilbert_monitor.service.figures.plot_options import Axis, Group, PlotOptions, Scale

from .answers import FIELDS
from .schema import Problem
from .security import protect, trouble

if TYPE_CHECKING:
    RunPanelName = str
    ComparePanelName = str
else:
    RunPanelName = Literal[tuple(run_figures.PANELS)]
    ComparePanelName = Literal[tuple(compare_figures.PANELS)]

SEARCH = (
    "Words that must all occur in a run's id, name, optimizer, model, state or settings; `lr=0.1` and `status:failed`"
    " ask for exactly that value of a field."
)
POINTS = "About how many records, at most: those where a field is smallest or largest are kept."
PROBLEMS: dict[int | str, str] = {
    400: "Asked under a name that is not answered to.",
    401: "The token is missing or wrong.",
    404: "There is no such run.",
    405: "Asked with another method than GET.",
    422: "A parameter is not what it should be.",
}
USUAL = {
    "Not Found": "There is nothing here: / is the dashboard, and /api/openapi.json lists what a program can ask.",
    "Method Not Allowed": "Runs are only read here, never changed: ask with GET.",
}

Id = Annotated[str, Path(description="Id of a run, as /api/runs lists it.", examples=["190M-rownorm-seed0"])]
ModelName = Annotated[str, Query(max_length=300, description="Only runs of this model.", examples=["190M"])]
Ids = Annotated[str, Query(max_length=30_000, description="Only these runs: ids with commas between them.")]


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


def view(
    axis: Annotated[
        Axis | None, Query(description="What curves are drawn against; by default tokens, if all runs have them.")
    ] = None,
    smooth: Annotated[float, Query(ge=0, le=0.999, description="Weight of what came before; 0 for none.")] = 0.0,
    scale: Annotated[Scale, Query(description="Of the y axis.")] = "auto",
    group: Annotated[Group, Query(description="Means by optimizer, or run by run.")] = "optimizer",
    seeds: Annotated[bool, Query(description="Draw the line of each seed too.")] = False,
    x0: Annotated[
        float | None, Query(allow_inf_nan=False, description="Begin of the range on that axis (time: in hours).")
    ] = None,
    x1: Annotated[float | None, Query(allow_inf_nan=False, description="End of the range.")] = None,
) -> PlotOptions:
    """How curves are looked at."""
    return PlotOptions(axis=axis, smooth=smooth, scale=scale, group=group, seeds=seeds, x0=x0, x1=x1)


Drawn = Annotated[PlotOptions, Depends(view)]


def ids(text: str) -> list[str]:
    """The ids of a list of them."""
    return [id for id in text.split(",") if id]


def problems(inline: bool = False) -> dict[int | str, dict[str, Any]]:
    """What an answer may be that is none, for the document; inline where the good answer is not JSON."""
    shape: dict[str, Any] = {"model": Problem}
    if inline:
        shape = {"content": {"application/json": {"schema": Problem.model_json_schema()}}}
    return {status: {"description": text, **shape} for status, text in PROBLEMS.items()}


def ok(model: type[BaseModel], content: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """What a good answer is, for the document."""
    about: dict[str, Any] = {"model": model, "description": (model.__doc__ or "").strip()}
    return {200: about | ({"content": content} if content else {})}


# When there is no answer


def refused(request: Request, error: Exception) -> Response:
    """There is no such thing, or not by this method."""
    assert isinstance(error, HTTPException)
    answer = trouble(request.scope, error.status_code, USUAL.get(error.detail, error.detail))
    answer.headers.update(error.headers or {})
    return answer


def misread(request: Request, error: Exception) -> Response:
    """A parameter is not what it should be."""
    assert isinstance(error, RequestValidationError)
    return trouble(request.scope, 422, " ".join(_sentence(one) for one in error.errors()[:5]))


def failed(request: Request, error: Exception) -> Response:
    """A fault of ours. The server logs it; others need not know more."""
    path: str = request.scope["path"]
    answer = trouble(request.scope, 500, "The service made a mistake: what it was stands in the service's own output.")
    protect(MutableHeaders(raw=answer.raw_headers), path)
    return answer


def _sentence(error: dict[str, Any]) -> str:
    name, said = str(error["loc"][-1]), str(error["msg"])
    given = "" if error["type"] == "missing" else f", not {repr(error['input'])[:80]}"
    return f"{name}: {said[:1].lower()}{said[1:]}{given}."
