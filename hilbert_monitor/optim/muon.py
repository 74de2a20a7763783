"""Muon: steps along the orthogonalised momentum, for the matrices of the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.linalg import vector_norm
from torch.optim.optimizer import ParamsT

from hilbert_monitor.geometry import RowSource, compute_dtype, full_precision
from hilbert_monitor.geometry.sharding import is_dtensor

from .base import Group, LastStep, MatrixOptimizer, check_choice, check_number, shrink_and_add
from .distributed import (
    BATCH_BYTES,
    MeshRanks,
    ReplicatedExchange,
    Result,
    ShardedExchange,
    batches,
    gather_objects,
    local,
    local_gradient,
)

Exchange = ReplicatedExchange | ShardedExchange

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic a x + b x^3 + c x^5: steep at zero, and into about [0.7, 1.2] after five steps."""

STACK_BYTES = {"cpu": 16 * 2**20}
"""Size of a stack of matrices for Newton-Schulz, in bytes: on a CPU it fits the cache. Elsewhere `BATCH_BYTES`."""

NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Precisions of Newton-Schulz. Groups have their names: torch moves no state dict to the CPU that has a dtype."""


class Muon(MatrixOptimizer):
    """Muon with Nesterov momentum, as the paper ran it.

    With the gradient G_t of an (m, n) matrix::

        M_t = momentum M_{t-1} + G_t
        N_t = G_t + momentum M_t                                       or M_t without nesterov
        S_t = -lr sqrt(max(1, m / n)) NS(N_t / (|N_t|_F + eps))
        W_{t+1} = (1 - lr weight_decay) W_t + S_t

    where NS is `ns_steps` of the Newton-Schulz iteration with (3.4445, -4.7750, 2.0315). torch.optim.Muon has the same
    formula but other arithmetic: it iterates in bf16, and divides by the larger of norm and eps, not by their sum.

    Matrices of one shape are orthogonalised in stacks. Under torch.distributed each matrix is computed by one rank, its
    owner, and one collective gathers up to 256 MiB of results in `ns_dtype`. The gradients must agree on all ranks, as
    they do under DDP. Every rank has all momentum buffers, so the state of any rank is complete.

    A sharded matrix (a DTensor) makes the step of the whole matrix. Its shards go to one rank of its mesh in
    `ns_dtype`, and the results come back: two collectives for up to 256 MiB of matrices a rank. Momentum stays in
    shards. A matrix moves on no rank if its owner has no gradient for it, or any rank of its mesh none for its shard.

    A weight stored the other way round, (in, out), as in Hugging Face's Conv1D, gets the scale of its transpose.

    Args:
        params: matrices, or groups of them. A vector is refused.
        lr: learning rate; a float or a tensor with one element.
        momentum: decay of the sum of gradients, in [0, 1).
        weight_decay: decoupled: W shrinks by the factor 1 - lr weight_decay before S is added.
        nesterov: look ahead by one gradient.
        ns_steps: Newton-Schulz steps, 1 to 99.
        eps: added to the Frobenius norm.
        ns_dtype: precision of Newton-Schulz. fp32 is true fp32, never TF32. torch.bfloat16 is for accelerators.
        maximize: ascend.
        rounding: of matrices stored in bf16 or fp16, as in `RowNorm`.
        distributed: share the work on whole matrices over the ranks of `process_group`, under torch.distributed.
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
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps, "eps": eps}
        choices = {"nesterov": nesterov, "ns_dtype": ns_dtype, "maximize": maximize, "rounding": rounding}
        self.distributed, self._group = distributed, _SharedGroup(process_group)
        self._agreed: list[Any] = []
        self._meshes: dict[Any, MeshRanks] = {}
        super().__init__(params, {**numbers, **choices})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "distributed": self.distributed, "_group": self._group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("_agreed", [])  # a copy learns again where shards are
        vars(self).setdefault("_meshes", {})

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the work; None for all of them."""
        return self._group.group

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

    def _before_step(self) -> None:
        """Raise ValueError on all ranks if they hold different parameters. Checked once for each set of parameters."""
        params = [p for group in self.param_groups for p in group["params"]]
        forms = [(p.shape, p.dtype, getattr(p, "device_mesh", None), getattr(p, "placements", None)) for p in params]
        if forms == self._agreed:
            return
        whole, world = [p for p in params if not is_dtensor(p)], self._world
        if world > 1 and whole:
            size = float(sum(p.float().abs().sum().to(whole[0].device) for p in whole))
            ranks = gather_objects((repr([(tuple(p.shape), p.dtype) for p in whole]), size), world, self.process_group)
            sizes = torch.tensor([size for _, size in ranks], dtype=torch.float64)
            alike = torch.isclose(sizes, sizes[0], rtol=1e-4, atol=0, equal_nan=True).all()
            if not alike or any(form != ranks[0][0] for form, _ in ranks):
                raise ValueError(
                    "the ranks hold different parameters, and Muon shares its work among ranks that hold the same: pass"
                    " the process_group of those, or distributed=False"
                )
        for mesh, sharded in _by_mesh(params):
            if mesh not in self._meshes:
                self._meshes[mesh] = MeshRanks(mesh)
            self._meshes[mesh].learn(sharded)
        self._agreed = forms

    def _step_group(self, params: list[Tensor], options: Group) -> None:
        live = [p for p in params if p.grad is not None]
        for p in live:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p, dtype=compute_dtype(p))
        if live:
            buffers = self._buffers(live)
            torch._foreach_mul_(buffers, options["momentum"])
            torch._foreach_add_(buffers, [local_gradient(p) for p in live])
        for exchange in self._exchanges(params, options):
            live = [p for p in exchange.inputs if p.grad is not None]
            for p, (X, present) in zip(exchange.params, self._orthogonal(exchange, live, options), strict=True):
                flag = present.to(compute_dtype(p)) if isinstance(present, Tensor) else present
                shrink = 1 - options["lr"] * options["weight_decay"] * flag
                shrink_and_add(local(p), _scaled(X, p, options), shrink=shrink, lost=self._lost(p, options))

    def _exchanges(self, params: list[Tensor], options: Group) -> Iterator[Exchange]:
        """Yield the exchanges of a group's parameters, in the same order on all ranks."""
        dtype, world = NS_DTYPES[options["ns_dtype"]], self._world
        whole = [p for p in params if not is_dtensor(p) and (world > 1 or p.grad is not None)]
        size = BATCH_BYTES if world > 1 or not whole else STACK_BYTES.get(whole[0].device.type, BATCH_BYTES)
        for batch in batches(whole, dtype, size):
            yield ReplicatedExchange(batch, dtype, world, self.process_group)
        yield from self._sharded_exchanges(params, dtype)

    def _sharded_exchanges(self, params: list[Tensor], dtype: torch.dtype) -> Iterator[ShardedExchange]:
        for mesh, sharded in _by_mesh(params):
            ranks = self._meshes[mesh]
            for batch in batches(sharded, dtype, BATCH_BYTES * len(ranks.ranks)):
                yield ShardedExchange(batch, dtype, ranks)

    def _orthogonal(self, exchange: Exchange, live: list[Tensor], options: Group) -> list[Result]:
        """Return the orthogonalised directions of an exchange's parameters; zero for inputs that are not `live`."""
        N = self._buffers(live)  # or this rank's shards of it
        if options["nesterov"] and live:
            N = list(torch._foreach_add([local_gradient(p) for p in live], N, alpha=options["momentum"]))
        directions = dict(zip(live, N, strict=True))
        matrices = exchange.collect([directions.get(p) for p in exchange.inputs])
        return exchange.distribute(_orthogonalize_each(matrices, options))

    def _buffers(self, params: list[Tensor]) -> list[Tensor]:
        return [local(self.state[p]["momentum_buffer"]) for p in params]

    def _increment_rows(self, param: Tensor, last: LastStep) -> RowSource:
        if last.options["nesterov"] and not last.had(param.grad):
            raise RuntimeError(
                "the gradient of the last step is gone or changed, and Muon's increment needs it: ask before zero_grad,"
                " for instance in a step post-hook"
            )
        dtype = NS_DTYPES[last.options["ns_dtype"]]
        whole: list[Exchange] = [] if is_dtensor(param) else [ReplicatedExchange([param], dtype)]
        for exchange in whole or self._sharded_exchanges([param], dtype):
            return RowSource(_scaled(self._orthogonal(exchange, [param], last.options)[0].X, param, last.options))
        return RowSource(torch.zeros_like(local(param), dtype=compute_dtype(param)))  # this rank is not in the mesh


