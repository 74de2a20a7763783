"""Answers to questions about runs: snapshots in, values that JSON can hold out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.record import Alert, RunInfo
from hilbert_monitor.runs.run import Run, settings
from hilbert_monitor.runs.table import NUMBERS, PAIR_COLUMNS, SECONDS, WHOLE, Floats, Table, present
from hilbert_monitor.service.figures.downsampling import downsample
from hilbert_monitor.service.figures.layer_map import layer_map
from hilbert_monitor.service.following.layer_rows import layers_of
from hilbert_monitor.service.following.summary import summary

from .notebook import NOTHING, Acknowledgement, Remarks, alert_key

Runs = Mapping[str, Run]
AlertState = Literal["all", "open", "acknowledged"]

TOKENS = 50
"""Pairs, and single tokens, that an answer lists, at most."""
ALERTS = 1000
"""The newest alerts of a run that an answer lists, at most."""
FIELDS = (*NUMBERS, *PAIR_COLUMNS)
"""Columns that a run may have, beside its steps and what the parts of measuring cost."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the list of runs."""

    runs: list[dict[str, Any]]
    count: int
    """How many runs match, on all pages."""
    next: str | None
    """The `after` of the next page; None if this is the last."""


def runs(
    index: Runs,
    wanted: Callable[[Run], bool] | None = None,
    *,
    limit: int | None = None,
    after: str = "",
) -> Page:
    """A line for each run that is wanted, the newest first.

    Args:
        index: all runs.
        wanted: whether a run is; by default all are.
        limit: how many lines, at most.
        after: id of the last run of the page before. KeyError if there is no such run.
    """
    matches: Sequence[Run] = sorted(index.values(), key=newest, reverse=True)
    if wanted is not None:
        matches = [run for run in matches if wanted(run)]
    first = 0
    if after:
        last = newest(index[after])
        first = next((place for place, run in enumerate(matches) if newest(run) < last), len(matches))
    stop = len(matches) if limit is None else first + limit
    part = matches[first:stop]
    return Page([to_json(summary(run)) for run in part], len(matches), part[-1].id if stop < len(matches) else None)


def newest(run: Run) -> tuple[Any, ...]:
    """The key that runs are sorted by; the largest is the newest run."""
    return _order(run.info.started, run.id)


def stamp(run: Run) -> tuple[Any, ...]:
    """A key that changes whenever the run does, and that no other run has."""
    return run.id, run.version, run.info.started, len(run.table)


def layers(one: Run, root: Path) -> dict[str, Any]:
    """The heat map of a run's layers, read from its folder."""
    found = layer_map(layers_of(root / one.id), one.table, one.info.head_name)
    return {"id": one.id, "version": one.version, **to_json(found)}


def run(one: Run, remarks: Remarks = NOTHING) -> dict[str, Any]:
    """Everything about a run but its curves."""
    pairs, tokens = _tokens(one.table)
    seen = remarks.by_alert()
    answer: dict[str, Any] = to_json(
        {
            "summary": summary(one),
            "remarks": remarks_answer(one, remarks),
            "info": _all_fields(one.info),
            "attempts": [_all_fields(info) for info in one.attempts],
            "alerts": [_alert(alert, seen) for alert in one.alerts[-ALERTS:]],
            "tokens": pairs,
            "token_rows": tokens,
            "cost": _cost(one.table),
            "pace": _pace(one),
            "config": list(settings(one.info).items()),
        }
    )
    return answer


def remarks_answer(run: Run, remarks: Remarks) -> dict[str, Any]:
    """What people say about a run. Acknowledged alerts that a resumed run no longer has are left out."""
    known = {alert_key(alert) for alert in run.alerts} if remarks.acknowledged else ()
    acknowledged = [one for one in remarks.acknowledged if alert_key(one) in known]
    return {
        "note": remarks.note,
        "tags": list(remarks.tags),
        "archived": remarks.archived,
        "acknowledged": [msgspec.structs.asdict(one) for one in acknowledged],
    }


