"""`watch` in loops of one's own: what goes into it, what comes out, and how a run ends."""

import atexit
import os
import signal
import sys
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import hilbert_monitor
from hilbert_monitor.monitor.panel import Panel, panel_from
from hilbert_monitor.monitor.runtime import Ranks
from hilbert_monitor.runs.reader import RunReader
from tests.support.decoders import Plain, batch, loss_of, seeded
from tests.support.loops import only_run, steps, watched
from tests.support.ranks import in_ranks
from tests.support.sinks import Recorder
from tests.support.warm import Program

V = 23
IDS = torch.arange(60).view(6, 10) % V
ALONE = Ranks.of(torch.device("cpu"), 1)


def test_a_short_run_whose_optimizer_does_not_have_the_head_says_so_at_its_end():
    model = seeded(Plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p is not model.lm_head.weight])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with hilbert_monitor.watch(model, optimizer, run_dir=None, strict=True) as run:
            steps(run, model, optimizer, range(3))
    (warning,) = caught
    assert "nothing is measured so far" in str(warning.message)
    assert "'lm_head'" in str(warning.message)


def test_steps_that_all_overflow_are_said_to():
    model = seeded(Plain)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.found_inf = torch.ones(())  # as a GradScaler says it to a fused optimizer
    optimizer.grad_scale = None
    with (
        pytest.warns(UserWarning, match="has not moved in 1 update; all were left out because gradients overflowed"),
        hilbert_monitor.watch(model, optimizer, run_dir=None, strict=True) as run,
    ):
        steps(run, model, optimizer, range(1))


# What goes in


class Stream(IterableDataset):
    def __iter__(self):
        return iter(IDS)


@pytest.mark.parametrize(
    "given",
    [
        IDS,
        IDS.tolist(),
        IDS.numpy().astype("uint16"),
        list(IDS),
        [IDS[:3], IDS[3:]],
        ({"input_ids": rows} for rows in IDS.split(2)),
        [(IDS, torch.ones_like(IDS))],
        {"input_ids": IDS},
        DataLoader(IDS, batch_size=2),
        DataLoader(Stream(), batch_size=4),
        Panel.of_tokens(IDS, 40),
    ],
    ids=["ids", "lists", "array", "texts", "batches", "dicts", "tuples", "a dict", "loader", "stream", "panel"],
)
def test_the_panel_is_made_of_whatever_text_the_user_has(given):
    before = torch.get_rng_state()
    assert panel_from(given, 40, ranks=ALONE).hash == Panel.of_tokens(IDS, 40).hash
    assert torch.equal(before, torch.get_rng_state())


def panels_of_ranks(rank, world):
    ranks = Ranks.of(torch.device("cpu"))
    try:
        return panel_from([IDS] if rank else [torch.ones(2)], 40, ranks=ranks)
    except ValueError:
        return "failed"


def test_no_rank_waits_for_one_whose_panel_fails(tmp_path):
    assert in_ranks(panels_of_ranks, tmp_path) == ["failed", None]


def test_a_run_that_goes_on_keeps_its_panel_though_its_batches_are_others_but_not_token_ids():
    run, model, optimizer = watched(panel=[IDS], panel_size=20, perturbation_every=1)
    with run:
        steps(run, model, optimizer, range(1))
        state = run.state_dict()
    for given, ids in (([IDS.flip(0)], IDS), (IDS.flip(0), IDS.flip(0))):
        run, model, optimizer = watched(panel=given, panel_size=20, perturbation_every=1, state=state)
        with run:
            assert run.session.probe.panel.hash == Panel.of_tokens(ids, 20).hash


def test_without_a_panel_the_diameter_is_measured_alone():
    run, model, optimizer = watched(sinks=[kept := Recorder()])
    with run:
        steps(run, model, optimizer, range(3))
    assert all(record.diameter > 0 and record.perturbation_rms is None for record in kept.records)


def test_a_name_that_is_no_option_is_refused_with_the_one_that_is_meant():
    with pytest.raises(TypeError, match=r"watch\(\) got an unexpected keyword argument 'diametre_every': did you mean"):
        watched(diametre_every=3)
    with pytest.raises(ValueError, match="needs save_checkpoint="):
        watched(on_blowup=["warn", "checkpoint"])


