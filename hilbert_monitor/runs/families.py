"""What Prometheus gets of every run besides the metrics of its steps: its state, its counters, its last blow-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .metrics import CATALOGUE


@dataclass(frozen=True, slots=True)
class Family:
    """A family of samples in Prometheus: a name with all its labels."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()
    """Besides `run` and `head`."""

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"hilbert_{self.name}" + {"counter": "_total", "info": "_info"}.get(self.kind, "")


FAMILIES = (
    Family("run", "info", "What the run is, in labels: its name, model, seed, validation panel, host and versions."),
    Family("run_status", "gauge", "1 for the state that the run is in, 0 for the others.", ("status",)),
    Family("run_start_timestamp_seconds", "gauge", "When the present attempt at the run began, since the epoch."),
    Family("heartbeat_timestamp_seconds", "gauge", "When training last made a step or validated, since the epoch."),
    Family("stalled_after_seconds", "gauge", "Age of the heartbeat from which on the run counts as stalled."),
    Family("step", "gauge", "Number of the last optimizer step."),
    Family("steps", "counter", "Optimizer steps that were recorded."),
    *(Family(metric.name, "counter", metric.help) for metric in CATALOGUE if metric.counted),
    Family(
        "step_diameter_distribution",
        "histogram",
        "Row diameters D(S) of all steps: exact where that was computed, else the certified lower bound.",
    ),
    Family(
        "blowups",
        "counter",
        "Blow-ups: steps that broke one of the monitor's rules, by the rule's kind and its severity, page or notice.",
        ("kind", "severity"),
    ),
    Family(
        "blowup_value",
        "gauge",
        "What was measured at the last blow-up of each kind and severity.",
        ("kind", "severity"),
    ),
    Family(
        "blowup_expected",
        "gauge",
        "What was usual before the last blow-up of each kind and severity, at its learning rate; the ceiling for kind"
        " ceiling, the expected learning rate for kind rate, 0 for kind nonfinite.",
        ("kind", "severity"),
    ),
    Family("blowup_step", "gauge", "Step of the last blow-up of each kind and severity.", ("kind", "severity")),
    Family("nonfinite_increments", "counter", "Steps whose increment of the LM head held a nan or an infinity."),
    Family("skipped_steps", "counter", "Steps at which the optimizer moved nothing."),
    Family("clipped_steps", "counter", "Steps of which a TrustRegion held something back."),
    Family("monitor_seconds", "counter", "Seconds that the monitor's measurements took, by part.", ("part",)),
    Family(
        "monitor_failures",
        "counter",
        "Failures of the monitor, by the part that raised an exception or the sink that dropped records.",
        ("sink",),
    ),
)
