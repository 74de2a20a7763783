"""The panel: fixed positions of validation text, at which every measured step is looked at.

A position is one token of one row of a batch. Padding, and tokens after which no loss looks at the prediction, are not
positions.

Hugging Face's labels stand at the token that they are, and are the input ids wherever they are not ignored. Others,
shifted by the loader or for masked tokens, stand where they are predicted.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from hilbert_monitor.runs.reader import PANEL

from .runtime import Ranks, keep_random_state, warn_user

Batch = Any  # token ids (B, T); a tuple or list whose first ids are the input; or a mapping with "input_ids"
SampleIndices = Tensor | Sequence[int]
NAMED = ("loader", "paper")
PanelChoice = Literal["loader", "paper"] | str | list[int] | list[list[int]] | Tensor
IGNORED = -100  # the label of a token that no loss looks at
HASHED = ("labels", "input_ids", "attention_mask")  # what the hash has already, or what does not belong there
ROWS = 8  # of a micro-batch where the text does not come in batches
INDEX_NAME = re.compile(r"((sample|example|item|data|dataset)_)?(index|indices|indexes|idx|idxs)|(sample|example)_ids?")


def _entries(batch: Batch, name: str) -> list[Any]:
    """Return the entry of that name, or all entries of a batch without names."""
    if isinstance(batch, Mapping):
        return [batch.get(name)]
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def token_ids(batch: Batch) -> Tensor | None:
    """Return the input ids of a batch, (B, T), if it has any."""
    candidates = _entries(batch, "input_ids")
    return next((x for x in candidates if isinstance(x, Tensor) and x.ndim == 2 and _is_integer(x)), None)


def input_ids(batch: Batch) -> Tensor:
    """Return the input ids of a batch, (B, T); refuse one that has none."""
    ids = token_ids(batch)
    if ids is None:
        raise ValueError(
            f"found no token ids in a batch of type {type(batch).__name__}: a batch is a tensor of integers (B, T), a"
            ' tuple or list that has one, or a dict that has one as "input_ids"; for other forms give the ids of the'
            " text itself as panel=..."
        )
    return ids


def token_count(batch: Batch) -> int:
    """Return how many tokens a batch has, also a dataclass or a list of samples; 0 if it does not tell."""
    if is_dataclass(batch) and not isinstance(batch, Mapping | type):
        batch = {field.name: getattr(batch, field.name, None) for field in fields(batch)}
    ids = token_ids(batch)
    if ids is not None:
        return ids.numel()
    samples = batch if isinstance(batch, list | tuple) else ()
    texts = [sample.get("input_ids") for sample in samples if isinstance(sample, Mapping)]
    return sum(len(text) for text in texts if isinstance(text, list) or (isinstance(text, Tensor) and text.ndim == 1))


def sample_indices(batch: Batch) -> SampleIndices | None:
    """Return the indices of a batch's samples, if it has them under one of the usual names. Nothing is read of them."""
    parts = [batch, *batch] if isinstance(batch, list | tuple) else [batch]
    for part in parts:
        named = part if isinstance(part, Mapping) else part._asdict() if hasattr(part, "_asdict") else {}
        for x in (value for name, value in named.items() if INDEX_NAME.fullmatch(str(name))):
            if isinstance(x, Tensor) and x.ndim == 1 and _is_integer(x) and x.layout is torch.strided:
                return x
            if isinstance(x, list | tuple) and x and all(type(index) is int for index in x):
                return x
    return None


def next_tokens(batch: Batch) -> Tensor:
    """Return the token that each position of a batch predicts, (B, T) on the CPU; IGNORED where no loss looks at it."""
    for targets in _targets(batch):
        return targets.long().cpu()
    following = input_ids(batch).long().masked_fill(~_attended(batch), IGNORED)[:, 1:]
    return torch.nn.functional.pad(following, (0, 1), value=IGNORED).cpu()


def positions_of(batch: Batch) -> Tensor:
    """Return the positions of a batch that count, as ascending indices into its B * T, on the CPU."""
    counts = _attended(batch)
    for targets in _targets(batch):
        counts = counts & (targets != IGNORED).to(counts.device)
    return counts.flatten().nonzero().squeeze(1).cpu()


