"""Rows on several ranks: the answers of the whole matrix, equal on every rank; and faults that all ranks survive."""

import math
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from functools import cache
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.geometry import (
    RowSource,
    center_rows,
    covering_radius,
    diameter,
    hilbert_perturbation,
    logits,
    norms,
    points,
    projected_row_norm,
    radius,
    row_diameter,
    row_diameter_bracket,
    row_statistics,
    spectral_norm,
)
from hilbert_monitor.geometry.points import CentredRows
from tests.support import warm
from tests.support.ranks import in_ranks
from tests.support.shards import sharded

KINDS = ("gauss", "heavy", "sphere", "signs", "equal", "nan", "inf", "tiny", "bf16", "huge")
SHAPES = {
    (1001, 16): KINDS,
    (3000, 40): ("gauss", "heavy", "sphere", "signs"),
    (5, 3): KINDS,
    (2, 4): KINDS,
    (1, 3): ("gauss", "equal", "nan", "inf"),
}
"""Rows and columns, and the kinds of rows that are measured: all where rows are many, few, and fewer than ranks."""


def rows_of(V, d, kind):
    draw = torch.Generator().manual_seed(V + d)
    S = torch.randn(V, d, generator=draw)
    if kind in ("nan", "inf"):
        S[V // 2, 0] = float(kind)
    made = {
        "heavy": lambda: S / torch.rand(V, 1, generator=draw),
        "sphere": lambda: S / torch.linalg.vector_norm(S, dim=1, keepdim=True),
        "signs": S.sign,
        "equal": lambda: torch.full((V, d), 0.3),
        "tiny": lambda: S * 1e-30,
        "bf16": S.bfloat16,
        "huge": lambda: S.double() * 1e200,
    }
    return made.get(kind, lambda: S)()


def states(d):
    return torch.randn(20, d, generator=torch.Generator().manual_seed(d))


def same(a, b, rel=1e-12):
    return a == b or (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=rel)


def distance(S, i, j):
    return math.dist(S[i].double().tolist(), S[j].double().tolist())  # which does not overflow


def answers(S, H):
    """All that is measured of rows, in plain numbers."""
    exact, bracket, panel = row_diameter(S), row_diameter_bracket(S), hilbert_perturbation(S, H)
    spectral, radius = spectral_norm(S), covering_radius(S, diameter=exact)
    return {
        "exact": (exact.value, exact.upper, exact.pair, exact.nonfinite_rows),
        "bracket": (bracket.lower, bracket.upper, bracket.pair, bracket.nonfinite_rows),
        "panel": (panel.rms, panel.max, panel.position, panel.pair, panel.nonfinite_rows, panel.delta.tolist()),
        "waste": row_statistics(S).gauge_waste,
        "spectral": (spectral.lower, spectral.upper),
        "radius": (radius.lower, radius.upper, radius.ball_radius, radius.nonfinite_rows),
        "ball": (radius.center.tolist(), radius.support.tolist(), radius.weights.tolist()),
    }


def _measured_by_parts(rank, world):
    """For every case what the ranks give, and on the first what the whole matrix does."""
    results = {}
    for (V, d), kinds in SHAPES.items():
        for kind in kinds:
            S, H = rows_of(V, d, kind), states(d)
            results[V, d, kind] = answers(sharded(S), H), None if rank else answers(S, H), S
    return results


@pytest.fixture(scope="module")
def found_by(tmp_path_factory):
    """What so many ranks found of a case, in the order of the ranks. They start once for all of their cases."""
    ranks = cache(lambda world: in_ranks(_all_cases, tmp_path_factory.mktemp("ranks"), world=world))
    return lambda case, world: [rank[case.__name__] for rank in ranks(world)]


def _all_cases(rank, world):
    return {case.__name__: case(rank, world) for case in CASES[world]}


@pytest.fixture
def measured(found_by):
    return found_by(_measured_by_parts, 3)


def test_every_rank_has_the_same_answers(measured):
    first = measured[0]
    for other in measured[1:]:
        for case, (ours, _, _) in first.items():
            assert repr(other[case][0]) == repr(ours), case


def test_the_exact_diameter_is_that_of_the_whole_matrix_and_in_the_bracket(measured):
    for case, (ours, whole, S) in measured[0].items():
        (value, upper, (i, j), bad), true = ours["exact"], whole["exact"]
        lower, above, ends, as_bad = ours["bracket"]
        assert same(value, true[0]), case
        assert bad == as_bad == true[3], case
        assert not value > upper, case
        if math.isfinite(value):
            assert len(S) == 1 or same(distance(S, i, j), value), case
            assert lower * (1 - 1e-12) <= value <= above <= 2.1 * lower + 1e-300, case
            assert same(distance(S, *ends), lower), case
        else:
            assert same(lower, value), case
            assert same(above, value), case


def test_the_panel_the_waste_and_the_spectral_norm_are_those_of_the_whole_matrix(measured):
    for case, (ours, whole, _) in measured[0].items():
        for a, b in zip(ours["panel"][-1], whole["panel"][-1], strict=True):
            assert same(a, b, rel=2e-5) or abs(a - b) <= 1e-5 * whole["panel"][1], case
        assert ours["panel"][4] == whole["panel"][4], case
        assert same(ours["waste"], whole["waste"], rel=1e-6) or abs(ours["waste"] - whole["waste"]) < 1e-9, case
        (low, high), (least, most) = ours["spectral"], whole["spectral"]
        assert math.isnan(low) == math.isnan(least), case
        assert math.isnan(low) or (low <= most * (1 + 1e-12) and least <= high * (1 + 1e-12)), case


def test_the_radius_is_bracketed_as_that_of_the_whole_matrix_with_certificates(measured):
    for case, (ours, whole, S) in measured[0].items():
        (lower, upper, ball, bad), (center, support, weights) = ours["radius"], ours["ball"]
        least, most, _, as_bad = whole["radius"]
        assert bad == as_bad, case
        if not math.isfinite(most):
            assert same(lower, least), case
            assert same(upper, most), case
            continue
        assert lower <= most, case
        assert least <= upper <= 1.02 * lower, case
        size = 2.0 ** -math.frexp(max(float(S.double().abs().max()), 1e-300))[1]  # keeps squares in range
        x = S.double() * size
        farthest = float((x - torch.tensor(center, dtype=torch.float64) * size).norm(dim=1).max())
        assert farthest <= ball * size * (1 + 1e-12) + 1e-15, case
        w, core = torch.tensor(weights, dtype=torch.float64), x[support]
        assert lower * size <= math.sqrt(float(w @ (core - w @ core).square().sum(1))) * (1 + 1e-12) + 1e-15, case


def _without_padding(rank, world):
    """Rows past the vocabulary are cut by each rank; all of the last rank's are."""
    V, d, padded = 700, 16, 1100
    S = rows_of(padded, d, "gauss")
    S[V:] *= 100
    return [("without padding", answers(sharded(S, first=V), states(d)), answers(S[:V], states(d)), True)]


def _layouts(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for V, d in ((1001, 16), (3, 4)):
        S, H = rows_of(V, d, "gauss"), states(d)
        head = torch.nn.Linear(d, V, bias=False)
        with torch.no_grad():
            head.weight.copy_(S)
        parallelize_module(head, mesh["tp"], ColwiseParallel())
        fully_shard(head, mesh=mesh["dp"])
        whole, results_of_rows = answers(S, H), [center_rows(S), projected_row_norm(S)]
        layouts = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Replicate())]
        matrices = [distribute_tensor(S, mesh, layout, src_data_rank=None) for layout in layouts]
        for matrix in (*matrices, head.weight.detach()):
            there = [center_rows(matrix), projected_row_norm(matrix)]
            same_rows = all(
                torch.allclose(x.full_tensor(), y, atol=1e-6) and x.placements == matrix.placements
                for x, y in zip(there, results_of_rows, strict=True)
            )
            formed = RowSource(2 * matrix, matrix, form=torch.sub)
            for source in (matrix, formed):
                results.append((str(matrix.placements), answers(source, H), whole, same_rows))
    return results


