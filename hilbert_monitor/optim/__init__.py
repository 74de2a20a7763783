"""The optimizers of the paper's recipe, and one optimizer to hold several."""

from .chain import ChainedOptimizer
from .muon import Muon
from .pretraining import pretraining_optimizer
from .roles import find_head, parameter_roles
from .rownorm import RowNorm
from .schedule import warmup_cosine, warmup_cosine_scale

__all__ = [
    "ChainedOptimizer",
    "Muon",
    "RowNorm",
    "find_head",
    "parameter_roles",
    "pretraining_optimizer",
    "warmup_cosine",
    "warmup_cosine_scale",
]
