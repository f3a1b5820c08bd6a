"""The n-th operation of a save fails, for every n: a result or a typed error, and a second try finishes it (PROTOCOLS.md §9.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers_kit import SteppedClock, attempt_at, persist_rank, run, shard_of, tiers_in

from tierstore.errors import OutcomeUnknownError, TemporaryError, TierFullError, TierStoreError
from tierstore.names import Attempt, shard_name
from tierstore.storage.contract import FileInfo, Listing, Source, Storage
from tierstore.storage.posix import PosixStorage
from tierstore.tiers.catalog import scan
from tierstore.tiers.commit import commit
from tierstore.tiers.replica import Want, open_replica
from tierstore.tiers.tier import Tiers

CLOCK = SteppedClock()

FAULTS: dict[str, tuple[str, Callable[[], BaseException]]] = {
    "down": ("before", lambda: TemporaryError("connection refused")),
    "full": ("before", lambda: TierFullError("no space left")),
    "lost answer": ("after", lambda: OutcomeUnknownError("the answer was lost")),
    "cancelled before": ("before", asyncio.CancelledError),
    "cancelled after": ("after", asyncio.CancelledError),
}


class Faulty(PosixStorage):
    """The n-th operation fails: before it does anything, or after it has done everything."""

    def __init__(self, root: Path, number: int, fault: str) -> None:
        super().__init__(root, durable=False)
        self.left = number
        self.when, self.error = FAULTS[fault]

    def trip(self, when: str) -> None:
        if when == "before":
            self.left -= 1
        if self.left == 0 and when == self.when:
            self.left = -(10**9)
            raise self.error()

    async def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.trip("before")
        data = await super().read(path, offset, nbytes)
        self.trip("after")
        return data

    async def write(self, path: str, source: Source) -> FileInfo:
        self.trip("before")
        info = await super().write(path, source)
        self.trip("after")
        return info

    async def put(self, path: str, data: bytes) -> FileInfo:
        self.trip("before")
        info = await super().put(path, data)
        self.trip("after")
        return info

    async def create(self, path: str, data: bytes) -> None:
        self.trip("before")
        await super().create(path, data)
        self.trip("after")

    async def stat(self, path: str) -> FileInfo:
        self.trip("before")
        info = await super().stat(path)
        self.trip("after")
        return info

    async def children(self, folder: str = "") -> Listing:
        self.trip("before")
        listing = await super().children(folder)
        self.trip("after")
        return listing


def save_once(tiers: Tiers, attempt: Attempt) -> None:
    async def work() -> None:
        for rank in range(2):
            await persist_rank(tiers, attempt, tiers.authority, rank=rank, world_size=2)
        await commit(tiers, attempt, deadline_s=60, clock=CLOCK)

    run(work())


def loaded(tiers: Tiers) -> list[bytes] | None:
    """The latest checkpoint's shards, proved; None where there is none."""

    async def work() -> list[bytes] | None:
        info = (await scan(tiers, "run")).latest()
        if info is None:
            return None
        replica = await open_replica(tiers, info)
        buffers = [bytearray(replica.index.file(shard_name(rank, 2)).nbytes) for rank in range(2)]
        await replica.read([Want(shard_name(rank, 2), 0, memoryview(b)) for rank, b in enumerate(buffers)])
        return [bytes(b) for b in buffers]

    return run(work())


@pytest.mark.parametrize("fault", FAULTS)
def test_whichever_operation_of_a_save_fails_nothing_half_is_seen_and_a_second_try_finishes(tmp_path: Path, fault: str) -> None:
    wanted = [shard_of(rank, 2).data for rank in range(2)]
    for number in range(1, 60):
        folder = tmp_path / str(number)
        attempt = attempt_at(5)
        made: list[Faulty] = []

        def faulty(_: Storage, folder: Path = folder, number: int = number, made: list[Faulty] = made) -> Storage:
            made.append(Faulty(folder / "shared", number, fault))
            return made[0]

        failed = False
        try:
            save_once(tiers_in(folder, wrap={"shared": faulty}), attempt)
        except (TierStoreError, asyncio.CancelledError):
            failed = True
        plain = tiers_in(folder)
        assert loaded(plain) in ((None, wanted) if failed else (wanted,))
        if failed:
            save_once(plain, attempt)
            assert loaded(plain) == wanted
        if made[0].left > 0:
            assert number > 15, "the sweep met too few operations"
            return
    pytest.fail("no run met no fault")
