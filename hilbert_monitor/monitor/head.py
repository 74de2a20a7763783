"""The LM head that is watched: which weight it is, and the increment of its last step as it acts on the logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Linear, Module, ModuleDict, Parameter
from torch.optim import Optimizer

from hilbert_monitor.geometry import RowShards, RowSource, compute_dtype
from hilbert_monitor.optim import find_head
from hilbert_monitor.optim.recipe import head_weight, parameter_of
from hilbert_monitor.runs.stops import handled_signals

from .computed_head import ComputedSource, ComputedWeight, computed_weight
from .increment import Basis, Increment, IncrementSource, LocalRows, StepPlan
from .optimizers import Decay, diameter_ceiling, owner_of
from .runtime import Ranks

# Where it is


class HeadPlace(NamedTuple):
    """Where the LM head is in a model."""

    name: str
    module: Module | None
    """None if the head is a parameter that no module of its own holds."""
    weight: Tensor
    """As an optimizer has it; of a weight that is computed, the largest parameter that is trained."""
    computed: ComputedWeight | None = None
    """How the weight is computed from other parameters, if it is."""

    @property
    def like(self) -> Tensor:
        """A tensor of the weight's shape, dtype, device and layout."""
        return self.weight if self.computed is None else self.computed.like

    @property
    def bias(self) -> Tensor | None:
        """The head's bias, if it has one."""
        module = self.module
        while isinstance(inner := getattr(module, "base_layer", None), Module):
            module = inner
        return None if module is None else parameter_of(module, "bias")


def locate_head(model: Module, head: str | Module | Parameter | None) -> HeadPlace:
    """Find the LM head in a model, given the module, its weight, the name of either, or nothing."""
    if isinstance(head, Parameter):
        name = next((name for name, p in model.named_parameters(remove_duplicate=False) if p is head), None)
        if name is None:
            raise ValueError("the head is no parameter of this model: pass one of its parameters, or the name of one")
        return _place_of_parameter(model, name)
    names = {module: name for name, module in model.named_modules()}
    if isinstance(head, Module):
        if head not in names:
            raise ValueError("the head is no module of this model: pass one of its modules, or the name of one")
        return _place_of_module(names[head], head)
    name = find_head(model) if head is None else head
    modules = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return _place_of_module(name, modules[name])
    if name in dict(model.named_parameters(remove_duplicate=False)):
        return _place_of_parameter(model, name)
    raise ValueError(f"the model has no module or parameter called {name!r}: pass the LM head or its name as head=...")


def _place_of_parameter(model: Module, name: str) -> HeadPlace:
    holder, _, last = name.rpartition(".")
    if last == "weight":
        return _place_of_module(holder, model.get_submodule(holder))
    weight = model.get_parameter(name)
    _check_matrix(name, type(weight).__name__, weight)
    return HeadPlace(name, None, weight)


def _place_of_module(name: str, module: Module) -> HeadPlace:
    copies, active = getattr(module, "modules_to_save", None), list(getattr(module, "active_adapters", None) or [])
    if isinstance(copies, ModuleDict) and len(active) == 1 and active[0] in copies:  # peft trains a copy in its place
        name, module = f"{name}.modules_to_save.{active[0]}", copies[active[0]]
    computed = computed_weight(module)
    if computed is not None:
        return HeadPlace(name, module, computed.trained, computed)
    weight = head_weight(module, name)
    _check_matrix(name, type(module).__name__, weight)
    assert weight is not None
    return HeadPlace(name, module, weight)


def _check_matrix(name: str, kind: str, weight: Tensor | None) -> None:
    if weight is None or weight.ndim != 2:
        got = "no weight of its own" if weight is None else f"a weight of shape {tuple(weight.shape)}"
        raise TypeError(f"the head '{name}', a {kind}, has {got}, not one of (V, d): pass the LM head as head=...")


