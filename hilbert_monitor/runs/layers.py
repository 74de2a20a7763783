"""The layers of a run, in a file of their own: ROOT/RUN/layers.jsonl, a line for each step at which they are measured.

A run without it has none: the file is made with the first line. Attempts begin with a marker, as in steps.jsonl.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from ._lines import LineFile, Marker, blocks, items, line_of
from .json_values import plain

LAYERS = "layers.jsonl"


class Layer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a step did to one parameter, in the ruler that is right for it."""

    kind: str
    """The ruler: "matrix" for the spectral norm, "embedding" for the largest row, "vector" for the root mean square."""
    step: float
    """Size of the increment. Of a matrix a lower bound that is close after some measurements."""
    weight: float
    """Size of the weight after it, in the same ruler."""
    upper: float | None = None
    """Certified upper bound of the increment's spectral norm, where it was computed."""
    ratio: float | None = None
    """RMS(g / sqrt(v)): the gradient over the second moment of an optimizer like Adam. About 1 in a calm run."""
    lr: float | None = None

    @property
    def relative(self) -> float:
        """Size of the increment over that of the weight; infinite for a weight of zero."""
        return self.step / self.weight if self.weight else float("inf")


class LayerRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The layers of one optimizer step, by the names of their parameters."""

    step: int
    time: float
    layers: dict[str, Layer]


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
