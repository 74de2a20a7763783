"""Masks values that look like secrets, before a run's configuration is written.

A secret is known by its name (`api_key`, `hfToken`, `db.password`), as the `user:password@` of a URL, or by its first
characters. Numbers stay, unless the name is that of a password: `num_key_value_heads` is not masked, and neither is
`sort_key="length"`. The code reads every text once, however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

MASK = "***"
ANY_VALUE = (
    *("password", "passwords", "passwd", "passphrase", "passcode"),
    *("secret", "secrets", "credential", "credentials"),
)
"""Words of a name, or ends of them, whose value is a secret, whatever it is."""
TEXT = ("apikey", "secretkey", "privatekey", "accesskey", "token", "authorization")
"""Words of a name, or ends of them, whose value is a secret unless it is a small number."""
SHORT_TEXT = {"auth", "bearer", "jwt", "cookie", "sig", "signature", "pwd"}
"""Whole words of the same effect."""
SECRET_KEYS = {"api", "access", "secret", "private", "auth", "ssh", "encryption", "signing"}
"""Words before `key` or `keys` that say that it is a secret. Without one, `text_key="caption"` names a column."""
SPECIAL_TOKENS = {
    *("bos", "eos", "pad", "unk", "mask", "sep", "cls", "special", "start", "end", "stop"),
    *("image", "audio", "video", "im", "begin", "new", "next", "first", "last"),
}
"""Words before the tokens of a tokenizer, such as `eos_token`."""
ABOUT = {
    *("path", "dir", "file", "folder", "type", "norm", "mixer", "length", "size", "column", "field", "count", "seen"),
    *("dropout", "dim", "rate", "prob", "weight", "id", "ids", "index", "embedding", "embeddings", "limit", "budget"),
}
"""Last words of harmless names, such as `token_type` and `key_file`."""

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
NUMBER = re.compile(r"[-+.\deE_]{1,12}[kKMmBbTt]?|[-+]?inf|nan")
WORD = re.compile(r"[A-Za-z_]{1,16}")
URL = re.compile(
    r"""(?<=://)(?:[^\s/:@'"]{0,256}:(?!\d{1,5}(?:[/?#,]|$))(?:(?!://)[^\s'"]){0,256}|[^\s/:@'"]{20,256})(?=@)"""
)
KNOWN = re.compile(
    r"\bsk-[\w-]{20,}|\bAIza[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+|\bhf_[A-Za-z]{30,}|\bgh[pousr]_\w{30,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}|\bA[KS]IA[0-9A-Z]{16}\b"
    r"|\bxox[abprs]-[\w-]{10,}|(?<=hooks\.slack\.com/services/)[\w/-]+|(?<=discord\.com/api/webhooks/)[\w/-]+"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]{0,30}-----|\Z)"
)
"""Secrets that are known by how they begin."""
ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?:(?P<flag>--[\w-]+)(?:\s{1,8}(?=[^\s=:])|\s{0,8}[=:]\s{0,8})"""
    r"""|(?P<name>[\w.-]+)(?P<quote>['"]?)\s{0,8}(?P<sign>[=:])\s{0,8})"""
)
"""A name before its value inside a text, as in a query, a command line or the repr of an object."""
SCHEME = re.compile(r"(?i:bearer|basic)\s{1,8}")
QUOTED = re.compile(r"""[A-Za-z]{0,2}(?:'(?:[^'\\]|\\.)*(?:'|\\?$)|"(?:[^"\\]|\\.)*(?:"|\\?$))""", re.DOTALL)
GROUP = re.compile(r"[\w.]{0,100}(?=[\[({])")
BARE = re.compile(r"[^\s&;,'\")\]}]*")


def mask_secrets(value: Any, names: Collection[str] = ()) -> Any:
    """Return dicts, lists, texts and numbers in which secrets are replaced by `***`; `names` are further names."""
    if isinstance(value, dict):
        masked = {mask_urls(name): _masked(name, item, names) for name, item in value.items()}
        said = next((value[name] for name in ("name", "key") if isinstance(value.get(name), str)), "")
        if "value" in value and said:  # {"name": "HF_TOKEN", "value": ...}, as containers have their environment
            masked["value"] = _masked(said, masked["value"], names)
        return masked
    if isinstance(value, list):
        if value and all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in value):
            return [[mask_secrets(name, names), _masked(name, item, names)] for name, item in value]
        # of a command line, the value of a flag is the next item
        flags = ["", *(item if isinstance(item, str) and item.startswith("-") else "" for item in value)]
        return [_masked(flag, item, names) for flag, item in zip(flags, value, strict=False)]
    if isinstance(value, str):
        return _mask_assignments(mask_urls(value), lambda match: True, names)
    return value


def mask_urls(text: str) -> str:
    """Return the text without the user and password of its URLs, and without tokens that are known by their form."""
    return KNOWN.sub(MASK, URL.sub(MASK, text))


