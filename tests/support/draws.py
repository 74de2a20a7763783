"""How many examples property-based tests draw: few by default, all of them where sweeps run as well."""

import os

SWEEP = os.environ.get("HILBERT_MONITOR_SWEEP") == "1"
MOST, LEAST = 25, 5


def draws(number):
    """As many examples as a test asks for, or without sweeps a quarter of them: 5 to 25 if it asks for more."""
    return number if SWEEP else min(number, max(LEAST, min(number // 4, MOST)))
