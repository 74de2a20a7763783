"""What a run says of itself, its steps and what went wrong with them: frozen, typed, of plain values."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from .formula import SATURATION, UTILISATION

Pair = tuple[int, int]


class RunInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run is, as one attempt at it knows. Where it was written, when and by whom its log fills in."""

    id: str = ""
    """Name of the run's folder. Give it to go on with exactly that run."""
    name: str = ""
    """What the user calls the run: any text, also the same for several runs."""
    attempt: int = 1
    """Processes that have written this run so far, this one included."""
    first_step: int = 0
    """The step this attempt goes on from: what earlier attempts did beyond it no longer counts."""
    started: float = 0.0
    """Seconds since the epoch, when the attempt began."""
    head_optimizer: str = ""
    model: str = ""
    seed: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The user's settings. What JSON has no form for is kept as text."""
    panel_hash: str = ""
    """Equal for runs whose perturbations are over the same panel; empty until there is one."""
    panel_size: int | None = None
    remarks: tuple[str, ...] = ()
    """What a reader of the numbers has to know, in sentences."""
    versions: dict[str, str] = field(default_factory=dict)
    host: str = ""
    pid: int = 0
    world_size: int = 1
    """Ranks that train together."""
    port: int | None = None
    """Where the run's own metrics are served."""
    address: str = ""
    """And at which address of its host."""
    heartbeat: float = 5.0
    """Seconds between two signs of life."""


class StepRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One optimizer step. What was not measured, or does not exist, is None."""

    step: int
    """Optimizer steps so far, this one included: the first is 1."""
    time: float
    """Seconds since the epoch, when the step was measured."""
    skipped: str = ""
    """Why the optimizer moved nothing ("no gradient", "overflow"), or empty."""
    tokens: int | None = None
    """Training tokens seen so far, over all ranks."""
    train_loss: float | None = None
    validation_loss: float | None = None
    learning_rate: float | None = None
    """Of the LM head at this step."""

    diameter: float | None = None
    """D(S), exact."""
    diameter_lower: float | None = None
    diameter_upper: float | None = None
    """Certified bounds of D(S), equal to it where it is exact."""
    pair: Pair | None = None
    """Tokens that attain the diameter, or its lower bound."""
    pair_text: tuple[str, str] | None = None
    ceiling: float | None = None
    """The largest D(S) that the optimizer can make with this learning rate, where there is a theorem."""
    rounding: float | None = None
    """Bound on the error of D(S) from the rounding of the weights, where S is their difference."""
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

    spectral_norm: float | None = None
    """Of S, what a spectral view would say of the step."""
    gauge_waste: float | None = None
    """Share of |S|^2 that is a common row shift, which changes no probability."""
    backward_bound: float | None = None
    """On the change, by the step, of the gradient that reaches a hidden state of the panel, for whichever target."""
    efficiency_lower: float | None = None
    efficiency_upper: float | None = None
    """First-order decrease of the step over the best of its diameter, for the batch's gradient."""
    moment_efficiency_lower: float | None = None
    moment_efficiency_upper: float | None = None
    """The same for the optimizer's moment."""

    seconds: dict[str, float] = field(default_factory=dict)
    """What measuring cost, by part."""
    share: float | None = None
    """Of the time since the last record, the part that measuring took."""

    @property
    def saturation(self) -> float | None:
        """D(S) as a share of its ceiling."""
        return SATURATION.of(self)

    @property
    def utilisation(self) -> float | None:
        """The panel's RMS perturbation as a share of the most it could be, D(S) times the RMS norm of hidden states."""
        return UTILISATION.of(self)


class Alert(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step that was not as the run's other steps."""

    step: int
    time: float
    """Seconds since the epoch."""
    kind: str
    value: float
    """What was measured."""
    expected: float | None = None
    """What was usual: the median of the history at the step's learning rate. For the kind "ceiling" it is the ceiling,
    for "nonfinite" 0."""
    pair: Pair | None = None
    pair_text: tuple[str, str] | None = None
    """Tokens that attain the value."""
    message: str = ""
    """The alert in a sentence or two."""
