"""Large ranged reads beside the S3 client: it signs, once for an object; threads with `http.client` read into the caller's memory.

A signature need not cover the ``Range`` header (AWS, Signature Version 4: the host and what begins with ``x-amz-`` must be signed), and
holds for 15 minutes: so one, made by the client for a read of the whole object, serves every range of it. The client is asked in full
(credentials of every kind, endpoint, region, addressing, requester pays): only its request is not sent. Whatever is not answered by
exactly the range that was asked for is left to the client, which knows all errors and redirections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from aiobotocore.awsrequest import AioAWSResponse
from botocore.httpsession import create_urllib3_context, get_cert_path
from botocore.utils import get_environ_proxies

from tierstore.storage._http_range import Lines, RangeRead, Request, Rooms, Server
from tierstore.storage._threads import DaemonPool
from tierstore.storage.s3_client import S3Requests

__all__ = ["DirectReads"]

_log = logging.getLogger(__name__)

_SMALL_NBYTES = 256 << 10
"""Below this the client's own way costs no more, in bytes."""
_LARGE_NBYTES = 4 << 20
"""From here on a connection of its own is worth its making, in bytes."""
_SIGNED_S = 240.0
_SIGNED_AT_ONCE = 4096
_STRIKES = 3
_PAUSE_S = 60.0

_ASKED: ContextVar[list[Any] | None] = ContextVar("tierstore_signed_requests", default=None)
"""Where a client's request is wanted and not to be sent, it is put here; each task sees its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """A signed request for a whole object, and until when it is used."""

    request: Request
    until: float


class DirectReads:
    """The direct reads of one bucket: for each process and event loop connections and threads of its own.

    Args:
        requests: The bucket's requests.
        threads: Reads at once, at most.
        connect_timeout_s: Seconds until a connection attempt is given up.
    """

    def __init__(self, requests: S3Requests, threads: int, connect_timeout_s: float) -> None:
        self._requests = requests
        self._threads = threads
        self._connect_timeout_s = connect_timeout_s
        self._pid = os.getpid()
        self._by_loop: dict[int, _Here] = {}
        self._inherited: list[dict[int, _Here]] = []

    async def read(self, key: str, start: int, rooms: Rooms, begun: int, *, check: Callable[[Mapping[str, str]], None]) -> RangeRead | None:
        """Prepares the read of the range that begins at `start`; None where it is the client's. `run` does it.

        Args:
            key: The object's key.
            start: Where the range begins, in bytes.
            rooms: As of `RangeRead`; so are the others.
            begun: How many of its first bytes are there.
            check: Looks at the answer.

        Raises:
            TierStoreError: There are no credentials, or they can't be had now.
        """
        here = self._here()
        if not here.worth(rooms.nbytes - begun):
            return None
        signed = await here.sign(key)
        if signed is None:
            return None
        return RangeRead(here.lines, signed.request, start, rooms, begun, check=check)

    async def run(self, key: str, read: RangeRead) -> bool:
        """Reads in a thread; False where it is the client's after all. Cancelled, it returns when nobody writes any more.

        Raises:
            ConnectionError: It broke in the middle.
            asyncio.TimeoutError: No byte came for too long.
            Exception: What `check` and `rooms` raise.
        """
        here = self._here()
        task = asyncio.wrap_future(here.pool.submit(read.run))
        try:
            done = await asyncio.shield(task)
        except asyncio.CancelledError:
            read.abort()
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError:
                    continue  # once more: the memory is the caller's again only when nobody writes into it
            if not task.cancelled():
                task.exception()  # seen, so that asyncio does not report it
            raise
        except TimeoutError as error:  # of a socket: before Python 3.11 not what asyncio calls so
            raise asyncio.TimeoutError from error
        here.judge(key, read, done)
        return done

    async def close(self) -> None:
        """Ends the running loop's connections and threads, and those of closed loops; idempotent."""
        if self._pid == os.getpid():
            self._forget_closed()
            here = self._by_loop.pop(id(asyncio.get_running_loop()), None)
            if here is not None:
                here.close()

    def _here(self) -> _Here:
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            self._inherited.append(self._by_loop)  # the parent's sockets: kept, untouched, so that nothing is said on them
            self._by_loop, self._pid = {}, os.getpid()
        here = self._by_loop.get(id(loop))
        if here is None or here.loop is not loop:
            self._forget_closed()
            here = self._by_loop[id(loop)] = _Here(self._requests, self._threads, self._connect_timeout_s)
        return here

    def _forget_closed(self) -> None:
        for number, here in list(self._by_loop.items()):
            if here.loop.is_closed():
                del self._by_loop[number]
                here.close()


