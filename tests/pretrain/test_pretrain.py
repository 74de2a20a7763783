"""The paper's recipe, from its numbers to real runs: killed, resumed, and over two processes."""

import time

import lightning
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.pretrain import recipes
from hilbert_monitor.pretrain.module import Places, train
from hilbert_monitor.pretrain.shards import write_shard
from hilbert_monitor.runs.reader import RunReader, find_runs
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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Shards of tokens that follow each other with some regularity."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name, size in (("fineweb_train_0.bin", 30_000), ("fineweb_train_1.bin", 20_000), ("fineweb_val_0.bin", 4_000)):
        tokens = np.cumsum(draw.integers(0, 5, size)) % 128
        write_shard(folder / name, tokens.astype(np.uint16))
    return folder


# Numbers


@pytest.mark.parametrize(
    ("size", "width", "updates", "adamw", "rownorm", "micro", "accumulation"),
    [
        ("190M", 512, 7083, 4.0e-3, 3.2e-3, 32, 1),
        ("380M", 768, 14464, 2.667e-3, 2.133e-3, 16, 2),
        ("640M", 1024, 24406, 2.0e-3, 1.6e-3, 8, 4),
    ],
)
def test_the_presets_have_the_papers_numbers(size, width, updates, adamw, rownorm, micro, accumulation):
    for head, rate in (("adamw", adamw), ("rownorm", rownorm)):
        r = recipes.recipe(size, head=head)
        assert (r.width, r.updates, r.micro_batch, r.accumulation) == (width, updates, micro, accumulation)
        assert r.head_lr == pytest.approx(rate, rel=2e-4)
        assert (r.global_batch, r.context, r.vocab_size, r.blocks, r.head_dim) == (256, 2048, 50_257, 32, 64)
        assert (r.matrix_lr, r.embedding_lr, r.weight_decay, r.clip) == (8e-3, 4e-3, 0.1, 1.0)
        assert (r.warmup, r.final_rate, r.precision) == (0.1, 0.1, "bf16-mixed")
        assert (r.diameter_every, r.perturbation_every, r.panel_size, r.panel) == (10, 500, 8192, "paper")
        assert (r.validation_every, r.validation_tokens) == (500, 5_242_880)


