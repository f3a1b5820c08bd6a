"""S3 clients (async s3fs), one per event loop and process, and the one way in which requests are sent, bounded and retried."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from s3fs import S3FileSystem
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from tierstore.clock import Clock
from tierstore.errors import IntegrityError, TierStoreError
from tierstore.storage._sessions import abandon_connections
from tierstore.storage.bandwidth import Bandwidth
from tierstore.storage.s3_errors import S3_FAILURES, Place, is_throttling, parse_http_date, translate
from tierstore.storage.s3_options import S3Options
from tierstore.storage.s3_pace import Slots

__all__ = ["Body", "Client", "Clients", "Patience", "S3Requests", "may_pass"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_PIECE_NBYTES = 256 * 1024
"""How much of a body is handed to the socket at once, in bytes: the grain of the progress watchdog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long is waited, in seconds, and how often is tried."""

    request_timeout_s: float
    """A request without a large body must be answered within this."""
    stall_timeout_s: float
    """A transfer in which no byte moves for this long has stalled."""
    attempts: int
    """Tries of one request."""
    part_attempts: int
    """Tries of one part or single PUT: more, so that an upload outlives a restart of the server."""
    first_wait_s: float = 0.2
    max_wait_s: float = 8.0


class Body:
    """A view as a request's body: read by botocore to sign it, iterated by aiohttp to send it, without a copy.

    `sent` grows with what the socket took, for the watchdog. Not `signed`: the payload is no part of the signature.
    """

    def __init__(self, view: memoryview, *, signed: bool = True) -> None:
        self._view = view
        self.signed = signed
        self._at = 0
        self.sent = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def read(self, nbytes: int = -1) -> memoryview:
        end = self._view.nbytes if nbytes is None or nbytes < 0 else min(self._at + nbytes, self._view.nbytes)
        piece = self._view[self._at : end]
        self._at = end
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {0: 0, 1: self._at, 2: self._view.nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for start in range(0, self._view.nbytes, _PIECE_NBYTES):
            piece = self._view[start : start + _PIECE_NBYTES]
            yield piece
            self.sent += piece.nbytes  # the consumer came back for more: the socket took it


class Client:
    """One s3fs instance on one event loop."""

    def __init__(self, fs: Any, loop: asyncio.AbstractEventLoop, transfers: int, requests: int, name: str = "") -> None:
        self.fs = fs
        self.loop = loop
        self.transfers = Slots(transfers, name)
        """Bodies on the wire."""
        self.pulls = Slots(transfers + max(2, transfers // 4), name)
        """Parts of all files that are in memory: those on the wire, and a few that are read and proved meanwhile."""
        self.requests = asyncio.Semaphore(requests)
        self._prepared: weakref.WeakSet[Any] = weakref.WeakSet()

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request of s3fs's client, tried once."""
        await self.fs.set_session()
        s3 = await self.fs.get_s3(arguments.get("Bucket"))
        if s3 not in self._prepared:
            s3.meta.events.register("before-sign.s3", _leave_payload_unsigned, unique_id="tierstore-unsigned-payload")
            self._prepared.add(s3)
        answer: dict[str, Any] = await self.fs._call_s3(method, **arguments)
        return answer

    async def close(self) -> None:
        if self.fs._s3 is not None:
            await self.fs._s3creator.__aexit__(None, None, None)

    def abandon(self) -> None:
        """Drops the connections of a loop that is closed already and so can't close them: the sockets are closed under it."""
        abandon_connections(self.fs)


class Clients:
    """Makes one `Client` per event loop and process. A client is never shared, inherited over fork, or pickled."""

    def __init__(self, options: S3Options, transfers: int, requests: int, name: str = "") -> None:
        self._options = options
        self._name = name
        self._transfers = transfers
        self._requests = requests
        self._pid = os.getpid()
        self._by_loop: dict[int, Client] = {}
        self._inherited: list[dict[int, Client]] = []

    def get(self) -> Client:
        """The running loop's client."""
        loop = asyncio.get_running_loop()
        if self._pid != os.getpid():
            # The parent's sockets and its epoll set are shared with us: its objects are kept, untouched, so that no
            # destructor ever speaks on them.
            self._inherited.append(self._by_loop)
            self._by_loop, self._pid = {}, os.getpid()
        client = self._by_loop.get(id(loop))
        if client is None or client.loop is not loop:
            self._forget_closed()
            fs = S3FileSystem(asynchronous=True, skip_instance_cache=True, use_listings_cache=False, **self._options.s3fs)
            fs.retries = 1  # retries happen in one place: `S3Requests`
            client = self._by_loop[id(loop)] = Client(fs, loop, self._transfers, self._requests, self._name)
        return client

    async def close(self) -> None:
        """Closes the running loop's client and drops those of closed loops; idempotent."""
        if self._pid == os.getpid():
            self._forget_closed()
            client = self._by_loop.pop(id(asyncio.get_running_loop()), None)
            if client is not None:
                await client.close()

    def _forget_closed(self) -> None:
        for key, client in list(self._by_loop.items()):
            if client.loop.is_closed():
                del self._by_loop[key]
                client.abandon()


