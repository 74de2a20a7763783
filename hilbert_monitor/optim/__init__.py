"""The optimizers of the paper's recipe, and one optimizer to hold several."""

from ._chunks import cache_chunks
from ._hyperparameters import Group, options_of
from ._matrix_optimizer import LastStep, MatrixOptimizer
from .chain import ChainedOptimizer
from .muon import Muon
from .pretraining import pretraining_optimizer
from .roles import find_head, parameter_roles
from .rownorm import RowNorm
from .schedule import warmup_cosine, warmup_cosine_scale

__all__ = [
    "ChainedOptimizer",
    "Group",
    "LastStep",
    "MatrixOptimizer",
    "Muon",
    "RowNorm",
    "cache_chunks",
    "find_head",
    "options_of",
    "parameter_roles",
    "pretraining_optimizer",
    "warmup_cosine",
    "warmup_cosine_scale",
]
