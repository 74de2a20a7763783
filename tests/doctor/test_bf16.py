"""A machine that dies of bf16 products: real processes, killed by a real SIGILL."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from hilbert_monitor.doctor import bf16
from hilbert_monitor.pretrain.data import write_shard
from tests.support.warm import Program

LETHAL = """
import os, signal
if os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_FP16":
    os.kill(os.getpid(), signal.SIGILL)
"""


@pytest.fixture
def lethal(tmp_path, monkeypatch):
    """An environment in which importing torch kills the process, unless oneDNN is told to leave AMX alone."""
    (tmp_path / "torch.py").write_text(LETHAL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for name in (bf16.VARIABLE, "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)


def test_a_product_killed_by_sigill_is_noticed_and_the_variable_helps(lethal, monkeypatch):
    assert not bf16.bf16_products_run()
    monkeypatch.setattr(bf16, "_PRODUCT", "import torch")
    monkeypatch.setenv(bf16.VARIABLE, bf16.WITHOUT_AMX)
    assert bf16.bf16_products_run()


def test_any_other_failure_of_the_child_is_no_sigill(monkeypatch):
    monkeypatch.setattr(bf16, "_PRODUCT", "raise SystemExit(1)")
    assert bf16.bf16_products_run()
    monkeypatch.setattr(bf16, "_PRODUCT", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    assert bf16.bf16_products_run()


def test_a_processor_that_is_well_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(bf16, "_PRODUCT", "pass")
    monkeypatch.delenv(bf16.VARIABLE, raising=False)
    assert not bf16.leave_out_broken_amx()
    assert bf16.VARIABLE not in os.environ


@pytest.mark.sweep
def test_the_tests_set_the_variable_themselves_and_say_so(lethal):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", __file__]
    said = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    assert f"{bf16.VARIABLE}={bf16.WITHOUT_AMX}" in said


# The commands


KILLS_TORCH = """
import os, signal, sys


class Kills:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX512_CORE_FP16":
            os.kill(os.getpid(), signal.SIGILL)


sys.meta_path.insert(0, Kills())
"""
"""Ends a process that loads the real torch while AMX is allowed: stricter than a machine that dies of a product."""

KILLS_THE_PROBE = """
import os, signal, sys
if any("bfloat16" in argument for argument in sys.orig_argv):
    os.kill(os.getpid(), signal.SIGILL)
"""

DOCTOR = """
import sys, types
from hilbert_monitor.cli import app
from hilbert_monitor.doctor import bf16

probe = bf16.leave_out_broken_amx


def leave_out_broken_amx():
    broken = probe()
    import torch
    sys.modules["hilbert_monitor.doctor.interference"] = types.ModuleType("interference")  # it loads Lightning
    from hilbert_monitor.doctor import report
    from hilbert_monitor.doctor.finding import Check, outcome_of

    product = torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
    check = Check("exactness", "a product", lambda: outcome_of(product[0, 0] == 64, "64"))
    report.ROOMS = (types.SimpleNamespace(checks=lambda device, sizes: [check]),)
    return broken


bf16.leave_out_broken_amx = leave_out_broken_amx  # the doctor as it is, with one check instead of forty
app()
"""


def machine(site, folder):
    """The environment of a machine that a sitecustomize makes."""
    (folder / "sitecustomize.py").write_text(site)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    environment = {name: value for name, value in os.environ.items() if name != bf16.VARIABLE}
    return environment | {"PYTHONPATH": path, "COLUMNS": "250", "NO_COLOR": "1"}


def one_line(text):
    return " ".join(text.replace("│", " ").split())


@pytest.mark.sweep
def test_the_doctor_names_the_cause_and_the_variable_and_lives_to_check_the_rest(tmp_path):
    command = [sys.executable, "-c", DOCTOR, "doctor", "--json", "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, env=machine(KILLS_TORCH, tmp_path))
    text = one_line(done.stdout + done.stderr)
    assert done.returncode == 1, text
    findings = json.loads((tmp_path / "out.json").read_text())["findings"]
    assert [(f["claim"], f["verdict"]) for f in findings] == [("processor", "FAILED"), ("exactness", "ok")]
    assert "announces AMX and lacks it: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in findings[0]["measured"]
    assert "1 claim failed: processor; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts" in text


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_pretraining_on_such_a_cpu_is_refused_in_bf16_and_not_in_fp32(precision, tmp_path):
    for name in ("fineweb_train_000.bin", "fineweb_val_000.bin"):
        write_shard(tmp_path / name, numpy.arange(200, dtype="uint16") % 64)
    numbers = ["width=16", "head_dim=8", "blocks=1", "context=8", "vocab_size=64", "updates=1", "panel_size=8"]
    numbers += ["global_batch=2", "micro_batch=2", "validation_tokens=16", f"precision={precision}"]
    command = ["-m", "hilbert_monitor", "pretrain", "--size", "demo", "--data", str(tmp_path), "--accelerator", "cpu"]
    command += ["--quiet", *(part for number in numbers for part in ("--set", number))]
    program = Program(*command, env=machine(KILLS_THE_PROBE, tmp_path))
    code, text = program.wait(), one_line(program.output)
    if precision == "32-true":
        assert code == 0, text
        return
    assert code == 2, text
    assert "the recipe trains in bf16-mixed, but bf16 matrix products end a process on this machine (SIGILL)" in text
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts, or train in fp32 with --set" in text
    assert not (tmp_path / "runs").exists()
