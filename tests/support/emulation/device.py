"""The emulated device: tensors that say they are on it, and a mode that computes with them on the CPU and counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .counts import Count, Counts, line_of_package
from .operations import (
    INDEXED,
    is_kernel,
    name_of,
    replaced,
    takes_scalar_of_host,
    tensors_in,
    wait_inside,
    work_of,
)

NAME = "emulated"
_registered: list[str] = []
_registering = threading.Lock()
_within = 0


def unavailable() -> str:
    """Return why this torch cannot host the device, or nothing."""
    from torch.utils import backend_registration

    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        return f"torch {torch.__version__} cannot host a device that is written in Python"
    other = torch._C._get_privateuse1_backend_name()
    if other not in ("privateuseone", NAME):
        return f"this process has another device of its own kind, {other}"
    return ""


def emulated_device() -> torch.device:
    """Return the device; torch hears of it at the first call.

    Raises:
        RuntimeError: if this torch cannot host it.
    """
    with _registering:
        if not _registered:
            if reason := unavailable():
                raise RuntimeError(f"there is no emulated device: {reason}")
            _register()
            _registered.append(NAME)
    return torch.device(NAME, 0)


def _register() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from hilbert_monitor.monitor.deferred import HOST_COPIES

    from . import autocast
    from .module import DeviceModule, host_copy

    _setup_privateuseone_for_python_backend(NAME, backend_module=DeviceModule())
    autocast.register()
    HOST_COPIES[NAME] = host_copy


class DeviceTensor(Tensor):
    """A tensor that says it is on the emulated device, and holds one on the CPU."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        """Wrap a tensor on the CPU."""
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute outside of the mode, where nobody counts."""
        return _computed(None, function, args, kwargs or {})

    def tolist(self) -> Any:
        """Read the numbers; the host waits."""
        if (mode := EmulatedDevice.current()) is not None:
            mode.wait("tolist")
        return self.host.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the numbers and the device."""
        return f"{NAME}({self.host})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the tensor on the CPU, and come back to the device."""
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _restored, (self.host.detach().clone(), self.requires_grad, is_parameter)


def _restored(host: Tensor, requires_grad: bool, is_parameter: bool) -> Tensor:
    emulated_device()
    tensor: Tensor = DeviceTensor(host)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


class EmulatedDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, tensors can be made on the device `emulated`, and what a GPU would do with them is counted.

    Computes with the CPU's kernels, so that numbers are the CPU's. Tensors of two devices in one operation are refused,
    as CUDA refuses them. Example: ``with EmulatedDevice() as device: row_diameter(device.tensor(S)); device.counts``.

    Args:
        backlog: kernels by which the device is behind the host, so that an event passes only that much later.
    """

    _current: ClassVar[threading.local] = threading.local()

    def __init__(self, *, backlog: int = 50) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = emulated_device()
        self.counts = Counts()
        self.backlog, self.queued, self._waited = backlog, 0, 0

    def __enter__(self) -> EmulatedDevice:
        self._outer = self.current()
        type(self)._current.mode = self
        _lift_on_the_host(+1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        type(self)._current.mode = self._outer
        _lift_on_the_host(-1)

    @classmethod
    def current(cls) -> EmulatedDevice | None:
        """Return the mode that this thread is in."""
        return getattr(cls._current, "mode", None)

    def tensor(self, host: Tensor) -> Tensor:
        """Put a tensor of the CPU on the device, in a copy that nobody counts."""
        return DeviceTensor(host.detach().clone())

    @contextmanager
    def counted(self) -> Iterator[Counts]:
        """Count a block by itself."""
        outer, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = outer

    @property
    def done(self) -> int:
        """How many of the kernels that were queued are done."""
        return max(self._waited, self.queued - self.backlog)

    def note(self, operation: str, work: Count) -> None:
        """Count work, which stands in the queue unless the host waits for it."""
        self.counts.note(operation, work)
        self.queued += int(work.kernels)
        if work.waits:
            self._waited = self.queued

    def wait(self, operation: str) -> None:
        """Wait for all that is queued."""
        self.note(operation, Count(waits=1))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute and count."""
        return _computed(self, function, args, kwargs or {})


def _lift_on_the_host(change: int) -> None:
    """Count who is within the mode: there torch.tensor(..., device=...) makes its copy where the mode sees it."""
    global _within
    with _registering:
        _within += change
        torch._C._set_only_lift_cpu_tensors(_within > 0)