def _is_transposed(model: Module, place: HeadPlace, vocab_size: int | None) -> bool:
    """Return True if the weight is stored as (d, V). That of an nn.Linear never is."""
    if isinstance(place.module, Linear | Embedding | EmbeddingBag) or (place.computed and place.computed.by_tokens):
        return False
    rows, columns = place.like.shape
    embeddings = [m for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)]
    for tokens in ({vocab_size}, {m.num_embeddings for m in embeddings}):  # the second, of a padded head
        if rows in tokens or columns in tokens:
            return rows not in tokens
    if vocab_size is not None and (rows < vocab_size) != (columns < vocab_size):
        return rows < vocab_size
    if place.module is not None:
        return False
    asked = "pass vocab_size=..." if vocab_size is None else f"and vocab_size={vocab_size} does not tell: look at it"
    raise ValueError(
        f"cannot tell whether the head '{place.name}' of shape ({rows}, {columns}) is stored as (V, d) or (d, V): no"
        f" embedding has as many tokens; {asked}"
    )


class NobodyMovesIt(ValueError):
    """No optimizer has the head's weight, so far."""


def _why_nobody_moves(place: HeadPlace) -> str:
    if not place.weight.requires_grad:
        return f"the head '{place.name}' is frozen, and no optimizer has it"
    return (
        f"no optimizer has the head '{place.name}', a weight of shape {tuple(place.weight.shape)}: if another head is"
        " trained, pass that as head=..."
    )


# Its step


class HeadIncrement(NamedTuple):
    """The increment of the logits' matrix in one step."""

    S: RowShards
    """(V, d): scaled, padding dropped; (V, d + 1) for a head with a bias, whose increment is the last column."""
    rounding: float | Tensor
    """Bound on the error of D(S) from the rounding of this rank's weights; zero where there is none."""
    basis: Basis
    has_decay: bool
    """True if the weight decay is unknown, so that this is the change of the weights, with their decay."""


