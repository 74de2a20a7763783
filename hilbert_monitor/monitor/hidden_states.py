"""Hidden states: the inputs of the LM head at the positions of a panel, under the weights as they are now.

An exception at the head would save the logits, but break a model that clears a flag or a cache at the end of its pass.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module
from torch.nn.parallel import DistributedDataParallel

from hilbert_monitor.optim.recipe import weight_matrix
from hilbert_monitor.runs.stops import handled_signals

from .panel import Batch, Panel, input_ids, select_rows, with_tensors
from .runtime import compute_device, keep_random_state, warn_user

HiddenStates = Callable[[Module, Batch], Tensor]  # returns the head's inputs, (B, T, d) or (B * T, d)
AutocastFactory = Callable[[], AbstractContextManager[Any]]  # makes the context in which a run calls its model
OnLogits = Callable[[Tensor, Tensor], None]  # takes what the head returned and what the model returned, of one shape
Undo = Callable[[], Any]

LOGIT_BYTES = 256_000_000  # logits of one forward pass, in fp32, unless one row has more
KEPT_BYTES = 64_000_000  # tensors of the model that are copied before a forward pass, the smallest first
ENTRIES = 1_000  # of a module's list, dict, set or deque that are looked at
CONTAINERS = (OrderedDict, dict, list, set, deque)
TARGETS = ("labels", "targets")  # what a forward pass calls the tokens that it should predict
NO_FORWARD = ("_forward_unimplemented", "LightningModule.forward")  # what a module inherits that defines no forward
ASK = "pass hidden=, a function of the module and a batch that returns the head's inputs (B, T, d)"


class HeadNotReached(RuntimeError):
    """The model's forward pass does not give its head the states of the batch."""


class SideEffects(RuntimeError):
    """A forward pass may advance something that cannot be restored."""


def hidden_states(
    model: Module,
    head: Module | Tensor,
    panel: Panel,
    *,
    hidden: HiddenStates | None = None,
    autocast: AutocastFactory | None = None,
    on_logits: OnLogits | None = None,
    remark: Callable[[str], None] = lambda text: None,
) -> Tensor:
    """Return the head's inputs at the positions of a panel: (size, d) fp32, on the device where the model computes.

    Calls the innermost module that contains the head, and the embedding if there is one, and defines forward; of a
    model that FSDP shards, its root. It gets the ids of a batch, or the entries of a dict that its forward takes. Where
    the head is never called, as under a fused loss, the states are the output of the last norm, and `remark` is told.
    A head that is a parameter needs `hidden`.
    """
    module = unwrapped(model)
    weight = weight_matrix(head) if isinstance(head, Module) else head  # (V, d), or (d, V)
    device = next((compute_device(p) for p in module.parameters()), torch.device("cpu"))
    vocabulary = None if hidden is not None or weight is None else max(weight.shape)
    states: list[Tensor] = []
    with without_side_effects(module), (autocast or nullcontext)(), _no_autocast_cache():
        read = hidden or partial(_head_inputs, head=head, on_logits=on_logits, remark=remark)
        for batch, positions in _passes(panel, vocabulary):
            batch = with_tensors(batch, lambda x: x.to(device))
            found: Any = read(module, batch)
            if hasattr(found, "full_tensor"):  # tensor-parallel ranks hold parts
                found = found.full_tensor()
            ids = input_ids(batch)
            if not _fit(found, ids):
                raise HeadNotReached(
                    f"the states of a batch of {tuple(ids.shape)} tokens have shape {tuple(found.shape)}, not a row for"
                    f" each: {ASK}"
                )
            rows = found.reshape(-1, found.shape[-1])  # (B * T, d)
            states.append(rows[positions.to(rows.device)].to(device, torch.float32))
        return torch.cat(states) if states else torch.empty(0, 0 if weight is None else weight.shape[1], device=device)


