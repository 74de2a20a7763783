"""Write runs that are points of a sweep over diameters, with losses and diameters that a test can compute again."""

from hilbert_monitor.runs.diameter_sweep import SweepPoint
from tests.support.services import record, write_run

UNIT = 0.05


def write_point(root, curve, allowed, seed, *, loss, made=None, steps=20, model="Decoder", **info):
    """Write a run whose final loss is given, and whose steps have the diameter `made`, in units; return its id."""
    records = []
    for step in range(1, steps + 1):
        rate = 0.03 * min(step / 4, 1.0)
        diameter = UNIT * (rate / 0.03) * (made if made is not None else allowed)
        last = {"validation_loss": loss} if step == steps else {}
        held = {"diameter": 3 * diameter, "made_diameter": diameter} if curve.endswith(("held", "scaled")) else {}
        records.append(record(step, **{"learning_rate": rate, "diameter": diameter, **held, **last}))
    point = SweepPoint(curve, allowed, UNIT)
    owner = curve.partition(",")[0]
    config = {"seed": seed, **point.as_config()}
    name = f"{curve} {allowed} {seed}"
    return write_run(root, name, records, head_optimizer=owner, seed=seed, model=model, config=config, **info)


def write_sweep(root, allowed=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0), seeds=(0, 1, 2)):
    """Write a whole sweep: losses fall with the diameter, by another amount on each curve and seed."""
    slopes = {"AdamW, rows held": 0.10, "AdamW, scaled": 0.05, "RowNorm, by its rate": 0.12}
    for seed in seeds:
        write_point(root, "AdamW", float("inf"), seed, loss=4.6 + 0.02 * seed, made=7.0)
        for multiple in allowed:
            for curve, slope in slopes.items():
                loss = 5.0 - slope * min(multiple, 6.0) + 0.03 * seed
                write_point(root, curve, multiple, seed, loss=loss, made=min(multiple, 7.0))
