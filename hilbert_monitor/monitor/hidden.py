"""Hidden states: the inputs of the LM head at the positions of a panel, under the weights as they are now.

The model runs as in validation, a few rows of a batch at a time, and nothing of the run changes: what a forward pass
writes, in buffers and in attributes, is put back.

Tried and dropped: to stop the forward pass at the head by an exception. It saves the logits, but a model that sets a
flag, a lock or a cache at the start of its forward pass and clears it at the end is broken at its next step.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module
from torch.nn.parallel import DistributedDataParallel

from hilbert_monitor.optim.recipe import weight_matrix
from hilbert_monitor.runs.stops import handled_signals

from .batches import Batch, input_ids, select_rows, text_ids, with_tensors
from .noted_calls import noted_inputs, noted_outputs
from .object_state import kept_state, same_packages
from .panel import Panel
from .runtime import compute_device, keep_random_state, warn_user

HiddenStates = Callable[[Module, Batch], Tensor]
"""From the model and a batch to the head's inputs, (B, T, d) or (B * T, d)."""

AutocastFactory = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a run calls its model."""

LOGIT_BYTES = 256_000_000
"""Logits of one forward pass, in fp32, unless one row has more."""
KEPT_BYTES = 64_000_000
"""Buffers and other tensors that are copied before a forward pass, to be put back."""
TARGETS = ("labels", "targets")
"""What a forward pass calls the tokens that it should predict."""
NO_FORWARD = ("_forward_unimplemented", "LightningModule.forward")
"""Names of the forward that a module inherits when it defines none."""


class HeadNotReached(RuntimeError):
    """The model's forward pass does not give its head the states of the batch."""


