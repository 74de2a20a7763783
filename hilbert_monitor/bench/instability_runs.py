"""Runs that may become unstable by themselves, side by side, and every signal that could tell of it earlier.

One AdamW has all runs, each with groups of its own. Signals are taken at every update, from what the update has at
hand, some of those of the logits on every second position of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW

from hilbert_monitor.geometry import leading_direction

from .instability_arms import Job
from .instability_model import NARROW, SQUARE, WIDE, Decoders, Pass, StudySizes
from .small_run import small_corpus

DECAY, CLIP = 0.1, 1.0
Z_LOSS, INDEPENDENT_DECAY = 1e-4, 1e-4
PANEL = 8
"""Windows of held-out text whose loss says what an update did, free of the noise of batches."""

Floats = NDArray[np.float64]


class StudyRuns:
    """Runs that are trained together. What one does has no effect on another.

    Args:
        jobs: the runs.
        sizes: how large they are.
    """

    def __init__(self, jobs: Sequence[Job], sizes: StudySizes) -> None:
        self.jobs, self.sizes = jobs, sizes
        self.model = Decoders(jobs, sizes)
        self.weights = self.model.weights
        arms = [job.arm for job in jobs]
        if tied := [r for r, arm in enumerate(arms) if arm.tied]:
            with torch.no_grad():
                self.weights["head"][tied] = self.weights["embed"][tied]
        self.tied = torch.tensor([arm.tied for arm in arms])
        corpus = small_corpus(sizes.vocab_size)
        self.text, held_out = (torch.from_numpy(part.astype("int64")) for part in (corpus.train, corpus.validation))
        windows = torch.linspace(0, len(held_out) - sizes.context - 1, PANEL).long()
        self.panel = held_out[windows[:, None] + torch.arange(sizes.context + 1)].expand(len(jobs), -1, -1)
        self.draws = [torch.Generator().manual_seed(10_000 + job.seed) for job in jobs]
        self.optimizer = AdamW([group for r in range(len(jobs)) for group in self._groups(r)], eps=1e-8, fused=True)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.z_loss = torch.tensor([Z_LOSS * arm.z_loss for arm in arms])
        self.clip = torch.tensor([CLIP if arm.clipping else torch.inf for arm in arms])
        self.rounds = [r for r, arm in enumerate(arms) if arm.bf16_logits]
        self.directions: dict[tuple[str, str], Tensor] = {}
        self.update = 0
        self._values: list[Tensor] = []
        self._names: list[str] = []

    def _groups(self, run: int) -> list[dict[str, Any]]:
        """The head and the rest of a run, each with its rate and its decay; parameters are views of the weights."""
        arm, high, low = self.jobs[run].arm, self.sizes.rate, self.sizes.rate / 10
        views = {name: Parameter(w.detach()[run]) for name, w in self.weights.items()}
        betas = (0.9, arm.beta2)
        head = {
            "params": [views.pop("head")],
            "lr": high if arm.high in ("all", "head") else low,
            "weight_decay": DECAY if arm.head_decay == "coupled" else 0.0,
            "betas": betas,
        }
        rate = high if arm.high in ("all", "backbone") else low
        return [head, {"params": [*views.values()], "lr": rate, "weight_decay": DECAY, "betas": betas}]

    def step(self) -> None:
        """Make one update of every run, and take its signals."""
        self.update += 1
        tokens = torch.stack([self._batch(draw) for draw in self.draws])  # (R, B, T + 1)
        result, targets = self.model.run(tokens[..., :-1]), tokens[..., 1:].flatten(1)
        head = self.weights["head"]
        logits = result.states @ head.mT  # (R, N, V)
        with torch.no_grad():
            every = 1 if self.rounds else 2
            rounded = _bf16(_bf16(result.states[:, ::every]) @ _bf16(head).mT)
        used = logits
        if self.rounds:  # rounded values, and the gradient of what was rounded
            used = logits.index_add(0, torch.tensor(self.rounds), (rounded - logits.detach())[self.rounds])
        log_z = torch.logsumexp(used, -1)
        target = used.gather(-1, targets[..., None])[..., 0]
        total = (log_z - target).mean(1) + self.z_loss * log_z.square().mean(1)
        found = torch.autograd.grad(total.sum(), [*self.weights.values()])
        # a product's gradient may be laid out as its transpose, which the fused kernel would take for another matrix
        gradients = {name: g.contiguous() for name, g in zip(self.weights, found, strict=True)}
        with torch.no_grad():
            norm = self._prepare(gradients)
            before = {name: w.clone() for name, w in self.weights.items()}
            self._move(gradients)
            exact_z = torch.logsumexp(logits, -1) if self.rounds else log_z
            self._measure(result, logits, exact_z, rounded, targets, gradients, before, norm)

    def _batch(self, draw: torch.Generator) -> Tensor:
        T = self.sizes.context
        starts = torch.randint(len(self.text) - T - 1, (self.sizes.batch,), generator=draw)
        return self.text[starts[:, None] + torch.arange(T + 1)]

    def _prepare(self, gradients: dict[str, Tensor]) -> Tensor:
        """Sum the two gradients of a tied weight, and clip; return the norms (R,) before it."""
        for run, job in enumerate(self.jobs):
            if job.arm.tied:
                gradients["embed"][run] += gradients["head"][run]
                gradients["head"][run] = gradients["embed"][run]
        squares = [torch.linalg.vector_norm(g, dim=(1, 2)) ** 2 * self._once(name) for name, g in gradients.items()]
        norm = torch.stack(squares).sum(0).sqrt()
        scale = (self.clip / norm.clamp_min(1e-30)).clamp_max(1.0)
        for gradient in gradients.values():
            gradient.mul_(scale[:, None, None])
        return norm

    def _once(self, name: str) -> Tensor:
        """One for each run (R,), and zero for the head of a tied one, which is counted as the embedding."""
        return 1 - self.tied.float() if name == "head" else torch.ones(len(self.jobs))

    def _move(self, gradients: dict[str, Tensor]) -> None:
        """Make a step of AdamW, and what arms do after it."""
        names = ["head", *(name for name in self.weights if name != "head")]
        for run, job in enumerate(self.jobs):
            head, rest = self.optimizer.param_groups[2 * run : 2 * run + 2]
            for name, p in zip(names, (*head["params"], *rest["params"]), strict=True):
                p.grad = gradients[name][run]
            warm = min(1.0, self.update / job.arm.warmup)
            head["lr"], rest["lr"] = (rate * warm for rate in self.rates[2 * run : 2 * run + 2])
        self.optimizer.step()
        for run, job in enumerate(self.jobs):
            head_weight = self.weights["head"].detach()[run]
            if job.arm.head_decay == "independent":
                head_weight.mul_(1 - INDEPENDENT_DECAY * min(1.0, self.update / job.arm.warmup))
            if job.arm.centred:
                head_weight.sub_(head_weight.mean(0))

    # Signals

    def _measure(
        self,
        result: Pass,
        logits: Tensor,
        log_z: Tensor,
        rounded: Tensor,
        targets: Tensor,
        gradients: dict[str, Tensor],
        before: dict[str, Tensor],
        norm: Tensor,
    ) -> None:
        steps = {name: w.detach() - before[name] for name, w in self.weights.items()}
        signals = self._of_logits(logits.detach(), log_z, rounded, targets) | self._of_head(
            steps["head"], gradients, result
        )
        moved = [torch.linalg.vector_norm(step, dim=(1, 2)) ** 2 * self._once(name) for name, step in steps.items()]
        signals |= {
            "panel loss": self._panel_loss(),
            "gradient norm": norm,
            "update norm": torch.stack(moved).sum(0).sqrt(),
            "attention logit": result.attention,
            "hidden norm": result.size,
        }
        signals |= self._ratios()
        for parts in (SQUARE, WIDE, NARROW):
            signals |= self._of_layers(parts, steps, result)
        self._names = [*signals]
        self._values.append(torch.stack([*signals.values()]).float())  # (signals, R)

    def _panel_loss(self) -> Tensor:
        """The cross entropy (R,) of the panel with the weights as they are now."""
        states, targets = self.model.run(self.panel[..., :-1]).states, self.panel[..., 1:].flatten(1)
        logits = states @ self.weights["head"].mT
        return (torch.logsumexp(logits, -1) - logits.gather(-1, targets[..., None])[..., 0]).mean(1)

    def _ratios(self) -> dict[str, Tensor]:
        """RMS(g / sqrt(v)) of each tensor: the gradient that the optimizer saw over its own second moment."""
        names = ["head", *(name for name in self.weights if name != "head")]
        ratios = []
        for group in self.optimizer.param_groups:
            correction = 1 - group["betas"][1] ** self.update
            for p in group["params"]:
                v = self.optimizer.state[p]["exp_avg_sq"]
                assert p.grad is not None
                ratios.append((torch.square(p.grad).div_(v + 1e-20).mean() * correction).sqrt())
        table = torch.stack(ratios).view(len(self.jobs), len(names)).T
        return {f"RMS(g / sqrt v):{name}": row for name, row in zip(names, table, strict=True)}

    def _of_logits(self, logits: Tensor, exact_z: Tensor, rounded: Tensor, targets: Tensor) -> dict[str, Tensor]:
        loss = exact_z - logits.gather(-1, targets[..., None])[..., 0]  # (R, N)
        half, places = (rounded[:, ::2] if self.rounds else rounded), targets[:, ::2, None]
        lost = torch.logsumexp(half, -1) - half.gather(-1, places)[..., 0] - loss[:, ::2]
        return {
            "loss": loss.mean(1),
            "mean logit": logits[:, ::2].mean(-1).square().mean(1).sqrt(),
            "log Z": exact_z.square().mean(1).sqrt(),
            "precision loss": lost.square().mean(1).sqrt(),
        }

    def _of_head(self, S: Tensor, gradients: dict[str, Tensor], result: Pass) -> dict[str, Tensor]:
        delta = result.states[:, ::2] @ S.mT
        diameter = lower_diameter(S)
        G = gradients["head"] - gradients["head"].mean(1, keepdim=True)
        tension = 0.5 * torch.linalg.vector_norm(G, dim=2).sum(1)
        decrease = (G * S).sum((1, 2))  # negative for descent, so that a fall of the efficiency goes up
        return {
            "D(S)": diameter,
            "Hilbert RMS": (delta.amax(2) - delta.amin(2)).square().mean(1).sqrt(),
            "efficiency": decrease / (tension * diameter).clamp_min(1e-30),
        }

    def _of_layers(self, parts: Sequence[str], steps: dict[str, Tensor], result: Pass) -> dict[str, Tensor]:
        """Spectral norms of increments over those of weights, and how inputs align with weights."""
        names = [f"{block}.{part}" for block in range(self.sizes.blocks) for part in parts]
        W, S = (torch.stack([x[name].detach() for name in names], 1) for x in (self.weights, steps))  # (R, k, m, n)
        found = {}
        for kind, A in (("weight", W), ("step", S)):
            found[kind] = leading_direction(A, self.directions.get((kind, parts[0])))
            self.directions[kind, parts[0]] = found[kind].right
        ratio = found["step"].norm / found["weight"].norm.clamp_min(1e-30)  # (R, k)
        X = torch.stack([result.inputs[name] for name in names], 1)  # (R, k, N, n)
        along = (X @ found["weight"].right[..., None])[..., 0]
        cosine = (along / torch.linalg.vector_norm(X, dim=-1).clamp_min(1e-30)).mean(-1).abs()
        layers = {f"layers:{name}": ratio[:, i] for i, name in enumerate(names)}
        return layers | {f"spectral alignment:{name}": cosine[:, i] for i, name in enumerate(names)}

    def table(self, run: int) -> dict[str, Floats]:
        """All signals of one run, (updates,) each. Members of a family are FAMILY:MEMBER."""
        values = torch.stack([value[:, run] for value in self._values], 1).double().numpy()
        return dict(zip(self._names, values, strict=True))


def lower_diameter(S: Tensor) -> Tensor:
    """Return lower bounds (R,) of the diameters of increments (R, V, d): two sweeps from the longest centred row."""
    centred = S - S.mean(1, keepdim=True)
    norms = centred.square().sum(2)
    place, farthest = norms.argmax(1), S.new_zeros(len(S))
    for _ in range(2):
        row = centred[torch.arange(len(S)), place]  # (R, d)
        squares = norms - 2 * (centred @ row[..., None])[..., 0]
        best = squares.max(1)
        farthest, place = best.values + row.square().sum(1), best.indices
    return farthest.clamp_min(0.0).sqrt()


def _bf16(x: Tensor) -> Tensor:
    """Round to bf16 and back: a product of such numbers, summed in fp32 and rounded again, is one in bf16."""
    return x.bfloat16().float()


def family_of(name: str) -> str:
    """The signal that a name belongs to: its own, or that of its family."""
    return name.partition(":")[0]