@pytest.mark.parametrize(("case", "world"), [(_without_padding, 3), (_layouts, 4)])
def test_any_layout_of_rows_over_a_mesh_gives_the_answers_of_the_whole_matrix(found_by, case, world):
    """Replicas, nested shards, and the strided ones of FSDP over tensor parallelism; with empty shards; and padding."""
    ranks = found_by(case, world)
    assert all(repr(results) == repr(ranks[0]) for results in ranks)
    for layout, ours, whole, same_rows in ranks[0]:
        assert same(ours["exact"][0], whole["exact"][0]), layout
        assert ours["exact"][2] == whole["exact"][2], layout
        assert ours["bracket"][0] <= whole["exact"][0] <= ours["bracket"][1], layout
        assert same(ours["panel"][0], whole["panel"][0], rel=1e-5), layout
        assert ours["panel"][3] == whole["panel"][3], layout
        assert same(ours["waste"], whole["waste"], rel=1e-6), layout
        assert ours["radius"][0] <= whole["radius"][1], layout
        assert whole["radius"][0] <= ours["radius"][1], layout
        assert same_rows, layout


def _moved(rank, world):
    S, counts = rows_of(20_000, 64, "heavy"), []
    for measure in (row_diameter_bracket, row_diameter, covering_radius):
        shards = sharded(S)
        measure(shards)
        counts.append((shards.ranks.collectives, shards.ranks.bytes / (S[0].nbytes * (world - 1) / world)))
    return counts  # collectives, rows moved


