"""Ports for servers that a test starts."""

import contextlib
import random
import socket


def ports(count):
    """Ports that nobody uses, and that the system does not give to connections meanwhile: those begin at 32768."""
    found = []
    while len(found) < count:
        port = random.randrange(15000, 32000)
        if port in found:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found
