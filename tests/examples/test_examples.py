"""Every example runs, as a reader would start it: in a process of its own, or one for each rank, from any folder."""

import os
import re
from pathlib import Path

import pytest

from hilbert_monitor.runs.reader import RunReader
from tests.support.ports import free_port
from tests.support.warm import Program

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(*arguments):
    """What a program prints, errors included; it has to end well."""
    program = Program(*arguments)
    assert program.wait() == 0, program.output
    return program.output


def outputs_of_ranks(program, world=2):
    """What a program prints on each rank; started as torchrun would, which tells the ranks by their environment."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    ranks = [Program(program, env={**os.environ, **meeting, **place}) for place in places]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * world, [rank.output for rank in ranks]
    return [rank.output for rank in ranks]


def test_there_is_a_test_for_every_example():
    programs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert programs == {
        "accelerate_loop.py",
        "bare_loop.py",
        "fabric_loop.py",
        "hugging_face.py",
        "hugging_face_trainer.py",
        "lightning_callback.py",
        "lightning_cli/main.py",
        "own_loop.py",
        "sharded_lightning.py",
        "sharded_loop.py",
    }


def test_the_callback_reports_a_learning_rate_accident_in_its_step():
    output = output_of(EXAMPLES / "lightning_callback.py")
    assert "step 45: the learning rate is 0.01, 10 times the 0.001 that earlier ones led to expect: " in output
    run = RunReader(Path("runs/lightning-example"))
    assert [alert.step for alert in run.alerts()] == [45]
    assert [record.step for record in run.steps()] == list(range(1, 61))


def test_a_loop_of_ones_own_has_a_record_for_every_step():
    output = output_of(EXAMPLES / "own_loop.py")
    assert output.count("D(S) = ") == 10
    assert output.count("of its worst case") == 2


def test_a_bare_loop_has_a_run_folder_and_tells_its_logger():
    output = output_of(EXAMPLES / "bare_loop.py")
    assert re.findall(r"step (\d+): D\(S\) = ", output) == ["10", "20", "30"]
    run = RunReader(Path("runs/bare-loop"))
    records = list(run.steps())
    assert [record.step for record in records] == list(range(1, 31))
    assert records[-1].tokens == 30 * 8 * 33
    assert records[-1].validation_loss > 0
    assert records[-1].perturbation_rms > 0


@pytest.mark.parametrize(
    ("example", "needs"),
    [("hugging_face_trainer.py", "accelerate"), ("accelerate_loop.py", "accelerate"), ("fabric_loop.py", "lightning")],
)
def test_other_trainers_need_one_line_or_two(example, needs):
    pytest.importorskip(needs)
    assert set(re.findall(r"step (\d+): D\(S\) = ", output_of(EXAMPLES / example))) == {"10", "20"}
    (run,) = Path("runs").iterdir()
    assert [record.step for record in RunReader(run).steps()] == list(range(1, 21))
    assert RunReader(run).state().status == "finished"


def test_a_hugging_face_model_needs_nothing_beyond_the_one_line():
    pytest.importorskip("transformers")
    assert output_of(EXAMPLES / "hugging_face.py").count("D(S) = ") == 2


def test_a_head_sharded_by_fsdp_is_measured_in_a_loop_of_ones_own():
    first, second = outputs_of_ranks(EXAMPLES / "sharded_loop.py")
    assert re.findall(r"step (\d+): D\(S\) = ", first) == ["5", "10", "15", "20"]
    assert "D(S)" not in second


def test_a_head_sharded_by_fsdp_is_measured_under_lightning():
    output_of(EXAMPLES / "sharded_lightning.py")  # Lightning starts the other rank
    run = RunReader(Path("runs/sharded"))
    records = list(run.steps())
    assert [record.step for record in records] == list(range(1, 21))
    assert [record.step for record in records if record.diameter] == [5, 10, 15, 20]
    assert records[-1].perturbation_rms > 0
    assert run.info.world_size == 2


def test_the_monitor_stands_in_the_yaml_of_a_lightning_cli():
    pytest.importorskip("jsonargparse")
    output_of(EXAMPLES / "lightning_cli" / "main.py", "fit", "--config", EXAMPLES / "lightning_cli" / "config.yaml")
    (run,) = Path("runs").iterdir()
    assert run.name == "lightning-cli-example"
    assert RunReader(run).info.config["width"] == 32
    assert [record.step for record in RunReader(run).steps()] == list(range(1, 21))
