"""Hidden states: the inputs of the LM head at the positions of a panel, under the weights as they are now.

The model runs as in validation, up to its head and no further: it computes no logits, and nothing of the run changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module
from torch.nn.parallel import DistributedDataParallel

from .batches import Batch, input_ids, with_tensors
from .panel import Panel
from .random_state import preserve_random_state

HiddenStates = Callable[[Module, Batch], Tensor]
"""From the model and a batch to the head's inputs, (B, T, d) or (B * T, d)."""

AutocastFactory = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a run calls its model."""

NO_FORWARD = ("_forward_unimplemented", "LightningModule.forward")
"""Names of the forward that a module inherits when it defines none."""


class HeadNotReached(RuntimeError):
    """The model's forward pass does not give its head the states of the batch."""


def hidden_states(
    model: Module,
    head: Module,
    panel: Panel,
    *,
    hidden: HiddenStates | None = None,
    autocast: AutocastFactory | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the head's inputs at the positions of a panel.

    Calls the innermost module that contains the head, and the embedding if there is one, and defines forward: with the
    ids of a batch, or with those entries of a dict that its forward takes. It runs eagerly, in eval mode, without
    gradients and without autocast's cache; an exception ends it at the head. Modes, hooks and random numbers are as
    before, whatever happens.

    Args:
        model: the model, or what DistributedDataParallel or torch.compile made of it.
        head: a module of it.
        panel: the positions; a rank's share may be empty.
        hidden: forms the states of a batch, for a model that never calls its head.
        autocast: makes the run's autocast context.
        device: where batches go; that of the model's first parameter by default.

    Returns:
        (size, d) fp32, in the order of the panel, on the device.

    Raises:
        HeadNotReached: if the head is not called, or not with a state for each token of a batch.
    """
    module = unwrapped(model)
    read = hidden or _inputs_of(module, head)
    if device is None:
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
    where, rows = torch.device(device), []
    with _undisturbed(module), (autocast or nullcontext)(), _no_autocast_cache():
        for batch, positions in zip(panel.batches, panel.positions, strict=True):
            states = read(module, with_tensors(batch, lambda x: x.to(where)))
            if not _fit(states, input_ids(batch)):
                raise HeadNotReached(
                    f"the states of a batch of {tuple(input_ids(batch).shape)} tokens have shape"
                    f" {tuple(states.shape)}, not a row for each: pass hidden=, a function of the module and a batch"
                    " that returns them as (B, T, d)"
                )
            flat = states.reshape(-1, states.shape[-1])  # (B * T, d)
            rows.append(flat[positions.to(flat.device)].to(where, torch.float32))
        if not rows:
            weight: Any = head.weight  # (V, d)
            rows.append(torch.empty(0, weight.shape[1], dtype=torch.float32, device=where))
        return torch.cat(rows)


def unwrapped(model: Module) -> Module:
    """Return the module inside DistributedDataParallel and torch.compile, in whatever order."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, Module):
            return model
        model = inner


class _AtHead(BaseException):
    """Ends a forward pass; no `except Exception` on the way catches it."""


def _inputs_of(model: Module, head: Module) -> HiddenStates:
    """Return a function that runs the model up to its head and returns what the head is given."""
    caller = _innermost_caller(model, head)
    name = type(caller).__name__

    def states(_: Module, batch: Batch) -> Tensor:
        ids, inputs = input_ids(batch), list[Tensor]()

        def stop(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            raise _AtHead

        hook = head.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            for args, kwargs in _calls(caller.forward, batch):
                inputs.clear()
                with suppress(_AtHead):
                    caller(*args, **kwargs)
                if inputs and _fit(inputs[0], ids):
                    break
        except Exception as error:
            error.add_note(f"hilbert_monitor called {name} to see what its head is given; hidden= says how else to")
            raise
        finally:
            hook.remove()
        if not inputs:
            raise HeadNotReached(
                f"the forward pass of {name} does not call its head, a {type(head).__name__}: pass hidden=, a function"
                " of the module and a batch that returns the head's inputs (B, T, d)"
            )
        return inputs[0]

    return states


def _innermost_caller(model: Module, head: Module) -> Module:
    """The innermost module that contains the head and can be called with tokens."""
    paths = [name.split(".") for name, m in model.named_modules(remove_duplicate=False) if m is head and name]
    if not paths:
        raise ValueError(f"the head, a {type(head).__name__}, is no module of {type(model).__name__}: give one that is")
    names = sorted({tuple(path[:depth]) for path in paths for depth in range(len(path))}, key=len, reverse=True)
    above = [m for m in (model.get_submodule(".".join(name)) for name in names) if _has_forward(m)]
    whole = [m for m in above if any(isinstance(part, Embedding) for part in m.modules())]
    if not above:
        raise HeadNotReached(
            f"no module of {type(model).__name__} above the head has a forward pass: pass hidden=, a function of the"
            " module and a batch that returns the head's inputs (B, T, d)"
        )
    return (whole or above)[0]


def _has_forward(module: Module) -> bool:
    return getattr(module.forward, "__qualname__", "") not in NO_FORWARD


def _calls(forward: Callable[..., Any], batch: Batch) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments to call a forward pass with: first without targets, unless it requires them; then with them.

    Without a target some models give their head the last position only. With one, a fused loss may not call it at all.
    """
    takes, ids = inspect.signature(forward).parameters, input_ids(batch)
    entries = dict(batch) if isinstance(batch, Mapping) else {}
    anything = all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes.values())
    by_name = isinstance(batch, Mapping) and ("input_ids" in takes or anything)
    open_ended = by_name and any(p.kind is p.VAR_KEYWORD for p in takes.values())
    kwargs = {name: value for name, value in entries.items() if open_ended or name in takes}
    targets = {name: kwargs.pop(name, ids) for name in ("labels", "targets") if name in {*kwargs, *takes}}
    args = () if by_name else (ids,)
    if "use_cache" in takes:  # keys and values of every block, for nothing
        kwargs.setdefault("use_cache", False)
    needed = {name: value for name, value in targets.items() if name in takes and takes[name].default is inspect._empty}
    yield args, kwargs | needed
    if len(targets) > len(needed):
        yield args, kwargs | targets


def _fit(states: Tensor, ids: Tensor) -> bool:
    """Whether states are (B, T, d) or (B * T, d)."""
    return states.shape[:-1] in (ids.shape, (ids.numel(),))


@contextmanager
def _undisturbed(model: Module) -> Iterator[None]:
    """Eager, in eval mode, without gradients: and all as before afterwards.

    Flags are set one by one: a module's own `train` may do more than that. Under torch.compile an exception would leave
    the module eager for good.
    """
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        for context in (torch.inference_mode(False), torch.no_grad(), preserve_random_state()):
            stack.enter_context(context)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Neither use nor leave weights cast without a graph."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