class _SharedGroup:
    """Holder of a process group: a copy of the optimizer shares the group, and pickling it is refused."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _SharedGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.group is not None:
            raise TypeError("Muon with a process_group cannot be pickled: save its state_dict() instead")
        return _SharedGroup, (None,)


def _by_mesh(params: list[Tensor]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield each mesh that this rank is in, with the parameters that are sharded over it."""
    meshes: dict[Any, list[Tensor]] = {}
    for p in params:
        if is_dtensor(p) and p.device_mesh.get_coordinate() is not None:  # type: ignore[attr-defined]
            meshes.setdefault(p.device_mesh, []).append(p)  # type: ignore[attr-defined]
    yield from meshes.items()


def _scaled(X: Tensor, p: Tensor, options: Group) -> Tensor:
    """Return the increment -lr sqrt(max(1, m / n)) X of a matrix like `p`, or of its shard. May overwrite X."""
    m, n = p.shape
    lr = options["lr"] if options["maximize"] else -options["lr"]
    return X.to(compute_dtype(p)).mul_(lr * math.sqrt(max(1, m / max(n, 1))))


def _orthogonalize_each(matrices: list[Tensor], options: Group) -> list[Tensor]:
    """Return the orthogonal factors of matrices. Those of one shape go in stacks."""
    results = list(matrices)
    for m, n in dict.fromkeys(N.shape for N in matrices):
        indices = [i for i, N in enumerate(matrices) if N.shape == (m, n)]
        N = matrices[indices[0]]
        size = STACK_BYTES.get(N.device.type, BATCH_BYTES)
        length = max(1, size // max(1, N.numel() * N.element_size()))
        for start in range(0, len(indices), length):
            some = indices[start : start + length]
            X = torch.stack([matrices[i] for i in some])  # (k, m, n)
            X = orthogonalize(X if m <= n else X.mT, steps=options["ns_steps"], eps=options["eps"])
            for i, result in zip(some, X if m <= n else X.mT, strict=True):
                results[i] = result
    return results


@full_precision
def orthogonalize(X: Tensor, *, steps: int, eps: float) -> Tensor:
    """Move the singular values of each matrix of a stack towards one: divide by (|X|_F + eps), then iterate.

    One step is X <- a X + (b A + c A A) X with A = X X'. For matrices at least twice as wide as high, three steps at a
    time work on A alone: with Z = a I + b A + c A A a step is X <- Z X and A <- Z A Z, so X itself is multiplied once
    in three steps. After them A is computed from X again, so rounding does not build up.

    X is (k, m, n) with m <= n, and is overwritten. The result has its shape and dtype, in which all is computed.
    """
    if X.numel() == 0:
        return X
    tiny = torch.finfo(X.dtype).tiny
    largest = X.abs().amax(dim=(1, 2), keepdim=True).clamp_min_(tiny)
    X.div_(largest)  # so that squares stay in range
    norm = vector_norm(X, dim=(1, 2), keepdim=True)
    X.div_(norm.add_(eps / largest).clamp_min_(tiny))  # a zero matrix stays zero
    if X.shape[2] >= 2 * X.shape[1] and X.dtype in (torch.float32, torch.float64):
        for done in range(0, steps, 3):
            X = _gram_steps(X, min(3, steps - done))
        return X
    a, b, c = COEFFICIENTS
    A = X.new_empty(len(X), X.shape[1], X.shape[1])
    Z, Y = torch.empty_like(A), torch.empty_like(X)
    for _ in range(steps):
        torch.bmm(X, X.mT, out=A)
        torch.baddbmm(A, A, A, beta=b, alpha=c, out=Z)
        torch.baddbmm(X, Z, X, beta=a, out=Y)
        X, Y = Y, X
    return X


def _gram_steps(X: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    A = torch.bmm(X, X.mT)
    product: Tensor | None = None
    for step in range(steps):
        Z = torch.baddbmm(A, A, A, beta=b, alpha=c)
        Z.diagonal(dim1=1, dim2=2).add_(a)
        product = Z if product is None else torch.bmm(Z, product)
        if step < steps - 1:
            A = torch.bmm(torch.bmm(Z, A), Z)
    return X if product is None else torch.bmm(product, X)
