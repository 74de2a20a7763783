"""What people say about runs, and requests that change it, as the OpenAPI document of the API describes them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool

from .schema import Answer, Number, RemarksAnswer

Id = Annotated[str, Field(max_length=300)]
Tag = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[^,\"\x00-\x1f]+$", examples=["baseline"])]


class AllRemarks(Answer):
    """What people say about runs, by the id of the run."""

    offered: bool = Field(description="Whether this service can keep remarks.")
    problem: str = Field(description="Why it cannot; else empty.")
    runs: dict[str, RemarksAnswer]


class ChangedRemarks(Answer):
    """The new remarks of the runs that were named."""

    runs: dict[str, RemarksAnswer]


class RemarksChange(Answer):
    """A change of what is said about runs. What is left out stays as it is."""

    runs: list[Id] = Field(min_length=1, max_length=10_000, description="Ids of the runs.")
    note: str | None = Field(None, max_length=4000, description="The new note; empty for none.")
    tag: list[Tag] = Field([], max_length=20, description="Tags to add.")
    untag: list[Tag] = Field([], max_length=20, description="Tags to take away.")
    archived: StrictBool | None = Field(None, description="Whether to archive the runs, or to bring them back.")


class AlertKey(Answer):
    """An alert of a run, as the API gives it."""

    step: int = Field(ge=-(2**53), le=2**53)
    kind: str = Field(max_length=100)
    time: Number


class AcknowledgementChange(Answer):
    """Alerts to acknowledge."""

    run: Id
    alerts: list[AlertKey] | None = Field(None, max_length=5000, description="Which; without any, all of the run's.")
    by: str = Field("", max_length=80, description="Who acknowledges them.", examples=["Ada"])
    undo: StrictBool = Field(False, description="Whether they are to be open again.")
