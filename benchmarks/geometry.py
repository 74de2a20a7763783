"""The exact row diameter against all pairs, its bounds against one pass over S, the panel against the bare product.

Also rows that are formed on demand, hard rows, and how the time of the exact search grows with V and d.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hilbert_monitor.doctor.samples import SampleIncrement, make_increment
from hilbert_monitor.geometry import RowSource, hilbert_perturbation, row_diameter, row_diameter_bracket
from hilbert_monitor.pretrain.recipe import HEADS

from .data import hard_rows
from .measure import Result, collect, paired_seconds, peak_bytes, seconds

MATMUL, CDIST = "all pairs, tiled matmul", "all pairs, blocked cdist"


def run(*, quick: bool, increments: Sequence[SampleIncrement] = ()) -> list[Result]:
    """Measure on the given increments, or on synthetic ones; then on hard rows and on growing sizes."""
    return collect(_results(quick, increments))


def _results(quick: bool, increments: Sequence[SampleIncrement]) -> Iterator[Result]:
    V, d, N = (4096, 64, 1024) if quick else (50_257, 256, 8192)
    for increment in increments or (make_increment(head, V, d, panel=N) for head in HEADS):
        yield from exact_search(increment)
        yield from panel(increment)
    for width in (d,) if quick else (d, 1024):
        yield from on_demand(V, width)
    yield from worst_case(V, d)
    yield from hard_cases(1024 if quick else 20_000, 64)
    yield from long_run(*((1024, 64, 40) if quick else (8192, 64, 2000)))
    sizes = [1024, 2048, 4096] if quick else [2**k * 1024 for k in range(3, 8)]
    S = make_increment("rownorm", sizes[-1], d, panel=1).S
    yield from growth("V", sizes, [S[:: len(S) // size].contiguous() for size in sizes], theory=2)
    widths, V = ([32, 64, 128], 4096) if quick else ([64, 128, 256, 512, 1024], 16_384)
    yield from growth("d", widths, [make_increment("rownorm", V, w, panel=1).S for w in widths], theory=1)


def exact_search(increment: SampleIncrement) -> Iterator[Result]:
    """Time the exact search against the faster all-pairs search, and the bracket against one pass."""
    S, case = increment.S, f"{increment.name} ({len(increment.S):,} x {increment.S.shape[1]})"
    exact = row_diameter(S)
    baseline, slow, value = _all_pairs(S)
    if not math.isclose(exact.value, value, rel_tol=1e-4):
        raise AssertionError(f"row_diameter found {exact.value}, all pairs {value}")
    share = (exact.pairs_screened + exact.pairs_computed) / (len(S) * (len(S) - 1) / 2)
    note = f"D = {exact.value:.6g}, tokens {exact.pair}, {share:.2%} of pairs looked at"
    yield Result("exact D(S)", case, seconds(lambda: row_diameter(S)), baseline, slow, note=note)
    bracket = row_diameter_bracket(S)
    ours, one_pass = (
        seconds(call) for call in (lambda: row_diameter_bracket(S), lambda: torch.linalg.vector_norm(S, dim=1))
    )
    note = f"lower {bracket.lower / exact.value:.3f} D, upper {bracket.upper / exact.value:.3f} D"
    yield Result("bracket of D(S)", case, ours, "norm of every row", one_pass, note=note)


def on_demand(V: int, d: int) -> Iterator[Result]:
    """Time and count the memory of AdamW's step measured from the optimizer's state, next to its step formed first."""
    S = make_increment("adamw", V, d, steps=3, panel=1).S
    square = torch.rand(V, d, generator=torch.Generator().manual_seed(0)).add_(0.5).mul_(1e-3).square_()
    average, memory = S * square.sqrt(), torch.empty_like(S)  # a state whose step is S

    def form(average: Tensor, square: Tensor, out: Tensor | None = None) -> Tensor:
        root = torch.sqrt(square, out=out).add_(1e-10)
        return torch.div(average, root, out=root)

    def form_first() -> Tensor:
        for at in range(0, V, rows := max(64, 2**20 // d)):  # in chunks that fit the cache
            part = slice(at, at + rows)
            form(average[part], square[part], memory[part])
        return memory

    source = RowSource(average, square, form=form)
    for name, measure in (("bracket", row_diameter_bracket), ("exact D(S)", row_diameter)):
        ours, first = paired_seconds(lambda: measure(source), lambda: measure(form_first()), repeat=9)  # noqa: B023
        scratch = peak_bytes(lambda: measure(source)) / 2**20  # noqa: B023
        note = f"{scratch:.0f} MiB scratch, S has {S.nbytes / 2**20:.0f}"
        yield Result(
            "rows on demand", f"{name} of AdamW's step ({V:,} x {d})", ours, "S formed first", first, note=note
        )


def panel(increment: SampleIncrement) -> Iterator[Result]:
    """Time the perturbation of the increment's panel, if it has one, and measure the scratch memory."""
    S, H = increment.S, increment.H
    if H is None:
        return
    found = hilbert_perturbation(S, H)
    scratch = peak_bytes(lambda: hilbert_perturbation(S, H)) / 2**20
    share = found.products / (len(S) * len(H))
    ours = seconds(lambda: hilbert_perturbation(S, H), repeat=3)
    product = seconds(lambda: bare_product(S, H), repeat=3)
    note = f"RMS {found.rms:.6g}, {share:.1%} of products computed, {scratch:.0f} MiB scratch"
    case = f"{increment.name} (panel of {len(H):,})"
    yield Result("Hilbert perturbation", case, ours, "bare product S H'", product, note=note)


