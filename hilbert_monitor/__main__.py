"""``python -m hilbert_monitor`` is ``hilbert-monitor``."""

from .cli import app

app()
