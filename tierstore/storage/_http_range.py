"""Ranged GETs by `http.client`, for threads: the body goes from the kernel straight into the caller's memory.

What is not answered by exactly the range is left to whoever asked: `RangeRead.run` says no.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Protocol

__all__ = ["Lines", "RangeRead", "Request", "Rooms", "Server"]

_IDLE_S = 10.0
"""Servers end connections that were idle for longer; a connection younger than that is tried first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a connection goes."""

    host: str
    port: int
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked, but for the range."""

    server: Server
    target: str
    headers: Mapping[str, str]


class Lines:
    """Connections, kept for the next request to their server; from any thread.

    Args:
        connect_timeout_s: Seconds until a connection attempt is given up.
        stall_timeout_s: Seconds without a byte until a read is.
    """

    def __init__(self, connect_timeout_s: float, stall_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._idle: dict[Server, list[tuple[HTTPConnection, float]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, server: Server) -> HTTPConnection | None:
        """A connection that was used a moment ago; None: there is none."""
        stale: list[HTTPConnection] = []
        try:
            with self._lock:
                kept = self._idle.get(server, [])
                while kept:
                    line, used_at = kept.pop()
                    if time.monotonic() - used_at < _IDLE_S:
                        return line
                    stale.append(line)
                return None
        finally:
            for line in stale:
                line.close()

    def connect(self, server: Server) -> HTTPConnection:
        """A new one; raises OSError."""
        if server.tls is None:
            line = HTTPConnection(server.host, server.port, timeout=self._connect_timeout_s)
        else:
            line = HTTPSConnection(server.host, server.port, timeout=self._connect_timeout_s, context=server.tls)
        try:
            line.connect()
            line.sock.settimeout(self._stall_timeout_s)
        except BaseException:
            line.close()
            raise
        return line

    def keep(self, server: Server, line: HTTPConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.setdefault(server, []).append((line, time.monotonic()))
                return
        line.close()

    def close(self) -> None:
        """Closes what is idle; what is in use is closed after its use."""
        with self._lock:
            self._closed = True
            idle = [line for lines in self._idle.values() for line, _ in lines]
            self._idle.clear()
        for line in idle:
            line.close()


class Rooms(Protocol):
    """Where the bytes of a range go (`s3_landing.Landing`)."""

    @property
    def nbytes(self) -> int:
        """The range's length."""

    def room(self, filled: int) -> memoryview:
        """Memory for the bytes from `filled` on: of some of them, one at least."""

    def landed(self, filled: int) -> None:
        """Told when a room is full."""


class RangeRead:
    """One ranged GET, on its way into memory. `run` runs in a thread; `abort` may be called from any other.

    Args:
        lines: The connections.
        request: What is asked.
        start: Where the range begins, in bytes.
        rooms: Where its bytes go; asked and told in the thread of `run`.
        begun: How many of its first bytes are there: they are not asked for.
        check: Looks at the headers (names in lower case) of an answer with status 206 before any byte of its body is taken; what it
            raises passes.
    """

    def __init__(
        self, lines: Lines, request: Request, start: int, rooms: Rooms, begun: int, *, check: Callable[[Mapping[str, str]], None]
    ) -> None:
        self.filled = begun
        """How many bytes of the range are there."""
        self.status = 0
        """The answer's; 0: there was none."""
        self._lines = lines
        self._request = request
        self._range = f"bytes={start + begun}-{start + rooms.nbytes - 1}"
        self._rooms = rooms
        self._begun = begun
        self._check = check
        self._socket: socket.socket | None = None
        self._aborted = False
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Ends it soon: a wait for bytes returns at once, one for a connection after its timeout; and nothing more is read."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is not connected any more
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> bool:
        """Reads. False: no connection could be made, or the server answers something else than such a range; nothing was read.

        Raises:
            ConnectionError: The connection broke; `filled` bytes are there.
            TimeoutError: No byte came for too long; as above.
            Exception: Of `check` and `rooms`.
        """
        server = self._request.server
        line = self._lines.take(server)
        if line is not None:
            try:
                return self._on(line)
            except _Stale:
                pass  # the server had ended it before it saw the request
        try:
            line = self._lines.connect(server)
        except OSError:
            return False
        try:
            return self._on(line)
        except _Stale as error:
            raise ConnectionResetError("the server ended the connection without an answer") from error

    def _on(self, line: HTTPConnection) -> bool:
        """Asks on this connection and reads the answer. The connection is kept where all of it was read."""
        whole = False
        held: socket.socket = line.sock  # `http.client` lets go of it before the body where the server is to end the connection
        try:
            self._hold(held)
            try:
                line.request("GET", self._request.target, headers={**self._request.headers, "Range": self._range})
                answer = line.getresponse()
            except TimeoutError:
                raise
            except (OSError, HTTPException) as error:
                raise _Stale from error
            with answer:
                self.status = answer.status
                if answer.status != 206:
                    return False
                self._check({name.lower(): value for name, value in answer.headers.items()})
                # A range past the object's end is shortened, for one.
                if answer.length != self._rooms.nbytes - self._begun:
                    return False
                self._read(answer, held)
                whole = not answer.will_close
            return True
        finally:
            self._hold(None)
            if whole:
                self._lines.keep(self._request.server, line)
            else:
                line.close()

    def _hold(self, held: socket.socket | None) -> None:
        with self._lock:
            if held is not None and self._aborted:
                raise ConnectionAbortedError("nobody wants it any more")
            self._socket = held

    def _read(self, answer: HTTPResponse, held: socket.socket) -> None:
        """First what came together with the headers, then from the socket itself: the layers between cost half as much as its copy."""
        buffered = True
        while self.filled < self._rooms.nbytes:
            room = self._rooms.room(self.filled)
            at = 0
            while at < room.nbytes:
                got = 0
                if not self._aborted:
                    try:
                        if buffered:
                            there = len(answer.fp.peek())
                            got = answer.readinto(room[at : at + there])
                            buffered = there > got
                        else:
                            got = held.recv_into(room[at:])
                    except ssl.SSLError as error:
                        raise ConnectionResetError("TLS failed in mid-answer") from error
                if not got:
                    raise ConnectionResetError("the connection ended early")
                at += got
                self.filled += got
            self._rooms.landed(self.filled)


class _Stale(Exception):
    """The connection broke before an answer began."""
