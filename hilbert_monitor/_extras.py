"""The optional parts of the package, called extras, and the error when one is not installed."""

from __future__ import annotations

EXTRAS = {
    "torch": "train",
    "lightning": "train",
    "tokenizers": "train",
    "fastapi": "serve",
    "plotly": "serve",
    "tsdownsample": "serve",
    "uvicorn": "serve",
}
"""The extra that installs a package."""


class MissingExtraError(ModuleNotFoundError):
    """A package is not installed, and an extra would install it."""


def missing_extra(wanted: str, error: ModuleNotFoundError) -> MissingExtraError | None:
    """Return an error that names the extra to install, or None if no extra installs the module that is missing.

    `wanted` is what the user asked for: a name of the package or a command.
    """
    module = error.name or ""
    extra = EXTRAS.get(module.partition(".")[0])
    if extra is None:
        return None
    return MissingExtraError(
        f'{wanted} needs {module}, which is not installed: pip install "hilbert-monitor[{extra}]"', name=module
    )
