"""Muon: steps along the orthogonalised momentum, for the matrices of the blocks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import compute_dtype
from hilbert_monitor.geometry.sharding import is_dtensor

from ._hyperparameters import Group, check_choice, check_number
from ._layout import local, local_gradient
from ._matrix_optimizer import LastStep, MatrixOptimizer
from ._owners import Bucket, Held, Owners
from ._rounding import shrink_and_add
from .newton_schulz import orthogonalize

STACK_BYTES = {"cpu": 16 * 2**20}
"""Size of a stack of matrices for Newton-Schulz, in bytes. On a CPU a stack is faster than its matrices one by one, as
long as it fits the cache. Elsewhere 256 MiB."""

NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Precisions of Newton-Schulz. Groups have their names: torch moves no state dict to the CPU that has a dtype."""

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13


class Muon(MatrixOptimizer):
    """Muon with Nesterov momentum, as the paper ran it.

    With the gradient G_t of an (m, n) matrix::

        M_t = momentum M_{t-1} + G_t
        N_t = G_t + momentum M_t                                       or M_t without nesterov
        S_t = -lr sqrt(max(1, m / n)) NS(N_t / (|N_t|_F + eps))
        W_{t+1} = (1 - lr weight_decay) W_t + S_t

    where NS is `ns_steps` of the Newton-Schulz iteration with (3.4445, -4.7750, 2.0315). torch.optim.Muon has the same
    formula but other arithmetic: it iterates in bf16, and divides by the larger of norm and eps, not by their sum.

    Matrices of one shape are orthogonalised in stacks. Under torch.distributed each rank computes its share of every
    shape, and one collective a shape gathers the results, in the order of the parameters. The gradients must agree on
    all ranks, as they do under DDP. Every rank has all momentum buffers, so the state of any rank is complete. If the
    rank that computes a parameter has no gradient for it, the parameter moves on no rank. The gathered results of one
    shape take as much memory as its parameters in `ns_dtype`.

    The step of a sharded matrix (a DTensor) is that of the whole matrix, not of its shards. Each matrix is
    orthogonalised by one rank of its mesh, its owner, so that all ranks have about the same work. Its shards go there
    in `ns_dtype` and the results come back, by two collectives for all matrices of a mesh. With W ranks a rank sends
    and receives about 2 / W of what all matrices hold; a gather on every rank would receive all of it. Momentum stays
    in shards, laid out as the parameter. If a rank that has a shard has no gradient for it, the matrix moves on no
    rank.

    A weight stored the other way round, (in, out), as in Hugging Face's Conv1D, gets the scale of its transpose.

    Args:
        params: matrices, or groups of them. A vector is refused.
        lr: learning rate; a float or a tensor with one element.
        momentum: decay of the sum of gradients, in [0, 1).
        weight_decay: decoupled: W shrinks by the factor 1 - lr weight_decay before S is added.
        nesterov: look ahead by one gradient.
        ns_steps: Newton-Schulz steps, 1 to 99.
        eps: added to the Frobenius norm.
        ns_dtype: precision of Newton-Schulz. fp32 is true fp32, never TF32. torch.bfloat16 is for accelerators. A
            group has its name.
        maximize: ascend.
        rounding: of matrices stored in bf16 or fp16, as in `RowNorm`.
        distributed: share the work over the ranks of `process_group` when torch.distributed is initialised. Sharded
            matrices do not ask: theirs is shared over their mesh.
        process_group: the ranks that hold the same parameters, where these are whole; all of them by default.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 8e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        nesterov: bool = True,
        ns_steps: int = 5,
        eps: float = 1e-5,
        *,
        ns_dtype: torch.dtype = torch.float32,
        maximize: bool = False,
        rounding: str = "nearest",
        distributed: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "eps": eps,
            "ns_dtype": ns_dtype,
            "maximize": maximize,
            "rounding": rounding,
        }
        self.distributed, self._ranks, self._agreed = distributed, _Ranks(process_group), False
        self._owners: dict[Any, Owners] = {}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = {"distributed": self.distributed, "_ranks": self._ranks, "_agreed": self._agreed}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_owners", {})  # a copy meets the ranks of its meshes again

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of matrices, with hyperparameters of its own if it has any."""
        super().add_param_group(param_group)
        self._agreed = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the work; None for all of them."""
        return self._ranks.group

    @property
    def _world(self) -> int:
        if not (self.distributed and dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        check_number(group, "momentum", below=1)
        check_number(group, "eps")
        check_number(group, "ns_steps", least=1, below=100)
        if not isinstance(group["ns_steps"], int):
            raise TypeError(f"ns_steps must be an integer, got {group['ns_steps']!r}")
        check_choice(group, "nesterov", (True, False))
        check_choice(group, "ns_dtype", (*NS_DTYPES.values(), *NS_DTYPES))
        group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")

    def _step_group(self, params: list[Tensor], options: Group) -> None:
        live = [p for p in params if p.grad is not None]
        for p in live:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=compute_dtype(p))
        if live:
            buffers = self._buffers(live)
            torch._foreach_mul_(buffers, options["momentum"])
            torch._foreach_add_(buffers, _gradients(live))
        world = self._world
        for alike in _by_shape([p for p in params if not is_dtensor(p)]):
            if world > 1:
                self._step_shared(alike, options, world)
            else:
                self._step_alone(alike, options)
        for owners, sharded in self._by_mesh(params):
            for bucket in owners.buckets(sharded, _ns_dtype(options)):
                self._step_sharded(bucket, options)

    def _step_alone(self, alike: list[Tensor], options: Group) -> None:
        shrink = 1 - options["lr"] * options["weight_decay"]
        for stack in _stacks([p for p in alike if p.grad is not None], _ns_dtype(options)):
            S = _scaled(_oriented(self._orthogonal(stack, options), stack[0]), stack[0], options)
            if S.dtype == stack[0].dtype:
                torch._foreach_mul_(stack, shrink)
                torch._foreach_add_(stack, list(S))
            else:
                for p, s in zip(stack, S, strict=True):
                    shrink_and_add(p, s, shrink=shrink, lost=self._lost(p, options))

    def _step_shared(self, alike: list[Tensor], options: Group, world: int) -> None:
        """Step the parameters of one shape: each rank sends its share of the results, and a flag for each."""
        size, share = alike[0].numel(), math.ceil(len(alike) / world)
        first = share * dist.get_rank(self.process_group)
        mine = torch.zeros(share * (size + 1), dtype=_ns_dtype(options), device=alike[0].device)
        results, present = mine[: share * size].view(share, size), mine[share * size :]
        slots = {p: slot for slot, p in enumerate(alike[first : first + share]) if p.grad is not None}
        for stack in _stacks(list(slots), _ns_dtype(options)):
            for p, x in zip(stack, self._orthogonal(stack, options), strict=True):
                results[slots[p]] = x.flatten()
                present[slots[p]] = 1
        gathered = mine.new_empty(world, len(mine))
        _gather(gathered.view(-1), mine, group=self.process_group)
        flags = gathered[:, share * size :].to(compute_dtype(alike[0]))
        shrinks = 1 - options["lr"] * options["weight_decay"] * flags  # one where there was no gradient
        for index, p in enumerate(alike):
            rank, slot = divmod(index, share)
            x = gathered[rank, slot * size : (slot + 1) * size].view(min(p.shape), max(p.shape))
            S, shrink = _scaled(_oriented(x, p), p, options), shrinks[rank, slot]
            shrink_and_add(p, S, shrink=shrink, lost=self._lost(p, options))

    def _step_sharded(self, bucket: Bucket, options: Group) -> None:
        for p, (x, present) in zip(bucket.params, self._orthogonal_shards(bucket, options), strict=True):
            shrink = 1 - options["lr"] * options["weight_decay"] * present.to(compute_dtype(p))
            S = _scaled(x, p, options)
            shrink_and_add(local(p), S, shrink=shrink, lost=self._lost(p, options))

    def _orthogonal_shards(self, bucket: Bucket, options: Group) -> list[Held]:
        """Return this rank's shards of the orthogonalised directions. Each matrix is computed by its owner alone."""
        live = [p for p in bucket.params if p.grad is not None]
        directions = dict(zip(live, self._directions(live, options), strict=True))
        wholes = bucket.gather([directions.get(p) for p in bucket.params])
        places = {held.X: i for i, held in wholes.items()}
        for alike in _by_shape(list(places)):
            for stack in _stacks(alike, _ns_dtype(options)):
                for X, result in zip(stack, _orthogonalized(stack, options), strict=True):
                    present = wholes[places[X]].present
                    wholes[places[X]] = Held(_oriented(result, X).masked_fill_(present == 0, 0), present)
        return bucket.scatter(wholes)

    def _by_mesh(self, params: list[Tensor]) -> Iterator[tuple[Owners, list[Tensor]]]:
        """Yield the sharded parameters on each mesh that this rank is in, with the ranks that share their work."""
        meshes: dict[Any, list[Tensor]] = {}
        for p in params:
            if is_dtensor(p) and p.device_mesh.get_coordinate() is not None:  # type: ignore[attr-defined]
                meshes.setdefault((p.device_mesh, p.device), []).append(p)  # type: ignore[attr-defined]
        for (mesh, _), sharded in meshes.items():
            if mesh not in self._owners:
                self._owners[mesh] = Owners(mesh)
            yield self._owners[mesh], sharded

    def _orthogonal(self, stack: list[Tensor], options: Group) -> Tensor:
        """Return the orthogonalised directions of `stack`, (k, min(m, n), max(m, n))."""
        return _orthogonalized(self._directions(stack, options), options)

    def _directions(self, params: list[Tensor], options: Group) -> list[Tensor]:
        """Return the directions before they are orthogonalised; of sharded parameters the shards of this rank."""
        directions = self._buffers(params)
        if options["nesterov"] and params:
            directions = list(torch._foreach_mul(directions, options["momentum"]))
            torch._foreach_add_(directions, _gradients(params))
        return directions

    def _buffers(self, params: list[Tensor]) -> list[Tensor]:
        return [local(self.state[p]["momentum_buffer"]) for p in params]

    def _form_increment(self, param: Tensor, last: LastStep, out: Tensor | None) -> Tensor:
        if last.options["nesterov"] and not last.had(param.grad):
            raise RuntimeError(
                "the gradient of the last step is gone or changed, and Muon's increment needs it: ask before zero_grad,"
                " for instance in a step post-hook"
            )
        if not is_dtensor(param):
            return _scaled(_oriented(self._orthogonal([param], last.options)[0], param), param, last.options)
        for owners, params in self._by_mesh([param]):
            for bucket in owners.buckets(params, _ns_dtype(last.options)):
                return _scaled(self._orthogonal_shards(bucket, last.options)[0].X, param, last.options)
        return torch.zeros_like(local(param), dtype=compute_dtype(param))  # this rank is not in the mesh

    def _before_step(self) -> None:
        """Raise ValueError on all ranks if they hold different parameters. Checked once for each set of parameters."""
        world = self._world
        params = [p for group in self.param_groups for p in group["params"] if not is_dtensor(p)]
        if world == 1 or self._agreed or not params:
            return
        shapes = zlib.crc32(repr([(tuple(p.shape), p.dtype) for p in params]).encode())
        device = params[0].device
        mine = torch.tensor([shapes >> 16, shapes & 0xFFFF, len(params), 0.0], device=device)
        mine[3] = sum(p.float().abs().sum().to(device) for p in params)
        held = mine.new_empty(world, len(mine))
        _gather(held.view(-1), mine, group=self.process_group)
        same = (held[:, :3] == held[0, :3]).all() and torch.allclose(held[:, 3], held[0, 3], rtol=1e-4)
        if not same:
            raise ValueError(
                "the ranks hold different parameters, and Muon shares its work among ranks that hold the same: pass"
                " the process_group of those, or distributed=False"
            )
        self._agreed = True


