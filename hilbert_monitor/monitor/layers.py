"""Every layer in its own ruler: what a step does to each parameter but the head's, on every tenth step.

The spectral norm measures the step of a matrix, the largest row that of an embedding, the root mean square that of a
vector; each stands beside the same of the weight. Two passes of a power iteration that goes on from the last measured
step bound a spectral norm from below. Between measured steps nothing is hooked and nothing is kept.

Rank zero measures, and nothing is sent. A parameter that is sharded is left out: its parts have no norms of their own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from hilbert_monitor.geometry import leading_direction, spectral_norm
from hilbert_monitor.optim import MatrixOptimizer
from hilbert_monitor.runs.alerts import LayerJudge, Rules
from hilbert_monitor.runs.record import Alert, Layer, LayerRecord, StepRecord

from .increment import Basis, IncrementSource, StepPlan
from .optimizers import Decay, inner_optimizers, on_steps, owner_of, state_of
from .runtime import Guard

EVERY = 10  # steps between two measurements
UPPER_EVERY = 500  # steps between two certified upper bounds of the spectral norms, which cost many products


@dataclass
class WatchedLayer:
    """A parameter, its ruler, and the directions in which it was longest at the last measured step."""

    name: str
    kind: str
    source: IncrementSource
    of_step: Tensor | None = None
    of_weight: Tensor | None = None

    def measure(self, *, exact: bool) -> Layer | None:
        """Measure the last step, in the optimizer's hook; None if it was skipped or cannot be formed."""
        step = self.source.end()
        increment = None if step.skipped else self.source.increment()
        if increment is None or increment.has_decay:
            return None
        S, W = increment.rows.matrix(), self.source.rows.of(self.source.param)
        sizes: list[Tensor]
        upper = None
        if self.kind == "matrix":
            along_step, along_weight = leading_direction(S, self.of_step), leading_direction(W, self.of_weight)
            self.of_step, self.of_weight = along_step.right, along_weight.right
            sizes = [along_step.norm, along_weight.norm]
            upper = spectral_norm(S).upper if exact else None
        elif self.kind == "embedding":
            sizes = [torch.linalg.vector_norm(x.float(), dim=1).amax() for x in (S, W)]
        else:
            sizes = [x.float().square().mean().sqrt() for x in (S, W)]
        numbers = torch.stack([size.float() for size in (*sizes, *self._ratio())]).tolist()
        ratio = numbers[2] if len(numbers) > 2 else None
        return Layer(kind=self.kind, step=numbers[0], weight=numbers[1], upper=upper, ratio=ratio, lr=step.lr)

    def _ratio(self) -> Iterator[Tensor]:
        """Yield RMS(g / sqrt(v)), where the optimizer has a second moment and the gradient is there."""
        state, g = state_of(self.source.optimizer, self.source.param), self.source.param.grad
        v, count = state.get("exp_avg_sq"), state.get("step")
        if isinstance(v, Tensor) and g is not None and not g.is_sparse and v.shape == g.shape and count is not None:
            beta2 = self.source.group.get("betas", (0.0, 0.0))[1]
            mean = (g.float().square() / v.float().clamp_min(1e-30)).mean()
            yield (mean * (1 - float(beta2) ** float(count))).sqrt()