@pytest.mark.sweep
def test_a_bracket_moves_its_sample_and_a_few_rows_and_an_exact_search_its_long_rows(tmp_path):
    for measured, most, rows in zip(in_ranks(_moved, tmp_path)[0], (8, 10, 12), (600, 2000, 900), strict=True):
        assert measured[0] <= most
        assert measured[1] <= rows


def _work(rank, world):
    """Shares of the rows loaded and the pairs looked at by this rank; and the number of collectives."""
    loaded, searches, shares = [], [], {}
    load, run = points.CentredRows.points, diameter.DiameterSearch.run

    def counted(self, rows, out=None):
        loaded.append(len(rows))
        return load(self, rows, out)

    def kept(self):
        searches.append(self)
        run(self)

    for head in ("adamw", "rownorm"):
        S = make_increment(head, 4000, 64, panel=1).S
        longest_first = S.norm(dim=1).argsort(descending=True)
        S = S[torch.cat([longest_first[other::world] for other in range(world)])]  # each rank has its share of them
        with (
            mock.patch.object(points.CentredRows, "points", counted),
            mock.patch.object(diameter.DiameterSearch, "run", kept),
        ):
            loaded.clear()
            whole = row_diameter(S)
            rows_of_all = sum(loaded)
            loaded.clear()
            shards = sharded(S)
            row_diameter(shards)
        pairs = sum(searches[-1].own_work) / (whole.pairs_screened + whole.pairs_computed)
        shares[head] = sum(loaded) / rows_of_all, pairs, shards.ranks.collectives
    return shares


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_with_its_share_of_long_rows_does_its_share_of_the_work_in_ten_collectives(found_by, world):
    for shares in found_by(_work, world):
        for case, (rows_loaded, pairs, collectives) in shares.items():
            # the guess compares as many rows on every rank, which is a tenth of the pairs of so small a matrix
            assert rows_loaded <= 1.2 / world, case
            assert pairs <= 1.2 / world + 0.1, case
            assert collectives <= 10, case


