"""What does a diameter buy? Small real runs whose steps of the head are held to a diameter, over a range of diameters.

All of this was fixed before the runs were made. The unit is RowNorm's ceiling: at its rate lr_t no step of RowNorm has
a diameter above 2 lr_t, so a multiple m allows 2 m lr_t at every step, warm-up and decay included. The curves:

- "RowNorm, by its rate": RowNorm at m times its rate.
- "AdamW, rows held", "AdamW, scaled": AdamW at the paper's rate, held by a `TrustRegion`: rows projected onto the ball,
  or the whole step scaled down.
- "AdamW, by its rate": nothing is held; its rate is lowered, or raised, so that its usual diameter is the one allowed.
  Is it the holding, or just a smaller step?
- "SGD, rows held": SGD with momentum, at the rate that was best for it without a limit.
- "AdamW": nothing is held, at the paper's rate.

Two numbers come from runs with another seed: the usual diameter of AdamW at the paper's rate, in units, and the rate
of SGD. Everything but the head is trained as in the paper. The head has no weight decay on any curve: decay is no part
of a step's diameter, and the rates differ by orders of magnitude.

Each run writes an ordinary run folder, in which it says which point it is: the dashboard's page Diameter and the report
draw the curves from them. A run whose folder is finished is not made again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from torch.optim import SGD, AdamW, Optimizer

from hilbert_monitor.geometry import row_diameter
from hilbert_monitor.monitor.held_step import How
from hilbert_monitor.monitor.trust_region import TrustRegion
from hilbert_monitor.monitor.watch import watch
from hilbert_monitor.optim import ChainedOptimizer, RowNorm, pretraining_optimizer
from hilbert_monitor.optim.pretraining import HEAD_LR
from hilbert_monitor.optim.schedule import warmup_cosine_scale
from hilbert_monitor.pretrain.model import Decoder
from hilbert_monitor.runs.diameter_sweep import SweepPoint
from hilbert_monitor.runs.log import find_runs

from .small_run import SmallRun, StepChange, TrialSizes
from .workers import in_processes

FREE = "AdamW"
"""The curve of AdamW without a limit, which is one point."""
CURVES = ("AdamW, rows held", "AdamW, scaled", "AdamW, by its rate", "RowNorm, by its rate", "SGD, rows held")
HOLDS: dict[str, How] = {"AdamW, rows held": "rows", "AdamW, scaled": "scale", "SGD, rows held": "rows"}
"""The curves that a trust region holds, and how."""
WARMUP = 0.1
"""Share of the steps over which rates rise. Diameters are compared after it."""


@dataclass(frozen=True)
class CurvePlan:
    """Which runs make the curves."""

    seeds: tuple[int, ...] = (50, 51, 52)
    calibration_seed: int = 49
    allowed: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    """Multiples of RowNorm's ceiling."""
    sgd_rates: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0)
    sizes: TrialSizes = field(default_factory=lambda: TrialSizes(steps=300, validation=128))
    validate_every: int = 100

    @classmethod
    def quick(cls) -> CurvePlan:
        """Return a plan that takes seconds."""
        sizes = TrialSizes(steps=4, vocab_size=512, width=32, context=16, batch=4, panel=64, validation=8)
        return cls((0, 1), 2, (0.5, 4.0), (1.0, 3.0), sizes, validate_every=2)

    @property
    def rownorm_rate(self) -> float:
        """RowNorm's rate at the peak, by the paper's rule."""
        return HEAD_LR["rownorm"] / self.sizes.width

    def unit(self, step: int) -> float:
        """Return RowNorm's ceiling at a step, from 0."""
        return 2 * self.rownorm_rate * warmup_cosine_scale(step, total_steps=self.sizes.steps, warmup=WARMUP)

    def points(self) -> Iterator[tuple[SweepPoint, int]]:
        """Yield the point and the seed of every run: seed by seed, so that what is there early has all points."""
        for seed in self.seeds:
            yield SweepPoint(FREE, math.inf, 2 * self.rownorm_rate), seed
            for allowed in self.allowed:
                for curve in CURVES:
                    yield SweepPoint(curve, allowed, 2 * self.rownorm_rate), seed


@dataclass(frozen=True)
class Calibration:
    """What runs with another seed say before any point is made."""

    usual: float
    """The median diameter of AdamW's steps at the paper's rate, in units."""
    sgd_rate: float
    """The rate of SGD with the lowest validation loss."""
    sgd_losses: dict[str, float]
    """The losses of all rates that were tried."""


def head_rate(curve: str, allowed: float, plan: CurvePlan, calibration: Calibration) -> float:
    """Return the peak learning rate of the head at a point."""
    adamw = HEAD_LR["adamw"] / plan.sizes.width
    if curve.startswith("SGD"):
        return calibration.sgd_rate
    if curve.startswith("RowNorm"):
        return plan.rownorm_rate * allowed
    return adamw * allowed / calibration.usual if curve == "AdamW, by its rate" else adamw


