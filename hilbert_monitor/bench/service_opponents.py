"""TensorBoard as an opponent: the time it takes to load the scalars of some runs."""

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
    """Return whether TensorBoard is installed."""
    return find_spec("tensorboard") is not None


def write_events(table: Table, folder: Path, copies: int) -> int:
    """Write so many copies of a run's numbers as TensorBoard events; return how many numbers one copy has.

    Every number is an event of its own, as Lightning's logger writes them.
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
            for name, (values, exists) in columns.items():
                if exists[row]:
                    value = summaries.Summary.Value(tag=name, simple_value=values[row])
                    event = protos.Event(wall_time=times[row], step=step, summary=summaries.Summary(value=[value]))
                    writer.write(event.SerializeToString())
                    count += 1
    for copy in range(1, copies):
        (folder / f"run{copy}").mkdir()
        shutil.copy(first, folder / f"run{copy}" / first.name)
    return count


def accumulate(folder: Path) -> tuple[float, int]:
    """Load all points of a folder's runs with TensorBoard's own reader; return the seconds, and how many there are."""
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    start, count = time.perf_counter(), 0
    for run in sorted(folder.iterdir()):
        reader: Any = module.EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        tags = reader.Tags()["scalars"]
        count += sum(len(reader.Scalars(tag)) for tag in tags)
    return time.perf_counter() - start, count


def ingest(folder: Path, last: int) -> float | None:
    """Load all points with TensorBoard's data server, a separate program; return the seconds, None if it is missing.

    Args:
        folder: folder of the runs.
        last: their last step.
    """
    if find_spec("tensorboard_data_server") is None:
        return None
    module = importlib.import_module("tensorboard.data.server_ingester")
    grpc = importlib.import_module("tensorboard.util.grpc_util")
    context = importlib.import_module("tensorboard.context").RequestContext()
    runs = len(list(folder.iterdir()))
    start = time.perf_counter()
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
    while time.perf_counter() - start < 600:
        scalars = ingester.data_provider.list_scalars(context, experiment_id="", plugin_name="scalars")
        if sum(tags[LAST].max_step == last for tags in scalars.values() if LAST in tags) == runs:
            return time.perf_counter() - start
        time.sleep(0.01)
    return None
