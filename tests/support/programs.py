"""Programs that tests run and that are not Python packages, such as Chromium and Prometheus."""

import os
import shutil

import pytest


def needs(program: str) -> str:
    """Return the path of a program. If it is not installed the test is skipped, or fails under CI=true."""
    path = shutil.which(program)
    if path is None:
        stop = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        stop(f"{program} is not installed: `make programs` says how")
    return path
