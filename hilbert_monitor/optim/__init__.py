"""The optimizers of the paper's recipe, and one optimizer to hold several."""

from .base import Group, LastStep, MatrixOptimizer, options_of
from .chain import ChainedOptimizer
from .muon import Muon
from .recipe import find_head, parameter_roles, pretraining_optimizer, warmup_cosine, warmup_cosine_scale
from .rownorm import RowNorm, cache_chunks

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
