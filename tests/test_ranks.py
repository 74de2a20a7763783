"""Ranks of the tests that do not meet are started once more, and no others."""

from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support import ranks

CLOSED = "Gloo connectFullMesh failed with [pair.cc:144] no error: Connection closed by peer"


def unlucky(rank, function, world, folder, args):
    """A rank whose connections are closed when it meets the others for the first time."""
    error = RuntimeError(CLOSED) if Path(folder).name != "again" else None
    with mock.patch.object(dist, "init_process_group", side_effect=error, wraps=dist.init_process_group):
        ranks._rank(rank, function, world, folder, args)


def numbered(rank, world, start):
    if start is None:
        raise RuntimeError("Connection closed by peer")
    return start + rank


def test_ranks_that_do_not_meet_start_once_more(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "_rank", unlucky)
    assert ranks.in_ranks(numbered, tmp_path, 5) == [5, 6]


def test_ranks_that_have_met_do_not_start_again_whatever_they_raise(tmp_path):
    with pytest.raises(mp.ProcessRaisedException, match="Connection closed by peer"):
        ranks.in_ranks(numbered, tmp_path, None)
    assert not (tmp_path / "again").exists()
