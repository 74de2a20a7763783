"""Kernels, waits and bytes of what the monitor computes, counted on the emulated device.

The limits are what was counted, and a little more. A kernel or a wait that creeps in fails here.
"""

import pytest
import torch

from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import deferred_bracket, hilbert_perturbation, row_diameter, row_diameter_bracket
from tests.support.emulation.device import EmulatedDevice

ROWS, WIDTH, PANEL = 8192, 128, 256


def counted(head, measure, rows=ROWS, width=WIDTH):
    """What the device does for a measurement of an increment, and the bytes of the increment."""
    sample = make_increment(head, rows, width, steps=10, panel=PANEL)
    with EmulatedDevice() as device:
        S, H = device.tensor(sample.S), device.tensor(sample.H)
        with device.counted() as counts:
            measure(S, H)
    return counts.total, sample.S.nbytes


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_bounds_take_one_pass_and_never_synchronize(head):
    count, size = counted(head, lambda S, H: deferred_bracket(S))
    assert count.waits == 0
    assert count.kernels <= 70
    assert size < count.bytes < 3 * size


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_an_exact_search_launches_few_kernels_and_waits_a_few_times(head):
    count, _ = counted(head, lambda S, H: row_diameter(S))
    assert count.waits <= 10
    assert count.kernels <= 330
    assert count.flops < 0.05 * 2 * ROWS**2 * WIDTH  # of all pairs


@pytest.mark.parametrize("head", ["adamw", "rownorm"])
def test_a_panel_is_one_product_and_a_few_waits(head):
    count, _ = counted(head, lambda S, H: hilbert_perturbation(S, H))
    product = 2 * ROWS * WIDTH * PANEL
    assert count.waits <= 11
    assert count.kernels <= 95
    assert product <= count.flops < 1.1 * product


def test_kernels_do_not_depend_on_the_size_of_the_head():
    small, large = (counted("rownorm", lambda S, H: row_diameter_bracket(S), rows)[0] for rows in (4096, 8192))
    assert small.kernels == large.kernels


def test_rows_in_half_precision_are_counted_by_their_bytes():
    wide, size = counted("rownorm", lambda S, H: S.double())
    assert wide.bytes == pytest.approx(3 * size)
    narrow, _ = counted("rownorm", lambda S, H: S.to(torch.bfloat16))
    assert narrow.bytes == pytest.approx(1.5 * size)
