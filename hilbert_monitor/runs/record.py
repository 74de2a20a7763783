"""The records of a run, and its metrics. Frozen structs of plain values.

A metric is one annotated field of StepRecord, or a formula of such fields in FORMULAS. All else follows from it: the
names in loggers and in Prometheus, the service's columns and CSV files, the panels of a run's page, Grafana's
dashboard of a run, and the tables in docs/.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Struct, field

Pair = tuple[int, int]
Line = Literal["band", "reference", "faint", "dotted", "other", "strong"]
"""The look of a metric's line, from the lowest layer to the top.

band: the area between this lower bound and the upper bound of the same label
reference: a grey dashed line, for bounds and other lines that the strong ones are read against
faint, dotted: a thin line in the optimizer's colour
other: a dotted line in a colour that belongs to no optimizer
strong: a thick line in the optimizer's colour, or a shade of it
"""


@dataclass(frozen=True)
class Metric:
    """One number of a step, for everything that logs, exports or draws it."""

    name: str
    """Last part of its name: hilbert/NAME in a logger, hilbert_NAME in Prometheus unless `exposed` is set."""
    _: dataclasses.KW_ONLY
    label: str
    """Name in a legend. The lower and the upper bound of a quantity share one."""
    help: str
    """A sentence for a reader who sees nothing else, as in Prometheus."""
    panel: str | None = None
    """Name of the panel of a run's page that draws it; None if none does."""
    line: Line = "strong"
    log: bool = False
    """True for a logarithmic axis."""
    smoothed: bool = True
    """False for a metric that is measured seldom and is smooth already."""
    scientific: bool = False
    """True if its numbers are written as powers of ten on a linear axis too."""
    unit: Literal["", "ratio", "tokens"] = ""
    exposed: str = ""
    """Last part of its name in Prometheus, where names must not contain a type such as gauge; empty for `name`."""
    counted: bool = False
    """True for a counter in Prometheus: a number that only grows."""
    field: str = ""
    """Its name in a StepRecord, in columns and in CSV files."""
    formula: Callable[..., Any] | None = None
    """A function of fields of a StepRecord, named as its arguments, for a metric that is not a field. It takes numbers
    or numpy arrays."""

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of a StepRecord that it follows from."""
        return tuple(inspect.signature(self.formula).parameters) if self.formula else (self.field,)

    @property
    def logged(self) -> str:
        """Name in a Lightning logger."""
        return self.logged_of("")

    def logged_of(self, head: str) -> str:
        """Return the name in a Lightning logger for one of several heads."""
        return "/".join(filter(None, ("hilbert", head, self.name)))

    @property
    def exported(self) -> str:
        """Name in Prometheus."""
        return f"hilbert_{self.exposed or self.name}"

    def value(self, record: StepRecord) -> float | None:
        """Return its number at a step; None if it was not measured, or a formula divides by zero."""
        values = [getattr(record, name) for name in self.fields]
        if self.formula is None or None in values:
            return None if None in values else values[0]
        try:
            result = float(self.formula(*values))
        except ZeroDivisionError:
            return None
        return result if math.isfinite(result) or not all(map(math.isfinite, values)) else None


class RunInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The description of a run by one of its attempts. The log fills in id, attempt, time, host and process."""

    id: str = ""
    """Name of the run's folder. Give it to resume exactly that run."""
    name: str = ""
    """The user's name for the run: any text. Several runs may share it."""
    attempt: int = 1
    """Processes that have written this run so far, this one included."""
    first_step: int = 0
    """The step this attempt goes on from: records of earlier attempts beyond it no longer count."""
    last_step: int | None = None
    """The step at which training will end, where that is known before."""
    started: float = 0.0
    """Seconds since the epoch, when the attempt began."""
    head_optimizer: str = ""
    head_name: str = ""
    """Path of the LM head in the model."""
    model: str = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The user's settings. What JSON has no form for is stored as text."""
    panel_hash: str = ""
    """Identifies the panel, the fixed set of validation positions that perturbations are measured on: runs with equal
    hashes can be compared. Empty until there is a panel."""
    panel_size: int | None = None
    remarks: tuple[str, ...] = ()
    """Sentences that a reader of the numbers has to know."""
    versions: dict[str, str] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    world_size: int = 1
    """Ranks that train together."""
    port: int | None = None
    address: str = ""
    """Port and address at which the run serves its own metrics."""
    scheme: str = "http"
    """"https" if it serves them with TLS."""
    stalled_after: float | None = None
    """Seconds without a step after which the run counts as stalled, if it asks for others than usual."""
    heartbeat: float = 5.0
    """Seconds between two heartbeats."""


