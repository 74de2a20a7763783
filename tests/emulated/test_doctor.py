"""The doctor's checks on the emulated device."""

import pytest
import torch

from hilbert_monitor.doctor import exactness, increment, prediction
from hilbert_monitor.doctor.device import CheckSizes
from hilbert_monitor.doctor.finding import examine
from hilbert_monitor.emulation.device import EmulatedDevice

SMALL = CheckSizes(cloud=(700, 16, 64), updates=2, head=(2048, 32), turns=1, patience=300)
ROOMS = {"exactness": exactness, "increment": increment, "prediction": prediction}


@pytest.mark.parametrize("claim", ROOMS)
def test_every_claim_holds_on_an_accelerator(claim):
    with EmulatedDevice() as device:
        findings = [examine(check) for check in ROOMS[claim].checks(device.device, SMALL)]
    assert findings
    assert {f.verdict for f in findings} <= {"ok", "skipped", "not known"}, [
        f for f in findings if f.verdict == "FAILED"
    ]
    if claim == "prediction":
        assert all("measured" in f.measured and "predicted" in f.measured for f in findings)
    else:
        assert sum(f.verdict == "ok" for f in findings) > 5


def test_a_cpu_is_predicted_without_a_verdict():
    findings = [examine(check) for check in prediction.checks(torch.device("cpu"), SMALL)]
    assert [f.verdict for f in findings] == ["skipped"] * 2
    assert "ms measured" in findings[0].measured
    assert "ms predicted" in findings[0].measured
