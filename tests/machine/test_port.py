"""A port in use is not an error."""

from __future__ import annotations

import socket

import pytest

from zerofit.machine.port import free_port, is_port_free


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_taken_while_somebody_listens_on_any_address(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        assert not is_port_free(port)
        assert free_port(port) not in (0, port)
    assert is_port_free(port)
    assert free_port(port) == port


def test_a_port_whose_last_connection_was_just_closed_is_free() -> None:
    # Closed by the server first, so that its side waits in TIME_WAIT.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = server.accept()
            connection.close()
            assert client.recv(1) == b""
    assert is_port_free(port)


def test_port_0_is_replaced_by_a_real_one() -> None:
    port = free_port(0)
    assert port != 0
    assert is_port_free(port)


def test_looking_does_not_take_the_port() -> None:
    port = free_port(0)
    assert [is_port_free(port) for _ in range(3)] == [True, True, True]