def worst_case(V: int, d: int) -> Iterator[Result]:
    """Time the search where no pair can be ruled out: points on a sphere."""
    S = normalize(torch.randn(V, d, generator=torch.Generator().manual_seed(0)), dim=1)
    baseline, slow, _ = _all_pairs(S)
    ours = seconds(lambda: row_diameter(S), repeat=1)
    yield Result("exact D(S)", f"sphere ({V:,} x {d})", ours, baseline, slow, note="no pair can be ruled out")


def hard_cases(V: int, d: int) -> Iterator[Result]:
    """Time the search and all pairs on ties, repeated rows and the like, Adam's first step and a step of RowNorm."""
    cases = hard_rows(V, d)
    for batch in (128, 2048):
        cases[f"Adam's first step, batch {batch:,}"] = make_increment("adamw", V, d, steps=1, batch=batch, panel=1).S
    cases["RowNorm after 40 steps, batch 2,048"] = make_increment("rownorm", V, d, batch=2048, panel=1).S
    for name, S in cases.items():
        yield _hard(name, S)


def long_run(V: int, d: int, steps: int) -> Iterator[Result]:
    """Time the search and all pairs on RowNorm's increment late in a run with a small vocabulary."""
    yield _hard(f"RowNorm after {steps:,} steps", make_increment("rownorm", V, d, steps=steps, panel=1).S)


def _hard(name: str, S: Tensor) -> Result:
    V, d = S.shape
    ours, all_pairs = paired_seconds(lambda: row_diameter(S), lambda: all_pairs_matmul(S), repeat=5)
    exact = row_diameter(S)
    screened, computed = (n / (V * (V - 1) / 2) for n in (exact.pairs_screened, exact.pairs_computed))
    note = f"{screened:.2%} of pairs screened, {computed:.2%} computed"
    return Result("exact D(S) of hard rows", f"{name} ({V:,} x {d})", ours, MATMUL, all_pairs, note=note)


def growth(letter: str, sizes: Sequence[int], samples: Sequence[Tensor], *, theory: int) -> Iterator[Result]:
    """Time the search on RowNorm's increments of growing size; the last note has the fitted exponents."""
    ours, all_pairs = [], []
    for size, S in zip(sizes, samples, strict=True):
        ours.append(seconds(lambda S=S: row_diameter(S)))  # type: ignore[misc]
        all_pairs.append(seconds(lambda S=S: all_pairs_matmul(S), repeat=1))  # type: ignore[misc]
        note = ""
        if size == sizes[-1]:
            exponents = exponent(sizes, ours), exponent(sizes, all_pairs)
            note = "time grows with exponent {:.2f}, all pairs with {:.2f} (in theory {})".format(*exponents, theory)
        yield Result("growth", f"rownorm, {letter} = {size:,}", ours[-1], MATMUL, all_pairs[-1], note=note)


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return the slope of log time over log size, by least squares."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(times, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _all_pairs(S: Tensor) -> tuple[str, float, float]:
    """Return name, time and value of the faster all-pairs search."""
    found = []
    for name, search in ((CDIST, all_pairs_cdist), (MATMUL, all_pairs_matmul)):
        start = time.perf_counter()
        value = search(S)
        found.append((time.perf_counter() - start, name, value))
    taken, name, value = min(found)
    return name, taken, value


def all_pairs_cdist(S: Tensor, *, block: int = 4096) -> float:
    """Return the row diameter by blocked `torch.cdist`, each unordered pair of blocks once, as in the paper's code."""
    return max(
        float(torch.cdist(S[i : i + block], S[j : j + block]).max())
        for i in range(0, len(S), block)
        for j in range(i, len(S), block)
    )


def all_pairs_matmul(S: Tensor, *, block: int = 2048) -> float:
    """Return the row diameter by tiled products of centred rows, each unordered pair of tiles once."""
    X = S - S.mean(0)
    norm2 = X.square().sum(1)
    buffer = X.new_empty(min(block, len(X)) ** 2)
    longest = 0.0
    for i in range(0, len(X), block):
        for j in range(i, len(X), block):
            x, y = X[i : i + block], X[j : j + block]
            gap2 = buffer[: len(x) * len(y)].view(len(x), len(y))
            torch.addmm(norm2[j : j + block], x, y.T, alpha=-2, out=gap2)
            longest = max(longest, float(gap2.add_(norm2[i : i + block, None]).max()))
    return math.sqrt(longest)


def bare_product(S: Tensor, H: Tensor, *, rows: int = 512, positions: int = 2048) -> None:
    """Compute H S' in chunks into one buffer, and do nothing with it."""
    buffer = S.new_empty(rows * positions)
    for i in range(0, len(S), rows):
        x = S[i : i + rows]
        for j in range(0, len(H), positions):
            h = H[j : j + positions]
            torch.mm(h, x.T, out=buffer[: len(h) * len(x)].view(len(h), len(x)))