def alerts(
    index: Runs,
    remarks: Callable[[Run], Remarks] = lambda run: NOTHING,
    *,
    run: str = "",
    kind: str = "",
    state: AlertState = "all",
    limit: int = 200,
) -> dict[str, Any]:
    """Alerts of all runs, or of one, or of one kind, the newest first.

    Args:
        index: all runs.
        remarks: what people say about a run.
        run: id of the only run.
        kind: the only kind.
        state: `open` leaves out alerts that are acknowledged, and archived runs unless one is asked for by its id.
        limit: how many alerts are listed, at most.
    """
    lines: list[tuple[Run, Alert, Acknowledgement | None]] = []
    acknowledged = 0
    for one in index.values():
        if not one.alerts or (run and one.id != run):
            continue
        about = remarks(one)
        seen, is_hidden = about.by_alert(), about.archived and state == "open" and not run
        for alert in one.alerts:
            if (kind and alert.kind != kind) or is_hidden:
                continue
            acknowledgement = seen.get(alert_key(alert))
            acknowledged += acknowledgement is not None
            if state == "all" or (state == "open") == (acknowledgement is None):
                lines.append((one, alert, acknowledgement))
    lines.sort(key=lambda line: _order(line[1].time, line[0].id, line[1].step), reverse=True)
    listed = [to_json(_run_alert(*line)) for line in lines[:limit]]
    return {"alerts": listed, "count": len(lines), "acknowledged": acknowledged}


def difference(a: Run, b: Run) -> dict[str, Any]:
    """The settings in which two runs differ."""
    ours, theirs = settings(a.info), settings(b.info)
    keys = [*ours, *(key for key in theirs if key not in ours)]
    rows = [{"key": key, "a": ours.get(key), "b": theirs.get(key)} for key in keys if ours.get(key) != theirs.get(key)]
    answer: dict[str, Any] = to_json({"a": a.id, "b": b.id, "rows": rows, "same": len(keys) - len(rows)})
    return answer


# Records


def fields(table: Table, asked: Sequence[str]) -> list[str]:
    """The columns that were asked for, or all that the run has. ValueError names one that no run has."""
    for name in asked:
        if name != "step" and name not in FIELDS and not name.startswith(SECONDS):
            near = get_close_matches(name[:80], FIELDS) or [*FIELDS][:3]
            raise ValueError(
                f"a record has no field '{name[:80]}': it has {', '.join(near)} and others; without fields= the answer"
                " has all of them"
            )
    wanted = asked or [*(name for name in FIELDS if name in table.columns), *sorted(_parts(table))]
    return [name for name in dict.fromkeys(wanted) if name != "step"]


def records(one: Run, names: Sequence[str], rows: slice, points: int) -> dict[str, Any]:
    """Columns of some rows, thinned to about `points`: the rows where a column is smallest or largest stay."""
    columns = {name: one.table.column(name)[rows] for name in names}
    steps = one.table.steps[rows]
    places = _thinned(list(columns.values()), len(steps), points)
    listed = {name: _listed(values[places], name in WHOLE) for name, values in columns.items()}
    return {
        "id": one.id,
        "version": one.version,
        "of": len(steps),
        "columns": {"step": steps[places].tolist(), **listed},
    }


def rows_of(table: Table, first: int | None, last: int | None) -> slice:
    """The rows of some steps, the last included."""
    start = 0 if first is None else int(np.searchsorted(table.steps, first))
    stop = len(table) if last is None else int(np.searchsorted(table.steps, last, "right"))
    return slice(start, max(start, stop))


def csv_rows(table: Table, names: Sequence[str], rows: slice, piece: int = 4096) -> Iterator[tuple[Any, ...]]:
    """The lines of a CSV file: the step of every record of some rows, and its fields."""
    for start in range(rows.start, rows.stop, piece):
        part = slice(start, min(start + piece, rows.stop))
        columns = (_objects(table.column(name)[part], name in WHOLE).tolist() for name in names)
        yield from zip(table.steps[part].tolist(), *columns, strict=True)


