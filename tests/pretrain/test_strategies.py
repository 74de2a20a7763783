"""The paper's recipe with its parameters sharded: FSDP2, tensor parallelism and both, beside DDP."""

import logging
import os

import lightning
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.pretrain import module, recipes
from hilbert_monitor.pretrain.module import Places, train
from hilbert_monitor.pretrain.shards import write_shard
from hilbert_monitor.runs.reader import RunReader
from tests.support.ranks import in_ranks
from tests.support.ways import assert_same_way

V, UPDATES, CLIP = 131, 4, 0.3
TINY = {
    "vocab_size": V,  # odd: ranks have shards of different sizes
    "width": 32,
    "blocks": 1,
    "head_dim": 8,
    "context": 16,
    "global_batch": 8,
    "micro_batch": 2,
    "validation_tokens": 32 * 16,
    "panel_size": 64,
    "panel": "paper",
    "updates": UPDATES,
    "diameter_every": 2,
    "perturbation_every": 2,
    "validation_every": 2,
    "checkpoint_every": 2,
    "clip": CLIP,
}


class Norms(lightning.Callback):
    """Keeps the norm of the whole gradient of each step, and the weights before the first."""

    def __init__(self):
        self.norms = []

    def on_train_start(self, trainer, module):
        self.start = {key: whole(p) for key, p in module.named_parameters()}
        trainer.optimizers[0].register_step_post_hook(self.note)

    def note(self, optimizer, *_):
        gradients = [whole(p.grad) for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.cat([g.double().flatten() for g in gradients]).norm()))


class Breaks(lightning.Callback):
    """Ends a run after an update that no checkpoint follows."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise InterruptedError


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def runs_of_a_rank(rank, world, folder, runs):
    """Run recipes one after the other; return of each the gradient norms, the whole weights, how many this rank has,
    and the weights before the run."""
    os.environ["LOCAL_RANK"] = str(rank)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results, monitor = {}, module.HilbertMonitor
    for name, changes in runs.items():
        recipe = recipes.recipe("demo", **TINY | {"devices": world} | changes)
        places, norms = Places(folder / "data", folder / "runs", folder / "checkpoints", name), Norms()
        more = {"accelerator": "cpu", "quiet": True, "monitor": {"strict": True, "on_blowup": []}}
        if name == "unwatched":
            module.HilbertMonitor = lambda **_: lightning.Callback()
        if name == "broken":
            with pytest.raises(InterruptedError):
                train(recipe, places, callbacks=[Breaks()], **more)
        trainer = train(recipe, places, callbacks=[norms], **more)
        module.HilbertMonitor = monitor
        weights = {key: whole(p) for key, p in trainer.lightning_module.named_parameters()}
        params = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
        held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in params)
        results[name] = norms.norms, weights, held, norms.start
    return results


def trained(folder, world, runs):
    """Return the results of all ranks, and the records of the runs."""
    (folder / "data").mkdir()
    draw = np.random.default_rng(0)
    for name, size in (("fineweb_train_0.bin", 30_000), ("fineweb_val_0.bin", 4_000)):
        write_shard(folder / "data" / name, (np.cumsum(draw.integers(0, 5, size)) % V).astype(np.uint16))
    ranks = in_ranks(runs_of_a_rank, folder / "ranks", folder, runs, world=world)
    return ranks, {name: list(RunReader(folder / "runs" / name).steps()) for name in runs if name != "unwatched"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Runs on two ranks."""
    runs = {
        "ddp": {},
        **{name: {"strategy": "fsdp", "loss_chunk": 10} for name in ("fsdp", "broken", "unwatched")},
        "tp=2": {"strategy": "tp=2", "loss_chunk": 10},
        "ddp-adamw": {"head": "adamw"},
    }
    return trained(tmp_path_factory.mktemp("two"), 2, runs)