def with_tensors(batch: Batch, change: Callable[[Tensor], Any]) -> Batch:
    """Return a batch with every tensor changed, in plain dicts, lists and tuples."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: with_tensors(value, change) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return (list if isinstance(batch, list) else tuple)(with_tensors(value, change) for value in batch)
    return batch


def select_rows(batch: Batch, positions: Tensor) -> tuple[Batch, Tensor]:
    """Copy the rows of a batch that hold positions to the CPU; return them, and the positions within them."""
    B, T = input_ids(batch).shape
    used = torch.zeros(B, dtype=torch.bool)
    used[positions // T] = True
    rows = used.nonzero().flatten()

    def narrow(x: Tensor) -> Tensor:
        x = x.detach()
        if x.ndim == 0 or len(x) != B:
            return x.to("cpu", copy=True)
        return x.index_select(0, rows.to(x.device)).cpu()  # torch 2.9 cannot index uint16 with brackets

    row = used.cumsum(0)[positions // T] - 1
    return with_tensors(batch, narrow), row * T + positions % T


def _attended(batch: Batch) -> Tensor:
    """Return where the text of a batch is not padding, (B, T)."""
    ids, mask = input_ids(batch), batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return torch.ne(mask, 0).to(ids.device)
    return torch.ones_like(ids, dtype=torch.bool)


def _targets(batch: Batch) -> Iterator[Tensor]:
    """Yield what a batch says of the token that each position predicts, (B, T).

    Of a tuple or list all integers of the ids' shape are labels. Text of one repeated token does not tell where labels
    stand: then those that have a name are Hugging Face's.
    """
    ids = input_ids(batch)
    for labels in _entries(batch, "labels"):
        if not isinstance(labels, Tensor) or labels is ids or not _is_integer(labels) or labels.shape != ids.shape:
            continue
        text, ignored = ids.to(labels.device), labels == IGNORED
        unshifted = bool(((labels == text) | ignored).all()) and not bool(ignored.all())
        if unshifted and not isinstance(batch, Mapping):
            unshifted = not bool(((labels[:, :-1] == text[:, 1:]) | ignored[:, :-1]).all())
        yield torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED) if unshifted else labels


def _is_integer(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


@dataclass(frozen=True, eq=False)
class Panel:
    """Micro-batches of validation text on the CPU, without rows that have no position, and which positions count."""

    batches: tuple[Batch, ...]
    positions: tuple[Tensor, ...]
    """For each micro-batch indices into its B * T positions, ascending; int64."""
    order: tuple[Tensor, ...] = ()
    """For each micro-batch the places of its rows in the text, if they do not follow each other."""

    @property
    def size(self) -> int:
        """Number of positions."""
        return sum(map(len, self.positions))

    @cached_property
    def hash(self) -> str:
        """SHA-256, in hex, of all that the hidden states depend on, besides the weights.

        Row by row: the tokens up to the last position, the places of the positions among them, and what else the batch
        has for each token. Neither padding nor the size of micro-batches enters, nor a device nor a dtype.
        """
        entries: list[tuple[int, bytes]] = []
        for k, (batch, positions) in enumerate(zip(self.batches, self.positions, strict=True)):
            ids, attention, start = input_ids(batch), _attended(batch), len(entries)
            named = batch if isinstance(batch, Mapping) else {}
            others = [named[name] for name in sorted(named) if name not in HASHED]
            others = [x for x in others if isinstance(x, Tensor) and _is_integer(x) and x.shape == ids.shape]
            rows, columns = positions // ids.shape[1], positions % ids.shape[1]
            for row in range(len(ids)):
                places = attention[row].cumsum(0)[columns[rows == row]] - 1
                end = int(places.max()) + 1
                texts = [x[row].long()[attention[row]][:end].tolist() for x in (ids, *others)]
                numbers = [end, len(places), *texts[0], *places.tolist(), *(n for text in texts[1:] for n in text)]
                place = int(self.order[k][row]) if self.order else start + row
                entries.append((place, struct.pack(f"<{len(numbers)}q", *numbers)))
        return hashlib.sha256(b"".join(line for _, line in sorted(entries))).hexdigest()

    @cached_property
    def number(self) -> int:
        """A number below 2^48 that two panels have in common if they have the same text in the same micro-batches."""
        shapes = [tuple(input_ids(batch).shape) for batch in self.batches]
        return int(hashlib.sha256(f"{self.hash} {shapes}".encode()).hexdigest()[:12], 16)

    @classmethod
    def of_tokens(cls, tokens: Tensor | Sequence[Any], size: int = 8192, context: int = 1024) -> Panel:
        """Take the first `size` positions of one text or of several, in rows of `context` tokens at most."""
        if not context >= 1:
            raise ValueError(f"context must be at least one token, got {context}")
        rows = [tokens] if len(tokens) and not getattr(tokens[0], "ndim", isinstance(tokens[0], Sequence)) else tokens
        texts = [torch.as_tensor(row) for row in rows]
        for text in texts:
            if text.ndim != 1 or not (_is_integer(text) or not len(text)):
                raise ValueError(
                    f"tokens must be integer ids with one or two dimensions, got rows of shape {tuple(text.shape)} and"
                    f" dtype {text.dtype}: give the ids that the model takes"
                )
        pieces = (piece.long() for text in texts if len(text) for piece in torch.split(text[:size], context))
        alike = (torch.stack(list(same)) for _, same in groupby(pieces, len))
        return cls.of_batches((batch for rows in alike for batch in torch.split(rows, ROWS)), size)

    @classmethod
    def of_batches(cls, batches: Iterable[Batch], size: int = 8192) -> Panel:
        """Take the first `size` positions of batches, which are copied; ask for no more batches than are needed."""
        if not size >= 1:
            raise ValueError(f"a panel has at least one position, got size={size}")
        parts: list[tuple[Batch, Tensor]] = []
        for batch in batches:
            if not _add(parts, batch, size):
                break
        if not parts:
            raise ValueError(
                f"found no position in the validation text, of {size} asked for: it is empty, or all padding and labels"
                f" of {IGNORED}"
            )
        panel = cls(*zip(*parts, strict=True))
        _warn_if_few(panel.size, size)
        return panel

    @classmethod
    def joined(cls, parts: Sequence[Panel], *, interleaved: bool = False) -> Panel:
        """Return panels as one: one after the other, or with their first rows before their second ones."""
        order: list[Tensor] = []
        for number, panel in enumerate(parts):
            counts = [len(input_ids(batch)) for batch in panel.batches]
            order += torch.split(number + len(parts) * torch.arange(sum(counts)), counts)
        batches = tuple(batch for panel in parts for batch in panel.batches)
        positions = tuple(positions for panel in parts for positions in panel.positions)
        return cls(batches, positions, tuple(order) if interleaved else ())

    @cached_property
    def saved(self) -> dict[str, Any]:
        """The panel as plain types, for JSON and for a checkpoint."""
        return {
            "hash": self.hash,
            "batches": [_to_plain(batch) for batch in self.batches],
            "positions": [x.tolist() for x in self.positions],
            "order": [x.tolist() for x in self.order],
        }

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Panel:
        """Return the panel that was `saved`."""
        positions, order = (tuple(map(torch.tensor, saved[name])) for name in ("positions", "order"))
        panel = cls(tuple(map(_from_plain, saved["batches"])), positions, order)
        if panel.hash != saved["hash"]:
            raise ValueError("the saved panel is damaged, as its hash is another: pass panel=... again")
        return panel

    @classmethod
    def of_run(cls, folder: str | os.PathLike[str]) -> Panel:
        """Return the panel of another run, from its folder."""
        with open(os.path.join(folder, PANEL), "rb") as file:
            return cls.restored(msgspec.json.decode(file.read()))


def check_panel_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a path unless it is the folder of a run with a panel."""
    if not os.path.isfile(os.path.join(path, PANEL)):
        raise ValueError(
            f'panel takes "loader" or "paper" of a Trainer, token ids, or the folder of a run with a {PANEL}, got'
            f" {os.fspath(path)!r}: a text has to be tokenized first"
        )


