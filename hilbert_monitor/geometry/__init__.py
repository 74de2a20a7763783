"""The mathematics of an LM-head update: pure functions of tensors, after the paper's equations.

Every function takes fp64, fp32, bf16 or fp16 on any device, computes in fp32 or better whatever the process has
set for its matrix products, builds no graph, and leaves its input as it was.
"""

from .backward import BackwardBound, backward_bound, fixed_cotangent_bound, uniform_backward_bound
from .bracket import DiameterBracket, PendingBracket, pending_bracket, row_diameter_bracket
from .diameter import RowDiameter, row_diameter
from .log_partition import LogPartition, MeanRow, log_partition, mean_row
from .numerics import compute_dtype, full_precision
from .perturbation import HilbertPerturbation, hilbert_perturbation
from .power_iteration import LeadingDirection, leading_direction
from .radius import RadiusBracket, covering_radius
from .rows import RowSummary, center_rows, gauge_waste, projected_row_norm, row_norm, summarize_rows
from .sharding import RowShards
from .simplex import cross_entropy_change_bound, hilbert_distance, tv_bound, variation_seminorm
from .spectral import spectral_norm
from .tension import (
    Interval,
    OracleSolution,
    TensionBracket,
    centred_decrease,
    diameter_oracle,
    first_order_decrease,
    jung_ratio,
    step_efficiency,
    tension_bracket,
)

__all__ = [
    "BackwardBound",
    "DiameterBracket",
    "HilbertPerturbation",
    "Interval",
    "LeadingDirection",
    "LogPartition",
    "MeanRow",
    "OracleSolution",
    "PendingBracket",
    "RadiusBracket",
    "RowDiameter",
    "RowShards",
    "RowSummary",
    "TensionBracket",
    "backward_bound",
    "center_rows",
    "centred_decrease",
    "compute_dtype",
    "covering_radius",
    "cross_entropy_change_bound",
    "diameter_oracle",
    "first_order_decrease",
    "fixed_cotangent_bound",
    "full_precision",
    "gauge_waste",
    "hilbert_distance",
    "hilbert_perturbation",
    "jung_ratio",
    "leading_direction",
    "log_partition",
    "mean_row",
    "pending_bracket",
    "projected_row_norm",
    "row_diameter",
    "row_diameter_bracket",
    "row_norm",
    "spectral_norm",
    "step_efficiency",
    "summarize_rows",
    "tension_bracket",
    "tv_bound",
    "uniform_backward_bound",
    "variation_seminorm",
]