class _Here:
    """What belongs to one event loop."""

    def __init__(self, requests: S3Requests, threads: int, connect_timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines = Lines(connect_timeout_s, requests.patience.stall_timeout_s)
        self.pool = DaemonPool(threads, "tierstore-s3")
        self._seen = 0
        self._requests = requests
        self._signed: dict[str, _Signed] = {}
        self._signing = asyncio.Lock()
        self._tls: dict[Any, ssl.SSLContext] = {}
        self._off_until = 0.0
        self._strikes = 0

    def worth(self, nbytes: int) -> bool:
        """Whether a read of so many bytes is made this way: where it saves more than a connection of its own costs.

        Of short reads the first one is the client's: it has a connection already, and there may never be a second one.
        """
        if nbytes < _SMALL_NBYTES or time.monotonic() < self._off_until:
            return False
        self._seen += 1
        return nbytes >= _LARGE_NBYTES or self._seen > 1

    def judge(self, key: str, read: RangeRead, done: bool) -> None:
        """A server that often refuses what its client may do is left to the client for a while."""
        if done:
            self._strikes = 0
        elif read.status not in (404, 429) and read.status < 500:
            self._signed.pop(key, None)
            self._strikes += 1
            if self._strikes >= _STRIKES:
                self._off_until, self._strikes = time.monotonic() + _PAUSE_S, 0
                _log.info("event=direct-reads-paused seconds=%.0f status=%d", _PAUSE_S, read.status)

    async def sign(self, key: str) -> _Signed | None:
        async with self._signing:  # of many reads of one object the first one signs
            signed = self._signed.get(key)
            if signed is None or signed.until < time.monotonic():
                signed = await self._requests.watched("reading", key, self._sign(key), self._requests.patience.request_timeout_s)
                if signed is None:
                    self._off_until = time.monotonic() + _PAUSE_S
                    return None
                if len(self._signed) >= _SIGNED_AT_ONCE:
                    self._signed.clear()
                self._signed[key] = signed
            return signed

    async def _sign(self, key: str) -> _Signed | None:
        """None where a connection of ours would not go where the client's does: through a proxy, or with a certificate of its own."""
        fs, bucket = self._requests.client().fs, self._requests.place.bucket
        await fs.set_session()
        s3 = await fs.get_s3(bucket)
        s3.meta.events.register_first("before-send.s3.GetObject", _keep_unsent, unique_id="tierstore-direct")
        until = time.monotonic() + _SIGNED_S
        asked: list[Any] = []
        token = _ASKED.set(asked)
        try:
            await fs._call_s3("get_object", Bucket=bucket, Key=key)
        finally:
            _ASKED.reset(token)
        if len(asked) != 1:
            return None
        (request,) = asked
        if s3.meta.config.client_cert or s3.meta.config.proxies or get_environ_proxies(request.url):
            return None
        parts = urlsplit(request.url)
        tls = None
        if parts.scheme == "https":
            tls = await self._context(getattr(getattr(s3, "_endpoint", None), "http_session", None))
            if tls is None:
                return None
        port = parts.port or (443 if tls else 80)
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        headers = {"Host": shown if port == (443 if tls else 80) else f"{shown}:{port}", "Accept-Encoding": "identity"}
        for name, value in request.headers.items():
            if name.lower() not in ("host", "range", "accept-encoding", "connection", "content-length"):
                headers[name] = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        server = Server(host=host, port=port, tls=tls)
        return _Signed(request=Request(server=server, target=target or "/", headers=headers), until=until)

    async def _context(self, session: Any) -> ssl.SSLContext | None:
        """TLS as the client does it (`botocore.httpsession`): its context, and whom it trusts."""
        verify = getattr(session, "_verify", None)
        if not isinstance(verify, (bool, str)):
            return None
        if verify not in self._tls:
            self._tls[verify] = await asyncio.to_thread(_tls, verify)
        return self._tls[verify]

    def close(self) -> None:
        self.pool.shutdown()
        self.lines.close()


def _tls(verify: bool | str) -> ssl.SSLContext:
    context: ssl.SSLContext = create_urllib3_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context.check_hostname = True
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(get_cert_path(verify))
    return context


def _keep_unsent(request: Any, **_: Any) -> AioAWSResponse | None:
    """botocore's hook before it sends: where it is wanted, the request is kept, and an empty answer stands for it."""
    asked = _ASKED.get()
    if asked is None:
        return None
    asked.append(request)
    return AioAWSResponse(request.url, 200, {}, None)
