"""Ranges read from the socket itself, whatever way the server sends its answer (`storage._http_range`)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from tierstore.storage._http_range import Lines, RangeRead, Request, Server
from tierstore.testing.sources import pattern

DATA = pattern(300_001)
DEADLINE_S = 60.0


class Memory:
    """All of the range, in rooms of an odd length."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer = memoryview(bytearray(nbytes))
        self.landings: list[int] = []

    def room(self, filled: int) -> memoryview:
        return self.buffer[filled : filled - filled % 70_001 + 70_001]

    def landed(self, filled: int) -> None:
        self.landings.append(filled)


@contextmanager
def answering(answer: Callable[[socket.socket], None], times: int) -> Iterator[Server]:
    """A server that gives so many requests, one after the other, to `answer`; each on a connection of its own."""

    def serve() -> None:
        for _ in range(times):
            with listener.accept()[0] as line:
                line.settimeout(DEADLINE_S)
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += line.recv(65536)
                answer(line)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Server(host="127.0.0.1", port=listener.getsockname()[1], tls=None)
        finally:
            thread.join()


def head(nbytes: int, more: str = "") -> bytes:
    return f"HTTP/1.1 206 Partial Content\r\nContent-Length: {nbytes}\r\n{more}\r\n".encode()


def reading(lines: Lines, server: Server, memory: Memory) -> RangeRead:
    return RangeRead(lines, Request(server=server, target="/file", headers={}), 0, memory, 0, check=lambda told: None)


@pytest.mark.parametrize("nbytes", [1, 4000, 8192, len(DATA)])
@pytest.mark.parametrize("together", [True, False])
def test_an_answer_after_which_the_server_closes_is_read_to_its_end(nbytes: int, together: bool) -> None:
    def answer(line: socket.socket) -> None:
        if together:
            line.sendall(head(nbytes, "Connection: close\r\n") + DATA[:nbytes])
        else:
            line.sendall(head(nbytes, "Connection: close\r\n"))
            line.sendall(DATA[:nbytes])

    memory = Memory(nbytes)
    with answering(answer, 2) as server, closing(Lines(DEADLINE_S, DEADLINE_S)) as lines:
        for _ in range(2):  # the connection is not kept: the server waits for another
            assert reading(lines, server, memory).run()
            assert memory.buffer == DATA[:nbytes]
            memory.buffer[:] = bytes(nbytes)
    assert memory.landings[-1] == nbytes


def test_a_read_that_waits_for_the_last_answer_of_a_connection_is_ended_by_abort() -> None:
    waiting, over = threading.Event(), threading.Event()

    class Waits(Memory):
        def room(self, filled: int) -> memoryview:
            if filled == 70_001:  # all that was sent, in however many pieces it came
                waiting.set()
            return super().room(filled)

    def answer(line: socket.socket) -> None:
        line.sendall(head(len(DATA), "Connection: close\r\n") + DATA[:70_001])
        assert over.wait(DEADLINE_S)

    errors: list[OSError] = []

    def run() -> None:
        try:
            read.run()
        except OSError as error:
            errors.append(error)
        finally:
            over.set()

    with answering(answer, 1) as server, closing(Lines(DEADLINE_S, DEADLINE_S)) as lines:
        read = reading(lines, server, Waits(len(DATA)))
        thread = threading.Thread(target=run)
        thread.start()
        assert waiting.wait(DEADLINE_S)
        read.abort()
        thread.join()
    assert [type(error) for error in errors] == [ConnectionResetError]
    assert read.filled == 70_001


def test_an_answer_that_ends_early_says_how_many_bytes_are_there() -> None:
    def answer(line: socket.socket) -> None:
        line.sendall(head(len(DATA)) + DATA[:100_000])

    memory = Memory(len(DATA))
    with answering(answer, 1) as server, closing(Lines(DEADLINE_S, DEADLINE_S)) as lines:
        read = reading(lines, server, memory)
        with pytest.raises(ConnectionError):
            read.run()
    assert read.filled == 100_000
    assert memory.buffer[:100_000] == DATA[:100_000]
    assert memory.landings == [70_001]
