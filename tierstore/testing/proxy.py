"""A small HTTP proxy on 127.0.0.1 before a test's S3 server: cuts, stalls, throttles, delays and counts requests.

::

    with CuttingProxy(server.endpoint_url) as proxy:
        proxy.add(Rule(method="PUT", path=r"000000\\.json", action="cut-after"))
        storage = S3Storage(uri, {**server.options(), "endpoint_url": proxy.endpoint_url})
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal
from urllib.parse import urlsplit

from tierstore.errors import TemporaryError

__all__ = ["CuttingProxy", "LatencyProxy", "Rule"]

Action = Literal["cut-before", "cut-after", "cut-body", "stall", "silence", "answer", "hold"]
_HEAD_LIMIT = 1 << 20
_PIECE_NBYTES = 1 << 16
_OURS = "tierstore-proxy"
"""The name of the tasks that a connection has here."""
_PATIENCE_S = 120
"""How long the proxy's own thread may take to begin and to end, in seconds: on a busy machine too."""


@dataclass(kw_only=True)
class Rule:
    """What happens to requests that match, counted from the first match.

    ``cut-before``: the connection ends before the server hears of it. ``cut-after``: the server does it and answers, and the
    connection ends instead. ``cut-body``: the answer's body ends after `nbytes`. ``stall``: the server never hears of it, and nothing
    comes back. ``silence``: the server does it and answers, and nothing comes back. ``answer``: `status` and `body` come back, the
    server never hears of it. ``hold``: it waits until `release`.
    """

    method: str = ".*"
    """A regular expression for the whole method."""
    path: str = ""
    """A regular expression searched in path and query, as they are sent."""
    action: Action
    first: int = 1
    """The first match that it happens to."""
    times: int = 1
    """How many matches it happens to, from the first on."""
    nbytes: int = 0
    status: str = "503 Slow Down"
    body: bytes = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
    headers: str = ""
    """More header lines of an ``answer``, each ended by CRLF."""
    matched: int = 0
    """How many requests matched so far."""
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when it happened for the first time."""
    silenced: threading.Event = field(default_factory=threading.Event)
    """Set when a server's answer was kept back for the first time."""
    released: threading.Event = field(default_factory=threading.Event)

    def hit(self, method: str, target: str) -> bool:
        if not re.fullmatch(self.method, method) or not re.search(self.path, target):
            return False
        self.matched += 1
        hit = self.first <= self.matched < self.first + self.times
        if hit:
            self.reached.set()
        return hit

    def release(self) -> None:
        self.released.set()


@dataclass(kw_only=True)
class _Exchange:
    method: str
    rule: Rule | None


class _Cut(Exception):
    """The connection ends here."""


