"""The catalogue: every metric's name, unit, help and axis. Loggers, exporter, dashboards and documents read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .record import StepRecord


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a step."""

    name: str
    """Its last part everywhere: hilbert/NAME in a logger, hilbert_NAME in Prometheus."""
    field: str
    """Where a StepRecord has it."""
    help: str
    unit: str = ""
    axis: Literal["log", "linear"] = "linear"

    @property
    def logged(self) -> str:
        """Name in a Lightning logger."""
        return f"hilbert/{self.name}"


CATALOGUE = (
    Metric("step_diameter", "diameter", "Row diameter D(S) of the LM head's increment, exact.", axis="log"),
    Metric("step_diameter_lower", "diameter_lower", "Certified lower bound of the row diameter.", axis="log"),
    Metric("step_diameter_upper", "diameter_upper", "Certified upper bound of the row diameter.", axis="log"),
    Metric("step_diameter_ceiling", "ceiling", "Largest row diameter this optimizer can make at its learning rate."),
    Metric("step_diameter_saturation", "saturation", "Row diameter as a share of its ceiling."),
    Metric("step_diameter_rounding", "rounding", "Bound on the row diameter's error from the rounding of weights."),
    Metric("perturbation_rms", "perturbation_rms", "Hilbert perturbation of the panel, root mean square.", axis="log"),
    Metric("perturbation_max", "perturbation_max", "Hilbert perturbation of the panel, largest.", axis="log"),
    Metric("hidden_norm_max", "hidden_norm", "Largest norm of a hidden state of the panel."),
    Metric("row_norm_max", "row_norm", "Largest norm of a row of the LM head's increment.", axis="log"),
    Metric(
        "gradient_row_norm_max", "gradient_row_norm", "Largest norm of a row of the LM head's gradient.", axis="log"
    ),
    Metric("gradient_balance", "gradient_balance", "Norm of the gradient's row sum over the sum of its row norms."),
    Metric("nonfinite_rows", "nonfinite_rows", "Rows of the increment with an infinity or a nan."),
    Metric("train_loss", "train_loss", "Training loss at the step."),
    Metric("validation_loss", "validation_loss", "Validation loss, when it was last computed."),
    Metric("learning_rate", "learning_rate", "Learning rate of the LM head at the step."),
    Metric("tokens", "tokens", "Training tokens seen.", unit="tokens"),
    Metric("monitor_share", "share", "Part of the run's time that measuring took.", unit="ratio"),
)


def values(record: StepRecord) -> Iterator[tuple[Metric, float]]:
    """The numbers a record has, with their metrics."""
    for metric in CATALOGUE:
        value = getattr(record, metric.field)
        if value is not None:
            yield metric, value
