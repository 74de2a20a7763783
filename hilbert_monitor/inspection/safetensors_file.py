"""Reads safetensors files: eight bytes with the length of a header, the header in JSON, and the tensors' bytes.

The format is small enough to be read here, so that the package needs no further dependency. A tensor is mapped, alone:
a file of any size costs the memory of the tensors that are looked at.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tensor_store import CheckpointError, TensorInfo, refuse_pointer

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LARGEST_HEADER = 100_000_000
"""Bytes of a header, at most, as in the format's own implementation."""


class SafetensorsFile:
    """The tensors of one file.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._size = path, path.stat().st_size
        header, self._start = self._read_header()
        self._places: dict[str, tuple[int, int]] = {}
        self.infos: dict[str, TensorInfo] = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            info, begin, end = self._entry(name, entry)
            if info is None:
                continue
            if self._start + end > self._size:
                raise CheckpointError(
                    f"{path} is truncated: it has {self._size:,} bytes, and {name!r} ends at byte"
                    f" {self._start + end:,}; copy or download it again"
                )
            self._places[name] = begin, end
            self.infos[name] = info

    def _entry(self, name: str, entry: Any) -> tuple[TensorInfo | None, int, int]:
        """What the header says of a tensor, and where its bytes are; no info if its dtype is one that no head has."""
        try:
            dtype, shape, (begin, end) = (
                DTYPES.get(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                entry["data_offsets"],
            )
            whole = dtype is None or end - begin == math.prod(shape) * dtype.itemsize
            if not (whole and 0 <= begin <= end):
                raise ValueError
        except (TypeError, KeyError, ValueError, AttributeError):
            raise CheckpointError(
                f"{self.path} is damaged: its header describes {name!r} as {str(entry)[:200]}; copy or"
                " download it again"
            ) from None
        return (None if dtype is None else TensorInfo(shape, dtype)), begin, end

    def _read_header(self) -> tuple[dict[str, Any], int]:
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if self._size < 8 or length > LARGEST_HEADER:
                refuse_pointer(self.path)
                raise CheckpointError(f"{self.path} is not a safetensors file: it does not begin with a header")
            text = file.read(length)
        if len(text) < length:
            raise CheckpointError(
                f"{self.path} is truncated: it has {self._size:,} bytes, and its header alone has {length:,}; copy or"
                " download it again"
            )
        try:
            header = json.loads(text)
        except ValueError:
            raise CheckpointError(f"{self.path} is not a safetensors file: its header is not JSON") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path} is not a safetensors file: its header is no table of tensors")
        return header, 8 + length

    def load(self, name: str) -> Tensor:
        """Return a tensor that is mapped from the file."""
        (begin, end), info = self._places[name], self.infos[name]
        if begin == end:
            return torch.empty(info.shape, dtype=info.dtype)
        at, number = self._start + begin, end - begin
        if at % info.dtype.itemsize:  # a mapping would not be aligned
            data = np.fromfile(self.path, np.uint8, number, offset=at)
        else:  # private, so that torch may take it for writable
            data = np.memmap(self.path, np.uint8, mode="c", offset=at, shape=(number,))
        return torch.from_numpy(data).view(info.dtype).view(info.shape)
