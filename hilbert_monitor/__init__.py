"""Exact step geometry of the language-model head, measured while it trains.

Names that need torch load on first use: ``import hilbert_monitor`` by itself loads none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .geometry import hilbert_perturbation as hilbert_perturbation
    from .geometry import row_diameter as row_diameter
    from .geometry import row_diameter_bracket as row_diameter_bracket
    from .integrations.transformers import HilbertCallback as HilbertCallback
    from .monitor.callback import HilbertMonitor as HilbertMonitor
    from .monitor.probe import Probe as Probe
    from .monitor.prometheus import Prometheus as Prometheus
    from .monitor.session import Advanced as Advanced
    from .monitor.trust_region import TrustRegion as TrustRegion
    from .monitor.watch import watch as watch
    from .optim import ChainedOptimizer as ChainedOptimizer
    from .optim import Muon as Muon
    from .optim import RowNorm as RowNorm
    from .optim import pretraining_optimizer as pretraining_optimizer
    from .optim import warmup_cosine as warmup_cosine
    from .runs.alerts import Rules as Rules
    from .runs.record import Alert as Alert
    from .runs.record import StepRecord as StepRecord
    from .runs.run import load_run as load_run
    from .runs.run import load_runs as load_runs

__version__ = "0.1.0"

_HOMES = {
    "Advanced": "monitor.session",
    "Alert": "runs.record",
    "ChainedOptimizer": "optim",
    "HilbertCallback": "integrations.transformers",
    "HilbertMonitor": "monitor.callback",
    "Muon": "optim",
    "Probe": "monitor.probe",
    "Prometheus": "monitor.prometheus",
    "RowNorm": "optim",
    "Rules": "runs.alerts",
    "StepRecord": "runs.record",
    "TrustRegion": "monitor.trust_region",
    "hilbert_perturbation": "geometry",
    "load_run": "runs.run",
    "load_runs": "runs.run",
    "pretraining_optimizer": "optim",
    "row_diameter": "geometry",
    "row_diameter_bracket": "geometry",
    "warmup_cosine": "optim",
    "watch": "monitor.watch",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(f".{_HOMES[name]}", __name__)
    except ModuleNotFoundError as error:
        from ._extras import missing_extra

        raise missing_extra(f"{__name__}.{name}", error) or error from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
