"""The spectral norm |S|_2 of a step, its largest singular value, between certified bounds.

|S|_2^2 is the largest eigenvalue of the Gram matrix A = S'S, which is only (d, d). A is summed in fp64. High powers of
it bring out a leading vector v, and v'Av / v'v is a lower bound. From above, a number m is proved to be a bound by a
Cholesky factorisation of m I - A: it exists only if no eigenvalue of A exceeds m.

Both bounds have slack for rounding. With u the unit roundoff of fp64, a sum of V products errs in spectral norm by at
most (V + 2) u |S|_F^2. A factorisation that succeeds proves that m I - A has no eigenvalue below -2 (d + 2) u d m.

Tried and dropped: power iteration on four vectors that starts from the longest rows. It finds nothing where these rows
are orthogonal to the leading direction, has no bound from above, and took two to three times as long on a CPU at V =
50,257 and d = 512 to 1,024: a product with four columns is bound by memory. An eigenvalue solver in place of powers and
factorisation took longer than the sum of A.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .arithmetic import MAX_BYTES, check_rows, full_precision, power_of_two_scale, row_chunks
from .efficiency import Interval

_UNIT = 2.0**-53
_SQUARINGS = 16
_MARGIN, _WIDER = 2.0**-30, 32.0


@full_precision
def spectral_norm(S: Tensor, *, max_bytes: int = MAX_BYTES) -> Interval:
    """Bracket the largest singular value of S: lower <= |S|_2 <= upper.

    The bounds agree to about eight digits, and to four where the largest singular values nearly tie. Draws no random
    number.

    Cost: V d^2 multiplications in fp64, about d / N of the product with a panel of N positions.

    Args:
        S: (V, d), any real floating-point dtype.
        max_bytes: bound on scratch memory beyond three matrices of min(V, d)^2 entries in fp64.

    Returns:
        both bounds, nan if S has an infinity or a nan.
    """
    check_rows("S", S)
    largest = float(S.abs().amax())
    if not math.isfinite(largest):
        return Interval(math.nan, math.nan)
    if largest == 0:
        return Interval(0.0, 0.0)
    scale = power_of_two_scale(largest)  # squares stay in range
    A = _gram(S if len(S) >= S.shape[1] else S.mT, scale, max_bytes)
    trace = float(A.trace())  # |S|_F^2, at least the square of the spectral norm
    lost = (max(S.shape) + 2 + len(A)) * _UNIT * trace
    estimate = _rayleigh_quotient(A)
    least = max(0.0, estimate - lost - 2 * (len(A) + 2) * _UNIT * trace)
    most = _proved_bound(A, estimate, trace) + lost
    down, up = math.sqrt(least) * (1 - 2.0**-50), math.sqrt(most) * (1 + 2.0**-50)
    return Interval(max(0.0, math.nextafter(down / scale, -math.inf)), math.nextafter(up / scale, math.inf))


def _gram(S: Tensor, scale: float, max_bytes: int) -> Tensor:
    """Return the Gram matrix S'S (d, d) of the scaled rows, in fp64."""
    A = torch.zeros(S.shape[1], S.shape[1], dtype=torch.float64, device=S.device)
    for _, chunk in row_chunks(S, torch.float64, max_bytes):
        rows = chunk * scale
        A.addmm_(rows.mT, rows)
    return A


def _rayleigh_quotient(A: Tensor) -> float:
    """Estimate the largest eigenvalue of A from below, by the vector that high powers of A bring out.

    After k squarings the estimate is within a factor d^(2^-k) of the eigenvalue, whatever the spectrum.
    """
    power = A / A.trace()
    for _ in range(_SQUARINGS):
        power = power @ power
        rest = power.trace()  # one for a matrix of rank one
        power /= rest
        if float(rest) > 1 - 1e-12:
            break
    v = power[:, power.diagonal().argmax()]
    return float((v @ (A @ v)) / (v @ v))


def _proved_bound(A: Tensor, estimate: float, trace: float) -> float:
    """Return an upper bound of the largest eigenvalue: the first of a growing sequence that can be proved.

    The trace ends the sequence. It is a bound without proof.
    """
    d = len(A)
    margin = _MARGIN + 32 * d * d * _UNIT
    while (bound := estimate * (1 + margin)) < trace:
        shifted = torch.diag(A.new_full((d,), bound)).sub_(A)
        if int(torch.linalg.cholesky_ex(shifted).info) == 0:
            return bound * (1 + 2 * (d + 2) * d * _UNIT)
        margin *= _WIDER
    return trace * (1 + 2 * d * _UNIT)
