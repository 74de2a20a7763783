"""Finds out whether this machine's bf16 matrix products run at all, without dying of the answer.

Some virtual machines announce AMX and do not have it: every bf16 product then ends the process with SIGILL. oneDNN
reads `ONEDNN_MAX_CPU_ISA` when it is loaded, so the variable has to be set before torch is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from .finding import Finding

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_FP16"
"""The largest instruction set of oneDNN that leaves AMX out."""
CAUSE = "bf16 matrix products end a process on this machine (SIGILL), since its processor announces AMX and lacks it"
REMEDY = f"set {VARIABLE}={WITHOUT_AMX} before Python starts"
CLAIM = "processor"
"""Under which the doctor reports it."""

_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"


def leave_out_broken_amx() -> bool:
    """Return whether bf16 products die here; if so, set the variable for this process and its children.

    Call it before torch is imported: afterwards oneDNN has made its choice.
    """
    broken = not bf16_products_run()
    if broken:
        os.environ[VARIABLE] = WITHOUT_AMX
    return broken


def broken_amx_finding() -> Finding:
    """Return the doctor's row about a machine on which bf16 products die."""
    return Finding(CLAIM, "bf16 matrix product, in a child process", "FAILED", f"{CAUSE}: {REMEDY}", 0.0)


def bf16_products_run() -> bool:
    """Return False if a bf16 matrix product is killed by SIGILL in a child process with this environment."""
    child = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, env=dict(os.environ))
    return child.returncode != -signal.SIGILL
