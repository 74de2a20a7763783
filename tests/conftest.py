"""Under CI the same examples are drawn on every run; elsewhere new ones, so that they go on finding things."""

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")
