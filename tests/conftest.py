"""Under CI the same examples are drawn on every run; elsewhere new ones, so that they go on finding things."""

import os

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None)
settings.register_profile("ci", derandomize=True, deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """What a test writes without saying where goes to a folder of its own."""
    monkeypatch.chdir(tmp_path)
