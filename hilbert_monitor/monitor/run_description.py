"""What is known of a run, for its log: what the training loop says, and what the monitor watches it with."""

from __future__ import annotations

import math
import platform
from typing import Any

import msgspec
import torch

from hilbert_monitor import __version__
from hilbert_monitor.runs.files import to_json
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.runs.secrets import mask_secrets

from .options import MonitorOptions
from .panel import Panel
from .probe import Probe
from .training_loop import TrainingLoop


def describe_run(
    loop: TrainingLoop, probe: Probe, options: MonitorOptions, panel: Panel | None, resumed: dict[str, Any]
) -> RunInfo:
    """Return what is known of a run now.

    Args:
        loop: that trains it.
        probe: that measures it.
        options: of the user.
        panel: if there is one yet.
        resumed: the state that the run goes on from, or nothing.
    """
    info = loop.describe()
    config = info.config if options.config is None else options.config
    same = options.run_name in (None, resumed.get("name"))  # or it is a branch with a name of its own
    versions = {
        "hilbert_monitor": __version__,
        "torch": str(torch.__version__),
        **info.versions,
        "python": platform.python_version(),
    }
    return msgspec.structs.replace(
        info,
        id=resumed.get("run", "") if same else "",
        name=options.run_name or "",
        head_optimizer=type(probe.head.source.optimizer).__name__,
        head_name=probe.head.name,
        config=mask_secrets(to_json(dict(config)), options.secrets),
        panel_hash="" if panel is None else panel.hash,
        panel_size=None if panel is None else panel.size,
        remarks=tuple(probe.remarks),
        stalled_after=options.patience,
        last_step=int(probe.schedule.last) if math.isfinite(probe.schedule.last) else None,
        versions=versions,
        world_size=loop.ranks.world,
    )