def _with_other_directions(rank, world):
    """Rank one would compute other directions from the same numbers, as another processor might."""
    S, real = rows_of(3000, 160, "gauss"), diameter.leading_directions
    with mock.patch.object(diameter, "leading_directions", lambda *args: real(*args).flip(1) if rank else real(*args)):
        return row_diameter(sharded(S)).value == row_diameter(S).value


def _short_rows_on_one_rank(rank, world):
    """All long rows, many of them equal, are on the first rank: the second has no partner."""
    long = rows_of(100, 16, "sphere").repeat(10, 1)
    S = torch.cat([torch.cat([long, -long]), torch.full((2000, 16), 1e-3)])
    return row_diameter(sharded(S)).value == row_diameter(S).value


@pytest.mark.parametrize("case", [_with_other_directions, _short_rows_on_one_rank])
def test_ranks_that_differ_find_the_diameter_of_the_whole_matrix(found_by, case):
    assert found_by(case, 2) == [True, True]


def _refused(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"sharded by rows.*redistribute it to Shard\(0\)"):
        row_diameter(distribute_tensor(rows_of(10, 4, "gauss"), mesh, [Shard(1)], src_data_rank=None))
    with pytest.raises(ValueError, match=r"\(V, d\) matrix"):
        row_diameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None))
    head = distribute_tensor(rows_of(10, 4, "gauss"), mesh, [Shard(0)], src_data_rank=None)
    with pytest.raises(ValueError, match="DTensor in an inner source"):
        row_diameter(RowSource(RowSource(head)))
    return True


def test_columns_on_several_ranks_are_refused_with_what_to_do(found_by):
    assert found_by(_refused, 2) == [True, True]


CASES = {
    2: (_work, _with_other_directions, _short_rows_on_one_rank, _refused),
    3: (_measured_by_parts, _without_padding),
    4: (_layouts, _work),
}
"""What so many ranks are started for."""


# Faults


def waste(S):
    return row_statistics(S).gauge_waste


def panel(S):
    return hilbert_perturbation(S, states(32)).max


FAULTS = [
    (row_diameter, diameter, "pad"),
    (row_diameter, CentredRows, "project"),
    (row_diameter, diameter, "screen_tables"),
    (row_diameter, diameter, "largest_bounds"),
    (row_diameter, diameter.DiameterSearch, "_compute_in_full"),
    (row_diameter_bracket, CentredRows, "norms"),
    (row_diameter_bracket, CentredRows, "points"),
    (covering_radius, CentredRows, "norms"),
    (covering_radius, radius, "_best_weights"),
    (panel, logits._Panel, "run"),
    (panel, logits._Panel, "logits"),
    (spectral_norm, RowSource, "chunks"),
    (waste, norms, "compute_dtype"),
]
"""A measurement, and a function inside it that fails on one rank."""


def _each_fault(rank, world):
    S = rows_of(3000, 32, "heavy")
    failures = []
    for measure, place, name in FAULTS:
        real = getattr(place, name)
        if rank == world - 1:

            def broken(*args, **kwargs):
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            setattr(place, name, broken)
        try:
            measure(sharded(S))
            failures.append("none")
        except RuntimeError as error:
            failures.append(f"{type(error).__name__}: {error}")
        setattr(place, name, real)
        again, whole = measure(sharded(S)), measure(S)
        number = getattr(whole, "lower", whole)
        assert getattr(again, "lower", again) == pytest.approx(number, rel=0.02), name
    return failures


@pytest.mark.sweep
def test_a_rank_that_fails_inside_a_measurement_fails_on_all_and_the_next_one_works(tmp_path):
    *others, broken = in_ranks(_each_fault, tmp_path, world=3, patience=120)
    for (measure, _, name), failure, *theirs in zip(FAULTS, broken, *others, strict=True):
        assert failure.startswith("RuntimeError: CUDA error"), (measure, name)
        assert all(other.startswith("RankError: another rank failed") for other in theirs), (measure, name, theirs)


