"""Which runs are seeds of one, and which differ in more.

A mean is over runs that differ in the seed alone. What a key of the configuration that differs between runs means is
decided by its values over all runs of a model:

- It has one value for each optimizer: it follows from the optimizer, as a learning rate that was tuned for it.
- It is the seed, or one of several seeds.
- It is a path, a date or a name, and another one in every run: it says nothing.
- Anything else splits the runs of an optimizer into groups.

A number that differs in every run splits too: in a random search that is the learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hilbert_monitor.runs.run import Run
from hilbert_monitor.service.following.text import clip

from .series import has_curve

FIRST = ("AdamW", "RowNorm")
"""The optimizers that come first, in this order; the others follow by name."""
SEED = re.compile(r"(^|[._-])seeds?(_everything)?$", re.IGNORECASE)
"""The end of a key that holds a seed."""
NAME = re.compile(r"[\d/\\]")
"""What a path, a date or a name has that tells runs apart, and a word such as "cosine" has not."""
SHOWN = 60
"""Characters of a value in the name of a group, at most."""

Values = dict[str, str]


@dataclass(frozen=True, slots=True)
class Roles:
    """What each key of the configuration that differs between runs means. Keys are sorted."""

    splitting: tuple[str, ...] = ()
    """Runs that differ in one of these are in different groups."""
    following: tuple[str, ...] = ()
    """Keys with one value for each optimizer."""
    seeding: tuple[str, ...] = ()
    naming: tuple[str, ...] = ()
    """Keys that differ in every run and say nothing."""
    values: dict[str, Values] = field(default_factory=dict, compare=False, repr=False)
    """The settings of each run in which not all runs agree, by its id."""

    def settings(self, run: Run) -> tuple[str | None, ...]:
        """A run's values of the keys that split; None where it does not have the key."""
        values = self.values.get(run.id, {})
        return tuple(values.get(key) for key in self.splitting)

    def seed(self, run: Run) -> tuple[int | str | None, ...]:
        """A run's seed, and the further seeds of its configuration."""
        values = self.values.get(run.id, {})
        return run.seed, *(values.get(key) for key in self.seeding)


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of an optimizer that differ in the seed alone."""

    name: str
    """The optimizer, and the settings that tell the group from others of the optimizer: "AdamW, lr=0.1"."""
    optimizer: str
    settings: tuple[str | None, ...]
    """The values of the keys that split."""
    chosen: str | None
    """The value of the key that a reader chose to split by."""
    runs: tuple[Run, ...]


def find_roles(runs: Sequence[Run]) -> Roles:
    """Find out what each key that differs means. Runs without a curve have no say, unless none has one."""
    judged = [run for run in runs if has_curve(run)] or list(runs)
    values = differing([run.settings for run in runs])
    settings = {run.id: own for run, own in zip(runs, values, strict=True)}
    keys = sorted({key for run in judged for key in settings[run.id]})
    columns = {key: [settings[run.id].get(key) for run in judged] for key in keys}
    columns = {key: texts for key, texts in columns.items() if len({*texts}) > 1}
    different = _count_different(judged, columns)
    roles: dict[str, list[str]] = {"splitting": [], "following": [], "seeding": [], "naming": []}
    for key, texts in columns.items():
        roles[_role(key, texts, judged, different)].append(key)
    return Roles(**{role: tuple(names) for role, names in roles.items()}, values=settings)


def _count_different(runs: Sequence[Run], columns: dict[str, list[str | None]]) -> int:
    """How many runs differ in more than a name that each run has for itself. Others are one run, made again."""
    names = {key for key, texts in columns.items() if len({*texts}) == len(runs) and all(map(_is_name, texts))}
    told = [texts for key, texts in columns.items() if key not in names]
    return len({*zip([run.optimizer for run in runs], [run.seed for run in runs], *told, strict=True)})


def _role(key: str, texts: Sequence[str | None], runs: Sequence[Run], different: int) -> str:
    if SEED.search(key) or all(text == str(run.seed) for run, text in zip(runs, texts, strict=True)):
        return "seeding"
    pairs = {(run.optimizer, text) for run, text in zip(runs, texts, strict=True)}
    if len(pairs) == len({run.optimizer for run in runs}):
        return "following"
    is_unique = len({*texts}) in (len(runs), different)
    return "naming" if is_unique and all(map(_is_name, texts)) else "splitting"


def _is_name(text: str | None) -> bool:
    """Whether a text may be a path, a date or a name: it has a digit or a slash, and is no number and no list."""
    if text is None or not NAME.search(text):
        return False
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):  # no JSON, or none that can be read
        return True
    return False


def group_runs(runs: Sequence[Run], roles: Roles, by: str = "") -> list[Group]:
    """The groups of some runs: AdamW and RowNorm first, then by optimizer and settings.

    Args:
        runs: runs of one model.
        roles: what their settings mean.
        by: a key of the configuration or of the environment that a reader chose to split by too.
    """
    chosen = setting_values(runs, by) if by else dict.fromkeys((run.id for run in runs), None)
    members: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        members.setdefault((run.optimizer, roles.settings(run), chosen[run.id]), []).append(run)
    keys = sorted(members, key=lambda key: (optimizer_order(key[0]), *map(natural_order, (key[2], *key[1]))))
    names = _names(keys, roles.splitting, by)
    return [Group(name, key[0], key[1], key[2], tuple(members[key])) for name, key in zip(names, keys, strict=True)]


def _names(keys: Sequence[tuple[Any, ...]], splitting: Sequence[str], by: str) -> list[str]:
    """A name for each group, with the settings in which the groups of its optimizer differ. No two are equal."""
    short = short_names([*splitting, by] if by else splitting)
    differs = {
        optimizer: [len({key[1][place] for key in keys if key[0] == optimizer}) > 1 for place in range(len(splitting))]
        for optimizer in {key[0] for key in keys}
    }
    names: dict[str, None] = {}
    for optimizer, settings, chosen in keys:
        parts = [clip(optimizer, SHOWN)]
        if by:
            parts.append(_part(short[by], chosen))
        for key, value, tells in zip(splitting, settings, differs[optimizer], strict=True):
            if tells and key != by:
                parts.append(_part(short[key], value))
        name, count = ", ".join(parts), 1
        while (unique := name if count == 1 else f"{name} ({count})") in names:
            count += 1
        names[unique] = None
    return list(names)


def _part(key: str, value: str | None) -> str:
    return f"no {key}" if value is None else f"{key}={clip(value, SHOWN)}"


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last part of each key, or the whole key where others end alike."""
    keys = list(dict.fromkeys(keys))
    lasts = [key.rsplit(".", 1)[-1] for key in keys]
    return {key: clip(last if lasts.count(last) == 1 else key, SHOWN) for key, last in zip(keys, lasts, strict=True)}


