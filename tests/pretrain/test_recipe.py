"""The paper's numbers, overrides of them, and recipes that are refused."""

import pytest
from typer.testing import CliRunner

from hilbert_monitor.cli import app
from hilbert_monitor.pretrain.recipe import Recipe, parse_changes, recipe


@pytest.mark.parametrize(
    ("size", "width", "heads", "updates", "adamw", "rownorm", "micro", "accumulation"),
    [
        ("190M", 512, 8, 7083, 4.0e-3, 3.2e-3, 32, 1),
        ("380M", 768, 12, 14464, 2.667e-3, 2.133e-3, 16, 2),
        ("640M", 1024, 16, 24406, 2.0e-3, 1.6e-3, 8, 4),
    ],
)
def test_the_presets_have_the_papers_numbers(size, width, heads, updates, adamw, rownorm, micro, accumulation):
    for head, rate in (("adamw", adamw), ("rownorm", rownorm)):
        r = recipe(size, head=head)
        assert (r.width, r.updates, r.micro_batch, r.accumulation) == (width, updates, micro, accumulation)
        assert r.head_lr == pytest.approx(rate, rel=2e-4)
        assert (r.global_batch, r.context, r.vocab_size, r.blocks) == (256, 2048, 50_257, 32)
        assert r.width // r.head_dim == heads
        assert (r.matrix_lr, r.embedding_lr, r.weight_decay, r.clip) == (8e-3, 4e-3, 0.1, 1.0)
        assert (r.warmup, r.final_rate, r.precision, r.loss_chunk) == (0.1, 0.1, "bf16-mixed", 4096)
        assert (r.diameter_every, r.perturbation_every, r.panel_size, r.panel) == (10, 500, 8192, "paper")
        assert (r.validation_every, r.validation_tokens, r.devices, r.seed) == (500, 5_242_880, 8, 0)


def test_every_number_can_be_overridden_by_name():
    changes = parse_changes(["width=64", "vocab-size=512", "head_lr=0.5", "compile=true", "loss_chunk=None"])
    assert changes == {"width": 64, "vocab_size": 512, "head_lr": 0.5, "compile": True, "loss_chunk": None}
    r = recipe("190M", **parse_changes(["width=64", "vocab_size=512", "blocks=2", "head_dim=32", "loss_chunk=None"]))
    assert (r.model.parameters, r.head_lr) == (2 * 512 * 64 + 2 * 16 * 64**2, 1.6384 / 64)
    assert r.loss_chunk is None


@pytest.mark.parametrize(
    ("strategy", "devices", "tensor_parallel", "data_parallel", "sharded"),
    [("ddp", 8, 1, 8, False), ("fsdp", 8, 1, 8, True), ("fsdp", 1, 1, 1, False), ("tp=4", 8, 4, 2, True)],
)
def test_devices_are_divided_by_the_strategy(strategy, devices, tensor_parallel, data_parallel, sharded):
    r = Recipe(strategy=strategy, devices=devices, micro_batch=8)
    assert (r.tensor_parallel, r.data_parallel, r.sharded) == (tensor_parallel, data_parallel, sharded)
    assert r.accumulation * data_parallel * 8 == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--size 1B", "unknown size '1B': choose one of 190M, 380M, 640M, demo"),
        ("--head lion", "the head is trained by adamw or rownorm, got 'lion'"),
        ("--devices 7", "on 7 devices: choose --set micro_batch=... so that 7 times it"),
        ("--seed -1", "seed must be at least 0, got -1"),
        ("--set depth=3", "a recipe has no 'depth'; it has size, head, seed"),
        ("--set width=wide", "--set width=wide"),
        ("--set width=100", "an even divisor of the width"),
        ("--set updates=0", "updates must be at least 1, got 0"),
        ("--set panel_size=0", "panel_size must be at least 1, got 0"),
        ("--set trust_region=nan", "trust_region must be zero or a positive number, got nan"),
        ("--strategy zero", "the strategy is ddp, fsdp or tp=N with a number of ranks, got 'zero'"),
        ("--strategy tp=0", "the strategy is ddp, fsdp or tp=N"),
        ("--strategy tp=3", "strategy tp=3 needs a multiple of 3 devices, got 8"),
        ("--strategy tp=8 --set width=256", "splits 4 attention heads: choose an N that divides them"),
        ("--strategy fsdp --set compile=true", "compile=true is for strategy ddp"),
        ("--strategy tp=2 --set micro_batch=48", "on 8 devices in groups of 2: choose --set micro_batch"),
        ("", "give the folder of the token shards as --data"),
        ("--data nowhere", "the folder of shards nowhere does not exist"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_in_one_sentence(arguments, message):
    command = ["pretrain", "--size", "190M", "--devices", "8", "--accelerator", "cpu", *arguments.split()]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
