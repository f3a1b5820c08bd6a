"""Ranged reads when the watchdog gives a transfer up while its bytes are still being taken in (`storage.s3_download`)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from tierstore.clock import SystemClock
from tierstore.errors import IntegrityError, TemporaryError
from tierstore.storage.s3_client import Clients, Patience, S3Requests
from tierstore.storage.s3_download import download
from tierstore.storage.s3_errors import Place
from tierstore.storage.s3_landing import Memory
from tierstore.testing.sources import pattern

T = TypeVar("T")
DATA = pattern(3 << 20)
DEADLINE_S = 60.0


class Body:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, nbytes: int = -1) -> bytes:
        piece, self._data = self._data[:nbytes], self._data[nbytes:]
        return piece

    def close(self) -> None:
        pass


class Server:
    """Answers ranges as S3 does, through a client's call; notes them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fs = self
        self.transfers = asyncio.Semaphore(1)

    def get(self) -> Server:
        return self

    async def _call_s3(self, method: str, *, Range: str, **_: Any) -> dict[str, Any]:
        self.asked.append(Range)
        first, last = map(int, Range.removeprefix("bytes=").split("-"))
        assert first <= last, "no server answers that"
        told = f"bytes {first}-{last}/{len(DATA)}"
        return {"ETag": "one", "ContentRange": told, "ContentLength": last + 1 - first, "Body": Body(DATA[first : last + 1])}


class Proof:
    """Takes until the transfer was given up, then fails or not."""

    def __init__(self, error: Exception | None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.seen = bytearray()
        self._error = error

    def __call__(self, at: int, piece: memoryview) -> None:
        assert at == len(self.seen)
        self.seen += piece
        self.begun.set()
        assert self.go.wait(DEADLINE_S)
        if self._error is not None:
            raise self._error


class GivenUp(S3Requests):
    """Gives a transfer up while the first proof of its bytes is on, and lets that go on then; as the watchdog does after a time."""

    def __init__(self, server: Server, proof: Proof) -> None:
        patience = Patience(request_timeout_s=DEADLINE_S, stall_timeout_s=DEADLINE_S, attempts=3, part_attempts=3, first_wait_s=0.001)
        place = cast(Place, SimpleNamespace(bucket="bucket", of=lambda key: f"s3://bucket/{key}"))
        super().__init__(cast(Clients, server), place, patience, SystemClock())
        self._proof = proof

    async def watched(
        self, doing: str, key: str, call: Coroutine[Any, Any, T], seconds: float, progress: Callable[[], int] = lambda: 0
    ) -> T:
        task = asyncio.ensure_future(call)
        while not (task.done() or self._proof.begun.is_set()):  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.001)
        if task.done() or self._proof.go.is_set():
            return await task
        task.cancel()
        self._proof.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        raise TemporaryError("the transfer has stalled", hint="it is tried again")


def read(proof: Proof) -> tuple[memoryview, Server]:
    """Reads all of DATA through a client of which one transfer is given up."""

    async def body() -> tuple[memoryview, Server]:
        server, memory = Server(), Memory(memoryview(bytearray(len(DATA))), prove=proof)
        await download(GivenUp(server, proof), "file", 0, memory)
        return memory.buffer, server

    return asyncio.run(body())


def test_a_proof_that_fails_while_the_transfer_is_given_up_fails_the_read() -> None:
    with pytest.raises(IntegrityError, match="rotten"):
        read(Proof(IntegrityError("rotten")))


def test_a_transfer_that_is_given_up_when_all_bytes_are_there_asks_for_no_more() -> None:
    proof = Proof(None)
    memory, server = read(proof)
    assert memory == proof.seen == DATA
    assert server.asked == [f"bytes=0-{len(DATA) - 1}"]
