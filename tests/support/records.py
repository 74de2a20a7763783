"""Records of a healthy run. A process that writes them loads nothing of the service."""

from hilbert_monitor.runs.record import StepRecord


def record(step, **changes):
    """A record of a healthy run, with changes."""
    defaults = {
        "time": 1_700_000_000.0 + step,
        "tokens": 1000 * step,
        "train_loss": 10.0 / step,
        "learning_rate": 0.01,
        "diameter": 0.02 / step,
        "diameter_lower": 0.02 / step,
        "diameter_upper": 0.02 / step,
        "ceiling": 0.04,
        "pair": (step % 3, 7),
        "pair_text": (f"t{step % 3}", "seven\nlines"),
        "perturbation_rms": 0.1 / step,
        "perturbation_max": 0.3 / step,
        "hidden_norm": 3.0,
        "hidden_norm_rms": 2.0,
        "spectral_norm": 0.03 / step,
        "gauge_waste": 0.01,
        "log_z_rms": 9.0,
        "precision_loss_rms": 0.001,
        "layer_step": 0.02,
        "backward_bound": 0.5 / step,
        "efficiency_lower": 0.4,
        "efficiency_upper": 0.5,
        "moment_efficiency_lower": 0.7,
        "moment_efficiency_upper": 0.8,
        "seconds": {"diameter": 0.25, "panel": 0.5},
        "share": 0.01,
    }
    return StepRecord(step=step, **(defaults | changes))
