"""An S3 server that is far away: a proxy that adds latency to each request and limits each connection, in a process of its own."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from urllib.parse import urlsplit


class Counts:
    """Requests and answered bytes, shared by the processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.requests, self.nbytes = context.Value("q"), context.Value("q")

    def add(self, requests: int, nbytes: int) -> None:
        with self.requests.get_lock():
            self.requests.value += requests
            self.nbytes.value += nbytes

    def read(self) -> tuple[int, int]:
        time.sleep(0.02)  # what is still being counted
        return self.requests.value, self.nbytes.value


@contextmanager
def far_away(endpoint_url: str, latency_s: float, connection_rate: float | None = None) -> Iterator[tuple[str, Counts]]:
    """A proxy with latency (and so many bytes a second for each connection), in a process of its own: it must not compete with the client
    for an interpreter."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    counts = Counts()
    process = context.Process(target=serve_proxy, args=(endpoint_url, latency_s, connection_rate, there, counts), daemon=True)
    process.start()
    try:
        yield here.recv(), counts
    finally:
        here.send("end")
        process.join(10)


def serve_proxy(endpoint_url: str, latency_s: float, connection_rate: float | None, link: Connection, counts: Counts) -> None:
    """Adds latency and nothing else: answers are spliced through the kernel. (`testing.LatencyProxy` reads what it passes on, which
    takes a core and more time than its latency when it must pass on hundreds of MiB.)"""
    there = urlsplit(endpoint_url)

    def ask(client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(1 << 16):  # no pipelining, and requests without bodies: what arrives at once is one request
            counts.add(1, 0)
            time.sleep(latency_s)
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)

    def answer(client: socket.socket, server: socket.socket) -> None:
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)
        free = 0.0
        try:
            while got := os.splice(server.fileno(), into, 1 << 20):
                counts.add(0, got)
                if connection_rate is not None:
                    free = max(free, time.monotonic()) + got / connection_rate
                    time.sleep(max(0.0, free - time.monotonic()))
                while got:
                    got -= os.splice(out, client.fileno(), got)
        except OSError:
            pass  # the client has gone
        finally:
            os.close(out)
            os.close(into)
            client.close()

    def accept(listener: socket.socket) -> None:
        while True:
            client, _ = listener.accept()
            server = socket.create_connection((there.hostname, there.port))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for work in (ask, answer):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        link.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        link.recv()
