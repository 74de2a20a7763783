"""A machine that dies of bf16 products, made with a stand-in for torch that kills its process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hilbert_monitor.doctor import bf16

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


def test_the_tests_set_the_variable_themselves_and_say_so(lethal):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", __file__]
    said = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    assert f"{bf16.VARIABLE}={bf16.WITHOUT_AMX}" in said
