"""What is known of an optimizer: its hooks, its step on one parameter, its weight decay and its learning rate."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, NAdam, Optimizer, RAdam

from hilbert_monitor.geometry import RowSource, compute_dtype
from hilbert_monitor.optim import ChainedOptimizer, Group, MatrixOptimizer, RowNorm
from hilbert_monitor.runs.stops import handled_signals

Rate = float | Tensor
Decay = str | float | Callable[[Group], Any]
"""How an optimizer uses weight_decay: "decoupled", "coupled", or the share of the weights that a step takes away, as a
number or as a function of the parameter's group."""
Schedulers = Any
"""A scheduler, several of them, or a function that returns them."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One call of an optimizer's step, as its hooks saw it."""

    skipped: str
    """Reason for which nothing moved ("no gradient", "overflow"), or empty."""
    options: Group
    """The options of the parameter's group at that step: a scheduler changes lr soon after."""
    overflow: Tensor | None = None
    """On its device, whether a GradScaler had a fused optimizer skip the step, where that was not read at once."""

    @property
    def lr(self) -> float | None:
        """Learning rate of the step, if the optimizer has one."""
        lr = self.options.get("lr")
        return None if lr is None else float(lr)


# Which optimizer moves a parameter


def group_of(optimizer: Optimizer, param: Tensor) -> Group | None:
    """Return the group of an optimizer that has a parameter."""
    return next((group for group in optimizer.param_groups if any(param is p for p in group["params"])), None)


def owner_of(optimizers: Sequence[Optimizer], param: Tensor) -> Optimizer | None:
    """Return the first of several optimizers that has a parameter."""
    return next((optimizer for optimizer in optimizers if group_of(optimizer, param) is not None), None)


def stepping_optimizer(optimizer: Any, param: Tensor) -> Optimizer:
    """Return the outermost optimizer whose hooks see a step of a parameter.

    That is the optimizer itself, the one of a chain that owns the parameter, or, where a wrapper has no hooks (a
    LightningOptimizer, an AcceleratedOptimizer, many a Lookahead), the one inside.
    """
    outer = hooked_optimizer(optimizer, param)
    return outer.owner(param) if isinstance(outer, ChainedOptimizer) else outer


def hooked_optimizer(optimizer: Any, param: Tensor) -> Optimizer:
    """Return the outermost optimizer that has hooks: as `stepping_optimizer`, but of a chain the chain itself."""
    has_hooks = hasattr(optimizer, "_optimizer_step_pre_hooks") and getattr(type(optimizer).step, "hooked", False)
    inner = [] if isinstance(optimizer, Optimizer) and has_hooks else inner_optimizers(optimizer, param)
    return hooked_optimizer(inner[0], param) if inner else optimizer


def inner_optimizers(optimizer: Any, param: Tensor) -> list[Optimizer]:
    """Return the optimizers among another's attributes that own the parameter too, as SAM's base_optimizer."""
    others = [x for x in vars(optimizer).values() if isinstance(x, Optimizer) and x is not optimizer]
    return [other for other in others if group_of(other, param) is not None]


def state_of(optimizer: Optimizer, param: Tensor) -> Group:
    """Return the optimizer's state of a parameter, or nothing. Indexing `optimizer.state` would insert an empty one."""
    state: Group = optimizer.state.get(param, {})
    return state


# Hooks