def test_the_loss_is_the_mean_of_the_micro_batches_and_tokens_are_counted():
    run, model, optimizer = watched(sinks=[kept := Recorder()])
    with run:
        for number in range(2):
            run.begin_batch(batch(0)[0], 2 * number)
            run.accumulate(torch.tensor(1.0))
            run.accumulate(3.0, tokens=10)
            steps(run, model, optimizer, [number], loss=torch.tensor(5.0), tokens=2)
    assert [(record.train_loss, record.tokens, record.batch) for record in kept.records] == [(3.0, 40, 0), (3.0, 80, 2)]


def test_a_step_that_a_scaler_leaves_out_is_recorded_as_skipped():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    run, model, optimizer = watched(sinks=[kept := Recorder()], scaler=scaler)
    with run:
        for number in range(3):
            scaler.scale(loss_of(model, number)).backward()
            if number == 1:
                model.lm_head.weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.step()
    assert [record.skipped for record in kept.records] == ["", "overflow", ""]


def test_the_restarts_of_a_scheduler_are_no_blow_ups():
    model, alerts, kept = seeded(Plain), [], Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=30, eta_min=1e-5)
    options = {"run_dir": None, "sinks": [kept], "on_blowup": [alerts.append]}
    with hilbert_monitor.watch(model, optimizer, schedulers=scheduler, **options) as run:
        for number in range(100):
            if number == 95:
                optimizer.param_groups[0]["lr"] = 1e-2
            steps(run, model, optimizer, [number])
            scheduler.step()
    assert [record.step for record in kept.records if record.scheduled is not True] == [96]
    assert [(alert.step, alert.kind) for alert in alerts] == [(96, "rate")]


# What comes out


class Writer:
    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.seen.append((global_step, tag))


@pytest.mark.parametrize("kind", ["wandb", "tensorboard", "positional", "dict alone"])
def test_loggers_get_the_names_of_lightning_by_the_function_that_they_have(kind):
    seen, writer = [], Writer()
    log = {
        "wandb": lambda data, step=None, commit=None: seen.extend((step, name) for name in data),
        "tensorboard": writer.add_scalar,
        "positional": lambda numbers, number: seen.extend((number, name) for name in numbers),
        "dict alone": lambda numbers: seen.extend((None, name) for name in numbers),
    }[kind]
    run, model, optimizer = watched(log=log)
    with run:
        steps(run, model, optimizer, range(2), loss=torch.tensor(1.0))
    seen = seen or writer.seen
    number = None if kind == "dict alone" else 2
    assert {(number, "hilbert/step_diameter"), (number, "hilbert/train_loss")} <= set(seen)


def test_a_blow_up_can_stop_the_loop_and_save_a_checkpoint_beside_the_log(tmp_path):
    run, model, optimizer = watched(
        run_dir=str(tmp_path), on_blowup=["checkpoint", "stop"], save_checkpoint=lambda path: torch.save({}, path)
    )
    with run:
        steps(run, model, optimizer, range(2))
        assert not run.should_stop
        loss_of(model, 3).backward()
        model.lm_head.weight.grad[0, 0] = torch.nan
        optimizer.step()
        run.step()
        assert run.should_stop
    (folder,) = tmp_path.iterdir()
    assert (folder / "blow-up-step-3.ckpt").exists()
    assert [alert.step for alert in RunReader(folder).alerts()] == [3]


# How a run goes on, and how it ends


def test_a_state_comes_before_the_run_or_is_refused(tmp_path):
    run, model, optimizer = watched()
    with run:
        steps(run, model, optimizer, range(2))
        state = run.state_dict()
        with pytest.raises(RuntimeError, match=r"call it before the with block, or give watch\(..., state=...\)"):
            run.load_state_dict(state)
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again, model, optimizer = watched(sinks=[kept := Recorder()], state=state)
    with again:
        steps(again, model, optimizer, range(2))
    assert [record.step for record in kept.records] == [3, 4]


def test_what_leaves_the_block_is_in_the_log_of_the_run(tmp_path):
    run, model, optimizer = watched(run_dir=str(tmp_path))
    optimizer.register_step_post_hook(lambda *_: 1 / (2 - run.session.probe.step))
    with pytest.raises(ZeroDivisionError), run:
        steps(run, model, optimizer, range(4))
    log = only_run(tmp_path)
    assert (log.state().status, log.state().error) == ("failed", "ZeroDivisionError")
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


