"""Runs of the paper's recipe: its schedule, killed and resumed, on other devices, and sharded next to DDP."""

import logging
import os
import time

import lightning
import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from hilbert_monitor.pretrain import recipe as recipes
from hilbert_monitor.pretrain.data import write_shard
from hilbert_monitor.pretrain.train import RunPaths, train
from hilbert_monitor.runs.reader import RunReader
from tests.support.ranks import in_ranks
from tests.support.warm import Program
from tests.support.ways import assert_same_way

TINY = {
    "vocab_size": 128,
    "width": 32,
    "blocks": 1,
    "head_dim": 16,
    "context": 16,
    "global_batch": 8,
    "micro_batch": 4,
    "validation_tokens": 32 * 16,
    "panel_size": 64,
}
MONITOR = {"strict": True, "on_blowup": []}


def write_data(folder, V=128):
    """Write shards of tokens that follow each other with some regularity."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    for name, size in (("fineweb_train_0.bin", 30_000), ("fineweb_train_1.bin", 20_000), ("fineweb_val_0.bin", 4_000)):
        write_shard(folder / name, np.cumsum(draw.integers(0, 5, size)) % V)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def fit(data, tmp_path, name="run", callbacks=(), **changes):
    recipe = recipes.recipe("demo", **TINY | changes)
    paths = RunPaths(data, tmp_path / "runs", tmp_path / "checkpoints", name)
    return train(recipe, paths, accelerator="cpu", quiet=True, callbacks=callbacks, monitor=MONITOR)


def records(folder, name="run"):
    return list(RunReader(folder / "runs" / name).steps())


class Breaks(lightning.Callback):
    """Ends a run before its n-th micro-batch."""

    def __init__(self, n):
        self.left = n

    def on_train_batch_start(self, *_):
        self.left -= 1
        if not self.left:
            raise InterruptedError


def test_neither_accumulation_nor_a_chunked_loss_changes_a_number_beyond_rounding(data, tmp_path):
    for name, changes in (("plain", {}), ("micro", {"micro_batch": 2}), ("chunked", {"loss_chunk": 10})):
        fit(data, tmp_path, name, **{"updates": 11, "validation_every": 4, "micro_batch": 8} | changes)
        plain, other = records(tmp_path, "plain"), records(tmp_path, name)
        assert [(r.step, r.tokens) for r in other] == [(n, n * 8 * 16) for n in range(1, 12)]
        assert [r.step for r in other if r.validation_loss is not None] == [4, 8, 11]
        assert [r.train_loss for r in other] == pytest.approx([r.train_loss for r in plain], rel=1e-4)
        assert other[-1].validation_loss == pytest.approx(plain[-1].validation_loss, rel=1e-4)
        assert other[-1].perturbation_rms == pytest.approx(plain[-1].perturbation_rms, rel=1e-2)
    info = RunReader(tmp_path / "runs" / "plain").info
    assert info.config.items() >= {"parameters": 2 * 128 * 32 + 16 * 32**2, "updates": 11, "head": "rownorm"}.items()
    assert (info.seed, info.head_optimizer) == (0, "RowNorm")


def test_the_first_update_has_no_learning_rate_and_the_last_a_tenth(data, tmp_path):
    fit(data, tmp_path, updates=20, head="adamw")
    steps, peak = records(tmp_path), 2.048 / 32
    assert (steps[0].learning_rate, steps[0].diameter_lower) == (0.0, 0.0)
    for t, step in enumerate(steps):  # w = 2
        scale = t / 2 if t < 2 else 0.1 + 0.45 * (1 + np.cos(np.pi * (t - 2) / (20 - 2 - 1)))
        assert step.learning_rate == pytest.approx(peak * scale)


def test_a_recipe_with_a_trust_region_limits_the_steps_of_the_head(data, tmp_path):
    fit(data, tmp_path, head="adamw", trust_region=1e-3, updates=6, warmup=0.5)
    assert all(record.trust_limit == 1e-3 and record.made_diameter <= 1e-3 for record in records(tmp_path))
    assert max(record.diameter_lower for record in records(tmp_path)) > 1e-3


def test_under_bf16_autocast_parameters_and_state_stay_fp32(data, tmp_path):
    trainer = fit(data, tmp_path, updates=3, precision="bf16-mixed", loss_chunk=16)
    assert all(p.dtype == torch.float32 for p in trainer.lightning_module.parameters())
    states = trainer.optimizers[0].state_dict()["state"].values()
    assert all(v.dtype == torch.float32 for state in states for v in state.values() if isinstance(v, torch.Tensor))
    assert records(tmp_path)[-1].perturbation_rms > 0


# Checkpoints


def test_a_run_that_breaks_within_a_resumed_update_resumes_from_before_it(data, tmp_path):
    fit(data, tmp_path, "whole", updates=5, checkpoint_every=2)
    for micro_batches in (6, 2):  # two of them are an update
        with pytest.raises(InterruptedError):
            fit(data, tmp_path, callbacks=[Breaks(micro_batches)], updates=5, checkpoint_every=2)
    fit(data, tmp_path, updates=5, checkpoint_every=2)
    whole, broken = (records(tmp_path, name) for name in ("whole", "run"))
    assert [(r.step, r.train_loss, r.tokens) for r in whole] == [(r.step, r.train_loss, r.tokens) for r in broken]


@pytest.mark.parametrize("micro", [2, 8])
def test_a_run_resumes_with_another_accumulation(data, tmp_path, micro):
    numbers = {"updates": 9, "checkpoint_every": 3, "validation_every": 4, "perturbation_every": 4}
    fit(data, tmp_path, "whole", **numbers)
    with pytest.raises(InterruptedError):
        fit(data, tmp_path, callbacks=[Breaks(8)], **numbers)  # after three updates of two micro-batches
    resumed = fit(data, tmp_path, micro_batch=micro, **numbers)
    assert resumed.global_step == 9
    a, b = records(tmp_path, "whole"), records(tmp_path)
    assert [(r.step, r.tokens, r.learning_rate) for r in a] == [(r.step, r.tokens, r.learning_rate) for r in b]
    assert [r.step for r in b if r.validation_loss is not None] == [4, 8, 9]
    assert [r.train_loss for r in b] == pytest.approx([r.train_loss for r in a], rel=1e-5)


def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(data, tmp_path):
    def start(name):
        folder, numbers = tmp_path / name, TINY | {"updates": 60, "checkpoint_every": 7, "head": "adamw"}
        paths = [f"--data={data}", f"--runs={folder / 'runs'}", f"--checkpoints={folder / 'checkpoints'}"]
        sets = [f"--set={key}={value}" for key, value in numbers.items()]
        flags = ["--size=demo", "--accelerator=cpu", "--quiet", "--name=run"]
        return Program("-m", "hilbert_monitor", "pretrain", *flags, *paths, *sets)

    whole, killed = start("whole"), start("killed")
    log = RunReader(tmp_path / "killed" / "runs" / "run")
    deadline = time.monotonic() + 300
    while sum(1 for _ in log.steps()) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()
    assert 10 <= max(r.step for r in log.steps()) < 60
    for program in (start("killed"), whole):
        assert program.wait() == 0, program.output
    files = (tmp_path / name / "checkpoints" / "run" / "last.ckpt" for name in ("whole", "killed"))
    a, b = (torch.load(file, weights_only=False)["state_dict"] for file in files)
    assert all(torch.equal(a[name], b[name]) for name in a)
    steps = list(log.steps())
    assert [r.step for r in steps] == list(range(1, 61))
    assert len(log.attempts) == 2
    assert log.attempts[1].first_step % 7 == 0
    clean = {r.step: r for r in records(tmp_path / "whole")}
    assert all(r.diameter_lower == clean[r.step].diameter_lower and r.tokens == clean[r.step].tokens for r in steps)


def test_a_run_does_not_resume_from_checkpoints_of_another_kind(tmp_path):
    whole_model, sharded = recipes.recipe("demo"), recipes.recipe("demo", devices=2, micro_batch=8, strategy="fsdp")
    paths = RunPaths(tmp_path, checkpoints=tmp_path, name="run")
    assert paths.last_checkpoint(whole_model) is paths.last_checkpoint(sharded) is None
    (tmp_path / "run" / "half.ckpt").mkdir(parents=True)  # killed while it was saved
    assert paths.last_checkpoint(sharded) is None
    (tmp_path / "run" / "last.ckpt").touch()
    assert paths.last_checkpoint(whole_model) == tmp_path / "run" / "last.ckpt"
    with pytest.raises(ValueError, match="another strategy than fsdp"):
        paths.last_checkpoint(sharded)


# Ranks

V, UPDATES, CLIP = 131, 4, 0.3  # ranks have shards of different sizes
ON_RANKS = TINY | {
    **{"vocab_size": V, "head_dim": 8, "micro_batch": 2, "panel": "paper", "updates": UPDATES, "clip": CLIP},
    **{"diameter_every": 2, "perturbation_every": 2, "validation_every": 2, "checkpoint_every": 2},
}


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


class Norms(lightning.Callback):
    """Collects the norms of whole gradients, and the weights before the first step."""

    def __init__(self):
        self.norms = []

    def on_train_start(self, trainer, module):
        self.start = {key: whole(p) for key, p in module.named_parameters()}
        trainer.optimizers[0].register_step_post_hook(self.note)

    def note(self, optimizer, *_):
        gradients = [whole(p.grad) for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.cat([g.double().flatten() for g in gradients]).norm()))


def runs_of_a_rank(rank, world, folder, runs):
    """Run recipes. Return for each the gradient norms, the whole weights, how many this rank has, and the start."""
    os.environ["LOCAL_RANK"] = str(rank)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {}
    for name, changes in runs.items():
        recipe = recipes.recipe("demo", **ON_RANKS | {"devices": world} | changes)
        paths, norms = RunPaths(folder / "data", folder / "runs", folder / "checkpoints", name), Norms()
        more = {"accelerator": "cpu", "quiet": True, "monitor": MONITOR}
        if name in ("broken", "moved"):
            with pytest.raises(InterruptedError):  # after the checkpoint of two updates
                train(recipe, paths, callbacks=[Breaks(3 * recipe.accumulation)], **more)
        if name != "moved":
            trainer = train(recipe, paths, callbacks=[norms], **more)
            weights = {key: whole(p) for key, p in trainer.lightning_module.named_parameters()}
            params = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
            held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in params)
            results[name] = norms.norms, weights, held, norms.start
    return results


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Runs on two ranks: folder, results of each rank."""
    folder = tmp_path_factory.mktemp("two")
    fsdp, tp = ({"strategy": strategy, "loss_chunk": 10} for strategy in ("fsdp", "tp=2"))
    write_data(folder / "data", V)
    runs = {"ddp": {}, "moved": {}, "fsdp": fsdp, "broken": fsdp, "tp=2": tp}
    return folder, in_ranks(runs_of_a_rank, folder / "ranks", folder, runs)


