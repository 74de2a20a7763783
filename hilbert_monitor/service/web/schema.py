"""The answers of the API as its OpenAPI document describes them; `answers` and `figure_answers` make them.

JSON has no nan and no infinities. In figures they are null, which plotly draws as a gap; elsewhere they are the strings
"nan", "inf" and "-inf".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from hilbert_monitor.runs.alerts import KINDS
from hilbert_monitor.runs.record import METRICS
from hilbert_monitor.runs.run import ShownStatus
from hilbert_monitor.service.figures import run_figures

Number = float | Literal["nan", "inf", "-inf"]
Figures = dict[str, dict[str, Any]]
Progress = Annotated[float, Field(ge=0, le=1, description="Share of the logs that has been read.", examples=[1.0])]
Version = Annotated[int, Field(description="Grows with every change.", examples=[42])]
Pair = tuple[int, int]
Texts = tuple[str, str]


class Answer(BaseModel):
    """What all answers have in common: they have no other fields than those that are described."""

    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    """An error, in a sentence."""

    detail: str = Field(examples=["There is no run 'adamw-7': /api/runs lists those that there are."])


class Health(Answer):
    """The state of the service."""

    status: Literal["ok"]
    version: str = Field(description="Version of the package.", examples=["0.1.0"])
    runs: int = Field(examples=[6])
    progress: Progress


class LastAlert(Answer):
    """The newest alert of a run."""

    step: int = Field(examples=[1200])
    kind: str = Field(examples=["diameter"])
    severity: Literal["page", "notice"]
    time: Number


class RunSummary(Answer):
    """The line of a run in the list of runs. Null where it has no value, or has not measured it yet."""

    id: str = Field(description="Name of the run's folder.", examples=["190M-rownorm-seed0"])
    name: str = Field(description="What the user calls the run.")
    label: str = Field(description="The name, or else the id.")
    optimizer: str = Field(description="Optimizer of the LM head.", examples=["RowNorm"])
    model: str = Field(description="Runs of one model are compared.", examples=["190M"])
    seed: int | None
    panel_hash: str = Field(
        description="Equal for runs with the same panel, the validation positions that perturbations are measured on."
    )
    status: ShownStatus
    problem: str = Field(description="Why the log cannot be read, in a sentence; else empty.")
    error: str = Field(description="Class of the exception that ended the run.")
    message: str
    step: int | None
    tokens: int | None
    time: Number = Field(description="Time of the last step, in seconds since the epoch.")
    started: Number
    attempts: int
    alerts: int
    last_alert: LastAlert | None
    train_loss: Number | None
    validation_loss: Number | None = Field(examples=[3.1415, "nan"])
    diameter: Number | None = Field(description="D(S) of the last step that has one.", examples=[0.0124])
    perturbation_rms: Number | None
    learning_rate: Number | None
    saturation: Number | None = Field(description="D(S) as a share of its ceiling.")
    version: Version
    indexed: Progress
    torn: int = Field(description="Lines of the log that were skipped because they were not whole.")


class Runs(Answer):
    """Runs, the newest first."""

    root: str = Field(description="Folder of the runs, or of the one run that is served.", examples=["/home/me/runs"])
    progress: Progress
    version: Version
    count: int = Field(description="How many runs match, on all pages.", examples=[6])
    next: str | None = Field(description="The `after` of the next page; null if there is none, as without a `limit`.")
    runs: list[RunSummary]


class Info(Answer):
    """What one attempt at a run says of the run."""

    id: str
    name: str
    attempt: int
    first_step: int = Field(description="The step that the attempt goes on from.")
    last_step: int | None = Field(description="The step at which training will end, where that is known.")
    started: Number
    head_optimizer: str
    head_name: str = Field(description="Where the LM head is in the model.")
    model: str
    seed: int | None
    config: dict[str, JsonValue]
    panel_hash: str
    panel_size: int | None
    remarks: list[str]
    versions: dict[str, str]
    host: str
    pid: int
    world_size: int
    port: int | None
    address: str
    scheme: str = Field(description="https if it serves its metrics with TLS.", examples=["http"])
    stalled_after: Number | None = Field(description="Seconds without a step after which it counts as stalled.")
    heartbeat: Number


class AlertAnswer(Answer):
    """A step that broke one of the monitor's rules: a blow-up."""

    step: int
    time: Number
    kind: str = Field(description="The rule that it broke.", examples=list(KINDS))
    severity: Literal["page", "notice"] = Field(description="A page needs somebody now; a notice is a mark.")
    value: Number = Field(examples=[0.81, "inf"])
    expected: Number | None = Field(description="What was usual before; the ceiling for the kind ceiling.")
    pair: Pair | None
    pair_text: Texts | None
    pattern: str = Field(description="What about its history was broken; empty for other kinds.", examples=["step"])
    rarity: Number | None = Field(description="Steps of the run among which one such is expected by chance.")
    batch: int | None = Field(description="Index of the step's batch in its epoch.")
    samples: list[int] | None = Field(description="Indices of its samples, where they are known: the first ones.")
    message: str = Field(examples=["D(S) is 0.81 at step 1,200: 12 times what it was before."])


class Sign(Answer):
    """That an alert is acknowledged."""

    by: str = Field(description="Who acknowledged it; empty if that is not known.", examples=["Ada"])
    at: float = Field(description="When, in seconds since the epoch.")