TERMINATED = """
import os, signal, sys
from tests.support.loops import watched, steps
run, model, optimizer = watched(run_dir=sys.argv[1])
with run:
    steps(run, model, optimizer, range(2))
    os.kill(os.getpid(), signal.SIGTERM)
    steps(run, model, optimizer, range(100))
"""


def test_a_run_that_is_terminated_says_so(tmp_path):
    program = Program("-c", TERMINATED, tmp_path)
    assert program.wait() == 143
    log = only_run(tmp_path)
    assert (log.state().status, log.end.stopped) == ("stopped", "SIGTERM")


def test_a_run_that_nobody_closes_ends_with_the_process_and_what_ended_that(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    run, model, optimizer = watched(run_dir=str(tmp_path))
    steps(run.start(), model, optimizer, range(2))
    monkeypatch.setattr(sys, "last_value", OverflowError("in a loop without a block"), raising=False)
    for function in at_exit:
        function()
    log = only_run(tmp_path)
    assert (log.state().status, log.state().error) == ("failed", "OverflowError")


def test_a_handler_of_the_users_own_stays():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        run, model, optimizer = watched()
        with run:
            os.kill(os.getpid(), signal.SIGTERM)
            steps(run, model, optimizer, range(2))
        assert run.session.probe.step == 2
    finally:
        signal.signal(signal.SIGTERM, before)


class DeepSpeedEngine(Plain):
    pass


class FullyShardedDataParallel(Plain):
    pass


@pytest.mark.parametrize(("kind", "what"), [(DeepSpeedEngine, "DeepSpeed"), (FullyShardedDataParallel, "FSDP1")])
def test_what_flattens_the_head_is_refused_in_a_sentence_and_trains_on(kind, what):
    run, model, optimizer = watched(seeded(kind))
    with pytest.warns(UserWarning, match=f"nothing is measured under {what}, .*: use "), run:
        steps(run, model, optimizer, range(2))
    assert run.session.probe is None


# Mistakes


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"panel": "wikitext"}, ValueError, "tokenized first"),
        ({"panel": 5}, TypeError, "panel takes token ids"),
        ({"log": 5}, TypeError, "log takes a function"),
        ({"autocast": torch.autocast("cpu", torch.bfloat16)}, TypeError, "write lambda"),
        ({"first_step": -1}, ValueError, "zero or more"),
        ({"last_step": "8"}, TypeError, "last_step is a number"),
        ({"state": "runs/x"}, TypeError, "what run.state_dict"),
        ({"state": {"model": 1, "monitor": {}}}, ValueError, "'model', 'monitor'"),
        ({"sinks": Recorder()}, TypeError, r"write sinks=\[...\]"),
        ({"sinks": [print]}, TypeError, "has no write"),
        ({"sinks": [Recorder]}, TypeError, r"the class Recorder: make one, sinks=\[Recorder"),
        ({"config": SimpleNamespace(lr=1)}, TypeError, r"config is a dict, such as vars\(args\), or None, got Simple"),
        ({"rules": {"false_alarms_per_10k": 1}}, TypeError, "rules is Rules"),
        ({"decode": "gpt2"}, TypeError, "tokenizer.decode, or None, got str 'gpt2'"),
        ({"hidden": 3}, TypeError, "hidden is a function"),
        ({"prometheus": "9464"}, TypeError, "prometheus is a port or Prometheus"),
        ({"logit_scale": "2"}, TypeError, "logit_scale is a number"),
        ({"logit_scale": 0.0}, ValueError, "other than zero"),
        ({"logit_scale": float("nan")}, ValueError, "other than zero"),
        ({"decay": "l2"}, ValueError, 'decay is "decoupled", "coupled", the share'),
        ({"run_dir": 5}, TypeError, "path of a folder"),
        ({"run_name": 5}, TypeError, "run_name is a text"),
        ({"seed": "5"}, TypeError, "seed is a whole number"),
        ({"data_ranks": 0}, ValueError, "one or more"),
        ({"save_checkpoint": "x.pt"}, TypeError, "a function of a path"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_wrong_argument_is_an_error_before_the_loop(options, error, message):
    with pytest.raises(error, match=message):
        watched(**options)


def test_a_home_folder_is_found_and_a_seed_of_numpy_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run, model, optimizer = watched(run_dir="~/runs", run_name="home", seed=np.int64(3))
    with run:
        steps(run, model, optimizer, range(1))
    assert RunReader(tmp_path / "runs" / "home").info.seed == 3


@dataclass
class Text:
    input_ids: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (Text(IDS, IDS), 60),
        ([{"input_ids": row} for row in IDS], 60),
        (({"input_ids": [1, 2, 3]}, {"input_ids": [4]}), 4),
        (IDS[:0], 0),
        ([], 0),
        ({"text": ["a", "b"]}, 0),
        (None, 0),
    ],
)
def test_tokens_are_counted_in_whatever_form_a_batch_comes(given, tokens):
    kept = Recorder()
    run, model, optimizer = watched(sinks=[kept])
    with run:
        run.begin_batch(given, 0)
        steps(run, model, optimizer, range(1))
    assert kept.records[-1].tokens == tokens