def check(found, name, expected):
    """Compare a run with the DDP run of two ranks, whose sums are in another order."""
    (folder, ranks), (other_folder, other_ranks) = found, expected
    for mine, theirs in zip(records(folder, name), records(other_folder, "ddp"), strict=True):
        assert (mine.step, mine.tokens, mine.learning_rate) == (theirs.step, theirs.tokens, theirs.learning_rate)
        # bounds depend on the rows that each rank samples; both hold the diameter
        assert mine.diameter_lower <= theirs.diameter_upper * (1 + 1e-4)
        assert theirs.diameter_lower <= mine.diameter_upper * (1 + 1e-4)
        for field in ("diameter", "perturbation_rms", "validation_loss"):
            value = getattr(theirs, field)
            assert getattr(mine, field) == (None if value is None else pytest.approx(value, rel=1e-4)), field
            assert value is not None or theirs.step in (1, 3) or field == "diameter"
    norms, weights, everything, start = other_ranks[0]["ddp"]
    held = [rank[name][2] for rank in ranks]
    assert sum(held) == everything
    assert max(held) <= 1.03 / len(ranks) * everything
    for rank in ranks:
        assert rank[name][0] == pytest.approx(norms, rel=1e-4)
        assert max(rank[name][0]) == pytest.approx(CLIP, rel=1e-4)  # some were clipped, or this shows nothing
        assert_same_way(*([named[key] for key in weights] for named in (rank[name][1], weights, start)))


