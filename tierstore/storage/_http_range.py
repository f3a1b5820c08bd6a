"""Ranged GETs over sockets of our own: bytes go from the kernel straight into the caller's memory, in the thread that waits for them.

What is answered is HTTP/1.1 (RFC 9110, 9112) with a length. Anything else is left to a whole HTTP client: `RangeRead.run` says no.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Head", "Lines", "RangeRead", "Server"]

_HEAD_NBYTES = 64 << 10
_PIECE_NBYTES = 256 << 10
"""How much is asked of the kernel at once, in bytes: the grain of progress."""
_IDLE_S = 10.0
"""Servers end connections that were idle for longer; a connection younger than that is tried first."""
_WAITALL = socket.MSG_WAITALL if sys.platform == "linux" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a connection goes."""

    host: str
    port: int
    tls: ssl.SSLContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """An answer's status and headers, their names in lower case."""

    status: int
    headers: Mapping[str, str]


@dataclass(slots=True, kw_only=True)
class _Line:
    """One connection."""

    socket: socket.socket
    used_at: float = field(default_factory=time.monotonic)


class Lines:
    """Idle connections, to be used again; from any thread."""

    def __init__(self, connect_timeout_s: float, quiet_s: float) -> None:
        self.connect_timeout_s = connect_timeout_s
        self.quiet_s = quiet_s
        """After so many seconds without a byte a wait returns, for its reader to see whether it is still wanted."""
        self.connected = 0
        """Connections made so far."""
        self._idle: dict[Server, list[_Line]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, server: Server) -> _Line | None:
        """A connection that was used a moment ago; None: there is none."""
        stale: list[_Line] = []
        try:
            with self._lock:
                kept = self._idle.get(server, [])
                while kept:
                    line = kept.pop()
                    if time.monotonic() - line.used_at < _IDLE_S:
                        return line
                    stale.append(line)
                return None
        finally:
            for line in stale:
                line.socket.close()

    def keep(self, server: Server, line: _Line) -> None:
        line.used_at = time.monotonic()
        with self._lock:
            if not self._closed:
                self._idle.setdefault(server, []).append(line)
                return
        line.socket.close()

    def close(self) -> None:
        """Closes what is idle; what is in use is closed after its use."""
        with self._lock:
            self._closed = True
            idle = [line for lines in self._idle.values() for line in lines]
            self._idle.clear()
        for line in idle:
            line.socket.close()