def test_every_number_can_be_overridden_by_name():
    changes = recipes.parse_changes(["width=64", "vocab-size=512", "head_lr=0.5", "compile=true", "loss_chunk=None"])
    assert changes == {"width": 64, "vocab_size": 512, "head_lr": 0.5, "compile": True, "loss_chunk": None}
    r = recipes.recipe(
        "190M", **recipes.parse_changes(["width=64", "vocab_size=512", "blocks=2", "head_dim=32", "devices=1"])
    )
    assert (r.model.parameters, r.head_lr) == (2 * 512 * 64 + 2 * 16 * 64**2, 1.6384 / 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--size", "1B"], "there is no size '1B': choose one of 190M, 380M, 640M, demo"),
        (["--size", "190M", "--head", "lion"], "the head is trained by adamw or rownorm, got 'lion'"),
        (["--size", "190M", "--devices", "7"], "on 7 devices: choose --set micro_batch=... so that 7 times it"),
        (["--size", "190M", "--set", "depth=3"], "a recipe has no 'depth'; it has size, head, seed"),
        (["--size", "190M", "--set", "width=wide"], "--set width=wide"),
        (["--size", "190M", "--set", "width=100"], "an even divisor of the width"),
        (["--size", "190M"], "give the folder of the token shards as --data"),
        (["--size", "190M", "--data", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run_is_refused_in_one_sentence_before_anything_is_allocated(arguments, said):
    result = CliRunner().invoke(app, ["pretrain", "--accelerator", "cpu", *arguments], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


# Runs


def fit(data, tmp_path, name="run", callbacks=(), **changes):
    r = recipes.recipe("demo", **TINY | changes)
    places, monitor = Places(data, tmp_path / "runs", tmp_path / "checkpoints", name), {"strict": True, "on_blowup": []}
    return train(r, places, accelerator="cpu", quiet=True, callbacks=callbacks, monitor=monitor)


@pytest.fixture(scope="module")
def accumulated(data, tmp_path_factory):
    """Runs of one recipe: in one micro-batch to an update, in four of them, and with a chunked loss."""
    folder = tmp_path_factory.mktemp("accumulated")
    for name, changes in (("whole", {}), ("micro", {"micro_batch": 2}), ("chunked", {"loss_chunk": 10})):
        fit(data, folder, name, **{"updates": 11, "validation_every": 4, "micro_batch": 8} | changes)
    return {name: RunReader(folder / "runs" / name) for name in ("whole", "micro", "chunked")}


def test_validation_comes_every_so_many_updates_and_after_the_last_whatever_the_accumulation(accumulated):
    for name in ("whole", "micro"):
        steps = list(accumulated[name].steps())
        assert [r.step for r in steps] == list(range(1, 12))
        assert [r.step for r in steps if r.validation_loss is not None] == [4, 8, 11]
        assert steps[-1].tokens == 11 * 8 * 16
        assert steps[-1].perturbation_rms > 0


def test_accumulation_changes_no_number_beyond_rounding(accumulated):
    runs = [list(accumulated[name].steps()) for name in ("whole", "micro")]
    for a, b in zip(*runs, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-4)
    assert runs[0][-1].validation_loss == pytest.approx(runs[1][-1].validation_loss, rel=1e-4)
    assert runs[0][-1].perturbation_rms == pytest.approx(runs[1][-1].perturbation_rms, rel=1e-2)


class Breaks(lightning.Callback):
    """Ends a run before its n-th micro-batch."""

    def __init__(self, n):
        self.left = n

    def on_train_batch_start(self, *_):
        self.left -= 1
        if not self.left:
            raise InterruptedError


def test_a_run_that_breaks_within_a_resumed_update_is_resumed_from_before_it(data, tmp_path):
    fit(data, tmp_path, "whole", updates=5, checkpoint_every=2)
    for micro_batches in (6, 2):  # two of them are an update
        with pytest.raises(InterruptedError):
            fit(data, tmp_path, callbacks=[Breaks(micro_batches)], updates=5, checkpoint_every=2)
    fit(data, tmp_path, updates=5, checkpoint_every=2)
    whole, broken = (list(RunReader(tmp_path / "runs" / name).steps()) for name in ("whole", "run"))
    assert [(r.step, r.train_loss, r.tokens) for r in whole] == [(r.step, r.train_loss, r.tokens) for r in broken]


def test_the_first_update_has_no_learning_rate_and_the_last_a_tenth(data, tmp_path):
    fit(data, tmp_path, updates=20, head="adamw")
    steps = list(RunReader(tmp_path / "runs" / "run").steps())
    peak = 2.048 / 32
    assert (steps[0].learning_rate, steps[0].diameter_lower) == (0.0, 0.0)
    assert steps[2].learning_rate == pytest.approx(peak)
    assert steps[-1].learning_rate == pytest.approx(0.1 * peak)


def test_a_trust_region_holds_the_steps_of_the_head(data, tmp_path):
    fit(data, tmp_path, head="adamw", trust_region=1e-3, updates=6, warmup=0.5)
    (run,) = find_runs(tmp_path / "runs")
    records = list(run.steps())
    assert all(record.trust_limit == 1e-3 and record.made_diameter <= 1e-3 for record in records)
    assert records[0].held_rows == 0, "the first update has no learning rate"
    assert max(record.held_share for record in records) > 0.5
    assert max(record.diameter_lower for record in records) > 1e-3


def test_the_resolved_recipe_is_part_of_the_runs_info(accumulated):
    info = accumulated["whole"].info
    assert info.config["parameters"] == 2 * 128 * 32 + 16 * 32**2
    assert (info.config["updates"], info.config["head"], info.seed, info.head_optimizer) == (
        11,
        "rownorm",
        0,
        "RowNorm",
    )


def test_a_chunked_loss_trains_the_same_model_and_the_monitor_sees_its_states(accumulated):
    whole, chunked = (list(accumulated[name].steps())[-1] for name in ("whole", "chunked"))
    assert chunked.train_loss == pytest.approx(whole.train_loss, rel=1e-4)
    assert chunked.perturbation_rms == pytest.approx(whole.perturbation_rms, rel=1e-2)


@pytest.mark.parametrize("head", recipes.HEADS)
def test_under_bf16_autocast_parameters_and_state_stay_fp32(data, tmp_path, head):
    trainer = fit(data, tmp_path, updates=3, head=head, precision="bf16-mixed", loss_chunk=16)
    assert all(p.dtype == torch.float32 for p in trainer.lightning_module.parameters())
    states = trainer.optimizers[0].state_dict()["state"].values()
    assert all(v.dtype == torch.float32 for state in states for v in state.values() if isinstance(v, torch.Tensor))
    assert list(RunReader(tmp_path / "runs" / "run").steps())[-1].perturbation_rms > 0


def command(data, folder, *more):
    sets = [f"--set={name}={value}" for name, value in TINY.items()]
    places = [f"--data={data}", f"--runs={folder / 'runs'}", f"--checkpoints={folder / 'checkpoints'}", "--name=run"]
    start = ["-m", "hilbert_monitor", "pretrain", "--size=demo", "--accelerator=cpu", "--quiet"]
    return [*start, *places, *sets, *more]


def finish(program):
    assert program.wait() == 0, program.output


def weights(folder):
    return torch.load(folder / "checkpoints" / "run" / "last.ckpt", weights_only=False)["state_dict"]


def test_a_run_that_is_killed_and_resumed_ends_with_the_weights_of_one_that_was_not(data, tmp_path):
    more = ["--set=updates=60", "--set=checkpoint_every=7", "--set=head=adamw"]
    whole = Program(*command(data, tmp_path / "whole", *more))
    killed = Program(*command(data, tmp_path / "killed", *more))
    log = RunReader(tmp_path / "killed" / "runs" / "run")
    deadline = time.monotonic() + 300
    while sum(1 for _ in log.steps()) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.kill()
    seen = max(r.step for r in log.steps())
    assert 10 <= seen < 60
    finish(Program(*command(data, tmp_path / "killed", *more)))
    finish(whole)
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(a[name], b[name]) for name in a)
    steps = list(log.steps())
    assert [r.step for r in steps] == list(range(1, 61))
    assert len(log.attempts) == 2
    assert log.attempts[1].first_step % 7 == 0
    clean = {r.step: r for r in RunReader(tmp_path / "whole" / "runs" / "run").steps()}
    assert all(r.diameter_lower == clean[r.step].diameter_lower and r.tokens == clean[r.step].tokens for r in steps)


@pytest.mark.sweep
def test_two_processes_follow_one_to_rounding(data, tmp_path):
    more = ["--set=updates=12", "--set=checkpoint_every=12", "--set=perturbation_every=4"]
    one = Program(*command(data, tmp_path / "one", *more, "--set=micro_batch=8"))
    two = Program(*command(data, tmp_path / "two", *more, "--devices=2"))  # which starts the other process itself
    finish(one)
    finish(two)
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    start = fit(data, tmp_path / "start", updates=1).lightning_module.state_dict()  # whose learning rate is zero
    assert_same_way(*([named[name] for name in a] for named in (b, a, start)))
    alone, both = ({r.step: r for r in next(iter(find_runs(tmp_path / n / "runs"))).steps()} for n in ("one", "two"))
    assert alone.keys() == both.keys()
    for step, r in alone.items():
        assert r.tokens == both[step].tokens
        if r.perturbation_rms is not None:
            assert both[step].perturbation_rms == pytest.approx(r.perturbation_rms, rel=2e-2)
    assert both[12].validation_loss == pytest.approx(alone[12].validation_loss, rel=1e-4)