def hidden_states(
    model: Module,
    head: Module | Tensor,
    panel: Panel,
    *,
    hidden: HiddenStates | None = None,
    autocast: AutocastFactory | None = None,
    device: torch.device | str | None = None,
    on_logits: Callable[[Tensor, Tensor], None] | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> Tensor:
    """Return the head's inputs at the positions of a panel.

    Calls the innermost module that contains the head, and the embedding if there is one, and defines forward: with the
    ids of a batch, or with those entries of a dict that its forward takes. Of a model that FSDP shards it is the root.
    Where the head is never called, as under a fused loss, the output of the last norm is taken. The model runs eagerly,
    in eval mode, without gradients and without autocast's cache, on as many rows of a batch as have LOGIT_BYTES of
    logits. Modes, hooks, random numbers, buffers and plain attributes are as before, whatever happens; see
    `SavedState`.

    Args:
        model: the model, or what DistributedDataParallel or torch.compile made of it.
        head: a module of it, or a parameter that its forward pass multiplies by.
        panel: the positions.
        hidden: forms the states of a batch, for a model that never calls its head.
        autocast: makes the run's autocast context.
        device: where batches go; where the model computes by default.
        on_logits: told once what the head returned in a forward pass, and what the model returned, of one shape.
        remark: told which norm the states are taken from, if it is one.

    Returns:
        (size, d) fp32, in the order of the panel, on the device.

    Raises:
        HeadNotReached: if the head is not called, or not with a state for each token of a batch.
    """
    module = unwrapped(model)
    weight = weight_matrix(head) if isinstance(head, Module) else head  # (V, d), or (d, V)
    read = hidden or _inputs_of(module, head, on_logits, remark)
    if device is None:
        device = next((compute_device(p) for p in module.parameters()), torch.device("cpu"))
    where, states = torch.device(device), []
    vocabulary = None if hidden is not None or weight is None else max(weight.shape)
    with undisturbed(module), (autocast or nullcontext)(), _no_autocast_cache():
        for batch, positions in _passes(panel, vocabulary):
            found = _whole(read(module, with_tensors(batch, lambda x: x.to(where))))
            flat = _flat(found, text_ids(batch))  # (B * T, d)
            states.append(flat[positions.to(flat.device)].to(where, torch.float32))
        if not states:
            width = 0 if weight is None else weight.shape[1]
            states.append(torch.empty(0, width, dtype=torch.float32, device=where))
        return torch.cat(states)


def _whole(states: Tensor) -> Tensor:
    """Return states that tensor-parallel ranks hold in parts as a plain tensor, on each of them."""
    sharded: Any = states
    return sharded.full_tensor() if hasattr(states, "full_tensor") else states


def _passes(panel: Panel, vocabulary: int | None) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the micro-batches of a panel and their positions, cut to as many rows as one forward pass takes."""
    for batch, positions in zip(panel.batches, panel.positions, strict=True):
        B, T = text_ids(batch).shape
        rows = B if vocabulary is None else max(1, LOGIT_BYTES // (4 * vocabulary * T))
        if rows >= B:
            yield batch, positions
            continue
        for part in torch.split(positions, torch.bincount(positions // T // rows).tolist()):
            yield select_rows(batch, part)


def _flat(states: Tensor, ids: Tensor) -> Tensor:
    """Return states as (B * T, d); refuse them if they are not one to a token."""
    if not _fit(states, ids):
        raise HeadNotReached(
            f"the states of a batch of {tuple(ids.shape)} tokens have shape {tuple(states.shape)}, not a row for each:"
            " pass hidden=, a function of the module and a batch that returns them as (B, T, d)"
        )
    return states.reshape(-1, states.shape[-1])


def unwrapped(model: Module) -> Module:
    """Return the module inside DistributedDataParallel and torch.compile, in whatever order."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, Module):
            return model
        model = inner


def _inputs_of(
    model: Module,
    head: Module | Tensor,
    on_logits: Callable[[Tensor, Tensor], None] | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> HiddenStates:
    """Return a function that runs the model and returns what its head is given."""
    caller = _innermost_caller(model, head)
    name = type(caller).__name__
    leaves = {m: path for path, m in caller.named_modules() if not any(m.children())}
    weight = weight_matrix(head) if isinstance(head, Module) else head
    decodes = _has_decoder_inputs(caller)

    def inputs_of_head(_: Module, batch: Batch) -> Tensor:
        ids, inputs, failure = text_ids(batch), list[Tensor](), None
        if decodes and ids is input_ids(batch):
            raise HeadNotReached(
                f"{name} is an encoder-decoder: its head is given the decoder's states, and a batch of the panel has"
                ' the encoder\'s ids alone; give batches with "labels" or "decoder_input_ids" as validation has them,'
                " or pass hidden=, a function of the module and a batch that returns the decoder's states (B, T, d)"
            )

        outputs: list[Any] = []
        returned: dict[Module, Any] = {}
        try:
            with noted_inputs(head, inputs, outputs), noted_outputs(leaves, returned):
                for args, kwargs in _calls(caller.forward, batch):
                    inputs.clear()
                    outputs.clear()
                    returned.clear()
                    try:
                        _compare(outputs, caller(*args, **kwargs))
                    except Exception as error:  # perhaps after the head: a loss without its targets
                        if handled_signals(error):
                            raise
                        failure = error
                    if (whole := _joined(inputs, ids)) is not None:
                        return whole
            if not inputs and weight is not None and (last := _last_states(returned, ids, weight)) is not None:
                remark(
                    f"the forward pass never calls the head: hidden states are the output of {leaves[last]!r}; if they"
                    " are others, pass hidden=..."
                )
                states: Tensor = returned[last]
                return states
        finally:
            outputs.clear()
            returned.clear()
        if failure is not None:
            failure.add_note(f"hilbert_monitor called {name} to see what its head is given; hidden= says how else to")
            raise failure
        if not inputs:
            raise HeadNotReached(
                f"the forward pass of {name} does not call its head, a {type(head).__name__}: pass hidden=, a function"
                " of the module and a batch that returns the head's inputs (B, T, d)"
            )
        return inputs[0]

    def _compare(outputs: list[Any], result: Any) -> None:
        nonlocal on_logits
        logits = getattr(result, "logits", result)
        if on_logits is not None and len(outputs) == 1 and isinstance(logits, Tensor):
            output, tell_of = outputs[0], on_logits
            on_logits = None
            if isinstance(output, Tensor) and output.shape == logits.shape and not hasattr(logits, "device_mesh"):
                tell_of(output, logits)

    return inputs_of_head


def _last_states(returned: dict[Module, Any], ids: Tensor, weight: Tensor) -> Module | None:
    """The module that returned the last states of a batch, if it is a norm: what follows is no module's work."""
    for module, output in reversed(returned.items()):
        if isinstance(output, Tensor) and _fit(output, ids) and output.shape[-1] in weight.shape:
            return module if "norm" in type(module).__name__.lower() else None
    return None


def _joined(inputs: list[Tensor], ids: Tensor) -> Tensor | None:
    """Return the states of a batch, from the inputs of one call of the head or of several in a row, or None."""
    if not inputs or _fit(inputs[0], ids):
        return inputs[0] if inputs else None
    for dim in (0, 1):
        others = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in inputs}
        if len(others) == 1 and inputs[0].ndim > dim + 1 and _fit(whole := torch.cat(inputs, dim), ids):
            return whole
    return None


def _has_decoder_inputs(module: Module) -> bool:
    """Whether a model takes ids for an encoder and other ids for a decoder."""
    return "decoder_input_ids" in inspect.signature(module.forward).parameters


def _innermost_caller(model: Module, head: Module | Tensor) -> Module:
    """The innermost module that contains the head and can be called with tokens."""
    parts = model.named_modules if isinstance(head, Module) else model.named_parameters
    paths = [name.split(".") for name, part in parts(remove_duplicate=False) if part is head and name]
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
    root = max((place for place, m in enumerate(above) if _is_sharded(m)), default=0)  # FSDP gathers from there
    return above[max(root, above.index((whole or above)[0]))]


def _is_sharded(module: Module) -> bool:
    """Whether FSDP shards the parameters of a module, and gathers them when it is called."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


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
    targets = {name: kwargs.pop(name, ids) for name in TARGETS if name in {*kwargs, *takes}}
    args = () if by_name else (ids, *_further_inputs(takes, batch))
    if "use_cache" in takes:  # keys and values of every block, for nothing
        kwargs.setdefault("use_cache", False)
    needed = {name: value for name, value in targets.items() if name in takes and takes[name].default is inspect._empty}
    yield args, kwargs | needed
    if len(targets) > len(needed):
        yield args, kwargs | targets


def _further_inputs(takes: Mapping[str, inspect.Parameter], batch: Batch) -> list[Any]:
    """What a forward pass requires after the ids, besides a target: of a tuple or list what follows the ids."""
    if not isinstance(batch, list | tuple):
        return []
    ids = input_ids(batch)
    following = [x for place, x in enumerate(batch) if place > next(i for i, y in enumerate(batch) if y is ids)]
    required = [p.name for p in takes.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    needed = next((n for n, name in enumerate(required) if name in TARGETS), len(required))
    return following[:needed]


def _fit(states: Tensor, ids: Tensor) -> bool:
    """Whether states are (B, T, d) or (B * T, d)."""
    return states.shape[:-1] in (ids.shape, (ids.numel(),))


@contextmanager
def undisturbed(model: Module) -> Iterator[None]:
    """Run eagerly, in eval mode, without gradients; afterwards all is as before.

    Flags are set one by one: a module's own `train` may do more than that. Under torch.compile an exception would leave
    the module eager for good.
    """
    modules = dict(model.named_modules(prefix=type(model).__name__))
    follow = same_packages(modules.values())
    with ExitStack() as stack:
        for context in (torch.inference_mode(False), torch.no_grad(), keep_random_state()):
            stack.enter_context(context)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        state = stack.enter_context(kept_state(modules.items(), follow=follow, memory=KEPT_BYTES))
        stack.enter_context(_sharded_as_before(model))
        for module in modules.values():
            module.training = False
            if "LightningModule" in (cls.__name__ for cls in type(module).__mro__):
                module.__dict__.update(log=_log_nothing, log_dict=_log_nothing)  # until the state is put back
        yield
    if state.lost:
        warn_user(
            f"the forward pass writes to {', '.join(state.lost)}, too large to be put back: each measurement of"
            " the panel changes the run; pass hidden=, a function of the module and a batch that writes nothing"
        )


def _log_nothing(*_: Any, **__: Any) -> None:
    """Take the place of LightningModule.log: the run's loggers are not told of the panel."""


@contextmanager
def _sharded_as_before(model: Module) -> Iterator[None]:
    """Let FSDP give up the parameters that it has gathered: it keeps the outermost module's for a backward pass."""
    before = list(model.parameters())
    try:
        yield
    finally:
        if not all(map(is_, before, model.parameters())):
            reshard(model)


def reshard(model: Module) -> None:
    """Let FSDP give up the parameters that it has gathered."""
    for module in model.modules():
        if _is_sharded(module):
            module.reshard()  # type: ignore[operator]


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Neither use nor leave weights cast without a graph."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
