"""The routes of what people say about runs. Two of them change something: `security` says who may ask for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.record import Alert
from hilbert_monitor.runs.run import Run

from . import remark_schema as schema
from .answers import remarks_answer
from .notebook import Remarks, acknowledge, alert_key, tidy
from .parameters import change_problems, ok
from .responder import Responder, json_response

TAGS = 20
"""Tags of a run, at most."""


def add_remarks(app: FastAPI, responder: Responder) -> None:
    """Add the routes."""
    notebook, index = responder.notebook, responder.index

    def changed(request: Request, runs: Sequence[Run], change: Callable[[Run, Remarks], Remarks]) -> Response:
        """Change remarks, tell everybody, and answer with the new ones."""
        if notebook.problem:
            raise HTTPException(403, f"Notes, tags and acknowledgements cannot be kept here: {notebook.problem}.")
        try:
            notebook.change(runs, change)
        except OSError as error:
            raise HTTPException(503, f"This could not be kept: {error.strerror or error}.") from None
        answer = {"runs": {run.id: to_json(remarks_answer(run, notebook.of(run))) for run in runs}}
        index.feed.publish("remarks", answer)
        return json_response(request, answer)

    @app.get("/api/remarks", tags=["remarks"], summary="Notes, tags, archive", responses=ok(schema.AllRemarks))
    def remarks(request: Request) -> Response:
        """Runs without any are left out."""
        notebook.refresh()
        known = index.runs

        def make() -> dict[str, Any]:
            said = {
                run.id: to_json(remarks_answer(run, remarks))
                for run in known.values()
                if not (remarks := notebook.of(run)).is_empty
            }
            return {"offered": not notebook.problem, "problem": to_json(notebook.problem), "runs": said}

        return responder.cached(request, (notebook.version, index.version), make)

    @app.post(
        "/api/remarks",
        tags=["remarks"],
        summary="Change the note, the tags or the archive",
        responses={**ok(schema.ChangedRemarks), **change_problems()},
    )
    def change_remarks(request: Request, change: schema.RemarksChange) -> Response:
        """What is not given stays as it is."""
        known = index.runs
        runs = [responder.run(id, known) for id in dict.fromkeys(change.runs)]
        return changed(request, runs, lambda run, remarks: _with(remarks, change))

    @app.post(
        "/api/acknowledgements",
        tags=["remarks"],
        summary="Acknowledge alerts of a run, or undo that",
        responses={**ok(schema.ChangedRemarks), **change_problems()},
    )
    def change_acknowledgements(request: Request, change: schema.AcknowledgementChange) -> Response:
        run = responder.run(change.run)
        alerts, by, at = _alerts(run, change.alerts), tidy(change.by), time.time()
        return changed(request, [run], lambda _, old: acknowledge(old, alerts, by=by, at=at, undo=change.undo))


def _with(remarks: Remarks, change: schema.RemarksChange) -> Remarks:
    """Remarks with a change."""
    fields: dict[str, Any] = {}
    if change.note is not None:
        fields["note"] = tidy(change.note)
    if change.archived is not None:
        fields["archived"] = change.archived
    if change.tag or change.untag:
        tags = dict.fromkeys((*remarks.tags, *map(tidy, change.tag)))
        fields["tags"] = tuple(tag for tag in tags if tag and tag not in set(map(tidy, change.untag)))
        if len(fields["tags"]) > TAGS:
            raise HTTPException(422, f"A run has at most {TAGS} tags, not {len(fields['tags'])}: take some away first.")
    return msgspec.structs.replace(remarks, **fields)


def _alerts(run: Run, wanted: Sequence[schema.AlertKey] | None) -> Sequence[Alert]:
    """The alerts of a run that are meant; HTTPException if it does not have one of them."""
    if wanted is None:
        return run.alerts
    known = {alert_key(alert): alert for alert in run.alerts}
    keys = [alert_key(Alert(step=one.step, kind=one.kind, time=float(one.time), value=0.0)) for one in wanted]
    for key in keys:
        if key not in known:
            raise HTTPException(
                404, f"The run has no alert of the kind '{key[1][:100]}' at step {key[0]} of this time."
            )
    return [known[key] for key in keys]