class _Ranks:
    """Holder of a process group: a copy of the optimizer shares the group, and pickling it is refused."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _Ranks:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise TypeError("Muon with a process_group cannot be pickled: save its state_dict() instead")
        return _Ranks, (None,)


def _by_shape(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of parameters of one shape, dtype and device. Includes those without a gradient, as on all ranks."""
    alike: dict[Any, list[Tensor]] = {}
    for p in params:
        alike.setdefault((p.shape, p.dtype, p.device), []).append(p)
    yield from alike.values()


def _stacks(params: list[Tensor], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Yield stacks of parameters of one shape, of a size that suits their device."""
    if not params:
        return
    budget = STACK_BYTES.get(params[0].device.type, 256 * 2**20)
    length = max(1, budget // max(1, params[0].numel() * dtype.itemsize))
    for start in range(0, len(params), length):
        yield params[start : start + length]


def _ns_dtype(options: Group) -> torch.dtype:
    """Return the precision of Newton-Schulz; state of an earlier version has it as a dtype."""
    choice: str | torch.dtype = options["ns_dtype"]
    return NS_DTYPES[choice] if isinstance(choice, str) else choice


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [local_gradient(p) for p in params if p.grad is not None]


def _orthogonalized(directions: list[Tensor], options: Group) -> Tensor:
    """Return the orthogonal factors of matrices of one shape, (k, min(m, n), max(m, n))."""
    X = torch.stack(directions).to(_ns_dtype(options))  # (k, m, n)
    wide = X if X.shape[1] <= X.shape[2] else X.mT
    return orthogonalize(wide, steps=options["ns_steps"], eps=options["eps"])


def _oriented(X: Tensor, p: Tensor) -> Tensor:
    """Return wide matrices in the orientation of `p`."""
    return X if X.shape[-2:] == p.shape else X.mT


def _scaled(X: Tensor, p: Tensor, options: Group) -> Tensor:
    """Return the increments -lr sqrt(max(1, m / n)) X of matrices like `p`, or of shards. May overwrite X."""
    m, n = p.shape
    S = X.to(compute_dtype(p))
    lr = options["lr"] if options["maximize"] else -options["lr"]
    return S.mul_(lr * math.sqrt(max(1, m / max(n, 1))))
