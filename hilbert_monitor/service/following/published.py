"""The numbers that the paper published of its own runs.

Source: "Toward a First-Principles Update Geometry for the Language-Model Head", its tables of model scales and of final
validation loss and LM head geometry, and the paragraph of results: means and sample deviations over seeds 0, 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hilbert_monitor.runs.run import SIZES


@dataclass(frozen=True, slots=True)
class Figure:
    """A published mean, and its sample standard deviation over seeds where there is one."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True, slots=True)
class Published:
    """The published numbers of one model."""

    parameters: int
    updates: int
    tokens: int
    optimizers: Mapping[str, Mapping[str, Figure]]
    ratios: Mapping[str, Figure]
    """AdamW's mean over RowNorm's."""
    difference: Figure
    """Final validation loss, RowNorm minus AdamW, over the pairs."""


def _recipe(loss: Figure, diameter: Figure, rms: Figure) -> dict[str, Figure]:
    return {"validation_loss": loss, "step_diameter": diameter, "perturbation_rms": rms}


def _ratios(diameter: float, rms: float) -> dict[str, Figure]:
    return {"step_diameter": Figure(diameter), "perturbation_rms": Figure(rms)}


PAPER = {
    "190M": Published(
        parameters=SIZES["190M"],
        updates=7_083,
        tokens=3_713_531_904,
        optimizers={
            "AdamW": _recipe(Figure(3.1588, 0.0027), Figure(2.870e-2, 0.140e-2), Figure(9.076e-2, 0.605e-2)),
            "RowNorm": _recipe(Figure(3.1741, 0.0031), Figure(6.369e-4, 0.009e-4), Figure(7.506e-3, 0.017e-3)),
        },
        ratios=_ratios(45.1, 12.1),
        difference=Figure(0.0153, 0.0027),
    ),
    "380M": Published(
        parameters=SIZES["380M"],
        updates=14_464,
        tokens=7_583_301_632,
        optimizers={
            "AdamW": _recipe(Figure(2.9403, 0.0019), Figure(2.303e-2, 0.324e-2), Figure(7.732e-2, 0.874e-2)),
            "RowNorm": _recipe(Figure(2.9494, 0.0024), Figure(4.241e-4, 0.015e-4), Figure(5.667e-3, 0.024e-3)),
        },
        ratios=_ratios(54.3, 13.6),
        difference=Figure(0.0091, 0.0007),
    ),
    "640M": Published(
        parameters=SIZES["640M"],
        updates=24_406,
        tokens=12_795_772_928,
        optimizers={
            "AdamW": _recipe(Figure(2.8156, 0.0024), Figure(1.895e-2, 0.368e-2), Figure(7.555e-2, 0.382e-2)),
            "RowNorm": _recipe(Figure(2.8213, 0.0033), Figure(3.1856e-4, 0.0029e-4), Figure(4.955e-3, 0.025e-3)),
        },
        ratios=_ratios(59.5, 15.2),
        difference=Figure(0.0057, 0.0012),
    ),
}