@pytest.mark.parametrize("strategy", ["fsdp", "tp=2"])
def test_a_sharded_run_follows_its_ddp_run_to_rounding(two, strategy):
    check(two, strategy, two)


def test_a_sharded_run_that_breaks_and_resumes_ends_with_the_same_bits(two):
    folder, ranks = two
    for rank in ranks:
        assert all(torch.equal(w, rank["fsdp"][1][key]) for key, w in rank["broken"][1].items())
        assert rank["broken"][0] == rank["fsdp"][0][2:]  # it resumed after its last checkpoint
    for mine, other in zip(records(folder, "broken"), records(folder, "fsdp"), strict=True):
        assert (mine.step, mine.tokens, mine.diameter) == (other.step, other.tokens, other.diameter)


def test_a_run_on_two_ranks_resumes_on_one_and_follows_the_run_on_two(two):
    folder, _ = two
    fit(folder / "data", folder, "moved", **ON_RANKS)
    a, b = records(folder, "ddp"), records(folder, "moved")
    assert [(r.step, r.tokens, r.learning_rate) for r in a] == [(r.step, r.tokens, r.learning_rate) for r in b]
    assert b[-1].validation_loss == pytest.approx(a[-1].validation_loss, rel=1e-4)
    assert b[-1].diameter == pytest.approx(a[-1].diameter, rel=1e-4)


@pytest.mark.sweep
def test_four_ranks_in_tensor_parallel_pairs_follow_the_ddp_run_of_two(two, tmp_path):
    write_data(tmp_path / "data", V)
    four = in_ranks(runs_of_a_rank, tmp_path / "ranks", tmp_path, {"tp=2": {"strategy": "tp=2"}}, world=4)
    check((tmp_path, four), "tp=2", two)
