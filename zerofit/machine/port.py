"""Finds a free port for the rendezvous of the ranks."""

from __future__ import annotations

import errno
import socket

DEFAULT_PORT = 29500
"""The default port of torchrun and accelerate."""


def is_port_free(port: int) -> bool:
    """Return True if a run could listen on the port on all interfaces."""
    try:
        with socket.create_server(("", port)):
            return True
    except OSError as error:
        # Any other error, such as a forbidden socket, does not mean that the port is in use.
        return error.errno != errno.EADDRINUSE


def free_port(preferred: int) -> int:
    """Return the preferred port, or a free one from the system if it is taken or 0."""
    if preferred and is_port_free(preferred):
        return preferred
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