class S3Requests:
    """Sends requests about one bucket: bounded in number and time, retried with jitter, their errors translated."""

    def __init__(self, clients: Clients, place: Place, patience: Patience, clock: Clock) -> None:
        self.place = place
        self.patience = patience
        self.pace: Bandwidth | None = None
        """The limit on bodies that are sent, each time that they are."""
        self._clients = clients
        self._clock = clock

    async def send(
        self, doing: str, key: str, method: str, *, body: memoryview | None = None, signed: bool = True, **arguments: Any
    ) -> dict[str, Any]:
        """One idempotent request, tried again while its failure may pass.

        Args:
            doing: A phrase for messages, for example ``"reading"``.
            key: The object's key, for messages and, where `arguments` have none of their own, nothing else.
            method: The client's method, for example ``"head_object"``.
            body: The body of an upload.
            signed: Whether the body is part of the signature, which costs a SHA-256 of it; a checksum among `arguments` always is.
            **arguments: The request's parameters but for ``Bucket`` and ``Body``.
        """
        attempts = self.patience.attempts if body is None else self.patience.part_attempts

        async def attempt() -> dict[str, Any]:
            return await self.once(doing, key, method, body=body, signed=signed, **arguments)

        return await self.retrying(attempt, attempts)

    async def once(
        self, doing: str, key: str, method: str, *, body: memoryview | None = None, signed: bool = True, **arguments: Any
    ) -> dict[str, Any]:
        """One request, sent once; raises a tierstore error whose cause is the client's."""
        client = self._clients.get()
        if body is None:
            async with client.requests:
                generation = client.transfers.generation
                call = client.call(method, Bucket=self.place.bucket, **arguments)
                try:
                    return await self.watched(doing, key, call, self.patience.request_timeout_s)
                except TierStoreError as error:
                    if is_throttling(error):
                        client.transfers.slow_down(generation)
                    raise
        if self.pace is not None:
            await self.pace.take(body.nbytes)  # before the slot, which others can use meanwhile
        sent = Body(body, signed=signed)
        async with client.transfers:
            call = client.call(method, Bucket=self.place.bucket, Body=sent, **arguments)
            return await self.watched(doing, key, call, self.patience.stall_timeout_s, lambda: sent.sent)

    async def watched(
        self, doing: str, key: str, call: Coroutine[Any, Any, _T], seconds: float, progress: Callable[[], int] = lambda: 0
    ) -> _T:
        """Awaits `call`; gives it up when `progress()` has not changed for `seconds`."""
        task = asyncio.ensure_future(call)
        try:
            seen, quiet = progress(), 0
            while not (await asyncio.wait({task}, timeout=seconds / 4))[0]:
                now = progress()
                seen, quiet = now, quiet + 1 if now == seen else 0
                if quiet >= 4:
                    raise asyncio.TimeoutError
            return task.result()
        except TierStoreError:
            raise
        except S3_FAILURES as error:
            raise self.translated(error, doing, key) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # seen, so that asyncio does not report it a second time

    async def retrying(self, attempt: Callable[[], Awaitable[_T]], attempts: int) -> _T:
        """`attempt`, up to `attempts` times while its failure may pass, with exponential waits and jitter between."""
        patience = self.patience
        retry = AsyncRetrying(
            stop=stop_after_attempt(attempts),
            wait=wait_exponential(multiplier=patience.first_wait_s, max=patience.max_wait_s) + wait_random(0, patience.first_wait_s),
            retry=retry_if_exception(may_pass),
            before_sleep=_report,
            reraise=True,
        )
        return await retry(attempt)

    def client(self) -> Client:
        return self._clients.get()

    def server_time(self, answer: dict[str, Any]) -> datetime:
        """The server's time when it gave `answer`; ours where it does not say."""
        told = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date") or "")
        return parse_http_date(told) or self._clock.now()

    async def close(self) -> None:
        await self._clients.close()

    def translated(self, error: BaseException, doing: str, key: str) -> TierStoreError:
        return translate(error, doing, key, self.place, self._clock.now())


def _leave_payload_unsigned(request: Any, **_: Any) -> None:
    """Before a request is signed: the payload of a body that says so is left out, also without TLS, unless the options say otherwise.

    botocore reads the choice from the client's configuration, which is the same for all requests: this one gets a copy.
    """
    config = request.context.get("client_config")
    chosen = getattr(config, "s3", None) or {}
    if not isinstance(request.data, Body) or request.data.signed or config is None or chosen.get("payload_signing_enabled") is not None:
        return
    ours = copy(config)
    ours.s3 = {**chosen, "payload_signing_enabled": False}
    request.context["client_config"] = ours


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later; bytes damaged on their way (the server says so) are sent again."""
    return isinstance(error, TierStoreError) and (error.retryable or (isinstance(error, IntegrityError) and "code" in error.context))


def _report(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    wait_s = state.next_action.sleep if state.next_action else 0.0
    message = error.message if isinstance(error, TierStoreError) else type(error).__name__
    _log.info("event=retry attempt=%d wait_s=%.2f reason=%s", state.attempt_number, wait_s, message)
