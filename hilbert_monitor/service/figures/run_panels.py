"""The panels that draw a run: on its page, in its CSV files and on Grafana's dashboard of a run.

Each metric names the panel that draws it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hilbert_monitor.runs.record import DERIVED_LINES, METRICS, Metric

Section = Literal["Geometry", "What a step is worth", "Blow-ups", "Training", "Cost of measuring"]
SECTIONS: tuple[Section, ...] = get_args(Section)
"""Rows of Grafana's dashboard of a run, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPanel:
    """A figure of one run. The metrics that name it are its lines."""

    name: str
    """In addresses: /api/runs/RUN/panels/NAME.csv."""
    title: str
    section: Section
    """Heading of the row of Grafana's dashboard that it stands in."""
    axis_title: str
    help: str
    """What it shows, in a sentence under its title."""
    if_empty: str = "Not measured yet."
    """A sentence in place of the curves, if there are none."""
    beside: tuple[str, ...] = ()
    """Names of metrics that it draws too, for comparison, though another panel is theirs."""
    on_page: bool = True
    """Whether the page of a run draws it, and not Grafana alone."""
    skips_start: bool = False
    """Whether the range of y is that of the values after the first twentieth of the run."""


WITH_THE_PANEL = "Not measured yet: it is measured together with the validation panel."

PANELS = (
    RunPanel(
        name="diameter",
        title="Row diameter D(S)",
        section="Geometry",
        axis_title="Row diameter D(S)",
        help="The largest distance between two rows of a step of the LM head, with its certified bounds (the bracket)"
        " and, where a theorem gives one, its ceiling.",
    ),
    RunPanel(
        name="saturation",
        title="Saturation",
        section="Geometry",
        axis_title="Share of the ceiling",
        help="D(S) as a share of its ceiling, the most that the optimizer can make. Above 100 % something else writes"
        " to the head.",
        if_empty="No ceiling is known for this optimizer.",
    ),
    RunPanel(
        name="perturbation",
        title="Hilbert perturbation",
        section="Geometry",
        axis_title="Hilbert perturbation",
        help="How far a step moves the predictions on the panel, a fixed set of validation positions: root mean square,"
        " maximum, and what bounds both.",
    ),
    RunPanel(
        name="loss",
        title="Loss",
        section="Training",
        axis_title="Loss",
        help="Validation loss, and thinner the training loss.",
        skips_start=True,
    ),
    RunPanel(
        name="efficiency",
        title="Step efficiency",
        section="What a step is worth",
        axis_title="Share of the best descent",
        help="First-order descent as a share of the best at this diameter, between two bounds: for the batch's"
        " gradient, and for the moment, the optimizer's average of gradients.",
        if_empty="Not measured: HilbertMonitor(efficiency=True) does.",
    ),
    RunPanel(
        name="shares",
        title="Utilisation and gauge waste",
        section="What a step is worth",
        axis_title="Share",
        help="Utilisation: Hilbert RMS as a share of D(S) times the RMS norm of hidden states, its worst case. Gauge"
        " waste: the share of the step that shifts all rows alike and changes no prediction. Where a TrustRegion holds"
        " steps: the share of rows that it held back.",
        if_empty=WITH_THE_PANEL,
    ),
    RunPanel(
        name="norms",
        title="Other norms of the step",
        section="What a step is worth",
        axis_title="Norms of the step",
        help="Other rulers of the step, beside D(S): among them a bound on how much it changes the gradient of a hidden"
        " state.",
        beside=("step_diameter",),
    ),
    RunPanel(
        name="logits",
        title="Where the logits are",
        section="Geometry",
        axis_title="Logits of the panel",
        help="log Z = mean logit + A at the panel's positions. Softmax sees A and not the mean logit; in bf16 the size"
        " of both costs precision.",
        if_empty=WITH_THE_PANEL,
    ),
    RunPanel(
        name="precision",
        title="Precision loss",
        section="Geometry",
        axis_title="Cross entropy, run's precision less fp32",
        help="How far the cross entropy of a position is from that of fp32 logits, because the run forms its logits in"
        " less: root mean square over the panel.",
        if_empty="Not measured: it is for runs whose logits have less than fp32, together with the validation panel.",
    ),
    RunPanel(
        name="layers",
        title="Layers",
        section="What a step is worth",
        axis_title="Largest over the layers",
        help="The largest relative step of a layer other than the head, each in its own ruler, the largest RMS(g /"
        " sqrt(v)), and the largest attention logit on the panel.",
        if_empty="Not measured: HilbertMonitor(layers=True) does.",
    ),
    RunPanel(
        name="learning_rate",
        title="Learning rate",
        section="Training",
        axis_title="Learning rate of the LM head",
        help="That of the LM head.",
    ),
    RunPanel(
        name="cost",
        title="Cost of the monitor",
        section="Cost of measuring",
        axis_title="Share of the time",
        help="What measuring took: seconds by part, and their share of the time between two records.",
    ),
    RunPanel(
        name="rows",
        title="Largest row",
        section="Geometry",
        axis_title="Norm of a row",
        help="The largest norm of a row of the step, and of the gradient.",
        on_page=False,
    ),
    RunPanel(
        name="head_rows",
        title="Mean row of the head",
        section="Geometry",
        axis_title="Norm of a row",
        help="The mean row of the LM head, which softmax does not see, beside the mean norm of its rows.",
        on_page=False,
    ),
    RunPanel(
        name="hidden",
        title="Hidden states of the panel",
        section="Geometry",
        axis_title="Norm of a hidden state",
        help="The inputs of the LM head on the panel, a fixed set of validation positions.",
        on_page=False,
    ),
    RunPanel(
        name="balance",
        title="Balance of the gradient",
        section="Geometry",
        axis_title="Balance",
        help="Whether the rows of the gradient sum to zero.",
        on_page=False,
    ),
    RunPanel(
        name="rounding",
        title="Rounding of D(S)",
        section="Geometry",
        axis_title="Bound of the error",
        help="Only where the increment is a difference of weights, or where the weights have less than fp32.",
        on_page=False,
    ),
    RunPanel(
        name="nonfinite",
        title="Rows that are not finite",
        section="Blow-ups",
        axis_title="Rows",
        help="In the increment of the last step.",
        on_page=False,
    ),
)


def drawn_in(panel: RunPanel) -> tuple[Metric, ...]:
    """The metrics that a panel draws: those of others first, then its own."""
    known = (*METRICS, *DERIVED_LINES)
    others = (metric for metric in known if metric.name in panel.beside)
    return (*others, *(metric for metric in known if metric.panel == panel.name))
