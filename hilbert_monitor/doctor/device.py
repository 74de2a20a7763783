"""The device to check, its name, and the sizes of the checks on it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from hilbert_monitor import __version__


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """Sizes of the checks."""

    cloud: tuple[int, int, int]
    """Rows, width and panel positions of the exactness checks."""
    updates: int
    """Updates of every training run."""
    head: tuple[int, int]
    """Rows and width of the head whose overhead is measured."""
    turns: int
    """Pairs of timed steps, one with the monitor and one without it."""
    patience: float
    """Seconds after which a process that does not answer counts as hanging."""

    @classmethod
    def of(cls, device: torch.device, *, quick: bool) -> CheckSizes:
        """Return the sizes for a device."""
        if quick:
            return cls(cloud=(2048, 32, 512), updates=6, head=(8192, 128), turns=2, patience=60)
        if device.type == "cpu":
            return cls(cloud=(8192, 64, 2048), updates=20, head=(8192, 128), turns=10, patience=120)
        return cls(cloud=(50_257, 256, 8192), updates=20, head=(50_257, 512), turns=20, patience=300)


def choose(name: str | None) -> torch.device:
    """Return the device of that name; without a name, CUDA if torch sees it, else the CPU.

    Raises:
        ValueError: if there is no such device; the message says what to do.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name is None:
        name = "cuda" if cuda else "cpu"  # mps has no fp64
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device: give cpu, cuda, cuda:1 or mps") from None
    if device.type == "cuda" and not cuda:
        raise ValueError(
            f"--device {name}: this torch sees no CUDA device (torch {torch.__version__}): install a CUDA build of"
            " torch or leave --device out"
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device {name}: this torch sees {count} CUDA devices, numbered from 0: give one of them")
    if device.type == "mps" and not mps:
        raise ValueError(f"--device {name}: this torch sees no Apple GPU: leave --device out")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device {name}: the checks know cpu, cuda and mps: give one of them")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device(device.type)


def device_name(device: torch.device) -> str:
    """Return the name of a device as its maker gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{machine()['processor']} ({device.type})"


def machine() -> dict[str, str]:
    """Return the machine and the versions that the figures were measured with."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hilbert-monitor": __version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
