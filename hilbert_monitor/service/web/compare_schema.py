"""The answer of the API about runs that are compared, as its OpenAPI document describes it."""

from __future__ import annotations

from pydantic import Field

from hilbert_monitor.service.figures import compare_figures

from .schema import Answer, Figures, Number, Version


class Model(Answer):
    """A model, and how many runs it has."""

    name: str
    runs: int


class SeedSpread(Answer):
    """A mean over seeds, and its spread."""

    mean: Number | None
    deviation: Number | None = Field(description="Sample standard deviation; null for a single run.")
    runs: int


class Ratio(Answer):
    """The baseline over the candidate."""

    now: Number | None
    step: int | None = Field(description="The last step that a pair of runs has.")
    pairs: int = Field(description="How many pairs of runs have that step.")


class Difference(Answer):
    """Validation loss, candidate minus baseline, over pairs of one seed and panel."""

    mean: Number | None
    deviation: Number | None
    pairs: int
    below: int
    checkpoints: int = Field(description="The candidate's mean is below the baseline's at `below` of so many.")


class ContrastAnswer(Answer):
    """A baseline and a candidate: two groups, or runs."""

    baseline: str = Field(examples=["AdamW, lr=0.004"])
    candidate: str = Field(examples=["RowNorm, lr=0.004"])
    differs: dict[str, str] = Field(
        description="Settings in which the two differ besides what follows from the optimizer.",
        examples=[{"lr": "0.004 against 0.1"}],
    )
    ratios: dict[str, Ratio]
    difference: Difference


class GroupAnswer(Answer):
    """Runs of an optimizer that differ in the seed alone."""

    name: str = Field(description="The optimizer, and the settings in which its groups differ.", examples=["AdamW"])
    optimizer: str
    colour: str = Field(examples=["#D55E00"])
    runs: list[str] = Field(description="Ids.")


class ComparisonAnswer(Answer):
    """The runs of one model, compared."""

    models: list[Model]
    model: str | None
    optimizers: dict[str, dict[str, SeedSpread]] = Field(
        description="By group. Its name is that of its optimizer, unless runs of the optimizer differ in settings."
    )
    ratios: dict[str, Ratio] = Field(description="Of the only contrast; null if there are none or several.")
    difference: Difference | None = Field(description="Of the only contrast.")
    contrasts: list[ContrastAnswer] = Field(description="One for each setting in which both sides have runs.")
    sides: tuple[str, str] = Field(description="What the ratios are of, and to.", examples=[["AdamW", "RowNorm"]])
    groups: list[GroupAnswer]
    about: str = Field(description="In what the runs differ besides optimizer and seed.")
    keys: list[str] = Field(description="Settings that groups can be split by: those that differ.")
    notes: list[str] = Field(description="Sentences that a reader of the numbers has to know.")
    pairs: list[tuple[str, str]]
    counted: list[str] = Field(description="Ids of the runs that the means are of.")
    aside: list[str] = Field(description="Ids of the runs that are in no mean; they are drawn with `seeds`, or by run.")
    axes: list[str] = Field(description="Axes that all runs have.")
    measured: list[str] = Field(description="Metrics that `panels` can ask for: those that some run has.")
    figures: Figures = Field(description=f"For plotly: {', '.join(compare_figures.PANELS)}, and those asked for.")
    version: Version