class Acknowledged(Sign):
    """An alert that is acknowledged."""

    step: int
    kind: str
    time: Number | None


class RemarksAnswer(Answer):
    """What people say about a run."""

    note: str
    tags: list[str] = Field(examples=[["baseline"]])
    archived: bool
    acknowledged: list[Acknowledged]


class AlertLine(AlertAnswer):
    """An alert, and whether somebody has acknowledged it."""

    acknowledged: Sign | None


class TokenPair(Answer):
    """Two tokens that attained the diameter."""

    pair: Pair = Field(examples=[[11, 198]])
    texts: tuple[str | None, str | None] = Field(description="Null where a text is not known.")
    count: int
    share: float = Field(description="Share of the steps with an exact diameter.")
    largest: Number = Field(description="The largest diameter that the two attained.")
    last_step: int


class Token(Answer):
    """A token that was one of the two."""

    token: int
    text: str | None
    count: int


class MeasuringCost(Answer):
    """What measuring took."""

    share_mean: Number | None = Field(description="Share of the time between records, of all of them together.")
    share_last: Number | None
    seconds: dict[str, Number] = Field(description="By part: the mean over the records that have it.")
    records: int


class Pace(Answer):
    """How quickly a run goes. Pauses do not count."""

    steps_per_second: Number | None = Field(examples=[2.5])
    tokens_per_second: Number | None
    last_step: int | None = Field(description="The step at which it will end, where that is known.")
    seconds_left: Number | None = Field(description="Until then, at this pace; null if the run does not go on.")


class RunAnswer(Answer):
    """Everything about a run but its curves."""

    summary: RunSummary
    remarks: RemarksAnswer
    info: Info
    attempts: list[Info]
    alerts: list[AlertLine] = Field(description="The oldest first; the last 1,000.")
    tokens: list[TokenPair] = Field(description="The most frequent first.")
    token_rows: list[Token]
    cost: MeasuringCost
    pace: Pace
    config: list[tuple[str, str]] = Field(
        description="The settings as a flat list.", examples=[[["optimizer.lr", "0.1"]]]
    )


class Records(Answer):
    """TableBuilder of a run's records."""

    id: str
    version: Version
    of: int = Field(description="How many records the range has; the answer may hold fewer.")
    columns: dict[str, list[Number | None]] = Field(
        description="Each as long as `step`; null where a record does not have the field.\n\n"
        + "\n".join(f"- `{metric.field}`: {metric.help}" for metric in METRICS if metric.formula is None),
        examples=[{"step": [1, 2, 3], "train_loss": [10.4, "nan", None]}],
    )


class LayerRow(Answer):
    """A layer over time."""

    name: str = Field(description="Of the parameter.", examples=["blocks.0.q.weight"])
    ruler: str = Field(description="How its steps are measured.", examples=["matrix", "embedding", "vector", "D(S)"])
    usual: float | None = Field(description="Median of its relative step; of the head, of D(S).")
    last: float | None
    cells: list[float | None] = Field(description="For each column the value over the usual one; null where none is.")


class Layers(Answer):
    """The heat map of a run's layers."""

    id: str
    version: Version
    steps: list[int] = Field(description="The last step of each column.")
    rows: list[LayerRow] = Field(description="The head first, in D(S).")


class RunFigures(Answer):
    """Figures of a run, for plotly."""

    id: str
    version: Version
    figures: Figures = Field(description=f"Those that have a curve, of {', '.join(run_figures.PANELS)}.")


class Change(Answer):
    """A setting that is not the same in two runs; null where a run does not have it."""

    key: str
    a: str | None
    b: str | None


class Changes(Answer):
    """How the settings of two runs differ."""

    a: str
    b: str
    rows: list[Change]
    same: int = Field(description="Settings that are equal.")


class RunAlert(AlertLine):
    """An alert, and the run that has it."""

    run: str
    name: str
    optimizer: str
    status: ShownStatus


class Alerts(Answer):
    """Alerts of all runs, the newest first."""

    alerts: list[RunAlert]
    count: int = Field(description="How many there are, also beyond the limit.")
    acknowledged: int = Field(description="How many of this run and kind are acknowledged.")


class SettingColumn(Answer):
    """A setting that may be a column of the table of runs."""

    name: str = Field(examples=["optimizer.lr"])
    runs: int = Field(description="How many runs have it.")
    values: int = Field(description="How many different values it has.")


class FieldColumn(Answer):
    """A field of records whose last value may be a column."""

    name: str = Field(examples=["last:saturation"])
    label: str
    about: str


class RunColumns(Answer):
    """TableBuilder that the table of runs may have: settings that differ between runs first."""

    settings: list[SettingColumn]
    fields: list[FieldColumn]


class Cells(Answer):
    """Cells of columns, by the name of the column and the id of the run; runs without a value are left out."""

    version: Version
    columns: dict[str, dict[str, Number | str]]


class Target(Answer):
    """The address of a run's own metrics, in the format of Prometheus' http_sd."""

    targets: list[str] = Field(examples=[["127.0.0.1:9464"]])
    labels: dict[str, str]


class Targets(RootModel[list[Target]]):
    """Runs that serve their own metrics."""


class Themes(Answer):
    """Plotly's templates for a light and for a dark page."""

    light: dict[str, Any]
    dark: dict[str, Any]