class Head:
    """An LM head and the optimizer that moves it.

    Args:
        model: a language model.
        optimizers: one of them moves the head. One of them may be a ChainedOptimizer.
        head: the LM head, its name or that of its weight, or None to look for it.
        decay: how the optimizer uses weight_decay, where the user says so.
        vocab_size: rows of the head that are tokens, if it is padded.
        logit_scale: factor between the head's output and the logits; by default that of the model's config, or 1.
    """

    def __init__(
        self,
        model: Module,
        optimizers: Optimizer | Sequence[Optimizer],
        *,
        head: str | Module | Parameter | None = None,
        decay: Decay | None = None,
        vocab_size: int | None = None,
        logit_scale: float | None = None,
    ) -> None:
        place = locate_head(model, head)
        self.name, self.module, self.weight, self.computed = place
        self.logits = logit_transform(model, self.module)
        self.vocab_size, self.logit_scale = vocab_size, self.logits.scale if logit_scale is None else logit_scale
        self.transposed = _is_transposed(model, place, vocab_size)
        rows = place.like.shape[int(self.transposed)]
        if vocab_size is not None and vocab_size > rows:
            raise ValueError(f"vocab_size is at most the {rows:,} rows of the head '{place.name}', got {vocab_size:,}")
        owners = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        owner = owner_of(owners, self.weight)
        if owner is None:
            raise NobodyMovesIt(_why_nobody_moves(place))
        self.owner = owner
        self.rows = LocalRows(place.like, transposed=self.transposed)
        self.source = (
            IncrementSource(owner, self.weight, decay=decay, rows=self.rows)
            if self.computed is None
            else ComputedSource(owners, self.computed, rows=self.rows)
        )
        self.bias = place.bias
        bias_owner = None if self.bias is None else owner_of(owners, self.bias)
        self.bias_source: IncrementSource | None = None
        """Of a bias that is trained; one that is frozen adds nothing to a step."""
        if self.bias is not None and bias_owner is not None:
            self.bias_source = IncrementSource(bias_owner, self.bias, decay=decay)
            if self.bias_source.optimizer is not self.source.optimizer:  # measured when a gradient may be gone
                self.bias_source = IncrementSource(bias_owner, self.bias, decay=decay, basis=Basis.STEP)
        self.sources = [self.source] if self.bias_source is None else [self.bias_source, self.source]
        """Where increments come from; the weight's is the last."""
        embeddings = [m for m in model.modules() if isinstance(m, Embedding | EmbeddingBag)]
        self.tied = any(self.weight is parameter_of(m, "weight") for m in embeddings)

    def remarks(self) -> list[str]:
        """Return reasons why the bound H D(S) on the perturbation is not tight for this head."""
        remarks = []
        if self.computed is not None:
            remarks.append(
                f"the head's weight is computed ({self.computed.kind}): S is the difference of the effective weight,"
                " in which the decay of its parameters is included"
            )
        if self.bias_source is not None:
            remarks.append("the head has a bias: rows are extended by its increment, and sqrt(H^2 + 1) D is a bound")
        if self.tied:
            remarks.append("the head's weight is an embedding's too: a step also moves the hidden states through it")
        if self.logits.softcap is not None:
            remarks.append(f"the logits are soft-capped at {self.logits.softcap:g}, which makes their changes smaller")
        elif self.logits.scale == 1 and self.logits.source and self.logit_scale == 1:
            remarks.append(f"{self.logits.source}; if it scales the logits, pass logit_scale=...")
        return remarks

    @property
    def basis(self) -> Basis:
        """What the increment of the next step is computed from."""
        return min(source.basis for source in self.sources)

    @property
    def waits_for_record(self) -> bool:
        """Whether a step is whole only when its record is made: the bias has an optimizer of its own, or more than the
        optimizer moves the weights."""
        return self.basis is Basis.UPDATE or any(s.optimizer is not self.source.optimizer for s in self.sources)

    @property
    def can_defer(self) -> bool:
        """Whether this rank forms the whole increment by itself, from the optimizer's state."""
        return not self.rows.sharded and self.basis is Basis.STATE

    @property
    def has_stored(self) -> bool:
        """Whether the step that was stored is another than the one intended, and can be formed."""
        return self.source.is_rounded and all(source.has_before for source in self.sources)

    def agree(self, ranks: Ranks, *mine: float) -> list[float]:
        """Return the least of what the ranks say, for each of some numbers; afterwards all have the same basis.

        Called on every rank. What one rank finds out of how the weights move, all must know.
        """
        numbers = ranks.all_min([*mine, *(float(source.basis) for source in self.sources)])
        for source, basis in zip(self.sources, numbers[len(mine) :], strict=True):
            source.basis = Basis(int(basis))
        return numbers[: len(mine)]

    def end_missing(self) -> None:
        """Note that a source made no step in an update in which another did."""
        for source in self.sources:
            source.end_missing()

    def end_unseen(self) -> None:
        """Note the step of an update that no hook saw. Called on every rank if it moved the weights of one."""
        for source in self.sources:
            source.end_unseen()

    def unchanged(self) -> bool:
        """Return whether the weights are those that the last step left; if not, updates are measured from now on."""
        return all([source.unchanged() for source in self.sources])

    def end_update(self, plan: StepPlan) -> None:
        """Note that an update is over; `plan` is that of the next."""
        for source in self.sources:
            source.end_update(plan)

    def forget(self) -> None:
        """Forget the last step."""
        for source in self.sources:
            source.forget()

    # Matrices

    def increment(self, *, check: bool = True) -> HeadIncrement | None:
        """Return the increment of the last step as it acts on the logits; None if the weights did something else.

        Args:
            check: compare it with what the weights did, where the step's plan says so.
        """
        increments = [source.increment(check=check) for source in self.sources]
        return None if None in increments else self._on_logits([x for x in increments if x is not None])

    def stored_increment(self) -> RowShards:
        """Return the increment that the stored weights made in the last step, as it acts on the logits. (V, d)."""
        return self._on_logits([source.stored() for source in self.sources]).S

    def _on_logits(self, increments: list[Increment]) -> HeadIncrement:
        *bias, weight = increments
        rows, width, scale = weight.rows, weight.rows.shape[1], self.logit_scale
        squares = width * weight.rounding**2  # of the error of one row, at most
        if bias:
            squares += bias[0].rounding ** 2
            form = lambda u, b: torch.cat([u, b.to(u.dtype)], 1)  # noqa: E731
            rows = RowSource(rows, bias[0].rows, form=form, width=width + 1)
        if scale != 1:
            rows = RowSource(rows, form=lambda s: s * scale)
        S, rounding = self.rows.matrix(rows, self.vocab_size), 2 * squares**0.5 * abs(scale)
        return HeadIncrement(S, rounding, self.basis, any(x.has_decay for x in increments))

    def weight_rows(self) -> RowShards:
        """Return the rows of the weight as it is now, (V, d), in its own dtype and without the logits' scale."""
        rows = self.rows.of(self.weight) if self.computed is None else self.computed.rows(self.rows)
        return self.rows.matrix(rows, self.vocab_size)

    def logit_matrix(self, *, bias: bool = True) -> RowShards:
        """Return the matrix that makes logits of hidden states, as it is now.

        (V, d), or (V, d + 1) with a bias, frozen or not. Without bias and scale its rows are those of the weight.
        """
        U, scale = self.weight_rows(), self.logit_scale
        rows, dtype = U.rows, compute_dtype(self.weight)
        if self.bias is not None and bias:
            entries = LocalRows(self.bias)
            column = entries.matrix(entries.of(self.bias), self.vocab_size).rows
            form = lambda u, b: torch.cat([u.to(dtype), b.to(dtype)], 1)  # noqa: E731
            rows = RowSource(rows, column, form=form, width=U.shape[1] + 1, dtype=dtype)
        if scale != 1:
            rows = RowSource(rows, form=lambda u: u.to(dtype) * scale, dtype=dtype)
        return U if rows is U.rows else replace(U, rows=rows)

    def gradient(self) -> RowShards | None:
        """Return the gradient of the head's weight, (V, d) with padding."""
        G = self.weight.grad if self.computed is None else None
        return None if G is None else self.rows.matrix(self.rows.of(G.to_dense() if G.is_sparse else G))

    def ceiling(self, *, lr: float | None = None, count: float | None = None) -> float | None:
        """Return the largest D(S) that the optimizer can make in a step like the last, where there is a theorem.

        Args:
            lr: the learning rate of the step, if it has been read.
            count: the optimizer's count of steps, if it has been read.
        """
        source, last = self.source, self.source.last
        if last is None or self.basis is not Basis.STATE or self.bias_source is not None or self.transposed:
            return None
        lr, count = last.lr if lr is None else lr, float(source.count) if count is None else count
        width = self.weight.shape[1]
        ceiling = diameter_ceiling(source.optimizer, last.options, lr=lr, count=count, width=width)
        return None if ceiling is None else ceiling * abs(self.logit_scale)


