"""What a run says of its steps: frozen, typed, of plain values."""

from __future__ import annotations

from msgspec import Struct, field

Pair = tuple[int, int]


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

    seconds: dict[str, float] = field(default_factory=dict)
    """What measuring cost, by part."""
    share: float | None = None
    """Of the time since the last record, the part that measuring took."""

    @property
    def saturation(self) -> float | None:
        """D(S) as a share of its ceiling."""
        if self.diameter is None or not self.ceiling:
            return None
        return self.diameter / self.ceiling
