"""The mathematics of an LM-head update: pure functions of tensors, after the paper's equations.

Every function takes fp64, fp32, bf16 or fp16 on any device, computes in fp32 or better whatever the process has
set for its matrix products, builds no graph, and leaves its input as it was. Rows S (V, d) may be a tensor, a DTensor
that is sharded by rows, a `RowSource` or `RowShards`; `max_bytes` bounds the scratch memory.
"""

from .bracket import DeferredBracket, DiameterBracket, deferred_bracket, row_diameter_bracket
from .diameter import RowDiameter, row_diameter
from .logits import HilbertPerturbation, LogPartition, hilbert_perturbation, log_partition
from .norms import (
    LeadingDirection,
    RowStatistics,
    center_rows,
    leading_direction,
    projected_row_norm,
    row_norm,
    row_statistics,
    spectral_norm,
)
from .numerics import Interval, compute_dtype, full_precision
from .radius import RadiusBracket, covering_radius
from .sharding import RowShards, RowSource
from .simplex import (
    BackwardBound,
    backward_bound,
    cross_entropy_change_bound,
    fixed_cotangent_bound,
    hilbert_distance,
    tv_bound,
    uniform_backward_bound,
    variation_seminorm,
)
from .tension import (
    OracleSolution,
    TensionBracket,
    centred_decrease,
    diameter_oracle,
    first_order_decrease,
    jung_ratio,
    step_efficiency,
    tension_bracket,
)