def _killed(rank, world, folder, patience):
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    timeout = timedelta(seconds=patience)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world, timeout=timeout)
    if rank == 1:
        diameter.largest_bounds = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        row_diameter(sharded(rows_of(3000, 32, "heavy")))
    except Exception as error:
        (folder / f"{rank}.txt").write_text(f"{time.monotonic() - start:.1f}\n{type(error).__name__}: {error}")
    os._exit(0)


def test_a_rank_that_is_killed_ends_the_others_with_the_error_of_their_group(tmp_path):
    world, patience = 3, 30
    start = multiprocessing.get_context(warm.METHOD).Process
    ranks = [start(target=_killed, args=(rank, world, tmp_path, patience)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(4 * patience)
    hung = [rank for rank in ranks if rank.is_alive()]
    for rank in hung:
        rank.kill()
    assert not hung
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL, 0]
    for rank in (0, 2):
        seconds, error = (tmp_path / f"{rank}.txt").read_text().split("\n", 1)
        assert float(seconds) <= 2 * patience
        assert "RankError" not in error
        assert "gloo" in error.lower() or "Connection closed" in error or "timed out" in error.lower()


def _sentence(measure, *args, **options):
    try:
        measure(*args, **options)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _different_inputs(rank, world):
    S, H = rows_of(3000, 32, "heavy"), states(32)
    shards, odd = sharded(S), rank == 1
    bracket = row_diameter_bracket(S)
    other = replace(bracket, pair=(0, 1))
    return [
        _sentence(row_diameter, sharded(S[:, :16] if odd else S)),
        _sentence(row_diameter, sharded(S.double() if odd else S)),
        _sentence(row_diameter_bracket, sharded(S[:100] if odd else S)),
        _sentence(spectral_norm, sharded(S.long() if odd else S)),
        _sentence(row_diameter, replace(shards, rows=RowSource(S), ids=torch.arange(len(S))) if odd else shards),
        _sentence(hilbert_perturbation, shards, H[:7] if odd else H),
        _sentence(hilbert_perturbation, shards, H[:, :7] if odd else H),
        _sentence(covering_radius, shards, diameter=other if odd else bracket),
        _sentence(row_diameter, shards, max_bytes=64 if odd else 2**28),
        "works" if row_diameter(shards).value == row_diameter(S).value else "broken",
    ]


def test_ranks_with_different_inputs_all_say_so_and_go_on(tmp_path):
    first, second = in_ranks(_different_inputs, tmp_path, world=2, patience=120)
    alike = "ValueError: ranks must measure one matrix alike, got "
    for sentences in (first, second):
        width, dtype, height, _, overlap, positions, _, pair, _, works = sentences
        for sentence in (width, dtype, height, positions, pair):
            assert alike in sentence
        assert "(3000, 32) torch.float32" in width
        assert "(3000, 16) torch.float32" in width
        assert "torch.float64" in dtype
        assert (
            overlap == "ValueError: ranks must hold each of 3000 rows once, got 1500, 3000 rows: check the ids of each"
        )
        assert works == "works"
    assert second[3].startswith("TypeError: S must be a real floating-point tensor")
    assert second[6].startswith("ValueError: S and H must have one width")
    assert "max_bytes=64" in second[8]
    assert all(first[case].startswith("RankError: another rank failed") for case in (3, 6, 8))


def _outside_the_mesh(rank, world):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    S = rows_of(3000, 32, "heavy")
    head = distribute_tensor(S, DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
    return _sentence(row_diameter, head) if rank == 2 else row_diameter(head).value == row_diameter(S).value


def test_a_rank_outside_the_mesh_is_told_so_and_the_others_do_not_wait_for_it(tmp_path):
    *inside, outside = in_ranks(_outside_the_mesh, tmp_path, world=3, patience=120)
    assert inside == [True, True]
    assert outside.startswith("ValueError: rank 2 is not in the mesh of S")