def on_steps(
    optimizers: Iterable[Optimizer],
    before: Callable[[], None],
    after: Callable[[], None],
    *,
    after_closure: Callable[[], bool] = lambda: False,
) -> Callable[[], None]:
    """Call `before` and `after` around each step; return a function that removes the hooks.

    If one step calls another, such as that of a base class, both are called for the outer one. A step that is compiled
    has no hooks, and one that a CUDA graph captures does not call them.

    Args:
        optimizers: whose steps are one and the same: an optimizer, and those that it calls.
        before: called before a step.
        after: called after it; not if the step raised.
        after_closure: asked whether `before` waits until a closure that the step is given has run for the first time.
            Right for optimizers that run it before they move anything, as torch's do.
    """
    outermost: FrameType | None = None

    def pre_hook(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        nonlocal outermost
        if not _runs_now():
            return None
        caller = sys._getframe(1)
        if _on_the_stack(outermost, caller):
            return None
        outermost = caller
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure) or not after_closure():
            before()
            return None
        closure = _followed_by(closure, before)
        return (args, kwargs | {"closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)

    def post_hook(*_: Any) -> None:
        nonlocal outermost
        if _runs_now() and sys._getframe(1) is outermost:
            outermost = None
            after()

    handles = [
        handle
        for optimizer in optimizers
        for handle in (optimizer.register_step_pre_hook(pre_hook), optimizer.register_step_post_hook(post_hook))
    ]

    def remove() -> None:
        nonlocal outermost
        for handle in handles:
            handle.remove()
        outermost = None  # it holds what the caller has

    return remove


def _runs_now() -> bool:
    """Return False for a step that is being compiled or captured, to run again unseen."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _followed_by(closure: Callable[[], Any], call: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure that calls `call` when it has run for the first time."""
    called = False

    def both() -> Any:
        nonlocal called
        loss = closure()
        if not called:
            called = True
            with torch.no_grad():
                call()
        return loss

    return both


def _on_the_stack(frame: FrameType | None, caller: FrameType | None) -> bool:
    """Return True if `frame` is `caller` or one of the frames that led to it."""
    while frame is not None and caller is not None and caller is not frame:
        caller = caller.f_back
    return frame is not None and caller is frame


# The increment of a step, from the optimizer's state


def steps_as(optimizer: Optimizer, kind: type[Optimizer]) -> bool:
    """Return True if an optimizer is of `kind` and its step is that of `kind`; torch wraps steps for its hooks."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def is_plain_sgd(optimizer: Optimizer, options: Group) -> bool:
    """Return True if a step is -lr times the gradient, and its state says nothing of it."""
    return steps_as(optimizer, SGD) and not (options["momentum"] or options["weight_decay"])


def knows_increment(optimizer: Optimizer, options: Group, *, sharded: bool) -> bool:
    """Return True if the optimizer's state, or the gradient of plain SGD, says what a step was."""
    if steps_as(optimizer, MatrixOptimizer):  # of a shard, other steps need what the ranks tell each other
        return not sharded or (isinstance(optimizer, RowNorm) and options["center"] == "none")
    if steps_as(optimizer, SGD):  # nesterov leaves a changed gradient behind
        return bool(options["momentum"] and not options["nesterov"]) or is_plain_sgd(optimizer, options)
    return steps_as(optimizer, Adam)


def increment_from_state(
    optimizer: Optimizer, param: Tensor, options: Group, rows: Callable[[Tensor], Tensor], *, transposed: bool = False
) -> RowSource:
    """Return this rank's rows of the increment of the last step, formed on demand from the optimizer's state.

    Args:
        optimizer: one whose increment is known.
        param: a parameter of it.
        options: of the step.
        rows: function from a tensor laid out as the parameter to this rank's rows (n, d) of it.
        transposed: these are its columns.
    """
    if isinstance(optimizer, MatrixOptimizer):
        source = optimizer.increment_rows(param)
        return RowSource(rows(source.matrix())) if transposed else source
    if steps_as(optimizer, SGD):
        direction: Any = state_of(optimizer, param)["momentum_buffer"] if options["momentum"] else param.grad
        ascends = options["maximize"] and not options["momentum"]
        return sgd_increment(rows(direction), options["lr"] if ascends else -options["lr"])
    state = {
        name: rows(x) if isinstance(x, Tensor) and x.shape == param.shape else x
        for name, x in optimizer.state[param].items()
    }
    return adam_increment(state, options)


def sgd_increment(direction: Tensor, rate: Rate) -> RowSource:
    """Return `rate` times the rows of a direction."""
    dtype = compute_dtype(direction)
    return RowSource(direction, form=lambda g: torch.mul(g.to(dtype), rate), dtype=dtype)


def adam_increment(state: Group, options: Group) -> RowSource:
    """Return the rows of -lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps), with the largest v so far under amsgrad.

    They are formed as m / (factor sqrt(v) + term), with the scale in the denominator. Where the learning rate is nearly
    zero, or a tensor, they are formed for a rate of one and then multiplied.

    Args:
        state: of the optimizer, with rows (n, d) in place of the moments.
        options: of the step.
    """
    m, v = state["exp_avg"], state["max_exp_avg_sq" if options["amsgrad"] else "exp_avg_sq"]
    dtype, lr = compute_dtype(m), options["lr"]
    divides = not isinstance(lr, Tensor) and abs(lr) > 1e-30
    factor, term = _adam_denominator(state["step"], options, lr if divides else 1.0, dtype)

    def form(m: Tensor, v: Tensor) -> Tensor:
        s = torch.sqrt(v.to(dtype))
        if isinstance(factor, Tensor):
            torch.addcmul(term, s, factor, out=s)
        else:  # faster on a CPU
            torch.add(term, s, alpha=factor, out=s)
        torch.div(m.to(dtype), s, out=s)
        return s if divides else s.mul_(lr)

    return RowSource(m, v, form=form, dtype=dtype)


def _adam_denominator(step: Rate, options: Group, lr: float, dtype: torch.dtype) -> tuple[Rate, Tensor]:
    """Return by what sqrt(v) is multiplied, and what is added to it, so that it divides m to the step.

    The count of steps is taken in fp64, as 1 - 0.999^t needs it; an accelerator that has it is not waited for.
    """
    on_device = isinstance(step, Tensor) and step.device.type not in ("cpu", "mps")
    t = step.double() if isinstance(step, Tensor) and on_device else float(step)
    b1, b2 = options["betas"]
    first, root = (1 - b1**t) / -lr, (1 - b2**t) ** 0.5
    if isinstance(first, Tensor):
        return (first / root).to(dtype), (first * options["eps"]).to(dtype)
    return first / root, torch.tensor(first * options["eps"], dtype=dtype)


def diameter_ceiling(
    optimizer: Optimizer, options: Group, *, lr: float | None, count: float, width: int
) -> float | None:
    """Return a bound on D(S) that holds whatever the gradients were, or None for an optimizer without one.

    RowNorm: every row has norm at most lr, so 2 lr. Adam and AdamW: by Cauchy-Schwarz an entry of m is at most
    sqrt(v sum_k (b1^2/b2)^k) (1 - b1) / sqrt(1 - b2), which with bias correction gives 2 lr sqrt(d) times a factor that
    is 1 at the first step and 7.27 in the limit for the usual betas. A subclass with a step of its own has none.

    Args:
        optimizer: the one that moves the head.
        options: of its group at the step.
        lr: learning rate of the step.
        count: Adam's own count of steps, the last one included.
        width: d.
    """
    if lr is None:
        return None
    if type(optimizer) is RowNorm:
        return 2 * lr
    if not steps_as(optimizer, Adam):
        return None
    b1, b2 = (float(b) for b in options["betas"])
    factor = adam_factor(b1, b2, count)
    return 2 * lr * math.sqrt(width) * factor if math.isfinite(factor) else None


def adam_factor(b1: float, b2: float, t: float) -> float:
    """Return the largest entry of Adam's step number `t` over lr, for all gradients: infinite if b2 = 0 < b1."""
    if b2 == 0 and b1 > 0 and t > 1:
        return math.inf
    ratio = b1 * b1 / b2 if b2 else 0.0
    series: float = t if ratio == 1 else (1 - ratio**t) / (1 - ratio)
    largest: float = (1 - b1) / (1 - b1**t)
    return largest * math.sqrt((1 - b2**t) / (1 - b2) * series)


# Weight decay

TORCH_COUPLED = {"SGD", "Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop", "Rprop"}
TORCH_DECOUPLED = {"Adafactor", "Muon"}
TORCH_FLAGGED = {"Adam", "NAdam", "RAdam"}
"""Classes of torch.optim that define a step, by how they use weight_decay."""
HAVE_FLAG = (Adam, NAdam, RAdam, MatrixOptimizer)
"""Classes whose subclasses inherit a flag, `decoupled_weight_decay`, that says nothing of a step of their own."""
BITSANDBYTES = {"adam": True, "adamw": True, "ademamix": True, "lamb": True, "lion": True} | dict.fromkeys(
    ("adagrad", "lars", "rmsprop", "sgd"), False
)
"""Modules of bitsandbytes, and whether their decay is decoupled."""


class WeightDecay:
    """The decoupled weight decay of one parameter: U' = (1 - share) U + S, where S is the increment.

    `decay=` overrides. Otherwise the class that defines the optimizer's step decides, if it is a known one: a subclass
    with a step of its own is another optimizer. Nothing is guessed of a class that is not known.

    Args:
        optimizer: the one that moves the parameter.
        choice: what the user says.
    """

    def __init__(self, optimizer: Optimizer, choice: Decay | None = None) -> None:
        if isinstance(choice, str) and choice not in ("decoupled", "coupled"):
            raise ValueError(f'decay is "decoupled", "coupled", a number or a function of the group, got {choice!r}')
        self.optimizer, self.choice = optimizer, choice

    def share(self, options: Group) -> Rate | None:
        """Return the share of the weights that a step with these options takes away; None if that is not known.

        A learning rate that is a tensor makes a tensor: an accelerator is not waited for.
        """
        lr, decay = options.get("lr"), options.get("weight_decay") or 0.0
        match self.choice:
            case None:
                share = self._of_class(options)
                return share if share is not None or any(options.get(name) for name in DECAY_OPTIONS) else 0.0
            case "coupled":
                return 0.0
            case "decoupled":
                return 0.0 if lr is None else lr * decay
            case function if callable(function):
                stated: Rate = function(options)
                return stated
            case number:
                return float(number)

    def _of_class(self, options: Group) -> Rate | None:
        """Return the share by what is known of the optimizer's class."""
        optimizer = self.optimizer
        step = inspect.unwrap(type(optimizer).step)
        package, kind = step.__module__.partition(".")[0], step.__qualname__.partition(".")[0]
        lr: Any = options.get("lr", 0.0)
        decay: Any = options.get("weight_decay") or 0.0
        decoupled: bool | None = None
        if steps_as(optimizer, MatrixOptimizer):
            decoupled = True
        elif step.__module__.startswith("torch.optim."):
            flag = bool(options.get("decoupled_weight_decay"))
            known = dict.fromkeys(TORCH_COUPLED, False) | dict.fromkeys(TORCH_DECOUPLED, True)
            decoupled = flag if kind in TORCH_FLAGGED else known.get(kind)
        elif package == "bitsandbytes" and type(optimizer).__module__.startswith("bitsandbytes."):
            decoupled = BITSANDBYTES.get(type(optimizer).__module__.rpartition(".")[2])
        elif package == "lion_pytorch" and not options.get("cautious_wd"):  # that decays some entries alone
            lion: Any = optimizer
            stated: Rate = lr * (decay / lion._init_lr if lion.decoupled_wd else decay)
            return stated
        elif package == "pytorch_optimizer" and kind == "Lion":
            stated = decay if options["fixed_decay"] else lr * decay
            return stated if options["weight_decouple"] else 0.0
        elif "decoupled_weight_decay" in optimizer.defaults and not isinstance(optimizer, HAVE_FLAG):
            decoupled = bool(options.get("decoupled_weight_decay"))  # a flag of the class's own, not inherited
        return None if decoupled is None else lr * decay if decoupled else 0.0


DECAY_OPTIONS = ("weight_decay", "wd", "decay")
"""Options by which optimizers call their weight decay."""


def unknown_decay(optimizer: Optimizer) -> str:
    """Say that D(S) is not known for want of the weight decay, and what to do."""
    return (
        f"it is not known how {type(optimizer).__name__} uses weight_decay, so D(S) is not measured: records have"
        ' change_diameter, the diameter of the change of the weights with their decay; pass decay="decoupled" |'
        ' "coupled" | a number | a function of the group'
    )


# The learning rate

SAME_RATE = 1e-6
"""Relative difference up to which two rates are one: a tensor has fewer digits."""


class LearningRate:
    """Tells whether the run's own schedulers set the learning rate of a step. It asks them, and changes nothing.

    A scheduler is any object that says which rates it set last, as torch's do: by `_last_lr` or `get_last_lr()`.
    Rates of torch's schedulers are taken as given. One with a `step` of its own may have forgotten to note its rates:
    it counts once two different rates of it were used.

    Args:
        schedulers: of the run. A function is asked at every step, as schedulers may change.
        param: the parameter whose rate it is.
    """

    def __init__(self, schedulers: Schedulers, param: Tensor) -> None:
        self._schedulers, self._param = schedulers, param
        self._ended: list[tuple[Any, Rate | None]] = []  # what they said at the end of the last update
        self._matches: dict[int, tuple[Any, float, bool]] = {}  # scheduler, its first rate, whether it is believed

    def end_update(self) -> None:
        """Note the rates at the end of an update: one may be set before its step is looked for."""
        self._ended = self._rates()

    def reading(self, used: Rate | None, *, since_update: bool = False) -> RateReading:
        """Return the rate that a step used, to be compared with those that the schedulers set.

        Args:
            used: the rate in the parameter's group at the step.
            since_update: compare also with the rates at the end of the last update.
        """
        rates = [*(self._ended if since_update else ()), *self._rates()] if used is not None else []
        known = [(one, rate) for one, rate in rates if rate is not None and not (rate is used and _is_tensor(rate))]
        return RateReading(self, used, known, complete=bool(rates) and len(known) == len(rates))

    def compare(self, reading: RateReading, used: float, others: Sequence[float]) -> bool | None:
        """Return whether a scheduler set the rate `used`; None if that is not known."""
        rates = zip(reading.known, others, strict=True)
        matching = [one for (one, _), rate in rates if math.isclose(used, rate, rel_tol=SAME_RATE)]
        for scheduler in matching:
            _, first, believed = self._matches.get(id(scheduler), (scheduler, used, False))
            different = not math.isclose(first, used, rel_tol=SAME_RATE)
            self._matches[id(scheduler)] = scheduler, first, believed or different
        if matching:
            return True
        return False if reading.complete and all(self._believes(one) for one, _ in reading.known) else None

    def forget(self) -> None:
        """Let go of the schedulers, and of what was learnt about them."""
        self._ended = []
        self._matches.clear()

    def _rates(self) -> list[tuple[Any, Rate | None]]:
        """Return the schedulers that may set the rate, each with the rate that it set last, if it tells."""
        schedulers = self._schedulers
        if callable(schedulers) and not hasattr(schedulers, "step"):
            schedulers = schedulers()
        if not isinstance(schedulers, Iterable):
            schedulers = [] if schedulers is None else [schedulers]
        found = []
        for one in schedulers:
            groups = getattr(getattr(one, "optimizer", None), "param_groups", None)
            index = None if groups is None else _group_index(groups, self._param)
            if groups is None or index is not None:
                found.append((one, _last_rate(one, index)))
        return found

    def _believes(self, scheduler: Any) -> bool:
        if getattr(getattr(type(scheduler), "step", None), "__module__", "") == "torch.optim.lr_scheduler":
            return True
        return self._matches.get(id(scheduler), (scheduler, 0.0, False))[2]


@dataclass
class RateReading:
    """The rate of a step and those that schedulers set, some of which may be on a device."""

    learning_rate: LearningRate
    used: Rate | None
    known: list[tuple[Any, Rate]] = field(default_factory=list)
    complete: bool = False
    """True if every scheduler has told its rate."""

    def tensor(self) -> Tensor | None:
        """Return the rates that are tensors together (n,), so that a device is waited for once; None if none is."""
        tensors = [x for x in self._all() if isinstance(x, Tensor)]
        if not tensors:
            return None
        first = next((x for x in tensors if x.device.type != "cpu"), tensors[0])
        return torch.stack([x.detach().reshape(()).to(first.device, first.dtype) for x in tensors])

    def read(self, values: Sequence[float] | None = None) -> tuple[float | None, bool | None]:
        """Return the rate, and whether a scheduler set it; None for what is not known.

        Args:
            values: of `tensor`, if they have been read.
        """
        if self.used is None:
            return None, None
        if values is None:
            tensor = self.tensor()
            values = [] if tensor is None else tensor.tolist()
        numbers = iter(values)
        used, *others = [next(numbers) if isinstance(x, Tensor) else float(x) for x in self._all()]
        return used, self.learning_rate.compare(self, used, others)

    def _all(self) -> list[Rate]:
        return [] if self.used is None else [self.used, *(rate for _, rate in self.known)]


def _is_tensor(rate: Rate | None) -> bool:
    return isinstance(rate, Tensor)


def _last_rate(scheduler: Any, index: int | None) -> Rate | None:
    """Return the rate that a scheduler set last for a group, if it tells."""
    try:
        rates = getattr(scheduler, "_last_lr", None)
        rates = scheduler.get_last_lr() if rates is None else rates
        rate = rates[index] if index is not None else rates[0] if len(rates) == 1 else None
    except Exception as error:  # whatever a scheduler of the user's does
        if handled_signals(error):
            raise
        return None
    return rate if isinstance(rate, Tensor) else None if rate is None else float(rate)


def _group_index(groups: list[Group], param: Tensor) -> int | None:
    return next((n for n, group in enumerate(groups) if any(param is p for p in group["params"])), None)