def _passes(panel: Panel, vocabulary: int | None) -> Iterator[tuple[Batch, Tensor]]:
    """Yield the micro-batches of a panel and their positions, cut to as many rows as one forward pass takes."""
    for batch, positions in zip(panel.batches, panel.positions, strict=True):
        B, T = input_ids(batch).shape
        rows = B if vocabulary is None else max(1, LOGIT_BYTES // (4 * vocabulary * T))
        if rows >= B:
            yield batch, positions
            continue
        for part in torch.split(positions, torch.bincount(positions // T // rows).tolist()):
            yield select_rows(batch, part)


def unwrapped(model: Module) -> Module:
    """Return the module inside DistributedDataParallel and torch.compile, in whatever order."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, Module):
            return model
        model = inner


def _head_inputs(
    model: Module, batch: Batch, *, head: Module | Tensor, on_logits: OnLogits | None, remark: Callable[[str], None]
) -> Tensor:
    """Run the model on a batch and return what its head is given."""
    if not isinstance(head, Module):
        raise HeadNotReached(f"the head is a bare parameter, which no module is called with: {ASK}")
    caller, ids = _innermost_caller(model, head), input_ids(batch)
    name, failure = type(caller).__name__, None
    for path, module in caller.named_modules(prefix=name):
        for attribute, value in _held(module):
            if isinstance(value, Iterator):
                raise SideEffects(
                    f"{path}.{attribute}, a {type(value).__name__}, could not be restored after the forward pass of the"
                    " panel: keep it outside of the model, or pass hidden=, a function that does not advance it"
                )
    for args, kwargs in _calls(caller.forward, batch):
        with _noted(caller, head) as (inputs, outputs, returned):
            try:
                result = caller(*args, **kwargs)
                both = [*outputs, getattr(result, "logits", result)]
                whole = [x for x in both if isinstance(x, Tensor) and not hasattr(x, "device_mesh")]
                if on_logits is not None and len(both) == len(whole) == 2 and both[0].shape == both[1].shape:
                    on_logits(*both)
            except Exception as error:  # perhaps after the head: a loss without its targets
                if handled_signals(error):
                    raise
                failure = error
        states = _joined(inputs, ids)
        if states is not None:
            return states
    weight = weight_matrix(head)
    widths = () if weight is None else weight.shape
    fitting = (m for m, x in returned.items() if isinstance(x, Tensor) and _fit(x, ids) and x.shape[-1] in widths)
    last = next(reversed([*fitting]), None)
    if not inputs and last is not None and "norm" in type(last).__name__.lower():  # or no module made the last states
        path = next(path for path, module in caller.named_modules() if module is last)
        remark(
            f"the forward pass never calls the head: hidden states are the output of {path!r}; if they are others, pass"
            " hidden=..."
        )
        made: Tensor = returned[last]
        return made
    if failure is not None:
        failure.add_note(f"hilbert_monitor called {name} to see what its head is given; hidden= says how else to")
        raise failure
    if not inputs:
        raise HeadNotReached(f"the forward pass of {name} does not call its head, a {type(head).__name__}: {ASK}")
    return inputs[0]


@contextmanager
def _noted(caller: Module, head: Module) -> Iterator[tuple[list[Tensor], list[Any], dict[Module, Any]]]:
    """Note what the head is given, what it returns, and the last output of each leaf in the order of the calls."""
    inputs, outputs, returned = list[Tensor](), list[Any](), dict[Module, Any]()

    def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if given is not None:
            inputs.append(given.detach().clone())  # what follows may write to it

    def after(module: Module, _: Any, output: Any) -> None:
        if module is head:
            outputs.append(output)
        returned.pop(module, None)
        returned[module] = output

    leaves = {module for module in caller.modules() if not any(module.children())}
    hooks = [module.register_forward_hook(after) for module in leaves | {head}]
    hooks.append(head.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield inputs, outputs, returned
    finally:
        for hook in hooks:
            hook.remove()


def _fit(states: Tensor, ids: Tensor) -> bool:
    return states.shape[:-1] in (ids.shape, (ids.numel(),))


def _joined(inputs: list[Tensor], ids: Tensor) -> Tensor | None:
    """Return the states of a batch, from the inputs of one call of the head or of several in a row, or None."""
    if not inputs or _fit(inputs[0], ids):
        return inputs[0] if inputs else None
    for dim in (0, 1):
        others = {(*x.shape[:dim], *x.shape[dim + 1 :]) for x in inputs}
        if len(others) == 1 and inputs[0].ndim > dim + 1 and _fit(whole := torch.cat(inputs, dim), ids):
            return whole
    return None


def _innermost_caller(model: Module, head: Module) -> Module:
    """Return the innermost module that contains the head and can be called with tokens."""
    paths = [name.split(".") for name, m in model.named_modules(remove_duplicate=False) if m is head and name]
    if not paths:
        raise ValueError(f"the head, a {type(head).__name__}, is no module of {type(model).__name__}: give one that is")
    names = sorted({tuple(path[:depth]) for path in paths for depth in range(len(path))}, key=len, reverse=True)
    modules = [model.get_submodule(".".join(name)) for name in names]
    above = [m for m in modules if getattr(m.forward, "__qualname__", "") not in NO_FORWARD]
    if not above:
        raise HeadNotReached(f"no module of {type(model).__name__} above the head has a forward pass: {ASK}")
    whole = next((m for m in above if any(isinstance(part, Embedding) for part in m.modules())), above[0])
    root = max((place for place, m in enumerate(above) if _is_sharded(m)), default=0)  # FSDP gathers from there
    caller = above[max(root, above.index(whole))]
    if "decoder_input_ids" in inspect.signature(caller.forward).parameters:
        raise HeadNotReached(f"{type(caller).__name__} is an encoder-decoder: {ASK}")
    return caller


def _calls(forward: Callable[..., Any], batch: Batch) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield arguments to call a forward pass with: first without targets, unless it requires them; then with them.

    Without a target some models give their head the last position only. With one, a fused loss may not call it at all.
    """
    takes, ids = inspect.signature(forward).parameters, input_ids(batch)
    kinds, named = {p.kind for p in takes.values()}, isinstance(batch, Mapping)
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    by_name = named and ("input_ids" in takes or kinds <= variable)
    open_ended = by_name and inspect.Parameter.VAR_KEYWORD in kinds
    kwargs = {name: value for name, value in (batch.items() if named else ()) if open_ended or name in takes}
    targets = {name: kwargs.pop(name, ids) for name in TARGETS if name in {*kwargs, *takes}}
    if "use_cache" in takes:  # keys and values of every block, for nothing
        kwargs.setdefault("use_cache", False)
    needed = {name: value for name, value in targets.items() if name in takes and takes[name].default is inspect._empty}
    args = () if by_name else (ids,)
    yield args, kwargs | needed
    if len(targets) > len(needed):
        yield args, kwargs | targets


@contextmanager
def without_side_effects(model: Module) -> Iterator[None]:
    """Run eagerly, in eval mode, without gradients; afterwards all is as before.

    It restores random numbers, parameters, buffers and other attributes of modules: rebound, tensors written to, lists
    and dicts changed, and generators, also those among the global variables next to the modules' classes.
    """
    modules = dict(model.named_modules(prefix=type(model).__name__))
    before = list(model.parameters())

    def reshard_if_changed() -> None:  # FSDP keeps the outermost module's parameters gathered for a backward pass
        if not all(map(is_, before, model.parameters())):
            reshard(model)

    with ExitStack() as stack:
        for context in (torch.inference_mode(False), torch.no_grad(), keep_random_state()):
            stack.enter_context(context)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for undo in _undos(modules):
            stack.callback(undo)
        stack.callback(reshard_if_changed)
        for module in modules.values():
            module.training = False  # not `train`, which a module may have changed
            if "LightningModule" in (cls.__name__ for cls in type(module).__mro__):
                module.__dict__.update(log=_log_nothing, log_dict=_log_nothing)
        yield


def _log_nothing(*_: Any, **__: Any) -> None:
    pass


def _is_sharded(module: Module) -> bool:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


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


def _undos(modules: dict[str, Module]) -> Iterator[Undo]:
    """Yield functions that restore what a forward pass may change of modules, given by their paths."""
    classes = {cls for m in modules.values() for cls in type(m).__mro__ if not cls.__module__.startswith("torch.")}
    globals_ = (vars(sys.modules[cls.__module__]) for cls in classes if cls.__module__ in sys.modules)
    generators = {id(x): x for names in globals_ for x in list(names.values()) if _is_generator(x)}
    tensors: dict[int, tuple[str, Tensor]] = {}
    for path, module in modules.items():
        yield _undo_container(module.__dict__)
        for name, value in _held(module):
            if isinstance(value, Tensor):
                tensors[id(value)] = f"{path}.{name}", value
            elif _is_generator(value):
                generators[id(value)] = value
            elif isinstance(value, CONTAINERS) and name != "_parameters":  # FSDP exchanges shards and whole ones
                yield _undo_container(value)
    yield from map(_undo_generator, generators.values())
    memory: float = KEPT_BYTES
    for name, x in sorted(tensors.values(), key=lambda entry: _bytes_to_copy(entry[1])):
        memory -= _bytes_to_copy(x)
        yield _undo_tensor(name, x, copied=memory >= 0)


def _held(module: Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and the entries of its lists and dicts; two of these have its tensors."""
    for name, value in vars(module).items():
        yield name, value
        if isinstance(value, CONTAINERS) and len(value) <= ENTRIES:
            entries = value.items() if isinstance(value, dict) else ((f"{name}[...]", x) for x in value)
            yield from ((str(key), x) for key, x in entries)


def _undo_container(x: Any) -> Undo:
    kind: Any = next(t for t in CONTAINERS if isinstance(x, t))
    before = dict.copy(x) if isinstance(x, dict) else kind(x)

    def undo() -> None:
        if not (len(x) == len(before) and all(map(is_, x, before))):
            kind.clear(x)
            (kind.update if isinstance(x, dict | set) else kind.extend)(x, before)
        elif isinstance(x, dict):
            dict.update(x, before)

    return undo


def _undo_tensor(name: str, x: Tensor, *, copied: bool) -> Undo:
    before, version = x.detach().clone() if copied else None, 0 if x.is_inference() else x._version

    def undo() -> None:
        if before is None:
            if not x.is_inference() and x._version != version:
                warn_user(
                    f"the forward pass writes to {name}, too large to be restored: each measurement of the panel"
                    f" changes the run; {ASK}, and writes nothing"
                )
        elif x.shape != before.shape or not _has_memory(x):
            x.data = before
        elif x.device.type != "cpu" or not torch.equal(x, before):  # on a device all is copied, and nothing waits
            x.data.copy_(before)  # so that autograd sees no write

    return undo


def _bytes_to_copy(x: Tensor) -> float:
    """Return the bytes of a tensor, or infinity if it cannot simply be written back."""
    plain = type(x) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and x.layout is torch.strided
    plain = plain and x.device.type != "meta" and _has_memory(x)
    return float(x.nbytes) if plain and (0 not in x.stride() or x.is_contiguous()) else float("inf")


def _has_memory(x: Tensor) -> bool:
    """Return True if a tensor's memory is allocated: some frameworks free it between passes."""
    return x.untyped_storage().nbytes() >= x.element_size() * bool(x.numel())


def _is_generator(x: Any) -> bool:
    """Return True for a generator of random numbers of torch, NumPy or Python."""
    numpy = sys.modules.get("numpy.random")
    kinds = (numpy.Generator, numpy.BitGenerator, numpy.RandomState) if numpy else ()
    return isinstance(x, (torch.Generator, random.Random, *kinds)) and not isinstance(x, random.SystemRandom)


def _undo_generator(x: Any) -> Undo:
    for get, put in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(x, get):
            return partial(getattr(x, put), getattr(x, get)())
    bits = getattr(x, "bit_generator", x)  # NumPy's
    return partial(setattr, bits, "state", bits.state)