# The scale of the logits


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The logits as a function of the head's output x: scale * x, or softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    source: str = ""
    """Where the numbers come from, or why a field of the config was not used; empty if there was nothing to read."""


SCALES = (
    ("logit_scale", False, ("cohere",)),
    ("logits_scaling", True, ("granite",)),
    ("logits_scaling", False, ("hyperclovax",)),
    ("lm_head_multiplier", False, ("falcon_h1",)),
    ("output_multiplier", False, ("muse",)),
)
"""Fields of configs that scale the logits, whether they divide, and the model types (their beginnings) for which this
is so, in transformers 5.22. MiniCPM3 divides the head's input by its field, and MPT never reads its own."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Fields with a soft cap. They mean the same in every model that has one."""
HARMLESS = (("mpt", "logit_scale"), ("minicpm", "logits_scaling"))
"""Beginnings of model types, and a field that their code does not apply to the head's output."""
PARTS = ("text_config", "decoder", "language_config", "llm_config")
"""Where the config of a model of several parts has that of its language model."""


def logit_transform(model: Module, head: Module | None = None) -> LogitTransform:
    """Read from a Hugging Face style config how a model makes logits of its head's output.

    Looks at the config of every module that contains the head, the innermost first, and takes the first that says
    something. A model may be wrapped, in a LightningModule for instance.
    """
    seen, doubt = set[int](), ""
    for module in reversed(list(model.modules())):
        config = getattr(module, "config", None)
        if config is None or id(config) in seen or not (head is None or any(part is head for part in module.modules())):
            continue
        seen.add(id(config))
        transform = config_transform(config)
        if transform.scale != 1 or transform.softcap is not None:
            return transform
        doubt = doubt or transform.source
    return LogitTransform(source=doubt)


