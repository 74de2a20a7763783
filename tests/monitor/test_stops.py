"""Runs that are asked to stop: real processes, real signals."""

import os
import signal
import threading
import time
import urllib.request

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

from hilbert_monitor import HilbertMonitor, Prometheus
from hilbert_monitor.runs.reader import RunReader
from tests.support.training import QUIET, Module, Text
from tests.support.warm import Program

SLURM = {"SLURM_JOB_ID": "17", "SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
SLURM |= {"SLURM_LOCALID": "0", "SLURM_NODELIST": "localhost"}
SIGNALS = {"slurm": [signal.SIGUSR1, signal.SIGTERM], "peer": [signal.SIGTERM], "keyboard": [signal.SIGINT]}


def train(name: str, root: str) -> None:
    """Train until a signal comes; say where the metrics are."""

    class Tell(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if trainer.global_step == 5:
                line = f"{name} {os.getpid()} {monitor.session.outputs.exporter.port}\n"
                os.write(1, line.encode())  # at once: print would let the lines of several processes mix
            time.sleep(0.1)
            if name == "peer" and trainer.global_step == 5:
                while not trainer.received_sigterm:
                    time.sleep(0.05)
                raise RuntimeError("a worker was killed by the same signal")

    monitor = HilbertMonitor(
        run_dir=f"{root}/runs", run_name=name, perturbation_every=0, prometheus=Prometheus(port=0, linger=300.0)
    )
    options = {"default_root_dir": f"{root}/{name}", "callbacks": [monitor, Tell()]}
    trainer = lightning.Trainer(max_epochs=-1, **QUIET, **options)
    trainer.fit(Module("torch"), DataLoader(Text(0), batch_size=4))


def train_several(root: str) -> None:
    """Train in several processes of one import; say which of them have ended."""
    for name in SIGNALS:
        if os.fork() == 0:
            try:
                os.environ.update(SLURM if name == "slurm" else {})
                train(name, root)
            finally:
                for thread in threading.enumerate():
                    if thread is not threading.current_thread() and not thread.daemon:
                        thread.join()  # as the interpreter does at its end
                os._exit(0)
    for _ in SIGNALS:
        print("ended", os.wait()[0], flush=True)


@pytest.mark.sweep
def test_a_stop_that_is_asked_for_is_a_state_of_its_own_and_quick(tmp_path):
    """SLURM, which asks for a checkpoint first; a SIGTERM that an error follows; and Ctrl-C."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment["PATH"] = f"{scontrol.parent}:{environment['PATH']}"
    code = f"from tests.monitor.test_stops import train_several; train_several({str(tmp_path)!r})"
    pids, program = {}, Program("-c", code, env=environment)
    said = (line.split() for line in program.lines() if line.startswith((*SIGNALS, "ended")))
    try:
        for _ in SIGNALS:
            name, pid, port = next(said)
            pids[name] = int(pid)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                assert b'status="running"} 1.0' in answer.read()
        for name, signals in SIGNALS.items():
            for one in signals:
                os.kill(pids[name], one)
                deadline = time.monotonic() + 300
                while one == signal.SIGUSR1 and not (tmp_path / "requeued").exists():
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            assert next(said) == ["ended", str(pids[name])]
            reader = RunReader(tmp_path / "runs" / name)
            state, end = reader.state(), reader.end
            assert time.time() - end.time < 100, name  # of the linger two seconds; more on a machine that is busy
            assert (name, state.status, end.stopped) == (name, "stopped", signals[-1].name)
            assert (state.error, state.message) == (
                ("RuntimeError", "a worker was killed by the same signal") if name == "peer" else ("", "")
            )
            del pids[name]
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        program.kill()
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    [checkpoint] = (tmp_path / "slurm").glob("hpc_ckpt_*.ckpt")
    assert torch.load(checkpoint, weights_only=False)["callbacks"][HilbertMonitor().state_key]["run"] == "slurm"