def check(found, name, expected, other):
    """Compare a run with one under DDP, whose sums are in another order."""
    (ranks, records), (other_ranks, other_records) = found, expected
    a, b = records[name], other_records[other]
    assert [r.step for r in a] == list(range(1, UPDATES + 1))
    for mine, theirs in zip(a, b, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.learning_rate == theirs.learning_rate
        for field in ("diameter", "diameter_lower", "perturbation_rms", "validation_loss"):
            value = getattr(theirs, field)
            assert getattr(mine, field) == (None if value is None else pytest.approx(value, rel=1e-4)), field
        if not name.startswith("tp"):  # where a rank reads what two read
            assert mine.train_loss == pytest.approx(theirs.train_loss, rel=1e-5)
    assert {r.step for r in a if r.validation_loss is not None} == {2, 4}
    _, expected_weights, _, start = other_ranks[0][other]
    for rank in ranks:
        norms, weights, _, _ = rank[name]
        assert norms == pytest.approx(other_ranks[0][other][0], rel=1e-4)
        assert max(norms) == pytest.approx(CLIP, rel=1e-4)  # some were clipped, or this shows nothing
        assert weights.keys() == expected_weights.keys()
        assert_same_way(*([named[key] for key in weights] for named in (weights, expected_weights, start)))


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["fsdp", "tp=2"])
def test_a_sharded_run_follows_its_ddp_run_to_rounding(two, strategy):
    check(two, strategy, two, "ddp")


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["fsdp", "tp=2"])
def test_a_rank_has_its_part_of_every_parameter(two, strategy):
    ranks, _ = two
    everything = ranks[0]["ddp"][2]
    held = [rank[strategy][2] for rank in ranks]
    assert sum(held) == everything
    assert max(held) <= 0.51 * everything


@pytest.mark.sweep
def test_a_sharded_run_that_breaks_and_is_resumed_ends_with_the_weights_of_one_that_did_not(two):
    ranks, records = two
    for rank in ranks:
        assert all(torch.equal(w, rank["fsdp"][1][key]) for key, w in rank["broken"][1].items())
        assert rank["broken"][0] == rank["fsdp"][0][2:]  # it began after its last checkpoint
    for mine, other in zip(records["broken"], records["fsdp"], strict=True):
        assert (mine.step, mine.tokens, mine.diameter) == (other.step, other.tokens, other.diameter)


@pytest.mark.sweep
def test_a_sharded_run_is_the_same_without_the_monitor(two):
    for rank in two[0]:
        assert all(torch.equal(w, rank["fsdp"][1][key]) for key, w in rank["unwatched"][1].items())


@pytest.mark.sweep
def test_four_ranks_in_tensor_parallel_pairs_follow_the_ddp_run_of_two(two, tmp_path):
    """Two of them read data, so that the panel is that of two ranks."""
    four = trained(tmp_path, 4, {"tp=2": {"head": "adamw", "strategy": "tp=2"}})
    check(four, "tp=2", two, "ddp-adamw")
    assert max(rank["tp=2"][2] for rank in four[0]) <= 0.27 * two[0][0]["ddp-adamw"][2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--strategy", "zero"], "the strategy is ddp, fsdp or tp=N with a number of ranks, got 'zero'"),
        (["--strategy", "tp=0"], "the strategy is ddp, fsdp or tp=N"),
        (["--strategy", "tp=3"], "strategy tp=3 needs a multiple of 3 devices, got 8"),
        (["--strategy", "tp=8", "--set=width=256"], "splits 4 attention heads: choose an N that divides them"),
        (["--strategy", "fsdp", "--set=compile=true"], "compile=true is for strategy ddp"),
        (["--strategy", "tp=2", "--set=micro_batch=48"], "on 8 devices in groups of 2: choose --set micro_batch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_strategy_that_cannot_be_run_is_refused_in_one_sentence(arguments, said):
    command = ["pretrain", "--size", "190M", "--devices", "8", "--accelerator", "cpu", *arguments]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_run_is_not_resumed_under_another_way_of_saving(tmp_path):
    whole_model, sharded = recipes.recipe("demo"), recipes.recipe("demo", devices=2, micro_batch=8, strategy="fsdp")
    places = Places(tmp_path, checkpoints=tmp_path, name="run")
    assert places.last_checkpoint(whole_model) is places.last_checkpoint(sharded) is None
    (tmp_path / "run" / "half.ckpt").mkdir(parents=True)  # killed while it was saved
    assert places.last_checkpoint(sharded) is None
    (tmp_path / "run" / "last.ckpt").touch()
    assert places.last_checkpoint(whole_model) == tmp_path / "run" / "last.ckpt"
    with pytest.raises(ValueError, match="another strategy than fsdp"):
        places.last_checkpoint(sharded)
