"""What a call does beside returning: the memory it takes, the precision it multiplies in."""

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


def peak_bytes(call):
    """Most memory held at once through torch's allocator while `call` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        call()
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


class MatmulPrecision(TorchDispatchMode):
    """Records the dtype and the fp32 setting of every matrix product."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.mv):
            dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor)}
            settings = (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)
            self.seen.update((dtype, *settings) for dtype in dtypes)
        return func(*args, **(kwargs or {}))
