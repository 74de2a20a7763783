"""The answers of the API as its OpenAPI document describes them. Requests are answered from `views` and `pictures`.

JSON has no nan and no infinities: outside of figures they are the strings "nan", "inf" and "-inf". In figures, where
plotly draws a gap, they are null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from hilbert_monitor.runs.metrics import CATALOGUE
from hilbert_monitor.service.figures import compare_figures, run_figures
from hilbert_monitor.service.following.snapshot import ShownStatus

Number = float | Literal["nan", "inf", "-inf"]
Figures = dict[str, dict[str, Any]]
Progress = Annotated[float, Field(ge=0, le=1, description="Share of the logs that is read.", examples=[1.0])]
Version = Annotated[int, Field(description="Grows with every change.", examples=[42])]
Pair = tuple[int, int]
Texts = tuple[str, str]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Problem(_Answer):
    """Why there is no answer."""

    detail: str = Field(examples=["There is no run 'adamw-7': /api/runs lists those that there are."])


class Health(_Answer):
    """That the service works."""

    status: Literal["ok"]
    version: str = Field(description="Of the package.", examples=["0.1.0"])
    runs: int = Field(examples=[6])
    progress: Progress


class LastAlert(_Answer):
    """The newest alert of a run."""

    step: int = Field(examples=[1200])
    kind: str = Field(examples=["diameter"])
    time: Number


class RunSummary(_Answer):
    """A run in a line. What a run does not have, or has not measured yet, is null."""

    id: str = Field(description="Name of the run's folder.", examples=["190M-rownorm-seed0"])
    name: str = Field(description="What the user calls it.")
    label: str = Field(description="The name, or else the id.")
    optimizer: str = Field(description="Of the LM head.", examples=["RowNorm"])
    model: str = Field(description="Equal for runs that are compared.", examples=["190M"])
    seed: int | None
    panel_hash: str = Field(description="Equal for runs whose perturbations are over the same panel.")
    status: ShownStatus
    problem: str = Field(description="Why the log cannot be read, in a sentence; else empty.")
    error: str = Field(description="Class of the exception that ended it.")
    message: str
    step: int | None
    tokens: int | None
    time: Number = Field(description="Of the last step, in seconds since the epoch.")
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
    torn: int = Field(description="Lines that were skipped, for they were not whole.")


class Runs(_Answer):
    """Runs, the newest first."""

    root: str = Field(description="Folder of the runs.", examples=["runs"])
    progress: Progress
    version: Version
    runs: list[RunSummary]


class Info(_Answer):
    """What one attempt at a run said of itself."""

    id: str
    name: str
    attempt: int
    first_step: int = Field(description="The step that the attempt goes on from.")
    started: Number
    head_optimizer: str
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
    heartbeat: Number


class AlertAnswer(_Answer):
    """A step that was not as the run's other steps."""

    step: int
    time: Number
    kind: str = Field(examples=["diameter", "nonfinite"])
    value: Number = Field(examples=[0.81, "inf"])
    expected: Number | None
    pair: Pair | None
    pair_text: Texts | None
    message: str = Field(examples=["D(S) is 0.81 at step 1,200: 12 times what it was before."])


class TokenPair(_Answer):
    """Two tokens that attained the diameter."""

    pair: Pair = Field(examples=[[11, 198]])
    texts: tuple[str | None, str | None] = Field(description="Null where a text is not known.")
    count: int
    share: float = Field(description="Of the steps with an exact diameter.")
    largest: Number = Field(description="The largest diameter that they attained.")
    last_step: int


class Token(_Answer):
    """A token that was one of such two."""

    token: int
    text: str | None
    count: int


class MeasuringCost(_Answer):
    """What measuring cost."""

    share_mean: Number | None = Field(description="Mean part of the time between two records.")
    share_last: Number | None
    seconds: dict[str, Number] = Field(description="By part: the mean over the records that have it.")
    records: int


class RunAnswer(_Answer):
    """A run."""

    summary: RunSummary
    info: Info
    attempts: list[Info]
    alerts: list[AlertAnswer] = Field(description="The oldest first; the last 1,000.")
    tokens: list[TokenPair] = Field(description="The most frequent first.")
    token_rows: list[Token]
    cost: MeasuringCost
    config: list[tuple[str, str]] = Field(description="Flat.", examples=[[["optimizer.lr", "0.1"]]])


class Records(_Answer):
    """Columns of a run's records."""

    id: str
    version: Version
    of: int = Field(description="Records in the range, of which these are some.")
    columns: dict[str, list[Number | None]] = Field(
        description="Each as long as `step`; null where a record does not have the field.\n\n"
        + "\n".join(f"- `{metric.field}`: {metric.help}" for metric in CATALOGUE if metric.formula is None),
        examples=[{"step": [1, 2, 3], "train_loss": [10.4, "nan", None]}],
    )


class RunFigures(_Answer):
    """Figures of a run, for plotly."""

    id: str
    version: Version
    figures: Figures = Field(description=f"Those that have a curve, of {', '.join(run_figures.PANELS)}.")


class Model(_Answer):
    """Runs that are compared."""

    name: str
    runs: int


class SeedSpread(_Answer):
    """Over seeds."""

    mean: Number | None
    deviation: Number | None = Field(description="Sample standard deviation; null for a single run.")
    runs: int


class Ratio(_Answer):
    """AdamW over RowNorm."""

    now: Number | None
    step: int | None = Field(description="The last that a pair has.")
    pairs: int = Field(description="How many pairs have it.")


class Difference(_Answer):
    """Validation loss, RowNorm minus AdamW, over pairs of one seed and panel."""

    mean: Number | None
    deviation: Number | None
    pairs: int
    below: int
    checkpoints: int = Field(description="RowNorm's mean is below AdamW's at `below` of so many.")


class ComparisonAnswer(_Answer):
    """The runs of one model, compared."""

    models: list[Model]
    model: str | None
    optimizers: dict[str, dict[str, SeedSpread]]
    ratios: dict[str, Ratio]
    difference: Difference | None
    notes: list[str] = Field(description="What a reader of the numbers has to know.")
    pairs: list[tuple[str, str]]
    counted: list[str] = Field(description="Ids of the runs that the means are of.")
    aside: list[str]
    axes: list[str] = Field(description="Axes that all runs have.")
    figures: Figures = Field(description=f"For plotly: {', '.join(compare_figures.PANELS)}.")
    version: Version


class Change(_Answer):
    """A setting that is not the same in two runs; null where a run does not have it."""

    key: str
    a: str | None
    b: str | None


class Changes(_Answer):
    """How the settings of two runs differ."""

    a: str
    b: str
    rows: list[Change]
    same: int = Field(description="Settings that are equal.")


class RunAlert(AlertAnswer):
    """An alert, and the run that has it."""

    run: str
    name: str
    optimizer: str
    status: ShownStatus


class Alerts(_Answer):
    """Alerts of all runs, the newest first."""

    alerts: list[RunAlert]
    count: int = Field(description="All that there are, also beyond the limit.")


class Target(_Answer):
    """A run's own metrics, as Prometheus looks for them."""

    targets: list[str] = Field(examples=[["127.0.0.1:9464"]])
    labels: dict[str, str]


class Targets(RootModel[list[Target]]):
    """Runs that serve their own metrics."""


class Themes(_Answer):
    """Plotly's templates for a light and for a dark page."""

    light: dict[str, Any]
    dark: dict[str, Any]
