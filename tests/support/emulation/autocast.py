"""Autocast of the emulated device: products in the lower precision and sums in fp32, as on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils._pytree import tree_map_only

KEY = "AutocastPrivateUse1"
LOWER = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv"),
    "scaled_dot_product_attention",
)
FP32 = (
    *("exp", "log", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "prod", "cumsum", "softmax.int", "log_softmax.int"),
    *("layer_norm", "nll_loss", "nll_loss_nd", "cross_entropy_loss", "mse_loss", "norm.ScalarOpt_dim"),
    *("sum", "sum.dim_IntList"),
)
"""Those of CUDA's lists that decoders use; others run in the dtype that they are given."""
_libraries: list[Library] = []


def register() -> None:
    """Tell torch, for the rest of the process."""
    if _libraries:
        return
    rest = Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(fallthrough_kernel, KEY)  # type: ignore[no-untyped-call]
    aten = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in (*LOWER, *FP32):
        packet, _, overload = name.partition(".")
        function = getattr(getattr(torch.ops.aten, packet), overload or "default")
        aten.impl(name, _cast(function, lower=name in LOWER), KEY)  # type: ignore[no-untyped-call]
    _libraries.extend([rest, aten])


def _cast(function: Any, *, lower: bool) -> Callable[..., Any]:
    outside = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("emulated") if lower else torch.float32

        def cast(x: Tensor) -> Tensor:
            wanted = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == "emulated"
            return x.to(dtype) if wanted else x

        with torch._C._ExcludeDispatchKeyGuard(outside):
            args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
            return function(*args, **kwargs)

    return run
