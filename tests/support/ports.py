"""Ports for programs that are told theirs."""

import random
import socket

PLACES = range(20_000, 32_000)
"""Below those that Linux gives away: nobody who asks for any port gets one of these until the program has it."""


def free_port():
    """A port at which nobody listens."""
    while True:
        port = random.SystemRandom().choice(PLACES)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