class CuttingProxy:
    """Forwards HTTP/1.1 to one server, by rules. Runs on an event loop and thread of its own; use it as a context manager.

    Attributes:
        requests: Method and target of every request that arrived, in order.
        body_nbytes: Bytes of answers' bodies that were passed on.
    """

    def __init__(self, upstream: str, *, delay_s: float = 0.0) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._delay_s = delay_s
        self._rules: list[Rule] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tierstore-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.requests: list[tuple[str, str]] = []
        self.body_nbytes = 0
        self.endpoint_url = ""

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_HEAD_LIMIT), self._loop
        ).result(_PATIENCE_S)
        self.endpoint_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for rule in self._rules:
            rule.release()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._loop.close()

    def add(self, rule: Rule) -> Rule:
        """Adds a rule; the first that hits decides."""
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Removes all rules and counts; what a rule holds goes on."""
        for rule in self._rules:
            rule.release()
        self._rules.clear()
        self.requests.clear()
        self.body_nbytes = 0

    def count(self, method: str = ".*", path: str = "") -> int:
        """How many requests matched the two regular expressions."""
        return sum(1 for one, target in list(self.requests) if re.fullmatch(method, one) and re.search(path, target))

    async def _stop(self) -> None:
        # Connections that the loop is just taking in become ours first: where their server is closed meanwhile, or asyncio's task for one
        # cancelled, it leaves the socket to the collector, which finds it in the midst of a later test.
        for listening in self._server.sockets if self._server is not None else ():
            self._loop.remove_reader(listening.fileno())
        while taking := {task for task in asyncio.all_tasks() if task.get_name() != _OURS} - {asyncio.current_task()}:
            await asyncio.wait(taking)
        if self._server is not None:
            self._server.close()
        connections = dict(self._connections)
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)
        for writer in connections.values():
            writer.transport.abort()  # a task that was cancelled before it began has not done so
        await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._connect(reader, writer), name=_OURS)
        self._connections[task] = writer
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Task[None]] = []
        try:
            answers, upstream = await asyncio.open_connection(*self._upstream, limit=_HEAD_LIMIT)
            waiting: deque[_Exchange] = deque()
            pumps = [
                self._loop.create_task(self._forward(reader, upstream, writer, waiting), name=_OURS),
                self._loop.create_task(self._back(answers, writer, waiting), name=_OURS),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # the server is down, or the proxy ends: so does the connection
        finally:
            for one in (writer, upstream):
                if one is not None:
                    one.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)  # last: the proxy may end, and cancel this, while it waits

    async def _forward(
        self, reader: asyncio.StreamReader, upstream: asyncio.StreamWriter, back: asyncio.StreamWriter, waiting: deque[_Exchange]
    ) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
            self.requests.append((method, target))
            rule = next((rule for rule in list(self._rules) if rule.hit(method, target)), None)
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            if rule is not None:
                if rule.action == "answer" and not _header(head, b"expect"):  # whose body waits for us
                    await _copy_body(reader, None, head)  # bytes that nobody took would break the connection under the answer
                await self._before(rule, back)
            waiting.append(_Exchange(method=method, rule=rule))
            upstream.write(head)
            await _copy_body(reader, upstream, head)

    async def _before(self, rule: Rule, back: asyncio.StreamWriter) -> None:
        if rule.action == "cut-before":
            raise _Cut
        if rule.action == "stall":
            await asyncio.Event().wait()
        if rule.action == "hold":
            await asyncio.to_thread(rule.released.wait)
        if rule.action == "answer":
            lines = f"HTTP/1.1 {rule.status}\r\nContent-Type: application/xml\r\nContent-Length: {len(rule.body)}\r\n{rule.headers}"
            back.write(f"{lines}Connection: close\r\n\r\n".encode() + rule.body)
            await back.drain()
            back.close()
            await back.wait_closed()
            raise _Cut

    async def _back(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, waiting: deque[_Exchange]) -> None:
        while True:
            try:
                head = await answers.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            status = int(head.split(b" ", 2)[1])
            if status < 200:
                writer.write(head)
                await writer.drain()
                continue
            exchange = waiting.popleft()
            if exchange.rule is not None and exchange.rule.action == "cut-after":
                raise _Cut
            if exchange.rule is not None and exchange.rule.action == "silence":
                exchange.rule.silenced.set()
                await asyncio.Event().wait()
            writer.write(head)
            if exchange.method != "HEAD" and status not in (204, 304):
                limit = exchange.rule.nbytes if exchange.rule is not None and exchange.rule.action == "cut-body" else None
                await self._answer_body(answers, writer, head, limit)
            await writer.drain()

    async def _answer_body(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, limit: int | None) -> None:
        async for piece, counted in _pieces(answers, head):
            if limit is not None and counted:
                writer.write(piece[:limit])
                await writer.drain()
                limit -= len(piece)
                if limit <= 0:
                    # What was written must leave before the connection ends: a close flushes, an abort would not.
                    writer.close()
                    await writer.wait_closed()
                    raise _Cut
                continue
            self.body_nbytes += len(piece) if counted else 0  # before it is passed on: whoever has read it may look at once
            writer.write(piece)
            await writer.drain()


class LatencyProxy(CuttingProxy):
    """Adds `delay_s` seconds before each request is passed on: what a bucket looks like from afar."""

    def __init__(self, upstream: str, delay_s: float) -> None:
        super().__init__(upstream, delay_s=delay_s)


def _header(head: bytes, name: bytes) -> bytes:
    found = re.search(rb"\r\n" + name + rb":[ \t]*([^\r\n]*)", head, re.IGNORECASE)
    return found[1].strip() if found else b""


async def _copy_body(reader: asyncio.StreamReader, upstream: asyncio.StreamWriter | None, head: bytes) -> None:
    """Takes a request's body; without an `upstream` nobody gets it."""
    async for piece, _ in _pieces(reader, head, request=True):
        if upstream is not None:
            upstream.write(piece)
            await upstream.drain()
    if upstream is not None:
        await upstream.drain()


async def _pieces(reader: asyncio.StreamReader, head: bytes, *, request: bool = False) -> AsyncIterator[tuple[bytes, bool]]:
    """The body behind `head` in pieces, and whether a piece is content (or the framing of a chunk)."""
    if _header(head, b"transfer-encoding").lower() == b"chunked":
        while True:
            line = await reader.readuntil(b"\r\n")
            yield line, False
            left = int(line.split(b";")[0], 16)
            while left:
                piece = await reader.read(min(left, _PIECE_NBYTES))
                if not piece:
                    raise TemporaryError("the peer ended its connection in mid-body", hint="this is the test's proxy")
                left -= len(piece)
                yield piece, True
            yield await reader.readuntil(b"\r\n"), False
            if int(line.split(b";")[0], 16) == 0:
                return
    length = _header(head, b"content-length")
    if not length and request:
        return
    left = int(length) if length else -1
    while left:
        piece = await reader.read(_PIECE_NBYTES if left < 0 else min(left, _PIECE_NBYTES))
        if not piece:
            return
        left -= len(piece) if left > 0 else 0
        yield piece, True