def test_what_is_no_loss_is_called_so():
    run, model, optimizer = watched(strict=False)
    with pytest.warns(UserWarning, match=r"a loss is a number or a tensor, got dict \{'loss': 1.0\}"), run:
        steps(run, model, optimizer, range(1), loss={"loss": 1.0})


def test_what_is_no_model_or_no_optimizer_is_called_so():
    model = seeded(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"has to be a torch.nn.Module, got SGD"):
        hilbert_monitor.watch(optimizer, model)
    for wrong in (None, model.parameters(), {"a": optimizer}, [], [optimizer, None]):
        with pytest.raises(TypeError, match="the one that moves the head"):
            hilbert_monitor.watch(model, wrong)


def test_a_run_that_nobody_started_says_so_once():
    run, model, optimizer = watched()
    with pytest.warns(UserWarning, match=r"call run.start\(\)") as told:
        steps(run, model, optimizer, range(2))
    assert len(told) == 1


def test_a_run_that_is_started_twice_is_one_run(tmp_path):
    kept = Recorder()
    run, model, optimizer = watched(run_dir=str(tmp_path), sinks=[kept])
    run.start()
    with run:
        steps(run, model, optimizer, range(2))
    assert [record.step for record in kept.records] == [1, 2]
    assert only_run(tmp_path).state().status == "finished"


class Picky(Plain):
    def forward(self, tokens, *, scale=None):
        if scale is None:
            raise ValueError("scale is needed")
        return super().forward(tokens)


def test_a_forward_pass_that_takes_no_batch_of_the_panel_is_told_of_with_what_to_do():
    run, model, optimizer = watched(seeded(Picky), panel=IDS, panel_size=20, perturbation_every=1, strict=False)
    with run:
        model.lm_head(model.hidden(IDS)).square().mean().backward()
        optimizer.step()
        with pytest.warns(UserWarning, match=r"ValueError: scale is needed; .*hidden= says how else to"):
            run.step()


@pytest.mark.parametrize(("private", "mode"), [(False, 0o755), (True, 0o700)])
def test_a_runs_folder_has_no_secret_and_is_private_if_asked(private, mode, tmp_path):
    config = {"api_key": "sk-4711", "db": "postgresql://me:sk-4711@db/runs", "pin": "sk-4711", "lr": 0.1}
    advanced = hilbert_monitor.Advanced(secrets=["pin"], private=private)
    before = os.umask(0o022)
    try:
        run, model, optimizer = watched(run_dir=str(tmp_path), config=config, advanced=advanced)
        run.start()
        steps(run, model, optimizer, range(2))
        run.close(ConnectionError("no answer from postgresql://me:sk-4711@db/runs"))
    finally:
        os.umask(before)
    folder, hidden = only_run(tmp_path).folder, {"api_key": "***", "db": "postgresql://***@db/runs", "pin": "***"}
    assert only_run(tmp_path).info.config == hidden | {"lr": 0.1}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert not [path for path in files if b"sk-4711" in path.read_bytes()]
    assert folder.stat().st_mode & 0o777 == mode
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
