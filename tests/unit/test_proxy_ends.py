"""The tests' proxy leaves nothing behind when it ends, whatever its connections are at: what it left would fail another test."""

from __future__ import annotations

import gc
import socket
import time
from contextlib import ExitStack

from tierstore.testing.proxy import CuttingProxy

_DEADLINE_S = 60.0


def test_a_proxy_that_ends_just_when_its_clients_do_closes_both_ends() -> None:
    for number in range(8):  # pytest fails at what is collected without having been closed
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
            proxy = stack.enter_context(CuttingProxy(f"http://127.0.0.1:{server.getsockname()[1]}"))
            address = ("127.0.0.1", int(proxy.endpoint_url.rpartition(":")[2]))
            clients = [socket.create_connection(address) for _ in range(30)]
            end = time.monotonic() + _DEADLINE_S
            while len(proxy._connections) < len(clients) * (number % 4) // 3:  # some it is just taking, or has not seen yet
                assert time.monotonic() < end, "the proxy does not take its clients"
                time.sleep(0.002)
            for client in clients:
                client.close()
    gc.collect()
