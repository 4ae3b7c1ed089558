"""Finds a port on which the ranks can meet."""

from __future__ import annotations

import errno
import socket

DEFAULT_PORT = 29500
"""The default port of torchrun and accelerate."""


def is_port_free(port: int) -> bool:
    """Return True if a run could listen on the port, on all interfaces."""
    try:
        with socket.create_server(("", port)):
            return True
    except OSError as error:
        # Anything else, such as a forbidden socket, is no sign of somebody on the port.
        return error.errno != errno.EADDRINUSE


def free_port(preferred: int) -> int:
    """Return the preferred port, or, where it is taken or 0, one that the system gives."""
    if preferred and is_port_free(preferred):
        return preferred
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
