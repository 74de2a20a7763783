"""Runs that have only a log, for the tests of alerts: `python -m tests.support.logged_runs FOLDER NAME`, until killed.

plain  makes steps, and wants one every four seconds
long   goes on from what `write_long` wrote
slow   made its last step ten minutes ago, and is patient
stuck  made its last step ten minutes ago
early  says that it serves its metrics, where nobody listens
"""

import os
import sys
import time

from hilbert_monitor.runs.log import RunWriter
from hilbert_monitor.runs.record import Alert, RunInfo, StepRecord

LONG = 200_000
"""Steps of the run `long`: more than a service reads between two scrapes."""
INFO = {
    "plain": {"stalled_after": 4.0},
    "slow": {"stalled_after": 3600.0},
    "early": {"port": 1, "address": "127.0.0.1"},
}


def write_long(folder):
    """Write the first attempt at the run `long`, with a blow-up every thousand steps."""
    writer = RunWriter.open(folder, RunInfo(name="long", head_optimizer="AdamW"))
    step(writer, 1)
    line = (writer.folder / "steps.jsonl").read_text().splitlines()[-1]
    with (writer.folder / "steps.jsonl").open("a") as file:
        file.writelines(line.replace('"step":1,', f'"step":{number},') + "\n" for number in range(2, LONG + 1))
    for number in range(1000, LONG, 1000):
        writer.alert(Alert(step=number, time=time.time(), kind="diameter", value=0.3, expected=0.03, message="far"))
    writer.close(RuntimeError("interrupted"))


def step(writer, number, at=None):
    at = time.time() if at is None else at
    writer.write(StepRecord(step=number, time=at, learning_rate=1e-3, diameter=0.03, train_loss=3.0, tokens=100))


def main(folder, name):
    os.setpgrp()  # as that of runs that train
    first = LONG if name == "long" else 0
    info = RunInfo(name=name, head_optimizer="AdamW", **INFO.get(name, {}))
    writer = RunWriter.open(folder, info, first_step=first, heartbeat=0.5)
    ago = 600.0 if name in ("slow", "stuck") else 0.0
    for number in range(1, 21):
        step(writer, first + number, time.time() - ago + number - 20)
    if ago:
        os.utime(writer.folder / "steps.jsonl", (time.time() - ago,) * 2)
    print("ready", flush=True)
    for number in range(21, 10**6):
        time.sleep(0.15)
        if name in ("plain", "long"):
            step(writer, first + number)


if __name__ == "__main__":
    main(*sys.argv[1:])
