"""TensorBoard, which people read their curves with today: the time it takes to load the scalars of some runs."""

from __future__ import annotations

import importlib
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hilbert_monitor.service.following.columns import Table, present

LAST = "train_loss"
"""A scalar that every record has."""


def installed() -> bool:
    """Whether there is a TensorBoard here."""
    return find_spec("tensorboard") is not None


def write_events(table: Table, folder: Path, copies: int) -> int:
    """Write a run's numbers as Lightning's logger does, one event a scalar, so many times; how many numbers they are.

    Lightning has one call of the logger a step, which makes one event of every number.
    """
    protos = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summaries = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    records = importlib.import_module("tensorboard.summary.writer.record_writer")
    columns = {name: (values.tolist(), present(values)) for name, values in table.columns.items() if name != "time"}
    times, count = table.column("time").tolist(), 0
    first = folder / "run0" / "events.out.tfevents.0.bench"
    first.parent.mkdir(parents=True)
    with first.open("wb") as file:
        writer = records.RecordWriter(file)
        writer.write(protos.Event(wall_time=times[0], file_version="brain.Event:2").SerializeToString())
        for row, step in enumerate(table.steps.tolist()):
            for name, (values, there) in columns.items():
                if there[row]:
                    value = summaries.Summary.Value(tag=name, simple_value=values[row])
                    event = protos.Event(wall_time=times[row], step=step, summary=summaries.Summary(value=[value]))
                    writer.write(event.SerializeToString())
                    count += 1
    for copy in range(1, copies):
        (folder / f"run{copy}").mkdir()
        shutil.copy(first, folder / f"run{copy}" / first.name)
    return count


def accumulate(folder: Path) -> tuple[float, int]:
    """Seconds that TensorBoard's own reader needs for the runs of a folder, all points kept; and their number."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    began, count = time.perf_counter(), 0
    for run in sorted(folder.iterdir()):
        loaded: Any = module.EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
        loaded.Reload()
        tags = loaded.Tags()["scalars"]
        count += sum(len(loaded.Scalars(tag)) for tag in tags)
    return time.perf_counter() - began, count


def ingest(folder: Path, last: int) -> float | None:
    """Seconds until TensorBoard's data server, a program of its own, has loaded all points; None if it is not there.

    Args:
        folder: of the runs.
        last: their last step.
    """
    if find_spec("tensorboard_data_server") is None:
        return None
    module = importlib.import_module("tensorboard.data.server_ingester")
    grpc = importlib.import_module("tensorboard.util.grpc_util")
    context = importlib.import_module("tensorboard.context").RequestContext()
    runs = len(list(folder.iterdir()))
    began = time.perf_counter()
    try:
        ingester = module.SubprocessServerDataIngester(
            server_binary=module.get_server_binary(),
            logdir=str(folder),
            reload_interval=0,
            channel_creds_type=grpc.ChannelCredsType.LOCAL,
            samples_per_plugin={"scalars": 0},
        )
        ingester.start()
    except (module.NoDataServerError, module.DataServerStartupError):
        return None
    while time.perf_counter() - began < 600:
        listed = ingester.data_provider.list_scalars(context, experiment_id="", plugin_name="scalars")
        if sum(tags[LAST].max_step == last for tags in listed.values() if LAST in tags) == runs:
            return time.perf_counter() - began
        time.sleep(0.01)
    return None