def optimizer(model: Decoder, name: str, rate: float) -> ChainedOptimizer:
    """Return the paper's optimizers with another for the head, which has no weight decay.

    Args:
        model: the decoder.
        name: what the optimizer of the head is called: AdamW, RowNorm or SGD.
        rate: its learning rate.
    """
    group = {"params": [("lm_head.weight", model.lm_head.weight)], "name": "head"}
    kinds: dict[str, Callable[[], Optimizer]] = {
        "AdamW": lambda: AdamW([group], lr=rate, betas=(0.9, 0.999), eps=1e-10, weight_decay=0.0, fused=True),
        "RowNorm": lambda: RowNorm([group], lr=rate),
        "SGD": lambda: SGD([group], lr=rate, momentum=0.9),
    }
    *others, _ = pretraining_optimizer(model).optimizers
    return ChainedOptimizer(*others, kinds[name](), model=model)


def calibrate(optimizer_name: str, rate: float, plan: CurvePlan) -> tuple[float, float]:
    """Train without a limit; return the median diameter of the steps after the warm-up, in units, and the loss."""
    run = SmallRun(plan.calibration_seed, plan.sizes, lambda model: optimizer(model, optimizer_name, rate))
    weight, diameters = run.model.lm_head.weight, []
    while run.updates < plan.sizes.steps:
        before, unit = weight.detach().clone(), plan.unit(run.updates)
        _step(run)
        if run.updates > WARMUP * plan.sizes.steps and unit and run.updates % 5 == 0:
            diameters.append(row_diameter(weight.detach() - before).value / unit)
    return median(diameters or [1.0]), run.validation_loss()


def _step(run: SmallRun) -> float:
    loss = run.backward(StepChange())
    run.clip_gradients()
    with run.update(StepChange()):
        run.optimizer.step()
    return float(loss)


def point_run(point: SweepPoint, seed: int, plan: CurvePlan, calibration: Calibration, out: Path) -> str:
    """Make the run of a point, watched, and held if its curve is; return its name."""
    rate = head_rate(point.curve, point.allowed, plan, calibration)
    owner = point.curve.partition(",")[0]
    run = SmallRun(seed, plan.sizes, lambda model: optimizer(model, owner, rate))
    config = {**asdict(plan.sizes), "seed": seed, "head_lr": rate, **point.as_config()}
    name = run_name(point, seed)
    with ExitStack() as stack:
        if how := HOLDS.get(point.curve):
            region = TrustRegion(limit=lambda step: point.allowed * plan.unit(run.updates), how=how)
            stack.enter_context(region.watch(run.model, run.optimizer))
        watched = stack.enter_context(
            watch(
                run.model,
                run.optimizer,
                panel=run.held_out[: plan.sizes.panel].view(-1, plan.sizes.context),
                schedulers=run.schedule,
                last_step=plan.sizes.steps,
                seed=seed,
                run_dir=str(out),
                run_name=name,
                config=config,
                panel_size=plan.sizes.panel,
                diameter_every=5,
                perturbation_every=plan.validate_every,
                hidden=lambda model, tokens: model.hidden(tokens),
            )
        )
        tokens = plan.sizes.batch * plan.sizes.context
        while run.updates < plan.sizes.steps:
            watched.step(loss=_step(run), tokens=tokens)
            if run.updates % plan.validate_every == 0 or run.updates == plan.sizes.steps:
                watched.validated(run.validation_loss())
    return name


def run_name(point: SweepPoint, seed: int) -> str:
    """Return the name of a point's run."""
    words = point.curve.lower().replace(",", "").replace(" ", "-")
    return f"{words}-{point.allowed:g}x-seed{seed}" if point.allowed < math.inf else f"{words}-free-seed{seed}"


def run(plan: CurvePlan, out: Path, *, workers: int, after_each: Callable[[str], None] = lambda name: None) -> None:
    """Make all runs that are not finished yet, each on one thread, in so many processes.

    Args:
        plan: which runs.
        out: folder of the run logs; the calibration is a file beside them.
        workers: number of processes.
        after_each: called with the name of each run that is there.
    """
    out.mkdir(parents=True, exist_ok=True)
    calibration = _calibration(plan, out, workers)
    finished = {reader.info.name for reader in find_runs(out) if reader.state().status == "finished"}
    jobs = []
    for point, seed in plan.points():
        if (name := run_name(point, seed)) in finished:
            after_each(name)
        else:
            jobs.append((point, seed, plan, calibration, out))
    in_processes(point_run, jobs, workers=workers, after_each=after_each)


def _calibration(plan: CurvePlan, out: Path, workers: int) -> Calibration:
    """Return the calibration of a folder, which is made if it is not there."""
    path = out / "calibration.json"
    if path.exists():
        return Calibration(**json.loads(path.read_text())["calibration"])
    adamw = HEAD_LR["adamw"] / plan.sizes.width
    jobs = [("AdamW", adamw, plan), *(("SGD", rate, plan) for rate in plan.sgd_rates)]
    (usual, _), *sgd = in_processes(calibrate, jobs, workers=workers)
    losses = {rate: loss for rate, (_, loss) in zip(plan.sgd_rates, sgd, strict=True)}
    best = min(losses, key=lambda rate: losses[rate])
    calibration = Calibration(usual, best, {f"{rate:g}": loss for rate, loss in losses.items()})
    path.write_text(json.dumps({"plan": asdict(plan), "calibration": asdict(calibration)}, indent=2) + "\n")
    return calibration
