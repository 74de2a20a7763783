"""Times the exact row diameter against all pairs, and its bounds against one pass over S."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hilbert_monitor.emulation.synthetic import hard_rows
from hilbert_monitor.geometry import row_diameter, row_diameter_bracket

from .increments import SampleIncrement, make_increment
from .measure import BenchResult, paired_seconds, seconds
from .opponents import all_pairs_cdist, all_pairs_matmul, one_pass


def exact_search(increment: SampleIncrement) -> Iterator[BenchResult]:
    """Time the exact search against the faster all-pairs search, and the bracket against one pass."""
    S, case = increment.S, f"{increment.name} ({len(increment.S):,} x {increment.S.shape[1]})"
    exact = row_diameter(S)
    opponent, slow, value = _all_pairs(S)
    if not math.isclose(exact.value, value, rel_tol=1e-4):
        raise AssertionError(f"row_diameter found {exact.value}, all pairs {value}")
    share = (exact.pairs_screened + exact.pairs_computed) / (len(S) * (len(S) - 1) / 2)
    note = f"D = {exact.value:.6g}, tokens {exact.pair}, {share:.2%} of pairs looked at"
    yield BenchResult("diameter", case, "row_diameter", seconds(lambda: row_diameter(S)), opponent, slow, note)
    bracket = row_diameter_bracket(S)
    note = f"lower {bracket.lower / exact.value:.3f} D, upper {bracket.upper / exact.value:.3f} D"
    yield BenchResult(
        "bracket",
        case,
        "row_diameter_bracket",
        seconds(lambda: row_diameter_bracket(S)),
        "one pass over S",
        seconds(lambda: one_pass(S)),
        note,
    )


def worst_case(V: int, d: int) -> Iterator[BenchResult]:
    """Time the search where no pair can be ruled out: points on a sphere."""
    points = torch.randn(V, d, generator=torch.Generator().manual_seed(0))
    S = torch.nn.functional.normalize(points, dim=1)
    opponent, slow, _ = _all_pairs(S)
    ours = seconds(lambda: row_diameter(S), repeat=1)
    yield BenchResult("diameter", f"sphere ({V:,} x {d})", "row_diameter", ours, opponent, slow, "nothing to prune")


def hard_cases(V: int, d: int) -> Iterator[BenchResult]:
    """Time the search beside all pairs on ties, repeated rows and the like, Adam's first step and a step of RowNorm."""
    cases = hard_rows(V, d)
    for batch in (128, 2048):
        cases[f"Adam's first step, batch {batch:,}"] = make_increment("adamw", V, d, steps=1, batch=batch, panel=1).S
    cases["RowNorm after 40 steps, batch 2,048"] = make_increment("rownorm", V, d, batch=2048, panel=1).S
    for name, S in cases.items():
        ours, theirs = paired_seconds(lambda S=S: row_diameter(S), lambda S=S: all_pairs_matmul(S), repeat=5)  # type: ignore[misc]
        exact = row_diameter(S)
        screened, computed = (n / (V * (V - 1) / 2) for n in (exact.pairs_screened, exact.pairs_computed))
        yield BenchResult(
            "hard cases",
            f"{name} ({V:,} x {S.shape[1]})",
            "row_diameter",
            ours,
            "tiled matmul",
            theirs,
            f"{screened:.2%} screened, {computed:.2%} computed",
        )


def long_run(V: int, d: int, steps: int) -> Iterator[BenchResult]:
    """Time the search beside all pairs on RowNorm's increment late in a run with a small vocabulary."""
    S = make_increment("rownorm", V, d, steps=steps, panel=1).S
    ours, theirs = paired_seconds(lambda: row_diameter(S), lambda: all_pairs_matmul(S), repeat=5)
    case = f"RowNorm after {steps:,} steps ({V:,} x {d})"
    yield BenchResult("hard cases", case, "row_diameter", ours, "tiled matmul", theirs)


def growth_in_tokens(increment: SampleIncrement, sizes: Sequence[int]) -> Iterator[BenchResult]:
    """Time the search on evenly spaced rows of one increment; the last note has the fitted exponents."""
    samples = [increment.S[:: len(increment.S) // size].contiguous() for size in sizes]
    yield from _growth(f"{increment.name.split()[0]}, V =", sizes, samples, 2)


def growth_in_width(increments: Sequence[SampleIncrement]) -> Iterator[BenchResult]:
    """Time the search on increments of growing width; the last note has the fitted exponents."""
    widths = [i.S.shape[1] for i in increments]
    yield from _growth(f"{increments[0].name.split()[0]}, d =", widths, [i.S for i in increments], 1)


def _growth(label: str, sizes: Sequence[int], samples: Sequence[Tensor], theory: int) -> Iterator[BenchResult]:
    ours, theirs = [], []
    for size, S in zip(sizes, samples, strict=True):
        ours.append(seconds(lambda S=S: row_diameter(S)))  # type: ignore[misc]
        theirs.append(seconds(lambda S=S: all_pairs_matmul(S), repeat=1))  # type: ignore[misc]
        note = ""
        if size == sizes[-1]:
            exponents = exponent(sizes, ours), exponent(sizes, theirs)
            note = "time grows with exponent {:.2f}, all pairs with {:.2f} (in theory {})".format(*exponents, theory)
        yield BenchResult("growth", f"{label} {size:,}", "row_diameter", ours[-1], "tiled matmul", theirs[-1], note)


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return the slope of log time over log size, by least squares."""
    x = torch.tensor(sizes, dtype=torch.float64).log()
    y = torch.tensor(times, dtype=torch.float64).log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def _all_pairs(S: Tensor) -> tuple[str, float, float]:
    """Return name, time and value of the faster all-pairs search."""
    searches = {"blocked cdist": all_pairs_cdist, "tiled matmul": all_pairs_matmul}
    times, values = {}, {}
    for name, search in searches.items():
        start = time.perf_counter()
        values[name] = search(S)
        times[name] = time.perf_counter() - start
    fastest = min(times, key=times.__getitem__)
    return fastest, times[fastest], values[fastest]