def _to_plain(x: Any) -> Any:
    """Return a part of a batch as plain types; None for what the model can hardly need."""
    if isinstance(x, Tensor):
        entries = x.flatten().tolist()
        if x.is_floating_point():
            entries = list(map(str, entries))  # JSON has no inf
        return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape), "entries": entries}
    if isinstance(x, Mapping):
        return {"dict": {str(name): _to_plain(value) for name, value in x.items()}}
    if isinstance(x, list | tuple):
        return {type(x).__name__: list(map(_to_plain, x))}
    return x if isinstance(x, str | int | float) else None


def _from_plain(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    if "dtype" in x:
        entries = [float(entry) if isinstance(entry, str) else entry for entry in x["entries"]]
        return torch.tensor(entries, dtype=getattr(torch, x["dtype"])).view(x["shape"])
    if "dict" in x:
        return {name: _from_plain(value) for name, value in x["dict"].items()}
    return list(map(_from_plain, x["list"])) if "list" in x else tuple(map(_from_plain, x["tuple"]))


def _add(parts: list[tuple[Batch, Tensor]], batch: Batch, size: int) -> bool:
    """Copy what a batch adds to the first `size` positions; return True if some are still missing."""
    missing = size - sum(len(positions) for _, positions in parts)
    if missing <= 0:
        return False
    with torch.inference_mode(False):  # inference tensors could not be used outside of it
        positions = positions_of(batch)[:missing]
        if len(positions):
            parts.append(select_rows(batch, positions))
    return len(positions) < missing


def _warn_if_few(found: int, size: int) -> None:
    if found < size:
        warn_user(f"the validation text has {found} positions, fewer than the {size} asked for", stacklevel=3)


GivenPanel = Panel | Tensor | Iterable[Any] | str | os.PathLike[str]  # also batches, or the folder of a run with one


def panel_from(given: GivenPanel, size: int, *, ranks: Ranks, saved: dict[str, Any] | None = None) -> Panel | None:
    """Make a panel of what a user gives. Called on every rank of `ranks`; None if another rank could not make its own.

    The `saved` panel takes the place of batches, which may have been shuffled, but not of token ids.
    """
    panel: Panel | None = None
    try:
        panel = _own_panel(given, size, saved)
    finally:  # also after a failure: the other ranks wait for this one
        panel = _share(panel, size, ranks, reader=ranks.rank)
    return panel


def _own_panel(given: Any, size: int, saved: dict[str, Any] | None) -> Panel:
    if isinstance(given, Panel):
        return given
    if isinstance(given, str | os.PathLike):
        return Panel.of_run(given)
    first = given[0] if isinstance(given, list | tuple) and given else None
    text = isinstance(first, list) and bool(first) and isinstance(first[0], int)
    text = text or (isinstance(first, Tensor) and first.ndim < 2)  # no batch has one dimension only
    if isinstance(given, Tensor | np.ndarray) or isinstance(first, int) or text:
        return Panel.of_tokens(given, size)
    if saved is not None:
        return Panel.restored(saved)
    makers = [getattr(owner, "generator", None) for owner in (given, getattr(given, "sampler", None))]
    states = [(maker, maker.get_state()) for maker in makers if isinstance(maker, torch.Generator)]
    try:
        with keep_random_state():
            return Panel.of_batches([given] if isinstance(given, Mapping) else given, size)
    finally:
        for maker, state in states:
            maker.set_state(state)


def _share(
    mine: Panel | None, size: int, ranks: Ranks, *, reader: int, paper: bool = False, more_to_come: bool = False
) -> Panel | None:
    """Return one panel of `size` positions of those that all ranks have; None if a rank has none. Called on every rank.

    The rows of different texts take turns. For the paper each reader has an equal part, one after the other. Too few
    positions make no panel if there is `more_to_come`.
    """
    own: tuple[int, str, list[int]] | None = None
    if mine is not None:
        pairs = zip(mine.batches, mine.positions, strict=True)
        counts = [n for batch, at in pairs for n in torch.bincount(at // input_ids(batch).shape[1]).tolist()]
        own = reader, mine.hash, counts
    told = ranks.gather(own)
    if mine is None or None in told:
        return None
    owners: dict[Any, int] = {}  # the first rank of each reader, or of each text
    for rank in sorted(range(len(told)), key=lambda rank: told[rank][0]):
        owners.setdefault(told[rank][0 if paper else 1], rank)
    rows = [told[rank][2] for rank in owners.values()]
    found, number = sum(map(sum, rows)), len(rows)
    if found < size and more_to_come:
        return None
    if number == 1:
        return mine if mine.size else None
    _warn_if_few(found, size)
    shares = [size * (k + 1) // number - size * k // number for k in range(number)] if paper else _turns(rows, size)
    mine_at = dict(zip(owners.values(), shares, strict=True)).get(ranks.rank, 0)
    part: Panel | None = None
    try:
        part = Panel.of_batches(mine.batches, mine_at) if mine_at else Panel((), ())
    finally:
        parts = ranks.gather(part)
    return None if None in parts else Panel.joined([parts[rank] for rank in owners.values()], interleaved=not paper)


def _turns(rows: list[list[int]], size: int) -> list[int]:
    """Return how many of the first `size` positions each text has, if `rows`, the positions of its rows, take turns."""
    shares, missing = [0] * len(rows), size
    for _, text, count in sorted((row, text, n) for text, counts in enumerate(rows) for row, n in enumerate(counts)):
        shares[text] += min(count, missing)
        missing -= min(count, missing)
    return shares


class PanelCollector:
    """Finds the panel of a run, `size` positions. All ranks have the same one, or none has.

    "loader" chooses the first positions that validation delivers, the rows of all ranks in turn; "paper" an equal part
    from each rank, as the paper's authors take them.
    """

    def __init__(self, choice: PanelChoice, size: int) -> None:
        self.choice, self.size = choice, size
        self._collects = isinstance(choice, str) and choice in NAMED
        self.panel: Panel | None = None
        self._parts: list[tuple[Batch, Tensor]] | None = None  # what this rank has collected

    def take(self, saved: dict[str, Any] | None, *, validates: bool, ranks: Ranks) -> None:
        """Take the panel that the user chose, or the `saved` one of a run that goes on. Called on every rank."""
        panel: Panel | None = None
        try:
            if not self._collects:
                panel = _own_panel(self.choice, self.size, None)
            elif saved is not None:
                panel = Panel.restored(saved)
            elif not validates:
                warn_user(
                    "found no validation data and measures the diameter alone: let the Trainer validate, or pass token"
                    " ids or the folder of a run as panel=..."
                )
        finally:  # also after a failure: the other ranks wait for this one
            hashes = ranks.gather(None if panel is None else panel.hash)
            self.panel = panel if len(set(hashes)) == 1 else None

    def collect(self) -> None:
        """Begin to collect validation batches, if they are wanted and there is no panel yet."""
        self._parts = [] if self.panel is None and self._collects else None

    def offer(self, batch: Batch) -> None:
        """Collect a validation batch, as the model takes it, if this rank still lacks positions."""
        if self._parts is not None:
            _add(self._parts, batch, self.size)

    def finish(self, *, ranks: Ranks, reader: int, more_to_come: bool = False) -> None:
        """Make the panel of what the ranks have collected. Called on every rank. Those of one `reader` share data."""
        if self._parts is None:
            return
        batches, positions = zip(*self._parts, strict=True) if self._parts else ((), ())
        self._parts, mine = None, Panel(batches, positions)
        if not more_to_come and ranks.world == 1 and batches:
            _warn_if_few(mine.size, self.size)
        paper = self.choice == "paper"
        self.panel = _share(mine, self.size, ranks, reader=reader, paper=paper, more_to_come=more_to_come)

    def reset(self) -> None:
        """Forget the panel: the next run finds its own."""
        self.panel = self._parts = None
