"""Claim: the geometry computes on this device what plain fp64 gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hilbert_monitor import geometry

from .device import CheckSizes
from .finding import Check, Outcome, outcome_of
from .samples import SampleIncrement, make_increment

EXACT = 1e-10
"""Relative error that a diameter may have: both it and the reference are lengths in fp64."""
SINGLE = 1e-5
"""Error that a perturbation, a product in fp32, may have relative to the largest one. TF32 would be off by 1e-3."""


class CheckedRows:
    """Rows on a device, and their diameter by brute force. Each is computed once, when it is first used."""

    def __init__(self, make: Callable[[], Tensor], device: torch.device) -> None:
        self._make, self._device = make, device

    @cached_property
    def rows(self) -> Tensor:
        """The rows, (V, d)."""
        return self._make().to(self._device)

    @cached_property
    def diameter(self) -> float:
        """The diameter over all pairs in fp64."""
        return all_pairs(self.rows)


def checks(device: torch.device, sizes: CheckSizes) -> Iterator[Check]:
    """Yield checks of the diameter on rows of all kinds and under reduced precision, and of a panel's perturbation."""
    V, d, panel = sizes.cloud
    adamw, rownorm = (cache(partial(make_increment, head, V, d, panel=panel)) for head in ("adamw", "rownorm"))
    draw = torch.Generator().manual_seed(0)
    sphere = CheckedRows(lambda: normalize(torch.randn(V, d, generator=draw)), device)
    cases = {
        "AdamW increment": CheckedRows(lambda: adamw().S, device),
        "RowNorm increment": CheckedRows(lambda: rownorm().S, device),
        "points on a sphere": sphere,
        "every pair tied": CheckedRows(lambda: torch.eye(d)[torch.arange(V) % d], device),
        "a common shift of 1,000": CheckedRows(lambda: adamw().S + 1000, device),
        "bf16 rows": CheckedRows(lambda: rownorm().S.bfloat16(), device),
        "fp16 rows": CheckedRows(lambda: adamw().S.half(), device),
    }
    for name, rows in cases.items():
        yield Check("exactness", f"{name} ({V:,} x {d})", partial(_diameter, rows, nullcontext))
    settings: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "TF32 allowed": reduced_products,
        "inside autocast": partial(torch.autocast, device.type, torch.bfloat16),
    }
    for name, setting in settings.items():
        yield Check("exactness", f"points on a sphere, {name}", partial(_diameter, sphere, setting))
    for name, increment in (("AdamW", adamw), ("RowNorm", rownorm)):
        for within, setting in {"": nullcontext, **{f", {name}": s for name, s in settings.items()}}.items():
            case = f"panel of {panel:,}, {name} increment{within}"
            yield Check("exactness", case, partial(_perturbation, increment, device, setting))


def _diameter(checked: CheckedRows, setting: Callable[[], AbstractContextManager[None]]) -> Outcome:
    S, truth = checked.rows, checked.diameter
    with setting():
        exact, bracket = geometry.row_diameter(S), geometry.row_diameter_bracket(S)
    attained = length(S, exact.pair)
    off = max(abs(exact.value - truth), abs(attained - truth)) / truth
    enclosed = bracket.lower <= truth * (1 + EXACT) and truth <= bracket.upper * (1 + EXACT)
    return outcome_of(
        off <= EXACT and enclosed,
        f"{exact.value:.8g}, its pair {attained:.8g}, all pairs in fp64 {truth:.8g}: off by {off:.0e} (limit"
        f" {EXACT:.0e}); bracket {bracket.lower:.4g} to {bracket.upper:.4g}",
    )


def _perturbation(
    make: Callable[[], SampleIncrement], device: torch.device, setting: Callable[[], AbstractContextManager[None]]
) -> Outcome:
    increment = make()
    assert increment.H is not None
    S, H = increment.S.to(device), increment.H.to(device)
    with setting():
        result = geometry.hilbert_perturbation(S, H)
    truth = plain_perturbation(S, H)
    largest = float(truth.max())
    off = float((result.delta.cpu().double() - truth).abs().max()) / largest
    h, (i, j) = increment.H[result.position].double(), result.pair
    attained = float((increment.S[i].double() - increment.S[j].double()) @ h)
    off = max(off, abs(result.max - largest) / largest, abs(attained - largest) / largest)
    return outcome_of(
        off <= SINGLE,
        f"largest {result.max:.7g}, plain fp64 {largest:.7g}: off by {off:.0e} (limit {SINGLE:.0e})",
    )


def all_pairs(S: Tensor, *, block: int = 2048) -> float:
    """Return the largest |s_i - s_j| in fp64, over all pairs. Tiles find candidates; their lengths are differences."""
    X = _wide(S)
    X = X - X.mean(0)
    square, longest = X.square().sum(1), 0.0
    for i in range(0, len(X), block):
        for j in range(i, len(X), block):
            gap = torch.addmm(square[j : j + block], X[i : i + block], X[j : j + block].T, alpha=-2)
            a, b = divmod(int(gap.add_(square[i : i + block, None]).argmax()), gap.shape[1])
            longest = max(longest, length(S, (i + a, j + b)))
    return longest


def plain_perturbation(S: Tensor, H: Tensor, *, block: int = 1024) -> Tensor:
    """Return the largest minus the smallest logit change at every position, (N,) in fp64, on the CPU."""
    X, Y = _wide(S), _wide(H)
    return torch.cat([(change := y @ X.T).amax(1) - change.amin(1) for y in torch.split(Y, block)]).cpu()


def length(S: Tensor, pair: tuple[int, int]) -> float:
    """Return |s_i - s_j| from differences, with correctly rounded sums."""
    a, b = (S[i].tolist() for i in pair)
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def _wide(A: Tensor) -> Tensor:
    """Return A in fp64, on the CPU if the device has no fp64."""
    return A.double() if A.is_cuda else A.cpu().double()


@contextmanager
def reduced_products() -> Iterator[None]:
    """Allow fp32 products in TF32 or bf16, as a training script may; raise if the block changes that setting."""
    choices = ((torch.backends.cuda.matmul, "tf32"), (torch.backends.mkldnn.matmul, "bf16"))  # type: ignore[attr-defined]
    inherited = torch.backends.fp32_precision  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend, _ in choices]
    try:
        for backend, precision in choices:
            backend.fp32_precision = precision
        yield
        if [backend.fp32_precision for backend, _ in choices] != [precision for _, precision in choices]:
            raise AssertionError("the precision that the process had chosen for its products was not put back")
    finally:
        for (backend, _), precision in zip(choices, before, strict=True):
            backend.fp32_precision = "none" if precision == inherited else precision
