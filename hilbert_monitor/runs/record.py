"""The records of a run: what it is, its steps, its alerts. Frozen structs of plain values."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from .formula import SATURATION, UTILISATION

Pair = tuple[int, int]


class RunInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt at a run says of the run. The log fills in id, attempt, time, host and process."""

    id: str = ""
    """Name of the run's folder. Give it to resume exactly that run."""
    name: str = ""
    """What the user calls the run: any text. Several runs may share it."""
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
    """Where the LM head is in the model."""
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
    """Port at which the run serves its own metrics."""
    address: str = ""
    """Address of its host at which it serves them."""
    scheme: str = "http"
    """"https" if it serves them with TLS."""
    stalled_after: float | None = None
    """Seconds without a step after which the run counts as stalled, if it asks for others than usual."""
    heartbeat: float = 5.0
    """Seconds between two heartbeats."""


class StepRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One optimizer step. A field that was not measured, or does not apply, is None."""

    step: int
    """Optimizer steps so far, this one included: the first is 1."""
    time: float
    """Seconds since the epoch, when the step was measured."""
    head: str = ""
    """Name of the head, where a monitor watches several."""
    skipped: str = ""
    """Why the optimizer moved nothing ("no gradient", "overflow"; "not finite" where a TrustRegion left the step out),
    or empty."""
    tokens: int | None = None
    """Training tokens seen so far, over all ranks."""
    train_loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    """That of the LM head at this step."""
    scheduled: bool | None = None
    """Whether the run's own scheduler set that rate; None if that is not known, or there is no scheduler."""
    batch: int | None = None
    """Index of the batch in its epoch; of an update of several micro-batches, that of the last."""
    samples: tuple[int, ...] | None = None
    """Indices of the samples that the step was made of, 64 at most, where the batches tell them and there is an alert.
    Of several ranks, those of rank zero."""

    diameter: float | None = None
    """D(S), exact."""
    diameter_lower: float | None = None
    diameter_upper: float | None = None
    """Certified bounds of D(S), equal to it where it is exact."""
    pair: Pair | None = None
    """Tokens that attain the diameter, or its lower bound."""
    pair_text: tuple[str, str] | None = None
    increment_from: str = ""
    """What S was formed from: "state" of the optimizer, weights before and after its "step", or a whole "update"."""
    stored_diameter: float | None = None
    """D of the step that the weights made, which are stored with less than fp32: D(S) is that of the step intended.
    Exact."""
    stored_diameter_lower: float | None = None
    stored_diameter_upper: float | None = None
    """Certified bounds of it."""
    stored_pair: Pair | None = None
    seen_diameter: float | None = None
    """D of the step that the forward pass sees, where it casts the weights to less than they have. Exact."""
    seen_pair: Pair | None = None
    moved_share: float | None = None
    """Share of the head's stored weights that the step changed at all."""
    trust_limit: float | None = None
    """What a TrustRegion holds the diameter of this step to; D(S) is that of the step that was asked for."""
    made_diameter: float | None = None
    """At most D of the step that was made: D(S) itself or its upper bound where nothing was held, else the limit."""
    held_rows: int | None = None
    """Rows of the head that were held back."""
    held_share: float | None = None
    """The same as a share of all rows."""
    held_tokens: tuple[int, ...] | None = None
    """Tokens of the rows that were held back most."""
    ceiling: float | None = None
    """The largest D(S) that the optimizer can make at this learning rate, where a theorem gives one."""
    rounding: float | None = None
    """Bound on the error of D(S) from the rounding of the weights, where S is their difference or they have less than
    fp32."""
    radius: float | None = None
    radius_lower: float | None = None
    """Certified bounds of the covering radius of S: that of the smallest ball that holds all its rows."""
    row_norm: float | None = None
    """Largest norm of a row of S."""
    row_token: int | None = None
    gradient_row_norm: float | None = None
    """Largest norm of a row of the head's gradient."""
    gradient_row_token: int | None = None
    gradient_balance: float | None = None
    """|sum of the gradient's rows| / sum of their norms: zero for a softmax head, as the theory assumes."""
    nonfinite_rows: int | None = None

    perturbation_rms: float | None = None
    perturbation_max: float | None = None
    """Hilbert perturbation over the panel."""
    perturbation_pair: Pair | None = None
    perturbation_pair_text: tuple[str, str] | None = None
    hidden_norm: float | None = None
    """Largest norm of a hidden state of the panel."""
    hidden_norm_rms: float | None = None

    mean_logit_rms: float | None = None
    mean_logit_min: float | None = None
    mean_logit_max: float | None = None
    """The mean logit z of a position over the panel: the mean row of the head times the hidden state."""
    centred_log_z_rms: float | None = None
    centred_log_z_min: float | None = None
    centred_log_z_max: float | None = None
    """A = log Z - z, the log-sum-exp of the logits less their mean."""
    log_z_rms: float | None = None
    log_z_min: float | None = None
    log_z_max: float | None = None
    """log Z, the log-sum-exp of the logits."""
    logit_max: float | None = None
    """The largest |logit| of the panel."""
    precision_loss: float | None = None
    """Cross entropy through logits in the run's own precision, less that in fp32: the mean over the panel."""
    precision_loss_rms: float | None = None
    """The same, root mean square over the positions, where errors do not cancel."""
    head_mean_row: float | None = None
    """Norm of the mean row of the head, which softmax does not see."""
    head_row_norm: float | None = None
    """Mean of the norms of the head's rows."""

    attention_logit: float | None = None
    """Largest |logit| of attention on the panel, where the model calls torch's scaled_dot_product_attention."""
    layer_step: float | None = None
    """Largest relative step of a layer other than the head, each in its own ruler; see `layers`."""
    layer_ratio: float | None = None
    """Largest RMS(g / sqrt(v)) of a layer whose optimizer keeps a second moment."""

    spectral_norm: float | None = None
    """The largest singular value of S."""
    gauge_waste: float | None = None
    """Share of |S|^2 that shifts all rows alike, which changes no probability."""
    backward_bound: float | None = None
    """Bound on how much the step changes the gradient that reaches a hidden state of the panel, for any target."""
    efficiency_lower: float | None = None
    efficiency_upper: float | None = None
    """Bounds of the step's first-order decrease over the best of its diameter, for the batch's gradient."""
    moment_efficiency_lower: float | None = None
    moment_efficiency_upper: float | None = None
    """The same for the optimizer's moment, the average of gradients that it keeps."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that measuring took, by part."""
    share: float | None = None
    """Share of the time since the last record that measuring took."""

    @property
    def saturation(self) -> float | None:
        """D(S) as a share of its ceiling."""
        return SATURATION.of(self)

    @property
    def utilisation(self) -> float | None:
        """The panel's RMS perturbation as a share of the most it could be, D(S) times the RMS norm of hidden states."""
        return UTILISATION.of(self)


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
    """What was measured: D(S), the panel's RMS, the learning rate, or the number of rows that are not finite."""
    expected: float | None = None
    """What was usual in the run's history, at its learning rate. For the kind "ceiling" it is the ceiling, for "rate"
    the learning rate that earlier ones led to expect, for "nonfinite" 0."""
    pair: Pair | None = None
    pair_text: tuple[str, str] | None = None
    """Tokens that attain the value."""
    pattern: str = ""
    """What about the history was broken: one "step", a "level" that lasts, or a "trend"."""
    rarity: float | None = None
    """Steps of this run among which one such is expected by chance."""
    batch: int | None = None
    """Index of the step's batch in its epoch."""
    samples: tuple[int, ...] | None = None
    """Indices of its samples, where the batch tells them: the first ones."""
    message: str = ""
    """The alert in a sentence or two."""