def config_transform(config: Any) -> LogitTransform:
    """Read one config, an object or a mapping such as a config.json, and the parts of it that a language model has."""
    doubt = ""
    for part in (config, *(_read(config, name) for name in PARTS)):
        if part is None:
            continue
        transform = _transform_of(part, str(_read(part, "model_type") or _read(config, "model_type") or ""))
        if transform.scale != 1 or transform.softcap is not None:
            return transform
        doubt = doubt or transform.source
    return LogitTransform(source=doubt)


def _read(config: Any, name: str) -> Any:
    """Return a field of a config, an object or a mapping; None if there is none."""
    if isinstance(config, Mapping):
        return config.get(name)
    try:
        return getattr(config, name, None)
    except Exception as error:  # a property may fail on a config that is incomplete
        if handled_signals(error):
            raise
        return None


def _transform_of(config: Any, model_type: str) -> LogitTransform:
    """Read one config. `source` has the fields that were used, or what is wrong with the first that was not."""
    scale, cap, sources, doubts = 1.0, None, list[str](), list[str]()
    for name in dict.fromkeys(name for name, _, _ in SCALES):
        value = _read(config, name)
        if value is None or any(model_type.startswith(kind) and name == harmless for kind, harmless in HARMLESS):
            continue
        divides = next((d for n, d, models in SCALES if n == name and model_type.startswith(models)), None)
        number = _number(value)
        if number is None:
            doubts.append(f"{name} of the model's config is {value!r}, not a number other than zero, and was not used")
        elif divides is not None:
            scale *= 1 / number if divides else number
            sources.append(f"{name} = {number:g}")
        elif number != 1:
            doubts.append(f"{name} = {number:g} of the config was not used: unknown for the model type {model_type!r}")
    for name in SOFTCAPS:
        value = _read(config, name)
        number = None if value is None else _number(value)
        if number is not None and number > 0:
            cap = number
            sources.append(f"{name} = {number:g}")
        elif value not in (None, False, 0):
            doubts.append(f"{name} of the model's config is {value!r}, not a positive number, and was not used")
    if sources and (scale != 1 or cap is not None):
        return LogitTransform(scale, cap, f"the config of {model_type or 'the model'}: {', '.join(sources)}")
    return LogitTransform(source=doubts[0] if doubts else "")


def _number(value: Any) -> float | None:
    """Return a finite number other than zero, or None for anything else."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) and number != 0 else None


COMPARED = 8192
"""Entries of a batch's logits that are compared with the head's output."""


@torch.no_grad()
def check_logit_scale(output: Tensor, logits: Tensor, scale: float, softcap: float | None = None) -> str:
    """Compare the logits of a batch with the head's output; return what is wrong with the scale, or nothing.

    Nothing is said either where the logits are no multiple of the output, or there is nothing to compare.

    Args:
        output: (..., V) of the head.
        logits: the same shape, of the model.
        scale: that the increment was measured with.
        softcap: of the logits, if the config has one.
    """
    if output.shape != logits.shape or not (output.is_floating_point() and logits.is_floating_point()):
        return ""
    x, y = output.detach().reshape(-1), logits.detach().reshape(-1)
    finite = (x.isfinite() & y.isfinite()).nonzero().squeeze(1)
    largest = finite[x[finite].float().abs().topk(min(64, len(finite))).indices]
    at = torch.cat([finite[:: max(1, -(-len(finite) // COMPARED))], largest])
    x, y = x[at].double().cpu(), y[at].double().cpu()
    eps = max(torch.finfo(t.dtype).eps for t in (output, logits))
    tolerance = 4 * max(eps, torch.finfo(torch.float32).eps) * float(y.abs().max()) if len(y) else 0.0
    if softcap is not None:  # below half the cap its inverse does not magnify rounding
        low = y.abs() < softcap / 2
        x, y, tolerance = x[low], softcap * torch.atanh(y[low] / softcap), 2 * tolerance
    if len(x) < 2 or not bool(x.any()) or not bool(y.any()):
        return ""
    measured = float((x * y).sum() / (x * x).sum())
    fits = float((measured * x - y).abs().max()) <= tolerance
    if not fits or abs(measured - scale) <= max(0.01, 4 * eps) * abs(scale):
        return ""
    return (
        f"the model's logits are {measured:.3g} times its head's output, and D(S) was measured for {scale:g} times:"
        f" pass logit_scale={measured:.3g}"
    )
