"""Runs made of given values, as the statistics and the figures take them."""

from hilbert_monitor.runs.reader import RunState
from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.runs.run import Curve, Run
from hilbert_monitor.runs.table import Table


def curve(values, every=10, pace=36.0):
    """A curve with a value every so many steps. A step takes `pace` seconds and has 100 tokens."""
    steps = [every * (i + 1) for i in range(len(values))]
    return Curve(steps, [100.0 * step for step in steps], [5e8 + pace * step for step in steps], values, 5e8)


def run_of(id, optimizer="", *, name="", seed=None, status="finished", step=None, table=None, info=None, **curves):
    """A run that has these curves."""
    known = {"id": id, "name": name, "head_optimizer": optimizer, "seed": seed, "model": "model", **(info or {})}
    state = RunState(status=status, step=step, time=0.0)
    return Run(id=id, info=RunInfo(**known), state=state, table=table or Table(), curves=curves)


def make_run(
    optimizer="AdamW", seed=0, *, panel="p", id="", status="finished", model="model", started=0.0, config=None, **values
):
    """A run whose curves have these values at steps 10, 20, 30 and so on."""
    curves = {name: curve(column) for name, column in values.items()}
    info = {"panel_hash": panel, "model": model, "started": started, "config": config or {}}
    return run_of(id or f"{optimizer}-{seed}", optimizer, seed=seed, status=status, info=info, **curves)


def moving_average(values, weight):
    """The normalised exponential moving average, by its definition."""
    averages = []
    for t in range(len(values)):
        weights = [weight ** (t - i) for i in range(t + 1)]
        averages.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    return averages
