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
    counted: bool = False
    """Whether Prometheus has it among the counters, as one that only grows."""

    @property
    def logged(self) -> str:
        """Name in a Lightning logger."""
        return f"hilbert/{self.name}"

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"hilbert_{self.name}"


@dataclass(frozen=True, slots=True)
class Family:
    """What Prometheus knows of a run besides the numbers of its last step."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()
    """Besides `run` and `head`."""

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"hilbert_{self.name}" + {"counter": "_total", "info": "_info"}.get(self.kind, "")


CATALOGUE = (
    Metric("step_diameter", "diameter", "Row diameter D(S) of the LM head's increment, exact.", axis="log"),
    Metric("step_diameter_lower", "diameter_lower", "Certified lower bound of the row diameter.", axis="log"),
    Metric("step_diameter_upper", "diameter_upper", "Certified upper bound of the row diameter.", axis="log"),
    Metric("step_diameter_ceiling", "ceiling", "Largest row diameter this optimizer can make at its learning rate."),
    Metric("step_diameter_saturation", "saturation", "Row diameter as a share of its ceiling."),
    Metric("step_diameter_rounding", "rounding", "Bound on the row diameter's error from the rounding of weights."),
    Metric("perturbation_rms", "perturbation_rms", "Hilbert perturbation of the panel, root mean square.", axis="log"),
    Metric("perturbation_max", "perturbation_max", "Hilbert perturbation of the panel, largest.", axis="log"),
    Metric("perturbation_utilisation", "utilisation", "Perturbation's RMS as a share of its worst case.", unit="ratio"),
    Metric("hidden_norm_max", "hidden_norm", "Largest norm of a hidden state of the panel."),
    Metric("hidden_norm_rms", "hidden_norm_rms", "Norm of the panel's hidden states, root mean square."),
    Metric("spectral_norm", "spectral_norm", "Spectral norm of the LM head's increment.", axis="log"),
    Metric("gauge_waste", "gauge_waste", "Share of the increment that shifts all rows alike, in vain.", unit="ratio"),
    Metric("backward_bound", "backward_bound", "Bound on the step's change of a hidden state's gradient.", axis="log"),
    Metric("step_efficiency_lower", "efficiency_lower", "Descent as a share of the best at this diameter, at least."),
    Metric("step_efficiency_upper", "efficiency_upper", "Descent as a share of the best at this diameter, at most."),
    Metric("moment_efficiency_lower", "moment_efficiency_lower", "The same for the optimizer's moment, at least."),
    Metric("moment_efficiency_upper", "moment_efficiency_upper", "The same for the optimizer's moment, at most."),
    Metric("row_norm_max", "row_norm", "Largest norm of a row of the LM head's increment.", axis="log"),
    Metric(
        "gradient_row_norm_max", "gradient_row_norm", "Largest norm of a row of the LM head's gradient.", axis="log"
    ),
    Metric("gradient_balance", "gradient_balance", "Norm of the gradient's row sum over the sum of its row norms."),
    Metric("nonfinite_rows", "nonfinite_rows", "Rows of the increment with an infinity or a nan."),
    Metric("train_loss", "train_loss", "Training loss at the step."),
    Metric("validation_loss", "validation_loss", "Validation loss, when it was last computed."),
    Metric("learning_rate", "learning_rate", "Learning rate of the LM head at the step."),
    Metric("tokens", "tokens", "Training tokens seen.", unit="tokens", counted=True),
    Metric("monitor_share", "share", "Part of the run's time that measuring took.", unit="ratio"),
)

FAMILIES = (
    Family("run", "info", "What the run is: its name, model, seed, panel, host and versions."),
    Family("run_status", "gauge", "1 for the state the run is in, 0 for the others.", ("status",)),
    Family("run_start_timestamp_seconds", "gauge", "When this attempt at the run began, since the epoch."),
    Family("heartbeat_timestamp_seconds", "gauge", "When training last made a step or validated, since the epoch."),
    Family("stalled_after_seconds", "gauge", "Age of the heartbeat from which on the run counts as stalled."),
    Family("step", "gauge", "The last optimizer step."),
    Family("steps", "counter", "Optimizer steps that were recorded."),
    Family("tokens", "counter", "Training tokens seen."),
    Family("step_diameter_distribution", "histogram", "Row diameters of all steps: exact, or their lower bounds."),
    Family("blowups", "counter", "Steps that blew up, by the rule that said so.", ("kind",)),
    Family("blowup_value", "gauge", "What the last blow-up of a kind measured.", ("kind",)),
    Family("blowup_expected", "gauge", "What it should have been at most.", ("kind",)),
    Family("blowup_step", "gauge", "The step of the last blow-up of a kind.", ("kind",)),
    Family("nonfinite_increments", "counter", "Increments of the LM head with an infinity or a nan."),
    Family("skipped_steps", "counter", "Steps at which the optimizer moved nothing."),
    Family("monitor_seconds", "counter", "Time that measuring took, by part.", ("part",)),
    Family("monitor_failures", "counter", "What failed in the monitor or was dropped by a sink.", ("sink",)),
)
"""Of every run, whatever it measures."""


def values(record: StepRecord) -> Iterator[tuple[Metric, float]]:
    """The numbers a record has, with their metrics."""
    for metric in CATALOGUE:
        value = getattr(record, metric.field)
        if value is not None:
            yield metric, value
