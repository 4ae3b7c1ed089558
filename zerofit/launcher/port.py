"""Finds a port on which the ranks can meet."""

from __future__ import annotations

import socket

DEFAULT_PORT = 29500
"""What torchrun and accelerate take."""


def is_free(port: int) -> bool:
    """Return whether this port can be listened on, on every address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def free_port(preferred: int) -> int:
    """Return the preferred port, or, where it is taken or 0, one that the system gives."""
    if preferred and is_free(preferred):
        return preferred
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
