"""What operations of torch cost on a CUDA device: which of them are kernels, which wait, what they move and compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .counts import Count

NO_KERNELS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *(
        "_unsafe_view",
        "_reshape_alias",
        "lift_fresh",
        "lift",
        "_local_scalar_dense",
        "resize_",
        "set_",
        "record_stream",
    ),
}
"""Operations that compute nothing, beside views."""
FACTORISATIONS = {"_linalg_eigh", "linalg_eig", "_linalg_svd", "linalg_qr", "_linalg_solve_ex", "linalg_lu_factor_ex"}
WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "equal": "equal",
    "_unique2": "unique",
    "unique_dim": "unique",
    "unique_consecutive": "unique",
    "_linalg_eigh": "eigh",
    "linalg_eig": "eig",
    "_linalg_svd": "svd",
    "linalg_lstsq": "lstsq",
    "bincount": "bincount",
    "histc": "histc",
    "repeat_interleave": "repeat_interleave",
}
"""Operations inside which the host reads something of the device: a number, the size of a result, or, as eigh does,
whether it converged."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
SELECTS = {"index", "index_select", "gather", "embedding", "_unsafe_index", "take", "take_along_dim"}
"""Operations that read no more of their first tensor than they return."""
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_"}
"""In-place operations that do not read what they overwrite."""
SCALARS_OF_THE_HOST = {"fill_", "masked_fill", "masked_fill_", "index_put", "index_put_", "_index_put_impl_", "copy_"}
"""Operations beside the pointwise ones that take a number of the CPU with tensors of the device."""


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among some values, and in lists and dicts of them. Faster than torch's pytree."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def replaced(value: Any, kind: type[Tensor], make: Callable[[Any], Any]) -> Any:
    """Return a value, a list or a tuple with its tensors of some kind replaced."""
    if isinstance(value, kind):
        return make(value)
    if isinstance(value, list | tuple):
        return type(value)([replaced(each, kind, make) for each in value])
    return value


def name_of(function: Any) -> str:
    """Return the name of an operation without its namespace and overload."""
    name: str = function._schema.name
    return name.split("::")[1]


def is_kernel(function: Any) -> bool:
    """Return whether a device runs anything for an operation."""
    metadata = function.is_view or torch.Tag.inplace_view in function.tags or function._schema.name.startswith("prim::")
    return not (metadata or name_of(function) in NO_KERNELS)


def takes_scalar_of_host(function: Any) -> bool:
    """Return whether a zero-dimensional tensor of the CPU may stand beside tensors of the device."""
    name = name_of(function)
    return (
        torch.Tag.pointwise in function.tags or name in SCALARS_OF_THE_HOST or name.startswith(("_foreach", "_fused"))
    )


def wait_inside(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return what the host waits for inside an operation on tensors of the device, or nothing."""
    name = name_of(function)
    if name == "repeat_interleave":
        return "" if kwargs.get("output_size") is not None else "repeat_interleave"
    if name in INDEXED and any(_is_mask(index) for index in args[1]):
        return "" if name.startswith("index_put") and _fills(args, kwargs) else "boolean index"
    return WAITS.get(name, "")


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _fills(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a mask is filled with one number: CUDA then makes a masked_fill of it, which does not wait."""
    values = args[2] if len(args) > 2 else kwargs["values"]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return bool(values.numel() == 1 and not accumulate and sum(i is not None for i in args[1]) == 1)


def work_of(function: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Count:
    """Return one kernel's work, given its arguments and results.

    Every input is read once and every result written once. An operation of several kernels in CUDA, such as a sort,
    counts as one.
    """
    name, results = name_of(function), tensors_in(out)
    kernels = _kernels(name, args)
    read = sum(nbytes(x) for x in _inputs(function, name, args, kwargs))
    written = sum(nbytes(x) for x in results)
    if name in SELECTS and results:
        read += nbytes(results[0])
    return Count(
        kernels=kernels,
        factorisations=name in FACTORISATIONS,
        bytes=read + written,
        flops=_flops(function, args, kwargs, out, results),
    )


def _kernels(name: str, args: Sequence[Any]) -> int:
    """Return one; for operations on lists of tensors, one for each 64 of them."""
    many = name.startswith(("_foreach", "_fused", "_amp_foreach")) and args and isinstance(args[0], list | tuple)
    return math.ceil(len(args[0]) / 64) if many else 1


def _inputs(function: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation reads in full."""
    values = [*args, *(kwargs.get(a.name) for a in function._schema.arguments[len(args) :])]
    read: list[Any] = []
    for argument, value in zip(function._schema.arguments, values, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not (written and (argument.is_out or name in OVERWRITES)):
            read.append(value)
    if name in SELECTS:
        read = read[1:]
    return tensors_in(read)


def nbytes(x: Tensor) -> int:
    """Return the bytes of the entries of a tensor; one that was expanded has fewer than its shape says."""
    if x.layout != torch.strided:
        return int(sum(nbytes(part) for part in (x._indices(), x._values())))
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or n == 0)


def _flops(function: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, results: Sequence[Tensor]) -> float:
    formula = flop_registry.get(function.overloadpacket)
    if formula is not None and not any(r.numel() == 0 for r in results):
        return float(formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=out))
    return float(max((x.numel() for x in (*tensors_in(args), *results)), default=0))