def _computed(mode: EmulatedDevice | None, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, as the device that its tensors are on would."""
    tensors = tensors_in(args, kwargs)
    here = any(isinstance(x, DeviceTensor) for x in tensors)
    device = kwargs.get("device")
    to = None if device is None else torch.device(device).type
    if not here and to != NAME:
        return function(*args, **kwargs)
    name = name_of(function)
    if here:
        _refuse_mixed(function, name, tensors, args)
    host_args = [replaced(x, DeviceTensor, _host) for x in args]
    host_kwargs = {name: replaced(x, DeviceTensor, _host) for name, x in kwargs.items()}
    if to == NAME:
        host_kwargs["device"] = torch.device("cpu")
    out = function(*host_args, **host_kwargs)
    if mode is not None:
        _count(mode, function, (args, kwargs), (host_args, host_kwargs), out)
    if torch.Tag.inplace_view in function.tags:
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)  # the tensor itself takes the shape of what it holds
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        return args[0]
    return out if to not in (None, NAME) else _wrapped(function, args, kwargs, out)


def _host(tensor: DeviceTensor) -> Tensor:
    return tensor.host


def _refuse_mixed(function: Any, name: str, tensors: Sequence[Tensor], args: Sequence[Any]) -> None:
    """Raise as CUDA does if an operation has tensors of the CPU too."""
    if name in ("copy_", "_to_copy"):
        return
    if name in INDEXED:
        indices = {id(i) for i in args[1] if isinstance(i, Tensor)}
        tensors = [x for x in tensors if id(x) not in indices]
    scalars = takes_scalar_of_host(function)
    if any(not isinstance(x, DeviceTensor) and not (scalars and x.dim() == 0) for x in tensors):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! (in"
            f" {function} at {line_of_package()})"
        )


Call = tuple[Sequence[Any], dict[str, Any]]
"""Arguments of an operation."""


def _count(mode: EmulatedDevice, function: Any, given: Call, on_host: Call, out: Any) -> None:
    """Count an operation, given its arguments on the device and on the host, and what came out."""
    name, (args, kwargs) = name_of(function), given
    if name in ("copy_", "_to_copy") and (way := _way(name, *given)):
        size = sum(x.nbytes for x in tensors_in(out))
        blocks = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        mode.note(way, Count(kernels=1, waits=blocks, copies=way == "to the device", bytes=size))
        return
    if name in INDEXED and (moved := [i for i in args[1] if isinstance(i, Tensor) and not isinstance(i, DeviceTensor)]):
        size = sum(i.nbytes for i in moved)  # torch copies them first, and waits for that
        mode.note("index of the host", Count(waits=len(moved), copies=len(moved), bytes=size))
    work = work_of(function, *on_host, out) if is_kernel(function) else Count()
    wait = wait_inside(function, args, kwargs)
    work.waits += bool(wait)
    if work.kernels or work.waits:
        mode.note(wait or name, work)


def _way(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return the direction of a copy between host and device, if it is one. A number is part of a kernel's call."""
    source = isinstance(args[0 if name == "_to_copy" else 1], DeviceTensor)
    if name == "_to_copy":
        device = kwargs.get("device")
        target = source if device is None else torch.device(device).type == NAME
    else:
        target = isinstance(args[0], DeviceTensor)
    if target == source or (name == "copy_" and target and args[1].dim() == 0):
        return ""
    return "to the device" if target else "to the host"


def _wrapped(function: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Any:
    """Return results on the device: the given tensor where an operation writes into it, else a new one."""
    writes = _writes(function)
    if not writes:
        return replaced(out, Tensor, DeviceTensor)
    names = [a.name for a in function._schema.arguments]
    owners = {alias: args[place] if place < len(args) else kwargs.get(names[place]) for alias, place in writes.items()}
    for owner in tensors_in(list(owners.values())):
        if isinstance(owner, DeviceTensor) and owner.shape != owner.host.shape:
            raise NotImplementedError(f"{function} changed the shape of a tensor in place: the device does not follow")
    returns = function._schema.returns
    results = [
        replaced(each, Tensor, DeviceTensor)
        if result.alias_info is None
        else owners[frozenset(result.alias_info.before_set)]
        for result, each in zip(returns, out if isinstance(out, tuple) else (out,), strict=False)
    ]
    return None if not returns else results[0] if len(returns) == 1 else tuple(results)


@cache
def _writes(function: Any) -> dict[frozenset[str], int]:
    """Return the places of the arguments that an operation writes into, by the name of their memory."""
    infos = [a.alias_info for a in function._schema.arguments]
    return {frozenset(info.before_set): k for k, info in enumerate(infos) if info is not None and info.is_write}
