"""Masks values that look like secrets, before a run's configuration is written.

A name says that its value is a secret: `api_key`, `hfToken`, `db.password`. A URL says so by `user:password@`. Numbers
are no secrets unless their name says password: `num_key_value_heads` and `max_tokens` stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

MASK = "***"
ANY_VALUE = {"password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"}
"""Words of a name whose value is a secret, whatever it is."""
TEXT = {"key", "keys", "apikey", "token", "tokens", "authorization"}
"""Words of a name whose value is a secret if it is a text."""
SPECIAL_TOKENS = {"bos", "eos", "pad", "unk", "mask", "sep", "cls", "special", "image", "audio", "video"}
"""Words that go with the tokens of a tokenizer, such as `eos_token`."""

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
URL = re.compile(r"(?<=://)[^\s/:@'\"]*:[^\s'\"]*(?=@)")
ASSIGNMENT = re.compile(
    r"""(?P<name>--[\w-]+(?=\s+[^\s-])|[\w.-]+(?=['"]?\s?[=:]))(?P<sign>['"]?\s?[=:]\s?|\s+)"""
    r"""(?P<value>'[^']*(?:'|$)|"[^"]*(?:"|$)|[^\s&;,'")\]}]+)"""
)
"""A name with its value inside a text, as in a query, a command line or the repr of an object."""


def mask_secrets(value: Any, names: Collection[str] = ()) -> Any:
    """Return a value of plain types in which secrets are replaced by `***`.

    Args:
        value: dicts, lists, texts and numbers.
        names: further names of secrets.
    """
    if isinstance(value, dict):
        return {name: _masked(name, item, names) for name, item in value.items()}
    if isinstance(value, list):  # of a command line, the value of a flag is the next item
        flags = ["", *(item if isinstance(item, str) and item.startswith("--") else "" for item in value)]
        return [_masked(flag, item, names) for flag, item in zip(flags, value, strict=False)]
    if isinstance(value, str):
        return ASSIGNMENT.sub(lambda match: _masked_assignment(match, names), mask_urls(value))
    return value


def mask_urls(text: str) -> str:
    """Return the text without the user and password of its URLs."""
    return URL.sub(MASK, text)


def _masked(name: str, value: Any, names: Collection[str]) -> Any:
    if value is None or value == "" or isinstance(value, bool):  # says only that there is none
        return value
    if _is_secret(name, isinstance(value, int | float), names):
        return MASK
    return mask_secrets(value, names)


def _masked_assignment(match: re.Match[str], names: Collection[str]) -> str:
    name, sign, value = match["name"], match["sign"], match["value"]
    bare = value.strip("'\"")
    number = re.fullmatch(r"[-+.\deE_]+", bare) is not None
    if bare in ("", "None", "True", "False", MASK) or not _is_secret(name, number, names):
        return match[0]
    return f"{name}{sign}{value.replace(bare, MASK)}"


def _is_secret(name: str, number: bool, names: Collection[str]) -> bool:
    """Return True if a value of this name is a secret."""
    words = {word.lower() for word in WORDS.findall(name)}
    if name in names or words & ANY_VALUE:
        return True
    return bool(words & TEXT) and not number and not words & SPECIAL_TOKENS
