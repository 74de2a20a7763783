"""The layers of a run, in a file of their own: ROOT/RUN/layers.jsonl, a line for each step at which they are measured.

A run without it has none: the file is made with the first line. Attempts begin with a marker, as in steps.jsonl.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ._lines import LineFile, Marker, blocks, items, line_of
from .json_values import plain
from .record import LayerRecord

LAYERS = "layers.jsonl"


as_layers = msgspec.json.Decoder(LayerRecord, strict=False)


class LayerFile:
    """Writes the layers of one attempt; the file is opened with the first record.

    Args:
        folder: of the run.
        attempt: its number.
        first_step: the step that it goes on from.
    """

    def __init__(self, folder: Path, attempt: int, first_step: int) -> None:
        self.path, self._marker = folder / LAYERS, Marker(attempt, first_step)
        self._file: LineFile | None = None

    def append(self, record: LayerRecord) -> None:
        """Add a record."""
        if self._file is None:
            file = LineFile(self.path)
            file.append(line_of(self._marker))
            self._file = file
        self._file.append(msgspec.json.encode(plain(msgspec.to_builtins(record))))

    def close(self) -> None:
        """Force the records to the disk, and close the file."""
        if self._file is not None:
            self._file.close()


def read_layers(folder: Path) -> list[LayerRecord]:
    """Return the records that count: those of a resumed run without what came after the step it went on from."""
    records: list[LayerRecord] = []
    for _, block in blocks(folder / LAYERS):
        for item in items(block, as_layers):
            if isinstance(item, Marker):
                records = [record for record in records if record.step <= item.first_step]
            elif item is not None:
                records.append(item)
    return records
