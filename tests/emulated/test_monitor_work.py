"""What the monitor does, counted: on one rank and on several, in this process and in one of its own."""

import re

import pytest
import torch

from hilbert_monitor.bench.increments import make_increment
from hilbert_monitor.doctor import prediction
from hilbert_monitor.doctor.device import CheckSizes
from hilbert_monitor.doctor.finding import examine
from hilbert_monitor.emulation import monitor_work
from hilbert_monitor.emulation.device import EmulatedDevice
from hilbert_monitor.emulation.ranks import in_emulated_ranks
from hilbert_monitor.geometry import hilbert_perturbation, row_diameter, row_diameter_bracket


def test_emulated_ranks_find_what_the_whole_matrix_has():
    S, H = torch.randn(2, 600, 16, generator=torch.Generator().manual_seed(0))
    S = S * torch.arange(1, 601)[:, None] ** -0.5
    exact, bounds = row_diameter(S), row_diameter_bracket(S)
    for work in in_emulated_ranks(3, S, lambda rows, device: (row_diameter(rows), row_diameter_bracket(rows))):
        found, bracket = work.result
        assert (found.value, found.pair) == (exact.value, exact.pair)
        assert bracket.lower <= exact.value <= bracket.upper <= 1.2 * bounds.upper
        assert work.collectives > 0
        assert 0 < work.received < 2 * S.nbytes
    panel = [
        w.result for w in in_emulated_ranks(2, S, lambda r, device: hilbert_perturbation(r, device.tensor(H[:50])).rms)
    ]
    assert panel[0] == panel[1]


@pytest.mark.sweep
def test_bounds_move_what_two_passes_move():
    work = monitor_work.monitor_work("adamw", ranks=1, autocast=False)
    S = 4 * monitor_work.ROWS * monitor_work.WIDTH
    assert 7 * S < work.forming.count.bytes < 7.5 * S  # AdamW's two moments, and what is made of them
    assert 2 * S < work.bracket.count.bytes < 4.5 * S
    assert work.forming.count.kernels + work.bracket.count.kernels <= 65
    assert work.bracket.count.waits == 0
    assert work.search.count.flops > work.bracket.count.flops
    assert work.product.count.flops >= 2 * monitor_work.PANEL * S / 4
    chunked = monitor_work.monitor_work("adamw", ranks=1, autocast=False, chunks=4)
    assert chunked.bracket.count.kernels == work.bracket.count.kernels  # norms take one pass, whatever memory there is
    assert chunked.bracket.count.bytes < 1.1 * work.bracket.count.bytes


@pytest.mark.sweep
def test_bytes_grow_as_those_of_a_larger_head_do_and_the_doctor_predicts_by_them():
    """In one process, which counts the three heads once. Fewer updates and positions make the counts no others."""
    monitor_work.UPDATES, monitor_work.BATCH = 4, 16
    monitor_work.PANEL = prediction.PANEL = 64
    bytes_grow_as_those_of_a_larger_head_do()
    the_doctor_predicts_an_accelerator_and_has_no_verdict_of_a_cpu()


def bytes_grow_as_those_of_a_larger_head_do():
    V, d = 24_000, 320
    S = make_increment("rownorm", V, d, steps=10, panel=1).S
    grown = monitor_work.grown_work("rownorm", ranks=1, autocast=False, rows=V, width=d, positions=monitor_work.PANEL)
    for part, measure in ((grown.bracket, monitor_work._bracket), (grown.search, monitor_work._search)):
        counted = monitor_work._shared(1, S, measure).count
        assert 0.8 < part.count.bytes / counted.bytes < 1.6
        assert counted.kernels <= 1.1 * part.count.kernels


def the_doctor_predicts_an_accelerator_and_has_no_verdict_of_a_cpu():
    prediction.HEADS = ("rownorm",)  # another takes as long to count again; this process is the test's own
    sizes = CheckSizes(cloud=(700, 16, 64), updates=2, head=(2048, 32), turns=1, patience=300)
    with EmulatedDevice() as device:
        findings = [examine(check) for check in prediction.checks(device.device, sizes)]
    assert [f.verdict in ("ok", "not known") for f in findings] == [True], findings
    assert all("measured" in f.measured and "predicted" in f.measured for f in findings)
    (finding,) = (examine(check) for check in prediction.checks(torch.device("cpu"), sizes))
    assert finding.verdict == "skipped"
    assert re.search("ms measured.*ms predicted", finding.measured)


@pytest.mark.sweep
def test_counts_made_in_another_process_are_the_same():
    sizes = {"positions": 64, "rows": 2048, "width": 32}
    here = monitor_work.monitor_work("rownorm", ranks=1, autocast=False, **sizes)
    assert monitor_work._counted_apart("rownorm", 1, False, 1, **sizes) == here


def test_kernels_hardly_depend_on_the_size_of_the_head():
    found = []
    for rows, width in ((2048, 64), (8192, 128)):
        S = make_increment("rownorm", rows, width, steps=4, panel=1).S
        (work,) = in_emulated_ranks(1, S, lambda rows, device: row_diameter_bracket(rows))
        found.append(work.counts.total.kernels)
    assert found[0] == found[1]
