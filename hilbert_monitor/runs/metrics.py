"""The catalogue of metrics.

A metric is one entry of CATALOGUE, and a field of StepRecord or a Formula of such fields. Everything else follows:
loggers, Prometheus, the service's columns and CSV files, the panels of a run's page, Grafana's dashboard of a run, and
the tables in docs/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .formula import PERTURBATION_BOUND, SATURATION, UTILISATION, Formula

if TYPE_CHECKING:
    from .record import StepRecord

Line = Literal["band", "reference", "faint", "dotted", "other", "strong"]
"""How a metric is drawn, from the lowest layer to the top.

band: the area between this lower bound and the upper bound of the same label
reference: a grey dashed line, for bounds and other lines that the strong ones are read against
faint, dotted: a thin line in the optimizer's colour
other: a dotted line in a colour of its own
strong: a thick line in the optimizer's colour, or a shade of it
"""
NOT_DRAWN = None
"""Stands in place of the name of a panel, for a metric that no panel draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number of a step."""

    name: str
    """Its last part everywhere: hilbert/NAME in a logger, hilbert_NAME in Prometheus unless that is `exposed`."""
    field: str
    """Its name in a StepRecord, in the columns of the service and in CSV files."""
    panel: str | None
    """Name of the panel of `panels` that draws it, or NOT_DRAWN."""
    label: str
    """Its name in a legend. The lower and the upper bound of something share one."""
    help: str
    """A sentence for a reader who sees nothing else, as in Prometheus."""
    formula: Formula | None = None
    """How it follows from fields of a StepRecord, if it is none itself."""
    line: Line = "strong"
    is_smoothed: bool = True
    """Whether smoothing applies to it; not to what is measured seldom and is smooth by itself."""
    unit: Literal["", "ratio", "tokens"] = ""
    axis: Literal["log", "linear"] = "linear"
    is_scientific: bool = False
    """Whether its numbers are written as powers of ten on a linear axis too."""
    exposed: str = ""
    """Its last part in Prometheus, where names must not hold the name of a type, such as gauge; empty for `name`."""
    counted: bool = False
    """Whether Prometheus has it among the counters, as one that only grows."""

    @property
    def logged(self) -> str:
        """Name in a Lightning logger."""
        return self.logged_of("")

    def logged_of(self, head: str) -> str:
        """Name in a Lightning logger, where several heads are watched, of that of one."""
        return "/".join(filter(None, ("hilbert", head, self.name)))

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"hilbert_{self.exposed or self.name}"

    def value(self, record: StepRecord) -> float | None:
        """Its number at a step; None if it was not measured."""
        value: float | None = self.formula.of(record) if self.formula else getattr(record, self.field)
        return value


CATALOGUE = (
    Metric(
        name="step_diameter",
        field="diameter",
        panel="diameter",
        label="D(S), exact",
        help="Row diameter D(S): the largest distance between two rows of the LM head's increment S, which is what one"
        " optimizer step adds to its weights. Exact.",
        axis="log",
    ),
    Metric(
        name="step_diameter_lower",
        field="diameter_lower",
        panel="diameter",
        label="bracket",
        help="Certified lower bound of the row diameter D(S) of the LM head's increment.",
        line="band",
        axis="log",
    ),
    Metric(
        name="step_diameter_upper",
        field="diameter_upper",
        panel="diameter",
        label="bracket",
        help="Certified upper bound of the row diameter D(S) of the LM head's increment.",
        line="band",
        axis="log",
    ),
    Metric(
        name="stored_diameter",
        field="stored_diameter",
        panel="diameter",
        label="stored step, exact",
        help="Row diameter of the step that the LM head's weights made, for weights stored with less than fp32: D(S) is"
        " that of the step that was intended, before rounding. Exact.",
        line="other",
        axis="log",
    ),
    Metric(
        name="seen_diameter",
        field="seen_diameter",
        panel="diameter",
        label="step as the forward pass sees it",
        help="Row diameter of the step that the forward pass sees, where it casts the LM head's weights to less than"
        " they have: under autocast, or by a mixed-precision policy of FSDP. Exact.",
        line="other",
        axis="log",
    ),
    Metric(
        name="stored_diameter_lower",
        field="stored_diameter_lower",
        panel=NOT_DRAWN,  # a second band would hide the first
        label="stored step",
        help="Certified lower bound of the row diameter of the step that the LM head's weights made, for weights stored"
        " with less than fp32.",
        axis="log",
    ),
    Metric(
        name="stored_diameter_upper",
        field="stored_diameter_upper",
        panel=NOT_DRAWN,
        label="stored step",
        help="Certified upper bound of the row diameter of the step that the LM head's weights made, for weights stored"
        " with less than fp32.",
        axis="log",
    ),
    Metric(
        name="moved_share",
        field="moved_share",
        panel="shares",
        label="weights that moved",
        help="Share of the LM head's stored weights that a step changed at all, for weights stored with less than fp32:"
        " the others rounded their step away.",
        line="other",
        unit="ratio",
    ),
    Metric(
        name="trust_limit",
        field="trust_limit",
        panel="diameter",
        label="limit",
        help="What a TrustRegion holds the row diameter of the LM head's step to.",
        line="reference",
        axis="log",
    ),
    Metric(
        name="made_diameter",
        field="made_diameter",
        panel="diameter",
        label="step that was made, at most",
        help="Upper bound of the row diameter of the step that was made, after a TrustRegion held the one that the"
        " optimizer asked for, whose diameter is D(S).",
        line="dotted",
        axis="log",
    ),
    Metric(
        name="held_share",
        field="held_share",
        panel="shares",
        label="rows held back",
        help="Share of the LM head's rows that a TrustRegion held back in a step.",
        line="dotted",
        unit="ratio",
    ),
    Metric(
        name="step_diameter_ceiling",
        field="ceiling",
        panel="diameter",
        label="ceiling",
        help="Largest row diameter D(S) that the LM head's optimizer can make at its learning rate, by a theorem.",
        line="reference",
    ),
    Metric(
        name="step_diameter_saturation",
        field="saturation",
        panel="saturation",
        label="D(S) / ceiling",
        help="Row diameter D(S) of the LM head's increment as a share of its ceiling, the largest that the optimizer"
        " can make at its learning rate.",
        formula=SATURATION,
        unit="ratio",
    ),
    Metric(
        name="step_diameter_rounding",
        field="rounding",
        panel="rounding",
        label="bound",
        help="Bound on the error of the row diameter D(S) from the rounding of the LM head's weights.",
        is_scientific=True,
    ),
    Metric(
        name="step_radius",
        field="radius",
        panel="norms",
        label="covering radius",
        help="Upper bound of the covering radius of the LM head's increment, the radius of the smallest ball that holds"
        " all its rows. The row diameter D(S) is at most twice as large.",
        axis="log",
    ),
    Metric(
        name="step_radius_lower",
        field="radius_lower",
        panel=NOT_DRAWN,  # a curve of it would hide that of the radius
        label="covering radius",
        help="Certified lower bound of the covering radius of the LM head's increment, the radius of the smallest ball"
        " that holds all its rows.",
        axis="log",
    ),
    Metric(
        name="perturbation_rms",
        field="perturbation_rms",
        panel="perturbation",
        label="Hilbert RMS",
        help="Hilbert perturbation: how far a step changes the log-odds of any two tokens at a position. Root mean"
        " square over the panel, a fixed set of validation positions.",
        axis="log",
    ),
    Metric(
        name="perturbation_max",
        field="perturbation_max",
        panel="perturbation",
        label="maximum",
        help="Hilbert perturbation: how far a step changes the log-odds of any two tokens at a position. Maximum over"
        " the panel, a fixed set of validation positions.",
        line="dotted",
        axis="log",
    ),
    Metric(
        name="perturbation_utilisation",
        field="utilisation",
        panel="shares",
        label="utilisation",
        help="Utilisation: the RMS of the Hilbert perturbation over the validation panel as a share of the most it"
        " could be, D(S) times the RMS norm of the panel's hidden states.",
        formula=UTILISATION,
        unit="ratio",
    ),
    Metric(
        name="hidden_norm_max",
        field="hidden_norm",
        panel="hidden",
        label="largest norm",
        help="Largest norm of a hidden state, an input of the LM head, on the validation panel. For a head with a bias,"
        " of the state extended by 1.",
    ),
    Metric(
        name="hidden_norm_rms",
        field="hidden_norm_rms",
        panel="hidden",
        label="RMS norm",
        help="Root mean square of the norms of the hidden states, the inputs of the LM head, on the validation panel."
        " For a head with a bias, of the states extended by 1.",
    ),
    Metric(
        name="log_z_rms",
        field="log_z_rms",
        panel="logits",
        label="log Z",
        help="Log Z, the log-sum-exp of the logits at a position: root mean square over the validation panel.",
    ),
    Metric(
        name="log_z_min",
        field="log_z_min",
        panel="logits",
        label="log Z, extremes",
        help="Smallest log Z (log-sum-exp of the logits at a position) on the validation panel.",
        line="band",
    ),
    Metric(
        name="log_z_max",
        field="log_z_max",
        panel="logits",
        label="log Z, extremes",
        help="Largest log Z (log-sum-exp of the logits at a position) on the validation panel.",
        line="band",
    ),
    Metric(
        name="mean_logit_rms",
        field="mean_logit_rms",
        panel="logits",
        label="mean logit",
        help="Mean logit at a position, the mean row of the LM head times the hidden state, which softmax does not"
        " see: root mean square over the validation panel.",
        line="other",
    ),
    Metric(
        name="mean_logit_min",
        field="mean_logit_min",
        panel=NOT_DRAWN,
        label="mean logit",
        help="Smallest mean logit of a position of the validation panel: negative where the logits have drifted down.",
    ),
    Metric(
        name="mean_logit_max",
        field="mean_logit_max",
        panel=NOT_DRAWN,
        label="mean logit",
        help="Largest mean logit of a position of the validation panel.",
    ),
    Metric(
        name="centred_log_z_rms",
        field="centred_log_z_rms",
        panel="logits",
        label="A = log Z - mean logit",
        help="A, the log-sum-exp of the logits at a position less their mean, which softmax does see: root mean"
        " square over the validation panel.",
        line="dotted",
    ),
    Metric(
        name="centred_log_z_min",
        field="centred_log_z_min",
        panel=NOT_DRAWN,
        label="A",
        help="Smallest log-sum-exp of the logits at a position less their mean, on the validation panel.",
    ),
    Metric(
        name="centred_log_z_max",
        field="centred_log_z_max",
        panel=NOT_DRAWN,
        label="A",
        help="Largest log-sum-exp of the logits at a position less their mean, on the validation panel.",
    ),
    Metric(
        name="logit_max",
        field="logit_max",
        panel="logits",
        label="largest |logit|",
        help="Largest absolute value of a logit on the validation panel.",
        line="reference",
    ),
    Metric(
        name="precision_loss_rms",
        field="precision_loss_rms",
        panel="precision",
        label="RMS over positions",
        help="Precision loss: cross entropy through logits in the run's own precision less that in fp32, root mean"
        " square over the positions of the validation panel, where errors do not cancel.",
        axis="log",
    ),
    Metric(
        name="precision_loss",
        field="precision_loss",
        panel=NOT_DRAWN,
        label="mean",
        help="Precision loss: cross entropy through logits in the run's own precision less that in fp32, mean over"
        " the validation panel.",
        is_scientific=True,
    ),
    Metric(
        name="head_row_norm",
        field="head_row_norm",
        panel="head_rows",
        label="mean norm of the rows",
        help="Mean of the norms of the LM head's rows.",
        line="reference",
    ),
    Metric(
        name="head_mean_row",
        field="head_mean_row",
        panel="head_rows",
        label="norm of the mean row",
        help="Norm of the mean row of the LM head, which softmax does not see: it grows where the optimizer moves"
        " all rows alike.",
    ),
    Metric(
        name="layer_step_max",
        field="layer_step",
        panel="layers",
        label="largest relative step",
        help="Largest step of a layer other than the LM head over its weight, each in its own ruler: spectral norm of a"
        " matrix (a lower bound), largest row of an embedding, root mean square of a vector.",
        axis="log",
    ),
    Metric(
        name="layer_ratio_max",
        field="layer_ratio",
        panel="layers",
        label="largest RMS(g / sqrt(v))",
        help="Largest root mean square of the gradient over the square root of the second moment, of the layers whose"
        " optimizer is like Adam: about 1 in a calm run.",
        line="other",
        axis="log",
    ),
    Metric(
        name="attention_logit_max",
        field="attention_logit",
        panel="layers",
        label="largest attention logit",
        help="Largest absolute value of an attention logit on the validation panel, where the model calls torch's"
        " scaled_dot_product_attention.",
        line="dotted",
        axis="log",
    ),
    Metric(
        name="spectral_norm",
        field="spectral_norm",
        panel="norms",
        label="spectral norm",
        help="Spectral norm of the LM head's increment: its largest singular value, rounded up.",
        line="other",
        axis="log",
    ),
    Metric(
        name="gauge_waste",
        exposed="shift_waste",
        field="gauge_waste",
        panel="shares",
        label="gauge waste",
        help="Gauge waste: the share of the LM head's increment, by its squared norm, that shifts all rows alike and so"
        " changes no prediction.",
        line="reference",
        unit="ratio",
    ),
    Metric(
        name="backward_bound",
        field="backward_bound",
        panel="norms",
        label="backward bound",
        help="Bound on how much a step of the LM head changes the gradient that reaches a hidden state of the"
        " validation panel, whichever token is the target.",
        line="reference",
        axis="log",
    ),
    Metric(
        name="step_efficiency_lower",
        field="efficiency_lower",
        panel="efficiency",
        label="for the gradient",
        help="Step efficiency, lower bound: how much a step lowers the loss of its batch to first order, as a share of"
        " the most that a step of the same row diameter D(S) can.",
        line="reference",
        unit="ratio",
    ),
    Metric(
        name="step_efficiency_upper",
        field="efficiency_upper",
        panel="efficiency",
        label="for the gradient",
        help="Step efficiency, upper bound: how much a step lowers the loss of its batch to first order, as a share of"
        " the most that a step of the same row diameter D(S) can.",
        line="reference",
        unit="ratio",
    ),
    Metric(
        name="moment_efficiency_lower",
        field="moment_efficiency_lower",
        panel="efficiency",
        label="for the moment",
        help="Moment efficiency, lower bound: how far a step follows the optimizer's moment (the average of gradients"
        " that it keeps), as a share of the most that a step of the same row diameter D(S) can.",
        unit="ratio",
    ),
    Metric(
        name="moment_efficiency_upper",
        field="moment_efficiency_upper",
        panel="efficiency",
        label="for the moment",
        help="Moment efficiency, upper bound: how far a step follows the optimizer's moment (the average of gradients"
        " that it keeps), as a share of the most that a step of the same row diameter D(S) can.",
        unit="ratio",
    ),
    Metric(
        name="row_norm_max",
        field="row_norm",
        panel="rows",
        label="of the increment",
        help="Largest norm of a row of the LM head's increment, which is what one optimizer step adds to its weights.",
        axis="log",
    ),
    Metric(
        name="gradient_row_norm_max",
        field="gradient_row_norm",
        panel="rows",
        label="of the gradient",
        help="Largest norm of a row of the LM head's gradient.",
        axis="log",
    ),
    Metric(
        name="gradient_balance",
        field="gradient_balance",
        panel="balance",
        label="balance",
        help="Norm of the sum of the rows of the LM head's gradient over the sum of their norms: zero for a softmax"
        " head, as the theory assumes.",
        is_scientific=True,
    ),
    Metric(
        name="nonfinite_rows",
        field="nonfinite_rows",
        panel="nonfinite",
        label="rows",
        help="Rows of the LM head's increment that hold a nan or an infinity.",
    ),
    Metric(
        name="train_loss",
        field="train_loss",
        panel="loss",
        label="training",
        help="Training loss at the step.",
        line="faint",
    ),
    Metric(
        name="validation_loss",
        field="validation_loss",
        panel="loss",
        label="validation",
        help="Validation loss, when it was last computed.",
        is_smoothed=False,
    ),
    Metric(
        name="learning_rate",
        field="learning_rate",
        panel="learning_rate",
        label="learning rate",
        help="Learning rate of the LM head at the step.",
        is_scientific=True,
    ),
    Metric(
        name="tokens",
        field="tokens",
        panel=NOT_DRAWN,  # it is an axis that others are drawn against
        label="tokens",
        help="Training tokens seen so far, over all ranks.",
        unit="tokens",
        counted=True,
    ),
    Metric(
        name="monitor_share",
        field="share",
        panel="cost",
        label="share of the time",
        help="Share of the time since the last record that the monitor's measurements took.",
        line="reference",
        unit="ratio",
    ),
)
"""Every number of a step that is logged and exported."""

GUIDES = (
    Metric(
        name="perturbation_bound",
        field="bound",
        panel="perturbation",
        label="bound D(S) max|h|",
        help="What no perturbation of the panel can exceed: D(S) times the largest norm of a hidden state.",
        formula=PERTURBATION_BOUND,
        line="reference",
        axis="log",
    ),
)
"""Lines that panels draw for comparison. They are neither logged nor exported: each follows from what is."""


def values(record: StepRecord) -> Iterator[tuple[Metric, float]]:
    """The numbers a record has, with their metrics."""
    for metric in CATALOGUE:
        value = metric.value(record)
        if value is not None:
            yield metric, value
