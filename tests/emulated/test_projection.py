"""The plans of the paper's three sizes, from counts of this code, and its opponents on the same device."""

import pytest
import torch

from hilbert_monitor.bench import projection
from hilbert_monitor.bench.opponents import all_pairs_matmul
from hilbert_monitor.emulation import monitor_work
from hilbert_monitor.pretrain import plan as plan_module
from hilbert_monitor.pretrain.device import Device
from hilbert_monitor.pretrain.monitor_cost import rank_work
from hilbert_monitor.pretrain.plan import plan
from hilbert_monitor.pretrain.recipes import recipe

MOST = {"190M": 0.0057, "380M": 0.0038, "640M": 0.0028}
"""Largest share of an update, if every kernel of the monitor were waited for: with room, so that a wait that creeps in
is seen. Our aim is 0.7, 0.4 and 0.3 %."""


@pytest.mark.sweep
def test_the_monitor_is_a_small_share_of_an_update_and_its_search_ten_times_faster_than_all_pairs():
    plan_module.HEADS_ELSEWHERE = ()  # which take as long to count again; this process is the test's own
    monitor_work.UPDATES, monitor_work.BATCH = 4, 16
    for size, most in MOST.items():
        found = plan(recipe(size, head="adamw"))
        share = found.monitor_share["seconds"]
        assert 0 < found.overlapped_share <= share <= most, (size, found.monitor)
        assert found.monitor_share["flops"] < 2e-4
    device, r = Device(), recipe("190M", head="adamw", devices=1, global_batch=32).resolved
    search = device.seconds(rank_work(r).search.count)
    all_pairs = device.seconds(projection.all_pairs_count(r.vocab_size, r.width))
    assert all_pairs > 10 * search, (all_pairs, search)


def test_the_opponents_work_is_that_counted_in_full():
    V, d = 3 * projection.TILE, 8
    whole, grown = projection.counted(all_pairs_matmul, torch.zeros(V, d)), projection.all_pairs_count(V, d)
    assert 0.9 < grown.flops / whole.flops < 1.1
    assert 0.7 < grown.kernels / whole.kernels < 1.4
