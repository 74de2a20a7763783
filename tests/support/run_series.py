"""Runs made of given values, as the statistics and the figures take them."""

from hilbert_monitor.runs.record import RunInfo
from hilbert_monitor.service.figures.series import RunSeries, Series
from hilbert_monitor.service.following.run_settings import configuration


def curve(values, every=10, pace=36.0):
    """A curve with a value every so many steps. A step takes `pace` seconds and has 100 tokens."""
    steps = [every * (i + 1) for i in range(len(values))]
    return Series(steps, [100.0 * step for step in steps], [5e8 + pace * step for step in steps], values, 5e8)


def make_run(
    optimizer="AdamW",
    seed=0,
    *,
    panel="p",
    id="",
    status="finished",
    model="model",
    started=0.0,
    config=None,
    **values,
):
    """A run whose curves have these values at steps 10, 20, 30 and so on."""
    curves = {name: curve(column) for name, column in values.items()}
    return RunSeries(
        id=id or f"{optimizer}-{seed}",
        optimizer=optimizer,
        seed=seed,
        panel_hash=panel,
        status=status,
        model=model,
        started=started,
        settings=frozenset(configuration(RunInfo(config=config or {})).items()),
        **curves,
    )


def moving_average(values, weight):
    """The normalised exponential moving average, by its definition."""
    averages = []
    for t in range(len(values)):
        weights = [weight ** (t - i) for i in range(t + 1)]
        averages.append(sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights))
    return averages