def mask_message(text: str) -> str:
    """Return the message of an exception without secrets: `api_key=...` is one, `token_embedding.weight: ...` none."""

    def counts(match: re.Match[str]) -> bool:
        name = match["flag"] or match["name"]
        certain = _kind(name, ()) == "any" or name.lower() == "authorization"
        return certain or match["sign"] == "=" or bool(match["quote"])

    return _mask_assignments(mask_urls(text), counts, ())


def _masked(name: str, value: Any, names: Collection[str]) -> Any:
    kind = _kind(name, names)
    if kind == "any" and not (value is None or value == "" or isinstance(value, bool)):  # says only that there is none
        return MASK
    return _without_texts(value, kind) if kind else mask_secrets(value, names)


def _without_texts(value: Any, kind: str) -> Any:
    """Return the value with every text in it masked that is a secret under a name of this kind."""
    if isinstance(value, dict):
        return {name: _without_texts(item, kind) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_texts(item, kind) for item in value]
    is_text = isinstance(value, str) or (isinstance(value, int) and abs(value) >= 10**12)
    return MASK if is_text and value != "" and not _is_harmless(str(value), kind) else value


def _is_harmless(text: str, kind: str) -> bool:
    """Return True if a text under a name of this kind is harmless: a number, or under a mere `key` a short word."""
    return NUMBER.fullmatch(text) is not None or (kind == "key" and WORD.fullmatch(text) is not None)


def _mask_assignments(text: str, counts: Callable[[re.Match[str]], bool], names: Collection[str]) -> str:
    """Mask the values of names inside a text. `counts` tells whether a match is an assignment."""
    parts, start, place = [], 0, 0
    while (match := ASSIGNMENT.search(text, place)) is not None:
        place = match.end()
        kind = _kind(match["flag"] or match["name"], names)
        if not kind or not counts(match):
            continue  # right behind the sign: the value may contain names
        first, last = _value(text, place)
        bare = text[first:last].strip("'\"")
        if bare in ("", "None", "True", "False", MASK) or (kind != "any" and _is_harmless_group(bare, kind, names)):
            place = last
            continue
        quote = text[first] if text[first] in "'\"" else ""
        closing = quote if quote and last - first > 1 and text[last - 1] == quote else ""
        parts += [text[start:first], quote, MASK, closing]
        start = place = last
    return "".join([*parts, text[start:]])


def _value(text: str, place: int) -> tuple[int, int]:
    """Return where the value at a place of a text begins and ends: a text in quotes, a group in brackets, or a word."""
    scheme = SCHEME.match(text, place)
    place = scheme.end() if scheme else place
    if quoted := QUOTED.match(text, place):
        return place, quoted.end()
    if group := GROUP.match(text, place):
        return place, _end_of_group(text, group.end())
    bare = BARE.match(text, place)
    return place, bare.end() if bare else place


def _end_of_group(text: str, place: int) -> int:
    """Return the place behind the bracket that closes the one at a place; the end of the text if none does."""
    depth = 0
    while place < len(text):
        quoted = QUOTED.match(text, place) if text[place] in "'\"" else None
        depth += (text[place] in "[({") - (text[place] in "])}")
        place = quoted.end() if quoted else place + 1
        if not depth:
            return place
    return place


def _is_harmless_group(text: str, kind: str, names: Collection[str]) -> bool:
    """Return True if a value inside a text is harmless: also a group without texts and names of secrets."""
    if text[-1] not in "])}":
        return _is_harmless(text, kind)
    return not (
        "'" in text or '"' in text or any(_kind(m["flag"] or m["name"], names) for m in ASSIGNMENT.finditer(text))
    )


def _kind(name: str, names: Collection[str]) -> str:
    """Return which values of a name are secrets: "any", "text", "key" for all texts but short words, or "" for none."""
    if name in names or name.lstrip("-") in names:
        return "any"
    words = [word.lower() for word in WORDS.findall(name[-200:])]
    if any(word.endswith(ANY_VALUE) for word in words):
        return "any"
    if not words or words[-1] in ABOUT:
        return ""
    if words[-1] == "pass" and (len(words) == 1 or words[-2] in ("db", "user", "admin", "smtp", "mail")):
        return "text"
    kind = ""
    for before, word in zip(["", *words], words, strict=False):
        special = before in SPECIAL_TOKENS or word.removesuffix("token") in SPECIAL_TOKENS
        if word in SHORT_TEXT or (word.endswith(TEXT) and not special):
            return "text"
        if word == "tokens" and before in SECRET_KEYS | {"refresh", "bearer", "hf", "hub"}:
            return "text"
        if word in ("key", "keys"):
            if before in SECRET_KEYS:
                return "text"
            kind = "key"
    return kind
