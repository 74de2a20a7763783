"""The texts of tokens, from a tokenizer.json that lies beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .tensor_store import CheckpointError

Names = Callable[[tuple[int, int]], tuple[str, str] | None]


def token_names(path: Path | None) -> Names:
    """Return a function from a pair of tokens to their texts, which knows none without a tokenizer.

    Args:
        path: a tokenizer.json of Hugging Face's tokenizers.
    """
    if path is None:
        return lambda pair: None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # whatever its parser raises
        raise CheckpointError(f"{path} is not a tokenizer.json of Hugging Face's tokenizers: {error}") from None

    def name(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        return tokenizer.id_to_token(token) or "no token"  # a part of a character, or a row of padding

    return lambda pair: (name(pair[0]), name(pair[1]))
