"""Large allocations of a block, as torch sees them."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Within it, `made` lists operations that return a tensor of at least `entries` in memory not given to them."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.made = entries, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            large = isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= self.entries * x.itemsize
            if large and x.untyped_storage()._cdata not in given:
                self.made.append(str(func))
        return out