# The formatter would need ten lines for each metric.
# fmt: off
class StepRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One optimizer step. A field that was not measured, or does not apply, is None.

    A field with a Metric is logged, exported and drawn; its help describes it.
    """

    step: int
    """Optimizer steps so far, this one included: the first is 1."""
    time: float
    """Seconds since the epoch, when the step was measured."""
    head: str = ""
    """Name of the head, where a monitor watches several."""
    skipped: str = ""
    """Reason for which the optimizer moved nothing ("no gradient", "overflow"; "not finite" if a TrustRegion skipped
    the step), or empty."""
    tokens: Annotated[int | None, Metric("tokens", label="tokens", unit="tokens", counted=True,
        help="Training tokens seen so far, over all ranks.")] = None
    train_loss: Annotated[float | None, Metric("train_loss", panel="loss", label="training", line="faint",
        help="Training loss at the step.")] = None
    validation_loss: Annotated[float | None, Metric("validation_loss", panel="loss", label="validation",
        smoothed=False, help="Validation loss, when it was last computed.")] = None
    learning_rate: Annotated[float | None, Metric("learning_rate", panel="learning_rate", label="learning rate",
        scientific=True, help="Learning rate of the LM head at the step.")] = None
    scheduled: bool | None = None
    """True if the run's scheduler set that rate; None if that is unknown or the run has no scheduler."""
    batch: int | None = None
    """Index of the batch in its epoch; with accumulation, of the last micro-batch."""
    samples: tuple[int, ...] | None = None
    """Indices of the samples that the step was made of, 64 at most, where the batches tell them and there is an alert.
    Of several ranks, those of rank zero."""

    diameter: Annotated[float | None, Metric("step_diameter", panel="diameter", label="D(S), exact", log=True,
        help="Row diameter D(S): the largest distance between two rows of the LM head's increment S, which is what one"
        " optimizer step adds to its weights. Exact.")] = None
    diameter_lower: Annotated[float | None, Metric("step_diameter_lower", panel="diameter", label="bracket",
        line="band", log=True,
        help="Certified lower bound of the row diameter D(S) of the LM head's increment.")] = None
    diameter_upper: Annotated[float | None, Metric("step_diameter_upper", panel="diameter", label="bracket",
        line="band", log=True,
        help="Certified upper bound of the row diameter D(S) of the LM head's increment.")] = None
    change_diameter: Annotated[float | None, Metric("change_diameter", panel="diameter",
        label="change of the weights, exact", line="other", log=True,
        help="Row diameter of the change of the LM head's weights in a step, weight decay included, where that decay is"
        " not known and D(S) therefore is not either. Exact.")] = None
    decay: str = ""
    """"unknown" where only the change of the weights with its decay is known, or empty."""
    pair: Pair | None = None
    """Tokens that attain the diameter, its lower bound, or the change's."""
    pair_text: tuple[str, str] | None = None
    increment_from: str = ""
    """Source of S: "state" of the optimizer, weights before and after its "step", or a whole "update"."""
    stored_diameter: Annotated[float | None, Metric("stored_diameter", panel="diameter", label="stored step, exact",
        line="other", log=True,
        help="Row diameter of the step that the LM head's weights made, for weights stored with less than fp32: D(S) is"
        " that of the step that was intended, before rounding. Exact.")] = None
    stored_diameter_lower: Annotated[float | None, Metric("stored_diameter_lower", label="stored step", log=True,
        help="Certified lower bound of the row diameter of the step that the LM head's weights made, for weights stored"
        " with less than fp32.")] = None
    stored_diameter_upper: Annotated[float | None, Metric("stored_diameter_upper", label="stored step", log=True,
        help="Certified upper bound of the row diameter of the step that the LM head's weights made, for weights stored"
        " with less than fp32.")] = None
    stored_pair: Pair | None = None
    moved_share: Annotated[float | None, Metric("moved_share", panel="shares", label="weights that moved",
        line="other", unit="ratio",
        help="Share of the LM head's stored weights that a step changed at all, for weights stored with less than fp32:"
        " the others rounded their step away.")] = None
    trust_limit: Annotated[float | None, Metric("trust_limit", panel="diameter", label="limit", line="reference",
        log=True, help="What a TrustRegion holds the row diameter of the LM head's step to.")] = None
    made_diameter: Annotated[float | None, Metric("made_diameter", panel="diameter",
        label="step that was made, at most", line="dotted", log=True,
        help="Upper bound of the row diameter of the step that was made, after a TrustRegion held the one that the"
        " optimizer asked for, whose diameter is D(S).")] = None
    held_rows: int | None = None
    """Rows of the head that were held back."""
    held_share: Annotated[float | None, Metric("held_share", panel="shares", label="rows held back", line="dotted",
        unit="ratio",
        help="Share of the LM head's rows that a TrustRegion held back in a step.")] = None
    held_tokens: tuple[int, ...] | None = None
    """Tokens of the rows that were held back most."""
    ceiling: Annotated[float | None, Metric("step_diameter_ceiling", panel="diameter", label="ceiling",
        line="reference",
        help="Largest row diameter D(S) that the LM head's optimizer can make at its learning rate, by a"
        " theorem.")] = None
    rounding: Annotated[float | None, Metric("step_diameter_rounding", panel="rounding", label="bound",
        scientific=True,
        help="Bound on the error of the row diameter D(S) from the rounding of the LM head's weights.")] = None
    radius: Annotated[float | None, Metric("step_radius", panel="norms", label="covering radius", log=True,
        help="Upper bound of the covering radius of the LM head's increment, the radius of the smallest ball that holds"
        " all its rows. The row diameter D(S) is at most twice as large.")] = None
    radius_lower: Annotated[float | None, Metric("step_radius_lower", label="covering radius", log=True,
        help="Certified lower bound of the covering radius of the LM head's increment, the radius of the smallest ball"
        " that holds all its rows.")] = None
    row_norm: Annotated[float | None, Metric("row_norm_max", panel="rows", label="of the increment", log=True,
        help="Largest norm of a row of the LM head's increment, which is what one optimizer step adds to its"
        " weights.")] = None
    row_token: int | None = None
    gradient_row_norm: Annotated[float | None, Metric("gradient_row_norm_max", panel="rows", label="of the gradient",
        log=True, help="Largest norm of a row of the LM head's gradient.")] = None
    gradient_row_token: int | None = None
    gradient_balance: Annotated[float | None, Metric("gradient_balance", panel="balance", label="balance",
        scientific=True,
        help="Norm of the sum of the rows of the LM head's gradient over the sum of their norms: zero for a softmax"
        " head, as the theory assumes.")] = None
    nonfinite_rows: Annotated[int | None, Metric("nonfinite_rows", panel="nonfinite", label="rows",
        help="Rows of the LM head's increment that hold a nan or an infinity.")] = None

    perturbation_rms: Annotated[float | None, Metric("perturbation_rms", panel="perturbation", label="Hilbert RMS",
        log=True,
        help="Hilbert perturbation: how far a step changes the log-odds of any two tokens at a position. Root mean"
        " square over the panel, a fixed set of validation positions.")] = None
    perturbation_max: Annotated[float | None, Metric("perturbation_max", panel="perturbation", label="maximum",
        line="dotted", log=True,
        help="Hilbert perturbation: how far a step changes the log-odds of any two tokens at a position. Maximum over"
        " the panel, a fixed set of validation positions.")] = None
    perturbation_pair: Pair | None = None
    perturbation_pair_text: tuple[str, str] | None = None
    hidden_norm: Annotated[float | None, Metric("hidden_norm_max", panel="hidden", label="largest norm",
        help="Largest norm of a hidden state, an input of the LM head, on the validation panel. For a head with a bias,"
        " of the state extended by 1.")] = None
    hidden_norm_rms: Annotated[float | None, Metric("hidden_norm_rms", panel="hidden", label="RMS norm",
        help="Root mean square of the norms of the hidden states, the inputs of the LM head, on the validation panel."
        " For a head with a bias, of the states extended by 1.")] = None

    mean_logit_rms: Annotated[float | None, Metric("mean_logit_rms", panel="logits", label="mean logit", line="other",
        help="Mean logit at a position, the mean row of the LM head times the hidden state, which softmax does not see:"
        " root mean square over the validation panel.")] = None
    mean_logit_min: Annotated[float | None, Metric("mean_logit_min", label="mean logit",
        help="Smallest mean logit of a position of the validation panel: negative where the logits have drifted"
        " down.")] = None
    mean_logit_max: Annotated[float | None, Metric("mean_logit_max", label="mean logit",
        help="Largest mean logit of a position of the validation panel.")] = None
    centred_log_z_rms: Annotated[float | None, Metric("centred_log_z_rms", panel="logits",
        label="A = log Z - mean logit", line="dotted",
        help="A, the log-sum-exp of the logits at a position less their mean, which softmax does see: root mean square"
        " over the validation panel.")] = None
    centred_log_z_min: Annotated[float | None, Metric("centred_log_z_min", label="A",
        help="Smallest log-sum-exp of the logits at a position less their mean, on the validation panel.")] = None
    centred_log_z_max: Annotated[float | None, Metric("centred_log_z_max", label="A",
        help="Largest log-sum-exp of the logits at a position less their mean, on the validation panel.")] = None
    log_z_rms: Annotated[float | None, Metric("log_z_rms", panel="logits", label="log Z",
        help="Log Z, the log-sum-exp of the logits at a position: root mean square over the validation panel.")] = None
    log_z_min: Annotated[float | None, Metric("log_z_min", panel="logits", label="log Z, extremes", line="band",
        help="Smallest log Z (log-sum-exp of the logits at a position) on the validation panel.")] = None
    log_z_max: Annotated[float | None, Metric("log_z_max", panel="logits", label="log Z, extremes", line="band",
        help="Largest log Z (log-sum-exp of the logits at a position) on the validation panel.")] = None
    logit_max: Annotated[float | None, Metric("logit_max", panel="logits", label="largest |logit|", line="reference",
        help="Largest absolute value of a logit on the validation panel.")] = None
    precision_loss: Annotated[float | None, Metric("precision_loss", label="mean", scientific=True,
        help="Precision loss: cross entropy through logits in the run's own precision less that in fp32, mean over the"
        " validation panel.")] = None
    precision_loss_rms: Annotated[float | None, Metric("precision_loss_rms", panel="precision",
        label="RMS over positions", log=True,
        help="Precision loss: cross entropy through logits in the run's own precision less that in fp32, root mean"
        " square over the positions of the validation panel, where errors do not cancel.")] = None
    head_mean_row: Annotated[float | None, Metric("head_mean_row", panel="head_rows", label="norm of the mean row",
        help="Norm of the mean row of the LM head, which softmax does not see: it grows where the optimizer moves all"
        " rows alike.")] = None
    head_row_norm: Annotated[float | None, Metric("head_row_norm", panel="head_rows", label="mean norm of the rows",
        line="reference", help="Mean of the norms of the LM head's rows.")] = None

    layer_step: Annotated[float | None, Metric("layer_step_max", panel="layers", label="largest relative step",
        log=True,
        help="Largest step of a layer other than the LM head over its weight, each in its own ruler: spectral norm of a"
        " matrix (a lower bound), largest row of an embedding, root mean square of a vector.")] = None
    layer_ratio: Annotated[float | None, Metric("layer_ratio_max", panel="layers", label="largest RMS(g / sqrt(v))",
        line="other", log=True,
        help="Largest root mean square of the gradient over the square root of the second moment, of the layers whose"
        " optimizer is like Adam: about 1 in a calm run.")] = None
    attention_logit: Annotated[float | None, Metric("attention_logit_max", panel="layers",
        label="largest attention logit", line="dotted", log=True,
        help="Largest absolute value of an attention logit on the validation panel, where the model calls torch's"
        " scaled_dot_product_attention.")] = None

    spectral_norm: Annotated[float | None, Metric("spectral_norm", panel="norms", label="spectral norm", line="other",
        log=True, help="Spectral norm of the LM head's increment: its largest singular value, rounded up.")] = None
    gauge_waste: Annotated[float | None, Metric("gauge_waste", panel="shares", label="gauge waste", line="reference",
        unit="ratio", exposed="shift_waste",
        help="Gauge waste: the share of the LM head's increment, by its squared norm, that shifts all rows alike and so"
        " changes no prediction.")] = None
    backward_bound: Annotated[float | None, Metric("backward_bound", panel="norms", label="backward bound",
        line="reference", log=True,
        help="Bound on how much a step of the LM head changes the gradient that reaches a hidden state of the"
        " validation panel, whichever token is the target.")] = None
    efficiency_lower: Annotated[float | None, Metric("step_efficiency_lower", panel="efficiency",
        label="for the gradient", line="reference", unit="ratio",
        help="Step efficiency, lower bound: how much a step lowers the loss of its batch to first order, as a share of"
        " the most that a step of the same row diameter D(S) can.")] = None
    efficiency_upper: Annotated[float | None, Metric("step_efficiency_upper", panel="efficiency",
        label="for the gradient", line="reference", unit="ratio",
        help="Step efficiency, upper bound: how much a step lowers the loss of its batch to first order, as a share of"
        " the most that a step of the same row diameter D(S) can.")] = None
    moment_efficiency_lower: Annotated[float | None, Metric("moment_efficiency_lower", panel="efficiency",
        label="for the moment", unit="ratio",
        help="Moment efficiency, lower bound: how far a step follows the optimizer's moment (the average of gradients"
        " that it keeps), as a share of the most that a step of the same row diameter D(S) can.")] = None
    moment_efficiency_upper: Annotated[float | None, Metric("moment_efficiency_upper", panel="efficiency",
        label="for the moment", unit="ratio",
        help="Moment efficiency, upper bound: how far a step follows the optimizer's moment (the average of gradients"
        " that it keeps), as a share of the most that a step of the same row diameter D(S) can.")] = None

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that measuring took, by part."""
    share: Annotated[float | None, Metric("monitor_share", panel="cost", label="share of the time", line="reference",
        unit="ratio", help="Share of the time since the last record that the monitor's measurements took.")] = None

    @property
    def saturation(self) -> float | None:
        """D(S) as a share of its ceiling."""
        return SATURATION.value(self)

    @property
    def utilisation(self) -> float | None:
        """RMS of the perturbation as a share of the most it could be."""
        return UTILISATION.value(self)


SATURATION = Metric("step_diameter_saturation", field="saturation", panel="saturation", label="D(S) / ceiling",
    formula=lambda diameter, ceiling: diameter / ceiling, unit="ratio",
    help="Row diameter D(S) of the LM head's increment as a share of its ceiling, the largest that the optimizer can"
    " make at its learning rate.")
UTILISATION = Metric("perturbation_utilisation", field="utilisation", panel="shares", label="utilisation",
    formula=lambda perturbation_rms, diameter, hidden_norm_rms: perturbation_rms / (diameter * hidden_norm_rms),
    unit="ratio",
    help="Utilisation: the RMS of the Hilbert perturbation over the validation panel as a share of the most it could"
    " be, D(S) times the RMS norm of the panel's hidden states.")
FORMULAS = (SATURATION, UTILISATION)
"""Metrics that follow from fields."""
DERIVED_LINES = (
    Metric("perturbation_bound", field="bound", panel="perturbation", label="bound D(S) max|h|", line="reference",
        formula=lambda diameter, hidden_norm: diameter * hidden_norm, log=True,
        help="What no perturbation of the panel can exceed: D(S) times the largest norm of a hidden state."),
)
"""Lines that panels draw for comparison. They are neither logged nor exported: each follows from fields."""
# fmt: on

METRICS = (
    *(
        dataclasses.replace(part, field=name)
        for name, annotation in get_type_hints(StepRecord, include_extras=True).items()
        for part in getattr(annotation, "__metadata__", ())
        if isinstance(part, Metric)
    ),
    *FORMULAS,
)
"""Every number of a step that is logged and exported, in the order of the fields."""


def measured(record: StepRecord) -> Iterator[tuple[Metric, float]]:
    """Yield the metrics that a record has, with their numbers."""
    for metric in METRICS:
        value = metric.value(record)
        if value is not None:
            yield metric, value


class Layer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The change of one parameter in a step, in the ruler that suits it."""

    kind: str
    """The ruler: "matrix" for the spectral norm, "embedding" for the largest row, "vector" for the root mean square."""
    step: float
    """Size of the increment. Of a matrix a lower bound that is close after some measurements."""
    weight: float
    """Size of the weight after it, in the same ruler."""
    upper: float | None = None
    """Certified upper bound of the increment's spectral norm, where it was computed."""
    ratio: float | None = None
    """RMS(g / sqrt(v)): the gradient over the second moment of an optimizer like Adam. About 1 in a calm run."""
    lr: float | None = None

    @property
    def relative(self) -> float:
        """Size of the increment over the size of the weight; infinite for a weight of zero."""
        return self.step / self.weight if self.weight else float("inf")


class LayerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The layers of one optimizer step, by the names of their parameters."""

    step: int
    time: float
    layers: dict[str, Layer]


class Alert(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step that broke one of the rules of `alerts`: a blow-up."""

    step: int
    time: float
    """Seconds since the epoch."""
    kind: str
    """The rule that it broke, one of alerts.KINDS."""
    severity: str = "notice"
    """"page" for what needs somebody now, "notice" for a mark on the dashboard."""
    value: float
    """The measured number: D(S), the panel's RMS, the learning rate, or the number of rows that are not finite."""
    expected: float | None = None
    """The usual value in the run's history, at its learning rate. For the kind "ceiling" it is the ceiling, for "rate"
    the learning rate that earlier ones led to expect, for "nonfinite" 0."""
    pair: Pair | None = None
    pair_text: tuple[str, str] | None = None
    """Tokens that attain the value."""
    pattern: str = ""
    """The kind of deviation from the history: one "step", a lasting "level", or a "trend"."""
    rarity: float | None = None
    """Steps of this run among which one such is expected by chance."""
    batch: int | None = None
    samples: tuple[int, ...] | None = None
    """Those of the step's record."""
    message: str = ""
    """The alert in a sentence or two."""