class RangeRead:
    """One ranged GET, on its way into memory. `run` runs in a thread; `abort` may be called from any other.

    Args:
        lines: The connections.
        server: Where it is asked.
        request: The whole request, as it is sent.
        buffer: Memory for exactly the range's bytes (``format "B"``, one dimension, not empty).
        check: Looks at the answer's head (status 206) before any byte of its body is taken; what it raises passes.
        landed: Told, in the same thread, how many bytes of `buffer` are there, each time that `unit` more are, and at the end.
        unit: After how many bytes, counted from `first`.
        first: How many bytes of the first unit came with an earlier request.
    """

    def __init__(
        self,
        lines: Lines,
        server: Server,
        request: bytes,
        buffer: memoryview,
        *,
        check: Callable[[Head], None],
        landed: Callable[[int], None] | None = None,
        unit: int = 1 << 20,
        first: int = 0,
    ) -> None:
        self.filled = 0
        self.status = 0
        """The answer's; 0: there was none."""
        self._lines = lines
        self._server = server
        self._request = request
        self._buffer = buffer
        self._check = check
        self._landed = landed
        self._unit = unit
        self._first = first
        self._socket: socket.socket | None = None
        self._aborted = False
        self._lock = threading.Lock()

    def abort(self) -> None:
        """Ends it soon: a wait for the network returns at once, and nothing more is read."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is not connected yet, or not any more
                    self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> bool:
        """Reads. False: no connection could be made, or the server answers something else than such a range; nothing was read.

        Raises:
            ConnectionError: The connection broke; `filled` bytes are there.
            Exception: Of `check` and `landed`.
        """
        line = self._lines.take(self._server)
        if line is not None:
            try:
                return self._on(line)
            except _Stale:
                pass  # the server had ended it before it saw the request
        try:
            line = _Line(socket=self._connect())
        except OSError:
            return False
        try:
            return self._on(line)
        except _Stale as error:
            raise ConnectionResetError("the server ended the connection without an answer") from error

    def _connect(self) -> socket.socket:
        error: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(self._server.host, self._server.port, type=socket.SOCK_STREAM):
            one = socket.socket(family, kind, protocol)
            try:
                self._holds(one)
                one.settimeout(self._lines.connect_timeout_s)
                one.connect(address)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._server.tls is not None:
                    one = self._server.tls.wrap_socket(one, server_hostname=self._server.host)
                    self._holds(one)
                self._lines.connected += 1  # for a look at it: a rare lost count of two threads at once does not matter
                return self._patient(one)
            except OSError as refused:
                one.close()
                error = refused
        raise error or OSError(f"{self._server.host} has no address")

    def _patient(self, one: socket.socket) -> socket.socket:
        """Waits of `quiet_s`. A blocking socket, where the system has them with a time limit, fills a piece in one call."""
        quiet_s = self._lines.quiet_s
        if not self._waits_for_all:
            one.settimeout(quiet_s)
            return one
        one.settimeout(None)
        limit = struct.pack("ll", int(quiet_s), int(quiet_s % 1 * 1e6))  # struct timeval
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        return one

    @property
    def _waits_for_all(self) -> bool:
        return bool(_WAITALL) and self._server.tls is None

    def _holds(self, one: socket.socket | None) -> None:
        with self._lock:
            if one is not None and self._aborted:
                raise ConnectionAbortedError("nobody wants it any more")
            self._socket = one

    def _on(self, line: _Line) -> bool:
        """Sends the request on this connection and reads the answer. The connection is kept where all of it was read."""
        done = False
        try:
            self._holds(line.socket)
            try:
                line.socket.sendall(self._request)
                head, rest = self._read_head(line.socket)
            except (OSError, ssl.SSLError) as error:
                raise _Stale from error
            self.status = head.status
            if head.status != 206 or head.headers.get("content-length") != str(self._buffer.nbytes) or "transfer-encoding" in head.headers:
                if head.status == 206 and "transfer-encoding" not in head.headers:
                    self._check(head)  # a range past the end of the object is shortened
                return False
            self._check(head)
            self._read_body(line.socket, rest)
            done = head.headers.get("connection", "").lower() != "close"
            return True
        finally:
            self._holds(None)
            if done:
                self._lines.keep(self._server, line)
            else:
                line.socket.close()

    def _read_head(self, one: socket.socket) -> tuple[Head, memoryview]:
        """The head, and what came of the body with it."""
        taken = bytearray(_HEAD_NBYTES)
        memory = memoryview(taken)
        have = 0
        while True:
            # Its first part alone: what comes with it is copied, what comes behind it is not.
            got = self._receive(one, memory[have : have + 4096], 0)
            have += got
            end = taken.find(b"\r\n\r\n", max(0, have - got - 3), have)
            if end >= 0:
                return _parse(bytes(memory[:end])), memory[end + 4 : have]
            if have + 4096 > _HEAD_NBYTES:
                raise ConnectionResetError("the answer's head has no end")

    def _read_body(self, one: socket.socket, rest: memoryview) -> None:
        nbytes = self._buffer.nbytes
        if rest.nbytes > nbytes:
            raise ConnectionResetError("the answer is longer than it says")
        self._buffer[: rest.nbytes] = rest
        self.filled = rest.nbytes
        flags = _WAITALL if self._waits_for_all else 0
        while True:
            edge = min(self.filled + self._unit - (self._first + self.filled) % self._unit, nbytes)
            while self.filled < edge:
                piece = self._buffer[self.filled : min(edge, self.filled + _PIECE_NBYTES)]
                self.filled += self._receive(one, piece, flags)
            if self._landed is not None:
                self._landed(self.filled)
            if self.filled == nbytes:
                return

    def _receive(self, one: socket.socket, into: memoryview, flags: int) -> int:
        """At least one byte. Whoever watches decides how long is too long; four quiet waits are, whoever watches."""
        for _ in range(5):
            if self._aborted:
                break
            try:
                got = one.recv_into(into, into.nbytes, flags)
            except (BlockingIOError, TimeoutError):  # nothing came within `quiet_s`
                continue
            except ssl.SSLError as error:
                raise ConnectionResetError("TLS failed in mid-answer") from error
            if not got:
                raise ConnectionResetError("the connection ended early")
            return got
        raise ConnectionAbortedError("nobody waits for it any more")


class _Stale(Exception):
    """The connection broke before an answer began."""


def _parse(head: bytes) -> Head:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not status.isdigit():
        raise ConnectionResetError("that is no answer of HTTP/1.1")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return Head(status=int(status), headers=headers)
