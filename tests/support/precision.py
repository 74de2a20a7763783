"""Record the precision in which a call multiplies matrices."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MatmulPrecision(TorchDispatchMode):
    """Within the block, records the dtype and the fp32 settings of every matrix product in `seen`."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.mv):
            dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
            settings = (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
            self.seen.update((dtype, *settings) for dtype in dtypes)
        return func(*args, **(kwargs or {}))
