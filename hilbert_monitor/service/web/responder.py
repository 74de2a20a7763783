"""What all routes share: the runs, what people say about them, and a cache of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.following.index import Index

from .assets import respond
from .figure_answers import FigureAnswers
from .notebook import Notebook, Remarks
from .response_cache import Body, ResponseCache
from .run_columns import SettingsIndex


class Responder:
    """Answers requests about the runs of an index. An answer is worked out once as long as nothing changes."""

    def __init__(self, index: Index, notebook: Notebook) -> None:
        self.index, self.notebook = index, notebook
        self.cache, self.figures, self.settings = ResponseCache(), FigureAnswers(), SettingsIndex()

    def run(self, id: str, runs: Mapping[str, Run] | None = None) -> Run:
        """A run by its id; HTTPException if there is none. Ids are looked up in the index alone, never on the disk."""
        snapshot = (self.index.runs if runs is None else runs).get(id)
        if snapshot is None:
            name = id if len(id) <= 100 else f"{id[:100]}..."
            raise HTTPException(404, f"There is no run {name!r}: /api/runs lists those that there are.")
        return snapshot

    def remarks(self, run: Run) -> Remarks:
        """What people say about a run."""
        return self.notebook.of(run)

    def cached(self, request: Request, key: tuple[Any, ...], make: Callable[[], Any]) -> Response:
        """The answer to a key: from the cache, or made and put there."""
        body = self.cache.get((request.scope["route"].path, *key), lambda: msgspec.json.encode(make()))
        return respond(request, body, "application/json")


def json_response(request: Request, answer: Any) -> Response:
    """An answer that is not cached."""
    return respond(request, Body(msgspec.json.encode(answer)), "application/json")