def _thinned(columns: Sequence[Floats], length: int, points: int) -> NDArray[np.int64]:
    """About `points` rows: those where a column is smallest, largest, infinite or nan."""
    if length <= points:
        return np.arange(length)
    rows = [downsample(columns or [np.arange(length, dtype=np.float64)], points)]
    for values in columns:
        odd = np.flatnonzero(present(values) & ~np.isfinite(values))
        rows.append(odd[np.linspace(0, len(odd) - 1, min(len(odd), points // len(columns))).astype(np.int64)])
    return np.unique(np.concatenate(rows))


def _listed(values: Floats, whole: bool) -> list[Any]:
    """A column as a list that JSON can hold."""
    objects, odd = _objects(values, whole), present(values) & ~np.isfinite(values)
    objects[odd] = [repr(float(value)) for value in values[odd]]
    listed: list[Any] = objects.tolist()
    return listed


def _objects(values: Floats, whole: bool) -> NDArray[np.object_]:
    """A column as Python's numbers, None where a value is missing."""
    objects = values.astype(object)
    if whole:
        finite = np.isfinite(values)
        objects[finite] = [int(value) for value in values[finite]]
    objects[~present(values)] = None
    return objects


# Parts of an answer


def _order(time: float, *rest: Any) -> tuple[Any, ...]:
    """A key to sort by, which works where a time is nan."""
    return (-math.inf if math.isnan(time) else time, *rest)


def _all_fields(record: RunInfo | Alert) -> dict[str, Any]:
    """All fields, also those with their default values."""
    return msgspec.structs.asdict(record)


def _alert(alert: Alert, seen: Mapping[tuple[Any, ...], Acknowledgement]) -> dict[str, Any]:
    return {**_all_fields(alert), "acknowledged": _sign(seen.get(alert_key(alert)))}


def _sign(acknowledgement: Acknowledgement | None) -> dict[str, Any] | None:
    return None if acknowledgement is None else {"by": acknowledgement.by, "at": acknowledgement.at}


def _run_alert(run: Run, alert: Alert, acknowledgement: Acknowledgement | None) -> dict[str, Any]:
    source = {"run": run.id, "name": run.info.name, "optimizer": run.info.head_optimizer or "unknown"}
    return {**source, "status": run.status, **_all_fields(alert), "acknowledged": _sign(acknowledgement)}


def _parts(table: Table) -> Iterator[str]:
    return (name for name in table.columns if name.startswith(SECONDS))


def _pace(run: Run) -> dict[str, Any]:
    speed, last, left = run.speed, run.last_step, None
    if speed.steps and last is not None and run.step is not None and run.status == "running":
        left = max(last - run.step, 0) / speed.steps
    return {
        "steps_per_second": speed.steps,
        "tokens_per_second": speed.tokens,
        "last_step": last,
        "seconds_left": left,
    }


def _cost(table: Table) -> dict[str, Any]:
    parts = {name.removeprefix(SECONDS): _mean(table.column(name)) for name in sorted(_parts(table))}
    return {
        "share_mean": _mean_share(table),
        "share_last": table.last("share"),
        "seconds": {part: mean for part, mean in parts.items() if mean is not None},
        "records": len(table),
    }


def _mean_share(table: Table) -> float | None:
    """The share of all the time between records that measuring took.

    A record's share is the sum of its parts over the time since the record before, so that time is their quotient.
    Where there are no parts, the times of the records have to tell it.
    """
    share = table.column("share")
    parts = [table.column(name) for name in _parts(table)]
    with np.errstate(all="ignore"):
        times = np.sum([np.where(present(part), part, 0.0) for part in parts], axis=0) / share
        between = np.diff(table.column("time"), prepend=np.nan)
        times = np.where(np.isfinite(times) & (times > 0), times, between)
        known = np.isfinite(share) & np.isfinite(times) & (times > 0)
        return float(np.average(share[known], weights=times[known])) if known.any() else _mean(share)


def _mean(values: Floats) -> float | None:
    measured = values[present(values)]
    with np.errstate(all="ignore"):
        return float(measured.mean()) if len(measured) else None


def _tokens(table: Table) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The pairs that attained the exact diameter, and the tokens in them, the most frequent first."""
    diameter, first, second = (table.column(name) for name in ("diameter", "pair.0", "pair.1"))
    rows = np.flatnonzero(present(diameter) & np.isfinite(first) & np.isfinite(second))
    if not len(rows):
        return [], []
    both = np.sort(np.stack([first[rows], second[rows]], axis=1), axis=1)
    pairs, inverse, counts = np.unique(both, axis=0, return_inverse=True, return_counts=True)
    inverse = inverse.reshape(-1)
    largest, last = np.full(len(pairs), np.nan), np.zeros(len(pairs), np.int64)
    np.fmax.at(largest, inverse, diameter[rows])
    np.maximum.at(last, inverse, table.steps[rows])
    listed = [
        {
            "pair": [int(token) for token in pairs[i]],
            "texts": [table.texts.get(int(token)) for token in pairs[i]],
            "count": int(counts[i]),
            "share": float(counts[i] / len(rows)),
            "largest": float(largest[i]),
            "last_step": int(last[i]),
        }
        for i in np.lexsort([-last, -counts])[:TOKENS]
    ]
    return listed, _single_tokens(both, table.texts)


def _single_tokens(pairs: Floats, texts: Mapping[int, str]) -> list[dict[str, Any]]:
    tokens, counts = np.unique(pairs, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:TOKENS]
    return [{"token": int(tokens[i]), "text": texts.get(int(tokens[i])), "count": int(counts[i])} for i in order]
