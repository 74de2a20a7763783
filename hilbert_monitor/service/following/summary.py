"""The line of a run in a table of runs."""

from __future__ import annotations

from typing import Any

from hilbert_monitor.runs.run import Run


def summary(run: Run) -> dict[str, Any]:
    """Return the line of a run in a table of runs; None where there is no value."""
    info, table, last = run.info, run.table, run.alerts[-1] if run.alerts else None
    tokens = table.last("tokens")
    return {
        "id": run.id,
        "name": info.name,
        "label": run.label,
        "optimizer": run.optimizer,
        "model": run.model,
        "seed": info.seed,
        "panel_hash": info.panel_hash,
        "status": run.status,
        "problem": run.problem,
        "error": run.state.error,
        "message": run.state.message,
        "step": run.state.step,
        "tokens": None if tokens is None else int(tokens),
        "time": run.state.time,
        "started": info.started,
        "attempts": len(run.attempts),
        "alerts": len(run.alerts),
        "last_alert": None
        if last is None
        else {"step": last.step, "kind": last.kind, "severity": last.severity, "time": last.time},
        "train_loss": table.last("train_loss"),
        "validation_loss": table.last("validation_loss"),
        "diameter": table.last("diameter"),
        "perturbation_rms": table.last("perturbation_rms"),
        "learning_rate": table.last("learning_rate"),
        "saturation": table.last("saturation"),
        "version": run.version,
        "indexed": run.indexed,
        "torn": run.torn,
    }
