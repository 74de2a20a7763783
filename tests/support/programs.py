"""Programs that are no Python packages and that tests run for real."""

import os
import shutil

import pytest


def needs(program: str) -> str:
    """Return where a program is. Where there is none the test is skipped; under CI=true it fails."""
    found = shutil.which(program)
    if found is None:
        say = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        say(f"{program} is not installed: `make programs` says how")
    return found