def differing(settings: Sequence[Mapping[str, str]]) -> list[Values]:
    """The settings of each run that not all runs have."""
    items = [frozenset(own.items()) for own in settings]
    common = frozenset.intersection(*items) if items else frozenset()
    return [dict(own - common) for own in items]


def setting_values(runs: Sequence[Run], key: str) -> dict[str, str | None]:
    """The value of a key in each run, by its id. The configuration goes before the environment."""
    return {run.id: {**run.environment, **run.settings}.get(key) for run in runs}


def offered_keys(runs: Sequence[Run], roles: Roles) -> list[str]:
    """The keys that runs can be split by: those that differ. Those that split them anyway come first."""
    environment = {key for own in differing([run.environment for run in runs]) for key in own}
    return [
        *roles.splitting,
        *roles.following,
        *roles.seeding,
        *roles.naming,
        *sorted(environment - {key for own in roles.values.values() for key in own}),
    ]


def differences(runs: Sequence[Run], roles: Roles) -> str:
    """Sentences that say in what the runs differ besides optimizer and seed; empty if in nothing."""
    following = [key for key in roles.following if not all(_names_optimizer(run, roles, key) for run in runs)]
    optimizers = listed(sorted({clip(run.optimizer, SHOWN) for run in runs}, key=optimizer_order))
    sentences = [
        f"Grouped by {listed(short_names(roles.splitting).values())}." if roles.splitting else "",
        f"{optimizers} also differ in {listed(short_names(following).values())}." if following else "",
        f"Each run has its own {listed(short_names(roles.naming).values())}." if roles.naming else "",
    ]
    return " ".join(filter(None, sentences))


def _names_optimizer(run: Run, roles: Roles, key: str) -> bool:
    return run.optimizer.lower() in (roles.values[run.id].get(key) or "").lower()


def listed(words: Iterable[str], limit: int = 6) -> str:
    """Words with commas and an "and"; of many, the first and how many more there are."""
    words = list(words)
    words = words if len(words) <= limit else [*words[: limit - 1], f"{len(words) - limit + 1} more"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def optimizer_order(optimizer: str) -> tuple[int, str]:
    """A key that sorts optimizers: AdamW and RowNorm first, then by name."""
    return (FIRST.index(optimizer) if optimizer in FIRST else len(FIRST), optimizer)


def natural_order(text: str | None) -> tuple[int, float, str]:
    """A key that sorts numbers by size, before other texts; what is missing comes last."""
    if text is None:
        return 2, 0.0, ""
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, text
    return (0, number, text) if number == number else (1, 0.0, text)
