"""Every layer in its own ruler: what a step does to each parameter but the head's, on every tenth step.

The spectral norm measures the step of a matrix, the largest row that of an embedding, the root mean square that of a
vector; each stands beside the same of the weight. Two passes of a power iteration that goes on from the last measured
step bound a spectral norm from below. Between measured steps nothing is hooked and nothing is kept.

Rank zero measures, and nothing is sent. A parameter that is sharded is left out: its parts have no norms of their own.
Muon's steps have a nearly constant spectral norm by construction: of its layers only the weight can tell something.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.optim import Optimizer

from hilbert_monitor.geometry import leading_direction, spectral_norm
from hilbert_monitor.optim import MatrixOptimizer
from hilbert_monitor.runs.record import Layer, LayerRecord, StepRecord

from .formulas import state_of
from .head_step import HeadStep
from .increment import IncrementSource
from .owners import owning_optimizer
from .runtime import Guard

EVERY = 10
"""Steps between two measurements."""
UPPER_EVERY = 500
"""Steps between two certified upper bounds of the spectral norms, which cost as much as many products."""


class LayerSource(IncrementSource):
    """Forms the increment of a layer; of our own matrix optimizers as a difference of weights.

    To form Muon's increment again costs as much as its step.
    """

    @property
    def from_state(self) -> bool:
        """Whether the increment is formed without a copy of the weights."""
        return not isinstance(self.optimizer, MatrixOptimizer) and super().from_state


@dataclass
class WatchedLayer:
    """A parameter, its ruler, and the directions in which it was longest at the last measured step."""

    name: str
    kind: str
    source: LayerSource
    of_step: Tensor | None = None
    of_weight: Tensor | None = None

    def measure(self, step: HeadStep, *, exact: bool) -> Layer | None:
        """Measure the last step, in the optimizer's hook; None if it was skipped or cannot be formed."""
        increment = None if step.skipped else self.source.form()
        if increment is None:
            return None
        S, W = increment.S, self.source.param.detach()
        sizes: list[Tensor]
        upper = None
        if self.kind == "matrix":
            S, W = S.flatten(1), W.flatten(1)
            along_step, along_weight = leading_direction(S, self.of_step), leading_direction(W, self.of_weight)
            self.of_step, self.of_weight = along_step.right, along_weight.right
            sizes = [along_step.norm, along_weight.norm]
            upper = spectral_norm(S).upper if exact else None
        elif self.kind == "embedding":
            sizes = [torch.linalg.vector_norm(x.float(), dim=1).amax() for x in (S, W)]
        else:
            sizes = [x.float().square().mean().sqrt() for x in (S, W)]
        numbers = torch.stack([size.float() for size in (*sizes, *self._ratio())]).tolist()
        lr = step.options.get("lr")
        return Layer(
            kind=self.kind,
            step=numbers[0],
            weight=numbers[1],
            upper=upper,
            ratio=numbers[2] if len(numbers) > 2 else None,
            lr=None if lr is None else float(lr),
        )

    def _ratio(self) -> Iterator[Tensor]:
        """RMS(g / sqrt(v)), where the optimizer has a second moment and the gradient is there."""
        state, g = state_of(self.source.optimizer, self.source.param), self.source.param.grad
        v, count = state.get("exp_avg_sq"), state.get("step")
        if isinstance(v, Tensor) and g is not None and not g.is_sparse and v.shape == g.shape and count is not None:
            beta2 = self.source.group.get("betas", (0.0, 0.0))[1]
            mean = (g.float().square() / v.float().clamp_min(1e-30)).mean()
            yield (mean * (1 - float(beta2) ** float(count))).sqrt()


class LayerWatch:
    """Measures the layers of a model, one step in ten.

    Args:
        model: a language model.
        optimizers: those that move its parameters.
        head: the LM head's weight, which has a ruler of its own.
        guard: counts what fails.
        remark: told what is left out.
        every: steps between two measurements.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Sequence[Optimizer],
        head: Tensor,
        *,
        guard: Guard,
        remark: Callable[[str], None] = lambda text: None,
        every: int = EVERY,
    ) -> None:
        self.guard, self.every = guard, every
        self.layers = [*_layers(model, optimizers, head, remark)]
        self.seconds = 0.0
        """What measuring has cost since it was last asked."""
        self._found: dict[str, Layer] = {}
        self._ends: list[Callable[[], None]] = []

    def begin(self, step: int) -> None:
        """Note that a step is about to be made; hook it if it is to be measured."""
        if self._ends or step % self.every:
            return
        start = time.perf_counter()
        with self.guard("layers"):
            exact = step % UPPER_EVERY == 0
            for layer in self.layers:
                self._ends.append(self._watch(layer, exact))
        self.seconds += time.perf_counter() - start

    def _watch(self, layer: WatchedLayer, exact: bool) -> Callable[[], None]:
        def on_step(step: HeadStep) -> None:
            start = time.perf_counter()
            with self.guard("layers"):
                measured = layer.measure(step, exact=exact)
                if measured is not None:
                    self._found[layer.name] = measured
            self.seconds += time.perf_counter() - start

        return layer.source.watch(on_step, check=lambda: False, guard=self.guard)

    def end(self, step: int) -> LayerRecord | None:
        """Return the layers of a step that was measured, and let go of the optimizers."""
        for stop in self._ends:
            stop()
        self._ends = []
        for layer in self.layers:
            layer.source.forget()
        found = {layer.name: self._found[layer.name] for layer in self.layers if layer.name in self._found}
        self._found = {}
        return LayerRecord(step=step, time=time.time(), layers=found) if found else None

    def spent(self) -> float:
        """Return the seconds that measuring has cost since this was last asked."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    @property
    def hooked(self) -> bool:
        """Whether a step is about to be measured."""
        return bool(self._ends)


def _layers(
    model: Module, optimizers: Sequence[Optimizer], head: Tensor, remark: Callable[[str], None]
) -> Iterator[WatchedLayer]:
    """Every trained parameter but the head's, with its ruler."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)}
    left_out = 0
    for name, p in model.named_parameters():
        owner = owning_optimizer(optimizers, p)
        if p is head or owner is None or not p.requires_grad or not p.numel() or not p.ndim:
            continue
        if hasattr(p, "device_mesh"):
            left_out += 1
            continue
        kind = "vector" if p.ndim < 2 else "embedding" if id(p) in tables else "matrix"
        yield WatchedLayer(name, kind, LayerSource(owner, p))
    if left_out:
        remark(f"{left_out} layers are sharded, and have no norm on one rank alone: they are left out")


def with_layers(record: StepRecord, measured: LayerRecord, seconds: float) -> StepRecord:
    """Return the record of a step with the largest of its layers in it, and what measuring them cost."""
    steps = [layer.relative for layer in measured.layers.values() if layer.weight]
    ratios = [layer.ratio for layer in measured.layers.values() if layer.ratio is not None]
    before = sum(record.seconds.values())
    share = None if record.share is None or not before else record.share * (before + seconds) / before
    return msgspec.structs.replace(
        record,
        layer_step=max(steps, default=None),
        layer_ratio=max(ratios, default=None),
        seconds=record.seconds | {"layers": seconds},
        share=share,
    )