class LayerMonitor:
    """Measures and judges the layers of a model, but its head, one step in ten, on rank zero.

    `remark` is told what is left out, `decay` is that of the head's optimizer, and `history` is the `state` of an
    earlier attempt.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Sequence[Optimizer],
        head: Tensor,
        *,
        guard: Guard,
        remark: Callable[[str], None] = lambda text: None,
        decay: Decay | None = None,
        rules: Rules | None = None,
        history: dict[str, Any] | None = None,
        every: int = EVERY,
    ) -> None:
        self.guard, self.every = guard, every
        self.layers = [*_layers(model, optimizers, head, remark, decay)]
        self._judge = LayerJudge(rules)
        if history is not None:
            with guard("history"):
                self._judge.restore(history)
        self._seconds = 0.0  # what measuring has cost since the last record
        self._found: dict[str, Layer] = {}
        self._pending: dict[int, tuple[LayerRecord, float]] = {}  # by step: an accelerator's records come later
        self._ends: list[Callable[[], None]] = []

    def begin(self, step: int) -> None:
        """Note that a step is about to be made; hook it if it is to be measured."""
        if self._ends or step % self.every:
            return
        with self._timed():
            plan = StepPlan(check=False)
            for layer in self.layers:
                optimizer, param = layer.source.optimizer, layer.source.param
                steps = (optimizer, *inner_optimizers(optimizer, param))
                before, after = partial(self._before, layer, plan), partial(self._after, layer, step)
                self._ends.append(on_steps(steps, before, after))

    def end(self, step: int) -> None:
        """Note that a step was made, and let go of the optimizers."""
        if self._found:
            layers = {layer.name: self._found[layer.name] for layer in self.layers if layer.name in self._found}
            self._pending[step] = LayerRecord(step=step, time=time.time(), layers=layers), self._seconds
            self._seconds = 0.0
        self.close()

    def complete(self, record: StepRecord) -> tuple[StepRecord, LayerRecord | None, list[Alert]]:
        """Return the record of a step with the largest of its layers, the layers, if measured, and their alerts."""
        measured, seconds = self._pending.pop(record.step, (None, 0.0))
        alerts: list[Alert] = []
        if measured is not None:
            with self.guard("layers"):
                alerts = self._judge.judge(measured)
                layers, before = measured.layers.values(), sum(record.seconds.values())
                record = msgspec.structs.replace(
                    record,
                    layer_step=max((layer.relative for layer in layers if layer.weight), default=None),
                    layer_ratio=max((layer.ratio for layer in layers if layer.ratio is not None), default=None),
                    seconds=record.seconds | {"layers": seconds},
                    share=record.share * (before + seconds) / before if record.share is not None and before else None,
                )
        return record, measured, alerts

    def state(self) -> dict[str, Any]:
        """Return the history of the layers, for a checkpoint."""
        return self._judge.state()

    def close(self) -> None:
        """Let go of the optimizers."""
        for stop in self._ends:
            stop()
        self._ends, self._found = [], {}
        for layer in self.layers:
            layer.source.forget()

    def _before(self, layer: WatchedLayer, plan: StepPlan) -> None:
        with self._timed():
            layer.source.begin(plan)

    def _after(self, layer: WatchedLayer, step: int) -> None:
        with self._timed():
            measured = layer.measure(exact=step % UPPER_EVERY == 0)
            if measured is not None:
                self._found[layer.name] = measured

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        with self.guard("layers"):
            yield
        self._seconds += time.perf_counter() - start


def _layers(
    model: Module, optimizers: Sequence[Optimizer], head: Tensor, remark: Callable[[str], None], decay: Decay | None
) -> Iterator[WatchedLayer]:
    """Yield every trained parameter but the head's, with its ruler."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)}
    left_out, unknown, of_head = 0, 0, owner_of(optimizers, head)
    for name, p in model.named_parameters():
        owner = owner_of(optimizers, p)
        if p is head or owner is None or not p.requires_grad or not p.numel() or not p.ndim:
            continue
        if hasattr(p, "device_mesh"):
            left_out += 1
            continue
        kind = "vector" if p.ndim < 2 else "embedding" if id(p) in tables else "matrix"
        stated = decay if owner is of_head else None
        source = IncrementSource(owner, p, decay=stated)
        if isinstance(source.optimizer, MatrixOptimizer):  # to form Muon's increment again costs as much as its step
            source = IncrementSource(owner, p, decay=stated, basis=Basis.STEP)
        unknown += source.decay.share(source.group) is None
        yield WatchedLayer(name, kind, source)
    if unknown:
        remark(f"the weight decay of {unknown} layers is not known, and neither are their steps: they are left out")
    if left_out:
        remark(f"{left_out} layers are sharded, and have no norm on one rank alone: they are left out")


class AttentionLogits(TorchFunctionMode):
    """Within the block, `largest` is the largest |logit| that a softmax of attention was given; None if none was.

    A mode of torch sees the calls of `scaled_dot_product_attention`, so that nothing of the model changes. A model that
    computes its attention by other means has no number: none is guessed. Positions that a mask excludes do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._maxima: list[Tensor] = []

    @property
    def largest(self) -> float | None:
        """Over all calls so far."""
        return float(torch.stack([x.float() for x in self._maxima]).amax()) if self._maxima else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at a call of attention, and pass every call on."""
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            with torch.no_grad():
                self._look(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> None:
        q, k = query.detach().float(), key.detach().float()
        if enable_gqa and q.ndim > 2 and q.shape[-3] != k.shape[-3]:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        logits = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if is_causal:
            logits = logits.tril()
        elif attn_mask is not None:
            excluded = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask < -1e4
            logits = logits.masked_fill(excluded, 0.0)
        if logits.numel():
            self._maxima.append(logits.abs().amax())
