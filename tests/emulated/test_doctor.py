"""The doctor's checks on the emulated device."""

import pytest

from hilbert_monitor.doctor import exactness, increment
from hilbert_monitor.doctor.device import CheckSizes
from hilbert_monitor.doctor.finding import examine
from tests.support.emulation.device import EmulatedDevice

SMALL = CheckSizes(cloud=(700, 16, 64), updates=2, head=(2048, 32), turns=1, patience=300)
ROOMS = {"exactness": exactness, "increment": increment}


@pytest.mark.few(1)
@pytest.mark.parametrize("claim", ROOMS)
def test_every_claim_holds_on_an_accelerator(claim):
    with EmulatedDevice() as device:
        findings = [examine(check) for check in ROOMS[claim].checks(device.device, SMALL)]
    assert findings
    assert {f.verdict for f in findings} <= {"ok", "skipped", "not known"}, [
        f for f in findings if f.verdict == "FAILED"
    ]
    assert sum(f.verdict == "ok" for f in findings) > 5
